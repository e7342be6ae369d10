"""Giving kernel code the names it means.

Kernel functions are ordinary Python functions, but `min`, `max` and `range` mean something else in
them, and a few cuTile functions do not reach the dispatch mode. The same code is therefore run with
other globals: a mapping that looks names up in the module's own globals and substitutes on the way,
with builtins of its own. Helper functions are treated alike, however they are reached: by global
name, through a module, a closure, a default value or as a `@ct.function`. Nothing outside is
changed, so host code that runs at the same time is not affected.

Methods and callable objects are the exception: they keep Python's builtins. Loops work there all
the same, with Python integers, and so do `min` and `max` of scalars; of other tiles they raise.
"""

from __future__ import annotations

import builtins
import sys
from types import CellType, FunctionType, ModuleType
from typing import Any

from mla_var3.runtime.interpreter.cutile_api import ct
from mla_var3.runtime.interpreter.dtypes import kernel_dtype
from mla_var3.runtime.interpreter.language import KERNEL_BUILTINS, SUBSTITUTES

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
        cells = [_Cell(cell) for cell in function.__closure__ or ()]
        rebound = FunctionType(
            function.__code__,
            self._globals_of(function),
            function.__name__,
            None,
            tuple(cell.new for cell in cells),
        )
        # Known before its surroundings are converted: a function may refer to itself there.
        self._functions[function] = rebound
        for cell in cells:
            cell.fill(self)
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


class _Cell:
    """A variable of an enclosing function, converted after the function that uses it exists."""

    def __init__(self, cell: CellType) -> None:
        self._cell = cell
        self.new = CellType()

    def fill(self, rebinder: Rebinder) -> None:
        try:
            value = self._cell.cell_contents
        except ValueError:
            # The variable is not assigned yet; using it raises NameError, as in Python.
            return
        self.new.cell_contents = rebinder.convert(value)


def _is_kernel_code(function: FunctionType) -> bool:
    if getattr(function, "_cutile_function_wrapper", False):
        return False
    package = _package(function.__module__)
    return package not in _HOST_PACKAGES and package != _CUTILE_PACKAGE
