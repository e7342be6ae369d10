"""Values of element-wise operations and casts."""

from __future__ import annotations

import math
import operator
from typing import Any

import cuda.tile as ct
import numpy as np
import pytest
import torch

from mla_var3.errors import InterpreterError
from tests.unit.runtime.interpreter.interpreter_support import apply, evaluate, values

RZ, RM, RP = ct.RoundingMode.RZ, ct.RoundingMode.RM, ct.RoundingMode.RP
NAN = math.nan


# ---------------------------------------------------------------------------------------- integers


def test_integers_wrap_around() -> None:
    assert values(lambda n: n + 1, 2**31 - 1) == -(2**31)
    assert values(lambda n: n * 3, 2**30) == 3 * 2**30 - 2**32
    assert values(lambda: ct.full((2,), 200, ct.uint8) + 100) == [44, 44]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_signed_division_rounds_down(dtype: torch.dtype) -> None:
    x = torch.tensor([7, -7, 7, -7], dtype=dtype)
    y = torch.tensor([2, 2, -2, -2], dtype=dtype)
    assert apply(operator.floordiv, x, y).tolist() == [3, -4, -4, 3]
    assert apply(operator.mod, x, y).tolist() == [1, 1, -1, -1]
    assert apply(ct.cdiv, x, y).tolist() == [4, -3, -3, 4]
    quotients = [values(lambda a, b: a // b, *p) for p in zip(x.tolist(), y.tolist(), strict=True)]
    assert quotients == [3, -4, -4, 3]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_unsigned_arithmetic(width: int) -> None:
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    top = 2**width
    x = np.array([1, top - 1, top // 2, 9], dtype=dtype)
    y = np.array([2, 3, top - 5, 4], dtype=dtype)
    operations: list[Any] = [
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.and_,
        operator.or_,
        operator.xor,
        operator.lt,
        operator.ge,
        operator.eq,
    ]
    tensors = torch.from_numpy(x), torch.from_numpy(y)
    for operation in operations:
        with np.errstate(over="ignore"):
            assert apply(operation, *tensors).tolist() == operation(x, y).tolist()
    assert apply(ct.maximum, *tensors).tolist() == np.maximum(x, y).tolist()
    pairs = zip(x.tolist(), y.tolist(), strict=True)
    assert apply(ct.cdiv, *tensors).tolist() == [-(-a // b) for a, b in pairs]
    assert apply(lambda a: a >> 1, tensors[0]).tolist() == (x >> dtype(1)).tolist()
    assert apply(lambda a: ~a, tensors[0]).tolist() == (~x).tolist()
    assert apply(lambda a: -a, tensors[0]).tolist() == (-x).tolist()
    assert apply(ct.sum, tensors[0]).item() == int(x.sum(dtype=dtype))
    assert apply(ct.max, tensors[0]).item() == top - 1
    assert apply(ct.argmax, tensors[0]).item() == 1
    assert apply(ct.cumsum, tensors[0]).tolist() == np.cumsum(x, dtype=dtype).tolist()


def test_division_by_zero() -> None:
    for body in (
        lambda n: 4 // n,
        lambda n: n % n,
        lambda n: ct.cdiv(n, n),
        lambda n: ct.full((2,), 4, ct.int32) // n,
        lambda n: ct.full((2,), 4, ct.uint32) % n.astype(ct.uint32),
    ):
        with pytest.raises(InterpreterError, match="by zero"):
            evaluate(body, 0)


# ------------------------------------------------------------------------------------------ floats


def test_minimum_and_maximum_ignore_nan() -> None:
    x, y = torch.tensor([NAN, 1.0, NAN, 3.0]), torch.tensor([2.0, NAN, NAN, 1.0])
    torch.testing.assert_close(
        apply(ct.maximum, x, y), torch.tensor([2.0, 1.0, NAN, 3.0]), equal_nan=True
    )
    assert apply(lambda a, b: ct.minimum(a, b, propagate_nan=True), x, y).isnan().tolist() == [
        True,
        True,
        True,
        False,
    ]


def test_flush_to_zero() -> None:
    tiny = 2.0**-130
    x = torch.tensor([tiny, -tiny, 2.0**-126, 1.0])
    flushed = apply(lambda a: ct.add(a, 0.0, flush_to_zero=True), x)
    assert flushed.tolist() == [0.0, 0.0, 2.0**-126, 1.0]
    product = apply(lambda a: ct.mul(a, -(2.0**-10), flush_to_zero=True), x)
    assert product.tolist() == [0.0, 0.0, 0.0, -(2.0**-10)]
    assert torch.signbit(product).tolist() == [True, False, True, True]
    assert apply(lambda a: ct.exp2(a * 0 - 130, flush_to_zero=True), x).tolist() == [0.0] * 4
    assert apply(lambda a: ct.rsqrt(a, flush_to_zero=True), x)[0] == math.inf
    assert apply(lambda a: ct.exp2(a * 0 - 130), x).tolist() == [tiny] * 4


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, [1.0, -1.0, 1.0 + 2**-7]),
        (RZ, [1.0, -1.0, 1.0]),
        (RM, [1.0, -1.0 - 2**-7, 1.0]),
        (RP, [1.0 + 2**-7, -1.0, 1.0 + 2**-7]),
    ],
)
def test_rounding_of_sums(mode: Any, expected: list[float]) -> None:
    x = torch.tensor([1.0, -1.0, 1.0, 0.0], dtype=torch.bfloat16)
    y = torch.tensor([2**-9, -(2**-9), 3 * 2**-9, 0.0], dtype=torch.bfloat16)
    assert apply(lambda a, b: ct.add(a, b, rounding_mode=mode), x, y).tolist() == [*expected, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_casts(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, dtype=torch.float64, generator=generator) * 1e-3
    target = getattr(ct, str(dtype).removeprefix("torch."))
    nearest, zero = (
        apply(lambda a: a.astype(target, rounding_mode=mode), x).double()  # noqa: B023
        for mode in (None, RZ)
    )
    assert torch.equal(nearest, x.to(dtype).double())
    assert (zero.abs() <= x.abs()).all()
    unit = (nearest - zero).abs()
    assert ((x - zero).abs() <= x.abs() * 2**-7).all()
    assert unit.max() > 0


def test_overflow_towards_zero_stays_finite() -> None:
    x = torch.tensor([1e6, -1e6])
    rounded = apply(lambda a: a.astype(ct.float16, rounding_mode=RZ), x)
    assert rounded.tolist() == [65504.0, -65504.0]


def test_directed_rounding_of_float64_is_refused() -> None:
    with pytest.raises(InterpreterError, match="rounding mode .* is not supported"):
        apply(lambda a: ct.sqrt(a, rounding_mode=RZ), torch.ones(2, dtype=torch.float64))
    with pytest.raises(InterpreterError, match="rounding mode .* is not supported"):
        apply(lambda a: ct.sum(a, rounding_mode=RZ), torch.ones(2))


# ------------------------------------------------------------------------------------------- casts


def test_cast_to_tf32_rounds_to_even() -> None:
    one_bit = 2.0**-10
    x = torch.tensor([1 + one_bit / 2, 1 + 3 * one_bit / 2, math.inf, NAN])
    rounded = apply(lambda a: a.astype(ct.tfloat32).astype(ct.float32), x)
    assert rounded.tolist()[:3] == [1.0, 1 + 2 * one_bit, math.inf]
    assert rounded[3].isnan()
    cut = apply(lambda a: a.astype(ct.tfloat32, rounding_mode=RZ).astype(ct.float32), x)
    assert cut.tolist()[:2] == [1.0, 1 + one_bit]


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(InterpreterError, match="dtype float4_e2m1fn is not supported by the CPU"):
        evaluate(lambda: ct.zeros((4,), ct.float4_e2m1fn))
