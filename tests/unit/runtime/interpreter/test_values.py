"""Values of operations: arithmetic and casts, products, reductions, changes of shape."""

import math
import operator

import cuda.tile as ct
import pytest
import torch

from mla_var3.errors import InterpreterError
from tests.unit.runtime.interpreter.interpreter_support import (
    apply,
    elements,
    evaluate,
    load,
    values,
)

RZ = ct.RoundingMode.RZ
NAN = math.nan


def test_integers_wrap_around():
    assert values(lambda n: n + 1, 2**31 - 1) == -(2**31)
    assert values(lambda n: n * 3, 2**30) == 3 * 2**30 - 2**32
    assert values(lambda: ct.full((2,), 200, ct.uint8) + 100) == [44, 44]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_signed_division_rounds_down(dtype):
    x = torch.tensor([7, -7, 7, -7], dtype=dtype)
    y = torch.tensor([2, 2, -2, -2], dtype=dtype)
    assert apply(operator.floordiv, x, y).tolist() == [3, -4, -4, 3]
    assert apply(operator.mod, x, y).tolist() == [1, 1, -1, -1]
    assert apply(ct.cdiv, x, y).tolist() == [4, -3, -3, 4]
    quotients = [values(lambda a, b: a // b, *p) for p in zip(x.tolist(), y.tolist(), strict=True)]
    assert quotients == [3, -4, -4, 3]


def test_division_that_rounds_up_needs_no_negative():
    for dtype, x, y, up in (
        (torch.uint8, [0, 5, 255, 200], [2, 2, 2, 100], [0, 3, 128, 2]),
        (torch.int8, [-128, -128, 127, -128], [3, 64, 2, -3], [-42, -2, 64, 43]),
    ):
        given = torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)
        assert apply(ct.cdiv, *given).tolist() == up


def test_division_by_zero():
    for body in (
        lambda n: 4 // n,
        lambda n: n % n,
        lambda n: ct.cdiv(n, n),
        lambda n: ct.full((2,), 4, ct.int32) // n,
    ):
        with pytest.raises(InterpreterError, match="by zero"):
            evaluate(body, 0)


def test_minimum_and_maximum_ignore_nan():
    x, y = torch.tensor([NAN, 1.0, NAN, 3.0]), torch.tensor([2.0, NAN, NAN, 1.0])
    torch.testing.assert_close(
        apply(ct.maximum, x, y), torch.tensor([2.0, 1.0, NAN, 3.0]), equal_nan=True
    )
    least = apply(lambda a, b: ct.minimum(a, b, propagate_nan=True), x, y)
    assert least.isnan().tolist() == [True, True, True, False]


def test_flush_to_zero():
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


def test_directed_rounding_is_refused():
    for body in (
        lambda a: ct.sqrt(a, rounding_mode=RZ),
        lambda a: ct.sum(a, rounding_mode=RZ),
        lambda a: a.astype(ct.bfloat16, rounding_mode=RZ),
    ):
        with pytest.raises(InterpreterError, match="rounding mode .* is not supported"):
            apply(body, torch.ones(2))


def test_cast_to_tf32_rounds_to_even():
    one_bit = 2.0**-10
    x = torch.tensor([1 + one_bit / 2, 1 + 3 * one_bit / 2, math.inf, NAN])
    rounded = apply(lambda a: a.astype(ct.tfloat32).astype(ct.float32), x)
    assert rounded.tolist()[:3] == [1.0, 1 + 2 * one_bit, math.inf]
    assert rounded[3].isnan()


def test_unsupported_dtype_is_named():
    with pytest.raises(InterpreterError, match="dtype float4_e2m1fn is not supported by the CPU"):
        evaluate(lambda: ct.zeros((4,), ct.float4_e2m1fn))


@pytest.mark.parametrize(
    ("dtype", "acc_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.float16, torch.float16, 2e-2),
        (torch.float32, torch.float32, 1e-5),
        (torch.float64, torch.float64, 1e-13),
        (torch.float8_e5m2, torch.float32, 1e-5),
    ],
)
def test_mma(dtype, acc_dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(*s, generator=generator).to(dtype) for s in ((8, 16), (4, 16)))
    acc = torch.randn(8, 4, generator=generator).to(acc_dtype)
    result = apply(lambda a, b, c: ct.mma(a, b.transpose(), c), x, y, acc)
    assert result.dtype == acc_dtype
    expected = x.double() @ y.double().T + acc.double()
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_integer_mma_is_exact_and_wraps():
    x = torch.full((2, 4), -128, dtype=torch.int8)
    y = torch.full((4, 2), 255, dtype=torch.uint8)
    acc = torch.full((2, 2), -(2**31) + 5, dtype=torch.int32)
    product = -128 * 255 * 4
    assert apply(ct.mma, x, y, acc).tolist() == [[-(2**31) + 5 + product + 2**32] * 2] * 2


def test_batched_mma_and_matmul():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 8, generator=generator)
    y = torch.randn(8, 4, generator=generator)
    torch.testing.assert_close(apply(operator.matmul, x, y), x @ y)
    acc = torch.ones(2, 4, 4)
    torch.testing.assert_close(apply(ct.mma, x, y, acc), x @ y + 1)
    halves = apply(operator.matmul, x.half(), y)
    assert halves.dtype == torch.float32


def test_extrema_ignore_nan():
    x = torch.tensor([[NAN, 1.0], [3.0, NAN]])
    assert apply(lambda a: ct.max(a, 1), x).tolist() == [1.0, 3.0]
    assert apply(lambda a: ct.min(a, 0), x).tolist() == [3.0, 1.0]
    assert apply(lambda a: ct.max(a, propagate_nan=True), x).isnan()
    assert apply(lambda a: ct.argmax(a, 1), x).tolist() == [1, 0]
    assert apply(lambda a: ct.argmin(a, 1, propagate_nan=True), x).tolist() == [0, 1]


def test_extract_and_insert_with_dynamic_index():
    x = torch.arange(16.0).reshape(4, 4)

    def body(a, i):
        tile = load(a, (4, 4))
        part = tile.extract((i, 0), (2, 2))
        return tile.insert((0, i), part)

    expected = x.clone()
    expected[:2, 2:] = x[2:, :2]
    assert torch.equal(elements(body, x, 1), expected)
    with pytest.raises(InterpreterError, match=r"subtile index \(2, 0\) is outside"):
        evaluate(body, x, 2)


def test_assumptions_are_checked():
    assert values(lambda n: ct.assume_divisible_by(n, 8), 16) == 16
    with pytest.raises(InterpreterError, match="17 is not divisible by 8"):
        evaluate(lambda n: ct.assume_divisible_by(n, 8), 17)
