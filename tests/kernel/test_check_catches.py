"""The check can fail: kernels spoiled in the ways that real bugs spoil them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_var3.errors import CheckFailedError, InterpreterError
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.check import CheckResult, check_stage

from .kernel_support import DESIGNS, Case, check, plan_of, tampered

CASE = Case(s=5, t=100, h=2, lengths=(100, 40), n=50)
ATTENTION_KERNEL = {
    "flash_attention": "flash_attention",
    "flash_mla": "flash_mla",
    "flash_mla_split_kv": "split_kv_partial",
    "mla_var6_plus": "attention_block_specialized",
}


def spoiled(plan: MlaPlan, kernel: str, change: Callable[[Any], Any]) -> CheckResult:
    inputs = plan.prepare_inputs("cpu")
    stage = plan.plan(*inputs)
    with tampered(stage, kernel, change):
        return check_stage(plan, inputs, stage)


def require_failure(result: CheckResult) -> None:
    assert not result.passed
    with pytest.raises(CheckFailedError, match="output 0: relative error"):
        result.require()


def shifted_lengths(by: int) -> Callable[[Any], Any]:
    return lambda a: a + by if isinstance(a, Tensor) and a.dtype == torch.int32 else a


def other_mask(argument: Any) -> Any:
    return not argument if isinstance(argument, bool) else argument


WRONG_ARGUMENTS: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "the scale": (True, lambda a: a * 1.1 if isinstance(a, float) else a),
    "a length too long, which reads a poisoned slot": (False, shifted_lengths(1)),
    "a length too short, causal": (True, shifted_lengths(-1)),
    "a length too short": (False, shifted_lengths(-1)),
    "no mask": (True, other_mask),
    "a mask": (False, other_mask),
}
"""Whether the kernel is causal, and what happens to its arguments."""


@pytest.mark.parametrize("design", DESIGNS)
def test_wrong_arguments(design):
    plan, kernel = plan_of(design, replace(CASE, lengths=(99, 40))), ATTENTION_KERNEL[design]
    assert spoiled(plan, kernel, lambda arg: arg).passed  # the tool is not what makes it fail
    for wrong, (causal, change) in WRONG_ARGUMENTS.items():
        result = spoiled(plan.copy(causal=causal), kernel, change)
        require_failure(result)
        assert (result.outputs[0].error.nan_count > 0) == ("too long" in wrong), wrong


@pytest.mark.parametrize("design", DESIGNS)
def test_ctas_that_never_ran(design):
    """The outputs start as NaN, so what no CTA writes shows; here the last request."""
    plan = plan_of(design, CASE)
    inputs = plan.prepare_inputs("cpu")
    for index in range(len(list(plan.plan(*inputs).kernels()))):
        stage = plan.plan(*inputs)
        kernel = list(stage.kernels())[index]
        *others, last = kernel.grid_fn(kernel.tiling)
        kernel.grid_fn = lambda tiling, others=others, last=last: (*others, last - 1)
        result = check_stage(plan, inputs, stage)
        require_failure(result)
        assert result.outputs[0].error.nan_count > 0, kernel.name


OUTPUT_ERRORS: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    # The output alone is right; only the second output tells.
    "an LSE in the wrong base": (1, lambda lse: lse.mul_(1.442695)),
    # Too small for the norm of the whole: the largest error catches it.
    "one wrong element": (0, lambda out: out.view(-1)[7].add_(0.75)),
    "one NaN": (0, lambda out: out.view(-1)[7].fill_(torch.nan)),
    "one infinity": (0, lambda out: out.view(-1)[7].fill_(torch.inf)),
    "heads in the wrong order": (0, lambda out: out.copy_(out.roll(1, dims=2))),
}


@pytest.mark.parametrize("design", DESIGNS)
def test_a_wrong_output(design):
    """The kernels run once; each error is planted into a copy of what they wrote."""
    plan = plan_of(design, CASE)
    inputs = plan.prepare_inputs("cpu")
    stage = plan.plan(*inputs)
    stage.launch()
    right = [output.clone() for output in stage.output_tensors]
    for place, spoil in OUTPUT_ERRORS.values():

        def launch(place: int = place, spoil: Callable[[Tensor], object] = spoil) -> None:
            for output, value in zip(stage.output_tensors, right, strict=True):
                output.copy_(value)
            spoil(stage.output_tensors[place])

        stage.launch = launch
        result = check_stage(plan, inputs, stage)
        assert [output.passed for output in result.outputs] == [place != 0, place != 1]
        with pytest.raises(CheckFailedError, match=f"output {place}: relative error"):
            result.require()


def forget_last_partial(argument: Any) -> Any:
    """Drops the LSE of the last partial and hence its weight."""
    if isinstance(argument, Tensor) and argument.ndim == 3 and argument.shape[1] == 3:
        poor = argument.clone()
        poor[:, -1] = -torch.inf
        return poor
    return argument


def test_a_reduction_that_forgets_a_partial():
    plan = plan_of("flash_mla_split_kv", Case(s=2, t=200, h=8, lengths=(200, 130), n=0, splits=3))
    assert check(plan).passed
    require_failure(spoiled(plan, "split_kv_reduce", forget_last_partial))


@pytest.mark.parametrize(
    ("cache_dtype", "change"),
    [
        ("fp8", lambda scales: scales * 1.05),
        ("fp8_per_token", lambda scales: scales.roll(1, dims=1)),
        ("fp8_ds_mla", lambda scales: scales.roll(1, dims=2)),
    ],
)
def test_scales_of_other_tokens_or_columns(cache_dtype, change):
    plan = plan_of("flash_mla", CASE, cache_dtype=cache_dtype)
    assert check(plan).passed

    def wrong(argument: Any) -> Any:
        scales = isinstance(argument, Tensor) and argument.dtype is torch.float32
        return change(argument) if scales and argument.ndim == 3 else argument

    require_failure(spoiled(plan, "flash_mla", wrong))


def test_a_window_at_the_wrong_place():
    """n one too small: a token counted twice, another one at the wrong position."""
    plan, kernel = plan_of("mla_var6_plus", CASE, causal=False), "attention_block_specialized"

    def another_window(by: int) -> Callable[[Any], Any]:
        return lambda a: a + by if type(a) is int and a == CASE.n else a

    require_failure(spoiled(plan, kernel, another_window(-1)))
    with pytest.raises(InterpreterError, match="k_new"):  # larger than its arrays
        spoiled(plan, kernel, another_window(1))
