"""Saying where in a kernel something went wrong."""

from __future__ import annotations

import linecache
import traceback
from types import FrameType

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter.cutile_api import TileError
from mla_var3.runtime.interpreter.dispatch import BlockId, InterpreterMode
from mla_var3.runtime.interpreter.rebinding import KernelGlobals

_DISPATCH_CODE = InterpreterMode.call_tile_function_from_host.__code__


def block_error(error: Exception, kernel_name: str, block: BlockId) -> InterpreterError:
    """Names kernel, block, operation and source line of an error raised while a block ran.

    Args:
        error: What was raised by the kernel's function.
        kernel_name: Name of the kernel.
        block: Id of the block.

    Returns:
        The error to raise from `error`.
    """
    frames = [*traceback.walk_tb(error.__traceback__)]
    kernel_frames = [
        i for i, (frame, _) in enumerate(frames) if isinstance(frame.f_globals, KernelGlobals)
    ]
    text = f"kernel {kernel_name}, block {block}"
    if not kernel_frames:
        return InterpreterError(f"{text}: {_reason(error)}")
    innermost = kernel_frames[-1]
    operation = _operation([frame for frame, _ in frames[innermost + 1 :]])
    if operation:
        text += f", {operation}"
    text += f": {_reason(error)}"
    for index in dict.fromkeys((innermost, kernel_frames[0])):
        text += f"\n  at {_position(*frames[index])}"
    return InterpreterError(text)


def _reason(error: Exception) -> str:
    # A cuTile error appends the place in the compiler's terms, which is unknown here.
    text = error.message if isinstance(error, TileError) else str(error)
    if isinstance(error, InterpreterError | TileError):
        return str(text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _operation(frames: list[FrameType]) -> str:
    """The operation that kernel code called, seen from the frames below it."""
    for frame in frames:
        if frame.f_code is _DISPATCH_CODE:
            return f"operation {frame.f_locals['func'].__qualname__}"
    return f"in {frames[0].f_code.co_qualname}" if frames else ""


def _position(frame: FrameType, line_number: int) -> str:
    file_name = frame.f_code.co_filename
    source = linecache.getline(file_name, line_number).strip()
    place = f"{file_name}:{line_number} in {frame.f_code.co_name}"
    return f"{place}: {source}" if source else place
