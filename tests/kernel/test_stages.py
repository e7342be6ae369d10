"""The stages of the two pipelines, each alone against its own reference."""

import pytest
import torch
from torch import Tensor

from mla_var3.op.compare import compare
from mla_var3.runtime.check import poison_outputs

from .kernel_support import STAGES, Case, make_plan, plan_of, require

CASES = [
    (Case(s=1, t=1, h=8, lengths=(1, 0), n=1, splits=1), True),
    (Case(s=3, t=67, h=4, lengths=(67, 0, 22), n=30, splits=3, dtype="float16"), False),
    (Case(s=5, t=67, h=3, lengths=(67, 33, 1, 0), n=66, splits=4), True),
    (Case(s=70, t=131, h=2, lengths=(131, 43), n=40, splits=2), True),
    (Case(s=1, t=33, h=65, lengths=(33,), n=16, splits=2, dtype="float16"), False),
]
"""Problems, each with whether a causal mask limits them."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("case", "causal"), CASES, ids=str)
def test_stage_alone(stage, case, causal):
    # A role without tokens is not written: see test_a_role_without_tokens.
    if stage != "attention_block_specialized" or case.n < case.t:
        require(plan_of(stage, case, causal=causal))


OTHERS = [
    # Around the 16 partials that one step of the reduction reads.
    *(("split_kv_reduce", {"s": 3, "t": 200, "splits": splits}) for splits in (1, 16, 17, 33)),
    # b * s rows of 63 and 69: under and over one tile when b is 3.
    *(
        ("decompress_combine", {"b": b, "s": s, "t": 64, "parts": parts})
        for parts in ("both", "latent", "new")
        for b in (1, 3)
        for s in (21, 23)
    ),
]


@pytest.mark.parametrize(("stage", "fields"), OTHERS, ids=str)
def test_any_number_of_splits_and_rows(stage, fields):
    require(make_plan(stage, **{"b": 2, "h": 8, **fields}))


def test_reduce_weighs_by_lse():
    """Empty partials, rows without any key, and partials that differ by more than float32 holds."""
    plan = make_plan("split_kv_reduce", b=1, s=1, t=64, h=8, splits=4)
    o_partial, lse_partial = plan.prepare_inputs("cpu")
    absent = -torch.inf
    lse_partial[0, :, 0, 0] = absent
    lse_partial[0, :, 0, 1] = torch.tensor([absent, 2.0, absent, absent])
    lse_partial[0, :, 0, 2] = torch.tensor([1e4, -1e4, 0.0, absent])
    lse_partial[0, :, 0, 3] = torch.tensor([-1e4, -1e4, absent, absent])
    o_partial[lse_partial == absent] = 0.0
    stage = require(plan, (o_partial, lse_partial))
    out, lse = stage.output_tensors
    assert lse[0, 0, 0] == absent
    assert not out[0, 0, 0].any()
    torch.testing.assert_close(out[0, 0, 1].float(), o_partial[0, 1, 0, 1], rtol=2**-7, atol=0.0)
    torch.testing.assert_close(out[0, 0, 2].float(), o_partial[0, 0, 0, 2], rtol=2**-7, atol=0.0)


def test_partials_of_one_split_are_the_whole():
    """With one split the partial stage computes what flash_mla computes."""
    fields = {"b": 2, "s": 3, "t": 90, "h": 8, "lengths": (90, 17)}
    partial = make_plan("split_kv_partial", splits=1, **fields)
    whole = make_plan("flash_mla", **fields)
    inputs = whole.prepare_inputs("cpu")
    parts, full = require(partial, inputs).output_tensors, require(whole, inputs).output_tensors
    torch.testing.assert_close(parts[0][:, 0].to(full[0].dtype), full[0], rtol=0.0, atol=0.0)
    torch.testing.assert_close(parts[1][:, 0], full[1], rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("n", "written"), [(0, slice(0, 2)), (67, slice(2, 4))], ids=["n0", "nt"])
def test_a_role_without_tokens(n, written):
    """Its pair of outputs is not written, as the contract says; the other pair is right."""
    plan = make_plan("attention_block_specialized", b=2, s=5, t=67, h=8, n=n, lengths=(67, 40))
    inputs = plan.prepare_inputs("cpu")
    stage = plan.plan(*inputs)
    poison_outputs(stage)
    stage.launch()
    references = plan.reference_fn(*inputs)
    baselines = plan.reference_fn(*inputs, compute_dtype=plan.torch_dtype)
    for index, output in enumerate(stage.output_tensors):
        if index not in range(4)[written]:
            assert output.isnan().all()
            continue
        error, allowed = (compare(x, references[index]) for x in (output, baselines[index]))
        assert error.relative_frobenius <= 2 * allowed.relative_frobenius + 1e-5


def test_combine_does_not_read_an_absent_part():
    for parts, absent in (("latent", (2, 3)), ("new", (0, 1, 4))):
        plan = make_plan("decompress_combine", b=2, s=3, t=64, h=8, parts=parts)
        inputs = plan.prepare_inputs("cpu")
        stage = plan.plan(*inputs)
        expected = plan.reference_fn(*inputs)[0]
        for index in absent:
            inputs[index].fill_(torch.nan)
        stage.launch()
        torch.testing.assert_close(stage.output_tensors[0].float(), expected, rtol=2**-6, atol=0.02)


def test_combine_rows_without_keys():
    """-inf in one part leaves the other, -inf in both gives 0 and -inf."""
    plan = make_plan("decompress_combine", b=1, s=1, t=64, h=8)
    inputs: list[Tensor] = list(plan.prepare_inputs("cpu"))
    lse_latent, lse_new = inputs[1], inputs[3]
    lse_latent[0, 0, :2] = -torch.inf
    lse_new[0, 0, 1:3] = -torch.inf
    inputs[0][0, 0, :2] = 0.0
    inputs[2][0, 0, 1:3] = 0.0
    out, lse = require(plan, tuple(inputs)).output_tensors
    assert torch.equal(out[0, 0, 0], inputs[2][0, 0, 0])
    assert not out[0, 0, 1].any()
    assert lse[0, 0].isinf().tolist() == [False, True, *[False] * 6]


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_combine_parts_of_very_different_weight(far):
    plan = make_plan("decompress_combine", b=1, s=2, t=64, h=8)
    inputs = plan.prepare_inputs("cpu")
    inputs[1].fill_(far)
    require(plan, inputs)
