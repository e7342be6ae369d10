"""`hyper-mla run` without a kernel: the main job, its progress and its summary on screen."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from mla_var3.bench.record import CALL, FAILED, OURS, load_record
from mla_var3.cli import console
from mla_var3.report import overview
from mla_var3.runtime.markdown import microseconds
from mla_var3.runtime.profiling import figures
from mla_var3.runtime.workflow import RunOptions, pick_device

_STYLES = {"ok": "green", "failed": "bold red"}


def overview_command(values: dict[str, Any]) -> int:
    """Run the main job with the parsed options of `hyper-mla run` and its `sizes`."""
    where = pick_device(RunOptions(device=values["device"]).device)
    if where == "cuda":
        tune = "" if values["quick"] else "tune, "
        text = f"MLA attention on this GPU: choose, {tune}check and time ours and the peers"
    else:
        reason = "--device=cpu" if values["device"] == "cpu" else "no GPU here"
        text = f"{overview.KERNEL} end to end, {reason}: check on the CPU interpreter, compile "
        text += "report, predicted times"
    console.say(text, "bold")
    console.show_log()
    names = ("quick", "out_dir", "device", "tune_seconds", "peer_libs", "sizes")
    given: dict[str, Any] = {name: values[name] for name in names if values[name] is not None}
    hooks: dict[str, Any] = {"on_start": _started, "on_end": _ended, "on_lost": _lost}
    with console.ProgressReporter() as progress:
        options = overview.OverviewOptions(**given, **hooks, progress=progress)
        result = overview.run_overview(options)
    _print_summary(result)
    return console.EXIT_OK if result.ok else console.EXIT_FAILED


def _started(step: overview.Step) -> None:
    console.say(f"- {step.title} ...")
    sys.stdout.flush()


def _ended(step: overview.Step) -> None:
    text = f"  {step.status} in {step.seconds:.1f} s: {step.reason or step.summary}"
    console.say(text, _STYLES[step.status])
    sys.stdout.flush()


def _lost(record: Path) -> None:
    """Name the kernel that hangs or destroyed the context; a hung process can only be ended."""
    for row in load_record(record).rows:
        if row.status == FAILED:
            console.note(f"{row.label}: {row.reason}; {record} has the rows measured so far")
    if threading.current_thread() is not threading.main_thread():
        console.end_process()


def _print_summary(result: overview.OverviewResult) -> None:
    if result.record is not None:
        title = f"measured on {', '.join(result.record.devices)}, fastest call first"
        console.print_table(title, *overview.measured_table(result.record))
        for row in result.record.rows:
            if row.path == CALL:
                console.say(f"{row.kernel} uses {row.note or row.reason}")
            elif row.note and row.source == OURS:
                console.say(f"{row.label}: {row.note}")
    if result.compiled:
        rows = figures.compile_rows(result.compiled)
        console.print_table("compiled", figures.COMPILE_HEADERS, rows)
    if result.sweeps:
        _print_predictions(result)
    console.print_table("summary", overview.SUMMARY_HEADERS, overview.summary_rows(result.steps))
    for plot in result.plots:
        if plot.suffix == ".png":
            console.say(f"plot:   {plot}")
    console.say(f"report: {result.report}", "bold")


def _print_predictions(result: overview.OverviewResult) -> None:
    first = result.sweeps[0]
    s = first.problem.s
    index = first.s_values.index(s)
    rows = []
    for entry in result.sweeps:
        times = [microseconds(each[index].advised_us) for each in entry.predictions.values()]
        fastest = entry.fastest(index) or "not ranked"
        rows.append((entry.spec.name.removeprefix("NVIDIA "), entry.heading, *times, fastest))
    title = f"predicted call time, s={s} (predictions, not measurements)"
    console.print_table(title, ("device", "times", *first.predictions, "fastest"), rows)
