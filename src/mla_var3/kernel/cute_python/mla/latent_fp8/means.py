"""Sums of the 8-bit latent kernel, kept near zero where the values of a column have a mean.

Hopper adds 8-bit products with 13 bits: every product is cut to a multiple of 2**-13 of the sum so
far. Values of one sign lose 7 % over 4096 tokens that way, those without a mean nothing. So the
tensor cores subtract the means now and then:

    O^T [256, rows] += M^T [256, 1] W^T [1, rows]

M is minus the mean of a column in e4m3, 0 where it is small. W is what the weights of a row have
added up to, in e4m3 too. What was subtracted is therefore known exactly, and `restore` adds it to
the output at the end of a tile, in float32. Subtracting half an interval ahead keeps a sum of equal
weights between plus and minus half an interval.

The means are those of a tile's first two KV blocks, each for half of the columns of a warpgroup.
Two warps of the producer's warpgroup, which idle otherwise, compute them while the score warpgroup
computes the first weights. Where no column has a mean, and in short tiles, nothing is subtracted.
"""

import struct
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.columns import own_row
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.hopper.rows import row_sum
from mla_var3.kernel.cute_python.mla.hopper.warps import lane_behind, release
from mla_var3.kernel.cute_python.mla.latent.merge import WATCHER_WARP
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    NO_BLOCK,
    empty,
    full,
    has_means,
    phase_of,
    stage_of,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    COMPUTING,
    FLUSH_PAIRS,
    HALF,
    MEAN_COPIES,
    MEAN_PAIRS,
    TILE_BYTES,
    Handover,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.weights import own_rows

MEAN_BYTES = 16
"""Bytes of a row's weights of the means. The K side of an 8-bit wgmma reads them twice."""
FIRST_MEAN_WARP = WATCHER_WARP + 1
LEAST_MEAN, WORTH_MEAN = 0.4, 0.7
"""From where on a mean is subtracted, as a share of the mean magnitude, and from where on one makes
subtracting worth while: 0.32 and 0.56 standard deviations of normal values. The mean of 64 values
without one lies below by 2.6 and 4.5 of its own deviations; a mean that is not there would only
make sums larger."""


def weights_layout(columns: int) -> cute.Layout:
    """Layout of the weights of the means, [columns, 32].

    It has no swizzle. The second half of the K side is the first one again.
    """
    return cute.make_layout(
        ((8, columns // 8), (MEAN_BYTES, 2)), stride=((MEAN_BYTES, 8 * MEAN_BYTES), (1, 0))
    )


# --- parts of a tile ------------------------------------------------------------------------------


def flushes(tile: Any) -> Any:
    """How often the output of a tile moves to memory before the tile ends."""
    return (tile.pairs + (FLUSH_PAIRS - 1)) // FLUSH_PAIRS - 1


@cute.jit
def walk_parts(
    tile: cutlass.Constexpr,
    means: cutlass.Constexpr,
    phase: Int32,
    take_part: cutlass.Constexpr,
    take_means: cutlass.Constexpr,
    flush: cutlass.Constexpr,
) -> Int32:
    """Walk the parts of a tile, alike in the score warpgroup and the value warpgroups.

    Args:
        tile: the work tile.
        means: `Means`.
        phase: phase of their mbarrier.
        take_part: called with the first pair of KV blocks of a part and the one behind its last.
        take_means: called with the number of pairs so far, where means are subtracted.
        flush: called with the number of times before, where the output moves to memory.

    Returns:
        Whether means were subtracted: not 0.
    """
    removing = Int32(has_means(tile))
    segments = flushes(tile) + 1
    for segment in cutlass.range(segments, unroll=1):
        begin = segment * FLUSH_PAIRS
        last_pair = cutlass.min(begin + FLUSH_PAIRS, tile.pairs)
        while begin < last_pair:
            end = part_end(begin, last_pair, removing)
            take_part(begin, end)
            if end < last_pair:
                if begin == 0:
                    removing = wait_means(means, phase)
                if removing != 0:
                    take_means(end)
            begin = end
        if segment < segments - 1:
            flush(segment)
    return removing


@cute.jit
def part_end(begin: Int32, last: Int32, removing: Int32) -> Int32:
    """Where a part of a segment ends, in pairs of KV blocks.

    Means are subtracted in the middle between two multiples of `MEAN_PAIRS`: a sum of equal weights
    is then 0 where the output moves to memory. Where no means are subtracted, the part takes all
    that is left.

    Args:
        begin: where it begins: a multiple of `MEAN_PAIRS`, or a middle.
        last: where the segment ends.
        removing: whether means are subtracted, as far as is known: not 0.
    """
    end = last
    if removing != 0:
        end = cutlass.min(begin + (begin % MEAN_PAIRS + MEAN_PAIRS // 2), last)
    # Else the main loops keep their counters, and with them all descriptors, in vector registers.
    return cute.arch.make_warp_uniform(end)


@cute.jit
def wait_means(means: cutlass.Constexpr, phase: Int32) -> Int32:
    """Wait for the means of the tile. Whether there are some to subtract: not 0."""
    cute.arch.mbarrier_wait(means.ready, phase)
    return cute.arch.make_warp_uniform(means.found[0] | means.found[1])


# --- the warps that compute the means -------------------------------------------------------------


@cute.jit
def compute_means(
    means: cutlass.Constexpr,
    keys_bytes: cute.Pointer,
    scales: cutlass.Constexpr,
    barriers: cute.Pointer,
):
    """Compute the means of all long tiles of the CTA.

    Two warps call it, each for the columns of a warpgroup. They release all blocks, also those that
    they do not read.

    Args:
        means: `Means`.
        keys_bytes: the KV blocks in shared memory.
        scales: of the tokens in all stages, or None.
        barriers: mbarriers.
    """
    thread, _, _ = cute.arch.thread_idx()
    # A lane has 4 neighbouring columns of each of two column tiles. Other numbers of a lane follow
    # from this one when needed: registers are few here, and all warps would spill.
    offset = (thread // 32 - FIRST_MEAN_WARP) * (2 * TILE_BYTES) + thread % 32 * 4
    number = Int32(0)
    phase = Int32(1)
    while wait_block(means, barriers, number) != NO_BLOCK:
        if number == means.first_block[0]:
            found = Int32(0)
            reference = Float32(0.0)
            for tile in cutlass.range(2, unroll=1):
                wait_block(means, barriers, number)
                sums, sizes = (cute.make_rmem_tensor(2, Int32) for _ in range(2))
                sums.fill(0)
                sizes.fill(0)
                at = keys_bytes.toint() + (stage_of(number) * 4 + tile) * TILE_BYTES + offset
                for row in cutlass.range(8, unroll=1):
                    # 16 bytes are swizzled by the row.
                    add_columns(sums, sizes, (at + row * 128) ^ (row * 16))
                lane = hidden(offset, number) % 128 // 4
                reader = lane_behind(lane, sizes[1])  # in which all eight rows are
                if const_expr(scales is not None):
                    stage = stage_of(number)
                    reference += scales[lane, stage] + scales[lane + 32, stage]
                    reader = lane_behind(reader, reference)
                cute.arch.sync_warp()
                release(empty(barriers, stage_of(number)), reader)
                number += 1
                if tile == 0:
                    # Consumers may still use those of the tile before.
                    cute.arch.mbarrier_wait(means.free, phase)
                place = hidden(offset, number)
                place = place // (2 * TILE_BYTES) * HALF + thread_place(place)
                for i in cutlass.range_constexpr(2):
                    at = means.values.toint() + (place + tile * 4 + 8 * i)
                    found |= store_means(sums[i], sizes[i], at)
            phase ^= 1
            found = cute.arch.vote_ballot_sync(found != 0)
            last = hidden(offset, number)
            if last % 128 == 0:
                means.found[last // (2 * TILE_BYTES)] = Int32(found)
            if const_expr(scales is not None):
                for step in cutlass.range_constexpr(5):
                    reference += cute.arch.shuffle_sync_bfly(reference, offset=1 << step)
                means.scale[0] = reference * (1.0 / (2 * KV_BLOCK))
            else:
                means.scale[0] = Float32(1.0)
            cute.arch.sync_warp()
            release(means.ready, last % 128)
        else:
            release(empty(barriers, stage_of(number)), hidden(offset, number) % 128)
            number += 1


def thread_place(column: Any) -> Any:
    """Where an even column of a column tile lies among bytes by consumer thread.

    A thread has eight neighbouring bytes: of its columns of the four M tiles, two of each. Those of
    the second column tile lie 4 bytes further, those of the next two columns 8.
    """
    return column % 64 // 16 * 64 + column % 16 * 4 + column % 128 // 64 * 2


def hidden(value: Int32, number: Int32) -> Int32:
    """The same value, as if it depended on `number`: what follows from it is computed here."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 x; mov.b32 x, {$r1}; mov.b32 {$w0}, {$r0}; }",
        write_only_types=[Int32],
        read_only_args=[value, number],
    )


def wait_block(means: Any, barriers: cute.Pointer, number: Int32) -> Int32:
    """Wait for a KV block, by its number in the CTA; `first_block` of then."""
    cute.arch.mbarrier_wait(full(barriers, stage_of(number)), phase_of(number))
    return means.first_block[0]


def add_columns(sums: cute.Tensor, sizes: cute.Tensor, address: Any) -> None:
    """Add four numbers of eight tokens, and their magnitudes, over the tokens that are read.

    Args:
        sums, sizes: pairs of float16.
        address: where the numbers of the first token are. The others lie 8 rows apart.
    """
    moves = "".join(f" mov.b32 m{i}, {{$r{1 + i}}}; mov.b32 n{i}, {{$r{3 + i}}};" for i in range(2))
    steps = "".join(f" ld.shared.b32 v{k}, [{{$r0}} + {k * 1024}];" for k in range(8))
    for k in range(8):
        steps += f" mov.b32 {{a, b}}, v{k};"
        for i in range(2):
            steps += f" cvt.rn.f16x2.e4m3x2 x, {'ab'[i]}; fma.rn.f16x2 m{i}, x, s, m{i};"
            steps += f" abs.f16x2 x, x; fma.rn.f16x2 n{i}, x, s, n{i};"
    results = "".join(f" mov.b32 {{$w{i}}}, m{i}; mov.b32 {{$w{2 + i}}}, n{i};" for i in range(2))
    found = cute.arch.inline_ptx(
        "{ .reg .b32 v0, v1, v2, v3, v4, v5, v6, v7, m0, m1, n0, n1, x, s; .reg .b16 a, b;"
        f" mov.b32 s, {half_twice(1 / KV_BLOCK)};{moves}{steps}{results} }}",
        write_only_types=[Int32] * 4,
        read_only_args=[address, *(sums[i] for i in range(2)), *(sizes[i] for i in range(2))],
    )
    for i in range(2):
        sums[i] = found[i]
        sizes[i] = found[2 + i]


def store_means(mean: Int32, size: Int32, address: Any) -> Int32:
    """Store minus the means of two columns as e4m3, 0 where they are below `LEAST_MEAN`.

    Args:
        mean: two means.
        size: their mean magnitudes.
        address: where they are stored.

    Returns:
        Whether one is above `WORTH_MEAN`: not 0.
    """
    least, worth = (half_twice(share) for share in (LEAST_MEAN, WORTH_MEAN))
    return cute.arch.inline_ptx(
        f"{{ .reg .b32 x, y, s; .reg .b16 a; mov.b32 s, {least};"
        " abs.f16x2 x, {$r0}; mul.rn.f16x2 y, {$r1}, s; set.ge.f16x2.f16x2 y, x, y;"
        " neg.f16x2 x, {$r0}; mul.rn.f16x2 x, x, y;"
        " cvt.rn.satfinite.e4m3x2.f16x2 a, x; st.shared.b16 [{$r2}], a;"
        f" abs.f16x2 x, {{$r0}}; mov.b32 s, {worth}; mul.rn.f16x2 y, {{$r1}}, s;"
        " set.ge.f16x2.f16x2 {$w0}, x, y; }",
        write_only_types=[Int32],
        read_only_args=[mean, size, address],
    )


def half_twice(number: float) -> str:
    """A number in float16, twice in a word of PTX."""
    return "0x" + 2 * struct.pack(">e", number).hex()


# --- the score warpgroup --------------------------------------------------------------------------


@cute.jit
def weigh_means(step: cutlass.Constexpr, means: cutlass.Constexpr, pairs: Int32, t: Int32):
    """Weights of the means: what the weights of a row have added up to, and half an interval.

    What they have added up to is taken as twice the lesser of the sums of even and of odd blocks,
    so that a token with most of the weight, as the first one often is, does not count: its values
    are not the mean.

    Args:
        step: `ScoreStep`.
        means: `Means`. Its last weights have been read: the value warpgroups are no more than three
            blocks behind.
        pairs: pairs of KV blocks of the tile so far.
        t: this thread.
    """
    state = step.state
    ahead = means.scale[0] * (1.0 + cute.arch.rcp_approx(Float32(pairs)) * (0.5 * MEAN_PAIRS))
    own_words = cute.recast_tensor(means.weights, Int32)
    for r in cutlass.range_constexpr(2):
        row = own_rows(t)[r]
        twice = row_sum(state.sums[r]) - cute.math.absf(row_sum(state.odd[r]))
        removed = means.removed[row]
        word, weight = rounded((twice * ahead - removed) * (1.0 / MEAN_COPIES))
        if row < step.columns:
            own_words[row, t % 4] = word
        cute.arch.sync_warp()  # the threads of a row have read what is written now
        means.removed[row] = removed + weight * MEAN_COPIES
    cute.arch.barrier_arrive(barrier_id=Handover.MEANS, number_of_threads=COMPUTING)


# --- the value warpgroups -------------------------------------------------------------------------


@cute.jit
def subtract_means(step: cutlass.Constexpr, means: cutlass.Constexpr, t: Int32, group: Int32):
    """Subtract the means times their weights from the output of this warpgroup.

    Args:
        step: `ValueStep`. All products have been waited for.
        means: `Means`.
        t, group: this thread and its warpgroup.
    """
    work = step.work
    cute.arch.barrier(barrier_id=Handover.MEANS, number_of_threads=COMPUTING)
    cute.arch.fence_view_async_shared()
    words = cute.recast_tensor(work.values, Int32)
    own = column_bytes(means.values, t, group)
    for m in cutlass.range_constexpr(HALF // 64):
        for r in cutlass.range_constexpr(2):
            selector = 0x1111 * (m % 2 * 2 + r)
            mean = Int32(cute.arch.prmt(own[m // 2], Int32(0), Int32(selector)))
            for half in cutlass.range_constexpr(2):
                words[(0, r, half), m, 0] = mean
    warpgroup.fence()
    atom = cute.make_mma_atom(step.mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    cute.gemm(
        atom, work.acc, work.values[(None, None, 0)], work.mean_weights[(None, None, 0)], work.acc
    )
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def rounded(number: Float32) -> Any:
    """A number as e4m3, four times in 32 bits, and as a float again."""
    # The word by `prmt`: from `mov.b32 {$w0}, {x, x}` in a loop ptxas of CUDA 12.9 makes a word and
    # a float that take half of a register which nothing writes.
    return cute.arch.inline_ptx(
        "{ .reg .b16 x, y, z; .reg .b32 h; cvt.rn.satfinite.e4m3x2.f32 x, {$r0}, {$r0};"
        " cvt.u32.u16 h, x; prmt.b32 {$w0}, h, h, 0x1010; cvt.rn.f16x2.e4m3x2 h, x;"
        " mov.b32 {y, z}, h; cvt.f32.f16 {$w1}, y; }",
        write_only_types=[Int32, Float32],
        read_only_args=[number],
    )


def column_bytes(values: Any, t: Int32, group: Int32) -> Any:
    """The bytes of this thread's eight columns, in two words: (one of two, M tile).

    Args:
        values: pointer to a byte of each column, see `thread_place`.
        t, group: this thread and its warpgroup.
    """
    address = values.toint() + (group * 32 + t // 32 * 8 + t % 32 // 4) * 8
    return cute.arch.inline_ptx(
        "ld.shared.v2.b32 { {$w0}, {$w1} }, [{$r0}];",
        write_only_types=[Int32] * 2,
        read_only_args=[address],
    )


@cute.jit
def restore(
    o: cute.Tensor,
    means: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    columns: cutlass.Constexpr,
):
    """Add what was subtracted from the output of this warpgroup."""
    own = column_bytes(means.values, t, group)
    numbers = [number for i in range(2) for number in floats(own[i])]
    for j in cutlass.range_constexpr(columns // 8):
        for e in cutlass.range_constexpr(2):
            removed = means.removed[own_row(j, e, t % 32)]
            for m in cutlass.range_constexpr(HALF // 64):
                for r in cutlass.range_constexpr(2):
                    at = ((e, j), (r, m))
                    o[at] = o[at] - numbers[2 * m + r] * removed


def floats(word: Int32) -> Any:
    """Four e4m3 numbers of a word as floats."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b, w, x, y, z; .reg .b32 h; mov.b32 {a, b}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 h, a; mov.b32 {w, x}, h; cvt.rn.f16x2.e4m3x2 h, b;"
        " mov.b32 {y, z}, h; cvt.f32.f16 {$w0}, w; cvt.f32.f16 {$w1}, x; cvt.f32.f16 {$w2}, y;"
        " cvt.f32.f16 {$w3}, z; }",
        write_only_types=[Float32] * 4,
        read_only_args=[word],
    )


@cute.jit
def end_tile(means: cutlass.Constexpr, tile: cutlass.Constexpr, t: Int32):
    """The means of the tile are no longer needed."""
    if has_means(tile):
        release(means.free, t % 32)
