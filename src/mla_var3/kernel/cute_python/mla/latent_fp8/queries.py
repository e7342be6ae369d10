"""Query rows of the 8-bit latent kernel: from memory to shared memory, rounded to e4m3."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    ROWS,
    SCORE_FLOOR,
)
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent_fp8.state import TILE_BYTES
from mla_var3.op.mla.window.quantise import E4M3_MAX

WARP_ROWS = ROWS // CONSUMER_WARPS
"""Query rows that a warp brings to shared memory."""


@cute.jit
def load_queries(
    queries: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    thread: Int32,
    per_token: cutlass.Constexpr,
):
    """Query rows into shared memory, as e4m3 numbers with a scale each; zeros for absent rows.

    Clears the running maxima too.

    A warp takes a row at a time, a lane 16 latent columns and 2 of the rope part. The rope part is
    divided by the scale too; where it is e4m3 the scale covers it.
    """
    lane = thread % 32
    warp = thread // 32
    dtype = queries.dtype
    rope_type = exchange.q_rope.element_type
    # No warp may still read the last tile's queries, nor its sums.
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    # All rows of a warp are asked for before the first one is used: one latency instead of eight.
    latent = cute.make_rmem_tensor((16, WARP_ROWS), dtype)
    rope = cute.make_rmem_tensor((2, WARP_ROWS), dtype)
    latent.fill(0.0)
    rope.fill(0.0)
    for i in cutlass.range_constexpr(WARP_ROWS):
        row = warp * WARP_ROWS + i
        if tile.row + row < tile.rows:
            at = tile.base + tile.row + row
            token, head = Int64(at // queries.heads), at % queries.heads
            start = token * queries.latent_token_stride + head * queries.latent_stride
            place = (queries.latent + (start + lane * 16)).align(16)
            cute.autovec_copy(cute.make_tensor(place, 16), latent[None, i])
            start = token * queries.rope_token_stride + head * queries.rope_stride
            place = (queries.rope + (start + lane * 2)).align(4)
            cute.autovec_copy(cute.make_tensor(place, 2), rope[None, i])
    for i in cutlass.range_constexpr(WARP_ROWS):
        row = warp * WARP_ROWS + i
        wide, wide_rope = latent[None, i].load().to(Float32), rope[None, i].load().to(Float32)
        peak = largest(wide)
        if const_expr(not per_token):
            peak = cute.arch.fmax(peak, largest(wide_rope))
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(peak, offset=1 << step)
            peak = cute.arch.fmax(peak, other)
        scale = Float32(1.0)
        if peak > 0.0:
            scale = cute.arch.fmax(peak * (1.0 / E4M3_MAX), Float32(2.0**-120))
        inverse = 1.0 / scale
        narrow = cute.make_rmem_tensor(16, Float8E4M3FN)
        narrow.store((wide * inverse).to(Float8E4M3FN))
        chunk = ((lane % 8) ^ (row % 8)) * 16
        store_bytes(narrow, exchange.q_bytes, (lane // 8) * TILE_BYTES + row * 128 + chunk)
        part = cute.make_rmem_tensor(2, rope_type)
        part.store((wide_rope * inverse).to(rope_type))
        if const_expr(per_token):
            place = row * 128 + ((lane // 4) ^ (row % 8)) * 16 + (lane % 4) * 4
        else:
            place = row * 64 + ((lane // 8) ^ (row % 8 // 2)) * 16 + (lane % 8) * 2
        store_bytes(part, exchange.q_rope_bytes, place)
        if lane == 0:
            exchange.q_scale[row] = scale
            # A warp whose rows see nothing publishes no maximum, but the other reads all.
            exchange.row_max[row] = Float32(SCORE_FLOOR)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)


def largest(values: Any) -> Float32:
    """The largest magnitude of some numbers in registers."""
    high = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
    low = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
    return cute.arch.fmax(high, -low)


def store_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Store registers at a byte offset in shared memory, in one go."""
    width = cute.size(values) * values.element_type.width // 8
    place = (cute.recast_ptr(base, dtype=cutlass.Uint8) + offset).align(width)
    target = cute.make_tensor(
        cute.recast_ptr(place, dtype=values.element_type), cute.make_layout(cute.size(values))
    )
    cute.autovec_copy(values, target)
