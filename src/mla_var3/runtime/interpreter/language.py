"""What belongs to the language: block ids, printing, assertions, and the names in kernel code.

Kernel functions are ordinary Python functions, but `min`, `max` and `range` mean something else in
them, and a few cuTile functions do not reach the dispatch mode. So a `Rebinder` runs the same code
with other globals: a mapping that looks a name up in the module's own globals, substitutes where
needed, and has builtins of its own. Helper functions are treated the same way, whether kernel code
reaches them by global name, through a module, a closure, a default value or as a `@ct.function`.
Nothing outside changes, so host code that runs at the same time is not affected.

Methods and callable objects keep Python's builtins. There, loops run over Python integers, and
`min` and `max` work on scalars; on other tiles they raise.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from types import CellType, FunctionType, ModuleType
from typing import Any

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import binary
from mla_var3.runtime.interpreter.cutile_api import DispatchMode, TileTypeError, ct, implements
from mla_var3.runtime.interpreter.dtypes import kernel_dtype, promoted
from mla_var3.runtime.interpreter.values import Tile, as_tile, describe, static_int

_MAX_STATIC_ITERATIONS = 1000


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
        raise api.TileStaticAssertionError("" if message is None else str(message))


@implements(ct.ensure_constant)
def _ensure_constant(value: Any, /) -> Any:
    if isinstance(value, Tile):
        raise api.TileStaticAssertionError(
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
            if tile.ndim or not api.is_integral(tile.element) or not api.is_signed(tile.element):
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
    ct.static_exception: api.make_static_exception,
}
"""Functions that do not go through the dispatch mode, and what kernel code gets for them."""


# Code of these packages is host code, even where a kernel names it.
_HOST_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
_CUTILE_PACKAGE = "cuda"


def _package(module_name: str | None) -> str:
    return (module_name or "").partition(".")[0]


class KernelGlobals(dict[str, Any]):
    """A module's globals as kernel code sees them.

    The interpreter loop asks a dict subclass through `__getitem__`, so names are looked up when
    they are used, and only those are converted.
    """

    def __init__(self, module_globals: dict[str, Any], rebinder: Rebinder) -> None:
        super().__init__(__builtins__={**vars(builtins), **KERNEL_BUILTINS})
        self._module_globals = module_globals
        self._rebinder = rebinder

    def __missing__(self, name: str) -> Any:
        value = self[name] = self._rebinder.convert(self._module_globals[name])
        return value


class _KernelModule(ModuleType):
    """A module as kernel code sees it."""

    def __init__(self, module: ModuleType, rebinder: Rebinder) -> None:
        super().__init__(module.__name__)
        self._module = module
        self._rebinder = rebinder

    def __getattr__(self, name: str) -> Any:
        value = self._rebinder.convert(getattr(self._module, name))
        setattr(self, name, value)
        return value


class Rebinder:
    """Converts the functions and modules that a kernel uses; one per launch."""

    def __init__(self) -> None:
        self._functions: dict[FunctionType, FunctionType] = {}
        self._globals: dict[int, KernelGlobals] = {}
        self._modules: dict[ModuleType, _KernelModule] = {}

    def convert(self, value: Any) -> Any:
        """What kernel code gets where its module has `value`."""
        kind = type(value)
        if kind is FunctionType:
            if value in SUBSTITUTES:
                return SUBSTITUTES[value]
            return self.rebind(value) if _is_kernel_code(value) else value
        if kind is ModuleType:
            return value if _package(value.__name__) in _HOST_PACKAGES else self._module(value)
        if isinstance(value, ct.DType):
            return kernel_dtype(value)
        if value is min or value is max or value is range:
            return SUBSTITUTES[value]
        return value

    def rebind(self, function: FunctionType) -> FunctionType:
        """The same function with the names of kernel code."""
        known = self._functions.get(function)
        if known is not None:
            return known
        cells = [(cell, CellType()) for cell in function.__closure__ or ()]
        rebound = FunctionType(
            function.__code__,
            self._globals_of(function),
            function.__name__,
            None,
            tuple(new for _, new in cells),
        )
        # Known before its surroundings are converted: a function may refer to itself there.
        self._functions[function] = rebound
        for cell, new in cells:
            # An unassigned variable stays so; using it raises NameError, as in Python.
            with suppress(ValueError):
                new.cell_contents = self.convert(cell.cell_contents)
        rebound.__qualname__ = function.__qualname__
        rebound.__module__ = function.__module__
        rebound.__dict__.update(function.__dict__)
        if function.__defaults__ is not None:
            rebound.__defaults__ = tuple(map(self.convert, function.__defaults__))
        if function.__kwdefaults__ is not None:
            rebound.__kwdefaults__ = {
                name: self.convert(value) for name, value in function.__kwdefaults__.items()
            }
        return rebound

    def _globals_of(self, function: FunctionType) -> KernelGlobals:
        module_globals = function.__globals__
        if isinstance(module_globals, KernelGlobals):
            return module_globals
        key = id(module_globals)
        if key not in self._globals:
            self._globals[key] = KernelGlobals(module_globals, self)
        return self._globals[key]

    def _module(self, module: ModuleType) -> _KernelModule:
        if module not in self._modules:
            self._modules[module] = _KernelModule(module, self)
        return self._modules[module]


def _is_kernel_code(function: FunctionType) -> bool:
    if getattr(function, "_cutile_function_wrapper", False):
        return False
    package = _package(function.__module__)
    return package not in _HOST_PACKAGES and package != _CUTILE_PACKAGE
