"""Collects metrics under Nsight Compute: through nsight-python, or by driving ncu directly."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.profiling.ncu.driver import (
    NcuTool,
    UnknownMetricsError,
    move_nsight_report,
    ncu_command,
    nsight_problem,
    run_ncu,
    target_command,
)
from mla_var3.runtime.profiling.target import NSIGHT_REPORT, TargetSpec

log = logging.getLogger(__name__)

COLLECTOR_VARIABLE = "HYPER_MLA_NCU_COLLECTOR"
COLLECTORS = ("auto", "nsight-python", "ncu")
_NSIGHT_PREFIX = "nsight-"


@dataclass
class Collection:
    """How the metrics were collected.

    Attributes:
        collector: "nsight-python" or "ncu".
        note: why not nsight-python, where it was not.
        dropped: metrics that this profiler or GPU does not have.
    """

    collector: str
    note: str = ""
    dropped: tuple[str, ...] = ()


def wanted_collector() -> str:
    """The collector that $HYPER_MLA_NCU_COLLECTOR asks for; "auto" by default."""
    value = os.environ.get(COLLECTOR_VARIABLE, "auto")
    if value not in COLLECTORS:
        raise InvalidArgumentError(COLLECTOR_VARIABLE, " or ".join(COLLECTORS), repr(value))
    return value


def collect(
    tool: NcuTool,
    folder: Path,
    spec: TargetSpec,
    metrics: Sequence[str] | None,
    clock_control: str,
    collector: str,
) -> Collection:
    """Run the target program under the profiler; leaves `report.ncu-rep` in the folder.

    The full set is always collected by ncu itself, which nsight-python has no option for.

    Raises:
        UnsupportedError: as `run_ncu`; also when nsight-python was asked for and cannot work.
    """
    if metrics is None:
        return _collect_until_known(tool, folder, spec, None, clock_control, "ncu")
    note = f"${COLLECTOR_VARIABLE} asks for it"
    if collector != "ncu":
        problem = nsight_problem(tool, folder)
        if problem is None:
            try:
                return _collect_until_known(
                    tool, folder, spec, metrics, clock_control, "nsight-python"
                )
            except UnsupportedError as error:
                if collector == "nsight-python" or "ERR_NVGPUCTRPERM" in str(error):
                    raise
                problem = f"nsight-python failed: {str(error).splitlines()[0]}"
        if collector == "nsight-python":
            raise UnsupportedError(f"{COLLECTOR_VARIABLE}: expected nsight-python, got {problem}")
        log.warning("%s; driving ncu with NVTX ranges instead", problem)
        note = problem
    done = _collect_until_known(tool, folder, spec, metrics, clock_control, "ncu")
    return dataclasses.replace(done, note=note)


def _collect_until_known(
    tool: NcuTool,
    folder: Path,
    spec: TargetSpec,
    metrics: Sequence[str] | None,
    clock_control: str,
    collector: str,
) -> Collection:
    """Collect; metrics that do not exist here are left out, and said so."""
    left = None if metrics is None else list(metrics)
    dropped: list[str] = []
    while True:
        try:
            _collect_once(tool, folder, spec, left, clock_control, collector)
        except UnknownMetricsError as error:
            unknown = [name for name in left or () if name in error.names]
            if left is None or not unknown or len(unknown) == len(left):
                raise
            log.warning("not known to ncu %s here: %s", tool.version, ", ".join(unknown))
            left = [name for name in left if name not in unknown]
            dropped += unknown
        else:
            log.info("metrics collected by %s (ncu %s)", collector, tool.version)
            return Collection(collector, dropped=tuple(dropped))


def _collect_once(
    tool: NcuTool,
    folder: Path,
    spec: TargetSpec,
    metrics: Sequence[str] | None,
    clock_control: str,
    collector: str,
) -> None:
    path = folder / "target.json"
    log_file = folder / "profiler.log"
    if collector == "ncu":
        dataclasses.replace(spec, nsight=None).write(path)
        command = ncu_command(
            tool, folder / "report", path, metrics=metrics, clock_control=clock_control
        )
        run_ncu(command, tool, folder / "report.ncu-rep", log_file)
        return
    nsight = {
        "metrics": list(metrics or ()),
        "clock_control": clock_control,
        "output_prefix": str(folder / _NSIGHT_PREFIX),
    }
    dataclasses.replace(spec, nsight=nsight).write(path)
    report = folder / f"{_NSIGHT_PREFIX}{NSIGHT_REPORT}"
    run_ncu(target_command(path), tool, report, log_file)
    move_nsight_report(folder, _NSIGHT_PREFIX)
