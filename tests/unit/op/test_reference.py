"""The reference: against other implementations, between its own paths, and with poison."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.compare import compare
from mla_var3.op.mla import attend as attend_module
from mla_var3.op.mla.attend import KvSegment, attend
from mla_var3.op.mla.inputs import (
    MlaInputs,
    decompress_all,
    decompress_newest,
    make_inputs,
    project_queries,
    up_project,
)
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import (
    reference_decompressed,
    reference_from_latent,
    reference_latent,
    reference_mix,
)
from tests.unit.op.op_support import visible, wide

# Mixed lengths: full, empty, shorter than s, just s, in between.
PROBLEM = MlaProblem(b=5, s=4, t=11, h=3, d=8, p=4, k=16, v=6, lengths=(11, 0, 2, 4, 7))


def mask_options(problem):
    return {"causal": problem.causal, "scale": problem.softmax_scale}


def by_hand(problem: MlaProblem, inputs: MlaInputs, window: int | None = None):
    """Attention row by row in Python, in float64, from decompressed keys."""
    out = torch.zeros(problem.b, problem.s, problem.h, problem.v, dtype=torch.float64)
    lse = torch.full((problem.b, problem.s, problem.h), -math.inf, dtype=torch.float64)
    for r in range(problem.b):
        for i in range(problem.s):
            own = problem.kv_lengths[r] - problem.s + i
            begin = 0 if window is None else max(0, own + 1 - window)
            seen = slice(begin, visible(problem, r, i))
            for head in range(problem.h):
                if seen.stop <= begin:
                    continue
                latent = inputs.c_kv[r, seen].double()
                keys = latent @ inputs.w_uk[head].double().T
                values = latent @ inputs.w_uv[head].double()
                logits = keys @ inputs.q_nope[r, i, head].double()
                logits += inputs.k_rope[r, seen].double() @ inputs.q_rope[r, i, head].double()
                logits *= problem.softmax_scale
                lse[r, i, head] = logits.logsumexp(0)
                out[r, i, head] = logits.softmax(0) @ values
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("scale", "p", "window"), [(None, 4, None), (0.3, 4, 1), (None, 0, 3), (None, 4, 9)]
)
def test_every_path_equals_attention_by_hand(causal, scale, p, window):
    problem = replace(PROBLEM, causal=causal, scale=scale, p=p)
    inputs = make_inputs(problem, "cpu", seed=1)
    expected = by_hand(problem, inputs, window)
    exact = wide(inputs)
    wanted = {"compute_dtype": torch.float64, "sliding_window": window}
    options = {**mask_options(problem), **wanted}
    q_latent = project_queries(exact.q_nope, exact.w_uk)
    k, v = decompress_all(exact.c_kv, exact.w_uk, exact.w_uv)

    found = {
        "decompressed": reference_decompressed(
            exact.q_nope, exact.q_rope, k, v, exact.k_rope, exact.lengths, **options
        ),
        "from_latent": reference_from_latent(exact, problem, **wanted),
    }
    o_latent, lse = reference_latent(
        q_latent, exact.q_rope, exact.c_kv, exact.k_rope, exact.lengths, **options
    )
    found["latent"] = up_project(o_latent, exact.w_uv), lse
    for n in (0, 1, 3, 4, 8, 11):
        k_new, v_new, rope_new = decompress_newest(exact, n)
        found[f"mix n={n}"] = reference_mix(
            exact.q_nope, q_latent, exact.q_rope, exact.c_kv, exact.k_rope, k_new, v_new, rope_new,
            exact.w_uv, problem.kv_lengths, **options,
        )  # fmt: skip
    for name, (out, lse) in found.items():
        assert out.shape == expected[0].shape, name
        assert compare(out, expected[0]).relative_frobenius < 1e-13, name
        assert compare(lse, expected[1]).relative_frobenius < 1e-13, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compute_dtype_rounds_like_that_dtype(dtype):
    problem = MlaProblem(b=2, s=4, t=64, h=4, d=32, p=16, k=64, dtype=dtype)
    torch_dtype = getattr(torch, dtype)
    inputs = make_inputs(problem, "cpu", seed=3)
    exact, _ = by_hand(problem, inputs)
    out, lse = reference_from_latent(inputs, problem, compute_dtype=torch_dtype)
    assert out.dtype is torch.float32
    assert torch.equal(out, out.to(torch_dtype).float())
    low, high = (1e-3, 2e-2) if dtype == "bfloat16" else (1e-4, 3e-3)
    assert low < compare(out, exact).relative_frobenius < high

    k, v = decompress_all(inputs.c_kv, inputs.w_uk, inputs.w_uv)
    out, lse = reference_decompressed(
        inputs.q_nope, inputs.q_rope, k, v, inputs.k_rope, inputs.lengths,
        **mask_options(problem), compute_dtype=torch_dtype,
    )  # fmt: skip
    assert low < compare(out, exact).relative_frobenius < high
    assert lse.dtype is torch.float32


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s", "t"), [(1, 1), (1, 9), (3, 3), (4, 13)])
def test_decompressed_matches_torch_sdpa(causal, s, t):
    problem = MlaProblem(b=2, s=s, t=t, h=3, d=8, p=4, k=16, causal=causal)
    inputs = make_inputs(problem, "cpu", seed=5)
    k, v = (x.float() for x in decompress_all(inputs.c_kv, inputs.w_uk, inputs.w_uv))
    q = torch.cat([inputs.q_nope, inputs.q_rope], -1).float()
    keys = torch.cat([k, inputs.k_rope.float()[:, None].expand(-1, problem.h, -1, -1)], -1)
    # Bottom-right alignment, which SDPA's own causal flag does not have.
    mask = torch.ones(s, t, dtype=torch.bool).tril(t - s) if causal else None
    expected = scaled_dot_product_attention(
        q.transpose(1, 2), keys, v, attn_mask=mask, scale=problem.softmax_scale
    ).transpose(1, 2)
    out, _ = reference_decompressed(
        inputs.q_nope, inputs.q_rope, k, v, inputs.k_rope, inputs.lengths, **mask_options(problem)
    )
    torch.testing.assert_close(out, expected)


def random_segments(b=2, s=3, h=4, m=6, e=5, ev=7, shared=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = 1 if shared else h
    return KvSegment(
        q=torch.randn(b, s, h, e, generator=generator),
        keys=torch.randn(b, heads, m, e, generator=generator),
        values=torch.randn(b, heads, m, ev, generator=generator),
        positions=torch.arange(m).expand(b, m),
    )


@pytest.mark.parametrize("shared", [True, False])
def test_segments_together_equal_one_segment(shared):
    whole = random_segments(shared=shared)
    (expected,), expected_lse = attend([whole], lengths=[6, 5], causal=True, scale=0.4)

    def with_nan(rows: torch.Tensor, picked: list[int]) -> torch.Tensor:
        return torch.cat([rows[:, :, picked], torch.full_like(rows[:, :, :1], math.nan)], 2)

    # Slots in two segments, out of order, with NaN in slots marked unused.
    parts = [
        KvSegment(
            whole.q, with_nan(whole.keys, picked), with_nan(whole.values, picked),
            torch.tensor([*picked, -1]).expand(2, 4),
        )
        for picked in ([4, 1, 0], [5, 2, 3])
    ]  # fmt: skip
    outputs, lse = attend(parts, lengths=torch.tensor([6, 5]), causal=True, scale=0.4)
    torch.testing.assert_close(outputs[0] + outputs[1], expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("h", [1, 4])
def test_empty_segment_contributes_nothing(h):
    whole = random_segments(h=h)
    empty = random_segments(h=h, m=0, ev=2)
    (alone,), lse = attend([whole], lengths=[6, 6], causal=False, scale=1.0)
    (first, second), lse_both = attend([empty, whole], lengths=[6, 6], causal=False, scale=1.0)
    assert torch.equal(first, torch.zeros(2, 3, h, 2))
    assert torch.equal(second, alone)
    assert torch.equal(lse, lse_both)


def test_head_chunks_do_not_change_the_result(monkeypatch):
    inputs = make_inputs(PROBLEM, "cpu", seed=8)
    expected = reference_from_latent(inputs, PROBLEM)
    monkeypatch.setattr(attend_module, "_CHUNK_ELEMENTS", 1)
    found = reference_from_latent(inputs, PROBLEM)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_callers_tf32_choice_is_restored_even_after_an_error(monkeypatch):
    matmul = torch.backends.cuda.matmul
    seen = []
    original = attend_module._attend_heads

    def spy(*args):
        seen.append(matmul.fp32_precision)
        original(*args)
        raise RuntimeError("stop")

    monkeypatch.setattr(attend_module, "_attend_heads", spy)
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="stop"):
            attend([random_segments()], lengths=[6, 6], causal=False, scale=1.0)
        assert seen == ["ieee"]
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def replaced(**change):
    return [replace(random_segments(), **change)]


@pytest.mark.parametrize(
    ("segments", "lengths", "message"),
    [
        (replaced(keys=torch.zeros(2, 3, 6, 5)), 2, r"segments\[0\].keys: expected \[2, 4 or 1"),
        (replaced(values=torch.zeros(2, 4, 5, 7)), 2, r"segments\[0\].values: .*4 or 1, 6, ev\]"),
        (replaced(positions=torch.zeros(2, 5)), 2, r"segments\[0\].positions: expected \[2, 6\]"),
        ([], 0, "segments: expected at least one"),
        ([random_segments()], 3, r"lengths: expected \[b=2\], got \[3\]"),
        ([random_segments(), random_segments(s=2)], 2, r"segments\[1\].q: expected \[2, 3, 4, e\]"),
    ],
)
def test_bad_arguments_are_named(segments, lengths, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        attend(segments, lengths=[1] * lengths, causal=True, scale=1.0)


def test_compare_counts_equal_infinities_as_equal_and_never_lets_a_nan_pass():
    inf, nan = math.inf, math.nan
    ref = torch.tensor([-inf, 2.0])
    assert compare(ref.clone(), ref).relative_frobenius == 0.0
    for wrong in ([inf, 2.0], [-1e30, 2.0], [-inf, -inf]):
        figures = compare(torch.tensor(wrong), ref)
        assert figures.mismatched_inf == 1
        assert figures.relative_frobenius == figures.max_abs == inf
    for out, ref, count in (
        (torch.tensor([nan, 1.0, nan]), torch.tensor([1.0, 1.0, -inf]), 2),
        (torch.ones(1), torch.tensor([nan]), 0),
    ):
        figures = compare(out, ref)
        assert figures.nan_count == count
        assert not figures.relative_frobenius <= 1e9 and not figures.max_abs <= 1e9


def test_compare_figures_and_edges(monkeypatch):
    assert compare(torch.zeros(0), torch.zeros(0)).relative_frobenius == 0.0
    assert compare(torch.ones(2), torch.zeros(2)).relative_frobenius == math.inf
    with pytest.raises(InvalidArgumentError, match=r"^out: expected the shape of ref \[2\]"):
        compare(torch.ones(3), torch.ones(2))
    monkeypatch.setattr("mla_var3.op.compare._COMPARE_ELEMENTS", 3)
    out, ref = torch.arange(10.0).view(2, 5).T, torch.ones(5, 2)
    figures = compare(out.half(), ref)
    assert figures.relative_frobenius == pytest.approx(float((out - ref).norm() / ref.norm()))
    assert (figures.max_abs, figures.nan_count, figures.mismatched_inf) == (8.0, 0, 0)
