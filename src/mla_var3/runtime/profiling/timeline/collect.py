"""Recording a timeline with CUPTI in this process, and with Nsight Systems in another one.

The analysis reads CUPTI's timeline, which needs nothing but torch. Where Nsight Systems is
installed, it records the same kinds of runs once more for its own report and statistics.

Two kinds of runs are recorded. A *queued* run waits behind a spinning GPU until all of it is
enqueued, so its timeline shows what the GPU can do. A *host-paced* run starts on an idle GPU, so
its timeline shows what the host's launches cost.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.environment import find_tool
from mla_var3.runtime.measure import CudaClock, wait_for_device
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import target
from mla_var3.runtime.profiling.target import TargetSpec, package_environment, run_profiler
from mla_var3.runtime.profiling.timeline import model
from mla_var3.runtime.profiling.timeline.model import HOST_PACED, QUEUED, WARMUP, Timeline
from mla_var3.runtime.stage import Stage

log = logging.getLogger(__name__)

RangeMaker = Callable[[str], AbstractContextManager[object]]
"""Makes the context manager that marks a named range for the profiler."""

REPORTS = (model.GPU_TRACE, model.NVTX_PROJECTION, model.API_SUMMARY)
DEFAULT_RUNS = 20

_HEAD_START_MARGIN = 2.0
_MIN_HEAD_START_S = 2e-4
_MAX_HEAD_START_S = 2e-2
_CYCLES_PER_SECOND = 2e9
"""No known GPU runs much faster, so the spin lasts at least as long as requested."""
_RUN_TIMEOUT_S = 1200
_TAIL_LINES = 8


def record_runs(
    stage: Stage, make_range: RangeMaker, queued: int, host_paced: int = 5, warmup: int = 3
) -> None:
    """Launch a runtime object on the current GPU, every run inside a range of its own.

    The L2 cache is flushed before every queued run, as in event mode, so that the times compare.
    """
    import torch

    clock = CudaClock()
    host_s = 0.0
    with ranges_below(stage, make_range):
        for _ in range(warmup):
            wait_for_device(stage.name)
            began = time.perf_counter()
            with make_range(f"{WARMUP}{stage.name}"):
                stage.launch()
            host_s = time.perf_counter() - began
        cycles = head_start_cycles(host_s)
        for _ in range(queued):
            clock.flush_l2()
            torch.cuda._sleep(cycles)
            with make_range(f"{QUEUED}{stage.name}"):
                stage.launch()
            wait_for_device(stage.name)
    for _ in range(host_paced):
        wait_for_device(stage.name)
        with make_range(f"{HOST_PACED}{stage.name}"):
            stage.launch()
    wait_for_device(stage.name)


def head_start_cycles(host_s: float) -> int:
    """How long the GPU must spin so that a host that takes `host_s` per run gets ahead of it."""
    wanted = min(max(_HEAD_START_MARGIN * host_s, _MIN_HEAD_START_S), _MAX_HEAD_START_S)
    return int(wanted * _CYCLES_PER_SECOND)


@contextmanager
def ranges_below(stage: Stage, make_range: RangeMaker) -> Iterator[None]:
    """While active, every stage below the given one launches inside a range of its name."""
    nodes = [*stage.children]
    for node in nodes:
        nodes += node.children

    def launch_in_range(launch: Callable[[], None], name: str) -> None:
        with make_range(name):
            launch()

    try:
        for node in nodes:
            # An instance attribute hides the method; deleting it brings the method back.
            name = f"{QUEUED}{node.name}"
            vars(node)["launch"] = functools.partial(launch_in_range, node.launch, name)
        yield
    finally:
        for node in nodes:
            vars(node).pop("launch", None)


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
