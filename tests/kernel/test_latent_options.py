"""Options of the cuTile latent kernels at the level of their plans; calls: `test_portable.py`."""

import pytest
import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.plan import Tiling

from .kernel_support import make_plan, require

KERNELS = ("flash_mla", "flash_mla_split_kv", "split_kv_partial")
SIZES = {"b": 2, "s": 3, "t": 100, "h": 6, "lengths": (100, 33), "scale": 0.1}


def latent_plan(name: str, **fields: object) -> MlaPlan:
    own = {} if name == "flash_mla" else {"splits": 2}
    return make_plan(name, **{**SIZES, **own, **fields}).for_target("sm_90")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("page", [16, 64])
def test_a_plan_makes_and_checks_paged_inputs(name, page):
    require(latent_plan(name, page=page))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize("window", [1, 40])
def test_a_plan_with_a_sliding_window(name, page, window):
    require(latent_plan(name, page=page, sliding_window=window))


@pytest.mark.parametrize("name", ["flash_mla", "split_kv_partial"])
@pytest.mark.parametrize("page", [0, 32])
def test_without_rope(name, page):
    """A rope part of no columns is left out of the scores."""
    plan = latent_plan(name, page=page)
    inputs = LatentInputs(*plan.prepare_inputs("cpu"))
    plan.p = 0
    given = inputs._replace(q_rope=inputs.q_rope[..., :0], k_rope=inputs.k_rope[..., :0])
    require(plan, tuple(tensor for tensor in given if tensor is not None))


def test_a_kv_tile_lies_in_one_page():
    plan = latent_plan("flash_mla", page=48)
    assert isinstance(plan.tiling, Tiling) and plan.tiling.Bn == 16
    longer = plan.copy(tiling=type(plan.tiling)(64, 32, 128))
    with pytest.raises(InvalidArgumentError, match="Bn: expected a divisor of page=48, got 32"):
        longer.plan(*longer.prepare_inputs("cpu")).launch()
    with pytest.raises(InvalidArgumentError, match="page: expected a multiple of 16, or 0, got 24"):
        make_plan("flash_mla", page=24)


def test_inputs_are_checked():
    plan = latent_plan("flash_mla", page=32)
    inputs = LatentInputs(*plan.prepare_inputs("cpu"))
    table = inputs.block_table
    assert table is not None
    bounds, tree = torch.tensor([0, 3, 6]), torch.ones((2, 3, 3), dtype=torch.bool)
    wrong = {
        "table: expected .b=2, at least 4 pages., got none": {"block_table": None},
        "table: expected .b=2, at least 4 pages., got .2, 3.": {"block_table": table[:, :3]},
        "table: expected int32": {"block_table": table.long()},
        "latent: expected .pages=11, page=32": {"c_kv": inputs.c_kv[:, :16]},
        "cu_seqlens_q: expected .b.1=3., got .2.": {"cu_seqlens_q": bounds.int()[1:]},
        "cu_seqlens_q: expected dtype torch.int32": {"cu_seqlens_q": bounds},
        "tree: expected .b=2, s=3, s=3.": {"tree": tree[:1]},
        "tree: expected dtype torch.bool": {"tree": tree.int()},
    }
    for message, fields in wrong.items():
        given = inputs._replace(**fields)
        if given.cu_seqlens_q is not None:
            flat = {name: getattr(given, name).flatten(0, 1) for name in ("q_latent", "q_rope")}
            given = given._replace(**flat)
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            plan.plan(*given)
    whole = plan.copy(causal=False)
    with pytest.raises(InvalidArgumentError, match="tree: expected none with causal=False"):
        whole.plan(*inputs._replace(tree=tree))
