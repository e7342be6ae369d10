"""The computing warpgroups of the absorbed kernel, for tiles of 64 query rows.

Of every pair of KV blocks each of the two warpgroups computes the scores of one. Of the output each
holds half of the columns, so it multiplies the probabilities of both blocks with its half of V, its
own from registers and the other's from shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warp, warpgroup

from mla_var3.kernel.cute_python.mla.hopper.warps import CONSUMERS, free
from mla_var3.kernel.cute_python.mla.latent.loader import (
    EVEN_GROUPS,
    ODD_GROUPS,
    Barrier,
    Signal,
    announce,
)
from mla_var3.kernel.cute_python.mla.latent.merge import final_lse
from mla_var3.kernel.cute_python.mla.latent.ops import (
    HALF,
    LATENT,
    ROPE_TILE,
    SCORE_FLOOR,
    TILE,
    add_values,
    clear_rows,
    hide,
    highest,
    raise_top,
    rises,
    row_total,
    scores,
    shrink,
    store_narrow,
    store_row,
    two_rows,
    weigh,
)
from mla_var3.kernel.cute_python.mla.latent.schedule import (
    KV_BLOCK,
    ROWS,
    first_hidden,
    item_at,
    note_piece,
    row_limit,
    slot_of,
)


@cute.jit
def compute_many(
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    pv_mma_shared: cute.TiledMma,
    s_q: cute.Tensor,
    s_even: cute.Tensor,
    s_odd: cute.Tensor,
    signals: cute.Pointer,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    part: Int32,
    work: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    strict: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others."""
    row_max, scale_even, scale_odd, row_sum = exchange
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // 128)
    t = thread % 128
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4

    # The rope columns of a KV block are of no use once its scores exist: they hold P then.
    p_even = cute.local_tile(s_even, (KV_BLOCK, TILE), (0, ROPE_TILE))
    p_odd = cute.local_tile(s_odd, (KV_BLOCK, TILE), (0, ROPE_TILE))
    thr_qk = qk_mma.get_slice(t)
    thr_pv, thr_pv_shared = pv_mma.get_slice(t), pv_mma_shared.get_slice(t)
    f_q = qk_mma.make_fragment_A(thr_qk.partition_A(s_q))
    f_even = qk_mma.make_fragment_B(thr_qk.partition_B(s_even))
    f_odd = qk_mma.make_fragment_B(thr_qk.partition_B(s_odd))

    def values(block):
        # (256, 64): this warpgroup's half of the latent columns, transposed
        half = cute.local_tile(block, (KV_BLOCK, HALF), (0, group))
        return cute.composition(half, cute.make_ordered_layout((HALF, KV_BLOCK), order=(1, 0)))

    v_even = pv_mma.make_fragment_B(thr_pv.partition_B(values(s_even)))
    v_odd = pv_mma.make_fragment_B(thr_pv.partition_B(values(s_odd)))
    f_p_even = pv_mma_shared.make_fragment_A(thr_pv_shared.partition_A(p_even))
    f_p_odd = pv_mma_shared.make_fragment_A(thr_pv_shared.partition_A(p_odd))
    store_p = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), qk_mma
    ).get_slice(t)
    p_even_target, p_odd_target = store_p.partition_D(p_even), store_p.partition_D(p_odd)

    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((ROWS, HALF)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, KV_BLOCK)), Float32)
    o, s = two_rows(acc_o, HALF), two_rows(acc_s, KV_BLOCK)
    # The same registers as an operand A of the second product and as the result of the first.
    p_operand = cute.make_rmem_tensor(
        cute.make_layout(((2, 2, 2), 1, 4), stride=((1, 2, 4), 0, 8)), dtype
    )
    p_result = cute.make_tensor(p_operand.iterator, acc_s.layout)
    sums = cute.make_rmem_tensor(2, Float32)
    limits = cute.make_rmem_tensor(2, Int32)
    scale = cute.make_rmem_tensor(2, Float32)
    best, top = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)

    item = item_at(work.part[0], work)
    phase = Int32(0)
    q_phase = Int32(0)
    if item.live:
        cute.arch.mbarrier_wait(signals + Signal.QUERY, 0)
        if group == 0:
            scores(qk_mma, f_q, f_even, acc_s, signals + Signal.EVEN, phase, EVEN_GROUPS)
        else:
            scores(qk_mma, f_q, f_odd, acc_s, signals + Signal.ODD, phase, ODD_GROUPS)
        warpgroup.wait_group(0)
    while item.live:
        following = item_at(item.index + work.part[4], work)
        acc_o.fill(0.0)
        sums.fill(0.0)
        top.fill(SCORE_FLOOR)
        for r in cutlass.range_constexpr(2):
            limits[r] = row_limit(item, row0 + 8 * r, work)
        lowest = first_hidden(item, work)
        if group == 0:
            for pair in cutlass.range(item.pairs, unroll=1):
                final = pair == item.pairs - 1
                if final:
                    free(signals + Signal.QUERY_FREE, lane)
                token = (item.first + 2 * pair) * KV_BLOCK
                if token + KV_BLOCK > lowest:
                    hide(s, token, limits, lane, row0, item, work)
                    if token + KV_BLOCK > item.length and token < item.length:
                        clear_rows(s_even, LATENT, item.length - token, t, Barrier.GROUP)
                highest(s, best)
                scale.fill(1.0)
                # In most blocks no maximum rises, and no thread needs to hear of another.
                if rises(best, top, scale_log2e):
                    raise_top(best, top, scale, sums, scale_log2e)
                    tell(row_max, top, row0, lane)
                    shrink(o, scale)
                tell(scale_even, scale, row0, lane)
                weigh(s, top, sums, scale_log2e)
                p_result.store(acc_s.load().to(dtype))
                cute.copy(store_p, store_p.retile(p_result), p_even_target)
                announce(Barrier.EVEN, strict)
                add_values(pv_mma, acc_o, p_operand, v_even)
                warpgroup.wait_group(0)
                free(signals + Signal.EVEN_FREE, lane)
                hear_of(Barrier.ODD)
                if hear(scale, scale_odd, row0):
                    follow(o, top, sums, scale, row_max, row0)
                add_values(pv_mma_shared, acc_o, f_p_odd, v_odd)
                warpgroup.wait_group(0)
                free(signals + (Signal.ODD_FREE + 1), lane)
                phase ^= 1
                if final and following.live:
                    cute.arch.mbarrier_wait(signals + Signal.QUERY, q_phase ^ 1)
                scores(qk_mma, f_q, f_even, acc_s, signals + Signal.EVEN, phase, EVEN_GROUPS)
                warpgroup.wait_group(0)
        else:
            for pair in cutlass.range(item.pairs, unroll=1):
                final = pair == item.pairs - 1
                if final:
                    free(signals + Signal.QUERY_FREE, lane)
                token = (item.first + 2 * pair + 1) * KV_BLOCK
                if token + KV_BLOCK > lowest:
                    hide(s, token, limits, lane, row0, item, work)
                    if token + KV_BLOCK > item.length and token < item.length:
                        clear_rows(s_odd, LATENT, item.length - token, t, Barrier.GROUP + 1)
                highest(s, best)
                hear_of(Barrier.EVEN)
                if hear(scale, scale_even, row0):
                    follow(o, top, sums, scale, row_max, row0)
                add_values(pv_mma_shared, acc_o, f_p_even, v_even)
                scale.fill(1.0)
                rising = rises(best, top, scale_log2e)
                if rising:
                    raise_top(best, top, scale, sums, scale_log2e)
                    tell(row_max, top, row0, lane)
                tell(scale_odd, scale, row0, lane)
                weigh(s, top, sums, scale_log2e)
                p_result.store(acc_s.load().to(dtype))
                cute.copy(store_p, store_p.retile(p_result), p_odd_target)
                announce(Barrier.ODD, strict)
                warpgroup.wait_group(0)
                free(signals + (Signal.EVEN_FREE + 1), lane)
                if rising:
                    shrink(o, scale)
                add_values(pv_mma, acc_o, p_operand, v_odd)
                warpgroup.wait_group(0)
                free(signals + Signal.ODD_FREE, lane)
                phase ^= 1
                if final and following.live:
                    cute.arch.mbarrier_wait(signals + Signal.QUERY, q_phase ^ 1)
                scores(qk_mma, f_q, f_odd, acc_s, signals + Signal.ODD, phase, ODD_GROUPS)
                warpgroup.wait_group(0)
        finish_many(o, sums, top, row_sum, outputs, item, part, row0, lane, group, work, dtype)
        q_phase ^= 1
        item = following


@cute.jit
def tell(shared: cute.Tensor, own: cute.Tensor, row: Int32, lane: Int32):
    """A number per row for the other warpgroup; the four threads of a row have the same."""
    if lane % 4 == 0:
        for r in cutlass.range_constexpr(2):
            shared[row + 8 * r] = own[r]


@cute.jit
def hear_of(barrier: cutlass.Constexpr):
    """Wait until the other warpgroup has announced its P, which products here can then read.

    Readers fence, not the writer: between writing P and multiplying with it, the fence would wait
    for scores that still run. On an H200 at b=32 s=32 t=4096 h=16 it costs 1 % there.
    """
    cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMERS)
    cute.arch.fence_view_async_shared()


@cute.jit
def hear(scale: cute.Tensor, scales: cute.Tensor, row: Int32) -> Boolean:
    """Read the scales of the other warpgroup; whether a row of the warp has to shrink."""
    for r in cutlass.range_constexpr(2):
        scale[r] = scales[row + 8 * r]
    return cute.arch.vote_ballot_sync(scale[0] != 1.0 or scale[1] != 1.0) != 0


@cute.jit
def follow(
    o: cute.Tensor,
    top: cute.Tensor,
    sums: cute.Tensor,
    scale: cute.Tensor,
    row_max: cute.Tensor,
    row: Int32,
):
    """Take over the maxima of the other warpgroup, by which earlier results shrink."""
    for r in cutlass.range_constexpr(2):
        top[r] = row_max[row + 8 * r]
        sums[r] = sums[r] * scale[r]
    shrink(o, scale)


@cute.jit
def finish_many(
    o: cute.Tensor,
    sums: cute.Tensor,
    top: cute.Tensor,
    row_sum: cute.Tensor,
    outputs: cutlass.Constexpr,
    item: cutlass.Constexpr,
    part: Int32,
    row0: Int32,
    lane: Int32,
    group: Int32,
    work: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Divide by the row sums of both warpgroups and write the item's result or piece."""
    o_latent, lse, o_partial, lse_partial, merges, empty_positive = outputs
    for r in cutlass.range_constexpr(2):
        total = row_total(sums[r])
        if lane % 4 == 0:
            row_sum[row0 + 8 * r, group] = total
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    slot = slot_of(item, part, work)
    for r in cutlass.range_constexpr(2):
        row = row0 + 8 * r
        total = row_sum[row, 0] + row_sum[row, 1]
        inverse = Float32(0.0)
        log_sum = -Float32.inf
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
            log_sum = top[r] + cute.math.log2(total, fastmath=True)
        o[r, None].store(o[r, None].load() * inverse)
        speaks = group == 0 and lane % 4 == 0
        inside = item.row + row < item.rows
        if item.piece != 0:
            if inside:
                start = (Int64(slot) * ROWS + row) * LATENT
                store_row(o[r, None], HALF, o_partial, start + group * HALF, lane, Float32)
                if speaks:
                    lse_partial[slot * ROWS + row] = log_sum
        else:
            at = Int64(item.base + item.row + row)
            target = o_latent + (at * LATENT + group * HALF)
            store_narrow(o[r, None], target, lane, inside, dtype)
            if speaks and inside:
                lse[at] = final_lse(log_sum, empty_positive)
    if item.piece != 0 and group == 0 and row0 == 0 and lane == 0:
        note_piece(merges, slot, item)
