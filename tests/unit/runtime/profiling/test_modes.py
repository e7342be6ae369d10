"""Profiling modes: finding them, refusing what is not there, and the mode that does nothing."""

import inspect
import re
from typing import Any

import pytest

from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.runtime.profiling import NsightProfType
from mla_var3.runtime.profiling.common import artifact_folder, plan_of_version
from mla_var3.runtime.profiling.disabled import disabled_profile_plan
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
    from mla_var3.runtime.paths import find_kernel, plan_class

    plan = plan_class(find_kernel("mla_var6_plus"))(b=3, s=2, t=40, h=8, n=7, causal=False)
    for version in ("v0", "base", "0"):
        other = plan_of_version(plan, version)
        assert type(other) is type(plan)
        assert other.params() == plan.params()
    with pytest.raises(UnknownNameError, match="unknown version of mla_var6_plus 'v99'"):
        plan_of_version(plan, "v99")


def test_a_chosen_parameter_that_another_version_lacks_is_refused():
    pytest.importorskip("cutlass")
    from mla_var3.runtime.paths import find_kernel, plan_class

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

    def noted(*inputs: Any) -> Any:
        stage = build(*inputs)
        stage.log = log
        return stage

    plan.on_device = lambda spec: plan
    plan.resolve = lambda *rates: plan
    plan.plan = noted
    options = RunOptions(device="cpu", check=check)
    result = disabled_profile_plan(plan, options=options)
    assert log == ["doubling"]
    assert result.out_dir is None
    assert not (tmp_path / "out").exists()
    assert (result.check is not None) is check
    assert result.total.time_us is None
    assert result.total.predicted_us is not None
    assert [stage.name for stage in result.stages] == ["doubling"]
    assert result.record["prof_type"] == "disabled"
    assert result.record["planned_for"] == planning_device().name  # whose peaks the ideal is of
    assert result.record["params"]["b"] == 8


def test_the_functions_of_the_modes_show_their_own_parameters():
    for profile in (disabled_profile_plan, nsys_profile_plan):
        names = list(inspect.signature(profile).parameters)
        assert names == ["plan", "out_dir", "version", "label", "bench_runs", "options"]
        assert profile.__doc__ and profile.__name__.endswith("_profile_plan")
