"""Timelines: the recorded trace, kernels found by name, overlap, reasons for serialisation."""

import csv
import dataclasses
import statistics
from pathlib import Path

import pytest

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.profiling.nsys import (
    kernel_figures,
    timeline_figures,
    timeline_sections,
)
from mla_var3.runtime.profiling.timeline.analysis import (
    Analysis,
    Outline,
    analyse,
    assign,
    group_overlap,
    serialisations,
    typical,
)
from mla_var3.runtime.profiling.timeline.model import (
    GpuActivity,
    Timeline,
    read_chrome_trace,
    write_stats,
)
from tests.unit.runtime.profiling.timeline.timeline_support import (
    OVERLAP,
    PAIR,
    PIPE,
    TRACE,
    pair_timeline,
)


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def recorded() -> Timeline:
    return read_chrome_trace(TRACE)


@pytest.fixture(scope="module")
def analysis(recorded: Timeline) -> Analysis:
    return analyse(recorded, PIPE)


def test_the_recorded_trace_is_read_exactly(recorded):
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


def test_runs_and_kernels_of_the_recorded_trace(analysis):
    assert [run.span_ns for run in analysis.queued] == [453534, 347583, 340031, 338240]
    for run in analysis.queued:
        assert [launch.leaf for launch in run.launches] == [0, 1, 2, 3]
    assert typical(analysis.queued).span_ns == 340031
    assert statistics.median(run.span_ns for run in analysis.queued) == (347583 + 340031) / 2
    figures = kernel_figures(analysis, 3)
    assert (figures["stream"], figures["launches"]) == (7, 4)


def test_overlap_of_the_recorded_trace(analysis):
    overlaps = [group_overlap(run, OVERLAP) for run in analysis.queued]
    # Third run: flash_mla ends at 587.692 + 83.328, flash_attention starts at 652.620.
    assert [overlap.overlap_ns for overlap in overlaps] == [0, 0, 18400, 42688]
    assert overlaps[3].possible_ns == 83360
    assert overlaps[3].share == pytest.approx(0.512, abs=1e-3)
    assert overlaps[3].busy_ns == 83360 + 117856 - 42688


def test_the_recorded_serialisation_is_the_hosts(analysis):
    (found,) = serialisations(PIPE, analysis.queued[:2])
    assert (found["first"], found["second"], found["cause"]) == (
        "flash_mla",
        "flash_attention",
        "host",
    )
    assert (found["runs"], found["of"]) == (2, 2)
    assert "CUDA graph" in found["reason"]
    assert serialisations(PIPE, analysis.queued[2:]) == []


def sections(analysis: Analysis) -> str:
    return "\n".join(timeline_sections(analysis, timeline_figures(analysis)))


def test_the_report_of_the_recorded_trace(analysis):
    text = sections(analysis)
    for heading in ("Kernels", "Overlap", "Unexpected serialisation", "Gaps", "Launch overhead"):
        assert f"## {heading}\n" in text
    assert "| overlap | flash_mla 83.2 µs, flash_attention 88.2 µs |" in text
    assert "attention_block_specialized | decompress_combine | dependency or event" in text
    paced = Analysis(PIPE, analysis.queued[2:], analysis.queued[:2])
    text = sections(paced)
    assert "cause: host" in text
    assert "Launching takes longer than the work" in text


def test_the_csv_files_have_columns_of_nsight_systems(recorded, tmp_path):
    files = write_stats(recorded, tmp_path)
    assert [file.name for file in files] == [
        "report_cuda_gpu_trace.csv",
        "report_nvtx_gpu_proj_trace.csv",
        "report_cuda_api_sum.csv",
    ]
    gpu, nvtx, api = map(rows_of, files)
    assert (gpu[0]["Start (ns)"], gpu[0]["Duration (ns)"]) == ("3854574723623535", "82847")
    assert (gpu[0]["Strm"], gpu[0]["GrdX"], gpu[0]["DymSMem (MB)"]) == ("13", "32", "0.222")
    assert (nvtx[0]["Name"], nvtx[0]["NumGPUOps"]) == (":hyper_mla@pipe", "4")
    assert nvtx[0]["Projected Duration (ns)"] == "453534"
    launches = next(row for row in api if row["Name"] == "cuLaunchKernelEx")
    assert launches["Num Calls"] == "16"
    assert sum(float(row["Time (%)"]) for row in api) == pytest.approx(100, abs=0.5)


# As CuTe DSL names them: the function, then class and module, then the arguments.
CUTE_MERGE = (
    "kernel_cutlass_merge_mla_var3kernelcute_pythonmlaflash_mlaflash_mlaflash_mlaFlashMLA_object_"
    "at__tensorptrf32gmemalign16o1_0"
)
CUTE_FLASH = (
    "kernel_cutlass_flash_mla_mla_var3kernelcute_pythonmlaflash_mlaflash_mlaflash_mlaFlashMLA_"
    "object_at__TiledMMA_ThrLayoutVMNK11110000_0"
)
CUTE_V5 = CUTE_FLASH.replace("kernel_cutlass_flash_mla_", "kernel_cutlass_flash_mla_v5_")
TWICE = ("flash_mla", "flash_mla_split_kv", "flash_mla")


@pytest.mark.parametrize(
    ("names", "launched", "expected"),
    [
        # The longest name decides; helpers and surplus launches are nobody's.
        (
            TWICE,
            ["kernel_cutlass_flash_mla_split_kv_0", "void at::fill(float)", *["flash_mla_Kt1"] * 3],
            [1, None, 0, 2, None],
        ),
        # The name behind the prefix decides, not that of the module.
        (("flash_mla", "merge"), [CUTE_FLASH, CUTE_MERGE], [0, 1]),
        (("flash_mla", "merge"), [CUTE_MERGE, CUTE_FLASH], [1, 0]),
        (("flash_mla", "flash_mla_v5"), [CUTE_V5, CUTE_FLASH], [1, 0]),
        (("flash",), ["kernel_cutlass_flashing_0", "x"], [None, None]),
        # Without any name the order decides, where the counts agree.
        (("a_kernel", "b_kernel"), ["k0", "memset", "k1"], [0, None, 1]),
        (("a_kernel", "b_kernel"), ["k0"], [None]),
    ],
)
def test_kernels_are_found_by_name(names, launched, expected):
    activities = [
        GpuActivity(name, 0, 1, 7, 1, "gpu_memset" if name == "memset" else "kernel")
        for name in launched
    ]
    assert assign(Outline("x", names, names, ()), activities) == expected


@pytest.mark.parametrize(
    ("causes", "second", "arguments"),
    [
        (["GPU"], (60_000, 90_000), {}),  # enqueued at 1 us, waits for the other
        (["stream"], (60_000, 90_000), {"streams": (13, 13)}),
        (["host"], (62_000, 90_000), {"launches": (0, 59_000)}),
        (["host"], (51_000, 90_000), {"launches": (0, 48_000), "ctas": 200}),
        ([], (40_000, 90_000), {}),  # they overlap
        ([], (60_000, 61_000), {}),  # too short to tell
    ],
)
def test_why_members_did_not_overlap(causes, second, arguments):
    found = analyse(pair_timeline((5_000, 50_000), second, **arguments), PAIR)
    assert [s["cause"] for s in serialisations(PAIR, found.queued)] == causes


def test_host_paced_runs_are_kept_apart():
    paced = pair_timeline((5_000, 50_000), (60_000, 90_000), name="hyper_mla_host@pair")
    with pytest.raises(UnsupportedError, match="expected GPU activity inside ranges"):
        analyse(paced, PAIR)
    both = pair_timeline((5_000, 50_000), (60_000, 90_000))
    found = analyse(both, PAIR)
    assert (len(found.queued), len(found.host_paced)) == (1, 0)


def test_a_range_of_the_same_name_inside_a_run_is_no_run_of_its_own():
    timeline = pair_timeline((5_000, 50_000), (60_000, 90_000))
    inner = dataclasses.replace(timeline.ranges[0], start=1, duration=800)
    timeline.ranges.append(inner)
    assert len(analyse(timeline, PAIR).queued) == 1


def test_without_groups_there_is_no_overlap_to_achieve(recorded):
    found = analyse(recorded, dataclasses.replace(PIPE, groups=()))
    assert "No stages run concurrently" in sections(found)
    assert timeline_figures(found)["overlap"] == []
