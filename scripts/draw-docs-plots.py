#!/usr/bin/env python3
"""Draw the pictures of the documentation from the records.

    python scripts/draw-docs-plots.py            draw them into docs/images
    python scripts/draw-docs-plots.py --check    say whether they are up to date, change nothing

docs/images/sources.json holds a digest of what each picture was made from, so that a picture that
no longer shows the records is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

IMAGES = ROOT / "docs" / "images"
MANIFEST = "sources.json"
SPEEDUP_RECORD = "docs/results/2026-11-16-nvidia-h200-sweep.json"
ROOFLINE_RECORDS = (
    "docs/results/2026-11-15-nvidia-h200.json",
    "docs/results/2026-11-15-nvidia-h200-absorbed.json",
)
SOURCES = {
    "measured-speedup.svg": (SPEEDUP_RECORD,),
    "measured-roofline.svg": (*ROOFLINE_RECORDS, "src/mla_var3/conf/devices.json"),
}
OURS = "HyperMLA"
SPEEDUP_SHAPE = (32, 4096, 128)
"""b, t and h of the picture."""


def digest(paths: Sequence[str]) -> str:
    """One digest over the contents of some files of the repository."""
    total = hashlib.sha256()
    for path in paths:
        total.update(path.encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return total.hexdigest()


def manifest() -> dict[str, dict[str, object]]:
    """What each picture is made from, as it is now."""
    return {
        name: {"made_from": list(paths), "sha256": digest(paths)} for name, paths in SOURCES.items()
    }


def outdated(images: Path) -> list[str]:
    """Pictures that are missing or made from something else than there is now."""
    file = images / MANIFEST
    known = json.loads(file.read_text()) if file.is_file() else {}
    return [
        name
        for name, made in manifest().items()
        if known.get(name) != made or not (images / name).is_file()
    ]


def speedups(record: Path) -> dict[str, list[tuple[int, float]]]:
    """Speed over the best peer by query tokens: our fastest 16-bit kernel, and each peer."""
    from mla_var3.bench.analysis import shape_groups
    from mla_var3.bench.record import load_record

    series: dict[str, list[tuple[int, float]]] = {OURS: []}
    for group in sorted(shape_groups(load_record(record).rows), key=lambda one: one.problem.s):
        best, rival, problem = group.best_ours, group.best_rival, group.problem
        shown = (problem.b, problem.t, problem.h) == SPEEDUP_SHAPE
        if not shown or best is None or rival is None:
            continue
        s, limit = group.problem.s, group.figure(rival)
        series[OURS].append((s, limit / group.figure(best)))
        for row in group.rivals:
            series.setdefault(row.label, []).append((s, limit / group.figure(row)))
    return series


def draw_speedups(record: Path, path: Path) -> None:
    """Our curve is the prominent one."""
    from mla_var3.bench.plots import LINE_STYLES, new_figure, save_figure

    series = speedups(record)
    with new_figure(8.0, 4.2) as figure:
        axis = figure.subplots()
        for style, (name, points) in zip([*LINE_STYLES] * 3, series.items(), strict=False):
            ours = name == OURS
            look = {
                "color": "#D55E00" if ours else "#777777",
                "linewidth": 3.0 if ours else 1.2,
                "linestyle": "-" if ours else style,
                "marker": "o" if ours else None,
                "zorder": 3 if ours else 2,
            }
            axis.plot(*zip(*points, strict=True), label=name, **look)
        for s, gain in series[OURS]:
            axis.annotate(
                f"{gain:.2f}x", (s, gain), (0, 7), textcoords="offset points", ha="center"
            )
        ticks = [s for s, _ in series[OURS]]
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(s) for s in ticks])
        axis.minorticks_off()
        axis.set_ylim(0.4, max(gain for _, gain in series[OURS]) + 0.12)
        axis.set(xlabel="query tokens per request, s", ylabel="speed, best peer = 1")
        axis.set_title("MLA attention call on an H200, b=32 t=4096 h=128, bfloat16")
        axis.legend(loc="lower left", ncols=2)
        save_figure(figure, path, ("svg",))


def draw(images: Path) -> None:
    """Draw all pictures."""
    from mla_var3.bench.plots import draw_plots
    from mla_var3.bench.record import load_record, merge_records
    from mla_var3.runtime.paths import write_atomic

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        draw_speedups(ROOT / SPEEDUP_RECORD, made / "over-peers")
        draw_plots(merge_records(load_record(ROOT / path) for path in ROOFLINE_RECORDS), made)
        for target, name in zip(SOURCES, ("over-peers.svg", "roofline.svg"), strict=True):
            lines = (made / name).read_text().splitlines()
            write_atomic(images / target, "\n".join(line.rstrip() for line in lines) + "\n")
    write_atomic(images / MANIFEST, json.dumps(manifest(), indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, or check; 0 when the pictures are up to date afterwards."""
    parser = argparse.ArgumentParser(description="pictures of the documentation")
    parser.add_argument("--check", action="store_true", help="change nothing, tell what is old")
    options = parser.parse_args(argv)
    if not options.check:
        draw(IMAGES)
        print(f"{len(SOURCES)} pictures in {IMAGES.relative_to(ROOT)}")
    old = outdated(IMAGES)
    for name in old:
        print(f"docs/images/{name}: not made from what there is now; run {Path(__file__).name}")
    return 1 if old else 0


if __name__ == "__main__":
    raise SystemExit(main())
