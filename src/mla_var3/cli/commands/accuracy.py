"""`hyper-mla accuracy`: what each 8-bit cache format costs in accuracy, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.cli.arguments import Parser, ValueType
from mla_var3.cli.console import ProgressReporter, print_json, print_table, say
from mla_var3.runtime.markdown import table, write_json
from mla_var3.runtime.paths import make_folder, output_root, timestamp, write_atomic

if TYPE_CHECKING:
    from mla_var3.report.accuracy import AccuracyRow


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    text = (
        "latents of a model, as examples/capture_latents.py writes them (default: made ones: "
        "normal, heavy-tailed, one hot channel)"
    )
    parser.add_option("latents", "FILE", text, type=Path)
    text = "the one scale of the format fp8; 1 as in engines without calibration"
    parser.add_option("scale", "X", text, type=ValueType(float), default=1.0)
    parser.add_option("seed", "N", "of what is made", type=ValueType(int), default=0)
    parser.add_flag("quick", "up to 2048 tokens, not 131072")
    parser.add_json()
    text = "folder of table, JSON and plot (default: out/accuracy/<timestamp>; none with --json)"
    parser.add_option("out_dir", "FOLDER", text, type=Path)


def accuracy_command(parser: Parser, argv: Sequence[str]) -> int:
    """Measure, print and write the errors."""
    values = parser.parse(argv)
    from mla_var3.op.mla.problem import MOST, require_int, require_scale
    from mla_var3.report.accuracy import accuracy_plot, cases, kernel_here, measure, read_latents

    require_scale(values["scale"])
    require_int("seed", values["seed"], minimum=-MOST, maximum=MOST)
    given = None if values["latents"] is None else read_latents(values["latents"])
    out_dir = values["out_dir"]
    if out_dir is None and not values["json"]:
        out_dir = output_root() / "accuracy" / timestamp()
    folder = None if out_dir is None else make_folder(out_dir)
    options = {"scale": values["scale"], "seed": values["seed"]}
    rows: list[AccuracyRow] = []
    kernel = kernel_here()
    todo = cases(given, values["quick"])
    with ProgressReporter() as progress:
        for index, (latents, lengths) in enumerate(todo):
            progress("accuracy", index, len(todo), latents.name)
            rows += measure(latents, lengths, **options, kernel=kernel)
        progress("accuracy", len(todo), len(todo), "")
    record = {**options, "kernel": kernel, "rows": [asdict(row) for row in rows]}
    if values["json"]:
        print_json(record)
    else:
        _print(rows, values["scale"], kernel)
    if folder is None:
        return 0
    written = [folder / "accuracy.json", folder / "accuracy.md"]
    write_json(written[0], record)
    write_atomic(written[1], table(*_cells(rows)) + "\n")
    for file in [*written, *accuracy_plot(rows, folder / "accuracy")]:
        if not values["json"]:
            say(f"written: {file}")
    return 0


def _cells(rows: Sequence[AccuracyRow]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells: a row per case, a column per cache, errors in percent."""
    caches = list(rows[0].errors)
    cells = [
        [row.latents, row.attention, str(row.t)]
        + [f"{100 * row.errors[name].channels:.2f}" for name in caches]
        for row in rows
    ]
    return ["latents", "attention", "t", *caches], cells


def _print(rows: Sequence[AccuracyRow], scale: float, kernel: str | None) -> None:
    print_table("error of the attention output, % per latent channel", *_cells(rows))
    say("only the cache is rounded; reference: float64 on unrounded tokens")
    if kernel is not None:
        say(f"kernel: {kernel} on the GPU here, which also rounds queries and probabilities")
    say(f"fp8 has one scale, {scale:g}; fp8 rounds rope keys too, the others keep bfloat16")
