"""Tile scheduler of the latent kernel: the work tiles of a CTA, one after another.

A CTA group has a range of work items (`ranges.py`). A *work tile* is what one CTA does of an item:
one query tile against the item's KV blocks.
"""

import dataclasses
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK_BITS,
    MOST_TAKEN,
    RANGE_WORDS,
    ROWS,
    THREADS,
    VECTOR_BITS,
)
from mla_var3.kernel.cute_python.mla.latent import ranges
from mla_var3.kernel.cute_python.mla.latent.balance import NO_VISIT, balanced, item_at
from mla_var3.kernel.cute_python.mla.latent.mask import causal_limit, window_begin
from mla_var3.kernel.cute_python.mla.latent.ops import (
    IndexTensors,
    LaunchSizes,
    blocks_of,
    divided,
    quotient,
)


class Split(IntEnum):
    """Flags of a split work tile; 0 is a whole one."""

    PARTIAL = 1
    FIRST = 2
    LAST = 4
    HALF = 8
    """Half of an item; the other half is in the same cluster, see `cluster.py`."""


@dataclass
class WorkTile:
    """What a CTA does next: one query tile against some KV blocks of one request.

    Attributes:
        row: the tile's first row among the request's rows.
        base: the request's first row among all rows.
        last: KV block behind the last one.
        split: 0, or how the item is split (`Split`).
    """

    item: Any
    valid: Any
    request: Any
    queries: Any
    row: Any
    base: Any
    rows: Any
    length: Any
    first: Any
    last: Any
    split: Any

    @property
    def pairs(self) -> Any:
        """Pairs of KV blocks; a tile without visible tokens still takes one, all hidden."""
        return cutlass.max((self.last - self.first + 1) >> 1, 1)


@dataclass(frozen=True)
class Scheduler:
    """What decides the work tiles of a CTA.

    Attributes:
        total_lengths: tokens per request over all shards; None where the cache is no shard.
        query_begins: first query of each request and of the one behind the last; None when all
            requests have `queries` of them.
        tree: bytes [b, s, s], not 0 where a query sees one of the newest tokens; None when the
            order of the tokens alone decides.
        queries, total_queries, heads, max_tokens, group_ctas, visits, newest, causal, shards,
            shard: sizes, as in the kernel's contract.
        clusters: whether CTAs of equal rank in two neighbouring groups are a cluster; constant.
        tile_rows: query rows of a tile; constant.
        taken: the group's items in shared memory where they may be balanced, see `balance.py`.
        first: the CTA's first work tile where a schedule has it.
    """

    range: ranges.WorkRange
    lengths: Any
    total_lengths: Any
    query_begins: Any
    tree: Any
    queries: Any
    total_queries: Any
    heads: Any
    max_tokens: Any
    group_ctas: Any
    visits: Any
    newest: Any
    causal: Any
    shards: Any
    shard: Any
    window: ranges.SlidingWindow | None
    group: Any
    rank: Any
    clusters: bool = False
    taken: Any = None
    first: WorkTile | None = None
    tile_rows: int = ROWS

    @property
    def cluster_rank(self) -> Any:
        """The CTA's place in its cluster."""
        return self.group % ranges.CLUSTER

    @classmethod
    def of(
        cls,
        index: IndexTensors,
        sizes: LaunchSizes,
        group: Any,
        rank: Any,
        clusters: bool = False,
        tile_rows: int = ROWS,
        words: Any = None,
        taken: Any = None,
    ) -> "Scheduler":
        """The scheduler of a CTA, with the range of its group.

        Args:
            words, taken: shared memory for sorting items and for those that the group takes; None
                where they are never balanced.
        """
        lengths, total_lengths, begins = index.lengths, index.total_lengths, index.query_begins
        queries, total_queries, heads = sizes.queries, sizes.total_queries, sizes.heads
        shards, shard, visits = sizes.shards, sizes.shard, sizes.visits
        group_ctas, group_count = sizes.group_ctas, sizes.group_count
        window, packed = None, None
        if sizes.sliding_window is not None:
            window = ranges.SlidingWindow(
                sizes.sliding_window, queries, total_lengths, shards, shard
            )
        if begins is not None:
            packed = ranges.PackedQueries(
                begins, queries, total_queries, heads, group_ctas * tile_rows
            )
        newest, max_tokens = sizes.newest, sizes.max_tokens
        batch = ranges.Batch(lengths, sizes.requests, visits, newest, max_tokens, window, packed)
        items, first = None, None
        if words is not None:
            items = cute.make_tensor(taken, cute.make_layout(MOST_TAKEN))
        if index.schedule is not None:
            cta = group * group_ctas + rank
            own, first = scheduled(index.schedule, cta)
            if items is not None:
                take_items(index.schedule, cta, items, own.balanced)
        else:
            own = ranges.work_range(
                batch, sizes.whole_items, group_ctas, group, group_count, clusters
            )
            if words is not None:
                own = balanced(batch, own, words, items, group_ctas, group, group_count)
        return cls(
            own, lengths, total_lengths, begins, index.tree, queries, total_queries, heads,
            max_tokens, group_ctas, visits, newest, sizes.causal, shards, shard, window, group,
            rank, clusters, items, first, tile_rows,
        )  # fmt: skip

    def first_tile(self) -> WorkTile:
        """The CTA's first work tile."""
        if self.first is None:
            return work_tile_at(self.range.begin, self)
        return dataclasses.replace(self.first)  # a loop over tiles writes into what it begins with

    def next_tile(self, tile: WorkTile) -> WorkTile:
        """The work tile behind `tile`."""
        return work_tile_at(tile.item + self.range.step, self)


RANGE_NUMBERS = "begin", "begin_block", "end", "end_block", "step", "total", "groups"
TILE_NUMBERS = (
    "item", "request", "queries", "row", "base", "rows", "length", "first", "last", "split",
)  # fmt: skip
FLAGS = "halves", "splits", "balanced", "valid"
"""Parts of a `WorkRange` and of its first `WorkTile` in a schedule, see `schedule.py`: a word for
each number, then one for all flags."""
RECORDS_AT = len(RANGE_NUMBERS) + len(TILE_NUMBERS) + 1
"""Where the records of a CTA's partials begin among its words, see `records.Record`."""
ITEMS_AT = RANGE_WORDS - MOST_TAKEN // 2
"""Where the items of its group begin."""


def scheduled(schedule: cute.Tensor, cta: Int32) -> tuple[ranges.WorkRange, WorkTile]:
    """The range and the first work tile of a CTA, from a schedule."""
    count = -(-RECORDS_AT // 4) * 4
    place = (schedule.iterator + cta * RANGE_WORDS).align(VECTOR_BITS // 8)
    words = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(cute.make_tensor(place, cute.make_layout(count)), words)
    numbers = (cute.arch.make_warp_uniform(words[i]) for i in range(RECORDS_AT))
    own = dict(zip((*RANGE_NUMBERS, *TILE_NUMBERS, "flags"), numbers, strict=True))
    flags = own.pop("flags")
    own |= {name: (flags & (1 << bit)) != 0 for bit, name in enumerate(FLAGS)}
    tile = WorkTile(valid=own.pop("valid"), **{name: own.pop(name) for name in TILE_NUMBERS})
    return ranges.WorkRange(**own), tile


@cute.jit
def take_items(schedule: cute.Tensor, cta: Int32, taken: cute.Tensor, balanced: Boolean):
    """The items of a CTA's group where they are `balanced`; all threads of the CTA call it."""
    thread, _, _ = cute.arch.thread_idx()
    items = cute.recast_tensor(taken, Int32)
    if balanced:
        for place in cutlass.range(thread, MOST_TAKEN // 2, THREADS, unroll=1):
            items[place] = schedule[cta, ITEMS_AT + place]


@cute.jit
def work_tile_at(item: Int32, scheduler: cutlass.Constexpr) -> WorkTile:
    """The next work tile of this CTA: in `item`, or in the next item where it has a query tile."""
    own = scheduler.range
    searching = Boolean(True)
    valid = Boolean(False)
    request = Int32(0)
    count = Int32(0)
    row = Int32(0)
    base = Int32(0)
    rows = Int32(0)
    length = Int32(0)
    first = Int32(0)
    last = Int32(0)
    split = Int32(0)
    while searching:
        over = item > own.end or (item == own.end and own.end_block == 0)
        request = divided(item, scheduler.visits)
        visit = item - request * scheduler.visits
        if const_expr(scheduler.taken is not None):
            if own.balanced:
                request, visit = item_at(scheduler.taken, item)
                over = visit == NO_VISIT
        if over:
            searching = Boolean(False)
        else:
            count = scheduler.queries
            base = request * scheduler.queries * scheduler.heads
            if const_expr(scheduler.query_begins is not None):
                begin, count = ranges.packed_queries(
                    request, scheduler.query_begins, scheduler.queries, scheduler.total_queries
                )
                base = begin * scheduler.heads
            row = (visit * scheduler.group_ctas + scheduler.rank) * scheduler.tile_rows
            rows = count * scheduler.heads
            if row < rows:
                searching = Boolean(False)
                valid = Boolean(True)
                length = ranges.tokens_of(scheduler.lengths, request, scheduler.max_tokens)
                blocks = ranges.kv_blocks(scheduler, request)
                if item == own.begin:
                    first = own.begin_block
                last = blocks
                if item == own.end:
                    last = own.end_block
                if first > 0 or last < blocks:
                    split = Int32(Split.PARTIAL)
                    if first == 0:
                        split += Split.FIRST
                    if last == blocks:
                        split += Split.LAST
                if const_expr(scheduler.clusters):
                    if own.halves:
                        half = ranges.half_of(
                            blocks, ranges.split_step(scheduler.group_ctas, scheduler.visits)
                        )
                        first = scheduler.cluster_rank * half
                        last = cutlass.min(blocks, first + half)
                        split = Int32(Split.HALF)
                if const_expr(scheduler.window is not None):
                    skipped = ranges.first_block(scheduler, request)
                    # The first row of the tile sees the oldest tokens.
                    oldest = window_begin(request, length, count, row, scheduler)
                    first = cutlass.max(first + skipped, cutlass.max(oldest, 0) >> KV_BLOCK_BITS)
                    last += skipped
                if scheduler.causal != 0:
                    # The last row of the tile sees most.
                    query = count - 1
                    if row + scheduler.tile_rows < rows:
                        query = quotient(row + scheduler.tile_rows - 1, scheduler.heads)
                    seen = cutlass.max(causal_limit(request, length, count, query, scheduler), 0)
                    last = cutlass.min(last, blocks_of(seen))
                last = cutlass.max(last, first)
            else:  # later visits find no tile either: on to the next request
                rest = (request + 1) * scheduler.visits - item
                if const_expr(scheduler.taken is not None):
                    if own.balanced:
                        rest = Int32(1)
                item += quotient(rest + own.step - 1, own.step) * own.step
    return WorkTile(item, valid, request, count, row, base, rows, length, first, last, split)


@cute.jit
def writes(tile: cutlass.Constexpr, exists: Boolean, group: Int32, scheduler: cutlass.Constexpr):
    """Whether a warpgroup writes a partial, and whether it writes a row at all that may exist.

    Of a half in a cluster each CTA writes the columns that it keeps, which are the result.
    """
    partial = tile.split != 0
    if const_expr(scheduler.clusters):
        if tile.split == Split.HALF:
            partial = Boolean(False)
            exists = exists and group == scheduler.cluster_rank
    return partial, exists


def cta_slot(scheduler: Any) -> Any:
    """The first of the two slots of a CTA for partials."""
    return (scheduler.group * scheduler.group_ctas + scheduler.rank) * 2


@cute.jit
def partial_slot(tile: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> Int32:
    """Where a CTA writes a partial: the even slot for its range's first item, else the odd one."""
    slot = cta_slot(scheduler)
    if tile.item != scheduler.range.begin:
        slot += 1
    return slot
