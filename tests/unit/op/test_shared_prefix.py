"""A prefix shared by the requests: against the same call with the prefix in every request."""

import itertools
from dataclasses import replace

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.inputs import project_queries
from mla_var3.op.mla.prefix.problem import (
    SharedPrefixProblem,
    latent_copied_cost,
    latent_shared_cost,
    latent_shared_passes,
    shared_prefix_attention_cost,
)
from mla_var3.op.mla.prefix.reference import (
    SharedPrefixInputs,
    make_shared_prefix_inputs,
    reference_shared_prefix,
)
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import decompressed_segment, reference_from_latent
from mla_var3.op.mla.window.formats import FP8, PLAIN
from mla_var3.op.mla.window.quantise import quantise
from tests.unit.op.op_support import wide

# Full, empty, within the prefix, at its end, just past it, own tokens fewer than queries.
PROBLEM = MlaProblem(b=6, s=4, t=12, h=3, d=8, p=4, k=16, v=6, lengths=(12, 0, 2, 5, 6, 8))


def shared_attention(problem: MlaProblem, x: SharedPrefixInputs):
    plain = wide(x.plain)
    parts = (x.k_prefix, x.v_prefix, x.k_rope_prefix, x.c_kv, x.k_rope)
    return reference_shared_prefix(
        plain.q_nope, project_queries(plain.q_nope, plain.w_uk), plain.q_rope,
        *(part.double() for part in parts), plain.w_uv, plain.lengths,
        causal=problem.causal, scale=problem.softmax_scale, compute_dtype=torch.float64,
    )  # fmt: skip


def exact_prefix(x: SharedPrefixInputs, prefix: int) -> SharedPrefixInputs:
    """The same inputs with keys and values that were not rounded to 16 bits."""
    longest = int(x.plain.lengths.argmax())
    latent = x.plain.c_kv[longest, :prefix].double()
    return replace(
        x,
        k_prefix=torch.einsum("mk,hdk->hmd", latent, x.plain.w_uk.double()),
        v_prefix=torch.einsum("mk,hkd->hmd", latent, x.plain.w_uv.double()),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 5, 12])
def test_it_equals_attention_with_the_prefix_copied(causal, prefix):
    problem = replace(PROBLEM, causal=causal)
    x = exact_prefix(
        make_shared_prefix_inputs(SharedPrefixProblem(problem, prefix), "cpu", 5), prefix
    )
    found, found_lse = shared_attention(problem, x)
    expected, lse = reference_from_latent(wide(x.plain), problem, compute_dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found_lse, lse, rtol=1e-9, atol=1e-10)


def test_the_reference_holds_the_prefix_once_for_all_requests():
    b, s, h, prefix = 64, 1, 4, 128
    q, rope = torch.zeros(b, s, h, 16), torch.zeros(b, s, h, 8)
    keys, rope_keys = torch.zeros(1, h, prefix, 16), torch.zeros(1, prefix, 8)
    positions = torch.arange(prefix).expand(b, -1)
    segment = decompressed_segment(q, rope, keys, keys, rope_keys, positions)
    assert segment.keys.shape == (b, h, prefix, 16)
    for rows in (segment.keys, segment.values):
        assert rows.untyped_storage().nbytes() == h * prefix * 16 * 4
    assert segment.k_rope is not None and segment.k_rope.shape == (b, prefix, 8)
    assert segment.k_rope.untyped_storage().nbytes() == prefix * 8 * 4


def test_requests_start_with_the_same_tokens_whose_slots_are_poisoned():
    problem = replace(PROBLEM, lengths=None)
    x = make_shared_prefix_inputs(SharedPrefixProblem(problem, 5), "cpu", 1)
    assert bool(x.c_kv[:, :5].isnan().all()) and bool(x.k_rope[:, :5].isnan().all())
    assert not bool(x.c_kv[:, 5:].isnan().any())
    first = x.plain.c_kv[:1, :5].expand(problem.b, -1, -1)
    assert torch.equal(x.plain.c_kv[:, :5], first)
    assert not torch.equal(x.plain.c_kv[0, 5:], x.plain.c_kv[1, 5:])
    keys = torch.einsum("mk,hdk->hmd", x.plain.c_kv[0, :5].double(), x.plain.w_uk.double())
    torch.testing.assert_close(x.k_prefix.double(), keys, rtol=2e-2, atol=2e-2)
    assert torch.equal(x.plain.k_rope[3, :5], x.k_rope_prefix)
    again = make_shared_prefix_inputs(SharedPrefixProblem(problem, 5), "cpu", 1)
    assert torch.equal(again.k_prefix, x.k_prefix)


def test_bad_prefixes_are_refused():
    for problem, prefix, message in (
        (PROBLEM, 13, "prefix: expected an integer from 0 to t=12"),
        (PROBLEM, True, "prefix: expected an integer"),
        ("mla", 1, "problem: expected an MlaProblem"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            SharedPrefixProblem(problem, prefix)
    x = make_shared_prefix_inputs(SharedPrefixProblem(PROBLEM, 5), "cpu", 0)
    for field, tensor in (
        ("k_prefix", torch.zeros(3, 13, 8)),
        ("v_prefix", x.v_prefix[:, :4]),
        ("k_rope_prefix", x.k_rope_prefix[:4]),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^{field}: expected"):
            shared_attention(PROBLEM, replace(x, **{field: tensor}))


@pytest.mark.parametrize("prefix", [0, 3, 5, 12])
@pytest.mark.parametrize("lengths", [PROBLEM.lengths, None])
def test_flops_by_counting(prefix, lengths):
    problem = replace(PROBLEM, lengths=lengths)
    shared = SharedPrefixProblem(problem, prefix)
    d, p, k, v = problem.d, problem.p, problem.k, problem.v
    mixed = absorbed = 0
    for length in problem.kv_lengths:
        for _, _, position in itertools.product(range(problem.s), range(problem.h), range(length)):
            absorbed += (k + p) + k
            mixed += (d + p) + v if position < prefix else (k + p) + k
    assert shared_prefix_attention_cost(shared).flops == 2 * mixed
    assert latent_copied_cost(shared).flops == 2 * absorbed
    assert latent_shared_cost(shared).flops == 2 * absorbed
    if prefix == 0:
        assert latent_shared_cost(shared) == latent_copied_cost(shared)
        assert (shared.prefix_tokens, shared.own_tokens) == (0, problem.total_tokens)


def test_bytes_are_the_sizes_of_the_tensors():
    problem = replace(PROBLEM, lengths=None)
    shared = SharedPrefixProblem(problem, 5)
    x = make_shared_prefix_inputs(shared, "meta")
    q_latent = project_queries(x.plain.q_nope, x.plain.w_uk)
    rows = problem.b * problem.s * problem.h
    queries = x.plain.q_nope.nbytes + x.plain.q_rope.nbytes + q_latent.nbytes
    prefix = x.k_prefix.nbytes + x.v_prefix.nbytes + x.k_rope_prefix.nbytes
    own = x.c_kv[:, 5:].nbytes + x.k_rope[:, 5:].nbytes
    partials = rows * (problem.k + problem.v) * 2 + 2 * rows * 4
    assert shared_prefix_attention_cost(shared).bytes == queries + prefix + own + partials
    copied = flash_mla_cost(problem)
    once = x.plain.c_kv[0, :5].nbytes + x.plain.k_rope[0, :5].nbytes
    assert latent_copied_cost(shared) == copied
    assert latent_shared_cost(shared).bytes == copied.bytes - (problem.b - 1) * once
    stored = sum(quantise(torch.zeros(rows.shape)).nbytes for rows in (x.k_prefix, x.v_prefix))
    plain, small = (shared_prefix_attention_cost(shared, form) for form in (PLAIN, FP8))
    assert plain.bytes - small.bytes == x.k_prefix.nbytes + x.v_prefix.nbytes - stored > 0
    assert plain.flops == small.flops


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_passes_of_latent_sharing_do_all_the_work(groups):
    problem = replace(PROBLEM, lengths=None)
    own, of_groups, merge = latent_shared_passes(SharedPrefixProblem(problem, 5, groups))
    both = flash_mla_cost(own) + flash_mla_cost(of_groups)
    assert both.flops == flash_mla_cost(problem).flops
    rows = problem.b * problem.s * problem.h
    again = rows * (2 * problem.k + problem.p) * 2 + rows * 4  # a second query, output and LSE
    once = latent_shared_cost(SharedPrefixProblem(problem, 5, groups)).bytes
    assert both.bytes == once + again
    assert merge.bytes == 3 * rows * (problem.k * 2 + 4)
    assert (of_groups.b, of_groups.causal) == (groups, False)


@pytest.mark.parametrize("lengths", [(12, 0, 0, 0), (0, 0, 0, 0), (7, 12, 1, 3), (2, 2, 2, 2)])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_short_and_empty_requests_read_no_more_than_they_have(lengths, groups):
    """Nothing shared is read more often than by copies, and no pass has more tokens than one."""
    problem = replace(PROBLEM, b=4, t=12, lengths=lengths)
    shared = SharedPrefixProblem(problem, 8, groups)
    assert shared.prefix_tokens <= shared.prefix_pairs
    assert latent_shared_cost(shared).bytes <= latent_copied_cost(shared).bytes
    _, of_groups, _ = latent_shared_passes(shared)
    assert set(of_groups.kv_lengths) == {min(8, max(lengths))}
