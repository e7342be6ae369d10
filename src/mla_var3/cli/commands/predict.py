"""`hyper-mla predict`: kernel and call times of a problem on the devices of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence

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
from mla_var3.op.mla.model.times import IDEAL
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
    for entry in sweeps:
        title = f"{entry.device}, {'predicted' if entry.fitted else IDEAL}"
        table = Table(title=title, title_justify="left")
        for name in ("kernel", "kernel time", "call time", "steady", "choice"):
            right = "time" in name or name == "steady"
            table.add_column(name, justify="right" if right else "left", no_wrap=True)
        fastest = entry.fastest(0)
        for kernel, (found,) in entry.predictions.items():
            name = f"{kernel}:{found.language}" if found.language else kernel
            table.add_row(
                name + (" *" if kernel == fastest else ""),
                microseconds(found.kernel_us),
                microseconds(found.call_us),
                microseconds(found.steady_call_us),
                " ".join(f"{key}={value}" for key, value in found.choice.items()),
                style="bold" if kernel == fastest else "",
            )
        stdout().print(table)
    say(f"{sizes} {problem.dtype}. Predictions, not measurements.")
    say("call time: kernel time and projections; steady: call time at the power limit")
    say("decompressed tokens are in the cache; * least steady (else burst) call time")
    for entry in sweeps:
        sources = {found.basis: None for (found,) in entry.predictions.values()}
        say(f"{entry.device}: {'; '.join(sources)}")
