"""Plots of predictions and comparisons: crossovers between kernels, lines and bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from mla_var3.bench.plots import FORMATS, LINE_STYLES, new_figure, save_figure, series_colour
from mla_var3.bench.suites import DESIGN, PURE_PATHS
from mla_var3.report.sweep import S_VALUES, DeviceSweep

_MOST_MARKERS = 12
"""More points than this make a curve, not a row of measurements."""
_DASHED = ("flash_mla_split_kv",)
_TITLE_LENGTH = 36
"""Characters that fit above a small plot."""


@dataclass(frozen=True)
class Region:
    """A stretch of the x axis, both ends included, in which one series is best."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """One device's crossover plot.

    Attributes:
        title: device name.
        subtitle: what the curves assume.
        x: query lengths.
        curves: kernel -> time in microseconds per query length.
        regions: where which kernel is fastest, in ascending order.
    """

    title: str
    subtitle: str
    x: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    regions: Sequence[Region] = ()


def crossover_plot(
    panels: Sequence[Panel], path: Path, heading: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw predicted time against query length, one small plot per device.

    Args:
        panels: the devices; they share the axes so that they can be compared.
        path: file without suffix.
        heading: what was predicted, for which sizes.
        formats: file formats.

    Returns:
        The files written.
    """
    if not panels:
        raise ValueError("panels: expected at least one, got none")
    columns = 1 if len(panels) == 1 else 2 if len(panels) in (2, 4) else 3
    rows = math.ceil(len(panels) / columns)
    width, height = (7.6, 5.2) if columns == 1 else (4.3 * columns, 3.6 * rows + 1.2)
    with new_figure(width, height) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        axes = list(grid.flat)
        for axis, panel in zip(axes, panels, strict=False):
            _draw_panel(axis, panel)
        # An unused cell of the grid holds the legend, so that it covers no curve.
        spare = axes[len(panels) :]
        for axis in spare:
            axis.set_axis_off()
        for index in range(len(panels)):
            last_row = index + columns >= len(panels)
            if last_row:
                axes[index].set_xlabel("query tokens per request, s")
                axes[index].tick_params(labelbottom=True)
            if index % columns == 0:
                axes[index].set_ylabel("predicted time, µs")
        handles, labels = _legend_entries(axes[: len(panels)])
        if spare:
            spare[0].legend(handles, labels, loc="center left", frameon=False, borderaxespad=0)
        else:
            figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=3 if columns < 3 else 5,
                frameon=False,
            )
        figure.suptitle(heading, fontsize=12, fontweight="bold")
        return save_figure(figure, path, formats)


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    low, high = min(panel.x), max(panel.x)
    boundaries = [region.start for region in panel.regions[1:]]
    for i, region in enumerate(panel.regions):
        start = low if i == 0 else boundaries[i - 1]
        end = high if i == len(panel.regions) - 1 else boundaries[i]
        axis.axvspan(start, end, color=series_colour(region.name, ()), alpha=0.10, linewidth=0)
        if i:
            axis.axvline(start, color="#666666", linewidth=0.9, linestyle=":")
            axis.annotate(
                f"s = {start:g}",
                (start, 0.03),
                xycoords=("data", "axes fraction"),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=8,
                color="#333333",
            )
    for name, times in panel.curves.items():
        axis.plot(
            panel.x,
            times,
            label=name,
            color=series_colour(name, ()),
            linestyle="--" if name in _DASHED else "-",
            linewidth=1.4 if name in _DASHED else 2.0,
        )
    axis.set_xlim(low, high)
    ticks = [x for x in panel.x if math.log2(x).is_integer()]
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.minorticks_off()
    axis.set_title(
        shorten(panel.title, _TITLE_LENGTH, placeholder=" …"),
        loc="left",
        fontweight="bold",
        pad=18 if panel.subtitle else 6,
    )
    if panel.subtitle:
        axis.text(0, 1.02, panel.subtitle, transform=axis.transAxes, fontsize=8, color="#444444")


def _legend_entries(axes: Sequence[Any]) -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries["shaded: fastest, end to end"] = Patch(color="#888888", alpha=0.25)
    return list(entries.values()), list(entries)


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
    reference: float | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Draw named series of (x, y) points.

    Args:
        series: name -> points in ascending x.
        path: file without suffix.
        title: heading.
        x_label: what the x axis shows, with unit.
        y_label: what the y axis shows, with unit.
        log_x: logarithmic x axis, to the base 2.
        log_y: logarithmic y axis.
        reference: value of y to compare with, drawn as a line.
        formats: file formats.
    """
    from matplotlib.ticker import FuncFormatter

    with new_figure(7.6, 4.8) as figure:
        axis = figure.subplots()
        if reference is not None:
            axis.axhline(reference, color="#666666", linewidth=1.0)
        for index, (name, points) in enumerate(series.items()):
            xs, ys = zip(*points, strict=True)
            axis.plot(
                xs,
                ys,
                marker="o" if len(xs) <= _MOST_MARKERS else None,
                markersize=4,
                linewidth=1.8,
                # Curves on top of each other stay visible when their dashes differ.
                linestyle=LINE_STYLES[index % len(LINE_STYLES)],
                label=name,
                color=series_colour(name, list(series)),
            )
        if log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if log_y:
            axis.set_yscale("log")
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.set_title(title, loc="left", fontweight="bold")
        axis.legend(frameon=False)
        return save_figure(figure, path, formats)


def bar_plot(
    groups: Mapping[str, Mapping[str, float]],
    path: Path,
    *,
    title: str,
    y_label: str,
    formats: Sequence[str] = FORMATS,
) -> list[Path]:
    """Draw grouped bars with their values on top.

    Args:
        groups: name below the group -> series -> value; a series may be missing in a group.
        path: file without suffix.
        title: heading.
        y_label: what the bars measure, with unit.
        formats: file formats.
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
        return save_figure(figure, path, formats)


def dense_s_values(last: int = S_VALUES[-1], per_octave: int = 8) -> list[int]:
    """Query lengths close enough for smooth curves, the powers of two among them."""
    values, i = set(), 0
    while (s := round(2 ** (i / per_octave))) <= last:
        values.add(s)
        i += 1
    return sorted(values)


def crossover_panels(sweeps: Iterable[DeviceSweep]) -> list[Panel]:
    """One panel per device."""
    return [
        Panel(
            title=entry.device.removeprefix("NVIDIA "),
            subtitle=entry.heading,
            x=entry.s_values,
            curves={
                kernel: [prediction.advised_us for prediction in predictions]
                for kernel, predictions in entry.predictions.items()
            },
            regions=[Region(c.kernel, c.s_from, c.s_to) for c in entry.crossovers],
        )
        for entry in sweeps
    ]


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


def dense_sweeps(sweeps: Iterable[DeviceSweep]) -> list[DeviceSweep]:
    """The same predictions at enough points for smooth curves."""
    return [entry.resampled(dense_s_values(entry.s_values[-1])) for entry in sweeps]
