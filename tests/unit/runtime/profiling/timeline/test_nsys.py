"""Nsys mode: finding the tool, the command lines, the fallback and the artifacts."""

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.profiling import nsys
from mla_var3.runtime.profiling.timeline import collect as timeline_collect
from mla_var3.runtime.profiling.timeline.analysis import outline
from mla_var3.runtime.profiling.timeline.collect import ranges_below, record_with_nsys
from mla_var3.runtime.profiling.timeline.model import read_chrome_trace
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import Prepared
from tests.programs import write_script
from tests.unit.runtime.profiling.timeline.timeline_support import NAMES, OVERLAP, PIPE, TRACE
from tests.unit.runtime.runtime_support import fake_kernel

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
    monkeypatch.setattr(timeline_collect, "find_tool", lambda name: program)
    fails = pytest.raises(UnsupportedError, match=message)
    with fails if message else contextlib.nullcontext():
        record_with_nsys(prepared.plan, prepared.stage, 20, folder)
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    report = ["report.nsys-rep"] if profile == 0 else []
    assert left == (report if message else [*report, "stats", "stats/report_cuda_gpu_trace.csv"])


def test_warnings_of_the_torch_profiler_are_logged(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mla_var3")

    def record(stage: Stage, make_range: Any, runs: int) -> None:
        with make_range("hyper_mla@k"):
            warnings.warn("raw text of torch", stacklevel=1)

    monkeypatch.setattr(timeline_collect, "wait_for_device", lambda name: None)
    monkeypatch.setattr(timeline_collect, "record_runs", record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timeline = timeline_collect.record_with_torch(fake_kernel("k"), 20, tmp_path / "trace.json")
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

    class Range(contextlib.AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            log.append(name)

        def __exit__(self, *_: object) -> None:
            log.append("end")

    clock = SimpleNamespace(flush_l2=lambda: log.append("flush"))
    monkeypatch.setattr(timeline_collect, "CudaClock", lambda: clock)
    monkeypatch.setattr(timeline_collect, "wait_for_device", lambda name: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: log.append("spin"))
    kernel = fake_kernel("k", log)
    timeline_collect.record_runs(kernel, Range, queued=2, host_paced=1, warmup=1)
    assert log == [
        *("hyper_mla_warmup@k", "k", "end"),
        *("flush", "spin", "hyper_mla@k", "k", "end"),
        *("flush", "spin", "hyper_mla@k", "k", "end"),
        *("hyper_mla_host@k", "k", "end"),
    ]


@pytest.fixture
def prepared() -> Prepared:
    from mla_var3.runtime.paths import find_kernel, plan_class

    plan = plan_class(find_kernel("mla_var6_plus"))(b=4, s=16, t=2048, n=512)
    return Prepared(plan, (), pipeline(), device_spec("NVIDIA H200"))


def test_all_artifacts_of_the_recorded_trace(prepared, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mla_var3")
    result = nsys.summarise(prepared, read_chrome_trace(TRACE), "Recorded by a test.", tmp_path)
    assert outline(prepared.stage) == PIPE
    assert result.get_total_time_us() == 343.807
    assert [stage.name for stage in result.stages] == list(NAMES)
    assert result.stages[3].extra["stream"] == 7
    record = json.loads((tmp_path / "params.json").read_text())
    (overlap,) = record["total"]["extra"]["overlap"]
    assert overlap["group"] == OVERLAP.name
    assert overlap["overlap_percent"] == pytest.approx(11.1, abs=0.1)
    assert record["clocks"]["locked"] is False
    assert "clocks not locked" in caplog.text
    report = (tmp_path / "report.md").read_text()
    assert "Recorded by a test." in report
    assert "GPU clocks: clocks not locked; scripts/lock-gpu-clock.sh locks them" in report
    assert "| overlap |" in report
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
    timeline_collect._run([sys.executable, "-c", code, str(result)], result)
    assert result.read_text() == mla_var3.__file__
