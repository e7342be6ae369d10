"""Tile scheduler of the decompressed kernel: what a CTA does next, and what its rows see.

A work tile is 64 query rows for each of two warpgroups against some KV blocks: two heads of one
query tile ("heads"), or two query tiles of one head, which then read the same keys and values
("tiles"). CTAs are persistent and take every `ctas`-th work tile. Neighbours in this order share
data: the heads of a request share its rope keys, the query tiles of a head its keys and values.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import CONSUMER_WARPGROUPS, KV_BLOCK, ROWS

LEAST_BLOCKS = 4
"""KV blocks of a split at least: a shorter one does not fill the pipeline of three to five stages.
Other numbers were not measured."""
MOST_SPLITS = 32
"""Splits of a request at most. Not measured."""
SPLIT_COST = 0.01
"""Share of the SMs that one more split has to put to work, because it makes the merge longer. Not
measured on its own; docs/results/2026-11-15-nvidia-h200-mix-development.md has runs with it."""


def choose_splits(requests: int, request_tiles: int, kv_blocks: int, ctas: int) -> int:
    """Splits to make of each request's tokens, so that few work tiles still fill the SMs."""
    work_tiles = requests * request_tiles
    most = max(1, kv_blocks // LEAST_BLOCKS)
    if work_tiles >= 2 * ctas:
        return 1

    def worth(splits: int) -> float:
        rounds = -(-work_tiles * splits // ctas)
        return work_tiles * splits / (rounds * ctas) - SPLIT_COST * splits

    return max(range(1, min(most, MOST_SPLITS) + 1), key=worth)


class Sizes(NamedTuple):
    """Numbers of `Scheduler`, in the order of the kernel's arguments."""

    requests: Any
    queries: Any
    heads: Any
    slots: Any
    kept: Any
    causal: Any
    splits: Any


@dataclass(frozen=True)
class Scheduler:
    """What decides the work tiles: sizes of the problem, as in the kernel's contract.

    Attributes:
        kept: tokens that are decompressed, per request.
        pair_tiles: whether a work tile is two query tiles of a head; constant.
        shared: whether all requests have the same keys and values, a prefix; constant.
        starts: in a ring the oldest position that it holds, per request; None when the slots are
            in order.
        alone: whether no other kernel attends to the tokens before a ring; constant.
    """

    lengths: Any
    requests: Any
    queries: Any
    heads: Any
    slots: Any
    kept: Any
    causal: Any
    splits: Any
    pair_tiles: bool
    shared: bool
    starts: Any = None
    alone: bool = False
    kv_block: int = KV_BLOCK

    @property
    def ring(self) -> bool:
        """Whether slot x holds the position with position % kept == x; constant."""
        return self.starts is not None

    @property
    def rows(self) -> Any:
        """Query rows of a head that meet the same keys."""
        return self.requests * self.queries if self.shared else self.queries

    @property
    def row_tiles(self) -> Any:
        """Query tiles of a head."""
        return (self.rows + ROWS - 1) // ROWS

    @property
    def request_tiles(self) -> Any:
        """Work tiles of a request without splits."""
        if self.pair_tiles:
            return self.heads * ((self.row_tiles + 1) // CONSUMER_WARPGROUPS)
        return (self.heads + 1) // CONSUMER_WARPGROUPS * self.row_tiles

    @property
    def work_tiles(self) -> Any:
        """All work tiles."""
        return (1 if self.shared else self.requests) * self.request_tiles * self.splits


@dataclass
class WorkTile:
    """A work tile.

    Attributes:
        request: whose keys and values.
        head, tile: head and query tile of warpgroup 0; the other one has the next head or tile.
        tokens: decompressed tokens that exist.
        first, last: KV blocks, `last` excluded; at least one, so that a work tile without tokens
            is no exception for the consumers.
        stop: the first token behind the split's.
        oldest_slot: in a ring the slot of its oldest place; 0 elsewhere.
        dropped: in a ring the places before its oldest token; 0 elsewhere.
        incomplete: whether tokens of a ring are missing.
    """

    request: Any
    head: Any
    tile: Any
    split: Any
    tokens: Any
    first: Any
    last: Any
    stop: Any
    oldest_slot: Any
    dropped: Any
    incomplete: Any


@cute.jit
def work_tile_at(index: Int32, scheduler: cutlass.Constexpr) -> WorkTile:
    """The work tile of a number; the producer and the consumers get the same one."""
    request_tiles = scheduler.request_tiles
    unit = index % request_tiles
    request = index // request_tiles % (scheduler.work_tiles // (request_tiles * scheduler.splits))
    split = index // (scheduler.work_tiles // scheduler.splits)
    if const_expr(scheduler.pair_tiles):
        pairs = (scheduler.row_tiles + 1) // CONSUMER_WARPGROUPS
        head, tile = unit // pairs, unit % pairs * CONSUMER_WARPGROUPS
        last_tile = tile + CONSUMER_WARPGROUPS - 1
    else:
        pairs = (scheduler.heads + 1) // CONSUMER_WARPGROUPS
        head, tile = unit % pairs * CONSUMER_WARPGROUPS, unit // pairs
        last_tile = tile
    if const_expr(scheduler.shared):
        tokens = scheduler.kept
        seen = tokens
    else:
        length = scheduler.lengths[request]
        tokens = cutlass.min(length, scheduler.kept)
        seen = tokens
        # The newest tokens of a ring may be anywhere in it, so all of its blocks are read.
        if const_expr(not scheduler.ring):
            if scheduler.causal != 0:  # the last row sees most
                last_row = cutlass.min(last_tile * ROWS + ROWS, scheduler.queries)
                seen = cutlass.min(seen, cutlass.max(tokens - scheduler.queries + last_row, 0))
    kv_block = scheduler.kv_block
    blocks = (tokens + kv_block - 1) // kv_block
    first = blocks * split // scheduler.splits
    last = cutlass.min(blocks * (split + 1) // scheduler.splits, (seen + kv_block - 1) // kv_block)
    stop = last * kv_block
    oldest_slot, dropped, incomplete = Int32(0), Int32(0), Boolean(False)
    if const_expr(scheduler.ring):
        oldest_slot, dropped, incomplete = ring_state(request, scheduler)
    last = cutlass.max(last, first + 1)
    return WorkTile(
        request, head, tile, split, tokens, first, last, stop, oldest_slot, dropped, incomplete
    )


@cute.jit
def warpgroup_rows(work_tile: cutlass.Constexpr, group: Int32, scheduler: cutlass.Constexpr):
    """The rows of a warpgroup in a work tile.

    Returns:
        Their head, the first of them among those of the head, and the same among all rows of
        queries and outputs.
    """
    head = work_tile.head if scheduler.pair_tiles else work_tile.head + group
    first = (work_tile.tile + group) * ROWS if scheduler.pair_tiles else work_tile.tile * ROWS
    start = (Int64(work_tile.request) * scheduler.queries + first) * scheduler.heads + head
    return head, first, start


@cute.jit
def ring_state(request: Int32, scheduler: cutlass.Constexpr):
    """The slot of a ring's oldest place, the places before its oldest token, and if any is missing.

    Tokens are missing where the ring begins later than its places allow and the kernel of the older
    tokens, which shows them to every query, must not show them to some; or where there is none.
    """
    length = scheduler.lengths[request]
    start = cutlass.min(scheduler.starts[request], length)
    oldest = cutlass.max(length - scheduler.kept, 0)
    seen_by_all = length
    if scheduler.causal != 0:
        seen_by_all = cutlass.max(length - scheduler.queries + 1, 0)
    if const_expr(scheduler.alone):
        seen_by_all = Int32(0)
    return oldest % scheduler.kept, start - oldest, start < oldest or start > seen_by_all


@cute.jit
def row_limit(work_tile: cutlass.Constexpr, row: Int32, scheduler: cutlass.Constexpr) -> Int32:
    """How many of the decompressed tokens a row sees."""
    if const_expr(scheduler.shared):
        request = cutlass.min(row // scheduler.queries, scheduler.requests - 1)
        length = scheduler.lengths[request]
        limit = cutlass.min(length, work_tile.tokens)
        if scheduler.causal != 0:
            limit = cutlass.min(limit, length - scheduler.queries + row % scheduler.queries + 1)
    else:
        limit = work_tile.tokens
        if scheduler.causal != 0:
            limit = cutlass.min(limit, work_tile.tokens - scheduler.queries + row + 1)
    if const_expr(scheduler.ring):
        # Counted by position, which says nothing about blocks: all of the split's, or none.
        if work_tile.stop <= work_tile.first * scheduler.kv_block:
            limit = Int32(0)
    else:
        limit = cutlass.min(limit, work_tile.stop)
    return limit


@cute.jit
def places_end(token: Int32, work_tile: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> Int32:
    """The place behind the newest one of a KV block of a ring."""
    end = token + KV_BLOCK
    if token < work_tile.oldest_slot:  # some slots, at least, hold the newer part
        end = cutlass.min(end, work_tile.oldest_slot) + scheduler.kept
    return end - work_tile.oldest_slot


@cute.jit
def place_of(slot: Int32, work_tile: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> Int32:
    """The place of a slot of a ring in the order of positions, counted from the oldest place."""
    place = slot - work_tile.oldest_slot
    if place < 0:
        place += scheduler.kept
    return place


@cute.jit
def row_exists(head: Int32, row: Int32, scheduler: cutlass.Constexpr) -> Boolean:
    """Whether there is such a row."""
    return row < scheduler.rows and head < scheduler.heads
