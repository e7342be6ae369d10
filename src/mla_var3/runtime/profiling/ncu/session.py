"""One run under Nsight Compute: prepare in this process, profile in another, read the report.

Also the parts of the reports that annotation and ncu mode share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.environment import environment
from mla_var3.runtime.markdown import byte_count, microseconds, number, table, write_csv
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, common
from mla_var3.runtime.profiling.bottleneck import find_opportunities, root_cause
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.lock import ClockState, announce_clocks
from mla_var3.runtime.profiling.ncu import driver, reader
from mla_var3.runtime.profiling.target import TargetSpec
from mla_var3.runtime.profiling.timeline.analysis import outline
from mla_var3.runtime.stage import by_unique_name
from mla_var3.runtime.workflow import Prepared, RunOptions

AGREEMENT = 0.10
"""Relative difference between event time and profiler's duration that needs no explanation."""


@dataclass
class Session:
    """Everything a report needs."""

    mode: NsightProfType
    prepared: Prepared
    folder: Path
    tool: driver.NcuTool
    collection: driver.Collection
    clocks: ClockState
    profiles: list[reader.StageProfile]
    event_us: dict[str, float] = field(default_factory=dict)
    not_disassembled: str | None = None

    def __post_init__(self) -> None:
        rates = self.device.peak_rates(self.dtype)
        for kernel, measured in zip(self.prepared.stage.kernels(), self.profiles, strict=True):
            measured.roofline_us = kernel.predict_us(*rates)
            measured.algorithm_bytes = kernel.cost().bytes

    @property
    def report_path(self) -> Path:
        return self.folder / "report.ncu-rep"

    @property
    def device(self) -> DeviceSpec:
        return self.prepared.require_device()

    @property
    def dtype(self) -> str:
        return plan_dtype(self.prepared.plan)


def profile(
    mode: NsightProfType,
    plan: KernelPlan,
    options: RunOptions,
    *,
    metrics: Sequence[str] | None,
    runs: int,
) -> Session:
    """Tune, check, time by events, then profile every stage under Nsight Compute."""
    import torch

    tool = driver.find_ncu()
    driver.load_ncu_report()  # fails before minutes of tuning, not after
    clocks = announce_clocks(environment())
    count = options.bench_runs or runs
    with common.measuring(mode, plan, options) as (prepared, made):
        folder = made.resolve()
        target_spec = TargetSpec.of(prepared.plan, prepared.stage, count)
        event_us = {
            name: time_gpu(kernel.launch).median_us
            for name, kernel in by_unique_name(prepared.stage.kernels()).items()
        }
        not_disassembled = common.write_compiled(
            prepared.stage.kernels(), prepared.require_device().target, folder
        )
        # The profiled program needs the GPU memory.
        prepared.inputs, prepared.stage = (), target_spec.build_stage(prepared.plan, "meta")
        torch.cuda.empty_cache()
        options.progress("profile", 0, 1, f"{prepared.plan.name} under ncu {tool.version}")
        collection = driver.collect(tool, folder, target_spec, metrics)
        options.progress("profile", 1, 1, "done")
    launches = reader.read_launches(folder / "report.ncu-rep")
    profiles = reader.stage_profiles(launches, list(event_us), count)
    measured = (clocks, profiles, event_us, not_disassembled)
    return Session(mode, prepared, folder, tool, collection, *measured)


def make_result(session: Session) -> ProfileResult:
    """The result of a session, with its record; reports are not written yet."""
    stage, device, dtype = session.prepared.stage, session.device, session.dtype
    stages = []
    for kernel, measured in zip(stage.kernels(), session.profiles, strict=True):
        time_us, spread_us = measured.figures["time_us"], measured.spread_us
        figures = common.stage_figures(kernel, device, dtype, time_us, spread_us, measured.name)
        figures.extra = {
            **measured.figures,
            "function": measured.main.function,
            "stalls": measured.stalls,
            "event_us": session.event_us.get(measured.name),
            "bottleneck": measured.bound.label,
            "issues": [issue._asdict() for issue in measured.issues],
        }
        stages.append(figures)
    total_us = sum(measured.time_us for measured in session.profiles)
    total = common.stage_figures(stage, device, dtype, total_us)
    total.extra = reader.combine_figures([measured.figures for measured in session.profiles])
    result = common.measured_result(
        session.mode, session.prepared, total, stages, session.folder, session.clocks
    )
    result.record["not_disassembled"] = session.not_disassembled
    result.record["profiler"] = {
        "tool": f"ncu {session.tool.version}",
        "collector": session.collection.collector,
        "collector_note": session.collection.note,
        "metrics_not_available": session.collection.dropped,
        "clock_control": driver.CLOCK_CONTROL,
        "runs": session.profiles[0].runs,
    }
    return result


def contract(session: Session) -> str:
    """The compact result: configuration, stages, bottleneck and what to try first."""
    kernel, params = session.prepared.plan.kernel_id, session.prepared.plan.params()
    shown = {k: v for k, v in params.items() if k in ("b", "s", "t", "dtype")}
    stages = session.profiles
    rows = []
    for stage in stages:
        keys = ("tensor_pct", "dram_pct", "occupancy_pct")
        shares = [f"{stage.figures[k]:.1f}" if k in stage.figures else None for k in keys]
        found = (stage.bound.label, stage.key_issue)
        rows.append((stage.name, f"{stage.time_us:.2f}", *shares, *found))
    longest = max(stages, key=lambda stage: stage.time_us)
    lines = [
        f"{i}. {o.name} ({o.stage}) — est. up to {o.gain_pct:.0f}% gain — trigger: [{o.trigger}]"
        for i, o in enumerate(find_opportunities(stages), start=1)
    ]
    header = ("Stage", "Duration (us)", "TC%", "DRAM%", "Occ%", "Bottleneck", "Key Issue")
    return "\n".join(
        [
            f"## Profile: {kernel.design} {kernel.version}\n",
            "### Configuration\n",
            table(tuple(shown), [tuple(shown.values())]),
            "### Stages\n",
            table(header, rows),
            f"### Bottleneck: {longest.bound.label}\n",
            f"Root cause: {root_cause(longest)}\n",
            f"Focus: {longest.bound.focus}.\n",
            "### Top 3 Opportunities (ranked by estimated impact)\n",
            *(lines or ["None: no rule found more than 1% to gain."]),
            "\nGains are upper bounds from one figure each, in percent of the whole; they overlap "
            "and do not add up.\n",
        ]
    )


def issues_table(session: Session) -> str:
    """Every figure outside its healthy range."""
    rows = [
        (stage.name, issue.name, issue.trigger, issue.healthy, issue.hint)
        for stage in session.profiles
        for issue in stage.issues
    ]
    if not rows:
        return "All figures are in their healthy ranges.\n"
    return table(("stage", "issue", "measured", "healthy", "hint"), rows)


def write_roofline(session: Session, result: ProfileResult) -> None:
    """Write `roofline_metrics.csv`."""
    device, dtype = session.device, session.dtype
    tflops, gbps = device.peak_tflops(dtype), device.peak_gbps
    rows = [
        {
            "stage": stage.name,
            "measured_us": stage.time_us,
            "roofline_us": stage.predicted_us,
            "of_roofline_pct": stage.of_roofline_pct,
            "gflop": stage.flops / 1e9,
            "mbyte": stage.bytes / 1e6,
            "intensity_flop_per_byte": stage.intensity,
            "ridge_flop_per_byte": device.ridge_point(dtype),
            "achieved_tflops": stage.tflops,
            "peak_tflops": tflops,
            "of_peak_tflops_pct": 100 * stage.tflops / tflops if stage.tflops else None,
            "achieved_gbps": stage.gbps,
            "peak_gbps": gbps,
            "of_peak_gbps_pct": 100 * stage.gbps / gbps if stage.gbps else None,
            "event_us": stage.extra.get("event_us"),
        }
        for stage in result.rows
    ]
    cells = [[f"{v:.6g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    write_csv(session.folder / "roofline_metrics.csv", list(rows[0]), cells)


def roofline_table(session: Session, result: ProfileResult) -> str:
    """Measured against roofline, stage by stage and for the whole."""
    device, dtype = session.device, session.dtype
    return stage_markdown(result) + (
        f"\nTFLOP/s and GB/s are what the algorithm needs divided by the duration. The roofline "
        f"takes the vendor's peaks, {device.peak_tflops(dtype):.0f} TFLOP/s and "
        f"{device.peak_gbps:.0f} GB/s, ridge point {device.ridge_point(dtype):.0f} FLOP/byte.\n"
    )


def metrics_table(result: ProfileResult) -> str:
    """Nsight Compute's figures, one column per stage."""
    stages = result.rows
    rows = []
    for figure in reader.FIGURES:
        values = [stage.extra.get(figure.key) for stage in stages]
        if figure.per_kernel and len(stages) > 1:
            values[-1] = None  # the whole
        if figure.label and any(value is not None for value in values):
            rows.append((figure.label, *(_cell(value, figure.unit) for value in values)))
    return table(("metric", *(stage.name for stage in stages)), rows)


def _cell(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "B":
        return byte_count(value)
    if unit == "%":
        return f"{value:.1f}%"
    text = f"{value:.0f}" if float(value).is_integer() else number(value)
    return f"{text} {unit}" if unit in ("GB/s", "MHz") else text


def whole_note(session: Session) -> str:
    """What the row of the whole means."""
    is_concurrent = bool(outline(session.prepared.stage).groups)
    if len(session.profiles) < 2 and not is_concurrent:
        return ""
    text = (
        "The whole is the sum of its stages: the profiler runs one kernel at a time. Percentages "
        "of the whole are averages weighted by duration.\n"
    )
    if is_concurrent:
        text += (
            "\nSome stages are meant to run at the same time. The profiler serialises them, so "
            "their overlap does not show here and the sum is longer than the real run: use "
            "`--prof_type=nsys`.\n"
        )
    return text


def timer_note(result: ProfileResult) -> str:
    """The profiler's duration beside the time by CUDA events, and why they differ."""
    parts, differences = [], [0.0]
    for stage in result.stages:
        event, clock = stage.extra.get("event_us"), stage.extra.get("sm_clock_mhz")
        if event and stage.time_us:
            at = f" at {clock:.0f} MHz" if clock else ""
            differences.append(stage.time_us / event - 1)
            parts.append(
                f"{stage.name} took {microseconds(stage.time_us)} under the profiler{at}, "
                f"{microseconds(event)} by CUDA events ({differences[-1]:+.1%})."
            )
    if max(map(abs, differences)) > AGREEMENT:
        parts.append(
            "Both start with cold caches. Events also cover the launch of the kernel (a few "
            "microseconds, most of a short one); the profiler pauses between its passes, so the "
            "GPU may run at another clock than in back-to-back runs."
        )
    return " ".join(parts) + "\n" if parts else ""


def method_table(session: Session) -> str:
    """How the figures were made."""
    collection = session.collection
    how = collection.collector
    if collection.collector == "ncu":
        how = "ncu with NVTX ranges" + (f" ({collection.note})" if collection.note else "")
    rows = [
        ("profiler", f"Nsight Compute {session.tool.version}"),
        ("collected by", how),
        ("runs", f"{session.profiles[0].runs} per stage, medians; caches flushed before each pass"),
        ("clocks", f"{session.clocks.describe()}; ncu --clock-control {driver.CLOCK_CONTROL}"),
    ]
    if collection.dropped:
        rows.append(("metrics not available", ", ".join(collection.dropped)))
    return table(("", ""), rows)


def method_sections(session: Session, result: ProfileResult) -> list[str]:
    """The end of both reports: method, timers, tiling and check."""
    return [
        "## How it was measured\n",
        method_table(session),
        timer_note(result),
        common.compiled_note(session.prepared.stage),
        *common.closing_sections(result, session.prepared.stage),
    ]
