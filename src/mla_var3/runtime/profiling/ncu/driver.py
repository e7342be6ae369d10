"""Finds Nsight Compute, builds its command lines, runs them and explains what went wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mla_var3
from mla_var3.errors import InvalidArgumentError, MissingToolError, UnsupportedError
from mla_var3.runtime.environment import find_tool, run_tool
from mla_var3.runtime.profiling import target

log = logging.getLogger(__name__)

MINIMUM_VERSION = (2024, 1)
"""The oldest release whose reports and options this code was written for."""
MINIMUM_READER = (2026, 2)
"""The oldest ncu-report that may be loaded beside torch: 2025.3.1 crashes the process when a unit
is read, 2026.2.0 and newer do not (torch 2.11 and 2.13). Newer ones read older reports."""
DRIVER_SETTINGS = Path("/proc/driver/nvidia/params")
CLOCK_CONTROLS = ("none", "base")
RANGE_FILTER = r"regex:hyper_mla\..*/"
"""Push/pop ranges of the default domain; the slash says that a range opens here."""

_TIMEOUT_S = 3600
_TAIL_LINES = 25
_VERSION = re.compile(r"\bVersion (\d+(?:\.\d+)+)")
_UNKNOWN_METRIC = re.compile(r"Failed to find metric (?:regex:)?(\S+)")
_INSTALL = "install Nsight Compute (part of the CUDA toolkit) and put its folder on PATH"


@dataclass(frozen=True)
class NcuTool:
    """An Nsight Compute command line program."""

    path: Path
    version: str

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for comparisons."""
        return _release(self.version)


class UnknownMetricsError(UnsupportedError):
    """This profiler or this GPU does not have some of the requested metrics."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(f"ncu: expected metrics of this GPU, got {', '.join(names)}")


def find_ncu() -> NcuTool:
    """The installed Nsight Compute.

    Raises:
        MissingToolError: there is none.
        UnsupportedError: it does not run, or is too old.
    """
    needed = ".".join(map(str, MINIMUM_VERSION))
    path = find_tool("ncu") or _newest_in_opt()
    if path is None:
        raise MissingToolError(
            f"ncu: expected Nsight Compute {needed} or newer on PATH, in $CUDA_HOME/bin, "
            f"/usr/local/cuda/bin or /opt/nvidia/nsight-compute, got none; {_INSTALL}, "
            "or use --prof_type=event, which needs no profiler"
        )
    match = _VERSION.search(run_tool(path, "--version") or "")
    if match is None:
        raise UnsupportedError(
            f"{path}: expected Nsight Compute {needed} or newer, got a program that does not "
            f"answer --version; {_INSTALL}"
        )
    tool = NcuTool(path, match[1])
    if tool.release < MINIMUM_VERSION:
        raise UnsupportedError(
            f"{path}: expected Nsight Compute {needed} or newer, got {tool.version}; {_INSTALL}"
        )
    return tool


def _newest_in_opt() -> Path | None:
    found = [
        path
        for path in Path("/opt/nvidia/nsight-compute").glob("*/ncu")
        if os.access(path, os.X_OK)
    ]
    return max(found, key=lambda path: _release(path.parent.name), default=None)


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:4])


def load_ncu_report(tool: NcuTool | None = None) -> Any:
    """The `ncu_report` module: the package, or else the copy that comes with Nsight Compute.

    Raises:
        MissingToolError: neither can be imported, or what is there is too old.
    """
    reasons = []
    needed = ".".join(map(str, MINIMUM_READER))
    if importlib.util.find_spec("ncu_report") is not None:
        version = _reader_version()
        if version is None or _release(version) >= MINIMUM_READER:
            return importlib.import_module("ncu_report")
        reasons.append(f"version {version}")
    elif tool is not None and tool.release < MINIMUM_READER:
        reasons.append(f"the copy in ncu {tool.version}")
    elif tool is not None:
        for folder in _bundled_folders(tool):
            sys.path.append(str(folder))
            try:
                module = importlib.import_module("ncu_report")
            except ImportError as error:
                reasons.append(f"{folder}: {error}")
                sys.path.remove(str(folder))
            else:
                log.info("reading reports with the ncu_report module in %s", folder)
                return module
    raise MissingToolError(
        f"ncu-report: expected {needed} or newer of the Python package that reads .ncu-rep files, "
        f'got {"; ".join(reasons) or "none"}; pip install "hyper-mla[profiling]"'
    )


def counters_problem() -> str | None:
    """Why this user may not read the hardware counters, as far as the driver tells in advance."""
    try:
        settings = DRIVER_SETTINGS.read_text()
    except OSError:
        return None
    if os.geteuid() != 0 and re.search(r"^RmProfilingAdminOnly: 1$", settings, re.MULTILINE):
        return (
            "ncu: expected the right to read the GPU's counters, got a driver that keeps it to root"
        )
    return None


def _reader_version() -> str | None:
    try:
        return importlib.metadata.version("ncu-report")
    except importlib.metadata.PackageNotFoundError:
        return None


def _bundled_folders(tool: NcuTool) -> list[Path]:
    """Where an installation keeps its Python module; `ncu` itself may be a link or a wrapper."""
    roots = [*tool.path.resolve().parents[:4]]
    short = ".".join(tool.version.split(".")[:3])
    roots.append(Path("/opt/nvidia/nsight-compute") / short)
    return [r / "extras" / "python" for r in roots if (r / "extras/python/ncu_report.py").is_file()]


def nsight_problem(tool: NcuTool, folder: Path) -> str | None:
    """Why nsight-python cannot profile here; None when it can."""
    for name in ("nsight", "nvtx", "pandas", "ncu_report"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    try:
        version = importlib.metadata.version("nsight-python")
    except importlib.metadata.PackageNotFoundError:
        return "nsight-python is not installed"
    if _release(version) >= (1,) and tool.release < (2026, 2):
        return f"nsight-python {version} needs ncu 2026.2, got {tool.version}"
    # It joins its command line with spaces and hands it to a shell.
    for path in (str(folder.resolve()), sys.executable, str(Path(target.__file__).resolve())):
        if not re.fullmatch(r"[\w./+:=@%-]+", path):
            return f"nsight-python cannot handle the path {path!r}"
    return None


def ncu_command(
    tool: NcuTool,
    output: Path,
    spec: Path,
    *,
    metrics: Sequence[str] | None,
    clock_control: str = "none",
) -> list[str]:
    """The command that profiles a target program.

    Args:
        tool: the profiler.
        output: report path without `.ncu-rep`.
        spec: what the target program runs.
        metrics: metrics to collect; None for the full set with sources.
        clock_control: "none" leaves the clocks alone, "base" holds them at the base frequency.
    """
    if clock_control not in CLOCK_CONTROLS:
        raise InvalidArgumentError("clock_control", " or ".join(CLOCK_CONTROLS), clock_control)
    if metrics is None:
        what = ["--set", "full", "--import-source", "yes"]
    else:
        what = ["--metrics", ",".join(metrics)]
    return [
        str(tool.path),
        *("--target-processes", "all"),
        *("--nvtx", "--nvtx-include", RANGE_FILTER),
        *("--clock-control", clock_control),
        *("--cache-control", "all"),
        *what,
        *("-f", "-o", str(output)),
        *target_command(spec),
    ]


def target_command(spec: Path) -> list[str]:
    """The command of the program to profile."""
    return [sys.executable, "-m", target.MODULE, str(spec)]


def child_environment(tool: NcuTool) -> dict[str, str]:
    """Environment of a profiled program: it imports this package and finds this profiler."""
    package_root = str(Path(mla_var3.__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    path = os.pathsep.join(filter(None, (str(tool.path.parent), os.environ.get("PATH"))))
    return {**os.environ, "PYTHONPATH": python_path, "PATH": path}


def run_ncu(command: Sequence[str], tool: NcuTool, report: Path, log_file: Path) -> None:
    """Run a profiling command; its output goes to a log file.

    Args:
        command: what to run.
        tool: the profiler, for messages.
        report: the file that must exist afterwards.
        log_file: gets everything that was printed.

    Raises:
        UnsupportedError: no right to the counters, a failed target program, no report.
        UnknownMetricsError: some metrics do not exist here.
    """
    log.debug("running %s", command)
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment(tool),
            timeout=_TIMEOUT_S,
            check=False,
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(
            f"ncu {tool.version}: expected to finish within {_TIMEOUT_S} s, got no end"
        ) from error
    except OSError as error:
        raise MissingToolError(
            f"{command[0]}: expected a program that runs, got {error}"
        ) from error
    log_file.write_text(text)
    # nsight-python keeps ncu's own messages in a file beside the report.
    beside = report.with_suffix(".log")
    if beside.is_file() and beside != log_file:
        text += beside.read_text(errors="replace")
    _raise_problem(text, code, tool, report, log_file)


def _raise_problem(text: str, code: int, tool: NcuTool, report: Path, log_file: Path) -> None:
    where = f"full output in {log_file}"
    if "ERR_NVGPUCTRPERM" in text:
        raise UnsupportedError(
            f"ncu {tool.version}: expected the right to read the GPU's performance counters, got "
            "ERR_NVGPUCTRPERM; run as root or in a container with --cap-add=SYS_ADMIN, or let the "
            "administrator load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
            "(https://developer.nvidia.com/ERR_NVGPUCTRPERM); --prof_type=event needs no such right"
        )
    unknown = _UNKNOWN_METRIC.findall(text)
    if unknown:
        raise UnknownMetricsError(sorted({name.rstrip(".,'\"") for name in unknown}))
    if code != 0:
        raise UnsupportedError(
            f"ncu {tool.version}: expected the profiled program to succeed, got exit code {code} "
            f"({where}):\n{tail(text)}"
        )
    if not report.is_file():
        reason = "no kernel ran in a range" if "No kernels were profiled" in text else "none"
        raise UnsupportedError(
            f"ncu {tool.version}: expected the report {report.name}, got {reason} "
            f"({where}):\n{tail(text)}"
        )


def tail(text: str, lines: int = _TAIL_LINES) -> str:
    """The last lines of a program's output."""
    return "\n".join(text.strip().splitlines()[-lines:])


def move_nsight_report(folder: Path, prefix: str) -> None:
    """Give the files of nsight-python the names that the direct way uses."""
    made = folder / f"{prefix}{target.NSIGHT_REPORT}"
    for suffix, name in ((".ncu-rep", "report.ncu-rep"), (".log", "ncu-messages.log")):
        source = made.with_suffix(suffix)
        if source.is_file():
            shutil.move(source, folder / name)
