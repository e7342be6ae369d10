"""`hyper-mla list`: which kernels there are and what can be done with them here; models by name.

Imports neither torch nor a kernel language; it reads folders and package metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mla_var3.cli.arguments import Parser
from mla_var3.cli.console import print_json, print_table, say
from mla_var3.conf.models import models
from mla_var3.runtime import paths
from mla_var3.runtime.environment import installed, run_tool


@dataclass(frozen=True)
class Gpu:
    """The first GPU of this machine, as the driver reports it."""

    name: str
    target: str


@cache
def find_gpu() -> tuple[Gpu | None, str]:
    """The first GPU as nvidia-smi reports it, or None and why there is none.

    torch would know it too, but takes seconds to import.
    """
    query = ("--query-gpu=name,compute_cap", "--format=csv,noheader")
    found = run_tool("nvidia-smi", *query)
    if not found:
        return None, "nvidia-smi finds none"
    name, _, capability = found.splitlines()[0].rpartition(",")
    return Gpu(name.strip(), f"sm_{capability.strip().replace('.', '')}"), ""


def inventory() -> list[dict[str, Any]]:
    """All kernel versions and what can be done with each on this machine, JSON-ready."""
    gpu, no_gpu = find_gpu()
    rows = []
    for kernel in paths.discover_kernels():
        targets = paths.declared_targets(kernel)
        distribution = paths.LANGUAGE_DISTRIBUTIONS[kernel.language]
        extra = paths.LANGUAGE_EXTRAS[kernel.language]
        missing = "" if installed(distribution) else f'pip install "hyper-mla[{extra}]"'
        gpu_reason = no_gpu if gpu is None else ""
        if missing:
            gpu_reason = f"{distribution} is not installed: {missing}"
        elif gpu is not None and gpu.target not in targets:
            gpu_reason = f"made for {', '.join(targets)}, this GPU is {gpu.target}"
        cpu = not missing and kernel.language == "cutile-dsl"
        cpu_reason = None if cpu else missing or "only cutile-dsl has an interpreter"
        names = ("version", "full_name", "language", "layer", "module")
        row = {"kernel": kernel.design, **{name: getattr(kernel, name) for name in names}}
        row |= {"targets": list(targets), "compiles": not missing}
        row["gpu"] = {"runs": not gpu_reason, "reason": gpu_reason or None}
        row["cpu"] = {"runs": cpu, "reason": cpu_reason}
        rows.append(row)
    return rows


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    parser.add_json()


def list_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print all kernels."""
    as_json = parser.parse(argv)["json"]
    rows = inventory()
    if as_json:
        print_json(rows)
        return 0
    gpu, no_gpu = find_gpu()
    cells = []
    for row in rows:
        serves = (row["gpu"]["runs"], row["cpu"]["runs"], row["compiles"])
        names = (row["full_name"], row["language"], " ".join(row["targets"]))
        cells.append((*names, *("yes" if value else "no" for value in serves)))
    headers = ("kernel", "language", "targets", "GPU", "CPU", "compiles")
    print_table("kernels", headers, cells)
    say("GPU, CPU, compiles: whether it runs and compiles on this machine")
    say(f"GPU: {gpu.name} ({gpu.target})" if gpu else f"GPU: none, {no_gpu}")
    for place in ("gpu", "cpu"):
        for reason in dict.fromkeys(row[place]["reason"] for row in rows):
            if reason and reason != no_gpu:
                say(f"{place.upper()}, no: {reason}")
    say("")
    widths = [(m.name, *m.widths, m.heads, ", ".join(m.aliases)) for m in models().values()]
    print_table("models", ("model", "k", "d", "p", "v", "heads", "the same attention"), widths)
    say("models: for --model; widths: k latent, d head, p rope, v value; see docs/models.md")
    say("hyper-mla show <kernel> tells more; hyper-mla run <kernel> --help lists its options")
    return 0
