"""Register pieces of the kernels that have 64 query rows on the M side of a wgmma.

A warpgroup holds a wgmma accumulator of 64 rows. Each of its threads has two rows: `row` and
`row + 8`. Views with the layout of `two_rows` address such an accumulator as [row of this thread,
(column of a pair, group of 8 columns)].
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, WARPGROUP
from mla_var3.kernel.cute_python.mla.hopper.warps import fence_and_sync_warpgroup

LAZY_RISE = 8.0
"""The running maximum follows a larger score only when it lies this far above it, in powers of two:
probabilities up to 2**8 are as exact as those up to 1, and most KV blocks rescale nothing. On an
H200 at b=32 s=16 t=4096 h=128 an exact maximum costs 6 % (885 against 836 us, the log in
docs/kernels/flash-mla.md). Other margins were not measured."""


def two_rows(accumulator: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator as [row of this thread, (column of a pair, group of 8 columns)]."""
    layout = cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


# --- masks ----------------------------------------------------------------------------------------


@cute.jit
def mask_scores(
    s: cute.Tensor,
    first_token: Int32,
    limits: cute.Tensor,
    lane: Int32,
    also_hidden: cutlass.Constexpr = None,
    begins: cutlass.Constexpr = None,
    columns: cutlass.Constexpr = KV_BLOCK,
):
    """Set the scores of tokens that a row does not see to -inf, whatever they are.

    Args:
        s: scores of this thread's two rows.
        first_token: the first token of the KV block.
        limits: per row the first token that it does not see.
        lane: this thread's lane.
        also_hidden: (row of this thread, token) -> whether a token before the limit is hidden too.
        begins: per row the first token that it sees; None for token 0.
        columns: tokens of the KV block.
    """
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                token = first_token + j * 8 + (lane % 4) * 2 + e
                hidden = token >= limits[r]
                if const_expr(begins is not None):
                    hidden = hidden or token < begins[r]
                if const_expr(also_hidden is not None):
                    hidden = hidden or also_hidden(r, token)
                if hidden:
                    s[r, (e, j)] = -Float32.inf


@cute.jit
def clear_rows(
    tile: cute.Tensor,
    columns: cutlass.Constexpr,
    valid: Int32,
    thread: Int32,
    barrier: Int32,
    rows: cutlass.Constexpr = KV_BLOCK,
):
    """Zero the rows of a tile of `rows` behind the first `valid`: 0 * NaN would poison the output.

    All threads of a warpgroup call it; `barrier` is a named barrier of theirs.
    """
    zero = cute.make_rmem_tensor(8, tile.element_type)
    zero.fill(0.0)
    chunks = (rows - valid) * (columns // 8)
    for i in cutlass.range(thread, chunks, WARPGROUP, unroll=1):
        row = valid + i // (columns // 8)
        target = cute.local_tile(tile, (1, 8), (row, i % (columns // 8)))
        cute.autovec_copy(zero, cute.group_modes(target, 0, 2))
    fence_and_sync_warpgroup(barrier)


# --- softmax --------------------------------------------------------------------------------------


@cute.jit
def thread_max(s: cute.Tensor, best: cute.Tensor):
    """The highest score of each of this thread's two rows, among its own columns."""
    for r in cutlass.range_constexpr(2):
        best[r] = s[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)


@cute.jit
def max_must_rise(
    best: cute.Tensor, top: cute.Tensor, factor: Float32, margin: cutlass.Constexpr = LAZY_RISE
) -> Boolean:
    """Whether the running maximum of any row of the warp has to rise, see `raise_max`."""
    rising = best[0] * factor > top[0] + margin or best[1] * factor > top[1] + margin
    return cute.arch.vote_ballot_sync(rising) != 0


@cute.jit
def raise_max(
    best: cute.Tensor,
    top: cute.Tensor,
    scale: cute.Tensor,
    sums: cute.Tensor,
    factor: Float32,
    margin: cutlass.Constexpr = LAZY_RISE,
):
    """Raise the running maxima of this thread's rows to scores that lie far above them.

    Args:
        best: the highest score of each row among this thread's columns.
        top: running maximum per row, updated.
        scale: factor by which to rescale earlier results of a row, written.
        sums: sums of this thread's probabilities, rescaled.
        factor: from scores to powers of two, the unit of the maxima.
        margin: how far above a score may lie without a rise.
    """
    for r in cutlass.range_constexpr(2):
        row_best = cute.arch.fmax(best[r], cute.arch.shuffle_sync_bfly(best[r], offset=1))
        row_best = cute.arch.fmax(row_best, cute.arch.shuffle_sync_bfly(row_best, offset=2))
        row_best = row_best * factor
        new = top[r]
        if row_best > new + margin:
            new = row_best
        scale[r] = cute.math.exp2(top[r] - new, fastmath=True)
        sums[r] = sums[r] * scale[r]
        top[r] = new


@cute.jit
def update_max(
    s: cute.Tensor,
    top: cute.Tensor,
    scale: cute.Tensor,
    sums: cute.Tensor,
    factor: Float32,
    margin: cutlass.Constexpr = LAZY_RISE,
):
    """Update running maxima that this warpgroup shares with no other, see `raise_max`."""
    best = cute.make_rmem_tensor(2, Float32)
    thread_max(s, best)
    scale.fill(1.0)
    if max_must_rise(best, top, factor, margin):
        raise_max(best, top, scale, sums, factor, margin)


@cute.jit
def exponentiate(
    s: cute.Tensor,
    top: cute.Tensor,
    sums: cute.Tensor,
    factor: Float32,
    in_pairs: cutlass.Constexpr = False,
):
    """Scores of two rows to probabilities relative to the running maxima; adds up their sums.

    Args:
        s: the scores, replaced.
        top: running maximum per row.
        sums: sums of this thread's probabilities, updated.
        factor: from scores to powers of two, the unit of the maxima.
        in_pairs: add probabilities in pairs. A chain of additions ends later: in the latent kernel
            behind the next barrier, in front of a product
            (docs/results/2026-11-17-nvidia-h200-sums-in-pairs-rows.json).
    """
    for r in cutlass.range_constexpr(2):
        p = cute.math.exp2(s[r, None].load() * factor - top[r], fastmath=True)
        s[r, None].store(p)
        if const_expr(in_pairs):
            sums[r] = sums[r] + sum_in_pairs([s[r, i] for i in range(cute.size(s, mode=[1]))])
        else:
            sums[r] = sums[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


def sum_in_pairs(numbers: list[Any]) -> Any:
    """The sum of 2**n numbers, by a tree of additions."""
    while len(numbers) > 1:
        numbers = [one + other for one, other in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


@cute.jit
def rescale(o: cute.Tensor, scale: cute.Tensor):
    """Multiply two rows of an output by their scales."""
    for r in cutlass.range_constexpr(2):
        o[r, None].store(o[r, None].load() * scale[r])


@cute.jit
def rescale_if_needed(o: cute.Tensor, scale: cute.Tensor):
    """Multiply two rows of an output by their scales, unless those of the whole warp are 1."""
    if cute.arch.vote_ballot_sync(scale[0] != 1.0 or scale[1] != 1.0) != 0:
        rescale(o, scale)


@cute.jit
def row_sum(own: Float32) -> Float32:
    """Sum over the four threads of a row."""
    own += cute.arch.shuffle_sync_bfly(own, offset=1)
    own += cute.arch.shuffle_sync_bfly(own, offset=2)
    return own


@cute.jit
def normaliser(total: Float32, top: Float32):
    """The factor that normalises a row and its LSE in powers of two; 0 and -inf for an empty row.

    Args:
        total: sum of the row's probabilities, relative to `top`.
        top: running maximum of the row.
    """
    inverse = Float32(0.0)
    lse_log2 = -Float32.inf
    if total > 0.0:
        inverse = cute.arch.rcp_approx(total)
        lse_log2 = top + cute.math.log2(total, fastmath=True)
    return inverse, lse_log2


# --- stores ---------------------------------------------------------------------------------------


def own_columns(row: cute.Tensor, columns: int) -> cute.Tensor:
    """A row of `two_rows` as (column of a pair, group of 8 columns)."""
    return cute.make_tensor(row.iterator, cute.make_layout((2, columns // 8), stride=(1, 4)))


def columns_at(
    base: cute.Pointer, offset: Int64, columns: int, lane: Int32, element: type[Numeric]
) -> cute.Tensor:
    """The same columns of the row in memory that begins `offset` elements behind `base`."""
    place = (base + (offset + (lane % 4) * 2)).align(element.width // 4)  # two elements
    return cute.make_tensor(place, cute.make_layout((2, columns // 8), stride=(1, 8)))


@cute.jit
def store_row(
    row: cute.Tensor,
    columns: cutlass.Constexpr,
    base: cute.Pointer,
    offset: Int64,
    lane: Int32,
    element: cutlass.Constexpr,
):
    """Store this thread's columns of a row of `two_rows` as elements of another type.

    Args:
        row: the columns.
        columns: of the whole row.
        base: first element of all rows.
        offset: elements from there to the row.
        lane: this thread's lane.
        element: the type in memory.
    """
    converted = cute.make_rmem_tensor((2, columns // 8), element)
    converted.store(own_columns(row, columns).load().to(element))
    cute.autovec_copy(converted, columns_at(base, offset, columns, lane, element))
