"""A benchmark record as pages: markdown for programs, one self-contained HTML file for people.

Both are made from the same blocks: headings, texts, lists, tables and images.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mla_var3.bench import analysis
from mla_var3.bench.analysis import ShapeGroup
from mla_var3.bench.plots import Plot, word
from mla_var3.bench.record import CALL, OK, PREDICTED, PROJECTION, BenchRecord, BenchRow
from mla_var3.bench.regression import Regression
from mla_var3.runtime.environment import environment_rows
from mla_var3.runtime.markdown import front_matter, number, table

HEADERS = (
    "kernel", "call µs", "kernel µs", "spread", "TFLOP/s", "GB/s", "of limit", "error", "vs best",
)  # fmt: skip
EIGHT_BIT_HEADER = "8-bit vs best"
"""8-bit results have a larger error, so their speed-ups have a column of their own."""
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
_LIMIT = (
    "The limit is the roofline at the vendor's peak rates: the larger of FLOPs over peak TFLOP/s "
    "and bytes over peak GB/s. The error is relative, of the Frobenius norm."
)
_EIGHT_BIT = (
    "8-bit kernels round their operands, with a relative error of a few per cent; their speed-ups "
    "have a column of their own and never count as our best. The error of a kernel on an 8-bit "
    "cache is that against float64 on the dequantised cache: of its queries, probabilities and "
    "sums, not of the format."
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
    return [*lines, _COUNTED, _LIMIT, f'"vs best" is the time of the {rival} over that of the row.']


def title_of(record: BenchRecord) -> str:
    """The heading of a report."""
    what = "predicted" if record.predicted else "measured"
    return f"MLA attention kernels, {what}: {record.suite}"


def group_rows(group: ShapeGroup) -> list[BenchRow]:
    """The rows of a shape in the order to read them: fastest first, projections last."""
    timed = sorted(group.timed, key=group.figure)
    projections = [row for row in group.rows if row.source == PROJECTION and row.status == OK]
    return timed + projections


def headers(group: ShapeGroup) -> tuple[str, ...]:
    """The columns of the table of a shape."""
    eight_bit = any(row.eight_bit for row in group.timed)
    return (*HEADERS, EIGHT_BIT_HEADER) if eight_bit else HEADERS


def cells(group: ShapeGroup, row: BenchRow) -> tuple[str, ...]:
    """One line of the table of a shape, under `headers`."""
    speedup, limit = group.speedup(row), analysis.limit_us(row)
    versus = "-" if speedup is None else f"{speedup:.2f}x"
    last = ("-", versus) if row.eight_bit else (versus, "-")
    # A call has no kernel time of its own; its label names the kernel that it chose.
    is_call = row.path == CALL
    found = (
        row.label + (f" = {row.note.partition(':')[0]}" if is_call else ""),
        number(row.call_us, 4),
        "-" if is_call else number(row.time_us, 4),
        "-" if row.kind == PREDICTED or row.spread_us is None else f"± {number(row.spread_us, 2)}",
        number(row.tflops),
        number(row.gbps, 4),
        "-" if not limit or not row.time_us else f"{100 * limit / row.time_us:.0f} %",
        "-" if row.error is None else f"{row.error:.1e}",
        *last,
    )
    return found[: len(headers(group))]


def headline(group: ShapeGroup) -> str:
    """Who wins at a shape; empty without a rival. An 8-bit kernel has a clause of its own."""
    parts = []
    for ours in filter(None, (group.best_ours, group.best_eight_bit)):
        rival, ratio = group.rival_of(ours), group.speedup(ours)
        if rival is None or ratio is None:
            continue
        how = f"{max(ratio, 1 / ratio):.2f}x {'as fast as' if ratio >= 1 else 'slower than'}"
        how = "as fast as" if how.startswith("1.00x") else how
        what = f"{group.basis}, 8-bit" if ours.eight_bit else group.basis
        parts.append(f"{ours.label} is {word(group.kind)}{how} {rival.label} ({what})")
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
        named = where[:_NAMED_SHAPES]
        named += [f"{len(where) - len(named)} more shapes"] if len(where) > len(named) else []
        where_text = "" if set(where) == shapes else f" ({'; '.join(named)})"
        lines.append((label, status, reason + where_text))
    known = {label for label, _, _ in lines}
    lines += [(k, "absent", why) for k, why in record.absent.items() if k not in known]
    return lines


def verdict_rows(regression: Regression) -> list[tuple[str, ...]]:
    """The verdicts, for a table; the worst first."""
    rows = []
    for each in sorted(regression.verdicts, key=lambda verdict: -verdict.change):
        times = [number(row.time_us, 4) for row in (each.before, each.row)]
        change, zone = f"{100 * each.change:+.1f} %", f"± {number(each.zone_us, 2)}"
        rows.append((each.row.label, each.row.shape, *times, change, zone, each.verdict))
    return rows


VERDICT_HEADERS = ("kernel", "shape", "before µs", "now µs", "change", "neutral zone", "verdict")


@dataclass(frozen=True)
class Block:
    """One part of a page; what it is follows from the fields that are set. Styles are CSS classes.

    `items` are (text, anchor to link to or ""), `shares` the lengths in percent of bars below the
    first cells of rows.
    """

    heading: str = ""
    anchor: str = ""
    text: str = ""
    style: str = ""
    items: Sequence[tuple[str, str]] = ()
    headers: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    row_styles: Sequence[str] = ()
    shares: Sequence[float] = ()
    plot: Plot | None = None

    @property
    def image(self) -> str:
        """The plot's PNG file, base64."""
        file = None if self.plot is None else self.plot.png
        return "" if file is None else base64.b64encode(file.read_bytes()).decode()

    def markdown(self) -> str:
        """The block as markdown."""
        if self.heading:
            return f"## {self.heading}\n"
        if self.text:
            return f"**{self.text}**\n" if self.style == "note" else f"{self.text}\n"
        if self.items:
            return "".join(f"- {text}\n" for text, _ in self.items)
        if self.plot is None:
            return table(self.headers, self.rows)
        if self.plot.png is None:
            return f"{self.plot.title}: not drawn, {self.plot.missing}.\n"
        return f"![{self.plot.title}]({self.plot.png.name})\n\n{self.plot.caption}\n"


def _blocks(
    record: BenchRecord, plots: Sequence[Plot], regression: Regression | None
) -> Iterator[Block]:
    for text in record.notes:
        yield Block(text=text, style="note")
    facts = [("device", ", ".join(record.devices) or "none")]
    facts += environment_rows(record.environment)
    if record.settings:
        facts.append(("settings", ", ".join(f"{k} {v}" for k, v in record.settings.items())))
    yield Block(headers=("", ""), rows=facts)
    if regression is not None:
        yield from _regression_blocks(regression)
    groups = [group for group in analysis.shape_groups(record.rows) if group.timed]
    if groups:
        yield Block(heading="Overview")
        heads = [": ".join(filter(None, (group.title, headline(group)))) for group in groups]
        yield Block(items=[(head, f"shape-{index}") for index, head in enumerate(heads, 1)])
    yield Block(heading="Plots")
    for plot in plots:
        yield Block(plot=plot)
    for index, group in enumerate(groups, 1):
        yield from _group_blocks(group, f"shape-{index}")
    if doubtful := analysis.doubts(record.rows):
        yield Block(heading="To be explained")
        yield Block(items=[(text, "") for text in doubtful])
    if missing := troubles(record):
        yield Block(heading="Not taking part")
        yield Block(headers=("kernel", "status", "reason"), rows=missing)
    yield Block(heading=f"How it was {'predicted' if record.predicted else 'measured'}")
    yield Block(items=[(text, "") for text in method(record)])


def _regression_blocks(regression: Regression) -> Iterator[Block]:
    yield Block(heading="Against the earlier record")
    yield Block(text=regression.summary)
    if rows := verdict_rows(regression):
        styles = [str(row[-1]) for row in rows]
        yield Block(headers=VERDICT_HEADERS, rows=rows, style="figures", row_styles=styles)
    if regression.not_compared:
        yield Block(headers=("not compared", "why"), rows=regression.not_compared)
    if regression.remarks:
        yield Block(items=[(text, "") for text in regression.remarks])


def _group_blocks(group: ShapeGroup, anchor: str) -> Iterator[Block]:
    yield Block(heading=f"{group.title}, {group.device}", anchor=anchor)
    yield Block(text=f"Compared by {analysis.BASIS_TEXT[group.basis]}.", style="dim")
    if sentence := headline(group):
        yield Block(text=f"{sentence}.")
    rows = group_rows(group)
    slowest = max(group.figure(row) for row in group.timed)
    yield Block(
        headers=headers(group),
        rows=[cells(group, row) for row in rows],
        style="figures",
        row_styles=[row.source for row in rows],
        shares=[0 if r.source == PROJECTION else 100 * group.figure(r) / slowest for r in rows],
    )


def markdown_page(
    record: BenchRecord, plots: Sequence[Plot], regression: Regression | None = None
) -> str:
    """The report as markdown, with front matter for programs."""
    head: dict[str, Any] = {"kind": "benchmark"}
    head |= {name: getattr(record, name) for name in ("suite", "predicted", "devices")}
    head |= {name: record.environment.get(name) for name in ("date", "command")}
    head["regression"] = None if regression is None else regression.summary
    blocks = [block.markdown() for block in _blocks(record, plots, regression)]
    return "\n".join([front_matter(head), f"# {title_of(record)}\n", *blocks])


def html_page(
    record: BenchRecord, plots: Sequence[Plot], regression: Regression | None = None
) -> str:
    """The report as one HTML file: images inline, nothing loaded from anywhere."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_TEMPLATE)
    return template.render(title=title_of(record), blocks=_blocks(record, plots, regression))


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
body { margin: 0 auto; padding: 2rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif; }
.dim, figcaption, .projection td { opacity: .7; }
.note { padding: .7rem 1rem; border-left: 4px solid #e69f00; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #88888866; text-align: left; }
.figures td + td, .figures th + th { text-align: right; font-variant-numeric: tabular-nums; }
.figures td { white-space: nowrap; }
.ours td:first-child, .worse { font-weight: 600; }
.bar { height: 4px; background: #8a939c; }
.ours .bar { background: #2a8fd0; }
.better { color: #2a9d4f; }
.worse { color: #d9534f; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: #ffffff; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for block in blocks %}
{% if block.heading %}
<h2{% if block.anchor %} id="{{ block.anchor }}"{% endif %}>{{ block.heading }}</h2>
{% elif block.text %}
<p class="{{ block.style }}">{{ block.text }}</p>
{% elif block.items %}
<ul>
{% for text, anchor in block.items %}
<li>{% if anchor %}<a href="#{{ anchor }}">{{ text }}</a>{% else %}{{ text }}{% endif %}</li>
{% endfor %}
</ul>
{% elif block.image %}
<figure>
<img alt="{{ block.plot.title }}" src="data:image/png;base64,{{ block.image }}">
<figcaption><strong>{{ block.plot.title }}.</strong> {{ block.plot.caption }}</figcaption>
</figure>
{% elif block.plot %}
<p class="dim">{{ block.plot.title }}: not drawn, {{ block.plot.missing }}.</p>
{% else %}
<div class="scroll"><table class="{{ block.style }}">
<thead><tr>{% for name in block.headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in block.rows %}
{% set outer = loop.index0 %}
<tr class="{{ block.row_styles[outer] if block.row_styles else '' }}">
{% for cell in row %}
<td>{{ cell }}{% if loop.first and block.shares and block.shares[outer] %}
<div class="bar" style="width: {{ '%.1f' % block.shares[outer] }}%"></div>{% endif %}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endif %}
{% endfor %}
</body>
</html>
"""
