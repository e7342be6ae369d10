"""Recording a timeline with CUPTI in this process, and with Nsight Systems in another one.

The analysis reads CUPTI's timeline, which needs nothing but torch. Where Nsight Systems is
installed, it records the same kinds of runs once more for its own report and statistics.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.environment import find_tool
from mla_var3.runtime.measure import wait_for_device
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import target
from mla_var3.runtime.profiling.target import (
    TargetSpec,
    package_environment,
    record_runs,
    run_profiler,
)
from mla_var3.runtime.profiling.timeline import model
from mla_var3.runtime.profiling.timeline.model import Timeline
from mla_var3.runtime.stage import Stage

log = logging.getLogger(__name__)

REPORTS = (model.GPU_TRACE, model.NVTX_PROJECTION, model.API_SUMMARY)
DEFAULT_RUNS = 20

_RUN_TIMEOUT_S = 1200
_TAIL_LINES = 8


def record_with_torch(stage: Stage, runs: int, trace: Path) -> Timeline:
    """Record a runtime object under torch.profiler, in this process."""
    from torch.profiler import ProfilerActivity, profile, record_function

    wait_for_device(stage.name)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder:
        # The profiler writes the file's path into the file, so it is exported elsewhere first.
        file = Path(folder) / "trace.json"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with profile(activities=activities, acc_events=True) as profiler:
                record_runs(stage, record_function, runs)
                wait_for_device(stage.name)
            profiler.export_chrome_trace(str(file))
        for message in dict.fromkeys(str(warning.message) for warning in caught):
            log.info("torch.profiler: %s", message)
        text = file.read_text(encoding="utf-8").replace(str(file), trace.name)
    write_atomic(trace, text)
    return model.read_chrome_trace(trace)


def record_with_nsys(plan: KernelPlan, stage: Stage, runs: int, folder: Path) -> None:
    """Record with Nsight Systems: `report.nsys-rep`, and `stats/` made of it."""
    report, stats = folder / "report.nsys-rep", folder / "stats"
    report.unlink(missing_ok=True)  # that of an earlier run, which this one may not replace
    nsys = find_tool("nsys")
    if nsys is None:
        raise MissingToolError("Nsight Systems: expected the program nsys on PATH, got none")
    with tempfile.TemporaryDirectory() as temporary:
        spec = Path(temporary) / "spec.json"
        timeline = dataclasses.replace(TargetSpec.of(plan, stage, runs), timeline=True)
        timeline.write(spec)
        options = "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"
        watched = sys.executable, "-m", target.MODULE, str(spec)
        output = str(report.with_suffix(""))
        _run([str(nsys), "profile", *options, "-o", output, *watched], report)
    stats.mkdir(exist_ok=True)
    options = "--format", "csv", "--force-export=true", "--force-overwrite=true"
    # Each table becomes a file `report_<table>.csv`.
    output, tables = str(stats / "report"), ",".join(REPORTS)
    command = [str(nsys), "stats", "--report", tables, *options, "--output", output, str(report)]
    try:
        _run(command, stats / f"report_{model.GPU_TRACE}.csv")
    except UnsupportedError:
        shutil.rmtree(stats)
        raise


def _run(command: Sequence[str], result: Path) -> None:
    """Run a command that must leave a file."""
    result.unlink(missing_ok=True)
    try:
        done = run_profiler(command, package_environment(), _RUN_TIMEOUT_S)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        got = f"exit code {done.returncode}: {' | '.join(lines[-_TAIL_LINES:])}"
        if done.returncode == 0 and result.is_file():
            return
    except (OSError, subprocess.TimeoutExpired) as error:
        got = str(error)
    raise UnsupportedError(f"nsys {command[1]}: expected {result.name}, got {got}")
