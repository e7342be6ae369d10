"""Nsys mode: finding the tool, the command lines, the fallback and the artifacts."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.profiling import nsys
from mla_var3.runtime.profiling.timeline import collect as timeline_collect
from mla_var3.runtime.profiling.timeline.analysis import outline
from mla_var3.runtime.profiling.timeline.collect import (
    Nsys,
    RunCounts,
    find_nsys,
    head_start_cycles,
    ranges_below,
)
from mla_var3.runtime.profiling.timeline.formats import read_chrome_trace
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import Prepared, RunOptions
from tests.unit.runtime.profiling.timeline.timeline_support import NAMES, OVERLAP, PIPE, TRACE
from tests.unit.runtime.runtime_support import fake_kernel

TOOL = Nsys(Path("/opt/nsys"), "2025.3.1")

STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then
    echo "NVIDIA Nsight Systems version {version}"
    exit {version_code}
fi
if [ "$1" = stats ]; then echo "{stats_text}"; exit {stats_code}; fi
exit 3
"""

RECORDER = """#!/bin/sh
while [ $# -gt 1 ]; do
    case "$1" in
        profile) [ {profile} = 0 ] || {{ echo last words; exit {profile}; }} ;;
        stats) [ {stats} = 0 ] || exit {stats} ;;
        -o) touch "$2.nsys-rep" ;;
        --output) touch "$2_cuda_api_sum.csv" ;;
    esac
    shift
done
"""


def pipeline() -> KernelPipeline:
    first, second, third, fourth = (fake_kernel(name) for name in NAMES)
    group = ConcurrentKernels(_name="overlap", concurrent_kernels=[first, second])
    rest = KernelPipeline(_name="mla_var6_plus", stages=[third, fourth])
    return KernelPipeline(_name="pipe", stages=[group, rest])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(
        version: str = "2025.3.1.90-253135822126v0", *, version_code: int = 0, stats_code: int = 0
    ) -> Path:
        program = tmp_path / "bin" / "nsys"
        program.parent.mkdir()
        program.write_text(
            STAND_IN.format(
                version=version,
                version_code=version_code,
                stats_code=stats_code,
                stats_text="no report tool" if stats_code else "fine",
            )
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return program

    return install


def test_a_usable_installation_is_found(stand_in: Any) -> None:
    program = stand_in()
    assert find_nsys() == Nsys(program, "2025.3.1.90")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": "2021.4.1"}, r"expected version 2023\.2 or newer, got 2021\.4\.1"),
        ({"version": "unknown"}, "to print a version"),
        ({"version_code": 1}, "to print a version"),
        ({"stats_code": 1}, "`nsys stats` fails.*no report tool.*incomplete"),
    ],
)
def test_an_unusable_installation_says_why(
    arguments: dict[str, Any], message: str, stand_in: Any
) -> None:
    stand_in(**arguments)
    with pytest.raises(MissingToolError, match=message):
        find_nsys()


def test_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_collect, "find_tool", lambda name: None)
    with pytest.raises(MissingToolError, match=r"nsys 2023\.2 or newer on PATH, got none"):
        find_nsys()


def test_the_command_lines() -> None:
    assert timeline_collect.profile_command(TOOL, Path("out/report"), Path("request.json")) == [
        *("/opt/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--force-overwrite=true", "-o", "out/report", sys.executable, "-m"),
        *("mla_var3.runtime.profiling.timeline.collect", "request.json"),
    ]
    assert timeline_collect.stats_command(
        TOOL, Path("out/report.nsys-rep"), Path("stats/report")
    ) == [
        *("/opt/nsys", "stats", "--report"),
        "cuda_gpu_trace,nvtx_gpu_proj_trace,cuda_api_sum",
        *("--format", "csv", "--force-export=true", "--force-overwrite=true"),
        *("--output", "stats/report", "out/report.nsys-rep"),
    ]


@pytest.mark.parametrize(
    ("profile", "stats", "message"),
    [
        (0, 0, None),
        (3, 0, r"expected report\.nsys-rep, got exit code 3: last words"),
        (0, 4, "nsys stats .*: expected the reports .* got exit code 4"),
    ],
)
def test_recording_with_nsight_systems(
    profile: int, stats: int, message: str | None, prepared: Prepared, tmp_path: Path
) -> None:
    program = tmp_path / "nsys"
    program.write_text(RECORDER.format(profile=profile, stats=stats))
    program.chmod(0o755)
    folder = tmp_path / "out"
    folder.mkdir()
    outcome = (
        pytest.raises(UnsupportedError, match=message) if message else contextlib.nullcontext()
    )
    with outcome:
        timeline_collect.record_with_nsys(
            Nsys(program, "2025.3.1"), prepared.plan, prepared.stage, RunCounts(), folder
        )
    left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    report = ["report.nsys-rep"] if profile == 0 else []
    assert left == (report if message else [*report, "stats", "stats/report_cuda_api_sum.csv"])


def test_warnings_of_the_torch_profiler_are_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mla_var3")

    def record(stage: Stage, make_range: Any, counts: RunCounts) -> None:
        with make_range("hyper_mla@k"):
            warnings.warn("raw text of torch", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timeline_collect, "record_runs", record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timeline = timeline_collect.record_with_torch(
            fake_kernel("k"), RunCounts(), tmp_path / "trace.json"
        )
    assert [found.name for found in timeline.ranges] == ["hyper_mla@k"]
    assert "torch.profiler: raw text of torch" in caplog.text
    assert str(tmp_path) not in (tmp_path / "trace.json").read_text()


def test_the_outline_of_a_pipeline() -> None:
    assert outline(pipeline()) == PIPE
    twice = KernelPipeline(_name="twice", stages=[fake_kernel("a"), fake_kernel("a")])
    assert outline(twice).leaves == ("a", "a#2")
    assert outline(fake_kernel("a")).groups == ()


def test_nested_groups_come_after_the_outer_one() -> None:
    inner = ConcurrentKernels(_name="in", concurrent_kernels=[fake_kernel("a"), fake_kernel("b")])
    outer = ConcurrentKernels(_name="out", concurrent_kernels=[inner, fake_kernel("c")])
    groups = outline(outer).groups
    assert [group.name for group in groups] == ["out", "in"]
    assert [member.leaves for member in groups[0].members] == [(0, 1), (2,)]


def test_stages_launch_inside_their_ranges_and_are_restored() -> None:
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


def test_the_head_start_has_bounds() -> None:
    assert head_start_cycles(0.0) == 400_000
    assert head_start_cycles(3e-4) == 1_200_000
    assert head_start_cycles(9.0) == 40_000_000


def test_runs_are_recorded_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for the GPU: the order of spins, ranges and launches."""
    log: list[str] = []

    class Range(contextlib.AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            log.append(name)

        def __exit__(self, *_: object) -> None:
            log.append("end")

    fake = SimpleNamespace(L2_cache_size=1 << 20)
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: log.append("spin"))
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: zeros(1, dtype=torch.int32))
    kernel = fake_kernel("k", log)
    timeline_collect.record_runs(kernel, Range, RunCounts(queued=2, host_paced=1, warmup=1))
    assert log == [
        *("hyper_mla_warmup@k", "k", "end"),
        *("spin", "hyper_mla@k", "k", "end"),
        *("spin", "hyper_mla@k", "k", "end"),
        *("hyper_mla_host@k", "k", "end"),
    ]


@pytest.fixture
def prepared() -> Prepared:
    from mla_var3.runtime.paths import find_kernel, plan_class

    plan = plan_class(find_kernel("mla_var6_plus"))(b=4, s=16, t=2048, n=512)
    return Prepared(plan, (), pipeline(), device_spec("NVIDIA H200"))


def test_a_request_survives_the_trip(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    counts = RunCounts(queued=7)
    timeline_collect.write_request(path, prepared.plan, prepared.stage, counts)
    spec, again = timeline_collect.read_request(path)
    assert again == counts
    assert spec.build_plan() == prepared.plan
    assert [entry["kernel"] for entry in spec.tilings] == list(NAMES)


def test_all_artifacts_of_the_recorded_trace(
    prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mla_var3")
    result = nsys.summarise(prepared, read_chrome_trace(TRACE), "Recorded by a test.", tmp_path)
    assert result.get_total_time_us() == (347.583 + 340.031) / 2
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
    assert (tmp_path / "timeline.png").is_file()
    assert sorted(p.stem for p in (tmp_path / "tiling").iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("nsys_state", ["works", "missing", "broken"])
def test_cupti_always_records_and_nsight_systems_where_it_works(
    nsys_state: str,
    prepared: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mla_var3")

    def find() -> Nsys:
        if nsys_state == "missing":
            raise MissingToolError("Nsight Systems: got none")
        return TOOL

    def record_with_nsys(*_: object) -> None:
        if nsys_state == "broken":
            raise UnsupportedError("nsys profile: no report")
        (tmp_path / "stats").mkdir()

    def record_with_torch(stage: Stage, counts: RunCounts, trace: Path) -> Any:
        return read_chrome_trace(TRACE)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(nsys, "find_nsys", find)
    monkeypatch.setattr(nsys, "record_with_nsys", record_with_nsys)
    monkeypatch.setattr(nsys, "record_with_torch", record_with_torch)
    timeline, how = nsys.collect(prepared, RunCounts(), tmp_path)
    assert len(timeline.gpu) == 16
    assert "recorded by CUPTI through torch.profiler" in how
    files = sorted(path.name for path in (tmp_path / "stats").iterdir())
    if nsys_state == "works":
        assert "Nsight Systems 2025.3.1" in how
        assert files == []
        return
    assert "So there is no `report.nsys-rep`" in how
    assert "no report.nsys-rep: " in caplog.text
    assert ("WARNING" in caplog.text) is (nsys_state == "broken")
    assert files == [
        "report_cuda_api_sum.csv",
        "report_cuda_gpu_trace.csv",
        "report_nvtx_gpu_proj_trace.csv",
    ]


def test_the_cpu_has_no_timeline(prepared: Prepared) -> None:
    with pytest.raises(UnsupportedError, match="expected a GPU for nsys mode"):
        nsys.nsys_profile_plan(prepared.plan, options=RunOptions(device="cpu"))
