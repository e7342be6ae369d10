"""Driving Nsight Systems: is it usable, which commands to run, and what they left behind."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.profiling.timeline.csv import (
    API_SUMMARY,
    API_TRACE,
    GPU_TRACE,
    NVTX_PROJECTION,
    read_stats,
)
from mla_var3.runtime.profiling.timeline.model import Timeline
from mla_var3.runtime.profiling.timeline.target import MODULE

MIN_VERSION = (2023, 2)
"""The first release that we know to have all four reports under the names used here."""
REPORTS = (GPU_TRACE, NVTX_PROJECTION, API_SUMMARY, API_TRACE)
_PROBE_TIMEOUT_S = 60
_RUN_TIMEOUT_S = 1200
_TAIL_LINES = 8


@dataclass(frozen=True)
class Nsys:
    """A usable installation of Nsight Systems."""

    path: Path
    version: str


def find_nsys() -> Nsys:
    """The Nsight Systems on PATH, checked to be able to make reports.

    Raises:
        MissingToolError: it is not there, too old or incomplete; the message says which.
    """
    found = shutil.which("nsys")
    needed = ".".join(map(str, MIN_VERSION))
    if found is None:
        raise MissingToolError(
            f"Nsight Systems: expected the program nsys {needed} or newer on PATH, got none"
        )
    path = Path(found)
    answer = _run([found, "--version"], _PROBE_TIMEOUT_S)
    match = re.search(r"\b(\d{4})\.(\d+)[\d.]*", answer.stdout)
    if answer.returncode != 0 or match is None:
        raise MissingToolError(
            f"Nsight Systems: expected {path} --version to name a version, got "
            f"{_tail(answer) or 'nothing'!r}"
        )
    if (int(match[1]), int(match[2])) < MIN_VERSION:
        raise MissingToolError(
            f"Nsight Systems: expected version {needed} or newer, got {match[0]} at {path}"
        )
    stats = _run([found, "stats", "--help-reports", ",".join(REPORTS)], _PROBE_TIMEOUT_S)
    if stats.returncode != 0:
        raise MissingToolError(
            f"Nsight Systems: expected {path} {match[0]} to make reports, but `nsys stats` fails "
            f"({_tail(stats) or f'exit code {stats.returncode}'}): the installation is incomplete; "
            "install the full package of Nsight Systems"
        )
    return Nsys(path, match[0])


def profile_command(tool: Nsys, report: Path, request: Path) -> list[str]:
    """The command that records a request.

    Args:
        tool: Nsight Systems.
        report: the report's path without suffix.
        request: file for `timeline_target`.
    """
    return [
        str(tool.path),
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        "-o",
        str(report),
        sys.executable,
        "-m",
        MODULE,
        str(request),
    ]


def stats_command(tool: Nsys, report: Path, output: Path) -> list[str]:
    """The command that turns a report into CSV files.

    Args:
        tool: Nsight Systems.
        report: the `.nsys-rep` file.
        output: path of the files without `_<report>.csv`.
    """
    return [
        str(tool.path),
        "stats",
        "--report",
        ",".join(REPORTS),
        "--format",
        "csv",
        "--force-export=true",
        "--force-overwrite=true",
        "--output",
        str(output),
        str(report),
    ]


def collect_with_nsys(tool: Nsys, request: Path, folder: Path) -> Timeline:
    """Record a request, make the CSV files below `folder/stats` and read the timeline.

    Raises:
        UnsupportedError: Nsight Systems failed or left no report; the message has its last lines.
    """
    report = folder / "report"
    done = _run(profile_command(tool, report, request), _RUN_TIMEOUT_S)
    file = report.with_suffix(".nsys-rep")
    if done.returncode != 0 or not file.is_file():
        raise UnsupportedError(
            f"nsys profile ({tool.version}): expected {file.name}, got exit code "
            f"{done.returncode}: {_tail(done)}"
        )
    stats = folder / "stats"
    stats.mkdir(exist_ok=True)
    done = _run(stats_command(tool, file, stats / "report"), _RUN_TIMEOUT_S)
    if done.returncode != 0:
        raise UnsupportedError(
            f"nsys stats ({tool.version}): expected the reports {', '.join(REPORTS)}, got exit "
            f"code {done.returncode}: {_tail(done)}"
        )
    return read_stats(stats)


def _run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command; one that cannot start or does not end is a failed one."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    return " | ".join(lines[-_TAIL_LINES:])
