"""Arguments of a CuTe DSL host function: their kinds, and the memory they are passed in.

A host function takes pointers and numbers and builds its tensors from them, so that one compiled
program serves every shape. What a Python value becomes:

| value | parameter | part of the program |
|---|---|---|
| tensor | `cute.Pointer` to global memory | element type and assumed alignment |
| int | `Int32` | |
| `Int64Arg(n)` | `Int64` | |
| float | `Float32` | |
| None | None | that it is absent |

The last parameter is the CUDA stream; the runtime adds it.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.errors import InvalidArgumentError

POINTER, INT32, INT64, FLOAT32, ABSENT = "pointer", "int32", "int64", "float32", "none"

FLOAT_ALIGNMENT = 16
"""Alignment in bytes of pointers to floating-point data: vector loads and bulk copies need it."""
INT_ALIGNMENT = 4
"""The same for integer tensors such as lengths, which may be slices of other tensors."""

DTYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.float8_e4m3fn: "Float8E4M3FN",
    torch.float8_e5m2: "Float8E5M2",
    torch.int8: "Int8",
    torch.uint8: "Uint8",
    torch.int32: "Int32",
    torch.int64: "Int64",
}
"""Element type of a tensor -> name of the element type of its pointer in CuTe DSL."""

_CELLS: dict[str, Any] = {
    POINTER: ctypes.c_void_p,
    INT32: ctypes.c_int32,
    INT64: ctypes.c_int64,
    FLOAT32: ctypes.c_float,
}


@dataclass(frozen=True)
class Int64Arg:
    """A number that is passed as `Int64`, for strides and offsets of large tensors."""

    value: int


@dataclass(frozen=True)
class ArgumentKind:
    """What an argument is to the compiler; `alignment`, in bytes, is 0 of all but pointers."""

    tag: str
    dtype: torch.dtype | None = None
    alignment: int = 0

    def __str__(self) -> str:
        if self.dtype is None:
            return self.tag
        return f"{self.tag} to {str(self.dtype).removeprefix('torch.')}, {self.alignment}-aligned"


def kind_of(value: Any, name: str = "argument") -> ArgumentKind:
    """The kind of one argument, `name` in an error; meta tensors are enough."""
    if value is None:
        return ArgumentKind(ABSENT)
    if isinstance(value, torch.Tensor):
        if value.dtype not in DTYPES:
            known = ", ".join(map(str, DTYPES))
            raise InvalidArgumentError(name, f"a tensor of {known}", value.dtype)
        floating = value.dtype.is_floating_point
        alignment = FLOAT_ALIGNMENT if floating else max(INT_ALIGNMENT, value.element_size())
        return ArgumentKind(POINTER, value.dtype, alignment)
    if isinstance(value, Int64Arg):
        return ArgumentKind(INT64)
    if isinstance(value, bool):
        raise InvalidArgumentError(
            name, "a tensor, number or None (a switch belongs into host_fn)", repr(value)
        )
    if isinstance(value, int):
        return ArgumentKind(INT32)
    if isinstance(value, float):
        return ArgumentKind(FLOAT32)
    raise InvalidArgumentError(name, "a tensor, int, Int64Arg, float or None", type(value).__name__)


def kinds_of(args: Sequence[Any]) -> tuple[ArgumentKind, ...]:
    """The kinds of the arguments of a host function, without the stream."""
    return tuple(kind_of(value, f"args_fn[{i}]") for i, value in enumerate(args))


class ArgumentBuffer:
    """The memory that a compiled host function reads its arguments from.

    It is laid out once: one cell per argument that is present, then the stream, then the CUDA
    error code that the host function writes. Later calls rewrite only what has changed.

    Attributes:
        packed: pointers to all cells, in the order of the host function's parameters.
        stream: cell of the CUDA stream.
        result: cell of the CUDA error code.
    """

    def __init__(self, kinds: Sequence[ArgumentKind], device: int | None) -> None:
        self.stream = ctypes.c_void_p()
        self.result = ctypes.c_int32()
        self._count = len(kinds)
        self._device = device
        cells: list[Any] = [None if kind.tag == ABSENT else _CELLS[kind.tag]() for kind in kinds]
        self._cells = [cell for cell in cells if cell is not None]
        places = list(zip(range(len(kinds)), kinds, cells, strict=True))
        self._pointers = [
            (i, cell, kind.dtype, kind.alignment - 1)
            for i, kind, cell in places
            if kind.tag == POINTER
        ]
        self._others = [(i, kind, cell) for i, kind, cell in places if kind.tag != POINTER]
        indices = [i for i, _, _ in self._others]
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]]
        if len(indices) > 1:
            self._pick = operator.itemgetter(*indices)
        else:  # of one place itemgetter gives no tuple
            self._pick = lambda args: tuple(args[i] for i in indices)
        self._written: Any = None
        addresses = [ctypes.addressof(c) for c in (*self._cells, self.stream, self.result)]
        self.packed = (ctypes.c_void_p * len(addresses))(*addresses)

    def write(self, args: Sequence[Any]) -> None:
        """Write the arguments of the next call; each must be of the kind compiled for."""
        if len(args) != self._count:
            raise InvalidArgumentError("arguments", f"{self._count} of them", len(args))
        device = self._device
        try:
            for i, cell, dtype, mask in self._pointers:
                value = args[i]
                pointer = value.data_ptr()
                if (
                    value.dtype is not dtype
                    or pointer & mask
                    or (device is not None and value.get_device() != device)
                ):
                    raise _pointer_error(f"argument {i}", value, dtype, mask + 1, device)
                cell.value = pointer
        except AttributeError:  # cheaper than asking each whether it is a tensor
            raise _pointer_error(f"argument {i}", value, dtype, mask + 1, device) from None
        # Sizes and strides seldom change from call to call; pointers may at any time.
        others = self._pick(args)
        if others != self._written:
            self._written = None
            for (i, kind, place), value in zip(self._others, others, strict=True):
                number = _checked(kind, value, f"argument {i}")
                if place is not None:
                    place.value = number
            self._written = others


def _pointer_error(
    name: str, value: Any, dtype: torch.dtype | None, alignment: int, device: int | None
) -> InvalidArgumentError:
    """What is wrong with an argument that was compiled as a pointer."""
    if not isinstance(value, torch.Tensor) or value.dtype is not dtype:
        got = getattr(value, "dtype", value)
        return InvalidArgumentError(name, f"a tensor of {dtype}, as compiled", got)
    if device is not None and value.get_device() != device:
        return InvalidArgumentError(name, f"a tensor on cuda:{device}", f"one on {value.device}")
    pointer = hex(value.data_ptr())
    return InvalidArgumentError(name, f"a pointer aligned to {alignment} bytes", pointer)


def _checked(kind: ArgumentKind, value: Any, name: str) -> int | float | None:
    """The number of an argument that is not a tensor, if it is of the kind."""
    if kind.tag == ABSENT:
        if value is not None:
            raise InvalidArgumentError(name, "None, as compiled", type(value).__name__)
        return None
    if kind.tag == FLOAT32:
        if not isinstance(value, float):
            raise InvalidArgumentError(name, "a float, as compiled", repr(value))
        return value
    wide = kind.tag == INT64
    number = value.value if wide and isinstance(value, Int64Arg) else value
    if not isinstance(number, int) or isinstance(number, bool) or wide is (number is value):
        form = "Int64Arg" if wide else "int"
        raise InvalidArgumentError(name, f"an {form}, as compiled", repr(value))
    limit = 1 << (63 if wide else 31)
    # ctypes would wrap it around silently.
    if not -limit <= number < limit:
        raise InvalidArgumentError(name, f"a number that fits {kind.tag}", number)
    return number
