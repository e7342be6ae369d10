"""`hyper-mla run` without a kernel: the main job, its progress and its summary on screen."""

from __future__ import annotations

import sys
from typing import Any

from rich.table import Table

from mla_var3.cli.console import (
    EXIT_FAILED,
    EXIT_OK,
    ProgressReporter,
    say,
    show_log,
    stdout,
)
from mla_var3.report.overview import KERNEL, OverviewOptions, OverviewResult, Step, run_overview
from mla_var3.runtime.workflow import RunOptions, pick_device

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "yellow"}


def overview_command(values: dict[str, Any]) -> int:
    """Run the main job.

    Args:
        values: the parsed options of `hyper-mla run`.
    """
    sizes = {name: values[name] for name in "bsth" if values.get(name) is not None}
    where = pick_device(RunOptions(device=values["device"]).device)
    if where == "cuda":
        say(f"{KERNEL} end to end: autotune, check and profile on the GPU, then the report", "bold")
    else:
        reason = "--device=cpu" if values["device"] == "cpu" else "no GPU here"
        say(
            f"{KERNEL} end to end, {reason}: check on the CPU interpreter, compile report, "
            "predicted times, then the report",
            "bold",
        )
    show_log()
    with ProgressReporter() as progress:
        result = run_overview(
            OverviewOptions(
                quick=values["quick"],
                out_dir=values["out_dir"],
                device=values["device"],
                sizes=sizes,
                progress=progress,
                on_start=_started,
                on_end=_ended,
            )
        )
    _print_summary(result)
    return EXIT_OK if result.ok else EXIT_FAILED


def _started(step: Step) -> None:
    say(f"- {step.title} ...")
    sys.stdout.flush()


def _ended(step: Step) -> None:
    say(
        f"  {step.status} in {step.seconds:.1f} s: {step.reason or step.summary}",
        _STYLES[step.status],
    )
    sys.stdout.flush()


def _print_summary(result: OverviewResult) -> None:
    table = Table(title="summary", title_justify="left")
    for title in ("step", "outcome", "seconds", "result"):
        table.add_column(title, justify="right" if title == "seconds" else "left")
    for step in result.steps:
        table.add_row(
            step.title,
            step.status,
            f"{step.seconds:.1f}",
            step.reason or step.summary,
            style=_STYLES[step.status] if step.status != "ok" else "",
        )
    stdout().print(table)
    for plot in result.plots:
        if plot.suffix == ".png":
            say(f"plot:   {plot}")
    say(f"report: {result.report}", "bold")
