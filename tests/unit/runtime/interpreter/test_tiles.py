"""Operations on whole tiles: products, reductions, scans, and changes of shape."""

from __future__ import annotations

import math
import operator
from typing import Any

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

NAN = math.nan


# ---------------------------------------------------------------------------------------- products


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
def test_mma(dtype: torch.dtype, acc_dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(*s, generator=generator).to(dtype) for s in ((8, 16), (4, 16)))
    acc = torch.randn(8, 4, generator=generator).to(acc_dtype)
    result = apply(lambda a, b, c: ct.mma(a, b.transpose(), c), x, y, acc)
    assert result.dtype == acc_dtype
    expected = x.double() @ y.double().T + acc.double()
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_integer_mma_is_exact_and_wraps() -> None:
    x = torch.full((2, 4), -128, dtype=torch.int8)
    y = torch.full((4, 2), 255, dtype=torch.uint8)
    acc = torch.full((2, 2), -(2**31) + 5, dtype=torch.int32)
    product = -128 * 255 * 4
    assert apply(ct.mma, x, y, acc).tolist() == [[-(2**31) + 5 + product + 2**32] * 2] * 2


def test_batched_mma_and_matmul() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 4, 8, generator=generator)
    y = torch.randn(8, 4, generator=generator)
    torch.testing.assert_close(apply(operator.matmul, x, y), x @ y)
    acc = torch.ones(2, 4, 4)
    torch.testing.assert_close(apply(ct.mma, x, y, acc), x @ y + 1)
    halves = apply(operator.matmul, x.half(), y)
    assert halves.dtype == torch.float32


def test_scaled_mma_of_batches() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 4, 64, generator=generator).to(torch.float8_e4m3fn)
    y = torch.randn(64, 4, generator=generator).to(torch.float8_e4m3fn)
    x_scale = torch.tensor([0.5, 2.0, 1.0, 4.0]).repeat(2, 2, 1).mT.to(torch.float8_e8m0fnu)
    y_scale = torch.tensor([[1.0], [8.0]]).repeat(1, 4).to(torch.float8_e8m0fnu)
    acc = torch.ones(2, 4, 4)
    result = apply(ct.mma_scaled, x, x_scale, y, y_scale, acc)
    wide = x.float() * x_scale.float().repeat_interleave(32, -1)
    wide_y = y.float() * y_scale.float().repeat_interleave(32, 0)
    torch.testing.assert_close(result, wide @ wide_y + 1)


@pytest.mark.parametrize(
    ("shape", "message"), [((4, 4), "do not fit a tile of shape"), ((2, 2), "do not fit a tile")]
)
def test_scales_of_wrong_shape(shape: tuple[int, int], message: str) -> None:
    def body():
        x, y = ct.ones((4, 64), ct.float8_e4m3fn), ct.ones((64, 4), ct.float8_e4m3fn)
        scale = ct.ones(shape, ct.float8_e8m0fnu)
        y_scale = ct.ones((2, 4), ct.float8_e8m0fnu)
        return ct.mma_scaled(x, scale, y, y_scale, ct.zeros((4, 4), ct.float32))

    with pytest.raises(InterpreterError, match=message):
        evaluate(body)


# -------------------------------------------------------------------------------------- reductions


def test_reductions_over_axes() -> None:
    x = torch.arange(16.0).reshape(2, 2, 4)
    assert torch.equal(apply(lambda a: ct.sum(a, (0, -1)), x), x.sum((0, 2)))
    assert torch.equal(apply(lambda a: ct.prod(a + 1, (0, 2)), x), (x + 1).prod(2).prod(0))
    assert apply(lambda a: ct.max(a, keepdims=True), x).shape == (1, 1, 1)
    assert apply(lambda a: ct.min(a, 1), x).shape == (2, 4)
    assert apply(lambda a: ct.sum(a > 3), x).item() == 12


def test_extrema_ignore_nan() -> None:
    x = torch.tensor([[NAN, 1.0], [3.0, NAN]])
    assert apply(lambda a: ct.max(a, 1), x).tolist() == [1.0, 3.0]
    assert apply(lambda a: ct.min(a, 0), x).tolist() == [3.0, 1.0]
    assert apply(lambda a: ct.max(a, propagate_nan=True), x).isnan()
    assert apply(lambda a: ct.argmax(a, 1), x).tolist() == [1, 0]
    assert apply(lambda a: ct.argmin(a, 1, propagate_nan=True), x).tolist() == [0, 1]


def test_positions_prefer_the_first() -> None:
    x = torch.tensor([[2, 5, 5, 1], [1, 1, 0, 0]], dtype=torch.int32)
    assert apply(lambda a: ct.argmax(a, 1, keepdims=True), x).tolist() == [[1], [0]]
    assert apply(lambda a: ct.argmin(a, -1), x).tolist() == [3, 2]
    assert apply(ct.argmax, x).item() == 1
    assert apply(lambda a: ct.argmin(a, keepdims=True), x).tolist() == [[6]]


def test_cumulative_sums_and_products() -> None:
    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)
    assert apply(lambda a: ct.cumsum(a, 1), x).tolist() == [[1, 3, 6, 10]]
    assert apply(lambda a: ct.cumsum(a, -1, reverse=True), x).tolist() == [[10, 9, 7, 4]]
    assert apply(lambda a: ct.cumprod(a * 10, 1), x).tolist() == [[10, -56, 112, -128]]
    assert apply(lambda a: ct.cumsum(a > 1, 1), x).dtype == torch.int32


def test_custom_reduction_keeps_the_order() -> None:
    """Composition of affine functions is associative but not commutative."""
    scale = torch.tensor([[2.0, 3.0, 0.5, 4.0]] * 2)
    shift = torch.tensor([[1.0, -1.0, 2.0, 0.5]] * 2)

    def compose(a, b, c, d):
        return a * c, b * c + d

    def expected(count: int) -> tuple[float, float]:
        a, b = 1.0, 0.0
        for c, d in zip(scale[0, :count].tolist(), shift[0, :count].tolist(), strict=True):
            a, b = a * c, b * c + d
        return a, b

    def reduced(a, b):
        return ct.cat(tuple(v[None, :] for v in ct.reduce((a, b), 1, compose, (1.0, 0.0))), 0)

    def scanned(a, b):
        return ct.scan((a, b), -1, compose, (1.0, 0.0))[1]

    assert apply(reduced, scale, shift)[:, 0].tolist() == list(expected(4))
    assert apply(scanned, scale, shift)[1].tolist() == [expected(n)[1] for n in (1, 2, 3, 4)]


def test_custom_reduction_with_builtins_and_keepdims() -> None:
    x = torch.tensor([[3, 9, 2, 4], [5, 1, 7, 0]], dtype=torch.int32)
    largest = apply(lambda a: ct.reduce(a, 1, lambda p, q: max(p, q), 0, keepdims=True), x)
    assert largest.tolist() == [[9], [7]]
    running = apply(lambda a: ct.scan(a, 1, lambda p, q: min(p, q), 99, reverse=True), x)
    assert running.tolist() == [[2, 2, 2, 4], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a: ct.reduce(a, 0, lambda p, q: (p, q), 0), "must return 1 values"),
        (lambda a: ct.reduce(a, 0, lambda p, q: p * 0.5, 0), "cannot implicitly cast"),
        (lambda a: ct.reduce(a, 0, lambda p, q: p if p > q else q, 0), "truth value"),
        (lambda a: ct.reduce((a, a), 0, lambda p, q, r, s: (p, q), 0), "1 identity values for 2"),
        (lambda a: ct.sum(a, (0, 0)), "names an axis twice"),
        (lambda a: ct.argmax(a, (0, 1)), "an axis must be an integer"),
    ],
)
def test_bad_reduction(function: Any, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        apply(function, torch.ones(4, 4, dtype=torch.int32))


# ------------------------------------------------------------------------------------------ shapes


def test_arange_with_dynamic_start_and_step() -> None:
    assert values(lambda n: ct.arange(4, dtype=ct.int32, start=n, step=-n), 3) == [3, 0, -3, -6]
    assert values(lambda: ct.arange(4, dtype=ct.float16, start=0.5)) == [0.5, 1.5, 2.5, 3.5]


def test_extract_and_insert_with_dynamic_index() -> None:
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


def test_insert_leaves_the_operand_alone() -> None:
    def body():
        zeros = ct.zeros((4,), ct.int32)
        changed = ct.insert(zeros, 1, 7)
        return zeros * 100 + changed

    assert values(body) == [0, 7, 0, 0]


def test_reshape_of_a_permuted_tile() -> None:
    x = torch.arange(8).reshape(2, 4)
    assert apply(lambda a: a.permute((1, 0)).reshape((2, -1)), x).tolist() == [
        [0, 4, 1, 5],
        [2, 6, 3, 7],
    ]


def test_tiles_are_immutable() -> None:
    def body():
        tile = ct.zeros((4,), ct.int32)
        tile[0] = 1

    with pytest.raises(InterpreterError, match="immutable"):
        evaluate(body)


def test_full_with_a_dynamic_value() -> None:
    assert values(lambda n: ct.full((2,), n, ct.float32), 3) == [3.0, 3.0]
    assert values(lambda: ct.full((2,), 300, ct.uint8)) == [44, 44]


def test_assumptions_are_checked() -> None:
    assert values(lambda n: ct.assume_divisible_by(n, 8), 16) == 16
    with pytest.raises(InterpreterError, match="17 is not divisible by 8"):
        evaluate(lambda n: ct.assume_divisible_by(n, 8), 17)
