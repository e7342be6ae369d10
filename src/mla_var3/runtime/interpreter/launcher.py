"""Running a kernel over its grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mla_var3.runtime.interpreter.arguments import (
    bind_arguments,
    checked_grid,
    checked_kernel,
    chosen_blocks,
)
from mla_var3.runtime.interpreter.diagnosis import block_error
from mla_var3.runtime.interpreter.dispatch import InterpreterMode
from mla_var3.runtime.interpreter.rebinding import Rebinder


def launch(
    grid: Sequence[int],
    kernel: Any,
    args: Sequence[Any],
    *,
    blocks: Iterable[int | Sequence[int]] | None = None,
) -> None:
    """Runs a cuTile kernel on CPU tensors, block by block.

    Args:
        grid: Number of blocks along one to three axes.
        kernel: A `@ct.kernel` object.
        args: The kernel's arguments in order: CPU tensors, numbers, tuples and lists of them, and
            constants for the parameters annotated with `ct.Constant`. Integers become int32 and
            floats float32 scalars, as in a launch on a GPU.
        blocks: Ids of the blocks to run, in the order given; by default all of the grid.

    Raises:
        InvalidArgumentError: If an argument of this call or of the kernel cannot be used.
        InterpreterError: If a block did something that is undefined or rejected on a GPU, or that
            the interpreter does not support. The message names kernel, block, operation and
            source line; the cause is chained.
    """
    full_grid = checked_grid(grid)
    chosen = list(chosen_blocks(full_grid, blocks))
    annotated = checked_kernel(kernel)._annotated_function
    rebinder = Rebinder()
    mode = InterpreterMode(full_grid, rebinder)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        parameters = bind_arguments(annotated, args)
        function = rebinder.rebind(annotated.pyfunc)
        stack.enter_context(mode.as_current())
        for block in chosen:
            mode.block = block
            try:
                function(*parameters)
            except Exception as error:
                raise block_error(error, function.__name__, block) from error
