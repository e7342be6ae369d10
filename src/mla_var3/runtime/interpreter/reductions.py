"""Matrix products, reductions, and the positions of extrema.

A GPU multiplies in the input dtype and accumulates in that of the accumulator. Here both use
float32 (float64 for float64 and integer inputs, which is exact for integers), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import check_modes, flush_subnormals
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    RoundingMode,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import cast, promoted, torch_dtype
from mla_var3.runtime.interpreter.values import Tile, as_tile, axes_of, axis_of, describe


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
