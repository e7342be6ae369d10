"""The computing warpgroups of the decompressed kernel with 8 bits and up to 48 query rows.

Tokens are on the M side of the products and query rows on the N side, which is as wide as there are
rows:

    S^T [64 tokens, rows] = K8 [64, 128] Q8^T + K_rope [64, 64] Q_rope^T
    O^T [128, rows] += V8^T [128, 64] P8^T

So nothing is computed for rows that do not exist, and a thread has two tokens, whose scales are
four numbers. A score is sq (sk (q8 k8) + (q_rope / sq) k_rope), with the scales sq of the query row
and sk of the key; sq goes into the exponent with the softmax scale. The rope part stays in 16 bits.

The scales of the values are powers of two and go into the exponents as well: the running maximum is
that of what a token adds to the output, weight times scale, so that the weights that are rounded to
e4m3 and multiplied with v8 always fit. The sums of a row divide the scales out again, exactly.

The maximum of a row over the 64 tokens of a block is spread over all four warps. Nobody looks for
it as long as no weight is too large for e4m3: the weights of a block are computed with the maximum
of the blocks before, and the barrier behind them, which is needed anyway, tells every warp whether
one was. Then, and in the first block, the maximum is looked for and the weights are computed again.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.decompressed.jobs import (
    BLOCK,
    FIRST_BARRIER,
    HEAD,
    inside,
    job_at,
    row_limit,
    rows_of_group,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import GROUP_WARPS, free, settle
from mla_var3.kernel.cute_python.mla.latent.ops import LN_2, ROPE
from mla_var3.op.mla.window.packed import TOKEN_ORDER
from mla_var3.op.mla.window.quantise import E4M3_MAX

WEIGHT_BITS = 6.0
"""A weight at the running maximum is 2**6: what is small stays above e4m3's least number, 2**-9."""
LARGEST_BITS = 8.75
"""A larger weight than 2**8.75 makes the running maximum follow; e4m3 ends at 448."""
ROW_THREADS = 4
"""Threads that load a query row."""
EXCHANGE_BYTES = 2 * HEAD + 2 * BLOCK + 4 + 4 * GROUP_WARPS
"""Shared memory of a query row: its two parts, weights of two blocks, scale, a number per warp."""
COLUMN_CHOICES = (16, 32, 48)
"""Query rows on the N side that the kernel is compiled for. With 64 the M side is as fast and takes
less energy: shared memory is read half as often."""
BYTE_CHOICES = ((0x7632, 0x5140, 0x7160), (0x5410, 0x3524, 0x3726))
"""For threads of even and of odd tokens: which bytes of two words of weights go to the neighbour,
and how those that stay and those that come are put together to two words."""


def columns_for(rows: int) -> int:
    """Query rows on the N side for a head that has so many; 0 where the M side is better."""
    return next((columns for columns in COLUMN_CHOICES if rows <= columns), 0)


@cute.jit
def compute_8(
    products: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    ring: cutlass.Constexpr,
    queries: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    scale_log2e: Float32,
    block: Int32,
    blocks: Int32,
    window: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Attend with one head or one tile of rows per warpgroup.

    Args:
        products: k q, k_rope q_rope and v p.
        shared: keys, values, rope keys and scales of all stages.
        exchange: of all warpgroups, queries, their rope part, their scales, a number per row and
            warp, and weights of two blocks: one is written while the other may still be read.
        ring: the ring's barriers and stages.
        queries: pointers to q_nope and q_rope.
        outputs: pointers to o and lse.
        scale_log2e: softmax scale times log2 e.
        block, blocks: which of the persistent blocks this is.
        window: sizes.
        dtype: of queries and output.
        columns: query rows on the N side.
        wide: whether to write parts in float32.
    """
    qk_mma, rope_mma, pv_mma = products
    s_k, s_v, s_r, s_scales = shared
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // 128)
    t = thread % 128
    lane = t % 32
    unit = 0 if window.tiles else group
    s_q, s_qr, q_scales, warp_rows = (part[(None, None, group)] for part in exchange[:4])
    s_p = exchange[4][(None, None, None, group)]
    thr_qk, thr_r, thr_pv = qk_mma.get_slice(t), rope_mma.get_slice(t), pv_mma.get_slice(t)
    f_k = qk_mma.make_fragment_A(thr_qk.partition_A(s_k))
    f_q = qk_mma.make_fragment_B(thr_qk.partition_B(s_q))
    f_r = rope_mma.make_fragment_A(thr_r.partition_A(s_r))
    f_qr = rope_mma.make_fragment_B(thr_r.partition_B(s_qr))
    f_v = pv_mma.make_fragment_A(thr_pv.partition_A(s_v))
    f_p = pv_mma.make_fragment_B(thr_pv.partition_B(s_p))
    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((HEAD, columns)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((BLOCK, columns)), Float32)
    acc_r = cute.make_rmem_tensor(acc_s.layout, Float32)
    # This thread's columns are 8 j + 2 (lane % 4) + e; [(e, j), token of this thread] and
    # [(e, j), (row of 8, tile of 64 output columns)].
    own = (2, columns // 8)
    tokens = cute.make_layout((own, 2), stride=((1, 4), 2))
    s, rope = cute.make_tensor(acc_s.iterator, tokens), cute.make_tensor(acc_r.iterator, tokens)
    o = cute.make_tensor(
        acc_o.iterator,
        cute.make_layout((own, (2, HEAD // 64)), stride=((1, 4), (2, columns // 2))),
    )
    sums = cute.make_rmem_tensor(own, Float32)
    factors = cute.make_rmem_tensor(own, Float32)
    bases = cute.make_rmem_tensor(own, Float32)
    state = (s, rope, o, sums, factors, bases)
    words = cute.make_tensor(
        cute.recast_ptr(s_p.iterator, dtype=Int32), cute.make_layout((columns * BLOCK // 4, 2))
    )
    stage = Int32(0)
    phase = Int32(0)
    turn = Int32(0)
    for index in cutlass.range(block, window.jobs, blocks, unroll=1):
        job = job_at(index, window)
        head, first_row, start = rows_of_group(job, group, window)
        load_queries_8(
            s_q, s_qr, q_scales, queries, start, head, first_row, window, t, group, columns, dtype
        )
        acc_o.fill(0.0)
        sums.fill(0.0)
        bases.fill(WEIGHT_BITS)
        lowest = job.stop
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                row = j * 8 + (lane % 4) * 2 + e
                factors[e, j] = scale_log2e * q_scales[row, 0]
                lowest = cutlass.min(lowest, row_limit(job, first_row + row, window))
        lowest = cute.arch.warp_redux_sync(lowest, "min")

        # The scores of a block are computed while the values of the block before are added up.
        token = job.first * BLOCK
        slot = stage * ring.units + unit
        cute.arch.mbarrier_wait(ring.keys(stage), phase)
        multiply_keys((qk_mma, rope_mma), (acc_s, acc_r), (f_k, f_r), (f_q, f_qr), slot, stage)
        warpgroup.wait_group(0)
        weigh(
            state, words[(None, turn)], warp_rows, s_scales, ring.keys_free(stage), slot, token,
            lowest, job, first_row, window, t, group, columns, Boolean(True),
        )  # fmt: skip
        for at in cutlass.range(job.first + 1, job.last, unroll=1):
            token = at * BLOCK
            v_slot, v_stage, v_phase = slot, stage, phase
            stage, phase = ring.after(stage, phase)
            slot = stage * ring.units + unit
            cute.arch.mbarrier_wait(ring.keys(stage), phase)
            multiply_keys((qk_mma, rope_mma), (acc_s, acc_r), (f_k, f_r), (f_q, f_qr), slot, stage)
            cute.arch.mbarrier_wait(ring.values(v_stage), v_phase)
            add_weighted(pv_mma, acc_o, f_v, f_p[(None, None, None, turn)], v_slot)
            turn ^= 1
            warpgroup.wait_group(1)
            weigh(
                state, words[(None, turn)], warp_rows, s_scales, ring.keys_free(stage), slot,
                token, lowest, job, first_row, window, t, group, columns, Boolean(False),
                ring.values_free(v_stage),
            )  # fmt: skip
        cute.arch.mbarrier_wait(ring.values(stage), phase)
        if token + BLOCK > job.tokens:
            clear_columns(s_v, slot, job.tokens - token, t, group)
        add_weighted(pv_mma, acc_o, f_v, f_p[(None, None, None, turn)], slot)
        turn ^= 1
        warpgroup.wait_group(0)
        free(ring.values_free(stage), lane)
        stage, phase = ring.after(stage, phase)
        if const_expr(wide):
            start += Int64(job.part) * window.requests * window.queries * window.heads
        finish_8(
            o, sums, bases, warp_rows, outputs, start, head, first_row, window, t, group, columns,
            dtype, wide,
        )  # fmt: skip


@cute.jit
def load_queries_8(
    target: cute.Tensor,
    rope_target: cute.Tensor,
    scales: cute.Tensor,
    queries: cutlass.Constexpr,
    start: Int64,
    head: Int32,
    first_row: Int32,
    window: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Query rows into shared memory as e4m3 numbers, each with a scale; zeros for absent rows.

    Args:
        target, rope_target: [columns, 128] in e4m3, [columns, 64] in 16 bits.
        scales: one per row, written.
        queries: pointers to both parts.
        start: the first row in memory; the next ones are `heads` behind.
        head, first_row: what it is, to tell which rows exist.
        window: sizes.
        t, group: this thread and its warpgroup.
        columns: rows.
        dtype: of the queries.
    """
    quarter = t % ROW_THREADS
    nope = cute.make_rmem_tensor(HEAD // ROW_THREADS, dtype)
    rope = cute.make_rmem_tensor(ROPE // ROW_THREADS, dtype)
    for first in cutlass.range_constexpr(0, columns, 128 // ROW_THREADS):
        row = first + t // ROW_THREADS
        nope.fill(0.0)
        rope.fill(0.0)
        if row < columns and inside(head, first_row + row, window):
            at = start + Int64(row) * window.heads
            copy_row(queries[0], at * HEAD + quarter * (HEAD // ROW_THREADS), nope)
            copy_row(queries[1], at * ROPE + quarter * (ROPE // ROW_THREADS), rope)
        parts = (nope.load().to(Float32), rope.load().to(Float32))
        scale = row_scale(parts)
        rounded = cute.make_rmem_tensor(HEAD // ROW_THREADS, Float8E4M3FN)
        rounded.store((parts[0] * (1.0 / scale)).to(Float8E4M3FN))
        rope.store((parts[1] * (1.0 / scale)).to(dtype))
        if row < columns:
            if quarter == 0:
                scales[row, 0] = scale
            for i in cutlass.range_constexpr(2):  # 16 bytes at a time
                place = cute.local_tile(target, (1, 16), (row, quarter * 2 + i))
                cute.autovec_copy(
                    cute.local_tile(rounded, (16,), (i,)), cute.group_modes(place, 0, 2)
                )
                place = cute.local_tile(rope_target, (1, 8), (row, quarter * 2 + i))
                cute.autovec_copy(cute.local_tile(rope, (8,), (i,)), cute.group_modes(place, 0, 2))
    settle(FIRST_BARRIER + group)


@cute.jit
def row_scale(parts: cutlass.Constexpr) -> Float32:
    """The scale of a query row, of whose two parts four neighbouring threads have a quarter each.

    It is that of the larger part, so that the rope part divided by it fits 16 bits too.
    """
    peak = Float32(0.0)
    for i in cutlass.range_constexpr(2):
        peak = cute.arch.fmax(peak, parts[i].reduce(cute.ReductionOp.MAX, Float32(0.0), 0))
        peak = cute.arch.fmax(peak, -parts[i].reduce(cute.ReductionOp.MIN, Float32(0.0), 0))
    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=1))
    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=2))
    scale = Float32(1.0)
    if peak > 0.0:
        scale = peak * (1.0 / E4M3_MAX)
    return scale


@cute.jit
def copy_row(source: cute.Pointer, at: Int64, target: cute.Tensor):
    """Part of a row from memory to registers, 16 bytes at a time."""
    place = cute.make_tensor((source + at).align(16), target.layout)
    cute.autovec_copy(place, target)


@cute.jit
def multiply_keys(
    products: cutlass.Constexpr,
    accumulators: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    queries: cutlass.Constexpr,
    slot: Int32,
    stage: Int32,
):
    """K q^T and k_rope q_rope^T into accumulators of their own; returns before they are done."""
    warpgroup.fence()
    for i in cutlass.range_constexpr(2):
        atom = cute.make_mma_atom(products[i].op)
        place = slot if i == 0 else stage
        for k in cutlass.range_constexpr(cute.size(queries[i], mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(
                atom, accumulators[i], keys[i][(None, None, k, place)],
                queries[i][(None, None, k)], accumulators[i],
            )  # fmt: skip
    warpgroup.commit_group()


@cute.jit
def add_weighted(
    mma: cute.TiledMma, acc: cute.Tensor, values: cute.Tensor, weights: cute.Tensor, slot: Int32
):
    """Acc += v^T p^T; returns before it is done."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
        cute.gemm(atom, acc, values[(None, None, k, slot)], weights[(None, None, k)], acc)
    warpgroup.commit_group()


@cute.jit
def weigh(
    state: cutlass.Constexpr,
    words: cute.Tensor,
    warp_rows: cute.Tensor,
    scales: cute.Tensor,
    keys_free: cute.Pointer,
    slot: Int32,
    token: Int32,
    lowest: Int32,
    job: cutlass.Constexpr,
    first_row: Int32,
    window: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    first: Boolean,
    values_free: cutlass.Constexpr = None,
):
    """Products of a block to weights in shared memory.

    Args:
        state: per row products, their rope part, output, sums of this thread's weights, factor of
            the scores, and WEIGHT_BITS less the running maximum; replaced or updated.
        words: where the weights go, four to a word.
        warp_rows: room for a number per row and warp.
        scales: of keys and values.
        keys_free: barrier that frees keys and scales.
        slot: the head's place in the ring.
        token: first token of the block.
        lowest: the first token that some row does not see.
        job: the job.
        first_row: its first row.
        window: sizes.
        t, group: this thread and its warpgroup.
        columns: rows.
        first: whether there is no earlier block.
        values_free: barrier that frees the values of the block before, whose product is still at
            work.
    """
    s, rope, o, sums, factors, bases = state
    lane = t % 32
    own_token = t // 4 % 8 + t // 32 * 16
    added = cute.make_rmem_tensor(sums.layout, Float32)
    inverses = cute.make_rmem_tensor(2, Float32)
    highest = -Float32.inf
    for r in cutlass.range_constexpr(2):
        at = own_token + 8 * r
        # What a slot without a token holds, in scales too, is hidden below.
        pair = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.local_tile(scales[(None, slot)], (2,), (at,)), pair)
        exponent = pair[1]
        if token + at >= job.tokens:
            exponent = Float32(0.0)
        inverses[r] = inverse_power(exponent)
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                score = s[(e, j), r] * pair[0] + rope[(e, j), r]
                s[(e, j), r] = score * factors[e, j] + (bases[e, j] + exponent)
    free(keys_free, lane)
    if token + BLOCK > lowest:
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                limit = row_limit(job, first_row + j * 8 + (lane % 4) * 2 + e, window)
                for r in cutlass.range_constexpr(2):
                    if token + own_token + 8 * r >= limit:
                        s[(e, j), r] = -Float32.inf
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                highest = cute.arch.fmax(highest, s[(e, j), r])
    rounded = round_weights_8(s, added, inverses, columns)
    warpgroup.wait_group(0)
    if const_expr(values_free is not None):
        free(values_free, lane)
    store_weights(words, rounded, t, columns)
    cute.arch.fence_view_async_shared()
    if any_of_group(first or highest > LARGEST_BITS, FIRST_BARRIER + group):
        raise_bases(s, o, sums, bases, warp_rows, t, group, columns, first)
        again = round_weights_8(s, added, inverses, columns)
        store_weights(words, again, t, columns)
        settle(FIRST_BARRIER + group)
    sums.store(sums.load() + added.load())


@cute.jit
def inverse_power(exponent: Float32) -> Float32:
    """2**-exponent for a whole number in a float, without the unit for exponentials.

    Beyond 1.5 * 2**23 the last bit of a float is worth 1, so the low bits of the sum are the
    exponent field of the result.
    """
    field = Float32(1.5 * 2**23 + 127) - exponent
    return (field.bitcast(Int32) << 23).bitcast(Float32)


@cute.jit
def any_of_group(holds: Boolean, barrier: Int32) -> Boolean:
    """Whether it holds for a thread of the warpgroup; all its threads meet here."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; bar.red.or.pred q, {$r1}, 128, p;"
        " selp.s32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[Int32(holds), barrier],
    )
    return found != 0


@cute.jit
def round_weights_8(
    s: cute.Tensor, added: cute.Tensor, inverses: cute.Tensor, columns: cutlass.Constexpr
) -> cute.Tensor:
    """Weights as e4m3 numbers, a word per two rows and two tokens.

    Args:
        s: exponents of the weights.
        added: sums of this thread's weights per row, scales divided out, written.
        inverses: of the scales of this thread's tokens.
        columns: rows.
    """
    rounded = cute.make_rmem_tensor(columns // 8, Int32)
    for j in cutlass.range_constexpr(columns // 8):
        four = cute.make_rmem_tensor(4, Float32)
        for e in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                four[2 * e + r] = cute.math.exp2(s[(e, j), r], fastmath=True)
            added[e, j] = four[2 * e] * inverses[0] + four[2 * e + 1] * inverses[1]
        narrow = cute.make_rmem_tensor(4, Float8E4M3FN)
        narrow.store(four.load().to(Float8E4M3FN))
        rounded[j] = cute.recast_tensor(narrow, Int32)[0]
    return rounded


@cute.jit
def store_weights(words: cute.Tensor, rounded: cute.Tensor, t: Int32, columns: cutlass.Constexpr):
    """Weights into shared memory, tokens in `TOKEN_ORDER`.

    In that order the tokens of this thread and of the one four lanes away, which has the same
    rows, are four neighbours. They trade a row of two for the other: the thread of the even token
    has the even row then, the other one the odd row, of which each stores a word. The words of a
    warp lie in a row.
    """
    send, first, second = (Int32(choice) for choice in BYTE_CHOICES[0])
    if t // 4 % 2 == 1:
        send, first, second = (Int32(choice) for choice in BYTE_CHOICES[1])
    place = word_place(t, columns)
    for j in cutlass.range_constexpr(0, columns // 8, 2):
        going = Int32(cute.arch.prmt(rounded[j], rounded[j + 1], send))
        coming = cute.arch.shuffle_sync_bfly(going, offset=4)
        words[place + j * 32] = Int32(cute.arch.prmt(rounded[j], coming, first))
        words[place + (j + 1) * 32] = Int32(cute.arch.prmt(rounded[j + 1], coming, second))


def word_place(t, columns):
    """The word of the first 8 rows that a thread stores; those of the next 8 are 32 behind."""
    lane = t % 32
    return t // 32 * (columns * 4) + ((lane % 4) * 2 + lane // 4 % 2) * 4 + lane // 8


@cute.jit
def raise_bases(
    s: cute.Tensor,
    o: cute.Tensor,
    sums: cute.Tensor,
    bases: cute.Tensor,
    warp_rows: cute.Tensor,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    first: Boolean,
):
    """Let the running maximum of the rows follow where it has to, with all that depends on it."""
    tops = cute.make_rmem_tensor(sums.layout, Float32)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            tops[e, j] = cute.arch.fmax(s[(e, j), 0], s[(e, j), 1])
    join_warps(tops, warp_rows, t, group, columns, cute.arch.fmax)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            top = tops[e, j]
            rise = Float32(0.0)
            if top > LARGEST_BITS or (first and top > -Float32.inf):
                rise = top - WEIGHT_BITS
            bases[e, j] = bases[e, j] - rise
            for r in cutlass.range_constexpr(2):
                s[(e, j), r] = s[(e, j), r] - rise
            if rise > 0.0:  # in the first block there is nothing that could shrink
                shrink = cute.math.exp2(-rise, fastmath=True)
                sums[e, j] = sums[e, j] * shrink
                o[(e, j), None].store(o[(e, j), None].load() * shrink)


@cute.jit
def join_warps(
    numbers: cute.Tensor,
    warp_rows: cute.Tensor,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    join: cutlass.Constexpr,
):
    """Join the numbers that the threads of a warpgroup have of a row; every thread gets the result.

    Args:
        numbers: this thread's, one per row, replaced.
        warp_rows: room for a number per row and warp; nobody may still be reading it.
        t, group: this thread and its warpgroup.
        columns: rows.
        join: joins two numbers.
    """
    lane = t % 32
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            joined = numbers[e, j]
            for step in cutlass.range_constexpr(3):
                joined = join(joined, cute.arch.shuffle_sync_bfly(joined, offset=4 << step))
            if lane < 4:
                warp_rows[j * 8 + lane * 2 + e, t // 32] = joined
    cute.arch.barrier(barrier_id=FIRST_BARRIER + group, number_of_threads=128)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = j * 8 + (lane % 4) * 2 + e
            joined = warp_rows[row, 0]
            for warp in cutlass.range_constexpr(1, GROUP_WARPS):
                joined = join(joined, warp_rows[row, warp])
            numbers[e, j] = joined


@cute.jit
def clear_columns(values: cute.Tensor, slot: Int32, valid: Int32, t: Int32, group: Int32):
    """Zero the tokens of transposed values that are none: 0 * NaN would poison the output.

    A thread has a row, tokens are its bytes.
    """
    for at in cutlass.range(cutlass.max(valid, 0) // 16, BLOCK // 16, unroll=1):
        place = cute.local_tile(values[(None, None, slot)], (1, 16), (t, at))
        kept = cute.make_rmem_tensor(16, values.element_type)
        cute.autovec_copy(cute.group_modes(place, 0, 2), kept)
        numbers = cute.recast_tensor(kept, cutlass.Uint8)
        for i in cutlass.range_constexpr(16):
            if at * 16 + TOKEN_ORDER[i] >= valid:
                numbers[i] = cutlass.Uint8(0)
        cute.autovec_copy(kept, cute.group_modes(place, 0, 2))
    settle(FIRST_BARRIER + group)


@cute.jit
def finish_8(
    o: cute.Tensor,
    sums: cute.Tensor,
    bases: cute.Tensor,
    warp_rows: cute.Tensor,
    outputs: cutlass.Constexpr,
    start: Int64,
    head: Int32,
    first_row: Int32,
    window: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    wide: cutlass.Constexpr,
):
    """Divide by the row sums of all warps and write the rows that are there."""
    out, lse = outputs
    element = Float32 if wide else dtype
    join_warps(sums, warp_rows, t, group, columns, operator.add)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            row = j * 8 + (t % 4) * 2 + e
            total = sums[e, j]
            inverse = Float32(0.0)
            log_sum = -Float32.inf
            if total > 0.0:
                inverse = cute.arch.rcp_approx(total)
                log_sum = cute.math.log2(total, fastmath=True) - bases[e, j]
            if inside(head, first_row + row, window):
                at = start + Int64(row) * window.heads
                if t < 4:
                    lse[at] = log_sum * LN_2
                for tile in cutlass.range_constexpr(HEAD // 64):
                    for r in cutlass.range_constexpr(2):
                        column = t // 4 % 8 + t // 32 * 16 + tile * 64 + r * 8
                        place = cute.make_tensor(out + (at * HEAD + column), 1)
                        place[0] = (o[(e, j), (r, tile)] * inverse).to(element)
