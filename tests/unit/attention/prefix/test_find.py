"""Shared prefixes found in block tables, against all groupings of small batches."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mla_var3.attention.prefix import find
from mla_var3.attention.prefix.find import find_shared_prefixes
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.errors import InvalidArgumentError

Rows = Sequence[Sequence[int]]


def common(rows: Rows) -> int:
    """Pages that all rows begin with."""
    return next(
        (place for place, pages in enumerate(zip(*rows, strict=False)) if len(set(pages)) > 1),
        min(len(row) for row in rows),
    )


def most_by_trees(rows: Rows, at: int, start: int, levels: int) -> int:
    """The most pages that any grouping into levels saves, of rows that agree on `at` pages.

    A group is all that continue alike, or not all of them.
    """
    saved = 0
    for page in {row[at] for row in rows if len(row) > at}:
        alike = [row for row in rows if len(row) > at and row[at] == page]
        if len(alike) > 1:
            end = common(alike)
            shared = (len(alike) - 1) * (end - start)
            if levels > 1:
                shared += most_by_trees(alike, end, end, levels - 1)
            saved += max(shared, most_by_trees(alike, end, start, levels))
    return saved


def saved_by(groups: PrefixGroups, rows: Rows, page: int) -> int:
    """Pages that groups save; the members of each hold the same pages there."""
    saved, starts = 0, [0] * len(rows)
    for level in range(groups.levels):
        of = groups.prefix_of[level].tolist()
        for group, tokens in enumerate(groups.prefix_length[level].tolist()):
            members = [r for r, number in enumerate(of) if number == group]
            if not members:
                assert tokens == 0
                continue
            (start,) = {starts[r] for r in members}
            end = start + tokens // page
            assert len({tuple(rows[r][:end]) for r in members}) == 1
            assert all(len(rows[r]) >= end for r in members)
            saved += (len(members) - 1) * (end - start)
            for r in members:
                starts[r] = end
    return saved


def test_no_grouping_saves_more():
    chance, page = random.Random(5), 16
    for _ in range(150):
        b, width = chance.randrange(1, 7), chance.randrange(1, 6)
        table = [[chance.randrange(3) + 3 * c for c in range(width)] for _ in range(b)]
        lengths = [chance.randrange(width * page + 1) for _ in range(b)]
        rows = [row[: max(0, n - 2) // page] for row, n in zip(table, lengths, strict=True)]
        for levels in (1, 2):
            found = find_shared_prefixes(table, lengths, page_size=page, queries=2, levels=levels)
            saved = saved_by(found, rows, page)
            assert saved == most_by_trees(rows, 0, 0, levels), (table, lengths, levels)
            assert (found.levels > 0) == (saved > 0)


@pytest.mark.parametrize("kind", ["lists", "numpy", "tensor"])
def test_a_system_prompt_and_two_documents(kind):
    table = [[1, 2, 3, 4, 9], [1, 2, 5, 6, 7], [1, 2, 3, 4, 8], [1, 2, 5, 6, 0], [3, 3, 3, 3, 3]]
    lengths = [300, 301, 302, 303, 100]
    given = {"lists": (table, lengths), "numpy": (np.array(table), np.array(lengths))}.get(
        kind, (torch.tensor(table), torch.tensor(lengths))
    )
    found = find_shared_prefixes(*given)
    assert found.prefix_of.tolist() == [[0, 0, 0, 0, -1], [0, 1, 0, 1, -1]]
    assert found.prefix_length.tolist() == [[128, 0], [128, 128]]
    assert (found.tokens, found.most, found.ordered) == (4 * 256 // 5, 4, False)
    assert found.own == (sum(lengths) - 4 * 256) // 5
    assert find_shared_prefixes(table[::2], [300, 302, 100]).ordered


def test_groups_are_numbered_by_their_first_request():
    """Not by their pages, so that neighbours are in order."""
    found = find_shared_prefixes([[9], [9], [1], [1]], [65] * 4)
    assert found.prefix_of.tolist() == [[0, 0, 1, 1]] and found.ordered


def test_a_bound_keeps_the_shape_and_what_saves_most():
    table = [[1, 2, 3], [1, 2, 4], [5, 6, 7], [5, 6, 8], [5, 6, 9]]
    found = find_shared_prefixes(table, [192] * 5, groups=1)
    assert found.prefix_of.tolist() == [[-1, -1, 0, 0, 0], [-1] * 5]
    assert found.prefix_length.tolist() == [[128], [0]]
    assert found.tokens is None and found.own is None
    apart = find_shared_prefixes([[1], [2]], [64, 64], groups=3)
    assert apart.prefix_of.tolist() == [[-1, -1]] * 2 and apart.groups == 3
    assert find_shared_prefixes([], []).levels == 0


TRUNK = [0, 1, 2, 3, 4, 5]
NESTED = [
    TRUNK[:1], TRUNK[:3], TRUNK, [*TRUNK, 20, 21, 22, 23], [*TRUNK, 24], [*TRUNK, 6, 25],
    [*TRUNK, 6, 7, 8, 9], [*TRUNK, *range(6, 14)], [0, 26],
]  # fmt: skip
"""Savings at the last level change twice with the pages before them; random forks rarely do."""


def test_no_grouping_of_forks_saves_more():
    chance = random.Random(6)
    tables = [NESTED]
    for _ in range(300):
        table: list[list[int]] = []
        for fork in range(chance.randrange(1, 30)):
            row = list(chance.choice(table)) if table else []
            table.append([*row[: chance.randrange(len(row) + 1)], fork, *range(50, 50 + fork % 4)])
        tables.append(table)
    for table in tables:
        counts = [len(row) for row in table]
        padded = [row + [0] * (max(counts) - len(row)) for row in table]
        for levels in (1, 2):
            found = find_shared_prefixes(padded, counts, page_size=1, queries=0, levels=levels)
            assert saved_by(found, table, 1) == most_by_trees(table, 0, 0, levels)


def test_the_work_does_not_grow_with_the_square_of_the_requests(monkeypatch):
    """34 s for 2048 requests, each of which continues the one before: deep, but no recursion."""
    calls, plain = [0], find._Run.saves

    def counted(run, start):
        calls[0] += 1
        return plain(run, start)

    monkeypatch.setattr(find._Run, "saves", counted)
    b = 300
    table = [list(range(r + 1)) + [1000 + r] * (b - r) for r in range(b)]
    found = find_shared_prefixes(table, [r + 2 for r in range(b)], page_size=1, queries=0)
    assert 0 < calls[0] < 5 * b
    assert found.levels == 2 and found.most is not None and found.most > b // 3


def test_bad_tables():
    with pytest.raises(InvalidArgumentError, match="device: expected a device of this machine"):
        find_shared_prefixes([[1]], [64], device="cudaa")
    for table, lengths in (([[1]], 5), (None, [1]), ([1], [64]), ([["a"]], ["b"])):
        with pytest.raises(
            InvalidArgumentError, match="block_table: expected rows of page numbers"
        ):
            find_shared_prefixes(table, lengths)
    with pytest.raises(InvalidArgumentError, match="lengths: expected numbers of tokens from 0"):
        find_shared_prefixes([[1, 2]], [-5])
    with pytest.raises(InvalidArgumentError, match="lengths: expected b=2 numbers, got 1"):
        find_shared_prefixes([[1], [2]], [3])
    for name, value, least in (
        ("page_size", 0, "a pos"),
        ("groups", 0, "a pos"),
        ("queries", -1, "an"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected {least}.*, got {value}"):
            find_shared_prefixes([[1]], [3], **{name: value})
    with pytest.raises(InvalidArgumentError, match="levels: expected an integer from 1 to 2"):
        find_shared_prefixes([[1]], [3], levels=3)
