"""Runs Nsight Compute: finds it, builds the command, collects metrics and explains failures.

Annotation mode collects through nsight-python where that works. Otherwise, and for the full set of
ncu mode, which nsight-python has no option for, `ncu` runs with an NVTX filter. Both start
`profiling.target` as the profiled program and leave `report.ncu-rep`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.environment import SOURCE_LINES, find_tool, run_tool, version_numbers
from mla_var3.runtime.profiling import target

log = logging.getLogger(__name__)

MINIMUM_VERSION = (2024, 1)
"""The oldest release whose reports and options this code was written for."""
MINIMUM_READER = (2026, 2)
"""The oldest ncu-report that may be loaded beside torch: 2025.3.1 crashes the process when a unit
is read, 2026.2.0 and newer do not (torch 2.11 and 2.13). Newer ones read older reports."""
DRIVER_SETTINGS = Path("/proc/driver/nvidia/params")
_WITH_SOURCES = "--import-source"
RANGE_FILTER = r"regex:hyper_mla\..*/"
"""Push/pop ranges of the default domain; the slash says that a range opens here."""
CLOCK_CONTROL = "none"
"""ncu leaves the clocks alone, so that they are those of `scripts/lock-gpu-clock.sh`."""

_TIMEOUT_S = 3600
_VERSION = re.compile(r"\bVersion (\d+(?:\.\d+)+)")
_UNKNOWN_METRIC = re.compile(r"Failed to find metric (?:regex:)?(\S+)")
_CAUSES = (
    re.compile(r"^[\w.]*(?:Error|Exception)\b.*", re.MULTILINE),
    re.compile(r"^==ERROR== .*", re.MULTILINE),
    re.compile(r"^.*\S.*\Z", re.MULTILINE),
)
"""What a failed run printed as its cause: an exception, an error of ncu, or its last line."""
_INSTALL = "install Nsight Compute (part of the CUDA toolkit) and put its folder on PATH"


class NcuTool(NamedTuple):
    """An Nsight Compute command line program."""

    path: Path
    version: str


class Collection(NamedTuple):
    """How the metrics were collected: by "nsight-python", or by "ncu" for the reason in `note`.

    `dropped` are metrics that this profiler or GPU does not have.
    """

    collector: str
    note: str = ""
    dropped: tuple[str, ...] = ()


class UnknownMetricsError(UnsupportedError):
    """This profiler or this GPU does not have some of the requested metrics."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"ncu: expected metrics of this GPU, got {', '.join(names)}")


def find_ncu() -> NcuTool:
    """The installed Nsight Compute."""
    needed = ".".join(map(str, MINIMUM_VERSION))
    path = find_tool("ncu") or _newest_in_opt()
    if path is None:
        raise MissingToolError(
            f"ncu: expected Nsight Compute {needed} or newer on PATH, in $CUDA_HOME/bin, "
            f"/usr/local/cuda/bin or /opt/nvidia/nsight-compute, got none; {_INSTALL}, "
            "or use --prof_type=event, which needs no profiler"
        )
    match = _VERSION.search(run_tool(path, "--version") or "")
    tool = NcuTool(path, match[1] if match else "a program that does not answer --version")
    if match is None or version_numbers(tool.version) < MINIMUM_VERSION:
        raise UnsupportedError(
            f"{path}: expected Nsight Compute {needed} or newer, got {tool.version}; {_INSTALL}"
        )
    return tool


def _newest_in_opt() -> Path | None:
    folders = Path("/opt/nvidia/nsight-compute").glob("*/ncu")
    found = [path for path in folders if os.access(path, os.X_OK)]
    return max(found, key=lambda path: version_numbers(path.parent.name), default=None)


def load_ncu_report() -> Any:
    """The `ncu_report` module, which reads .ncu-rep files."""
    try:
        version = importlib.metadata.version("ncu-report")
        if version_numbers(version) >= MINIMUM_READER:
            return importlib.import_module("ncu_report")
        got = f"version {version}"
    except ImportError as error:  # also that of a package without metadata
        got = f"none ({error})"
    needed = ".".join(map(str, MINIMUM_READER))
    raise MissingToolError(
        f"ncu-report: expected {needed} or newer of the Python package that reads .ncu-rep files, "
        f'got {got}; pip install "hyper-mla[profiling]"'
    )


def counters_problem() -> str | None:
    """Why this user may not read the hardware counters, as far as the driver's settings say."""
    try:
        settings = DRIVER_SETTINGS.read_text()
    except OSError:
        return None
    if os.geteuid() != 0 and re.search(r"^RmProfilingAdminOnly: 1$", settings, re.MULTILINE):
        return "ncu: expected access to the GPU's counters, got a driver that allows root only"
    return None


def nsight_problem(tool: NcuTool, folder: Path) -> str | None:
    """Why nsight-python cannot profile here; None when it can."""
    try:
        version = importlib.metadata.version("nsight-python")
        importlib.import_module("nsight")
    except importlib.metadata.PackageNotFoundError:
        return "nsight-python is not installed"
    except ImportError as error:
        return f"nsight-python {version} cannot be imported: {error}"
    if version_numbers(version) >= (1,) and version_numbers(tool.version) < (2026, 2):
        return f"nsight-python {version} needs ncu 2026.2, got {tool.version}"
    # It joins its command line with spaces and hands it to a shell.
    for path in (str(folder.resolve()), sys.executable, str(Path(target.__file__).resolve())):
        if not re.fullmatch(r"[\w./+:=@%-]+", path):
            return f"nsight-python cannot handle the path {path!r}"
    return None


def collect(
    tool: NcuTool, folder: Path, spec: target.TargetSpec, metrics: Sequence[str] | None
) -> Collection:
    """Run the target program under the profiler; leaves `report.ncu-rep` in the folder.

    Without metrics ncu collects the full set, with sources.
    """
    note = ""
    (folder / "profiler.log").unlink(missing_ok=True)
    if metrics is not None:
        note = nsight_problem(tool, folder) or ""
        try:
            if not note:
                return _collect(tool, folder, spec, metrics, "nsight-python")
        except UnsupportedError as error:
            if "ERR_NVGPUCTRPERM" in str(error):
                raise
            note = f"nsight-python failed: {error}"
        log.warning("%s; running ncu with NVTX ranges instead", note)
    return _collect(tool, folder, spec, metrics, "ncu")._replace(note=note)


def _collect(
    tool: NcuTool,
    folder: Path,
    spec: target.TargetSpec,
    metrics: Sequence[str] | None,
    collector: str,
) -> Collection:
    """Collect with one collector; metrics that do not exist here are left out and listed."""
    path, report = folder / "target.json", folder / "report.ncu-rep"
    dropped: list[str] = []
    while True:
        left = None if metrics is None else [name for name in metrics if name not in dropped]
        try:
            if collector == "ncu":
                dataclasses.replace(spec, nsight=None).write(path)
                run_ncu(ncu_command(tool, report.with_suffix(""), path, left), tool, report)
            else:
                prefix = f"{folder}/nsight-"
                nsight = {"metrics": left, "clock_control": CLOCK_CONTROL, "output_prefix": prefix}
                dataclasses.replace(spec, nsight=nsight).write(path)
                made = Path(f"{prefix}{target.NSIGHT_REPORT}")
                run_ncu(target_command(path), tool, made)
                made.replace(report)
                with contextlib.suppress(FileNotFoundError):
                    made.with_suffix(".log").replace(folder / "ncu-messages.log")
        except UnknownMetricsError as error:
            unknown = [name for name in left or () if name in error.names]
            if left is None or not unknown or len(unknown) == len(left):
                raise
            log.warning("not known to ncu %s here: %s", tool.version, ", ".join(unknown))
            dropped += unknown
        else:
            log.info("metrics collected by %s (ncu %s)", collector, tool.version)
            return Collection(collector, dropped=tuple(dropped))


def ncu_command(
    tool: NcuTool, output: Path, spec: Path, metrics: Sequence[str] | None
) -> list[str]:
    """The command that profiles a target program."""
    what = ["--set", "full", _WITH_SOURCES, "yes"]
    if metrics is not None:
        what = ["--metrics", ",".join(metrics)]
    return [
        str(tool.path),
        *("--target-processes", "all"),
        *("--nvtx", "--nvtx-include", RANGE_FILTER),
        *("--clock-control", CLOCK_CONTROL),
        *("--cache-control", "all"),
        *what,
        *("-f", "-o", str(output)),
        *target_command(spec),
    ]


def target_command(spec: Path) -> list[str]:
    """The command of the program to profile."""
    return [sys.executable, "-m", target.MODULE, str(spec)]


def run_ncu(command: Sequence[str], tool: NcuTool, report: Path) -> None:
    """Run a profiling command; its output is added to `profiler.log` beside the report."""
    log.debug("running %s", command)
    # Left by an earlier run, they would be taken for those of this one.
    for stale in (report, report.with_suffix(".log")):
        stale.unlink(missing_ok=True)
    # The profiled program imports this package and finds this profiler.
    path = os.pathsep.join(filter(None, (str(tool.path.parent), os.environ.get("PATH"))))
    environment = {**target.package_environment(), "PATH": path}
    if _WITH_SOURCES in command:
        environment[SOURCE_LINES] = "1"
    who = f"ncu {tool.version}"
    try:
        done = target.run_profiler(command, environment, _TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        expected = f"expected to finish within {_TIMEOUT_S} s"
        raise UnsupportedError(f"{who}: {expected}, got no end") from error
    except OSError as error:
        raise MissingToolError(
            f"{command[0]}: expected a program that runs, got {error}"
        ) from error
    text, log_file = done.stdout, report.with_name("profiler.log")
    # nsight-python keeps ncu's own messages in a file beside the report.
    if report.with_suffix(".log").is_file():
        text += report.with_suffix(".log").read_text(errors="replace")
    with log_file.open("a") as file:  # what was tried before stays
        file.write(text)
    unknown = _UNKNOWN_METRIC.findall(text)
    where = f"{_cause(text)} (full output in {log_file})"
    if "ERR_NVGPUCTRPERM" in text:
        raise UnsupportedError(
            f"{who}: expected access to the GPU's performance counters, got "
            "ERR_NVGPUCTRPERM; run as root or in a container with --cap-add=SYS_ADMIN, or let the "
            "administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
            "(https://developer.nvidia.com/ERR_NVGPUCTRPERM); --prof_type=event needs no access"
        )
    if unknown:
        raise UnknownMetricsError(sorted({name.rstrip(".,'\"") for name in unknown}))
    if done.returncode != 0:
        got = f"got exit code {done.returncode}: {where}"
        raise UnsupportedError(f"{who}: expected the profiled program to succeed, {got}")
    if not report.is_file():
        raise UnsupportedError(f"{who}: expected the report {report.name}, got none: {where}")


def _cause(text: str) -> str:
    """The line that says why a run failed."""
    found = (pattern.search(text.strip()) for pattern in _CAUSES)
    return next((match[0].strip() for match in found if match), "no output")
