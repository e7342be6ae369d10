"""Records: JSON and CSV schemas, the first schema, invalid files and rows, merging."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.bench import record as records
from mla_var3.bench.record import FAILED, MIX, PEER, SCHEMA, load_record, save_record
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem
from tests.unit.bench.bench_support import AROUND, peer, record, row

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_a_record_survives_the_file(tmp_path):
    rows = [
        row("mla_var6_plus_v2", choices={"n": 1024}, path=MIX, language="cute-dsl"),
        row("flash_mla", None, status=FAILED, reason="output 0: NaN", error=None),
        peer(problem=MlaProblem(b=2, s=1, t=64, h=8, lengths=(3, 64))),
    ]
    before = record(*rows, absent={"triton": "no vllm"}, settings={"rounds": 3}, notes=["n"])
    save_record(before, tmp_path / "a.json")
    assert load_record(tmp_path / "a.json") == before


def test_the_json_schema(tmp_path):
    save_record(record(row()), tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["schema"] == SCHEMA
    assert {"suite", "environment", "settings", "absent", "notes"} < set(data)
    (entry,) = data["rows"]
    problem = {"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512}
    problem |= {"dtype": "bfloat16", "causal": True}
    figures = {"call_us": 1040.0, "rounds_us": [1001.0, 999.0, 1000.0], "problem": problem}
    figures |= {"tflops": pytest.approx(600), "gbps": pytest.approx(300)}
    assert {name: entry[name] for name in (*AROUND, *figures)} == AROUND | figures


def test_the_csv_schema():
    problem = MlaProblem(b=2, s=1, t=64, h=8, lengths=(3, 64))
    failed = row("flash_mla", None, status=FAILED, reason="a,b", problem=problem)
    found = record(row(choices={"n": 0}), peer(), failed)
    lines = list(csv.DictReader(io.StringIO(records.csv_text(found, {0: 0.9}))))
    assert tuple(lines[0]) == records.CSV_COLUMNS and len(lines) == 3
    assert (lines[0]["choices"], lines[0]["speedup_over_best_peer"]) == ("n=0", "0.9")
    assert lines[0]["versions"].startswith("hyper-mla=0.1.0 torch=2.9")
    assert (lines[1]["source"], lines[1]["speedup_over_best_peer"]) == (PEER, "")
    assert (lines[2]["time_us"], lines[2]["reason"], lines[2]["lengths"]) == ("", "a,b", "3..64")


def test_every_kernel_with_an_eight_bit_window_is_known():
    from mla_var3.bench.suites import mla_kernels
    from mla_var3.op.mla.window.formats import FP8
    from mla_var3.runtime.paths import plan_class

    kernels = [k for k in mla_kernels() if getattr(plan_class(k), "window_form", None) == FP8]
    found = {(kernel.full_name, kernel.language) for kernel in kernels}
    assert found and found < records.EIGHT_BIT
    # Records from before it was renumbered.
    assert records.EIGHT_BIT - found == {("mla_var6_plus_v2", "cute-dsl")}
    for name, language in records.EIGHT_BIT:
        assert row(name, language=language).label == f"{name} ({language}) 8-bit"


def test_shapes_show_what_is_unusual():
    for more, text in (
        ({}, "b=2 s=1 t=64 h=4"),
        ({"lengths": (3, 64)}, "b=2 s=1 t=3..64 h=4"),
        ({"d": 64, "dtype": "float16", "causal": False}, "b=2 s=1 t=64 h=4 d=64 float16 full"),
    ):
        assert records.shape_text(MlaProblem(b=2, s=1, t=64, h=4, **more)) == text


def of(*rows: object) -> str:
    return json.dumps({"schema": SCHEMA, "suite": "a", "environment": {}, "rows": rows})


def test_a_bad_file_or_row_is_named(tmp_path):
    for text, message in (
        ("", "a readable record"),
        ("[]", "a benchmark record"),
        ("{}", "without rows"),
        ('{"rows": [], "environment": {}, "schema": "x/9"}', "this version reads"),
        (of(None), "row 0: expected a row"),
        (of({"kernel": "x"}), r"row 0 \(x\): expected the field 'problem'"),
        (of({"kernel": "x", "problem": dict.fromkeys("bsth", 0)}), r"row 0 \(x\), b: expected"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match=f"bad.json: .*{message}"):
            load_record(tmp_path / "bad.json")


NAN = float("nan")
INVALID = [
    ("time_us", -5), ("time_us", 0), ("time_us", NAN), ("time_us", "fast"), ("time_us", None),
    ("time_us", True), ("spread_us", -1.0), ("spread_us", "nan"), ("flops", 0),
    ("error", NAN), ("projections_us", float("inf")), ("rounds_us", [1.0, -2.0]), ("runs", 0),
    ("source", "theirs"), ("kind", "guessed"), ("status", "fine"), ("path", "short"),
    ("kernel", ""), ("device", 7), ("choices", {"n": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), INVALID)
def test_an_invalid_value_is_refused_on_load_and_on_write(field, value, tmp_path):
    """time_us=-5 once ranked first, and NaN and text disappeared."""
    file = tmp_path / "a.json"
    data = record(row(), peer()).to_dict()
    data["rows"][1][field] = value
    file.write_text(json.dumps(data))
    where = rf"a\.json: row 1.*, {field}: expected .*, got "
    with pytest.raises(InvalidArgumentError, match=where):
        load_record(file)
    file.write_text("kept")
    changed = tuple(value) if isinstance(value, list) else value
    with pytest.raises(InvalidArgumentError, match=where):
        save_record(record(row(), replace(peer(), **{field: changed})), file)
    assert file.read_text() == "kept"


def test_merged_records_keep_the_latest_row_per_device():
    old = record(row(time_us=2.0), peer())
    new = record(row(time_us=1.0), row(device="NVIDIA B200"), row(cache_dtype="fp8"))
    old.environment = {**old.environment, "date": "2029"}
    merged = records.merge_records([new, old])
    assert merged.rows == [new.rows[0], old.rows[1], *new.rows[1:]]
    assert records.merge_records([new]) is new
