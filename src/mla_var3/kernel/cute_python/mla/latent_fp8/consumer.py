"""Consumer warpgroups of the 8-bit latent kernel.

Of every pair of KV blocks each warpgroup computes the scores of one, with 64 query rows on the M
side. Each accumulates half of the output columns, and here the columns are on the M side and the
query rows on the N side:

    S [64 rows, 64 tokens] = Q8 [64, 512] K8^T (+ rope)     O^T [256, rows] += V8^T [256, 64] W8^T

An 8-bit wgmma takes its operands from shared memory with the contracted index innermost only, which
for V^T is the token. As operand A it may come from registers instead: `ldmatrix` transposes pairs
of bytes on the way there, and a byte permutation does the rest. So V is never written back to
shared memory, whose traffic bounds this kernel. The order of the tokens that results within 16 is
the one in which a thread has its scores (`TOKENS`), and the columns of an M tile are in pairs.

Per token, K8 and V8 have the scale sk, and a query row has sq. The cache holds the rope part of a
key over sk, so a score is sq sk (q8 k8 + (q_rope / sq) (k_rope / sk)), a sum in one accumulator. A
*weight* is a probability times sk, in e4m3. The running maximum is that of the weights, with sk
rounded down to a power of two: weights then fit e4m3, however the scales differ.

The sums of an 8-bit wgmma have 13 bits (`FLUSH_PAIRS`), so an output is moved to float32 now and
then: to the partial's place in memory, each thread its own numbers.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.columns import by_row, own_row
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    KV_BLOCK,
    LATENT,
    ROWS,
    SCORE_FLOOR,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    normaliser,
    raise_max,
    row_sum,
    thread_max,
    two_rows,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import release, sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.merge import record_partial
from mla_var3.kernel.cute_python.mla.latent.ops import final_lse
from mla_var3.kernel.cute_python.mla.latent.producer import WARPGROUP_BARRIERS, Barrier, arrive
from mla_var3.kernel.cute_python.mla.latent.rows64 import mask
from mla_var3.kernel.cute_python.mla.latent.scheduler import (
    first_hidden,
    needs_mask,
    partial_slot,
    row_begin,
    row_limit,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import STAGES, empty, full
from mla_var3.op.mla.window.quantise import E4M3_MAX

HALF = LATENT // 2
"""Output columns of a warpgroup."""
WEIGHT_BITS = 6.0
"""A weight at the running maximum is 2**6 or up to twice that: small weights stay above e4m3's
least number, 2**-9."""
RISE_BITS = 2.75
"""A weight 2**2.75 above the running maximum raises it: 2**8.75 = 430 is the last that rounds to
less than 448, e4m3's largest number. With scales per token the maximum is up to 1 bit too low."""
FLUSH_PAIRS = 32
"""Pairs of KV blocks, 4096 tokens, after which an output moves to float32."""
TOKENS = (0, 1, 8, 9)
"""Tokens of a word of values or weights, for the first of four neighbouring threads; the others
have those 2, 4 and 6 behind."""
TILE_BYTES = KV_BLOCK * 128
"""Bytes of a column tile of a KV block or query tile: 64 rows of 128 columns."""


@dataclass(frozen=True)
class Queries:
    """Query rows in memory.

    Attributes:
        latent, rope: pointers to row 0.
        latent_stride, rope_stride: between heads of a query token.
        latent_token_stride, rope_token_stride: between query tokens.
        heads: query heads.
        dtype: element type.
    """

    latent: Any
    rope: Any
    latent_stride: Any
    rope_stride: Any
    latent_token_stride: Any
    rope_token_stride: Any
    heads: Any
    dtype: Any


@dataclass(frozen=True)
class Exchange:
    """Shared memory of the consumers.

    Attributes:
        q: [64, 512] e4m3 and its pointer `q_bytes`.
        q_rope: [64, 64] in the type of the cache's rope part, and its pointer `q_rope_bytes`.
        p: [columns, 64, stage] e4m3 weights and their words `p_words`.
        q_scale: [64] scales of the query rows.
        row_max: [64] running maximum.
        scales: [64, warpgroup] factors by which the maximum of its last block rescales.
        risen: [warpgroup] number of its last block in which a maximum rose.
        row_sum: [64, warpgroup] sums of probabilities.
        tops, carried: [64, warpgroup] maxima of now and of the last flush.
    """

    q: Any
    q_bytes: Any
    q_rope: Any
    q_rope_bytes: Any
    p: Any
    p_words: Any
    q_scale: Any
    row_max: Any
    scales: Any
    risen: Any
    row_sum: Any
    tops: Any
    carried: Any


@dataclass(frozen=True)
class Mmas:
    """Scores, their rope part and values."""

    qk: Any
    rope: Any
    pv: Any


@dataclass(frozen=True)
class Fragments:
    """Operands and accumulators of a thread.

    Attributes:
        q, q_rope, keys, rope, p: in shared memory.
        acc_s: scores, and as [row of this thread, (column of a pair, group of 8 columns)] `s`.
        acc_o: output, and by query row `o`.
    """

    q: Any
    q_rope: Any
    keys: Any
    rope: Any
    p: Any
    acc_s: Any
    s: Any
    acc_o: Any
    o: Any


@dataclass(frozen=True)
class State:
    """Numbers of a thread, per row of its scores.

    Attributes:
        sums: sums of its probabilities.
        scale: factor by which the last maximum rescales.
        top: running maximum.
        factors: from scores to powers of two.
    """

    sums: Any
    scale: Any
    top: Any
    factors: Any


def values_tensor() -> cute.Tensor:
    """Registers for this warpgroup's half of V^T of a KV block: operand A, (byte, M tile, k)."""
    layout = cute.make_layout(((4, 2, 2), HALF // 64, 2), stride=((1, 4, 8), 16, 64))
    return cute.make_rmem_tensor(layout, Float8E4M3FN)


@cute.jit
def consume(
    mmas: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    keys_bytes: cute.Pointer,
    barriers: cute.Pointer,
    queries: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    cache_scale: Float32,
    scale_log2e: Float32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others.

    Args:
        mmas: `Mmas`.
        blocks: `SharedBlocks`.
        keys_bytes: its keys.
        barriers: mbarriers.
        queries: `Queries`.
        exchange: `Exchange`.
        outputs: `latent.ops.Outputs`.
        cache_scale: the scale of the whole cache; 1 with scales per token.
        scale_log2e: softmax scale times log2 e.
        scheduler: the CTA's work tiles.
        columns: query rows on the N side of the second product.
    """
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4
    per_token = blocks.scales is not None

    thr_qk, thr_r, thr_pv = (mma.get_slice(t) for mma in (mmas.qk, mmas.rope, mmas.pv))
    acc_s = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, KV_BLOCK)), Float32)
    acc_o = cute.make_rmem_tensor(thr_pv.partition_shape_C((HALF, columns)), Float32)
    work = Fragments(
        mmas.qk.make_fragment_A(thr_qk.partition_A(exchange.q)),
        mmas.rope.make_fragment_A(thr_r.partition_A(exchange.q_rope)),
        mmas.qk.make_fragment_B(thr_qk.partition_B(blocks.keys)),
        mmas.rope.make_fragment_B(thr_r.partition_B(blocks.rope)),
        mmas.pv.make_fragment_B(thr_pv.partition_B(exchange.p)),
        acc_s, two_rows(acc_s, KV_BLOCK), acc_o, by_row(acc_o, columns, HALF // 64),
    )  # fmt: skip
    values = values_tensor()
    state = State(*(cute.make_rmem_tensor(2, Float32) for _ in range(4)))
    # A lane reads row `lane` of 32 tokens. The 16 bytes of a warp within 128 are swizzled by the
    # row; the odd M tiles of a column tile lie 64 bytes further.
    first = keys_bytes.toint() + group * (2 * TILE_BYTES)
    places = (first + places_offset(t), first + (places_offset(t) ^ 64))

    step = Step(
        mmas, work, values, state, exchange, blocks.scales, places, barriers, scheduler, columns
    )
    tile = scheduler.first_tile()
    base = Int32(0)
    while tile.valid:
        load_queries(queries, exchange, tile, thread, per_token)
        acc_o.fill(0.0)
        state.sums.fill(0.0)
        state.top.fill(SCORE_FLOOR)
        for i in cutlass.range_constexpr(2):
            state.factors[i] = scale_log2e * cache_scale * exchange.q_scale[row0 + 8 * i]
        lowest = first_hidden(tile, scheduler)
        stored = cutlass.min(tile.length, tile.last * KV_BLOCK)
        stage = cute.arch.make_warp_uniform((base + group) % STAGES)
        cute.arch.mbarrier_wait(full(barriers, stage), (base + group) // STAGES % 2)
        compute_scores(mmas, work, stage)
        warpgroup.wait_group(0)
        segments = (tile.pairs + (FLUSH_PAIRS - 1)) // FLUSH_PAIRS
        for segment in cutlass.range(segments, unroll=1):
            begin = segment * FLUSH_PAIRS
            end = cutlass.min(begin + FLUSH_PAIRS, tile.pairs)
            if group == 0:
                for pair in cutlass.range(begin, end, unroll=1):
                    take_even(step, tile, 2 * pair, base, lowest, stored, t)
            else:
                for pair in cutlass.range(begin, end, unroll=1):
                    take_odd(step, tile, 2 * pair + 1, base, lowest, stored, t)
            if segment < segments - 1:
                flush(work.o, state, exchange, outputs, tile, segment, t, group, scheduler, columns)
        base += 2 * tile.pairs
        finish(
            work.o, state, exchange, outputs, tile, segments - 1, cache_scale, t, group, scheduler,
            columns, queries.dtype,
        )  # fmt: skip
        tile = scheduler.next_tile(tile)


@dataclass(frozen=True)
class Step:
    """What a step of the consumers works on: see `consume`.

    Attributes:
        mmas, work, values, state, exchange: `Mmas`, `Fragments`, `values_tensor`, `State`,
            `Exchange`.
        scales: of the tokens in all stages, or None.
        places: where this lane reads values.
        barriers: mbarriers.
        scheduler: the CTA's work tiles.
        columns: query rows on the N side.
    """

    mmas: Any
    work: Any
    values: Any
    state: Any
    exchange: Any
    scales: Any
    places: Any
    barriers: Any
    scheduler: Any
    columns: Any


@cute.jit
def take_even(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    block: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
):
    """Warpgroup 0 on a pair of blocks: weights of the even one, values of both.

    The scores of its next block are computed while the other warpgroup computes its weights.

    Args:
        step: `Step`.
        tile: the work tile.
        block: the even block, counted within the tile; its scores exist.
        base: blocks of the tiles before.
        lowest: the first token that some row may not see.
        stored: the first token that is in no block of the tile.
        t: this thread.
    """
    work, exchange, values, barriers = step.work, step.exchange, step.values, step.barriers
    lane = t % 32
    number = base + block
    stage = cute.arch.make_warp_uniform(number % STAGES)
    token = (tile.first + block) * KV_BLOCK
    compute_weights(step, 0, stage, token, number, lowest, stored, tile, t)
    cute.arch.fence_view_async_shared()
    arrive(Barrier.P_EVEN, False)
    load_values(values, step.places, stage, stored - token, t, 0)
    wait_next(step, tile, block, number, stage)
    sync_warpgroup(Barrier.WARPGROUP_0)
    rescale_output(work.o, exchange, 0, number, lane, step.columns)
    add_values(step.mmas.pv, work, values, stage)
    # Not before its products are issued: `ldmatrix` may still be reading then.
    release(empty(barriers, stage), lane)
    compute_scores(step.mmas, work, stage ^ 2)
    warpgroup.wait_group(1)
    cute.arch.barrier(barrier_id=Barrier.P_ODD, number_of_threads=CONSUMERS)
    adopt_max(step.state, exchange, 1, number + 1, t)
    rescale_output(work.o, exchange, 1, number + 1, lane, step.columns)
    load_values(values, step.places, stage + 1, stored - token - KV_BLOCK, t, 0)
    add_values(step.mmas.pv, work, values, stage + 1)
    release(empty(barriers, stage + 1), lane)
    warpgroup.wait_group(0)


@cute.jit
def take_odd(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    block: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
):
    """Warpgroup 1 on a pair of blocks: values of the even one while it computes the odd weights.

    Args: see `take_even`; `block` is the odd block.
    """
    work, exchange, values, barriers = step.work, step.exchange, step.values, step.barriers
    lane = t % 32
    number = base + block
    stage = cute.arch.make_warp_uniform(number % STAGES)
    token = (tile.first + block) * KV_BLOCK
    cute.arch.mbarrier_wait(full(barriers, stage - 1), number // STAGES % 2)
    load_values(values, step.places, stage - 1, stored - token + KV_BLOCK, t, 1)
    cute.arch.barrier(barrier_id=Barrier.P_EVEN, number_of_threads=CONSUMERS)
    adopt_max(step.state, exchange, 0, number - 1, t)
    rescale_output(work.o, exchange, 0, number - 1, lane, step.columns)
    add_values(step.mmas.pv, work, values, stage - 1)
    release(empty(barriers, stage - 1), lane)
    compute_weights(step, 1, stage, token, number, lowest, stored, tile, t)
    cute.arch.fence_view_async_shared()
    arrive(Barrier.P_ODD, False)
    wait_next(step, tile, block, number, stage)
    compute_scores(step.mmas, work, stage ^ 2)
    warpgroup.wait_group(1)
    sync_warpgroup(Barrier.WARPGROUP_1)
    rescale_output(work.o, exchange, 1, number, lane, step.columns)
    load_values(values, step.places, stage, stored - token, t, 1)
    add_values(step.mmas.pv, work, values, stage)
    release(empty(barriers, stage), lane)
    warpgroup.wait_group(0)


@cute.jit
def wait_next(
    step: cutlass.Constexpr, tile: cutlass.Constexpr, block: Int32, number: Int32, stage: Int32
):
    """Wait for this warpgroup's next block.

    Behind a tile's last pair there is none. Scores are computed all the same, from whatever is
    there, and not used: products under a branch would be serialised.
    """
    if block + 2 < 2 * tile.pairs:
        cute.arch.mbarrier_wait(full(step.barriers, stage ^ 2), (number + 2) // STAGES % 2)


# --- queries --------------------------------------------------------------------------------------


@cute.jit
def load_queries(
    queries: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    thread: Int32,
    per_token: cutlass.Constexpr,
):
    """Query rows into shared memory, as e4m3 numbers with a scale each; zeros for absent rows.

    A warp takes a row at a time, a lane 16 latent columns and 2 of the rope part. The rope part is
    divided by the scale too; where it is e4m3 the scale covers it.
    """
    lane = thread % 32
    warp = thread // 32
    dtype = queries.dtype
    rope_type = exchange.q_rope.element_type
    # No warp may still read the last tile's queries, nor its sums.
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)
    for first in cutlass.range_constexpr(0, ROWS // CONSUMER_WARPS, 2):
        latent = cute.make_rmem_tensor((16, 2), dtype)
        rope = cute.make_rmem_tensor((2, 2), dtype)
        latent.fill(0.0)
        rope.fill(0.0)
        for i in cutlass.range_constexpr(2):
            row = warp * (ROWS // CONSUMER_WARPS) + first + i
            if tile.row + row < tile.rows:
                at = tile.base + tile.row + row
                token, head = Int64(at // queries.heads), at % queries.heads
                start = token * queries.latent_token_stride + head * queries.latent_stride
                place = (queries.latent + (start + lane * 16)).align(16)
                cute.autovec_copy(cute.make_tensor(place, 16), latent[None, i])
                start = token * queries.rope_token_stride + head * queries.rope_stride
                place = (queries.rope + (start + lane * 2)).align(4)
                cute.autovec_copy(cute.make_tensor(place, 2), rope[None, i])
        for i in cutlass.range_constexpr(2):
            row = warp * (ROWS // CONSUMER_WARPS) + first + i
            wide, wide_rope = latent[None, i].load().to(Float32), rope[None, i].load().to(Float32)
            peak = largest(wide)
            if const_expr(not per_token):
                peak = cute.arch.fmax(peak, largest(wide_rope))
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_bfly(peak, offset=1 << step)
                peak = cute.arch.fmax(peak, other)
            scale = Float32(1.0)
            if peak > 0.0:
                scale = cute.arch.fmax(peak * (1.0 / E4M3_MAX), Float32(2.0**-120))
            inverse = 1.0 / scale
            narrow = cute.make_rmem_tensor(16, Float8E4M3FN)
            narrow.store((wide * inverse).to(Float8E4M3FN))
            chunk = ((lane % 8) ^ (row % 8)) * 16
            store_bytes(narrow, exchange.q_bytes, (lane // 8) * TILE_BYTES + row * 128 + chunk)
            part = cute.make_rmem_tensor(2, rope_type)
            part.store((wide_rope * inverse).to(rope_type))
            if const_expr(per_token):
                place = row * 128 + ((lane // 4) ^ (row % 8)) * 16 + (lane % 4) * 4
            else:
                place = row * 64 + ((lane // 8) ^ (row % 8 // 2)) * 16 + (lane % 8) * 2
            store_bytes(part, exchange.q_rope_bytes, place)
            if lane == 0:
                exchange.q_scale[row] = scale
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=Barrier.CONSUMERS, number_of_threads=CONSUMERS)


def largest(values: Any) -> Float32:
    """The largest magnitude of some numbers in registers."""
    high = values.reduce(cute.ReductionOp.MAX, Float32(0.0), 0)
    low = values.reduce(cute.ReductionOp.MIN, Float32(0.0), 0)
    return cute.arch.fmax(high, -low)


def store_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Store registers at a byte offset in shared memory, in one go."""
    width = cute.size(values) * values.element_type.width // 8
    place = (cute.recast_ptr(base, dtype=cutlass.Uint8) + offset).align(width)
    target = cute.make_tensor(
        cute.recast_ptr(place, dtype=values.element_type), cute.make_layout(cute.size(values))
    )
    cute.autovec_copy(values, target)


# --- products -------------------------------------------------------------------------------------


@cute.jit
def compute_scores(
    mmas: cutlass.Constexpr,
    work: cutlass.Constexpr,
    stage: Int32,
):
    """Issue the scores of the KV block of a stage; does not wait for them."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mmas.qk.op)
    for k in cutlass.range_constexpr(cute.size(work.q, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, k > 0)
        cute.gemm(
            atom, work.acc_s, work.q[(None, None, k)], work.keys[(None, None, k, stage)],
            work.acc_s,
        )  # fmt: skip
    rope_atom = cute.make_mma_atom(mmas.rope.op)
    rope_atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(work.q_rope, mode=[2])):
        cute.gemm(
            rope_atom, work.acc_s, work.q_rope[(None, None, k)], work.rope[(None, None, k, stage)],
            work.acc_s,
        )  # fmt: skip
    warpgroup.commit_group()


def places_offset(t: Any) -> Any:
    """Where a thread reads an even M tile, from the first byte of its warpgroup's columns on."""
    return t % 32 * 128 + ((t // 32) ^ (t % 8)) * 16


@cute.jit
def load_values(
    values: cute.Tensor,
    places: cutlass.Constexpr,
    stage: Int32,
    valid: Int32,
    t: Int32,
    group: cutlass.Constexpr,
):
    """This warpgroup's half of V^T of a KV block into the registers of an operand A.

    `ldmatrix` with a transposition gives a thread two columns of two tokens; two such words are two
    words of four tokens, one for each column.

    Args:
        values: registers, see `values_tensor`.
        places: addresses that this lane reads, of even and odd M tiles.
        stage: the block's stage.
        valid: tokens of the block that exist.
        t, group: this thread and its warpgroup.
    """
    if valid < KV_BLOCK:
        clear_values(places, stage, valid, t, group)
    words = cute.recast_tensor(values, Int32)
    for k in cutlass.range_constexpr(2):
        for m in cutlass.range_constexpr(HALF // 64):
            at = places[m % 2] + (stage * (4 * TILE_BYTES) + (m // 2) * TILE_BYTES + k * 4096)
            found = cute.arch.inline_ptx(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"
                " { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[at],
            )
            for half in cutlass.range_constexpr(2):
                low, high = found[2 * half], found[2 * half + 1]
                words[(0, 0, half), m, k] = Int32(cute.arch.prmt(low, high, Int32(0x6420)))
                words[(0, 1, half), m, k] = Int32(cute.arch.prmt(low, high, Int32(0x7531)))


@cute.jit
def clear_values(
    places: cutlass.Constexpr, stage: Int32, valid: Int32, t: Int32, group: cutlass.Constexpr
):
    """Zero this warpgroup's half of the tokens behind the first `valid`: 0 * NaN is NaN.

    The keys are in the same place; the scores of these tokens are hidden, whatever they are.
    """
    base = places[0] - places_offset(t) + stage * (4 * TILE_BYTES)
    for i in cutlass.range(cutlass.max(valid, 0) * 16 + t, KV_BLOCK * 16, WARPGROUP, unroll=1):
        at = base + i // 16 * 128 + i % 16 // 8 * TILE_BYTES + i % 8 * 16
        cute.arch.inline_ptx(
            "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [{$r0}], {z, z, z, z}; }",
            read_only_args=[at],
        )
    sync_warpgroup(WARPGROUP_BARRIERS[group])


@cute.jit
def add_values(mma: cute.TiledMma, work: cutlass.Constexpr, values: cute.Tensor, stage: Int32):
    """Issue O^T += V^T W^T for the weights of a stage; does not wait."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(2):
        cute.gemm(
            atom, work.acc_o, values[(None, None, k)], work.p[(None, None, k, stage)], work.acc_o
        )
    warpgroup.commit_group()


# --- softmax --------------------------------------------------------------------------------------


@cute.jit
def token_scales(scales: cute.Tensor, stage: Int32, j: cutlass.Constexpr, lane: Int32):
    """The scales of this thread's two tokens of group j of 8."""
    two = cute.make_rmem_tensor(2, Float32)
    place = cute.local_tile(scales[(None, stage)], (2,), (j * 4 + lane % 4,))
    cute.autovec_copy(place, two)
    return two


@cute.jit
def clear_scales(scales: cute.Tensor, stage: Int32, valid: Int32, t: Int32, group: Int32):
    """Set the scales behind the first `valid` to 1: they may be NaN. A warpgroup calls it."""
    if t >= valid and t < KV_BLOCK:
        scales[t, stage] = Float32(1.0)
    sync_warpgroup(Barrier.WARPGROUP_0 + group)


@cute.jit
def compute_weights(
    step: cutlass.Constexpr,
    group: cutlass.Constexpr,
    stage: Int32,
    token: Int32,
    number: Int32,
    lowest: Int32,
    stored: Int32,
    tile: cutlass.Constexpr,
    t: Int32,
):
    """Scores of a KV block to weights in shared memory, with the maximum of both warpgroups.

    The maximum of a row is not computed as long as no weight saturates: the weights are computed
    with the maximum of the blocks before, and once more in the warps where one saturated.

    Args:
        step: `Step`.
        group: the warpgroup.
        stage: the block's stage, and slot of its weights.
        token: the block's first token.
        number: number of the block in the CTA.
        lowest, stored: see `take_even`.
        tile: the work tile.
        t: this thread.
    """
    state, exchange, scales, s = step.state, step.exchange, step.scales, step.work.s
    lane = t % 32
    row0 = (t // 32) * 16 + lane // 4
    if const_expr(scales is not None):
        if token + KV_BLOCK > stored:
            clear_scales(scales, stage, stored - token, t, group)
    if needs_mask(token, lowest, tile, step.scheduler):
        limits, begins = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
        for r in cutlass.range_constexpr(2):
            limits[r] = row_limit(tile, row0 + 8 * r, step.scheduler)
            if const_expr(step.scheduler.window is not None):
                begins[r] = row_begin(tile, row0 + 8 * r, step.scheduler)
        mask(s, token, limits, begins, lane, row0, tile, step.scheduler)
    words = cute.make_rmem_tensor((KV_BLOCK // 16, 2), Int32)
    added = cute.make_rmem_tensor(2, Float32)
    weigh(s, state.top, state.factors, scales, stage, words, added, lane)
    state.scale.fill(1.0)
    if cute.arch.vote_ballot_sync(any_saturated(words)) != 0:
        factors, best = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            factors[r] = opaque(state.factors[r])
        hidden_lane = opaque(lane)
        highest_exponents(s, best, factors, scales, stage, hidden_lane)
        margin = RISE_BITS - (1.0 if const_expr(scales is not None) else 0.0)
        raise_max(best, state.top, state.scale, state.sums, Float32(1.0), margin)
        weigh(s, state.top, factors, scales, stage, words, added, hidden_lane)
        if lane % 4 == 0:
            for r in cutlass.range_constexpr(2):
                exchange.row_max[row0 + 8 * r] = state.top[r]
        if lane == 0:
            exchange.risen[group] = number
    if lane % 4 == 0:
        for r in cutlass.range_constexpr(2):
            exchange.scales[row0 + 8 * r, group] = state.scale[r]
    for r in cutlass.range_constexpr(2):
        state.sums[r] = state.sums[r] + added[r]
        row = row0 + 8 * r
        for g in cutlass.range_constexpr(KV_BLOCK // 16):
            place = stage * (step.columns * 16) + row * 16 + (g ^ (lane // 8)) * 4 + lane % 4
            if const_expr(step.columns == ROWS):
                exchange.p_words[place] = words[g, r]
            else:
                if row < step.columns:
                    exchange.p_words[place] = words[g, r]


def opaque(value: Any) -> Any:
    """The same number, of which the compiler does not know that it is the same.

    The rare second computation of the weights would otherwise share products with the first, which
    keeps them in registers.
    """
    kind = type(value)
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[kind], read_only_args=[value]
    )


@cute.jit
def weigh(
    s: cute.Tensor,
    top: cute.Tensor,
    row_factors: cute.Tensor,
    scales: cutlass.Constexpr,
    stage: Int32,
    words: cute.Tensor,
    added: cute.Tensor,
    lane: Int32,
):
    """Weights of this thread's scores in the order `TOKENS`, relative to the running maxima.

    Args:
        s: scores of two rows, over the scales of their tokens and of their row.
        top, row_factors: see `State`.
        scales: of the tokens, or None.
        stage: the block's stage.
        words: a word of weights per 16 tokens and row, written.
        added: sums of the probabilities, written.
        lane: this thread's lane.
    """
    added.fill(0.0)
    bases = (WEIGHT_BITS - top[0], WEIGHT_BITS - top[1])
    for g in cutlass.range_constexpr(KV_BLOCK // 16):
        weights = cute.make_rmem_tensor((4, 2), Float32)
        for half in cutlass.range_constexpr(2):
            j = 2 * g + half
            factors = (Float32(1.0), Float32(1.0))
            if const_expr(scales is not None):
                two = token_scales(scales, stage, j, lane)
                factors = (two[0], two[1])
            for r in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    score = s[r, (e, j)]
                    if const_expr(scales is not None):
                        score = score * factors[e]
                    p = cute.math.exp2(score * row_factors[r] + bases[r], fastmath=True)
                    added[r] = added[r] + p
                    if const_expr(scales is not None):
                        p = p * factors[e]
                    weights[2 * half + e, r] = p
        narrow = cute.make_rmem_tensor((4, 2), Float8E4M3FN)
        narrow.store(weights.load().to(Float8E4M3FN))
        packed = cute.recast_tensor(narrow, Int32)
        for r in cutlass.range_constexpr(2):
            words[g, r] = packed[0, r]


@cute.jit
def any_saturated(words: cute.Tensor) -> Boolean:
    """Whether a weight is e4m3's largest number, 0x7e, or NaN, 0x7f; none is negative."""
    found = Int32(0)
    for i in cutlass.range_constexpr(cute.size(words)):
        found |= (words[i] & 0x7F7F7F7F) + 0x02020202
    return (found & Int32(-0x7F7F7F80)) != 0


@cute.jit
def floor_log2(number: Float32) -> Float32:
    """The exponent of a positive float, from its bits and without a conversion."""
    field = (number.bitcast(Int32) >> 23) | 0x4B000000
    return field.bitcast(Float32) - Float32(2.0**23 + 127)


@cute.jit
def highest_exponents(
    s: cute.Tensor,
    best: cute.Tensor,
    factors: cute.Tensor,
    scales: cutlass.Constexpr,
    stage: Int32,
    lane: Int32,
):
    """The highest exponent of a weight of each of this thread's two rows, among its own tokens."""
    if const_expr(scales is None):
        thread_max(s, best)
        for r in cutlass.range_constexpr(2):
            best[r] = best[r] * factors[r]
    else:
        best.fill(-Float32.inf)
        for j in cutlass.range_constexpr(KV_BLOCK // 8):
            two = token_scales(scales, stage, j, lane)
            for e in cutlass.range_constexpr(2):
                added = floor_log2(two[e])
                for r in cutlass.range_constexpr(2):
                    exponent = s[r, (e, j)] * two[e] * factors[r] + added
                    best[r] = cute.arch.fmax(best[r], exponent)


@cute.jit
def adopt_max(
    state: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    group: cutlass.Constexpr,
    number: Int32,
    t: Int32,
):
    """Adopt the maxima of a block of warpgroup `group`, the other one, if one has risen."""
    row0 = (t // 32) * 16 + t % 32 // 4
    if exchange.risen[group] == number:
        for r in cutlass.range_constexpr(2):
            state.top[r] = exchange.row_max[row0 + 8 * r]
            state.sums[r] = state.sums[r] * exchange.scales[row0 + 8 * r, group]


@cute.jit
def rescale_output(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    group: cutlass.Constexpr,
    number: Int32,
    lane: Int32,
    columns: cutlass.Constexpr,
):
    """Multiply the output by the scales of a block of a warpgroup, if a maximum has risen in it."""
    if exchange.risen[group] == number:
        for j in cutlass.range_constexpr(columns // 8):
            for e in cutlass.range_constexpr(2):
                scale = exchange.scales[own_row(j, e, lane), group]
                o[(e, j), None].store(o[(e, j), None].load() * scale)


# --- results --------------------------------------------------------------------------------------


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
    if tile.split != 0 and group == 0 and t == 0:
        record_partial(outputs.merges, slot, tile)
