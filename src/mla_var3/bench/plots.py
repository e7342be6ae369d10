"""Plots of a benchmark record, as PNG and SVG, and the style that all plots share.

Axes and series come from `mla_var3.bench.analysis`. A plot that the record has too few figures for
is not drawn and says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_var3.bench.analysis import (
    TimesOverS,
    find_device,
    shape_groups,
    speedup_grid,
    times_over_n,
    times_over_s,
)
from mla_var3.bench.record import OK, OURS, PREDICTED, PROJECTION, BenchRecord, BenchRow
from mla_var3.bench.suites import COMMON
from mla_var3.conf.devices import DeviceSpec
from mla_var3.op.mla.model.designs import estimate
from mla_var3.op.mla.model.times import Workload

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
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    # Without a fixed salt two identical plots differ in their element ids.
    "svg.hashsalt": "hyper-mla",
}

MOST_LINES = 12
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
    """One plot of the record.

    Attributes:
        name: file name without suffix.
        title: heading.
        caption: how to read it.
        files: what was written; empty if it was not drawn.
        missing: why it was not drawn; empty otherwise.
    """

    name: str
    title: str
    caption: str
    files: tuple[Path, ...] = ()
    missing: str = ""


def draw_plots(record: BenchRecord, folder: Path) -> list[Plot]:
    """Draw every plot that the record has figures for."""
    rows = [row for row in record.rows if row.status == OK]
    return [draw(rows, folder) for draw in (_over_s, _roofline, _over_n, _heat_map, _bars)]


def word(kind: str) -> str:
    """Prefix of a time on an axis: a prediction must not look like a measurement."""
    return "predicted " if kind == PREDICTED else ""


def series_colour(name: str, names: Sequence[str]) -> str:
    """The colour of a series: base versions keep theirs in every plot, others differ from them.

    A version has the colour of its design, unless the design is among `names` as well.
    """
    if name in COLOURS:
        return COLOURS[name]
    design = max((known for known in COLOURS if name.startswith(known)), key=len, default=None)
    if design is not None and name not in names:
        return COLOURS[design]
    others = [other for other in names if other not in COLOURS]
    return _PALETTE[others.index(name) % len(_PALETTE)] if name in others else _PALETTE[0]


def _over_s(rows: Sequence[BenchRow], folder: Path) -> Plot:
    title = "Time over query tokens"
    caption = (
        "Each line is a kernel at its best choice of n and splits. Dotted verticals mark where "
        "another kernel becomes the fastest; 8-bit kernels do not count there."
    )
    data = times_over_s(rows)
    if data is None:
        return Plot(
            "time_s", title, caption, missing="it needs two values of s at the same b, t, h"
        )
    lines = _main_lines(data)
    shown = [each for each in data.crossings if {each.before, each.after} <= set(lines)]
    with new_figure(8.4, 5.2) as figure:
        axis = figure.subplots()
        _draw_lines(axis, lines, list(lines))
        for index, crossing in enumerate(shown):
            axis.axvline(crossing.s, color="#666666", linewidth=0.9, linestyle=":")
            axis.annotate(
                f"s ≈ {crossing.s:.1f}" if crossing.s < _COARSE_FROM else f"s ≈ {crossing.s:.0f}",
                # Staggered, because two crossings may be close together.
                (crossing.s, 0.02 + 0.045 * (index % _LABEL_ROWS)),
                xycoords=("data", "axes fraction"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=8,
            )
        lengths = sorted({s for points in lines.values() for s, _ in points})
        _log_axes(axis, lengths)
        axis.set(xlabel="query tokens per request, s", ylabel=f"{word(data.kind)}{data.basis}, µs")
        axis.set_title(f"{data.title} on {data.device}", loc="left", fontweight="bold")
        _legend_beside(figure)
        return Plot("time_s", title, caption, tuple(save_figure(figure, folder / "time_s")))


def _main_lines(data: TimesOverS) -> Mapping[str, Sequence[tuple[int, float]]]:
    """The lines to draw; of too many, those that come nearest to the fastest."""
    best: dict[int, float] = {}
    for points in data.series.values():
        for s, time_us in points:
            best[s] = min(time_us, best.get(s, math.inf))

    def distance(name: str) -> float:
        return min(time_us / best[s] for s, time_us in data.series[name])

    kept = sorted(data.series, key=distance)[:MOST_LINES]
    return {name: points for name, points in data.series.items() if name in kept}


def _roofline(rows: Sequence[BenchRow], folder: Path) -> Plot:
    title = "Roofline"
    caption = (
        "TFLOP/s over FLOP per byte. The lines are the device's rates; a kernel under the slope is "
        "limited by memory, one under the flat part by compute. One point per shape."
    )
    points = [row for row in rows if row.source != PROJECTION and row.tflops and row.bytes]
    device = next((row.device for row in points if row.device), "")
    spec = find_device(device)
    if not points or spec is None:
        reason = f"{device or 'the device'} is not in the device table" if points else "no figures"
        return Plot("roofline", title, caption, missing=reason)
    points = [row for row in points if row.device == device]
    names = list(dict.fromkeys(row.series for row in points))
    with new_figure(8.4, 5.2) as figure:
        axis = figure.subplots()
        intensities = [row.flops / row.bytes for row in points if row.flops and row.bytes]
        low, high = min(intensities) / 2, max(intensities) * 2
        for label, tflops, gbps, style in _roofs(spec, points[0].problem.dtype):
            ridge = tflops * 1e3 / gbps
            xs = sorted({low, min(max(ridge, low), high), high})
            ys = [min(tflops, x * gbps / 1e3) for x in xs]
            axis.plot(xs, ys, style, color="#444444", linewidth=1.2, label=label)
        for index, name in enumerate(names):
            own = [row for row in points if row.series == name]
            axis.scatter(
                [row.flops / row.bytes for row in own if row.flops and row.bytes],
                [row.tflops for row in own],
                label=name,
                color=series_colour(name, names),
                marker=_MARKERS[index % len(_MARKERS)],
                s=30,
                zorder=3,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        predicted = points[0].kind == PREDICTED
        axis.set(xlabel="FLOP per byte", ylabel=f"{'predicted ' if predicted else ''}TFLOP/s")
        axis.set_title(f"Roofline of {device}", loc="left", fontweight="bold")
        _legend_beside(figure)
        return Plot("roofline", title, caption, tuple(save_figure(figure, folder / "roofline")))


def _roofs(spec: DeviceSpec, dtype: str) -> list[tuple[str, float, float, str]]:
    peak = ("vendor peak", spec.peak_tflops(dtype), spec.peak_gbps, "--")
    if not {f"burst_{dtype}_float32_tflops", "burst_dram_bw_GBps"} <= set(spec.values):
        return [peak]
    return [("burst rates", *spec.burst_rates(dtype), "-"), peak]


def _over_n(rows: Sequence[BenchRow], folder: Path) -> Plot:
    title = "Time of mla_var6_plus over its window"
    caption = (
        "The n newest tokens are decompressed, the others latent. The thin line is the predicted "
        "kernel time, the circle the fastest n."
    )
    data = times_over_n(rows)
    if data is None:
        return Plot("time_n", title, caption, missing="it needs a kernel at two values of n")
    spec = find_device(data.device)
    names = list(data.series)
    with new_figure(8.4, 5.2) as figure:
        axis = figure.subplots()
        for index, (name, points) in enumerate(data.series.items()):
            colour = _PALETTE[index % len(_PALETTE)]
            axis.plot(
                *zip(*points, strict=True), marker="o", markersize=4, label=name, color=colour
            )
            n, time_us = min(points, key=lambda point: point[1])
            axis.plot([n], [time_us], "o", markersize=11, fillstyle="none", color=colour)
            if spec is not None:
                own = next(
                    r for r in rows if "n" in r.choices and f"{r.series}, s={r.problem.s}" == name
                )
                model = _model_line(own, spec)
                axis.plot(*zip(*model, strict=True), linewidth=0.8, linestyle=":", color=colour)
        axis.set(
            xlabel="decompressed tokens per request, n", ylabel=f"{word(data.kind)}kernel time, µs"
        )
        axis.set_ylim(bottom=0)
        sizes = " ".join(f"{key}={getattr(data.problem, key)}" for key in ("b", "t", "h"))
        axis.set_title(f"{sizes} on {data.device}", loc="left", fontweight="bold")
        _legend_beside(figure, len(names))
        return Plot("time_n", title, caption, tuple(save_figure(figure, folder / "time_n")))


def _model_line(row: BenchRow, spec: DeviceSpec) -> list[tuple[int, float]]:
    t = row.problem.t
    windows = sorted({round(t * i / _MODEL_POINTS) for i in range(_MODEL_POINTS + 1)})
    points = []
    for n in windows:
        found = estimate(row.kernel, Workload(row.problem, n=n), spec, row.language)
        if found is not None:
            points.append((n, found.kernel_us))
    return points


def _heat_map(rows: Sequence[BenchRow], folder: Path) -> Plot:
    predicted = any(row.kind == PREDICTED for row in rows)
    rival = "the better pure path" if predicted else "the best peer"
    title = f"Speed-up over {rival}"
    caption = f"Time of {rival} over that of our best 16-bit kernel; above 1 ours is faster."
    data = speedup_grid(rows)
    if data is None:
        reason = f"it needs a shape with one of our kernels and {rival}"
        return Plot("speedup", title, caption, missing=reason)
    from matplotlib.colors import TwoSlopeNorm

    s_values = sorted({s for s, _ in data.cells})
    t_values = sorted({t for _, t in data.cells})
    grid = [[data.cells.get((s, t), math.nan) for t in t_values] for s in s_values]
    reach = max(max(abs(math.log2(ratio)) for ratio in data.cells.values()), 0.1)
    with new_figure(2.6 + 1.1 * len(t_values), 2.2 + 0.45 * len(s_values)) as figure:
        axis = figure.subplots()
        logs = [[math.log2(value) if value > 0 else value for value in line] for line in grid]
        norm = TwoSlopeNorm(0.0, -reach, reach)
        axis.imshow(logs, cmap="PuOr", norm=norm, aspect="auto", origin="lower")
        axis.set_xticks(range(len(t_values)), [str(t) for t in t_values])
        axis.set_yticks(range(len(s_values)), [str(s) for s in s_values])
        axis.grid(visible=False)
        for (s, t), ratio in data.cells.items():
            strong = abs(math.log2(ratio)) > 0.6 * reach
            axis.text(
                t_values.index(t), s_values.index(s), f"{ratio:.2f}", ha="center", va="center",
                color="white" if strong else "black",
            )  # fmt: skip
        axis.set(xlabel="KV tokens per request, t", ylabel="query tokens per request, s")
        prefix = "predicted, " if data.kind == PREDICTED else ""
        heading = f"Speed-up over {rival}\n{prefix}{data.basis}, {data.title}"
        axis.set_title(heading, loc="left", fontweight="bold", fontsize=9)
        return Plot("speedup", title, caption, tuple(save_figure(figure, folder / "speedup")))


def _bars(rows: Sequence[BenchRow], folder: Path) -> Plot:
    title = "All kernels at one shape"
    caption = (
        "The shape with the most rows, that of the public comparison where several have as many; "
        "fastest first. The whisker is the spread."
    )
    groups = [group for group in shape_groups(rows) if group.timed]
    if not groups:
        return Plot("kernels", title, caption, missing="no figures")
    group = max(groups, key=lambda group: (len(group.timed), group.problem == COMMON))
    shown = sorted(group.timed, key=group.figure)[:MOST_BARS]
    with new_figure(8.4, 1.6 + 0.32 * len(shown)) as figure:
        axis = figure.subplots()
        values = [group.figure(row) for row in shown]
        colours = [COLOURS["flash_mla"] if r.source == OURS else "#999999" for r in shown]
        bars = axis.barh(
            range(len(shown)), values, xerr=[row.spread_us or 0.0 for row in shown], color=colours
        )
        for bar, row in zip(bars, shown, strict=True):
            bar.set_hatch("//" if row.eight_bit else "")
        axis.bar_label(bars, fmt="%.4g", fontsize=8, padding=3)
        axis.set_yticks(range(len(shown)), [row.label for row in shown])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.margins(x=0.12)
        legend = (
            "ours in blue, 8-bit hatched" if any(r.eight_bit for r in shown) else "ours in blue"
        )
        axis.set_xlabel(f"{word(group.kind)}{group.basis}, µs ({legend})")
        heading = f"{group.title} on {group.device}"
        axis.set_title(heading, loc="left", fontweight="bold")
        return Plot("kernels", title, caption, tuple(save_figure(figure, folder / "kernels")))


def _draw_lines(
    axis: Any, lines: Mapping[str, Sequence[tuple[float, float]]], names: Sequence[str]
) -> None:
    for index, (name, points) in enumerate(lines.items()):
        axis.plot(
            *zip(*points, strict=True),
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=4,
            linewidth=1.6,
            linestyle=LINE_STYLES[index % len(LINE_STYLES)],
            label=name,
            color=series_colour(name, names),
        )


def _log_axes(axis: Any, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [str(s) for s in lengths])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.minorticks_off()


def _legend_beside(figure: Any, entries: int = MOST_LINES) -> None:
    columns = 3 if entries > 2 else entries
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Any]:
    """A figure in our style, without pyplot, which would keep it and pick a window system."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure in each format; `path` has no suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in formats:
        file = path.with_name(f"{path.name}.{suffix}")
        temporary = path.with_name(f".{path.name}.{suffix}")
        # Without a date, two plots of the same figures are the same file.
        metadata = {"Date": None} if suffix == "svg" else {}
        figure.savefig(temporary, format=suffix, dpi=_DPI, metadata=metadata)
        temporary.replace(file)
        written.append(file)
    return written
