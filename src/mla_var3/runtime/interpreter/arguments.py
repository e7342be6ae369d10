"""Checking what a launch is given and turning it into what kernel code sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    HeterogeneousTupleNode,
    HomogeneousTupleNode,
    ct,
    integer_dtype_max,
    integer_dtype_min,
)
from mla_var3.runtime.interpreter.dispatch import BlockId
from mla_var3.runtime.interpreter.dtypes import constant, cutile_dtype
from mla_var3.runtime.interpreter.values import Array, ArrayList, Tile

_MAX_GRID_RANK = 3


def checked_grid(grid: Any) -> BlockId:
    """The grid with three sizes.

    Raises:
        InvalidArgumentError: If it does not have one to three sizes, all of them positive integers.
    """
    expected = "one to three positive integers"
    if not isinstance(grid, Sequence) or not 1 <= len(grid) <= _MAX_GRID_RANK:
        raise InvalidArgumentError("grid", expected, repr(grid))
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in grid):
        raise InvalidArgumentError("grid", expected, repr(grid))
    x, y, z = (*grid, 1, 1)[:_MAX_GRID_RANK]
    return x, y, z


def checked_kernel(kernel: Any) -> Any:
    """The kernel, if it is one."""
    if not isinstance(kernel, ct.kernel):
        raise InvalidArgumentError("kernel", "an object made by @ct.kernel", repr(kernel))
    return kernel


def chosen_blocks(grid: BlockId, blocks: Iterable[Any] | None) -> Iterator[BlockId]:
    """The ids of the blocks to run, x fastest; all of the grid unless `blocks` names some.

    Raises:
        InvalidArgumentError: If a block is not in the grid.
    """
    if blocks is None:
        for z, y, x in product(*map(range, reversed(grid))):
            yield x, y, z
        return
    for block in blocks:
        sizes = block if isinstance(block, Sequence) else (block,)
        valid = 1 <= len(sizes) <= _MAX_GRID_RANK and all(isinstance(i, int) for i in sizes)
        x, y, z = (*sizes, 0, 0)[:_MAX_GRID_RANK] if valid else (-1, -1, -1)
        if not all(0 <= i < size for i, size in zip((x, y, z), grid, strict=True)):
            raise InvalidArgumentError("blocks", f"block ids in the grid {grid}", repr(block))
        yield x, y, z


def bind_arguments(annotated_function: Any, args: Sequence[Any]) -> list[Any]:
    """What the kernel's function is called with.

    Args:
        annotated_function: cuTile's description of the kernel's function.
        args: The arguments of the launch.

    Raises:
        InvalidArgumentError: If the number of arguments is wrong or one cannot be passed.
    """
    names = list(annotated_function.pysig.parameters)
    if len(args) != len(names):
        raise InvalidArgumentError(
            "args", f"{len(names)} arguments ({', '.join(names)})", f"{len(args)}"
        )
    triples = zip(names, args, annotated_function.parameter_annotations, strict=True)
    return [_bind(name, value, annotation) for name, value, annotation in triples]


def _bind(name: str, value: Any, annotation: Any) -> Any:
    if isinstance(annotation, HomogeneousTupleNode | HeterogeneousTupleNode):
        if not isinstance(value, tuple):
            raise InvalidArgumentError(name, "a tuple", _got(value))
        if isinstance(annotation, HomogeneousTupleNode):
            nodes = (annotation.each,) * len(value)
        else:
            nodes = annotation.items
        if len(nodes) != len(value):
            raise InvalidArgumentError(name, f"a tuple of {len(nodes)}", f"a tuple of {len(value)}")
        return _bind_items(name, value, nodes)
    if isinstance(value, tuple):
        return _bind_items(name, value, (annotation,) * len(value))
    if annotation.constant:
        if not isinstance(value, bool | int | float):
            raise InvalidArgumentError(name, "a constant: bool, int or float", _got(value))
        return value
    if isinstance(value, list):
        element = None if annotation.list is None else annotation.list.element
        return ArrayList(
            [_bind_tensor(f"{name}[{i}]", item, element) for i, item in enumerate(value)]
        )
    if isinstance(value, torch.Tensor):
        return _bind_tensor(name, value, annotation.array)
    return _bind_scalar(name, value, ct.int32 if annotation.scalar is None else ct.int64)


def _bind_items(name: str, values: tuple[Any, ...], nodes: Sequence[Any]) -> tuple[Any, ...]:
    pairs = enumerate(zip(values, nodes, strict=True))
    return tuple(_bind(f"{name}[{i}]", value, node) for i, (value, node) in pairs)


def _bind_scalar(name: str, value: Any, integer_dtype: DType) -> Tile:
    if isinstance(value, bool):
        return Tile.of_integer(value, ct.bool_)
    if isinstance(value, int):
        low, high = integer_dtype_min(integer_dtype), integer_dtype_max(integer_dtype)
        if not low <= value <= high:
            raise InvalidArgumentError(name, f"an integer that fits {integer_dtype}", value)
        return Tile.of_integer(value, integer_dtype)
    if isinstance(value, float):
        return Tile(constant(value, ct.float32), ct.float32)
    raise InvalidArgumentError(
        name, "a CPU tensor, a number or a tuple of them (constants need ct.Constant)", _got(value)
    )


def _bind_tensor(name: str, tensor: Any, annotation: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(name, "a CPU tensor", _got(tensor))
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(name, "a tensor on the CPU", f"one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(name, "a strided tensor", f"layout {tensor.layout}")
    element = cutile_dtype(tensor.dtype)
    if element is None:
        raise InvalidArgumentError(name, "a dtype that cuTile has", tensor.dtype)
    index_dtype = ct.int32 if annotation is None else annotation.index_dtype
    largest = max((*tensor.shape, *tensor.stride()), default=0)
    if largest > integer_dtype_max(index_dtype):
        raise InvalidArgumentError(
            name, f"a shape and strides that fit {index_dtype} (see ct.IndexedWithInt64)", largest
        )
    rank = tensor.ndim
    static_shape = () if annotation is None else annotation.static_shape_dims
    static_strides = () if annotation is None else annotation.static_stride_dims
    return Array(
        tensor.detach(),
        element,
        name,
        index_dtype,
        frozenset(axis % rank for axis in static_shape),
        frozenset(axis % rank for axis in static_strides),
    )


def _got(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}"
