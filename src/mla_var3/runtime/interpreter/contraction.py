"""Matrix products.

A GPU multiplies in the input dtype and accumulates in the accumulator's; here both are done in
float32 (float64 for float64 and integer inputs, which is exact for the latter) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    TileTypeError,
    ct,
    matmul_shapes,
    resolve_mma_dtype,
    resolve_mma_scaled_dtypes,
    scaling_block_sizes,
)
from mla_var3.runtime.interpreter.dtypes import cast, promoted, torch_dtype
from mla_var3.runtime.interpreter.operands import as_tile
from mla_var3.runtime.interpreter.registry import implements
from mla_var3.runtime.interpreter.values import Tile, describe


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
    _, _, _, shape = matmul_shapes(x.shape, y.shape)
    if acc.shape != shape:
        raise TileTypeError(f"the accumulator must have shape {shape}, got {acc.shape}")


@implements(ct.mma)
def _mma(x: Any, y: Any, /, acc: Any, *, use_fast_acc: bool = False) -> Tile:
    x, y, acc = as_tile(x), as_tile(y), as_tile(acc)
    _check_shapes(x, y, acc)
    if use_fast_acc and x.element not in (ct.float8_e4m3fn, ct.float8_e5m2):
        raise TileTypeError(f"use_fast_acc needs float8 inputs, got {x.element}")
    resolve_mma_dtype(x.element, y.element, acc.element)
    return Tile(_accumulate(x.widened, y.widened, acc.tensor), acc.element)


@implements(ct.matmul)
def _matmul(x: Any, y: Any, /) -> Tile:
    x, y = as_tile(x), as_tile(y)
    if not x.ndim or not y.ndim:
        raise TileTypeError(f"matmul needs tiles with axes, got {describe(x)} and {describe(y)}")
    matmul_shapes(x.shape, y.shape)
    dtype = promoted(x.element, y.element)
    acc_dtype = resolve_mma_dtype(dtype, dtype, None)
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
    resolve_mma_scaled_dtypes(x.element, x_scale.element, y.element, y_scale.element, acc.element)
    _check_shapes(x, y, acc)
    product = _accumulate(_scaled(x, x_scale, -1), _scaled(y, y_scale, -2), acc.tensor)
    return Tile(product, acc.element)


def _scaled(tile: Tile, scale: Tile, axis: int) -> torch.Tensor:
    """The tile times its scales, of which each covers a block along `axis`."""
    block, rest = divmod(tile.shape[axis], scale.shape[axis])
    expected = list(tile.shape)
    expected[axis] = scale.shape[axis]
    allowed = scaling_block_sizes(tile.element, scale.element)
    if rest or block not in allowed or scale.shape != tuple(expected):
        raise TileTypeError(
            f"scales of shape {scale.shape} do not fit a tile of shape {tile.shape}: expected one "
            f"per block of {' or '.join(map(str, allowed))} elements along axis {axis}"
        )
    return tile.widened * scale.widened.repeat_interleave(block, dim=axis)
