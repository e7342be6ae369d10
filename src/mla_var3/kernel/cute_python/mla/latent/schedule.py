"""How the work of an absorbed attention kernel is cut over the SMs, without a host in between.

The query rows of a request fill `tiles` tiles. A *gang* is a set of blocks that walk through the
same KV blocks in step, one query tile each, so that a KV block comes from memory once and from L2
for the rest of the gang. Requests with more tiles than a gang has blocks are visited `groups`
times: an *item* is one request seen by one gang, item = request * groups + group.

All items in a row form a line, each as long as its KV blocks plus a fixed cost for starting and
finishing it. The line is cut into as many equal *parts* as there are gangs. A cut inside an item
makes its pieces partial results, which `merge_partials` joins. Where that would cost more than it
saves, as with equal lengths or few tokens, the gangs take whole items in turns instead.

Every block finds its own part when it starts, from the lengths on the device. So a changed length
needs no planning step, and a CUDA graph may be replayed with other lengths.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

KV_BLOCK = 64
"""Tokens of a KV block: the page size of the caches in use, and what two of fit into an SM."""
ROWS = 64
"""Query rows of a tile: the M side of a wgmma."""
DEFAULT_SM_COUNT = 132
"""SMs assumed where no device is known."""
ITEM_COST = 2
"""Cost of starting and finishing an item, in KV blocks."""
MERGE_COST = 9
"""Cost of cutting items, in KV blocks: the pieces are written, waited for and joined. On an H200 at
b=16 s=2 h=128 a launch that cuts takes 9 us more than one that does not (t=256 and 512, cold)."""
SPLIT_COST = 0.05
"""Share of the time that writing and merging pieces costs at most."""
SPLIT_ITEMS = 0.2
"""What it costs a part that has many items, in items."""
STREAM_COST = 0.0015
"""Share of the time that every gang costs that is alone on its KV blocks: memory is read for it
alone, which takes power from the tensor cores. On an H200 66 such gangs took 9 % (b=32 s=43)."""
GANG_WORTH = 0.03
"""Share of the time that a larger gang, which reads L2 in step, may cost."""


class Piece(IntEnum):
    """What a piece of an item is; 0 is a whole item."""

    PART = 1
    FIRST = 2
    LAST = 4


def cut_block(local, blocks):
    """The KV block at which a cut at distance `local` from an item's start is made.

    Even, because the kernel takes blocks in pairs; `blocks` or more means: behind the item. Plain
    arithmetic, so that it holds for Python integers as well as for device values.
    """
    return (cutlass.max(local - ITEM_COST, 0) + 1) // 2 * 2


def cut_position(total, part, parts):
    """Where part `part` of `parts` begins on a line of length `total`, without overflow."""
    return total // parts * part + total % parts * part // parts


@dataclass(frozen=True)
class GangShape:
    """How many blocks work together.

    Attributes:
        gang: blocks of a gang.
        groups: times that a gang visits a request, each with other query tiles.
        parts: gangs that fit the device at the same time.
    """

    gang: int
    groups: int
    parts: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.gang * self.parts


def gang_shape(tiles: int, requests: int, sm_count: int, gang: int = 0) -> GangShape:
    """Blocks per gang, and gangs, for a number of query tiles.

    Args:
        tiles: query tiles of the request with most rows.
        requests: requests of the batch.
        sm_count: blocks that the device runs at the same time.
        gang: a chosen size; 0 takes the one that leaves the fewest SMs without work.
    """

    def rated(size: int) -> tuple[float, GangShape]:
        groups, most = -(-tiles // size), max(sm_count // size, 1)
        items = requests * groups
        ideal = requests * tiles / sm_count
        each = items / most
        cost = min(SPLIT_COST, SPLIT_ITEMS / each)
        cut = (1.0 - cost) * ideal / each - STREAM_COST * most, GangShape(size, groups, most)
        rounds = -(-items // most)
        if items % rounds:
            return cut
        # Gangs that all take the same number of items need no cuts when lengths are equal, and
        # those on one request walk in step.
        parts = items // rounds
        streams = -(-parts // groups)
        whole = ideal / rounds - STREAM_COST * streams, GangShape(size, groups, parts)
        return max(whole, cut, key=lambda pair: pair[0])

    most = min(tiles, sm_count)
    sizes = [min(gang, most)] if gang else range(1, most + 1)
    candidates = [rated(size) for size in sizes]
    best = max(share for share, _ in candidates)
    near = (shape for share, shape in candidates if share >= best - GANG_WORTH)
    return max(near, key=lambda shape: shape.gang)


def takes_turns(longest, items, parts, total):
    """Whether gangs take whole items in turns: cutting them would cost more than it saves.

    Plain arithmetic, so that it holds for Python integers as well as for device values.

    Args:
        longest: most KV blocks of any item.
        items, parts: their numbers.
        total: length of the line.
    """
    rounds = (items + parts - 1) // parts
    return rounds * (longest + ITEM_COST) <= total // parts + MERGE_COST


def part_begins(lengths: Sequence[int], shape: GangShape) -> list[tuple[int, int]]:
    """Where each part begins, as (item, KV block), and where the last one ends.

    The same cuts as `part_range` makes on the device, for planning and tests. Items that are taken
    in turns there are in a row here; each part still gets its number of them.
    """
    blocks = [-(-length // KV_BLOCK) for length in lengths for _ in range(shape.groups)]
    starts = list(itertools.accumulate((count + ITEM_COST for count in blocks), initial=0))
    total = starts[-1]
    if takes_turns(max(blocks), len(blocks), shape.parts, total):
        each, rest = divmod(len(blocks), shape.parts)
        return [(part * each + min(part, rest), 0) for part in range(shape.parts + 1)]
    begins = []
    for part in range(shape.parts + 1):
        position = cut_position(total, part, shape.parts)
        item = bisect.bisect_right(starts, position) - 1
        if item == len(blocks):
            begins.append((item, 0))
            continue
        local = position - starts[item]
        block = cut_block(local, blocks[item])
        behind = block >= blocks[item] and local > 0
        begins.append((item + 1, 0) if behind else (item, block))
    return begins


def pieces(lengths: Sequence[int], shape: GangShape) -> int:
    """How many pieces of items the parts make, per member of a gang."""
    begins = part_begins(lengths, shape)
    items = len(lengths) * shape.groups
    inside = [begin for begin in dict.fromkeys(begins) if begin[1] > 0 and begin[0] < items]
    return len(inside) + len({item for item, _ in inside})


@cute.jit
def kv_blocks(lengths: cute.Tensor, request: Int32, newest: Int32) -> Int32:
    """KV blocks that a request's old tokens fill."""
    old = cutlass.max(lengths[request] - newest, 0)
    return (old + (KV_BLOCK - 1)) // KV_BLOCK


@cute.jit
def part_range(
    lengths: cute.Tensor, requests: Int32, groups: Int32, newest: Int32, part: Int32, parts: Int32
):
    """The items of a part; all lanes of a warp call it together and get the same answer.

    Where nothing is cut (`takes_turns`) the gangs at work are on neighbouring items, often of one
    request.

    Returns:
        (item, KV block) of the begin and of the end, which is not included: the part holds the
        blocks from the begin on, and of the end's item only those before its KV block. And the
        step from one item to the next.
    """
    lane = cute.arch.lane_idx()
    chunks = (requests + 31) // 32
    items = requests * groups
    total = Int32(0)
    longest = Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        request = chunk * 32 + lane
        if request < requests:
            blocks = kv_blocks(lengths, request, newest)
            total += blocks + ITEM_COST
            longest = cutlass.max(longest, blocks)
    total = cute.arch.warp_redux_sync(total, "add") * groups
    longest = cute.arch.warp_redux_sync(longest, "max")
    step = Int32(1)
    begin_item = part
    begin_block = Int32(0)
    end_item = items
    end_block = Int32(0)
    if takes_turns(longest, items, parts, total):
        step = parts
    else:
        begin_item, begin_block, end_item, end_block = cut_part(
            lengths, requests, groups, newest, part, parts, total
        )
    return begin_item, begin_block, end_item, end_block, step


@cute.jit
def cut_part(
    lengths: cute.Tensor,
    requests: Int32,
    groups: Int32,
    newest: Int32,
    part: Int32,
    parts: Int32,
    total: Int32,
):
    """A part's share of the line of length `total`; see `part_range`."""
    lane = cute.arch.lane_idx()
    chunks = (requests + 31) // 32
    begin_at = cut_position(total, part, parts)
    end_at = cut_position(total, part + 1, parts)

    before = Int32(0)
    begin_item = Int32(-1)
    begin_block = Int32(0)
    end_item = Int32(-1)
    end_block = Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        request = chunk * 32 + lane
        blocks = Int32(0)
        cost = Int32(0)
        if request < requests:
            blocks = kv_blocks(lengths, request, newest)
            cost = blocks + ITEM_COST
        inclusive = cost
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(inclusive, offset=1 << step)
            if lane >= (1 << step):
                inclusive += other
        start = (before + inclusive - cost) * groups
        if start <= begin_at and begin_at < start + cost * groups:
            begin_item, begin_block = cut_in_request(begin_at - start, request, groups, blocks)
        if start <= end_at and end_at < start + cost * groups:
            end_item, end_block = cut_in_request(end_at - start, request, groups, blocks)
        before += cute.arch.shuffle_sync(inclusive, 31)
    begin_item = cute.arch.warp_redux_sync(begin_item, "max")
    begin_block = cute.arch.warp_redux_sync(begin_block, "max")
    end_item = cute.arch.warp_redux_sync(end_item, "max")
    end_block = cute.arch.warp_redux_sync(end_block, "max")
    if begin_item < 0:  # behind the last item
        begin_item = requests * groups
    if end_item < 0:
        end_item = requests * groups
    return begin_item, begin_block, end_item, end_block


@cute.jit
def cut_in_request(local: Int32, request: Int32, groups: Int32, blocks: Int32):
    """(item, KV block) of a cut at distance `local` from the first item of a request."""
    cost = blocks + ITEM_COST
    item = request * groups + local // cost
    block = cut_block(local % cost, blocks)
    if block >= blocks and local % cost > 0:
        item += 1
        block = Int32(0)
    return item, block


@dataclass
class Item:
    """What a block does next: one query tile against some KV blocks of one request.

    Attributes:
        index: number of the item; live while there is one.
        live: whether there is one.
        row: the tile's first row among the request's rows.
        base: the request's first row among all rows.
        rows: rows of the request.
        length: tokens of the request.
        first: first KV block.
        last: KV block behind the last one.
        piece: 0, or what the item is a piece of (`Piece`).
    """

    index: Any
    live: Any
    row: Any
    base: Any
    rows: Any
    length: Any
    first: Any
    last: Any
    piece: Any

    @property
    def pairs(self) -> Any:
        """Pairs of KV blocks; an item without visible tokens still takes one, all hidden."""
        return cutlass.max((self.last - self.first + 1) // 2, 1)


@dataclass(frozen=True)
class Work:
    """What decides the items of a block: its part, and the sizes of the problem.

    Attributes:
        part: (item, KV block) of the begin and of the end, and the step, from `part_range`.
        lengths: tokens per request.
        query_begins: first query of each request and of the one behind the last; None when all
            requests have `queries` of them.
        tree: bytes [b, s, s], not 0 where a query sees one of the newest tokens; None when the
            order of the tokens alone decides.
        queries, heads, gang, groups, newest, causal: sizes, as in the kernel's contract.
        member: the block's place in its gang.
    """

    part: tuple[Any, ...]
    lengths: Any
    query_begins: Any
    tree: Any
    queries: Any
    heads: Any
    gang: Any
    groups: Any
    newest: Any
    causal: Any
    member: Any


@cute.jit
def item_at(index: Int32, work: cutlass.Constexpr) -> Item:
    """The next item, from `index` on, in which this block has a query tile."""
    begin_item, begin_block, end_item, end_block, step = work.part
    looking = Boolean(True)
    live = Boolean(False)
    row = Int32(0)
    base = Int32(0)
    rows = Int32(0)
    length = Int32(0)
    first = Int32(0)
    last = Int32(0)
    piece = Int32(0)
    while looking:
        if index > end_item or (index == end_item and end_block == 0):
            looking = Boolean(False)
        else:
            request = index // work.groups
            row = ((index % work.groups) * work.gang + work.member) * ROWS
            count = work.queries
            base = request * work.queries * work.heads
            if const_expr(work.query_begins is not None):
                count = work.query_begins[request + 1] - work.query_begins[request]
                base = work.query_begins[request] * work.heads
            rows = count * work.heads
            if row < rows:
                looking = Boolean(False)
                live = Boolean(True)
                length = work.lengths[request]
                blocks = kv_blocks(work.lengths, request, work.newest)
                if index == begin_item:
                    first = begin_block
                last = blocks
                if index == end_item:
                    last = end_block
                if first > 0 or last < blocks:
                    piece = Int32(Piece.PART)
                    if first == 0:
                        piece += Piece.FIRST
                    if last == blocks:
                        piece += Piece.LAST
                if work.causal != 0:
                    # The last row of the tile sees most.
                    query = cutlass.min(row + ROWS - 1, rows - 1) // work.heads
                    seen = cutlass.max(length - count + query + 1, 0)
                    last = cutlass.min(last, (seen + KV_BLOCK - 1) // KV_BLOCK)
                last = cutlass.max(last, first)
            else:
                index += step
    return Item(index, live, row, base, rows, length, first, last, piece)


@cute.jit
def slot_of(item: cutlass.Constexpr, part: Int32, work: cutlass.Constexpr) -> Int32:
    """Where a block leaves a piece: the even slot for its part's first item, the odd one else."""
    slot = (part * work.gang + work.member) * 2
    if item.index != work.part[0]:
        slot += 1
    return slot


@cute.jit
def note_piece(merges: cute.Tensor, slot: Int32, item: cutlass.Constexpr):
    """Tell the merge what a slot holds; one thread calls it."""
    merges[slot, 0] = item.piece
    merges[slot, 1] = item.base + item.row
    merges[slot, 2] = cutlass.min(item.rows - item.row, ROWS)


@cute.jit
def row_limit(item: cutlass.Constexpr, row: Int32, work: cutlass.Constexpr) -> Int32:
    """How many tokens a row of an item's tile sees in the item's KV blocks, counted from 0."""
    limit = cutlass.min(cutlass.max(item.length - work.newest, 0), item.last * KV_BLOCK)
    if work.causal != 0:
        query = (item.row + row) // work.heads
        limit = cutlass.min(limit, item.length - item.rows // work.heads + query + 1)
    return limit


@cute.jit
def first_hidden(item: cutlass.Constexpr, work: cutlass.Constexpr) -> Int32:
    """The first token that some row of an item's tile may not see."""
    lowest = row_limit(item, 0, work)
    if const_expr(work.tree is not None):
        lowest = cutlass.min(lowest, item.length - item.rows // work.heads)
    return lowest


@cute.jit
def tree_hides(
    item: cutlass.Constexpr, row: Int32, token: Int32, work: cutlass.Constexpr
) -> Boolean:
    """Whether a token is one of the newest and not on the way to a row's own token."""
    count = item.rows // work.heads
    draft = token - (item.length - count)
    hidden = Boolean(False)
    if draft >= 0 and draft < count:
        query = cutlass.min((item.row + row) // work.heads, count - 1)
        hidden = work.tree[item.index // work.groups, query, draft] == 0
    return hidden
