"""What is tuned together: the tuning units of a runtime object.

A unit is a kernel that runs alone, or all kernels of a `ConcurrentKernels` group: those compete for
the same machine, so their tilings are chosen together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.runtime.autotune.history import canonical
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.stage import KernelStage, Stage, Tiling, by_unique_name

Combo = tuple[Tiling, ...]
"""One tiling per kernel of a unit."""
Member = tuple[str, str]
"""A kernel of a unit with one of its tilings: its name and the tiling's canonical text."""


def member(name: str, tiling: Tiling) -> Member:
    """The hashable form of a kernel with a tiling."""
    return name, canonical(tiling.to_dict())


@dataclass(frozen=True)
class Unit:
    """What is tuned together.

    Attributes:
        name: unique name within the runtime object.
        stage: what is launched and timed.
        kernels: the leaf kernels, by unique name, in launch order.
        groups: the concurrent groups in it, each with the range of its kernels.
    """

    name: str
    stage: Stage
    kernels: dict[str, KernelStage]
    groups: tuple[tuple[ConcurrentKernels, slice], ...] = ()

    @property
    def joint(self) -> bool:
        """Whether a config names one tiling per kernel."""
        return isinstance(self.stage, ConcurrentKernels)

    def config(self, combo: Combo) -> dict[str, Any]:
        pairs = zip(self.kernels, combo, strict=True)
        if self.joint:
            return {name: tiling.to_dict() for name, tiling in pairs}
        return combo[0].to_dict()

    def by_kernel(self, recorded: dict[str, Any]) -> dict[str, Any]:
        return recorded if self.joint else dict.fromkeys(self.kernels, recorded)

    def candidates(self) -> dict[str, list[Tiling]]:
        """The tilings to try per kernel: the active one first, then the others, each once."""
        return {
            name: _distinct([kernel.tiling, *kernel.autotune_configs])
            for name, kernel in self.kernels.items()
        }

    def joint_failures(self, combo: Combo) -> tuple[str, ...]:
        return tuple(
            failure
            for group, members in self.groups
            for failure in group.joint_failures(combo[members])
        )

    def set_tilings(self, combo: Combo) -> None:
        for kernel, tiling in zip(self.kernels.values(), combo, strict=True):
            kernel.tiling = tiling


def units_of(stage: Stage) -> list[Unit]:
    """The tuning units of a runtime object, in launch order."""
    return [
        Unit(name, part, by_unique_name(part.kernels()), tuple(_groups(part)))
        for name, part in by_unique_name(_parts(stage)).items()
    ]


def _parts(stage: Stage) -> Iterator[Stage]:
    if isinstance(stage, KernelPipeline):
        for part in stage.stages:
            yield from _parts(part)
    else:
        yield stage


def _groups(stage: Stage, start: int = 0) -> Iterator[tuple[ConcurrentKernels, slice]]:
    if isinstance(stage, ConcurrentKernels):
        yield stage, slice(start, start + sum(1 for _ in stage.kernels()))
    for part in stage.children:
        yield from _groups(part, start)
        start += sum(1 for _ in part.kernels())


def _distinct(tilings: Sequence[Tiling]) -> list[Tiling]:
    found: dict[str, Tiling] = {}
    for tiling in tilings:
        found.setdefault(canonical(tiling.to_dict()), tiling)
    return list(found.values())
