"""The decompressed kernel with 8 bits and query rows on the M side: what differs from 16 bits.

Scores, scales and weights are those of `fp8_few.py`, which has the rows on the N side and is faster
up to 48 of them. With 64 rows nothing is padded here either, and queries and weights stay in
registers, which takes less energy than shared memory. The maximum of a row is exact but for a
margin that e4m3 leaves.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from mla_var3.kernel.cute_python.mla.decompressed import fp8_few
from mla_var3.kernel.cute_python.mla.decompressed.producer import warpgroup_barrier
from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, KV_BLOCK
from mla_var3.kernel.cute_python.mla.hopper.rows import update_max
from mla_var3.kernel.cute_python.mla.hopper.warps import fence_and_sync_warpgroup
from mla_var3.kernel.cute_python.mla.hopper.widths import row_places

MMA_DEPTH_8 = 32
"""K side of a wgmma with 8-bit operands."""


@cute.jit
def load_queries_by_row(
    q: cute.Tensor,
    q_rope: cute.Tensor,
    source: cute.Pointer,
    rows: cutlass.Constexpr,
    heads: Int32,
    state: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Load two rows as e4m3 numbers into the registers of an operand A, each with a scale.

    Args:
        q_rope: the rope part of the same rows, in 16 bits.
    """
    steps, row0, lane = HEAD // MMA_DEPTH_8, state.row0, state.lane
    for r in cutlass.range_constexpr(2):
        row = cute.make_rmem_tensor((4, 2, steps), Float32)
        row.fill(0.0)
        if rows[r]:
            for k in cutlass.range_constexpr(steps):
                for half in cutlass.range_constexpr(2):
                    at = Int64(row0 + 8 * r) * heads * HEAD
                    at += k * MMA_DEPTH_8 + half * 16 + (lane % 4) * 4
                    four = cute.make_rmem_tensor(4, dtype)
                    cute.autovec_copy(cute.make_tensor((source + at).align(8), 4), four)
                    row[None, half, k].store(four.load().to(Float32))
        parts = (row.load(), q_rope[(None, r, None), 0, None].load().to(Float32))
        scale = fp8_few.row_scale(parts)
        state.q_scale[r] = scale
        rounded = cute.make_rmem_tensor((4, 2, steps), Float8E4M3FN)
        rounded.store((row.load() * (1.0 / scale)).to(Float8E4M3FN))
        for k in cutlass.range_constexpr(steps):
            for half in cutlass.range_constexpr(2):
                q[(None, r, half), 0, k].store(rounded[None, half, k].load())


@cute.jit
def divide_rows(q: cute.Tensor, scales: cute.Tensor, dtype: cutlass.Constexpr):
    """Divide the two rows of an operand A by their scales."""
    for r in cutlass.range_constexpr(2):
        row = q[(None, r, None), 0, None]
        row.store((row.load().to(Float32) * (1.0 / scales[r])).to(dtype))


@cute.jit
def scale_scores(
    s: cute.Tensor,
    rope: cute.Tensor,
    exponents: cute.Tensor,
    scales: cute.Tensor,
    slot: Int32,
    lane: Int32,
):
    """Products of e4m3 numbers to scores, and the exponents of the value scales to registers.

    Args:
        s: q8 k8 of this thread's two rows, replaced by scores.
    """
    for j in cutlass.range_constexpr(KV_BLOCK // 8):
        four = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.local_tile(scales[(None, slot)], (4,), (j * 4 + lane % 4,)), four)
        for e in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                s[r, (e, j)] = s[r, (e, j)] * four[2 * e] + rope[r, (e, j)]
            exponents[e, j] = four[2 * e + 1]


@cute.jit
def softmax_by_row(state: cutlass.Constexpr, scale_log2e: Float32):
    """Scores to weights with the scales of the values in them, relative to a running maximum.

    Scales are part of the maximum.
    """
    s, exponents, sums, top = state.s, state.exponents, state.sums, state.top
    for r in cutlass.range_constexpr(2):
        factor = scale_log2e * state.q_scale[r]
        for j, e in row_places(KV_BLOCK):
            s[r, (e, j)] = s[r, (e, j)] * factor + exponents[e, j]
    update_max(s, top, state.scale, sums, Float32(1.0), fp8_few.LARGEST_BITS - fp8_few.WEIGHT_BITS)
    for j, e in row_places(KV_BLOCK):
        inverse = fp8_few.inverse_power(exponents[e, j])
        for r in cutlass.range_constexpr(2):
            weight = cute.math.exp2(s[r, (e, j)] - (top[r] - fp8_few.WEIGHT_BITS), fastmath=True)
            s[r, (e, j)] = weight
            sums[r] = sums[r] + weight * inverse


@cute.jit
def round_weights_by_row(p: cute.Tensor, s: cute.Tensor):
    """Weights to the registers of an operand A, whose k takes columns from two groups of 8."""
    for k in cutlass.range_constexpr(KV_BLOCK // MMA_DEPTH_8):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                four = cute.make_rmem_tensor(4, Float32)
                for i in cutlass.range_constexpr(4):
                    four[i] = s[r, (i % 2, 4 * k + 2 * half + i // 2)]
                p[(None, r, half), 0, k].store(four.load().to(Float8E4M3FN))


@cute.jit
def clear_scales(scales: cute.Tensor, slot: Int32, valid: Int32, t: Int32, group: Int32):
    """Zero the scales of slots that hold no token."""
    if t >= valid and t < KV_BLOCK:
        scales[2 * t, slot] = Float32(0.0)
        scales[2 * t + 1, slot] = Float32(0.0)
    fence_and_sync_warpgroup(warpgroup_barrier(group))
