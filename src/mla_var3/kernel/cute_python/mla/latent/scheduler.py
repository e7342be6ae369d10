"""Tile scheduler of the latent kernel: how its work is split over the SMs, on the device.

The query rows of a request fill `tiles` query tiles. A *CTA group* is a set of CTAs that walk the
same KV blocks in step, one query tile each, so that a KV block comes from memory once and from L2
for the rest of the group. Requests with more query tiles than a group has CTAs are visited `visits`
times. A *work item* is one visit of a request by a group: item = request * visits + visit. A *work
tile* is what one CTA does of it: one query tile against the item's KV blocks.

All items in order form a line, each as long as its KV blocks plus a fixed cost for its start and
end. The line is divided into as many equal ranges as there are groups. Where a range begins or ends
inside of an item, the item is split: each group writes a partial, and `merge.py` merges them. With
fewer items than groups the ranges are *aligned* where that makes them hardly longer: each item is
padded to whole ranges, so that every group has KV blocks of one item and starts and ends once.
Where splitting would cost more than it saves, as with as many equal items as groups or few tokens,
the groups take whole items in turns.

Packed requests have different numbers of query tiles. Each has items for the visits that find a
tile; the others have no length. Where the host knows that many requests have fewer tiles than the
largest, it makes the groups small (`groups.py`), so that few CTAs are idle.

Every CTA finds its own range when it starts, from the lengths on the device. A changed length needs
no planning step, and a CUDA graph may be replayed with other lengths.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, ROWS
from mla_var3.kernel.cute_python.mla.latent.mask import causal_limit, window_begin

ITEM_COST = 2
"""Cost of starting and finishing an item, in KV blocks: about 4.6 us for a query tile on an H200
(docs/results/2026-11-15-nvidia-h200-attention-grid.md). Other numbers were not measured."""
MERGE_COST = 9
"""Cost of splitting items, in KV blocks: partials are written, waited for and merged. On an H200 at
b=16 s=2 h=128 a launch that splits takes 9 us more than one that does not (t=256 and 512, cold L2;
docs/results/2026-11-15-nvidia-h200-attention-grid.md)."""

SPANS = 4
"""Sizes of aligned ranges that are tried, so that they reach those that are 5 % longer."""
LONGEST_ALIGNED = 1 << 20
"""Items of fewer KV blocks than this may have aligned ranges: float32 divides these exactly."""
ALIGNED_WORTH = 20
"""Aligned ranges may be longer by 1 in so many. On an H200 with 128 of 132 CTAs and equal lengths
around 4200, b=64 s=1 h=16 took 90 us instead of 94, b=64 s=4 h=16 102.5 instead of 109, b=32 s=1
h=128 82 instead of 87 (docs/results/2026-11-16-nvidia-h200-engine-shapes.md). Other numbers were
not measured."""


class Split(IntEnum):
    """Flags of a split work tile; 0 is a whole one."""

    PARTIAL = 1
    FIRST = 2
    LAST = 4


# --- plain arithmetic, on numbers of the host or of the device ------------------------------------


def quotient(dividend, divisor):
    """`dividend // divisor` of numbers that are not negative; on the device without signs."""
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor
    return (Uint32(dividend) // Uint32(divisor)).to(Int32)


def split_step(group_ctas, visits):
    """Splits are at multiples of so many KV blocks.

    The kernel computes KV blocks in pairs, and an odd one takes as long as a pair. But where a CTA
    is alone on its KV blocks it waits for memory, which a block that does not exist does not use.
    """
    return cutlass.min(group_ctas * visits, 2)


def split_block(local, item_cost, step):
    """The KV block at which an item is split, for a boundary at distance `local` from its start.

    The item's KV blocks or more means: behind the item. Plain arithmetic, for Python integers and
    for device values.

    Args:
        local: distance from the item's start on the line.
        item_cost: what the item takes of the line before its KV blocks.
        step: see `split_step`.
    """
    return (cutlass.max(local - item_cost, 0) + step - 1) & -step


def aligned_groups(blocks, span):
    """CTA groups of an item where every range has up to `span` KV blocks of one item."""
    return cutlass.max(quotient(blocks + span - 1, span), 1)


def shortest_span(blocks, group_count, step):
    """KV blocks of a range if all `blocks` of a launch could be divided equally."""
    return (quotient(cutlass.max(blocks - 1, 0), group_count) + step) & -step


def aligning_pays(span, total, group_count, step):
    """Whether aligned ranges of `span` KV blocks are taken instead of shares of the line.

    Splits of the line are at whole blocks, so one block more costs nothing, and `ALIGNED_WORTH`.
    Plain arithmetic, for Python integers and for device values.

    Args:
        span: a multiple of `step`.
        total: length of the line.
        group_count: number of CTA groups.
        step: see `split_step`.
    """
    return (span - step) * group_count < total + total // ALIGNED_WORTH + group_count


def span_step(shortest, step):
    """Difference of the sizes of aligned ranges that are tried, about 1.5 %."""
    return (shortest // 64 + 1) * step


def range_position(total, group, group_count):
    """Where the range of a CTA group begins on a line of length `total`, without overflow."""
    share = quotient(total, group_count)
    return share * group + quotient((total - share * group_count) * group, group_count)


def takes_turns(longest, items, group_count, total):
    """Whether groups take whole items in turns: splitting would cost more than it saves.

    Plain arithmetic, for Python integers and for device values.

    Args:
        longest: most KV blocks of any item.
        items, group_count: numbers of items and of CTA groups.
        total: length of the line.
    """
    rounds = quotient(items + group_count - 1, group_count)
    return rounds * (longest + ITEM_COST) <= quotient(total, group_count) + MERGE_COST


# --- on the device --------------------------------------------------------------------------------


@cute.jit
def tokens_of(lengths: cute.Tensor, request: Int32, max_tokens: Int32) -> Int32:
    """Tokens of a request, from 0 to `max_tokens` whatever the device holds."""
    return cutlass.max(cutlass.min(lengths[request], max_tokens), 0)


@dataclass(frozen=True)
class SlidingWindow:
    """The newest tokens that a query sees, up to itself.

    Attributes:
        size: how many.
        queries, total_lengths, shards, shard: as in `Scheduler`.
    """

    size: Any
    queries: Any
    total_lengths: Any
    shards: Any
    shard: Any


@cute.jit
def kv_blocks(
    lengths: cute.Tensor,
    request: Int32,
    newest: Int32,
    max_tokens: Int32,
    window: cutlass.Constexpr,
) -> Int32:
    """KV blocks of a request that its queries see, without its `newest` tokens."""
    old = cutlass.max(tokens_of(lengths, request, max_tokens) - newest, 0)
    blocks = (old + (KV_BLOCK - 1)) // KV_BLOCK
    if const_expr(window is not None):
        blocks = cutlass.max(blocks - first_block(lengths, request, max_tokens, window), 0)
    return blocks


@cute.jit
def first_block(
    lengths: cute.Tensor, request: Int32, max_tokens: Int32, window: cutlass.Constexpr
) -> Int32:
    """The first KV block that a request with the most queries would see."""
    length = tokens_of(lengths, request, max_tokens)
    hidden = causal_limit(request, length, window.queries, -window.size, window)
    return cutlass.max(hidden, 0) // KV_BLOCK


@dataclass(frozen=True)
class PackedQueries:
    """Where the queries of requests are that have different numbers of them.

    Attributes:
        begins: first query of each request, and of the one behind the last.
        queries: most queries of a request.
        total_queries, heads: sizes.
        group_rows: query rows of a visit.
    """

    begins: Any
    queries: Any
    total_queries: Any
    heads: Any
    group_rows: Any


@cute.jit
def packed_queries(
    request: Int32, begins: cute.Tensor, queries: Int32, total_queries: Int32
) -> tuple[Int32, Int32]:
    """First query of a request and how many, within those that there are."""
    begin = cutlass.min(cutlass.max(begins[request], 0), total_queries)
    most = cutlass.min(begin + queries, total_queries)
    return begin, cutlass.min(begins[request + 1], most) - begin


@cute.jit
def item_count(request: Int32, visits: Int32, packed: cutlass.Constexpr) -> Int32:
    """Items of a request: visits that find a query tile."""
    items = visits
    if const_expr(packed is not None):
        _, count = packed_queries(request, packed.begins, packed.queries, packed.total_queries)
        rows = cutlass.max(count, 0) * packed.heads
        items = (rows + packed.group_rows - 1) // packed.group_rows
    return items


@dataclass(frozen=True)
class WorkRange:
    """The items of a CTA group: KV blocks from the begin on, up to the end, which is excluded.

    Attributes:
        begin, begin_block: first item, and its first KV block.
        end, end_block: item of the end, of which only KV blocks before `end_block` belong here.
        step: step from one item to the next; the number of groups where they take turns.
        total: length of the line.
        groups: CTA groups that have work, the first ones.
    """

    begin: Any
    begin_block: Any
    end: Any
    end_block: Any
    step: Any
    total: Any
    groups: Any


@cute.jit
def work_range(
    lengths: cute.Tensor,
    requests: Int32,
    visits: Int32,
    newest: Int32,
    max_tokens: Int32,
    whole_items: Int32,
    group_ctas: Int32,
    group: Int32,
    group_count: Int32,
    window: cutlass.Constexpr = None,
    packed: cutlass.Constexpr = None,
) -> WorkRange:
    """The range of a CTA group; all lanes of a warp call it together and get the same answer.

    Where nothing is split (`takes_turns`, or `whole_items` is not 0) the groups at work are on
    neighbouring items, often of one request.
    """
    lane = cute.arch.lane_idx()
    chunks = (requests + 31) // 32
    items = requests * visits
    present = Int32(0)  # items that find a query tile
    total = Int32(0)
    longest = Int32(0)
    # Unrolled, so that the reads of a large batch wait for memory together.
    for chunk in cutlass.range(chunks, unroll=8):
        request = chunk * 32 + lane
        if request < requests:
            blocks = kv_blocks(lengths, request, newest, max_tokens, window)
            count = item_count(request, visits, packed)
            if count > 0:
                present += count
                total += (blocks + ITEM_COST) * count
                longest = cutlass.max(longest, blocks)
    present = cute.arch.warp_redux_sync(present, "add")
    total = cute.arch.warp_redux_sync(total, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    step = Int32(1)
    begin = group
    begin_block = Int32(0)
    end = items
    end_block = Int32(0)
    groups = group_count
    if whole_items != 0 or takes_turns(longest, items, group_count, total):
        step = group_count
    else:
        item_cost, align = Int32(ITEM_COST), Int32(1)
        block_step = split_step(group_ctas, visits)
        aligned = Boolean(False)
        if present <= group_count and longest < LONGEST_ALIGNED:
            shortest = shortest_span(total - ITEM_COST * present, group_count, block_step)
            span, needed = aligned_span(
                lengths, requests, visits, newest, max_tokens, group_count, shortest,
                span_step(shortest, block_step), window, packed,
            )  # fmt: skip
            if span > 0 and aligning_pays(span, total, group_count, block_step):
                aligned = Boolean(True)
                item_cost, align, groups = Int32(0), span, needed
        begin_at, end_at = group * align, (group + 1) * align
        if not aligned:
            begin_at = range_position(total, group, group_count)
            end_at = range_position(total, group + 1, group_count)
        begin, begin_block, end, end_block = split_range(
            lengths, requests, visits, newest, max_tokens, begin_at, end_at, item_cost, align,
            block_step, window, packed,
        )  # fmt: skip
    return WorkRange(begin, begin_block, end, end_block, step, total, groups)


@cute.jit
def aligned_span(
    lengths: cute.Tensor,
    requests: Int32,
    visits: Int32,
    newest: Int32,
    max_tokens: Int32,
    group_count: Int32,
    shortest: Int32,
    step: Int32,
    window: cutlass.Constexpr,
    packed: cutlass.Constexpr,
):
    """KV blocks of aligned ranges: the first of `SPANS` sizes that needs no more than all groups.

    Args:
        lengths, requests, visits, newest, max_tokens, group_count, window, packed: see
            `work_range`.
        shortest: the first size.
        step: difference of two sizes.

    Returns:
        The size and the groups that have work; 0 and all of them where none of the sizes fits.
    """
    lane = cute.arch.lane_idx()
    inverse = cute.make_rmem_tensor(SPANS, Float32)
    groups = cute.make_rmem_tensor(SPANS, Int32)
    for i in cutlass.range_constexpr(SPANS):
        groups[i] = Int32(0)
        inverse[i] = cute.arch.rcp_approx((shortest + i * step).to(Float32))
    for chunk in cutlass.range((requests + 31) // 32, unroll=1):
        request = chunk * 32 + lane
        if request < requests:
            last = cutlass.max(kv_blocks(lengths, request, newest, max_tokens, window) - 1, 0)
            count = item_count(request, visits, packed)
            for i in cutlass.range_constexpr(SPANS):
                # `aligned_groups`, exact up to `LONGEST_ALIGNED` blocks.
                whole = ((last.to(Float32) + 0.5) * inverse[i]).to(Int32)
                groups[i] += (whole + 1) * count
    span, needed = Int32(0), group_count
    for i in cutlass.range_constexpr(SPANS - 1, -1, -1):
        total = cute.arch.warp_redux_sync(groups[i], "add")
        if total <= group_count:
            span, needed = shortest + i * step, total
    return span, needed


@cute.jit
def split_range(
    lengths: cute.Tensor,
    requests: Int32,
    visits: Int32,
    newest: Int32,
    max_tokens: Int32,
    begin_at: Int32,
    end_at: Int32,
    item_cost: Int32,
    align: Int32,
    block_step: Int32,
    window: cutlass.Constexpr,
    packed: cutlass.Constexpr,
):
    """The range from `begin_at` to `end_at` on the line: begin and end as (item, KV block).

    Args:
        lengths, requests, visits, newest, max_tokens, window, packed: see `work_range`.
        begin_at, end_at: places on the line.
        item_cost, block_step: see `split_block`.
        align: items are padded to multiples of so many KV blocks.
    """
    lane = cute.arch.lane_idx()
    chunks = (requests + 31) // 32

    before = Int32(0)
    begin = Int32(-1)
    begin_block = Int32(0)
    end = Int32(-1)
    end_block = Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        request = chunk * 32 + lane
        blocks = Int32(0)
        length = Int32(1)
        cost = Int32(0)
        if request < requests:
            blocks = kv_blocks(lengths, request, newest, max_tokens, window)
            length = aligned_groups(blocks + item_cost, align) * align
            cost = length * item_count(request, visits, packed)
        inclusive = cost
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, offset=1 << step)
            if lane >= (1 << step):
                inclusive += other
        start = before + inclusive - cost
        if start <= begin_at and begin_at < start + cost:
            begin, begin_block = split_in_request(
                begin_at - start, request, visits, blocks, length, item_cost, block_step
            )
        if start <= end_at and end_at < start + cost:
            end, end_block = split_in_request(
                end_at - start, request, visits, blocks, length, item_cost, block_step
            )
        before += cute.arch.shuffle_sync(inclusive, 31)
    begin = cute.arch.warp_redux_sync(begin, "max")
    begin_block = cute.arch.warp_redux_sync(begin_block, "max")
    end = cute.arch.warp_redux_sync(end, "max")
    end_block = cute.arch.warp_redux_sync(end_block, "max")
    if begin < 0:  # behind the last item
        begin = requests * visits
    if end < 0:
        end = requests * visits
    return begin, begin_block, end, end_block


@cute.jit
def split_in_request(
    local: Int32,
    request: Int32,
    visits: Int32,
    blocks: Int32,
    length: Int32,
    item_cost: Int32,
    block_step: Int32,
):
    """(item, KV block) of a boundary at distance `local` from the first item of a request.

    Each of its items has `blocks` KV blocks and takes `length` of the line.
    """
    before = quotient(local, length)
    item = request * visits + before
    place = local - before * length
    block = split_block(place, item_cost, block_step)
    if block >= blocks and place > 0:
        item += 1
        block = Int32(0)
    return item, block


@dataclass
class WorkTile:
    """What a CTA does next: one query tile against some KV blocks of one request.

    Attributes:
        item: number of the work item.
        valid: whether there is one.
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
        return cutlass.max((self.last - self.first + 1) // 2, 1)


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
        group: Any,
        rank: Any,
    ) -> "Scheduler":
        """The scheduler of a CTA, with the range of its group.

        Args:
            index: `latent.ops.IndexTensors`.
            requests, queries, total_queries, heads, max_tokens, newest, causal, sliding_window,
                shards, shard, whole_items, group_ctas, visits, group_count: as in the kernel's
                contract.
            group, rank: this CTA's.
        """
        lengths, total_lengths, begins = index.lengths, index.total_lengths, index.query_begins
        window, packed = None, None
        if sliding_window is not None:
            window = SlidingWindow(sliding_window, queries, total_lengths, shards, shard)
        if begins is not None:
            packed = PackedQueries(begins, queries, total_queries, heads, group_ctas * ROWS)
        own = work_range(
            lengths, requests, visits, newest, max_tokens, whole_items, group_ctas, group,
            group_count, window, packed,
        )  # fmt: skip
        return cls(
            own, lengths, total_lengths, begins, index.tree, queries, total_queries, heads,
            max_tokens, group_ctas, visits, newest, causal, shards, shard, window, group, rank,
        )  # fmt: skip

    def first_tile(self) -> WorkTile:
        """The CTA's first work tile."""
        return work_tile_at(self.range.begin, self)

    def next_tile(self, tile: WorkTile) -> WorkTile:
        """The work tile behind `tile`."""
        return work_tile_at(tile.item + self.range.step, self)


@cute.jit
def work_tile_at(item: Int32, scheduler: cutlass.Constexpr) -> WorkTile:
    """The next work tile of this CTA: in `item`, or in the next item where it has a query tile."""
    own = scheduler.range
    searching = Boolean(True)
    valid = Boolean(False)
    row = Int32(0)
    base = Int32(0)
    rows = Int32(0)
    length = Int32(0)
    first = Int32(0)
    last = Int32(0)
    split = Int32(0)
    while searching:
        if item > own.end or (item == own.end and own.end_block == 0):
            searching = Boolean(False)
        else:
            request = item // scheduler.visits
            count = scheduler.queries
            base = request * scheduler.queries * scheduler.heads
            if const_expr(scheduler.query_begins is not None):
                begin, count = packed_queries(
                    request, scheduler.query_begins, scheduler.queries, scheduler.total_queries
                )
                base = begin * scheduler.heads
            row = ((item % scheduler.visits) * scheduler.group_ctas + scheduler.rank) * ROWS
            rows = count * scheduler.heads
            if row < rows:
                searching = Boolean(False)
                valid = Boolean(True)
                length = tokens_of(scheduler.lengths, request, scheduler.max_tokens)
                blocks = kv_blocks(
                    scheduler.lengths, request, scheduler.newest, scheduler.max_tokens,
                    scheduler.window,
                )  # fmt: skip
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
                if const_expr(scheduler.window is not None):
                    skipped = first_block(
                        scheduler.lengths, request, scheduler.max_tokens, scheduler.window
                    )
                    # The first row of the tile sees the oldest tokens.
                    oldest = window_begin(request, length, count, row, scheduler)
                    first = cutlass.max(first + skipped, cutlass.max(oldest, 0) // KV_BLOCK)
                    last += skipped
                if scheduler.causal != 0:
                    # The last row of the tile sees most.
                    query = cutlass.min(row + ROWS - 1, rows - 1) // scheduler.heads
                    seen = cutlass.max(causal_limit(request, length, count, query, scheduler), 0)
                    last = cutlass.min(last, (seen + KV_BLOCK - 1) // KV_BLOCK)
                last = cutlass.max(last, first)
            else:  # later visits find no tile either: on to the next request
                rest = (request + 1) * scheduler.visits - item
                item += (rest + own.step - 1) // own.step * own.step
    return WorkTile(item, valid, row, base, rows, length, first, last, split)


@cute.jit
def partial_slot(tile: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> Int32:
    """Where a CTA writes a partial: the even slot for its range's first item, else the odd one."""
    slot = (scheduler.group * scheduler.group_ctas + scheduler.rank) * 2
    if tile.item != scheduler.range.begin:
        slot += 1
    return slot
