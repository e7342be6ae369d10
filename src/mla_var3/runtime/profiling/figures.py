"""Checks, compile reports and profiles as rows, for screens and for markdown alike."""

from __future__ import annotations

from collections.abc import Sequence

from mla_var3.op.mla.model.designs import DESIGNS
from mla_var3.runtime.check import CheckResult, OutputCheck
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.markdown import byte_count, flop_count, microseconds, number, table
from mla_var3.runtime.paths import split_full_name
from mla_var3.runtime.profiling.modes import ProfileResult

Rows = list[tuple[object, ...]]

STAGE_HEADERS = (
    *("stage", "time", "spread", "ideal", "of roofline", "TFLOP/s", "GB/s"),
    *("FLOP/byte", "FLOPs", "bytes"),
)
COMPILE_HEADERS = (
    *("kernel", "target", "registers", "stack", "shared memory", "threads"),
    *("tensor core", "TMA", "verdict"),
)
CHECK_HEADERS = (
    *("output", "relative error", "bound", "largest error", "bound"),
    *("relative error of PyTorch", "outcome"),
)


def has_estimate(result: ProfileResult) -> bool:
    """Whether `hyper-mla predict` shows what the kernel is expected to take."""
    return split_full_name(result.kernel)[0] in DESIGNS


def stage_rows(result: ProfileResult) -> Rows:
    """Figures per stage, and of the whole when there are several."""
    return [
        (
            stage.name,
            microseconds(stage.time_us),
            None if stage.spread_us is None else f"± {microseconds(stage.spread_us)}",
            microseconds(stage.predicted_us),
            None if stage.of_roofline_pct is None else f"{stage.of_roofline_pct:.0f}%",
            number(stage.tflops),
            number(stage.gbps),
            number(stage.intensity),
            flop_count(stage.flops),
            byte_count(stage.bytes),
        )
        for stage in result.rows
    ]


def stage_markdown(result: ProfileResult) -> str:
    """Figures per stage as a markdown table."""
    return table(STAGE_HEADERS, stage_rows(result))


def check_rows(check: CheckResult) -> Rows:
    """Errors and bounds per output."""
    return [
        (
            f"{output.index} {list(output.shape)}",
            number(output.error.relative_frobenius),
            number(output.relative_bound),
            number(output.error.max_abs),
            number(output.max_bound),
            number(output.baseline.relative_frobenius if output.baseline else None),
            _outcome(output),
        )
        for output in check.outputs
    ]


def _outcome(output: OutputCheck) -> str:
    if output.passed:
        return "passed"
    counts = {"NaN": output.error.nan_count, "wrong infinities": output.error.mismatched_inf}
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"FAILED: {found}" if found else "FAILED"


def check_markdown(check: CheckResult) -> str:
    """Errors and bounds per output as a markdown table, and where the bounds come from."""
    return (
        table(CHECK_HEADERS, check_rows(check))
        + "\nThe relative error is that of the Frobenius norm. A bound is twice the error that "
        "the same computation has in PyTorch in the kernel's dtype, plus a small constant.\n"
    )


def check_summary(check: CheckResult) -> str:
    """The check in one line."""
    errors = ", ".join(
        f"{number(o.error.relative_frobenius)} (bound {number(o.relative_bound)})"
        for o in check.outputs
    )
    return f"check {'passed' if check.passed else 'FAILED'}, relative errors {errors}"


def compile_reports(result: ProfileResult) -> list[CompileReport]:
    """The compile reports of a static run, one per stage and target; empty in other modes."""
    return [report for stage in result.stages for report in stage.extra.get("compile", ())]


def compile_rows(reports: Sequence[CompileReport]) -> Rows:
    """The compile reports as rows."""
    rows: Rows = []
    for report in reports:
        registers, raised = report.registers, report.consumer_registers
        shown = f"{registers} ({raised})" if raised and raised != registers else registers
        stack = None if report.stack_bytes is None else f"{report.stack_bytes} B"
        sizes = (shown, stack, byte_count(report.shared_bytes), report.threads)
        tma = None if report.error else "yes" if report.uses_tma else "no"
        # What a good verdict says in words is in the other columns.
        verdict = "ok" if report.verdict.startswith("ok") else report.verdict
        rows.append((report.kernel, report.target, *sizes, report.tensor_core, tma, verdict))
    return rows


def compile_markdown(reports: Sequence[CompileReport]) -> str:
    """The compile reports as a markdown table, and how to read it."""
    return (
        table(COMPILE_HEADERS, compile_rows(reports))
        + "\nRegisters per thread at launch, in brackets what the consumer warps raise themselves "
        "to. A stack above zero means spills.\n"
    )
