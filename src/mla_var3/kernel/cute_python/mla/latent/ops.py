"""Device pieces that the absorbed kernels for Hopper share: 64 query rows against 64 tokens.

A warpgroup holds scores as a wgmma accumulator of 64 x 64 and half of the output as one of 64 x
256. Each thread has two rows of either: `row` and `row + 8`. Views with the layout of
`two_rows` address such an accumulator as [row of this thread, (column of a pair, group of 8)].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from mla_var3.kernel.cute_python.mla.hopper.warps import settle
from mla_var3.kernel.cute_python.mla.latent.schedule import KV_BLOCK, tree_hides

LATENT = 512
ROPE = 64
TILE = 64
"""Columns of a tile: 128 bytes, the widest swizzle of shared memory."""
COLUMN_TILES = (LATENT + ROPE) // TILE
ROPE_TILE = COLUMN_TILES - 1
HALF = LATENT // 2
"""Output columns of a warpgroup: the widest wgmma."""
TILE_BYTES = KV_BLOCK * TILE * 2
MMA_DEPTH = 16
SCORE_FLOOR = -1.0e30
"""Where the running maximum starts; finite, so that no difference of infinities arises."""
LAZY_RISE = 8.0
"""The running maximum follows a larger score only when it lies this much (in powers of two) above:
probabilities up to 2**8 are as exact as those up to 1, and most blocks rescale nothing. On an H200
at b=32 s=16 t=4096 h=128 an exact maximum costs 6 % (885 against 836 us)."""
LN_2 = 0.6931471805599453


def two_rows(accumulator: cute.Tensor, columns: int) -> cute.Tensor:
    """An accumulator as [row of this thread, (column of a pair, group of 8 columns)]."""
    layout = cute.make_layout((2, (2, columns // 8)), stride=(2, (1, 4)))
    return cute.make_tensor(accumulator.iterator, layout)


def copy_places(
    copy: cute.CopyAtom, shared: cute.Tensor, tensor: cute.Tensor, tile: tuple[int, ...]
) -> tuple[cute.Tensor, cute.Tensor]:
    """What the copy engine moves between shared memory and a tensor, tile by tile.

    Args:
        copy: the copy of one tile.
        shared: tiles in shared memory, the modes of a tile first.
        tensor: the tensor in memory, as the copy knows it.
        tile: sizes of a tile.

    Returns:
        Both with a tile as their first mode.
    """
    tiles = cute.local_tile(tensor, tile, (None,) * cute.rank(tensor))
    together = (cute.group_modes(each, 0, len(tile)) for each in (shared, tiles))
    return cpasync.tma_partition(copy, 0, cute.make_layout(1), *together)


@cute.jit
def scores(
    mma: cute.TiledMma,
    q: cute.Tensor,
    k: cute.Tensor,
    acc: cute.Tensor,
    arrived: cute.Pointer,
    phase: Int32,
    order: cutlass.Constexpr,
):
    """Acc = q k^T over groups of column tiles as they arrive; returns before it is done.

    Args:
        mma, q, k, acc: the product and its operands.
        arrived: barriers, one per group.
        phase: their phase.
        order: per group its column tiles.
    """
    # A private atom: setting a field of a shared one inside dynamic control flow is rejected.
    atom = cute.make_mma_atom(mma.op)
    for group in cutlass.range_constexpr(len(order)):
        cute.arch.mbarrier_wait(arrived + group, phase)
        warpgroup.fence()
        for i in cutlass.range_constexpr(len(order[group]) * TILE // MMA_DEPTH):
            tile = order[group][i * MMA_DEPTH // TILE]
            at = (None, None, tile * (TILE // MMA_DEPTH) + i % (TILE // MMA_DEPTH))
            atom.set(warpgroup.Field.ACCUMULATE, group + i > 0)
            cute.gemm(atom, acc, q[at], k[at], acc)
    warpgroup.commit_group()


@cute.jit
def add_values(mma: cute.TiledMma, acc: cute.Tensor, p: cute.Tensor, v: cute.Tensor):
    """Acc += p v; returns before it is done."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(KV_BLOCK // MMA_DEPTH):
        cute.gemm(atom, acc, p[(None, None, step)], v[(None, None, step)], acc)
    warpgroup.commit_group()


@cute.jit
def hide(
    s: cute.Tensor,
    first_token: Int32,
    limits: cute.Tensor,
    lane: Int32,
    row: Int32 = 0,
    item: cutlass.Constexpr = None,
    work: cutlass.Constexpr = None,
):
    """Scores of tokens that a row does not see become -inf, whatever they are.

    Args:
        s: scores of this thread's two rows.
        first_token: the first token of the block.
        limits: per row the first token that it does not see.
        lane: this thread's place in its warp.
        row, item, work: this thread's first row and what it belongs to, for trees of tokens.
    """
    for r in cutlass.range_constexpr(2):
        for j in cutlass.range_constexpr(KV_BLOCK // 8):
            for e in cutlass.range_constexpr(2):
                token = first_token + j * 8 + (lane % 4) * 2 + e
                hidden = token >= limits[r]
                if const_expr(work is not None and work.tree is not None):
                    hidden = hidden or tree_hides(item, row + 8 * r, token, work)
                if hidden:
                    s[r, (e, j)] = -Float32.inf


@cute.jit
def clear_rows(
    tile: cute.Tensor, columns: cutlass.Constexpr, valid: Int32, thread: Int32, barrier: Int32
):
    """Zero the rows of a tile that hold no token: 0 * NaN would poison the output.

    All 128 threads of a warpgroup call it; `barrier` is a named barrier of theirs.
    """
    zero = cute.make_rmem_tensor(8, tile.element_type)
    zero.fill(0.0)
    chunks = (KV_BLOCK - valid) * (columns // 8)
    for i in cutlass.range(thread, chunks, 128, unroll=1):
        row = valid + i // (columns // 8)
        target = cute.local_tile(tile, (1, 8), (row, i % (columns // 8)))
        cute.autovec_copy(zero, cute.group_modes(target, 0, 2))
    settle(barrier)


@cute.jit
def highest(s: cute.Tensor, best: cute.Tensor):
    """The highest score of each of this thread's two rows, among its own columns."""
    for r in cutlass.range_constexpr(2):
        best[r] = s[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)


@cute.jit
def rises(
    best: cute.Tensor, top: cute.Tensor, factor: Float32, margin: cutlass.Constexpr = LAZY_RISE
) -> Boolean:
    """Whether the maximum of any row of the warp has to follow its scores, see `raise_top`."""
    rising = best[0] * factor > top[0] + margin or best[1] * factor > top[1] + margin
    return cute.arch.vote_ballot_sync(rising) != 0


@cute.jit
def raise_top(
    best: cute.Tensor,
    top: cute.Tensor,
    scale: cute.Tensor,
    sums: cute.Tensor,
    factor: Float32,
    margin: cutlass.Constexpr = LAZY_RISE,
):
    """Let the running maxima of this thread's rows follow scores that lie far above.

    Args:
        best: the highest score of each row among this thread's columns.
        top: running maximum per row, updated.
        scale: factor per row by which earlier results shrink, written.
        sums: sums of this thread's probabilities, which shrink by it.
        factor: from scores to powers of two, the unit of the maxima.
        margin: how far above a score may lie without a rise.
    """
    for r in cutlass.range_constexpr(2):
        of_row = cute.arch.fmax(best[r], cute.arch.shuffle_sync_bfly(best[r], offset=1))
        of_row = cute.arch.fmax(of_row, cute.arch.shuffle_sync_bfly(of_row, offset=2)) * factor
        new = top[r]
        if of_row > new + margin:
            new = of_row
        scale[r] = cute.math.exp2(top[r] - new, fastmath=True)
        sums[r] = sums[r] * scale[r]
        top[r] = new


@cute.jit
def follow_scores(
    s: cute.Tensor,
    top: cute.Tensor,
    scale: cute.Tensor,
    sums: cute.Tensor,
    factor: Float32,
    margin: cutlass.Constexpr = LAZY_RISE,
):
    """Let maxima that no other warpgroup shares follow the scores of two rows, see `raise_top`."""
    best = cute.make_rmem_tensor(2, Float32)
    highest(s, best)
    scale.fill(1.0)
    if rises(best, top, factor, margin):
        raise_top(best, top, scale, sums, factor, margin)


@cute.jit
def weigh(s: cute.Tensor, top: cute.Tensor, sums: cute.Tensor, factor: Float32):
    """Scores of two rows to probabilities, relative to the running maxima, and their sums."""
    for r in cutlass.range_constexpr(2):
        p = cute.math.exp2(s[r, None].load() * factor - top[r], fastmath=True)
        s[r, None].store(p)
        sums[r] = sums[r] + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)


@cute.jit
def shrink(o: cute.Tensor, scale: cute.Tensor):
    """Multiply two rows of an output by their scales."""
    for r in cutlass.range_constexpr(2):
        o[r, None].store(o[r, None].load() * scale[r])


@cute.jit
def rescale(o: cute.Tensor, scale: cute.Tensor):
    """Multiply two rows of an output by their scales, unless no row of the warp needs it."""
    if cute.arch.vote_ballot_sync(scale[0] != 1.0 or scale[1] != 1.0) != 0:
        shrink(o, scale)


@cute.jit
def row_total(own: Float32) -> Float32:
    """Sum over the four threads of a row."""
    own += cute.arch.shuffle_sync_bfly(own, offset=1)
    own += cute.arch.shuffle_sync_bfly(own, offset=2)
    return own


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
        base: where the rows begin.
        offset: elements from there to the row.
        lane: this thread's place in its warp.
        element: the type in memory.
    """
    converted = cute.make_rmem_tensor((2, columns // 8), element)
    converted.store(own_columns(row, columns).load().to(element))
    cute.autovec_copy(converted, columns_at(base, offset, columns, lane, element))


@cute.jit
def store_narrow(
    row: cute.Tensor, target: cute.Pointer, lane: Int32, write: Boolean, dtype: cutlass.Constexpr
):
    """Store this thread's columns of a row of half an output in 16 bits, if `write`.

    Four neighbour threads hold 2 of 8 columns each. They trade two groups of 8 in pairs, so that
    each has 4 columns in a row and the four fill a memory sector of 32 bytes. All threads of the
    warp take part in the trade, whether their row is written or not.
    """
    narrow = cute.make_rmem_tensor((2, HALF // 8), dtype)
    narrow.store(own_columns(row, HALF).load().to(dtype))
    words = cute.recast_tensor(narrow, Int32)  # (1, 32)
    out = cute.make_rmem_tensor((2, HALF // 16), Int32)
    odd = lane % 2
    for j in cutlass.range_constexpr(HALF // 16):
        low, high = words[0, 2 * j], words[0, 2 * j + 1]
        send = high
        if odd == 1:
            send = low
        got = cute.arch.shuffle_sync_bfly(send, offset=1)
        if odd == 1:
            out[0, j] = got
            out[1, j] = high
        else:
            out[0, j] = low
            out[1, j] = got
    if write:
        column = (lane % 4 - odd) * 2 + odd * 8
        place = cute.recast_ptr((target + column).align(8), dtype=Int32)
        cute.autovec_copy(
            out, cute.make_tensor(place, cute.make_layout((2, HALF // 16), stride=(1, 8)))
        )
