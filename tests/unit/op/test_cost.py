"""The cost model: against counting, against tensor sizes, and its choices against brute force."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.cost import Cost
from mla_var3.op.mla import cost
from mla_var3.op.mla.inputs import decompress_all, decompress_newest, make_inputs, project_queries
from mla_var3.op.mla.problem import MlaProblem

TINY = MlaProblem(b=3, s=2, t=5, h=2, d=4, p=2, k=8, v=6, lengths=(5, 0, 3))
FULL = replace(TINY, lengths=None)
H200 = (790.0, 4300.0)


def multiply_adds(problem, per_token):
    """Counts over every request, query, head and KV token; `per_token(position, length)`."""
    rows = problem.s * problem.h
    return rows * sum(per_token(at, each) for each in problem.kv_lengths for at in range(each))


def nbytes(*tensors):
    return sum(tensor.nbytes for tensor in tensors)


def outputs(problem, width):
    rows = (problem.b, problem.s, problem.h)
    return nbytes(torch.empty(*rows, width, dtype=torch.bfloat16), torch.empty(rows))


@pytest.mark.parametrize("problem", [TINY, FULL])
@pytest.mark.parametrize("n", range(6))
def test_flops_by_counting(problem, n):
    d, p, k, v = problem.d, problem.p, problem.k, problem.v
    head, latent = (d + p) + v, (k + p) + k
    mixed = multiply_adds(problem, lambda at, length: head if at >= length - n else latent)
    assert cost.attention_block_specialized_cost(problem, n).flops == 2 * mixed
    if n == 5:
        assert cost.flash_attention_cost(problem).flops == 2 * mixed
    if n == 0:
        assert cost.flash_mla_cost(problem).flops == 2 * mixed
        assert cost.flash_mla_split_kv_cost(problem, 3).flops == 2 * mixed


def test_bytes_are_the_sizes_of_the_tensors():
    x = make_inputs(FULL, "meta")
    keys, values = decompress_all(x.c_kv, x.w_uk, x.w_uv)
    q_latent = project_queries(x.q_nope, x.w_uk)
    o, o_latent = outputs(FULL, FULL.v), outputs(FULL, FULL.k)
    lse = FULL.b * FULL.s * FULL.h * 4
    assert cost.flash_attention_cost(FULL).bytes == o + nbytes(
        x.q_nope, x.q_rope, keys, values, x.k_rope
    )
    mla = nbytes(q_latent, x.q_rope, x.c_kv, x.k_rope) + o_latent
    assert cost.flash_mla_cost(FULL).bytes == mla
    partials = 3 * (FULL.b * FULL.s * FULL.h * FULL.k * 4 + lse)
    assert cost.flash_mla_split_kv_cost(FULL, 3).bytes == mla + 2 * partials
    assert cost.query_projection_cost(FULL).bytes == nbytes(x.q_nope, x.w_uk, q_latent)
    assert cost.output_up_projection_cost(FULL).bytes == nbytes(x.w_uv) + o_latent + o - 2 * lse
    assert cost.decompress_combine_cost(FULL).bytes == o_latent + o + nbytes(x.w_uv) + o
    for n in range(FULL.t + 1):
        old = slice(0, FULL.t - n)
        window = decompress_newest(x, n)
        assert cost.decompressed_bytes(FULL, n) == nbytes(*window)
        assert cost.attention_block_specialized_cost(FULL, n).bytes == (
            nbytes(x.q_nope, x.q_rope, q_latent, x.c_kv[:, old], x.k_rope[:, old], *window)
            + o_latent
            + o
        )
        new = slice(FULL.t - n, FULL.t)
        assert cost.decompression_cost(FULL, n).bytes == nbytes(
            x.c_kv[:, new], x.k_rope[:, new], x.w_uk, x.w_uv, *window
        )


def test_lengths_count_where_slots_do_not():
    missing = FULL.b * FULL.t - sum(TINY.kv_lengths)
    heads, latent = TINY.h * (TINY.d + TINY.v), TINY.k
    for function, width in ((cost.flash_attention_cost, heads), (cost.flash_mla_cost, latent)):
        difference = function(FULL).bytes - function(TINY).bytes
        assert difference == missing * (width + TINY.p) * 2


def test_projection_flops():
    rows = FULL.b * FULL.s * FULL.h
    assert cost.query_projection_cost(FULL).flops == 2 * rows * FULL.d * FULL.k
    expected = 2 * rows * FULL.v * FULL.k
    assert cost.output_up_projection_cost(FULL).flops == expected
    assert cost.decompress_combine_cost(FULL).flops == expected
    # Keys and values of four tokens, each a [tokens, k] product per head.
    width = TINY.d + TINY.v
    assert cost.decompression_cost(TINY, 2).flops == 2 * (2 + 2) * TINY.h * TINY.k * width


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_best_n_is_the_minimum_over_all_n(data):
    b, t = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    lengths = data.draw(st.none() | st.tuples(*[st.integers(0, t)] * b))
    problem = MlaProblem(
        b=b,
        s=data.draw(st.sampled_from([1, 2, 5, 16, 43, 100])),
        t=t,
        h=data.draw(st.sampled_from([1, 2, 8, 128])),
        d=data.draw(st.sampled_from([16, 128, 256])),
        k=data.draw(st.sampled_from([64, 256, 512])),
        lengths=lengths,
    )
    peaks = (data.draw(st.sampled_from([50.0, 209.5, 790.0, 2250.0])), 1792.0)
    multiple = data.draw(st.sampled_from([1, 7, 64]))

    # Only the attention stage depends on n. Adding the constant combine stage could round two
    # different times to one and make a tie of them.
    def time_us(n):
        return cost.attention_block_specialized_cost(problem, n).time_us(*peaks)

    best = min(range(0, t + 1, multiple), key=time_us)
    assert cost.best_n(problem, *peaks, multiple=multiple) == best


def test_best_n_prefers_less_memory():
    nothing = MlaProblem(b=2, s=8, t=64, h=8, lengths=(0, 0))
    assert cost.best_n(nothing, *H200) == 0
    # Nothing beyond the longest request: a larger window would be empty slots.
    short = MlaProblem(b=2, s=512, t=4096, h=128, lengths=(10, 100))
    assert cost.best_n(short, *H200) <= 100
    # With 2hd == k a window moves as many bytes as the latent rows: only FLOPs decide.
    balanced = MlaProblem(b=1, s=1, t=64, h=2, d=128, k=512)
    assert cost.best_n(balanced, 1e9, 1.0) == 0
    assert cost.best_n(balanced, 1e-3, 1e9) == 64


@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        (MlaProblem(b=4, s=1, t=32768, h=128), 16),  # 8 tiles on 132 SMs: one full wave
        (MlaProblem(b=32, s=1, t=4096, h=128), 2),  # 64 tiles
        (MlaProblem(b=32, s=16, t=4096, h=128), 1),  # 1024 tiles fill the SMs by themselves
        (MlaProblem(b=1, s=1, t=1, h=16), 1),  # one KV tile cannot be split
        (MlaProblem(b=1, s=1, t=4096, h=16, lengths=(0,)), 1),
        (MlaProblem(b=1, s=1, t=8192, h=16), 128),  # every tile its own split
        (MlaProblem(b=133, s=1, t=4096, h=64), 4),  # one tile more than SMs
    ],
)
def test_split_count_of_known_shapes(problem, splits):
    assert cost.split_count(problem) == splits


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 5000), st.sampled_from([8, 16, 128]))
def test_split_count_never_loses_to_no_split(b, s, t, h):
    problem = MlaProblem(b=b, s=s, t=t, h=h)
    splits = cost.split_count(problem)
    tiles, kv_tiles = b * math.ceil(s * h / 64), math.ceil(t / 64)

    def steps(count):
        return math.ceil(tiles * count / 132) * math.ceil(kv_tiles / count)

    assert 1 <= splits <= kv_tiles
    assert steps(splits) <= steps(1)
    assert splits == 1 or steps(splits) < steps(1)
    # No split is empty: fewer splits would do the same.
    assert (splits - 1) * math.ceil(kv_tiles / splits) < kv_tiles


def test_cost_arithmetic():
    total = Cost(1.0, 2.0) + Cost(3.0, 4.0)
    assert total == Cost(4.0, 6.0)
    assert total.intensity == pytest.approx(4 / 6)
    assert Cost(1.0, 0.0).intensity == math.inf
    assert Cost(0.0, 0.0).intensity == 0.0
    # 2 TFLOP at 1 TFLOP/s take 2 s; 1 GB at 1 GB/s takes 1 s.
    work = Cost(2e12, 1e9)
    assert work.time_us(1.0, 1.0) == pytest.approx(2e6)
    assert work.time_us(4.0, 1.0) == pytest.approx(1e6)
    assert work.bound(1.0, 1.0) == "compute"
    assert work.bound(4.0, 1.0) == "memory"
    assert work.bound(2.0, 1.0) == "compute"


BAD_ARGUMENTS = {
    "n: expected an integer from 0 to t=5": [
        partial(function, FULL, n)
        for function in (
            cost.attention_block_specialized_cost, cost.decompression_cost, cost.decompressed_bytes
        )
        for n in (-1, 6)
    ],
    "multiple: expected a positive integer": [partial(cost.best_n, FULL, *H200, multiple=0)],
    "sm_count: expected a positive integer": [partial(cost.split_count, FULL, sm_count=0)],
    "splits: expected a positive integer": [partial(cost.flash_mla_split_kv_cost, FULL, 0)],
    "peak_tflops: expected a positive number": [partial(Cost(1.0, 1.0).time_us, 0.0, 1.0)],
    "peak_gbps: expected a positive number": [partial(Cost(1.0, 1.0).time_us, 1.0, math.nan)],
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_ARGUMENTS)
def test_bad_arguments_are_named(message):
    for call in BAD_ARGUMENTS[message]:
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            call()
