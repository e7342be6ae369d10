"""The parts of the reports that annotation and ncu mode share."""

from __future__ import annotations

from mla_var3.runtime.markdown import byte_count, microseconds, number, table, write_csv
from mla_var3.runtime.profiling import ProfileResult
from mla_var3.runtime.profiling.bottleneck import find_opportunities, root_cause
from mla_var3.runtime.profiling.common import closing_sections, compiled_note
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.ncu.driver import CLOCK_CONTROL
from mla_var3.runtime.profiling.ncu.reader import FIGURES
from mla_var3.runtime.profiling.ncu.session import Session, measurements

AGREEMENT = 0.10
"""Relative difference between event time and profiler's duration that needs no explanation."""


def contract(session: Session) -> str:
    """The compact result: configuration, stages, bottleneck and what to try first."""
    kernel, params = session.prepared.plan.kernel_id, session.prepared.plan.params()
    shown = {k: v for k, v in params.items() if k in ("b", "s", "t", "dtype")}
    stages = measurements(session)
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
        for stage in measurements(session)
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
    for figure in FIGURES:
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
    if len(session.profiles) < 2 and not session.is_concurrent:
        return ""
    text = (
        "The whole is the sum of its stages: the profiler runs one kernel at a time. Percentages "
        "of the whole are averages weighted by duration.\n"
    )
    if session.is_concurrent:
        text += (
            "\nSome stages are meant to run at the same time. The profiler serialises them, so "
            "their overlap does not show here and the sum is longer than the real run: use "
            "`--prof_type=nsys`.\n"
        )
    return text


def timer_note(result: ProfileResult) -> str:
    """The profiler's duration beside the time by CUDA events, and why they differ."""
    parts, explain = [], False
    for stage in result.stages:
        event = stage.extra.get("event_us")
        if event and stage.time_us:
            clock = stage.extra.get("sm_clock_mhz")
            at = f" at {clock:.0f} MHz" if clock else ""
            difference = stage.time_us / event - 1
            explain = explain or abs(difference) > AGREEMENT
            parts.append(
                f"{stage.name} took {microseconds(stage.time_us)} under the profiler{at}, "
                f"{microseconds(event)} by CUDA events ({difference:+.1%})."
            )
    if explain:
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
        ("clocks", f"{session.clocks.describe()}; ncu --clock-control {CLOCK_CONTROL}"),
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
        compiled_note(session.prepared.stage),
        *closing_sections(result, session.prepared.stage),
    ]
