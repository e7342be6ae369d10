"""Plots of predictions and comparisons: lines and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mla_var3.bench.plots import draw_lines, log_axes, new_figure, save_figure, series_colour


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool = False,
) -> list[Path]:
    """Draw named series of (x, y) points in ascending x; `path` has no suffix.

    Logarithmic axes have x to the base 2.
    """
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
