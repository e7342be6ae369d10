"""Progress, the log, and how a command ends."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3.cli import console
from mla_var3.cli.console import ProgressReporter, guarded
from mla_var3.errors import DeviceTimeoutError


def test_progress_without_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressReporter() as progress:
        for done in range(101):
            progress("autotune x", done, 100, f"Bm={done}")
        progress("compile", 1, 1, "")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "autotune x: 100 steps"
    assert lines[1].startswith("autotune x: done in ")
    assert lines[2] == "compile: 1 step"
    assert len(lines) == 4


def test_the_log_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("mla_var3")
    before = list(logger.handlers), logger.level
    try:
        console.show_log()
        console.show_log()
        logging.getLogger("mla_var3.runtime.x").info("using the results in %s", "[cache]")
    finally:
        logger.handlers, logger.level = before
    assert capsys.readouterr().err == "info: using the results in [cache]\n"


def test_a_reader_that_stops_early_is_no_error(
    package_environment: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import sys; from mla_var3.cli.console import guarded, say; "
        "sys.exit(guarded(lambda: [say('x' * 200) for _ in range(5000)] and 0))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=package_environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    assert errors == ""


def interrupted(note: str = "") -> int:
    interrupt = KeyboardInterrupt()
    if note:
        interrupt.add_note(note)
    raise interrupt


def test_an_interrupt_tells_only_what_was_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(interrupted) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert guarded(lambda: interrupted("results so far are kept")) == 130
    assert capsys.readouterr().err == "error: interrupted; results so far are kept\n"


def test_a_hung_kernel_ends_the_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The normal end of the process would wait for the kernel."""
    ended: list[int] = []
    monkeypatch.setattr(console.os, "_exit", ended.append)

    def hangs() -> int:
        raise DeviceTimeoutError("flash_mla: expected to end within 60 s")

    assert guarded(hangs) == 1
    assert ended == [1]
    assert "error: flash_mla: expected to end" in capsys.readouterr().err
