"""A softmax scale of the model's own, as with YaRN: in every design, against the fp32 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_var3.op.compare import compare
from mla_var3.runtime.paths import find_kernel, plan_class

from .kernel_support import DESIGNS

SCALE = 0.02
"""Far from (128 + 64) ** -0.5 = 0.072."""


def make(design: str, **fields: Any) -> Any:
    sizes = {"b": 2, "s": 2, "t": 40, "h": 4, "seed": 3, **fields}
    if design == "mla_var6_plus":
        sizes["n"] = 16
    return plan_class(find_kernel(design, language="cutile-dsl"))(**sizes)


def outputs(plan: Any, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    stage = plan.plan(*inputs)
    stage.launch()
    return list(stage.output_tensors)


@pytest.mark.parametrize("design", DESIGNS)
def test_the_scale_reaches_the_kernel_and_its_reference(design: str) -> None:
    plan, usual = make(design, scale=SCALE), make(design)
    inputs = plan.prepare_inputs("cpu")
    found = outputs(plan, inputs)[1]
    lse = plan.reference_fn(*inputs)[1]
    assert compare(found, lse).relative_frobenius < 1e-5
    assert compare(found, usual.reference_fn(*inputs)[1]).relative_frobenius > 1e-2
    assert compare(outputs(usual, inputs)[1], lse).relative_frobenius > 1e-2


def test_the_scale_of_the_cute_kernel() -> None:
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    plan = plan_class(find_kernel("flash_mla", language="cute-dsl"))(b=1, t=64, scale=SCALE)
    stage = plan.plan(*plan.prepare_inputs("meta"))
    attention = next(iter(stage.kernels()))
    (scale,) = (value for value in attention.args_fn(plan.tiling) if isinstance(value, float))
    assert scale == pytest.approx(SCALE * 1.4426950408889634)
