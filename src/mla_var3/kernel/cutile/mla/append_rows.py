"""append_rows: write new tokens into the latent cache, as they are or rounded to 8 bits.

    latent [m, k], rope [m, p]   new tokens; k and p powers of two, p may be 0
    taken [b] int32              tokens of each request that the cache took, from `reserve_pages`
    lengths [b] int32            tokens of each request, the taken ones included
    bounds [b+1]                 int32 or int64, first row of each request in packed rows
    block_table [b, max_pages]   int32; a dense cache has none, its requests stand for pages
    scale [1] float32            of the format "fp8", which has one scale
    -> latent_out [pages, page, k], rope_out [pages, page, p], scales_out [pages, page, g] float32:
       the parts of the cache; scales_out is not written in 16 bits and in "fp8"

A CTA writes ROWS tokens. It finds the request of each from its row number: by division in padded
rows, by counting the bounds up to it in packed ones. Whatever lengths, bounds and block table hold,
a token without a slot inside the cache is not written.

The rounding is that of `op/mla/cache_formats.py`, which defines zeros, NaN and infinities, and the
results are the same, bit by bit. Bound by memory: every row is read and written once.

For sm_80 and newer; 8 bits for sm_90 and newer, since cuTile has no float8 before.
"""

import cuda.tile as ct
from torch import Tensor

from mla_var3.kernel.cutile.mla.reserve_pages import power_of_two
from mla_var3.op.mla.cache_formats import LEAST_SCALE, ROPE_SHARE, CacheFormat
from mla_var3.op.mla.window.quantise import E4M3_MAX
from mla_var3.runtime.ct_kernel import Launch
from mla_var3.runtime.stage import is_power_of_two

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

INF = float("inf")
NAN = float("nan")

ROWS = 4
"""Tokens of a CTA: enough bytes in flight for long appends, enough CTAs for short ones."""
NO_ROW = 2**31 - 1
AS_IS = -1
"""GROUPS of a cache that is not in 8 bits."""


@ct.function
def finite_peak(x):
    # [R, C] -> [R, 1]: the largest finite magnitude; NaN and infinities count as 0.
    size = ct.abs(x)
    return ct.max(ct.where(size < INF, size, 0.0), 1, keepdims=True)


@ct.function
def rounded(x, scale, dtype):
    # Beyond +-448 saturated; NaN stays, an infinity becomes NaN.
    scaled = x / scale
    scaled = ct.where(scaled > E4M3_MAX, E4M3_MAX, scaled)
    scaled = ct.where(scaled < -E4M3_MAX, -E4M3_MAX, scaled)
    return ct.where(ct.abs(x) == INF, NAN, scaled).astype(dtype)


@ct.kernel
def append_rows(
    latent, rope, taken, lengths, bounds, block_table, scale,
    latent_out: ct.IndexedWithInt64, rope_out: ct.IndexedWithInt64,
    scales_out: ct.IndexedWithInt64, m,
    B: ConstInt, PAGED: ConstBool, PAGE: ConstInt, GROUPS: ConstInt, OVER_SCALE: ConstBool,
    K: ConstInt, P: ConstInt,
):  # fmt: skip
    # m: rows of a request, padded. B: at least the number of packed requests; 0 for padded rows.
    # GROUPS: scales per token; 0 for the given one.
    tile = ct.bid(0)
    # x [ROWS, K]; all tiles below [ROWS] until the stores
    x = ct.load(latent, (tile, 0), (ROWS, K), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    rows = tile * ROWS + ct.arange(ROWS, dtype=ct.int32)
    if B == 0:
        requests = rows // m
        offsets = rows - requests * m
    else:
        # Ends [1, B]; one read for all, where a search would wait for memory at every step.
        ends = ct.gather(bounds, ct.arange(B, dtype=ct.int32) + 1, padding_value=NO_ROW)
        passed = ends.reshape((1, B)) <= rows.reshape((ROWS, 1))
        requests = ct.sum(passed.astype(ct.int32), 1)
        offsets = rows - ct.gather(bounds, requests)
    new = ct.gather(taken, requests)  # 0 for a row of no request
    valid = (offsets >= 0) & (offsets < new)
    places = ct.where(valid, ct.gather(lengths, requests) - new + offsets.astype(ct.int32), -1)
    if PAGED:
        columns = places // PAGE
        pages = ct.gather(block_table, (requests, columns), mask=places >= 0, padding_value=-1)
        places = ct.where(places >= 0, places - columns * PAGE, -1)
    else:
        pages = requests
    inside = (places >= 0) & (places < PAGE) & (pages >= 0) & (pages < latent_out.shape[0])
    pages = pages.reshape((ROWS, 1))
    places = places.reshape((ROWS, 1))
    inside = inside.reshape((ROWS, 1))

    if P > 0:
        # key [ROWS, P]
        key = ct.load(rope, (tile, 0), (ROWS, P), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    if GROUPS == 0:
        one = ct.load(scale, (0,), (1,)).reshape((1, 1))
        x = rounded(x.astype(ct.float32), one, latent_out.dtype)
        if P > 0:
            key = rounded(key.astype(ct.float32), one, rope_out.dtype)
    elif GROUPS > 0:
        grouped = x.astype(ct.float32).reshape((ROWS * GROUPS, -1))
        peaks = finite_peak(grouped)  # [ROWS * GROUPS, 1]
        scales = ct.where(peaks == 0.0, 1.0, ct.maximum(peaks / E4M3_MAX, LEAST_SCALE))
        if OVER_SCALE and P > 0:  # GROUPS is 1
            wide = key.astype(ct.float32)
            scales = ct.maximum(scales, finite_peak(wide) * ROPE_SHARE)
            key = (wide / scales).astype(rope_out.dtype)
        x = rounded(grouped, scales, latent_out.dtype).reshape((ROWS, K))
        groups = ct.arange(GROUPS, dtype=ct.int32).reshape((1, GROUPS))
        ct.scatter(
            scales_out, (pages, places, groups), scales.reshape((ROWS, GROUPS)), mask=inside,
            check_bounds=False,
        )  # fmt: skip
    latent_columns = ct.arange(K, dtype=ct.int32).reshape((1, K))
    ct.scatter(latent_out, (pages, places, latent_columns), x, mask=inside, check_bounds=False)
    if P > 0:
        rope_columns = ct.arange(P, dtype=ct.int32).reshape((1, P))
        ct.scatter(rope_out, (pages, places, rope_columns), key, mask=inside, check_bounds=False)


def serves(k: int, p: int) -> bool:
    """Whether the kernel takes these widths."""
    return is_power_of_two(k) and (p == 0 or is_power_of_two(p))


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
    """The launch of `append_rows`; at least one row.

    Args:
        latent: `[m, k]`.
        rope: `[m, p]`.
        taken: `[b]`, from `reserve_pages`.
        lengths: `[b]`, likewise.
        bounds: `[b+1]`, first rows of packed requests; None for m / b rows each.
        block_table: Of a paged cache.
        latent_out: Latent rows of the cache, `[pages, page, k]` or `[b, t, k]`.
        rope_out: Its rope keys.
        scales: Those of an 8-bit cache, which "fp8" reads.
        fmt: The format of 8 bits; None for a cache of the dtype of the tokens.
    """
    (m, k), p, b = latent.shape, rope.shape[1], lengths.shape[0]
    groups = AS_IS if fmt is None else fmt.scales(k)
    # What a launch does not use is replaced by some tensor that it has.
    per_token = scales is not None and groups > 0
    return Launch(
        append_rows,
        (-(-m // ROWS), 1, 1),
        (
            latent, rope if p else latent, taken, lengths,
            lengths if bounds is None else bounds,
            lengths if block_table is None else block_table,
            lengths if scales is None or per_token else scales,
            latent_out, rope_out if p else latent_out,
            scales if per_token else latent_out,
            max(1, m // b),
        ),
        (
            0 if bounds is None else power_of_two(b), block_table is not None,
            latent_out.shape[1], groups, fmt is not None and fmt.rope_over_scale, k, p,
        ),
    )  # fmt: skip
