"""`hyper-mla predict`: kernel and call times of a problem on the devices of the table."""

from __future__ import annotations

from collections.abc import Sequence

from mla_var3.cli.arguments import Parser, read_lengths, read_problem, sizes_text, width_notes
from mla_var3.cli.console import print_json, print_table, say, usage_errors
from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.op.mla.model.times import IDEAL
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.sweep import DeviceSweep, sweep
from mla_var3.runtime.markdown import microseconds


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_problem()
    parser.add_option("dtype", "NAME", "bfloat16 or float16", default="bfloat16")
    parser.add_lengths()
    text = "one device of the table (default: all of them)"
    parser.add_option("for_device", "NAME", text, dest="device")
    parser.add_json()


def predict_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print the predicted times of all kernels."""
    values = parser.parse(argv)
    with usage_errors():
        device = values.pop("device")
        specs = [device_spec(device)] if device is not None else list(load_devices().values())
    as_json = values.pop("json")
    read_problem(values)
    values["lengths"] = read_lengths(values["lengths"], values["b"], values["t"])
    problem = MlaProblem(**values)
    sweeps = [sweep(problem, spec, (problem.s,)) for spec in specs]
    if as_json:
        print_json([entry.to_dict() for entry in sweeps])
    else:
        _print_tables(problem, sweeps)
    return 0


def _print_tables(problem: MlaProblem, sweeps: Sequence[DeviceSweep]) -> None:
    for entry in sweeps:
        fastest = entry.fastest(0)
        rows = []
        for kernel, (found,) in entry.predictions.items():
            name = f"{kernel}:{found.language}" if found.language else kernel
            times = map(microseconds, (found.kernel_us, found.call_us, found.steady_call_us))
            choice = " ".join(f"{key}={value}" for key, value in found.choice.items())
            rows.append((name + " *" * (kernel == fastest), *times, choice))
        title = f"{entry.spec.name}, {'predicted' if entry.fitted else IDEAL}"
        best = list(entry.predictions).index(fastest) if fastest else None
        print_table(title, ("kernel", "kernel time", "call time", "steady", "choice"), rows, best)
    say(f"{sizes_text(problem)} {problem.dtype}. Predictions, not measurements.")
    for text in width_notes(problem):
        say(text)
    say("call time: kernel time and projections; steady: call time at the power limit")
    say("decompressed tokens are in the cache; * least steady (else burst) call time")
    if not all(entry.fitted for entry in sweeps):
        say(f"{IDEAL}: with every SM busy; hyper-mla choose counts those that cuTile leaves idle")
    for entry in sweeps:
        sources = {found.basis: None for (found,) in entry.predictions.values()}
        say(f"{entry.spec.name}: {'; '.join(sources)}")
