"""Producer warp of the 8-bit latent kernel: KV blocks into a ring of shared-memory stages.

Query rows are not loaded here: the value warpgroups round them on their way to shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    KV_BLOCK,
    LATENT,
    ROPE,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, transfer
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier, kv_policy, place_of
from mla_var3.kernel.cute_python.mla.latent_fp8.state import MEAN_PAIRS, MEAN_WARPS

STAGES = 4
"""KV blocks in shared memory: 160 KB, of which an SM needs about 100 in flight to read memory at
its full rate (docs/kernels/flash-attention.md)."""
FIRST_BLOCKS = 2
"""KV blocks of a CTA that are loaded before its first queries have arrived: those whose scores are
computed first. With more of them queries would wait for blocks that are needed later."""
NO_BLOCK, NO_BLOCK_YET = -1, -2
"""Numbers of no KV block: behind the last one, and before a tile has means."""
MBARRIERS = 3 * STAGES + 2


def full(barriers: cute.Pointer, stage: Any) -> cute.Pointer:
    """The mbarrier of a stage whose block has arrived."""
    return barriers + stage


def empty(barriers: cute.Pointer, stage: Any) -> cute.Pointer:
    """The mbarrier of a stage that the warps of the values and of the means have released."""
    return barriers + (STAGES + stage)


def means_ready(barriers: cute.Pointer) -> cute.Pointer:
    """The mbarrier of a tile whose means have been computed."""
    return barriers + 2 * STAGES


def means_free(barriers: cute.Pointer) -> cute.Pointer:
    """The mbarrier of a tile that has ended, so that its means are no longer needed."""
    return barriers + (2 * STAGES + 1)


def weighed(barriers: cute.Pointer, stage: Any) -> cute.Pointer:
    """The mbarrier of a stage whose weights are in shared memory."""
    return barriers + (2 * STAGES + 2 + stage)


@cute.jit
def init_barriers(barriers: cute.Pointer):
    """Set up the mbarriers; one thread calls it."""
    for stage in cutlass.range_constexpr(STAGES):
        cute.arch.mbarrier_init(full(barriers, stage), 1)
        cute.arch.mbarrier_init(empty(barriers, stage), CONSUMER_WARPS + MEAN_WARPS)
        cute.arch.mbarrier_init(weighed(barriers, stage), WARPGROUP_WARPS)
    cute.arch.mbarrier_init(means_ready(barriers), MEAN_WARPS)
    cute.arch.mbarrier_init(means_free(barriers), CONSUMER_WARPS)
    cute.arch.mbarrier_init_fence()


@dataclass(frozen=True)
class SharedBlocks:
    """KV blocks in shared memory, the stage as the last mode.

    Attributes:
        keys: [64, 512, stage] e4m3, also the values.
        rope: [64, 64, stage] in 16 bits or e4m3.
        scales: [64, stage] float32 of the tokens; None with one scale for the whole cache.
    """

    keys: Any
    rope: Any
    scales: Any


@dataclass(frozen=True)
class Cache:
    """The cache in memory.

    Attributes:
        latent, rope, scales: its pages; `scales` is None with one scale for the whole cache.
        table: block table, or None for a dense cache.
        pages: number of pages.
        page_blocks: KV blocks of a page.
        block_bytes: bytes of a KV block.
    """

    latent: TmaTensor
    rope: TmaTensor
    scales: TmaTensor | None
    table: Any
    pages: Any
    page_blocks: Any
    block_bytes: int


@cute.jit
def produce(
    cache: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    barriers: cute.Pointer,
    scheduler: cutlass.Constexpr,
    first_block: cute.Tensor,
    early: cutlass.Constexpr,
):
    """Load the KV blocks of all work tiles of the CTA; one warp calls it.

    Args:
        cache: `Cache`.
        shared: `SharedBlocks`.
        barriers: mbarriers.
        scheduler: the CTA's work tiles.
        first_block: [1] first block of the last tile that has means, by its number in the CTA. Its
            readers have waited for that block, or for one behind the last, which sets `NO_BLOCK`.
        early: whether KV blocks are loaded before the queries exist; see the kernel.
    """
    parts = [
        transfer(cache.latent, shared.keys, (KV_BLOCK, LATENT)),
        transfer(cache.rope, shared.rope, (KV_BLOCK, ROPE)),
    ]
    if const_expr(cache.scales is not None):
        parts.append(transfer(cache.scales, shared.scales, (KV_BLOCK,)))
    policy = kv_policy(scheduler)
    tile = scheduler.first_tile()
    number = Int32(0)
    while tile.valid:
        if has_means(tile):
            first_block[0] = number
        for index in cutlass.range(2 * tile.pairs, unroll=1):
            if const_expr(not early):
                if number == FIRST_BLOCKS:
                    cute.arch.barrier(barrier_id=Barrier.QUERIES, number_of_threads=CONSUMERS + 32)
            place = place_of(cache, tile.request, tile.first + index, tile.last)
            load_block(cache, parts, barriers, number, place.block, place.page, policy)
            number += 1
        tile = scheduler.next_tile(tile)
    # One more, which is not loaded, for the warps that do not know how many there are.
    cute.arch.mbarrier_wait(empty(barriers, number % STAGES), number // STAGES % 2 ^ 1)
    first_block[0] = Int32(NO_BLOCK)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full(barriers, number % STAGES))


def has_means(tile: Any) -> Any:
    """Whether a tile is long enough for means to be subtracted.

    512 tokens of one sign lose 0.5 to 0.8 %, and waiting for their means takes up to 1 us.
    """
    return tile.pairs > MEAN_PAIRS


@cute.jit
def load_block(
    cache: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    barriers: cute.Pointer,
    number: Int32,
    block: Int32,
    page: Int32,
    policy: Int64,
):
    """Load a KV block, the CTA's `number`-th, into its stage as soon as that is empty."""
    stage = number % STAGES
    cute.arch.mbarrier_wait(empty(barriers, stage), number // STAGES % 2 ^ 1)
    arrival = full(barriers, stage)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(arrival, cache.block_bytes)
    for i in cutlass.range_constexpr(len(parts)):
        at = (None, block, page) if i == 2 else (None, block, 0, page)
        cute.copy(
            parts[i].copy, parts[i].tiles[at], parts[i].shared[(None, stage)],
            tma_bar_ptr=arrival, cache_policy=policy,
        )  # fmt: skip
