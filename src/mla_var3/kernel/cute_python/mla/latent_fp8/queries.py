"""Query rows of the 8-bit latent kernel: from memory to shared memory, rounded to e4m3.

They come through the ring of KV blocks, in front of those of their tile, so that TMA brings them
while the tile before is still computed. Loads to registers took 3 to 4 us per tile, probably
because the L1 cache, beside 227 KB of shared memory, has room for a third of what they ask for.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    LATENT,
    ROWS,
    WARPGROUP,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import release, sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    empty,
    full,
    phase_of,
    query_place,
    query_stages,
    stage_of,
    weighed,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.state import TILE_BYTES, Handover
from mla_var3.op.mla.window.quantise import E4M3_MAX

LANE_COLUMNS = 8
"""Neighbouring columns of a row that a lane rounds at once: 16 bytes in 16 bits."""
PARTS = LATENT // (32 * LANE_COLUMNS)
"""Such columns of a lane in a latent row."""
ROWS_AT_ONCE = 4
"""Rows that a warp rounds at once, for the latency of shared memory."""


@cute.jit
def clear_queries(exchange: cutlass.Constexpr, t: Int32, per_token: cutlass.Constexpr):
    """Zero all query rows, of which a kernel for fewer than 64 never writes the last ones.

    The score warpgroup calls it; whatever is there may be NaN.
    """
    zeros = cute.make_rmem_tensor(16, Float8E4M3FN)
    zeros.fill(0.0)
    rope_tile = TILE_BYTES if const_expr(per_token) else TILE_BYTES // 2
    for base, size in ((exchange.q_bytes, ROWS * LATENT), (exchange.q_rope_bytes, rope_tile)):
        for i in range(size // (16 * WARPGROUP)):
            store_bytes(zeros, base, i * (16 * WARPGROUP) + t * 16)


@cute.jit
def round_queries(
    shared: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    barriers: cute.Pointer,
    tile: cutlass.Constexpr,
    number: Int32,
    t: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Round the query rows of a tile to e4m3, with a scale each; absent rows are zeros.

    The score warpgroup calls it when its last scores of the tile before are done. Its warps take
    turns at the rows. The scales reach their threads by the first bytes of the rows in the ring.

    Args:
        shared: `SharedBlocks`.
        exchange: `Exchange`.
        barriers, tile, number, columns: see `producer.load_queries`.
        t: this thread.
        dtype: element type of the queries.

    Returns:
        The scales of this thread's two rows.
    """
    warp, lane = t // 32, t % 32
    per_token = shared.scales is not None
    for i in cutlass.range_constexpr(query_stages(columns)):
        cute.arch.mbarrier_wait(full(barriers, stage_of(number + i)), phase_of(number + i))
    sync_warpgroup(Handover.SCORES)  # no warp reads the last tile's queries any more
    for step in cutlass.range(columns // (WARPGROUP_WARPS * ROWS_AT_ONCE), unroll=1):
        first = step * (WARPGROUP_WARPS * ROWS_AT_ONCE) + warp
        rows = [first + i * WARPGROUP_WARPS for i in range(ROWS_AT_ONCE)]
        words = [row_words(shared, number, row, tile.row + row < tile.rows, lane) for row in rows]
        peaks = []
        for latent, rope in words:
            peak = largest(latent, dtype)
            if const_expr(not per_token):
                peak = cute.arch.fmax(peak, largest(rope, dtype))
            # They are not negative, so their bits are in their order.
            peak = cute.arch.warp_redux_sync(peak.bitcast(Int32), "max").bitcast(Float32)
            peaks.append(peak)
        own = Float32(1.0)
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            scale = cute.arch.fmax(peaks[i] * (1.0 / E4M3_MAX), Float32(2.0**-120))
            scale = cutlass.select_(peaks[i] > 0.0, scale, Float32(1.0))
            own = cutlass.select_(lane == i, scale, own)
            latent, rope = words[i]
            inverse = cute.arch.rcp_approx(scale)
            store_row(exchange, latent, rope, inverse, rows[i], lane, dtype)
        if lane < ROWS_AT_ONCE:
            latent_at, _ = query_place(shared, number, first + lane * WARPGROUP_WARPS)
            cute.make_tensor(cute.recast_ptr(latent_at, dtype=Float32), 1)[0] = own
    cute.arch.fence_view_async_shared()
    sync_warpgroup(Handover.SCORES)
    scales = cute.make_rmem_tensor(2, Float32)
    scales.fill(1.0)
    for r in cutlass.range_constexpr(2):
        row = warp * 16 + lane // 4 + 8 * r
        if row < columns:
            latent_at, _ = query_place(shared, number, row)
            scales[r] = cute.make_tensor(cute.recast_ptr(latent_at, dtype=Float32), 1)[0]
    # No scale is negative. An arrival that depends on them comes when they have been read.
    reader = lane | Int32(scales[0] < 0.0) | Int32(scales[1] < 0.0)
    cute.arch.sync_warp()
    release_queries(barriers, number, reader, columns)
    return scales[0], scales[1]


def release_queries(barriers: Any, number: Any, lane: Any, columns: int) -> None:
    """Release the stages of a tile's queries; the warps of the score warpgroup call it."""
    for i in range(query_stages(columns)):
        stage = stage_of(number + i)
        release(weighed(barriers, stage), lane)  # for the phase only: nothing is weighed
        for _ in range(2):  # for the value warps too, which read no queries
            release(empty(barriers, stage), lane)


def row_words(
    shared: Any, number: Int32, row: Int32, present: Any, lane: Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """This lane's words of the latent and of the rope part of a query row; zeros if it is absent.

    What lies there is read in any case: under a branch the compiler converts all of it at once.
    """
    latent = cute.make_rmem_tensor((LANE_COLUMNS // 2, PARTS), Int32)
    rope = cute.make_rmem_tensor(1, Int32)
    latent_at, rope_at = query_place(shared, number, row)
    for part in range(PARTS):
        load_bytes(latent[None, part], latent_at, (part * 32 + lane) * 16)
    load_bytes(rope, rope_at, lane * 4)
    for words in (latent, rope):
        for i in range(cute.size(words)):
            words[i] = cutlass.select_(present, words[i], Int32(0))
    return latent, rope


def store_row(
    exchange: Any,
    latent: cute.Tensor,
    rope: cute.Tensor,
    inverse: Float32,
    row: Int32,
    lane: Int32,
    dtype: Any,
) -> None:
    """Store this lane's part of a query row over its scale.

    The rope part is divided by the scale too; where it is e4m3 the scale covers it.
    """
    for part in range(PARTS):
        wide = cute.recast_tensor(latent[None, part], dtype).load().to(Float32)
        narrow = cute.make_rmem_tensor(LANE_COLUMNS, Float8E4M3FN)
        narrow.store((wide * inverse).to(Float8E4M3FN))
        chunk = part * 16 + lane // 2
        offset = chunk // 8 * TILE_BYTES + row * 128 + (chunk % 8 ^ row % 8) * 16 + lane % 2 * 8
        store_bytes(narrow, exchange.q_bytes, offset)
    kind = exchange.q_rope.element_type
    scaled = cute.make_rmem_tensor(2, kind)
    pair = cute.make_rmem_tensor(2, dtype)
    cute.recast_tensor(pair, Int32)[0] = rope[0]
    scaled.store((pair.load().to(Float32) * inverse).to(kind))
    if kind.width == 16:
        offset = row * 128 + (lane // 4 ^ row % 8) * 16 + lane % 4 * 4
    else:
        offset = row * 64 + (lane // 8 ^ row % 8 // 2) * 16 + lane % 8 * 2
    store_bytes(scaled, exchange.q_rope_bytes, offset)


def largest(words: cute.Tensor, dtype: Any) -> Float32:
    """The largest magnitude of 16-bit numbers in registers; any, if one is NaN, as its row is."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    found = [words[i] for i in range(cute.size(words))]
    while len(found) > 1:
        # Of both halves the larger magnitude, with some sign.
        found = [
            cute.arch.inline_ptx(
                f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Int32],
                read_only_args=found[i : i + 2],
            )
            for i in range(0, len(found), 2)
        ]
    pair = cute.make_rmem_tensor(2, dtype)
    cute.recast_tensor(pair, Int32)[0] = found[0] & 0x7FFF7FFF
    wide = pair.load().to(Float32)
    return cute.arch.fmax(wide[0], wide[1])


def store_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Store registers at a byte offset in shared memory, in one go."""
    cute.autovec_copy(values, shared_bytes(values, base, offset))


def load_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Load registers from a byte offset in shared memory, in one go."""
    cute.autovec_copy(shared_bytes(values, base, offset), values)


def shared_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> cute.Tensor:
    """As many numbers at a byte offset in shared memory, aligned to their size."""
    width = cute.size(values) * values.element_type.width // 8
    place = (cute.recast_ptr(base, dtype=cutlass.Uint8) + offset).align(width)
    return cute.make_tensor(
        cute.recast_ptr(place, dtype=values.element_type), cute.make_layout(cute.size(values))
    )
