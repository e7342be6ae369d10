"""Exact arithmetic on time intervals.

Times are whole nanoseconds, so nothing here rounds. An interval is a half-open pair `(start, end)`;
one that ends where another starts does not overlap it, and an empty one counts for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order; touching ones are joined."""
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


def span(intervals: Iterable[Interval]) -> Interval | None:
    """From the first start to the last end, None without any interval."""
    kept = list(intervals)
    if not kept:
        return None
    return min(start for start, _ in kept), max(end for _, end in kept)


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The points covered by both sets, as disjoint intervals in ascending order."""
    return covered_by([first, second], at_least=2)


def covered_by(sets: Sequence[Iterable[Interval]], at_least: int) -> list[Interval]:
    """The points that at least so many of the sets cover.

    A set counts once at each point, also where its own intervals overlap.
    """
    changes: list[tuple[int, int]] = []
    for intervals in sets:
        for start, end in union(intervals):
            changes += [(start, 1), (end, -1)]
    found: list[Interval] = []
    depth, begin = 0, 0
    # At equal times ends (-1) come before starts: touching sets do not overlap.
    for time, change in sorted(changes):
        before, depth = depth, depth + change
        if before < at_least <= depth:
            begin = time
        elif depth < at_least <= before and begin < time:
            found.append((begin, time))
    return union(found)


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The uncovered stretches between the first start and the last end."""
    return [(before[1], after[0]) for before, after in itertools.pairwise(union(intervals))]


def most_overlap(busy: Sequence[int]) -> int:
    """The longest time for which sets of these lengths could have run two or more at once.

    Every overlapped moment needs a second set, so what lies outside the longest set bounds it; and
    each such moment uses up two units of the sum.
    """
    total = sum(busy)
    return min(total - max(busy, default=0), total // 2)
