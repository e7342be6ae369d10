"""Annotation and ncu mode on a real report of Nsight Compute, and with a stand-in for it.

The recording is `mla_var6_plus` (b=8, s=16, t=2048, n=512) on an H200 under Nsight Compute
2025.3.1, full set, without embedded sources; folder names in it were replaced by others of the
same length.
"""

import atexit
import csv
import functools
import json
import lzma
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.measure import summarise
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, common
from mla_var3.runtime.profiling.annotation import (
    annotation_available,
    annotation_profile_plan,
    write_annotation,
)
from mla_var3.runtime.profiling.lock import ClockState
from mla_var3.runtime.profiling.ncu import driver as ncu_driver
from mla_var3.runtime.profiling.ncu import session as ncu_session
from mla_var3.runtime.profiling.ncu.driver import Collection, NcuTool
from mla_var3.runtime.profiling.ncu.mode import write_ncu
from mla_var3.runtime.profiling.ncu.reader import (
    Launch,
    MetricValue,
    advice,
    annotation_metrics,
    figures_of,
    plain_text,
    read_launches,
    stage_profiles,
)
from mla_var3.runtime.profiling.ncu.session import Session, timer_note
from mla_var3.runtime.profiling.ncu.source import (
    Instruction,
    KernelSource,
    LineProfile,
    annotate_source,
    line_profiles,
)
from mla_var3.runtime.workflow import Prepared
from tests.programs import python_stand_in

pytest.importorskip("ncu_report", reason="the package that reads .ncu-rep is not installed")


RECORDING = Path(__file__).parents[4] / "data" / "ncu" / "mla_var6_plus-h200.ncu-rep.xz"
STAGES = ("attention_block_specialized", "decompress_combine")
TOOL = NcuTool(Path("/opt/ncu"), "2025.3.1")


@functools.cache
def recording() -> bytes:
    """The recorded report."""
    return lzma.decompress(RECORDING.read_bytes())


@functools.cache
def launches() -> tuple[Launch, ...]:
    """The launches of the recording, read once per process.

    The reader goes back to the file for the machine code, so the file stays until the end.
    """
    folder = tempfile.mkdtemp(prefix="hyper-mla-test-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "report.ncu-rep")
    path.write_bytes(recording())
    return tuple(read_launches(path))


def recorded_plan() -> KernelPlan:
    """The plan that was recorded."""
    plan = plan_class(find_kernel("mla_var6_plus"))(b=8, s=16, t=2048, n=512)
    return plan.for_target("sm_90")


def recorded_session(mode: NsightProfType, folder: Path) -> Session:
    """A session as `profile` would return it, made of the recording."""
    (folder / "report.ncu-rep").write_bytes(recording())
    plan = recorded_plan()
    stage = plan.plan(*plan.prepare_inputs("meta"))
    return Session(
        mode=mode,
        prepared=Prepared(plan, (), stage, device_spec("NVIDIA H200")),
        folder=folder,
        tool=TOOL,
        collection=Collection("ncu", "the package nsight is not installed"),
        clocks=ClockState(False),
        profiles=stage_profiles(launches(), STAGES, 1),
        event_us={"attention_block_specialized": 290.0, "decompress_combine": 20.0},
    )


def test_every_hand_picked_metric_exists_on_an_h200():
    for launch in launches():
        missing = [n for n in annotation_metrics() if launch.metrics[n].number is None]
        assert missing == []


def test_figures_have_their_units():
    first, second = stage_profiles(launches(), STAGES, 1)
    assert second.figures["time_us"] == pytest.approx(17.056)
    expected = {
        **{"time_us": 291.072, "dram_bytes": 307051520 + 17965568, "registers": 168},
        **{"shared_bytes": 222064, "waves_per_sm": 1280 / 132, "local_bytes": 0},
        "sm_clock_mhz": 1768.76,
    }
    found = {key: first.figures[key] for key in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert next(iter(first.stalls)) == "long_scoreboard"


@pytest.mark.parametrize("unit", ["ns", "usecond", "msecond", "second"])
def test_durations_in_any_unit(unit):
    expected = 2 * {"ns": 1e-3, "usecond": 1, "msecond": 1e3, "second": 1e6}[unit]
    figures = figures_of({"gpu__time_duration.sum": MetricValue(2, unit)})
    assert figures["time_us"] == pytest.approx(expected)
    assert figures_of({"gpu__time_duration.sum": MetricValue(2, "cycle")}) == {}


def fake(name: str, nanoseconds: float, tensor: float) -> Launch:
    tensor_name = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
    return Launch(
        name,
        f"{name}_fn",
        {
            "gpu__time_duration.sum": MetricValue(nanoseconds, "ns"),
            tensor_name: MetricValue(tensor, "%"),
        },
    )


def test_runs_give_medians_and_kernels_of_one_stage_add_up():
    runs = [fake("k", ns, 50.0) for ns in (1000, 9000, 2000)]
    (profile,) = stage_profiles(runs, ["k"], 3)
    assert profile.figures["time_us"] == 2.0
    assert profile.spread_us is not None and profile.spread_us > 0
    assert profile.main is runs[1]
    (profile,) = stage_profiles([fake("k", 3000, 80.0), fake("k", 1000, 40.0)], ["k"], 1)
    assert profile.figures["time_us"] == 4.0
    assert profile.figures["tensor_pct"] == pytest.approx(70.0)
    with pytest.raises(UnsupportedError, match="k: expected a multiple of 2"):
        stage_profiles(runs, ["k"], 2)


def test_advice_is_what_a_kernel_author_can_use():
    told = advice(launches()[0].rules())
    titles = [rule.title for rule in told]
    assert titles[:2] == ["Theoretical Occupancy", "Long Scoreboard Stalls"]
    assert told[0].speedup_pct == pytest.approx(62.24, abs=0.01)
    assert sum("Imbalance" in title for title in titles) == 1
    assert not any(rule.identifier == "MemoryL2Compression" for rule in told)
    assert all("@" not in rule.message for rule in launches()[0].rules())


def test_links_in_messages_become_text():
    text = "See @section:WarpStateStats:Warp State Statistics@ and @url:guide:https://x.y/z#a@."
    assert plain_text(text) == "See Warp State Statistics and guide."
    assert plain_text("@source:tile_ops.py:144:tile_ops.py, line 145@") == "tile_ops.py, line 145"


def test_instructions_carry_source_lines_and_samples():
    items = KernelSource.of(launches()[1]).instructions
    assert len(items) == 1366
    assert {Path(item.file).name for item in items} == {"decompress_combine.py", "_stub.py"}
    assert any(item.opcode == "HGMMA" for item in items)
    assert sum(item.values.get("samples", 0) for item in items) == 1637
    assert not any(item.spills for item in items)


def test_annotated_source_marks_hot_and_bad_lines():
    lines = {
        2: LineProfile(samples=90, stalls=Counter({"barrier": 80, "selected": 10})),
        3: LineProfile(spills=2, excess_sectors=64),
        4: LineProfile(),
    }
    text = annotate_source("a\n  b\nc\nd\n", lines, 100, ["title"])
    assert text.splitlines() == [
        "# title",
        "#",
        "a",
        "  # [HOT] line 2: 90.0% of samples; 89% barrier (waiting at a CTA barrier)",
        "  b",
        "# [---] line 3: 0.0% of samples; SPILLS: 2 local memory instructions; "
        "UNCOALESCED: 64 excess L2 sectors",
        "c",
        "d",
    ]


def test_marks_of_the_rules_reach_their_line():
    items = [Instruction(16, "FMUL R1, R2", "/x/mla_var3/k.py", 7)]
    marker = {
        "rule_identifier": "FPInstructions",
        "message": "Many non-fused instructions. Use a compiler flag.",
        "source_location": {"file_name": "/x/mla_var3/k.py", "line": 7},
    }
    found = line_profiles(items, [marker, {"rule_identifier": "X", "source_address": 16}])
    assert found["/x/mla_var3/k.py"][7].messages == ["Many non-fused instructions"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ncu")
    write_ncu(recorded_session(NsightProfType.NCU, folder))
    return folder


def test_all_artifacts_are_there(outcome):
    per_stage = ("ncu-details.csv", "sass-metrics.csv", "source.ptx")
    names = ["report.md", "report-verbose.md", "report.ncu-rep", "params.json"]
    names += [f"tiling/{stage}.json" for stage in STAGES]
    names += [f"{stage}/{name}" for stage in STAGES for name in per_stage]
    assert all((outcome / name).stat().st_size > 0 for name in names)


def test_only_our_sources_are_annotated(outcome):
    written = {p.relative_to(outcome).as_posix() for p in outcome.glob("annotated-src/*/*")}
    assert written == {
        "annotated-src/attention_block_specialized/attention_block_specialized.py",
        "annotated-src/attention_block_specialized/tile_ops.py",
    }
    assert any("[HOT] line " in (outcome / name).read_text() for name in written)


def test_the_ptx_is_the_whole_module(outcome):
    text = (outcome / "decompress_combine" / "source.ptx").read_text()
    assert text.startswith(".version ") and "\0" not in text
    assert ".visible .entry decompress_combine" in text and "wgmma.mma_async" in text


def test_sass_table_has_one_row_per_instruction(outcome):
    rows = rows_of(outcome / "decompress_combine" / "sass-metrics.csv")
    shares = [float(row["samples_pct"]) for row in rows]
    assert len(rows) == 1366 and sum(shares) == pytest.approx(100, abs=0.5)
    hottest = rows[shares.index(max(shares))]
    assert hottest["file"].endswith("decompress_combine.py")
    assert int(hottest["stall_long_scoreboard"]) > 0


def test_the_reports_say_what_matters(outcome):
    compact = (outcome / "report.md").read_text()
    for text in (
        *("## Profile: mla_var6_plus v0", "### Bottleneck: Latency-bound", "clocks not locked"),
        *("| Tail Effect | 50% of the kernel |", "decompress_combine.py:76"),
        "ncu --clock-control none",
    ):
        assert text in compact
    verbose = (outcome / "report-verbose.md").read_text()
    for text in ("### Occupancy", "### Warp State Statistics", "Low Compression Rate"):
        assert text in verbose
    assert len(verbose) > 3 * len(compact)
    assert "{UNIT}" not in verbose


STAND_IN = """
import json, lzma, pathlib
if "--version" in args:
    print("Version 2025.3.1.0 (build 1)")
    sys.exit(0)
out = pathlib.Path(args[args.index("-o") + 1])
(out.parent / "arguments.json").write_text(json.dumps(args))
data = lzma.decompress(pathlib.Path({recording!r}).read_bytes())
pathlib.Path(str(out) + ".ncu-rep").write_bytes(data)
"""


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("annotation")
    write_annotation(recorded_session(NsightProfType.ANNOTATION, folder))
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_report_has_the_contract_and_every_figure(annotated):
    report = (annotated / "report.md").read_text()
    for text in (
        "## Profile: mla_var6_plus v0",
        "| 8 | 16 | 2048 | bfloat16 |",
        "| Stage | Duration (us) | TC% | DRAM% | Occ% | Bottleneck | Key Issue |",
        "| attention_block_specialized | 291.07 | 27.3 | 23.2 | 15.3 | Latency-bound | "
        "register or shared memory pressure (occupancy=15.3%) |",
        "### Bottleneck: Latency-bound",
        "### Top 3 Opportunities (ranked by estimated impact)",
        "1. hide latency",
        "trigger: [stall long_scoreboard=42%]",
        "| mla_var6_plus | 308 µs |",
        "| tensor core utilisation | 27.3% | 11.8% | 26.4% |",
        "| L2 hit rate | 51.8% | 22.7% |",
        "| achieved occupancy | 15.3% | 8.9% |",
        "| registers per thread | 168 | 255 | - |",
        "| static shared memory per CTA | 217 KiB | 224 KiB | - |",
        "| local spilling | 0 B | 0 B | 0 B |",
        "| waves per SM | 9.70 | 1.94 | - |",
        "ncu with NVTX ranges (the package nsight is not installed)",
        "clocks not locked",
        "Bm=64 Bn=64",
    ):
        assert text in report


def test_the_csv_files(annotated):
    raw = rows_of(annotated / "nsight_raw_metrics.csv")
    found = [r for r in raw if r["metric"] == "gpu__time_duration.sum"]
    assert [(r["stage"], r["run"], float(r["value"]), r["unit"]) for r in found] == [
        (STAGES[0], "0", 291072.0, "ns"),
        (STAGES[1], "0", 17056.0, "ns"),
    ]
    formatted = rows_of(annotated / "nsight_formatted_metrics.csv")
    assert [row["stage"] for row in formatted] == [*STAGES, "mla_var6_plus"]
    assert float(formatted[0]["time_us [us]"]) == pytest.approx(291.072)
    assert formatted[0]["bottleneck"] == "Latency-bound"
    whole = rows_of(annotated / "roofline_metrics.csv")[-1]
    assert float(whole["measured_us"]) == pytest.approx(308.128)
    assert float(whole["peak_gbps"]) == device_spec("NVIDIA H200").peak_gbps
    assert 0 < float(whole["of_roofline_pct"]) < 100


def test_a_large_difference_to_event_time_is_explained(tmp_path):
    session = recorded_session(NsightProfType.ANNOTATION, tmp_path)
    result = write_annotation(session)
    text = timer_note(result)
    assert "took 17.1 µs under the profiler at 1826 MHz, 20.0 µs by CUDA events (-14.7%)" in text
    assert "Both start with cold caches" in text
    result.stages[1].extra["event_us"] = 17.0
    assert "Both start with cold caches" not in timer_note(result)


@pytest.fixture
def machine(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The pretended GPU without tensors, and a stand-in for ncu that leaves the recording."""
    gpu.where = "meta"
    path = python_stand_in(tmp_path / "ncu", STAND_IN.format(recording=str(RECORDING)))
    timing = summarise([20.0], timer="cuda-event", cold_l2=True)
    clocks = ClockState(True, 1500, 3201, "today")
    monkeypatch.setattr(ncu_session, "time_gpu", lambda fn: timing)
    monkeypatch.setattr(ncu_session, "announce_clocks", lambda environment: clocks)
    monkeypatch.setattr(ncu_driver, "find_tool", lambda name: path)
    monkeypatch.setattr(ncu_driver, "nsight_problem", lambda tool, where: "it is missing")
    return gpu


def test_the_whole_way(machine, tmp_path):
    result = annotation_profile_plan(recorded_plan(), out_dir=tmp_path / "out", bench_runs=1)
    assert result.get_total_time_us() == pytest.approx(308.128)
    assert result.out_dir == tmp_path / "out"
    assert [f"compile {stage} for sm_90" for stage in STAGES] == machine.log[2:4]
    arguments = json.loads((tmp_path / "out" / "arguments.json").read_text())
    assert arguments[-3:-1] == ["-m", "mla_var3.runtime.profiling.target"]
    spec = json.loads(Path(arguments[-1]).read_text())
    assert spec["runs"] == 1
    assert [entry["kernel"] for entry in spec["tilings"]] == list(STAGES)
    text = (tmp_path / "out" / "report.md").read_text()
    assert "clocks locked by scripts/lock-gpu-clock.sh at 1500 MHz" in text
    assert "ncu with NVTX ranges (it is missing)" in text


def test_missing_tools_are_found_before_anything_is_tuned(machine, monkeypatch):
    monkeypatch.setattr(ncu_driver, "find_tool", lambda name: None)
    monkeypatch.setattr(ncu_driver, "_newest_in_opt", lambda: None)
    monkeypatch.setattr(common, "prepare", lambda *_: pytest.fail("tuned"))
    with pytest.raises(MissingToolError, match="ncu: expected Nsight Compute"):
        annotation_profile_plan(recorded_plan())
    assert (annotation_available() or "").startswith("ncu: expected Nsight Compute")
