"""What a timeline says: times per kernel, achieved overlap, gaps and launch overhead."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.profiling.timeline import intervals as intervals
from mla_var3.runtime.profiling.timeline.intervals import Interval
from mla_var3.runtime.profiling.timeline.model import (
    HOST_PACED,
    QUEUED,
    ApiCall,
    GpuActivity,
    HostRange,
    Timeline,
)
from mla_var3.runtime.profiling.timeline.outline import Group, Outline, assign


@dataclass(frozen=True)
class Piece:
    """One GPU activity of a run, with what it is and the host call that launched it."""

    activity: GpuActivity
    leaf: int | None
    launch: ApiCall


@dataclass(frozen=True)
class Iteration:
    """One run of the runtime object.

    Attributes:
        host: the range around it on the host.
        pieces: what it did on the GPU, in launch order.
        api_ns: time spent inside CUDA calls on the host.
    """

    host: HostRange
    pieces: tuple[Piece, ...]
    api_ns: int

    @property
    def span(self) -> Interval:
        """From the start of the first GPU activity to the end of the last."""
        found = intervals.span(self.busy())
        if found is None:
            raise ValueError("an iteration has at least one GPU activity")
        return found

    @property
    def span_ns(self) -> int:
        """Length of the span."""
        return self.span[1] - self.span[0]

    def busy(self, leaves: Iterable[int] | None = None) -> list[Interval]:
        """Intervals of all activities, or of those of some kernels."""
        wanted = None if leaves is None else set(leaves)
        return [p.activity.interval for p in self.pieces if wanted is None or p.leaf in wanted]

    def piece(self, leaf: int) -> Piece | None:
        """The activity of a kernel, None when it was not launched."""
        return next((piece for piece in self.pieces if piece.leaf == leaf), None)

    def gaps(self) -> list[Interval]:
        """Stretches inside the span in which the GPU did nothing of this run."""
        return intervals.gaps(self.busy())


@dataclass(frozen=True)
class GroupOverlap:
    """How far the members of a concurrent group ran at the same time, in one run.

    Attributes:
        overlap_ns: time in which at least two members ran.
        possible_ns: the longest such time that members of these lengths could have had.
        busy_ns: time in which at least one member ran.
        member_ns: time of each member.
        pairs: overlap of each two members, by their positions.
    """

    overlap_ns: int
    possible_ns: int
    busy_ns: int
    member_ns: tuple[int, ...]
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Achieved part of the possible overlap, None where there was nothing to overlap."""
        return self.overlap_ns / self.possible_ns if self.possible_ns else None


@dataclass
class Analysis:
    """Figures of a timeline.

    Attributes:
        shape: outline of the runtime object.
        queued: runs that were enqueued before the GPU began them.
        host_paced: runs on an idle GPU at the pace of the host.
    """

    shape: Outline
    queued: list[Iteration]
    host_paced: list[Iteration]

    def median_us(self, of: Callable[[Iteration], int | None]) -> float | None:
        """Median over the queued runs, in microseconds; None where no run has the figure."""
        return median_us(self.queued, of)

    def typical(self, runs: list[Iteration] | None = None) -> Iteration:
        """The run whose span is the median one (the lower of two)."""
        ordered = sorted(self.queued if runs is None else runs, key=lambda run: run.span_ns)
        return ordered[(len(ordered) - 1) // 2]


def median_us(runs: list[Iteration], of: Callable[[Iteration], int | None]) -> float | None:
    """Median of a figure in nanoseconds over some runs, in microseconds."""
    values = [value for run in runs if (value := of(run)) is not None]
    return statistics.median(values) / 1e3 if values else None


def group_overlap(run: Iteration, group: Group) -> GroupOverlap:
    """The overlap that a concurrent group achieved in one run."""
    busy = [run.busy(member.leaves) for member in group.members]
    lengths = tuple(intervals.length(member) for member in busy)
    pairs = {
        (i, j): intervals.length(intervals.intersection(busy[i], busy[j]))
        for i in range(len(busy))
        for j in range(i + 1, len(busy))
    }
    return GroupOverlap(
        overlap_ns=intervals.length(intervals.covered_by(busy, at_least=2)),
        possible_ns=intervals.most_overlap(lengths),
        busy_ns=intervals.length(interval for member in busy for interval in member),
        member_ns=lengths,
        pairs=pairs,
    )


def analyse(timeline: Timeline, shape: Outline) -> Analysis:
    """Find the runs in a timeline.

    Raises:
        UnsupportedError: the timeline holds no run of the runtime object.
    """
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
    launches = timeline.launches()
    ranges = [found for found in timeline.ranges if found.name == name]
    # A runtime object of one kernel has the kernel's name: the inner range repeats the outer.
    ranges = [
        found
        for found in ranges
        if not any(
            other is not found and other.thread == found.thread
            and other.start <= found.start and found.end <= other.end
            for other in ranges
        )
    ]  # fmt: skip
    runs = []
    for found, activities in zip(ranges, timeline.activities_in(ranges), strict=True):
        if activities:
            leaves = assign(shape, activities)
            pieces = [
                Piece(activity, leaf, launches[activity.correlation])
                for activity, leaf in zip(activities, leaves, strict=True)
            ]
            calls = [(call.start, call.end) for call in timeline.calls_in(found)]
            runs.append(Iteration(found, tuple(pieces), intervals.length(calls)))
    return runs
