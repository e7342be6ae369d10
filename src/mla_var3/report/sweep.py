"""Predictions over a sweep of the query length, per device, with the rates they assume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mla_var3.conf.devices import DeviceSpec, Value
from mla_var3.op.mla.cost import Crossover, Prediction, crossovers, predict_all
from mla_var3.op.mla.problem import MlaProblem

S_VALUES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LONGEST_COMPARED = 1024
"""Crossovers predict every query length, which takes minutes for those of a whole prompt."""


@dataclass(frozen=True)
class Rate:
    """A rate that a prediction assumes, and where it comes from.

    Attributes:
        value: the number.
        unit: its unit.
        sustained: whether it was measured; otherwise it is the vendor's peak.
        kind, source, date: provenance from the device table.
    """

    value: float
    unit: str
    sustained: bool
    kind: str
    source: str
    date: str

    @property
    def origin(self) -> str:
        """One phrase for tables."""
        return f"{'sustained' if self.sustained else 'vendor peak'}, {self.source} ({self.date})"


@dataclass(frozen=True)
class DeviceSweep:
    """Predicted times of all kernels on one device.

    Attributes:
        device: name of the device.
        target: GPU code.
        compute, memory: the rates assumed.
        sm_count: SMs of the device.
        problem: the problem; its s is replaced by each of `s_values`.
        s_values: the sweep.
        predictions: kernel id -> one prediction per value of s.
        crossovers: for which s each kernel is predicted fastest, up to the last of `s_values`
            or 1024.
    """

    device: str
    target: str
    compute: Rate
    memory: Rate
    sm_count: int
    problem: MlaProblem
    s_values: tuple[int, ...]
    predictions: dict[str, list[Prediction]]
    crossovers: list[Crossover]

    @property
    def measured_rates(self) -> bool:
        """Whether both rates were measured; times at vendor peaks are ideal and rank nothing."""
        return self.compute.sustained and self.memory.sustained

    def at(self, s: int) -> dict[str, Prediction]:
        """Predictions for any query length."""
        rates = (self.compute.value, self.memory.value)
        return predict_all(replace(self.problem, s=s), *rates, sm_count=self.sm_count)

    def resampled(self, s_values: Sequence[int]) -> DeviceSweep:
        """The same device and problem over other query lengths up to the same last one."""
        points = [self.at(s) for s in s_values]
        kernels = {kernel: [point[kernel] for point in points] for kernel in self.predictions}
        return replace(self, s_values=tuple(s_values), predictions=kernels)

    def range_of(self, kernel: str) -> str:
        """The query lengths for which a kernel is predicted fastest, in words."""
        found = [_range_text(c, self.s_values[-1]) for c in self.crossovers if c.kernel == kernel]
        return " and ".join(found) or "never"

    def fastest(self, index: int) -> str:
        """The kernel predicted fastest, end to end, at one point of the sweep."""
        at = {kernel: values[index].end_to_end_us for kernel, values in self.predictions.items()}
        return min(at, key=at.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "device": self.device,
            "target": self.target,
            "rates": {"compute": asdict(self.compute), "memory": asdict(self.memory)},
            "problem": asdict(self.problem),
            "s": list(self.s_values),
            "predicted": {
                kernel: [
                    {
                        "s": s,
                        "time_us": p.time_us,
                        "end_to_end_us": p.end_to_end_us,
                        "flops": p.cost.flops,
                        "bytes": p.cost.bytes,
                        "bound": p.bound,
                        "n": p.n,
                        "splits": p.splits,
                    }
                    for s, p in zip(self.s_values, values, strict=True)
                ]
                for kernel, values in self.predictions.items()
            },
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
        }


def device_rates(spec: DeviceSpec, dtype: str) -> tuple[Rate, Rate]:
    """The compute and memory rates a prediction uses: measured ones where there are any."""
    return (
        _rate(spec, f"sustained_{dtype}_float32_tflops", f"peak_{dtype}_float32_tflops"),
        _rate(spec, "sustained_dram_bw_GBps", "peak_dram_bw_GBps"),
    )


def _rate(spec: DeviceSpec, sustained: str, peak: str) -> Rate:
    key = sustained if sustained in spec else peak
    entry: Value = spec.entry(key)
    return Rate(spec[key], entry.unit, key == sustained, entry.kind, entry.source, entry.date)


def rates_text(compute: Rate, memory: Rate) -> str:
    """The rates of a device in one short line."""
    kinds = {"measured" if rate.sustained else "vendor peak" for rate in (compute, memory)}
    numbers = ", ".join(f"{rate.value:g} {rate.unit}" for rate in (compute, memory))
    return f"{numbers} ({' and '.join(sorted(kinds))})"


def sweep(problem: MlaProblem, spec: DeviceSpec, s_values: Sequence[int] = S_VALUES) -> DeviceSweep:
    """Predict all kernels on a device for each query length."""
    compute, memory = device_rates(spec, problem.dtype)
    predictions: dict[str, list[Prediction]] = {}
    for s in s_values:
        at_s = predict_all(
            replace(problem, s=s), compute.value, memory.value, sm_count=spec.sm_count
        )
        for kernel, prediction in at_s.items():
            predictions.setdefault(kernel, []).append(prediction)
    return DeviceSweep(
        device=spec.name,
        target=spec.target,
        compute=compute,
        memory=memory,
        sm_count=spec.sm_count,
        problem=problem,
        s_values=tuple(s_values),
        predictions=predictions,
        crossovers=crossovers(
            problem, compute.value, memory.value, s_max=min(s_values[-1], _LONGEST_COMPARED)
        ),
    )


def crossover_text(sweep: DeviceSweep) -> str:
    """The fastest kernel by query length, in words."""
    last = sweep.crossovers[-1].s_to
    return ", ".join(f"{c.kernel} for {_range_text(c, last)}" for c in sweep.crossovers)


def _range_text(crossover: Crossover, last: int) -> str:
    if crossover.s_to >= last:
        return f"s >= {crossover.s_from}"
    if crossover.s_from == crossover.s_to:
        return f"s = {crossover.s_from}"
    return f"s = {crossover.s_from}..{crossover.s_to}"
