"""Operations on whole tiles: products, reductions, scans, and changes of shape."""

import math
import operator

import cuda.tile as ct
import pytest
import torch

from mla_var3.errors import InterpreterError
from tests.unit.runtime.interpreter import interpreter_support as on_cpu
from tests.unit.runtime.interpreter.interpreter_support import apply, evaluate

NAN = math.nan


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
        tile = on_cpu.load(a, (4, 4))
        part = tile.extract((i, 0), (2, 2))
        return tile.insert((0, i), part)

    expected = x.clone()
    expected[:2, 2:] = x[2:, :2]
    assert torch.equal(on_cpu.elements(body, x, 1), expected)
    with pytest.raises(InterpreterError, match=r"subtile index \(2, 0\) is outside"):
        evaluate(body, x, 2)


def test_assumptions_are_checked():
    assert on_cpu.values(lambda n: ct.assume_divisible_by(n, 8), 16) == 16
    with pytest.raises(InterpreterError, match="17 is not divisible by 8"):
        evaluate(lambda n: ct.assume_divisible_by(n, 8), 17)
