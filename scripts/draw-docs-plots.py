#!/usr/bin/env python3
"""Draw the pictures of the documentation from the records and the cost model.

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
RECORDS = (
    "docs/results/2026-11-15-nvidia-h200.json",
    "docs/results/2026-11-15-nvidia-h200-absorbed.json",
)
MODEL = ("src/mla_var3/op/mla/cost.py", "src/mla_var3/conf/devices.json")
SOURCES = {
    "measured-time-over-s.svg": RECORDS,
    "measured-roofline.svg": (*RECORDS, MODEL[1]),
    "model-crossover.svg": MODEL,
    "model-gain.svg": MODEL,
}
DEVICES = ("NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090")


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


def draw(images: Path) -> None:
    """Draw all pictures."""
    from mla_var3.bench.plots import draw_plots
    from mla_var3.bench.record import load_record, merge_records
    from mla_var3.conf.devices import device_spec
    from mla_var3.op.mla.problem import MlaProblem
    from mla_var3.report.plots import (
        crossover_panels,
        crossover_plot,
        dense_sweeps,
        line_plot,
        speedup_series,
    )
    from mla_var3.report.sweep import sweep
    from mla_var3.runtime.files import write_atomic

    problem = MlaProblem(b=32, s=16, t=4096, h=128)
    sizes = "b=32, t=4096, h=128, bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        draw_plots(merge_records(load_record(ROOT / path) for path in RECORDS), made)
        dense = dense_sweeps([sweep(problem, device_spec(name)) for name in DEVICES])
        heading = f"Predicted call time of MLA attention, {sizes}"
        crossover_plot(crossover_panels(dense), made / "crossover", heading, ("svg",))
        line_plot(
            speedup_series(dense),
            made / "gain",
            title=f"mla_var6_plus: predicted gain over the better pure path\n{sizes}",
            x_label="query tokens per request, s",
            y_label="time of the better pure path / time of mla_var6_plus",
            log_x=True,
            reference=1.0,
            formats=("svg",),
        )
        names = ("time_s.svg", "roofline.svg", "crossover.svg", "gain.svg")
        for target, name in zip(SOURCES, names, strict=True):
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
