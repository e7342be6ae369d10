"""Launching a kernel on the CPU: its arguments, the blocks of its grid, and where it failed."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from types import FrameType
from typing import Any

import torch

from mla_var3.errors import InterpreterError, InvalidArgumentError

# Imported for the operations that they register.
from mla_var3.runtime.interpreter import arithmetic, memory, tiles  # noqa: F401
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import DispatchMode, DType, ct
from mla_var3.runtime.interpreter.dtypes import CUTILE_DTYPES, constant
from mla_var3.runtime.interpreter.language import KernelGlobals, Rebinder
from mla_var3.runtime.interpreter.values import Array, ArrayList, Tile

BlockId = tuple[int, int, int]


class InterpreterMode(DispatchMode):  # type: ignore[misc]
    """Carries out the operations of one launch."""

    def __init__(self, grid: BlockId, rebinder: Rebinder) -> None:
        self.grid = grid
        self.block: BlockId = (0, 0, 0)
        self._rebinder = rebinder

    def call_tile_function_from_host(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Called by cuTile for every operation and for every `@ct.function`."""
        implementation = api.IMPLEMENTATIONS.get(func)
        if implementation is not None:
            return implementation(*args, **kwargs)
        if api.is_stub(func):
            raise InterpreterError(f"{func.__qualname__} is not supported by the CPU interpreter")
        helper: Any = func
        return self._rebinder.rebind(helper.__wrapped__)(*args, **kwargs)


def checked_grid(grid: Any) -> BlockId:
    """The grid with three sizes."""
    sizes = grid if isinstance(grid, Sequence) else ()
    good = [not isinstance(size, bool) and isinstance(size, int) and size > 0 for size in sizes]
    if not 1 <= len(good) <= 3 or not all(good):
        raise InvalidArgumentError("grid", "one to three positive integers", repr(grid))
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def bind_arguments(annotated_function: Any, args: Sequence[Any]) -> list[Any]:
    """What the kernel's function is called with."""
    names = list(annotated_function.pysig.parameters)
    if len(args) != len(names):
        expected = f"{len(names)} arguments ({', '.join(names)})"
        raise InvalidArgumentError("args", expected, len(args))
    triples = zip(names, args, annotated_function.parameter_annotations, strict=True)
    return [_bind(name, value, annotation) for name, value, annotation in triples]


def _bind(name: str, value: Any, annotation: Any) -> Any:
    of_tuple = isinstance(annotation, api.HomogeneousTupleNode | api.HeterogeneousTupleNode)
    if of_tuple and not isinstance(value, tuple):
        raise InvalidArgumentError(name, "a tuple", _got(value))
    if isinstance(value, tuple):
        if isinstance(annotation, api.HeterogeneousTupleNode):
            nodes = annotation.items
        else:
            nodes = (annotation.each if of_tuple else annotation,) * len(value)
        if len(nodes) != len(value):
            raise InvalidArgumentError(name, f"a tuple of {len(nodes)}", f"a tuple of {len(value)}")
        pairs = enumerate(zip(value, nodes, strict=True))
        return tuple(_bind(f"{name}[{i}]", item, node) for i, (item, node) in pairs)
    if annotation.constant:
        if not isinstance(value, bool | int | float):
            raise InvalidArgumentError(name, "a constant: bool, int or float", _got(value))
        return value
    if isinstance(value, list):
        element = None if annotation.list is None else annotation.list.element
        arrays = enumerate(value)
        return ArrayList(_bind_tensor(f"{name}[{i}]", item, element) for i, item in arrays)
    if isinstance(value, torch.Tensor):
        return _bind_tensor(name, value, annotation.array)
    return _bind_scalar(name, value, ct.int32 if annotation.scalar is None else ct.int64)


def _bind_scalar(name: str, value: Any, integer_dtype: DType) -> Tile:
    if isinstance(value, bool):
        return Tile.of_integer(value, ct.bool_)
    if isinstance(value, int):
        low, high = api.integer_dtype_min(integer_dtype), api.integer_dtype_max(integer_dtype)
        if not low <= value <= high:
            raise InvalidArgumentError(name, f"an integer that fits {integer_dtype}", value)
        return Tile.of_integer(value, integer_dtype)
    if isinstance(value, float):
        return Tile(constant(value, ct.float32), ct.float32)
    expected = "a CPU tensor, a number or a tuple of them (constants need ct.Constant)"
    raise InvalidArgumentError(name, expected, _got(value))


def _bind_tensor(name: str, tensor: Any, annotation: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(name, "a CPU tensor", _got(tensor))
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(name, "a tensor on the CPU", f"one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(name, "a strided tensor", f"layout {tensor.layout}")
    element = CUTILE_DTYPES.get(tensor.dtype)
    if element is None:
        raise InvalidArgumentError(name, "a dtype that cuTile has", tensor.dtype)
    index_dtype = ct.int32 if annotation is None else annotation.index_dtype
    largest = max((*tensor.shape, *tensor.stride()), default=0)
    if largest > api.integer_dtype_max(index_dtype):
        expected = f"a shape and strides that fit {index_dtype} (see ct.IndexedWithInt64)"
        raise InvalidArgumentError(name, expected, largest)
    axes: tuple[Any, Any] = ((), ())
    if annotation is not None:
        axes = (annotation.static_shape_dims, annotation.static_stride_dims)
    static = (frozenset(axis % tensor.ndim for axis in some) for some in axes)
    return Array(tensor.detach(), element, name, index_dtype, *static)


def _got(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"


_DISPATCH_CODE = InterpreterMode.call_tile_function_from_host.__code__


def block_error(error: Exception, kernel_name: str, block: BlockId) -> InterpreterError:
    """Names kernel, block, operation and source line of an error raised while a block ran."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    inside = [i for i, (f, _) in enumerate(frames) if isinstance(f.f_globals, KernelGlobals)]
    text = f"kernel {kernel_name}, block {block}"
    operation = _operation([frame for frame, _ in frames[inside[-1] + 1 :]]) if inside else ""
    text += f", {operation}" if operation else ""
    text += f": {_reason(error)}"
    for index in dict.fromkeys((*inside[-1:], *inside[:1])):
        text += f"\n  at {_position(*frames[index])}"
    return InterpreterError(text)


def _reason(error: Exception) -> str:
    # A cuTile error appends the place in the compiler's terms, which is unknown here.
    text = error.message if isinstance(error, api.TileError) else str(error)
    if isinstance(error, InterpreterError | api.TileError):
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


def launch(grid: Sequence[int], kernel: Any, args: Sequence[Any]) -> None:
    """Runs a cuTile kernel on CPU tensors, block by block.

    Args:
        grid: Number of blocks along one to three axes.
        kernel: A `@ct.kernel` object.
        args: The kernel's arguments in order: CPU tensors, numbers, tuples and lists of them, and
            constants for the parameters annotated with `ct.Constant`. Integers become int32 and
            floats float32 scalars, as in a launch on a GPU.

    Raises:
        InvalidArgumentError: If an argument of this call or of the kernel cannot be used.
        InterpreterError: If a block did something that is undefined or rejected on a GPU, or that
            the interpreter does not support. The message names kernel, block, operation and
            source line; the cause is chained.
    """
    full_grid = checked_grid(grid)
    if not isinstance(kernel, ct.kernel):
        raise InvalidArgumentError("kernel", "an object made by @ct.kernel", repr(kernel))
    annotated = kernel._annotated_function
    rebinder = Rebinder()
    mode = InterpreterMode(full_grid, rebinder)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        parameters = bind_arguments(annotated, args)
        function = rebinder.rebind(annotated.pyfunc)
        stack.enter_context(mode.as_current())
        for z, y, x in product(*map(range, reversed(full_grid))):
            mode.block = block = (x, y, z)
            try:
                function(*parameters)
            except Exception as error:
                raise block_error(error, function.__name__, block) from error
