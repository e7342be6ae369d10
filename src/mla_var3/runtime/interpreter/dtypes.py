"""Dtypes: their torch counterparts, promotion, casts, rounding and padding values."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, TypeAlias

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    PaddingMode,
    RoundingMode,
    TileTypeError,
    ct,
)

Number: TypeAlias = bool | int | float

_TORCH_DTYPES: dict[DType, torch.dtype] = {ct.bool_: torch.bool, ct.tfloat32: torch.float32} | {
    getattr(ct, name): getattr(torch, name)
    for name in (
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    )
}
CUTILE_DTYPES = {
    torch_dtype: dtype for dtype, torch_dtype in _TORCH_DTYPES.items() if dtype != ct.tfloat32
}
_BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TF32_DROPPED_BITS = 13

_PADDING_VALUES: dict[PaddingMode, float] = {
    ct.PaddingMode.ZERO: 0.0,
    ct.PaddingMode.NEG_ZERO: -0.0,
    ct.PaddingMode.NAN: math.nan,
    ct.PaddingMode.POS_INF: math.inf,
    ct.PaddingMode.NEG_INF: -math.inf,
}


class KernelDType:
    """A dtype as kernel code sees it: equal to its torch counterpart, and callable as a cast.

    cuTile gives its dtypes this behaviour in the compiler; the Python objects themselves are not
    callable and not equal to torch dtypes.
    """

    __slots__ = ("native",)

    def __init__(self, native: DType) -> None:
        self.native = native

    @property
    def name(self) -> str:
        return str(self.native.name)

    @property
    def bitwidth(self) -> int:
        return int(self.native.bitwidth)

    def __call__(self, value: Any = 0, /) -> Any:
        if isinstance(value, tuple):
            raise TileTypeError(f"{self.name}() expects a scalar, got a tuple")
        return ct.astile(value, dtype=self)

    def __eq__(self, other: object) -> bool:
        try:
            return bool(self.native == as_dtype(other))
        except TypeError:
            return NotImplemented

    def __hash__(self) -> int:
        return hash(self.native)

    def __repr__(self) -> str:
        return str(self.native)


@cache
def kernel_dtype(native: DType) -> KernelDType:
    """The kernel-side form of a cuTile dtype."""
    return KernelDType(native)


def as_dtype(value: Any) -> DType:
    """The cuTile dtype named by a `ct` dtype, a kernel-side dtype or a torch dtype."""
    return value.native if isinstance(value, KernelDType) else api.to_dtype(value)


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype that holds elements of a cuTile dtype."""
    try:
        return _TORCH_DTYPES[dtype]
    except KeyError:
        raise InterpreterError(
            f"dtype {dtype} is not supported by the CPU interpreter: torch has no counterpart"
        ) from None


# `typed` keeps 1, 1.0 and True apart, which promote differently.
@lru_cache(maxsize=8192, typed=True)
def promoted(x: DType | Number, y: DType | Number, force_float: bool = False) -> DType:
    """Common dtype of two operands, each given as its dtype or as a loosely typed Python number."""
    return api.promote_dtypes(_loose_type(x), _loose_type(y), force_float)


def _loose_type(operand: DType | Number) -> Any:
    return api.LooselyTypedScalar(operand) if isinstance(operand, bool | int | float) else operand


def wrap_integer(value: int, dtype: DType) -> int:
    """`value` reduced to the range of an integer dtype, as the hardware does on overflow."""
    bits = dtype.bitwidth
    value &= (1 << bits) - 1
    if api.is_signed(dtype) and value >> (bits - 1):
        value -= 1 << bits
    return value


def constant(value: Number, dtype: DType) -> torch.Tensor:
    """A 0-d tensor with `value` as an element of `dtype`; shared, never to be written to."""
    # The cache cannot tell 0.0 from -0.0.
    if isinstance(value, float) and value == 0.0:
        return _new_constant(value, dtype)
    return _cached_constant(value, dtype)


def _new_constant(value: Number, dtype: DType) -> torch.Tensor:
    target = torch_dtype(dtype)
    if api.is_integral(dtype):
        return torch.tensor(wrap_integer(int(value), dtype), dtype=target)
    if api.is_boolean(dtype):
        return torch.tensor(bool(value), dtype=target)
    tensor = torch.tensor(float(value), dtype=target)
    return _round_to_tf32(tensor) if dtype == ct.tfloat32 else tensor


_cached_constant = lru_cache(maxsize=4096)(_new_constant)


def cast(
    tensor: torch.Tensor, source: DType, target: DType, rounding: RoundingMode | None = None
) -> torch.Tensor:
    """Explicit conversion between dtypes."""
    if source == target:
        return tensor
    if api.is_float(source) and api.is_float(target):
        rounding, _ = api.get_ftof_rounding_min_version(source, target, rounding)
    elif rounding is not None:
        raise TileTypeError("rounding_mode is only valid for float to float conversions")
    if rounding not in (None, ct.RoundingMode.RN):
        raise InterpreterError(f"rounding mode {rounding} is not supported by the CPU interpreter")
    converted = tensor.to(torch_dtype(target))
    return _round_to_tf32(converted) if target == ct.tfloat32 else converted


def implicit_cast(operand: DType | Number, tensor: torch.Tensor, target: DType) -> torch.Tensor:
    """Conversion that cuTile does by itself, as on a store; refuses to narrow."""
    if isinstance(operand, bool | int | float):
        api.check_implicit_cast(api.LooselyTypedScalar(operand), target)
        return constant(operand, target)
    if operand != target and not _widens(operand, target):
        raise TileTypeError(
            f"cannot implicitly cast {operand} to {target}; use astype() if that is meant"
        )
    return cast(tensor, operand, target)


@cache
def _widens(source: DType, target: DType) -> bool:
    try:
        return bool(api.promote_dtypes(source, target) == target)
    except TileTypeError:
        return False


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor's elements as signed integers, in the same memory."""
    return tensor.view(_BITS_DTYPES[tensor.element_size()])


def _round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    bits = tensor.contiguous().view(torch.int32)
    half_down = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    to_even = (bits >> _TF32_DROPPED_BITS) & 1
    kept = (bits + half_down + to_even) & -(1 << _TF32_DROPPED_BITS)
    return torch.where(torch.isfinite(tensor), kept.view(torch.float32), tensor)


@cache
def padding(dtype: DType, mode: PaddingMode) -> torch.Tensor:
    """The 0-d tensor that stands for elements outside an array under a padding mode."""
    if mode == ct.PaddingMode.UNDETERMINED:
        return poison(dtype)
    value = _PADDING_VALUES[mode]
    if not api.is_float(dtype) and mode != ct.PaddingMode.ZERO:
        raise TileTypeError(f"padding mode {mode.name} needs a float array, got {dtype}")
    return constant(value, dtype)


@cache
def poison(dtype: DType) -> torch.Tensor:
    """The stand-in for an undetermined element: one that spoils whatever depends on it."""
    if api.is_float(dtype):
        return constant(math.nan, dtype)
    return constant(True if api.is_boolean(dtype) else api.integer_dtype_max(dtype), dtype)
