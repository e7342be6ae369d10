"""Predictions over a sweep of the query length, per device, with what they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mla_var3.conf.devices import DeviceSpec, Value
from mla_var3.op.mla.model.designs import Crossover, crossovers, design_estimates
from mla_var3.op.mla.model.times import IDEAL, Estimate
from mla_var3.op.mla.problem import MlaProblem

S_VALUES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LONGEST_COMPARED = 1024
"""Crossovers predict every query length, which takes minutes for those of a whole prompt."""


@dataclass(frozen=True)
class DeviceSweep:
    """Predicted times of all designs on one device.

    Attributes:
        spec: The device.
        problem: The problem; its s is replaced by each of `s_values`.
        s_values: The sweep.
        predictions: Design -> one estimate per value of s.
        crossovers: For which s each design has the least call time, up to the last of `s_values`
            or 1024; empty where times are ideal.
    """

    spec: DeviceSpec
    problem: MlaProblem
    s_values: tuple[int, ...]
    predictions: dict[str, list[Estimate]]
    crossovers: list[Crossover]

    @property
    def rates(self) -> dict[str, tuple[str, Value]]:
        """Compute and memory rate: "burst" where measured, else "vendor peak", and the entry."""
        dtype = f"{self.problem.dtype}_float32_tflops"
        return {"compute": _rate(self.spec, dtype), "memory": _rate(self.spec, "dram_bw_GBps")}

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.spec.name

    @property
    def target(self) -> str:
        """GPU code."""
        return self.spec.target

    @property
    def fitted(self) -> bool:
        """Whether every design was timed on the device, so that they can be ranked."""
        return all(values[0].fitted for values in self.predictions.values())

    @property
    def heading(self) -> str:
        """What the call times are."""
        if not self.fitted:
            return IDEAL
        steady = all(values[0].steady_call_us is not None for values in self.predictions.values())
        return f"{'steady' if steady else 'burst'} call time by recorded rates"

    def at(self, s: int) -> dict[str, Estimate]:
        """Predictions for one query length, which need not be part of the sweep."""
        return design_estimates(replace(self.problem, s=s), self.spec)

    def resampled(self, s_values: Sequence[int]) -> DeviceSweep:
        """The same device and problem over other query lengths up to the same last one."""
        points = [self.at(s) for s in s_values]
        kernels = {kernel: [point[kernel] for point in points] for kernel in self.predictions}
        return replace(self, s_values=tuple(s_values), predictions=kernels)

    def range_of(self, kernel: str) -> str:
        """The query lengths for which a design has the least call time, in words."""
        found = [_range_text(c, self.s_values[-1]) for c in self.crossovers if c.kernel == kernel]
        return " and ".join(found) or "never"

    def fastest(self, index: int) -> str | None:
        """The design of least call time at one point of the sweep; None where times are ideal."""
        if not self.fitted:
            return None
        at = {kernel: values[index].advised_us for kernel, values in self.predictions.items()}
        return min(at, key=at.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "device": self.device,
            "target": self.target,
            "heading": self.heading,
            "rates": {
                name: {**asdict(value), "measured": origin == "burst"}
                for name, (origin, value) in self.rates.items()
            },
            "problem": asdict(self.problem),
            "s": list(self.s_values),
            "predicted": {
                kernel: [
                    {"s": s, **estimate.to_dict()}
                    for s, estimate in zip(self.s_values, values, strict=True)
                ]
                for kernel, values in self.predictions.items()
            },
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
        }


def _rate(spec: DeviceSpec, key: str) -> tuple[str, Value]:
    if f"burst_{key}" in spec:
        return "burst", spec.entry(f"burst_{key}")
    return "vendor peak", spec.entry(f"peak_{key}")


def sweep(problem: MlaProblem, spec: DeviceSpec, s_values: Sequence[int] = S_VALUES) -> DeviceSweep:
    """Predict all designs on a device for each query length."""
    points = [design_estimates(replace(problem, s=s), spec) for s in s_values]
    last = min(s_values[-1], _LONGEST_COMPARED)
    return DeviceSweep(
        spec=spec,
        problem=problem,
        s_values=tuple(s_values),
        predictions={kernel: [point[kernel] for point in points] for kernel in points[0]},
        crossovers=crossovers(problem, spec, s_max=last) if len(s_values) > 1 else [],
    )


def crossover_text(sweep: DeviceSweep) -> str:
    """The fastest design by query length, in words."""
    if not sweep.crossovers:
        return f"not ranked ({IDEAL})"
    last = sweep.crossovers[-1].s_to
    return ", ".join(f"{c.kernel} for {_range_text(c, last)}" for c in sweep.crossovers)


def _range_text(crossover: Crossover, last: int) -> str:
    if crossover.s_to >= last:
        return f"s >= {crossover.s_from}"
    if crossover.s_from == crossover.s_to:
        return f"s = {crossover.s_from}"
    return f"s = {crossover.s_from}..{crossover.s_to}"
