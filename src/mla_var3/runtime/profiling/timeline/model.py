"""A recorded timeline, and exact arithmetic on its time intervals.

Times are whole nanoseconds on one clock, so nothing here rounds. An interval is a half-open pair
`(start, end)`: touching intervals do not overlap, and an empty one counts for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

QUEUED = "hyper_mla@"
"""Range prefix of a run that was enqueued as a whole before the GPU began it."""
HOST_PACED = "hyper_mla_host@"
"""Range prefix of a run that started on an idle GPU, at the pace of the host."""
WARMUP = "hyper_mla_warmup@"
"""Range prefix of a warm-up run, which the analysis ignores."""

Interval = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """Something with a name, a start and a duration."""

    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        """When it finished."""
        return self.start + self.duration

    @property
    def interval(self) -> Interval:
        """Start and end."""
        return self.start, self.end


@dataclass(frozen=True)
class GpuActivity(Event):
    """One kernel, copy or fill on the GPU.

    Attributes:
        correlation: number that it shares with the host call that launched it.
        kind: its category in a Chrome trace: "kernel", "gpu_memcpy" or "gpu_memset".
        grid, block: launch sizes; None for copies and fills.
        registers: per thread.
        shared_bytes: shared memory per CTA, static and dynamic.
    """

    stream: int
    correlation: int
    kind: str = "kernel"
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None

    @property
    def ctas(self) -> int | None:
        """CTAs of the launch."""
        return None if self.grid is None else math.prod(self.grid)


@dataclass(frozen=True)
class ApiCall(Event):
    """One call of the CUDA runtime or driver on a host thread."""

    thread: int
    correlation: int


@dataclass(frozen=True)
class HostRange(Event):
    """A named range on a host thread."""

    thread: int

    def holds(self, call: ApiCall) -> bool:
        """Whether a call was made inside the range."""
        return self.thread == call.thread and self.start <= call.start < self.end


@dataclass
class Timeline:
    """A recorded run."""

    gpu: list[GpuActivity] = field(default_factory=list)
    api: list[ApiCall] = field(default_factory=list)
    ranges: list[HostRange] = field(default_factory=list)
    device_name: str = ""

    def __post_init__(self) -> None:
        self.gpu.sort(key=lambda activity: (activity.start, activity.correlation))
        self.api.sort(key=lambda call: (call.start, call.correlation))
        self.ranges.sort(key=lambda found: (found.start, -found.duration))

    def launches(self) -> dict[int, ApiCall]:
        """The host call of every correlation number that a GPU activity carries.

        A runtime call and the driver call below it may share a number. The outer one, which began
        first, is the one the program waited for.
        """
        wanted = {activity.correlation for activity in self.gpu}
        found: dict[int, ApiCall] = {}
        for call in self.api:
            if call.correlation in wanted:
                found.setdefault(call.correlation, call)
        return found

    def activities_in(self, ranges: Iterable[HostRange]) -> Iterator[list[GpuActivity]]:
        """For each range, what was launched inside it, in launch order."""
        launches = self.launches()
        pairs = [(launches[a.correlation], a) for a in self.gpu if a.correlation in launches]
        pairs.sort(key=lambda pair: (pair[0].start, pair[1].start))
        for found in ranges:
            yield [activity for call, activity in pairs if found.holds(call)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order; touching ones are merged."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """The time that at least one of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


def overlap(sets: Sequence[Iterable[Interval]]) -> int:
    """The time that at least two of the sets cover.

    A set counts once at each point, also where its own intervals overlap.
    """
    changes: list[tuple[int, int]] = []
    for intervals in sets:
        for start, end in union(intervals):
            changes += [(start, 1), (end, -1)]
    total, depth, before = 0, 0, 0
    for time, change in sorted(changes):
        total += time - before if depth >= 2 else 0
        depth, before = depth + change, time
    return total


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The uncovered stretches between the first start and the last end."""
    return [(before[1], after[0]) for before, after in itertools.pairwise(union(intervals))]


def most_overlap(lengths: Sequence[int]) -> int:
    """The longest time for which sets of these lengths could overlap.

    Each overlapped moment needs a second set, so what lies outside the longest set is a bound; it
    also uses up two units of the sum.
    """
    total = sum(lengths)
    return min(total - max(lengths, default=0), total // 2)
