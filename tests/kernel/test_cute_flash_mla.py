"""flash_mla in CuTe DSL without a GPU: its keys, plans, pages and errors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.cli.commands import kernel as kernel_command
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla.flash_mla import CuteFlashMLA
from mla_var3.kernel.cute_python.mla.hopper.constants import DEFAULT_SM_COUNT
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLATiling
from mla_var3.kernel.cute_python.mla.latent.merge import merge_cost, merge_rows
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LATENT_FIELDS,
    LatentOperands,
    Partials,
    groups_of,
)
from mla_var3.kernel.paging import SPARE_PAGES, dense_inputs, paged_inputs
from mla_var3.runtime import cute_kernel, workflow
from mla_var3.runtime.cute.arguments import kinds_of
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.stage import constraint_failures

from .noted_calls import named

SMALL: dict[str, Any] = {"b": 2, "s": 2, "t": 200, "h": 64, "seed": 0}


def make(**fields: Any) -> CuteFlashMLA:
    return CuteFlashMLA(**{**SMALL, **fields})


def kernel_of(plan: CuteFlashMLA) -> CuteKernel:
    """Its only kernel, on tensors without memory."""
    (kernel,) = plan.plan(*plan.prepare_inputs("meta")).kernels()
    assert isinstance(kernel, CuteKernel)
    return kernel


def key(**fields: Any) -> str:
    """Cache key of the program."""
    kernel = kernel_of(make(**fields))
    host, args = kernel._host_and_args(kernel.tiling)
    found = cute_kernel._key(kernel.kernel_fn, host, kinds_of(args), kernel.tiling, "sm_90a")
    return found.digest


@pytest.mark.parametrize(
    "other",
    [
        {"b": 1},
        {"b": 128, "s": 1, "h": 128},
        {"s": 200},
        {"t": 1},
        {"t": 20_000, "lengths": (0, 19_999)},
        {"h": 8},
        {"causal": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [0, 64])
def test_one_program_serves_all_shapes(page, other):
    assert key(page=page, **other) == key(page=page)


def test_dtype_and_kind_of_cache_make_other_programs():
    assert len({key(), key(page=64), key(dtype="float16")}) == 3
    assert key(page=192) == key(page=64)


def test_every_candidate_is_valid_and_fits_the_buffers_of_the_plan():
    for s, h in ((1, 8), (1, 128), (2, 64), (200, 128)):
        plan = make(s=s, h=h)
        attention = kernel_of(plan)
        assert attention.args_fn is not None
        args = attention.args_fn(attention.tiling)
        o_partial, lse_partial, merges = groups_of(args, LatentOperands, Partials)[1]
        chosen = [FlashMLATiling(group_ctas=plan.row_tiles), FlashMLATiling(group_ctas=1, sms=1)]
        for tiling in (*attention.autotune_configs, *chosen):
            assert constraint_failures(tiling, plan) == ()
            shape = plan.groups(tiling)
            assert 1 <= shape.ctas <= (tiling.sms or DEFAULT_SM_COUNT)
            assert 2 * shape.ctas <= o_partial.shape[0] == lse_partial.shape[0]
            assert merge_rows(shape.ctas) <= merges.shape[0]


def test_another_tiling_has_its_own_cta_groups(monkeypatch):
    """Prepared arguments hold the CTA groups; those of another tiling would find other partials."""
    launched: list[tuple[Any, ...]] = []

    program = SimpleNamespace(bind=lambda *args: lambda: launched.append(args))
    monkeypatch.setattr(cute_kernel, "program_for", lambda *given: program)
    monkeypatch.setattr(cute_kernel, "require_arch", lambda *given: None)
    monkeypatch.setattr(CuteKernel, "device_type", "cuda")
    plan = make(s=8)
    attention = kernel_of(plan)
    seen = []
    for group_ctas in (0, 2, 1, 0):
        attention.tiling = FlashMLATiling(group_ctas=group_ctas)
        attention.launch()
        seen.append(plan.groups(attention.tiling))
        assert launched[-1][-4:] == tuple(vars(seen[-1]).values())
    assert len(set(seen)) == 3


def test_the_cost_counts_the_partials_that_a_tiling_makes():
    """One long request: every CTA group has a split of it; a single group has all of it."""
    plan = make(b=1, s=1, t=64 * 1000)
    attention = kernel_of(plan)
    whole, split = FlashMLATiling(sms=1), FlashMLATiling(sms=10)
    assert attention.algorithmic_flops_bytes_fn is not None
    without = attention.algorithmic_flops_bytes_fn(whole)
    assert without == plan._algorithmic_flops_bytes(whole)
    flops, moved = attention.algorithmic_flops_bytes_fn(split)
    assert (flops - without[0], moved - without[1]) == merge_cost(10 * 64, 2, 2)
    assert merge_cost(10 * 64, 2, 2)[1] == 10 * 64 * (512 * (2 + 2) + 4)


def test_the_scale_of_the_model_reaches_the_kernel():
    attention = kernel_of(make(scale=0.02))
    assert attention.args_fn is not None
    (scale,) = (x for x in attention.args_fn(attention.tiling) if isinstance(x, float))
    assert scale == pytest.approx(0.02 * 1.4426950408889634)


def padded(tensor: Tensor, dim: int) -> Tensor:
    """The same values as a view of a tensor that is one longer in a dimension."""
    shape = list(tensor.shape)
    shape[dim] += 1
    view = tensor.new_zeros(shape).narrow(dim, 0, tensor.shape[dim])
    return view.copy_(tensor)


def test_a_cache_that_is_a_view_of_a_larger_one_is_taken():
    plan = make(h=2)
    q_latent, q_rope, c_kv, k_rope, lengths = plan.prepare_inputs("cpu")
    attention = next(iter(plan.plan(q_latent, q_rope, padded(c_kv, 1), k_rope, lengths).kernels()))
    given = named(LATENT_FIELDS, attention.args_fn(plan.tiling))
    assert (given["latent_page_stride"].value, given["latent_stride"]) == (201 * 512, 512)


@pytest.mark.parametrize(("page", "t"), [(64, 1), (64, 385), (192, 200)])
def test_pages_hold_what_the_dense_cache_does(page, t):
    plan = make(b=3, h=2, t=t, lengths=(t, 0, (t + 1) // 2))
    dense = plan.prepare_inputs("cpu")
    paged = paged_inputs(dense, page, 0)
    _, _, latent, rope, _, table = paged
    assert latent.shape == (3 * -(-t // page) + SPARE_PAGES, page, plan.k)
    assert rope.shape[:2] == latent.shape[:2]
    used = table.flatten().tolist()
    assert len(set(used)) == len(used)
    spare = sorted(set(range(latent.shape[0])) - set(used))
    assert len(spare) == SPARE_PAGES
    assert latent[spare].isnan().all() and rope[spare].isnan().all()
    assert latent.data_ptr() + plan.k * latent.element_size() == rope.data_ptr()
    for got, wanted in zip(dense_inputs(paged, t), dense, strict=True):
        assert torch.equal(got.nan_to_num(nan=-7.0), wanted.nan_to_num(nan=-7.0))


@pytest.mark.parametrize("page", [0, 64, 192])
def test_the_reference_of_pages_is_that_of_the_dense_cache(page):
    fields = {"s": 3, "h": 8, "lengths": (200, 77)}
    paged, dense = make(page=page, **fields), make(**fields)
    wanted = dense.reference_fn(*dense.prepare_inputs("cpu"))
    for got, exact in zip(paged.reference_fn(*paged.prepare_inputs("cpu")), wanted, strict=True):
        assert torch.equal(got, exact)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernel_command, workflow):
        monkeypatch.setattr(module, "cuda_available", lambda: False)


SIZES = ["--b=2", "--s=2", "--t=200", "--h=64"]


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["flash_mla", "--target=sm_100"], 2, "unknown target 'sm_100'"),
        (["flash_mla", "--device=cpu", "--check"], 1, "--check: expected a GPU for flash_mla"),
        (["flash_mla", "--device=cpu"], 1, "--device=cpu: expected a GPU for flash_mla (cute-dsl)"),
        (["flash_mla", "--prof_type=disabled"], 1, "--prof_type=static compiles it"),
        (["flash_mla", "--prof_type=static", "--check"], 1, "--check: expected a GPU"),
        (["mla_var6_plus", "v3", "--prefix=201"], 2, "prefix: expected an integer from 0 to t=200"),
        (["mla_var6_plus", "--sms=3"], 2, "tiling.sms"),
    ],
    ids=str,
)
def test_what_the_command_line_refuses(argv, code, message, capsys):
    assert kernel_command.main([*argv, "--language=cute-dsl", *SIZES]) == code
    assert message in " ".join(capsys.readouterr().err.split())
