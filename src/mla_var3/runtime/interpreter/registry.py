"""The table from cuTile's operations to the functions that carry them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

IMPLEMENTATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}
"""Keyed by the function object that cuTile passes to the dispatch mode."""


def implements(*stubs: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Registers a function as the implementation of cuTile operations."""

    def register(function: _Function) -> _Function:
        for stub in stubs:
            implement(stub, function)
        return function

    return register


def implement(stub: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Registers `function` for `stub` and for the functions that `stub` wraps.

    Some operations are wrapped once more for their documentation, and the dispatch mode is handed
    an inner function.
    """
    layer: Callable[..., Any] | None = stub
    while layer is not None:
        IMPLEMENTATIONS[layer] = function
        layer = getattr(layer, "__wrapped__", None)
