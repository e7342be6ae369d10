"""Producer warp of the latent kernel: query tiles and KV blocks, as shared memory becomes empty.

Shared memory holds one query tile and two KV blocks, the even and the odd one of a pair. A KV block
is loaded in halves of its latent columns, each as soon as its last reader has released it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    KV_BLOCK,
    TILE,
    TILE_BYTES,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import EVICT_FIRST, EVICT_NORMAL, TmaTensor
from mla_var3.kernel.cute_python.mla.hopper.widths import LatentWidths
from mla_var3.kernel.cute_python.mla.latent.ops import divided, quotient

FEW_BLOCKS = 1800
"""KV blocks of a small launch (`kv_policy`), 130 MB. On an H200 1,100 blocks gained; 4,200 gained
alone, and lost beside kernels that fill L2. Numbers between were not measured."""


class Mbarrier(IntEnum):
    """Mbarriers: FULL when tiles have arrived, EMPTY when all their readers have released them.

    OWN is the half of a KV block's latent columns that the warpgroup of its scores accumulates,
    OTHER the rest of the block.
    """

    EVEN_OWN_FULL = 0
    EVEN_OTHER_FULL = 1
    ODD_OWN_FULL = 2
    ODD_OTHER_FULL = 3
    Q_FULL = 4
    EVEN_OWN_EMPTY = 5
    EVEN_OTHER_EMPTY = 6
    ODD_OWN_EMPTY = 7
    ODD_OTHER_EMPTY = 8
    Q_EMPTY = 9


class Barrier(IntEnum):
    """Named barriers of the consumers; 0 is the one of the whole CTA."""

    P_EVEN = 1  # probabilities, scales and maximum of the even block are in shared memory
    P_ODD = 2  # the same of the odd block
    CONSUMERS = 3
    WARPGROUP_0 = 4
    WARPGROUP_1 = 5
    MERGE = 6  # and the watcher of `merge.py`


WARPGROUP_BARRIERS = (Barrier.WARPGROUP_0, Barrier.WARPGROUP_1)


@dataclass(frozen=True)
class BlockPart:
    """Column tiles of a KV block that arrive together and are released together.

    A copy takes half of the latent columns. Fewer and larger copies keep the producer warp from
    becoming the bottleneck (run 7 of docs/results/2026-11-15-nvidia-h200-cute-development.md).

    Attributes:
        half: which half of its latent columns: 0 is the left one.
    """

    widths: LatentWidths
    half: int
    has_rope: bool
    full: Mbarrier
    empty: Mbarrier

    @property
    def tiles(self) -> tuple[int, ...]:
        """The column tiles."""
        count = self.widths.tiles // 2
        own = range(self.half * count, (self.half + 1) * count)
        return (*own, self.widths.tiles) if self.has_rope else (*own,)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the scores' product over them, of 16 columns each."""
        return tuple(step for tile in self.tiles for step in self.widths.steps(tile))


def block_parts(widths: LatentWidths) -> tuple[tuple[BlockPart, ...], tuple[BlockPart, ...]]:
    """The parts of an even and of an odd KV block, in the order in which they are loaded.

    The warpgroup that computes a block's scores is the first to be done with its own half of the
    values. The rope part comes with the other half: its tile holds P once the scores exist, and the
    other warpgroup reads P last.
    """
    rope = widths.p > 0
    even = (
        BlockPart(widths, 0, False, Mbarrier.EVEN_OWN_FULL, Mbarrier.EVEN_OWN_EMPTY),
        BlockPart(widths, 1, rope, Mbarrier.EVEN_OTHER_FULL, Mbarrier.EVEN_OTHER_EMPTY),
    )
    odd = (
        BlockPart(widths, 1, False, Mbarrier.ODD_OWN_FULL, Mbarrier.ODD_OWN_EMPTY),
        BlockPart(widths, 0, rope, Mbarrier.ODD_OTHER_FULL, Mbarrier.ODD_OTHER_EMPTY),
    )
    return even, odd


def arrivals(barrier: Mbarrier, p_readers: int) -> int:
    """Arrivals that complete an mbarrier: the producer, or the warps that have read.

    Args:
        p_readers: warpgroups that read a P from shared memory, where a rope tile was.
    """
    if barrier.name.endswith("FULL"):
        return 1
    if barrier is Mbarrier.Q_EMPTY:
        return CONSUMER_WARPS
    return WARPGROUP_WARPS * (p_readers if "OTHER" in barrier.name else 1)


@cute.jit
def init_barriers(barriers: cute.Pointer, p_readers: cutlass.Constexpr):
    """Set up the mbarriers; one thread calls it."""
    for barrier in cutlass.range_constexpr(len(Mbarrier)):
        cute.arch.mbarrier_init(barriers + barrier, arrivals(Mbarrier(barrier), p_readers))
    cute.arch.mbarrier_init_fence()


@cute.jit
def arrive(barrier: cutlass.Constexpr, strict: cutlass.Constexpr):
    """Arrive at a named barrier where the other consumer warpgroup waits.

    Args:
        strict: wait for the other warpgroup as well. It is not needed, but the sanitizer does not
            follow an arrival without a wait.
    """
    if const_expr(strict):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMERS)
    else:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=CONSUMERS)


@dataclass(frozen=True)
class Sources:
    """What the producer reads.

    Attributes:
        q, q_rope: query rows and their rope part; with a `head_box`, heads of query tokens. No
            rope part where p is 0.
    """

    q: TmaTensor
    q_rope: TmaTensor | None
    latent: TmaTensor
    rope: TmaTensor | None
    table: Any
    pages: Any
    page_tokens: Any
    heads: Any
    head_box: int


@dataclass(frozen=True)
class SharedTiles:
    """Tiles [rows, `widths.columns`] in shared memory.

    Attributes:
        q: the query tile, of `q_rows` rows.
        even, odd: a pair of KV blocks, of 64 rows each.
        q_rows: 64, or the fewer rows that requests have.
    """

    q: Any
    even: Any
    odd: Any
    widths: LatentWidths
    q_rows: int


@dataclass(frozen=True)
class _Cache:
    """The cache as the copies of KV blocks see it; blocks are [64*columns, block, part, page].

    Without a rope part its fields are None.
    """

    latent_copy: Any
    latent_blocks: Any
    rope_copy: Any
    rope_blocks: Any
    table: Any
    pages: Any
    page_blocks: Any
    policy: Any


@dataclass(frozen=True)
class _Buffer:
    """A KV block in shared memory: halves [64*k/2, half], rope tile [64*64] or None."""

    halves: Any
    rope: Any


@dataclass(frozen=True)
class _Place:
    """Where a KV block lies: block of the page, page."""

    block: Any
    page: Any


def _halves(tile: cute.Tensor, widths: LatentWidths, rows: int = TILE) -> cute.Tensor:
    """A tile's latent columns as [rows*k/2, half]."""
    return cute.group_modes(cute.local_tile(tile, (rows, widths.half), (0, None)), 0, 2)


def _rope(tile: cute.Tensor, widths: LatentWidths, rows: int = TILE) -> cute.Tensor:
    """A tile's rope columns as [rows*64]."""
    return cute.group_modes(cute.local_tile(tile, (rows, TILE), (0, widths.tiles)), 0, 2)


def _blocks(tensor: cute.Tensor, columns: int) -> cute.Tensor:
    """A cache as [64*columns, block of page, column part, page]."""
    blocks = cute.local_tile(tensor, (TILE, columns), (None, None, None))
    return cute.group_modes(blocks, 0, 2)


@cute.jit
def produce(
    sources: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    barriers: cute.Pointer,
    scheduler: cutlass.Constexpr,
):
    """Load the query tiles and KV blocks of all work tiles of the CTA; one warp calls it."""
    widths, latent, rope = shared.widths, sources.latent, sources.rope

    def partitioned(source, tiles_of, columns):  # blocks of the cache, the even and the odd buffer
        blocks, one = _blocks(source.tensor, columns), cute.make_layout(1)
        even, found = cpasync.tma_partition(
            source.copy, 0, one, tiles_of(shared.even, widths), blocks
        )
        odd, _ = cpasync.tma_partition(source.copy, 0, one, tiles_of(shared.odd, widths), blocks)
        return found, even, odd

    latent_blocks, even_halves, odd_halves = partitioned(latent, _halves, widths.half)
    rope_copy = rope_blocks = even_rope = odd_rope = None
    if const_expr(rope is not None):
        rope_copy = rope.copy
        rope_blocks, even_rope, odd_rope = partitioned(rope, _rope, TILE)
    buffers = _Buffer(even_halves, even_rope), _Buffer(odd_halves, odd_rope)
    cache = _Cache(
        latent.copy, latent_blocks, rope_copy, rope_blocks,
        sources.table, sources.pages, sources.page_tokens // KV_BLOCK, kv_policy(scheduler),
    )  # fmt: skip
    tile = scheduler.first_tile()
    phase = Int32(0)
    q_phase = Int32(0)
    while tile.valid:
        cute.arch.mbarrier_wait(barriers + Mbarrier.Q_EMPTY, q_phase ^ 1)
        q_phase ^= 1
        load_queries(sources, shared, barriers + Mbarrier.Q_FULL, tile.base + tile.row)
        for pair in cutlass.range(tile.pairs, unroll=1):
            block = tile.first + 2 * pair
            places = (
                place_of(cache, tile.request, block, tile.last),
                place_of(cache, tile.request, block + 1, tile.last),
            )
            for buffer, place, parts in zip(buffers, places, block_parts(widths), strict=True):
                for part in parts:  # as soon as its readers have released the old one
                    load_part(cache, buffer, barriers, phase, place, part)
            phase ^= 1
        tile = scheduler.next_tile(tile)


@cute.jit
def kv_policy(scheduler: cutlass.Constexpr) -> Int64:
    """Cache policy of the KV blocks.

    They stream through L2 and push out what the next launch begins with: its code, lengths, block
    table and queries. A small launch gains by replacing them first: on an H200 batches of 16 with
    8 to 32 heads and 4096 tokens took 3 to 4 % less beside other kernels. A large one may lose:
    where others have filled L2, its KV blocks are gone before all CTAs of a group have read them
    (docs/results/2026-11-16-nvidia-h200-engine-shapes.md).
    """
    policy = Int64(EVICT_NORMAL)
    if scheduler.group_ctas * scheduler.visits <= 2 and scheduler.range.total <= FEW_BLOCKS:
        policy = Int64(EVICT_FIRST)
    return policy


@cute.jit
def load_queries(
    sources: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    full: cute.Pointer,
    first_row: Int32,
):
    """Start the copies of a query tile."""
    one = cute.make_layout(1)
    q, q_rope, widths, box_rows = sources.q, sources.q_rope, shared.widths, shared.q_rows

    def parts_of(tensor, columns):
        if const_expr(sources.head_box > 0):
            box = (sources.head_box, box_rows // sources.head_box, columns)
            token = quotient(first_row, sources.heads)
            at = (first_row - token * sources.heads, token, 0)
            rows = cute.domain_offset(at, tensor)
            return cute.group_modes(cute.local_tile(rows, box, (0, 0, None)), 0, 3)
        rows = cute.domain_offset((first_row, 0), tensor)
        return cute.group_modes(cute.local_tile(rows, (box_rows, columns), (0, None)), 0, 2)

    target, source = cpasync.tma_partition(
        q.copy, 0, one, _halves(shared.q, widths, box_rows), parts_of(q.tensor, widths.half)
    )
    rope: Any = (None, None)  # target and source
    if const_expr(q_rope is not None):
        rope = cpasync.tma_partition(
            q_rope.copy, 0, one, _rope(shared.q, widths, box_rows), parts_of(q_rope.tensor, TILE)
        )
    tiles = widths.tiles if q_rope is None else widths.tiles + 1
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, tiles * TILE_BYTES * box_rows // TILE)
    for half in cutlass.range_constexpr(2):
        cute.copy(q.copy, source[(None, half)], target[(None, half)], tma_bar_ptr=full)
    if const_expr(q_rope is not None):
        cute.copy(q_rope.copy, rope[1][(None, 0)], rope[0], tma_bar_ptr=full)


@cute.jit
def place_of(cache: cutlass.Constexpr, request: Int32, block: Int32, blocks: Int32) -> _Place:
    """Where a KV block of a request lies.

    A block behind the last one lies on a page that does not exist: TMA fills it with zeros without
    touching memory.
    """
    page = cache.pages
    if const_expr(cache.table is None):
        if block < blocks:
            page = request
    else:
        place = divided(block, cache.page_blocks)
        if block < blocks:
            page = cache.table[request, place]
        block -= place * cache.page_blocks
    return _Place(block, page)


@cute.jit
def load_part(
    cache: cutlass.Constexpr,
    buffer: cutlass.Constexpr,
    barriers: cute.Pointer,
    phase: Int32,
    place: cutlass.Constexpr,
    part: cutlass.Constexpr,
):
    """Load half of the latent columns of a KV block, and the rope tile if the part has it."""
    half = part.half
    full = barriers + part.full
    cute.arch.mbarrier_wait(barriers + part.empty, phase ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, len(part.tiles) * TILE_BYTES)
    source = cache.latent_blocks[(None, place.block, half, place.page)]
    target = buffer.halves[(None, half)]
    cute.copy(cache.latent_copy, source, target, tma_bar_ptr=full, cache_policy=cache.policy)
    if const_expr(part.has_rope):
        source = cache.rope_blocks[(None, place.block, 0, place.page)]
        cute.copy(cache.rope_copy, source, buffer.rope, tma_bar_ptr=full, cache_policy=cache.policy)
