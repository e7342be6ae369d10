"""The computing warpgroups of the decompressed kernel: 64 query rows and a head's output each.

Keys and values have 16 bits, or 8 and many rows (see `window_fp8_rows.py`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import WEIGHT_BITS, clear_columns
from mla_var3.kernel.cute_python.mla.decompressed.fp8_rows import (
    MMA_DEPTH_8,
    clear_scales,
    divide_rows,
    load_queries_by_row,
    round_weights_by_row,
    scale_scores,
    softmax_by_row,
)
from mla_var3.kernel.cute_python.mla.decompressed.jobs import (
    BLOCK,
    FIRST_BARRIER,
    HEAD,
    inside,
    job_at,
    place_of,
    places_end,
    row_limit,
    rows_of_group,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import free, keep_order, settle
from mla_var3.kernel.cute_python.mla.latent.ops import (
    LN_2,
    MMA_DEPTH,
    ROPE,
    SCORE_FLOOR,
    clear_rows,
    follow_scores,
    hide,
    rescale,
    row_total,
    store_row,
    two_rows,
    weigh,
)
from mla_var3.kernel.cute_python.mla.latent.schedule import ROWS


@cute.jit
def compute(
    products: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    queries: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    block: Int32,
    blocks: Int32,
    window: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    fp8: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Attend with one head or one tile of rows per warpgroup.

    Args:
        products: q k, q_rope k_rope and p v.
        shared: keys, values, rope keys and, in 8 bits, scales of all stages.
        ring: the ring's barriers and stages.
        queries: pointers to q_nope and q_rope.
        outputs: pointers to o and lse.
        scale_log2e: softmax scale times log2 e.
        block, blocks: which of the persistent blocks this is.
        window: sizes.
        dtype: of queries and output.
        fp8: whether keys and values have 8 bits.
        wide: whether to write parts in float32.
    """
    qk_mma, rope_mma, pv_mma = products
    s_k, s_v, s_r, s_scales = shared
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // 128)
    t = thread % 128
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4
    unit = 0 if window.tiles else group
    thr_qk, thr_r, thr_pv = qk_mma.get_slice(t), rope_mma.get_slice(t), pv_mma.get_slice(t)
    f_k = qk_mma.make_fragment_B(thr_qk.partition_B(s_k))
    f_r = rope_mma.make_fragment_B(thr_r.partition_B(s_r))
    f_v = pv_mma.make_fragment_B(thr_pv.partition_B(s_v))
    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((ROWS, HEAD)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, BLOCK)), Float32)
    o, s = two_rows(acc_o, HEAD), two_rows(acc_s, BLOCK)
    q_rope = operand(ROPE // MMA_DEPTH, dtype)
    acc_r = acc_s
    values_by_row = cute.make_tensor(s_v.iterator, cute.select(s_v.layout, mode=[1, 0, 2]))
    if const_expr(fp8):
        acc_r = cute.make_rmem_tensor(acc_s.layout, Float32)
        q = operand(HEAD // MMA_DEPTH_8, Float8E4M3FN, 4)
        p = operand(BLOCK // MMA_DEPTH_8, Float8E4M3FN, 4)
    else:
        q = operand(HEAD // MMA_DEPTH, dtype)
        p = operand(BLOCK // MMA_DEPTH, dtype)
    sums, top = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    scale, q_scale = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    q_scale.fill(1.0)
    exponents = cute.make_rmem_tensor((2, BLOCK // 8), Float32)
    limits = cute.make_rmem_tensor(2, Int32)
    stage = Int32(0)
    phase = Int32(0)
    operands = ((qk_mma, acc_s, q, f_k), (rope_mma, acc_r, q_rope, f_r))
    # Queries and first scores of a job come while the results of the one before are written.
    index = block
    job = job_at(cutlass.min(index, window.jobs - 1), window)
    own = rows_at(job, group, row0, window)
    fetch_queries(q, q_rope, q_scale, queries, own, row0, lane, window, dtype, fp8)
    if index < window.jobs:
        start_scores(
            operands, s_scales, ring, stage, phase, unit, job.tokens - job.first * BLOCK, t,
            group, fp8,
        )  # fmt: skip
        warpgroup.wait_group(0)
    while index < window.jobs:
        acc_o.fill(0.0)
        sums.fill(0.0)
        top.fill(SCORE_FLOOR)
        for r in cutlass.range_constexpr(2):
            limits[r] = row_limit(job, own.first + row0 + 8 * r, window)
        lowest = cute.arch.warp_redux_sync(cutlass.min(limits[0], limits[1]), "min")

        # The scores of a block are computed while the values of the block before are added up.
        # The products' operands are used up in between, so one set of registers serves all blocks.
        token = job.first * BLOCK
        slot = stage * ring.units + unit
        softmax(
            s, acc_r, exponents, sums, top, scale, q_scale, s_scales, slot, token, lowest,
            limits, lane, scale_log2e, fp8, job, window,
        )  # fmt: skip
        free(ring.keys_free(stage), lane)
        round_weights(p, acc_s, dtype, fp8)
        for at in cutlass.range(job.first + 1, job.last, unroll=1):
            token = at * BLOCK
            v_slot, v_stage, v_phase = slot, stage, phase
            stage, phase = ring.after(stage, phase)
            slot = stage * ring.units + unit
            if const_expr(window.ring):
                # Here, where no product is on its way.
                if job.gone > 0:
                    cute.arch.mbarrier_wait(ring.values(v_stage), v_phase)
                    held = values_by_row[(None, None, v_slot)]
                    clear_places(held, token - BLOCK, t, FIRST_BARRIER + group, job, window)
            start_scores(
                operands, s_scales, ring, stage, phase, slot, job.tokens - token, t, group, fp8
            )
            cute.arch.mbarrier_wait(ring.values(v_stage), v_phase)
            multiply_values(pv_mma, acc_o, p, f_v, v_slot)
            warpgroup.wait_group(1)
            if const_expr(not fp8):
                free(ring.keys_free(stage), lane)
            softmax(
                s, acc_r, exponents, sums, top, scale, q_scale, s_scales, slot, token,
                lowest, limits, lane, scale_log2e, fp8, job, window,
            )  # fmt: skip
            if const_expr(fp8):  # the scales have come with the keys
                free(ring.keys_free(stage), lane)
            else:  # in 8 bits the order makes no difference
                keep_order(sums[0] + sums[1])
            warpgroup.wait_group(0)
            free(ring.values_free(v_stage), lane)
            rescale(o, scale)
            round_weights(p, acc_s, dtype, fp8)
        index += blocks
        next_job = job_at(cutlass.min(index, window.jobs - 1), window)
        next_own = rows_at(next_job, group, row0, window)
        fetch_queries(q, q_rope, q_scale, queries, next_own, row0, lane, window, dtype, fp8)
        cute.arch.mbarrier_wait(ring.values(stage), phase)
        if const_expr(window.ring):
            if job.gone > 0:
                held = values_by_row[(None, None, slot)]
                clear_places(held, token, t, FIRST_BARRIER + group, job, window)
        if token + BLOCK > job.tokens:
            if const_expr(fp8):
                clear_columns(s_v, slot, job.tokens - token, t, group)
            else:
                first = cutlass.max(job.tokens - token, 0)
                clear_rows(values_by_row[(None, None, slot)], HEAD, first, t, FIRST_BARRIER + group)
        v_stage = stage
        stage, phase = ring.after(stage, phase)
        multiply_values(pv_mma, acc_o, p, f_v, slot)
        warpgroup.wait_group(0)
        free(ring.values_free(v_stage), lane)
        # Behind the last job too, with zeros: a product that may not be there would be waited for.
        slot = stage * ring.units + unit
        valid = next_job.tokens - next_job.first * BLOCK
        start_scores(operands, s_scales, ring, stage, phase, slot, valid, t, group, fp8)
        start = own.start
        if const_expr(wide):
            start += Int64(job.part) * window.requests * window.queries * window.heads
        bits = WEIGHT_BITS if const_expr(fp8) else 0.0
        finish(
            o, sums, top, bits, outputs, start, row0, (own.upper, own.lower), window.heads, lane,
            dtype, wide, job.broken if const_expr(window.ring) else None,
        )  # fmt: skip
        warpgroup.wait_group(0)
        job = next_job
        own = next_own


@cute.jit
def start_scores(
    operands: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    stage: Int32,
    phase: Int32,
    slot: Int32,
    valid: Int32,
    t: Int32,
    group: Int32,
    fp8: cutlass.Constexpr,
):
    """Scores of a block, once its keys are there; returns before they are done.

    Args:
        operands: of both products: the product, its result, queries and keys.
        scales: those of keys and values in 8 bits.
        ring: the ring's barriers and stages.
        stage, phase, slot: where the block is in it.
        valid: tokens of the block that exist, or more.
        t, group: this thread and its warpgroup.
        fp8: whether keys and values have 8 bits.
    """
    (qk_mma, acc_s, q, f_k), (rope_mma, acc_r, q_rope, f_r) = operands
    cute.arch.mbarrier_wait(ring.keys(stage), phase)
    if const_expr(fp8):
        if valid < BLOCK:
            clear_scales(scales, slot, valid, t, group)
    multiply_queries(qk_mma, acc_s, q, f_k, slot)
    multiply_rope(rope_mma, acc_r, q_rope, f_r, stage, fp8)
    warpgroup.commit_group()


@dataclass
class OwnRows:
    """The rows of a warpgroup in a job, as a thread sees them.

    Attributes:
        first: first row among those of the head.
        start: the same among all rows of queries and outputs.
        upper, lower: whether the thread's two rows exist.
    """

    first: Any
    start: Any
    upper: Any
    lower: Any


@cute.jit
def rows_at(
    job: cutlass.Constexpr, group: Int32, row0: Int32, window: cutlass.Constexpr
) -> OwnRows:
    """The rows of a warpgroup in a job."""
    head, first, start = rows_of_group(job, group, window)
    return OwnRows(
        first,
        start,
        inside(head, first + row0, window),
        inside(head, first + row0 + 8, window),
    )


@cute.jit
def fetch_queries(
    q: cute.Tensor,
    q_rope: cute.Tensor,
    q_scale: cute.Tensor,
    queries: cutlass.Constexpr,
    own: cutlass.Constexpr,
    row0: Int32,
    lane: Int32,
    window: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    fp8: cutlass.Constexpr,
):
    """Queries of a thread's two rows into the registers of the first products."""
    rows = (own.upper, own.lower)
    sources = (queries[0] + own.start * HEAD, queries[1] + own.start * ROPE)
    load_queries(q_rope, sources[1], ROPE, row0, rows, window.heads, lane)
    if const_expr(fp8):
        load_queries_by_row(q, q_rope, q_scale, sources[0], row0, rows, window.heads, lane, dtype)
        divide_rows(q_rope, q_scale, dtype)
    else:
        load_queries(q, sources[0], HEAD, row0, rows, window.heads, lane)


def operand(steps: int, dtype, in_row: int = 2) -> cute.Tensor:
    """Registers of an operand A: in_row neighbours in k, two rows, two halves of k, steps."""
    shape = ((in_row, 2, 2), 1, steps)
    strides = ((1, in_row, 2 * in_row), 0, 4 * in_row)
    return cute.make_rmem_tensor(cute.make_layout(shape, stride=strides), dtype)


@cute.jit
def load_queries(
    target: cute.Tensor,
    source: cute.Pointer,
    columns: cutlass.Constexpr,
    row0: Int32,
    rows: cutlass.Constexpr,
    heads: Int32,
    lane: Int32,
):
    """Two rows into the registers of an operand A; zeros for rows that are not there."""
    words = cute.recast_tensor(target, Int32)
    for k in cutlass.range_constexpr(columns // MMA_DEPTH):
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                value = Int32(0)
                if rows[r]:
                    at = Int64(row0 + 8 * r) * heads * columns
                    at += k * MMA_DEPTH + half * 8 + (lane % 4) * 2
                    place = cute.recast_ptr((source + at).align(4), dtype=Int32)
                    value = cute.make_tensor(place, 1)[0]
                words[(0, r, half), 0, k] = value


@cute.jit
def multiply_queries(
    mma: cute.TiledMma, acc: cute.Tensor, q: cute.Tensor, keys: cute.Tensor, slot: Int32
):
    """Acc = q k^T; returns before it is done."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(q, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(atom, acc, q[(None, None, k)], keys[(None, None, k, slot)], acc)


@cute.jit
def multiply_rope(
    mma: cute.TiledMma,
    acc: cute.Tensor,
    q: cute.Tensor,
    keys: cute.Tensor,
    stage: Int32,
    alone: cutlass.Constexpr,
):
    """Acc += q_rope k_rope^T, or = when it is alone; returns before it is done."""
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(ROPE // MMA_DEPTH):
        atom.set(warpgroup.Field.ACCUMULATE, k > 0 or not alone)
        cute.gemm(atom, acc, q[(None, None, k)], keys[(None, None, k, stage)], acc)


@cute.jit
def multiply_values(
    mma: cute.TiledMma, acc: cute.Tensor, p: cute.Tensor, values: cute.Tensor, slot: Int32
):
    """Acc += p v; returns before it is done."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(p, mode=[2])):
        cute.gemm(atom, acc, p[(None, None, k)], values[(None, None, k, slot)], acc)
    warpgroup.commit_group()


@cute.jit
def softmax(
    s: cute.Tensor,
    acc_r: cute.Tensor,
    exponents: cute.Tensor,
    sums: cute.Tensor,
    top: cute.Tensor,
    scale: cute.Tensor,
    q_scale: cute.Tensor,
    scales: cutlass.Constexpr,
    slot: Int32,
    token: Int32,
    lowest: Int32,
    limits: cute.Tensor,
    lane: Int32,
    scale_log2e: Float32,
    fp8: cutlass.Constexpr,
    job: cutlass.Constexpr,
    window: cutlass.Constexpr,
):
    """Scores to weights, relative to a running maximum.

    Args:
        s: scores of this thread's two rows, replaced.
        acc_r: the rope part of the scores, where it is apart.
        exponents: room for those of the value scales in 8 bits.
        sums: sums of this thread's weights, updated.
        top: running maximum per row, updated.
        scale: factor per row by which earlier results shrink, written.
        q_scale: scales of the query rows; 1 in 16 bits.
        scales: those of keys and values in 8 bits.
        slot: the head's place in the ring.
        token: first token of the block.
        lowest: the first token that some row of the warp does not see.
        limits: the first token that a row does not see.
        lane: this thread's place in its warp.
        scale_log2e: softmax scale times log2 e.
        fp8: whether keys and values have 8 bits.
        job, window: what the block belongs to, for the order of a ring.
    """
    if const_expr(fp8):
        scale_scores(s, two_rows(acc_r, BLOCK), exponents, scales, slot, lane)
    if const_expr(window.ring):
        if job.gone > 0 or places_end(token, job, window) > lowest:
            hide_places(s, token, limits, lane, job, window)
    elif token + BLOCK > lowest:
        hide(s, token, limits, lane)
    if const_expr(fp8):
        softmax_by_row(s, exponents, sums, top, scale, q_scale, scale_log2e)
    else:
        follow_scores(s, top, scale, sums, scale_log2e)
        weigh(s, top, sums, scale_log2e)


@cute.jit
def hide_places(
    s: cute.Tensor,
    token: Int32,
    limits: cute.Tensor,
    lane: Int32,
    job: cutlass.Constexpr,
    window: cutlass.Constexpr,
):
    """Scores of slots that a row does not see, in a ring, become -inf, whatever they are."""
    for j in cutlass.range_constexpr(BLOCK // 8):
        for e in cutlass.range_constexpr(2):
            place = place_of(token + j * 8 + (lane % 4) * 2 + e, job, window)
            for r in cutlass.range_constexpr(2):
                if place >= limits[r] or place < job.gone:
                    s[r, (e, j)] = -Float32.inf


@cute.jit
def clear_places(
    tile: cute.Tensor,
    token: Int32,
    thread: Int32,
    barrier: Int32,
    job: cutlass.Constexpr,
    window: cutlass.Constexpr,
):
    """Zero the rows of a block of a ring before its oldest token: 0 * NaN would poison the output.

    All 128 threads of a warpgroup call it; `barrier` is a named barrier of theirs.
    """
    zero = cute.make_rmem_tensor(8, tile.element_type)
    zero.fill(0.0)
    chunks = HEAD // 8
    for i in cutlass.range(thread, BLOCK * chunks, 128, unroll=1):
        row = i // chunks
        if place_of(token + row, job, window) < job.gone:
            target = cute.local_tile(tile, (1, 8), (row, i % chunks))
            cute.autovec_copy(zero, cute.group_modes(target, 0, 2))
    settle(barrier)


@cute.jit
def round_weights(
    p: cute.Tensor, acc_s: cute.Tensor, dtype: cutlass.Constexpr, fp8: cutlass.Constexpr
):
    """Weights to the registers of an operand A."""
    if const_expr(fp8):
        round_weights_by_row(p, two_rows(acc_s, BLOCK))
    else:
        # The result of one product has the layout of the next one's operand.
        cute.make_tensor(p.iterator, acc_s.layout).store(acc_s.load().to(dtype))


@cute.jit
def finish(
    o: cute.Tensor,
    sums: cute.Tensor,
    top: cute.Tensor,
    bits: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    start: Int64,
    row0: Int32,
    rows: cutlass.Constexpr,
    heads: Int32,
    lane: Int32,
    dtype: cutlass.Constexpr,
    wide: cutlass.Constexpr,
    broken: Boolean | None,
):
    """Divide by the row sums and write the rows that are there; NaN where tokens are missing.

    Weights and their sums are 2**bits too large.
    """
    out, lse = outputs
    element = Float32 if wide else dtype
    for r in cutlass.range_constexpr(2):
        total = row_total(sums[r])
        inverse = Float32(0.0)
        log_sum = -Float32.inf
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
            log_sum = top[r] - bits + cute.math.log2(total, fastmath=True)
        if const_expr(broken is not None):
            if broken:
                inverse = Float32(float("nan"))
                # Infinite parts merge to NaN; of parts that are NaN the merge would see nothing.
                log_sum = Float32.inf if const_expr(wide) else Float32(float("nan"))
        o[r, None].store(o[r, None].load() * inverse)
        if rows[r]:
            at = start + Int64(row0 + 8 * r) * heads
            store_row(o[r, None], HEAD, out, at * HEAD, lane, element)
            if lane % 4 == 0:
                lse[at] = log_sum * LN_2
