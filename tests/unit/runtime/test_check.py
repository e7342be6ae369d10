"""The check: how its bounds come about, and what can never pass."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_var3.errors import CheckFailedError
from mla_var3.op.compare import ErrorFigures
from mla_var3.runtime.check import CheckResult, OutputCheck, check_stage, poison_outputs
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from tests.unit.runtime.runtime_support import DoublingPlan, fake_kernel

NAN, INF = math.nan, math.inf
ERROR = ErrorFigures(0.001, 0.01, 0, 0)
GOOD = OutputCheck(0, (2, 4), ERROR, ERROR, relative_bound=0.002, max_bound=0.02)


def test_all_outputs_must_pass():
    error = ErrorFigures(math.nan, 0.01, 3, 0)
    bad = replace(GOOD, error=error, index=1)
    assert CheckResult((GOOD, GOOD)).passed
    result = CheckResult((GOOD, bad))
    assert not result.passed
    CheckResult((GOOD,)).require()
    with pytest.raises(CheckFailedError) as caught:
        result.require()
    start = r"output 1: relative error nan \(bound 0.002\), largest 0.01 \(bound 0.02\), 3 NaN"
    assert re.match(start, str(caught.value))


@dataclass
class OutputsPlan(DoublingPlan):
    """Leaves a given output, against a given reference and baseline."""

    output: Any = None
    reference: Any = None
    baseline: Any = None

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return (self.reference if compute_dtype is None else self.baseline,)

    def run(self) -> OutputCheck:
        inputs = self.prepare_inputs("cpu")
        stage = self.plan(*inputs)
        stage.output_tensors = [torch.empty_like(self.output)]
        stage._launch_cpu = lambda: stage.output_tensors[0].copy_(self.output)
        [output] = check_stage(self, inputs, stage).outputs
        return output


def judged(output: Any, reference: Any, baseline: Any) -> OutputCheck:
    tensors = [torch.tensor(values) for values in (output, reference, baseline)]
    return OutputsPlan(output=tensors[0], reference=tensors[1], baseline=tensors[2]).run()


def test_the_bound_is_twice_the_error_of_the_baseline():
    outcome = judged([3.0, 4.0], [3.0, 4.0], [3.03, 4.04])
    assert outcome.baseline.relative_frobenius == pytest.approx(0.01, rel=1e-4)
    assert outcome.relative_bound == pytest.approx(2 * 0.01 + 1e-5, rel=1e-4)
    assert outcome.max_bound == pytest.approx(2 * 0.04 + 4e-5, rel=1e-4)


@pytest.mark.parametrize(("error", "passed"), [(0.0199, True), (0.0201, False), (-0.0201, False)])
def test_around_the_bound(error, passed):
    outcome = judged([3.0 * (1 + error), 4.0 * (1 + error)], [3.0, 4.0], [3.03, 4.04])
    assert outcome.passed is passed


@pytest.mark.parametrize(
    ("output", "reference", "baseline"),
    [
        *(([1.0, NAN], [1.0, 1.0], [1.0, 1.0]), ([1.0, NAN], [1.0, 1.0], [1.0, NAN])),
        *(([1.0, NAN], [1.0, NAN], [1.0, NAN]), ([1.0, 1.0], [1.0, NAN], [1.0, 1.0])),
        ([NAN, NAN], [INF, INF], [INF, INF]),
        ([1.0, 70000.0], [1.0, 1.0], [1.0, INF]),  # PyTorch overflows: there is no yardstick
    ],
)
def test_nan_never_passes_and_an_infinite_baseline_excuses_nothing(output, reference, baseline):
    """Not in the output, and not excused by NaN in the baseline or the reference."""
    assert not judged(output, reference, baseline).passed


def test_infinities_must_be_equal():
    inf = INF
    assert judged([1.0, -inf], [1.0, -inf], [1.0, -inf]).passed
    for output, reference in (([1.0, inf], [1.0, -inf]), ([1.0, 9.0], [1.0, -inf])):
        outcome = judged(output, reference, reference)
        assert not outcome.passed
        assert outcome.error.mismatched_inf == 1
    assert judged([1.0, -inf], [1.0, 2.0], [1.0, 2.0]).error.mismatched_inf == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_baseline_is_in_the_dtype_of_the_kernel(dtype):
    plan = DoublingPlan(b=100, dtype=dtype)
    seen: list[Any] = []
    reference_fn = plan.reference_fn
    plan.reference_fn = lambda *inputs, compute_dtype=None: (
        seen.append(compute_dtype) or reference_fn(*inputs, compute_dtype=compute_dtype)
    )
    inputs = plan.prepare_inputs("cpu")
    result = check_stage(plan, inputs, plan.plan(*inputs))
    assert seen == [None, getattr(torch, dtype)]
    assert result.passed
    assert result.outputs[0].shape == (100,)


def test_a_16_bit_output_of_32_bit_inputs_has_a_16_bit_baseline():
    """A reduction of float32 partials rounds once, and may."""
    plan = DoublingPlan(b=100, dtype="float32")
    inputs = (plan.prepare_inputs("cpu")[0] * 1.2345,)
    stage = plan.plan(*inputs)
    stage.output_tensors = [torch.empty(100, dtype=torch.bfloat16)]
    assert check_stage(plan, inputs, stage).passed


def test_poison_reaches_every_kernel_and_spares_integers():
    first, second, third = fake_kernel("a"), fake_kernel("b"), fake_kernel("c")
    counter = torch.zeros(2, dtype=torch.int32)
    third.output_tensors.append(counter)
    group = ConcurrentKernels(_name="g", concurrent_kernels=[second, third])
    poison_outputs(KernelPipeline(_name="p", stages=[first, group]))
    for kernel in (first, second, third):
        assert kernel.output_tensors[0].isnan().all()
        assert not kernel.input_tensors[0].isnan().any()
    assert counter.tolist() == [0, 0]
