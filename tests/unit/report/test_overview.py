"""The main job: its steps, its report, and what happens when a step fails."""

import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.bench import measure as bench_measure
from mla_var3.bench.contenders import TuneBudget
from mla_var3.bench.record import FAILED, load_record, save_record
from mla_var3.cli.commands import overview as cli_overview
from mla_var3.cli.main import main
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.report import overview
from mla_var3.report.overview import TUNE_SECONDS, OverviewOptions, run_overview
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.paths import TARGETS, output_root
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from tests.unit.bench.bench_support import PROBLEM, FakeGpu, FakeTimer, record, row
from tests.unit.cli.cli_support import check_result

CPU_STEPS = ["check", "compile", "predict"]
GPU_STEPS = ["choose", "measure"]


class Runtime:
    """Stands for everything that takes time."""

    def __init__(self) -> None:
        self.passes = self.compiles = True
        self.interrupt = False
        self.error: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []

    def prepare(self, plan: Any, options: Any) -> Any:
        if self.interrupt:
            raise KeyboardInterrupt
        self.calls.append(("prepare", plan.params(), options.device))
        return SimpleNamespace(plan=plan, check=check_result(self.passes))

    def profile_plan(self, plan: Any, mode: NsightProfType, options: Any) -> ProfileResult:
        self.calls.append((mode, plan.name, plan.params(), options))
        if self.error is not None:
            raise self.error
        stage = StageFigures("a_stage", None, None, 1.0, 1.0, 2.0)
        report = partial(CompileReport, tiling={}, registers=168)
        error = None if self.compiles else "too large"
        stage.extra["compile"] = [report("a_stage", each, error=error) for each in options.targets]
        return ProfileResult(plan.name, mode, stage, [stage], options.out_dir)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    fake = Runtime()
    monkeypatch.setattr(overview, "prepare", fake.prepare)
    monkeypatch.setattr(overview, "profile_plan", fake.profile_plan)
    return fake


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(overview, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(cli_overview, "pick_device", lambda device: "cuda")
    monkeypatch.setattr(overview, "draw_plots", lambda record, folder: [])
    return FakeGpu(monkeypatch)


@pytest.fixture(autouse=True)
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "S_VALUES", (1, 64))


def data_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return data


def test_the_report_without_a_gpu(runtime):
    seen: list[str] = []
    hook = lambda step: seen.append(step.name)  # noqa: E731
    result = run_overview(OverviewOptions(device="cpu", on_start=hook, on_end=hook))
    assert result.ok
    assert seen == [name for step in CPU_STEPS for name in (step, step)]
    assert result.folder.parent == output_root() / "overview"
    text = result.report.read_text()
    for words in (
        "# MLA attention, end to end", "| device | no GPU", "| date | 20", "| command | ",
        "torch 2.", "## mla_var6_plus on the CPU interpreter", "| a_stage | sm_120 | 168 |",
        "predictions, not measurements", "![crossover](crossover.png)",
        "### NVIDIA H200 (sm_90), steady call time by recorded rates",
        "### NVIDIA B200 (sm_100), ideal, vendor peaks",
    ):  # fmt: skip
        assert words in text, words
    assert {plot.name for plot in result.plots} == {"crossover.png", "crossover.svg"}
    data = data_of(result.folder)
    assert data["ok"] and [step["name"] for step in data["steps"]] == CPU_STEPS
    assert data["environment"]["versions"]["torch"] and len(data["steps"][2]["data"]) >= 5
    prepared, static = runtime.calls
    assert prepared[2] == "cpu" and prepared[1]["lengths"] == (200, 67)
    assert static[2]["b"] == 32 and static[3].targets == TARGETS


def test_bad_sizes_and_an_interrupt_leave_no_empty_folder(runtime, tmp_path, monkeypatch):
    with pytest.raises(InvalidArgumentError, match="b: expected a positive integer"):
        run_overview(OverviewOptions(device="cpu", sizes={"b": 0}))
    monkeypatch.setattr(runtime, "interrupt", True)
    with pytest.raises(KeyboardInterrupt):
        run_overview(OverviewOptions(device="cpu", out_dir=tmp_path / "new"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spoil", "step", "reason"),
    [
        ({"passes": False}, "check", "3 NaN"),
        ({"compiles": False}, "compile", "a_stage for sm_90"),
        ({"error": UnsupportedError("no compiler here")}, "compile", "no compiler here"),
        ({"error": ZeroDivisionError("oops")}, "compile", "ZeroDivisionError: oops"),
    ],
)
def test_a_failed_step_is_reported_and_the_others_run(spoil, step, reason, runtime):
    vars(runtime).update(spoil)
    result = run_overview(OverviewOptions(device="cpu"))
    (failed,) = [s for s in result.steps if s.status == "failed"]
    assert failed.name == step and reason in failed.reason and not result.ok
    assert [s.name for s in result.steps] == CPU_STEPS
    text, data = result.report.read_text(), data_of(result.folder)
    assert "**failed**: " in text and reason in text and not data["ok"]
    assert [s["status"] for s in data["steps"]].count("failed") == 1


def test_the_main_job_on_a_gpu_shows_what_the_product_does(gpu, monkeypatch, capsys):
    """It once measured cuTile alone, the slower language."""
    times = iter(range(1, 1000))
    timer = lambda run: FakeTimer(next(times))(run)  # noqa: E731
    monkeypatch.setattr(bench_measure, "gpu_timer", lambda seconds: timer)
    assert main(["run", "--device=cuda"]) == 0
    shown = capsys.readouterr().out
    (folder,) = (output_root() / "overview").iterdir()
    data, text = data_of(folder), (folder / "report.md").read_text()
    assert [step["name"] for step in data["steps"]] == GPU_STEPS and data["ok"]
    rows = data["steps"][1]["data"]["rows"]
    names = [entry["kernel"] for entry in rows]
    assert "mla_attention = flash_mla (cute-dsl, kernel)" in names
    for design in ("mla_var6_plus", "flash_mla", "flash_attention"):
        assert {design, f"{design} (cute-dsl)"} <= set(names)
    assert {"flashmla", "fa3_qv", "fa3", "sdpa"} <= set(names)
    call = [float(entry["call µs"]) for entry in rows]
    assert call == sorted(call)
    for entry in rows:
        assert float(entry["TFLOP/s"]) > 0 and float(entry["GB/s"]) > 0
        assert entry["of limit"].endswith(" %")
    assert data["steps"][0]["data"]["kernel"] and data["steps"][0]["data"]["reason"]
    assert "mla_attention uses " in shown and "fastest call first" in shown
    assert "- mla_attention: flash_mla (cute-dsl, kernel): fastest" in text
    assert "roofline at the vendor's peak rates" in text
    found = load_record(folder / "record.json")
    tuned = {"tilings": "tuned", "rounds": 3, "seconds of tuning": TUNE_SECONDS}
    assert tuned.items() <= found.settings.items()
    assert gpu.budget == TuneBudget(6, TUNE_SECONDS)
    assert {row.problem for row in found.rows} == {PROBLEM}
    assert main(["run", "--device=cuda", "--tune_seconds=3", f"--peer_libs={folder}"]) == 0
    assert gpu.budget is not None and gpu.budget.seconds == 3


def test_a_kernel_that_fails_on_the_gpu_fails_the_job_and_the_others_are_shown(gpu, tmp_path):
    gpu.broken = {"flash_mla": RuntimeError("out of memory"), "sdpa": RuntimeError("no cuDNN")}
    result = run_overview(OverviewOptions(quick=True, out_dir=tmp_path, sizes={"s": 4}))
    assert not result.ok
    step = result.steps[-1]
    assert step.status == "failed" and "flash_mla: out of memory" in step.reason
    assert "no cuDNN" not in step.reason and "no cuDNN" in step.text
    assert "flash_attention (cute-dsl)" in step.text
    assert result.record is not None and result.record.settings["tilings"] == "default"


def test_a_kernel_that_hangs_is_named_and_ends_the_process(gpu, tmp_path, monkeypatch, capsys):
    file = tmp_path / "record.json"
    hung = row("flash_mla", None, status=FAILED, reason="did not finish within 180 s")
    save_record(record(hung, row("flash_attention")), file)
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    cli_overview._lost(file)  # in the main thread the report is still written
    watchdog = threading.Thread(target=cli_overview._lost, args=(file,))
    watchdog.start()
    watchdog.join()
    assert codes == [1]
    assert "flash_mla: did not finish within 180 s" in capsys.readouterr().err


def test_the_command(runtime, tmp_path, capsys):
    folder = tmp_path / "here"
    argv = ["run", "--device=cpu", "--quick", f"--out_dir={folder}", "--b=8", "--s=4"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    for words in ("mla_var6_plus end to end, --device=cpu", "ok in ", "predicted call time, s=4"):
        assert words in out
    assert out.rstrip().endswith(f"report: {folder / 'report.md'}")
    assert data_of(folder)["sizes"] == {"b": 8, "s": 4, "t": 4096, "h": 128}
    prepared, static = runtime.calls
    assert prepared[1]["t"] < 200 and static[2]["b"] == 8
    assert static[3].targets == TARGETS[:1]
    runtime.passes = False
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "failed in " in out and "3 NaN" in out and "report: " in out
