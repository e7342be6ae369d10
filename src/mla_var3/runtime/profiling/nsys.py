"""Nsys mode: the timeline of streams, with overlap, gaps and launch overhead.

The analysis reads CUPTI's timeline, recorded in this process, which needs nothing but torch. Where
Nsight Systems is installed, it records the same kinds of runs once more, in another process, for
its own report and statistics.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.environment import find_tool
from mla_var3.runtime.markdown import MISSING, microseconds, number, table
from mla_var3.runtime.measure import spread, wait_for_device
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling import (
    NsightProfType,
    ProfileResult,
    StageFigures,
    common,
    target,
)
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.target import TargetSpec
from mla_var3.runtime.profiling.timeline import model
from mla_var3.runtime.profiling.timeline.analysis import (
    SERIAL_BELOW,
    Analysis,
    Iteration,
    Launch,
    Outline,
    analyse,
    group_overlap,
    launches_of,
    outline,
    serialisations,
    typical,
)
from mla_var3.runtime.profiling.timeline.model import Timeline, write_stats
from mla_var3.runtime.stage import Stage, by_unique_name
from mla_var3.runtime.workflow import Prepared, RunOptions

log = logging.getLogger(__name__)

REPORTS = (model.GPU_TRACE, model.NVTX_PROJECTION, model.API_SUMMARY)
DEFAULT_RUNS = 20
_RUN_TIMEOUT_S = 1200
_TAIL_LINES = 8
_MIN_GAP_NS = 500
"""Shorter pauses between two kernels come from the hardware itself."""
_MOST_GAPS = 8


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
                target.record_runs(stage, record_function, runs)
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
        done = target.run_profiler(command, target.package_environment(), _RUN_TIMEOUT_S)
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        got = f"exit code {done.returncode}: {' | '.join(lines[-_TAIL_LINES:])}"
        if done.returncode == 0 and result.is_file():
            return
    except (OSError, subprocess.TimeoutExpired) as error:
        got = str(error)
    raise UnsupportedError(f"nsys {command[1]}: expected {result.name}, got {got}")


def summarise(prepared: Prepared, timeline: Timeline, how: str, folder: Path) -> ProfileResult:
    """Turn a timeline into a result, and write what belongs to it."""
    stage, spec, dtype = prepared.stage, prepared.require_device(), plan_dtype(prepared.plan)
    analysis = analyse(timeline, outline(stage))

    def timed(
        part: Stage, times_ns: list[int], extra: dict[str, Any], name: str = ""
    ) -> StageFigures:
        found = common.stage_figures(part, spec, dtype, name=name)
        if times_ns:
            found.time_us, found.spread_us = _median(times_ns), spread(times_ns) / 1e3
        found.extra = extra
        return found

    total = timed(stage, [run.span_ns for run in analysis.queued], timeline_figures(analysis))
    stages = [
        timed(kernel, analysis.durations(leaf), kernel_figures(analysis, leaf), label)
        for leaf, (label, kernel) in enumerate(by_unique_name(stage.kernels()).items())
    ]
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
        *timeline_sections(analysis, result.total.extra),
        "## Timeline\n",
        "Open `chrome_trace.json` in Perfetto.\n",
        *common.closing_sections(result, stage),
    ]


def kernel_figures(analysis: Analysis, leaf: int) -> dict[str, Any]:
    """What the timeline says about one kernel: medians over the queued runs."""
    queued = launches_of(analysis.queued, leaf)
    paced = launches_of(analysis.host_paced, leaf)
    if not queued:
        return {"launches": 0}
    one = queued[0].activity
    names = ("stream", "grid", "block", "registers", "shared_bytes")
    return {
        "launches": len(queued),
        **{name: getattr(one, name) for name in names},
        "start_us": _median(
            [p.activity.start - r.span[0] for r in analysis.queued if (p := r.of_kernel(leaf))]
        ),
        "launch_call_us": _median([launch.call.duration for launch in paced or queued]),
        "launch_to_start_us": _median([p.activity.start - p.call.start for p in paced]),
    }


def _median(values_ns: Sequence[int]) -> float | None:
    """The median of times in nanoseconds, in microseconds; None of none."""
    return statistics.median(values_ns) / 1e3 if values_ns else None


def timeline_figures(analysis: Analysis) -> dict[str, Any]:
    """Everything that goes into the record beside the times of the stages."""
    found = _run_figures(analysis.shape, analysis.queued)
    if analysis.host_paced:
        found["host_paced"] = _run_figures(analysis.shape, analysis.host_paced)
    return found


def _run_figures(shape: Outline, runs: list[Iteration]) -> dict[str, Any]:
    return {
        "runs": len(runs),
        "span_us": _median([run.span_ns for run in runs]),
        "host_us": _median([run.host.duration for run in runs]),
        "api_us": _median([run.api_ns for run in runs]),
        "idle_us": _median([run.idle_ns for run in runs]),
        "overlap": overlap_figures(shape, runs),
        "serialised": serialisations(shape, runs),
    }


def overlap_figures(shape: Outline, runs: list[Iteration]) -> list[dict[str, Any]]:
    """The overlap of every concurrent group: medians over some runs."""
    figures: list[dict[str, Any]] = []
    for group in shape.groups:
        overlaps = [group_overlap(run, group) for run in runs]
        shares = [overlap.share for overlap in overlaps if overlap.share is not None]
        members = zip(*(overlap.member_ns for overlap in overlaps), strict=True)
        names, percent = [member.name for member in group.members], None
        if shares:
            percent = 100 * statistics.median(shares)
        found: dict[str, Any] = {
            "group": group.name,
            "members": names,
            "member_us": [*map(_median, members)],
        }
        for key in ("overlap", "possible", "busy"):
            found[f"{key}_us"] = _median([getattr(overlap, f"{key}_ns") for overlap in overlaps])
        figures.append({**found, "overlap_percent": percent})
    return figures


def timeline_sections(analysis: Analysis, figures: dict[str, Any]) -> list[str]:
    """The sections of the report that come from the timeline."""
    return [
        "## Kernels\n",
        _kernel_table(analysis),
        "Medians over the queued runs; start counts from the first kernel of a run. The last two "
        "columns come from the host-paced runs.\n",
        *_overlap_section(figures),
        "## Gaps\n",
        _gap_section(analysis, figures),
        "## Launch overhead\n",
        _launch_section(figures),
    ]


def _kernel_table(analysis: Analysis) -> str:
    rows = []
    for leaf, label in enumerate(analysis.shape.leaves):
        f = kernel_figures(analysis, leaf)
        times = analysis.durations(leaf)
        extent = f"{min(times) / 1e3:.2f} to {max(times) / 1e3:.2f} µs" if times else MISSING
        where = (f.get("stream"), microseconds(f.get("start_us")), microseconds(_median(times)))
        sizes = [" x ".join(map(str, f[key])) if f.get(key) else None for key in ("grid", "block")]
        used = (f.get("registers"), f.get("shared_bytes"))
        launch = [microseconds(f.get(key)) for key in ("launch_call_us", "launch_to_start_us")]
        rows.append((label, *where, extent, *sizes, *used, *launch))
    header = (
        *("kernel", "stream", "start", "duration", "range", "grid", "block", "registers"),
        *("shared bytes", "launch call", "launch to start"),
    )
    return table(header, rows)


def _overlap_section(figures: dict[str, Any]) -> list[str]:
    if not figures["overlap"]:
        return ["## Overlap\n", "No stages run concurrently, so there is no overlap to achieve.\n"]
    rows = []
    for f in figures["overlap"]:
        timed = zip(f["members"], map(microseconds, f["member_us"]), strict=True)
        members = ", ".join(map(" ".join, timed))
        times = [microseconds(f[key]) for key in ("busy_us", "overlap_us", "possible_us")]
        percent = f["overlap_percent"]
        achieved = MISSING if percent is None else f"{percent:.0f} %"
        rows.append((f["group"], members, *times, achieved))
    parts = [
        "## Overlap\n",
        table(("group", "members", "group busy", "overlap", "possible", "achieved"), rows),
        "Overlap is the time in which at least two members ran; the percentage is of the longest "
        "overlap that members of these lengths could have (for two members, the shorter one). A "
        "member that shares the GPU takes longer than alone, so compare the group's own time "
        "too.\n",
        "## Unexpected serialisation\n",
        _serial_list(figures["serialised"], "enqueued ahead"),
    ]
    if "host_paced" in figures:
        parts.append(_serial_list(figures["host_paced"]["serialised"], "at the pace of the host"))
    return parts


def _serial_list(found: list[dict[str, Any]], how: str) -> str:
    if not found:
        return f"Runs {how}: none; every pair shared at least {SERIAL_BELOW:.0%} of the shorter.\n"
    lines = [
        f"- Runs {how}, {s['group']}: **{s['first']}** then **{s['second']}** in {s['runs']} of "
        f"{s['of']} runs (cause: {s['cause']}): {s['reason']}."
        for s in found
    ]
    return "\n".join(lines) + "\n"


def _gap_section(analysis: Analysis, figures: dict[str, Any]) -> str:
    run = typical(analysis.queued)
    rows = []
    for start, end in sorted(run.gaps, key=lambda gap: gap[0] - gap[1])[:_MOST_GAPS]:
        if end - start < _MIN_GAP_NS:
            continue
        ended = [p for p in run.launches if p.activity.end <= start]
        begun = [p for p in run.launches if p.activity.start >= end]
        before = max(ended, key=lambda p: p.activity.end)
        after = min(begun, key=lambda p: p.activity.start)
        late = after.call.end > start
        cause = "launched late by the host" if late else "dependency or event on the GPU"
        names = [launch_label(analysis.shape, p) for p in (before, after)]
        rows.append((microseconds((end - start) / 1e3), *names, cause))
    idle, span = figures["idle_us"], figures["span_us"]
    text = (
        f"The GPU idles {microseconds(idle)} of the {microseconds(span)} of a queued run "
        f"({idle / span:.1%}, medians)."
    )
    if not rows:
        return f"{text} No single gap of the typical run is longer than {_MIN_GAP_NS} ns.\n"
    header = ("gap", "after", "before", "likely cause")
    return f"{text} The longest gaps of the typical run:\n\n" + table(header, rows)


def _launch_section(figures: dict[str, Any]) -> str:
    if "host_paced" not in figures:
        return "No host-paced runs were recorded.\n"
    paced, queued = figures["host_paced"], figures["span_us"]
    host = paced["host_us"]
    rows = [
        ("host time of one run", microseconds(host), "Python and CUDA calls until all is enqueued"),
        ("of it inside CUDA calls", microseconds(paced["api_us"]), "the rest is Python"),
        ("GPU span, host-paced", microseconds(paced["span_us"]), "first kernel start to last end"),
        ("GPU span, queued", microseconds(queued), "the same without waiting for the host"),
    ]
    verdict = (
        f"Launching takes longer than the work: without a CUDA graph a run costs about "
        f"{microseconds(host)} instead of {microseconds(queued)}.\n"
        if host > queued
        else f"Launching hides behind the work ({number(100 * host / queued)} % of it).\n"
    )
    note = "The profiler adds time to every host call, so these are upper bounds.\n"
    return table(("figure", "median", "meaning"), rows) + f"\n{verdict}\n{note}"


def launch_label(shape: Outline, launch: Launch) -> str:
    """Stage name of a launch, or a short form of the kernel's own name."""
    if launch.leaf is not None:
        return shape.leaves[launch.leaf]
    return textwrap.shorten(launch.activity.name.split("(")[0], 40, placeholder="…")
