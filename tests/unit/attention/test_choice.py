"""Which kernel a call gets, and why; `hyper-mla choose`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.backends import plans
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.select.choice import Candidate
from mla_var3.cli.main import main
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.model.times import IDEAL, Estimate
from mla_var3.runtime.autotune.history import History, history_path, tuning_key
from mla_var3.runtime.autotune.units import units_of
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.paths import find_kernel, plan_class

from .attention_support import filled_cache, make_model, normal, registered

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128}
H200 = "NVIDIA H200"


@pytest.fixture
def only_cutile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice among the plan-driven kernels of cuTile."""
    monkeypatch.setattr("mla_var3.attention.backends.registry.LATENT_DESIGNS", ())
    monkeypatch.setattr("mla_var3.attention.backends.plans.CUTE_SERVICES", {})


def test_the_least_steady_call_time_decides_and_says_so():
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert explanation == mla_var3.explain(**SIZES, device_name="h200")
    assert not explanation.measured
    assert explanation.reason.startswith("least steady call time on NVIDIA H200, by recorded rates")
    able = [c for c in explanation.candidates if c.refusal is None and c.fitted]
    assert explanation.kernel == min(able, key=lambda c: c.steady_us or 0).kernel
    assert {c.kernel for c in explanation.candidates} >= {"flash_mla", "torch_tiled"}
    assert explanation.kernel in str(explanation)
    assert all(c.steady_us >= c.predicted_us for c in able if c.steady_us and c.predicted_us)


def test_a_prefix_is_shared_in_the_way_that_fits_its_queries():
    """Latent while bytes decide, decompressed with many rows, not at all where it gains nothing."""
    few = {"b": 16, "s": 1, "t": 68000, "h": 12, "shared": 63911}
    assert mla_var3.explain(**few, device_name=H200).kernel == "flash_mla_prefix"
    many = {"b": 256, "s": 1, "t": 26728, "h": 128, "prefix": 26472}
    assert mla_var3.explain(**many, device_name=H200).kernel == "mla_var6_plus_v6"
    short = {"b": 64, "s": 4, "t": 4096, "h": 128, "shared": 64}
    assert mla_var3.explain(**short, device_name=H200).kernel == "flash_mla"


def test_a_foreign_ring_of_all_tokens_is_a_copy_only_if_known_to_be_whole(generator):
    """Which tokens it lacks only the device knows, so a call decompresses all of them."""
    model = make_model(generator, h=2, d=128, k=512, dtype=torch.bfloat16)
    options = {"p": 64, "t": 128, "dtype": torch.bfloat16}
    cache, _ = filled_cache(generator, [100, 21], model, window=128, **options)
    q = [normal(generator, 2, 2, 2, w, dtype=torch.bfloat16) for w in (128, 64)]

    def around(view: Any, **more: Any) -> dict[str, dict[str, float]]:
        found = mla_var3.explain(*q, view, model.w_uk, model.w_uv, device_name=H200, **more)
        return {
            f"{each.kernel}:{each.language}": each.estimate.around
            for each in found.candidates
            if each.estimate is not None
        }

    foreign, full = replace(cache.view()), replace(cache.view(), window_start=None)
    for kernel in ("flash_attention:cute-dsl", "mla_var6_plus:cute-dsl"):
        assert around(cache)[kernel] == around(full)[kernel] == {}
        for more in ({}, {"max_kv": 100}, {"lengths": [60, 5]}):
            assert list(around(foreign, **more)[kernel]) == ["decompression"]
    short = filled_cache(generator, [100, 21], model, window=64, **options)[0]
    mix = around(replace(short.view()))["mla_var6_plus:cute-dsl"]
    assert list(mix) == ["query projection"]  # the others are latent


def test_a_ring_that_may_lack_tokens_changes_the_choice():
    sizes = {**SIZES, "window": 4096, "s": 64}
    assert mla_var3.explain(**sizes, device_name=H200).kernel == "flash_attention"
    assert mla_var3.explain(**sizes, whole_copy=False, device_name=H200).kernel == "flash_mla"


@pytest.mark.parametrize("window", [0, 2048])
def test_a_mix_that_nobody_timed_does_not_win_by_its_lower_bound(window):
    """Ideal times let both paths run at full rate at once, which no kernel does."""
    sizes = {**SIZES, "s": 43, "window": window}
    explanation = mla_var3.explain(**sizes, device_name="NVIDIA B200")
    assert explanation.kernel in ("flash_mla", "flash_mla_split_kv")
    assert f"nothing was timed on NVIDIA B200; by lower bounds ({IDEAL})" in explanation.reason
    assert not any(c.fitted for c in explanation.candidates)
    named = mla_var3.explain(**sizes, device_name="NVIDIA B200", kernel="mla_var6_plus_v4")
    assert named.kernel == "mla_var6_plus_v4"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"page_size": 64}, "a paged cache"),
        ({"page_size": 24}, "a paged cache"),
        ({"ragged": True}, "different numbers of queries per request"),
        ({"tree": True}, "a tree of tokens"),
        ({"sliding_window": 512}, "a sliding window"),
        ({"partial": True}, "a cache that holds a part"),
        ({"dtype": "float32"}, "float32"),
        ({"aligned": False}, "16-byte aligned"),
        ({"d": 96}, "these sizes: d: expected a power of two"),
    ],
)
@pytest.mark.usefixtures("only_cutile")
def test_what_the_plans_cannot_do(options, refusal):
    explanation = mla_var3.explain(**SIZES, **options)
    kernels = {c.kernel: c for c in explanation.candidates}
    assert refusal in str(kernels["mla_var6_plus"].refusal)
    assert kernels["mla_var6_plus"].predicted_us is None
    served = options.get("page_size") == 64 or {"ragged", "tree", "sliding_window"} & set(options)
    if served:  # by the latent kernels
        assert explanation.kernel in ("flash_mla", "flash_mla_split_kv")
        assert explanation.path == "kernel"
    elif "d" not in options:
        assert (explanation.kernel, explanation.path) == ("torch_tiled", "torch")
        assert explanation.reason == "no kernel serves a call of this shape"


def test_sizes_are_checked():
    with pytest.raises(UnknownNameError, match="unknown size 'windw'; did you mean 'window'"):
        mla_var3.explain(**SIZES, windw=3)
    with pytest.raises(InvalidArgumentError, match="h: expected a positive integer, got nothing"):
        mla_var3.explain(b=1, s=1, t=1)
    with pytest.raises(InvalidArgumentError, match="s: expected a positive integer, got 0"):
        mla_var3.explain(b=1, s=0, t=1, h=1)
    with pytest.raises(InvalidArgumentError, match="tree: expected False with causal=False"):
        mla_var3.explain(b=1, s=1, t=1, h=1, tree=True, causal=False)
    with pytest.raises(UnknownNameError, match="unknown device 'H205'"):
        mla_var3.explain(**SIZES, device_name="H205")


def test_on_the_cpu_the_torch_path_runs_and_is_named(generator):
    model = make_model(generator)
    cache, _ = filled_cache(generator, [5], model)
    q_nope, q_rope = (normal(generator, 1, 1, 2, w, dtype=torch.float32) for w in (6, 4))
    explanation = mla_var3.explain(q_nope, q_rope, cache, model.w_uk, model.w_uv, return_lse=True)
    found = explanation.kernel, explanation.path, explanation.runs_on
    assert found == ("torch_tiled", "torch", "cpu")
    assert "on the CPU" in explanation.reason
    latent = mla_var3.explain(torch.randn(1, 1, 2, 8), q_rope, cache, d=6)
    assert latent.shape.latent_only


ODD = torch.zeros(2, 8, 5)[:, :6]
"""Rows that are no multiple of 16 bytes apart, in requests that are."""


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"causal": False}, {"causal": False}),
        ({"scale": 0.5}, {"scale": 0.5}),
        ({"max_kv": 3, "lengths": [3, 2]}, {"t": 3}),
        ({"tree_mask": torch.ones(2, 2, dtype=torch.bool)}, {"tree": True}),
        ({"total_lengths": [9, 9]}, {"partial": True}),
        ({"batch_invariant": True}, {"batch_invariant": True}),
        ({"sliding_window": 3}, {"sliding_window": 3}),
        ({"cache": (torch.zeros(2, 6, 8), ODD[..., 1:])}, {"aligned": False}),
        ({"cache": (torch.zeros(2, 6, 10)[..., 2:], torch.zeros(2, 6, 4))}, {"aligned": False}),
    ],
)
def test_the_shape_of_a_call(options, changes):
    given = {
        "q_nope": torch.zeros(2, 2, 2, 6), "q_rope": torch.zeros(2, 2, 2, 4),
        "cache": (torch.zeros(2, 6, 8), torch.zeros(2, 6, 4)),
        "w_uk": torch.zeros(2, 6, 8), "w_uv": torch.zeros(2, 8, 5), **options,
    }  # fmt: skip
    operands = [given.pop(name) for name in ("q_nope", "q_rope", "cache", "w_uk", "w_uv")]
    shape = CallShape(2, 2, 6, 2, 6, 4, 8, 5, dtype="float32", scale=10**-0.5)
    assert mla_var3.explain(*operands, **given).shape == replace(shape, **changes)


# --- measured times -------------------------------------------------------------------------------


def tuned_here(times: dict[str, float], sizes: dict[str, int] | None = None) -> None:
    """Histories of the autotuner for cuTile kernels, each with a median."""
    spec = device_spec(H200)
    for name, median in times.items():
        plan = plan_class(find_kernel(name))(**(sizes or SIZES))
        plan = plan.for_target(spec.target).on_device(spec)
        units = list(units_of(plan.plan(*plan.prepare_inputs("meta"))))
        for unit in units:
            key = tuning_key(plan, spec, unit.name, unit.kernels.values())
            history = History(history_path(plan, spec, key), key)
            configs = {kernel: k.tiling.to_dict() for kernel, k in unit.kernels.items()}
            share = median / len(units)
            timing = Timing(share, share, share, share, 9, "cuda-event", True)
            (config,) = configs.values()
            history.record(config, "ok", timing=timing)
        assert plans.best_tilings(plan, spec)


def test_tuning_does_not_make_the_choice_worse():
    """Histories of two cuTile kernels, as the main job leaves them, beside a faster estimate."""
    before = mla_var3.explain(**SIZES, device_name=H200)
    tuned_here({"flash_mla": 1180.0, "flash_attention": 1950.0})
    after = mla_var3.explain(**SIZES, device_name=H200)
    assert (after.kernel, after.language) == (before.kernel, before.language)
    assert (after.kernel, after.language) == ("flash_mla", "cute-dsl")
    found = {(c.kernel, c.language): c for c in after.candidates}["flash_mla", "cutile-dsl"]
    assert found.measured is not None and "autotuned here" in found.measured.source
    assert found.measured.kernel_us == pytest.approx(1180.0)
    assert found.measured_us is not None and found.measured_us > 1180.0  # with the projections


def test_a_measurement_is_held_to_the_power_limit():
    tuned_here({"flash_mla": 500.0})
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    # Repeated, it takes as long as the same work in CuTe DSL.
    assert (explanation.kernel, explanation.language) == ("flash_mla", "cute-dsl")
    assert explanation.candidates[0].steady_us == pytest.approx(explanation.candidates[1].steady_us)


@pytest.mark.usefixtures("only_cutile")
def test_measured_kernels_compete_with_each_other():
    tuned_here({"flash_mla": 2000.0, "flash_mla_split_kv": 1100.0})
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert explanation.measured and explanation.kernel == "flash_mla_split_kv"
    assert explanation.reason.startswith("measured on NVIDIA H200")
    assert not mla_var3.explain(**{**SIZES, "t": 4032}, device_name=H200).measured
    assert not mla_var3.explain(**SIZES, device_name="RTX 5090").measured


def candidate(
    time_us: float, *, error: float = 0.1, fitted: bool = True, measured: float = 0.0
) -> Any:
    expected = Estimate(
        "k", "l", time_us, None, {}, Cost(1, 1), "memory", fitted, error, "a record"
    )
    found = plans.Measured(measured, "here") if measured else None
    return Candidate("k", "l", estimate=expected, measured=found)


def test_uncertain_times():
    ideal, rated = candidate(100.0, fitted=False), candidate(100.0)
    assert ideal.range_us == (100.0, float("inf")) and rated.range_us == pytest.approx(
        (90.0, 110.0)
    )
    assert candidate(80.0, error=0.05).surely_faster(rated)
    assert not candidate(95.0).surely_faster(rated)
    assert not candidate(1.0, fitted=False).surely_faster(rated)  # how much slower, nobody knows
    assert not candidate(5.0, measured=101.0).surely_faster(ideal)
    assert candidate(5.0, measured=85.0).surely_faster(rated)
    assert candidate(5.0, measured=85.0).surely_faster(candidate(5.0, measured=86.0))
    # What was measured slow gives way to an estimate that is better for sure.
    assert rated.surely_faster(candidate(50.0, measured=120.0))
    assert not rated.surely_faster(candidate(50.0, measured=105.0))


# --- a kernel that is plugged in ------------------------------------------------------------------


@pytest.mark.usefixtures("only_cutile")
def test_equal_predictions_go_to_the_plugged_kernel():
    """A latent kernel for paged caches only; `replay/test_replay.py` calls such kernels."""

    def unsupported(shape: CallShape) -> str | None:
        return None if shape.page_size else "a dense cache"

    with registered(LatentBackend("flash_mla", "cute-dsl", lambda *_: None, unsupported)):
        dense = mla_var3.explain(**SIZES, device_name=H200)
        paged = mla_var3.explain(**SIZES, page_size=64, device_name=H200)
    assert (dense.kernel, dense.language) == ("flash_mla", "cutile-dsl")
    assert (paged.kernel, paged.language) == ("flash_mla", "cute-dsl")


# --- hyper-mla choose -----------------------------------------------------------------------------


def test_choose_prints_the_choice(capsys):
    assert main(["choose", "--b=1", "--s=1", "--t=65536", "--h=16", "--for_device=H200"]) == 0
    out = capsys.readouterr().out
    assert "flash_mla:cute-dsl *" in out and "steady: call time at the power limit" in out
    kernels = "mla_var6_plus:cute-dsl, mla_var6_plus_v5:cute-dsl"
    assert f"{kernels} do not support a cache without a window" in out
    assert "adds query projection, output projection: flash_mla:cute-dsl" in out


def test_choose_tells_what_sharing_a_prefix_gains(capsys):
    sizes = ["choose", "--b=64", "--s=1", "--t=9000", "--h=16", "--for_device=H200"]
    assert main([*sizes, "--prefix=6000", "--groups=8"]) == 0
    out = capsys.readouterr().out
    assert "* flash_mla_prefix:cute-dsl: least steady" in out
    assert re.search(r"sharing the prefix: flash_mla_prefix 1\.\d\dx as fast as", out)
    assert main([*sizes, "--prefix=6000"]) == 0
    assert "mla_var6_plus_v6 " in capsys.readouterr().out
    assert main(sizes) == 0
    out = capsys.readouterr().out
    assert "sharing the prefix" not in out
    assert "flash_mla_prefix:cute-dsl does not support requests that share no first tokens" in out
