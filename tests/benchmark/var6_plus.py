"""One version of mla_var6_plus over s and its window n: what the three drivers share."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mla_var3.cli.commands.bench import bench_program


def main(version: str, argv: Sequence[str] | None = None) -> int:
    """Run the suite var6_plus for a version; exit code 3 where that version does not exist.

    Args:
        version: "v0" for the base version, "vN" otherwise.
        argv: command line; that of the process by default.
    """
    suffix = "" if version == "v0" else f"_{version}"
    arguments = sys.argv[1:] if argv is None else argv
    name = f"bench_mla_var6_plus{suffix}"
    return bench_program("var6_plus", name, arguments, version=version)
