"""LatentCache: the KV cache of MLA, dense or paged, with optional decompressed parts.

All state lives on the device and its pointers stay. `append`, `truncate`, `fork`, `evict` and
`refill` have fixed shapes and never read back, so a CUDA graph can capture them when their counts
are tensors on the device. What does not fit is refused on the device too: `append` returns what it
took, `check` asks the device and raises. On a GPU kernels append and drop tokens (`index.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.copies import Prefix, Window, copy_row, decompress_rows, fill_ring
from mla_var3.attention.cache.index import CacheIndex, capturing
from mla_var3.attention.cache.sizes import CacheShape, CacheSizes, cache_shape
from mla_var3.attention.cache.storage import Storage, stored_as
from mla_var3.attention.cache.tokens import NewTokens
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.checks import (
    INDEX_DTYPES,
    index_tensor,
    inference,
    require_bounds,
    require_device,
    require_tensor,
)
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.problem import MOST, require_int
from mla_var3.op.mla.window.formats import FP8

Counts = Tensor | Sequence[int]


class LatentCache:
    """The cache of a batch of requests; `allocate` makes one.

    Attributes:
        storage: the buffer of latent rows and rope keys.
        index: lengths and pages, and the kernels that change them.
        lengths: int32 `[b]`, tokens of each request.
        refused: int32 `[b]`, tokens that did not fit since the request was last emptied or
            `read_refused` reset it.
        pages: block table, owners and free list; None in a dense cache.
        window: ring of the newest tokens, decompressed; None without one.
        prefix: shared first tokens, decompressed; None without.
    """

    def __init__(self, shape: CacheShape, storage: Storage) -> None:
        """Make an empty cache; `allocate` is the way with checks and defaults."""
        self._shape = shape
        self.storage = storage
        self.index = CacheIndex(shape, storage)
        self.lengths, self.refused = self.index.lengths, self.index.refused
        self.pages = self.index.pages
        head = (shape.head_dim, shape.value_dim, shape.p, storage.dtype, storage.buffer.device)
        self.window: Window | None = None
        if shape.window:
            fp8 = shape.window_form == FP8
            self.window = Window(shape.b, shape.heads, shape.window, *head, fp8=fp8)
        self.prefix = Prefix(shape.heads, shape.prefix, *head) if shape.prefix else None
        self._prefix_filled = self.prefix is None
        self._ring_truncated = False
        self.kept_view = self._made_view()  # what `view` gives outside of traced programs

    @classmethod
    def allocate(
        cls,
        b: int,
        t: int | None = None,
        *,
        k: int = 512,
        p: int = 64,
        dtype: torch.dtype | str = torch.bfloat16,
        scale: float = 1.0,
        device: torch.device | str = "cpu",
        page_size: int | None = None,
        num_pages: int | None = None,
        window: int = 0,
        window_dtype: str | None = None,
        prefix: int = 0,
        heads: int | None = None,
        head_dim: int = 128,
        value_dim: int | None = None,
        budget_bytes: int | None = None,
    ) -> LatentCache:
        """Allocate an empty cache by sizes or by a memory budget.

        Args:
            b: requests.
            t: slots per request. A dense cache with a budget takes what the budget gives when this
                is left out; a paged cache rounds it up to whole pages, a dense one in
                "fp8_per_token" to a multiple of 4.
            k: latent width.
            p: rope width; 0 for a model without rope.
            dtype: bfloat16, float16 or float32; or an 8-bit format, "fp8_per_token", "fp8_ds_mla"
                or "fp8" (`op/mla/cache_formats.py`). An 8-bit cache is filled from bfloat16 rows,
                and its decompressed parts are in bfloat16.
            scale: with "fp8", the scale of the whole cache.
            device: where it lives.
            page_size: tokens per page, a multiple of 64; None for a dense cache.
            num_pages: pages of all requests; by default enough for every request to be full.
            window: newest tokens of each request to keep decompressed as well.
            window_dtype: "fp8" keeps them in e4m3 with a scale per token and head, about half the
                bytes; `window` is then a multiple of 64. None for the dtype of the tokens.
            prefix: tokens at the start that all requests share, kept decompressed once; filled by
                `set_prefix`. Whole pages in a paged cache.
            heads: heads of the decompressed parts.
            head_dim: width of their keys without rope.
            value_dim: width of their values; `head_dim` by default.
            budget_bytes: most memory for everything: sets `num_pages`, or `t` of a dense cache.
        """
        stored = stored_as(dtype, scale)
        shape = cache_shape(
            b, t, k=k, p=p, dtype=stored, page_size=page_size, num_pages=num_pages, window=window,
            window_dtype=window_dtype, prefix=prefix, heads=heads, head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim, budget_bytes=budget_bytes,
        )  # fmt: skip
        # Tensors made in inference mode could not be changed outside of it.
        with torch.inference_mode(False):
            return cls(shape, Storage(shape, stored, require_device(device), scale))

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied: without the views, which would come back apart from it."""
        return {name: part for name, part in vars(self).items() if name != "kept_view"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.kept_view = self._made_view()

    # -- the tensors ------------------------------------------------------------------------------

    @property
    def buffer(self) -> Tensor:
        """The buffer, `[b, t, ...]` or `[num_pages, page_size, ...]`: k+p columns, or bytes."""
        return self.storage.buffer

    @property
    def c_kv(self) -> Tensor:
        """The latent rows, a view of `buffer`; e4m3 in 8 bits."""
        return self.storage.parts().latent

    @property
    def k_rope(self) -> Tensor:
        """The rope keys, a view of `buffer`."""
        return self.storage.parts().rope

    @property
    def block_table(self) -> Tensor | None:
        """int32 `[b, max_pages]`; None in a dense cache."""
        return None if self.pages is None else self.pages.block_table

    def view(self) -> CacheView:
        """The tensors for the attention; they stay the same through the life of the cache."""
        # A traced program slices the buffer itself, to see that both are one memory.
        return self._made_view() if torch.compiler.is_compiling() else self.kept_view

    @property
    def _has_whole_copy(self) -> bool:
        """Whether the ring has a slot for every token, so that no change makes it lack one."""
        shape = self._shape
        return shape.window == shape.t and not shape.prefix and shape.window_form != FP8

    def _made_view(self) -> CacheView:
        window, prefix, parts = self.window, self.prefix, self.storage.parts()
        view = CacheView(parts.latent, parts.rope, self.lengths, self.block_table)
        copies: dict[str, Any] = {"scales": parts.scales}
        if window is not None:
            copies |= {name: getattr(window, name) for name in ("k_new", "v_new", "k_rope_new")}
            copies |= {"window_scales": window.scales, "window_start": window.start}
        if prefix is not None:
            names = ("k_prefix", "v_prefix", "k_rope_prefix")
            copies |= {name: getattr(prefix, name) for name in names}
        if self._has_whole_copy and torch.compiler.is_compiling():
            # The way to say that a ring is full to the operators of a traced program.
            copies["window_start"] = None
        view = replace(view, **copies)
        whole = window is not None and prefix is None and not self._ring_truncated
        return view.with_whole_ring() if whole else view

    def sizes(self) -> CacheSizes:
        """Memory by part, and capacity."""
        return self._shape.sizes()

    # -- changes ----------------------------------------------------------------------------------

    @inference
    def set_prefix(self, latent: Tensor, rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> None:
        """Fill the shared prefix and start every request with it; earlier contents are gone.

        Rows are `[prefix, k]` and `[prefix, p]`; weights as for `append`.
        """
        if self.prefix is None:
            raise InvalidArgumentError("prefix", "a cache allocated with prefix > 0", 0)
        self._require_rows(latent, rope, [("prefix", self.prefix.length)])
        self._require_weights(w_uk, w_uv)
        self.prefix.write(*decompress_rows(latent, w_uk, w_uv), rope)  # first: it needs memory
        slots = torch.arange(self.prefix.length, device=latent.device)
        every = torch.ones_like(slots, dtype=torch.bool)
        # Pages are shared; in a dense cache every request has the prefix in slots of its own.
        for request in range(self._shape.b if self.pages is None else 1):
            self.storage.put(request * self._shape.t + slots, latent, rope, every)
        self._prefix_filled = True
        if self.window is not None:
            self.window.start.fill_(self.prefix.length)
        self._drop(torch.ones_like(self.lengths, dtype=torch.bool))

    @inference
    def append(
        self,
        latent: Tensor,
        rope: Tensor,
        counts: Counts | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        k_new: Tensor | None = None,
        v_new: Tensor | None = None,
        w_uk: Tensor | None = None,
        w_uv: Tensor | None = None,
    ) -> Tensor:
        """Add new tokens at the end of every request.

        The tokens of a request are taken all or none. None are taken where they would exceed the
        slots of the request or where no pages are left; `refused` counts them. An append that
        raises, as for want of memory, has taken none.

        Args:
            latent: `[b, m, k]`, or packed `[total, k]` with `cu_seqlens`.
            rope: `[b, m, p]`, or `[total, p]`.
            counts: tokens of each request, `0..m`, int `[b]`; by default m for all. The rows
                beyond a count may hold anything.
            cu_seqlens: int32 `[b+1]`, first token of each request in packed rows.
            k_new: decompressed keys, `[b, m, h, d]` or `[total, h, d]`, for a cache with a window.
            v_new: decompressed values, `[b, m, h, v]` or `[total, h, v]`.
            w_uk: `[h, d, k]`; with `w_uv` instead of `k_new` and `v_new`.
            w_uv: `[h, k, v]`.

        Returns:
            int32 `[b]`: tokens that were taken.
        """
        if not self._prefix_filled:
            raise InvalidArgumentError("prefix", "set_prefix before the first append", "nothing")
        tokens = self._new_tokens(latent, rope, counts, cu_seqlens)
        flat_latent, flat_rope = latent.flatten(0, -2), rope.flatten(0, -2)
        # Before anything changes: a wrong argument must leave the cache as it was.
        decompressed = None
        if self.window is not None:
            given = {"k_new": k_new, "v_new": v_new, "w_uk": w_uk, "w_uv": w_uv}
            decompressed = self.window.decompressed(flat_latent, tokens.leading, given)
        taken = self.index.append(tokens, flat_latent, flat_rope)
        if self.window is not None and decompressed is not None:
            try:
                requests = tokens.rows.requests
                positions, valid = self.index.placed(tokens, taken)
                kept = valid & (positions >= self.lengths[requests] - self.window.n)
                self.window.write(requests, positions, *decompressed, flat_rope, kept)
            except BaseException:  # see `CacheIndex.append`
                self._take_back(self.window, taken)
                raise
            self.window.grow(self.lengths)
        return taken

    @inference
    def truncate(
        self,
        counts: Counts,
        *,
        w_uk: Tensor | None = None,
        w_uv: Tensor | None = None,
        most: int | None = None,
    ) -> None:
        """Drop the newest tokens of every request, for example rejected drafts.

        Pages that hold none of the remaining tokens are free again. The ring keeps what it has of
        the remaining tokens; with weights it is filled up again by `refill`, at most `most` tokens
        per request. A request loses `counts` tokens, int `[b]`, at most its own (a shared prefix
        stays).
        """
        dropped = self._counts("counts", counts, MOST)
        if (w_uk is None) is not (w_uv is None):
            raise InvalidArgumentError("w_uk", "w_uk and w_uv, or neither", "one of them")
        if w_uk is not None and w_uv is not None:
            self._require_refill(w_uk, w_uv, most)
        self._forget_whole_ring()
        self._drop(dropped)
        if w_uk is not None and w_uv is not None:
            self.refill(w_uk, w_uv, most)

    @inference
    def evict(self, requests: Counts) -> None:
        """Empty requests, by indices, int, or a bool mask `[b]`; only a shared prefix stays."""
        self._drop(self._mask("requests", requests))

    @inference
    def fork(self, request: int | Tensor, into: Counts) -> None:
        """Let other requests continue from the tokens of one, for example samples of a prompt.

        What the others held is gone. A paged cache copies nothing here: the requests share pages,
        and one that appends to a page with other owners copies that page first. A dense cache
        copies the slots.

        Fork once before a CUDA graph captures `append`, if only by `fork(0, into=[])`: copying
        pages is then part of the graph.

        Args:
            request: its index, an int or an int tensor `[1]`.
            into: indices of the others, int, or a bool mask `[b]`.

        Raises:
            UnsupportedError: a CUDA graph captured `append` before the first fork.

        Example:
            >>> cache = LatentCache.allocate(4, t=256, k=8, p=4, page_size=64)
            >>> _ = cache.append(*prompt, counts=[100, 0, 0, 0])
            >>> cache.fork(0, into=[1, 2, 3])
            >>> cache.lengths.tolist()
            [100, 100, 100, 100]
        """
        if self.index.captured_without_forks:
            expected = "a first fork before a CUDA graph captures append"
            raise UnsupportedError(f"fork: expected {expected}, got one after")
        given = request if isinstance(request, Tensor) else [request]
        source = self._indices("request", given, 1, self.lengths.device)
        source = source.clamp(0, self._shape.b - 1)
        targets = self._mask("into", into)
        targets = targets & (torch.arange(self._shape.b, device=targets.device) != source)
        self.index.forks = self.pages is not None
        self._drop(targets)
        # The copies first: without memory for them, the others are empty and hold no pages.
        if self.window is not None:
            self.window.fork(source, targets)
        if self.pages is None:
            copy_row(self.buffer, source, targets)
        else:
            self.pages.fork(source, targets)
        for numbers in (self.lengths, self.refused):
            numbers.copy_(torch.where(targets, numbers[source], numbers))

    @inference
    def refill(self, w_uk: Tensor, w_uv: Tensor, most: int | None = None) -> None:
        """Decompress tokens that dropping others brought back among the newest.

        At most `most` tokens per request, by default a whole ring; weights as for `append`.
        """
        self._require_refill(w_uk, w_uv, most)
        if self.window is not None:
            n = self.window.n
            oldest = (self.lengths.long() - n).clamp(min=self._shape.prefix)
            fill_ring(self.view(), w_uk, w_uv, oldest, n if most is None else min(most, n))

    def read_refused(self, *, reset: bool = True) -> list[int]:
        """Tokens of each request that did not fit, perhaps to count anew; waits for the device."""
        refused: list[int] = self.refused.tolist()
        if reset:
            self.refused.zero_()
        return refused

    def check(self) -> None:
        """Raise if tokens did not fit; waits for the device.

        A request that refused tokens fails the check until it is evicted or `read_refused` resets
        the counts.

        Raises:
            UnsupportedError: Tokens were refused; names the requests.
        """
        refused = self.read_refused(reset=False)
        if any(refused):
            which = {request: count for request, count in enumerate(refused) if count}
            raise UnsupportedError(
                f"cache: expected space for every token, got {sum(refused)} refused "
                f"(by request: {which}); {self.sizes().tokens} tokens fit altogether, "
                f"{self._shape.t} per request; evict them, or reset the counts with read_refused"
            )

    # -- parts ------------------------------------------------------------------------------------

    def _indices(self, name: str, given: Counts, count: int | None, device: torch.device) -> Tensor:
        shape, limits = [("count", count)], (0, self._shape.b - 1, "b-1")
        return index_tensor(name, given, shape, device, torch.int64, limits)

    def _mask(self, name: str, given: Counts) -> Tensor:
        """Requests by their indices or a mask, as bool `[b]`."""
        b, device = self._shape.b, self.lengths.device
        if isinstance(given, Tensor) and given.dtype is torch.bool:
            return require_tensor(name, given, [("b", b)], [torch.bool], device)
        # A mask of a list is made on the host: one copy to the device.
        on_device = isinstance(given, Tensor)
        index = self._indices(name, given, None, device if on_device else torch.device("cpu"))
        return (torch.arange(b, device=index.device)[:, None] == index).any(1).to(device)

    def _drop(self, dropped: Tensor) -> None:
        if not self._prefix_filled:
            return  # no request has any, not even the shared prefix, which would stay
        self.index.drop(dropped)
        if self.window is not None:
            self.window.shrink(self.lengths)

    def _forget_whole_ring(self) -> None:
        """Tokens are dropped: known on the host even where a CUDA graph repeats this."""
        if self.window is not None and not self._has_whole_copy and not self._ring_truncated:
            self._ring_truncated = True
            self.kept_view.forget_whole_ring()

    def _take_back(self, window: Window, taken: Tensor) -> None:
        """Drop tokens of which only some are in the ring."""
        if capturing(taken):
            return
        self._forget_whole_ring()
        window.grow(self.lengths)
        self.index.take_back(taken)
        window.shrink(self.lengths)

    def _new_tokens(
        self, latent: Tensor, rope: Tensor, counts: Counts | None, cu_seqlens: Tensor | None
    ) -> NewTokens:
        b, device = self._shape.b, self.lengths.device
        if cu_seqlens is None:
            self._require_rows(latent, rope, [("b", b), ("m", None)])
            given = None if counts is None else self._counts("counts", counts, latent.shape[1])
            return NewTokens([("b", b), ("m", latent.shape[1])], given, None, device)
        if counts is not None:
            raise InvalidArgumentError("counts", "none beside cu_seqlens", "both")
        self._require_rows(latent, rope, [("total", None)])
        bounds = require_tensor("cu_seqlens", cu_seqlens, [("b+1", b + 1)], INDEX_DTYPES, device)
        require_bounds("cu_seqlens", bounds, latent.shape[0])
        return NewTokens([("total", latent.shape[0])], None, bounds, device)

    def _counts(self, name: str, counts: Counts, most: int) -> Tensor:
        shape, device = [("b", self._shape.b)], self.lengths.device
        dtype = counts.dtype if isinstance(counts, Tensor) else torch.int32
        return index_tensor(name, counts, shape, device, dtype, (0, most, ""))

    def _require_rows(
        self, latent: Tensor, rope: Tensor, leading: list[tuple[str, int | None]]
    ) -> None:
        dtypes, device = [self.storage.dtype], self.buffer.device
        require_tensor("latent", latent, [*leading, ("k", self._shape.k)], dtypes, device)
        sizes = [(label, size) for (label, _), size in zip(leading, latent.shape, strict=False)]
        require_tensor("rope", rope, [*sizes, ("p", self._shape.p)], dtypes, device)

    def _require_refill(self, w_uk: Tensor, w_uv: Tensor, most: int | None) -> None:
        self._require_weights(w_uk, w_uv)
        if most is not None:
            require_int("most", most, minimum=0)

    def _require_weights(self, w_uk: Tensor, w_uv: Tensor) -> None:
        shape = self._shape
        # Without decompressed parts the widths of the heads are the caller's.
        d, v = (shape.head_dim, shape.value_dim) if shape.heads else (None, None)
        h, k = ("h", shape.heads or None), ("k", shape.k)
        dtypes, device = [self.storage.dtype], self.buffer.device
        require_tensor("w_uk", w_uk, [h, ("d", d), k], dtypes, device)
        require_tensor("w_uv", w_uv, [h, k, ("v", v)], dtypes, device)
