"""The score warpgroup of the 8-bit latent kernel: scores to weights, for both value warpgroups.

It rounds the query rows of a tile (`queries.py`) and computes the scores of all KV blocks, with 64
query rows on the M side,

    S [64 rows, 64 tokens] = Q8 [64, 512] K8^T (+ rope)

and owns the softmax: running maxima, sums, weights. It is up to three blocks ahead of the values.

Per token, K8 and V8 have the scale sk, and a query row has sq. The cache holds the rope part of a
key over sk, so a score is sq sk (q8 k8 + (q_rope / sq) (k_rope / sk)), a sum in one accumulator.
`weights.py` says what a weight is.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    ROWS,
    SCORE_FLOOR,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import row_sum, two_rows
from mla_var3.kernel.cute_python.mla.hopper.warps import keep_order, release
from mla_var3.kernel.cute_python.mla.latent.mask import first_hidden, needs_mask
from mla_var3.kernel.cute_python.mla.latent_fp8.first_token import is_apart, set_apart
from mla_var3.kernel.cute_python.mla.latent_fp8.means import walk_parts, weigh_means
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    full,
    has_means,
    phase_of,
    query_stages,
    stage_of,
    weighed,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.queries import (
    clear_queries,
    held_tensor,
    hold_queries,
    round_queries,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    COMPUTING,
    MOST_RISE,
    WEIGHT_BITS,
    Handover,
    ScoreFragments,
    ScoreState,
    ScoreStep,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.weights import (
    hide_scores,
    keep_maxima,
    load_scales,
    opaque,
    own_rows,
    weigh,
)

LAST_SCORES = 1
"""Products of the next scores that need not be done when weights are handed over. b=32 s=16 with 8
products held: 495 us with 1, 501 with 4; with 10 held 497 with 2, 500 with 4, 499 with 7
(docs/results/2026-11-19-nvidia-h200-fp8-held-rows.json)."""


@cute.jit
def compute_all_scores(
    mmas: cutlass.Constexpr,
    blocks: cutlass.Constexpr,
    barriers: cute.Pointer,
    exchange: cutlass.Constexpr,
    means: cutlass.Constexpr,
    first_token: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    cache_scale: Float32,
    scale_log2e: Float32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Weights of all work tiles of the CTA; the score warpgroup calls it.

    Args:
        mmas: `Mmas`.
        blocks: `SharedBlocks`.
        scale_log2e: softmax scale times log2 e.
        dtype: element type of the queries.

    The others are those of `values.consume`.
    """
    thread, _, _ = cute.arch.thread_idx()
    t = thread % WARPGROUP
    if const_expr(columns < ROWS):
        # Else rows of a thread are found where all warps begin, and what the scheduler finds there
        # is spilled: 40 accesses to local memory with 16 rows and scales per token.
        t = opaque(t)
    thr_qk, thr_r = mmas.qk.get_slice(t), mmas.rope.get_slice(t)
    per_token = blocks.scales is not None
    acc = cute.make_rmem_tensor(thr_qk.partition_shape_C((ROWS, KV_BLOCK)), Float32)
    work = ScoreFragments(
        mmas.qk.make_fragment_A(thr_qk.partition_A(exchange.q)),
        mmas.rope.make_fragment_A(thr_r.partition_A(exchange.q_rope)),
        mmas.qk.make_fragment_B(thr_qk.partition_B(blocks.keys)),
        mmas.rope.make_fragment_B(thr_r.partition_B(blocks.rope)),
        held_tensor(columns, per_token, scheduler.clusters), acc, two_rows(acc, KV_BLOCK),
    )  # fmt: skip
    state = ScoreState(*(cute.make_rmem_tensor(2, Float32) for _ in range(4)))
    tokens = cute.make_rmem_tensor((2, KV_BLOCK // 8), Float32) if const_expr(per_token) else None
    # Opaque, so that the compiler keeps them: it would compute them again in every KV block.
    words_at = opaque(exchange.p_bytes.toint() + t // 32 * 256 + t % 32 * 4)
    rescales_at = opaque(exchange.scales.iterator.toint() + own_rows(t)[0] * 4)
    step = ScoreStep(
        mmas, work, state, exchange, means.removed, blocks.scales, tokens, barriers, scheduler,
        columns, words_at, rescales_at,
    )  # fmt: skip
    if const_expr(columns < ROWS):
        clear_queries(exchange, t, per_token)
    tile = scheduler.first_tile()
    base = Int32(0)
    phase = Int32(0)
    while tile.valid:
        q_scales = round_queries(blocks, exchange, barriers, base, t, columns, dtype)
        base += query_stages(columns)
        hold_queries(work.held, exchange.q_bytes, t)
        state.sums.fill(0.0)
        state.odd.fill(0.0)
        state.bases.fill(WEIGHT_BITS - SCORE_FLOOR)
        for i in cutlass.range_constexpr(2):
            state.factors[i] = scale_log2e * cache_scale * q_scales[i]
        stage = cute.arch.make_warp_uniform(stage_of(base))
        cute.arch.mbarrier_wait(full(barriers, stage), phase_of(base))
        issue_scores(mmas, work, stage)
        if const_expr(per_token):
            load_scales(step, stage, t % 32)
        lowest = first_hidden(tile, scheduler)
        apart = is_apart(tile, lowest, scheduler)
        stored = cutlass.min(tile.length, tile.last * KV_BLOCK)
        warpgroup.wait_group(0)
        cute.arch.barrier(barrier_id=Handover.TILE_BEGINS, number_of_threads=COMPUTING)
        publish([([Float32(0.0)] * 2, means.removed)], t)
        keep_maxima(step, stage)
        set_apart(step, first_token, outputs, blocks.keys_bytes, tile, apart, stage, t)
        walk_parts(
            tile, means, phase,
            lambda begin, end: weigh_part(step, tile, begin, end, base, lowest, stored, t),
            lambda pairs: weigh_means(step, means, pairs, t),
            lambda flushed: publish_flush(step, flushed, t),
        )  # fmt: skip
        publish_tile(step, t)
        base += 2 * tile.pairs
        if has_means(tile):
            phase ^= 1
        tile = scheduler.next_tile(tile)


@cute.jit
def publish_flush(step: cutlass.Constexpr, flushed: Int32, t: Int32):
    """Factors of an output that moves to memory, added to what is there if `flushed`.

    What is there is relative to the maxima of the first flush, and so is what is added. A row whose
    maximum has risen by more than `MOST_RISE` starts again: its factor is negative.
    """
    first = step.exchange.fall
    tops, factors, carried = (cute.make_rmem_tensor(2, Float32) for _ in range(3))
    for r in cutlass.range_constexpr(2):
        tops[r] = WEIGHT_BITS - step.state.bases[r]
        carried[r] = first[own_rows(t)[r]]
        rise = tops[r] - carried[r]
        factors[r] = Float32(-1.0)
        if flushed == 0 or rise > MOST_RISE:
            carried[r] = tops[r]
        else:
            factors[r] = cute.math.exp2(rise, fastmath=True)
    cute.arch.sync_warp()  # the threads of a row have read what is written now
    publish([(factors, step.exchange.flush), (carried, first)], t)
    cute.arch.barrier_arrive(barrier_id=Handover.FLUSH, number_of_threads=COMPUTING)


@cute.jit
def publish_tile(step: cutlass.Constexpr, t: Int32):
    """What the value warpgroups need of the rows when a tile ends."""
    state, exchange = step.state, step.exchange
    tops, fall = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
    for r in cutlass.range_constexpr(2):
        state.sums[r] = row_sum(state.sums[r])
        tops[r] = WEIGHT_BITS - state.bases[r]
        fall[r] = cute.math.exp2(exchange.fall[own_rows(t)[r]] - tops[r], fastmath=True)
    cute.arch.sync_warp()  # see `publish_flush`
    publish([(state.sums, exchange.row_sum), (tops, exchange.row_max), (fall, exchange.fall)], t)
    cute.arch.barrier_arrive(barrier_id=Handover.TILE, number_of_threads=COMPUTING)


def publish(numbers: list[tuple[Any, cute.Tensor]], t: Int32) -> None:
    """Numbers of the rows into shared memory; the four threads of a row have the same."""
    for own, shared in numbers:
        for r in range(2):
            shared[own_rows(t)[r]] = own[r]


@cute.jit
def weigh_part(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    begin: Int32,
    end: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
):
    """Weights of the pairs of KV blocks from `begin` to before `end`; else as `weigh_block`."""
    uniform = cute.arch.make_warp_uniform
    first = uniform(base + 2 * begin)
    ready = Boolean(False)
    masked = hides(step, tile, first, base, lowest)
    words_at = words_of(step, first)
    for number in cutlass.range(first, uniform(base + 2 * end), unroll=1):
        ready, masked, words_at = weigh_block(
            step, tile, number, base, lowest, stored, t, ready, masked, words_at
        )


@cute.jit
def weigh_block(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    number: Int32,
    base: Int32,
    lowest: Int32,
    stored: Int32,
    t: Int32,
    ready: Boolean,
    masked: Int32,
    words_at: Int32,
):
    """Weights of a KV block, whose scores exist, and the scores of the next one.

    Beside the products of the value warpgroups an instruction takes four cycles, beside those of
    the scores nothing waits for it: what can be known early is found there.

    The weights are handed over when these scores exist: the value warpgroups then use the tensor
    cores while the next weights are computed. Earlier, they would compete with the scores for them
    and leave them idle afterwards.

    Behind a tile's last block are the queries of the next one, or nothing. Scores are computed all
    the same and not used: products under a branch would be serialised.

    Args:
        step: `ScoreStep`.
        tile: the work tile.
        number: of the block's stage.
        base: of the stage of the tile's first block.
        lowest: the first token that some row may not see.
        stored: the first token that is in no block of the tile.
        t: this thread.
        ready: whether the next stage is known to be full.
        masked: see `hides`.
        words_at: see `words_of`.

    Returns:
        The last three for the next block.
    """
    barriers = step.barriers
    stage, following = stage_of(number), stage_of(number + 1)
    # The next stage has been released, and with it all products of the block in front of that one:
    # the slot of the weights is free.
    if not ready:
        cute.arch.mbarrier_wait(full(barriers, following), phase_of(number + 1))
    if masked != 0:
        token = (tile.first + number - base) * KV_BLOCK
        hide_scores(step, stage, token, stored, tile, t)
    weigh(step, stage, number, t, words_at)
    issue_scores(step.mmas, step.work, following)
    # While the scores are computed: what follows them waits for every instruction.
    after = number + 2
    ready = cute.arch.mbarrier_test_wait(full(barriers, stage_of(after)), phase_of(after))
    masked = hides(step, tile, number + 1, base, lowest)
    words_at = words_of(step, number + 1)
    keep_order((words_at | masked).bitcast(Float32))
    keep_maxima(step, following)
    if const_expr(step.scales is not None):
        load_scales(step, following, t % 32)
    warpgroup.wait_group(1)  # all but `LAST_SCORES`
    cute.arch.sync_warp()
    release(weighed(barriers, stage), t % 32)
    warpgroup.wait_group(0)
    return ready, masked, words_at


@cute.jit
def hides(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    number: Int32,
    base: Int32,
    lowest: Int32,
) -> Int32:
    """Whether a row does not see all of a KV block, by its number: not 0. Tokens may be missing."""
    token = (tile.first + number - base) * KV_BLOCK
    return opaque(Int32(needs_mask(token, lowest, tile, step.scheduler)))


def words_of(step: Any, number: Any) -> Any:
    """Where this thread's first weights of the KV block of a number go."""
    return opaque(step.words_at + stage_of(number) * (step.columns * 64))


@cute.jit
def issue_scores(mmas: cutlass.Constexpr, work: cutlass.Constexpr, stage: Int32):
    """Issue the scores of the KV block of a stage; does not wait."""
    latent_steps, rope_steps = (cute.size(q, mode=[2]) for q in (work.q, work.q_rope))
    held = 0 if work.held is None else cute.size(work.held, mode=[2])
    steps = [(work.held, work.keys, mmas.held, k) for k in range(held)]
    steps += [(work.q, work.keys, mmas.qk, k) for k in range(held, latent_steps)]
    steps += [(work.q_rope, work.rope, mmas.rope, k) for k in range(rope_steps)]
    warpgroup.fence()
    for i in cutlass.range_constexpr(len(steps)):
        queries, keys, mma, k = steps[i]
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, i > 0)
        cute.gemm(atom, work.acc, queries[(None, None, k)], keys[(None, None, k, stage)], work.acc)
        if const_expr(i == len(steps) - LAST_SCORES - 1):
            warpgroup.commit_group()
    warpgroup.commit_group()
