"""Writing some of many rows without asking the host which ones."""

from __future__ import annotations

import torch


def masked_put(
    target: torch.Tensor,
    indices: tuple[torch.Tensor, ...],
    values: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    """`target[indices] = values` where `valid`; the other rows go nowhere.

    Shapes are fixed and nothing is read back, so a CUDA graph can capture it. A row that must not
    be written repeats the first valid one, index and value, which changes nothing; when no row is
    valid all of them rewrite what already stands at the first place.

    Args:
        target: what is written, in place.
        indices: one int64 tensor `[m]` per leading dimension of `target`; those of valid rows are
            within bounds and name different places, the others may be anything.
        values: `[m, ...]`, in any dtype that converts to that of `target`.
        valid: bool `[m]`.
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
    standing = target[tuple(anchors)]  # [1, ...]
    values = values.to(target.dtype)
    new = values.index_select(0, first)
    anchor_value = torch.where(_rows(anchor_valid, new), new, standing)
    places = tuple(
        torch.where(valid, index, anchor) for index, anchor in zip(indices, anchors, strict=True)
    )
    target.index_put_(places, torch.where(_rows(valid, values), values, anchor_value))


def _rows(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1, *([1] * (like.dim() - 1)))
