"""Records: JSON and CSV schemas, the first form, bad files, merging."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.bench.record import (
    CSV_COLUMNS,
    FAILED,
    MIX,
    OURS,
    PEER,
    SCHEMA,
    circumstances,
    csv_text,
    load_record,
    merge_records,
    save_record,
    shape_text,
)
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem
from tests.unit.bench.bench_support import AROUND, peer, record, row

RESULTS = Path(__file__).parents[3] / "docs" / "results"
RECORDS = sorted(set(RESULTS.glob("*.json")) - set(RESULTS.glob("*-rows.json")))
"""Of benchmarks; rows of a fit are no record of one."""


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    rows = [
        row("mla_var6_plus_v2", choices={"n": 1024}, path=MIX, language="cute-dsl"),
        row("flash_mla", None, status=FAILED, reason="output 0: NaN", error=float("nan")),
        peer(),
    ]
    before = record(*rows, absent={"triton": "no vllm"}, settings={"rounds": 3}, notes=["n"])
    save_record(before, tmp_path / "a.json")
    after = load_record(tmp_path / "a.json")
    assert after.rows[0] == rows[0]
    assert after.rows[1] == replace(rows[1], error=None)
    assert after.rows[2] == rows[2]
    assert (after.absent, after.settings, after.notes) == (
        {"triton": "no vllm"},
        {"rounds": 3},
        ["n"],
    )


def test_the_json_schema(tmp_path: Path) -> None:
    save_record(record(row()), tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["schema"] == SCHEMA
    (entry,) = data["rows"]
    for name in ("device", "date", "command", "versions"):
        assert entry[name] == AROUND[name]
    assert entry["problem"] == {
        **{"b": 32, "s": 16, "t": 4096, "h": 128, "d": 128, "p": 64, "k": 512},
        **{"dtype": "bfloat16", "causal": True},
    }
    assert entry["tflops"] == pytest.approx(600)
    assert entry["gbps"] == pytest.approx(300)
    assert entry["end_to_end_us"] == 1040.0
    assert entry["rounds_us"] == [1001.0, 999.0, 1000.0]


def test_the_csv_tells_lengths_apart() -> None:
    problem = MlaProblem(b=2, s=1, t=64, h=8, lengths=(3, 64))
    text = csv_text(record(row(), row(problem=problem)), {})
    assert [line["lengths"] for line in csv.DictReader(io.StringIO(text))] == ["", "3..64"]


def test_the_csv_schema() -> None:
    found = record(
        row(choices={"n": 0}), peer(), row("flash_mla", None, status=FAILED, reason="a,b")
    )
    lines = list(csv.DictReader(io.StringIO(csv_text(found, {0: 0.9}))))
    assert tuple(lines[0]) == CSV_COLUMNS
    assert len(lines) == 3
    assert lines[0]["choices"] == "n=0"
    assert lines[0]["speedup_over_best_peer"] == "0.9"
    assert lines[0]["versions"].startswith("hyper-mla=0.1.0 torch=2.9")
    assert lines[1]["source"] == PEER
    assert lines[1]["speedup_over_best_peer"] == ""
    assert (lines[2]["time_us"], lines[2]["reason"]) == ("", "a,b")


def test_labels_tell_language_and_choices() -> None:
    assert row("flash_mla").label == "flash_mla"
    both = row("flash_mla", language="cute-dsl", choices={"n": 3})
    assert both.label == "flash_mla (cute-dsl) n=3"
    assert both.series == "flash_mla (cute-dsl)"


def test_shapes_show_what_is_unusual() -> None:
    assert shape_text(MlaProblem(b=1, s=2, t=3, h=4)) == "b=1 s=2 t=3 h=4"
    odd = MlaProblem(b=1, s=2, t=3, h=4, d=64, dtype="float16", causal=False)
    assert shape_text(odd) == "b=1 s=2 t=3 h=4 d=64 float16 full"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_the_published_records_can_be_read(path: Path) -> None:
    found = load_record(path)
    assert found.rows
    assert found.devices
    for entry in found.rows:
        assert entry.command
        assert entry.versions["torch"]


def test_the_first_form_keeps_its_figures() -> None:
    file = RESULTS / "2026-11-15-nvidia-h200.json"
    raw = json.loads(file.read_text())["rows"]
    found = load_record(file).rows
    assert len(found) == len(raw)
    for entry, old in zip(found, raw, strict=True):
        assert entry.time_us == old["time_us"]
        assert entry.spread_us == old["spread_us"]
        assert entry.tflops == pytest.approx(old["tflops"])
        assert entry.gbps == pytest.approx(old["gbps"])
        assert entry.end_to_end_us is None
    assert {e.kernel for e in found if e.source == OURS} == {
        *("flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus")
    }
    assert {e.problem.causal for e in found if e.problem.s == 1024} == {True, False}
    assert {"splits": 16} in [e.choices for e in found]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a benchmark record"),
        ("[]", "a benchmark record"),
        ("{}", "without rows"),
        ('{"rows": [], "environment": {}, "schema": "x/9"}', "this version reads"),
        (
            '{"rows": [{"problem": {"b": 0}}], "environment": {}, "suite": "a", '
            f'"schema": "{SCHEMA}"}}',
            "a benchmark record",
        ),
    ],
)
def test_a_bad_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        load_record(tmp_path / "bad.json")
    assert "bad.json" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="gone.json: expected a readable record"):
        load_record(tmp_path / "gone.json")


def test_merged_records_keep_the_latest_row_per_device() -> None:
    old, new = record(row(time_us=2.0), peer()), record(row(time_us=1.0), row(device="NVIDIA B200"))
    old.environment = {**old.environment, "date": "2029"}
    merged = merge_records([new, old])
    assert [(r.kernel, r.time_us, r.device) for r in merged.rows] == [
        ("flash_mla", 1.0, "NVIDIA H200"),
        ("FlashMLA", 900.0, "NVIDIA H200"),
        ("flash_mla", 1000.0, "NVIDIA B200"),
    ]
    assert merge_records([new]) is new


def test_circumstances_come_from_the_environment() -> None:
    around = circumstances(record().environment)
    assert around["device"] == "NVIDIA H200"
    assert around["versions"]["driver"] == "580"
    assert circumstances({}, "NVIDIA B200")["device"] == "NVIDIA B200"


def test_given_lengths_are_kept_and_shown(tmp_path: Path) -> None:
    problem = MlaProblem(b=2, s=1, t=64, h=8, lengths=(3, 64))
    file = tmp_path / "record.json"
    save_record(record(replace(row(), problem=problem)), file)
    [again] = load_record(file).rows
    assert again.problem == problem
    assert shape_text(problem) == "b=2 s=1 t=3..64 h=8"
