"""The dispatch mode that answers cuTile calls while a kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mla_var3.errors import InterpreterError

# Imported for the operations that they register.
from mla_var3.runtime.interpreter import (  # noqa: F401
    arithmetic,
    atomics,
    contraction,
    elementwise,
    indexed,
    language,
    memory,
    reductions,
    shaping,
)
from mla_var3.runtime.interpreter.cutile_api import DispatchMode, is_stub
from mla_var3.runtime.interpreter.rebinding import Rebinder
from mla_var3.runtime.interpreter.registry import IMPLEMENTATIONS

BlockId = tuple[int, int, int]


class InterpreterMode(DispatchMode):  # type: ignore[misc]
    """Carries out the operations of one launch.

    Attributes:
        grid: Number of blocks along x, y, z.
        block: Id of the block that runs.
    """

    def __init__(self, grid: BlockId, rebinder: Rebinder) -> None:
        self.grid = grid
        self.block: BlockId = (0, 0, 0)
        self._rebinder = rebinder

    def call_tile_function_from_host(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called by cuTile for every operation and for every `@ct.function`."""
        implementation = IMPLEMENTATIONS.get(func)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if is_stub(func):
            raise InterpreterError(f"{func.__qualname__} is not supported by the CPU interpreter")
        helper: Any = func
        return self._rebinder.rebind(helper.__wrapped__)(*args, **kwargs)
