"""Tile scheduler of the latent kernel: the work tiles of a CTA, one after another.

A CTA group has a range of work items (`ranges.py`). A *work tile* is what one CTA does of an item:
one query tile against the item's KV blocks.
"""

import dataclasses
import functools
import operator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK_BITS,
    MOST_CTAS,
    MOST_TAKEN,
    RANGE_WORDS,
    ROWS,
    THREADS,
    VECTOR_BITS,
)
from mla_var3.kernel.cute_python.mla.latent.balance import NO_VISIT, balanced, item_at
from mla_var3.kernel.cute_python.mla.latent.mask import causal_limit, window_begin
from mla_var3.kernel.cute_python.mla.latent.ops import blocks_of, divided, quotient
from mla_var3.kernel.cute_python.mla.latent.ranges import (
    CLUSTER,
    Batch,
    PackedQueries,
    SlidingWindow,
    WorkRange,
    first_block,
    half_of,
    kv_blocks,
    packed_queries,
    split_step,
    tokens_of,
    work_range,
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
        item: number of the work item.
        valid: whether there is one.
        request: its request.
        queries: query tokens of the request.
        row: the tile's first row among the request's rows.
        base: the request's first row among all rows.
        rows: rows of the request.
        length: tokens of the request.
        first: first KV block.
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


RANGE_NUMBERS = "begin", "begin_block", "end", "end_block", "step", "total", "groups"
RANGE_FLAGS = "halves", "splits", "balanced"
TILE_NUMBERS = (
    "item", "request", "queries", "row", "base", "rows", "length", "first", "last", "split",
)  # fmt: skip
"""Parts of a `WorkRange` and of a `WorkTile` that the launches of a step share. A flag more says
whether the tile is valid."""
HEAD_WORDS = RANGE_WORDS - MOST_TAKEN // 2
"""Words of a CTA before its items: the key, the flags and these numbers."""


@dataclass(frozen=True)
class StepRange:
    """The range and the first work tile of a CTA as the launches of a step share them.

    The layers of a model attend to tokens of the same lengths. The launch of the first one finds
    its ranges like any other and writes them. Later ones read them: they load KV blocks after fewer
    steps, and less of their code, which is cold behind other kernels, is fetched. A key stands for
    the sizes that ranges follow from. A launch that finds another one finds its range by itself.
    Lengths and query counts are up to the caller.

    Attributes:
        memory: `[RANGE_WORDS]` words of the CTA: `HEAD_WORDS`, then the items of its group where
            they are balanced.
        words: the first of them in registers.
        ctas, cta: CTAs of the launch, and this one.
        key, ready: `ranges_key` and `ranges_ready` of `LatentSizes`.
        known: whether the words are those of this launch.
    """

    memory: Any
    words: Any
    ctas: Any
    cta: Any
    key: Any
    ready: Any
    known: Any

    @classmethod
    def of(cls, ranges: cute.Tensor, cta: Any, key: Any, ready: Any) -> "StepRange":
        """What an earlier launch has written for a CTA."""
        memory = cute.make_tensor(
            (ranges.iterator + cta * RANGE_WORDS).align(VECTOR_BITS // 8),
            cute.make_layout(RANGE_WORDS),
        )
        words = cute.make_rmem_tensor(HEAD_WORDS, Int32)
        cute.autovec_copy(cute.make_tensor(memory.iterator, cute.make_layout(HEAD_WORDS)), words)
        known = is_known(words, key, ready)
        return cls(memory, words, ranges.shape[0], cta, key, ready, known)

    def numbers(self, names: tuple[str, ...]) -> tuple[Any, ...]:
        """The numbers of a range or a tile, and its flags, all the same in a warp."""
        at = 2 if names is RANGE_NUMBERS else 2 + len(RANGE_NUMBERS)
        words = (self.words[at + i] for i in range(len(names)))
        return tuple(cute.arch.make_warp_uniform(word) for word in words)

    def flags(self) -> tuple[Any, ...]:
        """`RANGE_FLAGS`, and whether the tile is valid."""
        flags = cute.arch.make_warp_uniform(self.words[1])
        return tuple((flags & (1 << bit)) != 0 for bit in range(len(RANGE_FLAGS) + 1))


@dataclass(frozen=True)
class Scheduler:
    """What decides the work tiles of a CTA.

    Attributes:
        range: the items of its CTA group.
        lengths: tokens per request.
        total_lengths: tokens per request over all shards; None where the cache is no shard.
        query_begins: first query of each request and of the one behind the last; None when all
            requests have `queries` of them.
        tree: bytes [b, s, s], not 0 where a query sees one of the newest tokens; None when the
            order of the tokens alone decides.
        queries, total_queries, heads, max_tokens, group_ctas, visits, newest, causal, shards,
            shard: sizes, as in the kernel's contract.
        window: the newest tokens that a query sees; None for all.
        group: number of the CTA group.
        rank: the CTA's place in its group.
        clusters: whether CTAs of equal rank in two neighbouring groups are a cluster; constant.
        taken: the group's items in shared memory where they may be balanced, see `balance.py`.
        step: what the launches of a step share; None for a launch of its own.
        first: the CTA's first work tile, with `step` only.
    """

    range: WorkRange
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
    window: SlidingWindow | None
    group: Any
    rank: Any
    clusters: bool = False
    taken: Any = None
    step: StepRange | None = None
    first: WorkTile | None = None

    @property
    def cluster_rank(self) -> Any:
        """The CTA's place in its cluster."""
        return self.group % CLUSTER

    @classmethod
    def of(
        cls,
        index: Any,
        requests: Any,
        queries: Any,
        total_queries: Any,
        heads: Any,
        max_tokens: Any,
        newest: Any,
        causal: Any,
        sliding_window: Any,
        shards: Any,
        shard: Any,
        whole_items: Any,
        group_ctas: Any,
        visits: Any,
        group_count: Any,
        ranges_key: Any,
        ranges_ready: Any,
        group: Any,
        rank: Any,
        clusters: bool = False,
        words: Any = None,
        taken: Any = None,
    ) -> "Scheduler":
        """The scheduler of a CTA, with the range of its group.

        Args:
            index: `latent.ops.IndexTensors`.
            requests, queries, total_queries, heads, max_tokens, newest, causal, sliding_window,
                shards, shard, whole_items, group_ctas, visits, group_count, ranges_key,
                ranges_ready: as in the kernel's contract.
            group, rank: this CTA's.
            clusters: see the class.
            words, taken: shared memory for sorting items and for those that the group takes; None
                where they are never balanced.
        """
        lengths, total_lengths, begins = index.lengths, index.total_lengths, index.query_begins
        window, packed = None, None
        if sliding_window is not None:
            window = SlidingWindow(sliding_window, queries, total_lengths, shards, shard)
        if begins is not None:
            packed = PackedQueries(begins, queries, total_queries, heads, group_ctas * ROWS)
        batch = Batch(lengths, requests, visits, newest, max_tokens, window, packed)
        step = items = None
        if words is not None:
            items = cute.make_tensor(taken, cute.make_layout(MOST_TAKEN))
        arguments = batch, whole_items, group_ctas, group, group_count, clusters, words, items
        if index.ranges is None:
            own = found_range(*arguments)
        else:
            cta = group * group_ctas + rank
            step = StepRange.of(index.ranges, cta, ranges_key, ranges_ready)
            own = step_range(step, arguments, items)
        return cls(
            own, lengths, total_lengths, begins, index.tree, queries, total_queries, heads,
            max_tokens, group_ctas, visits, newest, causal, shards, shard, window, group, rank,
            clusters, items, step,
        )  # fmt: skip

    def with_first_tile(self) -> "Scheduler":
        """The scheduler as the roles take it; all threads call it, behind a barrier of the CTA."""
        if self.step is None:
            return self
        return dataclasses.replace(self, first=step_tile(self.step, self))

    def first_tile(self) -> WorkTile:
        """The CTA's first work tile."""
        if self.first is None:
            return work_tile_at(self.range.begin, self)
        return dataclasses.replace(self.first)  # a loop over tiles writes into what it begins with

    def next_tile(self, tile: WorkTile) -> WorkTile:
        """The work tile behind `tile`."""
        return work_tile_at(tile.item + self.range.step, self)


def found_range(
    batch: Batch,
    whole_items: Any,
    group_ctas: Any,
    group: Any,
    group_count: Any,
    clusters: bool,
    words: Any,
    taken: Any,
) -> WorkRange:
    """The range of a CTA group, from the lengths; arguments of `work_range` and `balanced`."""
    own = work_range(batch, whole_items, group_ctas, group, group_count, clusters)
    if words is None:
        return own
    return balanced(batch, own, words, taken, group_ctas, group, group_count)


@cute.jit
def is_known(words: cute.Tensor, key: Int32, ready: Int32) -> Boolean:
    """Whether the words of a CTA are those of a launch with this key."""
    return ready != 0 and cute.arch.make_warp_uniform(words[0]) == key


@cute.jit
def step_range(
    step: cutlass.Constexpr, arguments: cutlass.Constexpr, taken: cutlass.Constexpr
) -> WorkRange:
    """The range of a CTA in a step; all threads of the CTA call it together.

    Args:
        step: `StepRange`.
        arguments: those of `found_range`.
        taken: the items of the group in shared memory, where they may be balanced.
    """
    begin, begin_block, end, end_block, stride, total, groups = step.numbers(RANGE_NUMBERS)
    halves, splits, balances, _ = step.flags()
    if not step.known:
        own = found_range(*arguments)
        begin, begin_block, end, end_block = own.begin, own.begin_block, own.end, own.end_block
        stride, total, groups = own.step, own.total, own.groups
        halves, splits, balances = Boolean(own.halves), own.splits, Boolean(own.balanced)
    elif balances:
        copy_items(step, taken, False)
    return WorkRange(
        begin, begin_block, end, end_block, stride, total, groups, halves, splits,
        balanced=balances,
    )  # fmt: skip


@cute.jit
def step_tile(step: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> WorkTile:
    """The first work tile of a CTA in a step. The first launch writes it, and its range.

    It also takes back what launches of more CTAs wrote in steps before.
    """
    item, request, queries, row, base, rows, length, first, last, split = step.numbers(TILE_NUMBERS)
    *_, valid = step.flags()
    if not step.known:
        tile = work_tile_at(scheduler.range.begin, scheduler)
        item, valid, request, queries, row = (
            tile.item, tile.valid, tile.request, tile.queries, tile.row,
        )  # fmt: skip
        base, rows, length, first, last, split = (
            tile.base, tile.rows, tile.length, tile.first, tile.last, tile.split,
        )  # fmt: skip
        if step.ready == 0:
            write_step(step, scheduler, tile)
    return WorkTile(item, valid, request, queries, row, base, rows, length, first, last, split)


@cute.jit
def write_step(step: cutlass.Constexpr, scheduler: cutlass.Constexpr, tile: cutlass.Constexpr):
    """Write what the other launches of the step read; all threads call it."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        words = cute.make_rmem_tensor(HEAD_WORDS, Int32)
        for place, word in enumerate(head_words(step.key, scheduler.range, tile)):
            words[place] = word
        head = cute.make_tensor(step.memory.iterator, cute.make_layout(HEAD_WORDS))
        cute.autovec_copy(words, head)
    if step.cta == 0 and thread >= step.ctas and thread < MOST_CTAS:
        step.memory[thread * RANGE_WORDS] = Int32(0)
    if const_expr(scheduler.taken is not None):
        if scheduler.range.balanced:
            copy_items(step, scheduler.taken, True)


def head_words(key: Int32, own: WorkRange, tile: WorkTile) -> list[Any]:
    """The words of a CTA before its items."""
    flags = [*(getattr(own, name) for name in RANGE_FLAGS), tile.valid]
    bits = [(Boolean(flag).to(Int32) & 1) << place for place, flag in enumerate(flags)]
    numbers = [getattr(own, name) for name in RANGE_NUMBERS]
    numbers += [getattr(tile, name) for name in TILE_NUMBERS]
    words = [key, functools.reduce(operator.or_, bits), *numbers]
    return [Int32(word) for word in (*words, *[0] * (HEAD_WORDS - len(words)))]


@cute.jit
def copy_items(step: cutlass.Constexpr, taken: cutlass.Constexpr, out: cutlass.Constexpr):
    """Copy the items of the group from shared memory to the step's memory (`out`), or back."""
    if const_expr(taken is not None):
        thread, _, _ = cute.arch.thread_idx()
        items = cute.recast_tensor(taken, Int32)
        for place in cutlass.range(thread, MOST_TAKEN // 2, THREADS, unroll=1):
            if const_expr(out):
                step.memory[HEAD_WORDS + place] = items[place]
            else:
                items[place] = step.memory[HEAD_WORDS + place]


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
                begin, count = packed_queries(
                    request, scheduler.query_begins, scheduler.queries, scheduler.total_queries
                )
                base = begin * scheduler.heads
            row = (visit * scheduler.group_ctas + scheduler.rank) * ROWS
            rows = count * scheduler.heads
            if row < rows:
                searching = Boolean(False)
                valid = Boolean(True)
                length = tokens_of(scheduler.lengths, request, scheduler.max_tokens)
                blocks = kv_blocks(scheduler, request)
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
                        half = half_of(blocks, split_step(scheduler.group_ctas, scheduler.visits))
                        first = scheduler.cluster_rank * half
                        last = cutlass.min(blocks, first + half)
                        split = Int32(Split.HALF)
                if const_expr(scheduler.window is not None):
                    skipped = first_block(scheduler, request)
                    # The first row of the tile sees the oldest tokens.
                    oldest = window_begin(request, length, count, row, scheduler)
                    first = cutlass.max(first + skipped, cutlass.max(oldest, 0) >> KV_BLOCK_BITS)
                    last += skipped
                if scheduler.causal != 0:
                    # The last row of the tile sees most.
                    query = count - 1
                    if row + ROWS < rows:
                        query = quotient(row + ROWS - 1, scheduler.heads)
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
