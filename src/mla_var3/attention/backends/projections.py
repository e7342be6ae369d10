"""The products around the attention in the latent space, head by head, without a copy.

`rows [..., h, x]` times `weight [h, x, y]` gives `[..., h, y]`: one batched product over the heads
whose operands and result are strided views, so that nothing has to be brought into another order
before or after it.
"""

from __future__ import annotations

import math

import torch


def project_heads(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply every head's rows with the head's weight.

    Args:
        rows: `[..., h, x]`.
        weight: `[h, x, y]`.
        out: `[..., h, y]`; None for a new tensor, which is contiguous.
    """
    *leading, h, width = rows.shape
    count, columns = math.prod(leading), weight.shape[2]
    if out is None or not out.is_contiguous():
        result = rows.new_empty((*leading, h, columns))
    else:
        result = out
    by_head = rows.reshape(count, h, width).transpose(0, 1)
    torch.bmm(by_head, weight, out=result.view(count, h, columns).transpose(0, 1))
    return result if out is None or out is result else out.copy_(result)
