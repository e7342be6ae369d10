"""Consumer warpgroups of the latent kernel, for query tiles of 64 rows.

Of every pair of KV blocks each of the two warpgroups computes the scores of one. Each accumulates
half of the output columns, so it multiplies the probabilities of both blocks by its half of V, its
own from registers and the other's from shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from mla_var3.kernel.cute_python.mla.hopper import rows
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMERS,
    KV_BLOCK,
    ROWS,
    SCORE_FLOOR,
    TILE,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import release
from mla_var3.kernel.cute_python.mla.latent.cluster import meet, send_row, send_values, weights
from mla_var3.kernel.cute_python.mla.latent.mask import (
    first_hidden,
    needs_mask,
    row_begin,
    row_limit,
    tree_hides,
)
from mla_var3.kernel.cute_python.mla.latent.merge import partial_factors, slot_rows
from mla_var3.kernel.cute_python.mla.latent.ops import add_values, compute_scores, final_lse
from mla_var3.kernel.cute_python.mla.latent.producer import (
    Barrier,
    Mbarrier,
    arrive,
    block_parts,
)
from mla_var3.kernel.cute_python.mla.latent.scheduler import Split, partial_slot, writes

FLOAT16_PEAK = 2.0**14
"""Largest magnitude of a row that is exchanged in float16: numbers down to 2**-28 of it have all 11
bits, and rounding errors do not make it too large."""
LEAST_PEAK = 1.0e-25
"""Smaller magnitudes than this count as it, so that a row's sum times its factor fits a float32."""


@dataclass(frozen=True)
class Exchange:
    """What the warpgroups exchange in shared memory, a number per row.

    Attributes:
        row_max: [64] running maximum.
        scale_even, scale_odd: [64] factors by which the even or odd block's maximum rescales.
        row_sum: [64, warpgroup] sums of probabilities.
        peaks: [64, warpgroup] largest magnitudes of the output, see `float16_factor`.
    """

    row_max: Any
    scale_even: Any
    scale_odd: Any
    row_sum: Any
    peaks: Any


@cute.jit
def compute_rows64(
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    pv_mma_shared: cute.TiledMma,
    shared: cutlass.Constexpr,
    barriers: cute.Pointer,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    scheduler: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    strict: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others.

    Args:
        pv_mma, pv_mma_shared: values, 64 x k/2, with P in registers or in shared memory.
    """
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4
    widths, half_columns = shared.widths, shared.widths.half
    even_parts, odd_parts = block_parts(widths)

    # The rope tile of a KV block is of no use once its scores exist: it holds P then.
    p_even = cute.local_tile(shared.even, (KV_BLOCK, TILE), (0, widths.tiles))
    p_odd = cute.local_tile(shared.odd, (KV_BLOCK, TILE), (0, widths.tiles))
    thr_qk = qk_mma.get_slice(t)
    thr_pv, thr_pv_shared = pv_mma.get_slice(t), pv_mma_shared.get_slice(t)
    f_q = qk_mma.make_fragment_A(thr_qk.partition_A(shared.q))
    f_even = qk_mma.make_fragment_B(thr_qk.partition_B(shared.even))
    f_odd = qk_mma.make_fragment_B(thr_qk.partition_B(shared.odd))

    def values(block):
        # (k/2, 64): this warpgroup's half of the latent columns, transposed
        half = cute.local_tile(block, (KV_BLOCK, half_columns), (0, group))
        transposed = cute.make_ordered_layout((half_columns, KV_BLOCK), order=(1, 0))
        return cute.composition(half, transposed)

    v_even = pv_mma.make_fragment_B(thr_pv.partition_B(values(shared.even)))
    v_odd = pv_mma.make_fragment_B(thr_pv.partition_B(values(shared.odd)))
    f_p_even = pv_mma_shared.make_fragment_A(thr_pv_shared.partition_A(p_even))
    f_p_odd = pv_mma_shared.make_fragment_A(thr_pv_shared.partition_A(p_odd))
    store_p = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), qk_mma
    ).get_slice(t)
    p_even_target, p_odd_target = store_p.partition_D(p_even), store_p.partition_D(p_odd)

    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((ROWS, half_columns)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, KV_BLOCK)), Float32)
    o, s = rows.two_rows(acc_o, half_columns), rows.two_rows(acc_s, KV_BLOCK)
    # The same registers as operand A of the second product and as the result of the first.
    p_operand = cute.make_rmem_tensor(
        cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8)), dtype
    )
    p_result = cute.make_tensor(p_operand.iterator, acc_s.layout)
    sums = cute.make_rmem_tensor(2, Float32)
    limits, begins = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
    scale = cute.make_rmem_tensor(2, Float32)
    best, top = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)

    tile = scheduler.first_tile()
    phase = Int32(0)
    q_phase = Int32(0)
    if tile.valid:
        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, 0)
        if group == 0:
            compute_scores(qk_mma, f_q, f_even, acc_s, barriers, phase, even_parts)
        else:
            compute_scores(qk_mma, f_q, f_odd, acc_s, barriers, phase, odd_parts)
        warpgroup.wait_group(0)
    while tile.valid:
        following = scheduler.next_tile(tile)
        acc_o.fill(0.0)
        sums.fill(0.0)
        top.fill(SCORE_FLOOR)
        for r in cutlass.range_constexpr(2):
            limits[r] = row_limit(tile, row0 + 8 * r, scheduler)
            if const_expr(scheduler.window is not None):
                begins[r] = row_begin(tile, row0 + 8 * r, scheduler)
        lowest = first_hidden(tile, scheduler)
        if group == 0:
            for pair in cutlass.range(tile.pairs, unroll=1):
                final = pair == tile.pairs - 1
                if final:
                    release(barriers + Mbarrier.Q_EMPTY, lane)
                token = (tile.first + 2 * pair) * KV_BLOCK
                if needs_mask(token, lowest, tile, scheduler):
                    mask(s, token, limits, begins, lane, row0, tile, scheduler)
                    if token + KV_BLOCK > tile.length and token < tile.length:
                        rows.clear_rows(
                            shared.even, widths.k, tile.length - token, t, Barrier.WARPGROUP_0
                        )
                rows.thread_max(s, best)
                scale.fill(1.0)
                # In most blocks no maximum rises, and threads exchange nothing.
                if rows.max_must_rise(best, top, scale_log2e):
                    rows.raise_max(best, top, scale, sums, scale_log2e)
                    publish(exchange.row_max, top, row0, lane)
                    rows.rescale(o, scale)
                publish(exchange.scale_even, scale, row0, lane)
                rows.exponentiate(s, top, sums, scale_log2e, in_pairs=True)
                p_result.store(acc_s.load().to(dtype))
                cute.copy(store_p, store_p.retile(p_result), p_even_target)
                arrive(Barrier.P_EVEN, strict)
                add_values(pv_mma, acc_o, p_operand, v_even)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.EVEN_OWN_EMPTY, lane)
                wait_for_p(Barrier.P_ODD)
                if receive_scales(scale, exchange.scale_odd, row0):
                    adopt_max(o, top, sums, scale, exchange.row_max, row0)
                add_values(pv_mma_shared, acc_o, f_p_odd, v_odd)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.ODD_OTHER_EMPTY, lane)
                phase ^= 1
                if following.valid or not final:
                    if final:
                        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, q_phase ^ 1)
                    compute_scores(qk_mma, f_q, f_even, acc_s, barriers, phase, even_parts)
                    warpgroup.wait_group(0)
        else:
            for pair in cutlass.range(tile.pairs, unroll=1):
                final = pair == tile.pairs - 1
                if final:
                    release(barriers + Mbarrier.Q_EMPTY, lane)
                token = (tile.first + 2 * pair + 1) * KV_BLOCK
                if needs_mask(token, lowest, tile, scheduler):
                    mask(s, token, limits, begins, lane, row0, tile, scheduler)
                    if token + KV_BLOCK > tile.length and token < tile.length:
                        rows.clear_rows(
                            shared.odd, widths.k, tile.length - token, t, Barrier.WARPGROUP_1
                        )
                rows.thread_max(s, best)
                wait_for_p(Barrier.P_EVEN)
                if receive_scales(scale, exchange.scale_even, row0):
                    adopt_max(o, top, sums, scale, exchange.row_max, row0)
                add_values(pv_mma_shared, acc_o, f_p_even, v_even)
                scale.fill(1.0)
                rising = rows.max_must_rise(best, top, scale_log2e)
                if rising:
                    rows.raise_max(best, top, scale, sums, scale_log2e)
                    publish(exchange.row_max, top, row0, lane)
                publish(exchange.scale_odd, scale, row0, lane)
                rows.exponentiate(s, top, sums, scale_log2e, in_pairs=True)
                p_result.store(acc_s.load().to(dtype))
                cute.copy(store_p, store_p.retile(p_result), p_odd_target)
                arrive(Barrier.P_ODD, strict)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.EVEN_OTHER_EMPTY, lane)
                if rising:
                    rows.rescale(o, scale)
                add_values(pv_mma, acc_o, p_operand, v_odd)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.ODD_OWN_EMPTY, lane)
                phase ^= 1
                if following.valid or not final:
                    if final:
                        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, q_phase ^ 1)
                    compute_scores(qk_mma, f_q, f_odd, acc_s, barriers, phase, odd_parts)
                    warpgroup.wait_group(0)
        if const_expr(scheduler.clusters):
            if tile.split == Split.HALF:
                merge_halves(o, sums, top, exchange.row_sum, mailbox, row0, t, group, scheduler)
        finish(o, sums, top, exchange, outputs, tile, row0, lane, group, scheduler, dtype)
        q_phase ^= 1
        tile = following


@cute.jit
def mask(
    s: cute.Tensor,
    token: Int32,
    limits: cute.Tensor,
    begins: cute.Tensor,
    lane: Int32,
    row0: Int32,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """Hide the tokens of a KV block that a row does not see, by length, order, window and tree."""

    def off_path(r, hidden_token):
        return tree_hides(tile, row0 + 8 * r, hidden_token, scheduler)

    rows.mask_scores(
        s, token, limits, lane, None if scheduler.tree is None else off_path,
        None if scheduler.window is None else begins,
    )  # fmt: skip


@cute.jit
def publish(shared: cute.Tensor, own: cute.Tensor, row: Int32, lane: Int32):
    """Write a number per row for the other warpgroup; the four threads of a row have the same."""
    if lane % 4 == 0:
        for r in cutlass.range_constexpr(2):
            shared[row + 8 * r] = own[r]


@cute.jit
def wait_for_p(barrier: cutlass.Constexpr):
    """Wait for the other warpgroup's P, and make it visible to the wgmma of this one.

    The reader fences, not the writer: between writing P and multiplying by it, the writer's fence
    would wait for scores that still run. On an H200 at b=32 s=32 t=4096 h=16 it costs 1 % there
    (docs/knowledge/languages/cute-dsl/optimizations/fence-where-it-is-read.md).
    """
    cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMERS)
    cute.arch.fence_view_async_shared()


@cute.jit
def receive_scales(scale: cute.Tensor, scales: cute.Tensor, row: Int32) -> Boolean:
    """Read the scales of the other warpgroup; whether a row of the warp has to be rescaled."""
    for r in cutlass.range_constexpr(2):
        scale[r] = scales[row + 8 * r]
    return cute.arch.vote_ballot_sync(scale[0] != 1.0 or scale[1] != 1.0) != 0


@cute.jit
def adopt_max(
    o: cute.Tensor,
    top: cute.Tensor,
    sums: cute.Tensor,
    scale: cute.Tensor,
    row_max: cute.Tensor,
    row: Int32,
):
    """Adopt the maxima of the other warpgroup, and rescale earlier results by them."""
    for r in cutlass.range_constexpr(2):
        top[r] = row_max[row + 8 * r]
        sums[r] = sums[r] * scale[r]
    rows.rescale(o, scale)


@cute.jit
def merge_halves(
    o: cute.Tensor,
    sums: cute.Tensor,
    top: cute.Tensor,
    row_sums: cute.Tensor,
    mailbox: cutlass.Constexpr,
    row0: Int32,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
):
    """Merge the half of this CTA with that of the other one of its cluster, see `cluster.py`.

    Behind it the warpgroup that keeps its columns has the sums and maxima of both halves.
    """
    lane = t % 32
    rank = scheduler.cluster_rank
    totals = cute.make_rmem_tensor(2, Float32)
    for r in cutlass.range_constexpr(2):
        total = rows.row_sum(sums[r])
        if lane % 4 == 0:
            row_sums[row0 + 8 * r, group] = total
    meet()  # and no warp of the cluster reads its KV blocks any more
    for r in cutlass.range_constexpr(2):
        totals[r] = row_sums[row0 + 8 * r, 0] + row_sums[row0 + 8 * r, 1]
        sums[r] = Float32(0.0)
    if group != rank:
        for r in cutlass.range_constexpr(2):
            factor = float16_factor(row_peak(o[r, None]))
            o[r, None].store(o[r, None].load() * factor)
            if lane % 4 == 0:
                rise = cute.math.log2(factor, fastmath=True)
                send_row(totals[r] * factor, top[r] - rise, row0 + 8 * r, mailbox, 1 - rank)
        send_values(o, mailbox, 1 - rank, t)
    meet()
    if group == rank:
        own, other = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            row = row0 + 8 * r
            total, top[r], own[r], other[r] = weights(
                totals[r], top[r], mailbox.rows[row, 0], mailbox.rows[row, 1]
            )
            if lane % 4 == 0:
                sums[r] = total
        flat = cute.make_tensor(o.iterator, cute.make_layout(cute.size(o)))
        vector = cute.size(mailbox.values, mode=[0])
        for j in cutlass.range_constexpr(cute.size(mailbox.values, mode=[2])):
            received = mailbox.values[None, t, j].load().to(Float32)
            for n in cutlass.range_constexpr(vector):
                r = n // 2 % 2
                flat[vector * j + n] = flat[vector * j + n] * own[r] + received[n] * other[r]


@cute.jit
def finish(
    o: cute.Tensor,
    sums: cute.Tensor,
    top: cute.Tensor,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    row0: Int32,
    lane: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Normalise by the row sums of both warpgroups, and write the tile's result or partial."""
    lse, lse_partial = outputs.lse, outputs.lse_partial
    row_sums, peaks = exchange.row_sum, exchange.peaks
    k, half = outputs.widths.k, outputs.widths.half
    partial, writing = writes(tile, Boolean(True), group, scheduler)
    writes_lse = group == 0 and lane % 4 == 0
    for r in cutlass.range_constexpr(2):
        total = rows.row_sum(sums[r])
        if lane % 4 == 0:
            row_sums[row0 + 8 * r, group] = total
    # Each way in one piece: the code is not in the instruction cache, and jumps cost.
    if partial:
        slot = partial_slot(tile, scheduler)
        for r in cutlass.range_constexpr(2):
            peak = row_peak(o[r, None])
            if lane % 4 == 0:
                peaks[row0 + 8 * r, group] = peak
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
        for r in cutlass.range(2, unroll=1):
            row = row0 + 8 * r
            exists = writing and tile.row + row < tile.rows
            inverse, lse_log2 = rows.normaliser(row_sums[row, 0] + row_sums[row, 1], top[0])
            factor = float16_factor(cute.arch.fmax(peaks[row, 0], peaks[row, 1]))
            start = (Int64(slot) * slot_rows(outputs.o_partial) + row) * k
            target = outputs.o_partial + (start + group * half)
            store_narrow(o[0, None], factor, half, target, lane, exists, outputs.o_partial.dtype)
            if writes_lse and exists:
                lse_partial[slot * ROWS + row] = lse_log2
                factors = partial_factors(outputs.o_partial, slot + 1, k)
                factors[slot, row] = inverse * cute.arch.rcp_approx(factor)
            second_row(o, top)
    else:
        cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
        for r in cutlass.range(2, unroll=1):
            row = row0 + 8 * r
            exists = writing and tile.row + row < tile.rows
            inverse, lse_log2 = rows.normaliser(row_sums[row, 0] + row_sums[row, 1], top[0])
            at = Int64(tile.base + tile.row + row)
            target = outputs.o_latent + (at * k + group * half)
            store_narrow(o[0, None], inverse, half, target, lane, exists, dtype)
            if writes_lse and exists:
                lse[at] = final_lse(lse_log2, outputs.empty_positive)
            second_row(o, top)


@cute.jit
def second_row(o: cute.Tensor, top: cute.Tensor):
    """Put the second of a thread's rows in the place of the first, for the same code.

    The code at the end of a tile is not in the instruction cache. To fetch it takes longer than to
    move the numbers.
    """
    o[0, None].store(o[1, None].load())
    top[0] = top[1]


@cute.jit
def row_peak(row: cute.Tensor) -> Float32:
    """The largest magnitude of a row of half an output, of the four threads that have it."""
    peak = cute.math.absf(row.load()).reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=1))
    return cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=2))


@cute.jit
def float16_factor(peak: Float32) -> Float32:
    """The factor with which a row of this largest magnitude is exchanged in float16."""
    return cute.arch.rcp_approx(cute.arch.fmax(peak, Float32(LEAST_PEAK)) * (1 / FLOAT16_PEAK))


@cute.jit
def store_narrow(
    row: cute.Tensor,
    factor: Float32,
    columns: cutlass.Constexpr,
    target: cute.Pointer,
    lane: Int32,
    write: Boolean,
    dtype: cutlass.Constexpr,
):
    """Store this thread's columns of a row of half an output times a factor in 16 bits, if `write`.

    Four neighbour threads hold 2 of 8 columns each. Pairs of them exchange columns of two groups of
    8, so that each has 4 neighbouring columns and the four fill a memory sector of 32 bytes. All
    threads of the warp take part in the exchange, whether their row is written or not.
    """
    narrow = cute.make_rmem_tensor((2, columns // 8), dtype)
    narrow.store((rows.own_columns(row, columns).load() * factor).to(dtype))
    words = cute.recast_tensor(narrow, Int32)  # (1, columns / 8)
    out = cute.make_rmem_tensor((2, columns // 16), Int32)
    odd = lane % 2
    for j in cutlass.range_constexpr(columns // 16):
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
            out, cute.make_tensor(place, cute.make_layout((2, columns // 16), stride=(1, 8)))
        )
