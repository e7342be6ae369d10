"""Consumer warpgroups of the latent kernel when a request has fewer than 64 query rows.

wgmma wants 64 rows on its M side. Here the tokens take that side and the query rows the N side,
which may be 8 to 56 wide, so that nothing is computed for rows that do not exist:

    S^T [64 tokens, rows] = K [64, k+p] Q^T        O^T [k/2 columns, rows] += V^T [k/2, 64] P^T

Roles, barriers and loads are those of `rows64.py`. A softmax runs over the M side: over the eight
lanes that share a query row, and over the four warps through shared memory.
"""

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.columns import (
    by_row,
    own_row,
    own_token,
    reduce_lanes,
    reduce_warps,
    scores_by_row,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    KV_BLOCK,
    ROWS,
    SCORE_FLOOR,
    TILE,
    WARPGROUP,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import LAZY_RISE, clear_rows, normaliser
from mla_var3.kernel.cute_python.mla.hopper.warps import release, sync_warpgroup
from mla_var3.kernel.cute_python.mla.hopper.widths import row_places
from mla_var3.kernel.cute_python.mla.latent import mask
from mla_var3.kernel.cute_python.mla.latent.cluster import meet, send_row, send_values, weights
from mla_var3.kernel.cute_python.mla.latent.ops import add_values, compute_scores, final_lse
from mla_var3.kernel.cute_python.mla.latent.producer import (
    WARPGROUP_BARRIERS,
    Barrier,
    Mbarrier,
    arrive,
    block_parts,
)
from mla_var3.kernel.cute_python.mla.latent.scheduler import Split, partial_slot, writes


@dataclass(frozen=True)
class FewExchange:
    """What the warps exchange in shared memory, numbers per row.

    Attributes:
        row_max: [64, warpgroup] running maximum, as each warpgroup wrote it last.
        scales: [64, warpgroup] factors by which its maximum rescales.
        warp_rows: [64, warp] a maximum or sum of each warp.
    """

    row_max: Any
    scales: Any
    warp_rows: Any


@cute.jit
def compute_few(
    qk_mma: cute.TiledMma,
    pv_mma: cute.TiledMma,
    shared: cutlass.Constexpr,
    barriers: cute.Pointer,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    strict: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others."""
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    lane = t % 32
    widths, half_columns = shared.widths, shared.widths.half
    even_parts, odd_parts = block_parts(widths)

    def probabilities(block):  # (columns, 64), where the rope part was
        tile = cute.local_tile(block, (KV_BLOCK, TILE), (0, widths.tiles))
        return cute.composition(tile, cute.make_layout((columns, KV_BLOCK), stride=(1, ROWS)))

    def values(block):  # (k/2, 64): this warpgroup's half of the latent columns, transposed
        half = cute.local_tile(block, (KV_BLOCK, half_columns), (0, group))
        transposed = cute.make_ordered_layout((half_columns, KV_BLOCK), order=(1, 0))
        return cute.composition(half, transposed)

    p_even, p_odd = probabilities(shared.even), probabilities(shared.odd)
    thr_qk, thr_pv = qk_mma.get_slice(t), pv_mma.get_slice(t)
    f_q = qk_mma.make_fragment_B(thr_qk.partition_B(shared.q))
    f_even = qk_mma.make_fragment_A(thr_qk.partition_A(shared.even))
    f_odd = qk_mma.make_fragment_A(thr_qk.partition_A(shared.odd))
    v_even = pv_mma.make_fragment_A(thr_pv.partition_A(values(shared.even)))
    v_odd = pv_mma.make_fragment_A(thr_pv.partition_A(values(shared.odd)))
    f_p_even = pv_mma.make_fragment_B(thr_pv.partition_B(p_even))
    f_p_odd = pv_mma.make_fragment_B(thr_pv.partition_B(p_odd))

    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((half_columns, columns)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((KV_BLOCK, columns)), Float32)
    s, o = scores_by_row(acc_s, columns), by_row(acc_o, columns, half_columns // 64)
    own = (2, columns // 8)
    sums = cute.make_rmem_tensor(own, Float32)
    limits, begins = cute.make_rmem_tensor(own, Int32), cute.make_rmem_tensor(own, Int32)
    scale = cute.make_rmem_tensor(own, Float32)

    tile = scheduler.first_tile()
    phase = Int32(0)
    q_phase = Int32(0)
    started = Boolean(False)
    while tile.valid:
        following = scheduler.next_tile(tile)
        acc_o.fill(0.0)
        sums.fill(0.0)
        for j, e in row_places(columns):
            limits[e, j] = mask.row_limit(tile, own_row(j, e, lane), scheduler)
            if const_expr(scheduler.window is not None):
                begins[e, j] = mask.row_begin(tile, own_row(j, e, lane), scheduler)
        lowest = mask.first_hidden(tile, scheduler)
        if not started:  # later tiles have their first scores from the tile before
            started = Boolean(True)
            cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, 0)
            if group == 0:
                compute_scores(qk_mma, f_even, f_q, acc_s, barriers, phase, even_parts)
            else:
                compute_scores(qk_mma, f_odd, f_q, acc_s, barriers, phase, odd_parts)
            warpgroup.wait_group(0)
        if group == 0:
            for pair in cutlass.range(tile.pairs, unroll=1):
                final = pair == tile.pairs - 1
                if final:
                    release(barriers + Mbarrier.Q_EMPTY, lane)
                token = (tile.first + 2 * pair) * KV_BLOCK
                if mask.needs_mask(token, lowest, tile, scheduler):
                    mask_few(s, token, limits, begins, t, columns, tile, scheduler)
                    if token + KV_BLOCK > tile.length and token < tile.length:
                        clear_rows(
                            shared.even, widths.k, tile.length - token, t, Barrier.WARPGROUP_0
                        )
                softmax_few(
                    s, sums, scale, exchange, p_even, t, 0, pair == 0, scale_log2e, columns, dtype
                )
                cute.arch.fence_view_async_shared()
                arrive(Barrier.P_EVEN, strict)
                # All warps of the warpgroup must have written P before it is an operand here.
                sync_warpgroup(Barrier.WARPGROUP_0)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_even, f_p_even)
                warpgroup.wait_group(0)
                # P even lies in the part that holds the other half.
                release(barriers + Mbarrier.EVEN_OWN_EMPTY, lane)
                release(barriers + Mbarrier.EVEN_OTHER_EMPTY, lane)
                cute.arch.barrier(barrier_id=Barrier.P_ODD, number_of_threads=CONSUMERS)
                receive_scales_few(scale, sums, exchange.scales, 1, lane, columns)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_odd, f_p_odd)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.ODD_OTHER_EMPTY, lane)
                phase ^= 1
                if following.valid or not final:
                    if final:
                        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, q_phase ^ 1)
                    compute_scores(qk_mma, f_even, f_q, acc_s, barriers, phase, even_parts)
                    warpgroup.wait_group(0)
        else:
            for pair in cutlass.range(tile.pairs, unroll=1):
                final = pair == tile.pairs - 1
                if final:
                    release(barriers + Mbarrier.Q_EMPTY, lane)
                token = (tile.first + 2 * pair + 1) * KV_BLOCK
                cute.arch.barrier(barrier_id=Barrier.P_EVEN, number_of_threads=CONSUMERS)
                receive_scales_few(scale, sums, exchange.scales, 0, lane, columns)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_even, f_p_even)
                if mask.needs_mask(token, lowest, tile, scheduler):
                    mask_few(s, token, limits, begins, t, columns, tile, scheduler)
                    if token + KV_BLOCK > tile.length and token < tile.length:
                        clear_rows(
                            shared.odd, widths.k, tile.length - token, t, Barrier.WARPGROUP_1
                        )
                softmax_few(
                    s, sums, scale, exchange, p_odd, t, 1, Boolean(False), scale_log2e, columns,
                    dtype,
                )  # fmt: skip
                cute.arch.fence_view_async_shared()
                arrive(Barrier.P_ODD, strict)
                warpgroup.wait_group(0)
                release(barriers + Mbarrier.EVEN_OTHER_EMPTY, lane)
                sync_warpgroup(Barrier.WARPGROUP_1)
                rescale_few(o, scale, columns)
                add_values(pv_mma, acc_o, v_odd, f_p_odd)
                warpgroup.wait_group(0)
                # P odd lies in the part that holds the other half.
                release(barriers + Mbarrier.ODD_OWN_EMPTY, lane)
                release(barriers + Mbarrier.ODD_OTHER_EMPTY, lane)
                phase ^= 1
                if following.valid or not final:
                    if final:
                        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_FULL, q_phase ^ 1)
                    compute_scores(qk_mma, f_odd, f_q, acc_s, barriers, phase, odd_parts)
                    warpgroup.wait_group(0)
        if const_expr(scheduler.clusters):
            if tile.split == Split.HALF:
                merge_halves_few(o, sums, exchange, mailbox, t, group, scheduler, columns)
        finish_few(o, sums, exchange, outputs, tile, t, group, scheduler, columns, dtype)
        q_phase ^= 1
        tile = following


@cute.jit
def mask_few(
    s: cute.Tensor,
    first_token: Int32,
    limits: cute.Tensor,
    begins: cute.Tensor,
    t: Int32,
    columns: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """Set the scores of tokens that a row does not see to -inf, whatever they are."""
    for r in cutlass.range_constexpr(2):
        token = own_token(t, first_token) + 8 * r
        for j, e in row_places(columns):
            hidden = token >= limits[e, j]
            if const_expr(scheduler.window is not None):
                hidden = hidden or token < begins[e, j]
            if const_expr(scheduler.tree is not None):
                hidden = hidden or mask.tree_hides(tile, own_row(j, e, t), token, scheduler)
            if hidden:
                s[(e, j), r] = -Float32.inf


@cute.jit
def softmax_few(
    s: cute.Tensor,
    sums: cute.Tensor,
    own_scale: cute.Tensor,
    exchange: cutlass.Constexpr,
    p: cute.Tensor,
    t: Int32,
    group: cutlass.Constexpr,
    first: Boolean,
    scale_log2e: Float32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Scores to probabilities in shared memory, with the running maximum of both warpgroups.

    A warpgroup reads the maximum that the other one wrote last and writes its own, so no warp
    overwrites what a slower one has yet to read.
    """
    row_max, scales, warp_rows = exchange.row_max, exchange.scales, exchange.warp_rows
    lane = t % 32
    for j, e in row_places(columns):
        top = cute.arch.fmax(s[(e, j), 0], s[(e, j), 1])
        top = reduce_lanes(top, cute.arch.fmax)
        if lane < 4:
            warp_rows[j * 8 + lane * 2 + e, group * WARPGROUP_WARPS + t // 32] = top
    sync_warpgroup(WARPGROUP_BARRIERS[group])
    for j, e in row_places(columns):
        row = own_row(j, e, lane)
        top = reduce_warps(warp_rows, row, group * WARPGROUP_WARPS, WARPGROUP_WARPS, cute.arch.fmax)
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
            p[row, own_token(t) + 8 * r] = value.to(dtype)
        sums[e, j] = total


@cute.jit
def receive_scales_few(
    scale: cute.Tensor,
    sums: cute.Tensor,
    scales: cute.Tensor,
    group: cutlass.Constexpr,
    lane: Int32,
    columns: cutlass.Constexpr,
):
    """Read the other warpgroup's scales and apply them to the sums."""
    for j, e in row_places(columns):
        scale[e, j] = scales[own_row(j, e, lane), group]
        sums[e, j] = sums[e, j] * scale[e, j]


@cute.jit
def rescale_few(o: cute.Tensor, scale: cute.Tensor, columns: cutlass.Constexpr):
    """Multiply the output by its rows' scales, unless those of the whole warp are 1."""
    needed = scale[0, 0] != 1.0
    for j, e in row_places(columns):
        needed = needed or scale[e, j] != 1.0
    if cute.arch.vote_ballot_sync(needed) != 0:
        for j, e in row_places(columns):
            o[(e, j), None].store(o[(e, j), None].load() * scale[e, j])


@cute.jit
def merge_halves_few(
    o: cute.Tensor,
    sums: cute.Tensor,
    exchange: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Merge the half of this CTA with that of the other one of its cluster, see `cluster.py`.

    Behind it the warpgroup that keeps its columns has the sums of both halves, and `exchange` their
    maxima.
    """
    row_max, warp_rows = exchange.row_max, exchange.warp_rows
    lane = t % 32
    rank = scheduler.cluster_rank
    publish_sums(sums, warp_rows, t, group, columns)
    meet()  # and no warp of the cluster reads its KV blocks any more
    totals = cute.make_rmem_tensor((2, columns // 8), Float32)
    for j, e in row_places(columns):
        row = own_row(j, e, lane)
        totals[e, j] = reduce_warps(warp_rows, row, 0, CONSUMER_WARPS, operator.add)
        sums[e, j] = Float32(0.0)
        if group != rank and t < 4:
            send_row(totals[e, j], row_max[row, 1], row, mailbox, 1 - rank)
    if group != rank:
        send_values(o, mailbox, 1 - rank, t)
    meet()
    if group == rank:
        own, other = (cute.make_rmem_tensor((2, columns // 8), Float32) for _ in range(2))
        tops = cute.make_rmem_tensor((2, columns // 8), Float32)
        for j, e in row_places(columns):
            row = own_row(j, e, lane)
            total, tops[e, j], own[e, j], other[e, j] = weights(
                totals[e, j], row_max[row, 1], mailbox.rows[row, 0], mailbox.rows[row, 1]
            )
            if t < 4:
                sums[e, j] = total
        sync_warpgroup(WARPGROUP_BARRIERS[0] + group)  # all have read the maxima
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                if t < 4:
                    row_max[own_row(j, e, lane), 1] = tops[e, j]
            for m_tile in cutlass.range_constexpr(cute.size(o, mode=[1]) // 2):
                received = mailbox.values[None, t, m_tile * (columns // 8) + j].load()
                for r in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        value = o[(e, j), (r, m_tile)] * own[e, j]
                        o[(e, j), (r, m_tile)] = value + received[2 * r + e] * other[e, j]


@cute.jit
def publish_sums(
    sums: cute.Tensor, warp_rows: cute.Tensor, t: Int32, group: Int32, columns: cutlass.Constexpr
):
    """Write the sums of this warp's probabilities for the other warps."""
    lane = t % 32
    for j, e in row_places(columns):
        total = reduce_lanes(sums[e, j], operator.add)
        if lane < 4:
            warp_rows[j * 8 + lane * 2 + e, group * WARPGROUP_WARPS + t // 32] = total


@cute.jit
def finish_few(
    o: cute.Tensor,
    sums: cute.Tensor,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Normalise by the row sums of all warps, and write the tile's result or partial."""
    lse, lse_partial, warp_rows = outputs.lse, outputs.lse_partial, exchange.warp_rows
    k, half = outputs.widths.k, outputs.widths.half
    lane = t % 32
    publish_sums(sums, warp_rows, t, group, columns)
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    slot = partial_slot(tile, scheduler)
    for j, e in row_places(columns):
        row = own_row(j, e, lane)
        total = reduce_warps(warp_rows, row, 0, CONSUMER_WARPS, operator.add)
        inverse, lse_log2 = normaliser(total, exchange.row_max[row, 1])
        column = own_token(t, group * half)
        writes_lse = group == 0 and t < 4
        partial, exists = writes(tile, row < tile.rows, group, scheduler)
        if exists and partial:
            if writes_lse:
                lse_partial[slot * ROWS + row] = lse_log2
            start = (Int64(slot) * ROWS + row) * k + column
            for m_tile in cutlass.range_constexpr(half // 64):
                for r in cutlass.range_constexpr(2):
                    place = outputs.o_partial + (start + m_tile * 64 + r * 8)
                    target = cute.make_tensor(place, 1)
                    target[0] = o[(e, j), (r, m_tile)] * inverse
        elif exists:
            at = Int64(tile.base + row)
            if writes_lse:
                lse[at] = final_lse(lse_log2, outputs.empty_positive)
            for m_tile in cutlass.range_constexpr(half // 64):
                for r in cutlass.range_constexpr(2):
                    start = at * k + column + m_tile * 64 + r * 8
                    target = cute.make_tensor(outputs.o_latent + start, 1)
                    target[0] = (o[(e, j), (r, m_tile)] * inverse).to(dtype)
    # The next tile's first maximum must not be written before all warps have read this one.
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
