"""Query rows of the 8-bit latent kernel: from memory to shared memory, rounded to e4m3."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    LATENT,
    ROWS,
)
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent_fp8.state import COMPUTING, TILE_BYTES, Handover
from mla_var3.op.mla.window.quantise import E4M3_MAX

WARP_ROWS = ROWS // CONSUMER_WARPS
"""Query rows that a warp brings to shared memory, all at once."""
LANE_COLUMNS = 16
"""Neighbouring columns of a row that a lane has: 16 bytes of e4m3."""
ROW_LANES = 32 // WARP_ROWS
PARTS = LATENT // (ROW_LANES * LANE_COLUMNS)
"""Such columns of a lane in a latent row; it has one in the rope part."""


@cute.jit
def load_queries(
    queries: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    thread: Int32,
    first: Boolean,
    early: cutlass.Constexpr,
    per_token: cutlass.Constexpr,
):
    """Query rows into shared memory, as e4m3 numbers with a scale each; zeros for absent rows.

    The producer waits for the `first` of a CTA, unless `early`.

    Four lanes of a warp share a row, `WARP_ROWS` lanes apart, so that stores of neighbouring lanes
    lie in different banks. A lane then finds the place of one row, and a row's scale takes two
    exchanges: few instructions, which are not in the instruction cache when a tile begins. The rope
    part is divided by the scale too; where it is e4m3 the scale covers it.
    """
    lane = thread % 32
    row = thread // 32 * WARP_ROWS + lane % WARP_ROWS
    part = lane // WARP_ROWS
    dtype = queries.dtype
    rope_type = exchange.q_rope.element_type
    # No warp may still read the last tile's queries.
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    # All is asked for before the first number is used: one latency.
    latent = cute.make_rmem_tensor((LANE_COLUMNS, PARTS), dtype)
    rope = cute.make_rmem_tensor(LANE_COLUMNS, dtype)
    latent.fill(0.0)
    rope.fill(0.0)
    if tile.row + row < tile.rows:
        at = tile.base + tile.row + row
        token, head = Int64(at // queries.heads), Int64(at % queries.heads)
        start = token * queries.latent_token_stride + head * queries.latent_stride
        rope_start = token * queries.rope_token_stride + head * queries.rope_stride
        latent_row = (queries.latent + (start + part * LANE_COLUMNS)).align(16)
        rope_row = (queries.rope + (rope_start + part * LANE_COLUMNS)).align(16)
        for i in cutlass.range_constexpr(PARTS):
            place = latent_row + i * ROW_LANES * LANE_COLUMNS
            cute.autovec_copy(cute.make_tensor(place, LANE_COLUMNS), latent[None, i])
        cute.autovec_copy(cute.make_tensor(rope_row, LANE_COLUMNS), rope)
    peak = largest(latent)
    if const_expr(not per_token):
        peak = cute.arch.fmax(peak, largest(rope))
    for step in cutlass.range_constexpr(2):
        other = cute.arch.shuffle_sync_bfly(peak, offset=WARP_ROWS << step)
        peak = cute.arch.fmax(peak, other)
    if const_expr(not early):
        if first:
            cute.arch.barrier_arrive(barrier_id=Barrier.QUERIES, number_of_threads=CONSUMERS + 32)
    scale = Float32(1.0)
    if peak > 0.0:
        scale = cute.arch.fmax(peak * (1.0 / E4M3_MAX), Float32(2.0**-120))
    inverse = 1.0 / scale
    for i in cutlass.range_constexpr(PARTS):
        narrow = cute.make_rmem_tensor(LANE_COLUMNS, Float8E4M3FN)
        narrow.store((latent[None, i].load().to(Float32) * inverse).to(Float8E4M3FN))
        chunk = i * ROW_LANES + part
        offset = chunk // 8 * TILE_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16
        store_bytes(narrow, exchange.q_bytes, offset)
    scaled = cute.make_rmem_tensor(LANE_COLUMNS, rope_type)
    scaled.store((rope.load().to(Float32) * inverse).to(rope_type))
    if const_expr(per_token):
        for half in cutlass.range_constexpr(2):
            eight = cute.make_tensor(scaled.iterator + 8 * half, 8)
            chunk = (2 * part + half) ^ row % 8
            store_bytes(eight, exchange.q_rope_bytes, row * 128 + chunk * 16)
    else:
        store_bytes(scaled, exchange.q_rope_bytes, row * 64 + (part ^ row % 8 // 2) * 16)
    if part == 0:
        exchange.q_scale[row] = scale
    cute.arch.fence_view_async_shared()
    cute.arch.barrier_arrive(barrier_id=Handover.ROUNDED_QUERIES, number_of_threads=COMPUTING)


def largest(values: cute.Tensor) -> Float32:
    """The largest magnitude of 16-bit numbers in registers; any, if one is NaN, as its row is."""
    words = cute.recast_tensor(values, Int32)
    kind = "bf16x2" if values.element_type is BFloat16 else "f16x2"
    found = words[0]
    for i in range(1, cute.size(words)):
        # Of both halves the larger magnitude, with some sign.
        found = cute.arch.inline_ptx(
            f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[found, words[i]],
        )
    pair = cute.make_rmem_tensor(2, values.element_type)
    cute.recast_tensor(pair, Int32)[0] = found & 0x7FFF7FFF
    wide = pair.load().to(Float32)
    return cute.arch.fmax(wide[0], wide[1])


def store_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Store registers at a byte offset in shared memory, in one go."""
    width = cute.size(values) * values.element_type.width // 8
    place = (cute.recast_ptr(base, dtype=cutlass.Uint8) + offset).align(width)
    target = cute.make_tensor(
        cute.recast_ptr(place, dtype=values.element_type), cute.make_layout(cute.size(values))
    )
    cute.autovec_copy(values, target)
