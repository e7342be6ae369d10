"""Consoles, progress and what a closed pipe does."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from mla_var3.cli import console
from mla_var3.cli.console import ProgressReporter


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


def test_long_work_shows_a_sign_of_life(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    with ProgressReporter() as progress:
        progress("autotune x", 0, 9, "")
        now = 10.0
        progress("autotune x", 1, 9, "Bm=1")
        now = 50.0
        progress("autotune x", 2, 9, "Bm=[2]")
    assert capsys.readouterr().err.splitlines() == [
        "autotune x: 9 steps",
        "autotune x: 2 of 9 Bm=[2]",
    ]


def test_progress_on_a_terminal_is_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressReporter() as progress:
        progress("autotune x", 1, 4, "Bm=[64]")
        progress("autotune x", 4, 4, "done")
    err = capsys.readouterr().err
    assert "autotune x" in err and "4/4" in err


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


def test_wide_output_is_not_cut_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console.stdout().width == 120
    console.say("y" * 300)
    assert capsys.readouterr().out == "y" * 300 + "\n"
