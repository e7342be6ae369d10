"""`hyper-mla bench`: measure our kernels beside the peers, or predict, and write the report."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mla_var3.bench.analysis import doubts, shape_groups
from mla_var3.bench.measure import QUICK_ROUNDS, QUICK_SECONDS
from mla_var3.bench.page import VERDICT_HEADERS, cells, group_rows, headers, troubles, verdict_rows
from mla_var3.bench.record import PREDICTED, BenchRow
from mla_var3.bench.run import PREDICT, BenchOptions, BenchResult, run_bench
from mla_var3.bench.suites import PEERS, SUITES
from mla_var3.cli import console
from mla_var3.cli.arguments import CALL_SIZES, Parser, ValueType, read_model
from mla_var3.runtime.paths import LANGUAGES, output_root, timestamp

EXIT_ABSENT = 3
"""A version that was asked for by name does not exist."""

STANDARD_ERROR = 2
"""The highest file descriptor that the new process keeps."""
MOST_NOTES = 12
"""Rows that could not be compared: so many are printed; the files have all of them."""

DESCRIPTION = """\
With a GPU everything is checked and then timed; without one the same report is made from
predictions, or with --records from recorded results. The record is written all along; --resume
continues it. A kernel that destroys the CUDA context or hangs loses its own row only: a new
process measures the others. Exit code 0: fine; 1: one of our kernels failed, or --against found a
row that is worse or nothing to compare; 3: the version that was asked for does not exist.
"""


def add_arguments(parser: Parser) -> None:
    """The options of the command; those with a value are named as fields of `BenchOptions`."""
    suites = "\n".join(f"  {name:10} {text}" for name, text in SUITES.items())
    parser.epilog = f"Suites (figures by default):\n{suites}\n\n{DESCRIPTION}"
    names = " or ".join(", ".join(SUITES).rsplit(", ", 1))
    parser.add_argument("suite", nargs="?", default="figures", help=names)
    numbers, words = ValueType(int, sequence=True), ValueType(str, sequence=True)

    def add(group: Any, name: str, metavar: str, text: str, **settings: Any) -> None:
        group.add_option(name, metavar, text, default=argparse.SUPPRESS, **settings)

    what = parser.add_argument_group("what is run")
    several = {"type": numbers, "metavar": "N,N,...", "default": argparse.SUPPRESS}
    what.add_sizes(CALL_SIZES, "; the sweep takes several", **several)
    what.add_model()
    add(what, "n", "N,N,...", "windows of var6_plus", type=numbers, dest="n_values")
    add(what, "version", "vN", "version of var6_plus (default: v0)")
    add(what, "kernels", "NAME,...", "all, latest, designs or full names", type=words)
    known = ", ".join((*LANGUAGES, "peers", *PEERS))
    add(what, "backends", "NAME,...", f"{known} (default: all)", type=words)
    add(what, "shapes", "N,N,...", "only these shapes of the suite, from 1", type=numbers)
    add(what, "dtype", "NAME", "bfloat16 or float16")
    formats = "8-bit caches to measure the latent kernel on, too: fp8_per_token, fp8_ds_mla, fp8"
    add(what, "cache_dtype", "NAME,...", formats, type=words)
    add(what, "causal", "true|false", "mask or not", type=ValueType(bool))
    how = parser.add_argument_group("how it is run")
    how.add_flag("quick", "one short round; fewer shapes of the sweep, fewer windows of var6_plus")
    timings = "timings of each (default: 3, with --quick 1)"
    add(how, "rounds", "N", timings, type=ValueType(int))
    length = "length of one timing (default: 0.4, with --quick 0.15)"
    add(how, "max_seconds", "X", length, type=ValueType(float))
    limit = "seconds until a kernel counts as hung (default: 180; with --tune ten times it)"
    add(how, "patience", "X", limit, type=ValueType(float))
    how.add_flag("tune", "search tilings before timing")
    add(how, "peer_libs", "FOLDER", "the peers' libraries", type=Path)
    add(how, "mode", "NAME", "auto, measure or predict (default: auto)")
    parser.add_option("for_device", "NAME", "predict for a device of the table", dest="predict_for")
    add(how, "records", "FILE", "read, run nothing", type=Path, nargs="+")
    add(how, "resume", "FILE", "record of an interrupted run to continue", type=Path)
    result = parser.add_argument_group("results")
    add(result, "against", "FILE", "earlier record to compare with", type=Path)
    others = "compare also where compilers or peers have other versions"
    result.add_flag("across_versions", others)
    sent = "also write contribution.json, to send: no paths, no names of user or machine"
    result.add_flag("contribute", sent)
    add(result, "out_dir", "FOLDER", "default: out/bench/<suite>/<timestamp>", type=Path)


def bench_command(parser: Parser, argv: Sequence[str]) -> int:
    """Run a suite and print what came out."""
    return run(parser.parse(argv))


def bench_program(suite: str, name: str, argv: Sequence[str], **fixed: Any) -> int:
    """One suite as a program of its own, for the modules of `tests/benchmark`.

    `name` is that of the program and of its folder below `out/tests`. The command line cannot
    change the suite, nor the options in `fixed`.
    """

    def action() -> int:
        parser = Parser(prog=f"python -m tests.benchmark.{name}")
        add_arguments(parser)
        values = parser.parse([suite, *argv])
        for option, value in fixed.items():
            if values.get(option, value) != value:
                raise console.UsageError(
                    f"--{option}: expected {value}, which {name} pins, or none"
                )
        out_dir = output_root() / "tests" / name / timestamp()
        return run({"out_dir": out_dir, **values, **fixed})

    return console.guarded(action)


def run(values: dict[str, Any]) -> int:
    """Run a suite from parsed options; returns the exit code."""
    model = read_model(values)
    sizes = {name: values.pop(name) for name in CALL_SIZES if name in values}
    sizes |= {"h": (model.pop("h"),)} if model else {}
    if values["quick"]:
        values = {"rounds": QUICK_ROUNDS, "max_seconds": QUICK_SECONDS, **values}
    with console.usage_errors():
        options = BenchOptions(sizes=sizes, widths=model, **values)
    console.show_log()
    _announce(options)
    with console.ProgressReporter() as progress, console.usage_errors():

        def continue_from(record: Path) -> None:
            progress.__exit__()
            _start_again(record)

        options.progress = progress
        options.on_rows = _print_rows
        options.on_lost = continue_from
        with _termination_interrupts():
            result = run_bench(options)
    if options.records:
        _print_rows(result.record.rows)
    _print_summary(result)
    if result.missing:
        return EXIT_ABSENT
    worse = result.regression is not None and not result.regression.passed
    broken = bool(result.record.failed) and not options.records
    return console.EXIT_FAILED if worse or broken else console.EXIT_OK


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: the kernel that is running is not to blame."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_again(record: Path) -> None:
    """Continue in a new process: this one has lost its CUDA context, or hangs."""
    console.note(f"the device was lost; a new process continues from {record}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Once its files are closed, the driver ends a running kernel and frees its memory.
    for file in Path("/proc/self/fd").iterdir():
        if int(file.name) > STANDARD_ERROR:
            with suppress(OSError):
                os.set_inheritable(int(file.name), False)
    os.execv(sys.executable, [*sys.orig_argv, "--resume", str(record)])


def _announce(options: BenchOptions) -> None:
    if options.records:
        text = f"report from {', '.join(map(str, options.records))}"
    elif options.measures:
        rounds = f"{options.rounds} round{'' if options.rounds == 1 else 's'}"
        text = f"{options.suite}: check, then time {rounds}"
    else:
        asked = options.mode == PREDICT or options.predict_for
        reason = "as asked" if asked else "no GPU here"
        text = f"{options.suite}, {reason}: predictions, not measurements"
    console.say(f"benchmark {text}", "bold")


def _print_rows(rows: Sequence[BenchRow]) -> None:
    for group in shape_groups(rows):
        if group.timed:
            kind = ", predicted" if group.kind == PREDICTED else ""
            lines = [cells(group, row) for row in group_rows(group)]
            console.print_table(f"{group.title} on {group.device}{kind}", headers(group), lines)


def _print_summary(result: BenchResult) -> None:
    for doubt in doubts(result.record.rows):
        console.say(f"to be explained: {doubt}", "yellow")
    if lines := troubles(result.record):
        console.print_table("not taking part", ("kernel", "status", "reason"), lines)
    if (regression := result.regression) is not None:
        if regression.verdicts:
            title = "against the earlier record"
            console.print_table(title, VERDICT_HEADERS, verdict_rows(regression))
        for row, why in regression.not_compared[:MOST_NOTES]:
            console.note(f"not compared: {row}: {why}")
        if (more := len(regression.not_compared) - MOST_NOTES) > 0:
            console.note(f"not compared: {more} more, see {result.files['regression']}")
        for remark in regression.remarks:
            console.note(remark)
        console.say(f"verdict: {regression.summary}", "green" if regression.passed else "bold red")
    for plot in result.plots:
        if plot.missing:
            console.note(f"{plot.title}: not drawn, {plot.missing}")
    for text in result.record.notes:
        console.say(text)
    for kind, path in result.files.items():
        console.say(f"{kind + ':':10} {path}", "bold" if kind == "html" else "")
