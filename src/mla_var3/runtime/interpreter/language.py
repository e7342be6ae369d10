"""Operations that belong to the language: block ids, printing, assertions, static evaluation."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter.arithmetic import binary
from mla_var3.runtime.interpreter.cutile_api import (
    DispatchMode,
    PrintfValidator,
    TileStaticAssertionError,
    TileTy,
    TileTypeError,
    ct,
    is_integral,
    is_signed,
    make_static_exception,
)
from mla_var3.runtime.interpreter.dtypes import promoted
from mla_var3.runtime.interpreter.operands import as_tile, static_int
from mla_var3.runtime.interpreter.registry import implements
from mla_var3.runtime.interpreter.values import Tile, describe

_MAX_STATIC_ITERATIONS = 1000
_C_LENGTH_MODIFIER = re.compile(r"(hh|h|ll|l)(?=[a-zA-Z]$)")


def _grid_axis(axis: Any) -> int:
    number = static_int(axis, "the axis")
    if number not in (0, 1, 2):
        raise TileTypeError(f"axis must be 0, 1 or 2, got {number}")
    return number


@implements(ct.bid)
def _bid(axis: Any) -> Tile:
    return Tile.of_integer(DispatchMode.get_current().block[_grid_axis(axis)], ct.int32)


@implements(ct.num_blocks)
def _num_blocks(axis: Any) -> Tile:
    return Tile.of_integer(DispatchMode.get_current().grid[_grid_axis(axis)], ct.int32)


@implements(ct.grid_dependency_control_wait, ct.grid_dependency_control_launch_dependents)
def _grid_dependency_control() -> None:
    """Kernels run one after the other, so there is nothing to wait for or to let begin."""


@implements(ct.print)
def _print(*args: Any, sep: str = " ", end: str = "\n") -> None:
    sys.stdout.write(sep.join(str(arg) for arg in args) + end)


@implements(ct.printf)
def _printf(format: str, *args: Any) -> None:
    tiles = [as_tile(arg) for arg in args]
    types = tuple(TileTy(tile.element, tile.shape) for tile in tiles)
    PrintfValidator.parse_format(format, types)
    values = iter(tiles)

    def substitute(match: re.Match[str]) -> str:
        if match[0] == "%%":
            return "%"
        return _printed(next(values).tensor.tolist(), _C_LENGTH_MODIFIER.sub("", match[0]))

    pattern = re.compile(f"%%|{PrintfValidator.pattern.pattern}")
    sys.stdout.write(pattern.sub(substitute, format))


def _printed(value: Any, c_format: str) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_printed(item, c_format) for item in value) + "]"
    if c_format[-1] in "aA":
        return float(value).hex()
    return str(c_format % value)


@implements(ct.assert_)
def _assert(condition: Any, /, message: str | None = None) -> None:
    tile = as_tile(condition)
    if tile.element != ct.bool_:
        raise TileTypeError(f"assert_ needs a boolean tile, got {describe(tile)}")
    if not bool(tile.tensor.all()):
        raise AssertionError(message or "a condition is false")


@implements(ct.static_eval)
def _static_eval(expression: Any, /) -> Any:
    return expression.static if isinstance(expression, KernelRange) else expression


@implements(ct.static_assert)
def _static_assert(condition: Any, message: Any = None, /) -> None:
    if not isinstance(condition, bool):
        raise TileTypeError(
            f"static_assert needs a compile-time boolean, got {describe(condition)}"
        )
    if not condition:
        if isinstance(message, Tile):
            message = f"<tile[{message.element}, {message.shape}]>"
        raise TileStaticAssertionError("" if message is None else str(message))


@implements(ct.ensure_constant)
def _ensure_constant(value: Any, /) -> Any:
    if isinstance(value, Tile):
        raise TileStaticAssertionError(
            "Argument of ensure_constant() is not a compile-time constant"
        )
    return value


class KernelRange:
    """`range` in kernel code: its loop variable is a dynamic scalar, int32 at least."""

    def __init__(self, *bounds: Any) -> None:
        if not 1 <= len(bounds) <= 3:
            raise TileTypeError(f"range takes one to three arguments, got {len(bounds)}")
        self._dtype = ct.int32
        for bound in bounds:
            tile = as_tile(bound)
            if tile.ndim or not is_integral(tile.element) or not is_signed(tile.element):
                raise TileTypeError(f"range needs signed integer scalars, got {describe(bound)}")
            self._dtype = promoted(self._dtype, tile.element)
        self._range = range(*(bound.__index__() for bound in bounds))
        if self._range.step <= 0:
            raise TileTypeError(f"the step of range must be positive, got {self._range.step}")
        self.is_constant = not any(isinstance(bound, Tile) for bound in bounds)

    def __iter__(self) -> Iterator[Tile]:
        for value in self._range:
            yield Tile.of_integer(value, self._dtype)

    @property
    def static(self) -> range:
        """The same range as Python integers, for iteration at compile time."""
        if not self.is_constant:
            raise TileTypeError("static_iter needs a range with constant bounds")
        return self._range


def _kernel_extremum(builtin: Callable[..., Any], stub: Callable[..., Any]) -> Callable[..., Any]:
    def extremum(*args: Any, **options: Any) -> Any:
        if not any(isinstance(arg, Tile) for arg in args):
            return builtin(*args, **options)
        if len(args) != 2 or options:
            raise TileTypeError(f"{builtin.__name__}() of tiles takes exactly two arguments")
        return stub(*args)

    return extremum


def cdiv(x: Any, y: Any, /) -> Any:
    """`ct.cdiv` in kernel code; cuTile's own is written for host integers."""
    return binary("cdiv", x, y)


def static_iter(iterable: Any) -> list[Any]:
    """`ct.static_iter` in kernel code; a range yields Python integers here."""
    items = iterable.static if isinstance(iterable, KernelRange) else iterable
    drained = list(islice(items, _MAX_STATIC_ITERATIONS + 1))
    if len(drained) > _MAX_STATIC_ITERATIONS:
        raise InterpreterError(f"static_iter is limited to {_MAX_STATIC_ITERATIONS} iterations")
    return drained


KERNEL_BUILTINS: dict[str, Any] = {
    "min": _kernel_extremum(builtins.min, ct.minimum),
    "max": _kernel_extremum(builtins.max, ct.maximum),
    "range": KernelRange,
}
"""Python builtins that mean something else in kernel code."""

SUBSTITUTES: dict[Any, Any] = {
    **{getattr(builtins, name): value for name, value in KERNEL_BUILTINS.items()},
    ct.cdiv: cdiv,
    ct.static_iter: static_iter,
    ct.static_exception: make_static_exception,
}
"""Functions that do not go through the dispatch mode, and what kernel code gets for them."""
