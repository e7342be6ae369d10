"""How far an output is from its reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mla_var3.errors import InvalidArgumentError

# Elements compared at a time; a few float64 temporaries of 128 MiB each.
_COMPARE_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class ErrorFigures:
    """How far an output is from its reference.

    A NaN anywhere makes both error figures NaN and a mismatched infinity makes them infinite, so
    that a plain `<=` against a bound can never pass by accident.

    Attributes:
        relative_frobenius: `||out - ref|| / ||ref||` over all elements.
        max_abs: Largest absolute difference.
        nan_count: NaN elements of the output.
        mismatched_inf: Elements that are infinite in one of the two and not equal in the other.
    """

    relative_frobenius: float
    max_abs: float
    nan_count: int
    mismatched_inf: int


def compare(out: torch.Tensor, ref: torch.Tensor) -> ErrorFigures:
    """Compares an output with its reference, of the same shape, in float64.

    Infinities that are equal in both (rows without a key have an LSE of -inf) count as
    equal and stay out of the norms.
    """
    if out.shape != ref.shape:
        raise InvalidArgumentError("out", f"the shape of ref {list(ref.shape)}", list(out.shape))
    flat_out, flat_ref = out.detach().reshape(-1), ref.detach().reshape(-1)
    squared_error = squared_norm = max_abs = 0.0
    nan_count = mismatched = 0
    any_nan = False
    for start in range(0, flat_out.numel(), _COMPARE_ELEMENTS):
        chunk = slice(start, start + _COMPARE_ELEMENTS)
        x, y = flat_out[chunk].double(), flat_ref[chunk].to(out.device).double()
        x_nan, y_nan = x.isnan(), y.isnan()
        nan_count += int(x_nan.sum())
        any_nan = any_nan or bool(x_nan.any() | y_nan.any())
        infinite = (x.isinf() | y.isinf()) & ~x_nan & ~y_nan
        mismatched += int((infinite & (x != y)).sum())
        finite = ~(infinite | x_nan | y_nan)
        error = torch.where(finite, x - y, 0.0)
        squared_error += float(error.square().sum())
        squared_norm += float(torch.where(finite, y, 0.0).square().sum())
        max_abs = max(max_abs, float(error.abs().max()))
    if any_nan:
        return ErrorFigures(math.nan, math.nan, nan_count, mismatched)
    if mismatched:
        return ErrorFigures(math.inf, math.inf, nan_count, mismatched)
    if squared_norm == 0.0:
        relative = 0.0 if squared_error == 0.0 else math.inf
    else:
        relative = math.sqrt(squared_error / squared_norm)
    return ErrorFigures(relative, max_abs, nan_count, mismatched)
