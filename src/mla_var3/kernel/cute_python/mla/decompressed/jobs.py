"""What a block of the decompressed kernel does next, and what its rows see.

A job is 64 query rows for each of two warpgroups against some blocks of 64 tokens: two heads of one
tile of rows ("heads"), or two tiles of rows of one head, which then read the same keys and values
("tiles"). Blocks are persistent and take every blocks-th job, neighbours in the order in which they
share data: the heads of a request share its rope keys, the tiles of a head its keys and values.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.latent.schedule import KV_BLOCK, ROWS

HEAD = 128
"""Columns of a head: d."""
BLOCK = KV_BLOCK
"""Tokens of a block."""
GROUPS = 2
"""Computing warpgroups."""
FIRST_BARRIER = 1
"""Named barriers, one per warpgroup; 0 is the one of the whole block."""


def window_parts(requests: int, units: int, kv_blocks: int, blocks: int) -> int:
    """How many parts to cut each window into, so that few jobs still fill the SMs.

    Args:
        requests: requests of the batch.
        units: jobs of a request without cuts.
        kv_blocks: blocks of 64 tokens of the longest window.
        blocks: persistent blocks.
    """
    jobs = requests * units
    most = max(1, kv_blocks // 4)  # a part shorter than the ring does not fill it
    if jobs >= 2 * blocks:
        return 1

    def share_at_work(parts: int) -> float:
        rounds = -(-jobs * parts // blocks)
        return jobs * parts / (rounds * blocks)

    # Each part more costs a merge, so it has to pay.
    return max(range(1, min(most, 32) + 1), key=lambda parts: share_at_work(parts) - 0.01 * parts)


@dataclass(frozen=True)
class Window:
    """What decides the jobs: sizes of the problem, as in the kernel's contract.

    Attributes:
        lengths: tokens per request.
        requests, queries, heads: sizes.
        slots: tokens that there is room for.
        window: tokens that are kept decompressed.
        causal: not 0 when a query sees no later token.
        parts: parts of every window.
        tiles: whether a job is two tiles of a head; constant.
        shared: whether all requests have the same window, a prefix; constant.
        starts: in a ring the oldest position that it holds, per request; None when the slots are
            in order.
        alone: whether nobody else attends to the tokens before a ring; constant.
    """

    lengths: Any
    requests: Any
    queries: Any
    heads: Any
    slots: Any
    window: Any
    causal: Any
    parts: Any
    tiles: bool
    shared: bool
    starts: Any = None
    alone: bool = False

    @property
    def ring(self) -> bool:
        """Whether slot x holds the position with position % window == x; constant."""
        return self.starts is not None

    @property
    def rows(self) -> Any:
        """Query rows of a head that meet the same keys."""
        return self.requests * self.queries if self.shared else self.queries

    @property
    def row_tiles(self) -> Any:
        """Tiles of rows of a head."""
        return (self.rows + ROWS - 1) // ROWS

    @property
    def units(self) -> Any:
        """Jobs of a request without cuts."""
        if self.tiles:
            return self.heads * ((self.row_tiles + 1) // GROUPS)
        return (self.heads + 1) // GROUPS * self.row_tiles

    @property
    def jobs(self) -> Any:
        """All jobs."""
        return (1 if self.shared else self.requests) * self.units * self.parts


@dataclass
class Job:
    """A job.

    Attributes:
        request: whose keys and values.
        head, tile: of warpgroup 0; the other one has the next head or the next tile.
        part: which part of the window.
        tokens: tokens of the window that exist.
        first, last: blocks of tokens, `last` not included; at least one, so that a job without
            tokens is no exception for those who compute.
        stop: the first token behind the job's.
        cut: in a ring the slot of its oldest place; 0 elsewhere.
        gone: in a ring the places before its oldest token; 0 elsewhere.
        broken: whether tokens of a ring are missing.
    """

    request: Any
    head: Any
    tile: Any
    part: Any
    tokens: Any
    first: Any
    last: Any
    stop: Any
    cut: Any
    gone: Any
    broken: Any


@cute.jit
def job_at(index: Int32, window: cutlass.Constexpr) -> Job:
    """The job of a number; the loading warp and the computing warpgroups get the same one."""
    units = window.units
    unit = index % units
    request = index // units % (window.jobs // (units * window.parts))
    part = index // (window.jobs // window.parts)
    if const_expr(window.tiles):
        pairs = (window.row_tiles + 1) // GROUPS
        head, tile = unit // pairs, unit % pairs * GROUPS
        widest = tile + GROUPS - 1
    else:
        pairs = (window.heads + 1) // GROUPS
        head, tile = unit % pairs * GROUPS, unit // pairs
        widest = tile
    if const_expr(window.shared):
        tokens = window.window
        seen = tokens
    else:
        length = window.lengths[request]
        tokens = cutlass.min(length, window.window)
        seen = tokens
        # The newest tokens of a ring may be anywhere in it, so all of its blocks are read.
        if const_expr(not window.ring):
            if window.causal != 0:  # the last row sees most
                last_row = cutlass.min(widest * ROWS + ROWS, window.queries)
                seen = cutlass.min(seen, cutlass.max(tokens - window.queries + last_row, 0))
    blocks = (tokens + BLOCK - 1) // BLOCK
    first = blocks * part // window.parts
    last = cutlass.min(blocks * (part + 1) // window.parts, (seen + BLOCK - 1) // BLOCK)
    stop = last * BLOCK
    cut, gone, broken = Int32(0), Int32(0), Boolean(False)
    if const_expr(window.ring):
        cut, gone, broken = ring_state(request, window)
    last = cutlass.max(last, first + 1)
    return Job(request, head, tile, part, tokens, first, last, stop, cut, gone, broken)


@cute.jit
def rows_of_group(job: cutlass.Constexpr, group: Int32, window: cutlass.Constexpr):
    """The rows of a warpgroup in a job.

    Returns:
        Their head, the first of them among those of the head, and the same among all rows of
        queries and outputs.
    """
    head = job.head if window.tiles else job.head + group
    first = (job.tile + group) * ROWS if window.tiles else job.tile * ROWS
    start = (Int64(job.request) * window.queries + first) * window.heads + head
    return head, first, start


@cute.jit
def ring_state(request: Int32, window: cutlass.Constexpr):
    """The slot of a ring's oldest place, the places before its oldest token, and what is missing.

    Tokens are missing where the ring begins later than its places allow and the kernel of the older
    tokens, which shows them to every query, may not show them to some; or where there is none.
    """
    length = window.lengths[request]
    start = cutlass.min(window.starts[request], length)
    oldest = cutlass.max(length - window.window, 0)
    seen_by_all = length
    if window.causal != 0:
        seen_by_all = cutlass.max(length - window.queries + 1, 0)
    if const_expr(window.alone):
        seen_by_all = Int32(0)
    return oldest % window.window, start - oldest, start < oldest or start > seen_by_all


@cute.jit
def row_limit(job: cutlass.Constexpr, row: Int32, window: cutlass.Constexpr) -> Int32:
    """How many tokens of the window a row sees."""
    if const_expr(window.shared):
        request = cutlass.min(row // window.queries, window.requests - 1)
        length = window.lengths[request]
        limit = cutlass.min(length, job.tokens)
        if window.causal != 0:
            limit = cutlass.min(limit, length - window.queries + row % window.queries + 1)
    else:
        limit = job.tokens
        if window.causal != 0:
            limit = cutlass.min(limit, job.tokens - window.queries + row + 1)
    if const_expr(window.ring):
        # In the order of positions, which says nothing about blocks: all of the job's, or none.
        if job.stop <= job.first * BLOCK:
            limit = Int32(0)
    else:
        limit = cutlass.min(limit, job.stop)
    return limit


@cute.jit
def places_end(token: Int32, job: cutlass.Constexpr, window: cutlass.Constexpr) -> Int32:
    """The place behind the newest one of a block of a ring."""
    end = token + BLOCK
    if token < job.cut:  # some slots, at least, hold the newer part
        end = cutlass.min(end, job.cut) + window.window
    return end - job.cut


@cute.jit
def place_of(slot: Int32, job: cutlass.Constexpr, window: cutlass.Constexpr) -> Int32:
    """Where a slot of a ring is in the order of positions, counted from the oldest place."""
    place = slot - job.cut
    if place < 0:
        place += window.window
    return place


@cute.jit
def inside(head: Int32, row: Int32, window: cutlass.Constexpr) -> Boolean:
    """Whether there is such a row."""
    return row < window.rows and head < window.heads
