"""Finding shared prefixes on the host, from block tables that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.prefix.groups import LEVELS, PrefixGroups
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import require_int


@dataclass
class _Run:
    """Neighbours in the sorted block tables that begin with the same pages.

    Attributes:
        first, last: the neighbours, both included.
        pages: pages that all of them share.
        inner: runs inside of this one; they come right before it in the list of all runs.
    """

    first: int
    last: int
    pages: int
    inner: int = 0

    def saves(self, start: int) -> int:
        """Pages that need not be read again when those behind `start` are read once."""
        return (self.last - self.first) * (self.pages - start)


_Shared = tuple[_Run, int]
"""A run whose pages are read once, and the pages before them that the level above reads."""


def find_shared_prefixes(
    block_table: Any,
    lengths: Any,
    *,
    page_size: int = 64,
    queries: int = 1,
    levels: int = LEVELS,
    groups: int | None = None,
    device: torch.device | str = "cpu",
) -> PrefixGroups:
    """Groups of requests whose block tables begin with the same pages, chosen to save most reads.

    A group is all requests that begin with some pages, and a group of level 1 all requests of a
    group of level 0 that continue with some.

    Args:
        block_table: `[b, max_pages]`, lists, a numpy array or a CPU tensor; entries beyond a
            request's tokens may be anything.
        lengths: tokens of each request, `[b]`, likewise.
        page_size: tokens per page.
        queries: most query tokens of any request; they are never in a prefix.
        levels: most levels, 1 or 2.
        groups: bound on the groups of a level. The result then always has `levels` levels of so
            many groups, for a CUDA graph, and the groups that save least are left out. None for as
            many as there are.
        device: where the result goes.

    Returns:
        The groups. Without a bound and with nothing shared they have no level, and a call with
        them is a call without.

    Example:
        >>> find_shared_prefixes([[4, 9, 7], [4, 9, 2], [5, 1, 0]], [150, 140, 130])
        PrefixGroups(prefix_of=tensor([[ 0,  0, -1]], ...), prefix_length=tensor([[128]], ...), ...)
    """
    require_int("levels", levels, minimum=1, maximum=LEVELS)
    require_int("page_size", page_size, minimum=1)
    require_int("queries", queries, minimum=0)
    if groups is not None:
        require_int("groups", groups, minimum=1)
    try:
        counts, table = _plain(lengths), _plain(block_table)
        if len(counts) != len(table):
            raise InvalidArgumentError("lengths", f"b={len(table)} numbers", len(counts))
        if min(counts, default=0) < 0:
            raise InvalidArgumentError("lengths", "numbers of tokens from 0 on", min(counts))
        keys = [
            tuple(row[: max(0, length - queries) // page_size])
            for row, length in zip(table, counts, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
    except TypeError as error:
        raise InvalidArgumentError(
            "block_table", "rows of page numbers, and `lengths` one number of tokens per row", error
        ) from error
    _, chosen = _best(_runs([keys[request] for request in order]), 0, levels)
    if groups is not None:
        chosen = [sorted(level, key=lambda one: -one[0].saves(one[1]))[:groups] for level in chosen]
    return _groups(chosen, order, page_size, groups, device, sum(counts))


def _plain(values: Any) -> list[Any]:
    """Lists of what a tensor or an array holds."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _runs(keys: Sequence[tuple[int, ...]]) -> list[_Run]:
    """All runs of sorted keys that share at least one page, inner ones before outer ones."""
    found: list[_Run] = []
    open_runs: list[tuple[_Run, int]] = []  # with the number of runs before
    for place in range(1, len(keys) + 1):
        common = _common(keys[place - 1], keys[place]) if place < len(keys) else 0
        first, before = place - 1, len(found)
        while open_runs and open_runs[-1][0].pages > common:
            run, before = open_runs.pop()
            run.last, run.inner = place - 1, len(found) - before
            found.append(run)
            first = run.first
        if common and (not open_runs or open_runs[-1][0].pages < common):
            open_runs.append((_Run(first, first, common), before))
    return found


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _best(runs: Sequence[_Run], start: int, levels: int) -> tuple[int, list[list[_Shared]]]:
    """What saves most of the pages behind `start`: how many, and per level what is shared.

    At each level a run is taken, with what its inner runs save at the next level, or its inner runs
    are taken instead.
    """
    if levels == 0:
        return 0, []
    best: list[tuple[int, list[list[_Shared]]]] = []  # of each run and those inside of it

    def outermost(begin: int, end: int) -> tuple[int, list[list[_Shared]]]:
        chosen: list[list[_Shared]] = [[] for _ in range(levels)]
        saved, place = 0, end - 1
        while place >= begin:
            saved += best[place][0]
            chosen = [[*more, *found] for more, found in zip(best[place][1], chosen, strict=True)]
            place -= runs[place].inner + 1
        return saved, chosen

    for place, run in enumerate(runs):
        first = place - run.inner
        saved, below = _best(runs[first:place], run.pages, levels - 1)
        taken = run.saves(start) + saved, [[(run, start)], *below]
        apart = outermost(first, place)
        best.append(taken if taken[0] >= apart[0] else apart)
    return outermost(0, len(runs))


def _groups(
    chosen: Sequence[Sequence[_Shared]],
    order: Sequence[int],
    page_size: int,
    bound: int | None,
    device: torch.device | str,
    total: int,
) -> PrefixGroups:
    """The groups of what was chosen, numbered by their first request; `total` tokens in all."""
    if bound is None:
        chosen = [level for level in chosen if level]
    b, count = len(order), bound or max((len(level) for level in chosen), default=1)
    of = torch.full((len(chosen), b), -1, dtype=torch.int32, device="cpu")
    tokens = torch.zeros((len(chosen), count), dtype=torch.int32, device="cpu")
    shared, most = 0, 1
    for level, runs in enumerate(chosen):
        found = [(sorted(order[run.first : run.last + 1]), run.pages - at) for run, at in runs]
        for group, (members, pages) in enumerate(sorted(found)):
            of[level, members] = group
            tokens[level, group] = pages * page_size
            shared, most = shared + len(members) * pages * page_size, max(most, len(members))
    ranks = torch.where(of < 0, count, of)
    return PrefixGroups(
        of.to(device),
        tokens.to(device),
        ordered=bool((ranks[:, 1:] >= ranks[:, :-1]).all()) and bound is None,
        tokens=shared // max(b, 1) if bound is None else None,
        own=(total - shared) // max(b, 1) if bound is None else None,
        most=most if bound is None else None,
    )
