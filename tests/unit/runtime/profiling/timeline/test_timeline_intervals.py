"""Interval arithmetic, against counting every nanosecond."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mla_var3.runtime.profiling.timeline import intervals as intervals
from mla_var3.runtime.profiling.timeline.intervals import Interval

END = 40
points = st.integers(0, END)
interval_lists = st.lists(st.tuples(points, points).map(lambda p: (min(p), max(p))), max_size=8)
interval_sets = st.lists(interval_lists, max_size=5)


def covered(found: list[Interval]) -> set[int]:
    return {time for start, end in found for time in range(start, end)}


def is_canonical(found: list[Interval]) -> bool:
    flat = [time for interval in found for time in interval]
    return all(a < b for a, b in itertools.pairwise(flat))


@given(interval_lists)
def test_union_and_length(some: list[Interval]) -> None:
    found = intervals.union(some)
    assert is_canonical(found)
    assert covered(found) == covered(some)
    assert intervals.length(some) == len(covered(some))


@given(interval_lists, interval_lists)
def test_intersection(first: list[Interval], second: list[Interval]) -> None:
    found = intervals.intersection(first, second)
    assert is_canonical(found)
    assert covered(found) == covered(first) & covered(second)


@given(interval_sets, st.integers(1, 4))
def test_covered_by(sets: list[list[Interval]], at_least: int) -> None:
    members = [covered(found) for found in sets]
    expected = {t for t in range(END) if sum(t in member for member in members) >= at_least}
    found = intervals.covered_by(sets, at_least)
    assert is_canonical(found)
    assert covered(found) == expected


@given(interval_lists)
def test_gaps_fill_the_span(some: list[Interval]) -> None:
    found = intervals.gaps(some)
    busy = covered(some)
    expected = set(range(min(busy), max(busy) + 1)) - busy if busy else set()
    assert covered(found) == expected
    assert is_canonical(found)


@given(interval_sets)
def test_no_overlap_exceeds_the_possible(sets: list[list[Interval]]) -> None:
    lengths = [intervals.length(found) for found in sets]
    assert intervals.length(intervals.covered_by(sets, 2)) <= intervals.most_overlap(lengths)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_the_possible_overlap_can_be_reached(lengths: list[int]) -> None:
    """Members laid on a circle one after another overlap as long as possible (wrap-around rule)."""
    possible = intervals.most_overlap(lengths)
    sets: list[list[Interval]] = []
    place = 0
    width = max(max(lengths), (sum(lengths) + 1) // 2)
    for size in lengths:
        end = place + size
        sets.append([(place, min(end, width)), (0, max(0, end - width))])
        place = end % width if width else 0
    assert [intervals.length(found) for found in sets] == lengths
    assert intervals.length(intervals.covered_by(sets, 2)) == possible


def test_touching_intervals_do_not_overlap() -> None:
    assert intervals.intersection([(0, 5)], [(5, 9)]) == []
    assert intervals.union([(0, 5), (5, 9)]) == [(0, 9)]
    assert intervals.gaps([(0, 5), (5, 9)]) == []


def test_the_span() -> None:
    assert intervals.span([(3, 5), (1, 2)]) == (1, 5)
    assert intervals.span([]) is None
