"""Checks of tensors that callers pass; errors name the argument, what was expected and what came.

Values are checked wherever the host has them: in lists, in CPU tensors, and with HYPER_MLA_DEBUG=1
in CUDA tensors too, which waits for the device. Strides and alignment are not checked here: what a
kernel cannot read it refuses itself (`Backend.unsupported`).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)

Shape = Sequence[tuple[str, int | None]]
"""(label, size) per dimension; a size of None takes any."""

DEBUG_VARIABLE = "HYPER_MLA_DEBUG"

F = TypeVar("F", bound=Callable[..., Any])

# Every call asks. The mapping behind `os.environ` answers at once; `os.environ` itself encodes the
# name, and raises and catches two errors where the variable is not set, as it mostly is.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_KEY: Any = DEBUG_VARIABLE if _environment is os.environ else os.environ.encodekey(DEBUG_VARIABLE)
_OFF = (None, "", "0", b"", b"0")


def debug_on() -> bool:
    """Whether the environment asks for checks of values on the device."""
    return _environment.get(_KEY) not in _OFF


def inference(function: F) -> F:
    """Decorate a function that computes: no gradients, and products in the dtype of its tensors.

    Autocast would compute them in another one.
    """
    plain = torch.no_grad()(function)

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        enabled = torch.is_autocast_enabled
        if not (enabled("cuda") or enabled("cpu")):
            return plain(*arguments, **options)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return plain(*arguments, **options)

    return cast("F", run)


def readable(tensor: Tensor) -> bool:
    """Whether the host may look at the values of a tensor.

    Raises:
        UnsupportedError: They are on the device, to be checked, while a CUDA graph is captured.
    """
    if type(tensor) is not Tensor or torch.compiler.is_compiling():
        return False  # a tensor of a traced program
    if tensor.device.type == "cpu":
        return True
    if tensor.device.type != "cuda" or not debug_on():
        return False
    if torch.cuda.is_current_stream_capturing():
        expected = f"{DEBUG_VARIABLE}: expected no CUDA graph capture, got one"
        raise UnsupportedError(f"{expected}; the checks read from the device")
    return True


def require_range(
    name: str, values: Tensor, minimum: int, maximum: int, maximum_name: str = ""
) -> None:
    """Require integers within bounds, if the host may look at them.

    `name` is the argument's in the message, `maximum_name` says what the maximum is.
    """
    if not readable(values):
        return
    wrong = ((values < minimum) | (values > maximum)).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        limit = f"{maximum_name}={maximum}" if maximum_name else maximum
        got = values[tuple(index)].item()
        raise InvalidArgumentError(f"{name}{index}", f"a number from {minimum} to {limit}", got)


def require_bounds(name: str, bounds: Tensor, total: int) -> None:
    """Require first rows of packed requests: ascending from 0 to at most all rows."""
    if not readable(bounds):
        return
    values = bounds.tolist()
    if values[0] != 0 or values != sorted(values) or values[-1] > total:
        raise InvalidArgumentError(name, f"ascending bounds from 0 to at most {total} rows", values)


def require_tensor(
    name: str,
    tensor: object,
    shape: Shape,
    dtypes: Sequence[torch.dtype],
    device: torch.device | None,
) -> Tensor:
    """The tensor, if it has the shape, one of the dtypes, and the device where one is given."""
    if not isinstance(tensor, Tensor):
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


def zero_rows(name: str, rows: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape that a caller chose; an error if the host has too little memory."""
    try:
        return torch.zeros(rows, dtype=dtype, device=device)
    except RuntimeError as error:
        if device.type != "cpu":  # a GPU has an error of its own for this, which callers catch
            raise
        got = f"{math.prod(rows) * dtype.itemsize} bytes"
        raise InvalidArgumentError(name, "no more than fits into memory", got) from error


def kernel_ready(tensor: Tensor) -> Tensor:
    """The tensor as kernels read operands, contiguous and aligned; copied if it is not."""
    tensor = tensor.contiguous()
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.clone() if offset % ALIGNMENT_BYTES else tensor


def index_tensor(
    name: str,
    value: object,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    limits: tuple[int, int, str] | None = None,
) -> Tensor:
    """Integers as a tensor of a dtype on the device; a list of numbers is copied there.

    The limits are least and largest value, and what the largest is; None for any.
    """
    given = value
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor(value, device="cpu")  # whatever the default device is
        except (TypeError, ValueError, RuntimeError):
            expected = "integers, as a tensor or a sequence"
            raise InvalidArgumentError(name, expected, repr(value)) from None
        if value.numel() == 0:  # an empty list has no dtype of its own
            value = value.to(torch.int64)
    place = device if value is given else None
    found = require_tensor(name, value, shape, INDEX_DTYPES, place)
    if limits is not None:
        require_range(name, found, *limits)
    return found.to(device, dtype)
