"""Where the tokens of a cache are: lengths, refused tokens, pages.

Every change has two implementations with the same results, bit by bit: kernels (`kernels.py`), and
torch where they do not serve.
"""

from __future__ import annotations

import logging

import torch

from mla_var3.attention.cache.kernels import CacheKernels, capturing
from mla_var3.attention.cache.pages import PagePool
from mla_var3.attention.cache.sizes import CacheShape
from mla_var3.attention.cache.storage import Storage
from mla_var3.attention.cache.tokens import NewTokens, masked_put

log = logging.getLogger(__name__)


class CacheIndex:
    """Lengths and pages of a cache, and how tokens get into its buffer.

    Attributes:
        lengths: int32 `[b]`, tokens of each request.
        refused: int32 `[b]`, tokens that did not fit.
        pages: block table, owners and free list; None in a dense cache.
        kernels: the launches that replace torch.
        forks: whether pages may have several owners.
        captured_without_forks: whether a CUDA graph holds an append that copies no pages.
    """

    def __init__(self, shape: CacheShape, storage: Storage) -> None:
        """The index of an empty cache."""
        self._shape, self._storage = shape, storage
        device, size = storage.buffer.device, shape.page_size
        self.pages: PagePool | None = None
        if size is not None:
            self.pages = PagePool(
                shape.b, shape.t // size, shape.num_pages, size, device, shape.prefix // size
            )
        self.lengths = torch.zeros((shape.b,), dtype=torch.int32, device=device)
        self.refused = torch.zeros((shape.b,), dtype=torch.int32, device=device)
        self.kernels = CacheKernels(shape, storage)
        self.forks = False
        self.captured_without_forks = False

    def append(self, tokens: NewTokens, latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Take tokens as far as there is space, and write them.

        Args:
            tokens: whose they are.
            latent: `[m, k]`.
            rope: `[m, p]`.

        Returns:
            int32 `[b]`: tokens that were taken.
        """
        taken, sources = self._reserve(tokens)
        try:
            if self.pages is not None and sources is not None:
                self._copy_pages(self.pages, taken, sources)
            self._write(tokens, taken, latent, rope)
        except BaseException:  # for want of memory, or interrupted
            self.take_back(taken, sources)
            raise
        return taken

    def take_back(self, taken: torch.Tensor, sources: torch.Tensor | None = None) -> None:
        """Drop the tokens of an `append` that failed; a captured one has not happened.

        Args:
            taken: int32 `[b]`, what it took.
            sources: pages that it may not have copied, as in `Reserved.sources`.
        """
        if capturing(self.lengths):
            return
        try:
            if self.pages is not None and sources is not None:
                self._copy_pages(self.pages, taken, sources)  # the older tokens on them stay
            self.drop(taken)
        except Exception:  # the first error is the one to raise
            log.warning("the tokens of a failed append stay counted", exc_info=True)

    def placed(self, tokens: NewTokens, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Position of each row, int64 `[m]`, and whether it was taken, bool `[m]`.

        Args:
            tokens: the tokens of the last `append`.
            taken: what it returned.
        """
        rows = tokens.rows
        first = (self.lengths - taken).long()
        return first[rows.requests] + rows.offsets, rows.valid & (taken[rows.requests] > 0)

    def drop(self, dropped: torch.Tensor) -> None:
        """Drop tokens, int `[b]`, or all tokens of some requests, bool `[b]`.

        A shared prefix stays. A request that is emptied has refused nothing.
        """
        if self.kernels.release(dropped, self.lengths, self.refused, self.pages):
            return
        if dropped.dtype is torch.bool:
            left = torch.where(dropped, 0, self.lengths.long())
            self.refused.masked_fill_(dropped, 0)
        else:
            left = self.lengths.long() - dropped.long().clamp(min=0)
        left = left.clamp(min=self._shape.prefix)
        if self.pages is not None:
            self.pages.release(left)
        self.lengths.copy_(left)

    def _reserve(self, tokens: NewTokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens that are taken, int32 `[b]`, and pages to copy as in `Reserved.sources`."""
        pool = self.pages
        if pool is not None and not self.forks:
            self.captured_without_forks |= capturing(self.lengths)
        found = self.kernels.reserve(tokens, self.lengths, self.refused, pool, copies=self.forks)
        if found is not None:
            return found
        lengths, asked, sources = self.lengths.long(), tokens.rows.counts, None
        if pool is None:
            granted = lengths + asked <= self._shape.t
        else:
            granted, sources = pool.reserve(lengths, asked, tokens.most, self.forks)
        taken = torch.where(granted, asked, 0).to(torch.int32)
        self.lengths.add_(taken)
        self.refused.add_((asked - taken).to(torch.int32))
        return taken, sources

    def _write(
        self, tokens: NewTokens, taken: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Write the tokens that were taken."""
        pool, rows = self.pages, (latent, rope)
        if self.kernels.write(self._storage, rows, tokens, taken, self.lengths, pool):
            return
        positions, valid = self.placed(tokens, taken)
        if pool is None:
            slots = tokens.rows.requests * self._shape.t + positions
        else:
            slots = pool.rows(tokens.rows.requests, positions)
        self._storage.put(slots, latent, rope, valid)

    def _copy_pages(self, pool: PagePool, taken: torch.Tensor, sources: torch.Tensor) -> None:
        """Fill the new pages that replace pages with other owners."""
        buffer = self._storage.buffer
        if self.kernels.copy(buffer, sources, taken, self.lengths, pool):
            return
        requests = torch.arange(self._shape.b, device=taken.device)
        target = pool.pages_at(requests, (self.lengths - taken).long() // pool.page_size)
        try:
            masked_put(buffer, (target,), buffer[sources.long().clamp(min=0)], sources >= 0)
        except torch.OutOfMemoryError:  # one after the other
            if capturing(buffer):
                raise
            for copy, page in zip(target.tolist(), sources.tolist(), strict=True):
                if page >= 0:
                    buffer[copy].copy_(buffer[page])
