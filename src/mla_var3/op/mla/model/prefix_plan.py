"""What sharing first tokens gains: copied per request, shared in latent form, or decompressed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.model.designs import estimate
from mla_var3.op.mla.model.times import Estimate, Workload
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.window.formats import PLAIN

COPIED, LATENT, DECOMPRESSED = "copied", "latent", "decompressed"
KERNELS = {COPIED: "flash_mla", LATENT: "flash_mla_prefix", DECOMPRESSED: "mla_var6_plus_v6"}
"""Way to attend to shared tokens -> its kernel, in CuTe DSL."""
HOPPER = (9, 0)
GROUPED = "mla_var6_plus_v6_groups"
"""The decompressed way for several groups."""


@dataclass(frozen=True)
class PrefixWay:
    """One way to attend to shared tokens.

    Attributes:
        name: "copied", "latent" or "decompressed".
        copy_bytes: memory of decompressed copies in one layer.
        estimate: kernel and call time per layer.
    """

    name: str
    copy_bytes: int
    estimate: Estimate


@dataclass(frozen=True)
class PrefixPlan:
    """The ways, and the fastest one within a budget.

    Attributes:
        layers: layers that share the budget.
        budget_bytes: memory for decompressed copies, of all layers.
        ways: all of them, "copied" first.
        chosen: the one of least call time whose copies fit, steady where that is known.
    """

    shared: SharedPrefixProblem
    device: str
    layers: int
    budget_bytes: int
    ways: tuple[PrefixWay, ...]
    chosen: PrefixWay

    @property
    def fitted(self) -> bool:
        """Whether all times rest on recorded kernels; otherwise they are no advice."""
        return all(way.estimate.fitted for way in self.ways)

    def gain(self, way: PrefixWay) -> float:
        """How many times as fast a way is as copies."""
        return self.ways[0].estimate.advised_us / way.estimate.advised_us

    def fits(self, way: PrefixWay) -> bool:
        """Whether the copies of a way are within the budget."""
        return way.copy_bytes * self.layers <= self.budget_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            "predicted": True,
            "problem": asdict(self.shared.problem),
            "prefix": self.shared.prefix,
            "groups": self.shared.groups,
            "device": self.device,
            "fitted": self.fitted,
            "layers": self.layers,
            "budget_bytes": self.budget_bytes,
            "chosen": self.chosen.name,
            "ways": {
                way.name: {
                    "copy_bytes": way.copy_bytes,
                    "gain": self.gain(way),
                    **way.estimate.to_dict(),
                }
                for way in self.ways
            },
        }


def plan_prefix(
    shared: SharedPrefixProblem, spec: DeviceSpec, budget_bytes: int, layers: int = 1
) -> PrefixPlan:
    """Compare the ways to attend to shared tokens, with memory for copies of all layers.

    Raises:
        InvalidArgumentError: no kernel shares tokens on the device.
    """
    require_int("budget", budget_bytes, minimum=1)
    require_int("layers", layers, minimum=1)
    if spec.compute_capability != HOPPER:
        expected = "a GPU of compute capability 9.0, which the kernels are for"
        raise InvalidArgumentError("device", expected, spec.name)
    problem, prefix = shared.problem, shared.prefix
    ways = []
    for name, kernel in KERNELS.items():
        copy = name == DECOMPRESSED
        if copy and shared.groups > 1:
            kernel = GROUPED
        work = Workload(problem, prefix=prefix if copy else 0, shared=prefix, groups=shared.groups)
        found = estimate(kernel, work, spec, "cute-dsl")
        assert found is not None
        copy_bytes = shared.groups * prefix * PLAIN.token_bytes(problem) if copy else 0
        ways.append(PrefixWay(name, copy_bytes, found))
    fitting = [way for way in ways if way.copy_bytes * layers <= budget_bytes]
    chosen = min(fitting, key=lambda way: way.estimate.advised_us)
    return PrefixPlan(shared, spec.name, layers, budget_bytes, tuple(ways), chosen)
