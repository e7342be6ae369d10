"""Input makers: shapes, poison, statistics, and the projections between the forms."""

from dataclasses import replace

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.inputs import (
    decompress_all,
    decompress_newest,
    make_inputs,
    project_queries,
    up_project,
)
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.product import product

PROBLEM = MlaProblem(b=4, s=3, t=10, h=5, d=8, p=4, k=16, lengths=(10, 0, 1, 7))


SHAPES = {
    "q_nope": (4, 3, 5, 8), "q_rope": (4, 3, 5, 4), "c_kv": (4, 10, 16), "k_rope": (4, 10, 4),
    "w_uk": (5, 8, 16), "w_uv": (5, 16, 8), "lengths": (4,),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shapes_and_dtypes(device, dtype):
    inputs = make_inputs(replace(PROBLEM, dtype=dtype), device)
    for name, shape in SHAPES.items():
        tensor = getattr(inputs, name)
        assert tuple(tensor.shape) == shape and tensor.is_contiguous()
        assert tensor.device.type == device
        assert tensor.dtype == (torch.int32 if name == "lengths" else getattr(torch, dtype))


def test_nan_exactly_beyond_each_length():
    inputs = make_inputs(PROBLEM, "cpu", seed=0)
    for request, length in enumerate(PROBLEM.kv_lengths):
        for cache in (inputs.c_kv, inputs.k_rope):
            assert not cache[request, :length].isnan().any()
            assert cache[request, length:].isnan().all()
    for name in ("q_nope", "q_rope", "w_uk", "w_uv"):
        assert getattr(inputs, name).isfinite().all()
    assert inputs.lengths.tolist() == list(PROBLEM.kv_lengths)


def test_seed_repeats_and_none_does_not():
    first, second = (make_inputs(PROBLEM, "cpu", seed=7) for _ in range(2))
    assert torch.equal(first.q_nope, second.q_nope)
    assert torch.equal(first.c_kv.nan_to_num(), second.c_kv.nan_to_num())
    assert not torch.equal(first.q_nope, make_inputs(PROBLEM, "cpu", seed=8).q_nope)
    assert not torch.equal(make_inputs(PROBLEM, "cpu").q_nope, make_inputs(PROBLEM, "cpu").q_nope)


def test_projected_operands_have_about_unit_variance():
    problem = MlaProblem(b=1, s=8, t=64, h=4)
    inputs = make_inputs(problem, "cpu", seed=0)
    keys, values = decompress_all(inputs.c_kv, inputs.w_uk, inputs.w_uv)
    assert values.float().std() == pytest.approx(1.0, rel=0.05)
    for tensor in (keys, project_queries(inputs.q_nope, inputs.w_uk)):
        assert 0.6 < tensor.float().std() < 1.5


def test_projections_match_einsum():
    inputs = make_inputs(PROBLEM, "cpu", seed=0)
    q, w_uk, w_uv = inputs.q_nope.double(), inputs.w_uk.double(), inputs.w_uv.double()
    latent = project_queries(q, w_uk)
    assert latent.is_contiguous()
    torch.testing.assert_close(latent, torch.einsum("bshd,hdk->bshk", q, w_uk))
    output = up_project(latent, w_uv)
    assert output.is_contiguous()
    torch.testing.assert_close(output, torch.einsum("bshk,hkd->bshd", latent, w_uv))
    assert project_queries(inputs.q_nope, inputs.w_uk).dtype is torch.bfloat16

    cache = inputs.c_kv.double()
    keys, values = decompress_all(cache, w_uk, w_uv)
    torch.testing.assert_close(keys, torch.einsum("btk,hdk->bhtd", cache, w_uk), equal_nan=True)
    torch.testing.assert_close(values, torch.einsum("btk,hkd->bhtd", cache, w_uv), equal_nan=True)


@pytest.mark.parametrize("n", [0, 1, 3, 7, 9, 10])
def test_decompress_newest_is_the_end_of_each_request(n):
    inputs = make_inputs(PROBLEM, "cpu", seed=0)
    keys, values = decompress_all(inputs.c_kv, inputs.w_uk, inputs.w_uv)
    k_new, v_new, rope_new = decompress_newest(inputs, n)
    assert tuple(k_new.shape) == tuple(v_new.shape) == (PROBLEM.b, PROBLEM.h, n, PROBLEM.d)
    assert tuple(rope_new.shape) == (PROBLEM.b, n, PROBLEM.p)
    for request, (old, new) in enumerate(PROBLEM.window(n)):
        span = slice(old, old + new)
        torch.testing.assert_close(k_new[request, :, :new], keys[request, :, span])
        torch.testing.assert_close(v_new[request, :, :new], values[request, :, span])
        assert torch.equal(rope_new[request, :new], inputs.k_rope[request, span])
        for tensor in (k_new[request, :, new:], v_new[request, :, new:], rope_new[request, new:]):
            assert tensor.isnan().all()


def test_projections_name_the_wrong_operand():
    x = make_inputs(PROBLEM, "meta")
    for message, call in {
        r"w_uk: expected \[5, 8, ...\] .*q_nope": lambda: project_queries(x.q_nope, x.w_uv),
        "o_latent: expected 4 dimensions": lambda: up_project(x.c_kv, x.w_uv),
        r"w_uk: expected \[h, d, k=16\]": lambda: decompress_all(x.c_kv, x.w_uv, x.w_uv),
        r"w_uv: expected \[h=5, k=16, v\]": lambda: decompress_all(x.c_kv, x.w_uk, x.w_uk),
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            call()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_rounded_once(dtype, generator):
    rows, matrices = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 5, 300), (3, 300, 4))
    )
    exact = rows.double() @ matrices.double()
    found = product(rows, matrices)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    out = torch.empty_like(found)
    assert product(rows, matrices, out=out) is out and torch.equal(out, found)


def test_shapes_alone_take_no_step_per_request(monkeypatch):
    monkeypatch.setattr("mla_var3.op.mla.inputs._decompress", None)
    inputs = make_inputs(PROBLEM, "meta")
    keys, values = decompress_all(inputs.c_kv, inputs.w_uk, inputs.w_uv)
    window = decompress_newest(inputs, 6)
    assert [tuple(each.shape) for each in (keys, values)] == [(4, 5, 10, 8)] * 2
    assert [tuple(each.shape) for each in window] == [(4, 5, 6, 8), (4, 5, 6, 8), (4, 6, 4)]
