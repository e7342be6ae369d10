"""Checks of tensors that enter a plan; errors name the argument, what was expected and got."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_var3.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 16
"""Pointer and strides must be multiples of this: the bulk copy engine reads nothing else."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[tuple[str, int]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check the kernel argument `name`; `shape` is (label, size) per dimension."""
    expected = "[" + ", ".join(f"{label}={size}" for label, size in shape) + "]"
    if tuple(tensor.shape) != tuple(size for _, size in shape):
        raise InvalidArgumentError(name, expected, list(tensor.shape))
    if tensor.dtype != dtype:
        raise InvalidArgumentError(name, f"dtype {dtype}", tensor.dtype)
    indices = {tensor.device.index, device.index} - {None}
    if tensor.device.type != device.type or len(indices) > 1:
        raise InvalidArgumentError(name, f"a tensor on {device}", f"one on {tensor.device}")
    if tensor.numel() == 0:
        return
    strides, element = tensor.stride(), tensor.element_size()
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        raise InvalidArgumentError(name, "stride 1 in the last dimension", f"strides {strides}")
    for stride, (label, size) in zip(strides[:-1], shape[:-1], strict=True):
        if size > 1 and (stride * element) % ALIGNMENT_BYTES and element == 2:
            expected = (
                f"a stride of dimension {label} that is a multiple of {ALIGNMENT_BYTES} bytes"
            )
            raise InvalidArgumentError(name, expected, f"{strides} of {element}-byte elements")
    if device.type != "meta" and tensor.data_ptr() % ALIGNMENT_BYTES:
        expected = f"a pointer aligned to {ALIGNMENT_BYTES} bytes"
        raise InvalidArgumentError(name, expected, hex(tensor.data_ptr()))


def require_view(name: str, tensor: torch.Tensor, *shape: int) -> torch.Tensor:
    """The tensor in another shape without a copy, which would not follow later changes."""
    try:
        return tensor.view(*shape)
    except RuntimeError:
        got = f"shape {list(tensor.shape)} with strides {tensor.stride()}"
        expected = f"a layout that is {list(shape)} without a copy"
        raise InvalidArgumentError(name, expected, got) from None
