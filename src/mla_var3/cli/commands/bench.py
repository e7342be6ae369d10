"""`hyper-mla bench`: measure our kernels beside the peers, or predict, and write the report."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.cli.arguments import CALL_SIZES, Parser, ValueType, add_unset_sizes, parse
from mla_var3.cli.console import (
    EXIT_FAILED,
    EXIT_OK,
    ProgressReporter,
    UsageError,
    guarded,
    note,
    say,
    show_log,
    usage_errors,
)

if TYPE_CHECKING:
    from mla_var3.bench.record import BenchRow
    from mla_var3.bench.run import BenchOptions, BenchResult

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
    """The options of the command."""
    from mla_var3.bench.suites import PEERS, SUITES
    from mla_var3.runtime.paths import LANGUAGES

    suites = "\n".join(f"  {name:10} {text}" for name, text in SUITES.items())
    parser.epilog = f"Suites (figures by default):\n{suites}\n\n{DESCRIPTION}"
    parser.add_argument(
        "suite",
        nargs="?",
        default="figures",
        help=" or ".join(", ".join(SUITES).rsplit(", ", 1)),
    )
    what = parser.add_argument_group("what is run")
    numbers = ValueType(int, sequence=True)
    several = {"type": numbers, "metavar": "N,N,..."}
    add_unset_sizes(what, CALL_SIZES, "; the sweep takes several", **several)
    what.add_argument("--n", type=numbers, metavar="N,N,...", help="windows of var6_plus")
    what.add_argument("--version", metavar="vN", help="version of var6_plus (default: v0)")
    what.add_argument(
        "--kernels",
        type=ValueType(str, sequence=True),
        default=(),
        metavar="NAME,...",
        help="all, latest, designs or full names",
    )
    what.add_argument(
        "--backends",
        type=ValueType(str, sequence=True),
        default=(),
        metavar="NAME,...",
        help=f"{', '.join((*LANGUAGES, 'peers', *PEERS))} (default: all)",
    )
    what.add_argument("--dtype", default="bfloat16", metavar="NAME", help="bfloat16 or float16")
    what.add_argument(
        "--causal", type=ValueType(bool), default=True, metavar="true|false", help="mask or not"
    )
    how = parser.add_argument_group("how it is run")
    how.add_argument(
        "--quick",
        action="store_true",
        help="one short round; fewer shapes of the sweep, fewer windows of var6_plus",
    )
    how.add_argument(
        "--rounds",
        type=ValueType(int),
        metavar="N",
        help="timings of each (default: 3, with --quick 1)",
    )
    how.add_argument(
        "--max_seconds",
        type=ValueType(float),
        metavar="X",
        help="length of one timing (default: 0.4, with --quick 0.15)",
    )
    how.add_argument(
        "--patience",
        type=ValueType(float),
        default=180.0,
        metavar="X",
        help="seconds until a kernel counts as hung (default: 180; with --tune ten times it)",
    )
    how.add_argument("--tune", action="store_true", help="search tilings before timing")
    how.add_argument("--peer_libs", type=Path, metavar="FOLDER", help="the peers' libraries")
    how.add_argument(
        "--mode", default="auto", metavar="NAME", help="auto, measure or predict (default: auto)"
    )
    parser.add_for_device("predict for a device of the table", "predict_for", "predict_for")
    how.add_argument(
        "--records", type=Path, nargs="+", default=(), metavar="FILE", help="read, run nothing"
    )
    how.add_argument(
        "--resume", type=Path, metavar="FILE", help="record of an interrupted run to continue"
    )
    result = parser.add_argument_group("results")
    result.add_argument(
        "--against", type=Path, metavar="FILE", help="earlier record to compare with"
    )
    result.add_argument(
        "--across_versions",
        action="store_true",
        help="compare also where compilers or peers have other versions",
    )
    result.add_argument(
        "--out_dir", type=Path, metavar="FOLDER", help="default: out/bench/<suite>/<timestamp>"
    )


def bench_command(parser: Parser, argv: Sequence[str]) -> int:
    """Run a suite and print what came out."""
    return run(parse(parser, argv))


def bench_program(suite: str, name: str, argv: Sequence[str], **fixed: Any) -> int:
    """One suite as a program of its own, for the modules of `tests/benchmark`.

    Args:
        suite: the suite; the command line cannot change it.
        name: name of the program, and of the folder below `out/tests`.
        argv: command line.
        fixed: options that the program pins.
    """
    from mla_var3.runtime import paths

    def action() -> int:
        parser = Parser(prog=f"python -m tests.benchmark.{name}")
        add_arguments(parser)
        values = parse(parser, [suite, *argv])
        for option, value in fixed.items():
            if values[option] not in (None, value):
                raise UsageError(f"--{option}: expected {value}, which {name} pins, or none")
        values |= fixed
        values["out_dir"] = values["out_dir"] or (
            paths.output_root() / "tests" / name / paths.timestamp()
        )
        return run(values)

    return guarded(action)


def run(values: dict[str, Any]) -> int:
    """Run a suite from parsed options; returns the exit code."""
    from mla_var3.bench.run import run_bench

    with usage_errors():
        options = _options(values)
    show_log()
    _announce(options)
    with ProgressReporter() as progress, usage_errors():

        def continue_from(record: Path) -> None:
            progress.__exit__(None, None, None)
            _start_again(record)

        options.progress = progress
        options.on_rows = _print_rows
        options.on_lost = continue_from
        with _termination_interrupts():
            result = run_bench(options)
    if options.records:
        _print_rows(result.record.rows)
    _print_summary(result)
    return _exit_code(result, read_only=bool(options.records))


def _options(values: dict[str, Any]) -> BenchOptions:
    from mla_var3.bench.measure import MAX_SECONDS, QUICK_ROUNDS, QUICK_SECONDS, ROUNDS
    from mla_var3.bench.run import BenchOptions

    same = (
        "suite", "dtype", "causal", "version", "kernels", "backends", "quick", "patience", "tune",
        "peer_libs", "mode", "predict_for", "resume", "against", "across_versions", "out_dir",
    )  # fmt: skip
    rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if values["quick"] else (ROUNDS, MAX_SECONDS)
    return BenchOptions(
        rounds=rounds if values["rounds"] is None else values["rounds"],
        max_seconds=seconds if values["max_seconds"] is None else values["max_seconds"],
        sizes={name: values[name] for name in CALL_SIZES if values[name] is not None},
        n_values=values["n"],
        records=tuple(values["records"]),
        **{name: values[name] for name in same},
    )


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
    note(f"the device was lost; a new process continues from {record}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Once its files are closed, the driver ends a running kernel and frees its memory.
    for file in Path("/proc/self/fd").iterdir():
        if int(file.name) > STANDARD_ERROR:
            with suppress(OSError):
                os.set_inheritable(int(file.name), False)
    os.execv(sys.executable, [*sys.orig_argv, "--resume", str(record)])


def _announce(options: BenchOptions) -> None:
    from mla_var3.bench.run import PREDICT

    if options.records:
        say(f"benchmark report from {len(options.records)} recorded results", "bold")
    elif not options.measures:
        asked = options.mode == PREDICT or options.predict_for
        reason = "as asked" if asked else "no GPU here"
        say(f"benchmark {options.suite}, {reason}: predictions, not measurements", "bold")
    else:
        rounds = f"{options.rounds} round{'' if options.rounds == 1 else 's'}"
        say(f"benchmark {options.suite}: check, then time {rounds}", "bold")


def _print_rows(rows: Sequence[BenchRow]) -> None:
    from mla_var3.bench.analysis import shape_groups
    from mla_var3.bench.page import cells, group_rows, headers
    from mla_var3.bench.record import PREDICTED
    from mla_var3.cli.console import print_table

    for group in shape_groups(rows):
        if group.timed:
            kind = ", predicted" if group.kind == PREDICTED else ""
            lines = [cells(group, row) for row in group_rows(group)]
            print_table(f"{group.title} on {group.device}{kind}", headers(group), lines)


def _print_summary(result: BenchResult) -> None:
    from mla_var3.bench.analysis import doubts
    from mla_var3.bench.page import VERDICT_HEADERS, troubles, verdict_rows
    from mla_var3.cli.console import print_table

    for doubt in doubts(result.record.rows):
        say(f"to be explained: {doubt}", "yellow")
    lines = troubles(result.record)
    if lines:
        print_table("not taking part", ("kernel", "status", "reason"), lines)
    regression = result.regression
    if regression is not None:
        if regression.verdicts:
            title = "against the earlier record"
            print_table(title, VERDICT_HEADERS, verdict_rows(regression))
        for row, why in regression.not_compared[:MOST_NOTES]:
            note(f"not compared: {row}: {why}")
        more = len(regression.not_compared) - MOST_NOTES
        if more > 0:
            note(f"not compared: {more} more, see {result.files['regression']}")
        for remark in regression.remarks:
            note(remark)
        say(f"verdict: {regression.summary}", "green" if regression.passed else "bold red")
    for plot in result.plots:
        if plot.missing:
            note(f"{plot.title}: not drawn, {plot.missing}")
    for text in result.record.notes:
        say(text)
    for kind, path in result.files.items():
        say(f"{kind + ':':10} {path}", "bold" if kind == "html" else "")


def _exit_code(result: BenchResult, read_only: bool) -> int:
    if result.missing:
        return EXIT_ABSENT
    worse = result.regression is not None and not result.regression.passed
    broken = bool(result.failed) and not read_only
    return EXIT_FAILED if worse or broken else EXIT_OK
