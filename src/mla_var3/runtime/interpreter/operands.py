"""Reading the arguments of operations: tiles, indices, shapes and axes, with cuTile's checks."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    TileTypeError,
    is_integral,
    is_shape_broadcastable_to,
    is_signed,
    normalize_axis,
)
from mla_var3.runtime.interpreter.dtypes import Number, implicit_cast
from mla_var3.runtime.interpreter.values import Array, ForeignPointer, Tile, describe, number_tile

MAX_TILE_ELEMENTS = 1 << 24


def as_tile(value: Any) -> Tile:
    """A tile operand; a Python number becomes a scalar of the dtype cuTile gives it."""
    if isinstance(value, Tile):
        if isinstance(value, ForeignPointer):
            raise TileTypeError("a foreign pointer supports no tile operation")
        return value
    if isinstance(value, bool | int | float):
        return number_tile(value)
    raise TileTypeError(f"expected a tile, got {describe(value)}")


def as_array(value: Any) -> Array:
    """An array operand."""
    if not isinstance(value, Array):
        raise TileTypeError(f"expected an array, got {describe(value)}")
    return value


def loose_type(value: Tile | Number) -> DType | Number:
    """What promotion looks at: a tile's dtype, or a Python number itself."""
    return value.element if isinstance(value, Tile) else value


def implicit(value: Any, target: DType) -> torch.Tensor:
    """The elements of an operand after the implicit cast to `target`."""
    tile = as_tile(value)
    return implicit_cast(loose_type(value), tile.tensor, target)


def broadcast(tensor: torch.Tensor, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """`tensor` expanded to `shape`, which must not need more axes than `shape` has."""
    if not is_shape_broadcastable_to(tensor.shape, shape):
        raise TileTypeError(f"{what} of shape {tuple(tensor.shape)} does not broadcast to {shape}")
    return tensor.expand(shape)


def items_of(value: Any) -> tuple[Any, ...]:
    """The items of a tuple argument; anything else counts as a tuple of one."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def static_int(value: Any, what: str) -> int:
    """An integer that cuTile wants to be a compile-time constant."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TileTypeError(f"{what} must be an integer, got {describe(value)}")
    return int(value.__index__())


def static_ints(value: Any, what: str) -> tuple[int, ...]:
    """A tuple of constant integers; a single one counts as a tuple of one."""
    return tuple(static_int(item, what) for item in items_of(value))


def index_value(value: Any) -> int:
    """A signed integer scalar used as an index."""
    if type(value) is int:
        return value
    if isinstance(value, Tile) and is_integral(value.element) and is_signed(value.element):
        return int(value.scalar())
    raise TileTypeError(f"an index must be a signed integer scalar, got {describe(value)}")


def index_tuple(value: Any, rank: int, what: str) -> tuple[int, ...]:
    """The index of a tile or subtile in a space of `rank` axes."""
    index = tuple(index_value(item) for item in items_of(value))
    if len(index) != rank:
        raise TileTypeError(f"index {index} does not match the rank {rank} of {what}")
    return index


def tile_shape(value: Any, rank: int | None = None, zero_d: bool = False) -> tuple[int, ...]:
    """The shape of a tile to be made.

    Args:
        value: The shape argument; a single integer stands for one axis.
        rank: Number of axes wanted, if that is fixed.
        zero_d: Whether `()` is accepted whatever the rank.

    Raises:
        TileTypeError: If the rank is wrong, a size is not a power of two, or the tile is larger
            than the compiler accepts.
    """
    shape = static_ints(value, "a tile size")
    if rank is not None and len(shape) != rank and not (zero_d and not shape):
        raise TileTypeError(f"tile shape {shape} does not match the rank {rank}")
    for size in shape:
        if size <= 0 or size & (size - 1):
            raise TileTypeError(f"tile shape {shape}: {size} is not a power of two")
    if prod(shape) > MAX_TILE_ELEMENTS:
        raise TileTypeError(f"tile shape {shape} has more than {MAX_TILE_ELEMENTS} elements")
    return shape


def axis_of(value: Any, rank: int) -> int:
    """A constant axis number as a non-negative integer."""
    axis: int = normalize_axis(static_int(value, "an axis"), rank)
    return axis


def axes_of(value: Any, rank: int, what: str) -> tuple[int, ...]:
    """Constant axis numbers, each at most once."""
    axes = tuple(axis_of(item, rank) for item in items_of(value))
    if len(set(axes)) != len(axes):
        raise TileTypeError(f"{what} {axes} names an axis twice")
    return axes
