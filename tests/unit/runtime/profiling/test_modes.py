"""The modes: refusing what is not there, doing nothing, event mode on a pretended GPU."""

import inspect
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mla_var3.conf.devices import device_spec
from mla_var3.errors import (
    CheckFailedError,
    InvalidArgumentError,
    MissingToolError,
    UnknownNameError,
    UnsupportedError,
)
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.profiling import NsightProfType, common
from mla_var3.runtime.profiling.common import artifact_folder, plan_of_version
from mla_var3.runtime.profiling.disabled import disabled_profile_plan
from mla_var3.runtime.profiling.event import event_profile_plan
from mla_var3.runtime.profiling.modes import benchmark_kernel
from mla_var3.runtime.profiling.nsys import nsys_profile_plan
from mla_var3.runtime.workflow import RunOptions, planning_device
from tests.unit.runtime.runtime_support import DoublingPlan


def test_a_run_that_fails_leaves_no_folder_behind(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for wanted in (kept / "a" / "b", kept):
        options = RunOptions(out_dir=wanted)
        with (
            pytest.raises(UnsupportedError),
            artifact_folder(NsightProfType.EVENT, DoublingPlan(), options),
        ):
            raise UnsupportedError("no")
    assert list(tmp_path.rglob("*")) == [kept], "what was there before stays"


def test_an_option_that_no_run_has_is_named():
    with pytest.raises(UnknownNameError, match="unknown option 'bench_run'; did you mean 'bench_r"):
        DoublingPlan().benchmark_kernel("cpu", "disabled", bench_run=1)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("bench_runs", "3", "bench_runs: expected a number of at least 1, got '3'"),
        ("tune_seconds", "x", "tune_seconds: expected a number of at least 0, got 'x'"),
        ("targets", "sm_90", "targets: expected a sequence of GPU codes, got 'sm_90'"),
        ("targets", ("sm_1",), "unknown target 'sm_1'"),
    ],
)
def test_values_that_no_run_can_have_are_refused_by_name(option, value, message, tmp_path):
    with pytest.raises((InvalidArgumentError, UnknownNameError), match=re.escape(message)):
        DoublingPlan().benchmark_kernel("cpu", "static", tmp_path / "new", **{option: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plan", [None, "flash_mla", DoublingPlan])
def test_a_plan_is_one(plan):
    with pytest.raises(InvalidArgumentError, match="plan: expected a KernelPlan, got "):
        benchmark_kernel(plan, "cpu", "disabled")


def test_another_version_gets_the_same_problem():
    pytest.importorskip("cuda.tile")
    plan = plan_class(find_kernel("mla_var6_plus"))(b=3, s=2, t=40, h=8, n=7, causal=False)
    for version in ("v0", "base", "0"):
        other = plan_of_version(plan, version)
        assert type(other) is type(plan) and other.params() == plan.params()
    with pytest.raises(UnknownNameError, match="unknown version of mla_var6_plus 'v99'"):
        plan_of_version(plan, "v99")


def test_a_chosen_parameter_that_another_version_lacks_is_refused():
    pytest.importorskip("cutlass")
    base = plan_class(find_kernel("mla_var6_plus", language="cute-dsl"))
    sizes = {"b": 3, "s": 2, "t": 640, "h": 8}
    with pytest.raises(UnknownNameError, match=r"parameter of mla_var6_plus_v6 'n'.*prefix") as got:
        plan_of_version(base(**sizes, n=128), "v6")
    assert "tiling" not in got.value.known
    other = plan_of_version(base(**sizes), "v6")  # n was left to the model
    assert (other.name, other.t) == ("mla_var6_plus_v6", 640)


@pytest.mark.parametrize("check", [False, True])
def test_disabled_mode_runs_once_and_leaves_nothing(check, tmp_path):
    """With the check it is the check that runs it."""
    log: list[str] = []
    plan = DoublingPlan()
    build = plan.plan
    plan.on_device = lambda spec: plan
    plan.resolve = lambda *rates: plan
    plan.plan = lambda *inputs: replace(build(*inputs), log=log)
    result = disabled_profile_plan(plan, options=RunOptions(device="cpu", check=check))
    assert log == ["doubling"]
    assert result.out_dir is None and not (tmp_path / "out").exists()
    assert (result.check is not None) is check
    assert result.total.time_us is None and result.total.predicted_us is not None
    assert [stage.name for stage in result.stages] == ["doubling"]
    assert result.record["prof_type"] == "disabled"
    assert result.record["planned_for"] == planning_device().name  # whose peaks the ideal is of
    assert result.record["params"]["b"] == 8


def test_the_functions_of_the_modes_show_their_own_parameters():
    for profile in (disabled_profile_plan, nsys_profile_plan):
        names = list(inspect.signature(profile).parameters)
        assert names == ["plan", "out_dir", "version", "label", "bench_runs", "options"]
        assert profile.__doc__ and profile.__name__.endswith("_profile_plan")


H200 = device_spec("NVIDIA H200")


@dataclass
class TwicePlan(DoublingPlan):
    """Two kernels in order, which may have one name."""

    names: tuple[str, str] = ("first", "second")

    def reference_fn(self, *inputs: Tensor, compute_dtype: Any = None) -> tuple[Tensor, ...]:
        return ((inputs[0].float() * 4).to(compute_dtype or inputs[0].float().dtype),)

    def plan(self, *inputs: Tensor) -> Any:
        first = super().plan(*inputs)
        second = super().plan(*first.output_tensors)
        first.kernel_fn, second.kernel_fn = self.names
        return KernelPipeline(_name="twice", stages=[first, second])


@pytest.mark.parametrize("second", ["second", "first"])
def test_a_pipeline_is_timed_as_a_whole_and_by_stage(second, gpu, tmp_path):
    """A kernel that runs twice has two rows and two folders, in modes without times too."""
    times = iter((50.0, 20.0, 31.0))
    gpu.time_us = lambda: next(times)
    plan, label = TwicePlan(names=("first", second)), "second" if second == "second" else "first.2"
    result = event_profile_plan(plan, bench_runs=7, out_dir=tmp_path)
    assert result.get_total_time_us() == 50.0
    rows = [(stage.name, stage.time_us) for stage in result.stages]
    assert rows == [("first", 20.0), (label, 31.0)]
    assert [row["name"] for row in result.record["stages"]] == ["first", label]
    assert {path.name for path in (tmp_path / "compiled").iterdir()} == {"first", label}
    assert gpu.timed == [7, 7, 7]
    stage = plan.plan(*plan.prepare_inputs("cpu"))
    assert [row.name for row in common.kernel_figures(stage, H200, "bfloat16")] == ["first", label]


def test_timing_holds_the_device_and_comes_after_preparing(gpu):
    event_profile_plan(TwicePlan())
    assert gpu.log == [
        *("lock GPU-0", "prepare", "time", "time", "time"),
        *("compile first for sm_90", "compile second for sm_90", "unlock"),
    ]


def test_a_wrong_result_is_never_timed(gpu):
    with pytest.raises(CheckFailedError, match="output 0"):
        event_profile_plan(DoublingPlan(error=1.0), options=RunOptions(check=True))
    assert gpu.timed == []


def test_artifacts(gpu, tmp_path):
    history = tmp_path / "history.json"
    history.write_text('{"results": []}')
    gpu.tuning = {"first": type("Tuning", (), {"path": history})()}
    result = event_profile_plan(TwicePlan(), tmp_path / "here", options=RunOptions(check=True))
    assert result.out_dir == tmp_path / "here"
    found = [path for path in result.out_dir.rglob("*") if path.is_file()]
    assert {str(path.relative_to(result.out_dir)) for path in found} == {
        *("report.md", "params.json", "tiling/first.json", "tiling/second.json"),
        *("tiling/first/autotuning.json", "compiled/first/first.sm_90.cubin"),
        "compiled/second/second.sm_90.cubin",
    }


def test_a_time_above_the_roofline_is_called_wrong(gpu, tmp_path):
    gpu.time_us = lambda: 1e-9
    result = event_profile_plan(DoublingPlan(b=1000), out_dir=tmp_path)
    assert result.record["above_roofline"] is True
    assert "treat this measurement as wrong until explained" in (tmp_path / "report.md").read_text()


def test_a_missing_disassembler_does_not_lose_the_measurement(gpu, tmp_path, monkeypatch):
    """A GPU host often has no nvdisasm; the times are in by then."""

    def fail(kernel: Any, target: str, artifacts_dir: Path) -> None:
        raise MissingToolError("nvdisasm: expected the program, got none")

    monkeypatch.setattr(common, "compile_report", fail)
    result = event_profile_plan(DoublingPlan(), out_dir=tmp_path)
    assert result.get_total_time_us() == 50.0
    assert json.loads((tmp_path / "params.json").read_text())["total"]["time_us"] == 50.0
    assert "nvdisasm" in (tmp_path / "report.md").read_text()
