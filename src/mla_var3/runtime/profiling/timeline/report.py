"""The figures of a timeline for records, and its report in markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.markdown import MISSING, microseconds, number, table
from mla_var3.runtime.profiling.timeline.analysis import (
    Analysis,
    Iteration,
    group_overlap,
    median_us,
)
from mla_var3.runtime.profiling.timeline.plot import piece_label
from mla_var3.runtime.profiling.timeline.serial import SERIAL_BELOW, Serialisation, serialisations

_MIN_GAP_NS = 500
"""Shorter pauses between two kernels are the hardware's own."""
_MOST_GAPS = 8


def kernel_figures(analysis: Analysis, leaf: int) -> dict[str, Any]:
    """What the timeline says about one kernel: medians over the queued runs."""
    pieces = [piece for run in analysis.queued if (piece := run.piece(leaf)) is not None]
    if not pieces:
        return {"launches": 0}
    one = pieces[0].activity
    host = [piece for run in analysis.host_paced if (piece := run.piece(leaf)) is not None]
    return {
        "launches": len(pieces),
        "stream": one.stream,
        "grid": one.grid,
        "block": one.block,
        "registers": one.registers,
        "shared_bytes": one.shared_bytes,
        "start_us": analysis.median_us(lambda run: _start(run, leaf)),
        "launch_call_us": _median([piece.launch.duration for piece in host or pieces]),
        "launch_to_start_us": _median([p.activity.start - p.launch.start for p in host]),
    }


def _start(run: Iteration, leaf: int) -> int | None:
    piece = run.piece(leaf)
    return None if piece is None else piece.activity.start - run.span[0]


def _median(values_ns: Sequence[int]) -> float | None:
    return statistics.median(values_ns) / 1e3 if values_ns else None


def overlap_figures(analysis: Analysis, runs: list[Iteration]) -> list[dict[str, Any]]:
    """The overlap of every concurrent group: medians over some runs."""
    figures = []
    for group in analysis.shape.groups:
        overlaps = [group_overlap(run, group) for run in runs]
        shares = [overlap.share for overlap in overlaps if overlap.share is not None]
        names = [member.name for member in group.members]
        figures.append(
            {
                "group": group.name,
                "members": names,
                "member_us": [
                    _median([overlap.member_ns[i] for overlap in overlaps])
                    for i in range(len(names))
                ],
                "overlap_us": _median([overlap.overlap_ns for overlap in overlaps]),
                "possible_us": _median([overlap.possible_ns for overlap in overlaps]),
                "overlap_percent": 100 * statistics.median(shares) if shares else None,
                "busy_us": _median([overlap.busy_ns for overlap in overlaps]),
                "pairs_us": {
                    f"{names[i]} + {names[j]}": _median([o.pairs[i, j] for o in overlaps])
                    for i in range(len(names))
                    for j in range(i + 1, len(names))
                },
            }
        )
    return figures


def timeline_figures(analysis: Analysis, spec: DeviceSpec) -> dict[str, Any]:
    """Everything that goes into the record beside the times of the stages."""
    found = {
        "queued_runs": len(analysis.queued),
        "host_paced_runs": len(analysis.host_paced),
        "overlap": overlap_figures(analysis, analysis.queued),
        "serialised": [vars(s) for s in serialisations(analysis, analysis.queued, spec)],
        "idle_us": analysis.median_us(lambda run: sum(b - a for a, b in run.gaps())),
    }
    if analysis.host_paced:
        runs = analysis.host_paced
        found["host_paced"] = {
            "span_us": median_us(runs, lambda run: run.span_ns),
            "host_us": median_us(runs, lambda run: run.host.duration),
            "api_us": median_us(runs, lambda run: run.api_ns),
            "idle_us": median_us(runs, lambda run: sum(b - a for a, b in run.gaps())),
            "overlap": overlap_figures(analysis, runs),
            "serialised": [vars(s) for s in serialisations(analysis, runs, spec)],
        }
    return found


def timeline_sections(analysis: Analysis, spec: DeviceSpec) -> list[str]:
    """The sections of the report that come from the timeline."""
    return [
        "## Kernels\n",
        _kernel_table(analysis),
        "Medians over the queued runs; start counts from the first kernel of a run. The last two "
        "columns come from the host-paced runs.\n",
        *_overlap_section(analysis, spec),
        "## Gaps\n",
        _gap_section(analysis),
        "## Launch overhead\n",
        _launch_section(analysis),
    ]


def _kernel_table(analysis: Analysis) -> str:
    rows = []
    for leaf, label in enumerate(analysis.shape.leaves):
        f = kernel_figures(analysis, leaf)
        times = [p.activity.duration for run in analysis.queued if (p := run.piece(leaf))]
        spread = f"{min(times) / 1e3:.2f} to {max(times) / 1e3:.2f} µs" if times else MISSING
        rows.append(
            (
                label,
                f.get("stream"),
                microseconds(f.get("start_us")),
                microseconds(_median(times)),
                spread,
                _sizes(f.get("grid")),
                _sizes(f.get("block")),
                f.get("registers"),
                f.get("shared_bytes"),
                microseconds(f.get("launch_call_us")),
                microseconds(f.get("launch_to_start_us")),
            )
        )
    return table(
        ("kernel", "stream", "start", "duration", "range", "grid", "block", "registers",
         "shared bytes", "launch call", "launch to start"),
        rows,
    )  # fmt: skip


def _sizes(values: tuple[int, int, int] | None) -> str | None:
    return None if values is None else " x ".join(map(str, values))


def _overlap_section(analysis: Analysis, spec: DeviceSpec) -> list[str]:
    if not analysis.shape.groups:
        return ["## Overlap\n", "No stage runs concurrent kernels, so there is none to achieve.\n"]
    parts = [
        "## Overlap\n",
        _overlap_table(overlap_figures(analysis, analysis.queued)),
        "Overlap is the time in which at least two members ran; the percentage is of the longest "
        "that members of these lengths could have had (for two members, the shorter one). A member "
        "that shares the GPU takes longer than alone, so compare the group's own time too.\n",
        "## Unexpected serialisation\n",
    ]
    queued = serialisations(analysis, analysis.queued, spec)
    parts.append(_serial_list(queued, "enqueued ahead"))
    if analysis.host_paced:
        paced = serialisations(analysis, analysis.host_paced, spec)
        parts.append(_serial_list(paced, "at the pace of the host"))
    return parts


def _overlap_table(figures: list[dict[str, Any]]) -> str:
    rows = []
    for f in figures:
        percent = f["overlap_percent"]
        members = ", ".join(
            f"{name} {microseconds(time)}"
            for name, time in zip(f["members"], f["member_us"], strict=True)
        )
        rows.append(
            (
                f["group"],
                members,
                microseconds(f["busy_us"]),
                microseconds(f["overlap_us"]),
                microseconds(f["possible_us"]),
                MISSING if percent is None else f"{percent:.0f} %",
            )
        )
    return table(("group", "members", "group busy", "overlap", "possible", "achieved"), rows)


def _serial_list(found: list[Serialisation], how: str) -> str:
    if not found:
        return (
            f"Runs {how}: none; every two members shared at least {SERIAL_BELOW:.0%} of the "
            "shorter.\n"
        )
    lines = [
        f"- Runs {how}, {s.group}: **{s.first}** then **{s.second}** in {s.runs} of {s.of} runs "
        f"(cause: {s.cause}): {s.reason}."
        for s in found
    ]
    return "\n".join(lines) + "\n"


def _gap_section(analysis: Analysis) -> str:
    run = analysis.typical()
    rows = []
    for start, end in sorted(run.gaps(), key=lambda gap: gap[0] - gap[1])[:_MOST_GAPS]:
        if end - start < _MIN_GAP_NS:
            continue
        before = max(
            (p for p in run.pieces if p.activity.end <= start), key=lambda p: p.activity.end
        )
        after = min(
            (p for p in run.pieces if p.activity.start >= end), key=lambda p: p.activity.start
        )
        late = after.launch.end > start
        rows.append(
            (
                microseconds((end - start) / 1e3),
                piece_label(analysis.shape, before),
                piece_label(analysis.shape, after),
                "launched late by the host" if late else "dependency or event on the GPU",
            )
        )
    idle = analysis.median_us(lambda r: sum(b - a for a, b in r.gaps())) or 0.0
    span = analysis.median_us(lambda r: r.span_ns) or 0.0
    share = f"{idle / span:.1%}" if span else MISSING
    text = (
        f"The GPU idles {microseconds(idle)} of the {microseconds(span)} of a queued run ({share}, "
        "medians)."
    )
    if not rows:
        return f"{text} No single gap of the typical run is longer than {_MIN_GAP_NS} ns.\n"
    return f"{text} The longest gaps of the typical run:\n\n" + table(
        ("gap", "after", "before", "likely cause"), rows
    )


def _launch_section(analysis: Analysis) -> str:
    runs = analysis.host_paced
    if not runs:
        return "No host-paced runs were recorded.\n"
    span = median_us(runs, lambda run: run.span_ns) or 0.0
    queued = analysis.median_us(lambda run: run.span_ns) or 0.0
    host = median_us(runs, lambda run: run.host.duration) or 0.0
    api = median_us(runs, lambda run: run.api_ns)
    rows = [
        ("host time of one run", microseconds(host), "Python and CUDA calls until all is enqueued"),
        ("of it inside CUDA calls", microseconds(api), "the rest is Python"),
        ("GPU span, host-paced", microseconds(span), "first kernel start to last kernel end"),
        ("GPU span, queued", microseconds(queued), "the same without waiting for the host"),
    ]
    verdict = (
        f"Launching takes longer than the work: without a CUDA graph a run costs about "
        f"{microseconds(host)} instead of {microseconds(queued)}.\n"
        if host > queued
        else f"Launching hides behind the work ({number(100 * host / queued)} % of it).\n"
    )
    note = "The profiler itself adds to every host call, so these are upper bounds.\n"
    return table(("figure", "median", "meaning"), rows) + "\n" + verdict + "\n" + note
