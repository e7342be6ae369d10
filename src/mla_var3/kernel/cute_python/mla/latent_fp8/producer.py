"""Producer warp of the 8-bit latent kernel: the ring of shared-memory stages.

A stage takes a KV block, or 32 query rows in 16 bits. The query rows of a tile come in front of its
KV blocks; the score warpgroup rounds them (`queries.py`). Stages are numbered within the CTA. With
its queries the value warpgroups get the work tile, which they would otherwise find once more.
"""

from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    KV_BLOCK,
    LATENT,
    ROPE,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, transfer
from mla_var3.kernel.cute_python.mla.latent.ops import divided
from mla_var3.kernel.cute_python.mla.latent.producer import kv_policy, place_of
from mla_var3.kernel.cute_python.mla.latent.scheduler import WorkTile
from mla_var3.kernel.cute_python.mla.latent_fp8.state import MEAN_PAIRS, MEAN_WARPS

STAGES = 4
"""KV blocks in shared memory: 160 KB, of which an SM needs about 100 in flight to read memory at
its full rate (docs/kernels/flash-attention.md)."""
STAGE_ROWS = 32
"""Query rows of a stage."""
QUERY_BYTES, QUERY_ROPE_BYTES = 2 * LATENT, 2 * ROPE
"""Bytes of a query row in 16 bits."""
NO_BLOCK, NO_BLOCK_YET = -1, -2
"""Numbers of no KV block: behind the last one, and before a tile has means."""
MBARRIERS = 3 * STAGES + 2


def stage_of(number: Any) -> Any:
    """The stage of a number."""
    return number & (STAGES - 1)


def phase_of(number: Any) -> Any:
    """The phase of the mbarriers of its stage."""
    return (number >> (STAGES.bit_length() - 1)) & 1


def full(barriers: cute.Pointer, stage: Any) -> cute.Pointer:
    """The mbarrier of a stage whose KV block or query rows have arrived."""
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
    """The mbarrier of a stage whose weights are in shared memory, or whose queries are read."""
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


TILE_FIELDS = tuple(field.name for field in fields(WorkTile))
TILE_WORDS = -(-len(TILE_FIELDS) // 4) * 4
"""Words of a work tile in shared memory, moved in fours."""


@dataclass(frozen=True)
class SharedBlocks:
    """KV blocks in shared memory, the stage as the last mode.

    Attributes:
        keys: [64, 512, stage] e4m3, also the values, and their pointer `keys_bytes`.
        rope: [64, 64, stage] in 16 bits or e4m3, and their pointer `rope_bytes`.
        scales: [64, stage] float32 of the tokens; None with one scale for the whole cache.
    """

    keys: Any
    keys_bytes: Any
    rope: Any
    rope_bytes: Any
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
    queries: cutlass.Constexpr,
    tiles: cute.Tensor,
    columns: cutlass.Constexpr,
    first_block: cute.Tensor,
    early: cutlass.Constexpr,
):
    """Load the query rows and KV blocks of all work tiles of the CTA; one warp calls it.

    Args:
        cache: `Cache`.
        shared: `SharedBlocks`.
        barriers: mbarriers.
        scheduler: the CTA's work tiles.
        queries: `Queries`.
        tiles: see `send_tile`.
        columns: query rows on the N side, the most that a tile has.
        first_block: [1] first block of the last tile that has means, by its number in the CTA. Its
            readers have waited for that block, or for one behind the last, which sets `NO_BLOCK`.
        early: whether the first KV blocks go to the L2 cache before the queries exist; see the
            kernel.
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
    if const_expr(early):
        if tile.valid:
            for index in cutlass.range(cutlass.min(2 * tile.pairs, STAGES), unroll=1):
                place = place_of(cache, tile.request, tile.first + index, tile.last)
                for i in cutlass.range_constexpr(len(parts)):
                    cute.prefetch(parts[i].copy, parts[i].tiles[block_at(i, place)])
        cute.arch.griddepcontrol_wait()
    while tile.valid:
        load_queries(queries, shared, tiles, barriers, tile, number, columns)
        number += query_stages(columns)
        if has_means(tile):
            first_block[0] = number
        for index in cutlass.range(2 * tile.pairs, unroll=1):
            place = place_of(cache, tile.request, tile.first + index, tile.last)
            load_block(cache, parts, barriers, number, place, policy)
            number += 1
        tile = scheduler.next_tile(tile)
    # One more, which is not loaded, for the warps that do not know how many there are.
    cute.arch.mbarrier_wait(empty(barriers, stage_of(number)), phase_of(number) ^ 1)
    first_block[0] = Int32(NO_BLOCK)
    with cute.arch.elect_one():
        send_tile(tile, tiles, number)
        cute.arch.mbarrier_arrive(full(barriers, stage_of(number)))


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
    place: cutlass.Constexpr,
    policy: Int64,
):
    """Load a KV block into the stage of a number as soon as that is empty."""
    stage = stage_of(number)
    cute.arch.mbarrier_wait(empty(barriers, stage), phase_of(number) ^ 1)
    arrival = full(barriers, stage)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(arrival, cache.block_bytes)
    for i in cutlass.range_constexpr(len(parts)):
        cute.copy(
            parts[i].copy, parts[i].tiles[block_at(i, place)], parts[i].shared[(None, stage)],
            tma_bar_ptr=arrival, cache_policy=policy,
        )  # fmt: skip


def block_at(part: int, place: Any) -> tuple:
    """Where a KV block is among the tiles of the latent part, the rope part or the scales."""
    return (None, place.block, place.page) if part == 2 else (None, place.block, 0, place.page)


# --- work tiles -----------------------------------------------------------------------------------


def send_tile(tile: WorkTile, tiles: cute.Tensor, number: Any) -> None:
    """Write a work tile for the value warps: they find it in the stage of its first query rows.

    Where tokens have scales TMA writes to the same place later, so the words are fenced.

    Args:
        tile: the work tile.
        tiles: [word, stage] where the scales of tokens are in a stage with a KV block.
        number: of the stage, which is empty.
    """
    words = cute.make_rmem_tensor(TILE_WORDS, Int32)
    words.fill(0)
    for i, name in enumerate(TILE_FIELDS):
        words[i] = Int32(getattr(tile, name))
    cute.autovec_copy(words, tile_words(tiles, number))
    cute.arch.fence_view_async_shared()


def tile_words(tiles: cute.Tensor, number: Any) -> cute.Tensor:
    """Where the work tile of a stage is."""
    return cute.local_tile(tiles[(None, stage_of(number))], (TILE_WORDS,), (0,))


def receive_tile(tiles: cute.Tensor, barriers: cute.Pointer, number: Int32) -> WorkTile:
    """Wait for the work tile in the stage of a number, or for one that is not valid."""
    cute.arch.mbarrier_wait(full(barriers, stage_of(number)), phase_of(number))
    words = cute.make_rmem_tensor(TILE_WORDS, Int32)
    cute.autovec_copy(tile_words(tiles, number), words)
    numbers = {name: words[i] for i, name in enumerate(TILE_FIELDS)}
    return WorkTile(valid=numbers.pop("valid") != 0, **numbers)


# --- query rows -----------------------------------------------------------------------------------


def query_stages(columns: int) -> int:
    """Stages that the query rows of a tile take."""
    return -(-columns // STAGE_ROWS)


def query_place(shared: Any, number: Any, row: Any) -> tuple[cute.Pointer, cute.Pointer]:
    """The latent and the rope part of a query row in shared memory, in 16 bits.

    Args:
        shared: `SharedBlocks`.
        number: of the tile's first stage of queries.
        row: of the tile.
    """
    rope_stage = KV_BLOCK * ROPE * (1 if shared.scales is None else 2)
    places = []
    for base, stage_bytes, row_bytes in (
        (shared.keys_bytes, KV_BLOCK * LATENT, QUERY_BYTES),
        (shared.rope_bytes, rope_stage, QUERY_ROPE_BYTES),
    ):
        offset = stage_of(number + row // STAGE_ROWS) * stage_bytes + row % STAGE_ROWS * row_bytes
        places.append((cute.recast_ptr(base, dtype=Uint8) + offset).align(QUERY_ROPE_BYTES))
    return places[0], places[1]


@cute.jit
def load_queries(
    queries: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    tiles: cute.Tensor,
    barriers: cute.Pointer,
    tile: cutlass.Constexpr,
    number: Int32,
    columns: cutlass.Constexpr,
):
    """Load the query rows of a tile in 16 bits, a lane for each row of a stage.

    Where the tile has fewer rows, its last one comes again: there is nothing then that may be NaN.

    Args:
        queries: `Queries`.
        shared: `SharedBlocks`.
        tiles: see `send_tile`.
        barriers: mbarriers.
        tile: the work tile.
        number: of the first stage that they take.
        columns: query rows on the N side, the most that a tile has.
    """
    lane = cute.arch.lane_idx()
    for i in cutlass.range(query_stages(columns), unroll=1):
        rows = min(columns, STAGE_ROWS)
        if const_expr(columns % STAGE_ROWS != 0 and columns > STAGE_ROWS):
            rows = cutlass.min(columns - i * STAGE_ROWS, STAGE_ROWS)
        cute.arch.mbarrier_wait(empty(barriers, stage_of(number + i)), phase_of(number + i) ^ 1)
        arrival = full(barriers, stage_of(number + i))
        with cute.arch.elect_one():
            if i == 0:
                send_tile(tile, tiles, number)
            cute.arch.mbarrier_arrive_and_expect_tx(
                arrival, rows * (QUERY_BYTES + QUERY_ROPE_BYTES)
            )
        cute.arch.sync_warp()
        if lane < rows:
            row = i * STAGE_ROWS + lane
            at = tile.base + cutlass.min(tile.row + row, tile.rows - 1)
            token = divided(at, queries.heads)
            head = Int64(at - token * queries.heads)
            token = Int64(token)
            latent = token * queries.latent_token_stride + head * queries.latent_stride
            rope = token * queries.rope_token_stride + head * queries.rope_stride
            latent_at, rope_at = query_place(shared, number, row)
            copy_bytes(latent_at, queries.latent + latent, QUERY_BYTES, arrival)
            copy_bytes(rope_at, queries.rope + rope, QUERY_ROPE_BYTES, arrival)


def copy_bytes(
    target: cute.Pointer, source: cute.Pointer, size: int, arrival: cute.Pointer
) -> None:
    """Copy contiguous bytes to shared memory; the mbarrier counts them."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f" [{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
        read_only_args=[Int32(target.toint()), source.toint(), Int32(arrival.toint())],
    )
