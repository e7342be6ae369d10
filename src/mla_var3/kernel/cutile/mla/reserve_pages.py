"""reserve_pages, release_pages, copy_pages: the lengths and pages of a latent cache.

    lengths, refused [b] int32    tokens of each request; tokens that did not fit
    counts                        int32 or int64: [b] tokens of each request, or [b+1] first rows of
                                  packed requests; int8 [b], requests to empty
    block_table [b, max_pages]    int32, -1 without a page
    owners [num_pages] int32      requests that hold each page
    free [num_pages] int32        stack of free pages, of which the first free_count [1] are valid
    taken [b] int32               out: tokens that were taken
    sources [b] int32             out: page to copy before tokens are written, -1 without one

The results are those of `PagePool` in `attention/cache/pages.py`, bit by bit, with the same order
of pages on the stack. A dense cache has lengths only.

`reserve_pages` and `release_pages` are one CTA each, so that nothing depends on the order of CTAs:
a tile has one element per request, or a few pages of each. Atomics count the owners of pages that
several requests give up; what decides about the order on the stack does not depend on who came
first. All accesses are checked against the bounds of their array, whatever the device holds.

For sm_80 and newer. At most MOST_REQUESTS requests, and MOST_ENTRIES entries of the block table.
"""

from typing import NamedTuple

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.runtime.ct_kernel import Launch

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

MOST_REQUESTS = 1024
MOST_ENTRIES = 1 << 30
TILE = 1024
"""Elements of a tile of requests, and of one of pages. From 2048 on the compiler (tileiras 13.4)
spills registers on sm_90 and makes warps wait for each other on barriers."""
COPY_WORDS = 2048
"""Words of 4 bytes of a page that a CTA copies."""

ALL, COUNTS, BOUNDS = 0, 1, 2
"""What `counts` holds: nothing, every request has `most`; a count per request; first rows."""
LOSE, MARK, COUNT, PUSH = range(4)
"""Phases of giving up pages."""
NO_PAGE = -1
RELAXED = ct.MemoryOrder.RELAXED
"""One CTA updates the owners, and its own accesses to an array are in order."""


@ct.function
def pages_of(tokens, PAGE):
    # Rounded up, without overflow; 0 for 0.
    return (tokens - 1) // PAGE + 1


@ct.function
def marks_of(entries):
    # Below zero and ascending with the entry, to be told from a number of owners.
    return entries - MOST_ENTRIES


@ct.function
def disown(owners, free, count, pages, lost, b):
    # One page per request, pages [B], lost [B]: take away an owner; the stack gets those without
    # any, by the first request that lost them, the first on top. Returns the new count [1].
    pages = ct.where(lost, pages, NO_PAGE)  # no access out of bounds
    ct.atomic_add(owners, pages, -1, memory_order=RELAXED)
    requests = ct.arange(b, dtype=ct.int32)
    marks = marks_of(requests)
    left = ct.gather(owners, pages, padding_value=1)
    unowned = ct.where(left <= 0, pages, NO_PAGE)
    ct.atomic_min(owners, unowned, marks, memory_order=RELAXED)
    pushed = ct.gather(owners, pages) == marks
    ranks = ct.cumsum(pushed.astype(ct.int32), 0)
    freed = ct.sum(pushed.astype(ct.int32), 0, keepdims=True)
    ct.scatter(free, count + freed - ranks, pages, mask=pushed)
    ct.scatter(owners, pages, 0, mask=pushed)
    return count + freed


@ct.kernel
def reserve_pages(
    lengths, refused, counts, block_table, owners, free, free_count, taken, sources, most, slots,
    B: ConstInt, STEPS: ConstInt, ONCE: ConstBool, KIND: ConstInt, PAGED: ConstBool,
    PAGE: ConstInt, COPIES: ConstBool,
):  # fmt: skip
    # All tiles [B] unless noted. slots: of a request. STEPS: pages of a request at a time. ONCE:
    # whether none needs more. COPIES: whether pages have several owners.
    ct.grid_dependency_control_launch_dependents()  # `append_rows` reads its rows meanwhile
    requests = ct.arange(B, dtype=ct.int32)
    live = requests < lengths.shape[0]
    # Whatever is read from known places is read before anything waits.
    length = ct.gather(lengths, requests)
    refused_before = ct.gather(refused, requests)
    if PAGED:
        count = ct.gather(free_count, ct.zeros((1,), dtype=ct.int32), check_bounds=False)  # [1]
    if KIND == ALL:
        asked = ct.where(live, most, 0)
    else:
        given = ct.gather(counts, requests).astype(ct.int64)
        if KIND == BOUNDS:
            given = ct.gather(counts, requests + 1).astype(ct.int64) - given
        asked = ct.where(live, ct.minimum(ct.maximum(given, 0), most), 0).astype(ct.int32)
    within = (length >= 0) & (length <= slots) & (asked <= slots - length)
    granted = within
    if PAGED:
        old = ct.where(within, length, 0)
        new = ct.where(within, length + asked, 0)
        held = pages_of(old, PAGE)
        need = pages_of(new, PAGE) - held
        first = held
        if COPIES:
            partial = within & (asked > 0) & (old % PAGE > 0)
            last = ct.gather(block_table, (requests, held - 1), mask=partial, padding_value=NO_PAGE)
            copied = partial & (ct.gather(owners, last) > 1)
            need = need + copied.astype(ct.int32)
            first = held - copied.astype(ct.int32)
        total = ct.cumsum(need, 0)
        granted = within & ((need == 0) | (total <= count))
        before = total - need
        if not COPIES:
            # What is left after the last request that gets pages: the next one, or none, knows it.
            beyond = total > count
            refused_first = beyond & (before <= count)
            left = count - ct.where(beyond, before, total)
            tells = refused_first | (~beyond & (requests == B - 1))
            ct.scatter(free_count, 0 * requests, left, mask=tells)
        need = ct.where(granted, need, 0)
        # Not from `lengths` alone: where the layout of a tile changes, tileiras 13.4 may load such
        # a tile once more, after the store below.
        first = ct.where(granted, first, 0)
        # From here on [STEPS, B]: the pages of every request, STEPS at a time.
        top = (count - 1 - before).reshape((1, B))
        chunks = 1
        if not ONCE:
            chunks = ct.cdiv(ct.max(need), STEPS)
        for chunk in range(chunks):
            step = (chunk * STEPS + ct.arange(STEPS, dtype=ct.int32)).reshape((STEPS, 1))
            wanted = step < need.reshape((1, B))
            page = ct.gather(free, top - step, mask=wanted, padding_value=NO_PAGE)
            places = (requests.reshape((1, B)), first.reshape((1, B)) + step)
            ct.scatter(block_table, places, page, mask=wanted)
            ct.scatter(owners, page, 1, mask=wanted)
        if COPIES:
            count = count - ct.sum(need, 0, keepdims=True)
            copied = copied & granted
            ct.scatter(sources, requests, ct.where(copied, last, NO_PAGE))
            if ct.max(copied.astype(ct.int32)) > 0:
                count = disown(owners, free, count, last, copied, B)
            ct.store(free_count, (0,), count)
    fits = ct.where(granted, asked, 0)
    ct.scatter(taken, requests, fits)
    ct.scatter(lengths, requests, length + fits)
    ct.scatter(refused, requests, refused_before + asked - fits)


@ct.function
def request_of(rows, ends, b, SEARCH):
    # rows [R] -> [R]: the first request whose end is beyond the row; b where there is none.
    low = ct.zeros(rows.shape, dtype=ct.int32)
    high = low + b
    for _ in range(SEARCH):
        middle = (low + high) // 2
        beyond = (low < high) & (ct.gather(ends, middle) <= rows)
        high = ct.where(beyond | (low >= high), high, middle)
        low = ct.where(beyond, middle + 1, low)
    return low


@ct.function
def dropped_pages(lengths, block_table, owners, ends, chunk, PAGE, SEARCH):
    # Dropped entries of the block table, in order: their numbers, requests, columns, pages and
    # whether there is a page, all [TILE].
    entries = chunk * TILE + ct.arange(TILE, dtype=ct.int32)
    requests = request_of(entries, ends, lengths.shape[0], SEARCH)
    keep = pages_of(ct.gather(lengths, requests), PAGE)
    columns = keep + entries - ct.gather(ends, requests - 1)  # 0 before the first request
    pages = ct.gather(block_table, (requests, columns), padding_value=NO_PAGE)
    return entries, requests, columns, pages, (pages >= 0) & (pages < owners.shape[0])


@ct.kernel
def release_pages(
    lengths, refused, counts, block_table, owners, free, free_count, ends, least,
    B: ConstInt, SEARCH: ConstInt, EVICT: ConstBool, PAGED: ConstBool, PAGE: ConstInt,
):  # fmt: skip
    # EVICT: counts are the requests to empty, otherwise the tokens to drop. least: shared tokens.
    # ends [b]: workspace. All tiles [B] until the loops.
    requests = ct.arange(B, dtype=ct.int32)
    length = ct.gather(lengths, requests)
    if EVICT:
        gone = ct.gather(counts, requests) != 0
        left = ct.where(gone, 0, length)
        ct.scatter(refused, requests, 0, mask=gone)
    else:
        fewer = ct.maximum(ct.gather(counts, requests).astype(ct.int64), 0)
        left = length - ct.minimum(fewer, length.astype(ct.int64)).astype(ct.int32)
    left = ct.maximum(left, least)
    ct.scatter(lengths, requests, left)
    if PAGED:
        held = ct.minimum(pages_of(length, PAGE), block_table.shape[1])
        dropped = ct.maximum(held - pages_of(left, PAGE), 0)
        ct.scatter(ends, requests, ct.cumsum(dropped, 0))
        chunks = ct.cdiv(ct.sum(dropped), TILE)
        pushed = ct.zeros((1,), dtype=ct.int32)
        most_owners = ct.zeros((), dtype=ct.int32)
        for chunk in range(chunks):
            _, _, _, pages, found = dropped_pages(
                lengths, block_table, owners, ends, chunk, PAGE, SEARCH
            )
            pushed = pushed + ct.sum(found.astype(ct.int32), 0, keepdims=True)
            most_owners = ct.maximum(most_owners, ct.max(ct.gather(owners, pages)))
        # A page with several owners may be dropped several times, and may keep an owner. Then all
        # dropped pages lose an owner first; the first entry that dropped a page without further
        # owners marks it; marked entries are counted and pushed. One loop goes through these
        # phases.
        first_phase = PUSH
        if most_owners > 1:
            first_phase = LOSE
            pushed = ct.zeros((1,), dtype=ct.int32)
        count = ct.load(free_count, (0,), (1,))
        done = ct.zeros((1,), dtype=ct.int32)
        for turn in range((PUSH + 1 - first_phase) * chunks):
            phase = first_phase + turn // chunks
            entries, rows, columns, pages, found = dropped_pages(
                lengths, block_table, owners, ends, turn % chunks, PAGE, SEARCH
            )
            marks = marks_of(entries)
            if phase == LOSE:
                ct.atomic_add(owners, pages, -1, memory_order=RELAXED)
            else:
                owned = ct.gather(owners, pages, padding_value=1)
                if phase == MARK:
                    unowned = ct.where(owned <= 0, pages, NO_PAGE)
                    ct.atomic_min(owners, unowned, marks, memory_order=RELAXED)
                else:
                    wins = found & ((most_owners <= 1) | (owned == marks))
                    ranks = ct.cumsum(wins.astype(ct.int32), 0)
                    if phase == COUNT:
                        pushed = pushed + ct.max(ranks, 0, keepdims=True)
                    else:
                        # The first entry ends up on top.
                        ct.scatter(free, count + pushed - done - ranks, pages, mask=wins)
                        ct.scatter(owners, pages, 0, mask=wins)
                        ct.scatter(block_table, (rows, columns), NO_PAGE, mask=found)
                        done = done + ct.max(ranks, 0, keepdims=True)
        ct.store(free_count, (0,), count + pushed)


@ct.kernel
def copy_pages(words: ct.IndexedWithInt64, sources, taken, lengths, block_table, PAGE: ConstInt):
    # words [pages, 4-byte words of a page]. A CTA copies COPY_WORDS of the page that a request
    # appends to, from the page that others keep.
    request = ct.bid(0)
    part = ct.bid(1)
    source = ct.load(sources, (request,), ()).item()
    if source >= 0:
        start = ct.load(lengths, (request,), ()) - ct.load(taken, (request,), ())
        target = ct.gather(block_table, (request, start // PAGE), padding_value=NO_PAGE)
        if (target >= 0) & (target < words.shape[0]) & (source < words.shape[0]):
            page = ct.load(
                words, (source, part), (1, COPY_WORDS), padding_mode=ct.PaddingMode.ZERO,
                allow_tma=False,
            )  # fmt: skip
            ct.store(words, (target, part), page, allow_tma=False)


def serves(b: int, max_pages: int) -> bool:
    """Whether one CTA serves so many requests with so many pages each."""
    return b <= MOST_REQUESTS and b * (max_pages + 1) < MOST_ENTRIES


class Pool(NamedTuple):
    """The tensors of a paged cache, see the module; a dense cache has none."""

    block_table: Tensor
    owners: Tensor
    free: Tensor
    free_count: Tensor
    page_size: int


def reserve_launch(
    lengths: Tensor,
    refused: Tensor,
    counts: Tensor | None,
    pool: Pool | None,
    taken: Tensor,
    sources: Tensor | None,
    *,
    most: int,
    slots: int,
) -> Launch:
    """The launch of `reserve_pages`; `lengths` grow by what is taken, `refused` by what is not.

    Args:
        lengths: And the other tensors: see the module.
        counts: None for `most` of each request.
        sources: None where no page has several owners.
        most: Host-side bound on the tokens of a request.
        slots: Tokens that a request can have.
    """
    b = lengths.shape[0]
    rows, page = power_of_two(b), 1 if pool is None else pool.page_size
    kind = ALL if counts is None else COUNTS if counts.shape[0] == b else BOUNDS
    pages = max(1, -(-most // page) + (sources is not None))  # of a request, at most
    steps = min(power_of_two(pages), TILE // rows)
    tables = (lengths,) * 4 if pool is None else pool[:4]
    return Launch(
        reserve_pages,
        (1, 1, 1),
        (
            lengths, refused, lengths if counts is None else counts, *tables, taken,
            taken if sources is None else sources, most, slots,
        ),
        (rows, steps, pages <= steps, kind, pool is not None, page, sources is not None),
    )  # fmt: skip


def release_launch(
    lengths: Tensor, refused: Tensor, dropped: Tensor, pool: Pool | None, least: int
) -> Launch:
    """The launch of `release_pages`; `dropped` are `counts`, `least` the first tokens that stay."""
    b, evict = lengths.shape[0], dropped.dtype is torch.int8
    tables = (lengths,) * 4 if pool is None else pool[:4]
    page = 1 if pool is None else pool.page_size
    return Launch(
        release_pages,
        (1, 1, 1),
        (lengths, refused, dropped, *tables, torch.empty_like(lengths), least),
        (power_of_two(b), b.bit_length(), evict, pool is not None, page),
    )


def copy_launch(
    buffer: Tensor, sources: Tensor, taken: Tensor, lengths: Tensor, pool: Pool
) -> Launch:
    """The launch of `copy_pages`, after `reserve_pages` and before rows are written.

    The buffer is `[pages, page, ...]`, contiguous, of any dtype.
    """
    words = buffer.view(buffer.shape[0], -1).view(torch.int32)
    parts = -(-words.shape[1] // COPY_WORDS)
    return Launch(
        copy_pages,
        (lengths.shape[0], parts, 1),
        (words, sources, taken, lengths, pool.block_table),
        (pool.page_size,),
    )


def power_of_two(least: int) -> int:
    """The lowest power of two that is not below."""
    return 1 << max(0, least - 1).bit_length()
