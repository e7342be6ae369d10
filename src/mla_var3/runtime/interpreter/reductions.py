"""Matrix products, reductions, scans, and the positions of extrema.

A GPU multiplies in the input dtype and accumulates in that of the accumulator. Here both use
float32 (float64 for float64 and integer inputs, which is exact for integers), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import check_modes, flush_subnormals, through_numpy
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    RoundingMode,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import NUMPY_DTYPES, cast, promoted, torch_dtype
from mla_var3.runtime.interpreter.values import (
    Tile,
    as_tile,
    axes_of,
    axis_of,
    describe,
    implicit,
    items_of,
)


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
    product = torch.matmul(_promoted_product_input(x, dtype), _promoted_product_input(y, dtype))
    return Tile(cast(_narrow(product, torch_dtype(acc_dtype)), acc_dtype, dtype), dtype)


def _promoted_product_input(tile: Tile, dtype: DType) -> torch.Tensor:
    if tile.element == dtype:
        return tile.widened
    return Tile(cast(tile.tensor, tile.element, dtype), dtype).widened


@implements(ct.mma_scaled)
def _mma_scaled(x: Any, x_scale: Any, y: Any, y_scale: Any, /, acc: Any) -> Tile:
    x, x_scale, y, y_scale, acc = (as_tile(tile) for tile in (x, x_scale, y, y_scale, acc))
    for name, tile in (("x_scale", x_scale), ("y_scale", y_scale)):
        if tile.ndim not in (2, 3):
            raise TileTypeError(f"{name} must have 2 or 3 axes, got {describe(tile)}")
    api.resolve_mma_scaled_dtypes(
        x.element, x_scale.element, y.element, y_scale.element, acc.element
    )
    _check_shapes(x, y, acc)
    product = _accumulate(_scaled(x, x_scale, -1), _scaled(y, y_scale, -2), acc.tensor)
    return Tile(product, acc.element)


def _scaled(tile: Tile, scale: Tile, axis: int) -> torch.Tensor:
    """The tile times its scales, of which each covers a block along `axis`."""
    block, rest = divmod(tile.shape[axis], scale.shape[axis])
    expected = list(tile.shape)
    expected[axis] = scale.shape[axis]
    allowed = api.scaling_block_sizes(tile.element, scale.element)
    if rest or block not in allowed or scale.shape != tuple(expected):
        raise TileTypeError(
            f"scales of shape {scale.shape} do not fit a tile of shape {tile.shape}: expected one "
            f"per block of {' or '.join(map(str, allowed))} elements along axis {axis}"
        )
    return tile.widened * scale.widened.repeat_interleave(block, dim=axis)


_NEAREST = (None, ct.RoundingMode.RN)


def _reducible(name: str, x: Any) -> Tile:
    tile = as_tile(x)
    if not api.is_arithmetic(tile.element):
        raise TileTypeError(f"{name} is not defined for dtype {tile.element}")
    return Tile(tile.tensor.to(torch.int32), ct.int32) if api.is_boolean(tile.element) else tile


def _check(name: str, rounding: RoundingMode | None, flush: bool, dtype: DType) -> None:
    if rounding is not None or flush:
        check_modes(name, rounding, flush, dtype)
    if rounding not in _NEAREST:
        raise InterpreterError(
            f"a reduction with rounding mode {rounding} is not supported by the CPU interpreter"
        )


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


_ON_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.sum,
    "mul": np.prod,
    "min": np.min,
    "max": np.max,
}


def _reduce(name: str, tile: Tile, axis: Any, keepdims: bool, propagate_nan: bool) -> Tile:
    rank = tile.ndim
    axes = tuple(range(rank)) if axis is None else axes_of(axis, rank, "the reduction axis")
    tensor, dtype = tile.tensor, tile.element
    if not axes:
        return tile
    if dtype in NUMPY_DTYPES:
        options: dict[str, Any] = {"axis": axes, "keepdims": keepdims}
        if name in ("add", "mul"):
            options["dtype"] = tensor.numpy().dtype
        return Tile(through_numpy(_ON_NUMPY[name], tensor, **options), dtype)
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
    find_on_numpy = np.argmax if largest else np.argmin

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
        if tile.element in NUMPY_DTYPES:
            found = through_numpy(find_on_numpy, tensor, axis=along)
        else:
            found = find(tensor, along)
        if keepdims:
            found = found.reshape((1,) * rank) if axis is None else found.unsqueeze(along)
        return Tile(found.to(torch.int32), ct.int32)

    implement(stub, position)


for _stub, _name in {ct.sum: "add", ct.prod: "mul", ct.max: "max", ct.min: "min"}.items():
    _register_reduction(_stub, _name)
_register_position(ct.argmax, largest=True)
_register_position(ct.argmin, largest=False)


def _register_cumulative(stub: Callable[..., Any], name: str) -> None:
    function = torch.cumsum if name == "add" else torch.cumprod
    on_numpy = np.cumsum if name == "add" else np.cumprod

    def cumulative(
        x: Any,
        /,
        axis: Any = 0,
        *,
        reverse: bool = False,
        rounding_mode: RoundingMode | None = None,
        flush_to_zero: bool = False,
    ) -> Tile:
        tile = _reducible(name, x)
        _check(name, rounding_mode, flush_to_zero, tile.element)
        along = axis_of(axis, tile.ndim)
        tensor = tile.tensor.flip(along) if reverse else tile.tensor
        if tile.element in NUMPY_DTYPES:
            dtype = tensor.numpy().dtype
            result = through_numpy(on_numpy, tensor, axis=along, dtype=dtype)
        else:
            result = function(tensor, along, dtype=tensor.dtype)
        result = flush_subnormals(result) if flush_to_zero else result
        return Tile(result.flip(along) if reverse else result, tile.element)

    implement(stub, cumulative)


_register_cumulative(ct.cumsum, "add")
_register_cumulative(ct.cumprod, "mul")


class _Fold:
    """The operands and the function of a custom reduction or scan."""

    def __init__(self, x: Any, axis: Any, function: Callable[..., Any], identity: Any) -> None:
        self.is_tuple = isinstance(x, tuple)
        tiles = [as_tile(item) for item in items_of(x)]
        if not tiles or len(items_of(identity)) != len(tiles):
            raise TileTypeError(
                f"got {len(items_of(identity))} identity values for {len(tiles)} tiles"
            )
        tensors = torch.broadcast_tensors(*(tile.tensor for tile in tiles))
        self.dtypes = [tile.element for tile in tiles]
        self.axis = axis_of(axis, tensors[0].ndim)
        self.operands = list(tensors)
        self._function = function

    def combine(self, left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        """Combines two groups of values; the function sees all positions at once as tiles."""
        pairs = list(zip(left + right, self.dtypes * 2, strict=True))
        result = self._function(*(Tile(tensor, dtype) for tensor, dtype in pairs))
        values = items_of(result)
        if isinstance(result, tuple) != self.is_tuple or len(values) != len(self.dtypes):
            raise TileTypeError(
                f"the combining function must return {len(self.dtypes)} values, "
                f"got {describe(result)}"
            )
        return [
            implicit(value, dtype).expand(tensor.shape)
            for value, dtype, tensor in zip(values, self.dtypes, left, strict=True)
        ]

    def result(self, tensors: list[torch.Tensor]) -> Any:
        """The tiles to return, in the form in which the operands came."""
        tiles = tuple(Tile(t, dtype) for t, dtype in zip(tensors, self.dtypes, strict=True))
        return tiles if self.is_tuple else tiles[0]


@implements(ct.reduce)
def _custom_reduce(
    x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, keepdims: bool = False
) -> Any:
    fold = _Fold(x, axis, func, identity)
    along, values = fold.axis, fold.operands
    # Neighbours first: the function need not be commutative, and a tree takes few calls.
    while values[0].shape[along] > 1:
        pairs = [value.unflatten(along, (-1, 2)).unbind(along + 1) for value in values]
        values = fold.combine([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return fold.result(values if keepdims else [value.squeeze(along) for value in values])


@implements(ct.scan)
def _custom_scan(
    x: Any, /, axis: Any, func: Callable[..., Any], identity: Any, *, reverse: bool = False
) -> Any:
    fold = _Fold(x, axis, func, identity)
    along = fold.axis
    columns = list(zip(*(value.unbind(along) for value in fold.operands), strict=True))
    if reverse:
        columns.reverse()
    prefixes = [list(columns[0])]
    for column in columns[1:]:
        prefixes.append(fold.combine(prefixes[-1], list(column)))
    if reverse:
        prefixes.reverse()
    return fold.result([torch.stack(parts, along) for parts in zip(*prefixes, strict=True)])
