"""What is different in the decompressed kernel when keys and values have 8 bits.

A score is sq (sk (q8 k8) + (q_rope / sq) k_rope), with the scales sq of the query row and sk of the
key; sq goes into the exponent with the softmax scale. The rope part stays in 16 bits. Weights are
multiplied by the scales of the values relative to the largest so far, rounded to e4m3, and
multiplied with v8. Queries and weights lose as much as keys and values do.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from mla_var3.kernel.cute_python.mla.warpgroups import settle
from mla_var3.kernel.cute_python.mla.window_jobs import BLOCK, HEAD
from mla_var3.op.mla.packed_window import TOKEN_ORDER

MMA_DEPTH_8 = 32
E4M3_MAX = 448.0
LARGEST_WEIGHT = 256.0
"""Of a row: e4m3 ends at 448, and what is small stays above its least number, 2**-9."""
SCALE_FLOOR = 1.0e-30
"""Where the largest scale of the values starts; not 0, so that it can be divided by."""
FIRST_BARRIER = 1
"""Named barriers, one per warpgroup; 0 is the one of the whole block."""


@cute.jit
def load_queries_8(
    q: cute.Tensor,
    q_rope: cute.Tensor,
    scales: cute.Tensor,
    source: cute.Pointer,
    row0: Int32,
    rows: cutlass.Constexpr,
    heads: Int32,
    lane: Int32,
    dtype: cutlass.Constexpr,
):
    """Two rows as e4m3 numbers into the registers of an operand A, each with a scale.

    The scale is that of the larger part, so that the rope part divided by it fits 16 bits too.

    Args:
        q: registers.
        q_rope: the rope part of the same rows, in 16 bits.
        scales: one per row, written.
        source: the first element of row 0.
        row0: this thread's first row; the other is 8 behind.
        rows: whether they exist; others are zeros.
        heads: rows of the memory between two rows.
        lane: this thread's place in its warp.
        dtype: of the source.
    """
    steps = HEAD // MMA_DEPTH_8
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
        peak = Float32(0.0)
        for i in cutlass.range_constexpr(2):
            peak = cute.arch.fmax(peak, parts[i].reduce(cute.ReductionOp.MAX, Float32(0.0), 0))
            peak = cute.arch.fmax(peak, -parts[i].reduce(cute.ReductionOp.MIN, Float32(0.0), 0))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=1))
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=2))
        scale = Float32(1.0)
        if peak > 0.0:
            scale = peak * (1.0 / E4M3_MAX)
        scales[r] = scale
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
def scales_of(scales: cute.Tensor, slot: Int32, j: cutlass.Constexpr, lane: Int32) -> cute.Tensor:
    """Scales of key and value of this thread's two columns of a group of 8."""
    four = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.local_tile(scales[(None, slot)], (4,), (j * 4 + lane % 4,)), four)
    return four


@cute.jit
def scale_scores(
    s: cute.Tensor, rope: cute.Tensor, scales: cute.Tensor, slot: Int32, lane: Int32
) -> Float32:
    """Products of e4m3 numbers to scores; returns the largest scale of the block's values."""
    largest = Float32(0.0)
    for j in cutlass.range_constexpr(BLOCK // 8):
        four = scales_of(scales, slot, j, lane)
        for e in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                s[r, (e, j)] = s[r, (e, j)] * four[2 * e] + rope[r, (e, j)]
            largest = cute.arch.fmax(largest, four[2 * e + 1])
    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    return cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=2))


@cute.jit
def scale_weights(s: cute.Tensor, factor: Float32, scales: cute.Tensor, slot: Int32, lane: Int32):
    """Multiply the weights by the scales of the values, and by a factor."""
    for j in cutlass.range_constexpr(BLOCK // 8):
        four = scales_of(scales, slot, j, lane)
        for e in cutlass.range_constexpr(2):
            value_scale = four[2 * e + 1] * factor
            for r in cutlass.range_constexpr(2):
                s[r, (e, j)] = s[r, (e, j)] * value_scale


@cute.jit
def round_weights_8(p: cute.Tensor, s: cute.Tensor):
    """Weights to the registers of an operand A: four k in a row are columns of two groups of 8."""
    for k in cutlass.range_constexpr(BLOCK // MMA_DEPTH_8):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                four = cute.make_rmem_tensor(4, Float32)
                for i in cutlass.range_constexpr(4):
                    four[i] = s[r, (i % 2, 4 * k + 2 * half + i // 2)]
                p[(None, r, half), 0, k].store(four.load().to(Float8E4M3FN))


@cute.jit
def clear_columns(values: cute.Tensor, slot: Int32, valid: Int32, t: Int32, group: Int32):
    """Zero the tokens of transposed values that are none: 0 * NaN would poison the output.

    A thread has a row, tokens are its bytes.
    """
    for at in cutlass.range(cutlass.max(valid, 0) // 16, BLOCK // 16, unroll=1):
        place = cute.local_tile(values[(None, None, slot)], (1, 16), (t, at))
        kept = cute.make_rmem_tensor(16, values.element_type)
        cute.autovec_copy(cute.group_modes(place, 0, 2), kept)
        numbers = cute.recast_tensor(kept, cutlass.Uint8)
        for i in cutlass.range_constexpr(16):
            if at * 16 + TOKEN_ORDER[i] >= valid:
                numbers[i] = cutlass.Uint8(0)
        cute.autovec_copy(kept, cute.group_modes(place, 0, 2))
    settle(FIRST_BARRIER + group)


@cute.jit
def clear_scales(scales: cute.Tensor, slot: Int32, valid: Int32, t: Int32, group: Int32):
    """Zero the scales of slots that hold no token."""
    if t >= valid and t < BLOCK:
        scales[2 * t, slot] = Float32(0.0)
        scales[2 * t + 1, slot] = Float32(0.0)
    settle(FIRST_BARRIER + group)
