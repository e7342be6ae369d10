"""Rows, records, contenders, timers and a fake GPU for the benchmark tests."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mla_var3.bench import contenders as bench_contenders
from mla_var3.bench import measure as bench_measure
from mla_var3.bench import run as bench_run
from mla_var3.bench import session as bench_session
from mla_var3.bench.contenders import Contender, Ready, TuneBudget
from mla_var3.bench.record import CALL, LATENT, OURS, PEER, PROJECTION, BenchRecord, BenchRow
from mla_var3.conf.devices import device_spec
from mla_var3.errors import CheckFailedError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime import workflow
from mla_var3.runtime.measure import Timing

DEVICE = "NVIDIA H200"
AROUND: dict[str, Any] = {
    "device": DEVICE,
    "date": "2030-01-02T03:04:05+00:00",
    "command": "hyper-mla bench figures",
    "versions": {"hyper-mla": "0.1.0", "torch": "2.9", "cuda-tile": "1.7.0", "driver": "580"},
}
PROBLEM = MlaProblem(b=32, s=16, t=4096, h=128)


def row(
    kernel: str = "flash_mla",
    time_us: float | None = 1000.0,
    *,
    s: int = 16,
    t: int = 4096,
    source: str = OURS,
    **changes: Any,
) -> BenchRow:
    """A measured row at b=32 h=128; the FLOPs and bytes are those of about 600 TFLOP/s."""
    values: dict[str, Any] = {
        **{"problem": MlaProblem(b=32, s=s, t=t, h=128), "kernel": kernel, "source": source},
        **{"kind": "measured", "path": LATENT, "timer": "cuda-graph", "runs": 60},
        **{"time_us": time_us, "spread_us": 5.0, "rounds_us": (1001.0, 999.0, 1000.0)},
        **{"flops": 6e11, "bytes": 3e8, "error": 1.9e-3, "projections_us": 40.0},
        "language": "cutile-dsl" if source == OURS else "",
    }
    return BenchRow(**{**values, **AROUND, **changes})


def peer(kernel: str = "FlashMLA", time_us: float | None = 900.0, **changes: Any) -> BenchRow:
    return row(kernel, time_us, source=PEER, **changes)


def record(*rows: BenchRow, **changes: Any) -> BenchRecord:
    gpu = {"name": DEVICE, "driver": "580", "power_limit_w": 700.0}
    environment = {**AROUND, "gpu": gpu, "git": {"commit": "abc", "dirty": True}}
    return BenchRecord("figures", environment, list(rows), **changes)


def fake_contender(
    kernel: str,
    log: list[str],
    *,
    error: float = 1e-3,
    broken: BaseException | None = None,
    on_build: Callable[[str], None] = lambda name: None,
    source: str = OURS,
    language: str = "cutile-dsl",
    path: str = LATENT,
    choices: dict[str, int] | None = None,
    note: str = "",
    **fields: Any,
) -> Contender:
    """A contender that notes in `log` what is done with it."""

    def check() -> float:
        log.append(f"check {kernel}")
        if error > 0.01:
            raise CheckFailedError(f"relative error {error}")
        return error

    def build() -> Ready:
        log.append(f"build {kernel}")
        if broken is not None:
            raise broken
        on_build(kernel)
        run = partial(log.append, f"run {kernel}")
        return Ready(run, check, Cost(2e9, 1e6), path, choices or {}, note)

    return Contender(kernel, source, build, language, **fields)


class FakeTimer:
    """Runs once and gives out the next of some medians, with 1 us of spread on either side."""

    def __init__(self, *medians: float) -> None:
        self.medians = list(medians) or [100.0]
        self.calls = 0

    def __call__(self, run: Callable[[], None]) -> Timing:
        run()
        median = self.medians[self.calls % len(self.medians)]
        self.calls += 1
        return Timing(median, median - 1, median + 1, median - 2, 20, "cuda-graph", True)


class FakeGpu:
    """An H200 on which named contenders break; some destroy the context."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.budget: TuneBudget | None = None
        self.broken: dict[str, BaseException] = {}
        self.deadly: set[str] = set()
        self.dead = False
        patch.setattr(bench_run, "cuda_available", lambda: True)
        patch.setattr(workflow, "cuda_available", lambda: True)
        for module in (bench_session, workflow):
            patch.setattr(module, "current_device_spec", lambda: device_spec("H200"))
        patch.setattr(bench_session, "cuda_is_healthy", self.healthy)
        patch.setattr(bench_contenders, "contenders", self.contenders)
        patch.setattr(bench_measure, "gpu_timer", lambda seconds: FakeTimer())
        patch.setattr(bench_measure, "warm_up", lambda: self.log.append("warm up"))
        patch.setattr(bench_measure, "release_memory", lambda: None)
        patch.setattr(bench_measure, "cuda_is_healthy", self.healthy)

    def contenders(self, case: Any, _: Any, target: str, **options: Any) -> list[Contender]:
        assert target == "sm_90"
        assert set(options) == {"tune", "progress"}
        self.budget = options["tune"]
        fake = partial(fake_contender, log=self.log, on_build=self._built)
        found = []
        if case.call:
            note = "flash_mla (cute-dsl, kernel): fastest"
            found = [fake("mla_attention", path=CALL, language="", note=note)]
            for name in ("query projection", "output projection"):
                found.append(fake(name, source=PROJECTION, path="", language=""))
        for choice in case.kernels:
            kernel, fields = choice.kernel, dict(choice.fields)
            own = {"language": kernel.language, "choices": fields, "asked": fields}
            found.append(fake(kernel.full_name, **own))
        return found + [fake(name, source=PEER, language="") for name in case.peers]

    def _built(self, name: str) -> None:
        if name in self.broken:
            raise self.broken[name]
        if self.dead:
            raise RuntimeError("CUDA error: an earlier error")
        self.dead = name in self.deadly
        if self.dead:
            raise RuntimeError("CUDA error: illegal address")

    def healthy(self) -> bool:
        return not self.dead
