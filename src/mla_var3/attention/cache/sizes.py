"""The memory of a cache: what each part takes, and what a budget buys."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cache_formats import CacheFormat
from mla_var3.op.mla.problem import MOST_REQUESTS, require_int, require_size
from mla_var3.op.mla.window.formats import FP8, PLAIN, WindowForm

PAGE_STEP = 64
"""Page sizes are multiples of this: the kernels read whole tiles of 64 tokens from a page, and from
a ring."""
QUANTISED_FROM = torch.bfloat16
"""Dtype of the rows that an 8-bit cache is filled from, and of its decompressed parts."""
_INT32 = 4
_ROWS_STEP = 4
"""Slots of a dense cache in a format by page: the parts of a request then start at 16 bytes."""


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a cache by part, and how many tokens it holds.

    Attributes:
        latent_bytes: latent rows and rope keys.
        window_bytes: ring of the newest tokens, decompressed, with their rope keys.
        prefix_bytes: shared prefix, likewise.
        index_bytes: lengths, block table, owners of pages and free list.
        tokens: tokens that all requests together can have, a shared prefix counted once.
        tokens_per_request: tokens that one request can have.
        window_tokens: decompressed tokens per request.
        prefix_tokens: tokens of the shared prefix.
    """

    latent_bytes: int
    window_bytes: int
    prefix_bytes: int
    index_bytes: int
    tokens: int
    tokens_per_request: int
    window_tokens: int
    prefix_tokens: int

    @property
    def total_bytes(self) -> int:
        return self.latent_bytes + self.window_bytes + self.prefix_bytes + self.index_bytes

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total_bytes": self.total_bytes}


@dataclass(frozen=True)
class CacheShape:
    """The sizes that a cache is allocated by.

    Attributes:
        b, t: requests, and slots of each, a multiple of the page size in a paged cache.
        k, p: latent and rope width.
        row_bytes: bytes of a token in the latent cache.
        element_size: bytes per element of the decompressed parts.
        page_size: tokens per page; None for a dense cache.
        num_pages: pages of all requests; 0 for a dense cache.
        window, window_form: slots of the ring, and how it is stored.
        prefix: tokens of the shared prefix.
        heads, head_dim, value_dim: of the decompressed parts.
    """

    b: int
    t: int
    k: int
    p: int
    row_bytes: int
    element_size: int
    page_size: int | None
    num_pages: int
    window: int
    prefix: int
    heads: int
    head_dim: int
    value_dim: int
    window_form: WindowForm = PLAIN

    def sizes(self) -> CacheSizes:
        token = (self.heads, self.head_dim, self.value_dim, self.p, self.element_size)
        if self.page_size is None:
            rows, index = self.b * self.t, 0
            tokens = rows - self.prefix * max(self.b - 1, 0)
        else:
            rows = tokens = self.num_pages * self.page_size
            index = self.b * (self.t // self.page_size) + 2 * self.num_pages + 1
        index += 2 * self.b + (self.b if self.window else 0)
        return CacheSizes(
            latent_bytes=rows * self.row_bytes,
            window_bytes=self.b * self.window * self.window_form.row_bytes(*token),
            prefix_bytes=self.prefix * PLAIN.row_bytes(*token),
            index_bytes=index * _INT32,
            tokens=tokens,
            tokens_per_request=self.t,
            window_tokens=self.window,
            prefix_tokens=self.prefix,
        )


def cache_shape(
    b: int,
    t: int | None,
    *,
    k: int,
    p: int,
    dtype: torch.dtype | CacheFormat,
    page_size: int | None,
    num_pages: int | None,
    window: int,
    window_dtype: str | None,
    prefix: int,
    heads: int | None,
    head_dim: int,
    value_dim: int,
    budget_bytes: int | None,
) -> CacheShape:
    """The shape of a cache from the arguments of `LatentCache.allocate`, each of them checked."""
    require_size("b", b, MOST_REQUESTS)
    for name, value in (("k", k), ("head_dim", head_dim), ("value_dim", value_dim)):
        require_size(name, value)
    require_size("p", p, minimum=0)
    if t is not None:
        require_size("t", t)
    elif page_size is not None or budget_bytes is None:
        raise InvalidArgumentError("t", "slots per request (or a budget, if dense)", None)
    for name, value in (("window", window), ("prefix", prefix)):
        require_int(name, value, minimum=0, maximum=t, maximum_name="t")
    if window or prefix or heads is not None:
        require_size("heads", heads)
    if budget_bytes is not None:
        require_size("budget_bytes", budget_bytes, 2**63 - 1)
        if num_pages is not None:
            raise InvalidArgumentError("num_pages", "none beside budget_bytes", num_pages)
    if isinstance(dtype, CacheFormat):
        dtype.require_widths(k, p)
        row_bytes, element_size = dtype.row_bytes(k, p), QUANTISED_FROM.itemsize
        if t is not None and dtype.by_page and page_size is None:
            t = -(-t // _ROWS_STEP) * _ROWS_STEP
    else:
        row_bytes, element_size = (k + p) * dtype.itemsize, dtype.itemsize
    width = (heads or 0, head_dim, value_dim, _window_form(window, window_dtype))
    shape = CacheShape(b, t or 0, k, p, row_bytes, element_size, None, 0, window, prefix, *width)
    if page_size is not None:
        return _paged_shape(shape, page_size, num_pages, budget_bytes)
    if num_pages is not None:
        raise InvalidArgumentError("num_pages", "none without page_size", num_pages)
    return _dense_shape(shape, t, budget_bytes)


def _window_form(window: int, window_dtype: str | None) -> WindowForm:
    if window_dtype is None:
        return PLAIN
    if window_dtype != FP8.name:
        raise InvalidArgumentError("window_dtype", f"{FP8.name!r} or None", repr(window_dtype))
    if not window or window % PAGE_STEP:
        expected = f"a positive multiple of {PAGE_STEP} with window_dtype={FP8.name!r}"
        raise InvalidArgumentError("window", expected, window)
    return FP8


def _dense_shape(shape: CacheShape, t: int | None, budget_bytes: int | None) -> CacheShape:
    """The shape of a dense cache: `t` slots per request, and no more than the budget gives."""
    if budget_bytes is not None:  # in steps of 64 slots
        step_bytes = shape.b * PAGE_STEP * shape.row_bytes
        least = max(1, -(-shape.prefix // PAGE_STEP))
        steps = _bought(replace(shape, t=0), budget_bytes, step_bytes, least)
        t = steps * PAGE_STEP if t is None else min(t, steps * PAGE_STEP)
    require_int("t", t, minimum=max(1, shape.window, shape.prefix))
    return replace(shape, t=t or 0)


def _paged_shape(
    shape: CacheShape, page_size: int, num_pages: int | None, budget_bytes: int | None
) -> CacheShape:
    """The shape of a paged cache: whole pages per request, as many as given, bought or needed."""
    require_int("page_size", page_size, minimum=1)
    if page_size % PAGE_STEP:
        raise InvalidArgumentError("page_size", f"a multiple of {PAGE_STEP}", page_size)
    if shape.prefix % page_size:
        expected = f"whole pages, a multiple of page_size={page_size}"
        raise InvalidArgumentError("prefix", expected, shape.prefix)
    max_pages, shared = -(-shape.t // page_size), shape.prefix // page_size
    shape = replace(shape, page_size=page_size, t=max_pages * page_size)
    needed = shared + shape.b * (max_pages - shared)
    if budget_bytes is not None:
        page_bytes = page_size * shape.row_bytes + 2 * _INT32
        num_pages = min(needed, _bought(shape, budget_bytes, page_bytes, shared + 1))
    elif num_pages is None:
        num_pages = needed
    require_size("num_pages", num_pages, minimum=max(1, shared))
    return replace(shape, num_pages=num_pages)


def _bought(shape: CacheShape, budget_bytes: int, step_bytes: int, least: int) -> int:
    """Steps of so many bytes that a budget buys beside a cache of a shape, `least` or more."""
    fixed = shape.sizes().total_bytes
    steps = (budget_bytes - fixed) // step_bytes
    if steps < least:
        expected = f"at least {fixed + least * step_bytes} bytes"
        raise InvalidArgumentError("budget_bytes", expected, budget_bytes)
    return int(steps)
