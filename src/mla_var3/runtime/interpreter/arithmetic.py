"""Element-wise operations: arithmetic on two operands, functions of one, selection."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    RoundingMode,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import Number, cast, constant, promoted, wrap_integer
from mla_var3.runtime.interpreter.values import Tile, as_tile, loose_type

# Largest float32 below the smallest normal one.
_LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
_NEAREST_ENOUGH = (None, ct.RoundingMode.RN, ct.RoundingMode.FULL, ct.RoundingMode.APPROX)

Elementwise = Callable[..., Any]


def _floor_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.floor(x / y) if x.is_floating_point() else torch.div(x, y, rounding_mode="floor")


def _ceil_divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Not by negation, which an unsigned number and the least signed one do not have.
    floor = torch.div(x, y, rounding_mode="floor")
    return floor + (floor * y != x).to(floor.dtype)


# cuTile's name of the operation -> its stub and torch function. The stub of "pow" has rules of its
# own, and that of "cdiv" does not reach the dispatch mode.
_BINARY: dict[str, tuple[Callable[..., Any] | None, Elementwise]] = {
    "add": (ct.add, torch.add),
    "sub": (ct.sub, torch.sub),
    "mul": (ct.mul, torch.mul),
    "truediv": (ct.truediv, torch.true_divide),
    "floordiv": (ct.floordiv, _floor_divide),
    "cdiv": (None, _ceil_divide),
    "mod": (ct.mod, torch.remainder),
    "pow": (None, torch.pow),
    "atan2": (ct.atan2, torch.atan2),
    "min": (ct.minimum, torch.fmin),
    "max": (ct.maximum, torch.fmax),
    "and_": (ct.bitwise_and, torch.bitwise_and),
    "or_": (ct.bitwise_or, torch.bitwise_or),
    "xor": (ct.bitwise_xor, torch.bitwise_xor),
    "lshift": (ct.bitwise_lshift, torch.bitwise_left_shift),
    "rshift": (ct.bitwise_rshift, torch.bitwise_right_shift),
    "eq": (ct.equal, torch.eq),
    "ne": (ct.not_equal, torch.ne),
    "lt": (ct.less, torch.lt),
    "le": (ct.less_equal, torch.le),
    "gt": (ct.greater, torch.gt),
    "ge": (ct.greater_equal, torch.ge),
}
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_BITWISE = frozenset({"and_", "or_", "xor"})
_SHIFTS = frozenset({"lshift", "rshift"})
_DIVISIONS = frozenset({"floordiv", "cdiv", "mod"})
# Done on Python integers where both operands are integer scalars: they drive loops and indices,
# and a tensor operation costs several times as much.
_ON_INTEGERS = {
    name: api.BINOP_REGISTRY[name].impl
    for name in ("add", "sub", "mul", "floordiv", "cdiv", "mod", "min", "max", *_COMPARISONS)
}


def combine_elements(name: str, x: torch.Tensor, y: torch.Tensor, element: DType) -> torch.Tensor:
    """Applies a binary operation to two tensors of the same dtype `element`."""
    if name in _DIVISIONS and api.is_integral(element) and bool((y == 0).any()):
        raise InterpreterError(f"integer {name} by zero: undefined behaviour")
    result: torch.Tensor = _BINARY[name][1](x, y)
    return result


@lru_cache(maxsize=8192, typed=True)
def _operand_dtype(name: str, x: DType | Number, y: DType | Number) -> DType:
    """The dtype that both operands are cast to, after cuTile's checks for the operation."""
    numbers = [isinstance(operand, bool | int | float) for operand in (x, y)]
    x_dtype = api.dtype_of_constant_scalar(x) if numbers[0] else x
    y_dtype = api.dtype_of_constant_scalar(y) if numbers[1] else y
    if name in _BITWISE:
        if not all(api.is_integral(d) or api.is_boolean(d) for d in (x_dtype, y_dtype)):
            raise TileTypeError(
                f"bitwise operations need integers or booleans, got {x_dtype} and {y_dtype}"
            )
        if (not any(numbers) and x_dtype != y_dtype) or {x_dtype, y_dtype} == {ct.bool_, ct.int8}:
            raise TileTypeError(f"bitwise operands differ in dtype: {x_dtype} and {y_dtype}")
    elif name in _SHIFTS:
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
    unsupported = {"pow": api.is_integral, "atan2": api.is_integral, "cdiv": api.is_float}
    if name in unsupported and unsupported[name](common):
        raise TileTypeError(f"{name} is not defined for {x_dtype} and {y_dtype}")
    return common


def _elements(value: Tile | Number, dtype: DType) -> torch.Tensor:
    if isinstance(value, Tile):
        return cast(value.tensor, value.element, dtype)
    return constant(value, dtype)


def binary(
    name: str,
    x: Any,
    y: Any,
    /,
    *,
    rounding_mode: RoundingMode | None = None,
    flush_to_zero: bool = False,
    propagate_nan: bool = False,
) -> Any:
    """A binary operation, by cuTile's name; a Python number if both operands are numbers."""
    x_integer = x.integer if isinstance(x, Tile) else x if type(x) is int else None
    y_integer = y.integer if isinstance(y, Tile) else y if type(y) is int else None
    if x_integer is not None and y_integer is not None and name in _ON_INTEGERS:
        return _binary_on_integers(name, x, x_integer, y, y_integer)
    x = x if isinstance(x, bool | int | float) else as_tile(x)
    y = y if isinstance(y, bool | int | float) else as_tile(y)
    if not isinstance(x, Tile) and not isinstance(y, Tile):
        with api.reraise_tile_exception():
            return api.BINOP_REGISTRY[name].impl(x, y)
    dtype = _operand_dtype(name, loose_type(x), loose_type(y))
    a, b = _elements(x, dtype), _elements(y, dtype)
    if a.shape != b.shape:
        api.broadcast_shapes(a.shape, b.shape)
    if name in _COMPARISONS:
        return Tile(combine_elements(name, a, b, dtype), ct.bool_)
    on_torch: Elementwise = partial(combine_elements, name, element=dtype)
    if propagate_nan and api.is_float(dtype):
        on_torch = torch.minimum if name == "min" else torch.maximum
    return _with_modes(name, dtype, on_torch, (a, b), rounding_mode, flush_to_zero)


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


def check_modes(name: str, rounding: RoundingMode | None, flush: bool, dtype: DType) -> None:
    """Checks that an operation has the rounding mode and flushing asked for."""
    # cuTile's check asks the running compiler for its version in this case; FULL has the same rule.
    if name in ("exp", "tanh") and rounding == ct.RoundingMode.APPROX:
        rounding = ct.RoundingMode.FULL
    api.check_rd_and_ftz(name, rounding, flush, dtype)


def flush_subnormals(tensor: torch.Tensor) -> torch.Tensor:
    """Turns subnormal float32 numbers into zeros of the same sign."""
    flushed = torch.nn.functional.hardshrink(tensor, _LARGEST_SUBNORMAL)
    return torch.copysign(flushed, tensor)


def _with_modes(
    name: str,
    dtype: DType,
    function: Callable[..., torch.Tensor],
    operands: tuple[torch.Tensor, ...],
    rounding: RoundingMode | None,
    flush: bool,
) -> Tile:
    """Applies a torch function with a rounding mode, flushing subnormal numbers if asked to."""
    if rounding is not None or flush:
        check_modes(name, rounding, flush, dtype)
    # exp2 of a subnormal number is 1, as exp2 of zero.
    if flush and name != "exp2":
        operands = tuple(map(flush_subnormals, operands))
    if rounding not in _NEAREST_ENOUGH:
        raise InterpreterError(
            f"{name} with rounding mode {rounding} is not supported by the CPU interpreter"
        )
    result = function(*operands)
    return Tile(flush_subnormals(result) if flush else result, dtype)


for _name, (_stub, _) in _BINARY.items():
    if _stub is not None:
        implement(_stub, partial(binary, _name))


@implements(ct.pow)
def _pow(x: Any, y: Any, /) -> Any:
    if isinstance(x, Tile) or isinstance(y, Tile):
        base, exponent = as_tile(x), as_tile(y)
        # A float to the power of a small integer keeps the dtype of the float.
        if api.is_unrestricted_float(base.element) and api.integer_exponent_dtype(exponent.element):
            return Tile(torch.pow(base.tensor, exponent.tensor).to(base.tensor.dtype), base.element)
    return binary("pow", x, y)


@implements(ct.divmod)
def _divmod(x: Any, y: Any, /) -> tuple[Any, Any]:
    if isinstance(x, Tile) or isinstance(y, Tile):
        dtype = _operand_dtype("mod", loose_type(x), loose_type(y))
        if api.is_float(dtype):
            raise TileTypeError("divmod() is not implemented for floating point values")
    return binary("floordiv", x, y), binary("mod", x, y)


def _unary_dtype(name: str, dtype: DType) -> DType:
    """The dtype that an operation works in: its operand's, or the one this is converted to."""
    refused = {"floor": not api.is_float(dtype), "ceil": not api.is_float(dtype)}
    refused["bitwise_not"] = api.is_float(dtype)
    if api.is_restricted_float(dtype) or refused.get(name):
        raise TileTypeError(f"{name} is not defined for dtype {dtype}")
    if api.is_float(dtype) or name in ("abs", "bitwise_not"):
        return dtype
    if name == "neg":
        return ct.int32 if api.is_boolean(dtype) else dtype
    return ct.float32


def _register_unary(
    stub: Callable[..., Any], name: str, function: Callable[..., torch.Tensor]
) -> None:
    def unary(
        x: Any, /, *, rounding_mode: RoundingMode | None = None, flush_to_zero: bool = False
    ) -> Any:
        if isinstance(x, bool | int | float):
            with api.reraise_tile_exception():
                return api.UNARYOP_REGISTRY[name].impl(x)
        tile = as_tile(x)
        dtype = _unary_dtype(name, tile.element)
        elements = cast(tile.tensor, tile.element, dtype)
        return _with_modes(name, dtype, function, (elements,), rounding_mode, flush_to_zero)

    implement(stub, unary)


for _name in (
    *("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("floor", "ceil", "bitwise_not"),
):
    _register_unary(getattr(ct, _name), _name, getattr(torch, _name))
_register_unary(ct.negative, "neg", torch.neg)
_register_unary(ct.abs, "abs", lambda x: x if x.dtype == torch.bool else x.abs())


@implements(ct.isnan)
def _isnan(x: Any, /) -> Any:
    if isinstance(x, bool | int | float):
        return math.isnan(x)
    tile = as_tile(x)
    if not api.is_unrestricted_float(tile.element):
        raise TileTypeError(f"isnan is not defined for dtype {tile.element}")
    return Tile(torch.isnan(tile.tensor), ct.bool_)


@implements(ct.where)
def _where(condition: Any, x: Any, y: Any, /) -> Tile:
    chooser, first, second = as_tile(condition), as_tile(x), as_tile(y)
    dtype = promoted(loose_type(x), loose_type(y))
    api.broadcast_shapes(api.broadcast_shapes(first.shape, second.shape), chooser.shape)
    mask = cast(chooser.tensor, chooser.element, ct.bool_)
    on_true = cast(first.tensor, first.element, dtype)
    on_false = cast(second.tensor, second.element, dtype)
    return Tile(torch.where(mask, on_true, on_false), dtype)


@implements(ct.assume_divisible_by)
def _assume_divisible_by(x: Any, divisor: Any) -> Any:
    tile = as_tile(x)
    if tile.ndim or not api.is_integral(tile.element):
        raise TileTypeError(f"assume_divisible_by needs an integer scalar, got {tile.element}")
    if not isinstance(divisor, int) or divisor < 1:
        raise TileTypeError(f"assume_divisible_by needs a positive divisor, got {divisor!r}")
    if int(tile.scalar()) % divisor:
        raise InterpreterError(f"{tile.scalar()} is not divisible by {divisor}, as was assumed")
    return x
