"""Tile-shaped access to arrays: load, store, slices and tiled views.

A load always copies: a later store of the kernel must not change a tile that was loaded before.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import PaddingMode, TileTypeError, ct, implements
from mla_var3.runtime.interpreter.dtypes import padding
from mla_var3.runtime.interpreter.values import (
    Array,
    Tile,
    TiledView,
    as_array,
    axes_of,
    axis_of,
    broadcast,
    implicit,
    index_tuple,
    index_value,
    static_ints,
    tile_shape,
)

_tile_shape = tile_shape  # hidden by a parameter of that name below

_UNDETERMINED = ct.PaddingMode.UNDETERMINED


def window(
    tensor: torch.Tensor, name: str, start: tuple[int, ...], shape: tuple[int, ...], checked: bool
) -> tuple[torch.Tensor, tuple[slice, ...] | None]:
    """The part of an array that the tile of `shape` at element `start` covers, as a view.

    Also the part of the tile that lies inside the array, as slices; None for all of it. `checked`
    is False where the kernel states that the tile is inside (check_bounds=False).
    """
    strides = tensor.stride()
    offset = tensor.storage_offset()
    sizes = []
    inside = []
    for axis, (first, size, extent) in enumerate(zip(start, shape, tensor.shape, strict=True)):
        low, high = max(first, 0), min(first + size, extent)
        if low >= high:
            raise InterpreterError(
                f"tile of shape {shape} at element {start} lies wholly outside array {name} of "
                f"shape {tuple(tensor.shape)} along axis {axis}: undefined behaviour"
            )
        offset += low * strides[axis]
        sizes.append(high - low)
        inside.append(slice(low - first, high - first))
    whole = tuple(sizes) == shape
    if not whole and not checked:
        raise InterpreterError(
            f"check_bounds=False, but the tile of shape {shape} at element {start} is not inside "
            f"array {name} of shape {tuple(tensor.shape)}"
        )
    return tensor.as_strided(sizes, strides, offset), None if whole else tuple(inside)


def _read(
    array: Array,
    tensor: torch.Tensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    padding_mode: PaddingMode,
    checked: bool,
) -> Tile:
    memory, inside = window(tensor, array.name, start, shape or (1,) * tensor.ndim, checked)
    if inside is None:
        elements = memory.clone()
    else:
        elements = padding(array.element, padding_mode).repeat(shape or (1,) * tensor.ndim)
        elements[inside] = memory
    return Tile(elements if shape else elements.reshape(()), array.element)


def _write(
    array: Array, tensor: torch.Tensor, start: tuple[int, ...], value: torch.Tensor, checked: bool
) -> None:
    memory, inside = window(tensor, array.name, start, tuple(value.shape), checked)
    memory.copy_(value if inside is None else value[inside])


def _in_order(array: Array, order: Any) -> torch.Tensor:
    """The array with its axes permuted as the `order` argument says."""
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise TileTypeError(f"order must be 'C', 'F' or a permutation, got {order!r}")
        return array.tensor if order == "C" else array.tensor.permute(*reversed(range(array.ndim)))
    axes = axes_of(order, array.ndim, "order")
    if len(axes) != array.ndim:
        raise TileTypeError(f"order {axes} does not match the rank {array.ndim} of {array.name}")
    return array.tensor.permute(axes)


def check_hints(latency: int | None = None, allow_tma: bool | None = None) -> None:
    """Refuses hints that cuTile refuses; they have no effect here."""
    api.check_load_store_hints(latency, allow_tma)


def _origin(index: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(position * step for position, step in zip(index, steps, strict=True))


def _position(
    array: Any,
    index: Any,
    operation: Any,
    memory_order: Any = ct.MemoryOrder.WEAK,
    memory_scope: Any = ct.MemoryScope.NONE,
    **hints: Any,
) -> tuple[int, ...]:
    """The index of a tile in an array, after cuTile's checks of the other options."""
    check_hints(**hints)
    api.validate_memory_order_and_scope(memory_order, memory_scope, operation)
    return index_tuple(index, as_array(array).ndim, f"array {array.name}")


@implements(ct.load)
def _load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: PaddingMode = _UNDETERMINED,
    check_bounds: bool = True,
    **options: Any,
) -> Tile:
    position = _position(array, index, api.TileLoad, **options)
    sizes = tile_shape(shape, array.ndim, zero_d=True)
    start = _origin(position, sizes or (1,) * array.ndim)
    return _read(array, _in_order(array, order), start, sizes, padding_mode, check_bounds)


@implements(ct.store)
def _store(
    array: Any, /, index: Any, tile: Any, *, order: Any = "C", check_bounds: bool = True,
    **options: Any,
) -> None:  # fmt: skip
    position = _position(array, index, api.TileStore, **options)
    value = implicit(tile, array.element)
    if value.ndim == 0:
        value = value.reshape((1,) * array.ndim)
    if value.ndim != array.ndim:
        raise TileTypeError(
            f"cannot store a tile of shape {tuple(value.shape)} to array {array.name} of rank "
            f"{array.ndim}"
        )
    start = _origin(position, tuple(value.shape))
    _write(array, _in_order(array, order), start, value, check_bounds)


@implements(ct.num_tiles)
def _num_tiles(array: Any, /, axis: Any, shape: Any, order: Any = "C") -> Tile:
    array = as_array(array)
    sizes = tile_shape(shape, array.ndim, zero_d=True) or (1,) * array.ndim
    axis = axis_of(axis, array.ndim)
    return _count(_in_order(array, order).shape[axis], sizes[axis])


def _count(extent: int, step: int) -> Tile:
    return Tile.of_integer(-(-extent // step), ct.int32)


@implements(ct.Array.slice)
def _slice(array: Array, axis: Any, start: Any, stop: Any) -> Array:
    axis = axis_of(axis, array.ndim)
    first, last = index_value(start), index_value(stop)
    extent = array.tensor.shape[axis]
    if not (0 <= first < extent and first <= last <= extent):
        raise InterpreterError(
            f"slice [{first}:{last}] of array {array.name} along axis {axis}: expected "
            f"0 <= start < {extent} and start <= stop <= {extent}"
        )
    part = array.tensor.narrow(axis, first, last - first)
    return array.replace(part, f"{array.name}.slice({axis}, {first}, {last})", axis)


@implements(ct.Array.tiled_view)
def _tiled_view(
    array: Array,
    tile_shape: Any,
    *,
    padding_mode: PaddingMode = _UNDETERMINED,
    traversal_steps: Any = None,
) -> TiledView:
    sizes = _tile_shape(tile_shape, array.ndim, zero_d=True)
    if traversal_steps is None:
        steps = sizes or (1,) * array.ndim
    else:
        steps = static_ints(traversal_steps, "a traversal step")
        if len(steps) != array.ndim or min(steps, default=1) <= 0:
            raise TileTypeError(f"traversal_steps: expected {array.ndim} steps > 0, got {steps}")
    return TiledView(array, sizes, padding_mode, steps)


@implements(ct.TiledView.num_tiles)
def _view_num_tiles(view: TiledView, axis: Any) -> Tile:
    axis = axis_of(axis, view.array.ndim)
    return _count(view.array.tensor.shape[axis], view.traversal_steps[axis])


def _view_origin(view: TiledView, index: Any) -> tuple[int, ...]:
    """Element position of the tile at `index` of a tiled view."""
    position = index_tuple(index, view.array.ndim, f"the view of array {view.array.name}")
    return _origin(position, view.traversal_steps)


@implements(ct.TiledView.load)
def _view_load(view: TiledView, index: Any, *, check_bounds: bool = True, **hints: Any) -> Tile:
    check_hints(**hints)
    array, start = view.array, _view_origin(view, index)
    return _read(array, array.tensor, start, view.tile_shape, view.padding_mode, check_bounds)


@implements(ct.TiledView.store)
def _view_store(
    view: TiledView, index: Any, tile: Any, *, check_bounds: bool = True, **hints: Any
) -> None:
    check_hints(**hints)
    value = broadcast(implicit(tile, view.array.element), view.tile_shape, "stored tile")
    if not view.tile_shape:
        value = value.reshape((1,) * view.array.ndim)
    _write(view.array, view.array.tensor, _view_origin(view, index), value, check_bounds)
