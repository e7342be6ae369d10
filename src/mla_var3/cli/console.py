"""What all commands print with: consoles, tables, error lines, exit codes and progress."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rich import progress as bars
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mla_var3 import errors
from mla_var3.errors import HyperMlaError
from mla_var3.runtime.check import CheckResult
from mla_var3.runtime.markdown import json_ready, microseconds
from mla_var3.runtime.profiling import ProfileResult, figures

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

TRACEBACK_VARIABLE = "HYPER_MLA_TRACEBACK"
# Wide enough for the figure tables; rich assumes 80 columns where there is no terminal.
_PLAIN_WIDTH = 120
_LONGEST_WORD = 32
"""Longer words, such as paths, may be broken to make a table fit."""
_HEARTBEAT_S = 30.0


class UsageError(HyperMlaError):
    """The command line itself is wrong; exit code 2."""


def _console(*, stderr: bool) -> Console:
    """A console that prints square brackets as they are."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else _PLAIN_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(message: str, style: str = "") -> None:
    """Print one line of plain text."""
    _console(stderr=False).print(Text(message, style=style), soft_wrap=True)


def note(message: str) -> None:
    """Print one line about the run on the error stream, so that results can be piped."""
    _console(stderr=True).print(Text(message, style="dim"), soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(json_ready(value), indent=2))


def print_error(message: str) -> None:
    """Print an error the way all commands do."""
    _console(stderr=True).print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


@contextmanager
def usage_errors() -> Iterator[None]:
    """While a command line is read, an unknown name in it is a usage error."""
    try:
        yield
    except errors.UnknownNameError as error:
        raise UsageError(str(error)) from error


def guarded(action: Callable[[], int]) -> int:
    """Run a command and turn its errors into one line and an exit code.

    A bug keeps its traceback; with HYPER_MLA_TRACEBACK=1 every error does.
    """
    _fit_terminal()
    # torch warns where a CPU has no fast bfloat16 products; the result is right all the same.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    try:
        return action()
    except SystemExit as request:  # argparse leaves this way after --help and --version
        if isinstance(request.code, str):
            print_error(request.code)
            return EXIT_FAILED
        return request.code or EXIT_OK
    except KeyboardInterrupt as interrupt:
        # Work that can be resumed says so in a note.
        print_error("; ".join(["interrupted", *getattr(interrupt, "__notes__", [])]))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, for example `head`, closed the pipe. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0") or not _is_expected(error):
            raise
        print_error(_message(error))
        if isinstance(error, errors.DeviceTimeoutError):
            end_process()
        usage = isinstance(error, (UsageError, errors.InvalidArgumentError))
        return EXIT_USAGE if usage else EXIT_FAILED


def _fit_terminal() -> None:
    """Print a character that the terminal lacks as "?", and everything where COLUMNS is 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # rich would print nothing
        del os.environ["COLUMNS"]


def end_process() -> None:
    """End the process at once: its normal end would wait for a kernel that hangs."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_FAILED)


def _is_expected(error: Exception) -> bool:
    # torch is not imported here: a command that never needed it must not pay for its import.
    expected = isinstance(error, (HyperMlaError, OSError)) or _is_out_of_host_memory(error)
    return expected or type(error).__name__ == "OutOfMemoryError"


def _is_out_of_host_memory(error: Exception) -> bool:
    # torch's allocator on the host has no error of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        # Of two names the second is the target, the first a temporary file.
        path = error.filename if error.filename2 is None else error.filename2
        return f"{path}: expected a path that can be used here, got {error.strerror}"
    if _is_out_of_host_memory(error):
        return f"sizes: expected tensors that fit into this machine's memory, got {error}"
    return str(error)


def print_table(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[object]], best: int | None = None
) -> None:
    """Print a table that fits the screen without breaking words, the row `best` in bold.

    None becomes "-"; columns without any value are left out.
    """
    kept = [i for i in range(len(headers)) if any(row[i] not in (None, "", "-") for row in rows)]
    lines = [["-" if row[i] is None else str(row[i]) for i in kept] for row in rows]
    columns = [[headers[i], *(line[j] for line in lines)] for j, i in enumerate(kept)]
    numeric = [all(text[:1] in "0123456789-±" for text in column[1:]) for column in columns]
    console = _console(stderr=False)
    between = 2 * len(kept)
    widths = _column_widths(columns, numeric, console.width - between)
    if title:
        console.print(Text(title, style="italic"))
    console.width = max(console.width, sum(widths) + between)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, width, right in zip(columns, widths, numeric, strict=True):
        table.add_column(
            column[0], justify="right" if right else "left", overflow="fold", width=width
        )
    for index, line in enumerate(lines):
        table.add_row(*line, style="bold" if index == best else "")
    console.print(table)


def _column_widths(
    columns: Sequence[Sequence[str]], numeric: Sequence[bool], available: int
) -> list[int]:
    """Widths that add up to `available`; words and numbers with their units stay in one piece."""
    widths = [max(cell_len(line) for text in c for line in text.split("\n")) for c in columns]
    least = []
    for (header, *cells), whole in zip(columns, numeric, strict=True):
        words = [*header.split(), *(cells if whole else " ".join(cells).split())]
        least.append(max(min(cell_len(word), _LONGEST_WORD) for word in words))
    while sum(widths) > available:
        spare = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def print_result(result: ProfileResult) -> None:
    """Print the figures of a profile, and the compile report if it has one."""
    reports = figures.compile_reports(result)
    if reports:
        print_table("compile report", figures.COMPILE_HEADERS, figures.compile_rows(reports))
    title = f"{result.kernel}, {result.mode.value} mode"
    if device := result.record.get("device"):
        title += f", {device}"
    elif device := result.record.get("planned_for"):
        title += f", planned for {device}"
    print_table(title, figures.STAGE_HEADERS, figures.stage_rows(result))
    if predicted := result.record.get("predicted_us"):
        each = ", ".join(f"{name} {microseconds(time_us)}" for name, time_us in predicted.items())
        say(f"predicted, not measured, at the vendor's peaks: {each}")
        if figures.has_estimate(result):
            say("hyper-mla predict shows what kernels are expected to take")


def print_check(check: CheckResult, title: str) -> None:
    """Print errors and bounds per output, and the verdict."""
    print_table(title, figures.CHECK_HEADERS, figures.check_rows(check))
    say("check passed" if check.passed else "check FAILED", "green" if check.passed else "bold red")


class _NoteHandler(logging.Handler):
    """Passes log records on as notes, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def show_log() -> None:
    """Show what the package logs about its choices, such as which tuning results it used."""
    logger = logging.getLogger("mla_var3")
    if not any(isinstance(handler, _NoteHandler) for handler in logger.handlers):
        logger.addHandler(_NoteHandler())
    logger.setLevel(logging.INFO)


class ProgressReporter:
    """Shows long work: a bar on a terminal, a line at each start and end elsewhere.

    An instance is a `mla_var3.runtime.workflow.Progress`.
    """

    def __init__(self) -> None:
        self._bar: bars.Progress | None = None
        self._tasks: dict[str, bars.TaskID] = {}
        self._started: dict[str, float] = {}
        self._last_line = 0.0

    def __enter__(self) -> Self:
        console = _console(stderr=True)
        if console.is_terminal:
            self._bar = bars.Progress(
                bars.SpinnerColumn(),
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(bar_width=30),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TextColumn("{task.fields[detail]}", style="dim", markup=False),
                console=console,
                transient=True,
                # Results that go to a file or a pipe must not end up above the bar.
                redirect_stdout=sys.stdout.isatty(),
            )
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, what: str, done: int, total: int, detail: str) -> None:
        """Report that `done` of `total` steps of `what` are finished."""
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total, detail=detail)
            self._bar.update(self._tasks[what], completed=done, total=total, detail=detail)
            return
        now = time.monotonic()
        if what not in self._started:
            self._started[what] = self._last_line = now
            note(f"{what}: {total} step{'' if total == 1 else 's'}")
        if done >= total:
            note(f"{what}: done in {now - self._started.pop(what):.1f} s")
        elif now - self._last_line > _HEARTBEAT_S:
            self._last_line = now
            note(f"{what}: {done} of {total} {detail}".rstrip())
