"""Inputs at the edges of what floating point can hold, and rows that see no key."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.compare import compare

from ..unit.op.op_support import visible
from .kernel_support import DESIGNS, Case, named_inputs, plan_of, require

CASE = Case(s=3, t=70, h=2, lengths=(70, 0, 20, 2), n=30)


def with_queries(
    plan: MlaPlan, design: str, change: Callable[[Tensor], Tensor]
) -> tuple[Tensor, ...]:
    """The inputs of a plan with its queries changed."""
    inputs = named_inputs(plan, design)
    return tuple(change(x) if name.startswith("q_") else x for name, x in inputs.items())


@pytest.mark.parametrize(("factor", "dtype"), [(1e3, "float16"), (1e-4, "float16")])
@pytest.mark.parametrize("design", DESIGNS)
def test_scores_far_from_one(design, factor, dtype):
    """Huge scores make the softmax a choice of one key: exp must neither overflow nor vanish."""
    plan = plan_of(design, CASE, dtype=dtype)
    stage = require(plan, with_queries(plan, design, lambda q: q * factor))
    lse = stage.output_tensors[1]
    assert lse[lse.isfinite()].abs().max() > (1e3 if factor > 1 else 1.0)


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("design", DESIGNS)
def test_scores_all_huge_and_of_one_sign(design, sign):
    """All scores near +-30000: a running maximum that starts at 0 would lose the negative ones."""
    plan = plan_of(design, CASE, dtype="bfloat16")
    inputs = named_inputs(plan, design)
    for name, tensor in inputs.items():
        if name.startswith("q_"):
            inputs[name] = torch.full_like(tensor, 30.0 * sign)
        elif name in ("k", "k_new", "k_rope", "k_rope_new", "c_kv"):
            inputs[name] = torch.where(tensor.isnan(), tensor, 30.0)
    stage = require(plan, tuple(inputs.values()))
    lse = stage.output_tensors[1]
    finite = lse[lse.isfinite()]
    assert (finite * sign > 5e3).all()


@pytest.mark.parametrize(("dtype", "causal"), [("bfloat16", True), ("float16", False)])
@pytest.mark.parametrize("design", DESIGNS)
def test_equal_scores_give_the_mean(design, causal, dtype):
    """With zero queries every visible key weighs the same, and the lse is log(count)."""
    plan = plan_of(design, CASE, dtype=dtype, causal=causal)
    lse = require(plan, with_queries(plan, design, torch.zeros_like)).output_tensors[1]
    problem = plan.problem()
    for request in range(plan.b):
        for query in range(plan.s):
            count = visible(problem, request, query)
            wanted = math.log(count) if count else -math.inf
            assert lse[request, query].tolist() == pytest.approx([wanted] * plan.h, rel=1e-6)


@pytest.mark.parametrize("design", DESIGNS)
def test_unused_slots_may_hold_anything(design):
    """Not only NaN: what an earlier request left there must not reach the output."""
    plan = plan_of(design, CASE)
    inputs = named_inputs(plan, design)
    clean = [output.clone() for output in require(plan, tuple(inputs.values())).output_tensors]
    for poison in (math.inf, 6e4):
        filled = [
            torch.where(tensor.isnan(), poison, tensor) if tensor.is_floating_point() else tensor
            for tensor in inputs.values()
        ]
        again = require(plan, tuple(filled)).output_tensors
        for before, after in zip(clean, again, strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_launch_sees_what_the_inputs_hold_now(design):
    """A plan is made once and launched many times; no kernel accumulates into its outputs.

    Lengths are data: growing by a token needs no new plan.
    """
    plan = plan_of(design, CASE)
    inputs = plan.prepare_inputs("cpu")
    stage = require(plan, inputs)
    other = plan.copy(seed=1, lengths=(2, 65, 70, 0))
    fresh = other.prepare_inputs("cpu")
    wanted = require(other, fresh).output_tensors
    for old, new in zip(inputs, fresh, strict=True):
        old.copy_(new)
    for _ in range(2):
        stage.launch()
        for got, expected in zip(stage.output_tensors, wanted, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("design", DESIGNS)
def test_a_scale_of_the_model_reaches_the_kernel_and_its_reference(design):
    """As with YaRN; far from the default (128 + 64) ** -0.5 = 0.072."""
    plan = plan_of(design, CASE, scale=0.02)
    inputs = plan.prepare_inputs("cpu")
    own, usual = (require(each, inputs).output_tensors[1] for each in (plan, plan.copy(scale=None)))
    seen = own.isfinite()
    assert compare(own[seen], usual[seen]).relative_frobenius > 1e-2
