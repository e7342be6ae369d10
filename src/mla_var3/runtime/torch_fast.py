"""Short ways into torch, for host code that is called for every launch.

Most of them are what torch's own generated code calls. They are private, so each is looked for, and
where this torch lacks it the public function takes its place: slower, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

LayoutCheck = Callable[..., bool]
"""Takes tensors; whether they are laid out as those that it was made for."""
Maker = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes an empty tensor by shape, strides and dtype."""


def _of_generated_code(name: str) -> Any:
    """A function that torch offers to the code that it generates; None where it has none."""
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

Making a Stream object takes longer than all else in a launch.
"""


without_gradients: Callable[[], AbstractContextManager[Any]] = getattr(
    torch._C, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""Operations in it keep no gradients; of this thread only.

They go past the part of torch that would, where `torch.no_grad` has it look and do nothing. Not
needed in inference mode.
"""


def _view(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


view_as: Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor] = (
    _of_generated_code("_reinterpret_tensor") or _view
)
"""The memory of a tensor by another shape and strides, from an offset in elements on."""


_below_views: Callable[[], AbstractContextManager[Any]] | None = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", None
)


def separate_rows(memory: torch.Tensor) -> Sequence[torch.Tensor]:
    """What lies at each index of the first dimension, as tensors that have only memory in common.

    To torch none is a view of another: each has its own version, and may take part in a graph of
    gradients whatever happens to the others. `Tensor.unbind` gives such only in inference mode.

    Returns:
        The tensors; none where this torch cannot make them.
    """
    if _below_views is None:
        return ()
    with _below_views():
        rows: Sequence[torch.Tensor] = memory.unbind()
    return rows


def layout_check(tensors: Sequence[torch.Tensor]) -> LayoutCheck | None:
    """A check of the types, shapes, strides, dtypes and devices of tensors, all in one call.

    It also requires that gradients, inference mode and other states of torch that change what an
    operation does are as they are now. It keeps no tensor alive.

    Returns:
        The check; None where this torch has none that lets these tensors pass.
    """
    if _guards is None:
        return None
    shapes = [list(tensor.shape) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    try:
        made = _guards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        check: LayoutCheck = made.check
        # It lets no tensor pass that is there twice.
        return check if check(*tensors) else None
    except (TypeError, RuntimeError, AttributeError):
        return None


def tensor_maker(device: torch.device) -> Maker:
    """What makes empty tensors on a device, which is the current one when it is a GPU."""
    made: Maker | None = _of_generated_code(f"_empty_strided_{device.type}")
    return partial(_empty, device) if made is None else made


def _empty(
    device: torch.device, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
