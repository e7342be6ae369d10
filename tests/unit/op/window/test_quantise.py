"""The 8-bit form of keys and values: bounds, special rows, and whose error is whose."""

import math

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cost import decompressed_bytes
from mla_var3.op.mla.inputs import decompress_newest, make_inputs
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import FP8, PLAIN
from mla_var3.op.mla.window.quantise import (
    E4M3,
    E4M3_MAX,
    QuantisedRows,
    dequantise,
    form_errors,
    quantise,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rows_of(dtype: torch.dtype, generator: torch.Generator, std: float = 1.0) -> torch.Tensor:
    rows = torch.randn(3, 4, 50, 32, generator=generator, dtype=torch.float64) * std
    # Magnitudes from 1 down to 2**-14 within each row, so that small elements are in it too.
    return (rows * torch.logspace(0, -14, 32, base=2.0, dtype=torch.float64)).to(dtype)


def bounds(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Half a unit in the last place of e4m3, a little widened for the rounding of the scale."""
    subnormal = scales.double()[..., None] * 2**-10
    return torch.maximum(rows.double().abs() * 2**-4, subnormal) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_a_round_trip_stays_within_half_a_unit(dtype, powers_of_two, generator):
    rows = rows_of(dtype, generator)
    stored = quantise(rows, powers_of_two=powers_of_two)
    assert stored.values.dtype is E4M3 and stored.values.shape == rows.shape
    assert stored.scales.dtype is torch.float32 and stored.scales.shape == rows.shape[:-1]
    back = dequantise(stored, torch.float64)
    assert torch.equal(back, stored.values.double() * stored.scales.double()[..., None])
    torch.testing.assert_close(dequantise(stored), back.float(), rtol=1e-6, atol=0.0)
    error = (back - rows.double()).abs()
    assert bool((error <= bounds(rows, stored.scales)).all())
    # The bound is not generous: some element comes near it.
    assert float((error / bounds(rows, stored.scales)).max()) > 0.9
    exact, scales = rows.double().abs().amax(-1) / E4M3_MAX, stored.scales.double()
    if powers_of_two:
        assert torch.equal(scales.log2().round().exp2(), scales)
        assert bool(((scales >= exact * (1 - 1e-6)) & (scales < 2 * exact)).all())
    else:
        torch.testing.assert_close(scales, exact, rtol=1e-6, atol=0.0)
        assert bool((stored.values.float().abs().amax(-1) == E4M3_MAX).all())


def test_powers_of_two_stay_what_they_are_and_end_at_a_least_one():
    peaks = E4M3_MAX * torch.tensor([2.0**-70, 2.0**-60, 0.25, 1.0, 2.0**20, 0.0])
    scales = quantise(peaks[:, None], powers_of_two=True).scales
    assert scales.tolist() == [2.0**-60, 2.0**-60, 0.25, 1.0, 2.0**20, 2.0**-60]


def test_zeros_stay_zeros_with_a_scale_that_can_divide():
    stored = quantise(torch.zeros(2, 5, 16, dtype=torch.bfloat16))
    assert torch.equal(dequantise(stored), torch.zeros(2, 5, 16))
    # A scale that is subnormal would be zero on a GPU that flushes such numbers.
    assert bool((stored.scales >= torch.finfo(torch.float32).tiny).all())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_a_row_without_a_scale_in_float32_becomes_nan_and_no_other(poison, powers_of_two):
    rows = torch.ones(3, 16, dtype=torch.float64)
    rows[1, 7] = poison
    stored = quantise(rows, powers_of_two=powers_of_two)
    back = dequantise(stored, torch.float64)
    # In both tensors: a kernel may meet either first.
    assert bool(stored.values[1].float().isnan().all() & stored.scales[1].isnan())
    assert bool(back[1].isnan().all())
    torch.testing.assert_close(back[[0, 2]], rows[[0, 2]], rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_numbers_of_a_dtype(dtype):
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    rows = torch.tensor([[largest, -largest, 1.0, 0.0]], dtype=dtype)
    back = dequantise(quantise(rows), torch.float64)
    assert back[0, :2].tolist() == pytest.approx([float(rows[0, 0]), float(rows[0, 1])], rel=1e-6)
    tiny = torch.full((1, 4), torch.finfo(dtype).tiny, dtype=dtype)
    stored = quantise(tiny)
    error = (dequantise(stored, torch.float64) - tiny.double()).abs()
    assert bool((error <= bounds(tiny, stored.scales)).all())


def test_bad_rows_are_refused():
    ones, good = torch.ones(2, 4), quantise(torch.ones(2, 4))
    for message, call in {
        "rows: expected one of the dtypes float16": lambda: quantise(ones.int()),
        r"rows: expected \[..., d\] with d > 0": lambda: quantise(ones[:, :0]),
        "scales: expected": lambda: QuantisedRows(good.values, good.scales[:1]),
        "values: expected torch.float8_e4m3fn": lambda: QuantisedRows(ones, good.scales),
        "scales: expected torch.float32": lambda: QuantisedRows(good.values, good.scales.half()),
    }.items():
        with pytest.raises(InvalidArgumentError, match=message):
            call()


def test_the_error_of_the_form_and_that_of_a_kernel_are_told_apart(generator):
    unrounded = rows_of(torch.float32, generator)
    on_form = dequantise(quantise(unrounded))
    exact = form_errors(on_form, on_form, unrounded)
    assert exact.kernel.relative_frobenius == 0.0
    assert exact.form == exact.total
    # Three mantissa bits: more than bfloat16's eight give, less than a tenth.
    assert 0.005 < exact.form.relative_frobenius < 0.1
    wrong = form_errors(on_form * 1.01, on_form, unrounded)
    assert wrong.kernel.relative_frobenius == pytest.approx(0.01, rel=1e-3)
    assert wrong.form == exact.form


def test_bytes_of_the_form_are_those_of_the_tensors():
    problem = MlaProblem(b=3, s=2, t=9, h=2, d=16, p=4, k=32)
    inputs = make_inputs(problem, "cpu", seed=0)
    for n in (0, 4, 9):
        k_new, v_new, rope = decompress_newest(inputs, n)
        stored = quantise(k_new).nbytes + quantise(v_new).nbytes + rope.nbytes
        plain = k_new.nbytes + v_new.nbytes + rope.nbytes
        assert decompressed_bytes(problem, n, FP8) == stored
        assert decompressed_bytes(problem, n, PLAIN) == decompressed_bytes(problem, n) == plain
