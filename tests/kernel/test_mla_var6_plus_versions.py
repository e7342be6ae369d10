"""Versions 2 to 4 of mla_var6_plus in cuTile: the same results as the base, another arrangement.

Unused slots hold NaN and every output starts as NaN, as in `test_designs.py`.
"""

from typing import Any

import pytest
import torch

from mla_var3.conf.devices import load_devices
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.check import poison_outputs
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.composite import ConcurrentKernels
from mla_var3.runtime.ct_kernel import CtKernel

from .kernel_support import Case, make_plan, named_inputs, require

BASE = "mla_var6_plus"
V2, V3, V4 = (f"{BASE}_v{number}" for number in (2, 3, 4))
VERSIONS = (V2, V3, V4)

CASES = [
    Case(s=1, t=1, h=8, lengths=(1, 0), n=1),
    Case(s=3, t=67, h=5, lengths=(67, 0, 22), n=30, dtype="float16"),
    # with n < s the causal limit reaches into the old tokens, with len < n there are none
    Case(s=9, t=20, h=2, lengths=(1, 8, 20), n=5, dtype="float16"),
    Case(s=2, t=70, h=2, lengths=(70, 0, 40), n=0),
    Case(s=2, t=70, h=2, lengths=(70, 0, 40), n=70),
    # more queries than a tile of a head, more rows than a latent tile
    Case(s=70, t=131, h=2, lengths=(131, 43), n=40),
]
"""Few heads: the interpreter takes its time per head."""
SMALL: dict[str, Any] = {"b": 2, "s": 1, "t": 70, "h": 8, "lengths": (70, 41)}


def attention_of(plan: Any) -> Any:
    """The first kernel of a plan on CPU tensors, its outputs full of NaN."""
    stage = plan.plan(*plan.prepare_inputs("cpu"))
    poison_outputs(stage)
    return next(iter(stage.kernels()))


def written(kernel: Any) -> tuple[int, int]:
    """How many (request, head) pairs of o_latent and o_new hold no NaN, for s=1."""
    o_latent, _, o_new, _ = kernel.output_tensors
    return tuple(int((~x.isnan().any(dim=-1)).sum()) for x in (o_latent, o_new))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_bits_as_the_base(case):
    """The default tiles are those of the base, and where a tile runs does not change it.

    `test_designs.py` compares the base with the reference. The latent cache of the newest tokens
    holds NaN: the window is what counts.
    """
    sizes = {"b": len(case.lengths), "s": case.s, "t": case.t, "h": case.h, "n": case.n}
    options = {"lengths": case.lengths, "dtype": case.dtype, "causal": case.s != 3}
    plans = [make_plan(name, **sizes, **options) for name in (BASE, *VERSIONS)]
    inputs = named_inputs(plans[0], BASE)
    for request, length in enumerate(case.lengths):
        for name in ("c_kv", "k_rope"):
            inputs[name][request, max(length - case.n, 0) :] = torch.nan
    stages = [plan.plan(*inputs.values()) for plan in plans]
    for stage in stages:
        poison_outputs(stage)
        stage.launch()
    base, *others = (stage.output_tensors for stage in stages)
    for expected, *found in zip(base, *others, strict=True):
        assert not expected.isnan().any()
        assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_defaults_of_other_targets(version, target):
    require(make_plan(version, **SMALL, n=30).for_target(target))


LARGE = {"b": 32, "s": 16, "t": 4096, "h": 128}
"""Fills a device."""


@pytest.mark.parametrize(
    ("blocks", "n", "hold_back", "wanted"),
    [
        # The role with longer blocks leads.
        (1, 10, 25, (8, 0)), (1, 69, 25, (0, 1)),
        # Both run from the start, and short blocks end the grid.
        (4, 10, 25, (8, 3)), (14, 10, 25, (16, 12)), (18, 10, 25, (16, 16)),
        # Nothing or everything is held back.
        (9, 10, 0, (8, 8)), (10, 10, 0, (16, 8)), (2, 10, 100, (16, 0)),
    ],
)  # fmt: skip
def test_the_launch_order_of_v2(blocks, n, hold_back, wanted):
    """What the first blocks write: SMALL has 2 latent ones of 8 heads each, and 16 head blocks."""
    kernel = attention_of(make_plan(V2, **SMALL, n=n))
    kernel.tiling.HoldBack = hold_back
    assert kernel.grid_fn(kernel.tiling) == (18,)
    kernel.grid_fn = lambda tiling: (blocks,)
    kernel.launch()
    assert written(kernel) == wanted


@pytest.mark.parametrize("share", [0, 50, 100], ids="share{}".format)
def test_every_tile_is_taken_once_whatever_the_shares(share):
    """Block 0 begins with either role, finds its queue empty in time and goes on with the other."""
    plan: Any = make_plan(V3, **SMALL, n=30)
    plan.tiling.LatentShare = share
    kernel = next(iter(require(plan).kernels()))
    (blocks,) = kernel.grid_fn(kernel.tiling)
    # Each block takes one number too many from each queue: that is how it knows of the end.
    assert kernel.queues[:, 0].tolist() == [2 + blocks, 16 + blocks]
    assert not kernel.queues[:, 1:].any()


def test_each_launch_begins_with_full_queues():
    """Over repeated launches, and after one that left the counters anywhere."""
    kernel = attention_of(make_plan(V3, **SMALL, n=30))
    for left_over in (0, 7, 10_000):
        kernel.queues.fill_(left_over)
        poison_outputs(kernel)
        kernel.launch()
        assert written(kernel) == (16, 16)
    # So it can fail: without the reset another launch does nothing.
    poison_outputs(kernel)
    CtKernel.launch(kernel)
    assert written(kernel) == (0, 0)


@pytest.mark.parametrize(
    ("version", "field", "value", "message"),
    [
        (V2, "HoldBack", 101, "HoldBack: expected"), (V3, "LatentShare", -1, "LatentShare: exp"),
        (V3, "LatentShare", 101, "LatentShare: expected"), (V3, "BlocksPerSm", 0, "BlocksPerSm: "),
        (V4, "Share", 0, "Share: expected a percentage"), (V4, "Share", 80, "for both kernels"),
    ],
)  # fmt: skip
def test_a_tiling_out_of_range(version, field, value, message):
    plan: Any = make_plan(version, **SMALL, n=30)
    setattr(plan.tiling, field, value)
    with pytest.raises(InvalidArgumentError, match=message):
        plan.plan(*plan.prepare_inputs("cpu")).launch()


@pytest.mark.parametrize(
    ("n", "kernels"),
    [
        (0, ["latent_old_v4", "decompress_combine"]),
        (30, ["latent_old_v4", "window_new_v4", "decompress_combine"]),
        (70, ["window_new_v4", "decompress_combine"]),
    ],
    ids=["n0", "n30", "nt"],
)
def test_a_kernel_without_tokens_is_left_out(n, kernels):
    stage = without_tensors(V4, **SMALL, n=n)
    assert [kernel.name for kernel in stage.kernels()] == kernels
    assert isinstance(stage.stages[0], ConcurrentKernels) == (len(kernels) == 3)


def without_tensors(version: str, **fields: Any) -> Any:
    plan = make_plan(version, **fields)
    return plan.plan(*plan.prepare_inputs("meta"))


def test_persistent_blocks_are_as_many_as_the_device_holds():
    smallest = min(spec.sm_count for spec in load_devices().values() if spec.target == "sm_90")
    queued = next(iter(without_tensors(V3, **LARGE, n=1024).kernels()))
    assert queued.grid_fn(queued.tiling) == (smallest,)
    queued.tiling.BlocksPerSm = 2
    assert queued.grid_fn(queued.tiling) == (2 * smallest,)
    # The grids of v4 share the device.
    latent, window, _ = without_tensors(V4, **LARGE, n=1024).kernels()
    assert latent.grid_fn(latent.tiling) == (smallest // 2,)
    assert window.grid_fn(window.tiling) == (2 * (smallest // 2),)  # two blocks per SM
    alone = next(iter(without_tensors(V4, **LARGE, n=0).kernels()))
    assert alone.grid_fn(alone.tiling) == (smallest,)
    assert len({tiling.Share for tiling in alone.autotune_configs}) == 1


@pytest.mark.parametrize(
    ("latent", "window", "fits"),
    [(50, 50, True), (25, 75, True), (25, 25, True), (99, 1, True), (75, 50, False)],
)
def test_joint_tilings_may_not_need_more_sms_than_there_are(latent, window, fits):
    group = without_tensors(V4, **LARGE, n=1024).stages[0]
    tilings = [kernel.tiling for kernel in group.kernels()]
    tilings[0].Share, tilings[1].Share = latent, window
    failures = group.joint_failures(tilings)
    assert (failures == ()) == fits
    assert all("SMs for both kernels" in failure for failure in failures)


def test_few_blocks_for_many_tiles():
    """One SM each: every block goes through several tiles."""
    plan: Any = make_plan(V4, b=3, s=9, t=70, h=3, n=30, lengths=(70, 0, 33))
    plan.tiling.Share = plan.window_tiling.Share = 1
    stage = require(plan)
    latent, window, _ = stage.kernels()
    assert latent.grid_fn(latent.tiling) == (1,)
    assert window.grid_fn(window.tiling) == (2,)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_each_kernel_alone(causal):
    plan: Any = make_plan(
        V4, b=3, s=5, t=67, h=3, n=30, lengths=(67, 0, 20), causal=causal, dtype="float16"
    )
    require(plan._latent_plan())
    require(plan._window_plan())


@pytest.mark.slow
def test_v3_draws_its_tiles_in_one_loop(tmp_path):
    """Two loops over the queues hang on a GPU (see the kernel), and each brings a draw of its own.

    `tests/gpu/test_gpu_many_launches.py` launches the kernel; this one needs no GPU.
    """
    plan = make_plan(V3, b=5, s=6, t=1907, h=16, n=1246)
    kernel = next(iter(plan.plan(*plan.prepare_inputs("meta")).kernels()))
    compile_report(kernel, "sm_90", artifacts_dir=tmp_path)
    [sass] = tmp_path.glob("*.sass")
    assert sass.read_text().count("ATOMG.E.ADD") == 1
