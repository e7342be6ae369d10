"""The computing warpgroups of the absorbed kernel when a request has fewer than 64 query rows.

wgmma wants 64 rows on its M side. Here the tokens take that side and the query rows the N side,
which may be 8 to 56 wide, so that nothing is computed for rows that do not exist:

    S^T [64 tokens, rows] = K [64, 576] Q^T        O^T [256 columns, rows] += V^T [256, 64] P^T

Roles, barriers and loads are those of `flash_mla.py`. A softmax now runs over the M side: over the
eight threads of a column in a warp, and over the four warps through shared memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.warps import CONSUMERS, GROUP_WARPS, free
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
    LAZY_RISE,
    ROPE,
    ROPE_TILE,
    SCORE_FLOOR,
    TILE,
    add_values,
    clear_rows,
    scores,
)
from mla_var3.kernel.cute_python.mla.latent.schedule import (
    KV_BLOCK,
    ROWS,
    first_hidden,
    item_at,
    note_piece,
    row_limit,
    slot_of,
    tree_hides,
)


@cute.jit
def compute_few(
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    s_q: cute.Tensor,
    s_even: cute.Tensor,
    s_odd: cute.Tensor,
    signals: cute.Pointer,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    part: Int32,
    work: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    strict: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others.

    Args:
        qk_mma, pv_mma: the two products, `columns` wide.
        s_q, s_even, s_odd: the query tile and the KV blocks in shared memory.
        signals: memory barriers.
        exchange: in shared memory, maximum and scales per row by warpgroup, and warp results.
        outputs: o_latent, lse, o_partial, lse_partial, merges, `empty_positive` of `final_lse`.
        scale_log2e: softmax scale times log2 e.
        part: the block's part.
        work: what decides its items.
        columns: query rows, rounded up to a multiple of 8.
        dtype: element type.
        strict: see `announce`.
    """
    row_max, scales, warp_rows = exchange
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // 128)
    t = thread % 128
    lane = t % 32

    def first_rows(tensor, width):  # of a tile with 64 rows
        return cute.composition(tensor, cute.make_layout((columns, width), stride=(1, ROWS)))

    def probabilities(block):  # (columns, 64), where the rope columns were
        tile = cute.local_tile(block, (KV_BLOCK, TILE), (0, ROPE_TILE))
        return first_rows(tile, KV_BLOCK)

    def values(block):  # (256, 64): this warpgroup's half of the latent columns, transposed
        half = cute.local_tile(block, (KV_BLOCK, HALF), (0, group))
        return cute.composition(half, cute.make_ordered_layout((HALF, KV_BLOCK), order=(1, 0)))

    p_even, p_odd = probabilities(s_even), probabilities(s_odd)
    thr_qk, thr_pv = qk_mma.get_slice(t), pv_mma.get_slice(t)
    f_q = qk_mma.make_fragment_B(thr_qk.partition_B(first_rows(s_q, LATENT + ROPE)))
    f_even = qk_mma.make_fragment_A(thr_qk.partition_A(s_even))
    f_odd = qk_mma.make_fragment_A(thr_qk.partition_A(s_odd))
    v_even = pv_mma.make_fragment_A(thr_pv.partition_A(values(s_even)))
    v_odd = pv_mma.make_fragment_A(thr_pv.partition_A(values(s_odd)))
    f_p_even = pv_mma.make_fragment_B(thr_pv.partition_B(p_even))
    f_p_odd = pv_mma.make_fragment_B(thr_pv.partition_B(p_odd))

    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((HALF, columns)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((KV_BLOCK, columns)), Float32)
    # This thread's columns are 8 j + 2 (lane % 4) + e; [(e, j), token of this thread] and
    # [(e, j), (row of 8, tile of 64 output columns)].
    own = (2, columns // 8)
    s = cute.make_tensor(acc_s.iterator, cute.make_layout((own, 2), stride=((1, 4), 2)))
    o = cute.make_tensor(
        acc_o.iterator,
        cute.make_layout((own, (2, HALF // 64)), stride=((1, 4), (2, columns // 2))),
    )
    sums = cute.make_rmem_tensor(own, Float32)
    limits = cute.make_rmem_tensor(own, Int32)
    scale = cute.make_rmem_tensor(own, Float32)

    item = item_at(work.part[0], work)
    phase = Int32(0)
    q_phase = Int32(0)
    if item.live:
        cute.arch.mbarrier_wait(signals + Signal.QUERY, 0)
        if group == 0:
            scores(qk_mma, f_even, f_q, acc_s, signals + Signal.EVEN, phase, EVEN_GROUPS)
        else:
            scores(qk_mma, f_odd, f_q, acc_s, signals + Signal.ODD, phase, ODD_GROUPS)
        warpgroup.wait_group(0)
    while item.live:
        following = item_at(item.index + work.part[4], work)
        acc_o.fill(0.0)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                limits[e, j] = row_limit(item, j * 8 + (lane % 4) * 2 + e, work)
        lowest = first_hidden(item, work)
        if group == 0:
            for pair in cutlass.range(item.pairs, unroll=1):
                final = pair == item.pairs - 1
                if final:
                    free(signals + Signal.QUERY_FREE, lane)
                token = (item.first + 2 * pair) * KV_BLOCK
                if token + KV_BLOCK > lowest:
                    hide_few(s, token, limits, t, columns, item, work)
                    if token + KV_BLOCK > item.length and token < item.length:
                        clear_rows(s_even, LATENT, item.length - token, t, Barrier.GROUP)
                softmax_few(
                    s, sums, scale, row_max, scales, warp_rows, p_even, t, 0, pair == 0,
                    scale_log2e, columns, dtype,
                )  # fmt: skip
                cute.arch.fence_view_async_shared()
                announce(Barrier.EVEN, strict)
                # All warps of the group have to be done with P before it is an operand here.
                cute.arch.barrier(barrier_id=Barrier.GROUP, number_of_threads=128)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_even, f_p_even)
                warpgroup.wait_group(0)
                # P even lies in what the other half frees.
                free(signals + Signal.EVEN_FREE, lane)
                free(signals + (Signal.EVEN_FREE + 1), lane)
                cute.arch.barrier(barrier_id=Barrier.ODD, number_of_threads=CONSUMERS)
                take_scales(scale, sums, scales, 1, lane, columns)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_odd, f_p_odd)
                warpgroup.wait_group(0)
                free(signals + (Signal.ODD_FREE + 1), lane)
                phase ^= 1
                if final and following.live:
                    cute.arch.mbarrier_wait(signals + Signal.QUERY, q_phase ^ 1)
                scores(qk_mma, f_even, f_q, acc_s, signals + Signal.EVEN, phase, EVEN_GROUPS)
                warpgroup.wait_group(0)
        else:
            for pair in cutlass.range(item.pairs, unroll=1):
                final = pair == item.pairs - 1
                if final:
                    free(signals + Signal.QUERY_FREE, lane)
                token = (item.first + 2 * pair + 1) * KV_BLOCK
                cute.arch.barrier(barrier_id=Barrier.EVEN, number_of_threads=CONSUMERS)
                take_scales(scale, sums, scales, 0, lane, columns)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_even, f_p_even)
                if token + KV_BLOCK > lowest:
                    hide_few(s, token, limits, t, columns, item, work)
                    if token + KV_BLOCK > item.length and token < item.length:
                        clear_rows(s_odd, LATENT, item.length - token, t, Barrier.GROUP + 1)
                softmax_few(
                    s, sums, scale, row_max, scales, warp_rows, p_odd, t, 1, Boolean(False),
                    scale_log2e, columns, dtype,
                )  # fmt: skip
                cute.arch.fence_view_async_shared()
                announce(Barrier.ODD, strict)
                warpgroup.wait_group(0)
                free(signals + (Signal.EVEN_FREE + 1), lane)
                cute.arch.barrier(barrier_id=Barrier.GROUP + 1, number_of_threads=128)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_odd, f_p_odd)
                warpgroup.wait_group(0)
                # P odd lies in what the other half frees.
                free(signals + Signal.ODD_FREE, lane)
                free(signals + (Signal.ODD_FREE + 1), lane)
                phase ^= 1
                if final and following.live:
                    cute.arch.mbarrier_wait(signals + Signal.QUERY, q_phase ^ 1)
                scores(qk_mma, f_odd, f_q, acc_s, signals + Signal.ODD, phase, ODD_GROUPS)
                warpgroup.wait_group(0)
        finish_few(o, sums, row_max, warp_rows, outputs, item, part, t, group, work, columns, dtype)
        q_phase ^= 1
        item = following


@cute.jit
def hide_few(
    s: cute.Tensor,
    first_token: Int32,
    limits: cute.Tensor,
    t: Int32,
    columns: cutlass.Constexpr,
    item: cutlass.Constexpr,
    work: cutlass.Constexpr,
):
    """Scores of tokens that a row does not see become -inf, whatever they are."""
    for r in cutlass.range_constexpr(2):
        token = first_token + t // 4 % 8 + t // 32 * 16 + 8 * r
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                hidden = token >= limits[e, j]
                if const_expr(work.tree is not None):
                    row = j * 8 + (t % 4) * 2 + e
                    hidden = hidden or tree_hides(item, row, token, work)
                if hidden:
                    s[(e, j), r] = -Float32.inf


@cute.jit
def softmax_few(
    s: cute.Tensor,
    sums: cute.Tensor,
    own_scale: cute.Tensor,
    row_max: cute.Tensor,
    scales: cute.Tensor,
    warp_rows: cute.Tensor,
    p: cute.Tensor,
    t: Int32,
    group: cutlass.Constexpr,
    first: Boolean,
    scale_log2e: Float32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Scores to probabilities in shared memory, with the running maximum of both warpgroups.

    A warpgroup reads the maximum that the other one wrote last and writes its own, so nobody
    overwrites what a slower warp has yet to read.
    """
    lane = t % 32
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            top = cute.arch.fmax(s[(e, j), 0], s[(e, j), 1])
            for step in cutlass.range_constexpr(3):
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=4 << step))
            if lane < 4:
                warp_rows[j * 8 + lane * 2 + e, group * GROUP_WARPS + t // 32] = top
    cute.arch.barrier(barrier_id=Barrier.GROUP + group, number_of_threads=128)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = j * 8 + (lane % 4) * 2 + e
            top = warp_rows[row, group * GROUP_WARPS]
            for warp in cutlass.range_constexpr(1, GROUP_WARPS):
                top = cute.arch.fmax(top, warp_rows[row, group * GROUP_WARPS + warp])
            old = row_max[row, 1 - group]
            if first:
                old = Float32(SCORE_FLOOR)
            new = old
            if top * scale_log2e > old + LAZY_RISE:
                new = top * scale_log2e
            scale = cute.math.exp2(old - new, fastmath=True)
            own_scale[e, j] = scale
            if t < 4:
                scales[row, group] = scale
                row_max[row, group] = new
            total = sums[e, j] * scale
            for r in cutlass.range_constexpr(2):
                value = cute.math.exp2(s[(e, j), r] * scale_log2e - new, fastmath=True)
                total += value
                p[row, t // 4 % 8 + t // 32 * 16 + 8 * r] = value.to(dtype)
            sums[e, j] = total


@cute.jit
def take_scales(
    scale: cute.Tensor,
    sums: cute.Tensor,
    scales: cute.Tensor,
    group: cutlass.Constexpr,
    lane: Int32,
    columns: cutlass.Constexpr,
):
    """Read the other warpgroup's scales and apply them to the sums."""
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            scale[e, j] = scales[j * 8 + (lane % 4) * 2 + e, group]
            sums[e, j] = sums[e, j] * scale[e, j]


@cute.jit
def rescale_few(o: cute.Tensor, scale: cute.Tensor, columns: cutlass.Constexpr):
    """Multiply the output by its rows' scales, unless no row of the warp needs it."""
    needed = scale[0, 0] != 1.0
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            needed = needed or scale[e, j] != 1.0
    if cute.arch.vote_ballot_sync(needed) != 0:
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                o[(e, j), None].store(o[(e, j), None].load() * scale[e, j])


@cute.jit
def finish_few(
    o: cute.Tensor,
    sums: cute.Tensor,
    row_max: cute.Tensor,
    warp_rows: cute.Tensor,
    outputs: cutlass.Constexpr,
    item: cutlass.Constexpr,
    part: Int32,
    t: Int32,
    group: Int32,
    work: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Divide by the row sums of all warps and write the item's result or piece."""
    o_latent, lse, o_partial, lse_partial, merges, empty_positive = outputs
    lane = t % 32
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            total = sums[e, j]
            for step in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, offset=4 << step)
            if lane < 4:
                warp_rows[j * 8 + lane * 2 + e, group * GROUP_WARPS + t // 32] = total
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    slot = slot_of(item, part, work)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = j * 8 + (lane % 4) * 2 + e
            total = warp_rows[row, 0]
            for warp in cutlass.range_constexpr(1, 2 * GROUP_WARPS):
                total += warp_rows[row, warp]
            inverse = Float32(0.0)
            log_sum = -Float32.inf
            if total > 0.0:
                inverse = cute.arch.rcp_approx(total)
                log_sum = row_max[row, 1] + cute.math.log2(total, fastmath=True)
            column = group * HALF + t // 4 % 8 + t // 32 * 16
            speaks = group == 0 and t < 4
            exists = row < item.rows
            if exists and item.piece != 0:
                if speaks:
                    lse_partial[slot * ROWS + row] = log_sum
                start = (Int64(slot) * ROWS + row) * LATENT + column
                for tile in cutlass.range_constexpr(HALF // 64):
                    for r in cutlass.range_constexpr(2):
                        place = cute.make_tensor(o_partial + (start + tile * 64 + r * 8), 1)
                        place[0] = o[(e, j), (r, tile)] * inverse
            elif exists:
                at = Int64(item.base + row)
                if speaks:
                    lse[at] = final_lse(log_sum, empty_positive)
                for tile in cutlass.range_constexpr(HALF // 64):
                    for r in cutlass.range_constexpr(2):
                        start = at * LATENT + column + tile * 64 + r * 8
                        place = cute.make_tensor(o_latent + start, 1)
                        place[0] = (o[(e, j), (r, tile)] * inverse).to(dtype)
    # The next item's first maximum must not come before everyone has read this one.
    cute.arch.barrier(barrier_id=Barrier.FINISH, number_of_threads=CONSUMERS)
    if item.piece != 0 and group == 0 and t == 0:
        note_piece(merges, slot, item)
