"""The source files that decide what a kernel does, for cache keys."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_var3.runtime.paths import KERNEL_PACKAGE, is_plan_class


def kernel_source_files(function: Callable[..., Any]) -> list[Path]:
    """The files of the kernel function and of every HyperMLA helper that its module imports.

    Device helpers are inlined into the kernel, so a change there is a change of the kernel.
    """
    found: dict[Path, None] = {}
    pending = [inspect.getmodule(function)]
    while pending:
        module = pending.pop()
        path = getattr(module, "__file__", None)
        if module is None or path is None or Path(path) in found:
            continue
        found[Path(path)] = None
        for value in vars(module).values():
            owner = inspect.getmodule(value) if inspect.isfunction(value) else None
            if owner is not None and owner.__name__.startswith(f"{KERNEL_PACKAGE}."):
                pending.append(owner)
    return sorted(found)


def traced_source_files(*roots: Any) -> list[Path]:
    """The files of what is traced, and of every kernel module that they import, by any name.

    For languages whose host code is traced into the kernel as well: there a class, a constant or a
    whole module can decide what the kernel does, so every import counts. Only an import of nothing
    but plan classes does not: a plan calls the kernel, it is no part of it.

    Args:
        roots: functions, classes or instances; their modules are where the search starts.
    """
    modules = [inspect.getmodule(root) for root in roots]
    found: dict[Path, None] = {}
    pending = [module for module in modules if module is not None]
    while pending:
        module = pending.pop()
        path = getattr(module, "__file__", None)
        if path is None or Path(path) in found:
            continue
        found[Path(path)] = None
        pending.extend(_imported_modules(module, Path(path)))
    return sorted(found)


def _imported_modules(module: ModuleType, path: Path) -> Iterator[ModuleType]:
    """The loaded kernel modules that a module's import statements name."""
    package = module.__package__ or ""
    inside = tuple({f"{KERNEL_PACKAGE}.", f"{package}." if package else f"{KERNEL_PACKAGE}."})
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            values = [getattr(module, alias.asname or alias.name, None) for alias in node.names]
            if all(map(is_plan_class, values)):
                continue
            # A name in it may be a module itself.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith(inside) and name in sys.modules:
                yield sys.modules[name]
