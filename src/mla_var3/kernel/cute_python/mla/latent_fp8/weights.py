"""Scores to weights of the 8-bit latent kernel, and the running maxima.

A *weight* is a probability times the scale of its token, in e4m3. The running maximum is that of
the weights, with the scale rounded down to a power of two: weights then fit e4m3, however the
scales differ.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.columns import own_row
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    ROWS,
    SCORE_FLOOR,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    raise_max,
    sum_in_pairs,
    thread_max,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import fence_and_sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.mask import row_begin, row_limit
from mla_var3.kernel.cute_python.mla.latent.rows64 import mask
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    FIRST_BITS,
    RISE_BITS,
    WEIGHT_BITS,
    Handover,
)


@cute.jit
def token_scales(scales: cute.Tensor, stage: Int32, j: cutlass.Constexpr, lane: Int32):
    """The scales of this thread's two tokens of group j of 8."""
    two = cute.make_rmem_tensor(2, Float32)
    place = cute.local_tile(scales[(None, stage)], (2,), (j * 4 + lane % 4,))
    cute.autovec_copy(place, two)
    return two


@cute.jit
def load_scales(step: cutlass.Constexpr, stage: Int32, lane: Int32):
    """Scales of this thread's tokens into registers, while the scores of their KV block come."""
    for j in cutlass.range_constexpr(KV_BLOCK // 8):
        two = token_scales(step.scales, stage, j, lane)
        for e in cutlass.range_constexpr(2):
            step.tokens[e, j] = two[e]


def held_scales(tokens: cute.Tensor | None) -> Callable[[int], tuple[Any, Any]] | None:
    """Finds the scales of this thread's two tokens of a group of 8, in registers."""
    return None if tokens is None else lambda j: (tokens[0, j], tokens[1, j])


def stored_scales(scales: cute.Tensor | None, stage: Int32, lane: Int32) -> Callable | None:
    """The same in shared memory, for the rare second computation, which has no registers left."""
    return None if scales is None else lambda j: token_scales(scales, stage, j, lane)


@cute.jit
def clear_scales(scales: cute.Tensor, stage: Int32, valid: Int32, t: Int32):
    """Set the scales behind the first `valid` to 1: they may be NaN."""
    if t >= valid and t < KV_BLOCK:
        scales[t, stage] = Float32(1.0)
    fence_and_sync_warpgroup(Handover.SCORES)  # TMA writes there later


@cute.jit
def hide_scores(
    step: cutlass.Constexpr,
    stage: Int32,
    token: Int32,
    stored: Int32,
    tile: cutlass.Constexpr,
    t: Int32,
):
    """Hide the scores of a KV block that rows do not see, and scales of tokens that do not exist.

    Args:
        step: `ScoreStep`.
        stage: the block's stage.
        token: the block's first token.
        stored, tile, t: see `weigh_block`.
    """
    scales, s = step.scales, step.work.s
    lane = t % 32
    row0, _ = own_rows(t)
    if const_expr(scales is not None):
        if token + KV_BLOCK > stored:
            clear_scales(scales, stage, stored - token, t)
            load_scales(step, stage, lane)
    limits, begins = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
    for r in cutlass.range_constexpr(2):
        limits[r] = row_limit(tile, row0 + 8 * r, step.scheduler)
        if const_expr(step.scheduler.window is not None):
            begins[r] = row_begin(tile, row0 + 8 * r, step.scheduler)
    mask(s, token, limits, begins, lane, row0, tile, step.scheduler)


@cute.jit
def weigh(step: cutlass.Constexpr, stage: Int32, number: Int32, t: Int32, words_at: Int32):
    """Weights of a KV block into shared memory, and its sums to those of the rows.

    The maximum of a row is not computed as long as no weight saturates: the weights are those with
    the maximum of the blocks before. They are computed once more in the warps where one saturated.

    Args:
        step: `ScoreStep`.
        stage: the block's stage, and slot of its weights, which is free.
        number: of that stage.
        t: this thread.
        words_at: where this thread's first weights go.
    """
    state, exchange, scales, s = step.state, step.exchange, step.scales, step.work.s
    removed = step.removed
    lane = t % 32
    row0, _ = own_rows(t)
    added = cute.make_rmem_tensor(2, Float32)
    saturated = weigh_tokens(step, held_scales(step.tokens), added, row0, words_at)
    if cute.arch.vote_any_sync(saturated):
        scale = cute.make_rmem_tensor(2, Float32)
        best, tops = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        hidden_lane = opaque(lane)
        highest_exponents(s, best, state, scales, stage, hidden_lane)
        for r in cutlass.range_constexpr(2):
            tops[r] = WEIGHT_BITS - state.bases[r]
            if tops[r] == SCORE_FLOOR:
                best[r] = best[r] + FIRST_BITS
        margin = RISE_BITS - (1.0 if const_expr(scales is not None) else 0.0)
        raise_max(best, tops, scale, state.sums, Float32(1.0), margin)
        for r in cutlass.range_constexpr(2):
            state.odd[r] = state.odd[r] * scale[r]
            state.bases[r] = WEIGHT_BITS - tops[r]
            if hidden_lane % 4 == 0:
                removed[row0 + 8 * r] = removed[row0 + 8 * r] * scale[r]
        weigh_tokens(step, stored_scales(scales, stage, hidden_lane), added, row0, words_at)
        if lane == 0:
            exchange.risen[stage] = number
        store_rescales(step, stage, scale)
    for r in cutlass.range_constexpr(2):
        state.sums[r] = state.sums[r] + added[r]
        state.odd[r] = added[r] - state.odd[r]


def own_rows(t: Any) -> tuple[Any, Any]:
    """The two rows of a thread of the score warpgroup."""
    row = t // 32 * 16 + t % 32 // 4
    return row, row + 8


def keep_maxima(step: Any, stage: Any) -> None:
    """Factors of a KV block in which no maximum has risen; stored early, and again if one has.

    The numbers are in the text: nvidia-cutlass-dsl 4.6 takes no constant as an operand.
    """
    cute.arch.inline_ptx(
        "st.shared.f32 [{$r0}], 0f3F800000; st.shared.f32 [{$r0} + 32], 0f3F800000;",
        read_only_args=[rescales_place(step, stage)],
    )


def store_rescales(step: Any, stage: Any, scale: cute.Tensor) -> None:
    """Factors of this thread's two rows into shared memory; four threads write the same."""
    cute.arch.inline_ptx(
        "st.shared.f32 [{$r0}], {$r1}; st.shared.f32 [{$r0} + 32], {$r2};",
        read_only_args=[rescales_place(step, stage), scale[0], scale[1]],
    )


def rescales_place(step: Any, stage: Any) -> Any:
    """Where the factor of this thread's first row goes."""
    return step.rescales_at + stage * (ROWS * 4)


@cute.jit
def put(
    at: Int32,
    offset: cutlass.Constexpr,
    word: Int32,
    row: Int32,
    columns: cutlass.Constexpr,
):
    """Write a word of weights to shared memory, if the row is one of the second product."""
    if const_expr(columns == ROWS):
        store_word(at, offset, word)
    else:
        if row < columns:
            store_word(at, offset, word)


def store_word(at: Any, offset: int, word: Any) -> None:
    """Write a word to shared memory."""
    cute.arch.inline_ptx(f"st.shared.b32 [{{$r0}} + {offset}], {{$r1}};", read_only_args=[at, word])


def opaque(value: Any) -> Any:
    """The same number, of which the compiler does not know that it is the same.

    It then neither shares what follows from it with other code, nor computes it anew: the rare
    second computation of the weights would keep products of the first in registers.
    """
    kind = type(value)
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[kind], read_only_args=[value]
    )


def weigh_tokens(
    step: Any, scales_of: Callable | None, added: cute.Tensor, row0: Any, words_at: Any
) -> Boolean:
    """Weights of this thread's scores, stored word by word, in the order of `values.py`.

    Args:
        step: `ScoreStep`.
        scales_of: `held_scales` or `stored_scales`.
        added: sums of the probabilities, written.
        row0: this thread's first row.
        words_at: where its first weights go.

    Returns:
        Whether a weight is e4m3's largest number, 0x7e, or NaN, 0x7f; none is negative. It says so
        of others too if a byte is above 0x7f, whose sum would carry into the next one.
    """
    s, state = step.work.s, step.state
    sums: list[list[Any]] = [[], []]
    found = Int32(0)
    for g in range(KV_BLOCK // 16):
        weights = cute.make_rmem_tensor((4, 2), Float32)
        for half in range(2):
            j = 2 * g + half
            factors = None if scales_of is None else scales_of(j)
            for r in range(2):
                for e in range(2):
                    score = s[r, (e, j)]
                    if factors is not None:
                        score = score * factors[e]
                    # Else the compiler shares products with the rare second computation where it
                    # likes, and programs differ in the last bit of a sum.
                    power = cute.math.fma(score, state.factors[r], state.bases[r])
                    p = cute.math.exp2(power, fastmath=True)
                    sums[r].append(p)
                    weights[2 * half + e, r] = p if factors is None else p * factors[e]
        narrow = cute.make_rmem_tensor((4, 2), Float8E4M3FN)
        narrow.store(weights.load().to(Float8E4M3FN))
        packed = cute.recast_tensor(narrow, Int32)
        for r in range(2):
            found |= packed[0, r] + 0x02020202
            put(words_at, g * 16 * step.columns + r * 128, packed[0, r], row0 + 8 * r, step.columns)
    for r in range(2):
        four = [sum_in_pairs(sums[r][i : i + 4]) for i in range(0, KV_BLOCK // 4, 4)]
        added[r] = ((four[0] + four[1]) + four[2]) + four[3]
    return (found & Int32(-0x7F7F7F80)) != 0


@cute.jit
def floor_log2(number: Float32) -> Float32:
    """The exponent of a positive float, from its bits and without a conversion."""
    field = (number.bitcast(Int32) >> 23) | 0x4B000000
    return field.bitcast(Float32) - Float32(2.0**23 + 127)


@cute.jit
def highest_exponents(
    s: cute.Tensor,
    best: cute.Tensor,
    state: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    stage: Int32,
    lane: Int32,
):
    """The highest exponent of a weight of each of this thread's two rows, among its own tokens."""
    if const_expr(scales is None):
        thread_max(s, best)
        for r in cutlass.range_constexpr(2):
            best[r] = best[r] * state.factors[r]
    else:
        best.fill(-Float32.inf)
        for j in cutlass.range_constexpr(KV_BLOCK // 8):
            two = token_scales(scales, stage, j, lane)
            for e in cutlass.range_constexpr(2):
                added = floor_log2(two[e])
                for r in cutlass.range_constexpr(2):
                    exponent = s[r, (e, j)] * two[e] * state.factors[r] + added
                    best[r] = cute.arch.fmax(best[r], exponent)


@cute.jit
def rescale_output(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    stage: Int32,
    number: Int32,
    lane: Int32,
    columns: cutlass.Constexpr,
):
    """Multiply the output by the scales of a KV block, if a maximum has risen in it."""
    if exchange.risen[stage] == number:
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                scale = exchange.scales[own_row(j, e, lane), stage]
                o[(e, j), None].store(o[(e, j), None].load() * scale)
