"""Timelines: the recorded trace, kernels found by name, overlap, reasons for serialisation."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.profiling.timeline import csv as timeline_csv
from mla_var3.runtime.profiling.timeline.analysis import Analysis, analyse, group_overlap
from mla_var3.runtime.profiling.timeline.model import NSYS, GpuActivity, Timeline
from mla_var3.runtime.profiling.timeline.outline import Outline, assign
from mla_var3.runtime.profiling.timeline.plot import timeline_plot
from mla_var3.runtime.profiling.timeline.report import (
    kernel_figures,
    timeline_figures,
    timeline_sections,
)
from mla_var3.runtime.profiling.timeline.serial import resident_blocks, serialisations
from mla_var3.runtime.profiling.timeline.trace import read_chrome_trace, write_chrome_trace
from tests.unit.runtime.profiling.timeline.timeline_support import (
    NAMES,
    OVERLAP,
    PAIR,
    PIPE,
    TRACE,
    pair_timeline,
)

H200 = device_spec("NVIDIA H200")


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def recorded() -> Timeline:
    return read_chrome_trace(TRACE)


@pytest.fixture(scope="module")
def analysis(recorded: Timeline) -> Analysis:
    return analyse(recorded, PIPE)


def test_the_recorded_trace_is_read_exactly(recorded: Timeline) -> None:
    assert recorded.device_name == "NVIDIA H200"
    assert (len(recorded.gpu), len(recorded.api), len(recorded.ranges)) == (16, 74, 4)
    first = recorded.gpu[0]
    assert first.name.startswith("flash_mla_Kt1_")
    assert (first.start, first.duration) == (3854574723623535, 82847)
    assert (first.stream, first.correlation, first.grid, first.block) == (
        *(13, 28),
        *((32, 4, 1), (384, 1, 1)),
    )
    assert (first.registers, first.shared_bytes) == (168, 222048)


def test_runs_and_kernels_of_the_recorded_trace(analysis: Analysis) -> None:
    assert [run.span_ns for run in analysis.queued] == [453534, 347583, 340031, 338240]
    for run in analysis.queued:
        assert [piece.leaf for piece in run.pieces] == [0, 1, 2, 3]
    assert analysis.typical().span_ns == 340031
    assert analysis.median_us(lambda run: run.span_ns) == (347583 + 340031) / 2 / 1e3
    figures = kernel_figures(analysis, 3)
    assert (figures["stream"], figures["launches"]) == (7, 4)


def test_overlap_of_the_recorded_trace(analysis: Analysis) -> None:
    overlaps = [group_overlap(run, OVERLAP) for run in analysis.queued]
    # Third run: flash_mla ends at 587.692 + 83.328, flash_attention starts at 652.620.
    assert [overlap.overlap_ns for overlap in overlaps] == [0, 0, 18400, 42688]
    assert overlaps[3].possible_ns == 83360
    assert overlaps[3].share == pytest.approx(0.512, abs=1e-3)
    assert overlaps[3].busy_ns == 83360 + 117856 - 42688


def test_the_recorded_serialisation_is_the_hosts(analysis: Analysis) -> None:
    (found,) = serialisations(analysis, analysis.queued[:2], H200)
    assert (found.first, found.second, found.cause) == ("flash_mla", "flash_attention", "host")
    assert (found.runs, found.of) == (2, 2)
    assert "CUDA graph" in found.reason
    assert serialisations(analysis, analysis.queued[2:], H200) == []


def test_the_report_of_the_recorded_trace(analysis: Analysis) -> None:
    text = "\n".join(timeline_sections(analysis, H200))
    for heading in ("Kernels", "Overlap", "Unexpected serialisation", "Gaps", "Launch overhead"):
        assert f"## {heading}\n" in text
    assert "| overlap | flash_mla 83.2 µs, flash_attention 88.2 µs |" in text
    assert "attention_block_specialized | decompress_combine | dependency or event" in text
    paced = Analysis(PIPE, analysis.queued[2:], analysis.queued[:2])
    text = "\n".join(timeline_sections(paced, H200))
    assert "cause: host" in text
    assert "Launching takes longer than the work" in text


def test_figures_are_json_ready(analysis: Analysis) -> None:
    paced = Analysis(PIPE, analysis.queued[2:], analysis.queued[:2])
    data = json.loads(json.dumps(timeline_figures(paced, H200)))
    (group,) = data["overlap"]
    assert group["overlap_us"] == (18.4 + 42.688) / 2
    assert group["members"] == ["flash_mla", "flash_attention"]
    assert data["host_paced"]["serialised"][0]["cause"] == "host"


def test_the_plot_is_drawn(analysis: Analysis, tmp_path: Path) -> None:
    paced = Analysis(PIPE, analysis.queued[2:], analysis.queued[:2])
    path = timeline_plot(paced, tmp_path / "timeline.png", "pipe, NVIDIA H200")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["timeline.png"]


def test_a_written_trace_reads_back_the_same(recorded: Timeline, tmp_path: Path) -> None:
    write_chrome_trace(recorded, tmp_path / "trace.json")
    again = read_chrome_trace(tmp_path / "trace.json")
    assert again.gpu == recorded.gpu
    assert again.api == recorded.api
    assert [dataclasses.replace(r, process=916) for r in again.ranges] == recorded.ranges


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(InvalidArgumentError, match="a Chrome trace"):
        read_chrome_trace(tmp_path / "x.json")


def test_the_csv_files_have_the_columns_of_nsight_systems(
    recorded: Timeline, tmp_path: Path
) -> None:
    files = timeline_csv.write_stats(recorded, tmp_path)
    assert [file.name for file in files] == [
        "report_cuda_gpu_trace.csv",
        "report_nvtx_gpu_proj_trace.csv",
        "report_cuda_api_sum.csv",
    ]
    gpu, nvtx, api = map(rows_of, files)
    assert tuple(gpu[0]) == timeline_csv.GPU_COLUMNS
    assert (gpu[0]["Strm"], gpu[0]["GrdX"], gpu[0]["DymSMem (MB)"]) == ("13", "32", "0.222")
    assert (nvtx[0]["Name"], nvtx[0]["NumGPUOps"]) == (":hyper_mla@pipe", "4")
    assert nvtx[0]["Projected Duration (ns)"] == "453534"
    launches = next(row for row in api if row["Name"] == "cuLaunchKernelEx")
    assert launches["Num Calls"] == "16"
    assert sum(float(row["Time (%)"]) for row in api) == pytest.approx(100, abs=0.5)


def test_nested_ranges_in_the_csv(tmp_path: Path) -> None:
    timeline = pair_timeline((2_000, 9_000), (3_000, 5_000))
    outer = timeline.ranges[0]
    inner = dataclasses.replace(outer, name="hyper_mla@left", start=0, duration=900)
    nested = Timeline(timeline.source, timeline.gpu, timeline.api, [inner, outer])
    rows = rows_of(timeline_csv.write_stats(nested, tmp_path)[1])
    assert [row["RangeStack"] for row in rows] == [":1", ":1:2"]
    assert [row["Lvl"] for row in rows] == ["0", "1"]
    assert [row["NumChild"] for row in rows] == ["1", "0"]
    assert rows[1]["Projected Duration (ns)"] == "7000"


def test_csv_of_nsight_systems_gives_the_same_analysis(recorded: Timeline, tmp_path: Path) -> None:
    """Through our own files and an API trace in the form that `nsys stats` prints."""
    timeline_csv.write_stats(recorded, tmp_path)
    lines = ["Start (ns),Duration (ns),Name,Result,CorrID,Pid,Tid,T-Pri,Thread Name"]
    lines += [
        f"{c.start},{c.duration},{c.name},0,{c.correlation},916,{c.thread},20,python3"
        for c in recorded.api
    ]
    preamble = "Processing [report.sqlite] with [cuda_api_trace.py]...\n"
    (tmp_path / "report_cuda_api_trace.csv").write_text(preamble + "\n".join(lines))
    again = timeline_csv.read_stats(tmp_path)
    assert (again.source, again.device_name) == (NSYS, "NVIDIA H200")
    runs = analyse(again, PIPE).queued
    assert [run.span_ns for run in runs] == [453534, 347583, 340031, 338240]
    assert group_overlap(runs[3], OVERLAP).overlap_ns == 42688


@pytest.mark.parametrize("text", ["", "SKIPPED: report.sqlite does not contain CUDA trace data.\n"])
def test_empty_reports_of_nsight_systems(text: str, tmp_path: Path) -> None:
    for name in ("cuda_gpu_trace", "cuda_api_trace", "nvtx_gpu_proj_trace"):
        (tmp_path / f"report_{name}.csv").write_text(text)
    assert timeline_csv.read_stats(tmp_path).gpu == []


def test_other_columns_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="a report of nsys stats"):
        timeline_csv.read_stats(tmp_path)
    (tmp_path / "report_cuda_gpu_trace.csv").write_text("Start (ns),Name\n1,x\n")
    with pytest.raises(InvalidArgumentError, match="CorrId, Strm"):
        timeline_csv.read_stats(tmp_path)


def kernel(name: str, kind: str = "kernel") -> GpuActivity:
    return GpuActivity(kind, name, 0, 1, 7, 1)


def test_kernels_are_found_by_the_longest_name() -> None:
    names = ("flash_mla", "flash_mla_split_kv", "flash_mla")
    shape = Outline("x", ("flash_mla", "flash_mla_split_kv", "flash_mla#2"), names, ())
    activities = [
        kernel("kernel_cutlass_flash_mla_split_kv_0"),
        kernel("void at::native::fill(float)"),
        kernel("flash_mla_Kt1_A3"),
        kernel("Memset (Device)", "memset"),
        kernel("flash_mla_Kt1_A3"),
        kernel("flash_mla_Kt1_A3"),
    ]
    assert assign(shape, activities) == [1, None, 0, None, 2, None]


def test_without_any_name_the_order_decides() -> None:
    shape = Outline("x", ("a_kernel", "b_kernel"), ("a_kernel", "b_kernel"), ())
    assert assign(shape, [kernel("k0"), kernel("m", "memset"), kernel("k1")]) == [0, None, 1]
    assert assign(shape, [kernel("k0")]) == [None]


def cause(timeline: Timeline) -> str:
    found = analyse(timeline, PAIR)
    causes = [s.cause for s in serialisations(found, found.queued, H200)]
    return ",".join(causes) or "none"


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        # enqueued at 1 us, waits for the other: 200 blocks of which the device holds 132
        ("resources", {"blocks": 200}),
        ("unknown", {"blocks": 8}),
        ("stream", {"streams": (13, 13)}),
        ("host", {"launches": (0, 59_000)}),
        ("host", {"launches": (0, 48_000), "blocks": 200}),
    ],
)
def test_why_members_did_not_overlap(expected: str, arguments: dict[str, object]) -> None:
    timeline = pair_timeline((5_000, 50_000), (60_000, 90_000), **arguments)  # type: ignore[arg-type]
    if "launches" in arguments:
        late = arguments["launches"][1]  # type: ignore[index]
        timeline = pair_timeline((5_000, 50_000), (late + 3_000, 90_000), **arguments)  # type: ignore[arg-type]
    assert cause(timeline) == expected


def test_members_that_overlap_or_are_tiny_are_not_reported() -> None:
    assert cause(pair_timeline((5_000, 50_000), (40_000, 90_000))) == "none"
    assert cause(pair_timeline((5_000, 50_000), (60_000, 61_000))) == "none"


def test_the_threshold_of_serialisation() -> None:
    # 10 % of the shorter one, 30 us, are 3 us.
    assert cause(pair_timeline((5_000, 53_000), (50_000, 80_000))) == "none"
    assert cause(pair_timeline((5_000, 52_999), (50_000, 80_000))) == "unknown"


def test_resident_blocks_by_each_limit() -> None:
    one = pair_timeline((0, 1), (0, 1)).gpu[0]
    assert resident_blocks(one, H200) == 132
    small = dataclasses.replace(one, shared_bytes=1000)
    assert resident_blocks(small, H200) == 2 * 132  # 128 registers x 256 threads x 2
    assert resident_blocks(dataclasses.replace(small, registers=16), H200) == 8 * 132
    assert resident_blocks(dataclasses.replace(one, block=None), H200) is None


def test_host_paced_runs_are_kept_apart() -> None:
    paced = pair_timeline((5_000, 50_000), (60_000, 90_000), name="hyper_mla_host@pair")
    with pytest.raises(UnsupportedError, match="expected GPU activity inside ranges"):
        analyse(paced, PAIR)
    both = pair_timeline((5_000, 50_000), (60_000, 90_000))
    found = analyse(both, PAIR)
    assert (len(found.queued), len(found.host_paced)) == (1, 0)


def test_a_range_of_the_same_name_inside_a_run_is_no_run_of_its_own() -> None:
    timeline = pair_timeline((5_000, 50_000), (60_000, 90_000))
    inner = dataclasses.replace(timeline.ranges[0], start=1, duration=800)
    timeline.ranges.append(inner)
    assert len(analyse(timeline, PAIR).queued) == 1


def test_without_groups_there_is_no_overlap_to_achieve(recorded: Timeline) -> None:
    found = analyse(recorded, dataclasses.replace(PIPE, groups=()))
    text = "\n".join(timeline_sections(found, H200))
    assert "No stage runs concurrent kernels" in text
    assert timeline_figures(found, H200)["overlap"] == []
    assert len(NAMES) == 4
