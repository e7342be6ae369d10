"""The first token of a request, apart from the others of the 8-bit latent kernel.

In many models the first token has much of the weight of many rows. Beside it the weights of the
others are so small that e4m3 rounds many to zero, and a sum that holds its values cuts what is left
of them. So it is hidden from the tile's weights and maxima. At the end of the tile it is merged in
float32, as a partial of one token.

This holds for tiles that begin with the request and are long enough for means (`means.py`): in
shorter ones the others have weight enough. Where rows see a sliding window there is no such token.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.kernel.cute_python.mla.latent.mask import existing_rows
from mla_var3.kernel.cute_python.mla.latent_fp8.means import column_bytes, floats, thread_place
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    HALF,
    MEAN_PAIRS,
    TILE_BYTES,
    WEIGHT_BITS,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.weights import floor_log2, own_rows

NOT_APART = -1.0
"""In place of the first token's scale, which is not negative: it is among the others."""


def is_apart(tile: Any, lowest: Int32, scheduler: Any) -> Boolean:
    """Whether a tile has a first token, long enough contexts and no row that sees nothing of it.

    Args:
        tile: the work tile.
        lowest: see `first_hidden`.
        scheduler: the CTA's work tiles.
    """
    if scheduler.window is not None:
        return Boolean(False)
    # `has_means` and `lowest > 0`. As two conditions they make all warps spill four numbers.
    return (tile.first == 0) & (cutlass.min(tile.pairs - MEAN_PAIRS, lowest) > 0)


@cute.jit
def set_apart(
    step: cutlass.Constexpr,
    first: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    keys_bytes: cute.Pointer,
    tile: cutlass.Constexpr,
    apart: Boolean,
    stage: Int32,
    t: Int32,
):
    """Keep the first token's scores and values, and hide it from the others.

    Warpgroup 0 calls it when a tile begins.

    Args:
        step: `Step`. The scores of the tile's first KV block exist.
        first: `FirstToken`.
        outputs: `latent.ops.Outputs`. The scores, in powers of two, are kept where the LSE of the
            rows is written when all is done: shared memory is full.
        keys_bytes: the KV blocks in shared memory.
        tile: the work tile.
        apart: see `is_apart`.
        stage: the first block's stage.
        t: this thread.
    """
    scores = (step.work.s[0, (0, 0)], step.work.s[1, (0, 0)])
    for r in cutlass.range_constexpr(2):
        hidden = apart and t % 4 == 0
        step.work.s[r, (0, 0)] = cutlass.select_(hidden, -Float32.inf, scores[r])
    scale = Float32(NOT_APART)
    if apart:
        scale = Float32(1.0)
        if const_expr(step.scales is not None):
            scale = step.scales[0, stage]
        if t % 4 == 0:
            for r in cutlass.range_constexpr(2):
                row = own_rows(t)[r]
                if row < existing_rows(tile, step.scheduler):
                    score = scores[r] * step.state.factors[r] * scale
                    outputs.lse[tile.base + tile.row + row] = score
        # A thread brings four columns of a column tile. Row 0 of a tile is not swizzled.
        column = t % 32 * 4
        source = keys_bytes.toint() + (stage * 4 + t // 32) * TILE_BYTES + column
        target = first.values.toint() + t // 64 * HALF + thread_place(column) + t // 32 % 2 * 4
        cute.arch.inline_ptx(
            "{ .reg .b32 v; .reg .b16 a, b; ld.shared.b32 v, [{$r0}]; mov.b32 {a, b}, v;"
            " st.shared.b16 [{$r1}], a; st.shared.b16 [{$r1} + 8], b; }",
            read_only_args=[source, target],
        )
    if t == 0:
        first.scale[0] = scale


@cute.jit
def own_score(outputs: cutlass.Constexpr, tile: cutlass.Constexpr, t: Int32) -> Float32:
    """The first token's score of row `t`, if it is apart. Read early, for its latency."""
    score = Float32(0.0)
    if t < ROWS and tile.row + t < tile.rows:
        score = outputs.lse[tile.base + tile.row + t]
    return score


@cute.jit
def send_first(first: cutlass.Constexpr, score: Float32, rank: Int32, t: Int32, group: Int32):
    """Give the first token to the CTA of the cluster that keeps this warpgroup's columns.

    Args:
        first: `FirstToken`, the same place in both CTAs.
        score: of row `t`.
        rank: the other CTA, which has another part of the request.
        t, group: this thread and its warpgroup.
    """
    if first.scale[0] != NOT_APART:
        if t < ROWS:
            send_word(score.bitcast(Int32), first.scores.toint() + t * 4, rank)
            place = first.values.toint() + group * HALF + t * 4
            send_word(word_at(place), place, rank)
        if t == 0:
            scale = first.scale[0]
            send_word(scale.bitcast(Int32), first.scale.iterator.toint(), rank)


def word_at(place: Any) -> Int32:
    """The word at an address in shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place]
    )


def send_word(word: Int32, place: Any, rank: Int32) -> None:
    """Write a word at an address in the shared memory of another CTA of the cluster."""
    cute.arch.inline_ptx(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1};"
        " st.shared::cluster.b32 [a], {$r2}; }",
        read_only_args=[place.to(Int32), rank, word],
    )


@cute.jit
def received_score(first: cutlass.Constexpr, score: Float32, t: Int32, rank: Int32) -> Float32:
    """The score of row `t` behind a merge of halves: CTA 0 has its own, the other what it got."""
    if rank != 0 and t < ROWS:
        score = word_at(first.scores.toint() + t * 4).bitcast(Float32)
    return score


@cute.jit
def with_first(total: Float32, top: Float32, score: Float32, scale: Float32):
    """A row's sum and maximum with the first token, and factors of the output and its values.

    Args:
        total, top: of the row's other tokens.
        score: of the first token.
        scale: its scale, or `NOT_APART`.
    """
    own, share = Float32(1.0), Float32(0.0)
    if scale != NOT_APART:
        highest = cute.arch.fmax(top, score + floor_log2(scale))
        own = cute.math.exp2(top - highest, fastmath=True)
        share = cute.math.exp2(score - highest + WEIGHT_BITS, fastmath=True)
        total = total * own + share
        top = highest
        share = share * scale
    return total, top, own, share


@cute.jit
def own_values(first: cutlass.Constexpr, t: Int32, group: Int32):
    """The first token's values in this thread's columns, two of each M tile; zeros if not apart."""
    words = cute.make_rmem_tensor(2, Int32)
    words.fill(0)
    if first.scale[0] != NOT_APART:
        found = column_bytes(first.values, t, group)
        for i in cutlass.range_constexpr(2):
            words[i] = found[i]
    return [number for i in range(2) for number in floats(words[i])]
