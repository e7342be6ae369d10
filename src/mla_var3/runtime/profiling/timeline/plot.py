"""The timeline of one run as a picture: streams as lanes, kernels as labelled bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.runtime.profiling.timeline.analysis import Analysis, Iteration, Piece
from mla_var3.runtime.profiling.timeline.outline import Outline

# Okabe and Ito's palette, told apart with every common form of colour blindness; the dark ones,
# which carry white text, come first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#444444")
_DARK = ("#0072B2", "#D55E00", "#009E73", "#444444")
_OTHER = "#999999"
_HOST = "#E5E5E5"
_LABEL = 9
_DPI = 150
_WIDTH = 11.0
_CHARACTER_SHARE = 0.0082
"""Width of one character of a label, as a part of the axis."""


def timeline_plot(analysis: Analysis, path: Path, title: str) -> Path:
    """Draw the typical queued run, and below it the typical host-paced one with the host's calls.

    Args:
        analysis: of a timeline.
        path: PNG file.
        title: heading.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = [(analysis.typical(), "enqueued ahead: what the GPU can do", False)]
    if analysis.host_paced:
        run = analysis.typical(analysis.host_paced)
        panels.append((run, "on an idle GPU: at the pace of the host's launches", True))
    lanes = [len(_streams(run)) + int(host) for run, _, host in panels]
    style: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        height = 1.5 + sum(0.55 * count + 0.95 for count in lanes)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": [c + 1 for c in lanes]}
        )
        for axis, (run, heading, host) in zip(grid.flat, panels, strict=True):
            _draw(axis, analysis.shape, run, heading, host)
        grid[-1, 0].set_xlabel("time, µs")
        _legend(figure, analysis.shape, [run for run, _, _ in panels])
        figure.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=12, fontweight="bold")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        figure.savefig(temporary, format="png", dpi=_DPI)
        temporary.replace(path)
    return path


def _streams(run: Iteration) -> list[int]:
    return list(dict.fromkeys(piece.activity.stream for piece in run.pieces))


def colour_of(piece: Piece) -> str:
    """The colour of a kernel, by its place in the launch order."""
    return _OTHER if piece.leaf is None else _COLOURS[piece.leaf % len(_COLOURS)]


def _draw(axis: Any, shape: Outline, run: Iteration, heading: str, host: bool) -> None:
    streams = _streams(run)
    rows = {stream: place for place, stream in enumerate(streams)}
    first, last = run.span
    origin = run.host.start if host else first
    end = max(last, run.host.end) if host else last
    width = (end - origin) / 1e3
    for piece in run.pieces:
        _draw_piece(axis, shape, piece, origin, rows[piece.activity.stream], width)
    labels = [f"stream {stream}" for stream in streams]
    if host:
        place = len(streams)
        labels.append("host")
        axis.barh(place, (run.host.end - origin) / 1e3, left=0, height=0.62, color=_HOST)
        for piece in run.pieces:
            left = (piece.launch.start - origin) / 1e3
            length = piece.launch.duration / 1e3
            axis.barh(place, length, left=left, height=0.62, color=colour_of(piece))
            axis.plot(
                [left, (piece.activity.start - origin) / 1e3],
                [place - 0.31, rows[piece.activity.stream] + 0.36],
                color="#888888",
                linewidth=0.7,
                linestyle=":",
            )
    for start, stop in run.gaps():
        left, right = (start - origin) / 1e3, (stop - origin) / 1e3
        axis.axvspan(left, right, color="#000000", alpha=0.07, linewidth=0)
    axis.set_yticks(range(len(labels)), labels)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.set_xlim(0, width * 1.01)
    axis.grid(axis="x", alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.set_title(f"{heading}; {run.span_ns / 1e3:.1f} µs on the GPU", loc="left", fontsize=10)


def _draw_piece(
    axis: Any, shape: Outline, piece: Piece, origin: int, row: int, width: float
) -> None:
    left, length = (piece.activity.start - origin) / 1e3, piece.activity.duration / 1e3
    colour = colour_of(piece)
    axis.barh(row, length, left=left, height=0.72, color=colour, edgecolor="white", linewidth=0.8)
    name = piece_label(shape, piece)
    for text in (f"{name}  {length:.1f} µs", name, f"{length:.1f} µs", f"{length:.0f}"):
        if len(text) * _CHARACTER_SHARE < length / width:
            text_colour = "white" if colour in _DARK else "black"
            where = (left + length / 2, row)
            axis.text(
                *where, text, ha="center", va="center", fontsize=_LABEL, color=text_colour,
                clip_on=True,
            )  # fmt: skip
            return


def piece_label(shape: Outline, piece: Piece) -> str:
    """Stage name of an activity, or a short form of its own name."""
    if piece.leaf is not None:
        return shape.leaves[piece.leaf]
    return textwrap.shorten(piece.activity.name.split("(")[0], 40, placeholder="…")


def _legend(figure: Any, shape: Outline, runs: Sequence[Iteration]) -> None:
    from matplotlib.patches import Patch

    entries: dict[str, str] = {}
    for run in runs:
        for piece in run.pieces:
            name = piece_label(shape, piece) if piece.leaf is not None else "other"
            entries.setdefault(name, colour_of(piece))
    handles = [Patch(color=colour, label=name) for name, colour in entries.items()]
    if any(run.gaps() for run in runs):
        handles.append(Patch(color="#000000", alpha=0.12, label="GPU idle"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
