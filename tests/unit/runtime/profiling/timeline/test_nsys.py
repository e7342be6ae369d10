"""Nsys mode: finding the tool, the command lines, the fallback and the artifacts."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
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
from mla_var3.runtime.profiling.timeline import launch as timeline_launch
from mla_var3.runtime.profiling.timeline import nsys as timeline_nsys
from mla_var3.runtime.profiling.timeline import target as timeline_target
from mla_var3.runtime.profiling.timeline.launch import RunCounts, head_start_cycles, stage_ranges
from mla_var3.runtime.profiling.timeline.model import CUPTI
from mla_var3.runtime.profiling.timeline.nsys import Nsys, find_nsys
from mla_var3.runtime.profiling.timeline.outline import outline
from mla_var3.runtime.profiling.timeline.trace import read_chrome_trace
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
        ({"version": "unknown"}, "to name a version"),
        ({"version_code": 1}, "to name a version"),
        ({"stats_code": 1}, "`nsys stats` fails.*no report tool.*incomplete"),
    ],
)
def test_an_unusable_installation_says_why(
    arguments: dict[str, Any], message: str, stand_in: Any
) -> None:
    stand_in(**arguments)
    with pytest.raises(MissingToolError, match=message):
        find_nsys()


def test_no_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"nsys 2023\.2 or newer on PATH, got none"):
        find_nsys()


def test_the_command_lines() -> None:
    assert timeline_nsys.profile_command(TOOL, Path("out/report"), Path("request.json")) == [
        *("/opt/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--force-overwrite=true", "-o", "out/report", sys.executable, "-m"),
        *("mla_var3.runtime.profiling.timeline.target", "request.json"),
    ]
    assert timeline_nsys.stats_command(TOOL, Path("out/report.nsys-rep"), Path("stats/report")) == [
        *("/opt/nsys", "stats", "--report"),
        "cuda_gpu_trace,nvtx_gpu_proj_trace,cuda_api_sum,cuda_api_trace",
        *("--format", "csv", "--force-export=true", "--force-overwrite=true"),
        *("--output", "stats/report", "out/report.nsys-rep"),
    ]


def test_a_failing_profile_run_shows_the_last_lines(stand_in: Any, tmp_path: Path) -> None:
    tool = Nsys(stand_in(), "2025.3.1")
    with pytest.raises(UnsupportedError, match=r"expected report\.nsys-rep, got exit code 3"):
        timeline_nsys.collect_with_nsys(tool, tmp_path / "request.json", tmp_path)


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
    with stage_ranges(stage, note):
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
    timeline_launch.record_runs(kernel, Range, RunCounts(queued=2, host_paced=1, settling=1))
    assert log == [
        *("hyper_mla_settle@k", "k", "end"),
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
    timeline_target.write_request(path, prepared.plan, prepared.stage, counts)
    spec, again = timeline_target.read_request(path)
    assert again == counts
    assert spec.build_plan() == prepared.plan
    assert [entry["kernel"] for entry in spec.tilings] == list(NAMES)


def test_all_artifacts_of_the_recorded_trace(
    prepared: Prepared, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mla_var3")
    collected = nsys.Collected(read_chrome_trace(TRACE), "Recorded by a test.")
    result = nsys.summarise(prepared, collected, tmp_path)
    assert result.get_total_time_us() == (347.583 + 340.031) / 2
    assert [stage.name for stage in result.stages] == list(NAMES)
    assert result.stages[3].extra["stream"] == 7
    record = json.loads((tmp_path / "params.json").read_text())
    (overlap,) = record["total"]["extra"]["overlap"]
    assert overlap["group"] == OVERLAP.name
    assert overlap["overlap_percent"] == pytest.approx(11.1, abs=0.1)
    assert record["timeline"]["source"] == CUPTI
    assert record["clocks"]["locked"] is False
    assert "clocks not locked" in caplog.text
    report = (tmp_path / "report.md").read_text()
    assert "Recorded by a test." in report
    assert "GPU clocks: clocks not locked; scripts/lock-gpu-clock.sh locks them" in report
    assert "| overlap |" in report
    assert (tmp_path / "timeline.png").is_file()
    assert sorted(p.stem for p in (tmp_path / "tiling").iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("failure", ["missing", "broken"])
def test_without_nsight_systems_cupti_collects_and_says_so(
    failure: str,
    prepared: Prepared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mla_var3")

    def find() -> Nsys:
        if failure == "missing":
            raise MissingToolError("Nsight Systems: got none")
        return TOOL

    def broken(*_: object) -> Any:
        raise UnsupportedError("nsys profile: no report")

    def record(stage: Stage, counts: RunCounts, trace: Path) -> Any:
        trace.write_bytes(TRACE.read_bytes())
        return read_chrome_trace(trace)

    monkeypatch.setattr(nsys, "wait_for_device", lambda kernel: None)
    monkeypatch.setattr(nsys, "find_nsys", find)
    monkeypatch.setattr(nsys, "collect_with_nsys", broken)
    monkeypatch.setattr(nsys, "collect_with_torch", record)
    collected = nsys.collect(prepared, RunCounts(), tmp_path)
    assert "CUPTI through torch.profiler, in process" in collected.how
    assert "There is no `report.nsys-rep`" in collected.how
    assert "instead of Nsight Systems" in caplog.text
    assert sorted(p.name for p in (tmp_path / "stats").iterdir()) == [
        "report_cuda_api_sum.csv",
        "report_cuda_gpu_trace.csv",
        "report_nvtx_gpu_proj_trace.csv",
    ]


def test_the_cpu_has_no_timeline(prepared: Prepared) -> None:
    with pytest.raises(UnsupportedError, match="expected a GPU for nsys mode"):
        nsys.nsys_profile_plan(prepared.plan, options=RunOptions(device="cpu"))
