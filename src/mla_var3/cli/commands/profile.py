"""`hyper-mla profile`: profile a kernel in the richest mode that runs here."""

from __future__ import annotations

from collections.abc import Sequence

from mla_var3.cli.arguments import Parser, require_kernel

EPILOG = """\
The other options are those of the kernel, as for run:
  hyper-mla profile mla_var6_plus --b=32 --s=16 --t=4096 --prof_type=nsys
  hyper-mla profile flash_mla --help
Several versions side by side: hyper-mla compare mla_var6_plus:v0 mla_var6_plus:v2
"""


def add_arguments(parser: Parser) -> None:
    """The arguments that are not the kernel's own."""
    parser.epilog = EPILOG
    parser.add_argument("kernel", help="kernel id, such as mla_var6_plus")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    text = "profiling mode (default: the richest one that runs here)"
    parser.add_option("prof_type", "MODE", text)


def profile_command(parser: Parser, argv: Sequence[str]) -> int:
    """Profile what the command line names; returns the exit code."""
    from mla_var3.cli.commands.kernel import run_kernel

    kernel, rest = require_kernel(parser, argv)
    return run_kernel(kernel, rest, f"hyper-mla profile {kernel.full_name}")
