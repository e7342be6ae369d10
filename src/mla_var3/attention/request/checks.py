"""Checks of tensors that callers pass; errors name the argument, what was expected and what came.

Other than the checks of a kernel plan these say nothing about strides and alignment: what a kernel
cannot take as it is belongs to the kernel's own `unsupported`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)

Shape = Sequence[tuple[str, int | None]]
"""(label, size) per dimension; a size of None takes any."""

__all__ = [
    "FLOAT_DTYPES",
    "INDEX_DTYPES",
    "Shape",
    "index_tensor",
    "kernel_ready",
    "require_device",
    "require_int",
    "require_tensor",
    "zero_rows",
]


def require_tensor(
    name: str,
    tensor: object,
    shape: Shape,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> torch.Tensor:
    """The tensor, if it is one of the shape, dtype and device.

    Args:
        name: the argument's name in the message.
        tensor: what came.
        shape: what was expected.
        dtypes: the dtypes that are allowed.
        device: where it has to be; None for anywhere.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(name, f"a tensor [{_labels(shape)}]", type(tensor).__name__)
    # Every call passes here several times, so nothing is formatted before something is wrong.
    sizes = tensor.shape
    if len(sizes) != len(shape):
        raise InvalidArgumentError(name, f"[{_labels(shape)}]", list(sizes))
    for (_, size), got in zip(shape, sizes, strict=True):
        if size is not None and size != got:
            raise InvalidArgumentError(name, f"[{_labels(shape)}]", list(sizes))
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise InvalidArgumentError(name, f"dtype {expected}", tensor.dtype)
    if device is not None and tensor.device != device:
        raise InvalidArgumentError(name, f"a tensor on {device}", f"one on {tensor.device}")
    return tensor


def _labels(shape: Shape) -> str:
    return ", ".join(label if size is None else f"{label}={size}" for label, size in shape)


def require_device(device: object) -> torch.device:
    """The device by its name, if tensors can be made there."""
    try:
        return torch.empty((), device=cast("torch.device", device)).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises all three
        got = f"{device!r} ({str(error).splitlines()[0]})"
        raise InvalidArgumentError("device", "a device of this machine, such as cpu", got) from None


def zero_rows(
    name: str, rows: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros of a shape that a caller chose, who hears of it if they are too many for the host."""
    try:
        return torch.zeros(rows, dtype=dtype, device=device)
    except RuntimeError as error:
        if device.type != "cpu":  # a GPU has an error of its own for this, which callers catch
            raise
        got = f"{math.prod(rows) * dtype.itemsize} bytes"
        raise InvalidArgumentError(name, "no more than fits into memory", got) from error


def kernel_ready(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take operands: contiguous, at an aligned address; copied if need be."""
    tensor = tensor.contiguous()
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if offset % ALIGNMENT_BYTES else tensor


def index_tensor(
    name: str, value: object, shape: Shape, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Integers as a tensor on the device; a list of numbers is copied there.

    Args:
        name: the argument's name in the message.
        value: a tensor of integers, or a sequence of them.
        shape: what was expected.
        device: where it has to be.
        dtype: what it is brought to.
    """
    if not isinstance(value, torch.Tensor):
        try:
            value = torch.tensor(value, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgumentError(
                name, "integers, as a tensor or a sequence", repr(value)
            ) from None
        if value.numel() == 0:  # an empty list has no dtype of its own
            value = value.to(torch.int64)
    return require_tensor(name, value, shape, INDEX_DTYPES, device).to(dtype)
