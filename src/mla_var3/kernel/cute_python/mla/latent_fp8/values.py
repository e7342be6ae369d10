"""Value warpgroups of the 8-bit latent kernel: the output, and its way to memory.

Each of the two accumulates half of the output columns, which are on the M side. The query rows are
on the N side:

    O^T [256, rows] += V8^T [256, 64] W8^T

An 8-bit wgmma takes its operands from shared memory with the contracted index innermost only, which
for V^T is the token. As operand A it may come from registers instead: `ldmatrix` transposes pairs
of bytes on the way there, and a byte permutation does the rest. So V is never written back to
shared memory. The order of 16 tokens that results, 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, is the
one in which four neighbouring threads have their scores, so weights need no exchange. The columns
of an M tile are in pairs.

The weights come from the score warpgroup (`scores.py`). The sums of an 8-bit wgmma have 13 bits
(`FLUSH_PAIRS`), so an output is moved to float32 now and then: to the partial's place in memory,
each thread its own numbers, which it reads at the end only.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.columns import by_row
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, WARPGROUP
from mla_var3.kernel.cute_python.mla.hopper.warps import (
    fence_and_sync_warpgroup,
    lane_behind,
    release,
)
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent_fp8.means import (
    flushes,
    subtract_means,
    walk_parts,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    empty,
    full,
    has_means,
    phase_of,
    query_stages,
    receive_tile,
    stage_of,
    weighed,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.queries import load_matrices
from mla_var3.kernel.cute_python.mla.latent_fp8.results import finish, flush
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    COMPUTING,
    HALF,
    TILE_BYTES,
    Handover,
    ValueFragments,
    ValueStep,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.weights import rescale_output


def values_tensor() -> cute.Tensor:
    """Registers for this warpgroup's half of V^T of a KV block: operand A, (byte, M tile, k)."""
    layout = cute.make_layout(((4, 2, 2), HALF // 64, 2), stride=((1, 4, 8), 16, 64))
    return cute.make_rmem_tensor(layout, Float8E4M3FN)


@cute.jit
def consume(
    mma: cute.TiledMma,
    keys_bytes: cute.Pointer,
    barriers: cute.Pointer,
    exchange: cutlass.Constexpr,
    means: cutlass.Constexpr,
    first_token: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    cache_scale: Float32,
    per_token: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
    tiles: cute.Tensor,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
):
    """Outputs of all work tiles of the CTA: warpgroup 0 has the left half of the columns.

    Args:
        mma: of the values.
        keys_bytes: the KV blocks in shared memory.
        barriers: mbarriers.
        exchange: `Exchange`.
        means: `Means`.
        first_token: `FirstToken`.
        outputs: `latent.ops.Outputs`.
        cache_scale: the scale of the whole cache; 1 with scales per token.
        per_token: whether there are scales per token.
        scheduler: what decides the CTA's work tiles.
        tiles: see `producer.send_tile`.
        columns: query rows on the N side.
        dtype: element type of the output.
        mailbox: `Mailbox` of a kernel with clusters, else None.
    """
    thread, _, _ = cute.arch.thread_idx()
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    t = thread % WARPGROUP
    thr_pv = mma.get_slice(t)
    acc = cute.make_rmem_tensor(thr_pv.partition_shape_C((HALF, columns)), Float32)
    work = ValueFragments(
        mma.make_fragment_B(thr_pv.partition_B(exchange.p)),
        mma.make_fragment_B(thr_pv.partition_B(means.weights)),
        values_tensor(), acc, by_row(acc, columns, HALF // 64),
    )  # fmt: skip
    # A lane reads row `lane` of 32 tokens. The 16 bytes of a warp within 128 are swizzled by the
    # row; the odd M tiles of a column tile lie 64 bytes further.
    first = keys_bytes.toint() + group * (2 * TILE_BYTES)
    places = (first + places_offset(t), first + (places_offset(t) ^ 64))
    step = ValueStep(mma, work, exchange, places, barriers, columns, per_token)
    tile = receive_tile(tiles, barriers, Int32(0))
    base = Int32(0)
    phase = Int32(0)
    while tile.valid:
        cute.arch.barrier_arrive(barrier_id=Handover.TILE_BEGINS, number_of_threads=COMPUTING)
        acc.fill(0.0)
        release_queries(barriers, base, lane_behind(t % 32, tile.rows), columns)
        base += query_stages(columns)
        stored = cutlass.min(tile.length, tile.last * KV_BLOCK)
        removing = walk_parts(
            tile, means, phase,
            lambda begin, end: add_part(step, tile, begin, end, base, stored, t, group),
            lambda pairs: subtract_means(step, means, t, group),
            lambda flushed: flush(work.o, exchange, outputs, t, group, scheduler, columns),
        )  # fmt: skip
        base += 2 * tile.pairs
        if has_means(tile):
            phase ^= 1
        finish(
            work.o, exchange, means, first_token, removing, outputs, tile, flushes(tile),
            cache_scale, t, group, scheduler, columns, dtype, mailbox,
        )  # fmt: skip
        tile = receive_tile(tiles, barriers, base)


def release_queries(barriers: Any, number: Any, lane: Any, columns: int) -> None:
    """Release the stages of a tile's queries once the score warpgroup has read them."""
    for i in range(query_stages(columns)):
        stage = stage_of(number + i)
        cute.arch.mbarrier_wait(weighed(barriers, stage), phase_of(number + i))
        release(empty(barriers, stage), lane)


@cute.jit
def add_part(
    step: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    begin: Int32,
    end: Int32,
    base: Int32,
    stored: Int32,
    t: Int32,
    group: Int32,
):
    """Add the values of the pairs of KV blocks from `begin` to before `end` times their weights.

    Args:
        step: `ValueStep`.
        tile: the work tile.
        begin, end: counted within the tile.
        base: number of the stage of the tile's first block.
        stored: the first token that is in no block of the tile.
        t, group: this thread and its warpgroup.
    """
    valid = stored - (tile.first + 2 * begin) * KV_BLOCK
    load_block(step, base + 2 * begin, valid, True, t, group)
    for block in cutlass.range(2 * begin, 2 * end, unroll=1):
        valid = stored - (tile.first + block) * KV_BLOCK
        add_block(step, base + block, valid, block + 1 < 2 * end, t, group)


@cute.jit
def load_block(
    step: cutlass.Constexpr, number: Int32, valid: Int32, exists: Boolean, t: Int32, group: Int32
):
    """This warpgroup's half of V^T of a KV block into registers, or anything if it does not exist.

    Args:
        step: `ValueStep`.
        number: of the block's stage.
        valid: tokens of the block that exist.
        exists: whether it is there.
        t, group: this thread and its warpgroup.
    """
    await_block(step, number, valid, exists, t, group)
    for k in cutlass.range_constexpr(2):
        load_values(step, number, k)


@cute.jit
def await_block(
    step: cutlass.Constexpr, number: Int32, valid: Int32, exists: Boolean, t: Int32, group: Int32
):
    """Wait for a KV block if it exists, and clear the values of tokens that do not."""
    stage = cute.arch.make_warp_uniform(stage_of(number))
    if exists:
        cute.arch.mbarrier_wait(full(step.barriers, stage), phase_of(number))
        if valid < KV_BLOCK:
            clear_values(step.places, stage, valid, t, group)


@cute.jit
def add_block(
    step: cutlass.Constexpr, number: Int32, valid: Int32, more: Boolean, t: Int32, group: Int32
):
    """Add the values of a KV block, which are in registers, times its weights, and load the next.

    Args:
        step, number, valid, t, group: see `load_block`.
        more: whether there is a next one.
    """
    work, exchange, barriers = step.work, step.exchange, step.barriers
    lane = t % 32
    stage = cute.arch.make_warp_uniform(stage_of(number))
    cute.arch.mbarrier_wait(weighed(barriers, stage), phase_of(number))
    cute.arch.fence_view_async_shared()
    rescale_output(work.o, exchange, stage, number, lane, step.columns)
    for k in cutlass.range_constexpr(2):
        add_values(step.mma, work, stage, k)
    # Not before its products are issued: `ldmatrix` may still be reading then.
    release(empty(barriers, stage), lane)
    if const_expr(step.load_early):
        await_block(step, number + 1, valid - KV_BLOCK, more, t, group)
        for k in cutlass.range_constexpr(2):
            warpgroup.wait_group(1 - k)
            load_values(step, number + 1, k)
    else:
        warpgroup.wait_group(0)
        load_block(step, number + 1, valid - KV_BLOCK, more, t, group)


def places_offset(t: Any) -> Any:
    """Where a thread reads an even M tile, from the first byte of its warpgroup's columns on."""
    return t % 32 * 128 + ((t // 32) ^ (t % 8)) * 16


def load_values(step: Any, number: Any, k: int) -> None:
    """This warpgroup's half of V^T of 32 tokens of a KV block into the registers of an operand A.

    `ldmatrix` with a transposition gives a thread two columns of two tokens; two such words are two
    words of four tokens, one for each column.

    Args:
        step: `ValueStep`.
        number: of the block's stage.
        k: which of the block's halves.
    """
    stage = cute.arch.make_warp_uniform(stage_of(number))
    words = cute.recast_tensor(step.work.values, Int32)
    for m in range(HALF // 64):
        at = step.places[m % 2] + (stage * (4 * TILE_BYTES) + (m // 2) * TILE_BYTES + k * 4096)
        found = load_matrices(at, transposed=True)
        for half in range(2):
            low, high = found[2 * half], found[2 * half + 1]
            words[(0, 0, half), m, k] = Int32(cute.arch.prmt(low, high, Int32(0x6420)))
            words[(0, 1, half), m, k] = Int32(cute.arch.prmt(low, high, Int32(0x7531)))


@cute.jit
def clear_values(places: cutlass.Constexpr, stage: Int32, valid: Int32, t: Int32, group: Int32):
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
    fence_and_sync_warpgroup(Barrier.WARPGROUP_0 + group)  # TMA writes there later


@cute.jit
def add_values(mma: cute.TiledMma, work: cutlass.Constexpr, stage: Int32, k: cutlass.Constexpr):
    """Issue O^T += V^T W^T for 32 tokens of a stage; does not wait."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    cute.gemm(
        atom, work.acc, work.values[(None, None, k)], work.p[(None, None, k, stage)], work.acc
    )
    warpgroup.commit_group()
