"""Rows of a batch with a different number of tokens per request, and writing some of them.

Shapes are fixed and nothing is read back, so a CUDA graph can capture everything here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRows:
    """Which request and place each row belongs to.

    Attributes:
        requests: int64 `[m]`, within bounds even for rows of no request.
        offsets: int64 `[m]`, place among the tokens of the request.
        valid: bool `[m]`, whether the row holds a token.
        counts: int64 `[b]`, tokens of each request.
    """

    requests: Tensor
    offsets: Tensor
    valid: Tensor
    counts: Tensor


def padded_rows(b: int, m: int, counts: Tensor | None, device: torch.device) -> TokenRows:
    """Rows of a tensor `[b, m, ...]`, of which each request uses the first `counts`."""
    index = torch.arange(b * m, device=device)
    requests, offsets = index // max(m, 1), index % max(m, 1)
    if counts is None:
        counts = torch.full((b,), m, dtype=torch.int64, device=device)
        valid = torch.ones_like(index, dtype=torch.bool)
    else:
        counts = counts.clamp(0, m)
        valid = offsets < counts[requests]
    return TokenRows(requests, offsets, valid, counts)


def ragged_rows(cu_seqlens: Tensor, total: int) -> TokenRows:
    """Rows of a packed tensor `[total, ...]`; request r has rows `cu_seqlens[r]..[r+1]-1`.

    Rows at and beyond the last bound belong to no request.
    """
    bounds = cu_seqlens.long()
    index = torch.arange(total, device=bounds.device)
    found = torch.searchsorted(bounds[1:].contiguous(), index, right=True)
    requests = found.clamp(max=bounds.shape[0] - 2)
    offsets = index - bounds[requests]
    valid = (found < bounds.shape[0] - 1) & (offsets >= 0)
    counts = (bounds[1:] - bounds[:-1]).clamp(0, total)
    return TokenRows(requests, offsets, valid, counts)


@dataclass
class NewTokens:
    """Tokens to append, by request.

    Attributes:
        leading: dimensions of the tensor that holds their rows: b and m, or the total if packed.
        counts: int `[b]`, tokens of each request in padded rows; None for m each.
        bounds: int `[b+1]`, first row of each request in packed rows; None for padded ones.
        device: where they are.
    """

    leading: list[tuple[str, int | None]]
    counts: Tensor | None
    bounds: Tensor | None
    device: torch.device
    _rows: TokenRows | None = field(default=None, init=False, repr=False)

    @property
    def given(self) -> Tensor | None:
        """What says how many each request has; None for m each."""
        return self.counts if self.bounds is None else self.bounds

    @property
    def most(self) -> int:
        """Host-side bound on the tokens of a request."""
        return self.leading[-1][1] or 0

    @property
    def rows(self) -> TokenRows:
        """Request and place of each row; torch needs them, the kernels do not."""
        # No `cached_property`: it locks in Python 3.11, which a compiled program cannot.
        if self._rows is None and self.bounds is not None:
            self._rows = ragged_rows(self.bounds, self.most)
        elif self._rows is None:
            counts = None if self.counts is None else self.counts.long()
            self._rows = padded_rows(self.leading[0][1] or 0, self.most, counts, self.device)
        return self._rows


def masked_put(target: Tensor, indices: tuple[Tensor, ...], values: Tensor, valid: Tensor) -> None:
    """`target[indices] = values` where `valid`, in place.

    There is one int64 tensor `[m]` of indices per leading dimension of `target`. Those of valid
    rows are within bounds and name different places, the others may be anything: a row that must
    not be written repeats the first valid one, index and value, which changes nothing. When no row
    is valid all of them rewrite what the first place holds.
    """
    count = valid.shape[0]
    if count == 0 or target.numel() == 0:
        return
    first = valid.to(torch.int8).argmax(keepdim=True)  # [1]; 0 when none is valid
    anchor_valid = valid.index_select(0, first)
    anchors = []
    for index in indices:
        at_first = index.index_select(0, first)
        anchors.append(torch.where(anchor_valid, at_first, 0))
    held = target[tuple(anchors)]  # [1, ...]
    values = values.to(target.dtype)
    new = values.index_select(0, first)
    anchor_value = torch.where(_rows(anchor_valid, new), new, held)
    places = tuple(
        torch.where(valid, index, anchor) for index, anchor in zip(indices, anchors, strict=True)
    )
    target.index_put_(places, torch.where(_rows(valid, values), values, anchor_value))


def _rows(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(-1, *([1] * (like.dim() - 1)))
