"""The pages of a paged cache: block table, owners and free list, all on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.tokens import masked_put

NO_PAGE = -1
"""Block table entry without a page."""


class PagePool:
    """Block table, owners and free list.

    All live on the device and change there, with fixed shapes and no copy to the host, so that a
    CUDA graph can capture every method. After `fork` requests share pages. A request that appends
    to a page with other owners gets a copy of it first. `kernel/cutile/mla/reserve_pages.py` does
    the same in one kernel each. Pages that are given up go onto the stack in the order of requests
    and blocks, the first on top: dropping tokens and appending as many gives the same pages.

    Attributes:
        page_size, num_pages: tokens per page, and pages of the whole cache.
        block_table: int32 `[b, max_pages]`, page of each block of a request or `NO_PAGE`.
        owners: int32 `[num_pages]`, requests that hold each page.
        free, free_count: int32 `[num_pages]`, a stack of free pages of which so many, `[1]`, count.
    """

    def __init__(
        self,
        b: int,
        max_pages: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        shared_pages: int = 0,
    ) -> None:
        """Make a pool in which the first `shared_pages` pages always belong to all requests."""
        self.page_size, self.num_pages, self._shared = page_size, num_pages, shared_pages
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.block_table = torch.full((b, max_pages), NO_PAGE, **numbers)
        self.block_table[:, :shared_pages] = torch.arange(shared_pages, **numbers)
        self.owners = torch.zeros((num_pages,), **numbers)
        self.owners[:shared_pages] = b
        # The stack is popped from its end: the lowest page goes first.
        self.free = torch.arange(num_pages - 1, -1, -1, **numbers)
        self.free_count = torch.full((1,), num_pages - shared_pages, **numbers)

    def reserve(
        self, lengths: Tensor, counts: Tensor, most: int, copies: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Give every request the pages that more tokens need, as far as pages are left.

        Lengths and counts of tokens to come are int64 `[b]`, at most `most` for each. Requests are
        served in order, each completely or not at all. Once one does not get its pages, no later
        one gets any. With `copies` pages may have several owners: a request that would write into
        such a page gets a new one in its place, to be filled by the caller.

        Returns:
            Whether each request has pages for its tokens, bool `[b]`, and the page to copy before
            the first token is written, int32 `[b]`, `NO_PAGE` without one; None without `copies`.
        """
        size, device = self.page_size, lengths.device
        requests = torch.arange(lengths.shape[0], device=device)
        held = (lengths + size - 1) // size
        last = self.pages_at(requests, held - 1)
        within = lengths + counts <= self.block_table.shape[1] * size
        copied = torch.zeros_like(within)
        if copies:
            copied = within & (counts > 0) & (lengths % size > 0) & (self.owners[last] > 1)
        need = (lengths + counts + size - 1) // size - held + copied
        need = torch.where(within, need, 0)
        total = need.cumsum(0)
        granted = within & ((need == 0) | (total <= self.free_count))
        copied = copied & granted
        steps = torch.arange((most + size - 1) // size + 1 + copies, device=device)
        wanted = (steps < need[:, None]) & granted[:, None]  # [b, steps]
        rank = (total - need)[:, None] + steps
        from_stack = (self.free_count - 1 - rank).clamp(0, self.num_pages - 1)
        pages = self.free[from_stack].flatten()
        columns = (held - copied.long())[:, None] + steps
        places = (requests[:, None].expand_as(wanted).flatten(), columns.flatten())
        masked_put(self.block_table, places, pages, wanted.flatten())
        self.owners.index_add_(0, pages.long(), wanted.flatten().to(torch.int32))
        self.free_count.sub_(wanted.sum().to(torch.int32))
        if not copies:
            return granted, None
        self._disown(last, copied)
        return granted, torch.where(copied, last, NO_PAGE).to(torch.int32)

    def fork(self, request: Tensor, targets: Tensor) -> None:
        """Give the pages of one request, int64 `[1]`, to others, bool `[b]`, as well.

        Theirs must have been released, and the request itself is not among them.
        """
        columns = torch.arange(self.block_table.shape[1], device=request.device)
        row = self.block_table[request]  # [1, max_pages]
        given = targets[:, None] & (columns >= self._shared)
        self.block_table.copy_(torch.where(given, row, self.block_table))
        added = (targets.sum() * (columns >= self._shared) * (row[0] != NO_PAGE)).to(torch.int32)
        self.owners.index_add_(0, row[0].long().clamp(min=0), added)

    def release(self, lengths: Tensor) -> None:
        """Take every page beyond the given lengths, int64 `[b]`, from its request.

        A page is free again when its last owner has lost it.
        """
        keep = (lengths + self.page_size - 1) // self.page_size
        keep = keep.clamp(min=self._shared)
        columns = torch.arange(self.block_table.shape[1], device=lengths.device)
        unused = (columns >= keep[:, None]) & (self.block_table != NO_PAGE)
        self._disown(self.block_table.flatten().long().clamp(min=0), unused.flatten())
        self.block_table.masked_fill_(unused, NO_PAGE)

    def rows(self, requests: Tensor, positions: Tensor) -> Tensor:
        """Row in the flat buffer of each token, int64; meaningless where no page is held."""
        page = self.pages_at(requests, positions // self.page_size)
        return page * self.page_size + positions % self.page_size

    def pages_at(self, requests: Tensor, columns: Tensor) -> Tensor:
        """Pages at columns of the block table, int64; some page where there is none."""
        columns = columns.clamp(0, self.block_table.shape[1] - 1)
        return self.block_table[requests, columns].long().clamp(min=0)

    def _disown(self, pages: Tensor, lost: Tensor) -> None:
        """Take away one owner per page, int64 `[m]`, where `lost`; free those without any."""
        self.owners.index_add_(0, pages, -lost.to(torch.int32))
        entries = torch.arange(pages.shape[0], device=pages.device)
        most = torch.where(lost, entries, pages.shape[0])
        first = torch.full((self.num_pages,), pages.shape[0], device=pages.device)
        first.scatter_reduce_(0, pages, most, "amin")
        freed = lost & (self.owners[pages] == 0) & (first[pages] == entries)
        ranks = freed.cumsum(0)
        masked_put(self.free, (self.free_count + freed.sum() - ranks,), pages, freed)
        self.free_count.add_(freed.sum().to(torch.int32))
