"""Interval arithmetic, against counting every nanosecond."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mla_var3.runtime.profiling.timeline.model import (
    Interval,
    gaps,
    length,
    most_overlap,
    overlap,
    union,
)

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
def test_union_length_and_gaps(some):
    busy = covered(some)
    assert is_canonical(union(some))
    assert covered(union(some)) == busy
    assert length(some) == len(busy)
    assert is_canonical(gaps(some))
    assert covered(gaps(some)) == (set(range(min(busy), max(busy))) - busy if busy else set())


@given(interval_sets)
def test_overlap_counts_each_set_once(sets):
    members = [covered(found) for found in sets]
    expected = sum(sum(time in member for member in members) >= 2 for time in range(END))
    assert overlap(sets) == expected
    assert expected <= most_overlap([length(found) for found in sets])


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_the_possible_overlap_can_be_reached(lengths):
    """Members laid on a circle one after another overlap as long as possible (wrap-around rule)."""
    sets: list[list[Interval]] = []
    place = 0
    width = max(max(lengths), (sum(lengths) + 1) // 2)
    for size in lengths:
        end = place + size
        sets.append([(place, min(end, width)), (0, max(0, end - width))])
        place = end % width if width else 0
    assert [length(found) for found in sets] == lengths
    assert overlap(sets) == most_overlap(lengths)
