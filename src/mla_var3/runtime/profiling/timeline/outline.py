"""Which kernels a runtime object launches, and which of them are meant to run at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.profiling.timeline.model import GpuActivity
from mla_var3.runtime.stage import Stage


@dataclass(frozen=True)
class Member:
    """One member of a concurrent group.

    Attributes:
        name: its stage name.
        leaves: positions of its kernels in the launch order.
    """

    name: str
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """A `ConcurrentKernels` object."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Outline:
    """The shape of a runtime object.

    Attributes:
        name: of the whole.
        leaves: label of every kernel in launch order; a second one of a name is `name#2`.
        names: the kernels' own names, in the same order.
        groups: concurrent groups, outer ones first.
    """

    name: str
    leaves: tuple[str, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]


def outline(stage: Stage) -> Outline:
    """The outline of a runtime object."""
    names: list[str] = []
    groups: list[Group] = []

    def walk(node: Stage) -> tuple[int, ...]:
        if isinstance(node, KernelPipeline):
            return tuple(leaf for child in node.stages for leaf in walk(child))
        if isinstance(node, ConcurrentKernels):
            place = len(groups)
            members = [Member(child.name, walk(child)) for child in node.concurrent_kernels]
            groups.insert(place, Group(node.name, tuple(members)))
            return tuple(leaf for member in members for leaf in member.leaves)
        found = []
        for kernel in node.kernels():
            found.append(len(names))
            names.append(kernel.name)
        return tuple(found)

    walk(stage)
    labels = []
    for index, name in enumerate(names):
        earlier = names[:index].count(name)
        labels.append(f"{name}#{earlier + 1}" if earlier else name)
    return Outline(stage.name, tuple(labels), tuple(names), tuple(groups))


CUTE_PREFIX = "kernel_cutlass_"
"""How the machine-code name of a CuTe DSL kernel begins."""


def assign(shape: Outline, activities: Sequence[GpuActivity]) -> list[int | None]:
    """The kernel of the outline that each activity is, None for a helper that it does not name.

    A compiled kernel carries the name of its Python function with something around it (a mangled
    signature, a prefix of the language), so the longest name that occurs in it decides; see
    `_carries`. Kernels of one name are told apart by their order. Where no name is found at all and
    the numbers agree, the order alone decides.

    Args:
        shape: the outline.
        activities: GPU activities of one run in launch order.
    """
    waiting: dict[str, deque[int]] = {}
    for index, name in enumerate(shape.names):
        waiting.setdefault(name, deque()).append(index)
    found: list[int | None] = []
    for activity in activities:
        names = [name for name in waiting if _carries(activity.name, name)]
        if activity.kind != "kernel" or not names:
            found.append(None)
            continue
        places = waiting[max(names, key=len)]
        found.append(places.popleft() if places else None)
    kernels = [i for i, activity in enumerate(activities) if activity.kind == "kernel"]
    if all(leaf is None for leaf in found) and len(kernels) == len(shape.names):
        for leaf, i in enumerate(kernels):
            found[i] = leaf
    return found


def _carries(compiled: str, name: str) -> bool:
    """Whether a compiled kernel is the one of that name.

    CuTe DSL writes the function's name right after its prefix, then the class and module that the
    function is in and the types of its arguments: those may hold the names of other kernels.
    """
    _, prefix, rest = compiled.partition(CUTE_PREFIX)
    return rest.startswith(f"{name}_") if prefix else name in compiled
