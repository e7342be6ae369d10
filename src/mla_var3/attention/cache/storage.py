"""The buffer of a latent cache, in 16 or 8 bits: its parts, and writing tokens with torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mla_var3.attention.cache.sizes import QUANTISED_FROM, CacheShape
from mla_var3.attention.cache.tokens import masked_put
from mla_var3.attention.request.checks import FLOAT_DTYPES, zero_rows
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cache_formats import FORMATS, PER_TENSOR, CacheFormat, cache_format, quantise
from mla_var3.op.mla.problem import require_scale


class Parts(NamedTuple):
    """Views of a buffer: latent rows, rope keys and, in 8 bits, scales."""

    latent: Tensor
    rope: Tensor
    scales: Tensor | None


class Storage:
    """Latent rows and rope keys of all tokens.

    Attributes:
        buffer: `[b, t, k+p]`, or paged `[num_pages, page_size, k+p]`; in 8 bits uint8, with the
            bytes
            of a token.
        format, dtype: the format of 8 bits, None in 16; the dtype of the tokens that are written.
        scale: of the format "fp8", float32 `[1]`; None in others.
    """

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype | CacheFormat,
        device: torch.device,
        scale: float,
    ) -> None:
        self._widths = shape.k, shape.p
        self.format = dtype if isinstance(dtype, CacheFormat) else None
        self.dtype = QUANTISED_FROM if isinstance(dtype, CacheFormat) else dtype
        self.scale: Tensor | None = None
        if self.format is PER_TENSOR:
            self.scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        stored = self.dtype if self.format is None else torch.uint8
        rows = (shape.num_pages, shape.page_size) if shape.page_size else (shape.b, shape.t)
        self.buffer = zero_rows("b, t", (*rows, shape.row_bytes // stored.itemsize), stored, device)

    def parts(self) -> Parts:
        """The parts of the buffer; made anew, so that a traced program sees one memory."""
        k, p = self._widths
        if self.format is None:
            return Parts(self.buffer[..., :k], self.buffer[..., k:], None)
        found = self.format.parts(self.buffer, k, p, self.scale)
        return Parts(found.latent, found.rope, found.scales)

    def put(self, slots: Tensor, latent: Tensor, rope: Tensor, valid: Tensor) -> None:
        """Write the valid tokens, in 8 bits rounded; see `masked_put`.

        Slots are int64 `[m]`, counted over all pages or requests.
        """
        if self.format is None:
            rows = torch.cat([latent, rope], dim=-1)
            masked_put(self.buffer.view(-1, rows.shape[-1]), (slots,), rows, valid)
            return
        page, values = self.buffer.shape[1], quantise(latent, rope, self.format, self.scale)
        parts = self.parts()
        pairs = [(parts.latent, values.latent), (parts.rope, values.rope)]
        if parts.scales is not None and self.scale is None:
            pairs.append((parts.scales, values.scales))
        for part, new in pairs:
            if part.dtype.itemsize == 1:  # few operations of torch know e4m3
                part, new = part.view(torch.uint8), new.view(torch.uint8)
            masked_put(part, (slots // page, slots % page), new, valid)


def stored_as(dtype: object, scale: object) -> torch.dtype | CacheFormat:
    """What `LatentCache.allocate` stores for its `dtype` and `scale`, both checked."""
    hint = "A cache in 16 or 32 bits takes a torch dtype, such as torch.bfloat16"
    stored = cache_format(dtype, hint) if isinstance(dtype, str) else dtype
    if not isinstance(stored, CacheFormat) and stored not in FLOAT_DTYPES:
        expected = f"bfloat16, float16, float32 or one of {', '.join(FORMATS)}"
        raise InvalidArgumentError("dtype", expected, dtype)
    require_scale(scale)
    if scale != 1.0 and stored is not PER_TENSOR:
        raise InvalidArgumentError("scale", f"none unless dtype is {PER_TENSOR.name!r}", scale)
    return stored  # type: ignore[return-value]
