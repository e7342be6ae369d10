"""The main job: its steps, its report, and what happens when a step fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.cli.main import main
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.compare import ErrorFigures
from mla_var3.report import overview
from mla_var3.report.overview import OverviewOptions, run_overview
from mla_var3.runtime.check import CheckResult, OutputCheck
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.paths import output_root
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.workflow import TARGETS

CPU_STEPS = ["check", "compile", "predict", "plot"]
GPU_STEPS = [
    *("profile_mla_var6_plus", "profile_flash_mla", "profile_flash_attention"),
    *("compare", "predict", "plot"),
]


class Runtime:
    """Stands for everything that takes time."""

    def __init__(self) -> None:
        self.passes = True
        self.compiles = True
        self.error: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []

    def check(self) -> CheckResult:
        error = ErrorFigures(0.001, 0.01, 0 if self.passes else 3, 0)
        return CheckResult((OutputCheck(0, (2, 4), error, error, 0.002, 0.02),))

    def prepare(self, plan: Any, options: Any) -> Any:
        self.calls.append(("prepare", plan.params(), options.device))
        return SimpleNamespace(plan=plan, check=self.check())

    def profile_plan(self, plan: Any, mode: NsightProfType | None, options: Any) -> ProfileResult:
        self.calls.append((mode, plan.name, plan.params(), options))
        if self.error is not None:
            raise self.error
        if mode is NsightProfType.STATIC:
            stage = StageFigures("a_stage", None, None, 1.0, 1.0, 2.0)
            stage.extra["compile"] = [
                CompileReport(
                    "a_stage",
                    target,
                    {},
                    registers=168,
                    instructions={"HGMMA": 4, "UTMALDG": 1},
                    error=None if self.compiles else "too large",
                )
                for target in options.targets
            ]
            return ProfileResult(plan.name, mode, stage, [stage], options.out_dir)
        stage = StageFigures("a_stage", 900.0, 1.0, 1e9, 1e9, 600.0)
        event = NsightProfType.EVENT
        return ProfileResult(plan.name, event, stage, [stage], options.out_dir, self.check())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(overview, "prepare", fake.prepare)
    monkeypatch.setattr(overview, "profile_plan", fake.profile_plan)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(overview, "current_device_spec", lambda: device_spec("NVIDIA H200"))
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(140e9), int(141e9)))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*arguments: Any, **settings: Any) -> list[Path]:
        path: Path = arguments[1].with_suffix(".png")
        path.write_bytes(b"png")
        return [path]

    monkeypatch.setattr(overview, "crossover_plot", write)
    monkeypatch.setattr(overview, "line_plot", write)
    monkeypatch.setattr(overview, "dense_sweeps", list)


def data_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return data


def test_the_report_without_a_gpu(runtime: Runtime) -> None:
    started: list[str] = []
    ended: list[str] = []
    result = run_overview(
        OverviewOptions(
            device="cpu",
            on_start=lambda step: started.append(step.name),
            on_end=lambda step: ended.append(step.name),
        )
    )
    assert result.ok
    assert started == ended == CPU_STEPS
    assert result.folder.parent == output_root() / "overview"
    text = result.report.read_text()
    for words in (
        "# mla_var6_plus, end to end",
        "| device | no GPU",
        "| date | 20",
        "| command | `",
        "torch 2.",
        "## Summary",
        "## mla_var6_plus on the CPU interpreter",
        "## mla_var6_plus compiled",
        "| a_stage | sm_120 | 168 |",
        "## Predicted times",
        "predictions, not measurements",
        "vendor peak, NVIDIA",
        "burst, ",
        "### NVIDIA H200 (sm_90), steady call time by recorded rates",
        "### NVIDIA B200 (sm_100), ideal, vendor peaks",
        "Fastest: flash_mla for s = 1",
        "![crossover](crossover.png)",
    ):
        assert words in text, words
    for plot in result.plots:
        assert plot.stat().st_size > 5000
    assert {plot.name for plot in result.plots} >= {"crossover.png", "speedup.png"}
    data = data_of(result.folder)
    assert data["ok"] and [step["name"] for step in data["steps"]] == CPU_STEPS
    assert data["environment"]["versions"]["torch"]
    assert len(data["steps"][2]["data"]) >= 5
    prepared, static = runtime.calls
    assert prepared[2] == "cpu" and prepared[1]["lengths"] == (200, 67)
    assert static[2]["b"] == 32 and static[3].targets == TARGETS


def test_sizes_and_quick(runtime: Runtime, no_plots: None, tmp_path: Path) -> None:
    options = OverviewOptions(
        device="cpu", quick=True, out_dir=tmp_path / "here", sizes={"b": 8, "s": 4}
    )
    result = run_overview(options)
    assert result.folder == tmp_path / "here" and result.ok
    prepared, static = runtime.calls
    assert prepared[1]["t"] < 200
    assert (static[2]["b"], static[2]["s"], static[2]["t"]) == (8, 4, 4096)
    assert static[3].targets == TARGETS[:1]


def test_bad_sizes_write_nothing(runtime: Runtime) -> None:
    with pytest.raises(InvalidArgumentError, match="b: expected a positive integer"):
        run_overview(OverviewOptions(device="cpu", sizes={"b": 0}))
    assert not output_root().exists()


def fail_check(runtime: Runtime) -> None:
    runtime.passes = False


def fail_compile(runtime: Runtime) -> None:
    runtime.compiles = False


def fail_with_own_error(runtime: Runtime) -> None:
    runtime.error = UnsupportedError("no compiler here")


def fail_with_bug(runtime: Runtime) -> None:
    runtime.error = ZeroDivisionError("oops")


@pytest.mark.parametrize(
    ("spoil", "step", "reason"),
    [
        (fail_check, "check", "3 NaN"),
        (fail_compile, "compile", "a_stage for sm_90"),
        (fail_with_own_error, "compile", "no compiler here"),
        (fail_with_bug, "compile", "ZeroDivisionError: oops"),
    ],
)
def test_a_failed_step_is_reported_and_the_others_run(
    spoil: Callable[[Runtime], None], step: str, reason: str, runtime: Runtime, no_plots: None
) -> None:
    spoil(runtime)
    result = run_overview(OverviewOptions(device="cpu"))
    assert not result.ok
    (failed,) = [s for s in result.steps if s.status == "failed"]
    assert failed.name == step and reason in failed.reason
    assert [s.name for s in result.steps] == CPU_STEPS
    assert "**failed**: " in result.report.read_text() and reason in result.report.read_text()
    data = data_of(result.folder)
    assert not data["ok"]
    assert [s["status"] for s in data["steps"]].count("failed") == 1


def test_the_report_with_a_gpu(runtime: Runtime, gpu: None, no_plots: None) -> None:
    result = run_overview(OverviewOptions())
    assert result.ok and [step.name for step in result.steps] == GPU_STEPS
    assert [call[1] for call in runtime.calls] == ["mla_var6_plus", "flash_mla", "flash_attention"]
    for call in runtime.calls:
        assert call[0] is None and call[3].check and call[3].autotune
        assert (call[2]["b"], call[2]["s"], call[2]["t"]) == (32, 16, 4096)
    text = result.report.read_text()
    assert "| flash_mla | 900 µs | 600 µs | 1.50 |" in text
    assert "without the projections" in text and "measured" in text
    assert result.measured[0] == ("mla_var6_plus", 900.0, 600.0)


def test_what_does_not_fit_is_skipped_with_the_reason(
    runtime: Runtime, gpu: None, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(10e9), int(141e9)))
    result = run_overview(OverviewOptions())
    skipped = {step.name: step.reason for step in result.steps if step.status == "skipped"}
    assert list(skipped) == ["profile_flash_attention"]
    assert "of GPU memory" in skipped["profile_flash_attention"]
    assert result.ok


def test_quick_on_a_gpu(runtime: Runtime, gpu: None, no_plots: None) -> None:
    run_overview(OverviewOptions(quick=True))
    ((_, kernel, _, options),) = runtime.calls
    assert kernel == "mla_var6_plus" and options.tune_max_iters == 2


def test_the_command(
    runtime: Runtime, no_plots: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "here"
    assert main(["run", "--device=cpu", "--quick", f"--out_dir={folder}", "--s=8"]) == 0
    out = capsys.readouterr().out
    assert "mla_var6_plus end to end, --device=cpu" in out
    assert "ok in " in out and "predicted call time, s=8" in out
    assert out.rstrip().endswith(f"report: {folder / 'report.md'}")
    assert data_of(folder)["sizes"]["s"] == 8


def test_the_command_fails_when_a_step_fails(
    runtime: Runtime, no_plots: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.passes = False
    assert main(["run", "--device=cpu"]) == 1
    out = capsys.readouterr().out
    assert "failed in " in out and "3 NaN" in out and "report: " in out
