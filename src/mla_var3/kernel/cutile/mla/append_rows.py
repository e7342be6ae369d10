"""append_rows: write new tokens into the latent cache, as they are or rounded to 8 bits.

    latent [m, k], rope [m, p]   new tokens; k and p powers of two, p may be 0
    taken [b] int32              tokens of each request that the cache took, from `reserve_pages`
    lengths [b] int32            tokens of each request, the taken ones included
    bounds [b+1]                 int32 or int64, first row of each request in packed rows
    block_table [b, max_pages]   int32; a dense cache has none, its requests stand for pages
    scale [1] float32            of the format "fp8", which has one scale
    -> latent_out [pages, page, k], rope_out [pages, page, p], scales_out [pages, page, g] float32:
       the parts of the cache; scales_out is not written in 16 bits and in "fp8"

A CTA has ROWS rows in a row, of one request where rows are padded. It reads them at once: which
these are depends on nothing that the device holds. Only what follows, the places and the pages of
each row, waits for the kernel in front of it. So the launch may be an early one: it then begins
while `reserve_pages` still runs. In packed rows the CTA counts the requests that end before each
row. Whatever lengths, bounds and block table hold, a token without a slot inside the cache is not
written.

The rounding is that of `op/mla/cache_formats.py`, which defines zeros, NaN and infinities, and the
results are the same, bit by bit, without its divisions: one per element in float32 took longer than
the memory. A tile that has an infinity, or a scale far from 1, takes a longer way. Every row is
read and written once. Latent rows come in two halves: with k=512 a warp holds a row of each, and a
peak needs no other warp.

For sm_80 and newer; 8 bits for sm_90 and newer, since cuTile has no float8 before.
"""

import cuda.tile as ct
from torch import Tensor

from mla_var3.kernel.cutile.mla.reserve_pages import power_of_two
from mla_var3.op.mla.cache_formats import ROPE_SHARE, CacheFormat
from mla_var3.op.mla.window.quantise import E4M3_MAX, LEAST_SCALE
from mla_var3.runtime.ct_kernel import Launch
from mla_var3.runtime.stage import is_power_of_two

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

INF = float("inf")
NAN = float("nan")

ROWS = 4
"""Tokens of a CTA: a warp has one (tileiras 13.4, sm_90, k=512). On an H200 8 of them, whose peaks
go through shared memory, take 3.0 to 3.4 us longer in "fp8_per_token", at 64 x 512 and 1 x 32768
tokens, 0.8 in "fp8_ds_mla", and 0.1 to 0.3 less in "fp8". Before rows were read early, 2 took 14
longer (docs/results/2026-11-16-nvidia-h200-fp8-latent.md)."""
NO_ROW = 2**30
MOST_CTAS = 65535
"""In the second and third dimension of a grid. Tiles are in the second where they fit: for an index
of the first tileiras 13.4 divides by the size of a cluster, 20 instructions before any load."""
AS_IS = -1
"""GROUPS of a cache that is not in 8 bits."""
LEAST_PLAIN, MOST_PLAIN = 2.0**-80, 2.0**80
"""Scales between them are plain: far enough from the ends of float32 for `quotient`."""
SHARE_HIGH = 37449 * 2.0**-24
SHARE_LOW = 1 / E4M3_MAX - SHARE_HIGH
"""1 / 448 in 16 bits, and the rest."""


@ct.function
def plain_scale_of(peaks):
    # Peaks of bfloat16 numbers, or infinities, over 448, where that is a plain scale: the product
    # with both parts of 1 / 448 has the same bits for all 8 bits of a peak.
    return ct.where(peaks == 0.0, 1.0, peaks * SHARE_HIGH + peaks * SHARE_LOW)


@ct.function
def scale_of(peaks):
    # The same for any finite peak: small ones are scaled up, so that no product is subnormal.
    scaled = ct.where(
        peaks < 1.0, plain_scale_of(peaks * 2.0**64) * 2.0**-64, plain_scale_of(peaks)
    )
    return ct.where(peaks == 0.0, 1.0, ct.maximum(scaled, LEAST_SCALE))


@ct.function
def finite(x):
    # Magnitudes; NaN and infinities count as 0.
    size = ct.abs(x)
    return ct.where(size < INF, size, 0.0)


@ct.function
def leading(x, dropped):
    # x [R, 1] without the last `dropped` bits.
    return ct.bitcast(ct.bitcast(x, ct.int32) & (-1 << dropped), ct.float32)


@ct.function
def reciprocal(scale):
    # [R, 1], plain -> two addends of 1 / scale, both positive: 16 bits, and the rest but 2**-35 of
    # it. All sums and products but the last are exact, so it does not matter which become an FMA.
    # The approximation is off by at most two units in its last place.
    approximate = ct.RoundingMode.APPROX
    near = ct.truediv(1.0, scale, rounding_mode=approximate, flush_to_zero=True)
    below = ct.bitcast(ct.bitcast(near, ct.int32) - 4, ct.float32)
    high = leading(below, 8)
    first = leading(scale, 16)
    second = leading(scale - first, 16)
    left = 1.0 - first * high - second * high - (scale - first - second) * high
    return high, left * below


@ct.function
def quotient(x, high, low):
    # x [R, C], bfloat16 numbers in float32, over a scale. e4m3 rounds it as it rounds x / scale:
    # x * high is exact, since x has 8 bits, and the sum is off by 2**-34 before it is rounded to
    # float32. So both are the same, or x / scale is that close to the middle between a tie of e4m3,
    # of 5 bits, and the next float32. With a scale of 24 bits and x of 8, only 2**24 - 1 can do so.
    return x * high + x * low


@ct.function
def rope_quotient(key, high, low):
    # key [R, C] over a plain scale of at least ROPE_SHARE of it. bfloat16 rounds it as key / scale:
    # tried with all keys and all scales, 256 of them up to a power of two. Small keys are scaled
    # up, so that no product that counts is subnormal.
    small = ct.abs(key) < 1.0
    scaled = quotient(ct.where(small, key * 2.0**64, key), high, low)
    return ct.where(small, scaled * 2.0**-64, scaled)


@ct.function
def saturated(scaled, x, dtype):
    # scaled: x over its scale. The conversion takes what is beyond +-448 to it, and keeps NaN.
    return ct.where(ct.abs(x) == INF, NAN, scaled).astype(dtype)


@ct.function
def is_plain(scale):
    return (scale > LEAST_PLAIN) & (scale < MOST_PLAIN)


@ct.function
def divided(x, scale, dtype):
    # x over any positive scale. Both times a power of two that makes the scale plain: the quotient
    # stays, but where x gets too small for float32, which is 0 in e4m3, or too large, which is
    # +-448.
    shift = ct.where(scale >= MOST_PLAIN, 2.0**-64, ct.where(scale <= LEAST_PLAIN, 2.0**64, 1.0))
    high, low = reciprocal(scale * shift)
    return saturated(quotient(x * shift, high, low), x, dtype)


@ct.kernel
def append_rows(
    latent: ct.IndexedWithInt64, rope: ct.IndexedWithInt64, taken, lengths, bounds, block_table,
    scale, latent_out: ct.IndexedWithInt64, rope_out: ct.IndexedWithInt64,
    scales_out: ct.IndexedWithInt64, m,
    AXIS: ConstInt, ROWS: ConstInt, B: ConstInt, PAGED: ConstBool, PAGE: ConstInt,
    GROUPS: ConstInt, OVER_SCALE: ConstBool, K: ConstInt, P: ConstInt,
):  # fmt: skip
    # m: rows of a padded request, or all packed rows. AXIS: of the grid, for tiles. B: at least the
    # number of packed requests; 0 for padded rows. GROUPS: scales per token; 0 for the given one.
    # Tiles [ROWS, 1] unless noted.
    steps = ct.arange(ROWS, dtype=ct.int32).reshape((ROWS, 1))
    columns = ct.arange(K // 2, dtype=ct.int32).reshape((1, K // 2))
    rope_columns = ct.arange(max(P, 1), dtype=ct.int32).reshape((1, max(P, 1)))
    offsets = ct.bid(AXIS) * ROWS + steps
    # x, y [ROWS, K / 2]: both halves of the latent rows; key [ROWS, P]. Rows beyond the last one
    # are that one: loads without a condition are all under way at once.
    held = ct.minimum(offsets, m - 1)
    if B == 0:
        request = ct.bid(2)  # []
        held = held + request * m
    x = ct.gather(latent, (held, columns), check_bounds=False)
    y = ct.gather(latent, (held, columns + K // 2), check_bounds=False)
    if P > 0:
        key = ct.gather(rope, (held, rope_columns), check_bounds=False)
    if B > 0:
        # One read of all ends, where a search would wait for memory at every step; [B]. One sum
        # counts for every row the requests that end before it, at most B, which is below 2**BITS.
        FEW = B < 1 << 32 // ROWS - 1
        WORD = ct.int32 if FEW else ct.int64
        BITS = (32 if FEW else 64) // ROWS
        ends = ct.gather(bounds, ct.arange(B, dtype=ct.int32) + 1, padding_value=NO_ROW)
        counts = ct.zeros((B,), dtype=WORD)
        for row in ct.static_iter(range(ROWS)):
            over = ends <= ct.bid(AXIS) * ROWS + row
            counts = counts + (over.astype(WORD) << row * BITS)
        request = (ct.sum(counts) >> (steps * BITS).astype(WORD)) & (1 << BITS) - 1
        request = ct.minimum(request, lengths.shape[0] - 1).astype(ct.int32)
        first = ct.gather(bounds, request, check_bounds=False)
        offsets = (offsets - first).astype(ct.int32)
    ct.grid_dependency_control_wait()
    new = ct.gather(taken, request, check_bounds=False)
    places = ct.gather(lengths, request, check_bounds=False) - new + offsets
    page = request
    if PAGED:
        column = ct.minimum(ct.maximum(places // PAGE, 0), block_table.shape[1] - 1)
        column = column.astype(ct.int32)
        page = ct.gather(block_table, (request, column), check_bounds=False)
        places = places - column * PAGE
    inside = (offsets >= 0) & (offsets < new) & (page >= 0) & (page < latent_out.shape[0])
    inside = inside & (places >= 0) & (places < PAGE)

    if GROUPS == 0:
        one = ct.load(scale, (0,), (1,)).reshape((1, 1))
        # With all bits set, see `quotient`, the next scale below: its quotients lie between the
        # same ties of e4m3.
        bits = ct.bitcast(one, ct.int32)
        one = ct.where((bits + 1) % (1 << 23) == 0, ct.bitcast(bits - 1, ct.float32), one)
        x, y = x.astype(ct.float32), y.astype(ct.float32)
        if P > 0:
            key = key.astype(ct.float32)
        if is_plain(one).item():
            high, low = reciprocal(one)
            x8 = saturated(quotient(x, high, low), x, latent_out.dtype)
            y8 = saturated(quotient(y, high, low), y, latent_out.dtype)
            if P > 0:
                key8 = saturated(quotient(key, high, low), key, rope_out.dtype)
        else:
            x8 = divided(x, one, latent_out.dtype)
            y8 = divided(y, one, latent_out.dtype)
            if P > 0:
                key8 = divided(key, one, rope_out.dtype)
        x, y = x8, y8
        if P > 0:
            key = key8
    elif GROUPS == 1:
        x, y = x.astype(ct.float32), y.astype(ct.float32)
        # From here on [ROWS, 1]. In a peak NaN does not count, but an infinity does.
        own = plain_scale_of(ct.max(ct.maximum(ct.abs(x), ct.abs(y)), 1, keepdims=True))
        least = ct.zeros((ROWS, 1), dtype=ct.float32)
        if OVER_SCALE and P > 0:
            key = key.astype(ct.float32)
            least = ct.max(finite(key), 1, keepdims=True) * ROPE_SHARE
        scales = ct.maximum(own, least)
        odd = (own <= LEAST_PLAIN) | (scales >= MOST_PLAIN)
        if ct.max(odd.astype(ct.int32)) == 0:
            high, low = reciprocal(scales)
            x8 = quotient(x, high, low).astype(latent_out.dtype)
            y8 = quotient(y, high, low).astype(latent_out.dtype)
            if OVER_SCALE and P > 0:
                key16 = rope_quotient(key, high, low).astype(rope_out.dtype)
        else:
            own = scale_of(ct.max(ct.maximum(finite(x), finite(y)), 1, keepdims=True))
            scales = ct.maximum(own, least)
            if OVER_SCALE and P > 0:
                key16 = (key / scales).astype(rope_out.dtype)
            x8 = divided(x, scales, latent_out.dtype)
            y8 = divided(y, scales, latent_out.dtype)
        x, y = x8, y8
        if OVER_SCALE and P > 0:
            key = key16
        ct.scatter(scales_out, (page, places, 0), scales, mask=inside, check_bounds=False)
    elif GROUPS > 1:
        half = GROUPS // 2
        # Groups of columns as rows, [ROWS * half, K / GROUPS].
        x = x.astype(ct.float32).reshape((ROWS * half, -1))
        y = y.astype(ct.float32).reshape((ROWS * half, -1))
        # From here on [ROWS * half, 1].
        x_scales = plain_scale_of(ct.max(ct.abs(x), 1, keepdims=True))
        y_scales = plain_scale_of(ct.max(ct.abs(y), 1, keepdims=True))
        lowest, highest = ct.minimum(x_scales, y_scales), ct.maximum(x_scales, y_scales)
        odd = (lowest <= LEAST_PLAIN) | (highest >= MOST_PLAIN)
        if ct.max(odd.astype(ct.int32)) == 0:
            high, low = reciprocal(x_scales)
            x8 = quotient(x, high, low).astype(latent_out.dtype)
            high, low = reciprocal(y_scales)
            y8 = quotient(y, high, low).astype(latent_out.dtype)
        else:
            x_scales = scale_of(ct.max(finite(x), 1, keepdims=True))
            y_scales = scale_of(ct.max(finite(y), 1, keepdims=True))
            x8 = divided(x, x_scales, latent_out.dtype)
            y8 = divided(y, y_scales, latent_out.dtype)
        x, y = x8.reshape((ROWS, K // 2)), y8.reshape((ROWS, K // 2))
        groups = ct.arange(half, dtype=ct.int32).reshape((1, half))
        x_scales, y_scales = x_scales.reshape((ROWS, half)), y_scales.reshape((ROWS, half))
        ct.scatter(scales_out, (page, places, groups), x_scales, mask=inside, check_bounds=False)
        groups = groups + half
        ct.scatter(scales_out, (page, places, groups), y_scales, mask=inside, check_bounds=False)
    ct.scatter(latent_out, (page, places, columns), x, mask=inside, check_bounds=False)
    ct.scatter(latent_out, (page, places, columns + K // 2), y, mask=inside, check_bounds=False)
    if P > 0:
        ct.scatter(rope_out, (page, places, rope_columns), key, mask=inside, check_bounds=False)


def serves(k: int, p: int, b: int = 1) -> bool:
    """Whether the kernel takes these widths and so many requests."""
    widths = k > 1 and is_power_of_two(k) and (p == 0 or is_power_of_two(p))
    return widths and b <= MOST_CTAS  # which ROWS numbers of 16 bits can count


def append_launch(
    latent: Tensor,
    rope: Tensor,
    taken: Tensor,
    lengths: Tensor,
    bounds: Tensor | None,
    block_table: Tensor | None,
    latent_out: Tensor,
    rope_out: Tensor,
    scales: Tensor | None,
    fmt: CacheFormat | None,
) -> Launch:
    """The launch of `append_rows`; at least one row, and bfloat16 ones where a format is given.

    Without bounds a request has m / b rows; `scales` are those of an 8-bit cache, which "fp8" reads
    and the other formats write. The other tensors: see the module.
    """
    (m, k), p, b = latent.shape, rope.shape[1], lengths.shape[0]
    groups = AS_IS if fmt is None else fmt.scales(k)
    # What a launch does not use is replaced by some tensor that it has.
    per_token = scales is not None and groups > 0
    each, requests = (m // b, b) if bounds is None else (m, 1)
    tiles = -(-each // ROWS)
    axis = 1 if tiles <= MOST_CTAS else 0
    return Launch(
        append_rows,
        (1, tiles, requests) if axis else (tiles, 1, requests),
        (
            latent, rope if p else latent, taken, lengths,
            lengths if bounds is None else bounds,
            lengths if block_table is None else block_table,
            lengths if scales is None or per_token else scales,
            latent_out, rope_out if p else latent_out,
            scales if per_token else latent_out,
            each,
        ),
        (
            axis, ROWS, 0 if bounds is None else power_of_two(b), block_table is not None,
            latent_out.shape[1], groups, fmt is not None and fmt.rope_over_scale, k, p,
        ),
    )  # fmt: skip
