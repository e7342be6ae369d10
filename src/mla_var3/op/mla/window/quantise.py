"""Decompressed keys and values in 8 bits: e4m3 with one scale per token and head.

A row is the key or the value of one token and head. Its scale is the row's largest magnitude over
448, the largest e4m3 number, so every row uses the whole range and an outlier costs only its own
row precision. Scales are float32. The rope part of the keys is shared by the heads, so it is small,
and stays in the problem's dtype.

Where a kernel wants it, scales are rounded up to powers of two. That costs no precision: e4m3
numbers are floating-point numbers, and only those near the least one lose a bit.

An element keeps a relative error of at most 2**-4 down to 2**-6 of the scale, half a unit in the
last of its three mantissa bits; below that the absolute error is at most 2**-10 of the scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.compare import ErrorFigures, compare

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The least scale: a subnormal one would become zero on a GPU that flushes them. It is also the
# scale of a row of zeros, so that no kernel ever divides by zero or needs a branch.
LEAST_SCALE = torch.finfo(torch.float32).tiny
_LEAST_EXPONENT = -60
"""Of a power of two. A kernel takes the scales of all tokens relative to the largest in float32, so
they must not be worlds apart; values below 448 * 2**-60 do not matter to any output."""
_SOURCES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class QuantisedRows:
    """Keys or values in 8 bits.

    Attributes:
        values: float8_e4m3fn, `[..., d]`.
        scales: float32, `[...]`; an element is worth its e4m3 number times its row's scale.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dtype is not E4M3:
            raise InvalidArgumentError("values", E4M3, self.values.dtype)
        if self.scales.dtype is not torch.float32:
            raise InvalidArgumentError("scales", torch.float32, self.scales.dtype)
        if self.scales.shape != self.values.shape[:-1]:
            raise InvalidArgumentError(
                "scales", list(self.values.shape[:-1]), list(self.scales.shape)
            )

    @property
    def nbytes(self) -> int:
        """Memory of both tensors."""
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class FormErrors:
    """Where the error of a kernel on an 8-bit window comes from.

    Attributes:
        kernel: The output against the float32 attention on the same 8-bit window: what the kernel
            itself gets wrong, to be bounded like that of any other kernel.
        form: That attention against the one on unrounded keys and values: what the 8-bit form
            costs, whatever kernel reads it.
        total: The output against the attention on unrounded keys and values.
    """

    kernel: ErrorFigures
    form: ErrorFigures
    total: ErrorFigures


def quantise(rows: torch.Tensor, *, powers_of_two: bool = False) -> QuantisedRows:
    """Rounds rows `[..., d]` of a 16- to 64-bit float to 8 bits, each with its own scale.

    A row with a NaN or an infinity has no scale and becomes NaN throughout: a slot without a token
    stays poisoned, and an overflow is not hidden. With `powers_of_two` scales are rounded up to
    powers of two, from 2**-60 on.
    """
    if rows.dtype not in _SOURCES:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SOURCES)
        raise InvalidArgumentError("rows", f"one of the dtypes {expected}", rows.dtype)
    if rows.dim() < 1 or rows.shape[-1] == 0:
        raise InvalidArgumentError("rows", "[..., d] with d > 0", list(rows.shape))
    wide = torch.float64 if rows.dtype is torch.float64 else torch.float32
    peaks = rows.abs().amax(-1).to(wide)
    # clamp keeps NaN, and turns a peak of zero into the least scale.
    scales = (peaks / E4M3_MAX).float().clamp(min=LEAST_SCALE)
    usable = peaks.isfinite() & scales.isfinite()
    if powers_of_two:
        mantissas, exponents = torch.frexp(scales)  # a mantissa is at least 0.5
        exponents = torch.where(mantissas == 0.5, exponents - 1, exponents)
        scales = torch.ldexp(torch.ones_like(scales), exponents.clamp(min=_LEAST_EXPONENT))
    scales = torch.where(usable & scales.isfinite(), scales, torch.nan)
    # Never beyond 448 by more than the rounding of the scale, which e4m3 rounds back to 448.
    return QuantisedRows((rows / scales.to(wide)[..., None]).to(E4M3), scales)


def dequantise(rows: QuantisedRows, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What quantised rows are worth, `[..., d]` in a dtype.

    The product is computed in float32, or in float64, where it is exact.
    """
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return (rows.values.to(wide) * rows.scales.to(wide)[..., None]).to(dtype)


def form_errors(out: torch.Tensor, on_form: torch.Tensor, unrounded: torch.Tensor) -> FormErrors:
    """Separates a kernel's error from that of the 8-bit form, by outputs of `reference_mix`.

    `on_form` is that on what the 8-bit window is worth, `unrounded` the one before rounding.
    """
    return FormErrors(
        kernel=compare(out, on_form),
        form=compare(on_form, unrounded),
        total=compare(out, unrounded),
    )
