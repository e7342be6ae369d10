"""Masks of the latent kernel: which tokens of a request a query row sees.

`tile` is a `WorkTile` and `scheduler` a `Scheduler` of `scheduler.py`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.latent.ops import divided, quotient


@cute.jit
def causal_limit(
    request: Int32, length: Int32, count: Int32, query: Int32, scheduler: cutlass.Constexpr
) -> Int32:
    """How many tokens of the cache are not later than a query, which may be none or fewer.

    A query at position x sees tokens 0 to x. Of these, those with i % shards == shard are here.
    """
    limit = length - count + query + 1
    if const_expr(scheduler.total_lengths is not None):
        position = scheduler.total_lengths[request] - count + query
        limit = Int32(0)
        if position >= 0:
            limit = divided(position + scheduler.shards - scheduler.shard, scheduler.shards)
    return limit


def existing_rows(tile: Any, scheduler: Any) -> Any:
    """Query rows of a work tile that exist; others of its request are in tiles behind it."""
    return cutlass.min(tile.rows - tile.row, scheduler.tile_rows)


@cute.jit
def row_limit(tile: cutlass.Constexpr, row: Int32, scheduler: cutlass.Constexpr) -> Int32:
    """How many tokens a row of a work tile sees in the tile's KV blocks, counted from 0."""
    limit = cutlass.min(cutlass.max(tile.length - scheduler.newest, 0), tile.last * KV_BLOCK)
    if scheduler.causal != 0:
        # Not `quotient`: with it the loops of `rows64.py` lie where they are slower
        # (docs/results/2026-11-16-nvidia-h200-engine-shapes.md#placement-of-the-code).
        query = (tile.row + row) // scheduler.heads
        seen = causal_limit(tile.request, tile.length, tile.queries, query, scheduler)
        limit = cutlass.min(limit, seen)
    return limit


@cute.jit
def window_begin(
    request: Int32, length: Int32, count: Int32, row: Int32, scheduler: cutlass.Constexpr
) -> Int32:
    """The first token in the sliding window of a request's row; may be negative."""
    query = quotient(row, scheduler.heads) - scheduler.window.size
    return causal_limit(request, length, count, query, scheduler)


@cute.jit
def row_begin(tile: cutlass.Constexpr, row: Int32, scheduler: cutlass.Constexpr) -> Int32:
    """The same for a row of a work tile."""
    return window_begin(tile.request, tile.length, tile.queries, tile.row + row, scheduler)


@cute.jit
def needs_mask(
    token: Int32, lowest: Int32, tile: cutlass.Constexpr, scheduler: cutlass.Constexpr
) -> Boolean:
    """Whether some row of a work tile does not see all tokens of the KV block from `token` on."""
    needed = token + KV_BLOCK > lowest
    if const_expr(scheduler.window is not None):
        # The last row of the tile sees the fewest old tokens.
        last_row = existing_rows(tile, scheduler) - 1
        needed = needed or token < row_begin(tile, last_row, scheduler)
    return needed


@cute.jit
def first_hidden(tile: cutlass.Constexpr, scheduler: cutlass.Constexpr) -> Int32:
    """The first token that some row of a work tile may not see."""
    lowest = row_limit(tile, 0, scheduler)
    if const_expr(scheduler.tree is not None):
        lowest = cutlass.min(lowest, tile.length - tile.queries)
    return lowest


@cute.jit
def tree_hides(
    tile: cutlass.Constexpr, row: Int32, token: Int32, scheduler: cutlass.Constexpr
) -> Boolean:
    """Whether a token is one of the newest and not on the path to a row's own token."""
    count = tile.queries
    draft = token - (tile.length - count)
    hidden = Boolean(False)
    if draft >= 0 and draft < count:
        query = cutlass.min((tile.row + row) // scheduler.heads, count - 1)
        hidden = scheduler.tree[tile.request, query, draft] == 0
    return hidden
