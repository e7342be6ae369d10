"""Options of the cuTile latent kernels at the level of their plans; calls: `test_portable.py`."""

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs
from mla_var3.kernel.cutile.mla.tile_ops import e4m3_values
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cache_formats import FORMATS
from mla_var3.op.mla.window.quantise import E4M3
from mla_var3.runtime.plan import Tiling

from ..unit.runtime.interpreter.interpreter_support import apply
from .kernel_support import check, make_plan, require

KERNELS = ("flash_mla", "flash_mla_split_kv", "split_kv_partial")
SIZES = {"b": 2, "s": 3, "t": 100, "h": 6, "lengths": (100, 33), "scale": 0.1}


def latent_plan(name: str, **fields: object) -> MlaPlan:
    own = {} if name == "flash_mla" else {"splits": 2}
    return make_plan(name, **{**SIZES, **own, **fields}).for_target("sm_90")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("options", [
    *({"page": page} for page in (16, 64)),
    *({"page": page, "sliding_window": window} for page in (0, 32) for window in (1, 40)),
    *({"page": page, "p": 0} for page in (0, 32)),
], ids=str)  # fmt: skip
def test_pages_sliding_windows_and_no_rope(name, options):
    require(latent_plan(name, **options))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("cache_dtype", FORMATS)
@pytest.mark.parametrize(("target", "page", "dtype"), [
    ("sm_90", 0, "float16"), ("sm_80", 32, "bfloat16"), ("sm_100", 64, "bfloat16"),
])  # fmt: skip
def test_a_plan_on_an_8_bit_cache(name, cache_dtype, target, page, dtype):
    """Tilings of all families: scales of one and of several groups of columns in a tile."""
    fields = {"t": 101, "page": page, "dtype": dtype, "cache_dtype": cache_dtype}
    plan = latent_plan(name, **fields).for_target(target)
    check(plan).require()


def test_bytes_are_decoded_as_float8_is_converted():
    """All 256 of them: subnormals, both zeros, NaN."""
    every = torch.arange(256, dtype=torch.uint8)
    wanted = every.view(E4M3).float()
    for given in (every.view(torch.int8), every.view(E4M3)):
        found = apply(e4m3_values, given)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(0.0), wanted.nan_to_num(0.0))
        assert torch.equal(found.signbit()[:0x7F], wanted.signbit()[:0x7F])


def test_widths_and_scales_of_8_bit_caches_are_checked():
    with pytest.raises(InvalidArgumentError, match="k, p: expected rows of a multiple of 16 bytes"):
        make_plan("flash_mla", k=256, cache_dtype="fp8_ds_mla")
    with pytest.raises(UnknownNameError, match="cache format 'fp4'"):
        make_plan("flash_mla", cache_dtype="fp4")
    plan = latent_plan("flash_mla", cache_dtype="fp8_ds_mla")
    inputs = LatentInputs(*plan.prepare_inputs("cpu"))
    narrow = plan.copy(tiling=type(plan.tiling)(64, 32, 64))  # type: ignore[attr-defined]
    with pytest.raises(InvalidArgumentError, match="columns of a scale: expected a divisor of Kp"):
        narrow.plan(*inputs).launch()
    assert inputs.scales is not None
    for scales, message in (
        (None, "scales: expected those of fp8_ds_mla, got none"),
        (inputs.scales[..., :1], "scales: expected .b=2, t=100, g=4."),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            plan.plan(*inputs._replace(scales=scales))
    with pytest.raises(InvalidArgumentError, match="c_kv: expected dtype torch.bfloat16"):
        latent_plan("flash_mla").plan(*inputs)


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
        "table: expected a tensor on cpu, got one on meta": {"block_table": table.to("meta")},
        "latent: expected a tensor on cpu, got one on meta": {"c_kv": inputs.c_kv.to("meta")},
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
    for name, given in {"tree": tree, "cu_seqlens_q": bounds.int()}.items():
        with pytest.raises(InvalidArgumentError, match=f"^{name}: expected none"):
            plan.reference_fn(*inputs._replace(**{name: given}))
