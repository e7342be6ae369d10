"""Element-wise operations: arithmetic on two operands, functions of one, selection."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import (
    Number,
    cast,
    constant,
    dtype_of_number,
    promoted,
    wrap_integer,
)
from mla_var3.runtime.interpreter.values import Tile, as_tile, loose_type

# Largest float32 below the smallest normal one.
_LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149

Elementwise = Callable[..., Any]


def _floor_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.floor(x / y) if x.is_floating_point() else torch.div(x, y, rounding_mode="floor")


def _ceil_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -torch.div(-x, y, rounding_mode="floor")


def _minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmin(x, y) if x.is_floating_point() else torch.minimum(x, y)


def _maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.fmax(x, y) if x.is_floating_point() else torch.maximum(x, y)


# cuTile's name of the operation -> torch function.
_BINARY: dict[str, Elementwise] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": _floor_divide,
    "cdiv": _ceil_divide,
    "mod": torch.remainder,
    "min": _minimum,
    "max": _maximum,
    "and_": torch.bitwise_and,
    "or_": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_BITWISE = frozenset({"and_", "or_", "xor"})
_DIVISIONS = frozenset({"floordiv", "cdiv", "mod"})
# Done on Python integers where both operands are integer scalars: they drive loops and indices,
# and a tensor operation costs several times as much.
_ON_INTEGERS = {
    name: api.BINOP_REGISTRY[name].impl
    for name in ("add", "sub", "mul", "floordiv", "cdiv", "mod", "min", "max", *_COMPARISONS)
}


@lru_cache(maxsize=8192, typed=True)
def _operand_dtype(name: str, x: DType | Number, y: DType | Number) -> DType:
    """The dtype that both operands are cast to, after cuTile's checks for the operation."""
    x_dtype, y_dtype = (
        dtype_of_number(operand) if isinstance(operand, bool | int | float) else operand
        for operand in (x, y)
    )
    if name in _BITWISE:
        if not all(api.is_integral(d) or api.is_boolean(d) for d in (x_dtype, y_dtype)):
            raise TileTypeError(
                f"bitwise operations need integers or booleans, got {x_dtype} and {y_dtype}"
            )
        both_typed = x is x_dtype and y is y_dtype
        if (both_typed and x_dtype != y_dtype) or {x_dtype, y_dtype} == {ct.bool_, ct.int8}:
            raise TileTypeError(f"bitwise operands differ in dtype: {x_dtype} and {y_dtype}")
    elif name == "lshift":
        if not (api.is_integral(x_dtype) and api.is_integral(y_dtype)):
            raise TileTypeError(f"a shift needs integers, got {x_dtype} and {y_dtype}")
    elif name not in _COMPARISONS:
        for dtype in (x_dtype, y_dtype):
            if not api.is_arithmetic(dtype):
                raise TileTypeError(f"{name} is not defined for dtype {dtype}")
    common = promoted(x, y, name == "truediv")
    if name not in _COMPARISONS | _BITWISE and common == ct.bool_:
        raise TileTypeError(f"{name} does not support bool; cast to an integer first")
    if name in _COMPARISONS and api.is_restricted_float(common):
        raise TileTypeError(f"comparison is not defined for dtype {common}")
    if name == "cdiv" and api.is_float(common):
        raise TileTypeError(f"{name} is not defined for {x_dtype} and {y_dtype}")
    return common


def _elements(value: Tile | Number, dtype: DType) -> torch.Tensor:
    if isinstance(value, Tile):
        return cast(value.tensor, value.element, dtype)
    return constant(value, dtype)


def binary(name: str, x: Any, y: Any, /) -> Any:
    """A binary operation, by cuTile's name; a Python number if both operands are numbers."""
    x_integer = x.integer if isinstance(x, Tile) else x if type(x) is int else None
    y_integer = y.integer if isinstance(y, Tile) else y if type(y) is int else None
    if x_integer is not None and y_integer is not None and name in _ON_INTEGERS:
        return _binary_on_integers(name, x, x_integer, y, y_integer)
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        x, y = _require_number(x), _require_number(y)
        with api.reraise_tile_exception():
            return api.BINOP_REGISTRY[name].impl(x, y)
    x = x if isinstance(x, bool | int | float) else as_tile(x)
    y = y if isinstance(y, bool | int | float) else as_tile(y)
    dtype = _operand_dtype(name, loose_type(x), loose_type(y))
    a, b = _elements(x, dtype), _elements(y, dtype)
    if a.shape != b.shape:
        api.broadcast_shapes(a.shape, b.shape)
    if name in _DIVISIONS and api.is_integral(dtype) and bool((b == 0).any()):
        raise InterpreterError(f"integer {name} by zero: undefined behaviour")
    return Tile(_BINARY[name](a, b), ct.bool_ if name in _COMPARISONS else dtype)


def _require_number(value: Any) -> Number:
    if isinstance(value, bool | int | float):
        return value
    as_tile(value)
    raise TileTypeError(f"unexpected operand {value!r}")


def _binary_on_integers(name: str, x: Any, x_value: int, y: Any, y_value: int) -> Any:
    function = _ON_INTEGERS[name]
    if name in _DIVISIONS and y_value == 0:
        raise InterpreterError(f"integer {name} by zero: undefined behaviour")
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        return function(x_value, y_value)
    dtype = _operand_dtype(name, loose_type(x), loose_type(y))
    x_value, y_value = wrap_integer(x_value, dtype), wrap_integer(y_value, dtype)
    result = function(x_value, y_value)
    if name in _COMPARISONS:
        return Tile.of_integer(result, ct.bool_)
    return Tile.of_integer(wrap_integer(result, dtype), dtype)


def _flush_subnormals(tensor: torch.Tensor) -> torch.Tensor:
    """Turns subnormal float32 numbers into zeros of the same sign."""
    flushed = torch.nn.functional.hardshrink(tensor, _LARGEST_SUBNORMAL)
    return torch.copysign(flushed, tensor)


# Each stub with cuTile's name of the operation.
_STUBS: dict[Callable[..., Any], str] = {
    ct.add: "add",
    ct.sub: "sub",
    ct.mul: "mul",
    ct.truediv: "truediv",
    ct.minimum: "min",
    ct.maximum: "max",
    ct.floordiv: "floordiv",
    ct.mod: "mod",
    ct.bitwise_and: "and_",
    ct.bitwise_or: "or_",
    ct.bitwise_xor: "xor",
    ct.bitwise_lshift: "lshift",
    ct.equal: "eq",
    ct.not_equal: "ne",
    ct.less: "lt",
    ct.less_equal: "le",
    ct.greater: "gt",
    ct.greater_equal: "ge",
}
for _stub, _name in _STUBS.items():
    implement(_stub, partial(binary, _name))


def _unary(name: str, function: Elementwise, x: Any, /, *, flush_to_zero: bool = False) -> Any:
    """A function of one operand; a Python number if the operand is one."""
    if isinstance(x, bool | int | float):
        with api.reraise_tile_exception():
            return api.UNARYOP_REGISTRY[name].impl(x)
    tile = as_tile(x)
    if api.is_restricted_float(tile.element):
        raise TileTypeError(f"{name} is not defined for dtype {tile.element}")
    dtype = tile.element
    if name == "neg":
        dtype = ct.int32 if api.is_boolean(dtype) else dtype
    elif name != "abs" and not api.is_float(dtype):
        dtype = ct.float32
    elements = cast(tile.tensor, tile.element, dtype)
    if not flush_to_zero:
        return Tile(function(elements), dtype)
    api.check_rd_and_ftz(name, None, flush_to_zero, dtype)
    # exp2 of a subnormal number is 1, as exp2 of zero.
    operand = elements if name == "exp2" else _flush_subnormals(elements)
    return Tile(_flush_subnormals(function(operand)), dtype)


def _absolute(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.abs()


_UNARY: dict[Callable[..., Any], tuple[str, Elementwise]] = {
    ct.exp: ("exp", torch.exp),
    ct.exp2: ("exp2", torch.exp2),
    ct.log: ("log", torch.log),
    ct.log2: ("log2", torch.log2),
    ct.sqrt: ("sqrt", torch.sqrt),
    ct.rsqrt: ("rsqrt", torch.rsqrt),
    ct.negative: ("neg", torch.neg),
    ct.abs: ("abs", _absolute),
}
for _stub, (_name, _function) in _UNARY.items():
    implement(_stub, partial(_unary, _name, _function))


@implements(ct.where)
def _where(condition: Any, x: Any, y: Any, /) -> Tile:
    chooser, first, second = as_tile(condition), as_tile(x), as_tile(y)
    dtype = promoted(loose_type(x), loose_type(y))
    api.broadcast_shapes(api.broadcast_shapes(first.shape, second.shape), chooser.shape)
    mask = cast(chooser.tensor, chooser.element, ct.bool_)
    on_true = cast(first.tensor, first.element, dtype)
    on_false = cast(second.tensor, second.element, dtype)
    return Tile(torch.where(mask, on_true, on_false), dtype)
