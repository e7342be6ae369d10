"""How the work of the latent kernel is split over the SMs, on the device.

The query rows of a request fill `tiles` query tiles. A *CTA group* is a set of CTAs that walk the
same KV blocks in step, one query tile each, so that a KV block comes from memory once and from L2
for the rest of the group. Requests with more query tiles than a group has CTAs are visited `visits`
times. A *work item* is one visit of a request by a group: item = request * visits + visit.

All items in order form a line, each as long as its KV blocks plus a fixed cost for its start and
end. The line is divided into as many equal ranges as there are groups. Where a range begins or ends
inside of an item, the item is split: each group writes a partial, and `merge.py` merges them. With
fewer items than groups the ranges are *aligned* where that makes them hardly longer: each item is
padded to whole ranges, so that every group has KV blocks of one item and starts and ends once.
Where splitting would cost more than it saves, as with as many equal items as groups or few tokens,
the groups take whole items in turns. Where there are two groups for every item or more, and that is
the fastest way, two neighbouring ones share it, half of its KV blocks each (`cluster.py`). Where
there are more items than groups, whole ones may be balanced by length instead (`balance.py`).

Packed requests have different numbers of query tiles. Each has items for the visits that find a
tile; the others have no length. Where the host knows that many requests have fewer tiles than the
largest, it makes the groups small (`groups.py`), so that few CTAs are idle.

Every CTA finds its own range when it starts, from the lengths on the device. A changed length needs
no planning step, and a CUDA graph may be replayed with other lengths. Launches of a step read it
instead (`schedule.py`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK_BITS
from mla_var3.kernel.cute_python.mla.latent.mask import causal_limit
from mla_var3.kernel.cute_python.mla.latent.ops import blocks_of, quotient

ITEM_COST = 2
"""Cost of starting and finishing an item, in KV blocks: about 4.6 us for a query tile on an H200
(docs/results/2026-11-15-nvidia-h200-attention-grid.md). Other numbers were not measured."""
MERGE_COST = 9
"""Cost of splitting items, in KV blocks: partials are written, waited for and merged. On an H200 at
b=16 s=2 h=128 a launch that splits takes 9 us more than one that does not (t=256 and 512, cold L2;
docs/results/2026-11-15-nvidia-h200-attention-grid.md)."""
CLUSTER = 2
"""CTAs of a cluster. Of larger ones an H200 does not run enough at the same time: 128 CTAs in
clusters of 4 and 8 took up to 2.9 times as long where they split, in clusters of 2 no longer
(docs/results/2026-11-17-nvidia-h200-cluster-rows.json). Of as many as fit, short contexts gain
and others lose (docs/results/2026-11-18-nvidia-h200-small-batches-rows.json)."""
HALVES_SAVE = 10
"""How many quarters of a KV block a half of an item may be longer than 5/4 of an equal share, see
`halves_pay`. Read off the same rows; other rules were not measured."""
HALVES_COST = 2
"""Cost of merging two halves in a cluster, in KV blocks; not measured on its own."""

CHUNKS_AT_ONCE = 4
"""Chunks of 32 requests whose lengths are read together. Other numbers were not measured."""
SPANS = 4
"""Sizes of aligned ranges that are tried, so that they reach those that are 5 % longer."""
LONGEST_ALIGNED = 1 << 20
"""Items of fewer KV blocks than this may have aligned ranges: float32 divides these exactly."""
ALIGNED_WORTH = 20
"""Aligned ranges may be longer by 1 in so many. On an H200 with 128 of 132 CTAs and equal lengths
around 4200, b=64 s=1 h=16 took 90 us instead of 94, b=64 s=4 h=16 102.5 instead of 109, b=32 s=1
h=128 82 instead of 87 (docs/results/2026-11-16-nvidia-h200-engine-shapes.md). Other numbers were
not measured."""


# --- plain arithmetic, on numbers of the host or of the device ------------------------------------


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
    """
    return (cutlass.max(local - item_cost, 0) + step - 1) & -step


def shortest_span(blocks, group_count, step):
    """KV blocks of a range if all `blocks` of a launch could be divided equally."""
    return (quotient(cutlass.max(blocks - 1, 0), group_count) + step) & -step


def aligning_pays(span, total, group_count, step):
    """Whether aligned ranges of `span` KV blocks are taken instead of shares of the line.

    Splits of the line are at whole blocks, so one block more costs nothing, and `ALIGNED_WORTH`.
    Plain arithmetic, for Python integers and for device values.
    """
    return (span - step) * group_count < total + quotient(total, ALIGNED_WORTH) + group_count


def span_step(shortest, step):
    """Difference of the sizes of aligned ranges that are tried, about 1.5 %."""
    return ((shortest >> 6) + 1) * step


def range_position(total, group, group_count):
    """Where the range of a CTA group begins on a line of length `total`, without overflow."""
    share = quotient(total, group_count)
    return share * group + quotient((total - share * group_count) * group, group_count)


def turns_length(longest, items, group_count):
    """What a CTA group takes at most where all take whole items in turns."""
    return quotient(items + group_count - 1, group_count) * (longest + ITEM_COST)


def takes_turns(longest, items, group_count, total):
    """Whether groups take whole items in turns: splitting would cost more than it saves.

    Plain arithmetic, for Python integers and for device values.
    """
    return (turns_length(longest, items, group_count) - MERGE_COST) * group_count <= total


def half_of(blocks, step):
    """KV blocks of the first half of an item that two CTA groups share."""
    return (((blocks + 1) >> 1) + step - 1) & -step


def halves_pay(longest, group_count, total, step):
    """Whether two groups share every item, half of its KV blocks each; see `cluster.py`.

    There are at least two groups per item. A half may be longer than an equal share of all KV
    blocks: merging halves is cheaper than merging partials, and memory serves long halves faster
    once short ones are done. Plain arithmetic, for Python integers and for device values.
    """
    half = half_of(longest, step)
    most = cutlass.min(
        5 * total + HALVES_SAVE * group_count, 4 * (longest - HALVES_COST) * group_count
    )
    return 4 * half * group_count <= most


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
def kv_blocks(batch: cutlass.Constexpr, request: Int32) -> Int32:
    """KV blocks of a request that its queries see, without its newest tokens."""
    length = tokens_of(batch.lengths, request, batch.max_tokens)
    blocks = blocks_of(cutlass.max(length - batch.newest, 0))
    if const_expr(batch.window is not None):
        blocks = cutlass.max(blocks - first_block(batch, request), 0)
    return blocks


@cute.jit
def first_block(batch: cutlass.Constexpr, request: Int32) -> Int32:
    """The first KV block that a request with the most queries would see in its window."""
    window = batch.window
    length = tokens_of(batch.lengths, request, batch.max_tokens)
    hidden = causal_limit(request, length, window.queries, -window.size, window)
    return cutlass.max(hidden, 0) >> KV_BLOCK_BITS


@dataclass(frozen=True)
class PackedQueries:
    """Where the queries of requests are that have different numbers of them.

    Attributes:
        begins: first query of each request, and of the one behind the last.
        queries: most queries of a request.
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


@dataclass(frozen=True)
class Batch:
    """The items of a launch.

    Attributes:
        lengths, visits, newest, max_tokens, window: as in `Scheduler`.
        packed: their queries where they have different numbers of them, else None.
    """

    lengths: Any
    requests: Any
    visits: Any
    newest: Any
    max_tokens: Any
    window: SlidingWindow | None = None
    packed: PackedQueries | None = None

    def lane_items(self, chunk: Int32) -> tuple[Int32, Int32]:
        """See `lane_items`."""
        return lane_items(self, chunk)


@cute.jit
def item_count(request: Int32, visits: Int32, packed: cutlass.Constexpr) -> Int32:
    """Items of a request: visits that find a query tile."""
    items = visits
    if const_expr(packed is not None):
        _, count = packed_queries(request, packed.begins, packed.queries, packed.total_queries)
        rows = cutlass.max(count, 0) * packed.heads
        items = quotient(rows + packed.group_rows - 1, packed.group_rows)
    return items


@cute.jit
def lane_items(batch: cutlass.Constexpr, chunk: Int32) -> tuple[Int32, Int32]:
    """KV blocks of an item and number of items of this lane's request in a chunk of 32.

    Both are 0 where there is no item.
    """
    request = chunk * 32 + cute.arch.lane_idx()
    blocks, count = Int32(0), Int32(0)
    if request < batch.requests:
        blocks = kv_blocks(batch, request)
        count = item_count(request, batch.visits, batch.packed)
        if const_expr(batch.packed is not None):
            if count == 0:
                blocks = Int32(0)
    return blocks, count


@dataclass(frozen=True)
class WorkRange:
    """The items of a CTA group: KV blocks from the begin on, up to the end, which is excluded.

    Attributes:
        begin, begin_block: first item, and its first KV block.
        end, end_block: item of the end, of which only KV blocks before `end_block` belong here.
        step: step from one item to the next; the number of groups where they take turns.
        groups: CTA groups that have work, the first ones.
        halves: whether two neighbouring groups share every item.
        splits: whether the launch may split items.
        present, longest: items that find a query tile, and most KV blocks of any.
        balanced: whether items are those that `balance.py` lists, by number. The list has its own
            end; `end` is the item that ends inside, or -1.
    """

    begin: Any
    begin_block: Any
    end: Any
    end_block: Any
    step: Any
    total: Any
    groups: Any
    halves: Any = False
    splits: Any = True
    present: Any = 0
    longest: Any = 0
    balanced: Any = False


@cute.jit
def work_range(
    batch: cutlass.Constexpr,
    whole_items: Int32,
    group_ctas: Int32,
    group: Int32,
    group_count: Int32,
    clusters: cutlass.Constexpr = False,
) -> WorkRange:
    """The range of a CTA group; all lanes of a warp call it together and get the same answer.

    Where nothing is split (`takes_turns`, or `whole_items` is not 0) the groups at work are on
    neighbouring items, often of one request. Every load of a launch waits for this, so its steps
    are few: up to 32 requests stay in registers.

    Args:
        whole_items: not 0 where nothing may be split.
        clusters: whether there are two groups for every item or more, an even number, and two
            neighbouring ones may share one.
    """
    chunks = (batch.requests + 31) >> 5
    items = batch.requests * batch.visits
    blocks, count = batch.lane_items(Int32(0))
    present = count  # items that find a query tile
    total = (blocks + ITEM_COST) * count
    longest = blocks
    for first in cutlass.range(1, chunks, CHUNKS_AT_ONCE, unroll=1):
        # Unrolled, so that the reads of a large batch wait for memory together.
        for i in cutlass.range_constexpr(CHUNKS_AT_ONCE):
            more_blocks, more = batch.lane_items(first + i)
            present += more
            total += (more_blocks + ITEM_COST) * more
            longest = cutlass.max(longest, more_blocks)
    present = cute.arch.warp_redux_sync(present, "add")
    total = cute.arch.warp_redux_sync(total, "add")
    longest = cute.arch.warp_redux_sync(longest, "max")
    halves = Boolean(False)
    found = (group >> 1, Int32(0), items, Int32(0), group_count, group_count, Boolean(False))
    if const_expr(clusters):
        step = split_step(group_ctas, batch.visits)
        halves = halves_pay(longest, group_count, total, step)
    if const_expr(not clusters) or not halves:
        found = divided_range(
            batch, whole_items, group_ctas, group, group_count, chunks, items, blocks, count,
            present, total, longest,
        )  # fmt: skip
    begin, begin_block, end, end_block, step, groups, splits = found
    return WorkRange(
        begin, begin_block, end, end_block, step, total, groups, halves, splits, present, longest
    )


@cute.jit
def divided_range(
    batch: cutlass.Constexpr,
    whole_items: Int32,
    group_ctas: Int32,
    group: Int32,
    group_count: Int32,
    chunks: Int32,
    items: Int32,
    blocks: Int32,
    count: Int32,
    present: Int32,
    total: Int32,
    longest: Int32,
):
    """The range of a CTA group that shares no item with its neighbour alone.

    Args:
        batch, whole_items, group_ctas, group, group_count: as for `work_range`.
        chunks: chunks of 32 requests.

    Returns:
        The first fields of `WorkRange`, without the length of the line.
    """
    splits = Boolean(False)
    step = Int32(1)
    begin = group
    begin_block = Int32(0)
    end = items
    end_block = Int32(0)
    groups = group_count
    if whole_items != 0 or takes_turns(longest, items, group_count, total):
        step = group_count
    else:
        splits = group_count > 1
        block_step = split_step(group_ctas, batch.visits)
        span, inverse = Int32(0), Float32(0.0)
        if present <= group_count and longest < LONGEST_ALIGNED:
            shortest = shortest_span(total - ITEM_COST * present, group_count, block_step)
            span, inverse, needed = aligned_span(
                batch, chunks, blocks, count, group_count, shortest,
                span_step(shortest, block_step),
            )  # fmt: skip
            if aligning_pays(span, total, group_count, block_step):
                groups = needed
            else:
                span = Int32(0)
        if span > 0:
            begin, begin_block, end, end_block = aligned_range(
                batch, chunks, blocks, count, group, span, inverse
            )
        else:
            begin, begin_block, end, end_block = split_range(
                batch, chunks, blocks, count, range_position(total, group, group_count),
                range_position(total, group + 1, group_count), block_step,
            )  # fmt: skip
    return begin, begin_block, end, end_block, step, groups, splits


@cute.jit
def aligned_span(
    batch: cutlass.Constexpr,
    chunks: Int32,
    blocks: Int32,
    count: Int32,
    group_count: Int32,
    shortest: Int32,
    step: Int32,
):
    """KV blocks of aligned ranges: the first of `SPANS` sizes that needs no more than all groups.

    Args:
        chunks: chunks of 32 requests.

    Returns:
        The size, its inverse and the groups that have work; 0 and all groups where no size fits.
    """
    inverses = cute.make_rmem_tensor(SPANS, Float32)
    groups = cute.make_rmem_tensor(SPANS, Int32)
    for i in cutlass.range_constexpr(SPANS):
        groups[i] = Int32(0)
        inverses[i] = cute.arch.rcp_approx((shortest + i * step).to(Float32))
    for chunk in cutlass.range(chunks, unroll=1):
        if chunks > 1:
            blocks, count = batch.lane_items(chunk)
        for i in cutlass.range_constexpr(SPANS):
            groups[i] += ranges_of(blocks, inverses[i]) * count
    span, inverse, needed = Int32(0), Float32(0.0), group_count
    for i in cutlass.range_constexpr(SPANS - 1, -1, -1):
        total = cute.arch.warp_redux_sync(groups[i], "add")
        if total <= group_count:
            span, inverse, needed = shortest + i * step, inverses[i], total
    return span, inverse, needed


@cute.jit
def ranges_of(blocks: Int32, inverse: Float32) -> Int32:
    """Aligned ranges of an item, by the inverse of their size; exact up to `LONGEST_ALIGNED`."""
    last = cutlass.max(blocks - 1, 0)
    return ((last.to(Float32) + 0.5) * inverse).to(Int32) + 1


@cute.jit
def inclusive_sum(number: Int32) -> Int32:
    """The sum of the numbers of all lanes up to this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(number, offset=1 << step)
        if lane >= (1 << step):
            number += other
    return number


@cute.jit
def aligned_range(
    batch: cutlass.Constexpr,
    chunks: Int32,
    blocks: Int32,
    count: Int32,
    group: Int32,
    span: Int32,
    inverse: Float32,
):
    """The range of a group where each has up to `span` KV blocks of one item.

    Returns:
        Begin and end as (item, KV block).
    """
    before, begin, place = Int32(0), Int32(-1), Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        if chunks > 1:
            blocks, count = batch.lane_items(chunk)
        ranges = ranges_of(blocks, inverse)
        behind = before + inclusive_sum(ranges * count)
        local = group - (behind - ranges * count)
        if local >= 0 and group < behind:
            visit = Int32(0)
            if batch.visits > 1:
                visit = quotient(local, ranges)
            part = local - visit * ranges
            begin = (chunk * 32 + cute.arch.lane_idx()) * batch.visits + visit
            place = part * 2
            if part == ranges - 1:  # the last of its item
                place += 1
        before = cute.arch.shuffle_sync(behind, 31)
    begin = cute.arch.warp_redux_sync(begin, "max")
    place = cute.arch.warp_redux_sync(place, "max")
    begin_block = (place >> 1) * span
    end, end_block = begin, begin_block + span
    if place % 2 == 1:
        end, end_block = begin + 1, Int32(0)
    if begin < 0:  # behind the last item
        begin = end = batch.requests * batch.visits
        end_block = Int32(0)
    return begin, begin_block, end, end_block


@cute.jit
def split_range(
    batch: cutlass.Constexpr,
    chunks: Int32,
    blocks: Int32,
    count: Int32,
    begin_at: Int32,
    end_at: Int32,
    block_step: Int32,
):
    """The range from `begin_at` to `end_at` on the line: begin and end as (item, KV block).

    Args:
        batch: the items; or those left of balanced ones.
    """
    before = Int32(0)
    begin = Int32(-1)
    begin_block = Int32(0)
    end = Int32(-1)
    end_block = Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        if chunks > 1:
            blocks, count = batch.lane_items(chunk)
        request = chunk * 32 + cute.arch.lane_idx()
        behind = before + inclusive_sum((blocks + ITEM_COST) * count)
        start = behind - (blocks + ITEM_COST) * count
        if start <= begin_at and begin_at < behind:
            begin, begin_block = split_in_request(
                begin_at - start, request, batch.visits, blocks, block_step
            )
        if start <= end_at and end_at < behind:
            end, end_block = split_in_request(
                end_at - start, request, batch.visits, blocks, block_step
            )
        before = cute.arch.shuffle_sync(behind, 31)
    begin = cute.arch.warp_redux_sync(begin, "max")
    begin_block = cute.arch.warp_redux_sync(begin_block, "max")
    end = cute.arch.warp_redux_sync(end, "max")
    end_block = cute.arch.warp_redux_sync(end_block, "max")
    if begin < 0:  # behind the last item
        begin = batch.requests * batch.visits
    if end < 0:
        end = batch.requests * batch.visits
    return begin, begin_block, end, end_block


@cute.jit
def split_in_request(local: Int32, request: Int32, visits: Int32, blocks: Int32, block_step: Int32):
    """(item, KV block) of a boundary at distance `local` from the first item of a request.

    Each of its items has `blocks` KV blocks.
    """
    before = Int32(0)
    if visits > 1:
        before = quotient(local, blocks + ITEM_COST)
    item = request * visits + before
    place = local - before * (blocks + ITEM_COST)
    block = split_block(place, ITEM_COST, block_step)
    if block >= blocks and place > 0:
        item += 1
        block = Int32(0)
    return item, block
