"""Making tiles, changing their shape or dtype, taking them apart and concatenating them."""

from __future__ import annotations

import math
from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter.arithmetic import binary
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    RoundingMode,
    TileTypeError,
    ct,
    implement,
    implements,
    is_integral,
)
from mla_var3.runtime.interpreter.dtypes import as_dtype, cast, constant, torch_dtype
from mla_var3.runtime.interpreter.values import (
    Tile,
    as_tile,
    axes_of,
    axis_of,
    broadcast,
    describe,
    index_tuple,
    items_of,
    static_int,
    static_ints,
    tile_shape,
)


@implements(ct.full)
def _full(shape: Any, fill_value: Any, dtype: Any) -> Tile:
    element = as_dtype(dtype)
    if isinstance(fill_value, bool | int | float):
        value = constant(fill_value, element)
    else:
        tile = as_tile(fill_value)
        if tile.ndim:
            raise TileTypeError(f"the fill value must be a scalar, got {describe(tile)}")
        value = cast(tile.tensor, tile.element, element)
    return Tile(value.expand(tile_shape(shape)), element)


for _stub, _fill in {ct.zeros: 0, ct.ones: 1}.items():
    implement(_stub, lambda shape, dtype, fill=_fill: _full(shape, fill, dtype))


@implements(ct.arange)
def _arange(size: Any, /, *, dtype: Any, start: Any = 0, step: Any = 1) -> Tile:
    element = as_dtype(dtype)
    counter = torch.arange(*tile_shape(static_int(size, "the size"))).to(torch_dtype(element))
    result = Tile(counter, element)
    if not (isinstance(step, int) and step == 1):
        result = binary("mul", result, _astype(step, element))
    if not (isinstance(start, int) and start == 0):
        result = binary("add", result, _astype(start, element))
    return result


def _nested_shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple):
        if as_tile(value).ndim:
            raise TileTypeError(f"expected scalars, got {describe(value)}")
        return ()
    shapes = {_nested_shape(item) for item in value}
    if len(shapes) != 1:
        raise TileTypeError(f"expected a nested tuple of uniform shape, got {value!r}")
    return (len(value), *shapes.pop())


def _flatten(value: Any) -> list[Any]:
    if not isinstance(value, tuple):
        return [value]
    return [leaf for item in value for leaf in _flatten(item)]


@implements(ct.astile)
def _astile(value: Any, /, *, dtype: Any) -> Tile:
    element = as_dtype(dtype)
    shape = tile_shape(_nested_shape(value))
    leaves = [_astype(leaf, element).tensor for leaf in _flatten(value)]
    return Tile(torch.stack(leaves).reshape(shape), element)


@implements(ct.astype)
def _astype(x: Any, dtype: Any, /, *, rounding_mode: RoundingMode | None = None) -> Tile:
    element = as_dtype(dtype)
    if isinstance(x, bool | int | float) and rounding_mode in (None, ct.RoundingMode.RN):
        return Tile(constant(x, element), element)
    tile = as_tile(x)
    if tile.integer is not None and is_integral(element) and rounding_mode is None:
        return _integer_scalar(tile.integer, element)
    return Tile(cast(tile.tensor, tile.element, element, rounding_mode), element)


def _integer_scalar(value: int, element: DType) -> Tile:
    return Tile.of_integer(int(constant(value, element).item()), element)


@implements(ct.bitcast)
def _bitcast(x: Any, /, dtype: Any) -> Tile:
    tile, element = as_tile(x), as_dtype(dtype)
    if ct.bool_ in (tile.element, element) or tile.element.bitwidth != element.bitwidth:
        raise TileTypeError(f"cannot bitcast from {tile.element} to {element}")
    return Tile(tile.tensor.contiguous().view(torch_dtype(element)), element)


@implements(ct.reshape)
def _reshape(x: Any, /, shape: Any) -> Tile:
    tile = as_tile(x)
    sizes = static_ints(shape, "a size")
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or not known or tile.tensor.numel() % known:
        raise TileTypeError(f"cannot reshape {tile.shape} to {sizes}")
    inferred = tuple(tile.tensor.numel() // known if size == -1 else size for size in sizes)
    if math.prod(inferred) != tile.tensor.numel():
        raise TileTypeError(f"cannot reshape {tile.shape} to {sizes}")
    return Tile(tile.tensor.reshape(tile_shape(inferred)), tile.element)


@implements(ct.Tile.item)
def _item(tile: Tile) -> Tile:
    return _reshape(tile, ())


@implements(ct.expand_dims)
def _expand_dims(x: Any, /, axis: Any) -> Tile:
    tile = as_tile(x)
    return Tile(tile.tensor.unsqueeze(axis_of(axis, tile.ndim + 1)), tile.element)


@implements(ct.broadcast_to)
def _broadcast_to(x: Any, /, shape: Any) -> Tile:
    tile = as_tile(x)
    return Tile(broadcast(tile.tensor, tile_shape(shape), "a tile"), tile.element)


@implements(ct.permute)
def _permute(x: Any, /, axes: Any) -> Tile:
    tile = as_tile(x)
    order = axes_of(axes, tile.ndim, "permutation")
    if len(order) != tile.ndim:
        raise TileTypeError(f"permutation {order} does not match {describe(tile)}")
    return Tile(tile.tensor.permute(order), tile.element)


@implements(ct.transpose)
def _transpose(x: Any, /, axis0: Any = None, axis1: Any = None) -> Tile:
    tile = as_tile(x)
    if (axis0 is None) != (axis1 is None):
        raise TileTypeError(f"expected both axes or none, got {axis0!r} and {axis1!r}")
    if tile.ndim < 2 or (axis0 is None and tile.ndim != 2):
        raise TileTypeError(f"cannot transpose {describe(tile)} without axes")
    first, second = (0, 1) if axis0 is None else axes_of((axis0, axis1), tile.ndim, "axes")
    return Tile(tile.tensor.transpose(first, second), tile.element)


@implements(ct.cat)
def _cat(tiles: Any, /, axis: Any) -> Tile:
    parts = [as_tile(tile) for tile in items_of(tiles)]
    if not 1 <= len(parts) <= 2:
        raise TileTypeError(f"cat needs one or two tiles, got {len(parts)}")
    first = parts[0]
    along = axis_of(axis, first.ndim)
    for part in parts[1:]:
        if part.element != first.element or part.ndim != first.ndim:
            raise TileTypeError(f"cannot join {describe(first)} and {describe(part)}")
    joined = torch.cat([part.tensor for part in parts], along)
    tile_shape(tuple(joined.shape))
    return Tile(joined, first.element)


def _subtile(tile: Tile, index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Where the subtile of `shape` at `index` of the grid of subtiles lies."""
    position = index_tuple(index, tile.ndim, describe(tile))
    slices = []
    for place, size, extent in zip(position, shape, tile.shape, strict=True):
        count, rest = divmod(extent, size)
        if rest:
            raise TileTypeError(f"{describe(tile)} is not divisible into subtiles of {shape}")
        if not 0 <= place < count:
            raise InterpreterError(
                f"subtile index {position} is outside {describe(tile)} in subtiles of {shape}"
            )
        slices.append(slice(place * size, (place + 1) * size))
    return tuple(slices)


@implements(ct.extract)
def _extract(x: Any, /, index: Any, shape: Any) -> Tile:
    tile = as_tile(x)
    sizes = tile_shape(shape, tile.ndim, zero_d=True)
    part = tile.tensor[_subtile(tile, index, sizes or (1,) * tile.ndim)]
    return Tile(part.reshape(sizes), tile.element)


@implements(ct.insert)
def _insert(x: Any, /, index: Any, value: Any) -> Tile:
    tile, part = as_tile(x), as_tile(value)
    if tile.element != part.element or part.ndim not in (0, tile.ndim):
        raise TileTypeError(f"cannot insert {describe(part)} into {describe(tile)}")
    sizes = part.shape or (1,) * tile.ndim
    result = tile.tensor.clone(memory_format=torch.contiguous_format)
    result[_subtile(tile, index, sizes)] = part.tensor
    return Tile(result, tile.element)
