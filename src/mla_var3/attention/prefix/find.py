"""Finding shared prefixes on the host, from block tables that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.prefix.groups import LEVELS, PrefixGroups
from mla_var3.attention.request.checks import require_device
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import require_int


@dataclass
class _Run:
    """Neighbours in the sorted block tables, `first` to `last`, that begin with the same pages.

    The number of runs `inner` is inside of this one; they come right before it in the list of all.
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
    device = require_device(device)
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
    chosen = _best(_runs([keys[request] for request in order]), levels)
    if groups is not None:
        chosen = [sorted(level, key=lambda one: -one[0].saves(one[1]))[:groups] for level in chosen]
    return _groups(chosen, order, page_size, groups, device, sum(counts))


def _plain(values: Any) -> list[Any]:
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


def _best(runs: Sequence[_Run], levels: int) -> list[list[_Shared]]:
    """What to share at each level so that most reads are saved, in the order of the runs.

    A run is taken, with what the runs inside of it save at the next level, or the runs inside of it
    are considered instead.
    """
    saved: list[int] = []  # of each run and those inside of it
    taken: list[bool] = []  # whether the run itself is shared
    last: list[_LastLevel] = []
    for place, run in enumerate(runs):
        inside = list(_outermost(runs, place - run.inner, place))
        below = 0
        if levels > 1:
            last.append(_LastLevel.of(run, [last[inner] for inner in inside]))
            below = last[-1].below
        alone, apart = run.saves(0) + below, sum(saved[inner] for inner in inside)
        saved.append(max(alone, apart))
        taken.append(alone >= apart)
    first = list(_outermost(runs, 0, len(runs), taken.__getitem__))[::-1]
    chosen = [[(runs[place], 0) for place in first]]
    if levels > 1:
        chosen.append([])
    for place in first if levels > 1 else ():
        run, start = runs[place], runs[place].pages
        inner = _outermost(runs, place - run.inner, place, lambda at: start <= last[at].latest)  # noqa: B023
        chosen[1] += [(runs[at], start) for at in list(inner)[::-1]]
    return chosen


def _outermost(
    runs: Sequence[_Run], begin: int, end: int, taken: Callable[[int], bool] = lambda _: True
) -> Iterator[int]:
    """The runs `begin..end-1` that are taken and inside of no other one that is; the last first."""
    place = end - 1
    while place >= begin:
        if taken(place):
            yield place
            place -= runs[place].inner
        place -= 1


@dataclass
class _LastLevel:
    """What a run and those inside of it save at the last level, by the pages before them.

    Behind x pages that is a number a + b * x, with other a and b from some x on. A run loses more
    with x than those inside of it together, so it is taken up to some x, `latest`, -1 for none, and
    they are from there on. That way a chain of runs, each inside of the next, needs no search at
    each of its starts. `changes` are x, and what is added to a and b from there on; ascending.
    `below` is what those inside of the run save behind it.
    """

    a: int
    b: int
    changes: list[tuple[int, int, int]]
    last_a: int
    last_b: int
    latest: int = -1
    below: int = 0

    @classmethod
    def of(cls, run: _Run, inside: Sequence[_LastLevel]) -> _LastLevel:
        """Of a run, and the outermost of those inside of it."""
        changes = inside[0].changes if len(inside) == 1 else []
        if len(inside) > 1:
            changes = sorted(change for inner in inside for change in inner.changes)
        found = cls(
            sum(inner.a for inner in inside), sum(inner.b for inner in inside), changes,
            sum(inner.last_a for inner in inside), sum(inner.last_b for inner in inside),
        )  # fmt: skip
        while changes and changes[-1][0] > run.pages:  # nobody asks beyond
            _, more_a, more_b = changes.pop()
            found.last_a, found.last_b = found.last_a - more_a, found.last_b - more_b
        found.below = found.last_a + found.last_b * run.pages
        found._take(run.saves(0), run.last - run.first, run.pages)
        return found

    def _take(self, most: int, step: int, pages: int) -> None:
        """Take the run, which saves `most - step * x`, as long as it saves no less."""
        a, b, passed = self.a, self.b, 0
        for x, more_a, more_b in self.changes:
            if most - step * x < a + more_a + (b + more_b) * x:
                break
            a, b, passed = a + more_a, b + more_b, passed + 1
        end = self.changes[passed][0] - 1 if passed < len(self.changes) else pages
        if b + step:
            end = min(end, (most - a) // (b + step))
        if end < 0:
            return
        self.a, self.b, self.latest = most, -step, end
        self.changes[:passed] = [(end + 1, a - most, b + step)]
        if end == pages:
            self.changes, self.last_a, self.last_b = [], most, -step


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
    # Lists: to write single numbers into a tensor takes torch microseconds each.
    group_of, lengths = ([[empty] * size for _ in chosen] for empty, size in ((-1, b), (0, count)))
    shared, most = 0, 1
    for level, runs in enumerate(chosen):
        found = [(sorted(order[run.first : run.last + 1]), run.pages - at) for run, at in runs]
        for group, (members, pages) in enumerate(sorted(found)):
            for member in members:
                group_of[level][member] = group
            lengths[level][group] = pages * page_size
            shared, most = shared + len(members) * pages * page_size, max(most, len(members))
    of, tokens = (
        torch.tensor(numbers, dtype=torch.int32, device="cpu").view(len(chosen), size)
        for numbers, size in ((group_of, b), (lengths, count))
    )
    ranks = torch.where(of < 0, count, of)
    return PrefixGroups(
        of.to(device),
        tokens.to(device),
        ordered=bool((ranks[:, 1:] >= ranks[:, :-1]).all()) and bound is None,
        tokens=shared // max(b, 1) if bound is None else None,
        own=(total - shared) // max(b, 1) if bound is None else None,
        most=most if bound is None else None,
    )
