"""quantise_append: round new tokens to 8 bits and write them into the latent cache, in one launch.

    latent [m, k], rope [m, p]   new tokens, in 16 bits or float32; k and p powers of two
    slots  [m] int64             where each goes, counted over all pages
    valid  [m] int8              0 for a row that is not written
    scale  [1] float32           of the format "fp8", which has one scale
    -> latent_out [pages, page, k] e4m3, rope_out [pages, page, p] bfloat16 or e4m3,
       scales_out [pages, page, g] float32, the parts of the cache; not written in "fp8"

The rounding is that of `op/mla/cache_formats.py`, which defines zeros, NaN and infinities, and the
results are the same, bit by bit. Bound by memory: every row is read and written once.

For sm_90 and newer: cuTile has no float8 before.
"""

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.op.mla.cache_formats import LEAST_SCALE, ROPE_SHARE, CacheFormat, QuantisedCache
from mla_var3.op.mla.window.quantise import E4M3_MAX
from mla_var3.runtime.ct_kernel import launch_kernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

INF = float("inf")
NAN = float("nan")


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
def quantise_append(
    latent, rope, slots, valid, scale,
    latent_out: ct.IndexedWithInt64, rope_out: ct.IndexedWithInt64,
    scales_out: ct.IndexedWithInt64,
    PAGE: ConstInt, GROUPS: ConstInt, OVER_SCALE: ConstBool, K: ConstInt, P: ConstInt,
):  # fmt: skip
    # A CTA has one token. GROUPS scales per token; 0 for the given one.
    token = ct.bid(0)
    if ct.load(valid, (token,), (1,)).item() != 0:
        slot = ct.load(slots, (token,), (1,)).item()
        page = slot // PAGE
        place = slot % PAGE
        # x [1, K], key [1, P]
        x = ct.load(latent, (token, 0), (1, K), allow_tma=False).astype(ct.float32)
        key = ct.load(rope, (token, 0), (1, P), allow_tma=False).astype(ct.float32)
        if GROUPS == 0:
            one = ct.load(scale, (0,), (1,)).reshape((1, 1))
            values = rounded(x, one, latent_out.dtype)
            rope_values = rounded(key, one, rope_out.dtype)
        else:
            grouped = x.reshape((GROUPS, -1))
            peaks = finite_peak(grouped)  # [GROUPS, 1]
            scales = ct.where(peaks == 0.0, 1.0, ct.maximum(peaks / E4M3_MAX, LEAST_SCALE))
            if OVER_SCALE:  # GROUPS is 1
                scales = ct.maximum(scales, finite_peak(key) * ROPE_SHARE)
                key = key / scales
            values = rounded(grouped, scales, latent_out.dtype)
            rope_values = key.astype(rope_out.dtype)
            ct.store(scales_out, (page, place, 0), scales.reshape((1, 1, GROUPS)), allow_tma=False)
        ct.store(latent_out, (page, place, 0), values.reshape((1, 1, K)), allow_tma=False)
        ct.store(rope_out, (page, place, 0), rope_values.reshape((1, 1, P)), allow_tma=False)


def serves(k: int, p: int) -> bool:
    """Whether the kernel takes these widths."""
    return all(width > 0 and width & (width - 1) == 0 for width in (k, p))


def write_tokens(
    latent: Tensor,
    rope: Tensor,
    slots: Tensor,
    valid: Tensor,
    fmt: CacheFormat,
    parts: QuantisedCache,
) -> None:
    """Round tokens and write them; see the module.

    Args:
        latent: `[m, k]`.
        rope: `[m, p]`.
        slots: int64 `[m]`; those of valid rows are within the cache and differ.
        valid: bool `[m]`.
        fmt: The format of the cache.
        parts: Its parts, views of its buffer; the scale of "fp8" is read.
    """
    m, k = latent.shape
    if m == 0:
        return
    groups, scales = fmt.scales(k), parts.scales
    # Without scales per token the kernel gets the one scale in the place of both.
    given = scales.reshape(-1)[:1] if groups == 0 else scales[0, 0]
    written = scales.view(1, 1, 1) if groups == 0 else scales
    launch_kernel(
        quantise_append,
        (m, 1, 1),
        (
            latent, rope, slots, valid.view(torch.int8), given, parts.latent, parts.rope, written,
            parts.latent.shape[1], groups, fmt.rope_over_scale, k, rope.shape[1],
        ),
    )  # fmt: skip
