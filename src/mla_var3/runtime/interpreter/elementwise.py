"""Element-wise operations on one operand, and selection between two."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter.arithmetic import check_modes, flush_subnormals, through_numpy
from mla_var3.runtime.interpreter.cutile_api import (
    UNARYOP_REGISTRY,
    DType,
    RoundingMode,
    TileTypeError,
    broadcast_shapes,
    ct,
    is_boolean,
    is_float,
    is_integral,
    is_restricted_float,
    is_unrestricted_float,
    reraise_tile_exception,
)
from mla_var3.runtime.interpreter.dtypes import NUMPY_DTYPES, cast, promoted, round_directed
from mla_var3.runtime.interpreter.operands import as_tile, loose_type
from mla_var3.runtime.interpreter.registry import implement, implements
from mla_var3.runtime.interpreter.values import Tile


class _Accepts(Enum):
    """Which dtypes an operation takes, and what it does with the others."""

    FLOAT = auto()
    """Floats; integers and booleans become float32."""
    STRICTLY_FLOAT = auto()
    """Floats only."""
    NUMBER = auto()
    """Floats and integers; booleans become int32."""
    BITS = auto()
    """Integers and booleans only."""
    ANY = auto()
    """Everything, as it is."""


def _accepted_dtype(name: str, accepts: _Accepts, dtype: DType) -> DType:
    """The dtype that the operation works in."""
    if is_restricted_float(dtype):
        raise TileTypeError(f"{name} is not defined for dtype {dtype}")
    if is_float(dtype):
        if accepts is _Accepts.BITS:
            raise TileTypeError(f"{name} does not support float inputs, got {dtype}")
        return dtype
    if accepts is _Accepts.STRICTLY_FLOAT:
        raise TileTypeError(f"{name} supports float inputs only, got {dtype}")
    if accepts is _Accepts.FLOAT:
        return ct.float32
    if accepts is _Accepts.NUMBER and is_boolean(dtype):
        return ct.int32
    return dtype


def _absolute(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.abs()


# stub -> (cuTile's name, torch function, dtypes).
_UNARY: dict[Callable[..., Any], tuple[str, Callable[..., torch.Tensor], _Accepts]] = {
    ct.exp: ("exp", torch.exp, _Accepts.FLOAT),
    ct.exp2: ("exp2", torch.exp2, _Accepts.FLOAT),
    ct.log: ("log", torch.log, _Accepts.FLOAT),
    ct.log2: ("log2", torch.log2, _Accepts.FLOAT),
    ct.sqrt: ("sqrt", torch.sqrt, _Accepts.FLOAT),
    ct.rsqrt: ("rsqrt", torch.rsqrt, _Accepts.FLOAT),
    ct.sin: ("sin", torch.sin, _Accepts.FLOAT),
    ct.cos: ("cos", torch.cos, _Accepts.FLOAT),
    ct.tan: ("tan", torch.tan, _Accepts.FLOAT),
    ct.sinh: ("sinh", torch.sinh, _Accepts.FLOAT),
    ct.cosh: ("cosh", torch.cosh, _Accepts.FLOAT),
    ct.tanh: ("tanh", torch.tanh, _Accepts.FLOAT),
    ct.floor: ("floor", torch.floor, _Accepts.STRICTLY_FLOAT),
    ct.ceil: ("ceil", torch.ceil, _Accepts.STRICTLY_FLOAT),
    ct.negative: ("neg", torch.neg, _Accepts.NUMBER),
    ct.abs: ("abs", _absolute, _Accepts.ANY),
    ct.bitwise_not: ("bitwise_not", torch.bitwise_not, _Accepts.BITS),
}
_ON_NUMPY: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "abs": np.absolute,
    "bitwise_not": np.invert,
}
_NEAREST_ENOUGH = (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX)


def _register_unary(stub: Callable[..., Any]) -> None:
    name, function, accepts = _UNARY[stub]

    def unary(
        x: Any,
        /,
        *,
        rounding_mode: RoundingMode | None = None,
        flush_to_zero: bool = False,
    ) -> Any:
        if isinstance(x, bool | int | float):
            with reraise_tile_exception():
                return UNARYOP_REGISTRY[name].impl(x)
        tile = as_tile(x)
        dtype = _accepted_dtype(name, accepts, tile.element)
        elements = cast(tile.tensor, tile.element, dtype)
        if dtype in NUMPY_DTYPES:
            return Tile(through_numpy(_ON_NUMPY[name], elements), dtype)
        if rounding_mode is None and not flush_to_zero:
            return Tile(function(elements), dtype)
        check_modes(name, rounding_mode, flush_to_zero, dtype)
        # exp2 of a subnormal number is 1, as exp2 of zero.
        if flush_to_zero and name != "exp2":
            elements = flush_subnormals(elements)
        if rounding_mode in _NEAREST_ENOUGH:
            result = function(elements)
        elif dtype == ct.float64:
            raise InterpreterError(
                f"{name} with rounding mode {rounding_mode} is not supported by the CPU "
                "interpreter for float64"
            )
        else:
            result = round_directed(function(elements.double()), dtype, rounding_mode)
        return Tile(flush_subnormals(result) if flush_to_zero else result, dtype)

    implement(stub, unary)


for _stub in _UNARY:
    _register_unary(_stub)


@implements(ct.isnan)
def _isnan(x: Any, /) -> Any:
    if isinstance(x, bool | int | float):
        return math.isnan(x)
    tile = as_tile(x)
    if not is_unrestricted_float(tile.element):
        raise TileTypeError(f"isnan is not defined for dtype {tile.element}")
    return Tile(torch.isnan(tile.tensor), ct.bool_)


@implements(ct.where)
def _where(condition: Any, x: Any, y: Any, /) -> Tile:
    chooser, first, second = as_tile(condition), as_tile(x), as_tile(y)
    dtype = promoted(loose_type(x), loose_type(y))
    broadcast_shapes(broadcast_shapes(first.shape, second.shape), chooser.shape)
    mask = cast(chooser.tensor, chooser.element, ct.bool_)
    on_true = cast(first.tensor, first.element, dtype)
    on_false = cast(second.tensor, second.element, dtype)
    return Tile(torch.where(mask, on_true, on_false), dtype)


@implements(ct.assume_divisible_by)
def _assume_divisible_by(x: Any, divisor: Any) -> Any:
    tile = as_tile(x)
    if tile.ndim or not is_integral(tile.element):
        raise TileTypeError(f"assume_divisible_by needs an integer scalar, got {tile.element}")
    if not isinstance(divisor, int) or divisor < 1:
        raise TileTypeError(f"assume_divisible_by needs a positive divisor, got {divisor!r}")
    if int(tile.scalar()) % divisor:
        raise InterpreterError(f"{tile.scalar()} is not divisible by {divisor}, as was assumed")
    return x
