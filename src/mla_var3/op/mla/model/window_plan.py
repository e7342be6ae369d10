"""How many tokens to keep decompressed within a given amount of memory."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cost import decompressed_bytes
from mla_var3.op.mla.model.designs import window_estimate
from mla_var3.op.mla.model.mix import WORTH_MIXING, MixBound, MixModel, fastest_window
from mla_var3.op.mla.model.times import Estimate
from mla_var3.op.mla.problem import MlaProblem, require_int

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}ib": 2 ** (10 * _power), f"{_prefix}b": 10 ** (3 * _power)}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")
# Points of a curve; more would only make tables and plots larger.
_CURVE_POINTS = 64


@dataclass(frozen=True)
class PlanPoint:
    """One size of the window.

    Attributes:
        n: Decompressed tokens per request.
        window_bytes: Memory of the window in one layer, for the whole batch.
        estimate: Kernel and call time per layer, see `window_estimate`.
        sms: SMs of the latent work.
        bound: What the attention waits for.
        joules: Energy of its attention, per layer; None where it is not known.
    """

    n: int
    window_bytes: int
    estimate: Estimate
    sms: int
    bound: MixBound
    joules: float | None

    @property
    def advised_us(self) -> float:
        """Call time that advice goes by: steady where it is known."""
        return self.estimate.advised_us

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.estimate.to_dict(),
            "n": self.n,
            "window_bytes": self.window_bytes,
            "sms": self.sms,
            "bound": self.bound,
            "joules": self.joules,
        }


@dataclass(frozen=True)
class WindowPlan:
    """The window to keep, and what others would give.

    Attributes:
        problem: Sizes and lengths of one call.
        layers: Layers that share the budget.
        budget_bytes: Memory for the windows of all layers.
        multiple: Windows considered are multiples of it, or the whole cache.
        chosen: The window of least call time that fits, steady where that is known.
        unlimited: The best one if memory were no concern.
        curve: Windows from none to everything, in ascending order, the two above among them.
    """

    problem: MlaProblem
    model: MixModel
    layers: int
    budget_bytes: int
    multiple: int
    chosen: PlanPoint
    unlimited: PlanPoint
    curve: tuple[PlanPoint, ...]

    @property
    def layer_budget_bytes(self) -> int:
        """Memory for the window of one layer."""
        return self.budget_bytes // self.layers

    @property
    def fitted(self) -> bool:
        """Whether the times rest on recorded kernels; otherwise they are ideal and no advice."""
        return self.model.parameters.fitted

    def to_dict(self) -> dict[str, Any]:
        return {
            "predicted": True,
            "problem": asdict(self.problem),
            "form": asdict(self.model.form),
            "parameters": self.model.parameters.to_dict(),
            "fitted": self.fitted,
            "layers": self.layers,
            "budget_bytes": self.budget_bytes,
            "layer_budget_bytes": self.layer_budget_bytes,
            "multiple": self.multiple,
            "chosen": self.chosen.to_dict(),
            "chosen_bytes_all_layers": self.chosen.window_bytes * self.layers,
            "chosen_us_all_layers": self.chosen.advised_us * self.layers,
            "unlimited": self.unlimited.to_dict(),
            "curve": [point.to_dict() for point in self.curve],
        }


def plan_window(
    problem: MlaProblem,
    model: MixModel,
    budget_bytes: int,
    *,
    layers: int = 1,
    multiple: int = 1,
) -> WindowPlan:
    """Chooses the window of least call time within a budget, steady where that is known.

    The budget is memory for the windows of the whole batch, which all layers share evenly. Windows
    are some multiple, or the whole cache.
    """
    require_int("budget", budget_bytes, minimum=1)
    require_int("layers", layers, minimum=1)
    require_int("multiple", multiple, minimum=1)
    least_n = min(multiple, problem.t)
    least = layers * decompressed_bytes(problem, least_n, model.form)
    if budget_bytes < least:
        raise InvalidArgumentError(
            "budget",
            f"at least {least} bytes, which is {least_n} tokens of each of {problem.b} requests "
            f"in {layers} layer{'' if layers == 1 else 's'} (a unit such as GiB may follow)",
            f"{budget_bytes} bytes",
        )
    points: dict[int, PlanPoint] = {}

    def time_us(n: int) -> float:
        points.setdefault(n, plan_point(problem, model, n))
        return points[n].advised_us

    def best(most: int | None) -> int:
        """The fastest window that fits; a mix only where it clearly beats the pure paths."""
        windows = model.candidates(problem, most, multiple)
        n = fastest_window(windows, time_us)
        if not points[n].estimate.mixes or not model.parameters.fitted:
            return n
        ends = [end for end in (windows[0], windows[-1]) if not points[end].estimate.mixes]
        pure = min(ends, key=time_us)
        return n if time_us(n) < (1.0 - WORTH_MIXING) * time_us(pure) else pure

    chosen, unlimited = best(budget_bytes // layers), best(None)
    curve = plan_curve(problem, model, multiple, (chosen, unlimited))
    found = points[chosen], points[unlimited]
    return WindowPlan(problem, model, layers, budget_bytes, multiple, *found, curve)


def plan_curve(
    problem: MlaProblem, model: MixModel, multiple: int, also: tuple[int, ...] = ()
) -> tuple[PlanPoint, ...]:
    """Windows from none to everything, evenly spread multiples and those named."""
    largest = problem.longest
    step = multiple * max(1, -(-largest // (multiple * _CURVE_POINTS)))
    sizes = sorted({*range(0, largest, step), largest, *also})
    return tuple(plan_point(problem, model, n) for n in sizes)


def plan_point(problem: MlaProblem, model: MixModel, n: int) -> PlanPoint:
    """One window at its best split of the SMs."""
    at, window_bytes = model.at(problem, n), decompressed_bytes(problem, n, model.form)
    estimate, joules = window_estimate(problem, n, model), model.joules(problem, n)
    return PlanPoint(n, window_bytes, estimate, at.split, at.bound, joules)


def parse_bytes(text: str) -> int:
    """Reads a budget of memory: a number of bytes, or a number with a unit such as 1.5GiB.

    KiB, MiB, GiB and TiB are powers of 1024, kB, MB, GB and TB of 1000.
    """
    match = _AMOUNT.fullmatch(text.strip().lower())
    unit = None if match is None else _UNITS.get(match.group(2))
    if match is None or unit is None:
        raise InvalidArgumentError(
            "budget",
            "a number of bytes, or one with a unit: KiB, MiB, GiB, TiB, kB, MB, GB, TB",
            repr(text),
        )
    amount = int(float(match.group(1)) * unit) if "." in match.group(1) else int(match[1]) * unit
    if amount < 1:
        raise InvalidArgumentError("budget", "a positive amount of memory", repr(text))
    return amount
