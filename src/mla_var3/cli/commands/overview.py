"""`hyper-mla run` without a kernel: the main job, its progress and its summary on screen."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from mla_var3.bench.record import CALL, FAILED, OURS, load_record
from mla_var3.cli.console import (
    EXIT_FAILED,
    EXIT_OK,
    ProgressReporter,
    note,
    print_table,
    say,
    show_log,
)
from mla_var3.report.overview import (
    KERNEL,
    SUMMARY_HEADERS,
    OverviewOptions,
    OverviewResult,
    Step,
    measured_table,
    run_overview,
    summary_rows,
)
from mla_var3.runtime.markdown import microseconds
from mla_var3.runtime.profiling import figures
from mla_var3.runtime.workflow import RunOptions, pick_device

_STYLES = {"ok": "green", "failed": "bold red"}


def overview_command(values: dict[str, Any]) -> int:
    """Run the main job with the parsed options of `hyper-mla run` and its `sizes`."""
    where = pick_device(RunOptions(device=values["device"]).device)
    if where == "cuda":
        tune = "" if values["quick"] else "tune, "
        say(f"MLA attention on this GPU: choose, {tune}check and time ours and the peers", "bold")
    else:
        reason = "--device=cpu" if values["device"] == "cpu" else "no GPU here"
        say(
            f"{KERNEL} end to end, {reason}: check on the CPU interpreter, compile report, "
            "predicted times",
            "bold",
        )
    show_log()
    given = values.get("tune_seconds")
    tuning = {} if given is None else {"tune_seconds": given}
    with ProgressReporter() as progress:
        result = run_overview(
            OverviewOptions(
                quick=values["quick"],
                out_dir=values["out_dir"],
                device=values["device"],
                **tuning,
                peer_libs=values["peer_libs"],
                sizes=values["sizes"],
                progress=progress,
                on_start=_started,
                on_end=_ended,
                on_lost=_lost,
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


def _lost(record: Path) -> None:
    """Name the kernel that hangs or destroyed the context; a hung process can only be ended."""
    for row in load_record(record).rows:
        if row.status == FAILED:
            note(f"{row.label}: {row.reason}; {record} has the rows measured so far")
    if threading.current_thread() is not threading.main_thread():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_FAILED)


def _print_summary(result: OverviewResult) -> None:
    if result.record is not None:
        title = f"measured on {', '.join(result.record.devices)}, fastest call first"
        print_table(title, *measured_table(result.record))
        for row in result.record.rows:
            if row.path == CALL:
                say(f"{row.kernel} uses {row.note or row.reason}")
            elif row.note and row.source == OURS:
                say(f"{row.label}: {row.note}")
    if result.compiled:
        print_table("compiled", figures.COMPILE_HEADERS, figures.compile_rows(result.compiled))
    if result.sweeps:
        _print_predictions(result)
    print_table("summary", SUMMARY_HEADERS, summary_rows(result.steps))
    for plot in result.plots:
        if plot.suffix == ".png":
            say(f"plot:   {plot}")
    say(f"report: {result.report}", "bold")


def _print_predictions(result: OverviewResult) -> None:
    first = result.sweeps[0]
    s = first.problem.s
    index = first.s_values.index(s)
    rows = [
        (
            entry.device.removeprefix("NVIDIA "),
            entry.heading,
            *(microseconds(values[index].advised_us) for values in entry.predictions.values()),
            entry.fastest(index) or "not ranked",
        )
        for entry in result.sweeps
    ]
    headers = ("device", "times", *first.predictions, "fastest")
    print_table(f"predicted call time, s={s} (predictions, not measurements)", headers, rows)
