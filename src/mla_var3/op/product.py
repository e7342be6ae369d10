"""Matrix products that are quick on every CPU."""

from __future__ import annotations

import torch


def product(
    rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows [..., x, y] @ matrices [..., y, z]` in their dtype, into `out` if there is one.

    On the CPU 16-bit operands are multiplied in float32 and the result is rounded once, which is
    what 16-bit products with float32 accumulators give. Where a CPU has no 16-bit products, torch's
    own take more than a hundred times as long.
    """
    if rows.device.type == "cpu" and rows.dtype in (torch.bfloat16, torch.float16):
        exact = torch.matmul(rows.float(), matrices.float())
        return exact.to(rows.dtype) if out is None else out.copy_(exact)
    return torch.matmul(rows, matrices, out=out)
