"""Nsys mode: the timeline of streams, with overlap, gaps and launch overhead.

Nsight Systems records it where it is installed and able to make reports; elsewhere CUPTI does,
through torch.profiler in this process, and the screen and the report say so.
"""

from __future__ import annotations

import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import InvalidArgumentError, MissingToolError, UnsupportedError
from mla_var3.runtime.environment import environment
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.measure import percentile, wait_for_device
from mla_var3.runtime.plan import plan_dtype
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.profiling.clocks import ClockState, announce_clocks
from mla_var3.runtime.profiling.common import (
    header,
    measured_result,
    measuring,
    profiling_mode,
    stage_figures,
    tiling_table,
    write_artifacts,
)
from mla_var3.runtime.profiling.figures import check_markdown, stage_markdown
from mla_var3.runtime.profiling.timeline.analysis import Analysis, analyse
from mla_var3.runtime.profiling.timeline.csv import write_stats
from mla_var3.runtime.profiling.timeline.launch import DEFAULT_RUNS, RunCounts
from mla_var3.runtime.profiling.timeline.model import CUPTI, Timeline
from mla_var3.runtime.profiling.timeline.nsys import collect_with_nsys, find_nsys
from mla_var3.runtime.profiling.timeline.outline import outline
from mla_var3.runtime.profiling.timeline.plot import timeline_plot
from mla_var3.runtime.profiling.timeline.report import (
    kernel_figures,
    timeline_figures,
    timeline_sections,
)
from mla_var3.runtime.profiling.timeline.target import write_request
from mla_var3.runtime.profiling.timeline.torch import collect_with_torch
from mla_var3.runtime.profiling.timeline.trace import write_chrome_trace
from mla_var3.runtime.workflow import RunOptions

if TYPE_CHECKING:
    from mla_var3.conf.devices import DeviceSpec
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.stage import Stage
    from mla_var3.runtime.workflow import Prepared

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collected:
    """A timeline and how it came about."""

    timeline: Timeline
    how: str


@profiling_mode(NsightProfType.NSYS, gpu=True)
def nsys_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and record the timeline of a plan on the current GPU."""
    counts = RunCounts(queued=run.bench_runs or DEFAULT_RUNS)
    with measuring(NsightProfType.NSYS, plan, run) as (prepared, folder):
        return summarise(prepared, collect(prepared, counts, folder), folder)


def collect(prepared: Prepared, counts: RunCounts, folder: Path) -> Collected:
    """Record with Nsight Systems where it works, else with CUPTI; says which, and why."""
    prepared.stage.launch()  # what is compiled at first use must not be in the timeline
    wait_for_device(prepared.stage.name)
    try:
        tool = find_nsys()
        with tempfile.TemporaryDirectory() as scratch:
            request = Path(scratch) / "request.json"
            write_request(request, prepared.plan, prepared.stage, counts)
            timeline = collect_with_nsys(tool, request, folder)
        write_chrome_trace(timeline, folder / "chrome_trace.json")
        how = f"Recorded by Nsight Systems {tool.version} (`report.nsys-rep`)."
        log.info("timeline recorded by Nsight Systems %s", tool.version)
        return Collected(timeline, how)
    except MissingToolError as error:
        reason = str(error)
    except (UnsupportedError, InvalidArgumentError) as error:
        reason = str(error)
        log.warning("%s", error)
    log.info("timeline recorded by %s instead of Nsight Systems (%s)", CUPTI, reason)
    timeline = collect_with_torch(prepared.stage, counts, folder / "chrome_trace.json")
    write_stats(timeline, folder / "stats")
    how = (
        f"Recorded by {CUPTI}, in process, because Nsight Systems was not usable: {reason}. "
        "There is no `report.nsys-rep`; the files below `stats/` have the columns that `nsys "
        "stats` prints, empty where CUPTI does not tell."
    )
    return Collected(timeline, how)


def summarise(prepared: Prepared, collected: Collected, folder: Path) -> ProfileResult:
    """Turn a timeline into a result, and write what belongs to it."""
    stage, plan, spec = prepared.stage, prepared.plan, prepared.require_device()
    dtype = plan_dtype(plan)
    analysis = analyse(collected.timeline, outline(stage))
    total = _total(analysis, stage, spec, dtype)
    figures = timeline_figures(analysis, spec)
    total.extra.update(figures)
    stages = _stages(analysis, stage, spec, dtype)
    clocks = announce_clocks(environment())
    result = measured_result(NsightProfType.NSYS, prepared, total, stages, folder, clocks)
    record = result.record
    record["timeline"] = {"source": collected.timeline.source, "how": collected.how}
    write_artifacts(folder, record, prepared)
    sizes = " ".join(f"{k}={v}" for k, v in plan.params().items() if isinstance(v, (int, str)))
    timeline_plot(analysis, folder / "timeline.png", f"{plan.name}, {sizes}, {spec.name}")
    write_atomic(folder / "report.md", _report(result, analysis, stage, spec, collected.how))
    return result


def _total(analysis: Analysis, stage: Stage, spec: DeviceSpec, dtype: str) -> StageFigures:
    spans = [run.span_ns / 1e3 for run in analysis.queued]
    spread = (percentile(spans, 90) - percentile(spans, 10)) / 2
    return stage_figures(stage, percentile(spans, 50), spread, spec, dtype)


def _stages(analysis: Analysis, stage: Stage, spec: DeviceSpec, dtype: str) -> list[StageFigures]:
    found = []
    for leaf, kernel in enumerate(stage.kernels()):
        times = [p.activity.duration / 1e3 for r in analysis.queued if (p := r.piece(leaf))]
        median = percentile(times, 50) if times else None
        spread = (percentile(times, 90) - percentile(times, 10)) / 2 if times else None
        figures = stage_figures(kernel, median, spread, spec, dtype)
        figures.name = analysis.shape.leaves[leaf]
        figures.extra.update(kernel_figures(analysis, leaf))
        found.append(figures)
    return found


def _report(
    result: ProfileResult, analysis: Analysis, stage: Stage, spec: DeviceSpec, how: str
) -> str:
    record: dict[str, Any] = result.record
    clocks = ClockState(**record["clocks"])
    parts = [
        header(f"{result.kernel}, nsys mode", record),
        f"{how}\n",
        f"GPU clocks: {clocks.describe()}.\n",
        "## Measured against roofline\n",
        stage_markdown(result),
        f"Median of {len(analysis.queued)} runs, each enqueued as a whole before the GPU began it, "
        "L2 cache cold. The whole is the span from the first kernel's start to the last one's end; "
        "a stage's time is its kernel's, beside whatever ran at the same time.\n",
    ]
    if record["above_roofline"]:
        parts.append(
            "**Faster than the specified peaks allow**: treat this measurement as wrong until "
            "explained.\n"
        )
    parts += timeline_sections(analysis, spec)
    parts += [
        "## Timeline\n",
        "![streams and kernels of a typical run](timeline.png)\n",
        "Open `chrome_trace.json` in Perfetto to move around in it.\n",
        "## Tiling\n",
        tiling_table(stage),
    ]
    if result.check is not None:
        parts += ["## Check\n", check_markdown(result.check)]
    return "\n".join(parts)
