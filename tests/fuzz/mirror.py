"""A latent cache beside plain lists of its tokens, and attention over the lists in float64."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import mla_var3
from mla_var3.attention import paged_view, tree_ancestors
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.op.mla.cache_formats import cache_format, dequantise, quantise

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Error of an output row relative to its norm plus that of a row of unit variance."""
FP8_TOLERANCE = 0.06
"""The same with keys and values, or queries and probabilities, that are rounded to e4m3."""
E4M3_ERROR = 0.026
"""Standard deviation of the relative error of a number rounded to e4m3."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class WrongResult(AssertionError):
    """A result that float64 refutes."""


class Mirror:
    """One attention layer with its cache, and the same tokens as lists.

    Everything that no call may read holds NaN: see `poison`.

    Args:
        device: where cache and calls are.
        seed: of all values.
        dtype: a key of `DTYPES`.
        b, t, h, d, k, p: sizes.
        kind: "dense" or "paged" for a `LatentCache`, "pair" for two tensors, "view" for pages that
            somebody else owns.
        page_size, num_pages, window, prefix: as for `LatentCache.allocate`.
        cache_dtype: format of an 8-bit cache without decompressed parts; None for `dtype`.
        window_dtype: as for `LatentCache.allocate`.
    """

    def __init__(
        self,
        *,
        device: str,
        seed: int,
        dtype: str,
        b: int,
        t: int,
        h: int,
        d: int,
        k: int,
        p: int,
        kind: str = "dense",
        page_size: int = 64,
        num_pages: int | None = None,
        window: int = 0,
        prefix: int = 0,
        cache_dtype: str | None = None,
        window_dtype: str | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), DTYPES[dtype]
        self.b, self.h, self.d, self.k, self.p, self.kind = b, h, d, k, p, kind
        self.window, self.prefix, self.page_size = window, prefix, page_size
        self.cache_dtype, self.window_dtype = cache_dtype, window_dtype
        self._forked = False
        self._generator = torch.Generator().manual_seed(seed)
        self.w_uk = self.normal(h, d, k, scale=(d * k) ** -0.25)
        self.w_uv = self.normal(h, k, d, scale=k**-0.5)
        first = self.normal(prefix, k + p)
        self.tokens = [first] * b
        self.cache: mla_var3.LatentCache | None = None
        if kind in ("dense", "paged"):
            self.cache = mla_var3.LatentCache.allocate(
                b, t, k=k, p=p, dtype=cache_dtype or self.dtype, device=device, window=window,
                window_dtype=window_dtype, prefix=prefix,
                page_size=page_size if kind == "paged" else None,
                num_pages=num_pages if kind == "paged" else None, heads=h, head_dim=d,
            )  # fmt: skip
            view = self.cache.view()
            if prefix:
                self.cache.set_prefix(first[:, :k], first[:, k:], self.w_uk, self.w_uv)
            self.t = view.capacity
            self.poison()
        else:
            self.t = -(-t // page_size) * page_size if kind == "view" else t

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random values on the device, the same for the same seed on every device."""
        values = torch.randn(shape, generator=self._generator) * scale
        return values.to(self.dtype).to(self.device)

    def nans(self, *shape: int) -> Tensor:
        """What no call may read."""
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request."""
        return [len(rows) for rows in self.tokens]

    # -- changes ----------------------------------------------------------------------------------

    def append(self, counts: Sequence[int], *, packed: bool = False, given: bool = False) -> None:
        """Add tokens; what the cache says it took has to follow its own rules.

        Args:
            counts: tokens of each request.
            packed: give rows one after the other, not padded.
            given: give decompressed keys and values, not the weights.
        """
        new = [self.normal(count, self.k + self.p) for count in counts]
        if self.cache is None:
            for request, rows in enumerate(new):
                if len(self.tokens[request]) + len(rows) <= self.t:
                    self.tokens[request] = torch.cat([self.tokens[request], rows])
            return
        options: dict[str, Any] = {}
        if packed:
            rows = torch.cat([*new, self.nans(1, self.k + self.p)])
            bounds = [0, *itertools.accumulate(counts)]
            options["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=self.device)
        else:
            width = max(counts) + 1
            rows = self.nans(self.b, width, self.k + self.p)
            for request, own in enumerate(new):
                rows[request, : len(own)] = own
            options["counts"] = list(counts)
        latent, rope = rows[..., : self.k], rows[..., self.k :]
        if self.window and given:
            options["k_new"] = torch.einsum("...k,hdk->...hd", latent, self.w_uk)
            options["v_new"] = torch.einsum("...k,hkd->...hd", latent, self.w_uv)
        elif self.window:
            options.update(w_uk=self.w_uk, w_uv=self.w_uv)
        taken = self.cache.append(latent, rope, **options).tolist()
        free = self._free_pages()
        for request, (own, count) in enumerate(zip(new, taken, strict=True)):
            length = len(self.tokens[request])
            fits = length + len(own) <= self.t
            if count not in (0, len(own)) or (count and not fits):
                raise WrongResult(
                    f"append: request {request} of {length} took {count} of {own.shape}"
                )
            wanted = self._pages(length + len(own)) - self._pages(length)
            if count == 0 < len(own) and fits and wanted <= free and not self._scarce():
                raise WrongResult(f"append: request {request} was refused, {free} pages free")
            if count:
                self.tokens[request] = torch.cat([self.tokens[request], self._stored(own)])
        self._after_change()

    def _stored(self, rows: Tensor) -> Tensor:
        """Tokens as the cache gives them back."""
        if self.cache_dtype is None:
            return rows
        parts = quantise(rows[:, : self.k], rows[:, self.k :], cache_format(self.cache_dtype))
        return torch.cat(dequantise(parts, self.dtype), dim=-1)

    def truncate(self, counts: Sequence[int], *, refill: bool = False) -> None:
        """Drop the newest tokens, with or without filling the window up again."""
        for request, count in enumerate(counts):
            kept = max(len(self.tokens[request]) - count, self.prefix)
            self.tokens[request] = self.tokens[request][:kept]
        if self.cache is not None:
            weights = {"w_uk": self.w_uk, "w_uv": self.w_uv} if refill else {}
            self.cache.truncate(list(counts), **weights)
            self._after_change()

    def evict(self, requests: Sequence[int]) -> None:
        """Empty requests."""
        for request in requests:
            self.tokens[request] = self.tokens[request][: self.prefix]
        if self.cache is not None:
            self.cache.evict(list(requests))
            self._after_change()

    def fork(self, source: int, into: Sequence[int]) -> None:
        """Let requests continue from the tokens of another one."""
        for request in into:
            self.tokens[request] = self.tokens[source]
        if self.cache is not None:
            self.cache.fork(source, into=list(into))
            self._forked = True
            self._after_change()

    def _after_change(self) -> None:
        assert self.cache is not None
        found = self.cache.lengths.tolist()
        if found != self.lengths:
            raise WrongResult(f"lengths: expected {self.lengths}, got {found}")
        self.poison()

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _scarce(self) -> bool:
        """Whether requests share pages, or compete for them, so that the order decides."""
        assert self.cache is not None
        if self._forked:
            return True
        shared = self.prefix // self.page_size
        wanted = shared + self.b * (self.t // self.page_size - shared)
        return self.kind == "paged" and self.cache.buffer.shape[0] < wanted

    def _free_pages(self) -> int:
        if self.cache is None or self.kind != "paged":
            return self.b * self.t
        shared = self.prefix // self.page_size
        used = shared + sum(self._pages(length) - shared for length in self.lengths)
        return int(self.cache.buffer.shape[0]) - used

    def poison(self) -> None:
        """NaN into every slot of the cache that holds no token of a request."""
        assert self.cache is not None
        view = self.cache.view()
        live = torch.zeros(self.cache.buffer.shape[:2], dtype=torch.bool, device=self.device)
        for request, length in enumerate(self.lengths):
            if view.block_table is None:
                live[request, :length] = True
                continue
            positions = torch.arange(length, device=self.device)
            pages = view.block_table[request].long()[positions // self.page_size]
            live[pages, positions % self.page_size] = True
        for part in (view.latent, view.rope, view.scales):
            if part is not None and part.dim() == 3:
                empty = ~live[..., None]
                if part.dtype.itemsize == 1:
                    part.view(torch.uint8).masked_fill_(empty, 0xFF)  # a NaN in e4m3
                else:
                    part.masked_fill_(empty, torch.nan)
        if view.k_new is None or view.v_new is None or view.k_rope_new is None:
            return
        assert view.window_start is not None
        filled = torch.zeros((self.b, self.window), dtype=torch.bool, device=self.device)
        for request, first in enumerate(view.window_start.tolist()):
            positions = torch.arange(first, self.lengths[request], device=self.device)
            filled[request, positions % self.window] = True
        if view.packed_window is None:
            for tensor in (view.k_new, view.v_new):
                tensor.masked_fill_(~filled[:, None, :, None], torch.nan)
        else:
            for target, index in view.packed_window.by_slot(*(~filled).nonzero(as_tuple=True)):
                target[index] = torch.nan if target.dtype.is_floating_point else 0xFF
        view.k_rope_new.masked_fill_(~filled[..., None], torch.nan)

    # -- attention --------------------------------------------------------------------------------

    def operand(self) -> tuple[Any, dict[str, Any]]:
        """The cache as the call takes it, and the options that go with it."""
        if self.cache is not None:
            return self.cache, {}
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        if self.kind == "pair":
            rows = self.nans(self.b, self.t, self.k + self.p)
            for request, own in enumerate(self.tokens):
                rows[request, : len(own)] = own
            return (rows[..., : self.k], rows[..., self.k :]), {"lengths": lengths}
        per_request = self.t // self.page_size
        count = self.b * per_request + 1
        order = torch.randperm(count, generator=self._generator).tolist()
        pages = self.nans(count, self.page_size, self.k + self.p)
        table = torch.full((self.b, per_request), order.pop(), dtype=torch.int32)
        for request, own in enumerate(self.tokens):
            for index in range(self._pages(len(own))):
                table[request, index] = page = order.pop()
                part = own[index * self.page_size : (index + 1) * self.page_size]
                pages[page, : len(part)] = part
        return paged_view(pages, table.to(self.device), lengths, k=self.k), {}

    def attend(
        self,
        counts: Sequence[int],
        *,
        packed: bool = False,
        mask: str = "causal",
        per_request: bool = False,
        scale: float | None = None,
        latent: bool = False,
        strided: bool = False,
        out: bool = False,
        bound: bool = False,
        sliding_window: int | None = None,
        batch_invariant: bool = False,
        wide: bool = False,
        unbounded: bool = False,
        kernel: str = "auto",
    ) -> None:
        """One call, compared with float64.

        Args:
            counts: queries of each request, all the same unless `packed`.
            packed: queries one after the other.
            mask: "causal", "full", "tree" (a mask) or "parents".
            per_request: whether each request has a tree of its own.
            scale: factor on the logits.
            latent: call `mla_latent_attention`.
            strided: queries whose elements do not lie side by side.
            out: give the output tensor.
            bound: give `max_kv`.
            sliding_window: as for the call.
            batch_invariant: likewise.
            wide: bounds of packed queries in 64 bits.
            unbounded: give no `max_q`, where no tree asks for it.
            kernel: as for the call.
        """
        total, most, step = sum(counts), max([1, *counts]), 2 if strided else 1
        width = self.k if latent else self.d
        q = self.normal(
            total, self.h, width * step, scale=(self.d / self.k) ** 0.25 if latent else 1.0
        )
        q, q_rope = q[..., ::step], self.normal(total, self.h, self.p * step)[..., ::step]
        cache, options = self.operand()
        options.update(causal=mask != "full", kernel=kernel, batch_invariant=batch_invariant)
        options.update(scale=scale, sliding_window=sliding_window)
        trees = self._trees(most, mask, per_request, options)
        bounds = [0, *itertools.accumulate(counts)]
        shape: tuple[int, ...] = (total, self.h)
        if packed:
            index = torch.int64 if wide else torch.int32
            options["cu_seqlens_q"] = torch.tensor(bounds, dtype=index, device=self.device)
            if trees is not None or not unbounded:
                options["max_q"] = most
        else:
            shape = (self.b, most, self.h)
            q, q_rope = q.unflatten(0, (self.b, most)), q_rope.unflatten(0, (self.b, most))
        if bound:
            options["max_kv"] = max([1, *self.lengths])
        if out:
            options["out"] = self.nans(*shape, width)
        if latent:
            result, lse = mla_var3.mla_latent_attention(q, q_rope, cache, d=self.d, **options)
        else:
            result, lse = mla_var3.mla_attention(
                q, q_rope, cache, self.w_uk, self.w_uv, return_lse=True, **options
            )
        if out and result.data_ptr() != options["out"].data_ptr():
            raise WrongResult("out: the output lies elsewhere")
        if result.shape != (*shape, width) or lse.shape != shape:
            raise WrongResult(f"shapes: got {tuple(result.shape)} and {tuple(lse.shape)}")
        flat = result.reshape(total, self.h, width), lse.reshape(total, self.h)
        queries = q.reshape(total, self.h, width), q_rope.reshape(total, self.h, self.p)
        for request, (first, last) in enumerate(itertools.pairwise(bounds)):
            own = [x[first:last] for x in queries]
            tree = None if trees is None else trees[request][: last - first, : last - first]
            masks = mask != "full", tree, sliding_window
            expected = self.exact(request, *own, scale, latent, *masks)
            self.compare(request, [x[first:last] for x in flat], expected)

    def _trees(
        self, most: int, mask: str, per_request: bool, options: dict[str, Any]
    ) -> list[Tensor] | None:
        if mask not in ("tree", "parents"):
            return None
        lead = (self.b,) if per_request else ()
        draws = torch.rand((*lead, most), generator=self._generator)
        parents = (draws * (torch.arange(most) + 1)).long() - 1
        trees = tree_ancestors(parents)
        options["tree_mask"] = (trees if mask == "tree" else parents).to(self.device)
        return list(trees.expand(self.b, most, most))

    def exact(
        self,
        request: int,
        q: Tensor,
        q_rope: Tensor,
        scale: float | None,
        latent: bool,
        causal: bool,
        tree: Tensor | None,
        sliding_window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One request in float64: output `[s, h, ...]`, log-sum-exp and noise `[s, h]`.

        Noise is the standard deviation of a row's scores, the largest, for query elements with a
        relative error of 1.
        """
        rows, s = self.tokens[request].double(), len(q)
        c, rope, m = rows[:, : self.k], rows[:, self.k :], len(rows)
        w_uk, w_uv = self.w_uk.double(), self.w_uv.double()
        q_latent = q.double() if latent else torch.einsum("shd,hdk->shk", q.double(), w_uk)
        logits = torch.einsum("shk,mk->shm", q_latent, c)
        logits = logits + torch.einsum("shp,mp->shm", q_rope.double(), rope)
        factor = (self.d + self.p) ** -0.5 if scale is None else scale
        logits = logits * factor
        square = torch.einsum("shk,mk->shm", q_latent**2, c**2)
        square = square + torch.einsum("shp,mp->shm", q_rope.double() ** 2, rope**2)
        noise = square.amax(-1).sqrt() * factor if m else logits.new_zeros((s, self.h))
        position = torch.arange(m - s, m, device=self.device)[:, None]
        token = torch.arange(m, device=self.device)
        hidden = (token > position) if causal else torch.zeros(s, m, device=self.device).bool()
        if sliding_window is not None:
            hidden = hidden | (token <= position - sliding_window)
        if tree is not None and s:
            draft = token - (m - s)
            seen = tree.to(self.device)[:, draft.clamp(min=0)]
            hidden = hidden | ((draft >= 0) & ~seen)
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
        lse = torch.logsumexp(logits, -1) if m else logits.new_full((s, self.h), -torch.inf)
        weights = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        output = torch.einsum("shm,mk->shk", weights, c)
        return (output if latent else torch.einsum("shk,hkd->shd", output, w_uv)), lse, noise

    def compare(
        self, request: int, found: list[Tensor], expected: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Refuse output and LSE of a request that are too far from the exact ones."""
        output, lse = (x.double() for x in found)
        wanted, wanted_lse, noise = expected
        tolerance, rounding = TOLERANCE[self.dtype], torch.zeros_like(noise)
        if self.window_dtype or (self.cache_dtype in FP8_FORMATS and self.device.type == "cuda"):
            tolerance, rounding = FP8_TOLERANCE, 6 * E4M3_ERROR * noise
        norm = wanted.norm(dim=-1)
        error = (output - wanted).norm(dim=-1)
        # Not "error > bound": that is false for NaN.
        wrong = ~(error <= 3 * tolerance * (norm + wanted.shape[-1] ** 0.5))
        empty = wanted_lse == -torch.inf
        wrong |= empty & ((output != 0).any(-1) | (lse != -torch.inf))
        difference = torch.where(empty, 0.0, lse - torch.where(empty, 0.0, wanted_lse))
        bound = tolerance * (1 + wanted_lse.abs().masked_fill(empty, 0.0)) + rounding
        wrong |= ~(difference.abs() <= bound)
        if wrong.any():
            query, head = (int(x) for x in wrong.nonzero()[0])
            raise WrongResult(
                f"request {request} of length {len(self.tokens[request])}, query {query} of "
                f"{len(output)}, head {head}: error {float(error[query, head]):.3g} at norm "
                f"{float(norm[query, head]):.3g}, LSE {float(lse[query, head]):.6g} and not "
                f"{float(wanted_lse[query, head]):.6g}; {int(wrong.sum())} of {wrong.numel()} "
                "rows are wrong"
            )
