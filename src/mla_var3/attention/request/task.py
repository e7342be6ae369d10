"""One attention call, checked and complete, as every backend takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix.groups import DecompressedPrefixes, about_tokens
from mla_var3.attention.prefix.layout import Prefix, groups_in, is_pageable
from mla_var3.attention.request.masks import Visibility
from mla_var3.attention.request.shape import CallShape
from mla_var3.op.mla.problem import MOST
from mla_var3.op.mla.window.formats import FP8
from mla_var3.runtime.tensors import ALIGNMENT_BYTES


@dataclass(frozen=True)
class AttentionTask:
    """Operands and options of one call.

    Attributes:
        q: `q_nope [b, s, h, d]`, or `q_latent [b, s, h, k]` when `w_uk` is None; `[total, h, ...]`
            with `cu_seqlens_q`.
        q_rope: `[b, s, h, p]`, or `[total, h, p]`.
        cache: the KV tokens.
        w_uk, w_uv: `[h, d, k]` and `[h, k, v]`; None when the caller does the projections.
        causal, scale, max_kv, shards, shard, batch_invariant, sliding_window, prefix, out: as for
            `mla_attention`.
        tree: bool `[b, s, s]`; None for plain causal order.
        cu_seqlens_q: int32 `[b+1]`; None when all requests have s queries.
        max_q: queries per request, the most of any when they differ; None when only the device
            knows.
        total_lengths: int32 `[b]`, see `Visibility.ends`; None when the cache holds all tokens.
        schedule: memory that the calls of a `Step` share; None for a call of its own.
        scheduled: whether the schedule of this call is there.
        empty_positive: whether a query that sees no token has an LSE of +inf, as in
            FlashMLA, not -inf. `with_empty_sums` does it after kernels that know one way only.
    """

    q: Tensor
    q_rope: Tensor
    cache: CacheView
    w_uk: Tensor | None
    w_uv: Tensor | None
    causal: bool
    scale: float
    tree: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None
    total_lengths: Tensor | None = None
    shards: int = 1
    shard: int = 0
    batch_invariant: bool = False
    sliding_window: int | None = None
    prefix: Prefix | None = None
    schedule: Tensor | None = None
    scheduled: bool = False
    out: Tensor | None = None
    empty_positive: bool = False

    @property
    def latent_only(self) -> bool:
        return self.w_uk is None

    @property
    def h(self) -> int:
        return self.q.shape[-2]

    @property
    def width(self) -> int:
        """Width of the output."""
        return self.cache.latent.shape[-1] if self.w_uv is None else self.w_uv.shape[2]

    def with_empty_sums(self, lse: Tensor) -> Tensor:
        """The LSE as this call wants it: -inf or +inf for queries that see no token."""
        if not self.empty_positive:
            return lse
        return lse.masked_fill(lse == -torch.inf, torch.inf)

    def visibility(self, s: int) -> Visibility:
        """What the queries see, with s query rows per request."""
        lengths = self.cache.lengths.long()
        if self.cu_seqlens_q is None:
            counts = torch.full_like(lengths, s)
        else:
            bounds = self.cu_seqlens_q.long()
            counts = (bounds[1:] - bounds[:-1]).clamp(0, s)
        ends = lengths if self.total_lengths is None else self.total_lengths.long()
        return Visibility(
            lengths, ends, counts, s, self.causal, self.tree, self.shards, self.shard,
            self.sliding_window,
        )  # fmt: skip

    def shape(self) -> CallShape:
        """What decides which kernels can serve the call."""
        cache, ragged = self.cache, self.cu_seqlens_q is not None
        b, k = cache.requests, cache.latent.shape[-1]
        shared, groups = self._shared()
        mean = -(-self.q.shape[0] // max(b, 1)) if ragged else self.q.shape[1]
        d = self.q.shape[-1] if self.w_uk is None else self.w_uk.shape[1]
        t = cache.capacity if self.max_kv is None else min(self.max_kv, cache.capacity)
        widest = max(k, d, self.width)
        copies = self.prefix.copies if isinstance(self.prefix, DecompressedPrefixes) else ()
        as_they_are = ("h", "causal", "batch_invariant", "sliding_window", "latent_only", "scale")
        known: dict[str, Any] = {name: getattr(self, name) for name in as_they_are}
        known |= {name: getattr(cache, name) for name in ("page_size", "window", "prefix")}
        return CallShape(
            **known,
            b=b,
            s=max(1, self.max_q or mean),
            t=t,
            d=d,
            p=self.q_rope.shape[-1],
            k=k,
            v=0 if self.w_uv is None else self.w_uv.shape[2],
            dtype=str(self.q.dtype).removeprefix("torch."),
            ragged=ragged,
            tree=self.tree is not None,
            partial=self.total_lengths is not None,
            aligned=all(_is_aligned(rows) for rows in (cache.latent, cache.rope))
            and _are_scales_aligned(cache.scales),
            shared=shared,
            groups=groups,
            prefix_copies=max((copy.tokens for copy in copies), default=0),
            cache_dtype=None if cache.format is None else cache.format.name,
            window_dtype=None if cache.window_scales is None else FP8.name,
            whole_copy=cache.window < t or cache.window_start is None or cache.ring_whole,
            rows_in_32_bits=not ragged or self.q.shape[0] * self.h * widest <= MOST,
        )

    def _shared(self) -> tuple[int, int]:
        """Shared first tokens of a request, roughly, and groups that share some."""
        if self.prefix is not None:
            given = groups_in(self.prefix)
            about = about_tokens(self.cache.capacity) if given.about is None else given.about
            return about, min(given.groups, max(self.cache.requests, 1))
        return (self.cache.prefix if is_pageable(self.cache) else 0), 1


def _are_scales_aligned(scales: Tensor | None) -> bool:
    """The same for scales beside the rows; one scale for all is read by itself."""
    if scales is None or scales.dim() == 1:
        return True
    return _is_aligned(scales if scales.shape[-1] > 1 else scales[..., 0])


def _is_aligned(rows: Tensor) -> bool:
    """Whether the copy engine of a GPU can read the rows: stride 1 inside, 16-byte steps."""
    if not rows.shape[-1]:  # no rope part
        return True
    element = rows.element_size()
    steps = (stride * element for stride in rows.stride()[:-1])
    whole = rows.stride(-1) == 1 and all(step % ALIGNMENT_BYTES == 0 for step in steps)
    return whole and rows.storage_offset() * element % ALIGNMENT_BYTES == 0
