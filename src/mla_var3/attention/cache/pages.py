"""The pages of a paged cache: block table and free list, all on the device."""

from __future__ import annotations

import torch

from mla_var3.attention.cache.tokens import masked_put

NO_PAGE = -1
"""Block table entry without a page."""


class PagePool:
    """Block table and free list.

    Both live on the device and change there, with fixed shapes and no copy to the host, so that
    reserving and releasing can be part of a CUDA graph.

    Attributes:
        page_size: tokens per page.
        num_pages: pages of the whole cache.
        block_table: int32 `[b, max_pages]`, page of each block of a request or `NO_PAGE`.
        free: int32 `[num_pages]`, a stack of free pages; the first `free_count` entries count.
        free_count: int32 `[1]`.
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
        self.page_size = page_size
        self.num_pages = num_pages
        self._shared = shared_pages
        self.block_table = torch.full((b, max_pages), NO_PAGE, dtype=torch.int32, device=device)
        self.block_table[:, :shared_pages] = torch.arange(
            shared_pages, dtype=torch.int32, device=device
        )
        # The stack is popped from its end: the lowest page goes first.
        self.free = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32, device=device)
        self.free_count = torch.full(
            (1,), num_pages - shared_pages, dtype=torch.int32, device=device
        )

    def reserve(self, lengths: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
        """Give every request the pages that `counts` more tokens need, as far as pages are left.

        Requests are served in order, each completely or not at all. Once one does not get its
        pages, no later one gets any.

        Args:
            lengths: int64 `[b]`, tokens that each request has.
            counts: int64 `[b]`, tokens to come.
            most: host-side bound on `counts`.

        Returns:
            bool `[b]`: whether the request has pages for its tokens.
        """
        size = self.page_size
        held = (lengths + size - 1) // size
        need = (lengths + counts + size - 1) // size - held
        within = lengths + counts <= self.block_table.shape[1] * size
        need = torch.where(within, need, 0)
        total = need.cumsum(0)
        granted = within & ((need == 0) | (total <= self.free_count))
        steps = torch.arange((most + size - 1) // size + 1, device=lengths.device)
        wanted = (steps < need[:, None]) & granted[:, None]  # [b, steps]
        rank = (total - need)[:, None] + steps
        from_stack = (self.free_count - 1 - rank).clamp(0, self.num_pages - 1)
        rows = torch.arange(lengths.shape[0], device=lengths.device)[:, None].expand_as(wanted)
        masked_put(
            self.block_table,
            (rows.flatten(), (held[:, None] + steps).flatten()),
            self.free[from_stack].flatten(),
            wanted.flatten(),
        )
        self.free_count.sub_(wanted.sum().to(torch.int32))
        return granted

    def release(self, lengths: torch.Tensor) -> None:
        """Take back every page beyond the given lengths, int64 `[b]`."""
        keep = (lengths + self.page_size - 1) // self.page_size
        keep = keep.clamp(min=self._shared)
        columns = torch.arange(self.block_table.shape[1], device=lengths.device)
        unused = ((columns >= keep[:, None]) & (self.block_table != NO_PAGE)).flatten()
        place = self.free_count + unused.cumsum(0) - 1
        masked_put(self.free, (place,), self.block_table.flatten(), unused)
        self.free_count.add_(unused.sum().to(torch.int32))
        self.block_table.masked_fill_(unused.view_as(self.block_table), NO_PAGE)

    def rows(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Row in the flat buffer of each token, int64; meaningless where no page is held."""
        columns = (positions // self.page_size).clamp(0, self.block_table.shape[1] - 1)
        page = self.block_table[requests, columns].long()
        return page * self.page_size + positions % self.page_size
