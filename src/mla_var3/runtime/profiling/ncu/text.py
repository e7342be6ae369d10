"""The parts of the reports that annotation and ncu mode share."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.markdown import byte_count, microseconds, number, table
from mla_var3.runtime.profiling.bottleneck import diagnose, find_opportunities, root_cause
from mla_var3.runtime.profiling.ncu.session import Session, measurements, total_stages

if TYPE_CHECKING:
    from mla_var3.runtime.profiling import ProfileResult, StageFigures

AGREEMENT = 0.10
"""Relative difference between event time and profiler's duration that needs no explanation."""

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("tensor_pct", "tensor core utilisation", "%"),
    ("dram_pct", "DRAM throughput", "%"),
    ("dram_gbps", "DRAM throughput", "GB/s"),
    ("dram_read_bytes", "DRAM read", "bytes"),
    ("dram_write_bytes", "DRAM written", "bytes"),
    ("l2_pct", "L2 throughput", "%"),
    ("l2_hit_pct", "L2 hit rate", "%"),
    ("l1_hit_pct", "L1 hit rate", "%"),
    ("sm_pct", "SM throughput", "%"),
    ("issue_pct", "issue slots busy", "%"),
    ("occupancy_pct", "achieved occupancy", "%"),
    ("occupancy_limit_pct", "theoretical occupancy", "%"),
    ("registers", "registers per thread", ""),
    ("shared_static_bytes", "static shared memory per block", "bytes"),
    ("shared_dynamic_bytes", "dynamic shared memory per block", "bytes"),
    ("local_bytes", "local spilling", "bytes"),
    ("waves_per_sm", "waves per SM", ""),
    ("grid", "blocks", ""),
    ("threads", "threads per block", ""),
    ("sm_clock_mhz", "SM clock while profiled", "MHz"),
)
_PER_KERNEL = frozenset(
    (
        *("occupancy_limit_pct", "registers", "shared_static_bytes", "shared_dynamic_bytes"),
        *("waves_per_sm", "grid", "threads"),
    )
)
"""Rows that mean nothing for several kernels together."""


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file; None becomes an empty cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    write_atomic(path, buffer.getvalue())


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def contract(session: Session) -> str:
    """The compact result: configuration, stages, bottleneck and what to try first."""
    kernel, params = session.prepared.plan.kernel_id, session.prepared.plan.params()
    shown = {k: v for k, v in params.items() if k in ("b", "s", "t", "dtype")}
    stages = measurements(session)
    rows = []
    for stage in stages:
        found, figures = diagnose(stage), stage.figures
        rows.append(
            (
                stage.name,
                f"{stage.time_us:.2f}",
                _percent(figures.get("tensor_pct")),
                _percent(figures.get("dram_pct")),
                _percent(figures.get("occupancy_pct")),
                found.bound.label,
                found.key_issue,
            )
        )
    longest = max(stages, key=lambda stage: stage.time_us)
    bound = diagnose(longest).bound
    chances = find_opportunities(stages)
    lines = [
        f"{i}. {o.name} ({o.stage}) — est. up to {o.gain_pct:.0f}% gain — trigger: [{o.trigger}]"
        for i, o in enumerate(chances, start=1)
    ]
    return "\n".join(
        [
            f"## Profile: {kernel.design} {kernel.version}\n",
            "### Configuration\n",
            table(tuple(shown), [tuple(shown.values())]),
            "### Stages\n",
            table(
                ("Stage", "Duration (us)", "TC%", "DRAM%", "Occ%", "Bottleneck", "Key Issue"), rows
            ),
            f"### Bottleneck: {bound.label}\n",
            f"Root cause: {root_cause(longest)}\n",
            f"Focus: {bound.focus}.\n",
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
        for issue in diagnose(stage).issues
    ]
    if not rows:
        return "All figures are in their healthy ranges.\n"
    return table(("stage", "issue", "measured", "healthy", "hint"), rows)


def roofline_rows(
    session: Session, result: ProfileResult
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Header and rows of `roofline_metrics.csv`."""
    device, dtype = session.device, session.dtype
    tflops, gbps = device.peak_tflops(dtype), device.peak_gbps
    header = [
        *("stage", "measured_us", "roofline_us", "of_roofline_pct", "gflop", "mbyte"),
        *("intensity_flop_per_byte", "ridge_flop_per_byte", "achieved_tflops", "peak_tflops"),
        *("of_peak_tflops_pct", "achieved_gbps", "peak_gbps", "of_peak_gbps_pct", "event_us"),
    ]
    rows: list[tuple[object, ...]] = []
    for stage in total_stages(result):
        rows.append(
            (
                stage.name,
                _digits(stage.time_us),
                _digits(stage.predicted_us),
                _digits(_of_roofline(stage)),
                _digits(stage.flops / 1e9),
                _digits(stage.bytes / 1e6),
                _digits(stage.flops / stage.bytes if stage.bytes else None),
                _digits(device.ridge_point(dtype)),
                _digits(stage.tflops),
                tflops,
                _digits(100 * stage.tflops / tflops if stage.tflops is not None else None),
                _digits(stage.gbps),
                gbps,
                _digits(100 * stage.gbps / gbps if stage.gbps is not None else None),
                _digits(stage.extra.get("event_us")),
            )
        )
    return header, rows


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _of_roofline(stage: StageFigures) -> float | None:
    if not stage.time_us or not stage.predicted_us:
        return None
    return 100 * stage.predicted_us / stage.time_us


def roofline_table(session: Session, result: ProfileResult) -> str:
    """Measured against roofline, stage by stage and for the whole."""
    device, dtype = session.device, session.dtype
    rows = []
    for stage in total_stages(result):
        tflops, gbps = stage.tflops or 0.0, stage.gbps or 0.0
        share = _of_roofline(stage)
        rows.append(
            (
                stage.name,
                microseconds(stage.time_us),
                None if stage.spread_us is None else f"± {microseconds(stage.spread_us)}",
                microseconds(stage.predicted_us),
                None if share is None else f"{share:.0f}%",
                number(tflops),
                f"{100 * tflops / device.peak_tflops(dtype):.1f}%",
                number(gbps),
                f"{100 * gbps / device.peak_gbps:.1f}%",
                number(stage.flops / stage.bytes if stage.bytes else None),
            )
        )
    header = (
        *("stage", "duration", "spread", "roofline", "of roofline", "TFLOP/s", "of peak"),
        *("GB/s", "of peak", "FLOP/byte"),
    )
    return table(header, rows) + (
        f"\nTFLOP/s and GB/s are what the algorithm needs divided by the duration. The roofline "
        f"takes the vendor's peaks, {device.peak_tflops(dtype):.0f} TFLOP/s and "
        f"{device.peak_gbps:.0f} GB/s, ridge point {device.ridge_point(dtype):.0f} FLOP/byte.\n"
    )


def metrics_table(result: ProfileResult) -> str:
    """Nsight Compute's figures, one column per stage."""
    stages = total_stages(result)
    rows = []
    for key, label, unit in _ROWS:
        cells = []
        for stage in stages:
            value = stage.extra.get(key)
            if stage is result.total and len(stages) > 1 and key in _PER_KERNEL:
                value = None
            cells.append(_cell(value, unit))
        if any(cell is not None for cell in cells):
            rows.append((label, *cells))
    return table(("metric", *(stage.name for stage in stages)), rows)


def _cell(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "bytes":
        return byte_count(value)
    if unit == "%":
        return f"{value:.1f}%"
    text = f"{value:.0f}" if float(value).is_integer() else number(value)
    return f"{text} {unit}".strip()


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


def timer_table(result: ProfileResult) -> str:
    """The profiler's duration beside the time by CUDA events, and why they differ."""
    rows, far = [], []
    for stage in result.stages:
        event = stage.extra.get("event_us")
        if not event or not stage.time_us:
            continue
        difference = stage.time_us / event - 1
        clock = stage.extra.get("sm_clock_mhz")
        rows.append(
            (stage.name, microseconds(stage.time_us), microseconds(event), f"{difference:+.1%}")
        )
        if abs(difference) > AGREEMENT:
            at = f" at an SM clock of {clock:.0f} MHz" if clock else ""
            far.append(
                f"{stage.name}: {microseconds(abs(stage.time_us - event))} apart; it was profiled"
                f"{at}."
            )
    if not rows:
        return "Not timed by events.\n"
    text = table(("stage", "ncu duration", "event time", "difference"), rows)
    if not far:
        return f"{text}\nThey agree within {AGREEMENT:.0%}.\n"
    return (
        f"{text}\n{' '.join(far)} Both start with cold caches. Events also cover the launch of the "
        "kernel (a few microseconds, most of a short one); the profiler leaves pauses between its "
        "passes, so the GPU may run at another clock than in back-to-back runs.\n"
    )


def method_table(session: Session) -> str:
    """How the figures were made."""
    collection = session.collection
    how = collection.collector
    if collection.collector == "ncu":
        how = "ncu driven with NVTX ranges" + (f" ({collection.note})" if collection.note else "")
    rows = [
        ("profiler", f"Nsight Compute {session.tool.version}"),
        ("collected by", how),
        ("runs", f"{session.profiles[0].runs} per stage, medians; caches flushed before each pass"),
        ("clocks", f"{session.clocks.describe()}; ncu --clock-control {session.clock_control}"),
    ]
    if collection.dropped:
        rows.append(("metrics not available", ", ".join(collection.dropped)))
    return table(("", ""), rows)
