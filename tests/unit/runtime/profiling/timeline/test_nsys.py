"""Nsys mode: recording, the recorded trace, overlap and reasons for serialisation, artifacts."""

import contextlib
import csv
import dataclasses
import itertools
import json
import logging
import statistics
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_var3
from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.profiling import nsys, target
from mla_var3.runtime.profiling.nsys import (
    kernel_figures,
    timeline_figures,
    timeline_sections,
)
from mla_var3.runtime.profiling.target import ranges_below
from mla_var3.runtime.profiling.timeline.analysis import (
    Analysis,
    Group,
    Member,
    Outline,
    analyse,
    assign,
    group_overlap,
    outline,
    serialisations,
    typical,
)
from mla_var3.runtime.profiling.timeline.model import (
    ApiCall,
    GpuActivity,
    HostRange,
    Interval,
    Timeline,
    gaps,
    length,
    most_overlap,
    overlap,
    read_chrome_trace,
    union,
    write_stats,
)
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import Prepared
from tests.programs import write_script
from tests.unit.runtime.runtime_support import fake_kernel

TRACE = Path(__file__).resolve().parents[4] / "data" / "nsys" / "h200_pipeline_trace.json"
"""Four runs of KernelPipeline[ConcurrentKernels[flash_mla, flash_attention], mla_var6_plus],
recorded by torch.profiler on an H200 in 2026-11, at the pace of the host."""
NAMES = ("flash_mla", "flash_attention", "attention_block_specialized", "decompress_combine")
OVERLAP = Group("overlap", (Member("flash_mla", (0,)), Member("flash_attention", (1,))))
PIPE = Outline("pipe", NAMES, NAMES, (OVERLAP,))
PAIR = Outline("pair", ("left", "right"), ("left", "right"),
               (Group("pair", (Member("left", (0,)), Member("right", (1,)))),))  # fmt: skip


def pair_timeline(
    left: tuple[int, int],
    right: tuple[int, int],
    *,
    launches: tuple[int, int] = (0, 1_000),
    streams: tuple[int, int] = (13, 17),
    ctas: int = 8,
    name: str = "hyper_mla@pair",
) -> Timeline:
    """One run of two kernels, given as (start, end) in nanoseconds, launched at the given times."""
    gpu, api = [], []
    for index, (kernel, (start, end)) in enumerate((("left", left), ("right", right))):
        sizes = {"grid": (ctas, 1, 1), "block": (256, 1, 1), "registers": 128}
        place = (start, end - start, streams[index], index + 1)
        gpu.append(GpuActivity(f"{kernel}_Kt1_A3", *place, **sizes, shared_bytes=200_000))
        api.append(ApiCall("cuLaunchKernelEx", launches[index], 500, 7, index + 1))
    return Timeline(gpu, api, [HostRange(name, 0, 10_000_000, 7)], "NVIDIA H200")


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
    sizes = {"grid": (32, 4, 1), "block": (384, 1, 1), "registers": 168, "shared_bytes": 222048}
    read = GpuActivity(first.name, 3854574723623535, 82847, stream=13, correlation=28, **sizes)
    assert first == read


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
    assert "CUDA graph" in found.pop("reason")
    pair = {"group": "overlap", "first": "flash_mla", "second": "flash_attention"}
    assert found == {**pair, "cause": "host", "runs": 2, "of": 2}
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
    write_stats(recorded, tmp_path)
    names = ("cuda_gpu_trace", "nvtx_gpu_proj_trace", "cuda_api_sum")
    gpu, nvtx, api = (rows_of(tmp_path / f"report_{name}.csv") for name in names)
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
    times = (5_000, 50_000), (60_000, 90_000)
    with pytest.raises(UnsupportedError, match="expected GPU activity inside ranges"):
        analyse(pair_timeline(*times, name="hyper_mla_host@pair"), PAIR)
    timeline = pair_timeline(*times)
    # A range of the same name inside a run is no run of its own.
    timeline.ranges.append(dataclasses.replace(timeline.ranges[0], start=1, duration=800))
    found = analyse(timeline, PAIR)
    assert (len(found.queued), len(found.host_paced)) == (1, 0)


def test_without_groups_there_is_no_overlap_to_achieve(recorded):
    found = analyse(recorded, dataclasses.replace(PIPE, groups=()))
    assert "No stages run concurrently" in sections(found)
    assert timeline_figures(found)["overlap"] == []


RECORDER = """#!/bin/sh
while [ $# -gt 1 ]; do
    case "$1" in
        profile) [ {profile} = 0 ] || {{ echo last words; exit {profile}; }} ;;
        stats) [ {stats} = 0 ] || exit {stats} ;;
        -o) touch "$2.nsys-rep" ;;
        --output) touch "$2_cuda_gpu_trace.csv" ;;
    esac
    shift
done
"""


def pipeline() -> KernelPipeline:
    first, second, third, fourth = (fake_kernel(name) for name in NAMES)
    group = ConcurrentKernels(_name="overlap", concurrent_kernels=[first, second])
    rest = KernelPipeline(_name="mla_var6_plus", stages=[third, fourth])
    return KernelPipeline(_name="pipe", stages=[group, rest])


@pytest.mark.parametrize(
    ("profile", "stats", "message"),
    [
        (0, 0, None),
        (3, 0, r"nsys profile: expected report\.nsys-rep, got exit code 3: last words"),
        (0, 4, r"nsys stats: expected report_cuda_gpu_trace\.csv, got exit code 4"),
    ],
)
def test_recording_with_nsight_systems(profile, stats, message, prepared, tmp_path, monkeypatch):
    program = write_script(tmp_path / "nsys", RECORDER.format(profile=profile, stats=stats))
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "report.nsys-rep").write_text("of an earlier run in the same folder")
    monkeypatch.setattr(nsys, "find_tool", lambda name: program)
    fails = pytest.raises(UnsupportedError, match=message)
    with fails if message else contextlib.nullcontext():
        nsys.record_with_nsys(prepared.plan, prepared.stage, 20, folder)
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    report = ["report.nsys-rep"] if profile == 0 else []
    assert left == (report if message else [*report, "stats", "stats/report_cuda_gpu_trace.csv"])


def test_warnings_of_the_torch_profiler_are_logged(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mla_var3")

    def record(stage: Stage, make_range: Any, runs: int) -> None:
        with make_range("hyper_mla@k"):
            warnings.warn("raw text of torch", stacklevel=1)

    monkeypatch.setattr(nsys, "wait_for_device", lambda name: None)
    monkeypatch.setattr(target, "record_runs", record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timeline = nsys.record_with_torch(fake_kernel("k"), 20, tmp_path / "trace.json")
    assert [found.name for found in timeline.ranges] == ["hyper_mla@k"]
    assert "torch.profiler: raw text of torch" in caplog.text
    assert str(tmp_path) not in (tmp_path / "trace.json").read_text()


def test_stages_launch_inside_their_ranges_and_are_restored():
    seen: list[str] = []

    @contextlib.contextmanager
    def note(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    stage = pipeline()
    with ranges_below(stage, note):
        stage.launch()
    assert seen == [
        *("hyper_mla@overlap", "hyper_mla@flash_mla", "hyper_mla@flash_attention"),
        *("hyper_mla@mla_var6_plus", "hyper_mla@attention_block_specialized"),
        "hyper_mla@decompress_combine",
    ]
    seen.clear()
    stage.launch()
    assert seen == []


def test_runs_are_recorded_by_kind(monkeypatch):
    """On a stand-in for the GPU: the order of spins, ranges and launches."""
    log: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        log.append(name)
        yield
        log.append("end")

    clock = SimpleNamespace(flush_l2=lambda: log.append("flush"))
    monkeypatch.setattr(target, "CudaClock", lambda: clock)
    monkeypatch.setattr(target, "wait_for_device", lambda name: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: log.append("spin"))
    kernel = fake_kernel("k", log)
    target.record_runs(kernel, noted, queued=2, host_paced=1, warmup=1)
    assert log == [
        *("hyper_mla_warmup@k", "k", "end"),
        *("flush", "spin", "hyper_mla@k", "k", "end"),
        *("flush", "spin", "hyper_mla@k", "k", "end"),
        *("hyper_mla_host@k", "k", "end"),
    ]


@pytest.fixture
def prepared() -> Prepared:
    plan = plan_class(find_kernel("mla_var6_plus"))(b=4, s=16, t=2048, n=512)
    return Prepared(plan, (), pipeline(), device_spec("NVIDIA H200"))


def test_all_artifacts_of_the_recorded_trace(prepared, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mla_var3")
    result = nsys.summarise(prepared, read_chrome_trace(TRACE), "Recorded by a test.", tmp_path)
    assert outline(prepared.stage) == PIPE
    assert result.get_total_time_us() == 343.807
    times = [(stage.name, round(stage.time_us or 0, 1)) for stage in result.stages]
    assert times == list(zip(NAMES, (83.2, 88.2, 167.6, 10.1), strict=True))
    assert result.stages[3].extra["stream"] == 7
    record = json.loads((tmp_path / "params.json").read_text())
    (overlap,) = record["total"]["extra"]["overlap"]
    assert overlap["group"] == OVERLAP.name
    assert overlap["overlap_percent"] == pytest.approx(11.1, abs=0.1)
    assert record["clocks"]["locked"] is False and "clocks not locked" in caplog.text
    unlocked = "GPU clocks: clocks not locked; scripts/lock-gpu-clock.sh locks them"
    for words in ("Recorded by a test.", unlocked, "| overlap |"):
        assert words in (tmp_path / "report.md").read_text()
    assert sorted(p.stem for p in (tmp_path / "tiling").iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("state", ["works", "missing", "broken", "without stats"])
def test_cupti_always_records_and_nsight_systems_where_it_works(
    state, prepared, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "mla_var3")

    def record_with_nsys(*_: object) -> None:
        if state == "missing":
            raise MissingToolError("Nsight Systems: got none")
        if state != "broken":
            (tmp_path / "report.nsys-rep").touch()
        if state != "works":
            raise UnsupportedError("nsys: it failed")
        (tmp_path / "stats").mkdir()

    monkeypatch.setattr(nsys, "wait_for_device", lambda name: None)
    monkeypatch.setattr(nsys, "record_with_nsys", record_with_nsys)
    monkeypatch.setattr(nsys, "record_with_torch", lambda *_: read_chrome_trace(TRACE))
    timeline, how = nsys.collect(prepared, 20, tmp_path)
    assert len(timeline.gpu) == 16
    assert "recorded by CUPTI through torch.profiler" in how
    assert ("there is no `report.nsys-rep`" in how) is (state in ("missing", "broken"))
    assert ("WARNING" in caplog.text) is (state in ("broken", "without stats"))
    assert ("not by Nsight Systems" in caplog.text) is (state != "works")
    files = sorted(path.stem for path in (tmp_path / "stats").iterdir())
    expected = ["report_cuda_api_sum", "report_cuda_gpu_trace", "report_nvtx_gpu_proj_trace"]
    assert files == ([] if state == "works" else expected)


def test_the_program_under_nsys_imports_this_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.chdir(tmp_path)
    result = tmp_path / "found"
    code = "import mla_var3, sys; open(sys.argv[1], 'w').write(mla_var3.__file__)"
    nsys._run([sys.executable, "-c", code, str(result)], result)
    assert result.read_text() == mla_var3.__file__


END = 40
points = st.integers(0, END)
interval_lists = st.lists(st.tuples(points, points).map(lambda p: (min(p), max(p))), max_size=8)
interval_sets = st.lists(interval_lists, max_size=5)


def covered(found: list[Interval]) -> set[int]:
    return {time for start, end in found for time in range(start, end)}


def is_canonical(found: list[Interval]) -> bool:
    flat = [time for interval in found for time in interval]
    return all(a < b for a, b in itertools.pairwise(flat))


@given(interval_lists)
def test_union_length_and_gaps(some):
    busy = covered(some)
    assert is_canonical(union(some))
    assert covered(union(some)) == busy
    assert length(some) == len(busy)
    assert is_canonical(gaps(some))
    assert covered(gaps(some)) == (set(range(min(busy), max(busy))) - busy if busy else set())


@given(interval_sets)
def test_overlap_counts_each_set_once(sets):
    members = [covered(found) for found in sets]
    expected = sum(sum(time in member for member in members) >= 2 for time in range(END))
    assert overlap(sets) == expected
    assert expected <= most_overlap([length(found) for found in sets])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_the_possible_overlap_can_be_reached(lengths):
    """Members laid on a circle one after another overlap as long as possible (wrap-around rule)."""
    sets: list[list[Interval]] = []
    place = 0
    width = max(max(lengths), (sum(lengths) + 1) // 2)
    for size in lengths:
        end = place + size
        sets.append([(place, min(end, width)), (0, max(0, end - width))])
        place = end % width if width else 0
    assert [length(found) for found in sets] == lengths
    assert overlap(sets) == most_overlap(lengths)
