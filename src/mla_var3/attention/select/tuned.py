"""Measured times and tuned tilings from the autotuner's histories on this machine.

A history counts when device, toolkit, sources and problem are the same as now, and not otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.autotune.history import History, history_path, median_us, tuning_key
from mla_var3.runtime.autotune.units import Unit, units_of
from mla_var3.runtime.paths import cache_root, slug
from mla_var3.runtime.stage import Tiling, tiling_from_dict


@dataclass(frozen=True)
class Measured:
    """A measured kernel time.

    Attributes:
        kernel_us: of the kernel alone.
        source: where the figure comes from.
    """

    kernel_us: float
    source: str


def local_result(plan: Any, spec: DeviceSpec) -> Measured | None:
    """The time of a plan from the autotuner's histories on this machine.

    Args:
        plan: the plan with every choice made, for the device's target.
        spec: the device.

    Returns:
        None when a kernel of the plan was not timed for exactly this problem.
    """
    total, files = 0.0, []
    for _, history in _histories(plan, spec):
        best = history.best()
        if best is None:
            return None
        total += median_us(best)
        files.append(history.path.name)
    return Measured(total, f"autotuned here ({', '.join(files)})")


def has_histories(spec: DeviceSpec) -> bool:
    """Whether anything was tuned for a device on this machine."""
    return (cache_root() / "kernel-autotune" / slug(spec.name)).is_dir()


def best_tilings(plan: Any, spec: DeviceSpec) -> dict[str, Tiling]:
    """The tilings that tuning found on this machine, by kernel name; empty where it found none."""
    if not has_histories(spec):
        return {}
    found: dict[str, Tiling] = {}
    for unit, history in _histories(plan, spec):
        best = history.best()
        if best is not None:
            configs = unit.by_kernel(best["config"])
            for name, kernel in unit.kernels.items():
                found[name] = tiling_from_dict(type(kernel.tiling), configs[name])
    return found


def _histories(plan: Any, spec: DeviceSpec) -> Iterator[tuple[Unit, History]]:
    for unit in units_of(plan.plan(*plan.prepare_inputs("meta"))):
        key = tuning_key(plan, spec, unit.name, unit.kernels.values())
        yield unit, History(history_path(plan, spec, key), key)
