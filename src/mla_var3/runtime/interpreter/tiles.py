"""Operations on whole tiles: creation, shapes, dtypes, matrix products and reductions.

A GPU multiplies in the input dtype and accumulates in that of the accumulator. Here both use
float32 (float64 for float64 and integer inputs, which is exact for integers), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import binary
from mla_var3.runtime.interpreter.cutile_api import TileTypeError, ct, implement, implements
from mla_var3.runtime.interpreter.dtypes import as_dtype, cast, constant, torch_dtype
from mla_var3.runtime.interpreter.values import (
    Tile,
    as_tile,
    axes_of,
    describe,
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


@implements(ct.astype)
def _astype(x: Any, dtype: Any, /) -> Tile:
    element = as_dtype(dtype)
    if isinstance(x, bool | int | float):
        return Tile(constant(x, element), element)
    tile = as_tile(x)
    if tile.integer is not None and api.is_integral(element):
        return Tile.of_integer(int(constant(tile.integer, element).item()), element)
    return Tile(cast(tile.tensor, tile.element, element), element)


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


@implements(ct.permute)
def _permute(x: Any, /, axes: Any) -> Tile:
    tile = as_tile(x)
    order = axes_of(axes, tile.ndim, "permutation")
    if len(order) != tile.ndim:
        raise TileTypeError(f"permutation {order} does not match {describe(tile)}")
    return Tile(tile.tensor.permute(order), tile.element)


# --- products and reductions ---


def _accumulate(x: torch.Tensor, y: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    if x.ndim == 2 and y.ndim == 2 and x.dtype == acc.dtype:
        return torch.addmm(acc, x, y)
    return _narrow(torch.matmul(x, y) + acc.to(x.dtype), acc.dtype)


def _narrow(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Integers wrap around on overflow; a direct conversion from float would not.
    return (product if dtype.is_floating_point else product.to(torch.int64)).to(dtype)


def _check_shapes(x: Tile, y: Tile, acc: Tile) -> None:
    for name, tile in (("x", x), ("y", y)):
        if tile.ndim < 2:
            raise TileTypeError(f"{name} must have 2 axes or more, got {describe(tile)}")
    _, _, _, shape = api.matmul_shapes(x.shape, y.shape)
    if acc.shape != shape:
        raise TileTypeError(f"the accumulator must have shape {shape}, got {acc.shape}")


@implements(ct.mma)
def _mma(x: Any, y: Any, /, acc: Any) -> Tile:
    x, y, acc = as_tile(x), as_tile(y), as_tile(acc)
    _check_shapes(x, y, acc)
    api.resolve_mma_dtype(x.element, y.element, acc.element)
    return Tile(_accumulate(x.widened, y.widened, acc.tensor), acc.element)


def _extremum(
    reduce: Callable[..., torch.Tensor], tensor: torch.Tensor, axes: tuple[int, ...], keepdim: bool
) -> torch.Tensor:
    result = reduce(tensor, axes, keepdim=keepdim)
    # torch propagates NaN; looking for it in the small result spares a pass over the operand.
    if not tensor.is_floating_point() or not bool(torch.isnan(result).any()):
        return result
    worst = -math.inf if reduce is torch.amax else math.inf
    return reduce(tensor.masked_fill(torch.isnan(tensor), worst), axes, keepdim=keepdim)


def _reduce(name: str, x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Tile:
    tile = as_tile(x)
    if not api.is_arithmetic(tile.element):
        raise TileTypeError(f"{name} is not defined for dtype {tile.element}")
    if api.is_boolean(tile.element):
        tile = Tile(tile.tensor.to(torch.int32), ct.int32)
    rank, tensor, dtype = tile.ndim, tile.tensor, tile.element
    axes = tuple(range(rank)) if axis is None else axes_of(axis, rank, "the reduction axis")
    if not axes:
        return tile
    if name == "sum":
        return Tile(tensor.sum(axes, keepdim=keepdims, dtype=tensor.dtype), dtype)
    reduce = torch.amax if name == "max" else torch.amin
    return Tile(_extremum(reduce, tensor, axes, keepdims), dtype)


for _stub in (ct.sum, ct.max, ct.min):
    implement(_stub, partial(_reduce, _stub.__name__))
