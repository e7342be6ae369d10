"""What a result was made with: versions, GPU, driver, commit, command.

Nothing here raises for a thing that is missing; it is recorded as None.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mla_var3

log = logging.getLogger(__name__)

SOURCE_LINES = "CUTE_DSL_LINEINFO"
"""The variable that asks CuTe DSL for source lines in its programs: a profiler shows sources by
them. They cost nothing at run time, but a fifth to a third of the time to compile."""

_TOOL_TIMEOUT_S = 20
_SOURCE_ROOT = Path(__file__).resolve().parents[3]
"""Top of the checkout, when the package runs from one (`src` layout)."""

_TOOLKITS = {"cutile-dsl": ("cuda-tile", "tileiras", "ptxas"), "cute-dsl": ("cutlass-dsl",)}
"""What decides the machine code of a kernel, per language."""

_DISTRIBUTIONS = {
    "tileiras": "nvidia-cuda-tileiras",
    "ptxas": "nvidia-cuda-nvcc",
    "cutlass-dsl": "nvidia-cutlass-dsl",
}
"""The distribution that a version is read from, where its name is another one."""

_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.current.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.current.memory": "memory_clock_mhz",
    "power.limit": "power_limit_w",
    "power.max_limit": "max_power_limit_w",
    "clocks_event_reasons.applications_clocks_setting": "clocks_limited_by_setting",
}
"""nvidia-smi field -> name in the record."""


def environment() -> dict[str, Any]:
    """The circumstances of a run, JSON-ready: what is not there is None.

    Versions and the commit are read once per process, the date and the clocks at every call.
    """
    if gpu := _gpu():
        gpu |= _smi(gpu["uuid"])
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "versions": {
            "hyper-mla": mla_var3.__version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            **toolkit_versions(),
        },
        "cuda_runtime": torch.version.cuda if (torch := _torch()) else None,
        "platform": platform.platform(),
        "arch": platform.machine(),
        "git": copy.deepcopy(_git()),
        "gpu": gpu,
    }


def environment_rows(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `environment` returned, for a table of two columns; what is unknown is left out."""
    gpu, git = record.get("gpu") or {}, record.get("git") or {}
    commit = git.get("commit")
    limit = gpu.get("power_limit_w")
    rows = {
        "date": record.get("date"),
        "command": record.get("command"),
        "versions": ", ".join(f"{k} {v}" for k, v in (record.get("versions") or {}).items() if v),
        "driver": gpu.get("driver"),
        "power limit": f"{limit:g} W" if limit else None,
        "commit": f"{commit} with local changes" if commit and git.get("dirty") else commit,
    }
    return [(name, str(value)) for name, value in rows.items() if value]


def toolkit_versions(language: str | None = None) -> dict[str, str | None]:
    """Versions of what turns a kernel into machine code, for cache keys."""
    names = _TOOLKITS.values() if language is None else (_TOOLKITS.get(language, ()),)
    return {name: _version(name) for group in names for name in group}


def find_tool(name: str) -> Path | None:
    """A program of the CUDA toolkit, or None.

    The wheels come first because they are what the kernel language itself runs; a toolkit that
    happens to be on PATH may be of another release.
    """
    roots = filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda"))
    folders = (*_wheel_bin_folders(), os.environ.get("PATH"), *(f"{root}/bin" for root in roots))
    found = (shutil.which(name, path=str(folder)) for folder in folders if folder)
    return next((Path(path) for path in found if path), None)


def _wheel_bin_folders() -> list[Path]:
    """The `bin` folders of NVIDIA's wheels: `nvidia/cu13/bin` in every place on the import path."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # ValueError: something put a bare module of that name there
        return []
    places = (spec.submodule_search_locations or []) if spec else []
    return [folder for place in places for folder in sorted(Path(place).glob("cu[0-9]*/bin"))[::-1]]


def run_tool(*command: str | Path) -> str | None:
    """The standard output of a read-only query, None when it cannot run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("%s: %s", command[0], error)
        return None
    return done.stdout


@functools.cache
def _version(name: str) -> str | None:
    found = installed(_DISTRIBUTIONS.get(name, name))
    if found is not None or name not in ("tileiras", "ptxas"):
        return found
    tool = find_tool(name)
    output = tool and run_tool(tool, "--version")
    match = re.search(r"\bV(\d+(?:\.\d+)+)", output or "")
    return match and match[1]


@functools.cache
def _git() -> dict[str, Any] | None:
    """Commit of the checkout this package runs from; None for an installed package.

    The top of the repository is compared, because site-packages may be inside another
    checkout.
    """
    git = ("git", "--no-optional-locks", "-C", _SOURCE_ROOT)
    top = run_tool(*git, "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != _SOURCE_ROOT:
        return None
    commit = run_tool(*git, "rev-parse", "--verify", "HEAD")
    status = run_tool(*git, "status", "--porcelain")
    return {
        "commit": commit.strip() if commit else None,
        "dirty": None if status is None else bool(status.strip()),
    }


@functools.cache
def _torch() -> Any:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that torch links is missing
        log.debug("torch: %s", error)
        return None
    return torch


def _gpu() -> dict[str, Any] | None:
    """The current GPU, which may change."""
    torch = _torch()
    if torch is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "uuid": str(properties.uuid) if hasattr(properties, "uuid") else None,
    }


def _smi(uuid: str | None) -> dict[str, Any]:
    """Driver, clocks and power limit as nvidia-smi reports them now."""
    which = [f"--id={uuid if uuid.startswith('GPU-') else f'GPU-{uuid}'}"] if uuid else []
    query = [f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    lines = (run_tool("nvidia-smi", *which, *query) or "").strip().splitlines()
    answers = [part.strip() for part in lines[0].split(",")] if lines else []
    if len(answers) != len(_SMI_FIELDS):
        answers = ["N/A"] * len(_SMI_FIELDS)
    names = zip(_SMI_FIELDS.values(), answers, strict=True)
    return {name: _smi_value(name, answer) for name, answer in names}


def _smi_value(name: str, text: str) -> Any:
    """A number, a truth value, a text, or None for what the driver does not say."""
    if text.startswith(("[", "N/A")):
        return None
    if text in ("Active", "Not Active"):
        return text == "Active"
    # A driver version may look like a number and is none.
    return float(text) if name != "driver" and re.fullmatch(r"-?\d+(\.\d+)?", text) else text


def version_numbers(version: str) -> tuple[int, ...]:
    """The release of a version as numbers, to compare."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def installed(*distributions: str) -> str | None:
    """The version of the first of some distributions that is installed, None of none."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None
