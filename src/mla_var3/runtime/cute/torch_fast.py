"""Fast private functions of torch, for host code that runs in every call.

Most of them are what torch's own generated code calls. Where this version of torch lacks one, the
public function takes its place: slower, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

LayoutCheck = Callable[..., bool]
"""Takes tensors; whether their layout is that of the tensors it was made for."""
Maker = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes an empty tensor by shape, strides and dtype."""


def _of_generated_code(name: str) -> Any:
    """A function that torch offers to its generated code; None where there is none."""
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return getattr(guards, name, None)


_guards = _of_generated_code("TensorGuards")

current_device_index: Callable[[], int] = getattr(
    torch._C, "_cuda_getDevice", torch.cuda.current_device
)
"""Index of the current GPU."""

is_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current stream is being captured into a CUDA graph."""


def _stream_handle(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_handle)
"""Handle of the current CUDA stream of a device.

Making a Stream object would take longer than the rest of a launch.
"""


without_gradients: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""Context without gradients, for this thread only.

It skips the autograd dispatch that `torch.no_grad` still goes through. Not needed in inference
mode.
"""


def _view(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


view_as: Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor] = (
    _of_generated_code("_reinterpret_tensor") or _view
)
"""The memory of a tensor with another shape and strides, from an offset in elements."""


_below_views: Callable[[], AbstractContextManager[Any]] | None = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", None
)


def separate_rows(memory: torch.Tensor) -> Sequence[torch.Tensor]:
    """The rows of the first dimension, as tensors that share nothing but memory.

    To torch none is a view of another: each has its own version counter and may take part in
    autograd independently. `Tensor.unbind` does so only in inference mode. Empty where this
    version of torch cannot make such rows.
    """
    if _below_views is None:
        return ()
    with _below_views():
        rows: Sequence[torch.Tensor] = memory.unbind()
    return rows


def layout_check(tensors: Sequence[torch.Tensor]) -> LayoutCheck | None:
    """A check of types, shapes, strides, dtypes and devices of all tensors, in one call.

    It also requires that gradients, inference mode and other global state of torch are as they are
    now. It keeps no tensor alive.
    """
    if _guards is None:
        return None
    shapes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    try:
        made = _guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        check: LayoutCheck = made.check
        # It never accepts the same tensor twice.
        return check if check(*tensors) else None
    except (TypeError, RuntimeError, AttributeError):
        return None


def tensor_maker(device: torch.device) -> Maker:
    """A function that makes empty tensors on a device; a GPU has to be the current one."""
    made: Maker | None = _of_generated_code(f"_empty_strided_{device.type}")
    return partial(_empty, device) if made is None else made


def _empty(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
