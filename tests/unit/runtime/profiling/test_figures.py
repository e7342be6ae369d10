"""Compile reports as rows."""

from pathlib import Path

from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures, figures

GOOD = CompileReport(
    "first",
    "sm_90",
    {"Bm": 64},
    registers=168,
    consumer_registers=232,
    stack_bytes=0,
    shared_bytes=2048,
    threads=384,
    instructions={"HGMMA": 8, "UTMALDG": 2},
)
SPILLING = CompileReport(
    "first",
    "sm_120",
    {"Bm": 64},
    registers=255,
    stack_bytes=544,
    shared_bytes=1024,
    threads=256,
    instructions={"HMMA": 8, "STL": 3},
)
BROKEN = CompileReport("second", "sm_90", {}, error="does not fit")


def result(timed: bool) -> ProfileResult:
    first = StageFigures("first", 10.0 if timed else None, 0.5, 2e9, 1e6, 5.0)
    second = StageFigures("second", None, None, 1e9, 0.0, None)
    total = StageFigures("whole", 20.0 if timed else None, None, 3e9, 1e6, 5.0)
    if not timed:
        first.extra["compile"] = [GOOD, SPILLING]
        second.extra["compile"] = [BROKEN]
    mode = NsightProfType.EVENT if timed else NsightProfType.STATIC
    return ProfileResult("whole", mode, total, [first, second], Path("out"))


def test_compile_reports_come_by_stage():
    reports = figures.compile_reports(result(timed=False))
    assert reports == [GOOD, SPILLING, BROKEN]
    assert figures.compile_reports(result(timed=True)) == []
    rows = figures.compile_rows(reports)
    assert rows[0][2:] == ("168 (232)", "0 B", "2.00 KiB", 384, "HGMMA", "yes", "ok")
    assert rows[1][3] == "544 B" and "spills" in str(rows[1][-1])
    assert rows[2][2:4] == (None, None) and "does not fit" in str(rows[2][-1])
    assert "A stack above zero means spills" in figures.compile_markdown(reports)
