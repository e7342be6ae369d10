"""A benchmark record as pages: markdown for programs, one self-contained HTML file for people."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from mla_var3.bench.analysis import BASIS_TEXT, ShapeGroup, doubts, shape_groups
from mla_var3.bench.plots import Plot
from mla_var3.bench.record import OK, OURS, PREDICTED, PROJECTION, BenchRecord, BenchRow
from mla_var3.bench.regression import Regression
from mla_var3.runtime.markdown import front_matter, number, table

HEADERS = (
    "kernel", "kernel µs", "spread", "call µs", "TFLOP/s", "GB/s", "relative error", "vs best",
)  # fmt: skip
EIGHT_BIT_HEADER = "8-bit vs best"
"""8-bit results have a larger error, so their speed-ups stand in a column of their own."""
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
_CALL_TIME = (
    "Call time adds the projections that a kernel does not do, measured the same way: those of "
    "queries and outputs for latent kernels, that of the queries for mla_var6_plus, none for "
    "decompressed kernels, whose keys and values count as decompressed already."
)
_COUNTED = (
    "TFLOP/s and GB/s count what the algorithm needs, each input and output once, pairs hidden by "
    "the mask included."
)
_EIGHT_BIT = (
    "8-bit kernels round their operands, with a relative error of a few per cent; their speed-ups "
    "stand in a column of their own and never count as our best."
)
_NAMED_SHAPES = 4
"""A reason that holds for several shapes names this many of them."""


def method(record: BenchRecord) -> list[str]:
    """How the figures of this record were obtained, one sentence each."""
    measured = [row for row in record.rows if row.kind != PREDICTED and row.status == OK]
    in_rounds = [row for row in measured if row.rounds_us]
    lines = [_PREDICTED] if record.predicted else []
    lines += [_CHECKED] if measured else []
    lines += [_TIMED_IN_ROUNDS] if in_rounds else []
    lines += [_TIMED_ONCE] if len(in_rounds) < len(measured) else []
    lines += [_CALL_TIME] if any(row.call_us is not None for row in record.rows) else []
    lines += [_EIGHT_BIT] if any(row.eight_bit for row in record.rows) else []
    rival = "faster pure path" if record.predicted and not measured else "fastest peer"
    return [*lines, _COUNTED, f'"vs best" is the time of the {rival} over that of the row.']


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


def headers(group: ShapeGroup) -> tuple[str, ...]:
    """The columns of the table of a shape."""
    return (*HEADERS, EIGHT_BIT_HEADER) if group.best_eight_bit else HEADERS


def cells(group: ShapeGroup, row: BenchRow) -> tuple[str, ...]:
    """One line of the table of a shape, under `headers`."""
    speedup = group.speedup(row)
    versus = "-" if speedup is None else f"{speedup:.2f}x"
    last = (
        (versus,) if not group.best_eight_bit else ("-", versus) if row.eight_bit else (versus, "-")
    )
    return (
        row.label,
        number(row.time_us, 4),
        "-" if row.kind == PREDICTED or row.spread_us is None else f"± {number(row.spread_us, 2)}",
        number(row.call_us, 4),
        number(row.tflops),
        number(row.gbps, 4),
        "-" if row.error is None else f"{row.error:.1e}",
        *last,
    )


def headline(group: ShapeGroup) -> str:
    """Who wins at a shape; empty without a rival. An 8-bit kernel has a clause of its own."""
    rival, parts = group.best_rival, []
    for ours in filter(None, (group.best_ours, group.best_eight_bit)):
        ratio = group.speedup(ours)
        if rival is None or ratio is None:
            continue
        how = f"{ratio:.2f}x as fast as" if ratio >= 1 else f"{1 / ratio:.2f}x slower than"
        how = "as fast as" if "1.00x" in how else how
        predicted = "predicted " if group.kind == PREDICTED else ""
        what = f"{group.basis}, 8-bit" if ours.eight_bit else group.basis
        parts.append(f"{ours.label} is {predicted}{how} {rival.label} ({what})")
    return "; ".join(parts)


def troubles(record: BenchRecord) -> list[tuple[str, str, str]]:
    """Who did not take part and why: name, status and reason; shapes of one reason together."""
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
            parts.append(table(headers(group), [cells(group, row) for row in group_rows(group)]))
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
    ).from_string(_TEMPLATE)
    groups = [group for group in shape_groups(record.rows) if group.timed]
    return template.render(
        title=title_of(record),
        predicted=record.predicted,
        notes=record.notes,
        facts=circumstances_rows(record),
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
        "headers": headers(group),
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


# A string in a module, so that the package needs no data file. It refers to no other file.
_TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root {
  --back: #ffffff; --text: #1b1f24; --dim: #5b6570; --line: #d8dee4; --soft: #f4f6f8;
  --ours: #0072b2; --rival: #8a939c; --good: #1a7f37; --bad: #b3261e; --warn: #7a4d00;
  --warn-back: #fff3d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14181d; --text: #e4e8ec; --dim: #9aa5b1; --line: #333c46; --soft: #1c2229;
    --ours: #56b4e9; --rival: #77818c; --good: #57c26e; --bad: #ff8a80; --warn: #ffd58a;
    --warn-back: #3a2d10;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 72rem; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p { margin: .4rem 0; }
.dim { color: var(--dim); }
.note { background: var(--warn-back); color: var(--warn); padding: .7rem 1rem; border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { background: var(--soft); font-weight: 600; white-space: nowrap; }
.figures td + td, .figures th + th { text-align: right; font-variant-numeric: tabular-nums; }
.figures td { white-space: nowrap; }
.ours td:first-child { font-weight: 600; }
.projection td { color: var(--dim); }
.bar { height: 4px; margin-top: 3px; border-radius: 2px; background: var(--rival); }
.ours .bar { background: var(--ours); }
.better { color: var(--good); } .worse { color: var(--bad); font-weight: 600; }
figure { margin: 1.5rem 0; }
figure img {
  display: block; max-width: 100%; height: auto; padding: .5rem; background: #ffffff;
  border: 1px solid var(--line); border-radius: 6px;
}
figcaption { color: var(--dim); font-size: .92rem; margin-top: .4rem; }
code { font: .88rem ui-monospace, monospace; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for text in notes %}
<p class="note">{{ text }}</p>
{% endfor %}
<div class="scroll"><table>
<tbody>
{% for name, value in facts %}
<tr><th scope="row">{{ name }}</th><td>
{% if name == "command" %}<code>{{ value }}</code>{% else %}{{ value }}{% endif %}
</td></tr>
{% endfor %}
</tbody>
</table></div>
{% if regression is not none %}
<h2>Against the earlier record</h2>
<p>{{ regression.summary }}</p>
{% if verdicts %}
<div class="scroll"><table class="figures">
<thead><tr>{% for name in verdict_headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in verdicts %}
<tr class="{{ row[-1] }}">{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% if regression.not_compared %}
<p class="dim">Not compared:</p>
<ul>
{% for row, why in regression.not_compared %}
<li>{{ row }}: {{ why }}</li>
{% endfor %}
</ul>
{% endif %}
{% for text in regression.remarks %}
<p class="dim">{{ text }}</p>
{% endfor %}
{% endif %}
{% if groups %}
<h2>Overview</h2>
<ul>
{% for group in groups %}
<li><a href="#shape-{{ loop.index }}">{{ group.title }}</a>
{% if group.headline %}: {{ group.headline }}{% endif %}
</li>
{% endfor %}
</ul>
{% endif %}
<h2>Plots</h2>
{% for plot in plots %}
{% if plot.data %}
<figure>
<img alt="{{ plot.title }}" src="data:image/png;base64,{{ plot.data }}">
<figcaption><strong>{{ plot.title }}.</strong> {{ plot.caption }}</figcaption>
</figure>
{% else %}
<p class="dim">{{ plot.title }}: not drawn, {{ plot.missing }}.</p>
{% endif %}
{% endfor %}
{% for group in groups %}
<h2 id="shape-{{ loop.index }}">{{ group.title }}</h2>
<p class="dim">{{ group.device }}. Compared by {{ group.basis }}.</p>
{% if group.headline %}
<p>{{ group.headline }}.</p>
{% endif %}
<div class="scroll"><table class="figures">
<thead><tr>{% for name in group.headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in group.rows %}
<tr class="{{ row.source }}">
{% for cell in row.cells %}
<td>{{ cell }}{% if loop.first and row.share %}
<div class="bar" style="width: {{ '%.1f' % row.share }}%"></div>{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if doubts %}
<h2>To be explained</h2>
<ul>
{% for text in doubts %}
<li>{{ text }}</li>
{% endfor %}
</ul>
{% endif %}
{% if troubles %}
<h2>Not taking part</h2>
<div class="scroll"><table>
<thead><tr><th>kernel</th><th>status</th><th>reason</th></tr></thead>
<tbody>
{% for label, status, reason in troubles %}
<tr><td>{{ label }}</td><td>{{ status }}</td><td>{{ reason }}</td></tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
<h2>{{ "How it was predicted" if predicted else "How it was measured" }}</h2>
<ul>
{% for text in method %}
<li>{{ text }}</li>
{% endfor %}
</ul>
</body>
</html>
"""
