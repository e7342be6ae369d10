"""Where the tokens of a cache are: lengths, refused tokens, pages.

Every change has two implementations with the same results, bit by bit. Kernels: `append` is two
launches, of which the second may begin early, `truncate` and `evict` one (`reserve_pages` and
`append_rows` in `kernel/cutile/mla/`); once a cache has forked, `append` has one more, which copies
pages. And torch: on the CPU, on GPUs before Ampere, in traced programs, for batches and widths that
no kernel serves, and where a CUDA graph captures a kernel that was never launched: a first launch
compiles, which no graph may capture.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.pages import PagePool
from mla_var3.attention.cache.sizes import CacheShape
from mla_var3.attention.cache.storage import Parts, Storage
from mla_var3.attention.cache.tokens import NewTokens, masked_put
from mla_var3.errors import KernelCompileError

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
FLOAT8_CAPABILITY = (9, 0)
EARLY_CAPABILITY = (9, 0)
"""Least compute capability for which cuTile compiles, has float8, and kernels may begin early."""


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
        self.shape, self.storage = shape, storage
        device, size = storage.buffer.device, shape.page_size
        self.pages: PagePool | None = None
        if size is not None:
            self.pages = PagePool(
                shape.b, shape.t // size, shape.num_pages, size, device, shape.prefix // size
            )
        self.lengths = torch.zeros((shape.b,), dtype=torch.int32, device=device)
        self.refused = torch.zeros((shape.b,), dtype=torch.int32, device=device)
        self.kernels = CacheKernels(self)
        self.forks = False
        self.captured_without_forks = False

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied: launches and views are found again."""
        return {name: part for name, part in vars(self).items() if name != "kernels"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.kernels = CacheKernels(self)

    def append(self, tokens: NewTokens, latent: Tensor, rope: Tensor) -> Tensor:
        """Take tokens, rows `[m, k]` and `[m, p]`, as far as there is space, and write them.

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

    def take_back(self, taken: Tensor, sources: Tensor | None = None) -> None:
        """Drop the tokens that an `append` took before it failed; a captured one has not happened.

        The pages in `sources`, see `PagePool.reserve`, may not have been copied.
        """
        if capturing(self.lengths):
            return
        try:
            if self.pages is not None and sources is not None:
                self._copy_pages(self.pages, taken, sources)  # the older tokens on them stay
            self.drop(taken)
        except Exception:  # the first error is the one to raise
            log.warning("the tokens of a failed append stay counted", exc_info=True)

    def placed(self, tokens: NewTokens, taken: Tensor) -> tuple[Tensor, Tensor]:
        """Of the last `append`: position of each row, int64 `[m]`, and whether it was taken."""
        rows = tokens.rows
        first = (self.lengths - taken).long()
        return first[rows.requests] + rows.offsets, rows.valid & (taken[rows.requests] > 0)

    def drop(self, dropped: Tensor) -> None:
        """Drop tokens, int `[b]`, or all tokens of some requests, bool `[b]`.

        A shared prefix stays. A request that is emptied has refused nothing.
        """
        if self.kernels.release(dropped):
            return
        if dropped.dtype is torch.bool:
            left = torch.where(dropped, 0, self.lengths.long())
            self.refused.masked_fill_(dropped, 0)
        else:
            left = self.lengths.long() - dropped.long().clamp(min=0)
        left = left.clamp(min=self.shape.prefix)
        if self.pages is not None:
            self.pages.release(left)
        self.lengths.copy_(left)

    def _reserve(self, tokens: NewTokens) -> tuple[Tensor, Tensor | None]:
        """Tokens that are taken, int32 `[b]`, and pages to copy as in `PagePool.reserve`."""
        pool = self.pages
        if pool is not None and not self.forks:
            self.captured_without_forks |= capturing(self.lengths)
        found = self.kernels.reserve(tokens)
        if found is not None:
            return found
        lengths, asked, sources = self.lengths.long(), tokens.rows.counts, None
        if pool is None:
            granted = lengths + asked <= self.shape.t
        else:
            granted, sources = pool.reserve(lengths, asked, tokens.most, self.forks)
        taken = torch.where(granted, asked, 0).to(torch.int32)
        self.lengths.add_(taken)
        self.refused.add_((asked - taken).to(torch.int32))
        return taken, sources

    def _write(self, tokens: NewTokens, taken: Tensor, latent: Tensor, rope: Tensor) -> None:
        if self.kernels.write(latent, rope, tokens, taken):
            return
        positions, valid = self.placed(tokens, taken)
        if self.pages is None:
            slots = tokens.rows.requests * self.shape.t + positions
        else:
            slots = self.pages.rows(tokens.rows.requests, positions)
        self.storage.put(slots, latent, rope, valid)

    def _copy_pages(self, pool: PagePool, taken: Tensor, sources: Tensor) -> None:
        """Fill the new pages that replace pages with other owners."""
        if self.kernels.copy(sources, taken):
            return
        buffer = self.storage.buffer
        requests = torch.arange(self.shape.b, device=taken.device)
        target = pool.pages_at(requests, (self.lengths - taken).long() // pool.page_size)
        try:
            masked_put(buffer, (target,), buffer[sources.long().clamp(min=0)], sources >= 0)
        except torch.OutOfMemoryError:  # one after the other
            if capturing(buffer):
                raise
            for copy, page in zip(target.tolist(), sources.tolist(), strict=True):
                if page >= 0:
                    buffer[copy].copy_(buffer[page])


class CacheKernels:
    """The launches of one cache; each returns whether it happened, otherwise torch has to.

    Attributes:
        pages: whether kernels keep lengths and pages.
        rows: whether a kernel writes tokens.
        early: whether that kernel begins, and reads the tokens, while `reserve_pages` still runs.
            What computed the tokens has ended before `reserve_pages` began, which itself never
            begins early: its wait would show it what was written before, but nothing that CUDA
            documents would show it to the next kernel.
    """

    def __init__(self, index: CacheIndex) -> None:
        self._index = index
        self._parts: tuple[Tensor, Parts] | None = None
        self._launched: set[tuple[object, ...]] = set()
        self._failed: set[object] = set()
        storage = index.storage
        capability = _capability(storage.buffer.device)
        self.pages = self.rows = self.early = self._reserved = False
        if capability >= LEAST_CAPABILITY:
            self.serve(float8=capability >= FLOAT8_CAPABILITY, fp8=storage.format is not None)
            self.early = capability >= EARLY_CAPABILITY

    def serve(self, *, float8: bool, fp8: bool) -> None:
        """Use kernels where they serve the cache, on a device with or without float8."""
        from mla_var3.kernel.cutile.mla import append_rows, reserve_pages

        shape = self._index.shape
        self.pages = reserve_pages.serves(shape.b, -(-shape.t // (shape.page_size or shape.t)))
        self.rows = (float8 or not fp8) and append_rows.serves(shape.k, shape.p, shape.b)

    def reserve(self, tokens: NewTokens) -> tuple[Tensor, Tensor | None] | None:
        """Take tokens as far as there is space: those taken, and the pages to copy.

        Lengths, refused counts and pages change. None where torch has to.
        """
        if not self.pages or torch.compiler.is_compiling():
            return None
        from mla_var3.kernel.cutile.mla.reserve_pages import reserve_launch

        index = self._index
        taken = torch.empty_like(index.lengths)
        copies = index.forks and index.pages is not None
        sources = torch.empty_like(taken) if copies else None
        launch = reserve_launch(
            index.lengths, index.refused, tokens.given, _pool(index.pages), taken, sources,
            most=tokens.most, slots=index.shape.t,
        )  # fmt: skip
        self._reserved = self._launch(launch, tokens.given)
        return (taken, sources) if self._reserved else None

    def release(self, dropped: Tensor) -> bool:
        if not self.pages or torch.compiler.is_compiling():
            return False
        from mla_var3.kernel.cutile.mla.reserve_pages import release_launch

        if dropped.dtype is torch.bool:
            dropped = dropped.view(torch.int8)
        index = self._index
        launch = release_launch(
            index.lengths, index.refused, dropped, _pool(index.pages), index.shape.prefix
        )
        return self._launch(launch, dropped)

    def copy(self, sources: Tensor, taken: Tensor) -> bool:
        """Copy the pages that requests append to and others keep; see `copy_launch`."""
        if not self.pages or torch.compiler.is_compiling():
            return False
        from mla_var3.kernel.cutile.mla.reserve_pages import copy_launch

        index = self._index
        buffer, tables = index.storage.buffer, _pool(index.pages)
        return self._launch(copy_launch(buffer, sources, taken, index.lengths, tables))

    def write(self, latent: Tensor, rope: Tensor, tokens: NewTokens, taken: Tensor) -> bool:
        """Write the tokens that were taken; see `append_launch`."""
        if not self.rows or torch.compiler.is_compiling():
            return False
        if latent.shape[0] == 0:
            return True
        from mla_var3.kernel.cutile.mla.append_rows import append_launch

        index, storage = self._index, self._index.storage
        if self._parts is None or self._parts[0] is not storage.buffer:
            self._parts = storage.buffer, storage.parts()
        table = None if index.pages is None else index.pages.block_table
        launch = append_launch(
            latent, rope, taken, index.lengths, tokens.bounds, table, *self._parts[1],
            storage.format,
        )  # fmt: skip
        launch = launch._replace(early=self.early and self.pages and self._reserved)
        return self._launch(launch, latent, rope, tokens.bounds)

    def _launch(self, launch: Any, *given: Tensor | None) -> bool:
        """Launch, unless it would compile where it must not.

        The tensors that are given may differ from one call to the next.
        """
        from mla_var3.runtime.ct_kernel import launch_kernel, specialisation

        device = launch.operands[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(launch, *given)
        if launch.kernel in self._failed:
            return False
        known = (None if part is None else specialisation(part) for part in given)
        key = (launch.kernel, launch.constants, *known)
        if key not in self._launched and capturing(launch.operands[0]):
            return False
        try:
            launch_kernel(launch)
        except KernelCompileError as error:
            log.warning("%s; torch does this for this cache", error)
            self._failed.add(launch.kernel)
            return False
        self._launched.add(key)
        return True


def _pool(pool: PagePool | None) -> Any:
    from mla_var3.kernel.cutile.mla.reserve_pages import Pool

    if pool is None:
        return None
    return Pool(pool.block_table, pool.owners, pool.free, pool.free_count, pool.page_size)


def capturing(tensor: Tensor) -> bool:
    """Whether work on a tensor is captured into a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device that has the kernels; (0, 0) for another."""
    if device.type != "cuda" or find_spec("cuda") is None or find_spec("cuda.tile") is None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)
