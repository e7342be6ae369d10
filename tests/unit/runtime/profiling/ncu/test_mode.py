"""Reading a real report of Nsight Compute, and the artifacts of ncu mode made from it."""

import csv
from pathlib import Path
from typing import Any

import pytest

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.profiling import NsightProfType
from mla_var3.runtime.profiling.ncu.mode import write_ncu
from mla_var3.runtime.profiling.ncu.reader import (
    Launch,
    MetricValue,
    advice,
    annotation_metrics,
    figures_of,
    plain_text,
    stage_profiles,
)
from mla_var3.runtime.profiling.ncu.source import (
    Instruction,
    KernelSource,
    LineProfile,
    annotate_source,
    line_profiles,
)

pytest.importorskip("ncu_report", reason="the package that reads .ncu-rep is not installed")

from tests.unit.runtime.profiling.ncu.ncu_support import STAGES, launches, recorded_session


def test_every_hand_picked_metric_exists_on_an_h200():
    for launch in launches():
        missing = [n for n in annotation_metrics() if launch.metrics[n].number is None]
        assert missing == []


def test_figures_have_their_units():
    first, second = stage_profiles(launches(), STAGES, 1)
    assert first.figures["time_us"] == pytest.approx(291.072)
    assert second.figures["time_us"] == pytest.approx(17.056)
    assert first.figures["dram_bytes"] == 307051520 + 17965568
    assert first.figures["registers"] == 168
    assert first.figures["shared_bytes"] == 222064
    assert first.figures["sm_clock_mhz"] == pytest.approx(1768.76, abs=0.01)
    assert first.figures["waves_per_sm"] == pytest.approx(1280 / 132)
    assert first.figures["local_bytes"] == 0
    assert next(iter(first.stalls)) == "long_scoreboard"


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(2000, "ns", 2.0), (2.0, "usecond", 2.0), (2.0, "msecond", 2000.0), (2.0, "second", 2e6)],
)
def test_durations_in_any_unit(value, unit, expected):
    figures = figures_of({"gpu__time_duration.sum": MetricValue(value, unit)})
    assert figures["time_us"] == pytest.approx(expected)
    assert figures_of({"gpu__time_duration.sum": MetricValue(value, "cycle")}) == {}


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


def test_runs_are_summed_up_by_their_median():
    runs = [fake("k", ns, 50.0) for ns in (1000, 9000, 2000)]
    (profile,) = stage_profiles(runs, ["k"], 3)
    assert profile.figures["time_us"] == 2.0
    assert profile.spread_us is not None and profile.spread_us > 0
    assert profile.main is runs[1]


def test_kernels_of_one_stage_add_up():
    both = [fake("k", 3000, 80.0), fake("k", 1000, 40.0)]
    (profile,) = stage_profiles(both, ["k"], 1)
    assert profile.figures["time_us"] == 4.0
    assert profile.figures["tensor_pct"] == pytest.approx(70.0)


@pytest.mark.parametrize("runs", [2, 3])
def test_missing_launches_are_an_error(runs):
    with pytest.raises(UnsupportedError, match=f"k: expected a multiple of {runs}"):
        stage_profiles([fake("k", 1, 1)], ["k"], runs)


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
        2: LineProfile(samples=90, instructions=3),
        3: LineProfile(samples=0, instructions=1, spills=2, excess_sectors=64),
        4: LineProfile(samples=0, instructions=1),
    }
    lines[2].stalls.update({"barrier": 80, "selected": 10})
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
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("ncu")
    return folder, write_ncu(recorded_session(NsightProfType.NCU, folder))


def test_all_artifacts_are_there(outcome):
    per_stage = ("ncu-details.csv", "sass-metrics.csv", "source.ptx")
    names = ["report.md", "report-verbose.md", "report.ncu-rep", "params.json"]
    names += [f"tiling/{stage}.json" for stage in STAGES]
    names += [f"{stage}/{name}" for stage in STAGES for name in per_stage]
    assert all((outcome[0] / name).stat().st_size > 0 for name in names)


def test_only_our_sources_are_annotated(outcome):
    folder, _ = outcome
    written = {p.relative_to(folder).as_posix() for p in folder.glob("annotated-src/*/*")}
    assert written == {
        "annotated-src/attention_block_specialized/attention_block_specialized.py",
        "annotated-src/attention_block_specialized/tile_ops.py",
    }
    assert any("[HOT] line " in (folder / name).read_text() for name in written)


def test_the_ptx_is_the_whole_module(outcome):
    text = (outcome[0] / "decompress_combine" / "source.ptx").read_text()
    assert text.startswith(".version ")
    assert ".visible .entry decompress_combine" in text
    assert "wgmma.mma_async" in text
    assert "\0" not in text


def test_sass_table_has_one_row_per_instruction(outcome):
    with (outcome[0] / "decompress_combine" / "sass-metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1366
    assert sum(float(row["samples_pct"]) for row in rows) == pytest.approx(100, abs=0.5)
    hottest = max(rows, key=lambda row: float(row["samples_pct"]))
    assert hottest["file"].endswith("decompress_combine.py")
    assert int(hottest["stall_long_scoreboard"]) > 0


def test_the_reports_say_what_matters(outcome):
    folder, _ = outcome
    compact = (folder / "report.md").read_text()
    assert "## Profile: mla_var6_plus v0" in compact
    assert "### Bottleneck: Latency-bound" in compact
    assert "| Tail Effect | 50% of the kernel |" in compact
    assert "decompress_combine.py:76" in compact
    assert "ncu --clock-control none" in compact
    assert "clocks not locked" in compact
    verbose = (folder / "report-verbose.md").read_text()
    for text in ("### Occupancy", "### Warp State Statistics", "Low Compression Rate"):
        assert text in verbose
    assert len(verbose) > 3 * len(compact)
    assert "{UNIT}" not in verbose
