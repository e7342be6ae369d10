"""Measured times and tuned tilings: what ships in `conf/tuned/`, and what was tuned here.

A file of `conf/tuned/` is `{"device": ..., "results": [...]}`. Each result has `kernel`,
`language`, `problem` (the fields of `PROBLEM_FIELDS`, and `n` or `splits` where the kernel has
one), `kernel_us` (the time of the kernel without projections that it leaves to others) and
`source`, the record that the figure comes from. Histories of the autotuner are used when device,
toolkit, sources and problem are the same as now, and not otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from mla_var3.attention.request.shape import CallShape
from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.autotune.history import History, history_path, median_us, tuning_key
from mla_var3.runtime.autotune.units import Unit, units_of
from mla_var3.runtime.paths import cache_root, slug
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.tiling import Tiling, tiling_from_dict

PROBLEM_FIELDS = ("b", "s", "t", "h", "d", "p", "k", "dtype", "causal")
_RESULT_FIELDS = {"kernel", "language", "problem", "kernel_us", "source"}


@dataclass(frozen=True)
class Measured:
    """A measured kernel time.

    Attributes:
        kernel_us: of the kernel alone.
        source: where the figure comes from.
    """

    kernel_us: float
    source: str


def tuned_folder() -> Path:
    """The folder of results that ship with the package."""
    return Path(str(resources.files("mla_var3.conf") / "tuned"))


def shipped_result(
    kernel: str, language: str, shape: CallShape, spec: DeviceSpec, choice: Mapping[str, int]
) -> Measured | None:
    """The shipped time of a kernel for exactly this problem on this device.

    Args:
        kernel: its id.
        language: its language.
        shape: the form of the call.
        spec: the device.
        choice: `n` or `splits` that the call would use.
    """
    wanted = {name: getattr(shape, name) for name in PROBLEM_FIELDS}
    for result in _shipped(str(tuned_folder())).get(spec.name, ()):
        problem = result["problem"]
        same = all(problem.get(name) == value for name, value in wanted.items())
        same = same and all(problem.get(name, value) == value for name, value in choice.items())
        if same and (result["kernel"], result["language"]) == (kernel, language):
            return Measured(float(result["kernel_us"]), str(result["source"]))
    return None


@lru_cache(maxsize=4)
def _shipped(folder: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            device, results = content["device"], content["results"]
            for result in results:
                missing = _RESULT_FIELDS - set(result)
                if missing or not float(result["kernel_us"]) > 0:
                    raise ValueError(f"a result without {', '.join(sorted(missing)) or 'a time'}")
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(str(path), "tuned results", error) from error
        found.setdefault(device, []).extend(results)
    return found


def local_result(plan: Any, spec: DeviceSpec) -> Measured | None:
    """The time of a plan from the autotuner's histories on this machine.

    Args:
        plan: the plan with every choice made, for the device's target.
        spec: the device.

    Returns:
        None when a kernel of the plan was not timed for exactly this problem.
    """
    if not has_histories(spec):
        return None
    total, files = 0.0, []
    for _, history in _histories(plan.plan(*plan.prepare_inputs("meta")), plan, spec):
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
    for unit, history in _histories(plan.plan(*plan.prepare_inputs("meta")), plan, spec):
        best = history.best()
        if best is not None:
            configs = unit.by_kernel(best["config"])
            for name, kernel in unit.kernels.items():
                found[name] = tiling_from_dict(type(kernel.tiling), configs[name])
    return found


def _histories(stage: Stage, plan: Any, spec: DeviceSpec) -> Iterator[tuple[Unit, History]]:
    for unit in units_of(stage):
        key = tuning_key(plan, spec, unit.name, unit.kernels.values())
        yield unit, History(history_path(plan, spec, key), key)
