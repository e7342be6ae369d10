"""Results of the 8-bit latent kernel: moved to float32 now and then, normalised and written."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from mla_var3.kernel.cute_python.mla.hopper.columns import own_row
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMERS,
    LATENT,
    ROWS,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    normaliser,
)
from mla_var3.kernel.cute_python.mla.hopper.warps import sync_warpgroup
from mla_var3.kernel.cute_python.mla.latent.cluster import meet, send_row, send_values, weights
from mla_var3.kernel.cute_python.mla.latent.mask import existing_rows
from mla_var3.kernel.cute_python.mla.latent.merge import slot_rows
from mla_var3.kernel.cute_python.mla.latent.ops import final_lse
from mla_var3.kernel.cute_python.mla.latent.producer import Barrier
from mla_var3.kernel.cute_python.mla.latent.scheduler import (
    Split,
    cta_slot,
    partial_slot,
    writes,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.first_token import (
    own_score,
    own_values,
    received_score,
    send_first,
    with_first,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.means import end_tile, restore
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    COMPUTING,
    HALF,
    WEIGHT_BITS,
    Exchange,
    Handover,
)

READ_ROWS = 8
"""Rows of a thread that are read back at once: 64 registers, those of the scores and values, which
nothing uses at the end of a tile. Other numbers were not measured."""
SLOT_WORDS = ROWS * LATENT
"""Words of the slot of a partial."""
THREAD_STEP = CONSUMERS * 16
"""Bytes between neighbouring groups of four flushed numbers of a thread."""
FOUR = "{ {$r1}, {$r2}, {$r3}, {$r4} }"


@cute.jit
def own_words(
    outputs: cutlass.Constexpr, t: Int32, group: Int32, scheduler: cutlass.Constexpr
) -> Int64:
    """Address of the first 16 bytes of this thread's flushed output.

    A slot has room for float32, of which a partial in 16 bits takes the first half. Flushed output
    lies in the second halves of both slots of the CTA: the slots may hold partials of other tiles.
    No thread reads what another wrote, so it lies in the order in which warps write it.
    """
    start = Int64(cta_slot(scheduler)) * SLOT_WORDS + SLOT_WORDS // 2
    words = cute.recast_ptr(outputs.o_partial, dtype=Float32)
    return (words + start + (group * WARPGROUP + t) * 4).toint()


def four_of(j: int, e: int, half: int) -> tuple[int, list[tuple[Any, Any]]]:
    """Offset in bytes of four numbers of an own row, and where they are in the output."""
    number = (j * 2 + e) * 2 + half
    slot, place = divmod(number * THREAD_STEP, SLOT_WORDS * 4 // 2)
    offset = slot * SLOT_WORDS * 4 + place
    return offset, [((e, j), (r, 2 * half + m)) for m in range(2) for r in range(2)]


@cute.jit
def flush(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    outputs: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Move the output to memory, times a factor, or add it to what is there. Nothing is read.

    Only this thread uses its numbers before `finish`. All accesses are relaxed ones of the GPU's
    scope, which keep their order at an address and do not use the L1 cache.
    """
    address = own_words(outputs, t, group, scheduler)
    cute.arch.barrier(barrier_id=Handover.FLUSH, number_of_threads=COMPUTING)
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            move(o, address, j, e, exchange.flush[own_row(j, e, t % 32)])


def move(o: cute.Tensor, address: Int64, j: int, e: int, factor: Float32) -> None:
    """Write an own row of the output, or add it to what is there, times a factor, and clear it."""
    for half in range(2):
        offset, places = four_of(j, e, half)
        scaled = (o[place] * cute.math.absf(factor) for place in places)
        cute.arch.inline_ptx(
            "{ .reg .pred p; setp.lt.f32 p, {$r5}, 0f00000000;"
            f" @p st.relaxed.gpu.global.v4.f32 [{{$r0}} + {offset}], {FOUR};"
            f" @!p red.relaxed.gpu.global.add.v4.f32 [{{$r0}} + {offset}], {FOUR}; }}",
            read_only_args=[address, *scaled, factor],
        )
        for place in places:
            o[place] = Float32(0.0)


def read_back(o: cute.Tensor, exchange: Exchange, address: Int64, t: Int32, columns: int) -> None:
    """Add what was flushed to the output.

    The reads of `READ_ROWS` rows are started before the first is used.
    """
    own_rows = [(j, e) for j in range(columns // 8) for e in range(2)]
    for first in range(0, len(own_rows), READ_ROWS):
        rows = own_rows[first : first + READ_ROWS]
        found = [[read(address, four_of(*own, half)[0]) for half in range(2)] for own in rows]
        for (j, e), halves in zip(rows, found, strict=True):
            scale = exchange.fall[own_row(j, e, t % 32)]
            for half in range(2):
                for place, value in zip(four_of(j, e, half)[1], halves[half], strict=True):
                    o[place] = o[place] + value * scale


def read(address: Any, offset: int) -> Any:
    """Start to read four numbers."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} },"
        f" [{{$r0}} + {offset}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


@cute.jit
def finish(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    means: cutlass.Constexpr,
    first_token: cutlass.Constexpr,
    removing: Int32,
    outputs: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    flushed: Int32,
    cache_scale: Float32,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    mailbox: cutlass.Constexpr,
):
    """Normalise by the row sums, and write the tile's result or partial.

    What a row needs is computed by one thread of each value warpgroup. The code of the others is
    short: it runs once per tile and is not in the instruction cache then.
    """
    cute.arch.barrier(barrier_id=Handover.TILE, number_of_threads=COMPUTING)
    score = own_score(outputs, tile, t)
    total, top = exchange.row_sum[t % ROWS], exchange.row_max[t % ROWS]
    if (flushed | removing) != 0:  # one jump over both where there is neither
        if flushed != 0:
            read_back(o, exchange, own_words(outputs, t, group, scheduler), t, columns)
        if removing != 0:
            restore(o, means, t, group, columns)
    end_tile(means, tile, t)
    if const_expr(scheduler.clusters):
        if tile.split == Split.HALF:
            score, total, top = merge_halves(
                o, exchange, first_token, score, total, top, mailbox, t, group, scheduler, columns
            )
    slot = partial_slot(tile, scheduler)
    partial, exists = writes(tile, Boolean(True), group, scheduler)
    rows = existing_rows(tile, scheduler)
    if not exists:
        rows = Int32(0)
    lse, lse_partial = outputs.lse, outputs.lse_partial
    if t < ROWS and exists:
        total, top, own, share = with_first(total, top, score, first_token.scale[0])
        inverse, lse_log2 = normaliser(total, top - WEIGHT_BITS)
        factor = inverse * cache_scale
        exchange.factors[t, group] = factor * own
        exchange.shares[t, group] = factor * share
        if group == 0 and t < rows:
            if partial:
                lse_partial[slot * ROWS + t] = lse_log2
            else:
                at = tile.base + tile.row + t
                lse[at] = final_lse(lse_log2, outputs.empty_positive)
    sync_warpgroup(Barrier.WARPGROUP_0 + group)
    factors = (exchange.factors, exchange.shares)
    values = own_values(first_token, t, group)
    column = group * HALF + t // 32 * 16 + t % 32 // 4 * 2  # the first of this thread's
    of_partial = outputs.o_partial + (
        Int64(slot) * (slot_rows(outputs.o_partial) * LATENT) + column
    )
    of_result = outputs.o_latent + (Int64(tile.base + tile.row) * LATENT + column)
    if const_expr(dtype is outputs.o_partial.dtype):
        address = of_result.toint()
        if partial:
            address = of_partial.toint()
        first = cute.make_ptr(dtype, address, cute.AddressSpace.gmem)
        store_rows(o, values, factors, first, rows, t, group, columns, dtype)
    elif partial:
        other = outputs.o_partial.dtype
        store_rows(o, values, factors, of_partial, rows, t, group, columns, other)
    else:
        store_rows(o, values, factors, of_result, rows, t, group, columns, dtype)


@cute.jit
def merge_halves(
    o: cute.Tensor,
    exchange: cutlass.Constexpr,
    first_token: cutlass.Constexpr,
    score: Float32,
    total: Float32,
    top: Float32,
    mailbox: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    scheduler: cutlass.Constexpr,
    columns: cutlass.Constexpr,
):
    """Merge the half of this CTA with that of the other of its cluster, see `latent/cluster.py`.

    Behind it the warpgroup that keeps its columns has the output of both halves, their sums and
    maxima. Both CTAs have the first token.

    Returns:
        Of row `t` the score of the first token, the sum and the maximum.
    """
    rank = scheduler.cluster_rank
    meet()  # no warp of the cluster reads its KV blocks any more
    if group != rank:
        send_values(o, mailbox, 1 - rank, t)
        send_first(first_token, score, 1 - rank, t, group)
        if t < ROWS:
            send_row(total, top, t, mailbox, 1 - rank)
    meet()
    if group == rank:
        if t < ROWS:
            total, top, own, other = weights(total, top, mailbox.rows[t, 0], mailbox.rows[t, 1])
            # Where the other warpgroup, which writes nothing, would have its factors.
            exchange.factors[t, 1 - group] = own
            exchange.shares[t, 1 - group] = other
        sync_warpgroup(Barrier.WARPGROUP_0 + group)
        flat = cute.make_tensor(o.iterator, cute.make_layout(cute.size(o)))
        vector = cute.size(mailbox.values, mode=[0])
        for i in cutlass.range_constexpr(cute.size(mailbox.values, mode=[2])):
            received = mailbox.values[None, t, i].load().to(Float32)
            for n in cutlass.range_constexpr(vector):
                at = vector * i + n
                row = own_row(at // 4 % (columns // 8), at % 2, t % 32)
                own, other = exchange.factors[row, 1 - group], exchange.shares[row, 1 - group]
                flat[at] = flat[at] * own + received[n] * other
    return received_score(first_token, score, t, rank), total, top


@cute.jit
def store_rows(
    o: cute.Tensor,
    values: cutlass.Constexpr,
    factors: cutlass.Constexpr,
    first: cute.Pointer,
    rows: Int32,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """Write this thread's output with the first token, each times a factor of its row.

    Args:
        o: the output by query row.
        values: the first token's, in this thread's columns.
        factors: [64, warpgroup] those of the output and of `values`.
        first: this thread's column of row 0.
        rows: how many are written.
        t, group: this thread and its warpgroup.
        columns: query rows on the N side.
        dtype: type in which they are written.
    """
    lane = t % 32
    half = columns // 2
    # Aligned once: all that is added below is a constant.
    first = (first + own_row(0, 0, lane) * LATENT).align(2 * dtype.width // 8)
    # In two parts, for the same code: it is not in the instruction cache, and to fetch it takes
    # longer than to move the numbers of the second part.
    for part in cutlass.range(2, unroll=1):
        begin = first + cute.assume(part * (half * LATENT), divby=2)
        for j in cutlass.range_constexpr(half // 8):
            for e in cutlass.range_constexpr(2):
                row = own_row(j, e, lane) + part * half
                own, share = (factor[row, group] for factor in factors)
                if row < rows:
                    for m in cutlass.range_constexpr(HALF // 64):
                        pair = cute.make_rmem_tensor(2, dtype)
                        for r in cutlass.range_constexpr(2):
                            number = o[(e, j), (r, m)] * own + values[2 * m + r] * share
                            pair[r] = number.to(dtype)
                        place = begin + ((j * 8 + e) * LATENT + m * 64)
                        cute.autovec_copy(pair, cute.make_tensor(place, 2))
                o[(e, j), None].store(o[(e, j + half // 8), None].load())
