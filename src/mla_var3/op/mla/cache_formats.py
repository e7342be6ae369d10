"""8-bit formats of the latent cache: how a token lies in memory, and its rounding.

A token is its latent row in e4m3, the scales of that row and its rope key. Three formats:

| name | bytes (k=512, p=64) | scales | rope | order |
|---|---:|---|---|---|
| `fp8_per_token` | 644 | one float32 per token | bfloat16 | by page: latent, rope, scales |
| `fp8_ds_mla` | 656 | a float32 per 128 columns | bfloat16 | by token: latent, scales, rope |
| `fp8` | 576 | one for the whole tensor, beside it | e4m3 | by token: latent, rope |

`fp8` is what vLLM (`fp8`) and SGLang (`fp8_e4m3`) write for dense MLA, `fp8_ds_mla` what vLLM and
FlashMLA write for DeepSeek V3.2. `fp8_per_token` is the default of this package. It keeps the parts
of a page apart: all latent rows of the page, then its rope keys, then its scales. A row of 644
bytes would not be a multiple of the 16 bytes that the copy engine of a GPU steps in; rows of 512
and 128 bytes are. In a dense cache a request takes the place of a page. Its rope keys are divided
by the scale of their token, so that a kernel adds both parts of a score in one accumulator.

Rounding:

- A scale is the largest finite magnitude it covers over 448, the largest e4m3 number; at least
  2**-126, and 1 where all values are zero. That of a token also keeps its divided rope key finite.
  With a given scale, as in `fp8`, larger finite values saturate at +-448 times the scale.
- NaN stays NaN. An infinity becomes NaN, since e4m3 has none: an overflow is not hidden.
- Values are divided by the scale in float32 and rounded to nearest, ties to even. The relative
  error is at most 2**-4 from 2**-6 times the scale on; below, the absolute error is at most 2**-10
  times the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.op.mla.window.quantise import E4M3, E4M3_MAX, LEAST_SCALE

_FLOAT32 = 4
BYTE_DTYPES = (torch.uint8, torch.int8, E4M3)
ROPE_SHARE = 2.0**-60
"""Least scale over the largest number of the rope key: the divided key stays within bfloat16."""


@dataclass(frozen=True)
class CacheFormat:
    """Where the parts of a token lie.

    Attributes:
        name: As in `LatentCache.allocate(dtype=...)`.
        scale_columns: Latent columns per scale; 0 for one scale per token, None for one scale for
            the whole tensor.
        rope_dtype: Dtype of the rope keys.
        rope_over_scale: Whether a rope key is stored divided by the scale of its token.
        by_page: Whether a page holds all latent rows, then all rope keys, then all scales;
            otherwise each token holds its latent row, its scales and its rope key.
    """

    name: str
    scale_columns: int | None
    rope_dtype: torch.dtype
    by_page: bool
    rope_over_scale: bool = False

    def scales(self, k: int) -> int:
        """Scales of a token."""
        if self.scale_columns is None:
            return 0
        return k // self.scale_columns if self.scale_columns else 1

    def row_bytes(self, k: int, p: int) -> int:
        """Bytes of a token."""
        return k + self.scales(k) * _FLOAT32 + p * self.rope_dtype.itemsize

    def rope_width(self, row_bytes: int, k: int) -> int:
        """The rope width of tokens of some bytes; rounded down where it is no whole number."""
        return (row_bytes - k - self.scales(k) * _FLOAT32) // self.rope_dtype.itemsize

    def require_widths(self, k: int, p: int) -> None:
        """Require widths that the format can hold.

        Raises:
            InvalidArgumentError: Names the width.
        """
        # With one scale in a row, `format_of` could not tell it from a scale per token.
        columns = self.scale_columns
        if columns and (k % columns or k == columns):
            expected = f"a multiple of {columns}, {2 * columns} or more ({self.name})"
            raise InvalidArgumentError("k", expected, k)
        if columns and self.row_bytes(k, p) % _FLOAT32:  # its scales are read as float32
            raise InvalidArgumentError(
                "p", f"rows of a multiple of {_FLOAT32} bytes ({self.name})", p
            )

    def parts(
        self, buffer: torch.Tensor, k: int, p: int, scale: torch.Tensor | None = None
    ) -> QuantisedCache:
        """The parts of a buffer, as views.

        Args:
            buffer: `[pages, page, row_bytes]` of a 1-byte dtype, or `[b, t, row_bytes]`; each page
                contiguous.
            k: Latent width.
            p: Rope width.
            scale: For `fp8`: float32 of one element; None for 1.

        Raises:
            InvalidArgumentError: The buffer is not one of this format, or a scale is missing or
                too much.
        """
        self.require_widths(k, p)
        row = self.row_bytes(k, p)
        if buffer.dtype not in BYTE_DTYPES:
            raise InvalidArgumentError("pages", "uint8, int8 or float8_e4m3fn", buffer.dtype)
        if buffer.dim() != 3 or buffer.shape[2] != row:
            raise InvalidArgumentError(
                "pages", f"[num_pages, page, {row}] ({self.name}, k={k}, p={p})", list(buffer.shape)
            )
        pages, page, _ = buffer.shape
        raw = buffer.view(torch.uint8)
        if self.scale_columns is None:
            scales = _one_scale(scale, buffer.device)
        elif scale is not None:
            raise InvalidArgumentError("scale", f"none with {self.name}, whose rows hold it", scale)
        if self.by_page:
            if page % _FLOAT32 or (pages and raw.stride()[1:] != (row, 1)):
                raise InvalidArgumentError(
                    "pages", f"contiguous pages of a multiple of 4 tokens ({self.name})", page
                )
            # Pages may be spaced out, as in an engine's pool. Not by as_strided, through which no
            # compiled program may write.
            flat = raw.view(pages, page * row)
            ends = (page * k, page * (k + p * self.rope_dtype.itemsize))
            latent = flat[:, : ends[0]].view(pages, page, k)
            rope = flat[:, ends[0] : ends[1]].view(self.rope_dtype).view(pages, page, p)
            scales = flat[:, ends[1] :].view(torch.float32).view(pages, page, 1)
        else:
            rope_at = k + self.scales(k) * _FLOAT32
            latent, rope = raw[..., :k], raw[..., rope_at:].view(self.rope_dtype)
            if self.scale_columns is not None:
                scales = raw[..., k:rope_at].view(torch.float32)
        return QuantisedCache(latent.view(E4M3), rope, scales)


@dataclass(frozen=True)
class QuantisedCache:
    """Tokens in 8 bits.

    Attributes:
        latent: e4m3 `[..., k]`.
        rope: `[..., p]`, bfloat16, or e4m3 that the scale of the tensor applies to; see
            `CacheFormat.rope_over_scale`.
        scales: float32 `[..., g]`, each for k / g columns, or `[1]` for the whole tensor. A value
            is its e4m3 number times its scale.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor


PER_TOKEN = CacheFormat("fp8_per_token", 0, torch.bfloat16, by_page=True, rope_over_scale=True)
DS_MLA = CacheFormat("fp8_ds_mla", 128, torch.bfloat16, by_page=False)
PER_TENSOR = CacheFormat("fp8", None, E4M3, by_page=False)
FORMATS = {entry.name: entry for entry in (PER_TOKEN, DS_MLA, PER_TENSOR)}


def cache_format(name: str, hint: str = "") -> CacheFormat:
    """The format of a name.

    Raises:
        UnknownNameError: There is none; with the hint.
    """
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise UnknownNameError("cache format", str(name), FORMATS, hint) from None


def format_of(cache: QuantisedCache) -> CacheFormat:
    """The format of some parts; it differs by its scales."""
    if cache.scales.dim() == 1:
        return PER_TENSOR
    return PER_TOKEN if cache.scales.shape[-1] == 1 else DS_MLA


def quantise(
    latent: torch.Tensor,
    rope: torch.Tensor,
    fmt: CacheFormat,
    scale: torch.Tensor | None = None,
) -> QuantisedCache:
    """Round latent rows `[..., k]` and rope keys `[..., p]`, of any floating dtype, to 8 bits.

    `scale` is for `fp8`: float32 of one element; None for 1.
    """
    fmt.require_widths(latent.shape[-1], rope.shape[-1])
    wide = latent.float()
    if fmt.scale_columns is None:
        scales = _one_scale(scale, latent.device)
        return QuantisedCache(_rounded(wide, scales), _rounded(rope.float(), scales), scales)
    grouped = wide.unflatten(-1, (fmt.scales(latent.shape[-1]), -1))
    peaks = grouped.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1)
    # A tensor: by a number of the host, torch multiplies with its reciprocal on a GPU.
    highest_e4m3 = peaks.new_full((), E4M3_MAX)
    scales = torch.where(peaks == 0.0, 1.0, (peaks / highest_e4m3).clamp(min=LEAST_SCALE))
    if fmt.rope_over_scale and rope.shape[-1]:
        wide_rope = rope.float()
        highest = wide_rope.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
        scales = torch.maximum(scales, highest * ROPE_SHARE)
        rope = wide_rope / scales
    values = _rounded(grouped, scales[..., None]).flatten(-2)
    return QuantisedCache(values, rope.to(fmt.rope_dtype), scales)


def dequantise(
    cache: QuantisedCache, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens in 8 bits are worth: latent rows `[..., k]` and rope keys `[..., p]` in a dtype.

    The product with a scale is in float32, or in float64, where it is exact.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    latent, scales = cache.latent.to(wide), cache.scales.to(wide)
    if scales.dim() == 1:
        rope = cache.rope.to(wide) * scales
        return (latent * scales).to(dtype), rope.to(dtype)
    grouped = latent.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    rope = cache.rope.to(wide)
    if format_of(cache).rope_over_scale:
        rope = rope * scales
    return grouped.flatten(-2).to(dtype), rope.to(dtype)


def _rounded(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values over their scales in e4m3; torch itself turns what is beyond 448 into NaN."""
    scaled = (values / scales).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(values.isinf(), torch.nan, scaled).to(E4M3)


def _one_scale(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if scale is None:
        return torch.ones((1,), dtype=torch.float32, device=device)
    if not isinstance(scale, torch.Tensor):
        raise InvalidArgumentError("scale", f"one float32 on {device}", type(scale).__name__)
    if scale.numel() != 1 or scale.dtype is not torch.float32 or scale.device != device:
        got = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        raise InvalidArgumentError("scale", f"one float32 on {device}", got)
    return scale.reshape(1)
