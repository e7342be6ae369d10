"""Nsys mode: the timeline of streams, with overlap, gaps and launch overhead."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.measure import percentile, spread, wait_for_device
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures, common
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.timeline import report
from mla_var3.runtime.profiling.timeline.analysis import Analysis, analyse, outline
from mla_var3.runtime.profiling.timeline.collect import (
    DEFAULT_RUNS,
    record_with_nsys,
    record_with_torch,
)
from mla_var3.runtime.profiling.timeline.formats import write_stats
from mla_var3.runtime.profiling.timeline.model import Timeline
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.workflow import Prepared, RunOptions

log = logging.getLogger(__name__)


@common.profiling_mode(NsightProfType.NSYS, gpu=True)
def nsys_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and record the timeline of a plan on the current GPU."""
    runs = run.bench_runs or DEFAULT_RUNS
    with common.measuring(NsightProfType.NSYS, plan, run) as (prepared, folder):
        return summarise(prepared, *collect(prepared, runs, folder), folder)


def collect(prepared: Prepared, runs: int, folder: Path) -> tuple[Timeline, str]:
    """Record with CUPTI, and with Nsight Systems where it works."""
    prepared.stage.launch()  # compiles what is compiled at first use, outside the timeline
    wait_for_device(prepared.stage.name)
    timeline = record_with_torch(prepared.stage, runs, folder / "chrome_trace.json")
    how = "The figures and `chrome_trace.json` were recorded by CUPTI through torch.profiler. "
    try:
        record_with_nsys(prepared.plan, prepared.stage, runs, folder)
        log.info("Nsight Systems recorded report.nsys-rep and stats/")
    except UnsupportedError as error:
        # Nsight Systems is optional: that it is missing is no reason for a warning.
        level = logging.INFO if isinstance(error, MissingToolError) else logging.WARNING
        log.log(level, "statistics by CUPTI, not by Nsight Systems: %s", error)
        write_stats(timeline, folder / "stats")
        missing = not (folder / "report.nsys-rep").is_file()
        return timeline, (
            f"{how}Nsight Systems was not usable ({error}): "
            f"{'there is no `report.nsys-rep`, and ' if missing else ''}"
            "the files in `stats/` have those columns of `nsys stats` that CUPTI fills."
        )
    return timeline, f"{how}`report.nsys-rep` and `stats/` are of more runs, by Nsight Systems."


def summarise(prepared: Prepared, timeline: Timeline, how: str, folder: Path) -> ProfileResult:
    """Turn a timeline into a result, and write what belongs to it."""
    stage, plan, spec = prepared.stage, prepared.plan, prepared.require_device()
    dtype = plan_dtype(plan)
    analysis = analyse(timeline, outline(stage))

    def timed(
        part: Stage, times_us: list[float], extra: dict[str, Any], name: str = ""
    ) -> StageFigures:
        found = common.stage_figures(part, spec, dtype, name=name)
        if times_us:
            found.time_us, found.spread_us = percentile(times_us, 50), spread(times_us)
        found.extra.update(extra)
        return found

    spans = [run.span_ns / 1e3 for run in analysis.queued]
    total = timed(stage, spans, report.timeline_figures(analysis))
    stages = []
    for leaf, kernel in enumerate(stage.kernels()):
        times = [p.activity.duration / 1e3 for r in analysis.queued if (p := r.of_kernel(leaf))]
        name = analysis.shape.leaves[leaf]
        stages.append(timed(kernel, times, report.kernel_figures(analysis, leaf), name))
    result = common.measured_result(NsightProfType.NSYS, prepared, total, stages, folder)
    result.record["timeline"] = {"how": how}
    common.write_artifacts(result, prepared, _report(result, analysis, stage, how))
    return result


def _report(result: ProfileResult, analysis: Analysis, stage: Stage, how: str) -> list[str]:
    return [
        common.header(f"{result.kernel}, nsys mode", result.record),
        f"{how}\n",
        common.clocks_line(result),
        "## Measured against roofline\n",
        stage_markdown(result),
        f"Median of {len(analysis.queued)} runs, each enqueued as a whole before the GPU began it, "
        "L2 cache cold. The whole is the span from the first kernel's start to the last one's end; "
        "a stage's time is its kernel's, beside whatever ran at the same time.\n",
        common.roofline_warning(result),
        *report.timeline_sections(analysis, result.total.extra),
        "## Timeline\n",
        "Open `chrome_trace.json` in Perfetto.\n",
        *common.closing_sections(result, stage),
    ]
