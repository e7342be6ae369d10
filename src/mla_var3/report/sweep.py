"""Predictions over a sweep of the query length on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.op.mla.model.designs import design_estimates
from mla_var3.op.mla.model.times import IDEAL, Estimate
from mla_var3.op.mla.problem import MlaProblem


@dataclass(frozen=True)
class DeviceSweep:
    """Predicted times of all designs on one device, an estimate per value of s."""

    spec: DeviceSpec
    problem: MlaProblem
    s_values: tuple[int, ...]
    predictions: dict[str, list[Estimate]]

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

    def fastest(self, index: int) -> str | None:
        """The design of least call time at one point of the sweep; None where times are ideal."""
        if not self.fitted:
            return None
        at = {kernel: values[index].advised_us for kernel, values in self.predictions.items()}
        return min(at, key=at.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        predicted = {
            kernel: [{"s": s, **x.to_dict()} for s, x in zip(self.s_values, values, strict=True)]
            for kernel, values in self.predictions.items()
        }
        what = {"device": self.spec.name, "target": self.spec.target, "heading": self.heading}
        sizes = {"problem": asdict(self.problem), "s": list(self.s_values)}
        return {**what, **sizes, "predicted": predicted}


def sweep(problem: MlaProblem, spec: DeviceSpec, s_values: Sequence[int]) -> DeviceSweep:
    """Predict all designs on a device for each query length."""
    points = [design_estimates(replace(problem, s=s), spec) for s in s_values]
    predictions = {kernel: [point[kernel] for point in points] for kernel in points[0]}
    return DeviceSweep(spec, problem, tuple(s_values), predictions)
