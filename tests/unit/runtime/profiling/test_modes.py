"""Profiling modes: finding them, refusing what is not there, and the mode that does nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnknownNameError, UnsupportedError
from mla_var3.runtime.profiling import (
    NsightProfType,
    ProfileResult,
    StageFigures,
    default_mode,
    profile_plan,
)
from mla_var3.runtime.profiling.common import (
    above_roofline,
    artifact_folder,
    plan_of_version,
    run_options,
    stage_figures,
)
from mla_var3.runtime.profiling.disabled import disabled_profile_plan
from mla_var3.runtime.workflow import RunOptions
from tests.unit.runtime.runtime_support import DoublingPlan, FakeTiling, fake_kernel

H200 = device_spec("NVIDIA H200")
CPU = RunOptions(device="cpu")
HERE = (NsightProfType.EVENT, NsightProfType.STATIC, NsightProfType.DISABLED)
FIGURES = StageFigures("x", 10.0, 0.5, flops=2e7, bytes=3e4, predicted_us=5.0)


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "nearest"), [("evnt", "event"), ("statc", "static"), ("disable", "disabled")]
)
def test_an_unknown_mode_suggests_the_nearest(typed: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown prof_type '{typed}'; did you mean") as got:
        profile_plan(DoublingPlan(), typed, CPU)
    assert f"'{nearest}'" in str(got.value)
    assert all(mode.value in str(got.value) for mode in NsightProfType)


def test_a_mode_that_is_not_there_lists_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    available = property(lambda mode: mode in HERE)
    monkeypatch.setattr(NsightProfType, "available", available)
    with pytest.raises(UnsupportedError) as caught:
        profile_plan(DoublingPlan(), "nsys", CPU)
    assert str(caught.value) == (
        "prof_type: expected one of the modes of this version (event, static, disabled), got nsys"
    )


def test_the_default_needs_no_gpu_where_there_is_none() -> None:
    assert default_mode("cpu") is NsightProfType.STATIC
    assert default_mode("cuda") in (NsightProfType.ANNOTATION, NsightProfType.EVENT)


def test_a_mode_is_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding a module is all it takes; it gets the plan and the options."""
    seen: list[Any] = []
    module = ModuleType("mla_var3.runtime.profiling.event")
    module.event_profile_plan = lambda plan, options: seen.append((plan, options)) or "done"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(NsightProfType, "available", property(lambda mode: True))
    plan = DoublingPlan()
    assert profile_plan(plan, "event", CPU) == "done"
    assert seen == [(plan, CPU)]


@pytest.mark.parametrize("mode", ["event", NsightProfType.EVENT])
def test_event_mode_refuses_the_cpu(mode: Any) -> None:
    with pytest.raises(
        UnsupportedError,
        match="^prof_type: expected a GPU for event mode, got the CPU; static mode needs none$",
    ):
        profile_plan(DoublingPlan(), mode, CPU)


# --- figures --------------------------------------------------------------------------------------


def test_nothing_timed_has_no_rates() -> None:
    untimed = StageFigures("x", None, None, 1.0, 1.0, None)
    assert (untimed.tflops, untimed.gbps) == (None, None)
    result = ProfileResult("k", NsightProfType.STATIC, untimed, [untimed])
    with pytest.raises(UnsupportedError, match="^static mode measures no time; use event mode"):
        result.get_total_time_us()
    assert ProfileResult("k", NsightProfType.EVENT, FIGURES, []).get_total_time_us() == 10.0


def test_figures_beside_the_roofline() -> None:
    stage = fake_kernel("k", flops=1e9, nbytes=1.0)
    figures = stage_figures(stage, 5.0, 0.1, H200, "bfloat16")
    assert (figures.name, figures.flops, figures.bytes) == ("k", 1e9, 1.0)
    assert figures.predicted_us == pytest.approx(1e3 / H200.peak_tflops("bfloat16"))


def test_faster_than_the_peak_is_noticed() -> None:
    stage = fake_kernel("k", flops=1e9, nbytes=1.0)
    floor = 1e3 / H200.peak_tflops("bfloat16")
    for time_us, above in ((0.9 * floor, True), (1.1 * floor, False), (None, False)):
        figures = stage_figures(stage, time_us, 0.0, H200, "bfloat16")
        assert above_roofline(figures, stage, H200, "bfloat16") is above


# --- options and folders --------------------------------------------------------------------------


def test_arguments_win_over_options() -> None:
    base = RunOptions(device="cpu", label="old", bench_runs=3, check=True)
    merged = run_options(base, "there", "new", 7)
    assert (merged.out_dir, merged.label, merged.bench_runs) == (Path("there"), "new", 7)
    assert merged.check
    assert run_options(base, None, None, None) == base
    assert run_options(None, None, None, None) == RunOptions()


def test_folders_are_made_where_asked(tmp_path: Path) -> None:
    asked = RunOptions(out_dir=tmp_path / "a/b")
    with artifact_folder(NsightProfType.EVENT, DoublingPlan(), asked) as folder:
        assert folder == tmp_path / "a/b"
        (folder / "report.md").write_text("")
    assert folder.is_dir()
    labelled = RunOptions(label="try")
    with artifact_folder(NsightProfType.EVENT, DoublingPlan(b=2), labelled) as folder:
        assert folder.is_dir()
        assert folder.parent.name.startswith("b2_")
        assert folder.name.endswith("-try")


def test_a_run_that_fails_leaves_no_folder_behind(tmp_path: Path) -> None:
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


# --- versions -------------------------------------------------------------------------------------


def test_no_version_keeps_the_plan() -> None:
    plan = DoublingPlan()
    assert plan_of_version(plan, None) is plan


def test_another_version_gets_the_same_problem() -> None:
    pytest.importorskip("cuda.tile")
    from mla_var3.runtime.paths import find_kernel, plan_class

    plan = plan_class(find_kernel("mla_var6_plus"))(b=3, s=2, t=40, h=8, n=7, causal=False)
    for version in ("v0", "base", "0"):
        other = plan_of_version(plan, version)
        assert type(other) is type(plan)
        assert other.params() == plan.params()
    with pytest.raises(UnknownNameError, match="unknown version of mla_var6_plus 'v99'"):
        plan_of_version(plan, "v99")


# --- disabled mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_disabled_mode_runs_once_and_leaves_nothing(check: bool, tmp_path: Path) -> None:
    """With the check it is the check that runs it."""
    log: list[str] = []
    plan = DoublingPlan()
    build = plan.plan

    def noted(*inputs: Any) -> Any:
        stage = build(*inputs)
        stage.log = log
        return stage

    plan.on_device = lambda spec: plan  # type: ignore[method-assign]
    plan.resolve = lambda *rates: plan  # type: ignore[method-assign]
    plan.plan = noted  # type: ignore[method-assign]
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
    assert result.record["params"]["b"] == 8


def test_benchmark_kernel_is_the_same_thing() -> None:
    result = DoublingPlan(tiling=FakeTiling(rows=2)).benchmark_kernel(
        device="cpu", prof_type="disabled", check=True
    )
    assert result.mode is NsightProfType.DISABLED
    assert result.check is not None
    assert result.check.passed
