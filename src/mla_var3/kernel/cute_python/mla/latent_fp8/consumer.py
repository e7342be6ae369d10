"""Consumer warpgroups of the 8-bit latent kernel.

Of every pair of KV blocks each warpgroup computes the scores of one, with 64 query rows on the M
side. Each accumulates half of the output columns, and here the columns are on the M side and the
query rows on the N side:

    S [64 rows, 64 tokens] = Q8 [64, 512] K8^T (+ rope)     O^T [256, rows] += V8^T [256, 64] W8^T

An 8-bit wgmma takes its operands from shared memory with the contracted index innermost only, which
for V^T is the token. As operand A it may come from registers instead: `ldmatrix` transposes pairs
of bytes on the way there, and a byte permutation does the rest. So V is never written back to
shared memory. The order of 16 tokens that results, 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, is the
one in which four neighbouring threads have their scores, so weights need no exchange. The columns
of an M tile are in pairs.

Per token, K8 and V8 have the scale sk, and a query row has sq. The cache holds the rope part of a
key over sk, so a score is sq sk (q8 k8 + (q_rope / sq) (k_rope / sk)), a sum in one accumulator. A
*weight* is a probability times sk, in e4m3. The running maximum is that of the weights, with sk
rounded down to a power of two: weights then fit e4m3, however the scales differ.

The sums of an 8-bit wgmma have 13 bits (`FLUSH_PAIRS`), so an output is moved to float32 now and
then: to the partial's place in memory, each thread its own numbers, which it reads at the end only.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.columns import by_row
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMERS,
    KV_BLOCK,
    ROWS,
    SCORE_FLOOR,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    two_rows,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import release, sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.mask import first_hidden
from mla_var3.kernel.cute_python.mla.latent.producer import WARPGROUP_BARRIERS, Barrier, arrive
from mla_var3.kernel.cute_python.mla.latent_fp8.first_token import is_apart, set_apart
from mla_var3.kernel.cute_python.mla.latent_fp8.means import (
    begin_tile,
    part_end,
    remove_means,
    wait_means,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import STAGES, empty, full, has_means
from mla_var3.kernel.cute_python.mla.latent_fp8.queries import load_queries
from mla_var3.kernel.cute_python.mla.latent_fp8.results import finish, flush
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    FLUSH_PAIRS,
    HALF,
    TILE_BYTES,
    Fragments,
    State,
    Step,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.weights import (
    adopt_max,
    compute_weights,
    rescale_output,
)


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
    means: cutlass.Constexpr,
    first_token: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    cache_scale: Float32,
    scale_log2e: Float32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
    early: cutlass.Constexpr,
):
    """Warpgroup 0 owns the even KV blocks and the left half of the output, 1 the others.

    Args:
        mmas: `Mmas`.
        blocks: `SharedBlocks`.
        keys_bytes: its keys.
        barriers: mbarriers.
        queries: `Queries`.
        exchange: `Exchange`.
        means: `Means`.
        first_token: `FirstToken`.
        outputs: `latent.ops.Outputs`.
        cache_scale: the scale of the whole cache; 1 with scales per token.
        scale_log2e: softmax scale times log2 e.
        scheduler: the CTA's work tiles.
        columns: query rows on the N side of the second product.
        mailbox: `Mailbox` of a kernel with clusters, else None.
        early: as for `produce`.
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
        mmas.pv.make_fragment_B(thr_pv.partition_B(means.weights)),
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
        load_queries(queries, exchange, tile, thread, base == 0, early, per_token)
        begin_tile(means, t, group)
        acc_o.fill(0.0)
        state.sums.fill(0.0)
        state.top.fill(SCORE_FLOOR)
        for i in cutlass.range_constexpr(2):
            state.factors[i] = scale_log2e * cache_scale * exchange.q_scale[row0 + 8 * i]
        lowest = first_hidden(tile, scheduler)
        apart = is_apart(tile, lowest, scheduler)
        stored = cutlass.min(tile.length, tile.last * KV_BLOCK)
        stage = cute.arch.make_warp_uniform((base + group) % STAGES)
        cute.arch.mbarrier_wait(full(barriers, stage), (base + group) // STAGES % 2)
        compute_scores(mmas, work, stage)
        warpgroup.wait_group(0)
        if group == 0:
            set_apart(step, first_token, outputs, keys_bytes, tile, apart, stage, t)
        removing = Int32(has_means(tile))
        segments = (tile.pairs + (FLUSH_PAIRS - 1)) // FLUSH_PAIRS
        for segment in cutlass.range(segments, unroll=1):
            begin = segment * FLUSH_PAIRS
            last_pair = cutlass.min(begin + FLUSH_PAIRS, tile.pairs)
            while begin < last_pair:
                end = part_end(begin, last_pair, removing)
                if group == 0:
                    if const_expr(not per_token):
                        publish_even(step, tile, 2 * begin, base, lowest, stored, t)
                    for pair in cutlass.range(begin, end, unroll=1):
                        take_even(step, tile, 2 * pair, 2 * end, base, lowest, stored, t)
                else:
                    for pair in cutlass.range(begin, end, unroll=1):
                        take_odd(step, tile, 2 * pair + 1, base, lowest, stored, t)
                if end < last_pair:
                    if begin == 0:
                        removing = wait_means(means, group)
                    if removing != 0:
                        remove_means(step, means, base, end, t, group)
                begin = end
            if segment < segments - 1:
                flush(work.o, state, exchange, outputs, tile, segment, t, group, scheduler, columns)
        base += 2 * tile.pairs
        finish(
            work.o, state, exchange, means, first_token, removing, outputs, tile, segments - 1,
            cache_scale, t, group, scheduler, columns, queries.dtype, mailbox,
        )  # fmt: skip
        tile = scheduler.next_tile(tile)


@cute.jit
def publish_even(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    block: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
):
    """Warpgroup 0 computes the weights of an even block, whose scores exist, for both.

    Args: see `take_even`.
    """
    number = base + block
    stage = cute.arch.make_warp_uniform(number % STAGES)
    token = (tile.first + block) * KV_BLOCK
    compute_weights(step, 0, stage, token, number, lowest, stored, tile, t)
    arrive(Barrier.P_EVEN, False)


@cute.jit
def take_even(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    block: Int32,
    end: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
):
    """Warpgroup 0 on a pair of blocks: values of both, and the weights of an even one.

    The scores of its next block are computed while the other warpgroup computes its weights. With
    one scale for the cache, the weights of that block are computed here too, while the values of
    the odd one are added; with scales per token this takes more registers than there are.

    Args:
        step: `Step`.
        tile: the work tile.
        block: the even block, counted within the tile; its scores exist.
        end: the block behind the last one before the output moves to memory.
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
    ahead = step.scales is None
    if const_expr(not ahead):
        publish_even(step, tile, block, base, lowest, stored, t)
    load_values(values, step.places, stage, stored - token, t, 0)
    wait_next(step, tile, block, number, stage)
    sync_warpgroup(Barrier.WARPGROUP_0)
    cute.arch.fence_view_async_shared()
    rescale_output(work.o, exchange, 0, number, lane, step.columns)
    add_values(step.mmas.pv, work, values, stage)
    # Not before its products are issued: `ldmatrix` may still be reading then.
    release(empty(barriers, stage), lane)
    compute_scores(step.mmas, work, stage ^ 2)
    warpgroup.wait_group(1)
    cute.arch.barrier(barrier_id=Barrier.P_ODD, number_of_threads=CONSUMERS)
    cute.arch.fence_view_async_shared()
    adopt_max(step.state, exchange, 1, number + 1, t)
    rescale_output(work.o, exchange, 1, number + 1, lane, step.columns)
    load_values(values, step.places, stage + 1, stored - token - KV_BLOCK, t, 0)
    add_values(step.mmas.pv, work, values, stage + 1)
    release(empty(barriers, stage + 1), lane)
    if const_expr(ahead):
        warpgroup.wait_group(1)
        if block + 2 < end:
            publish_even(step, tile, block + 2, base, lowest, stored, t)
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
    cute.arch.fence_view_async_shared()
    adopt_max(step.state, exchange, 0, number - 1, t)
    rescale_output(work.o, exchange, 0, number - 1, lane, step.columns)
    add_values(step.mmas.pv, work, values, stage - 1)
    release(empty(barriers, stage - 1), lane)
    compute_weights(step, 1, stage, token, number, lowest, stored, tile, t)
    arrive(Barrier.P_ODD, False)
    wait_next(step, tile, block, number, stage)
    compute_scores(step.mmas, work, stage ^ 2)
    warpgroup.wait_group(1)
    sync_warpgroup(Barrier.WARPGROUP_1)
    cute.arch.fence_view_async_shared()
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
