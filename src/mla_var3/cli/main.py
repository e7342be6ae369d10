"""The console script `hyper-mla`.

A command `x` is the module `mla_var3.cli.commands.x` with `add_arguments(parser)` and
`x_command(parser, argv)`. Kernels, torch and plots are imported by the command that needs them, so
that help and the list of kernels come at once.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import mla_var3
from mla_var3.cli.arguments import Parser, leading_words
from mla_var3.cli.console import guarded, usage_errors
from mla_var3.errors import UnknownNameError

COMMANDS = {
    "run": "run a kernel; without one the main job: mla_var6_plus end to end, with a report",
    "profile": "profile a kernel in the richest mode that runs here",
    "compare": "runs, versions or kernels side by side, against the first of them",
    "bench": "all kernels beside their peers: tables, plots, one HTML page, regression check",
    "list": "kernels, versions, languages, targets, and what runs on this machine",
    "show": "contract, options, cost, tiling candidates and cached tunings of one kernel",
    "predict": "predicted times of all kernels on the devices in the table",
    "choose": "the kernel that mla_attention uses for a problem, and why",
    "plan": "how many tokens to keep decompressed in the memory there is, and the time to expect",
    "accuracy": "what each 8-bit format of the cache costs in accuracy, against float64",
    "clone": "a new version of a kernel from an existing one, under new names",
    "env": "this machine: GPU, versions, programs found and missing, known devices",
    "doctor": "whether and how vLLM or SGLang here will use the kernels, with the exact flag",
}


def _show_help(argv: list[str]) -> int:
    text = "Multi-head Latent Attention kernels, and the workbench they are made on."
    more = "hyper-mla <command> --help tells more about a command."
    parser = Parser(prog="hyper-mla", description=text, epilog=more)
    parser.add_argument("--version", action="version", version=f"hyper-mla {mla_var3.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="<command>")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    parser.parse(argv)
    parser.print_help()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _dispatch(arguments))


def _dispatch(argv: list[str]) -> int:
    words, rest = leading_words(argv, 1)
    if not words:
        return _show_help(argv)
    (name,) = words
    with usage_errors():
        if name not in COMMANDS:
            raise UnknownNameError("command", name, COMMANDS)
    module = command_module(name)
    parser = Parser(prog=f"hyper-mla {name}", description=COMMANDS[name])
    module.add_arguments(parser)
    return int(getattr(module, f"{name}_command")(parser, rest))


def command_module(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"mla_var3.cli.commands.{name}")


if __name__ == "__main__":
    raise SystemExit(main())
