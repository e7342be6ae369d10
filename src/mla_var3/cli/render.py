"""Results as tables on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mla_var3.cli.console import say, stdout
from mla_var3.runtime.markdown import microseconds
from mla_var3.runtime.profiling import figures

if TYPE_CHECKING:
    from mla_var3.runtime.check import CheckResult
    from mla_var3.runtime.profiling import ProfileResult


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; columns without any value are left out."""
    kept = [i for i in range(len(headers)) if any(row[i] not in (None, "-") for row in rows)]
    table = Table(title=title, title_justify="left")
    for i in kept:
        numeric = all(str(row[i])[:1] in "0123456789-±" or row[i] is None for row in rows)
        table.add_column(headers[i], justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*("-" if row[i] is None else str(row[i]) for i in kept))
    stdout().print(table)


def print_result(result: ProfileResult) -> None:
    """Print the figures of a profile, and the compile report if it has one."""
    reports = figures.compile_reports(result)
    if reports:
        print_table("compile report", figures.COMPILE_HEADERS, figures.compile_rows(reports))
    title = f"{result.kernel}, {result.mode.value} mode"
    device = result.record.get("device") or result.record.get("planned_for")
    if device:
        title += f", {device}"
    print_table(title, figures.STAGE_HEADERS, figures.stage_rows(result))
    predicted = result.record.get("predicted_us")
    if predicted:
        each = ", ".join(f"{name} {microseconds(time_us)}" for name, time_us in predicted.items())
        say(f"predicted, not measured: {each}")


def print_check(check: CheckResult, title: str) -> None:
    """Print errors and bounds per output, and the verdict."""
    print_table(title, figures.CHECK_HEADERS, figures.check_rows(check))
    say("check passed" if check.passed else "check FAILED", "green" if check.passed else "bold red")
