"""Inputs that are not contiguous: views of larger caches work, impossible layouts are named."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.check import check_stage

from .kernel_support import (
    DESIGNS,
    INPUT_NAMES,
    STAGES,
    Case,
    named_inputs,
    plan_of,
    require,
    transposed_storage,
)

CASE = Case(s=3, t=70, h=4, lengths=(70, 0, 20), n=30)

Inputs = dict[str, Tensor]


def make(name: str) -> tuple[Any, Inputs]:
    plan = plan_of(name, CASE)
    return plan, named_inputs(plan, name)


def joined(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both as slices of one tensor, side by side in the last dimension."""
    both = torch.cat([first, second], dim=-1)
    return both[..., : first.shape[-1]], both[..., first.shape[-1] :]


def one_cache(inputs: Inputs) -> None:
    """Latent and rope in one cache of 576 columns, as serving engines store them."""
    inputs["c_kv"], inputs["k_rope"] = joined(inputs["c_kv"], inputs["k_rope"])
    assert inputs["c_kv"].stride(1) == 576


def one_query(inputs: Inputs) -> None:
    """Both parts of a query side by side, as the projection leaves them."""
    part = "q_nope" if "q_nope" in inputs else "q_latent"
    inputs[part], inputs["q_rope"] = joined(inputs[part], inputs["q_rope"])


def tokens_first(inputs: Inputs) -> None:
    """Decompressed keys and values stored token by token, [b, t, h, d]."""
    for name in ("k", "v", "k_new", "v_new"):
        if name in inputs:
            inputs[name] = transposed_storage(inputs[name], 1, 2)


def padded_batch(inputs: Inputs) -> None:
    """Slots of a larger cache: only the first t of every request belong to this call."""
    for name in ("c_kv", "k_rope", "k", "v"):
        if name in inputs:
            tensor = inputs[name]
            shape = (*tensor.shape[:-2], 100, tensor.shape[-1])
            larger = torch.full(shape, torch.nan, dtype=tensor.dtype)
            inputs[name] = larger[..., : CASE.t, :].copy_(tensor)


def every_second_request(inputs: Inputs) -> None:
    """A batch picked out of a larger one."""
    for name in inputs:
        if name not in ("w_uv", "lengths"):
            inputs[name] = inputs[name].repeat_interleave(2, dim=0)[::2]


def prefix_shared_by_the_batch(inputs: Inputs) -> None:
    """A latent cache expanded over the batch: stride 0. Request 0 has all tokens."""
    for name in ("c_kv", "k_rope"):
        inputs[name] = inputs[name][:1].expand(3, -1, -1)
        assert inputs[name].stride(0) == 0


OF_LATENT_CACHES = (one_cache, prefix_shared_by_the_batch)
OF_ALL = (one_query, tokens_first, padded_batch, every_second_request)


@pytest.mark.parametrize(
    ("design", "layout"),
    [
        pytest.param(design, layout, id=f"{design}-{layout.__name__}")
        for design in DESIGNS
        for layout in (*OF_LATENT_CACHES, *OF_ALL)
        if layout not in OF_LATENT_CACHES or "c_kv" in INPUT_NAMES[design]
    ],
)
def test_views_work(design, layout):
    plan, inputs = make(design)
    layout(inputs)
    require(plan, tuple(inputs.values()))


@pytest.mark.parametrize("name", [*DESIGNS, *STAGES])
def test_transposed_inputs_work_or_are_named(name):
    """Heads outside tokens, [b, h, s, ...]: computed right, or refused with the argument's name.

    A copy made to merge s and h must not outlive a launch: inputs are updated in place.
    """
    for argument in INPUT_NAMES[name]:
        plan, inputs = make(name)
        if inputs[argument].ndim < 4:
            continue
        inputs[argument] = transposed_storage(inputs[argument], -3, -2)
        values = tuple(inputs.values())
        try:
            stage = plan.plan(*values)
            check_stage(plan, values, stage).require()
        except InvalidArgumentError as error:
            assert str(error).startswith(f"{argument}: expected")
            continue
        inputs[argument].mul_(-1.0)
        check_stage(plan, values, stage).require()


def part_of(tensor: Tensor, columns: int, part: slice) -> Tensor:
    """The same values in some columns of a wider tensor."""
    return torch.zeros((*tensor.shape[:-1], columns), dtype=tensor.dtype)[..., part].copy_(tensor)


@pytest.mark.parametrize("name", [*DESIGNS, "split_kv_partial", "attention_block_specialized"])
def test_impossible_strides_are_named(name):
    plan, inputs = make(name)
    for argument, right in inputs.items():
        width = right.shape[-1]
        layouts = {
            # Rows one element longer, a first element 2 bytes off, every second column.
            "a stride of dimension . that is a multiple of 16 bytes": (width + 1, slice(width)),
            "a pointer aligned to 16 bytes": (width + 8, slice(1, 1 + width)),
            "stride 1 in the last dimension": (2 * width, slice(0, None, 2)),
        }
        for expected, layout in layouts.items():
            if argument != "lengths" or "dimension ." not in expected:
                wrong = {**inputs, argument: part_of(right, *layout)}
                message = f"^{argument}: expected {expected}, got"
                with pytest.raises(InvalidArgumentError, match=message):
                    plan.plan(*wrong.values())
