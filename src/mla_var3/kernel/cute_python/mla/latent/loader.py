"""The loading warp of the absorbed kernels for Hopper: query tiles and KV blocks, as there is room.

Shared memory holds one query tile and two KV blocks, the even and the odd one of a pair. A KV block
is loaded in halves of its latent columns, each as soon as its last reader has said that it is done.
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from mla_var3.kernel.cute_python.mla.hopper.warps import CONSUMERS
from mla_var3.kernel.cute_python.mla.latent.ops import (
    COLUMN_TILES,
    HALF,
    ROPE_TILE,
    TILE,
    TILE_BYTES,
)
from mla_var3.kernel.cute_python.mla.latent.schedule import KV_BLOCK, item_at

LEFT, RIGHT = (0, 1, 2, 3), (4, 5, 6, 7)
"""Column tiles of a copy: half of the latent columns. Fewer and larger copies keep the loading warp
from becoming what everything waits for."""
EVEN_GROUPS = (LEFT, (*RIGHT, ROPE_TILE))
ODD_GROUPS = (RIGHT, (*LEFT, ROPE_TILE))
"""Column tiles that arrive together and become free together. The warpgroup that computes a block's
scores is the first to be done with its half of the values. The rope tile holds P after its scores
are computed, and P is read by the other warpgroup last."""


class Signal(IntEnum):
    """Memory barriers: tiles have arrived, or all their readers are done with them."""

    EVEN = 0  # and 1: one per group of column tiles
    ODD = 2
    QUERY = 4
    EVEN_FREE = 5
    ODD_FREE = 7
    QUERY_FREE = 9


SIGNALS = Signal.QUERY_FREE + 1


class Barrier(IntEnum):
    """Named barriers of the computing threads; 0 is the one of the whole block."""

    EVEN = 1  # probabilities, scales and maximum of the even block are there
    ODD = 2  # the same of the odd block
    FINISH = 3
    GROUP = 4  # and 5: one per warpgroup


def arrivals(signal: int, p_readers: int) -> int:
    """Arrivals that complete a barrier: the loading thread, or the warps that have read.

    Args:
        signal: the barrier.
        p_readers: warpgroups that read a P from shared memory, where a rope tile was.
    """
    if signal < Signal.EVEN_FREE:
        return 1
    if signal == Signal.QUERY_FREE:
        return CONSUMERS // 32
    return 4 * p_readers if signal in (Signal.EVEN_FREE + 1, Signal.ODD_FREE + 1) else 4


@cute.jit
def init_signals(signals: cute.Pointer, p_readers: cutlass.Constexpr):
    """Set up the barriers; one thread calls it."""
    for signal in cutlass.range_constexpr(SIGNALS):
        cute.arch.mbarrier_init(signals + signal, arrivals(signal, p_readers))
    cute.arch.mbarrier_init_fence()


@cute.jit
def announce(barrier: cutlass.Constexpr, strict: cutlass.Constexpr):
    """Tell the other warpgroup that what it waits for at a named barrier is there.

    Args:
        barrier: the barrier.
        strict: wait for the other warpgroup as well. It is not needed, but the sanitizer does not
            follow an arrival without a wait.
    """
    if const_expr(strict):
        cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMERS)
    else:
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=CONSUMERS)


@cute.jit
def load_all(
    q_copy: cute.CopyAtom,
    q_global: cute.Tensor,
    qr_copy: cute.CopyAtom,
    qr_global: cute.Tensor,
    c_copy: cute.CopyAtom,
    c_global: cute.Tensor,
    r_copy: cute.CopyAtom,
    r_global: cute.Tensor,
    s_q: cute.Tensor,
    s_even: cute.Tensor,
    s_odd: cute.Tensor,
    signals: cute.Pointer,
    table: cutlass.Constexpr,
    pages: Int32,
    page_tokens: Int32,
    work: cutlass.Constexpr,
):
    """Bring query tiles and KV blocks into shared memory, as places become free."""
    one = cute.make_layout(1)

    def shared_halves(tensor):  # [64*256, half]
        halves = cute.local_tile(tensor, (TILE, HALF), (0, None))
        return cute.group_modes(halves, 0, 2)

    def shared_rope(tensor):  # [64*64]
        return cute.group_modes(cute.local_tile(tensor, (TILE, TILE), (0, ROPE_TILE)), 0, 2)

    def blocks_of(tensor, columns):  # [64*columns, block of page, column part, page]
        blocks = cute.local_tile(tensor, (TILE, columns), (None, None, None))
        return cute.group_modes(blocks, 0, 2)

    even_halves, c_blocks = cpasync.tma_partition(
        c_copy, 0, one, shared_halves(s_even), blocks_of(c_global, HALF)
    )
    odd_halves, _ = cpasync.tma_partition(
        c_copy, 0, one, shared_halves(s_odd), blocks_of(c_global, HALF)
    )
    even_rope, r_blocks = cpasync.tma_partition(
        r_copy, 0, one, shared_rope(s_even), blocks_of(r_global, TILE)
    )
    odd_rope, _ = cpasync.tma_partition(
        r_copy, 0, one, shared_rope(s_odd), blocks_of(r_global, TILE)
    )
    places = (even_halves, even_rope, odd_halves, odd_rope)
    cache = (c_copy, c_blocks, r_copy, r_blocks, table, pages, page_tokens // KV_BLOCK)
    item = item_at(work.part[0], work)
    started = item.live
    phase = Int32(0)
    q_phase = Int32(0)
    while item.live:
        cute.arch.mbarrier_wait(signals + Signal.QUERY_FREE, q_phase ^ 1)
        q_phase ^= 1
        load_queries(
            q_copy, q_global, qr_copy, qr_global, shared_halves(s_q), shared_rope(s_q),
            signals + Signal.QUERY, item.base + item.row,
        )  # fmt: skip
        request = item.index // work.groups
        for pair in cutlass.range(item.pairs, unroll=1):
            block = item.first + 2 * pair
            load_pair(
                cache, places, signals, phase,
                place_of(cache, request, block, item.last),
                place_of(cache, request, block + 1, item.last),
            )  # fmt: skip
            phase ^= 1
        item = item_at(item.index + work.part[4], work)
    if started:
        # Scores are computed one pair ahead, so behind the last pair as well.
        nowhere = (Int32(0), pages)
        load_pair(cache, places, signals, phase, nowhere, nowhere)


@cute.jit
def load_queries(
    q_copy: cute.CopyAtom,
    q_global: cute.Tensor,
    qr_copy: cute.CopyAtom,
    qr_global: cute.Tensor,
    halves: cute.Tensor,
    rope: cute.Tensor,
    arrived: cute.Pointer,
    first_row: Int32,
):
    """Start the copies of a query tile."""
    one = cute.make_layout(1)

    def parts_of(tensor, columns):
        rows = cute.domain_offset((first_row, 0), tensor)
        return cute.group_modes(cute.local_tile(rows, (TILE, columns), (0, None)), 0, 2)

    target, source = cpasync.tma_partition(q_copy, 0, one, halves, parts_of(q_global, HALF))
    rope_target, rope_source = cpasync.tma_partition(
        qr_copy, 0, one, rope, parts_of(qr_global, TILE)
    )
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, COLUMN_TILES * TILE_BYTES)
    for half in cutlass.range_constexpr(2):
        cute.copy(q_copy, source[(None, half)], target[(None, half)], tma_bar_ptr=arrived)
    cute.copy(qr_copy, rope_source[(None, 0)], rope_target, tma_bar_ptr=arrived)


@cute.jit
def place_of(cache: cutlass.Constexpr, request: Int32, block: Int32, blocks: Int32):
    """Where a KV block lies: (block of the page, page).

    A block behind the last one lies on a page that does not exist, which the copy engine
    reads as zeros without touching memory.
    """
    _, _, _, _, table, pages, page_blocks = cache
    page = pages
    if const_expr(table is None):
        if block < blocks:
            page = request
    else:
        if block < blocks:
            page = table[request, block // page_blocks]
        block = block % page_blocks
    return block, page


@cute.jit
def load_pair(
    cache: cutlass.Constexpr,
    places: cutlass.Constexpr,
    signals: cute.Pointer,
    phase: Int32,
    even: cutlass.Constexpr,
    odd: cutlass.Constexpr,
):
    """Copy two KV blocks, each part as soon as its readers are done with the old one."""
    even_halves, even_rope, odd_halves, odd_rope = places
    for group in cutlass.range_constexpr(2):
        load_half(
            cache, even_halves, even_rope, signals + (Signal.EVEN + group),
            signals + (Signal.EVEN_FREE + group), phase, even, EVEN_GROUPS[group],
        )  # fmt: skip
    for group in cutlass.range_constexpr(2):
        load_half(
            cache, odd_halves, odd_rope, signals + (Signal.ODD + group),
            signals + (Signal.ODD_FREE + group), phase, odd, ODD_GROUPS[group],
        )  # fmt: skip


@cute.jit
def load_half(
    cache: cutlass.Constexpr,
    halves: cute.Tensor,
    rope: cute.Tensor,
    arrived: cute.Pointer,
    free: cute.Pointer,
    phase: Int32,
    place: cutlass.Constexpr,
    tiles: cutlass.Constexpr,
):
    """Copy half of the latent columns of a KV block, with the rope tile if it is of them."""
    c_copy, c_blocks, r_copy, r_blocks, _, _, _ = cache
    block, page = place
    half = tiles[0] // len(LEFT)
    cute.arch.mbarrier_wait(free, phase ^ 1)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, len(tiles) * TILE_BYTES)
    source = c_blocks[(None, block, half, page)]
    cute.copy(c_copy, source, halves[(None, half)], tma_bar_ptr=arrived)
    if const_expr(ROPE_TILE in tiles):
        cute.copy(r_copy, r_blocks[(None, block, 0, page)], rope, tma_bar_ptr=arrived)
