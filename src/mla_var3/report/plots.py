"""Plots of predictions and comparisons: crossovers between kernels, lines and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from mla_var3.bench.plots import (
    draw_line,
    log_axes,
    mark_crossing,
    new_figure,
    save_figure,
    series_colour,
)
from mla_var3.bench.suites import DESIGN, PURE_PATHS
from mla_var3.report.sweep import S_VALUES, DeviceSweep

_MOST_MARKERS = 12
"""More points than this make a curve, not a row of measurements."""
_TITLE_LENGTH = 36
"""Characters that fit above a small plot."""


def crossover_plot(sweeps: Sequence[DeviceSweep], path: Path, heading: str) -> list[Path]:
    """Draw predicted call time against query length, one small plot per device.

    Args:
        sweeps: the devices; they share the axes so that they can be compared.
        path: file without suffix.
        heading: what was predicted, for which sizes.

    Returns:
        The files written.
    """
    from matplotlib.patches import Patch

    count = len(sweeps)
    columns = 1 if count == 1 else 2 if count in (2, 4) else 3
    rows = math.ceil(count / columns)
    width, height = (7.6, 5.2) if columns == 1 else (4.3 * columns, 3.6 * rows + 1.2)
    with new_figure(width, height) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        axes, spare = list(grid.flat)[:count], list(grid.flat)[count:]
        for index, (axis, entry) in enumerate(zip(axes, sweeps, strict=True)):
            _draw_panel(axis, entry)
            if index + columns >= count:  # nothing below it
                axis.set_xlabel("query tokens per request, s")
                axis.tick_params(labelbottom=True)
            if index % columns == 0:
                axis.set_ylabel("predicted time, µs")
        for axis in spare:
            axis.set_axis_off()
        handles, labels = axes[0].get_legend_handles_labels()
        handles.append(Patch(color="#888888", alpha=0.25))
        labels.append("shaded: fastest, end to end")
        # An unused cell of the grid holds the legend, so that it covers no curve.
        if spare:
            spare[0].legend(handles, labels, loc="center left", frameon=False, borderaxespad=0)
        else:
            place = "outside lower center"
            figure.legend(handles, labels, loc=place, ncols=columns + 1, frameon=False)
        figure.suptitle(heading, fontsize=12, fontweight="bold")
        return save_figure(figure, path)


def _draw_panel(axis: Any, entry: DeviceSweep) -> None:
    low, high = entry.s_values[0], entry.s_values[-1]
    log_axes(axis, [s for s in entry.s_values if math.log2(s).is_integer()])
    starts = [low, *(crossover.s_from for crossover in entry.crossovers[1:])]
    ends = [*starts[1:], high]
    for crossover, start, end in zip(entry.crossovers, starts, ends, strict=False):
        colour = series_colour(crossover.kernel, ())
        axis.axvspan(start, end, color=colour, alpha=0.10, linewidth=0)
        if start != low:
            mark_crossing(axis, start, f"s = {start:g}", 0.03)
    for name, predictions in entry.predictions.items():
        times = [(s, p.advised_us) for s, p in zip(entry.s_values, predictions, strict=True)]
        thin = name == "flash_mla_split_kv"
        style = {"linestyle": "--" if thin else "-", "linewidth": 1.4 if thin else 2.0}
        draw_line(axis, name, times, 0, (), **style)
    axis.set_xlim(low, high)
    title = shorten(entry.device.removeprefix("NVIDIA "), _TITLE_LENGTH, placeholder=" …")
    axis.set_title(title, loc="left", fontweight="bold", pad=18)
    axis.text(0, 1.02, entry.heading, transform=axis.transAxes, fontsize=8, color="#444444")


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    reference: float | None = None,
) -> list[Path]:
    """Draw named series of (x, y) points.

    Args:
        series: name -> points in ascending x.
        path: file without suffix.
        title: heading.
        x_label: what the x axis shows, with unit.
        y_label: what the y axis shows, with unit.
        log_x: logarithmic x axis, to the base 2.
        reference: value of y to compare with, drawn as a line.
    """
    from matplotlib.ticker import FuncFormatter

    with new_figure(7.6, 4.8) as figure:
        axis = figure.subplots()
        if reference is not None:
            axis.axhline(reference, color="#666666", linewidth=1.0)
        for index, (name, points) in enumerate(series.items()):
            marker = "o" if len(points) <= _MOST_MARKERS else None
            draw_line(axis, name, points, index, list(series), marker=marker, linewidth=1.8)
        if log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.legend(frameon=False)
        return save_figure(figure, path)


def bar_plot(
    groups: Mapping[str, Mapping[str, float]], path: Path, *, title: str, y_label: str
) -> list[Path]:
    """Draw grouped bars with their values on top.

    Args:
        groups: name below the group -> series -> value; a series may be missing in a group.
        path: file without suffix.
        title: heading.
        y_label: what the bars measure, with unit.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    with new_figure(max(6.0, 1.6 * len(groups) + 2.0), 4.6) as figure:
        axis = figure.subplots()
        for position, name in enumerate(names):
            places = [i for i, group in enumerate(groups.values()) if name in group]
            values = [group[name] for group in groups.values() if name in group]
            offset = (position - (len(names) - 1) / 2) * width
            bars = axis.bar(
                [place + offset for place in places],
                values,
                width * 0.92,
                label=name,
                color=series_colour(name, names),
            )
            axis.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        axis.set_xticks(range(len(groups)), list(groups))
        axis.grid(visible=False, axis="x")
        axis.set_ylabel(y_label)
        axis.margins(y=0.12)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.legend(frameon=False)
        return save_figure(figure, path)


def dense_s_values(last: int = S_VALUES[-1], per_octave: int = 8) -> list[int]:
    """Query lengths close enough for smooth curves, the powers of two among them."""
    steps = range(math.floor(math.log2(last) * per_octave) + 2)
    return sorted({s for i in steps if (s := round(2 ** (i / per_octave))) <= last})


def dense_sweeps(sweeps: Iterable[DeviceSweep]) -> list[DeviceSweep]:
    """The same predictions at enough points for smooth curves."""
    return [entry.resampled(dense_s_values(entry.s_values[-1])) for entry in sweeps]


def speedup_series(
    sweeps: Iterable[DeviceSweep], kernel: str = DESIGN
) -> dict[str, list[tuple[float, float]]]:
    """How much faster than the better of the two pure paths a kernel is predicted, per device."""
    series = {}
    for entry in sweeps:
        points = []
        for i, s in enumerate(entry.s_values):
            pure = min(entry.predictions[path][i].advised_us for path in PURE_PATHS)
            points.append((float(s), pure / entry.predictions[kernel][i].advised_us))
        series[entry.device.removeprefix("NVIDIA ")] = points
    return series
