"""Rows, records, contenders and timers for the benchmark tests; no GPU and no peer needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mla_var3.bench.contenders import Ready
from mla_var3.bench.record import ABSORBED, MEASURED, OURS, PEER, BenchRecord, BenchRow
from mla_var3.errors import CheckFailedError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.problem import MlaProblem
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
    ours = source == OURS
    values: dict[str, Any] = {
        "problem": MlaProblem(b=32, s=s, t=t, h=128),
        "kernel": kernel,
        "source": source,
        "kind": MEASURED,
        "path": ABSORBED,
        "language": "cutile-dsl" if ours else "",
        "time_us": time_us,
        "spread_us": 5.0,
        "rounds_us": (1001.0, 999.0, 1000.0),
        "runs": 60,
        "timer": "cuda-graph",
        "flops": 6e11,
        "bytes": 3e8,
        "error": 1.9e-3,
        "projections_us": 40.0,
        **AROUND,
    }
    return BenchRow(**{**values, **changes})


def peer(kernel: str = "FlashMLA", time_us: float | None = 900.0, **changes: Any) -> BenchRow:
    return row(kernel, time_us, source=PEER, **changes)


def record(*rows: BenchRow, **changes: Any) -> BenchRecord:
    environment = {
        "date": AROUND["date"],
        "command": AROUND["command"],
        "versions": AROUND["versions"],
        "gpu": {"name": DEVICE, "driver": "580", "power_limit_w": 700.0},
        "git": {"commit": "abc", "dirty": True},
    }
    return BenchRecord("figures", environment, list(rows), **changes)


@dataclass
class FakeContender:
    """Notes in `log` what is done with it."""

    kernel: str
    log: list[str]
    error: float = 1e-3
    source: str = OURS
    path: str = ABSORBED
    broken: Exception | None = None
    language: str = "cutile-dsl"
    choices: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, int]:
        return {"n": 7}

    def build(self) -> Ready:
        self.log.append(f"build {self.kernel}")
        if self.broken is not None:
            raise self.broken
        return Ready(self._run, self._check, Cost(2e9, 1e6), self.path, self.choices)

    def _run(self) -> None:
        self.log.append(f"run {self.kernel}")

    def _check(self) -> float:
        self.log.append(f"check {self.kernel}")
        if self.error > 0.01:
            raise CheckFailedError(f"relative error {self.error}")
        return self.error


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
