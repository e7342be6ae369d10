"""Compile reports as rows."""

from pathlib import Path

from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures, figures

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
