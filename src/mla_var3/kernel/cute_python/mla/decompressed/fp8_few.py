"""Consumer warpgroups of the decompressed kernel with 8 bits and up to 48 query rows.

Tokens are on the M side of the products and query rows on the N side, which is as wide as there are
rows:

    S^T [64 tokens, rows] = K8 [64, 128] Q8^T + K_rope [64, 64] Q_rope^T
    O^T [128, rows] += V8^T [128, 64] P8^T

So nothing is computed for rows that do not exist, and a thread has two tokens, whose scales are
four numbers. A score is sq (sk (q8 k8) + (q_rope / sq) k_rope), with the scales sq of the query row
and sk of the key; sq goes into the exponent with the softmax scale. The rope part stays in 16 bits.

The scales of the values are powers of two and go into the exponents as well. A *weight* is a
probability times the scale of its value. The running maximum is that of the weights, so that the
weights, which are rounded to e4m3 and multiplied by v8, always fit. The sums of a row divide the
scales out again, exactly.

The maximum of a row over the 64 tokens of a KV block is spread over all four warps. It is not
computed as long as no weight is too large for e4m3: the weights of a block are computed with the
maximum of the blocks before, and the barrier behind them, which is needed anyway, tells every warp
whether one was. Then, and in the first block, the maximum is computed and the weights again.

A row sees a token of every block before its last one, so the first block sets its maximum. Only in
a ring that lacks tokens the first block may hold none. There all maxima start `FLOOR_BITS` below
zero, and the first visible weight, wherever it is, raises its row's.
"""

import operator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.decompressed.producer import warpgroup_barrier
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import (
    place_of,
    places_end,
    row_exists,
    row_limit,
    warpgroup_rows,
    work_tile_at,
)
from mla_var3.kernel.cute_python.mla.hopper.columns import (
    by_row,
    own_row,
    own_token,
    reduce_lanes,
    reduce_warps,
    scores_by_row,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    HEAD,
    KV_BLOCK,
    LN_2,
    ROPE,
    WARPGROUP,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import (
    fence_and_sync_warpgroup,
    release,
    sync_warpgroup,
)
from mla_var3.kernel.cute_python.mla.hopper.widths import row_places
from mla_var3.op.mla.window.packed import TOKEN_ORDER
from mla_var3.op.mla.window.quantise import E4M3_MAX

WEIGHT_BITS = 6.0
"""A weight at the running maximum is 2**6: small weights stay above e4m3's least number, 2**-9.
Other numbers were not measured."""
LARGEST_BITS = 8.75
"""A weight above 2**8.75 raises the running maximum; e4m3 ends at 448 = 2**8.8."""
FLOOR_BITS = 4096.0
"""How far below zero maxima start in a ring that lacks tokens: below all scores, and small enough
for float32 to keep exponents to 2**-12, a small part of the rounding to e4m3."""
ROW_THREADS = 4
"""Threads that load a query row."""
EXCHANGE_BYTES = 2 * HEAD + 2 * KV_BLOCK + 4 + 4 * WARPGROUP_WARPS
"""Shared memory of a query row: its two parts, weights of two blocks, scale, a number per warp."""
COLUMN_CHOICES = (16, 32, 48)
"""Query rows on the N side that the kernel is compiled for. With 64 the M side is faster, 1251
against 1402 us at s=64, and takes less energy: shared memory is read half as often (run 11 of
docs/results/2026-11-15-nvidia-h200-mix-development.md)."""
BYTE_CHOICES = ((0x7632, 0x5140, 0x7160), (0x5410, 0x3524, 0x3726))
"""For threads of even and of odd tokens: which bytes of two words of weights go to the neighbour,
and how those that stay and those that come make two words."""


def columns_for(rows: int) -> int:
    """Query rows on the N side for a head that has so many; 0 where the M side is better."""
    return next((columns for columns in COLUMN_CHOICES if rows <= columns), 0)


@dataclass(frozen=True)
class Exchange:
    """Shared memory of the warpgroups, the last mode of each tensor.

    Attributes:
        q_nope: [columns, 128, group] queries in e4m3.
        q_rope: [columns, 64, group] their rope part.
        warp_rows: [columns, warp, group] a number per row and warp.
        weights: [columns, 64, 2, group] weights of two KV blocks: one is written while the other
            may still be read.
    """

    q_nope: Any
    q_rope: Any
    q_scales: Any
    warp_rows: Any
    weights: Any


@dataclass(frozen=True)
class RowState:
    """Where a thread is, and its registers, per query row.

    Attributes:
        t, group: its number in the warpgroup, and the warpgroup.
        columns: query rows on the N side; constant.
        warp_rows: [columns, warp] numbers that warps exchange.
        s: products of e4m3 numbers, replaced by exponents of weights.
        factors: from scores to exponents.
        bases: WEIGHT_BITS less the running maximum.
    """

    t: Any
    group: Any
    columns: int
    warp_rows: Any
    s: Any
    rope: Any
    o: Any
    sums: Any
    factors: Any
    bases: Any


@cute.jit
def compute_few_fp8(
    consumer: cutlass.Constexpr, exchange: cutlass.Constexpr, columns: cutlass.Constexpr
):
    """Attend with one head or one query tile per warpgroup; all consumers call it."""
    shared, pipeline, scheduler = consumer.shared, consumer.pipeline, consumer.scheduler
    qk_mma, rope_mma, pv_mma = consumer.mma.qk, consumer.mma.rope, consumer.mma.pv
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    lane = t % 32
    stage_head = 0 if scheduler.pair_tiles else group
    s_q, s_qr, q_scales, warp_rows = (
        each[(None, None, group)]
        for each in (exchange.q_nope, exchange.q_rope, exchange.q_scales, exchange.warp_rows)
    )
    s_p = exchange.weights[(None, None, None, group)]
    thr_qk, thr_r, thr_pv = qk_mma.get_slice(t), rope_mma.get_slice(t), pv_mma.get_slice(t)
    f_k = qk_mma.make_fragment_A(thr_qk.partition_A(shared.keys))
    f_q = qk_mma.make_fragment_B(thr_qk.partition_B(s_q))
    f_r = rope_mma.make_fragment_A(thr_r.partition_A(shared.rope))
    f_qr = rope_mma.make_fragment_B(thr_r.partition_B(s_qr))
    f_v = pv_mma.make_fragment_A(thr_pv.partition_A(shared.values))
    f_p = pv_mma.make_fragment_B(thr_pv.partition_B(s_p))
    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((HEAD, columns)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((KV_BLOCK, columns)), Float32)
    acc_r = cute.make_rmem_tensor(acc_s.layout, Float32)
    own = (2, columns // 8)
    sums = cute.make_rmem_tensor(own, Float32)
    factors = cute.make_rmem_tensor(own, Float32)
    bases = cute.make_rmem_tensor(own, Float32)
    state = RowState(
        t, group, columns, warp_rows, scores_by_row(acc_s, columns), scores_by_row(acc_r, columns),
        by_row(acc_o, columns, HEAD // 64), sums, factors, bases,
    )  # fmt: skip
    words = cute.make_tensor(
        cute.recast_ptr(s_p.iterator, dtype=Int32), cute.make_layout((columns * KV_BLOCK // 4, 2))
    )
    stage = Int32(0)
    phase = Int32(0)
    turn = Int32(0)
    for index in cutlass.range(consumer.cta, scheduler.work_tiles, consumer.ctas, unroll=1):
        tile = work_tile_at(index, scheduler)
        head, first_row, start = warpgroup_rows(tile, group, scheduler)
        load_queries_fp8(s_q, s_qr, q_scales, consumer, state, start, head, first_row)
        acc_o.fill(0.0)
        sums.fill(0.0)
        bases.fill(WEIGHT_BITS)
        lowest = tile.stop
        if const_expr(scheduler.ring):
            lowest = tile.tokens
            if tile.dropped > 0:
                bases.fill(WEIGHT_BITS + FLOOR_BITS)
        for j, e in row_places(columns):
            row = own_row(j, e, lane)
            factors[e, j] = consumer.scale_log2e * q_scales[row, 0]
            lowest = cutlass.min(lowest, row_limit(tile, first_row + row, scheduler))
        lowest = cute.arch.warp_redux_sync(lowest, "min")

        # The scores of a block are computed while the values of the block before are added up.
        token = tile.first * KV_BLOCK
        slot = stage * pipeline.heads + stage_head
        cute.arch.mbarrier_wait(pipeline.keys_full(stage), phase)
        multiply_keys((qk_mma, rope_mma), (acc_s, acc_r), (f_k, f_r), (f_q, f_qr), slot, stage)
        warpgroup.wait_group(0)
        compute_weights(
            state, words[(None, turn)], consumer, stage, slot, token, lowest, tile, first_row,
            Boolean(True),
        )  # fmt: skip
        for block in cutlass.range(tile.first + 1, tile.last, unroll=1):
            token = block * KV_BLOCK
            v_slot, v_stage, v_phase = slot, stage, phase
            stage, phase = pipeline.after(stage, phase)
            slot = stage * pipeline.heads + stage_head
            if const_expr(scheduler.ring):
                # Here, where no product is in flight.
                if tile.dropped > 0:
                    cute.arch.mbarrier_wait(pipeline.values_full(v_stage), v_phase)
                    clear_dropped(
                        shared.values, v_slot, token - KV_BLOCK, t, group, tile, scheduler
                    )
            cute.arch.mbarrier_wait(pipeline.keys_full(stage), phase)
            multiply_keys((qk_mma, rope_mma), (acc_s, acc_r), (f_k, f_r), (f_q, f_qr), slot, stage)
            cute.arch.mbarrier_wait(pipeline.values_full(v_stage), v_phase)
            add_weighted(pv_mma, acc_o, f_v, f_p[(None, None, None, turn)], v_slot)
            turn ^= 1
            warpgroup.wait_group(1)
            compute_weights(
                state, words[(None, turn)], consumer, stage, slot, token, lowest, tile, first_row,
                Boolean(False), v_stage,
            )  # fmt: skip
        cute.arch.mbarrier_wait(pipeline.values_full(stage), phase)
        if const_expr(scheduler.ring):
            if tile.dropped > 0:
                clear_dropped(shared.values, slot, token, t, group, tile, scheduler)
        if token + KV_BLOCK > tile.tokens:
            clear_columns(shared.values, slot, tile.tokens - token, t, group)
        add_weighted(pv_mma, acc_o, f_v, f_p[(None, None, None, turn)], slot)
        turn ^= 1
        warpgroup.wait_group(0)
        release(pipeline.values_empty(stage), lane)
        stage, phase = pipeline.after(stage, phase)
        if const_expr(consumer.partials):
            start += Int64(tile.split) * scheduler.requests * scheduler.queries * scheduler.heads
        finish_fp8(state, consumer, start, head, first_row, tile)


@cute.jit
def load_queries_fp8(
    target: cute.Tensor,
    rope_target: cute.Tensor,
    scales: cute.Tensor,
    consumer: cutlass.Constexpr,
    state: cutlass.Constexpr,
    start: Int64,
    head: Int32,
    first_row: Int32,
):
    """Query rows into shared memory as e4m3 numbers with a scale each; zeros for absent rows.

    Args:
        target, rope_target: [columns, 128] in e4m3, [columns, 64] in 16 bits.
        start: the first row in memory; the next ones are `heads` behind.
    """
    queries, scheduler, dtype = consumer.queries, consumer.scheduler, consumer.dtype
    t, columns = state.t, state.columns
    quarter = t % ROW_THREADS
    nope = cute.make_rmem_tensor(HEAD // ROW_THREADS, dtype)
    rope = cute.make_rmem_tensor(ROPE // ROW_THREADS, dtype)
    for first in cutlass.range_constexpr(0, columns, WARPGROUP // ROW_THREADS):
        row = first + t // ROW_THREADS
        nope.fill(0.0)
        rope.fill(0.0)
        if row < columns and row_exists(head, first_row + row, scheduler):
            at = start + Int64(row) * scheduler.heads
            copy_row(queries.nope, at * HEAD + quarter * (HEAD // ROW_THREADS), nope)
            copy_row(queries.rope, at * ROPE + quarter * (ROPE // ROW_THREADS), rope)
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
    fence_and_sync_warpgroup(warpgroup_barrier(state.group))


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
    mmas: cutlass.Constexpr,
    accumulators: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    queries: cutlass.Constexpr,
    slot: Int32,
    stage: Int32,
):
    """Issue k q^T and k_rope q_rope^T into accumulators of their own; does not wait."""
    warpgroup.fence()
    for i in cutlass.range_constexpr(2):
        atom = cute.make_mma_atom(mmas[i].op)
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
    """Issue acc += v^T p^T; does not wait."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(weights, mode=[2])):
        cute.gemm(atom, acc, values[(None, None, k, slot)], weights[(None, None, k)], acc)
    warpgroup.commit_group()


@cute.jit
def compute_weights(
    state: cutlass.Constexpr,
    words: cute.Tensor,
    consumer: cutlass.Constexpr,
    stage: Int32,
    slot: Int32,
    token: Int32,
    lowest: Int32,
    tile: cutlass.Constexpr,
    first_row: Int32,
    first: Boolean,
    before: cutlass.Constexpr = None,
):
    """Products of a KV block to weights in shared memory.

    Args:
        words: where the weights go, four to a word.
        lowest: the first token that some row does not see.
        first: whether there is no earlier block.
        before: stage of the block before, whose product with values is still in flight.
    """
    keys_empty = consumer.pipeline.keys_empty(stage)
    values_empty = None if before is None else consumer.pipeline.values_empty(before)
    s, sums, factors, bases = state.s, state.sums, state.factors, state.bases
    rope, t, columns = state.rope, state.t, state.columns
    scheduler, scales = consumer.scheduler, consumer.shared.scales
    lane = t % 32
    first_token = own_token(t)
    added = cute.make_rmem_tensor(sums.layout, Float32)
    inverses = cute.make_rmem_tensor(2, Float32)
    highest = -Float32.inf
    for r in cutlass.range_constexpr(2):
        at = first_token + 8 * r
        # What a slot without a token holds, in scales too, is masked below.
        pair = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.local_tile(scales[(None, slot)], (2,), (at,)), pair)
        exponent = pair[1]
        if const_expr(scheduler.ring):
            place = place_of(token + at, tile, scheduler)
            if place >= tile.tokens or place < tile.dropped:
                exponent = Float32(0.0)
        elif token + at >= tile.tokens:
            exponent = Float32(0.0)
        inverses[r] = inverse_power(exponent)
        for j, e in row_places(columns):
            score = s[(e, j), r] * pair[0] + rope[(e, j), r]
            s[(e, j), r] = score * factors[e, j] + (bases[e, j] + exponent)
    release(keys_empty, lane)
    end = token + KV_BLOCK
    if const_expr(scheduler.ring):
        end = places_end(token, tile, scheduler)
        if tile.dropped > 0:
            end = lowest + 1
    if end > lowest:
        for j, e in row_places(columns):
            limit = row_limit(tile, first_row + j * 8 + (lane % 4) * 2 + e, scheduler)
            for r in cutlass.range_constexpr(2):
                at = token + first_token + 8 * r
                if const_expr(scheduler.ring):
                    place = place_of(at, tile, scheduler)
                    if place >= limit or place < tile.dropped:
                        s[(e, j), r] = -Float32.inf
                elif at >= limit:
                    s[(e, j), r] = -Float32.inf
    for j, e in row_places(columns):
        for r in cutlass.range_constexpr(2):
            highest = cute.arch.fmax(highest, s[(e, j), r])
    rounded = round_weights_fp8(s, added, inverses, columns)
    warpgroup.wait_group(0)
    if const_expr(values_empty is not None):
        release(values_empty, lane)
    store_weights(words, rounded, t, columns)
    cute.arch.fence_view_async_shared()
    if any_in_warpgroup(first or highest > LARGEST_BITS, warpgroup_barrier(state.group)):
        raise_bases(state, first)
        again = round_weights_fp8(s, added, inverses, columns)
        store_weights(words, again, t, columns)
        fence_and_sync_warpgroup(warpgroup_barrier(state.group))
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
def any_in_warpgroup(holds: Boolean, barrier: Int32) -> Boolean:
    """Whether it holds for a thread of the warpgroup; all its threads meet at the barrier."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; bar.red.or.pred q, {$r1}, 128, p;"
        " selp.s32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[Int32(holds), barrier],
    )
    return found != 0


@cute.jit
def round_weights_fp8(
    s: cute.Tensor, added: cute.Tensor, inverses: cute.Tensor, columns: cutlass.Constexpr
) -> cute.Tensor:
    """Weights as e4m3 numbers, a word per two rows and two tokens."""
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
    rows, are four neighbours. The two exchange one row each: the thread of the even token then has
    the even row, the other one the odd row, and each stores a word. The words of a warp are
    contiguous.
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
def raise_bases(state: cutlass.Constexpr, first: Boolean):
    """Raise the running maxima that have to rise, and rescale what depends on them."""
    s, o, sums, bases, columns = state.s, state.o, state.sums, state.bases, state.columns
    tops = cute.make_rmem_tensor(sums.layout, Float32)
    for j, e in row_places(columns):
        tops[e, j] = cute.arch.fmax(s[(e, j), 0], s[(e, j), 1])
    reduce_rows(tops, state, cute.arch.fmax)
    for j, e in row_places(columns):
        top = tops[e, j]
        rise = Float32(0.0)
        if top > LARGEST_BITS or (first and top > -Float32.inf):
            rise = top - WEIGHT_BITS
        bases[e, j] = bases[e, j] - rise
        for r in cutlass.range_constexpr(2):
            s[(e, j), r] = s[(e, j), r] - rise
        if rise > 0.0:  # in the first block there is nothing to rescale
            scale = cute.math.exp2(-rise, fastmath=True)
            sums[e, j] = sums[e, j] * scale
            o[(e, j), None].store(o[(e, j), None].load() * scale)


@cute.jit
def reduce_rows(numbers: cute.Tensor, state: cutlass.Constexpr, combine: cutlass.Constexpr):
    """Combine the numbers that a warpgroup's threads have of a row; every thread gets the result.

    No warp may still be reading `warp_rows`.
    """
    t, columns, warp_rows = state.t, state.columns, state.warp_rows
    lane = t % 32
    for j, e in row_places(columns):
        combined = reduce_lanes(numbers[e, j], combine)
        if lane < 4:
            warp_rows[j * 8 + lane * 2 + e, t // 32] = combined
    sync_warpgroup(warpgroup_barrier(state.group))
    for j, e in row_places(columns):
        row = own_row(j, e, lane)
        numbers[e, j] = reduce_warps(warp_rows, row, 0, WARPGROUP_WARPS, combine)


@cute.jit
def clear_columns(values: cute.Tensor, slot: Int32, valid: Int32, t: Int32, group: Int32):
    """Zero the tokens of transposed values that do not exist: 0 * NaN would poison the output."""

    def is_gone(at, i):
        return at * 16 + TOKEN_ORDER[i] >= valid

    clear_tokens(values, slot, cutlass.max(valid, 0) // 16, is_gone, t, group)


@cute.jit
def clear_dropped(
    values: cute.Tensor,
    slot: Int32,
    token: Int32,
    t: Int32,
    group: Int32,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """The same for the tokens of a KV block of a ring before its oldest one."""

    def is_gone(at, i):
        return place_of(token + at * 16 + TOKEN_ORDER[i], tile, scheduler) < tile.dropped

    clear_tokens(values, slot, 0, is_gone, t, group)


@cute.jit
def clear_tokens(
    values: cute.Tensor,
    slot: Int32,
    first: cutlass.Constexpr,
    is_gone: cutlass.Constexpr,
    t: Int32,
    group: Int32,
):
    """Zero the tokens that are gone, in groups of 16 from the first on.

    A thread has a row, tokens are its bytes.
    """
    for at in cutlass.range(first, KV_BLOCK // 16, unroll=1):
        place = cute.local_tile(values[(None, None, slot)], (1, 16), (t, at))
        kept = cute.make_rmem_tensor(16, values.element_type)
        cute.autovec_copy(cute.group_modes(place, 0, 2), kept)
        numbers = cute.recast_tensor(kept, cutlass.Uint8)
        for i in cutlass.range_constexpr(16):
            if is_gone(at, i):
                numbers[i] = cutlass.Uint8(0)
        cute.autovec_copy(kept, cute.group_modes(place, 0, 2))
    fence_and_sync_warpgroup(warpgroup_barrier(group))


@cute.jit
def finish_fp8(
    state: cutlass.Constexpr,
    consumer: cutlass.Constexpr,
    start: Int64,
    head: Int32,
    first_row: Int32,
    tile: cutlass.Constexpr,
):
    """Normalise by the row sums of all warps and write the rows that exist, as `finish` does."""
    out, lse, scheduler = consumer.outputs.o, consumer.outputs.lse, consumer.scheduler
    o, sums, bases, t, columns = state.o, state.sums, state.bases, state.t, state.columns
    reduce_rows(sums, state, operator.add)
    for j, e in row_places(columns):
        row = own_row(j, e, t)
        total = sums[e, j]
        inverse = Float32(0.0)
        lse_log2 = -Float32.inf
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
            lse_log2 = cute.math.log2(total, fastmath=True) - bases[e, j]
        if const_expr(scheduler.ring):
            if tile.incomplete:
                inverse = Float32(float("nan"))
                lse_log2 = consumer.incomplete_lse
        if row_exists(head, first_row + row, scheduler):
            at = start + Int64(row) * scheduler.heads
            if t < 4:
                lse[at] = lse_log2 * LN_2
            for m_tile in cutlass.range_constexpr(HEAD // 64):
                for r in cutlass.range_constexpr(2):
                    column = own_token(t) + m_tile * 64 + r * 8
                    place = cute.make_tensor(out + (at * HEAD + column), 1)
                    place[0] = (o[(e, j), (r, m_tile)] * inverse).to(consumer.output_type)
