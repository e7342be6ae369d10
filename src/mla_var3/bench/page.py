"""A benchmark record as pages: markdown for programs, one self-contained HTML file for people."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from mla_var3.bench.analysis import BASIS_TEXT, ShapeGroup, doubts, shape_groups
from mla_var3.bench.plots import Plot
from mla_var3.bench.record import OK, OURS, PREDICTED, PROJECTION, BenchRecord, BenchRow
from mla_var3.bench.regression import Regression
from mla_var3.bench.template import PAGE
from mla_var3.runtime.markdown import front_matter, number, table

HEADERS = (
    "kernel", "µs", "spread", "end to end µs", "TFLOP/s", "GB/s", "relative error", "vs best",
)  # fmt: skip
_CHECKED = (
    "Every row is checked against the float32 reference first: ours within twice the error of the "
    "same computation in PyTorch, peers within 1 %. A row that fails is not timed."
)
_TIMED_ONCE = (
    "Times are CUDA-graph replays with a cold L2 cache, median; the spread is half the distance "
    "from the 10th to the 90th percentile."
)
_TIMED_IN_ROUNDS = (
    "Times are CUDA-graph replays with a cold L2 cache. All contenders of a shape are timed in "
    "several rounds, each starting elsewhere in the list; the figure is the median of the rounds' "
    "medians, the spread half the distance from their smallest 10th to their largest 90th "
    "percentile."
)
_PREDICTED = (
    "A predicted time is the larger of FLOPs over the compute rate and bytes over the memory rate "
    "of the device; stages that follow one another add up."
)
_END_TO_END = (
    "End to end adds the projections that a kernel leaves to others, taken the same way: query "
    "absorption and output up-projection for kernels on the latent cache, the former for "
    "mla_var6_plus, none for kernels on decompressed keys and values, whose decompression is "
    "taken as done."
)
_COUNTED = (
    "TFLOP/s and GB/s count what the algorithm needs, each input and output once, pairs hidden by "
    "the mask included."
)


_NAMED_SHAPES = 4
"""Of a reason that holds for several shapes, so many are named."""


def method(record: BenchRecord) -> list[str]:
    """How the figures of this record came about, sentence by sentence."""
    measured = [row for row in record.rows if row.kind != PREDICTED and row.status == OK]
    in_rounds = [row for row in measured if row.rounds_us]
    lines = [_PREDICTED] if record.predicted else []
    lines += [_CHECKED] if measured else []
    lines += [_TIMED_IN_ROUNDS] if in_rounds else []
    lines += [_TIMED_ONCE] if len(in_rounds) < len(measured) else []
    lines += [_END_TO_END] if any(row.end_to_end_us is not None for row in record.rows) else []
    rival = "faster pure path" if record.predicted and not measured else "fastest peer"
    return [*lines, _COUNTED, f"The last column is the time of the {rival} over the row's."]


def title_of(record: BenchRecord) -> str:
    """The heading of a report."""
    what = "predicted" if record.predicted else "measured"
    return f"MLA attention kernels, {what}: {record.suite}"


def circumstances_rows(record: BenchRecord) -> list[tuple[str, str]]:
    """The circumstances of a record, for a table of two columns."""
    env = record.environment
    gpu = env.get("gpu") or {}
    versions = ", ".join(f"{k} {v}" for k, v in (env.get("versions") or {}).items() if v)
    git = env.get("git") or {}
    commit = git.get("commit") or ""
    commit += " with local changes" if commit and git.get("dirty") else ""
    card = [f"driver {gpu['driver']}"] if gpu.get("driver") else []
    card += [f"power limit {gpu['power_limit_w']:g} W"] if gpu.get("power_limit_w") else []
    settings = ", ".join(f"{k} {v}" for k, v in record.settings.items())
    found = [
        ("device", ", ".join([*record.devices, *card]) or "none"),
        ("date", str(env.get("date") or "")),
        ("command", str(env.get("command") or "")),
        ("versions", versions),
        ("commit", commit),
        ("settings", settings),
    ]
    return [(name, value) for name, value in found if value]


def group_rows(group: ShapeGroup) -> list[BenchRow]:
    """The rows of a shape in the order to read them: fastest first, projections last."""
    timed = sorted(group.timed, key=group.figure)
    projections = [row for row in group.rows if row.source == PROJECTION and row.status == OK]
    return timed + projections


def cells(group: ShapeGroup, row: BenchRow) -> tuple[str, ...]:
    """One line of the table of a shape, under `HEADERS`."""
    speedup = group.speedup(row)
    return (
        row.label,
        number(row.time_us, 4),
        "-" if row.kind == PREDICTED or row.spread_us is None else f"± {number(row.spread_us, 2)}",
        number(row.end_to_end_us, 4),
        number(row.tflops),
        number(row.gbps, 4),
        "-" if row.error is None else f"{row.error:.1e}",
        "-" if speedup is None else f"{speedup:.2f}x",
    )


def headline(group: ShapeGroup) -> str:
    """Who wins at a shape, in one sentence; empty without a rival."""
    ours, rival = group.best_ours, group.best_rival
    if ours is None or rival is None:
        return ""
    ratio = group.figure(rival) / group.figure(ours)
    how = f"{ratio:.2f}x as fast as" if ratio >= 1 else f"{1 / ratio:.2f}x slower than"
    how = "as fast as" if "1.00x" in how else how
    predicted = "predicted " if group.kind == PREDICTED else ""
    return f"{ours.label} is {predicted}{how} {rival.label} ({group.basis})"


def troubles(record: BenchRecord) -> list[tuple[str, str, str]]:
    """Who did not take part and why: name, status and reason, shapes joined."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in record.rows:
        if row.status != OK:
            found.setdefault((row.label, row.status, row.reason), []).append(row.shape)
    shapes = {row.shape for row in record.rows}
    lines = []
    for (label, status, reason), where in found.items():
        all_shapes = len(set(where)) == len(shapes)
        named = where[:_NAMED_SHAPES]
        named += [f"{len(where) - len(named)} more shapes"] if len(where) > len(named) else []
        lines.append((label, status, reason if all_shapes else f"{reason} ({'; '.join(named)})"))
    known = {label for label, _, _ in lines}
    lines += [(k, "absent", why) for k, why in record.absent.items() if k not in known]
    return lines


def verdict_rows(regression: Regression) -> list[tuple[str, ...]]:
    """The verdicts, for a table; the worst first."""
    ordered = sorted(regression.verdicts, key=lambda verdict: -verdict.change)
    return [
        (
            each.row.label,
            each.row.shape,
            number(each.before.time_us, 4),
            number(each.row.time_us, 4),
            f"{100 * each.change:+.1f} %",
            f"± {number(each.zone_us, 2)}",
            each.verdict,
        )
        for each in ordered
    ]


VERDICT_HEADERS = ("kernel", "shape", "before µs", "now µs", "change", "neutral zone", "verdict")


def markdown_page(
    record: BenchRecord, plots: Sequence[Plot], regression: Regression | None = None
) -> str:
    """The report as markdown, with front matter for programs."""
    parts = [
        front_matter(
            {
                "kind": "benchmark",
                "suite": record.suite,
                "predicted": record.predicted,
                "devices": record.devices,
                "date": record.environment.get("date"),
                "command": record.environment.get("command"),
                "regression": None if regression is None else regression.summary,
            }
        ),
        f"# {title_of(record)}\n",
        *(f"**{text}**\n" for text in record.notes),
        table(
            ("", ""),
            [(k, f"`{v}`" if k == "command" else v) for k, v in circumstances_rows(record)],
        ),
    ]
    if regression is not None:
        parts += [f"## Against the earlier record\n\n{regression.summary}\n"]
        parts += [table(VERDICT_HEADERS, verdict_rows(regression))] if regression.verdicts else []
        skipped = regression.not_compared
        parts += [table(("not compared", "why"), skipped)] if skipped else []
        parts += ["".join(f"- {text}\n" for text in regression.remarks)]
    for group in shape_groups(record.rows):
        if group.timed:
            sentence = headline(group)
            parts.append(f"## {group.title}, {group.device}\n")
            parts += [sentence + ".\n"] if sentence else []
            parts.append(table(HEADERS, [cells(group, row) for row in group_rows(group)]))
    doubtful = doubts(record.rows)
    parts += ["## To be explained\n", "".join(f"- {text}\n" for text in doubtful)] * bool(doubtful)
    lines = troubles(record)
    parts += ["## Not taking part\n", table(("", "", "reason"), lines)] if lines else []
    parts.append("## Plots\n")
    for plot in plots:
        images = [file for file in plot.files if file.suffix == ".png"]
        parts += [f"![{plot.title}]({image.name})\n\n{plot.caption}\n" for image in images]
        parts += [f"{plot.title}: not drawn, {plot.missing}.\n"] if plot.missing else []
    how = "predicted" if record.predicted else "measured"
    parts += [f"## How it was {how}\n", "".join(f"- {text}\n" for text in method(record))]
    return "\n".join(parts)


def html_page(
    record: BenchRecord, plots: Sequence[Plot], regression: Regression | None = None
) -> str:
    """The report as one HTML file: images inline, nothing loaded from anywhere."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(PAGE)
    groups = [group for group in shape_groups(record.rows) if group.timed]
    return template.render(
        title=title_of(record),
        predicted=record.predicted,
        notes=record.notes,
        facts=circumstances_rows(record),
        headers=HEADERS,
        groups=[_group(group) for group in groups],
        doubts=doubts(record.rows),
        troubles=troubles(record),
        plots=[_image(plot) for plot in plots],
        regression=regression,
        verdict_headers=VERDICT_HEADERS,
        verdicts=[] if regression is None else verdict_rows(regression),
        method=method(record),
    )


def _group(group: ShapeGroup) -> dict[str, Any]:
    rows = group_rows(group)
    slowest = max(group.figure(row) for row in group.timed)
    return {
        "title": group.title,
        "device": group.device,
        "headline": headline(group),
        "basis": BASIS_TEXT[group.basis],
        "rows": [
            {
                "cells": cells(group, row),
                "source": row.source,
                "ours": row.source == OURS,
                "share": 0 if row.source == PROJECTION else 100 * group.figure(row) / slowest,
            }
            for row in rows
        ],
    }


def _image(plot: Plot) -> dict[str, str]:
    image = next((file for file in plot.files if file.suffix == ".png"), None)
    data = base64.b64encode(image.read_bytes()).decode() if image else ""
    return {"title": plot.title, "caption": plot.caption, "data": data, "missing": plot.missing}
