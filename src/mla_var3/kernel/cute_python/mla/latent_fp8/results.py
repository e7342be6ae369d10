"""Results of the 8-bit latent kernel: moved to float32 now and then, normalised and written."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mla_var3.kernel.cute_python.mla.hopper.columns import own_row
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMERS,
    LATENT,
    ROWS,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    normaliser,
    row_sum,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.ops import final_lse
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent.scheduler import (
    partial_slot,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.state import HALF, WEIGHT_BITS


@cute.jit
def own_place(
    outputs: cutlass.Constexpr,
    slot: Int32,
    row: Int32,
    t: Int32,
    group: Int32,
    m: cutlass.Constexpr,
) -> cute.Tensor:
    """Where this thread's two neighbouring columns of M tile m and of a row are in a partial."""
    start = (Int64(slot) * ROWS + row) * LATENT + own_column(t, group, m)
    return cute.make_tensor((outputs.o_partial + start).align(8), 2)


def own_column(t: Any, group: Any, m: int) -> Any:
    """The first of this thread's two output columns of M tile m."""
    return group * HALF + m * 64 + t // 32 * 16 + t % 32 // 4 * 2


@cute.jit
def publish_tops(state: cutlass.Constexpr, exchange: cutlass.Constexpr, t: Int32, group: Int32):
    """The running maxima of this warpgroup into shared memory."""
    row0 = (t // 32) * 16 + t % 32 // 4
    if t % 4 == 0:
        for r in cutlass.range_constexpr(2):
            exchange.tops[row0 + 8 * r, group] = state.top[r]


@cute.jit
def flush(
    o: cute.Tensor,
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    flushed: Int32,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Move the output to the partial's place in memory, added to what is there if `flushed`.

    What is there is relative to the maxima of its time, which `carried` holds.
    """
    slot = partial_slot(tile, scheduler)
    publish_tops(state, exchange, t, group)
    sync_warpgroup(Barrier.WARPGROUP_0 + group)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = own_row(j, e, t % 32)
            scale = Float32(0.0)
            if flushed != 0:
                gap = exchange.carried[row, group] - exchange.tops[row, group]
                scale = cute.math.exp2(gap, fastmath=True)
            for m in cutlass.range_constexpr(HALF // 64):
                place = own_place(outputs, slot, row, t, group, m)
                pair = cute.make_rmem_tensor(2, Float32)
                pair.fill(0.0)
                if flushed != 0:
                    cute.autovec_copy(place, pair)
                for r in cutlass.range_constexpr(2):
                    pair[r] = pair[r] * scale + o[(e, j), (r, m)]
                    o[(e, j), (r, m)] = Float32(0.0)
                cute.autovec_copy(pair, place)
    sync_warpgroup(Barrier.WARPGROUP_0 + group)
    row0 = (t // 32) * 16 + t % 32 // 4
    if t % 4 == 0:
        for r in cutlass.range_constexpr(2):
            exchange.carried[row0 + 8 * r, group] = state.top[r]


@cute.jit
def finish(
    o: cute.Tensor,
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    flushed: Int32,
    cache_scale: Float32,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Normalise by the row sums of both warpgroups, and write the tile's result or partial."""
    row0 = (t // 32) * 16 + t % 32 // 4
    publish_tops(state, exchange, t, group)
    for r in cutlass.range_constexpr(2):
        total = row_sum(state.sums[r])
        if t % 4 == 0:
            exchange.row_sum[row0 + 8 * r, group] = total
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    slot = partial_slot(tile, scheduler)
    lse, lse_partial = outputs.lse, outputs.lse_partial
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = own_row(j, e, t % 32)
            top = exchange.tops[row, group]
            total = exchange.row_sum[row, 0] + exchange.row_sum[row, 1]
            inverse, lse_log2 = normaliser(total, top - WEIGHT_BITS)
            if flushed != 0:
                scale = cute.math.exp2(exchange.carried[row, group] - top, fastmath=True)
                for m in cutlass.range_constexpr(HALF // 64):
                    pair = cute.make_rmem_tensor(2, Float32)
                    cute.autovec_copy(own_place(outputs, slot, row, t, group, m), pair)
                    for r in cutlass.range_constexpr(2):
                        o[(e, j), (r, m)] = o[(e, j), (r, m)] + pair[r] * scale
            inverse = inverse * cache_scale
            writes_lse = group == 0 and t // 4 == 0
            exists = tile.row + row < tile.rows
            if exists and tile.split != 0:
                if writes_lse:
                    lse_partial[slot * ROWS + row] = lse_log2
                for m in cutlass.range_constexpr(HALF // 64):
                    pair = cute.make_rmem_tensor(2, Float32)
                    for r in cutlass.range_constexpr(2):
                        pair[r] = o[(e, j), (r, m)] * inverse
                    cute.autovec_copy(pair, own_place(outputs, slot, row, t, group, m))
            elif exists:
                at = Int64(tile.base + tile.row + row)
                if writes_lse:
                    lse[at] = final_lse(lse_log2, outputs.empty_positive)
                for m in cutlass.range_constexpr(HALF // 64):
                    narrow = cute.make_rmem_tensor(2, dtype)
                    for r in cutlass.range_constexpr(2):
                        narrow[r] = (o[(e, j), (r, m)] * inverse).to(dtype)
                    place = (outputs.o_latent + (at * LATENT + own_column(t, group, m))).align(4)
                    cute.autovec_copy(narrow, cute.make_tensor(place, 2))
