"""Event mode with a pretended GPU: the order of things, the figures, the artifacts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mla_var3.conf.devices import device_spec
from mla_var3.errors import CheckFailedError, MissingToolError
from mla_var3.runtime.check import check_stage
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.measure import Timing, summarise
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import common, event
from mla_var3.runtime.profiling.event import event_profile_plan
from mla_var3.runtime.workflow import Prepared, RunOptions
from tests.unit.runtime.runtime_support import DoublingPlan

H200 = device_spec("NVIDIA H200")


@dataclass
class TwicePlan(DoublingPlan):
    """Two kernels in order."""

    def reference_fn(self, *inputs: Tensor, compute_dtype: Any = None) -> tuple[Tensor, ...]:
        return ((inputs[0].float() * 4).to(compute_dtype or inputs[0].float().dtype),)

    def plan(self, *inputs: Tensor) -> Any:
        first = super().plan(*inputs)
        second = super().plan(*first.output_tensors)
        first.kernel_fn, second.kernel_fn = "first", "second"
        second.log = first.log
        return KernelPipeline(_name="twice", stages=[first, second])


@dataclass
class SameTwicePlan(TwicePlan):
    """The same kernel twice."""

    def plan(self, *inputs: Tensor) -> Any:
        stage = super().plan(*inputs)
        for part in stage.stages:
            part.kernel_fn = "first"
        return stage


@dataclass
class PretendedGpu:
    """What event mode asks of the machine."""

    tuning: dict[str, Any] = field(default_factory=dict)
    time_us: Callable[[], float] = lambda: 50.0
    timed: list[int | None] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def prepare(self, plan: KernelPlan, options: RunOptions) -> Prepared:
        self.log.append("prepare")
        plan = plan.on_device(H200).for_target("sm_90")
        inputs = plan.prepare_inputs("cpu")
        stage = plan.plan(*inputs)
        check = check_stage(plan, inputs, stage) if options.check else None
        return Prepared(plan, inputs, stage, H200, self.tuning, check)

    def time_gpu(self, launch: Callable[[], None], runs: int | None = None) -> Timing:
        launch()
        self.timed.append(runs)
        self.log.append("time")
        median = self.time_us()
        samples = [median - 1.0, median, median + 1.0]
        return summarise(samples, timer="cuda-event", cold_l2=True)

    def compile_report(self, kernel: Any, target: str, artifacts_dir: Path) -> None:
        self.log.append(f"compile {kernel.name} for {target}")
        artifacts_dir.mkdir(parents=True)
        (artifacts_dir / f"{kernel.name}.{target}.cubin").write_bytes(b"code")

    @contextmanager
    def device_lock(self, device: str) -> Iterator[None]:
        self.log.append(f"lock {device}")
        yield
        self.log.append("unlock")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    machine = PretendedGpu()
    monkeypatch.setattr(common, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(common, "prepare", machine.prepare)
    monkeypatch.setattr(common, "current_device_name", lambda: "GPU-0")
    monkeypatch.setattr(common, "device_lock", machine.device_lock)
    monkeypatch.setattr(common, "compile_report", machine.compile_report)
    monkeypatch.setattr(event, "time_gpu", machine.time_gpu)
    return machine


def test_a_pipeline_is_timed_as_a_whole_and_by_stage(gpu):
    times = iter((50.0, 20.0, 31.0))
    gpu.time_us = lambda: next(times)
    result = event_profile_plan(TwicePlan(), bench_runs=7)
    assert result.get_total_time_us() == 50.0
    assert [(stage.name, stage.time_us) for stage in result.stages] == [
        ("first", 20.0),
        ("second", 31.0),
    ]
    assert gpu.timed == [7, 7, 7]


def test_a_kernel_that_runs_twice_has_two_rows_and_two_folders(gpu, tmp_path):
    times = iter((50.0, 20.0, 31.0))
    gpu.time_us = lambda: next(times)
    result = event_profile_plan(SameTwicePlan(), out_dir=tmp_path)
    rows = [(stage.name, stage.time_us) for stage in result.stages]
    assert rows == [("first", 20.0), ("first.2", 31.0)]
    assert [row["name"] for row in result.record["stages"]] == ["first", "first.2"]
    assert {path.name for path in (tmp_path / "compiled").iterdir()} == {"first", "first.2"}


def test_a_kernel_that_runs_twice_is_not_lost_in_other_modes():
    """Modes without times list the kernels by the same names."""
    plan = SameTwicePlan()
    stage = plan.plan(*plan.prepare_inputs("cpu"))
    rows = common.kernel_figures(stage, H200, "bfloat16")
    assert [row.name for row in rows] == ["first", "first.2"]


def test_timing_holds_the_device_and_comes_after_preparing(gpu):
    event_profile_plan(TwicePlan())
    assert gpu.log == [
        *("lock GPU-0", "prepare", "time", "time", "time"),
        *("compile first for sm_90", "compile second for sm_90", "unlock"),
    ]


def test_a_wrong_result_is_never_timed(gpu):
    with pytest.raises(CheckFailedError, match="output 0"):
        event_profile_plan(DoublingPlan(error=1.0), options=RunOptions(check=True))
    assert gpu.timed == []


def test_artifacts(gpu, tmp_path):
    history = tmp_path / "history.json"
    history.write_text('{"results": []}')
    gpu.tuning = {"first": type("Tuning", (), {"path": history})()}
    result = event_profile_plan(
        TwicePlan(), out_dir=tmp_path / "here", options=RunOptions(check=True)
    )
    assert result.out_dir == tmp_path / "here"
    found = {
        str(path.relative_to(result.out_dir))
        for path in result.out_dir.rglob("*")
        if path.is_file()
    }
    assert found == {
        "report.md",
        "params.json",
        "tiling/first.json",
        "tiling/second.json",
        "tiling/first/autotuning.json",
        "compiled/first/first.sm_90.cubin",
        "compiled/second/second.sm_90.cubin",
    }


def test_a_time_above_the_roofline_is_called_wrong(gpu, tmp_path):
    gpu.time_us = lambda: 1e-9
    result = event_profile_plan(DoublingPlan(b=1000), out_dir=tmp_path)
    assert result.record["above_roofline"] is True
    assert "treat this measurement as wrong until explained" in (tmp_path / "report.md").read_text()


def test_a_missing_disassembler_does_not_lose_the_measurement(gpu, tmp_path, monkeypatch):
    """A GPU host often has no nvdisasm; the times are in by then."""

    def fail(kernel: Any, target: str, artifacts_dir: Path) -> None:
        raise MissingToolError("nvdisasm: expected the program, got none")

    monkeypatch.setattr(common, "compile_report", fail)
    result = event_profile_plan(DoublingPlan(), out_dir=tmp_path)
    assert result.get_total_time_us() == 50.0
    assert json.loads((tmp_path / "params.json").read_text())["total"]["time_us"] == 50.0
    assert "nvdisasm" in (tmp_path / "report.md").read_text()
