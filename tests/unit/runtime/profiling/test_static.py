"""Static mode: a small kernel compiled for real, its artifacts and its report."""

from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import load_devices
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.paths import TARGETS, find_kernel, plan_class
from mla_var3.runtime.profiling import NsightProfType, ProfileResult
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
    assert compiled.mode is NsightProfType.STATIC
    assert compiled.kernel == "flash_attention"
    [stage] = compiled.stages
    assert stage.name == "flash_attention"
    assert stage.time_us is None
    assert stage.predicted_us == pytest.approx(compiled.total.predicted_us)
    [report] = stage.extra["compile"]
    assert report.target == "sm_90"
    assert report.error is None
    assert report.tensor_core == "HGMMA"


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
    assert found == {
        "report.md",
        "params.json",
        "tiling/flash_attention.json",
        *(
            f"compiled/flash_attention/flash_attention.sm_90.{end}"
            for end in ("cubin", "sass", "resources.txt", "tileirbc", "mlir")
        ),
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
    tilings = {
        report.target: report.tiling for report in reports if report.kernel == expected[0][0]
    }
    assert tilings["sm_90"] != tilings["sm_120"], "each target has defaults of its own"
    assert [stage.name for stage in result.stages] == list(kernels)
    assert result.record["params"]["n"] > 0, "the model chose the window"
    assert result.total.predicted_us == pytest.approx(
        sum(stage.predicted_us or 0.0 for stage in result.stages)
    )


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
