"""Query rows of the 8-bit latent kernel: from memory to shared memory, rounded to e4m3.

They come through the ring of KV blocks, in front of those of their tile, so that TMA brings them
while the tile before is still computed. Loads to registers took 3 to 4 us per tile, probably
because the L1 cache, beside 227 KB of shared memory, has room for a third of what they ask for.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int16, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    LATENT,
    ROWS,
    WARPGROUP,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import lane_behind, release, sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    QUERY_BYTES,
    QUERY_ROPE_BYTES,
    STAGE_ROWS,
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
HELD = {(48, False): (16, 8), (48, True): (16, 8), (ROWS, False): (11, 3), (ROWS, True): (8, 2)}
"""How many of the 16 products of a latent score have their queries in registers, by query rows on
the N side and whether for clusters: with one scale, and with a scale per token. Each takes 2 KB per
KV block less from shared memory, and four registers, which the weights then lack. b=32 s=16 with 9,
10 and 11: 478.7, 478.8 and 475.8 us, serialised with 12; per token with 3, 4 and 5: 546.9, 562.2
and 563.6. In clusters 9 spill 96 bytes. b=64 s=6 t=1537 with 16 heads, 48 rows, with 8, 12 and 16:
33.6, 32.8 and 32.7; per token with 4 and 8: 37.5 and 37.1, and with 12 results were wrong, which is
not understood (docs/results/2026-11-20-nvidia-h200-fp8-rows48-rows.json)."""
ROWS_AT_ONCE = 4
"""Rows that a warp rounds at once, for the latency of shared memory."""
STEP_ROWS = WARPGROUP_WARPS * ROWS_AT_ONCE
"""Those of the warpgroup."""


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
    number: Int32,
    t: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Round the query rows of a tile to e4m3, with a scale each.

    The score warpgroup calls it when its last scores of the tile before are done. Its warps take
    turns at the rows. The scales reach their threads by the first bytes of the rows in the ring.

    Args:
        shared: `SharedBlocks`.
        exchange: `Exchange`.
        barriers, number, columns: see `producer.load_queries`.
        t: this thread.
        dtype: element type of the queries.

    Returns:
        The scales of this thread's two rows.
    """
    warp, lane = t // 32, t % 32
    per_token = shared.scales is not None
    sync_warpgroup(Handover.SCORES)  # no warp reads the last tile's queries any more
    targets = row_targets(exchange, warp, lane, per_token)
    for step in cutlass.range(columns // STEP_ROWS, unroll=1):
        stage = number + step * STEP_ROWS // STAGE_ROWS
        cute.arch.mbarrier_wait(full(barriers, stage_of(stage)), phase_of(stage))
        latent_at, rope_at = query_place(shared, number, step * STEP_ROWS + warp)
        rows = []
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            row = i * WARPGROUP_WARPS
            latent = cute.make_rmem_tensor((LANE_COLUMNS // 2, PARTS), Int32)
            for part in cutlass.range_constexpr(PARTS):
                place = latent_at + row * QUERY_BYTES + part * 512
                cute.autovec_copy(words_at(place + lane * 16, 4), latent[None, part])
            rope = words_at(rope_at + row * QUERY_ROPE_BYTES + lane * 4, 1)[0]
            words = [latent[i] for i in range(cute.size(latent))]
            peak = largest(words if const_expr(per_token) else [*words, rope], dtype)
            # They are not negative, so their bits are in their order.
            peak = cute.arch.warp_redux_sync(peak.bitcast(Int32), "max").bitcast(Float32)
            rows.append((words, rope, peak))
        own = Float32(1.0)
        for i in cutlass.range_constexpr(ROWS_AT_ONCE):
            words, rope, peak = rows[i]
            scale = cute.arch.fmax(peak * (1.0 / E4M3_MAX), Float32(2.0**-120))
            scale = cutlass.select_(peak > 0.0, scale, Float32(1.0))
            own = cutlass.select_(lane == i, scale, own)
            store_row(targets, words, rope, cute.arch.rcp_approx(scale), step, i, dtype, per_token)
        if lane < ROWS_AT_ONCE:
            words_at(latent_at + lane * (WARPGROUP_WARPS * QUERY_BYTES), 1)[0] = own.bitcast(Int32)
    cute.arch.fence_view_async_shared()
    sync_warpgroup(Handover.SCORES)
    scales = cute.make_rmem_tensor(2, Float32)
    scales.fill(1.0)
    for r in cutlass.range_constexpr(2):
        row = warp * 16 + lane // 4 + 8 * r
        if row < columns:
            latent_at, _ = query_place(shared, number, row)
            scales[r] = words_at(latent_at, 1)[0].bitcast(Float32)
    cute.arch.sync_warp()
    hand_over_queries(barriers, number, lane_behind(lane, scales[0], scales[1]), columns)
    return scales[0], scales[1]


def held_tensor(columns: int, per_token: bool, clusters: bool) -> cute.Tensor | None:
    """Registers for the first columns of the queries: operand A, (byte, M tile, k).

    None in kernels for few query rows, which memory bounds.

    Args:
        columns: query rows on the N side.
        per_token: whether there are scales per token.
        clusters: whether the kernel is for clusters, whose code leaves fewer registers.
    """
    if (columns, clusters) not in HELD:
        return None
    products = HELD[columns, clusters][per_token]
    layout = cute.make_layout(((4, 2, 2), 1, products), stride=((1, 4, 8), 0, 16))
    return cute.make_rmem_tensor(layout, Float8E4M3FN)


def hold_queries(held: cute.Tensor | None, q_bytes: cute.Pointer, t: Int32) -> None:
    """Load the first columns of the rounded queries to registers."""
    if held is None:
        return
    words = cute.recast_tensor(held, Int32)
    row = t // 32 * 16 + t % 16
    for k in range(cute.size(held, mode=[2])):
        chunk = (k % 4 * 2 + t % 32 // 16) ^ (t % 8)
        at = q_bytes.toint() + (k // 4 * TILE_BYTES + row * 128 + chunk * 16)
        found = load_matrices(at)
        for i in range(4):
            words[(0, i % 2, i // 2), 0, k] = found[i]


def load_matrices(at: Any, transposed: bool = False) -> Any:
    """Four matrices of 8 x 8 pairs of bytes to registers, a word of each per thread.

    Args:
        at: address of the row that this lane brings: lanes 0 to 7 those of the first matrix.
        transposed: whether a thread has two rows of a column instead of two columns of a row.
    """
    kind = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16"
        " { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[at],
    )


def hand_over_queries(barriers: Any, number: Any, lane: Any, columns: int) -> None:
    """Leave the stages of a tile's queries to the value warps, which release them."""
    for i in range(query_stages(columns)):
        release(weighed(barriers, stage_of(number + i)), lane)


def words_at(place: cute.Pointer, count: int) -> cute.Tensor:
    """Words in shared memory at a place that is aligned to all of them."""
    words = cute.recast_ptr(place.align(4 * count), dtype=Int32)
    return cute.make_tensor(words, cute.make_layout(count))


def row_targets(
    exchange: Any, warp: Int32, lane: Int32, per_token: bool
) -> tuple[list[Any], list[Any]]:
    """Addresses of this lane's latent and rope part in the warp's first two rows.

    The rows of a warp are four apart. Those of even and odd turns are swizzled alike.
    """
    chunk = lane // 2
    latent = exchange.q_bytes.toint() + (warp * 128 + chunk // 8 * TILE_BYTES + lane % 2 * 8)
    latents = [latent + (chunk % 8 ^ (warp + 4 * i)) * 16 for i in range(2)]
    rope = exchange.q_rope_bytes.toint()
    if per_token:
        ropes = [
            rope + (warp * 128 + (lane // 4 ^ (warp + 4 * i)) * 16 + lane % 4 * 4) for i in (0, 1)
        ]
    else:
        ropes = [
            rope + (warp * 64 + (lane // 8 ^ (warp // 2 + 2 * i)) * 16 + lane % 8 * 2)
            for i in (0, 1)
        ]
    return latents, ropes


def store_row(
    targets: tuple[list[Any], list[Any]],
    words: list[Int32],
    rope: Int32,
    inverse: Float32,
    step: Int32,
    turn: int,
    dtype: Any,
    per_token: bool,
) -> None:
    """Store this lane's part of a query row over its scale.

    The rope part is divided by the scale too; where it is e4m3 the scale covers it.
    """
    latents, ropes = targets
    row = turn * WARPGROUP_WARPS
    for part in range(PARTS):
        four = words[part * LANE_COLUMNS // 2 : (part + 1) * LANE_COLUMNS // 2]
        wide = [number * inverse for word in four for number in halves(word, dtype)]
        narrow = cute.make_rmem_tensor(LANE_COLUMNS, Float8E4M3FN)
        narrow.store(vector_of(wide).load().to(Float8E4M3FN))
        eight = cute.recast_tensor(narrow, Int32)
        offset = row * 128 + part * (2 * TILE_BYTES)
        cute.arch.inline_ptx(
            f"st.shared.v2.b32 [{{$r0}} + {offset}], {{ {{$r1}}, {{$r2}} }};",
            read_only_args=[latents[turn % 2] + step * (STEP_ROWS * 128), eight[0], eight[1]],
        )
    kind, row_bytes = (BFloat16, 128) if per_token else (Float8E4M3FN, 64)
    scaled = cute.make_rmem_tensor(2, kind)
    scaled.store(vector_of([number * inverse for number in halves(rope, dtype)]).load().to(kind))
    width = 2 * kind.width
    number = cute.recast_tensor(scaled, Int32 if per_token else Int16)[0]
    cute.arch.inline_ptx(
        f"st.shared.b{width} [{{$r0}} + {row * row_bytes}], {{$r1}};",
        read_only_args=[ropes[turn % 2] + step * (STEP_ROWS * row_bytes), number],
    )


def vector_of(numbers: list[Float32]) -> cute.Tensor:
    """Numbers in registers, as a tensor."""
    found = cute.make_rmem_tensor(len(numbers), Float32)
    for i, number in enumerate(numbers):
        found[i] = number
    return found


def halves(word: Int32, dtype: Any) -> tuple[Float32, Float32]:
    """Both 16-bit numbers of a word."""
    if dtype is BFloat16:
        return (word << 16).bitcast(Float32), (word & -0x10000).bitcast(Float32)
    pair = cute.make_rmem_tensor(2, dtype)
    cute.recast_tensor(pair, Int32)[0] = word
    wide = pair.load().to(Float32)
    return wide[0], wide[1]


def largest(words: list[Int32], dtype: Any) -> Float32:
    """The largest magnitude of 16-bit numbers; any, if one is NaN, as its row is."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    found = list(words)
    while len(found) > 1:
        # Of both halves the larger magnitude, with some sign.
        pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
        found = [
            cute.arch.inline_ptx(
                f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Int32],
                read_only_args=pair,
            )
            if len(pair) == 2
            else pair[0]
            for pair in pairs
        ]
    low, high = halves(found[0] & 0x7FFF7FFF, dtype)
    return cute.arch.fmax(low, high)


def store_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> None:
    """Store registers at a byte offset in shared memory, in one go."""
    cute.autovec_copy(values, shared_bytes(values, base, offset))


def shared_bytes(values: cute.Tensor, base: cute.Pointer, offset: Any) -> cute.Tensor:
    """As many numbers at a byte offset in shared memory, aligned to their size."""
    width = cute.size(values) * values.element_type.width // 8
    place = (cute.recast_ptr(base, dtype=cutlass.Uint8) + offset).align(width)
    return cute.make_tensor(
        cute.recast_ptr(place, dtype=values.element_type), cute.make_layout(cute.size(values))
    )
