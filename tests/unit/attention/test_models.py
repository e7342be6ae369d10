"""Calls with the widths and head counts of every published model, against float64 on the CPU."""

import functools
from dataclasses import replace

import pytest
import torch

import mla_var3
from mla_var3.conf.models import Widths, models
from mla_var3.errors import UnsupportedError
from mla_var3.op.mla.inputs import MlaInputs, make_inputs, project_queries, up_project
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_from_latent

WIDTHS = sorted({each.widths for each in models().values()})
HEADS = (128, 96, 64, 48, 40, 32, 20, 16, 12, 10, 8, 5, 4, 2, 1)
"""Of the models, and of their ranks with tensor parallelism."""
B, T = 2, 70

# Each in turn with each number of heads: s, causal, paged.
KINDS = [(1, True, True), (3, True, False), (4, False, True)]


def case(widths: Widths, h: int, s: int, causal: bool) -> tuple[MlaProblem, MlaInputs]:
    problem = MlaProblem(B, s, T, h, **widths._asdict(), causal=causal, lengths=(T, 33))
    return problem, make_inputs(problem, "cpu", seed=h)


@functools.cache
def all_heads(widths: Widths, s: int, causal: bool) -> tuple[MlaInputs, torch.Tensor, torch.Tensor]:
    """Inputs with as many heads as any model has, and the exact results, head by head."""
    problem, inputs = case(widths, max(HEADS), s, causal)
    tensors = vars(inputs).items()
    wide = {name: each if name == "lengths" else each.float() for name, each in tensors}
    return MlaInputs(**wide), *exact(problem, inputs)


def filled(problem: MlaProblem, inputs: MlaInputs, **options) -> mla_var3.LatentCache:
    cache = mla_var3.LatentCache.allocate(
        B, T, k=problem.k, p=problem.p, heads=problem.h, head_dim=problem.d, value_dim=problem.v,
        **options,
    )  # fmt: skip
    if options.get("prefix"):
        m = options["prefix"]
        cache.set_prefix(inputs.c_kv[0, :m], inputs.k_rope[0, :m], inputs.w_uk, inputs.w_uv)
        inputs.c_kv[:, :m], inputs.k_rope[:, :m] = inputs.c_kv[0, :m], inputs.k_rope[0, :m]
    first = options.get("prefix", 0)
    counts = [length - first for length in problem.kv_lengths]
    weights = {"w_uk": inputs.w_uk, "w_uv": inputs.w_uv} if options.get("window") else {}
    cache.append(inputs.c_kv[:, first:], inputs.k_rope[:, first:], counts, **weights)
    return cache


def exact(problem: MlaProblem, inputs: MlaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    return reference_from_latent(inputs, problem, compute_dtype=torch.float64)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("h", HEADS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_every_width_with_every_number_of_heads(widths, h):
    s, causal, paged = KINDS[(HEADS.index(h) + WIDTHS.index(widths)) % len(KINDS)]
    full, *expected_of_all = all_heads(widths, s, causal)
    expected, expected_lse = (each[:, :, -h:] for each in expected_of_all)
    inputs = replace(
        full, q_nope=full.q_nope[:, :, -h:], q_rope=full.q_rope[:, :, -h:], w_uk=full.w_uk[-h:],
        w_uv=full.w_uv[-h:],
    )  # fmt: skip
    problem = MlaProblem(B, s, T, h, **widths._asdict(), lengths=(T, 33))
    cache = filled(problem, inputs, page_size=64 if paged else None, dtype=torch.float32)
    operands = (inputs.q_nope, inputs.q_rope, cache, inputs.w_uk, inputs.w_uv)
    o, lse = mla_var3.mla_attention(*operands, causal=causal, return_lse=True)
    assert o.shape == (B, s, h, widths.v)
    assert error(o, expected) < 1e-5
    assert error(lse, expected_lse) < 1e-5

    q_latent = project_queries(inputs.q_nope, inputs.w_uk)
    o_latent, latent_lse = mla_var3.mla_latent_attention(
        q_latent, inputs.q_rope, cache, d=widths.d, causal=causal
    )
    assert error(up_project(o_latent, inputs.w_uv), expected) < 1e-5
    assert error(latent_lse, expected_lse) < 1e-5


@pytest.mark.parametrize("options", [{"window": 20}, {"prefix": 16}, {"window": 12, "prefix": 16}])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_decompressed_copies_have_the_width_of_the_values(widths, options):
    problem, inputs = case(widths, 4, 3, True)
    cache = filled(problem, inputs, **options)
    expected, _ = exact(problem, inputs)
    operands = (inputs.q_nope, inputs.q_rope, cache, inputs.w_uk, inputs.w_uv)
    assert error(mla_var3.mla_attention(*operands), expected) < 1e-2
    per_token = 2 * (problem.h * (problem.d + problem.v) + problem.p)
    sizes = cache.sizes()
    assert sizes.window_bytes == B * options.get("window", 0) * per_token
    assert sizes.prefix_bytes == options.get("prefix", 0) * per_token


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["glm-4.7-flash", "glm-5.3-flash"])
def test_packed_queries_a_given_output_and_batch_invariance(name, packed):
    """Of models with wider values, and without rope."""
    problem, inputs = case(mla_var3.model(name).widths, 5, 3, True)
    assert problem.p == 0 or problem.v > problem.d
    expected, _ = exact(problem, inputs)
    queries, options = (inputs.q_nope, inputs.q_rope), {}
    out = torch.empty_like(expected, dtype=torch.bfloat16)
    if packed:
        queries, out = tuple(rows.flatten(0, 1) for rows in queries), out.flatten(0, 1)
        options = {"cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32), "max_q": 3}
    operands = (*queries, filled(problem, inputs), inputs.w_uk, inputs.w_uv)
    for invariant in (False, True):
        found = mla_var3.mla_attention(*operands, batch_invariant=invariant, out=out, **options)
        assert found is out
        assert error(out.view_as(expected), expected) < 1e-2


def test_kernels_that_need_equal_widths_refuse_by_name():
    sizes = {"b": 32, "s": 4, "t": 4096, **mla_var3.model("glm-4.7-flash").sizes(4)}
    found = mla_var3.explain(**sizes, window=4096, device_name="H200")
    refusals = {(c.kernel, c.language): c.refusal for c in found.candidates}
    for name, language in (
        ("flash_attention", "cutile-dsl"), ("mla_var6_plus", "cutile-dsl"),
        ("mla_var6_plus", "cute-dsl"),
    ):  # fmt: skip
        assert refusals[name, language] == "values of width v=256 beside d=192; it needs v = d"
    for name in ("flash_mla", "flash_attention"):
        assert refusals[name, "cute-dsl"] is None
    with pytest.raises(UnsupportedError, match="mla_var6_plus .* v=256 beside d=192"):
        mla_var3.explain(**sizes, kernel="mla_var6_plus", device_name="H200")


@pytest.mark.parametrize("widths", [each for each in WIDTHS if each.p], ids=str)
def test_the_latent_cutile_kernel_serves_every_width_with_rope(widths):
    problem, inputs = case(widths, 5, 2, True)
    expected, expected_lse = exact(problem, inputs)
    o, lse = mla_var3.mla_attention(
        inputs.q_nope, inputs.q_rope, filled(problem, inputs), inputs.w_uk, inputs.w_uv,
        kernel="flash_mla:cutile-dsl", return_lse=True,
    )  # fmt: skip
    assert error(o, expected) < 1e-2
    assert error(lse, expected_lse) < 3e-3
