"""Operations on whole tiles: making them, shapes, dtypes, matrix products, reductions and scans.

A GPU multiplies in the input dtype and accumulates in that of the accumulator. Here both use
float32 (float64 for float64 and integer inputs, which is exact for integers), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import binary, check_modes, flush_subnormals
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    RoundingMode,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import as_dtype, cast, constant, promoted, torch_dtype
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


def _stacked(value: Any, element: DType) -> torch.Tensor:
    """The scalars of a nested tuple as one tensor."""
    if not isinstance(value, tuple):
        if as_tile(value).ndim:
            raise TileTypeError(f"expected scalars, got {describe(value)}")
        return _astype(value, element).tensor
    parts = [_stacked(item, element) for item in value]
    if len({part.shape for part in parts}) != 1:
        raise TileTypeError(f"expected a nested tuple of uniform shape, got {value!r}")
    return torch.stack(parts)


@implements(ct.astile)
def _astile(value: Any, /, *, dtype: Any) -> Tile:
    element = as_dtype(dtype)
    stacked = _stacked(value, element)
    tile_shape(tuple(stacked.shape))
    return Tile(stacked, element)


@implements(ct.astype)
def _astype(x: Any, dtype: Any, /, *, rounding_mode: RoundingMode | None = None) -> Tile:
    element = as_dtype(dtype)
    if isinstance(x, bool | int | float) and rounding_mode in (None, ct.RoundingMode.RN):
        return Tile(constant(x, element), element)
    tile = as_tile(x)
    if tile.integer is not None and api.is_integral(element) and rounding_mode is None:
        return Tile.of_integer(int(constant(tile.integer, element).item()), element)
    return Tile(cast(tile.tensor, tile.element, element, rounding_mode), element)


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
    try:  # what divides a power of two is one
        return Tile(tile.tensor.reshape(sizes), tile.element)
    except RuntimeError:
        raise TileTypeError(f"cannot reshape {tile.shape} to {sizes}") from None


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
def _mma(x: Any, y: Any, /, acc: Any, *, use_fast_acc: bool = False) -> Tile:
    x, y, acc = as_tile(x), as_tile(y), as_tile(acc)
    _check_shapes(x, y, acc)
    if use_fast_acc and x.element not in (ct.float8_e4m3fn, ct.float8_e5m2):
        raise TileTypeError(f"use_fast_acc needs float8 inputs, got {x.element}")
    api.resolve_mma_dtype(x.element, y.element, acc.element)
    return Tile(_accumulate(x.widened, y.widened, acc.tensor), acc.element)


@implements(ct.matmul)
def _matmul(x: Any, y: Any, /) -> Tile:
    x, y = as_tile(x), as_tile(y)
    if not x.ndim or not y.ndim:
        raise TileTypeError(f"matmul needs tiles with axes, got {describe(x)} and {describe(y)}")
    api.matmul_shapes(x.shape, y.shape)
    dtype = promoted(x.element, y.element)
    acc_dtype = api.resolve_mma_dtype(dtype, dtype, None)
    a, b = (Tile(cast(tile.tensor, tile.element, dtype), dtype).widened for tile in (x, y))
    product = torch.matmul(a, b)
    return Tile(cast(_narrow(product, torch_dtype(acc_dtype)), acc_dtype, dtype), dtype)


def _reducible(name: str, x: Any) -> Tile:
    tile = as_tile(x)
    if not api.is_arithmetic(tile.element):
        raise TileTypeError(f"{name} is not defined for dtype {tile.element}")
    return Tile(tile.tensor.to(torch.int32), ct.int32) if api.is_boolean(tile.element) else tile


def _check(name: str, rounding: RoundingMode | None, flush: bool, dtype: DType) -> None:
    if rounding is not None or flush:
        check_modes(name, rounding, flush, dtype)
    if rounding not in (None, ct.RoundingMode.RN):
        raise InterpreterError(f"rounding mode {rounding} is not supported by the CPU interpreter")


def _extremum(
    tensor: torch.Tensor, axes: tuple[int, ...], keepdim: bool, largest: bool, propagate_nan: bool
) -> torch.Tensor:
    reduce = torch.amax if largest else torch.amin
    result = reduce(tensor, axes, keepdim=keepdim)
    # torch propagates NaN; looking for it in the small result spares a pass over the operand.
    if propagate_nan or not tensor.is_floating_point() or not bool(torch.isnan(result).any()):
        return result
    return reduce(_without_nan(tensor, largest), axes, keepdim=keepdim)


def _without_nan(tensor: torch.Tensor, largest: bool) -> torch.Tensor:
    worst = float("-inf") if largest else float("inf")
    return torch.where(torch.isnan(tensor), torch.tensor(worst, dtype=tensor.dtype), tensor)


def _reduce(name: str, tile: Tile, axis: Any, keepdims: bool, propagate_nan: bool) -> Tile:
    rank = tile.ndim
    axes = tuple(range(rank)) if axis is None else axes_of(axis, rank, "the reduction axis")
    tensor, dtype = tile.tensor, tile.element
    if not axes:
        return tile
    if name == "add":
        return Tile(tensor.sum(axes, keepdim=keepdims, dtype=tensor.dtype), dtype)
    if name == "mul":
        for along in sorted(axes, reverse=True):
            tensor = tensor.prod(along, keepdim=keepdims, dtype=tensor.dtype)
        return Tile(tensor, dtype)
    return Tile(_extremum(tensor, axes, keepdims, name == "max", propagate_nan), dtype)


def _register_reduction(stub: Callable[..., Any], name: str) -> None:
    def reduce(
        x: Any,
        /,
        axis: Any = None,
        *,
        keepdims: bool = False,
        rounding_mode: RoundingMode | None = None,
        flush_to_zero: bool = False,
        propagate_nan: bool = False,
    ) -> Tile:
        tile = _reducible(name, x)
        _check(name, rounding_mode, flush_to_zero, tile.element)
        result = _reduce(name, tile, axis, keepdims, propagate_nan)
        return Tile(flush_subnormals(result.tensor), tile.element) if flush_to_zero else result

    implement(stub, reduce)


def _register_position(stub: Callable[..., Any], largest: bool) -> None:
    find = torch.argmax if largest else torch.argmin

    def position(
        x: Any, /, axis: Any = None, *, keepdims: bool = False, propagate_nan: bool = False
    ) -> Tile:
        tile = _reducible(stub.__name__, x)
        tensor = tile.tensor
        rank = tensor.ndim
        if api.is_float(tile.element) and not propagate_nan:
            tensor = _without_nan(tensor, largest)
        along = 0 if axis is None else axis_of(axis, rank)
        if axis is None:
            tensor = tensor.reshape(-1)
        found = find(tensor, along)
        if keepdims:
            found = found.reshape((1,) * rank) if axis is None else found.unsqueeze(along)
        return Tile(found.to(torch.int32), ct.int32)

    implement(stub, position)


for _stub, _name in {ct.sum: "add", ct.prod: "mul", ct.max: "max", ct.min: "min"}.items():
    _register_reduction(_stub, _name)
_register_position(ct.argmax, largest=True)
_register_position(ct.argmin, largest=False)


def _register_scan(stub: Callable[..., Any], run: Callable[..., torch.Tensor]) -> None:
    def scan(
        x: Any,
        /,
        axis: Any = 0,
        *,
        reverse: bool = False,
        rounding_mode: RoundingMode | None = None,
        flush_to_zero: bool = False,
    ) -> Tile:
        tile = _reducible(stub.__name__, x)
        _check("add" if run is torch.cumsum else "mul", rounding_mode, flush_to_zero, tile.element)
        along, tensor = axis_of(axis, tile.ndim), tile.tensor
        if reverse:
            tensor = tensor.flip(along)
        result = run(tensor, along, dtype=tensor.dtype)
        if reverse:
            result = result.flip(along)
        return Tile(flush_subnormals(result) if flush_to_zero else result, tile.element)

    implement(stub, scan)


_register_scan(ct.cumsum, torch.cumsum)
_register_scan(ct.cumprod, torch.cumprod)
