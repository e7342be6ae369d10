"""The mix and decompressed attention in CuTe DSL without a GPU: plans, SMs, work tiles, errors."""

import re
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.attention.backends import registry
from mla_var3.conf.devices import device_spec
from mla_var3.errors import HyperMlaError, InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.kernel import HEADS, TILES
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    DecompressedShape,
    DecompressedTiling,
    may_be_long,
)
from mla_var3.kernel.cute_python.mla.hopper.widths import HeadWidths
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLATiling
from mla_var3.kernel.cute_python.mla.mix.plan import SmSplit, balanced_split
from mla_var3.kernel.cute_python.mla.projections.outputs import DecompressCombineTiling, row_tiles
from mla_var3.op.compare import compare
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import best_n
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.prefix.reference import make_shared_prefix_inputs
from mla_var3.op.mla.reference import reference_from_latent
from mla_var3.runtime import paths
from mla_var3.runtime.composite import ConcurrentKernels
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.stage import constraint_failures
from tests.unit.attention.emulated_stages import named_arguments

from .compile_once import SMALL
from .kernel_support import INPUT_NAMES

HOPPER = device_spec("NVIDIA H200")


def plan_of(name: str, **fields: Any) -> Any:
    cls: Any = plan_class(find_kernel(name, language="cute-dsl"))
    return cls(**fields)


def make(name: str, **fields: Any) -> Any:
    return plan_of(name, **{**SMALL, **fields}).on_device(HOPPER)


def stage_of(plan: Any) -> Any:
    """On tensors without memory."""
    return plan.plan(*plan.prepare_inputs("meta"))


def kernels(plan: Any) -> dict[str, Any]:
    return {kernel.name: kernel for kernel in stage_of(plan).kernels()}


@pytest.mark.parametrize(("old", "new"), [("v2", "v5"), ("v3", "v6")])
def test_old_ids_still_work_and_say_what_they_are_now(old, new, caplog):
    """In CuTe DSL; the same numbers of cuTile are other ideas."""
    paths.current_name.cache_clear()
    name = f"mla_var6_plus_{old}"
    assert find_kernel(name, language="cute-dsl").version == new
    assert f"{name} in cute-dsl is now mla_var6_plus_{new}" in caplog.text
    assert find_kernel("mla_var6_plus", old, "cute-dsl").version == new
    assert find_kernel(name).full_name == name


def test_a_call_may_name_a_backend_by_its_old_id():
    [backend] = registry.named("mla_var6_plus_v3:cute-dsl", registry.backends())
    assert (backend.kernel, backend.language) == ("mla_var6_plus_v6", "cute-dsl")
    [backend] = registry.named("mla_var6_plus_v3", registry.backends())  # no old id in cuTile
    assert (backend.kernel, backend.language) == ("mla_var6_plus_v3", "cutile-dsl")


def test_a_number_means_one_idea_in_every_language():
    """Only base versions exist in both."""
    ids: dict[str, set[str]] = {language: set() for language in paths.LANGUAGES}
    for kernel in paths.discover_kernels():
        if kernel.number:
            ids[kernel.language].add(kernel.full_name)
    assert not set.intersection(*ids.values())


@pytest.mark.parametrize(
    ("name", "fields", "wanted"),
    [
        ("flash_attention", {}, ["decompressed_attention"]),
        ("mla_var6_plus", {"n": 0}, ["flash_mla", "decompress_combine"]),
        (
            "mla_var6_plus",
            {"n": 100},
            ["flash_mla", "decompressed_attention", "decompress_combine"],
        ),
        ("mla_var6_plus", {"n": 300}, ["decompressed_attention"]),
        ("mla_var6_plus_v5", {"n": 300}, ["decompressed_attention"]),
        ("mla_var6_plus_v5", {"n": 0}, ["flash_mla", "decompress_combine"]),
        ("mla_var6_plus_v6", {"prefix": 0}, ["flash_mla", "decompress_combine"]),
        ("mla_var6_plus_v6", {"prefix": 300}, ["decompressed_attention"]),
    ],
    ids=str,
)
def test_a_kernel_without_tokens_is_left_out(name, fields, wanted):
    stage = stage_of(make(name, **fields))
    assert [kernel.name for kernel in stage.kernels()] == wanted
    rows = (SMALL["b"], SMALL["s"], SMALL["h"])
    assert [tuple(tensor.shape) for tensor in stage.output_tensors] == [(*rows, 128), rows]
    assert [tensor.dtype for tensor in stage.output_tensors] == [torch.bfloat16, torch.float32]


def test_the_latent_kernel_leaves_out_the_window_and_nothing_else():
    plan = make("mla_var6_plus", n=100, lengths=(300, 60))
    named = named_arguments(kernels(plan)["decompressed_attention"])
    assert (named["kept"], named["slots"], named["requests"]) == (100, 100, 2)
    assert plan.latent_lengths() == [200, 0]
    assert plan.new_lengths() == [100, 60]
    assert named_arguments(kernels(plan)["flash_mla"])["newest"] == 100


def test_a_prefix_is_one_window_and_the_latent_kernel_starts_behind_it():
    plan = make("mla_var6_plus_v6", prefix=128, lengths=(300, 60), h=2)
    named = named_arguments(kernels(plan)["decompressed_attention"])
    assert (named["kept"], named["slots"], named["requests"]) == (128, 128, 2)
    assert tuple(named["keys"].shape) == (1, 2, 128, 128)
    inputs = plan.prepare_inputs("cpu")
    assert inputs[-1].tolist() == [172, 0]
    own = {kernel.name: kernel for kernel in plan.plan(*inputs).kernels()}["flash_mla"]
    latent = own.input_tensors[2]
    assert latent.data_ptr() == inputs[6][:, 128:].data_ptr()


def test_eight_bits_are_half_the_bytes_and_padded_slots():
    plain, packed = make("mla_var6_plus", n=100), make("mla_var6_plus_v5", n=100)
    named = named_arguments(kernels(packed)["decompressed_attention"])
    assert (named["kept"], named["slots"], named["requests"]) == (100, 128, 2)
    assert named["scales"] is not None and named["rope_token"] == 64
    assert tuple(named["k_rope"].shape) == (2, 128, 64)
    assert packed.decompressed_cost().flops == plain.decompressed_cost().flops
    assert 0.5 < packed.decompressed_cost().bytes / plain.decompressed_cost().bytes < 0.6


TINY: dict[str, Any] = {"b": 2, "s": 3, "t": 90, "h": 2, "lengths": (90, 40), "seed": 1}


@pytest.mark.parametrize(
    ("name", "fields", "bound"),
    [
        ("mla_var6_plus", {"n": 50}, 0.01),
        ("mla_var6_plus_v5", {"n": 50}, 0.1),  # what rounding to 8 bits costs
        ("mla_var6_plus_v6", {"prefix": 50}, 0.01),
    ],
)
def test_the_reference_is_the_operation(name, fields, bound):
    """Against the latent path alone."""
    plan = make(name, **TINY, **fields)
    raw = plan.make_inputs("cpu")
    if name.endswith("v6"):
        raw = make_shared_prefix_inputs(plan.shared_problem(), "cpu", seed=1).plain
    found = plan.reference_fn(*plan.prepare_inputs("cpu"))
    for got, wanted in zip(found, reference_from_latent(raw, plan.problem()), strict=True):
        assert compare(got, wanted).relative_frobenius < bound


def test_the_split_makes_both_end_together():
    latent, window = Cost(flops=5.2e12, bytes=0.0), Cost(flops=0.0, bytes=60e9)
    assert balanced_split(latent, window, 132) == SmSplit(66, 66)
    assert balanced_split(latent + latent, window, 132) == SmSplit(88, 44)
    nothing = Cost(0.0, 0.0)
    assert balanced_split(nothing, window, 132) == SmSplit(1, 131)
    assert balanced_split(latent, nothing, 132) == SmSplit(131, 1)
    assert balanced_split(nothing, nothing, 2) == SmSplit(1, 1)


def test_a_shared_prefix_and_the_own_tokens_get_all_sms_in_turn():
    """256 work tiles of a prefix fill two turns of 132 SMs, and no smaller number of them."""
    plan = make("mla_var6_plus_v6", b=256, s=1, t=512, h=128, prefix=256, lengths=None)
    assert plan.split() == SmSplit(HOPPER.sm_count, HOPPER.sm_count)
    assert plan.settled() is plan
    group = together(plan)
    assert [kernel.name for kernel in group.kernels()] == ["decompressed_attention", "flash_mla"]
    assert group.joint_failures() == ()
    decompressed, latent = (named_arguments(kernel) for kernel in group.kernels())
    assert decompressed["ctas"] == HOPPER.sm_count
    assert latent["group_ctas"] * latent["group_count"] > 0.9 * HOPPER.sm_count


@pytest.mark.parametrize("n", [64, 512, 2048, 4000])
def test_a_longer_window_gets_more_sms(n):
    sizes = {"b": 32, "s": 16, "t": 4096, "h": 128}
    split = make("mla_var6_plus", **sizes, n=n).split()
    longer = make("mla_var6_plus", **sizes, n=n + 64).split()
    assert split.latent + split.decompressed == HOPPER.sm_count
    assert longer.decompressed >= split.decompressed
    assert make("mla_var6_plus_v5", **sizes, n=n).split().decompressed <= split.decompressed


def test_a_fitted_model_chooses_the_window_and_the_sms():
    sizes = {"b": 32, "s": 43, "t": 4096, "h": 128}
    parameters = mix_parameters(HOPPER)
    assert parameters.fitted
    model, plan = MixModel(parameters), make("mla_var6_plus", **sizes)
    # A mix is faster in a short run only, so it is not chosen.
    assert plan.n == model.worthwhile_n(plan.problem(), multiple=128) == plan.t
    chosen = {s: make("mla_var6_plus", **{**sizes, "s": s}).n for s in (1, 200)}
    assert chosen == {1: 0, 200: 4096}
    best = model.best_n(plan.problem(), multiple=128)
    mix = make("mla_var6_plus", **sizes, n=best)
    assert mix.n == best and 0 < best < mix.t
    wanted = model.best_split(mix.problem(), best)
    # CTA groups take whole numbers of SMs.
    assert wanted - 16 < mix.split().latent <= wanted
    assert mix.copy(b=8).on_device(HOPPER).n == best


@pytest.mark.parametrize(
    ("device", "dtype"), [("NVIDIA H100 80GB HBM3", "bfloat16"), ("NVIDIA H200", "float16")]
)
def test_without_a_fit_the_roofline_chooses(device, dtype):
    spec = device_spec(device)
    plan = plan_of("mla_var6_plus", b=32, s=43, t=4096, h=128, dtype=dtype).on_device(spec)
    rates = spec.burst_rates(dtype)
    assert plan.model is None
    assert plan.n == best_n(plan.problem(), *rates, multiple=128)


def test_a_chosen_share_leaves_the_other_kernel_the_rest():
    plan = make("mla_var6_plus", n=100, tiling=FlashMLATiling(sms=100))
    assert plan.split() == SmSplit(100, 32)
    plan = make("mla_var6_plus", n=100, decompressed_tiling=DecompressedTiling(sms=100))
    assert plan.split() == SmSplit(32, 100)


def together(plan: Any) -> ConcurrentKernels:
    found = stage_of(plan).stages[0]
    assert isinstance(found, ConcurrentKernels)
    return found


@pytest.mark.parametrize("name", ["mla_var6_plus", "mla_var6_plus_v5"])
def test_more_sms_than_there_are_is_refused(name):
    group = together(make(name, **OWN[name]))
    assert group.joint_failures() == ()
    latent, window = (kernel.tiling for kernel in group.kernels())
    most = HOPPER.sm_count
    for sms in ((most - 1, 1), (60, 60)):
        chosen = [FlashMLATiling(sms=sms[0]), DecompressedTiling(sms=sms[1])]
        assert group.joint_failures(chosen) == ()
    for pair in ((most, 1), (1, most), (100, 33)):
        [failure] = group.joint_failures(
            [FlashMLATiling(sms=pair[0]), DecompressedTiling(sms=pair[1])]
        )
        assert f"at most {most} SMs for both kernels, got {pair[0]} + {pair[1]}" in failure
    assert latent.sms == window.sms == 0


def test_every_candidate_is_valid_and_some_pairs_fit():
    for s, h, n in ((1, 8, 100), (16, 128, 100), (100, 16, 299), (2, 64, 0), (2, 64, 300)):
        plan = make("mla_var6_plus", s=s, h=h, n=n)
        stage = stage_of(plan)
        for kernel in stage.kernels():
            for tiling in kernel.autotune_configs:
                assert constraint_failures(tiling, plan) == ()
                assert kernel.args_fn(tiling)
        if 0 < n < plan.t:
            group = together(plan)
            latent, window = group.kernels()
            fits = [
                not group.joint_failures([a, b])
                for a in latent.autotune_configs
                for b in window.autotune_configs
            ]
            assert 5 <= sum(fits) < len(fits)


def test_work_tiles_and_their_ctas():
    """Rows decide the pairing; `test_cute_ring.py` counts the work tiles of the device code."""
    assert DecompressedShape(2, 64, 8, 300).pairing(DecompressedTiling()) == HEADS
    assert DecompressedShape(2, 65, 8, 300).pairing(DecompressedTiling()) == TILES
    assert DecompressedShape(2, 65, 8, 300).pairing(DecompressedTiling(pairing=HEADS)) == HEADS
    shape = DecompressedShape(2, 1, 8, 300)
    assert shape.ctas(DecompressedTiling(splits=1), 132) == 8
    assert shape.ctas(DecompressedTiling(splits=3), 132) == 24
    assert shape.ctas(DecompressedTiling(splits=3), 10) == 10


def test_kv_blocks_are_long_where_work_tiles_are():
    """By the tokens of a split, two query tiles of a head and the widths; or as the tiling says."""
    tiling = DecompressedTiling()

    def kv_block(*sizes: int, long_blocks: bool = True, tiling=tiling) -> int:
        return DecompressedShape(*sizes, long_blocks).kv_block(tiling, 132)

    assert kv_block(1, 100, 128, 8192) == 128
    assert kv_block(1, 100, 128, 8191) == 64
    assert kv_block(1, 64, 128, 32768) == 64  # two heads of a query tile
    assert kv_block(1, 129, 128, 32768) == 64  # several work tiles of a head
    assert kv_block(1, 100, 128, 32768, long_blocks=False) == 64
    assert DecompressedShape(1, 100, 8, 32768).splits(tiling, 132) == 16
    assert kv_block(1, 100, 8, 32768) == 64
    assert kv_block(1, 100, 128, 32768, tiling=DecompressedTiling(kv_block=64)) == 64
    assert may_be_long(HeadWidths(128, 64, 128)) and not may_be_long(HeadWidths(192, 64, 256))


def test_long_kv_blocks_are_refused_where_there_are_none():
    long = DecompressedTiling(kv_block=128)
    assert not long.validate(make("flash_attention", s=100)).failures
    for plan in (make("flash_attention"), make("flash_attention", s=100, d=64, v=128)):
        (message,) = long.validate(plan).failures
        assert "kv_block" in message
    (message,) = DecompressedTiling(kv_block=96).validate(make("flash_attention", s=100)).failures
    assert "96" in message


def test_splits_have_partials_and_one_split_needs_none():
    kernel = kernels(make("flash_attention"))["decompressed_attention"]
    split = DecompressedTiling(splits=3)
    named = named_arguments(kernel, split)
    assert [named["o"], named["lse"]] == kernel.output_tensors
    assert tuple(named["o_partial"].shape) == (3, 2, 2, 64, 128)
    assert named["o_partial"].dtype is torch.float32
    assert tuple(named["lse_partial"].shape) == (3, 2, 2, 64)
    assert kernel.host_fn(split).partials and named["merge_ctas"] == 2 * 2 * 64  # no more than rows
    whole = DecompressedTiling(splits=1)
    named = named_arguments(kernel, whole)
    assert named["o_partial"] is None and named["lse_partial"] is None
    assert not kernel.host_fn(whole).partials


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (DecompressedTiling(sms=-1), "sms: expected 0 to 132"),
        (DecompressedTiling(sms=133), "sms: expected 0 to 132"),
        (DecompressedTiling(splits=-1), "splits: expected 0 to 5"),
        (DecompressedTiling(splits=6), "splits: expected 0 to 5"),
        (DecompressedTiling(pairing="rows"), "pairing: expected heads, tiles or nothing, got"),
        (DecompressCombineTiling(-1), "head_ctas: expected 0 to 2"),
        (DecompressCombineTiling(3), "head_ctas: expected 0 to 2"),
        (FlashMLATiling(group_ctas=-1), "group_ctas: expected 0 to 100 (tiles of 64 rows), got -1"),
        (FlashMLATiling(group_ctas=101), "group_ctas: expected 0 to 100"),
        (FlashMLATiling(sms=-1), "sms: expected 0 to 132"),
        (FlashMLATiling(sms=133), "sms: expected 0 to 132 (SMs of the device), got 133"),
    ],
    ids=str,
)
def test_a_wrong_tiling_is_named_before_anything_is_compiled(tiling, message):
    kernel = kernels(make("flash_attention"))["decompressed_attention"]
    if not isinstance(tiling, DecompressedTiling):
        latent, _, combine = stage_of(make("mla_var6_plus", s=100, n=100)).kernels()
        kernel = latent if isinstance(tiling, FlashMLATiling) else combine
        assert row_tiles(200) == 2
    with pytest.raises(HyperMlaError, match=re.escape(message)):
        kernel.compile("sm_90", tiling)


@pytest.mark.parametrize(("h", "ctas"), [(128, 1), (64, 2), (8, 4), (1, 4)])
def test_the_rows_of_a_head_are_shared_by_as_many_ctas_as_fit(h, ctas):
    plan = make("mla_var6_plus", b=4, s=128, h=h, n=100)
    named = named_arguments(kernels(plan)["decompress_combine"])
    assert named["head_ctas"] == ctas
    assert (named["rows"], named["heads"]) == (512, h)


def test_the_lse_is_that_of_the_latent_part_when_it_is_alone():
    stage = stage_of(make("mla_var6_plus", n=0))
    *_, merge, combine = stage.kernels()
    assert stage.output_tensors[1] is merge.output_tensors[1]
    named = named_arguments(combine)
    assert [named[x] for x in ("lse_latent", "o_new", "lse_new", "lse")] == [None] * 4


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "flash_mla",
            {"k": 384},
            "(k, p): expected (512, 64) or (512, 0) or (256, 64)",
        ),
        ("flash_mla", {"p": 32}, "(256, 32), got (512, 32)"),
        ("flash_mla", {"page": 100}, "page: expected a multiple of 64, or 0, got 100"),
        ("flash_mla", {"page": -64}, "page: expected a multiple of 64, or 0, got -64"),
        ("flash_attention", {"p": 32}, "(d, p, v): expected (128, 64, 128) or (192, 64, 256)"),
        ("flash_attention", {"v": 96}, "or (64, 32, 64), got (128, 64, 96)"),
        ("mla_var6_plus", {"k": 256}, "k: expected 512, which the tiles are made for, got 256"),
        ("mla_var6_plus", {"n": 301}, "n: expected an integer from 0 to t=300, got 301"),
        ("mla_var6_plus_v5", {"n": -1}, "n: expected an integer from 0 to t=300, got -1"),
        ("mla_var6_plus_v6", {"prefix": 301}, "prefix: expected an integer from 0 to t=300"),
    ],
    ids=str,
)
def test_a_wrong_size_is_named(name, fields, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        make(name, **fields)


NAMES = {
    "flash_mla": ("q_latent", "q_rope", "latent", "rope", "lengths", "table"),
    "flash_attention": INPUT_NAMES["flash_attention"],
    "mla_var6_plus": INPUT_NAMES["mla_var6_plus"],
    "mla_var6_plus_v5": (
        *("q_nope", "q_latent", "q_rope", "c_kv", "k_rope"),
        *("keys", "values", "scales", "k_rope_new", "w_uv", "lengths"),
    ),
    "mla_var6_plus_v6": (
        *("q_nope", "q_latent", "q_rope", "k_prefix", "v_prefix", "k_rope_prefix"),
        *("c_kv", "k_rope", "w_uv", "lengths", "own_lengths"),
    ),
}


OWN: dict[str, dict[str, Any]] = {
    "flash_mla": {"page": 64},
    "flash_attention": {},
    "mla_var6_plus": {"n": 100},
    "mla_var6_plus_v5": {"n": 100},
    "mla_var6_plus_v6": {"prefix": 100},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_tensor_is_named(name):
    plan = make(name, **OWN[name])
    inputs = dict(zip(NAMES[name], plan.prepare_inputs("meta"), strict=True))
    for argument, right in inputs.items():
        longer = torch.empty((*right.shape, 1), device="meta", dtype=right.dtype)
        elsewhere = torch.empty(right.shape, dtype=right.dtype)
        wrongs = [(longer, ""), (right.to(torch.float64), ".*float64")]
        if name.startswith("flash") and argument != NAMES[name][0]:  # the first says where
            wrongs.append((elsewhere, "a tensor on meta, got one on cpu"))
        for wrong, expected in wrongs:
            with pytest.raises(InvalidArgumentError, match=f"^{argument}: expected {expected}"):
                plan.plan(*{**inputs, argument: wrong}.values())
    if name == "flash_mla":
        by_columns = inputs["table"].t().contiguous().t()
        with pytest.raises(InvalidArgumentError, match="^table: expected int32 with stride 1"):
            plan.plan(*{**inputs, "table": by_columns}.values())


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        *(("flash_mla", name) for name in ("q_latent", "q_rope")),
        *(("mla_var6_plus", name) for name in ("q_nope", "q_rope", "q_latent", "w_uv")),
        *(("mla_var6_plus_v5", name) for name in ("keys", "values", "scales")),
    ],
)
def test_gaps_are_refused_by_name(name, argument):
    plan = make(name, **OWN[name])
    inputs = dict(zip(NAMES[name], plan.prepare_inputs("meta"), strict=True))
    right = inputs[argument]
    longer = right.new_empty((right.shape[0], right.shape[1] + 1, *right.shape[2:]))
    inputs[argument] = longer[:, : right.shape[1]]
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: expected a layout"):
        plan.plan(*inputs.values())


def test_a_small_copy_keeps_the_share_of_decompressed_tokens():
    small = make("mla_var6_plus", t=4000, n=1000).cpu_check_plan()
    assert (small.t, small.n) == (150, 38)
    small = make("mla_var6_plus_v6", t=4000, prefix=3000).cpu_check_plan()
    assert (small.t, small.prefix) == (150, 112)


def test_an_unresolved_choice_says_who_makes_it():
    for plan in (plan_of("mla_var6_plus", **SMALL), plan_of("mla_var6_plus_v6", **SMALL)):
        with pytest.raises(InvalidArgumentError, match="`resolved` chooses one"):
            plan.prepare_inputs("meta")
    assert make("mla_var6_plus").n is not None
    assert make("mla_var6_plus_v6").prefix == 128
