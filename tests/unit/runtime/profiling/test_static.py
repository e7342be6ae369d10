"""Static mode: a small kernel compiled for real, its artifacts and its report."""

from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import load_devices
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.paths import TARGETS, find_kernel, plan_class
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures, figures
from mla_var3.runtime.profiling import static as static_module
from mla_var3.runtime.profiling.static import static_profile_plan
from mla_var3.runtime.workflow import RunOptions

pytest.importorskip("cuda.tile")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ProfileResult:
    """One small kernel for one target, as a user would get it."""
    folder = tmp_path_factory.mktemp("static")
    plan = plan_class(find_kernel("flash_attention"))(b=1, s=1, t=64, h=8)
    options = RunOptions(device="cpu", out_dir=folder, targets=("sm_90",))
    return static_profile_plan(plan, options=options)


def test_figures(compiled):
    assert (compiled.mode, compiled.kernel) == (NsightProfType.STATIC, "flash_attention")
    [stage] = compiled.stages
    assert (stage.name, stage.time_us) == ("flash_attention", None)
    assert stage.predicted_us == pytest.approx(compiled.total.predicted_us)
    [report] = stage.extra["compile"]
    assert (report.target, report.error, report.tensor_core) == ("sm_90", None, "HGMMA")


def test_predictions_for_every_device_that_the_kernel_serves(compiled):
    predicted = compiled.record["predicted_us"]
    served = {spec.name for spec in load_devices().values() if spec.target in TARGETS}
    assert set(predicted) == served
    assert all(value > 0 for value in predicted.values())
    assert compiled.record["planned_for"] in predicted


def test_artifacts(compiled):
    folder = compiled.out_dir
    assert folder is not None
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    code = "compiled/flash_attention/flash_attention.sm_90."
    assert found == {
        *("report.md", "params.json", "tiling/flash_attention.json"),
        *(code + end for end in ("cubin", "sass", "resources.txt", "tileirbc", "mlir")),
    }
    text = (folder / "report.md").read_text()
    assert text.startswith("---\n"), "front matter for the agents"
    for expected in (
        "# flash_attention, static mode",
        "## Compile report",
        "| flash_attention | sm_90 |",
        "HGMMA",
        "## Prediction",
        "NVIDIA H200",
        "`hyper-mla predict` shows",
        "## Tilings",
        "### sm_90, planned for ",
    ):
        assert expected in text


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[CompileReport]:
    """Notes what would be compiled; the second target does not compile."""
    made: list[CompileReport] = []

    def report(kernel: Any, target: str, artifacts_dir: Path) -> CompileReport:
        error = "no such instruction" if target == "sm_100" else None
        made.append(CompileReport(kernel.name, target, kernel.tiling.to_dict(), error=error))
        return made[-1]

    monkeypatch.setattr(static_module, "compile_report", report)
    return made


def test_every_stage_for_every_target(reports):
    plan = plan_class(find_kernel("mla_var6_plus"))(b=32, s=32, t=4096, h=128)
    result = static_profile_plan(plan, options=RunOptions(device="cpu"))
    kernels = ("attention_block_specialized", "decompress_combine")
    expected = [(k, target) for target in ("sm_90", "sm_100", "sm_120") for k in kernels]
    assert [(report.kernel, report.target) for report in reports] == expected
    tilings = {report.target: report.tiling for report in reports[::2]}
    assert tilings["sm_90"] != tilings["sm_120"], "each target has defaults of its own"
    assert [stage.name for stage in result.stages] == list(kernels)
    assert result.record["params"]["n"] > 0, "the model chose the window"
    parts = [stage.predicted_us for stage in result.stages]
    assert result.total.predicted_us == pytest.approx(sum(parts))


@pytest.mark.usefixtures("reports")
def test_a_target_that_does_not_compile_is_a_result():
    plan = plan_class(find_kernel("flash_mla"))(b=1, s=1, t=64, h=8)
    result = static_profile_plan(plan, options=RunOptions(device="cpu", label="Broken one"))
    assert result.out_dir is not None
    assert result.out_dir.name.endswith("-broken-one")
    assert "does not compile: no such instruction" in (result.out_dir / "report.md").read_text()


def test_a_chosen_tiling_is_compiled_for_every_target(reports):
    cls = plan_class(find_kernel("flash_attention"))
    tiling = type(cls().tiling)(Bm=32, Bn=32)
    plan = cls(b=1, s=1, t=64, h=8, tiling=tiling)
    static_profile_plan(plan, options=RunOptions(device="cpu"))
    assert {(report.tiling["Bm"], report.tiling["Bn"]) for report in reports} == {(32, 32)}


GOOD = CompileReport(
    "first", "sm_90", {"Bm": 64}, registers=168, consumer_registers=232, stack_bytes=0,
    shared_bytes=2048, threads=384, instructions={"HGMMA": 8, "UTMALDG": 2},
)  # fmt: skip
SPILLING = CompileReport("first", "sm_120", {"Bm": 64}, registers=255, stack_bytes=544)
BROKEN = CompileReport("second", "sm_90", {}, error="does not fit")


def test_compile_reports_come_by_stage():
    first, second = (StageFigures(name, None, None, 1e9, 1e6, 5.0) for name in ("first", "second"))
    result = ProfileResult("whole", NsightProfType.STATIC, first, [first, second], Path("out"))
    assert figures.compile_reports(result) == []
    first.extra["compile"], second.extra["compile"] = [GOOD, SPILLING], [BROKEN]
    reports = figures.compile_reports(result)
    assert reports == [GOOD, SPILLING, BROKEN]
    rows = figures.compile_rows(reports)
    assert rows[0][2:] == ("168 (232)", "0 B", "2.00 KiB", 384, "HGMMA", "yes", "ok")
    assert rows[1][3] == "544 B" and "spills" in str(rows[1][-1])
    assert rows[2][2:4] == (None, None) and "does not fit" in str(rows[2][-1])
    assert "A stack above zero means spills" in figures.compile_markdown(reports)


def test_other_kernels_are_not_sent_to_predict():
    stage = StageFigures("only", None, None, 1e9, 1e6, 5.0)
    for kernel, known in (("flash_mla", True), ("mla_var6_plus_v2", True), ("latent_norm", False)):
        result = ProfileResult(kernel, NsightProfType.STATIC, stage, [stage], Path("out"))
        assert figures.has_estimate(result) is known
