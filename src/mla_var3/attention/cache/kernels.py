"""The kernels that append tokens to a latent cache and drop them.

`append` is two launches, `truncate` and `evict` one: `reserve_pages` and `append_rows` in
`kernel/cutile/mla/`. Once a cache has forked, `append` has one more, which copies pages. Torch does
the same, with the same results, on the CPU, on GPUs before Ampere, in traced programs, for batches
and widths that no kernel serves, and where a CUDA graph captures a kernel that was never launched:
a first launch compiles, which no graph may capture.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from mla_var3.attention.cache.pages import PagePool
from mla_var3.attention.cache.sizes import CacheShape
from mla_var3.attention.cache.storage import Parts, Storage
from mla_var3.attention.cache.tokens import NewTokens
from mla_var3.errors import KernelCompileError

log = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
FLOAT8_CAPABILITY = (9, 0)
"""Least compute capability for which cuTile compiles, and has float8."""


class CacheKernels:
    """The launches of one cache; each returns whether it happened, otherwise torch has to.

    Attributes:
        pages: Whether kernels keep lengths and pages.
        rows: Whether a kernel writes tokens.
    """

    def __init__(self, shape: CacheShape, storage: Storage) -> None:
        """Find out which kernels serve a cache on its device."""
        self._shape, self._storage = shape, storage
        self._parts: tuple[torch.Tensor, Parts] | None = None
        self._launched: set[tuple[object, ...]] = set()
        self._failed: set[object] = set()
        capability = _capability(storage.buffer.device)
        self.pages = self.rows = False
        if capability >= LEAST_CAPABILITY:
            self.serve(float8=capability >= FLOAT8_CAPABILITY, fp8=storage.format is not None)

    def __reduce__(self) -> tuple[type[CacheKernels], tuple[CacheShape, Storage]]:
        """What is pickled or copied: launches and views are found again."""
        return CacheKernels, (self._shape, self._storage)

    def serve(self, *, float8: bool, fp8: bool) -> None:
        """Use kernels where they serve the sizes of the cache.

        Args:
            float8: Whether the device has float8.
            fp8: Whether the cache needs it.
        """
        from mla_var3.kernel.cutile.mla import append_rows, reserve_pages

        shape = self._shape
        self.pages = reserve_pages.serves(shape.b, -(-shape.t // (shape.page_size or shape.t)))
        self.rows = (float8 or not fp8) and append_rows.serves(shape.k, shape.p, shape.b)

    def reserve(
        self,
        tokens: NewTokens,
        lengths: torch.Tensor,
        refused: torch.Tensor,
        pool: PagePool | None,
        *,
        copies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Take tokens as far as there is space; lengths, refused counts and pages change.

        Args:
            tokens: The tokens to come.
            lengths: int32 `[b]`, tokens of each request.
            refused: int32 `[b]`.
            pool: Of a paged cache.
            copies: Whether pages may have several owners.

        Returns:
            As `PagePool.reserve`; None where torch has to.
        """
        if not self.pages or torch.compiler.is_compiling():
            return None
        from mla_var3.kernel.cutile.mla.reserve_pages import reserve_launch

        taken = torch.empty_like(lengths)
        sources = torch.empty_like(lengths) if copies and pool is not None else None
        launch = reserve_launch(
            lengths, refused, tokens.given, _pool(pool), taken, sources,
            most=tokens.most, slots=self._shape.t,
        )  # fmt: skip
        return (taken, sources) if self._launch(launch, tokens.given) else None

    def release(
        self,
        dropped: torch.Tensor,
        lengths: torch.Tensor,
        refused: torch.Tensor,
        pool: PagePool | None,
    ) -> bool:
        """Drop tokens, int `[b]`, or all tokens of some requests, bool `[b]`."""
        if not self.pages or torch.compiler.is_compiling():
            return False
        from mla_var3.kernel.cutile.mla.reserve_pages import release_launch

        if dropped.dtype is torch.bool:
            dropped = dropped.view(torch.int8)
        least = self._shape.prefix
        launch = release_launch(lengths, refused, dropped, _pool(pool), least)
        return self._launch(launch, dropped)

    def copy(
        self,
        buffer: torch.Tensor,
        sources: torch.Tensor,
        taken: torch.Tensor,
        lengths: torch.Tensor,
        pool: PagePool,
    ) -> bool:
        """Copy the pages that requests append to and others keep; see `copy_launch`."""
        if not self.pages or torch.compiler.is_compiling():
            return False
        from mla_var3.kernel.cutile.mla.reserve_pages import copy_launch

        tables = _pool(pool)
        assert tables is not None
        return self._launch(copy_launch(buffer, sources, taken, lengths, tables))

    def write(
        self,
        storage: Storage,
        rows: tuple[torch.Tensor, torch.Tensor],
        tokens: NewTokens,
        taken: torch.Tensor,
        lengths: torch.Tensor,
        pool: PagePool | None,
    ) -> bool:
        """Write the tokens that were taken; see `append_launch`.

        Args:
            storage: Where to.
            rows: Latent rows `[m, k]` and rope keys `[m, p]`.
            tokens: Whose they are.
            taken: int32 `[b]`.
            lengths: int32 `[b]`, with the taken tokens.
            pool: Of a paged cache.
        """
        if not self.rows or torch.compiler.is_compiling():
            return False
        if rows[0].shape[0] == 0:
            return True
        from mla_var3.kernel.cutile.mla.append_rows import append_launch

        if self._parts is None or self._parts[0] is not storage.buffer:
            self._parts = storage.buffer, storage.parts()
        parts, table = self._parts[1], None if pool is None else pool.block_table
        launch = append_launch(
            *rows, taken, lengths, tokens.bounds, table, parts.latent, parts.rope, parts.scales,
            storage.format,
        )  # fmt: skip
        return self._launch(launch, *rows, tokens.bounds)

    def _launch(self, launch: Any, *given: torch.Tensor | None) -> bool:
        """Launch, unless it would compile where it must not.

        Args:
            launch: The launch.
            given: Its tensors that may differ from one call to the next.
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
    """The tensors of a pool as its kernels take them."""
    from mla_var3.kernel.cutile.mla.reserve_pages import Pool

    if pool is None:
        return None
    return Pool(pool.block_table, pool.owners, pool.free, pool.free_count, pool.page_size)


def capturing(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor is captured into a CUDA graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a device that has the kernels; (0, 0) for another."""
    if device.type != "cuda" or find_spec("cuda") is None or find_spec("cuda.tile") is None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)
