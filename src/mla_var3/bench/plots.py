"""Plots of a benchmark record, as PNG and SVG, and the style that all plots share.

Axes and series come from `mla_var3.bench.analysis`. A plot that the record has too few figures for
is not drawn and says why.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mla_var3.bench import analysis
from mla_var3.bench.record import OK, OURS, PREDICTED, PROJECTION, BenchRecord, BenchRow
from mla_var3.bench.suites import COMMON
from mla_var3.conf.devices import DeviceSpec
from mla_var3.op.mla.model.designs import estimate
from mla_var3.op.mla.model.times import Workload
from mla_var3.runtime.paths import write_atomic

# Okabe and Ito's palette, distinct under every common form of colour blindness and in grey.
COLOURS = {
    "flash_mla": "#0072B2",
    "flash_mla_split_kv": "#56B4E9",
    "mla_var6_plus": "#D55E00",
    "flash_attention": "#009E73",
}
LINE_STYLES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
FORMATS = ("png", "svg")
_DPI = 150
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    # Without a fixed salt two identical plots differ in their element ids.
    "svg.hashsalt": "hyper-mla",
}

MOST_LINES, MOST_MARKERS = 12, 12
MOST_BARS = 30
_MODEL_POINTS = 64
_LABEL_ROWS = 4
_COARSE_FROM = 10
"""From here on crossings are given in whole tokens."""
_MARKERS = "osD^vP*Xhp<>"
# Distinct from the colours of the base versions, so that no peer looks like one of them.
_PALETTE = ("#CC79A7", "#E69F00", "#000000", "#7F3C8D", "#8C564B", "#B5BD00", "#999999", "#17697A")


@dataclass(frozen=True)
class Plot:
    """One plot of the record: its files, or why it was not drawn."""

    name: str
    title: str
    caption: str
    files: tuple[Path, ...] = ()
    missing: str = ""

    @property
    def png(self) -> Path | None:
        """The PNG among its files."""
        return next((file for file in self.files if file.suffix == ".png"), None)


class _NotDrawnError(Exception):
    """Too few figures for a plot; the message says what is missing."""


def draw_plots(record: BenchRecord, folder: Path) -> list[Plot]:
    """Draw every plot that the record has figures for."""
    rows = [row for row in record.rows if row.status == OK]
    rival = _rival(rows)
    plots = (
        ("time_s", "Time over query tokens", _OVER_S, _over_s),
        ("roofline", "Roofline", _ROOFLINE, _roofline),
        ("time_n", "Time of mla_var6_plus over its window", _OVER_N, _over_n),
        ("speedup", f"Speed-up over {rival}", _SPEEDUP.format(rival=rival), _heat_map),
        ("kernels", "All kernels at one shape", _BARS, _bars),
    )
    found = []
    for name, title, caption, draw in plots:
        with new_figure(8.4, 5.2) as figure:
            try:
                draw(figure, rows)
                files = tuple(save_figure(figure, folder / name))
                found.append(Plot(name, title, caption, files))
            except _NotDrawnError as reason:
                found.append(Plot(name, title, caption, missing=str(reason)))
    return found


_OVER_S = (
    "Each line is a kernel at its best choice of n and splits. Dotted verticals mark where another "
    "kernel becomes the fastest; 8-bit kernels do not count there."
)
_ROOFLINE = (
    "TFLOP/s over FLOP per byte. The lines are the device's rates; a kernel under the slope is "
    "limited by memory, one under the flat part by compute. One point per shape."
)
_OVER_N = (
    "The n newest tokens are decompressed, the others latent. The thin line is the predicted "
    "kernel time, the circle the fastest n."
)
_SPEEDUP = "Time of {rival} over that of our best 16-bit kernel; above 1 ours is faster."
_BARS = (
    "The shape with the most rows, that of the public comparison where several have as many; "
    "fastest first. The whisker is the spread."
)


def _rival(rows: Sequence[BenchRow]) -> str:
    return "the better pure path" if any(r.kind == PREDICTED for r in rows) else "the best peer"


def word(kind: str) -> str:
    """Prefix of a time on an axis: a prediction must not look like a measurement."""
    return "predicted " if kind == PREDICTED else ""


def series_colour(name: str, names: Sequence[str]) -> str:
    """The colour of one of `names`: base versions keep theirs in every plot, others differ."""
    if name in COLOURS:
        return COLOURS[name]
    others = [other for other in names if other not in COLOURS]
    return _PALETTE[others.index(name) % len(_PALETTE)]


def _over_s(figure: Any, rows: Sequence[BenchRow]) -> None:
    data = analysis.times_over_s(rows)
    if data is None:
        raise _NotDrawnError("it needs two values of s at the same b, t, h")
    lines = _main_lines(data)
    axis = figure.subplots()
    draw_lines(axis, lines, _MARKERS, 1.6)
    shown = [each for each in data.crossings if {each.before, each.after} <= set(lines)]
    for index, crossing in enumerate(shown):
        text = f"s ≈ {crossing.s:.1f}" if crossing.s < _COARSE_FROM else f"s ≈ {crossing.s:.0f}"
        axis.axvline(crossing.s, color="#666666", linewidth=0.9, linestyle=":")
        # Staggered, because two crossings may be close together.
        place = (crossing.s, 0.02 + 0.045 * (index % _LABEL_ROWS))
        look = {"xytext": (3, 0), "textcoords": "offset points", "fontsize": 8}
        axis.annotate(text, place, xycoords=("data", "axes fraction"), **look)
    log_axes(axis, sorted({s for points in lines.values() for s, _ in points}))
    axis.set(xlabel="query tokens per request, s", ylabel=f"{word(data.kind)}{data.basis}, µs")
    _finish(figure, axis, f"{data.title} on {data.device}")


def _main_lines(data: analysis.Chart) -> Mapping[str, Sequence[tuple[int, float]]]:
    """The lines to draw; of too many, those that come nearest to the fastest."""
    best: dict[int, float] = {}
    for s, time_us in chain.from_iterable(data.series.values()):
        best[s] = min(time_us, best.get(s, math.inf))

    def distance(name: str) -> float:
        return min(time_us / best[s] for s, time_us in data.series[name])

    kept = sorted(data.series, key=distance)[:MOST_LINES]
    return {name: points for name, points in data.series.items() if name in kept}


def _roofline(figure: Any, rows: Sequence[BenchRow]) -> None:
    points = [row for row in rows if row.source != PROJECTION and row.tflops and row.bytes]
    if not points:
        raise _NotDrawnError("no figures")
    device = next((row.device for row in points if row.device), "")
    spec = analysis.find_device(device)
    if spec is None:
        raise _NotDrawnError(f"{device or 'the device'} is not in the device table")
    points = [row for row in points if row.device == device]
    names = list(dict.fromkeys(row.series for row in points))
    axis = figure.subplots()
    low, high = min(map(_intensity, points)) / 2, max(map(_intensity, points)) * 2
    for label, tflops, gbps, style in _roofs(spec, points[0].problem.dtype):
        ridge = tflops * 1e3 / gbps
        xs = sorted({low, min(max(ridge, low), high), high})
        ys = [min(tflops, x * gbps / 1e3) for x in xs]
        axis.plot(xs, ys, style, color="#444444", linewidth=1.2, label=label)
    for index, name in enumerate(names):
        own = [row for row in points if row.series == name]
        look = {"color": series_colour(name, names), "marker": _MARKERS[index % len(_MARKERS)]}
        places = [_intensity(row) for row in own], [row.tflops for row in own]
        axis.scatter(*places, label=name, s=30, zorder=3, **look)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte")
    axis.set_ylabel(f"{word(points[0].kind)}TFLOP/s")
    _finish(figure, axis, f"Roofline of {device}")


def _intensity(row: BenchRow) -> float:
    return (row.flops or 0.0) / (row.bytes or math.inf)


def _roofs(spec: DeviceSpec, dtype: str) -> list[tuple[str, float, float, str]]:
    peak = ("vendor peak", *spec.peak_rates(dtype), "--")
    if not {f"burst_{dtype}_float32_tflops", "burst_dram_bw_GBps"} <= set(spec.values):
        return [peak]
    return [("burst rates", *spec.burst_rates(dtype), "-"), peak]


def _over_n(figure: Any, rows: Sequence[BenchRow]) -> None:
    data = analysis.times_over_n(rows)
    if data is None:
        raise _NotDrawnError("it needs a kernel at two values of n")
    spec = analysis.find_device(data.device)
    axis = figure.subplots()
    for index, (name, points) in enumerate(data.series.items()):
        colour = _PALETTE[index % len(_PALETTE)]
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=colour)
        n, time_us = min(points, key=lambda point: point[1])
        axis.plot([n], [time_us], "o", markersize=11, fillstyle="none", color=colour)
        if spec is not None:
            own = next(r for r in rows if "n" in r.choices and analysis.window_series(r) == name)
            model = _model_line(own, spec)
            axis.plot(*zip(*model, strict=True), linewidth=0.8, linestyle=":", color=colour)
    label = f"{word(data.kind)}kernel time, µs"
    axis.set(xlabel="decompressed tokens per request, n", ylabel=label, ylim=(0, None))
    _finish(figure, axis, f"{data.title} on {data.device}", len(data.series))


def _model_line(row: BenchRow, spec: DeviceSpec) -> list[tuple[int, float]]:
    t = row.problem.t
    windows = sorted({round(t * i / _MODEL_POINTS) for i in range(_MODEL_POINTS + 1)})
    found = [estimate(row.kernel, Workload(row.problem, n=n), spec, row.language) for n in windows]
    pairs = zip(windows, found, strict=True)
    return [(n, each.kernel_us) for n, each in pairs if each is not None]


def _heat_map(figure: Any, rows: Sequence[BenchRow]) -> None:
    data, rival = analysis.speedup_grid(rows), _rival(rows)
    if data is None:
        raise _NotDrawnError(f"it needs a shape with one of our kernels and {rival}")
    from matplotlib.colors import TwoSlopeNorm

    s_values = sorted({s for s, _ in data.cells})
    t_values = sorted({t for _, t in data.cells})
    logs = {at: math.log2(ratio) for at, ratio in data.cells.items()}
    reach = max(0.1, *map(abs, logs.values()))
    figure.set_size_inches(2.6 + 1.1 * len(t_values), 2.2 + 0.45 * len(s_values))
    axis = figure.subplots()
    grid = [[logs.get((s, t), math.nan) for t in t_values] for s in s_values]
    norm = TwoSlopeNorm(0.0, -reach, reach)
    axis.imshow(grid, cmap="PuOr", norm=norm, aspect="auto", origin="lower")
    axis.set_xticks(range(len(t_values)), [str(t) for t in t_values])
    axis.set_yticks(range(len(s_values)), [str(s) for s in s_values])
    axis.grid(visible=False)
    for (s, t), ratio in data.cells.items():
        colour = "white" if abs(logs[s, t]) > 0.6 * reach else "black"
        place = t_values.index(t), s_values.index(s)
        axis.text(*place, f"{ratio:.2f}", ha="center", va="center", color=colour)
    axis.set(xlabel="KV tokens per request, t", ylabel="query tokens per request, s")
    prefix = "predicted, " if data.kind == PREDICTED else ""
    heading = f"Speed-up over {rival}\n{prefix}{data.basis}, {data.title}"
    axis.set_title(heading, fontsize=9)


def _bars(figure: Any, rows: Sequence[BenchRow]) -> None:
    groups = [group for group in analysis.shape_groups(rows) if group.timed]
    if not groups:
        raise _NotDrawnError("no figures")
    group = max(groups, key=lambda group: (len(group.timed), group.problem == COMMON))
    shown = sorted(group.timed, key=group.figure)[:MOST_BARS]
    figure.set_size_inches(8.4, 1.6 + 0.32 * len(shown))
    axis = figure.subplots()
    colours = [COLOURS["flash_mla"] if row.source == OURS else "#999999" for row in shown]
    spreads = [row.spread_us or 0.0 for row in shown]
    times = [group.figure(row) for row in shown]
    bars = axis.barh(range(len(shown)), times, xerr=spreads, color=colours)
    for bar, row in zip(bars, shown, strict=True):
        bar.set_hatch("//" if row.eight_bit else "")
    axis.bar_label(bars, fmt="%.4g", fontsize=8, padding=3)
    axis.set_yticks(range(len(shown)), [row.label for row in shown])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.12)
    hatched = ", 8-bit hatched" if any(row.eight_bit for row in shown) else ""
    axis.set_xlabel(f"{word(group.kind)}{group.basis}, µs (ours in blue{hatched})")
    axis.set_title(f"{group.title} on {group.device}")


def draw_lines(
    axis: Any, series: Mapping[str, Sequence[tuple[float, float]]], markers: str, width: float
) -> None:
    """A line per series, with markers in turn; those on top of each other differ in their dashes.

    Many points make a curve, not a row of measurements: they have no markers.
    """
    names = list(series)
    for index, (name, points) in enumerate(series.items()):
        look = {"linestyle": LINE_STYLES[index % len(LINE_STYLES)], "linewidth": width}
        if len(points) <= MOST_MARKERS:
            look |= {"marker": markers[index % len(markers)], "markersize": 4}
        axis.plot(*zip(*points, strict=True), label=name, color=series_colour(name, names), **look)


def log_axes(axis: Any, x_ticks: Sequence[float]) -> None:
    """Logarithmic axes: x to the base 2 with the given ticks, y with plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(x_ticks, [f"{x:g}" for x in x_ticks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.minorticks_off()


def _finish(figure: Any, axis: Any, title: str, entries: int = MOST_LINES) -> None:
    axis.set_title(title)
    figure.legend(loc="outside lower center", ncols=min(entries, 3), fontsize=8)


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Any]:
    """A figure in our style, without pyplot, which would keep it and pick a window system."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in each format; `path` has no suffix."""
    written = [path.with_name(f"{path.name}.{suffix}") for suffix in formats]
    for file, suffix in zip(written, formats, strict=True):
        # Without a date, two plots of the same figures are the same file.
        metadata = {"Date": None} if suffix == "svg" else {}
        content = io.BytesIO()
        figure.savefig(content, format=suffix, dpi=_DPI, metadata=metadata)
        write_atomic(file, content.getvalue())
    return written


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
) -> list[Path]:
    """Draw named series of (x, y) points in ascending x; `path` has no suffix."""
    with new_figure(7.6, 4.8) as figure:
        axis = figure.subplots()
        draw_lines(axis, series, "o", 1.8)
        if log:
            log_axes(axis, sorted({x for points in series.values() for x, _ in points}))
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.set_title(title)
        axis.legend()
        return save_figure(figure, path)


def bar_plot(
    groups: Mapping[str, Mapping[str, float]], path: Path, *, title: str, y_label: str
) -> list[Path]:
    """Draw grouped bars with their values on top; `path` has no suffix.

    `groups` maps the name below a group to its values by series; some series may be missing.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    with new_figure(max(6.0, 1.6 * len(groups) + 2.0), 4.6) as figure:
        axis = figure.subplots()
        for position, name in enumerate(names):
            offset = (position - (len(names) - 1) / 2) * width
            values = {i + offset: g[name] for i, g in enumerate(groups.values()) if name in g}
            look = {"label": name, "color": series_colour(name, names)}
            bars = axis.bar(list(values), list(values.values()), width * 0.92, **look)
            axis.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.grid(visible=False, axis="x")
        axis.set_ylabel(y_label)
        axis.margins(y=0.12)
        axis.set_title(title)
        axis.legend()
        return save_figure(figure, path)
