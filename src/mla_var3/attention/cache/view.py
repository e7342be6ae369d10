"""A cache as the attention reads it, ours or foreign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mla_var3.attention.request.checks import FLOAT_DTYPES, INDEX_DTYPES, require_tensor
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cache_formats import (
    BYTE_DTYPES,
    CacheFormat,
    QuantisedCache,
    cache_format,
    dequantise,
    format_of,
)
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.window.packed import PackedWindow


@dataclass(frozen=True)
class CacheView:
    """The tensors of a cache.

    Attributes:
        latent: `[b, t, k]`, or `[num_pages, page, k]` with a block table.
        rope: `[b, t, p]`, or `[num_pages, page, p]`.
        lengths: int32 `[b]`, tokens of each request.
        block_table: int32 `[b, max_pages]`; None for a dense cache.
        k_new, v_new: ring of the newest tokens, `[b, h, n, d]` and `[b, h, n, v]`, position x in
            slot x % n; in 8 bits as in `PackedWindow`.
        window_start: int32 `[b]`, the oldest position in the ring.
        k_prefix, v_prefix: shared first tokens, `[h, m, d]` and `[h, m, v]`.
        k_rope_new: `[b, n, p]`, the rope keys of the ring in its order, for kernels that read its
            slots in their order; None where only `rope` has them.
        k_rope_prefix: `[m, p]`, those of the shared first tokens, likewise.
        scales: of an 8-bit cache, whose `latent` is e4m3: float32 `[b, t, g]` or
            `[num_pages, page, g]`, each for k / g columns, or `[1]` for the whole cache.
        window_scales: of a ring in 8 bits, float32 `[b, h, n, 2]`, see `PackedWindow`.
        ring_whole: Whether the ring is known to hold the newest tokens of every request, as many as
            it has slots for. Otherwise a kernel that needs them decompresses what is missing. No
            field: the fields are the tensors.
    """

    ring_whole: ClassVar[bool] = False

    latent: Tensor
    rope: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    window_start: Tensor | None = None
    k_prefix: Tensor | None = None
    v_prefix: Tensor | None = None
    k_rope_new: Tensor | None = None
    k_rope_prefix: Tensor | None = None
    scales: Tensor | None = None
    window_scales: Tensor | None = None

    def with_whole_ring(self) -> CacheView:
        """The same view, with a ring that is known to be whole."""
        view = replace(self)
        object.__setattr__(view, "ring_whole", True)
        return view

    def forget_whole_ring(self) -> None:
        """Its ring may lack tokens from now on; in place, because callers hold views."""
        object.__setattr__(self, "ring_whole", False)

    @property
    def format(self) -> CacheFormat | None:
        """The format of an 8-bit cache; None for a cache in the dtype of the queries."""
        if self.scales is None:
            return None
        return format_of(QuantisedCache(self.latent, self.rope, self.scales))

    @property
    def page_size(self) -> int | None:
        """Tokens per page; None for a dense cache."""
        return None if self.block_table is None else self.latent.shape[1]

    @property
    def capacity(self) -> int:
        """Slots per request."""
        if self.block_table is None:
            return self.latent.shape[1]
        return self.block_table.shape[1] * self.latent.shape[1]

    @property
    def requests(self) -> int:
        return self.lengths.shape[0]

    @property
    def window(self) -> int:
        """Slots of the ring; 0 without one."""
        return 0 if self.k_new is None else self.k_new.shape[2]

    @property
    def packed_window(self) -> PackedWindow | None:
        """The ring in 8 bits; None without one."""
        if self.k_new is None or self.v_new is None or self.window_scales is None:
            return None
        return PackedWindow(self.k_new, self.v_new, self.window_scales)

    @property
    def prefix(self) -> int:
        """Tokens of the shared prefix; 0 without one."""
        return 0 if self.k_prefix is None else self.k_prefix.shape[1]

    def tile(
        self, first: int, last: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor]:
        """Latent and rope rows of the slots `first..last-1` of every request, `[b, m, ...]`.

        In a paged cache both ends must be at page borders. Slots without a page give rows of some
        other page; the caller masks them by length. Those in 8 bits are dequantised to the dtype.
        """
        if self.block_table is None:
            return self._gathered(lambda part: part[:, first:last], dtype)
        page = self.latent.shape[1]
        pages = self.block_table[:, first // page : last // page]
        index = pages.long().clamp(0, self.latent.shape[0] - 1)
        return self._gathered(lambda part: part[index].flatten(1, 2), dtype)

    def rows(self, positions: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """Latent and rope rows at positions int64 `[b, m]`, which are clamped to the capacity.

        Those in 8 bits are dequantised to the dtype.
        """
        positions = positions.clamp(0, self.capacity - 1)
        requests = torch.arange(self.requests, device=positions.device)[:, None]
        if self.block_table is None:
            return self._gathered(lambda part: part[requests, positions], dtype)
        page = self.latent.shape[1]
        index = self.block_table[requests, positions // page].long()
        index = index.clamp(0, self.latent.shape[0] - 1)
        return self._gathered(lambda part: part[index, positions % page], dtype)

    def _gathered(
        self, gather: Callable[[Tensor], Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Some latent and rope rows; those of an 8-bit cache dequantised."""
        if self.scales is None:
            return gather(self.latent), gather(self.rope)
        scales = self.scales if self.scales.dim() == 1 else gather(self.scales)
        return dequantise(QuantisedCache(gather(self.latent), gather(self.rope), scales), dtype)

    def without_copies(self) -> CacheView:
        """The latent cache alone, without decompressed tokens."""
        return CacheView(self.latent, self.rope, self.lengths, self.block_table, scales=self.scales)

    def request(self, number: int) -> CacheView:
        return self.span(number, number + 1)

    def span(self, first: int, last: int) -> CacheView:
        """The view of the requests `first..last-1`."""
        shared = {"k_prefix", "v_prefix", "k_rope_prefix", "ring_whole"}
        if self.block_table is not None:
            shared |= {"latent", "rope", "scales"}
        if self.scales is not None and self.scales.dim() == 1:
            shared.add("scales")
        own = {
            name: part[first:last]
            for name, part in vars(self).items()
            if part is not None and name not in shared
        }
        return replace(self, **own)

    def at_lengths(self, lengths: Tensor) -> CacheView:
        """The same cache with other lengths, int32 `[b]`.

        A ring belongs to the lengths that it was filled for: its slots may hold tokens beyond the
        given ones instead of older tokens. So it is left out, unless it has a slot for every token.
        """
        if self.k_new is None or self.window >= self.capacity:
            start = self.window_start
            if start is not None and not self.ring_whole:
                # The call may fill the ring up to its own lengths: that is not to be kept.
                start = start.clone()
            view = replace(self, lengths=lengths, window_start=start)
            return view.with_whole_ring() if self.ring_whole else view
        return replace(
            self, lengths=lengths, k_new=None, v_new=None, window_start=None, k_rope_new=None,
            window_scales=None,
        )  # fmt: skip

    def full_copy(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of all tokens, slot x at position x; None where the cache lacks some.

        A ring as long as the cache never turns. Of a shared prefix it has nothing, and where it
        starts later, it lacks tokens. One in 8 bits is no copy.
        """
        if self.k_new is None or self.v_new is None or self.window_scales is not None:
            return None
        if self.prefix or self.window != self.capacity:
            return None
        if self.window_start is not None and not self.ring_whole:
            return None
        return self.k_new, self.v_new

    def ring_start(self) -> Tensor:
        """int32 `[b]`, the oldest position of the ring; a view without one has a full ring."""
        if self.window_start is not None:
            return self.window_start
        return (self.lengths - self.window).clamp_(min=0)

    def ring_rope(self) -> Tensor:
        """Rope keys `[b, n, p]` in the order of the ring: those of the view, or gathered."""
        if self.k_rope_new is not None:
            return self.k_rope_new
        n = self.window
        oldest = (self.lengths.long() - n).clamp(min=0)[:, None]
        slots = torch.arange(n, device=oldest.device)
        return self.rows(oldest + (slots - oldest) % n)[1]

    def prefix_rope(self) -> Tensor:
        """Rope keys `[m, p]` of the shared first tokens: those of the view, or gathered."""
        if self.k_rope_prefix is not None:
            return self.k_rope_prefix
        positions = torch.arange(self.prefix, device=self.rope.device)
        return self.rows(positions.expand(self.requests, -1))[1][0]


def _int32(numbers: Tensor) -> Tensor:
    """Indices in 32 bits; those that do not fit stay too large or too small, for later checks."""
    if numbers.dtype == torch.int64:
        limits = torch.iinfo(torch.int32)
        numbers = numbers.clamp(limits.min, limits.max)
    return numbers.to(torch.int32)


def paged_view(
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    k: int = 512,
    format: str | None = None,
    scale: Tensor | None = None,
) -> CacheView:
    """The view of a foreign paged cache, such as that of a serving engine.

    Args:
        pages: `[num_pages, page, k+p]`, latent row and rope key of each token side by side; with a
            format `[num_pages, page, bytes]`, uint8, int8 or float8_e4m3fn. Nothing is copied.
        block_table: int32 `[b, max_pages]`; entries beyond a request's tokens may be anything.
        lengths: int32 `[b]`.
        k: width of the latent part.
        format: of 8-bit pages: "fp8_per_token", "fp8_ds_mla" or "fp8" (`op/mla/cache_formats.py`).
        scale: with "fp8" the scale of all pages, float32 of one element; None for 1.
    """
    fmt = None if format is None else cache_format(format)
    shape = [("num_pages", None), ("page", None), ("k+p" if fmt is None else "bytes", None)]
    require_tensor("pages", pages, shape, FLOAT_DTYPES if fmt is None else BYTE_DTYPES, None)
    require_int("k", k, minimum=1, maximum=pages.shape[-1], maximum_name="k+p")
    require_tensor("lengths", lengths, [("b", None)], INDEX_DTYPES, pages.device)
    entries = [("b", lengths.shape[0]), ("max_pages", None)]
    require_tensor("block_table", block_table, entries, INDEX_DTYPES, pages.device)
    table, lengths = _int32(block_table), _int32(lengths)
    if fmt is None:
        if scale is not None:
            raise InvalidArgumentError("scale", "none without a format", "one")
        return CacheView(pages[..., :k], pages[..., k:], lengths, table)
    parts = fmt.parts(pages, k, fmt.rope_width(pages.shape[-1], k), scale)
    return CacheView(parts.latent, parts.rope, lengths, table, scales=parts.scales)
