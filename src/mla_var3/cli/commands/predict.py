"""`hyper-mla predict`: what the cost model says about a problem on the devices it knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mla_var3.cli.arguments import (
    MIXED,
    SIZES,
    Parser,
    add_lengths,
    add_sizes,
    mixed_lengths,
    parse,
)
from mla_var3.cli.console import say, stdout, usage_errors
from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.sweep import DeviceSweep, sweep
from mla_var3.runtime.markdown import json_ready, microseconds


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    add_sizes(parser)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        metavar="NAME",
        help="bfloat16 or float16 (default: bfloat16)",
    )
    add_lengths(parser)
    parser.add_for_device("one device of the table (default: all of them)", "device", "device")
    parser.add_argument("--json", action="store_true", help="print JSON")


def predict_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the predicted times of all kernels."""
    values = parse(parser, argv)
    with usage_errors():
        device = values.pop("device")
        specs = [device_spec(device)] if device is not None else list(load_devices().values())
    as_json = values.pop("json")
    if values["lengths"] == MIXED:
        values["lengths"] = mixed_lengths(values["b"], values["t"])
    problem = MlaProblem(**values)
    sweeps = [sweep(problem, spec, (problem.s,)) for spec in specs]
    if as_json:
        print(json.dumps(json_ready([entry.to_dict() for entry in sweeps]), indent=2))
        return 0
    _print_tables(problem, sweeps)
    return 0


def _print_tables(problem: MlaProblem, sweeps: Sequence[DeviceSweep]) -> None:
    sizes = " ".join(f"{name}={getattr(problem, name)}" for name in SIZES)
    table = Table(title=f"predicted, {sizes} {problem.dtype}", title_justify="left")
    for title in ("device", "kernel", "kernel time", "end to end", "bound", "choice"):
        table.add_column(title, justify="right" if "time" in title or "end" in title else "left")
    for entry in sweeps:
        fastest = entry.fastest(0)
        for kernel, (prediction,) in entry.predictions.items():
            choice = ""
            if prediction.n is not None:
                choice = f"n={prediction.n}"
            elif prediction.splits is not None:
                choice = f"splits={prediction.splits}"
            first = kernel == next(iter(entry.predictions))
            table.add_row(
                entry.device if first else "",
                kernel + (" *" if kernel == fastest else ""),
                microseconds(prediction.time_us),
                microseconds(prediction.end_to_end_us),
                prediction.bound,
                choice,
                style="bold" if kernel == fastest else "",
                end_section=kernel == list(entry.predictions)[-1],
            )
    stdout().print(table)
    say("* fastest end to end: kernel plus the projections it leaves to others")
    for entry in sweeps:
        say(f"{entry.device}: rates {_rates(entry)}")
    say("These are roofline predictions, not measurements.")


def _rates(entry: DeviceSweep) -> str:
    parts: list[Any] = []
    for rate in (entry.compute, entry.memory):
        parts.append(
            f"{rate.value:g} {rate.unit} ({'sustained' if rate.sustained else 'vendor peak'})"
        )
    return ", ".join(parts)
