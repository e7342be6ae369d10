"""Consumer warpgroups of the decompressed kernel: 64 query rows and a head's output each.

Keys and values have 16 bits, or 8 and many rows (see `fp8_rows.py`).
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.decompressed import fp8_few, fp8_rows
from mla_var3.kernel.cute_python.mla.decompressed.producer import warpgroup_barrier
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import (
    place_of,
    places_end,
    row_exists,
    row_limit,
    warpgroup_rows,
    work_tile_at,
)
from mla_var3.kernel.cute_python.mla.hopper import warps
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    LN_2,
    MMA_DEPTH,
    ROWS,
    SCORE_FLOOR,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    clear_rows,
    exponentiate,
    mask_scores,
    normaliser,
    rescale_if_needed,
    row_sum,
    store_row,
    two_rows,
    update_max,
)
from mla_var3.kernel.cute_python.mla.hopper.widths import HeadWidths, row_places


@dataclass(frozen=True)
class Mmas:
    """The wgmma of q_nope k, of q_rope k_rope and of p v."""

    qk: Any
    rope: Any
    pv: Any


@dataclass(frozen=True)
class Queries:
    """The queries.

    Attributes:
        nope, rope: pointers; no rope part where p is 0.
        shared_nope, shared_rope: [64, columns, warpgroup] in shared memory; None where they are in
            registers.
    """

    nope: Any
    rope: Any
    shared_nope: Any
    shared_rope: Any


@dataclass(frozen=True)
class Outputs:
    """Pointer to o and tensor of lse: results, or partials where requests are split."""

    o: Any
    lse: Any


@dataclass(frozen=True)
class Consumer:
    """What the consumer warpgroups of a CTA work with.

    Attributes:
        shared: keys, values (columns first), rope keys and scales of all stages.
        fp8: whether keys and values have 8 bits; constant.
        partials: whether the outputs are partials, in float32; constant.
    """

    mma: Mmas
    shared: Any
    pipeline: Any
    queries: Queries
    outputs: Outputs
    scale_log2e: Any
    cta: Any
    ctas: Any
    scheduler: Any
    dtype: Any
    fp8: bool
    partials: bool
    widths: HeadWidths

    @property
    def shared_queries(self) -> bool:
        """Whether queries lie in shared memory."""
        return self.queries.shared_nope is not None

    @property
    def output_type(self) -> Any:
        """Element type of the outputs."""
        return Float32 if self.partials else self.dtype

    @property
    def incomplete_lse(self) -> Any:
        """LSE, in powers of two, of rows that lack tokens.

        Infinite partials merge to NaN; partials that are NaN would be ignored.
        """
        return Float32.inf if self.partials else Float32(float("nan"))


@dataclass(frozen=True)
class Softmax:
    """Where a thread is, and the registers of its softmax over two rows.

    Attributes:
        t, lane, group: its number in the warpgroup and in its warp, and the warpgroup.
        row0: its first row in the warpgroup's; the other is 8 behind.
        exponents: those of the value scales (8 bits).
        q_scale: scales of the query rows; 1 in 16 bits.
        limits: the first token that a row does not see.
    """

    t: Any
    lane: Any
    group: Any
    row0: Any
    s: Any
    rope: Any
    exponents: Any
    sums: Any
    top: Any
    scale: Any
    q_scale: Any
    limits: Any


@dataclass(frozen=True)
class ScoreProduct:
    """One of the two products of the scores: the wgmma, its result, queries and keys."""

    mma: Any
    acc: Any
    queries: Any
    keys: Any


@cute.jit
def compute(consumer: cutlass.Constexpr):
    """Attend with one head or one query tile per warpgroup; all consumers call it."""
    shared, pipeline, scheduler = consumer.shared, consumer.pipeline, consumer.scheduler
    dtype, fp8, kv_block = consumer.dtype, consumer.fp8, scheduler.kv_block
    qk_mma, rope_mma, pv_mma = consumer.mma.qk, consumer.mma.rope, consumer.mma.pv
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4
    stage_head = 0 if scheduler.pair_tiles else group
    thr_qk, thr_r, thr_pv = qk_mma.get_slice(t), rope_mma.get_slice(t), pv_mma.get_slice(t)
    f_k = qk_mma.make_fragment_B(thr_qk.partition_B(shared.keys))
    f_v = pv_mma.make_fragment_B(thr_pv.partition_B(shared.values))
    widths, given = consumer.widths, consumer.queries
    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((ROWS, widths.v)), Float32)
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, kv_block)), Float32)
    o = two_rows(acc_o, widths.v)
    f_r = q_rope = None
    if const_expr(widths.p > 0):
        f_r = rope_mma.make_fragment_B(thr_r.partition_B(shared.rope))
        if const_expr(consumer.shared_queries):
            q_rope = rope_mma.make_fragment_A(thr_r.partition_A(given.shared_rope))
            q_rope = q_rope[(None, None, None, group)]
        else:
            q_rope = operand(widths.p // MMA_DEPTH, dtype)
    acc_r = acc_s
    values_by_row = cute.make_tensor(
        shared.values.iterator, cute.select(shared.values.layout, mode=[1, 0, 2])
    )
    if const_expr(fp8):
        acc_r = cute.make_rmem_tensor(acc_s.layout, Float32)
        q = operand(widths.d // fp8_rows.MMA_DEPTH_8, Float8E4M3FN, 4)
        p = operand(KV_BLOCK // fp8_rows.MMA_DEPTH_8, Float8E4M3FN, 4)
    else:
        if const_expr(consumer.shared_queries):
            q = qk_mma.make_fragment_A(thr_qk.partition_A(given.shared_nope))
            q = q[(None, None, None, group)]
        else:
            q = operand(widths.d // MMA_DEPTH, dtype)
        p = operand(kv_block // MMA_DEPTH, dtype)
    sums, top = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    scale, q_scale = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    q_scale.fill(1.0)
    exponents = cute.make_rmem_tensor((2, KV_BLOCK // 8), Float32)
    limits = cute.make_rmem_tensor(2, Int32)
    state = Softmax(
        t, lane, group, row0, two_rows(acc_s, kv_block), acc_r, exponents, sums, top, scale,
        q_scale, limits,
    )  # fmt: skip
    nope = ScoreProduct(qk_mma, acc_s, q, f_k)
    rope = ScoreProduct(rope_mma, acc_r, q_rope, f_r)
    stage = Int32(0)
    phase = Int32(0)
    # Queries and first scores of a work tile come while the results of the one before are written.
    index = consumer.cta
    tile = work_tile_at(cutlass.min(index, scheduler.work_tiles - 1), scheduler)
    own = rows_at(tile, group, row0, scheduler)
    fetch_queries(q, q_rope, state, consumer, own)
    if index < scheduler.work_tiles:
        valid = tile.tokens - tile.first * kv_block
        start_scores(nope, rope, state, consumer, stage, phase, stage_head, valid)
        warpgroup.wait_group(0)
    while index < scheduler.work_tiles:
        acc_o.fill(0.0)
        sums.fill(0.0)
        top.fill(SCORE_FLOOR)
        for r in cutlass.range_constexpr(2):
            limits[r] = row_limit(tile, own.first + row0 + 8 * r, scheduler)
        lowest = cute.arch.warp_redux_sync(cutlass.min(limits[0], limits[1]), "min")

        # The scores of a block are computed while the values of the block before are added up.
        # The products' operands are used up in between, so one set of registers serves all blocks.
        token = tile.first * kv_block
        slot = stage * pipeline.heads + stage_head
        softmax(state, consumer, slot, token, lowest, tile)
        warps.release(pipeline.keys_empty(stage), lane)
        round_weights(p, acc_s, dtype, fp8)
        for block in cutlass.range(tile.first + 1, tile.last, unroll=1):
            token = block * kv_block
            v_slot, v_stage, v_phase = slot, stage, phase
            stage, phase = pipeline.after(stage, phase)
            slot = stage * pipeline.heads + stage_head
            if const_expr(scheduler.ring):
                # Here, where no product is in flight.
                if tile.dropped > 0:
                    cute.arch.mbarrier_wait(pipeline.values_full(v_stage), v_phase)
                    if const_expr(fp8):
                        fp8_few.clear_dropped(
                            shared.values, v_slot, token - KV_BLOCK, t, group, tile, scheduler
                        )
                    else:
                        held = values_by_row[(None, None, v_slot)]
                        clear_places(
                            held, token - KV_BLOCK, t, warpgroup_barrier(group), tile, scheduler
                        )
            valid = tile.tokens - token
            start_scores(nope, rope, state, consumer, stage, phase, slot, valid)
            cute.arch.mbarrier_wait(pipeline.values_full(v_stage), v_phase)
            multiply_values(pv_mma, acc_o, p, f_v, v_slot)
            # Registers do not hold a softmax beside a product of 256 columns in flight.
            warpgroup.wait_group(0 if const_expr(widths.shared_queries) else 1)
            if const_expr(not fp8):
                warps.release(pipeline.keys_empty(stage), lane)
            softmax(state, consumer, slot, token, lowest, tile)
            if const_expr(fp8):  # the scales have come with the keys
                warps.release(pipeline.keys_empty(stage), lane)
            else:  # in 8 bits the order makes no difference
                warps.keep_order(sums[0] + sums[1])
            warpgroup.wait_group(0)
            warps.release(pipeline.values_empty(v_stage), lane)
            rescale_if_needed(o, scale)
            round_weights(p, acc_s, dtype, fp8)
        index += consumer.ctas
        next_tile = work_tile_at(cutlass.min(index, scheduler.work_tiles - 1), scheduler)
        next_own = rows_at(next_tile, group, row0, scheduler)
        fetch_queries(q, q_rope, state, consumer, next_own)
        cute.arch.mbarrier_wait(pipeline.values_full(stage), phase)
        if const_expr(scheduler.ring):
            if tile.dropped > 0:
                if const_expr(fp8):
                    fp8_few.clear_dropped(shared.values, slot, token, t, group, tile, scheduler)
                else:
                    held = values_by_row[(None, None, slot)]
                    clear_places(held, token, t, warpgroup_barrier(group), tile, scheduler)
        if token + kv_block > tile.tokens:
            if const_expr(fp8):
                fp8_few.clear_columns(shared.values, slot, tile.tokens - token, t, group)
            else:
                valid = cutlass.max(tile.tokens - token, 0)
                clear_rows(
                    values_by_row[(None, None, slot)], widths.v, valid, t,
                    warpgroup_barrier(group), kv_block,
                )  # fmt: skip
        v_stage = stage
        stage, phase = pipeline.after(stage, phase)
        multiply_values(pv_mma, acc_o, p, f_v, slot)
        warpgroup.wait_group(0)
        warps.release(pipeline.values_empty(v_stage), lane)
        # Behind the last work tile too, with zeros: the assembler would wait for a product that
        # is issued on one path only.
        slot = stage * pipeline.heads + stage_head
        valid = next_tile.tokens - next_tile.first * kv_block
        start_scores(nope, rope, state, consumer, stage, phase, slot, valid)
        start = own.start
        if const_expr(consumer.partials):
            start += Int64(tile.split) * scheduler.requests * scheduler.queries * scheduler.heads
        finish(o, state, consumer, start, own, tile)
        warpgroup.wait_group(0)
        tile = next_tile
        own = next_own


@cute.jit
def start_scores(
    nope: cutlass.Constexpr,
    rope: cutlass.Constexpr,
    state: cutlass.Constexpr,
    consumer: cutlass.Constexpr,
    stage: Int32,
    phase: Int32,
    slot: Int32,
    valid: Int32,
):
    """Issue the scores of a KV block, once its keys have arrived; does not wait for them.

    `valid` are the tokens of the block that exist, or more.
    """
    cute.arch.mbarrier_wait(consumer.pipeline.keys_full(stage), phase)
    if const_expr(consumer.fp8):
        if valid < KV_BLOCK:
            fp8_rows.clear_scales(consumer.shared.scales, slot, valid, state.t, state.group)
    if const_expr(consumer.scheduler.kv_block > KV_BLOCK):
        # The first product overwrites the result; the assembler takes it for an operand all the
        # same, keeps the old scores beside the probabilities made of them, and has too few
        # registers for blocks of more than 64 tokens. Zeros free them, and cost no instruction.
        nope.acc.fill(0.0)
    multiply_queries(nope.mma, nope.acc, nope.queries, nope.keys, slot)
    if const_expr(rope.queries is not None):
        multiply_rope(rope.mma, rope.acc, rope.queries, rope.keys, stage, consumer.fp8)
    warpgroup.commit_group()


@dataclass
class OwnRows:
    """The rows of a warpgroup in a work tile, as a thread sees them.

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
    tile: cutlass.Constexpr, group: Int32, row0: Int32, scheduler: cutlass.Constexpr
) -> OwnRows:
    """The rows of a warpgroup in a work tile."""
    head, first, start = warpgroup_rows(tile, group, scheduler)
    return OwnRows(
        first,
        start,
        row_exists(head, first + row0, scheduler),
        row_exists(head, first + row0 + 8, scheduler),
    )


@cute.jit
def fetch_queries(
    q: cute.Tensor,
    q_rope: cutlass.Constexpr,
    state: cutlass.Constexpr,
    consumer: cutlass.Constexpr,
    own: cutlass.Constexpr,
):
    """Load the queries of a thread's two rows to where the first products read them."""
    rows, heads = (own.upper, own.lower), consumer.scheduler.heads
    given, d, p = consumer.queries, consumer.widths.d, consumer.widths.p
    group, dtype = state.group, consumer.dtype
    nope = given.nope + own.start * d
    if const_expr(consumer.shared_queries):
        warps.sync_warpgroup(warpgroup_barrier(group))  # no warp reads the old ones any more
        target = given.shared_nope[(None, None, group)]
        copy_queries(target, nope, d, rows, heads, state)
        if const_expr(p > 0):
            rope = given.rope + own.start * p
            target = given.shared_rope[(None, None, group)]
            copy_queries(target, rope, p, rows, heads, state)
        warps.fence_and_sync_warpgroup(warpgroup_barrier(group))
    else:
        if const_expr(p > 0):
            rope = given.rope + own.start * p
            load_queries(q_rope, rope, p, rows, heads, state)
        if const_expr(consumer.fp8):
            fp8_rows.load_queries_by_row(q, q_rope, nope, rows, heads, state, dtype)
            fp8_rows.divide_rows(q_rope, state.q_scale, dtype)
        else:
            load_queries(q, nope, d, rows, heads, state)


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
    rows: cutlass.Constexpr,
    heads: Int32,
    state: cutlass.Constexpr,
):
    """Load two rows into the registers of an operand A; zeros for rows that do not exist."""
    words, row0, lane = cute.recast_tensor(target, Int32), state.row0, state.lane
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
def copy_queries(
    target: cute.Tensor,
    source: cute.Pointer,
    columns: cutlass.Constexpr,
    rows: cutlass.Constexpr,
    heads: Int32,
    state: cutlass.Constexpr,
):
    """Copy two rows to shared memory, with the other threads of the rows; zeros for absent ones."""
    for i in cutlass.range(columns // 32, unroll=1):
        for r in cutlass.range_constexpr(2):
            row, chunk = state.row0 + 8 * r, i * 4 + state.lane % 4
            eight = cute.make_rmem_tensor(8, target.element_type)
            eight.fill(0.0)
            if rows[r]:
                at = Int64(row) * heads * columns + chunk * 8
                cute.autovec_copy(cute.make_tensor((source + at).align(16), 8), eight)
            place = cute.local_tile(target, (1, 8), (row, chunk))
            cute.autovec_copy(eight, cute.group_modes(place, 0, 2))


@cute.jit
def multiply_queries(
    mma: cute.TiledMma, acc: cute.Tensor, q: cute.Tensor, keys: cute.Tensor, slot: Int32
):
    """Issue acc = q k^T; does not wait."""
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
    """Issue acc += q_rope k_rope^T, or acc = where it is alone; does not wait."""
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(q, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, k > 0 or not alone)
        cute.gemm(atom, acc, q[(None, None, k)], keys[(None, None, k, stage)], acc)


@cute.jit
def multiply_values(
    mma: cute.TiledMma, acc: cute.Tensor, p: cute.Tensor, values: cute.Tensor, slot: Int32
):
    """Issue acc += p v; does not wait."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(p, mode=[2])):
        cute.gemm(atom, acc, p[(None, None, k)], values[(None, None, k, slot)], acc)
    warpgroup.commit_group()


@cute.jit
def softmax(
    state: cutlass.Constexpr,
    consumer: cutlass.Constexpr,
    slot: Int32,
    token: Int32,
    lowest: Int32,
    tile: cutlass.Constexpr,
):
    """Scores of a KV block to probabilities, relative to a running maximum.

    Args:
        slot: where the block's head is in shared memory.
        lowest: the first token that some row of the warp does not see.
    """
    scheduler, lane = consumer.scheduler, state.lane
    if const_expr(consumer.fp8):
        rope = two_rows(state.rope, KV_BLOCK)
        fp8_rows.scale_scores(state.s, rope, state.exponents, consumer.shared.scales, slot, lane)
    if const_expr(scheduler.ring):
        if tile.dropped > 0 or places_end(token, tile, scheduler) > lowest:
            mask_places(state.s, token, state.limits, lane, tile, scheduler)
            if const_expr(consumer.fp8):
                clear_exponents(state.exponents, token, lane, tile, scheduler)
    elif token + scheduler.kv_block > lowest:
        mask_scores(state.s, token, state.limits, lane, columns=scheduler.kv_block)
    if const_expr(consumer.fp8):
        fp8_rows.softmax_by_row(state, consumer.scale_log2e)
    else:
        update_max(state.s, state.top, state.scale, state.sums, consumer.scale_log2e)
        exponentiate(state.s, state.top, state.sums, consumer.scale_log2e)


@cute.jit
def mask_places(
    s: cute.Tensor,
    token: Int32,
    limits: cute.Tensor,
    lane: Int32,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """Set the scores of slots of a ring that a row does not see to -inf, whatever they are."""
    for j, e in row_places(KV_BLOCK):
        place = place_of(token + j * 8 + (lane % 4) * 2 + e, tile, scheduler)
        for r in cutlass.range_constexpr(2):
            if place >= limits[r] or place < tile.dropped:
                s[r, (e, j)] = -Float32.inf


@cute.jit
def clear_exponents(
    exponents: cute.Tensor,
    token: Int32,
    lane: Int32,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """Zero the exponents of slots of a ring before its oldest token: they may be NaN."""
    for j, e in row_places(KV_BLOCK):
        place = place_of(token + j * 8 + (lane % 4) * 2 + e, tile, scheduler)
        if place < tile.dropped:
            exponents[e, j] = Float32(0.0)


@cute.jit
def clear_places(
    values: cute.Tensor,
    token: Int32,
    thread: Int32,
    barrier: Int32,
    tile: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
):
    """Zero the rows of a KV block of a ring before its oldest token: 0 * NaN would poison o.

    All threads of a warpgroup call it; `barrier` is a named barrier of theirs.
    """
    zero = cute.make_rmem_tensor(8, values.element_type)
    zero.fill(0.0)
    chunks = cute.size(values, mode=[1]) // 8
    for i in cutlass.range(thread, KV_BLOCK * chunks, WARPGROUP, unroll=1):
        row = i // chunks
        if place_of(token + row, tile, scheduler) < tile.dropped:
            target = cute.local_tile(values, (1, 8), (row, i % chunks))
            cute.autovec_copy(zero, cute.group_modes(target, 0, 2))
    warps.fence_and_sync_warpgroup(barrier)


@cute.jit
def round_weights(
    p: cute.Tensor, acc_s: cute.Tensor, dtype: cutlass.Constexpr, fp8: cutlass.Constexpr
):
    """Probabilities to the registers of an operand A."""
    if const_expr(fp8):
        fp8_rows.round_weights_by_row(p, two_rows(acc_s, KV_BLOCK))
    else:
        # The result of one product has the layout of the next one's operand.
        cute.make_tensor(p.iterator, acc_s.layout).store(acc_s.load().to(dtype))


@cute.jit
def finish(
    o: cute.Tensor,
    state: cutlass.Constexpr,
    consumer: cutlass.Constexpr,
    start: Int64,
    own: cutlass.Constexpr,
    tile: cutlass.Constexpr,
):
    """Normalise by the row sums and write the rows that exist; NaN where tokens are missing."""
    out, lse = consumer.outputs.o, consumer.outputs.lse
    rows, heads = (own.upper, own.lower), consumer.scheduler.heads
    row0, lane = state.row0, state.lane
    # In 8 bits the probabilities and their sums are 2**WEIGHT_BITS too large.
    bits = fp8_few.WEIGHT_BITS if const_expr(consumer.fp8) else 0.0
    for r in cutlass.range_constexpr(2):
        total = row_sum(state.sums[r])
        inverse, lse_log2 = normaliser(total, state.top[r] - bits)
        if const_expr(consumer.scheduler.ring):
            if tile.incomplete:
                inverse = Float32(float("nan"))
                lse_log2 = consumer.incomplete_lse
        o[r, None].store(o[r, None].load() * inverse)
        if rows[r]:
            at = start + Int64(row0 + 8 * r) * heads
            v = consumer.widths.v
            store_row(o[r, None], v, out, at * v, lane, consumer.output_type)
            if lane % 4 == 0:
                lse[at] = lse_log2 * LN_2
