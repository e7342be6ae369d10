"""Register pieces of the kernels that have query rows on the N side of a wgmma.

Tokens are on the M side. The rows are the columns of an accumulator, so there may be 8, 16, 24, ...
of them. A thread has two of every 64 tokens and two of every 8 rows, `own_row(j, e, lane)` for e in
(0, 1).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


def own_row(j, e, lane):
    """A query row of this thread: number e of its two in group j of 8 rows."""
    return j * 8 + (lane % 4) * 2 + e


def own_token(t, base=0):
    """The first of this thread's two tokens, or output columns, of the 64 from `base` on.

    The other one is 8 behind.
    """
    return base + t // 4 % 8 + t // 32 * 16


def by_row(accumulator: cute.Tensor, columns: int, m_tiles: int) -> cute.Tensor:
    """An accumulator [64 * m_tiles, columns] as [own row (e, j), (one of two, tile of 64)].

    Args:
        accumulator: the accumulator.
        columns: query rows.
        m_tiles: tiles of 64 on the M side.
    """
    own = (2, columns // 8)
    layout = cute.make_layout((own, (2, m_tiles)), stride=((1, 4), (2, columns // 2)))
    return cute.make_tensor(accumulator.iterator, layout)


def scores_by_row(accumulator: cute.Tensor, columns: int) -> cute.Tensor:
    """Scores [64 tokens, columns] as [own row (e, j), token of this thread]."""
    layout = cute.make_layout(((2, columns // 8), 2), stride=((1, 4), 2))
    return cute.make_tensor(accumulator.iterator, layout)


@cute.jit
def reduce_lanes(value: Float32, combine: cutlass.Constexpr) -> Float32:
    """Combine what the eight lanes that share a query row have of it."""
    for step in cutlass.range_constexpr(3):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=4 << step))
    return value


@cute.jit
def reduce_warps(
    warp_rows: cute.Tensor,
    row: Int32,
    first: cutlass.Constexpr,
    count: cutlass.Constexpr,
    combine: cutlass.Constexpr,
) -> Float32:
    """Combine what warps have written of a row, `count` of them from `first` on."""
    value = warp_rows[row, first]
    for warp in cutlass.range_constexpr(1, count):
        value = combine(value, warp_rows[row, first + warp])
    return value
