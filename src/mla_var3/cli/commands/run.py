"""`hyper-mla run`: one kernel, or without one the main job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.cli.arguments import CALL_SIZES, SIZES, Parser, ValueType, read_model, take_kernel
from mla_var3.cli.console import UsageError

EPILOG = """\
With a kernel the options are those of the kernel:
  hyper-mla run <kernel> [<version>] [options]
  hyper-mla run flash_mla --help
"""


def add_arguments(parser: Parser) -> None:
    """The options of the main job."""
    parser.epilog = EPILOG
    parser.add_argument("kernel", nargs="?", help="kernel id; left out: the main job")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    job = parser.add_argument_group("main job")
    job.add_flag("quick", "smaller steps, about half the time")
    job.add_option("device", "NAME", "auto, cuda or cpu", default="auto")
    text = "folder of the report (default: out/overview/<timestamp>)"
    job.add_option("out_dir", "FOLDER", text, type=Path)
    text = "time to search tilings on a GPU, for all kernels together (default: 15)"
    job.add_option("tune_seconds", "SECONDS", text, type=ValueType(float))
    text = "the peers' libraries, where they are not installed"
    job.add_option("peer_libs", "FOLDER", text, type=Path)
    job.add_sizes(CALL_SIZES, default=argparse.SUPPRESS)
    job.add_model()


def run_command(parser: Parser, argv: Sequence[str]) -> int:
    """Run the kernel that the command line names, or the main job; returns the exit code."""
    kernel, rest = take_kernel(argv)
    if kernel is not None:
        from mla_var3.cli.commands.kernel import run_kernel

        return run_kernel(kernel, rest, prog=f"hyper-mla run {kernel.full_name}")
    from mla_var3.cli.commands.overview import overview_command

    values = parser.parse(rest)
    return overview_command({**values, "sizes": _sizes(values)})


def _sizes(values: dict[str, Any]) -> dict[str, int]:
    """The sizes of the main job; widths only where they are not the default ones."""
    model = read_model(values)
    if model and (model["v"] != model["d"] or not model["p"]):
        raise UsageError(
            "--model: expected one with v=d and p > 0, which every kernel of the main job takes, "
            f"got d={model['d']}, v={model['v']}, p={model['p']}; use hyper-mla choose or predict"
        )
    sizes = {name: values.get(name, model.get(name, SIZES[name])) for name in CALL_SIZES}
    return sizes | {n: size for n, size in model.items() if n in SIZES and size != SIZES[n]}
