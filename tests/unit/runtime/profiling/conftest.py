"""A pretended GPU, for every mode that measures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.runtime.check import check_stage
from mla_var3.runtime.measure import Timing, summarise
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import common, event
from mla_var3.runtime.workflow import Prepared, RunOptions

H200 = device_spec("NVIDIA H200")


@dataclass
class PretendedGpu:
    """What the modes ask of a machine; its tensors are on the CPU, or are none."""

    where: str = "cpu"
    tuning: dict[str, Any] = field(default_factory=dict)
    time_us: Callable[[], float] = lambda: 50.0
    timed: list[int | None] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def prepare(self, plan: KernelPlan, options: RunOptions) -> Prepared:
        self.log.append("prepare")
        plan = plan.on_device(H200).for_target("sm_90")
        inputs = plan.prepare_inputs(self.where)
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
