"""Which kernel a call gets, and why; `hyper-mla choose`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.backends import registry as backends
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.select import tuned
from mla_var3.attention.select.estimate import estimate
from mla_var3.cli.main import main
from mla_var3.conf.devices import device_spec
from mla_var3.conf.kernel_rates import kernel_rates
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOperands, LatentOptions
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.reference import reference_absorbed
from mla_var3.runtime.autotune.history import History, history_path, tuning_key
from mla_var3.runtime.autotune.units import units_of
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.paths import find_kernel, plan_class

from .attention_support import assert_close, filled_cache, make_model, normal, oracle

SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128}
H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def only_cutile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The choice among the plan-driven kernels of cuTile, with no shipped times."""
    monkeypatch.setattr("mla_var3.attention.backends.registry.LATENT_DESIGNS", ())
    monkeypatch.setattr("mla_var3.attention.backends.plans.CUTE_SERVICES", {})
    monkeypatch.setattr(tuned, "tuned_folder", lambda: tmp_path / "tuned")


def test_predictions_decide_and_say_so() -> None:
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert explanation == mla_var3.explain(**SIZES, device_name="h200")
    assert not explanation.measured
    assert "not measured" in explanation.reason
    able = [c for c in explanation.candidates if c.refusal is None and c.predicted_us]
    assert explanation.kernel == min(able, key=lambda c: c.predicted_us or 0).kernel
    assert {c.kernel for c in explanation.candidates} >= {"flash_mla", "torch_tiled"}
    assert explanation.kernel in str(explanation)


def test_few_tiles_are_split() -> None:
    explanation = mla_var3.explain(b=1, s=1, t=65536, h=16, device_name=H200)
    assert explanation.kernel == "flash_mla_split_kv"
    assert explanation.candidates[0].choice["splits"] > 1


def test_a_kernel_that_nobody_timed_does_not_win_by_its_roofline() -> None:
    """Versions without rates on the device are listed, and chosen only when they are named."""
    sizes = {**SIZES, "s": 43, "window": 4096}
    explanation = mla_var3.explain(**sizes, device_name=H200)
    times = {c.kernel: c for c in explanation.candidates if c.language == "cutile-dsl"}
    fast = min(times.values(), key=lambda c: c.predicted_us or float("inf"))
    assert any(c.rated for c in explanation.candidates)
    chosen = explanation.candidates[0]
    assert chosen.rated and (fast.rated or (fast.predicted_us or 0) < (chosen.predicted_us or 0))
    named = mla_var3.explain(**sizes, device_name=H200, kernel="mla_var6_plus_v4")
    assert named.kernel == "mla_var6_plus_v4"
    elsewhere = mla_var3.explain(**sizes, device_name="NVIDIA B200")
    assert not any(c.rated for c in elsewhere.candidates)


def test_decompressed_copies_change_the_estimate() -> None:
    """Kernels on decompressed tokens pay for making them, unless the cache has them."""
    spec = device_spec(H200)
    bare, windowed, whole = (CallShape(**SIZES, window=n) for n in (0, 512, 4096))

    def total(kernel: str, shape: CallShape) -> float:
        found = estimate(kernel, shape, spec)
        assert found is not None
        return found.total_us

    assert total("flash_attention", whole) < total("flash_attention", windowed)
    assert total("flash_attention", windowed) == total("flash_attention", bare)
    found = estimate("mla_var6_plus", windowed, spec)
    assert found is not None and found.choice == {"n": 512}
    assert total("flash_mla", bare) == total("flash_mla", windowed)
    assert estimate("no_such_kernel", bare, spec) is None
    latent = CallShape(**SIZES, latent_only=True)
    assert total("flash_mla", latent) < total("flash_mla", bare)


def test_the_mix_is_estimated_by_its_own_model_where_that_was_fitted() -> None:
    spec = device_spec(H200)
    sizes = {**SIZES, "s": 43}
    model = MixModel(mix_parameters(spec))
    for window in (0, 1024, 2048, 4096):
        shape = CallShape(**sizes, window=window)
        found = estimate("mla_var6_plus", shape, spec, "cute-dsl")
        assert found is not None and found.rated
        n = window or model.best_n(shape.problem(), multiple=128)
        assert found.choice == {"n": n}
        assert found.kernel_us >= model.at(shape.problem(), n).attention_us
    # A whole copy needs no projection, no merge and no reordering.
    rates = kernel_rates(H200, "flash_attention", "cute-dsl")
    assert rates is not None
    assert (found.kernel_us, found.others_us) == (
        pytest.approx(model.at(shape.problem(), 4096).attention_us + rates.fixed_us),
        0.0,
    )
    for kernel, language, device in (
        ("mla_var6_plus_v5", "cute-dsl", H200),
        ("mla_var6_plus", "cute-dsl", "NVIDIA H100 80GB HBM3"),
    ):
        unrated = estimate(kernel, shape, device_spec(device), language)
        assert unrated is not None and not unrated.rated


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"page_size": 64}, "a paged cache"),
        ({"ragged": True}, "different numbers of queries per request"),
        ({"tree": True}, "a tree of tokens"),
        ({"partial": True}, "a cache that holds a part"),
        ({"dtype": "float32"}, "float32"),
        ({"aligned": False}, "16-byte aligned"),
        ({"d": 96}, "these sizes: d: expected a power of two"),
    ],
)
def test_what_the_plans_cannot_do(options: dict[str, Any], refusal: str) -> None:
    explanation = mla_var3.explain(**SIZES, **options)
    kernels = {c.kernel: c for c in explanation.candidates}
    assert refusal in str(kernels["mla_var6_plus"].refusal)
    assert kernels["mla_var6_plus"].predicted_us is None
    if "d" not in options:
        assert (explanation.kernel, explanation.path) == ("torch_tiled", "torch")
        assert explanation.reason == "no kernel serves a call of this form"


def test_latent_queries_leave_the_latent_kernels() -> None:
    explanation = mla_var3.explain(**SIZES, latent_only=True)
    able = {c.kernel for c in explanation.candidates if c.refusal is None}
    assert able == {"flash_mla", "flash_mla_split_kv", "torch_tiled"}


def test_sizes_are_checked() -> None:
    with pytest.raises(UnknownNameError, match="unknown size 'windw'; did you mean 'window'"):
        mla_var3.explain(**SIZES, windw=3)
    with pytest.raises(InvalidArgumentError, match="h: expected a positive integer, got nothing"):
        mla_var3.explain(b=1, s=1, t=1)
    with pytest.raises(InvalidArgumentError, match="s: expected a positive integer, got 0"):
        mla_var3.explain(b=1, s=0, t=1, h=1)
    with pytest.raises(UnknownNameError, match="unknown device 'H20'"):
        mla_var3.explain(**SIZES, device_name="H20")


def test_on_the_cpu_the_torch_path_runs_and_is_named(generator: torch.Generator) -> None:
    model = make_model(generator)
    cache, _ = filled_cache(generator, [5], model)
    q_nope, q_rope = (normal(generator, 1, 1, 2, w, dtype=torch.float32) for w in (6, 4))
    explanation = mla_var3.explain(q_nope, q_rope, cache, model.w_uk, model.w_uv, return_lse=True)
    assert (explanation.kernel, explanation.path, explanation.runs_on) == (
        "torch_tiled",
        "torch",
        "cpu",
    )
    assert "on the CPU" in explanation.reason
    latent = mla_var3.explain(torch.randn(1, 1, 2, 8), q_rope, cache, d=6)
    assert latent.shape.latent_only


# --- measured times -------------------------------------------------------------------------------


def write_tuned(folder: Path, *results: tuple[str, float], **problem: Any) -> None:
    full = {**SIZES, "d": 128, "p": 64, "k": 512, "dtype": "bfloat16", "causal": True, **problem}
    content = {
        "device": H200,
        "results": [
            {"kernel": kernel, "language": "cutile-dsl", "problem": full, "kernel_us": time_us,
             "source": "a record"}
            for kernel, time_us in results
        ],
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "times.json").write_text(json.dumps(content))
    tuned._shipped.cache_clear()


@pytest.fixture
def tuned_folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "tuned"
    tuned._shipped.cache_clear()


def test_two_measured_kernels_decide(tuned_folder: Path) -> None:
    write_tuned(tuned_folder, ("flash_mla", 5000.0), ("mla_var6_plus", 100.0))
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert explanation.measured and explanation.kernel == "mla_var6_plus"
    assert explanation.reason.startswith("fastest of 2 measured on NVIDIA H200")
    assert explanation.candidates[0].source == "a record"
    assert (explanation.candidates[0].measured_us or 0) > 100.0  # with what lies around the kernel
    assert not mla_var3.explain(**{**SIZES, "b": 31}, device_name=H200).measured
    assert not mla_var3.explain(**SIZES, device_name="RTX 5090").measured


def test_one_measured_kernel_decides_nothing(tuned_folder: Path) -> None:
    write_tuned(tuned_folder, ("flash_attention", 1.0))
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert not explanation.measured and explanation.kernel != "flash_attention"


def test_a_measured_time_holds_for_its_own_window(tuned_folder: Path) -> None:
    write_tuned(tuned_folder, ("flash_mla", 5000.0), ("mla_var6_plus", 100.0), n=256)
    assert not mla_var3.explain(**SIZES, window=512, device_name=H200).measured
    assert mla_var3.explain(**SIZES, window=256, device_name=H200).measured


@pytest.mark.parametrize("text", ["no json", '{"device": "x"}', '{"device": "x", "results": [{}]}'])
def test_a_broken_file_is_named(text: str, tuned_folder: Path) -> None:
    tuned_folder.mkdir()
    (tuned_folder / "bad.json").write_text(text)
    tuned._shipped.cache_clear()
    with pytest.raises(InvalidArgumentError, match=r"bad\.json: expected tuned results"):
        mla_var3.explain(**SIZES, device_name=H200)


def test_times_tuned_here_are_found() -> None:
    """Histories of the autotuner count when they are for this problem, source and toolkit."""
    spec = device_spec(H200)
    for name, median in (("flash_mla", 70.0), ("flash_mla_split_kv", 20.0)):
        plan = plan_class(find_kernel(name))(**SIZES).for_target(spec.target).on_device(spec)
        for unit in units_of(plan.plan(*plan.prepare_inputs("meta"))):
            key = tuning_key(plan, spec, unit.name, unit.kernels.values())
            history = History(history_path(plan, spec, key), key)
            (kernel,) = unit.kernels.values()
            timing = Timing(median, median, median, median, 9, "cuda-event", True)
            history.record(kernel.tiling.to_dict(), "ok", timing=timing)
            tilings = tuned.best_tilings(plan, spec)
            assert tilings[kernel.name] == kernel.tiling
    explanation = mla_var3.explain(**SIZES, device_name=H200)
    assert explanation.measured and explanation.kernel == "flash_mla_split_kv"
    assert "autotuned here" in str(explanation.candidates[0].source)
    assert not mla_var3.explain(**{**SIZES, "t": 4032}, device_name=H200).measured


# --- a kernel that is plugged in ------------------------------------------------------------------


@pytest.fixture
def plugged() -> Iterator[list[dict[str, Any]]]:
    """A latent kernel made of the reference; records what it was called with."""
    calls: list[dict[str, Any]] = []

    def attend(operands: LatentOperands, options: LatentOptions) -> None:
        assert not options.empty_positive and operands.block_table is not None
        calls.append({"max_q": options.max_q})
        pages = operands.block_table.long()
        result = reference_absorbed(
            operands.q_latent, operands.q_rope, operands.latent[pages].flatten(1, 2),
            operands.rope[pages].flatten(1, 2), operands.lengths, causal=options.causal,
            scale=options.scale_log2e * math.log(2.0),
        )  # fmt: skip
        operands.o_latent.copy_(result[0])
        operands.lse.copy_(result[1])

    def unsupported(shape: CallShape) -> str | None:
        return None if shape.page_size else "a dense cache"

    backends.register(LatentBackend("flash_mla", "cute-dsl", attend, unsupported, runs_on_cpu=True))
    yield calls
    backends.unregister("flash_mla", "cute-dsl")


def test_a_plugged_kernel_serves_what_it_supports(
    plugged: list[dict[str, Any]], generator: torch.Generator
) -> None:
    model = make_model(generator, dtype=torch.bfloat16, k=8, d=8)
    cache, tokens = filled_cache(
        generator, [70, 128], model, p=8, t=128, dtype=torch.bfloat16, page_size=64
    )
    q_nope, q_rope = (normal(generator, 2, 2, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    operands = q_nope, q_rope, cache, model.w_uk, model.w_uv
    assert mla_var3.explain(*operands, kernel="flash_mla").language == "cute-dsl"
    cache.block_table.clamp_(min=0)  # type: ignore[union-attr]
    output, lse = mla_var3.mla_attention(*operands, kernel="flash_mla", return_lse=True)
    assert [call["max_q"] for call in plugged] == [2]
    for request, rows in enumerate(tokens):
        expected, expected_lse = oracle(
            q_nope[request], q_rope[request], rows[:, :8], rows[:, 8:], model
        )
        assert_close(output[request], expected, lse[request], expected_lse)
    q_latent = normal(generator, 2, 2, 2, 8, dtype=torch.bfloat16)
    out = torch.empty_like(q_latent)
    latent, _ = mla_var3.mla_latent_attention(
        q_latent, q_rope, cache, kernel="flash_mla:cute-dsl", out=out
    )
    assert latent is out and len(plugged) == 2


def test_equal_predictions_go_to_the_plugged_kernel(plugged: list[dict[str, Any]]) -> None:
    dense = mla_var3.explain(**SIZES, device_name=H200)
    assert (dense.kernel, dense.language) == ("flash_mla", "cutile-dsl")
    paged = mla_var3.explain(**SIZES, page_size=64, device_name=H200)
    assert (paged.kernel, paged.language) == ("flash_mla", "cute-dsl")


def test_a_gpu_kernel_is_refused_on_the_cpu(generator: torch.Generator) -> None:
    model = make_model(generator, dtype=torch.bfloat16, k=8, d=8)
    cache, _ = filled_cache(generator, [9], model, p=8, t=128, dtype=torch.bfloat16)
    q = normal(generator, 1, 2, 2, 8, dtype=torch.bfloat16)
    backends.register(LatentBackend("gpu_only", "cute-dsl", lambda *_: None))
    try:
        with pytest.raises(UnsupportedError, match=r"gpu_only \(cute-dsl\): it needs a GPU"):
            mla_var3.mla_attention(q, q, cache, model.w_uk, model.w_uv, kernel="gpu_only")
    finally:
        backends.unregister("gpu_only", "cute-dsl")


# --- hyper-mla choose -----------------------------------------------------------------------------


def test_choose_prints_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "--b=1", "--s=1", "--t=65536", "--h=16", "--device_name=H200"]) == 0
    out = capsys.readouterr().out
    assert "flash_mla_split_kv *" in out
    assert "predictions of the cost model" in out


def test_choose_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["choose", "--b", "4", "--page_size", "64", "--window", "64", "--tree", "--json"]
    assert main([*argv, "--device_name", "RTX 5090"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernel"] == "torch_tiled"
    assert report["shape"]["tree"] is True and report["shape"]["b"] == 4
    assert report["device"] == "NVIDIA GeForce RTX 5090"


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--kernel=flash"], 2, "unknown kernel 'flash'"),
        (["--s=0"], 2, "s: expected a positive integer, got 0"),
        (["--device_name=H20"], 2, "unknown device 'H20'"),
        (["--dtype=int8"], 2, "dtype: expected bfloat16 or float16 or float32, got 'int8'"),
        (["--kernel=mla_var6_plus", "--tree"], 1, "it does not support a tree of tokens"),
    ],
)
def test_choose_refuses(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["choose", *argv]) == code
    assert message in capsys.readouterr().err
