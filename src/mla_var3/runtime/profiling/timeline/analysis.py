"""What a timeline says: times per kernel, achieved overlap, serialised members and why."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels
from mla_var3.runtime.profiling.timeline.model import (
    HOST_PACED,
    QUEUED,
    ApiCall,
    GpuActivity,
    HostRange,
    Interval,
    Timeline,
    gaps,
    length,
    most_overlap,
    overlap,
)
from mla_var3.runtime.stage import Stage, by_unique_name

SERIAL_BELOW = 0.10
"""Two members count as serialised when they share less than this part of the shorter one."""
CUTE_PREFIX = "kernel_cutlass_"
"""Prefix of the machine-code name of a CuTe DSL kernel."""
_MIN_MEMBER_NS = 2_000
"""A shorter member ends before another could start, so its overlap says nothing."""
_LAUNCH_LATENCY_NS = 10_000
"""A kernel that begins this soon after its launch call returned did not wait for the GPU (2 to 4 us
are usual on an H200)."""


class Member(NamedTuple):
    """One member of a concurrent group: its name, and its kernels by position in launch order."""

    name: str
    leaves: tuple[int, ...]


class Group(NamedTuple):
    """A `ConcurrentKernels` object."""

    name: str
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Outline:
    """The kernels that a runtime object launches, and which of them may overlap.

    `leaves` are the labels of the kernels in launch order, of which a second one of a name is
    `name.2`; `names` their own names in the same order; outer groups come first.
    """

    name: str
    leaves: tuple[str, ...]
    names: tuple[str, ...]
    groups: tuple[Group, ...]


def outline(stage: Stage) -> Outline:
    """The outline of a runtime object."""
    labels = by_unique_name(stage.kernels())
    groups: list[Group] = []
    position = itertools.count()

    def walk(node: Stage) -> tuple[int, ...]:
        if not node.children:
            return (next(position),)
        place = len(groups)
        members = tuple(Member(child.name, walk(child)) for child in node.children)
        if isinstance(node, ConcurrentKernels):
            groups.insert(place, Group(node.name, members))
        return tuple(leaf for member in members for leaf in member.leaves)

    walk(stage)
    names = tuple(kernel.name for kernel in labels.values())
    return Outline(stage.name, tuple(labels), names, tuple(groups))


def assign(shape: Outline, activities: Sequence[GpuActivity]) -> list[int | None]:
    """The kernel of the outline that each activity is; None for helpers outside the outline.

    A compiled kernel carries the name of its Python function with something around it (a mangled
    signature, a prefix of the language), so the longest name found in it decides. Kernels of one
    name are told apart by their order. Where no name is found at all and the counts agree, the
    order alone decides.
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

    CuTe DSL writes the function's name right after its prefix, then class, module and argument
    types, which may contain the names of other kernels.
    """
    _, prefix, rest = compiled.partition(CUTE_PREFIX)
    return rest.startswith(f"{name}_") if prefix else name in compiled


class Launch(NamedTuple):
    """One GPU activity of a run, the outline's kernel that it is, and its host call."""

    activity: GpuActivity
    leaf: int | None
    call: ApiCall


@dataclass(frozen=True)
class Iteration:
    """One run of the runtime object: `api_ns` is the time spent inside CUDA calls on the host."""

    host: HostRange
    launches: tuple[Launch, ...]
    api_ns: int

    @property
    def span(self) -> Interval:
        """From the start of the first GPU activity to the end of the last."""
        busy = self.busy()
        return min(start for start, _ in busy), max(end for _, end in busy)

    @property
    def span_ns(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def gaps(self) -> list[Interval]:
        """Stretches inside the span in which the GPU did nothing of this run."""
        return gaps(self.busy())

    @property
    def idle_ns(self) -> int:
        return sum(end - start for start, end in self.gaps)

    def busy(self, leaves: Iterable[int] | None = None) -> list[Interval]:
        """Intervals of all activities, or of those of some kernels."""
        wanted = None if leaves is None else set(leaves)
        return [p.activity.interval for p in self.launches if wanted is None or p.leaf in wanted]

    def of_kernel(self, leaf: int) -> Launch | None:
        """The launch of a kernel; None when there was none."""
        return next((launch for launch in self.launches if launch.leaf == leaf), None)


class GroupOverlap(NamedTuple):
    """How far the members of a concurrent group ran at the same time, in one run.

    That is the time in which at least two members ran, beside the longest that members of these
    lengths could overlap, the time in which any ran, and the overlap of each two by position.
    """

    overlap_ns: int
    possible_ns: int
    busy_ns: int
    member_ns: tuple[int, ...]
    pairs: dict[tuple[int, int], int]

    @property
    def share(self) -> float | None:
        """Achieved part of the possible overlap; None where nothing could overlap."""
        return self.overlap_ns / self.possible_ns if self.possible_ns else None


@dataclass
class Analysis:
    """The runs found in a timeline."""

    shape: Outline
    queued: list[Iteration]
    host_paced: list[Iteration]

    def durations(self, leaf: int) -> list[int]:
        """How long a kernel took in each queued run."""
        return [launch.activity.duration for launch in launches_of(self.queued, leaf)]


def launches_of(runs: list[Iteration], leaf: int) -> list[Launch]:
    """The launches of a kernel in some runs; a run may have none."""
    return [launch for run in runs if (launch := run.of_kernel(leaf))]


def typical(runs: list[Iteration]) -> Iteration:
    """The run with the median span (the lower of two)."""
    return sorted(runs, key=lambda run: run.span_ns)[(len(runs) - 1) // 2]


def group_overlap(run: Iteration, group: Group) -> GroupOverlap:
    """The overlap that a concurrent group achieved in one run."""
    busy = [run.busy(member.leaves) for member in group.members]
    lengths = tuple(length(member) for member in busy)
    numbers = itertools.combinations(range(len(busy)), 2)
    pairs = {(i, j): overlap([busy[i], busy[j]]) for i, j in numbers}
    together = length(itertools.chain(*busy))
    return GroupOverlap(overlap(busy), most_overlap(lengths), together, lengths, pairs)


def analyse(timeline: Timeline, shape: Outline) -> Analysis:
    """Find the runs in a timeline."""
    queued = _iterations(timeline, shape, f"{QUEUED}{shape.name}")
    host_paced = _iterations(timeline, shape, f"{HOST_PACED}{shape.name}")
    if not queued:
        seen = sorted({found.name for found in timeline.ranges}) or ["no ranges"]
        raise UnsupportedError(
            f"timeline: expected GPU activity inside ranges {QUEUED}{shape.name}, got "
            f"{len(timeline.gpu)} activities and {', '.join(seen)}; the profiler may lack the "
            "rights to trace the GPU, or another profiler is attached"
        )
    return Analysis(shape, queued, host_paced)


def _iterations(timeline: Timeline, shape: Outline, name: str) -> list[Iteration]:
    calls = timeline.launches()
    ranges: list[HostRange] = []
    for found in timeline.ranges:
        # A runtime object of one kernel has the kernel's name: the inner range repeats the outer,
        # which starts first.
        inner = any(o.thread == found.thread and found.end <= o.end for o in ranges)
        if found.name == name and not inner:
            ranges.append(found)
    runs = []
    for found, activities in zip(ranges, timeline.activities_in(ranges), strict=True):
        if activities:
            leaves = assign(shape, activities)
            launches = [
                Launch(activity, leaf, calls[activity.correlation])
                for activity, leaf in zip(activities, leaves, strict=True)
            ]
            inside = length(call.interval for call in timeline.api if found.holds(call))
            runs.append(Iteration(found, tuple(launches), inside))
    return runs


def serialisations(shape: Outline, runs: list[Iteration]) -> list[dict[str, Any]]:
    """All pairs of members that failed to overlap in at least half of the runs, JSON-ready.

    `first` ran before `second`; `cause` is "stream", "host" or "GPU", and `reason` the same in a
    sentence with the figures of one run.
    """
    found = []
    for group in shape.groups:
        overlaps = [group_overlap(run, group) for run in runs]
        for pair in overlaps[0].pairs if overlaps else ():
            serial = [r for r, o in zip(runs, overlaps, strict=True) if _is_serial(o, pair)]
            if serial and 2 * len(serial) >= len(runs):
                reasons = [_reason(group, pair, run) for run in serial]
                (cause, first, second), _ = Counter(r[:3] for r in reasons).most_common(1)[0]
                text = next(r[3] for r in reasons if r[:3] == (cause, first, second))
                pair_of = {"group": group.name, "first": first, "second": second}
                count = {"runs": len(serial), "of": len(runs)}
                found.append({**pair_of, **count, "cause": cause, "reason": text})
    return found


def _is_serial(found: GroupOverlap, pair: tuple[int, int]) -> bool:
    shorter = min(found.member_ns[member] for member in pair)
    return shorter >= _MIN_MEMBER_NS and found.pairs[pair] < SERIAL_BELOW * shorter


def _reason(group: Group, pair: tuple[int, int], run: Iteration) -> tuple[str, str, str, str]:
    """Cause, earlier member, later member and a sentence, for one run."""
    launches = {m: [p for p in run.launches if p.leaf in group.members[m].leaves] for m in pair}
    early, late = sorted(pair, key=lambda m: min(p.activity.start for p in launches[m]))
    first, second = group.members[early].name, group.members[late].name
    ends = max(launches[early], key=lambda p: p.activity.end)
    starts = min(launches[late], key=lambda p: p.activity.start)
    used = [{p.activity.stream for p in launches[m]} for m in (early, late)]
    if used[0] & used[1]:
        streams = ", ".join(map(str, sorted(used[0] & used[1])))
        text = f"both ran on stream {streams}, which executes in order"
        return "stream", first, second, text
    if starts.activity.start - starts.call.end < _LAUNCH_LATENCY_NS:
        late_us = (starts.call.start - launches[early][0].call.start) / 1e3
        lasted_us = (ends.activity.end - launches[early][0].activity.start) / 1e3
        text = (
            f"the host launched {second} {late_us:.1f} µs after {first}, which took "
            f"{lasted_us:.1f} µs: launch overhead, not the GPU, kept them apart; capture the group "
            "in a CUDA graph or give it more work"
        )
        return "host", first, second, text
    waited_us = (starts.activity.start - starts.call.start) / 1e3
    text = (
        f"{second} was enqueued while {first} still ran and began {waited_us:.1f} µs after its "
        f"launch: the {ends.activity.ctas} CTAs of {first} left no room for others (threads, "
        "registers and shared memory are in the table of kernels), or an event or a default stream "
        "is between them"
    )
    return "GPU", first, second, text
