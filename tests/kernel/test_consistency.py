"""Random problems give the same answer on every latent path."""

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_var3.op.compare import compare
from mla_var3.op.mla.inputs import up_project
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_from_latent

from .kernel_support import make_plan

EXAMPLES = int(os.environ.get("HYPER_MLA_EXAMPLES", "15"))
"""More than the default are drawn at random, for a search."""
PATHS = ("flash_mla", "flash_mla_split_kv", "mla_var6_plus")


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    b = draw(st.integers(1, 3))
    s = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 33])))
    t = draw(st.one_of(st.integers(1, 140), st.sampled_from([64, 127, 128, 129, 192])))
    length = st.one_of(st.integers(0, t), st.sampled_from([0, 1, min(s, t), t]))
    return {
        "b": b,
        "s": s,
        "t": t,
        "h": draw(st.sampled_from([1, 2, 3, 8])),
        "lengths": tuple(draw(st.lists(length, min_size=b, max_size=b))),
        "causal": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["bfloat16", "float16"])),
        "seed": draw(st.integers(0, 99)),
    }


def run(path: str, fields: dict[str, object], **own: int) -> tuple[torch.Tensor, torch.Tensor]:
    plan = make_plan(path, **fields, **own)
    stage = plan.plan(*plan.prepare_inputs("cpu"))
    stage.launch()
    output, lse = stage.output_tensors
    if output.shape[-1] == plan.k:
        output = up_project(output, plan.make_inputs("cpu").w_uv)
    return output, lse


@settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES <= 15, print_blob=True
)
@given(fields=problems(), data=st.data())
def test_all_paths_agree(fields, data):
    t = int(fields["t"])
    own = {
        "flash_mla": {},
        "flash_mla_split_kv": {"splits": data.draw(st.integers(1, min(t, 9)), label="splits")},
        "mla_var6_plus": {"n": data.draw(st.integers(0, t), label="n")},
    }
    results = {path: run(path, fields, **own[path]) for path in PATHS}

    sizes = {key: value for key, value in fields.items() if key != "seed"}
    problem = MlaProblem(**sizes)
    raw = make_plan("flash_mla", **fields).make_inputs("cpu")
    dtype = raw.q_nope.dtype
    exact, exact_lse = reference_from_latent(raw, problem)
    rounded = compare(reference_from_latent(raw, problem, compute_dtype=dtype)[0], exact)
    epsilon = torch.finfo(dtype).eps
    for path, (output, lse) in results.items():
        error, lse_error = compare(output, exact), compare(lse, exact_lse)
        assert error.nan_count == lse_error.nan_count == lse_error.mismatched_inf == 0, path
        # The dtype's epsilon covers problems so small that rounding happens to cancel.
        assert error.relative_frobenius <= 2 * rounded.relative_frobenius + epsilon, path
        # The queries of the latent paths are rounded before the scores are taken.
        assert lse_error.max_abs <= 16 * epsilon, path

    # Splitting changes the order of float32 sums only.
    whole, split = results["flash_mla"], results["flash_mla_split_kv"]
    assert compare(split[0], whole[0]).relative_frobenius <= 2 * epsilon
    assert compare(split[1], whole[1]).max_abs <= 1e-5
