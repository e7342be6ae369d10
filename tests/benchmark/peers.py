"""Which peers can take part on this machine, with their versions, and why others cannot.

python -m tests.benchmark.peers [--peer_libs FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.bench.peers import KERNELS, PeerLibraries
from mla_var3.cli.console import print_table


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of peers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer_libs", type=Path, help="folder with the peers' libraries")
    libraries = PeerLibraries(parser.parse_args(argv).peer_libs)
    rows = []
    for name, kernel in KERNELS.items():
        reason = libraries.absent.get(kernel.library)
        outcome = reason if reason else libraries.versions.get(kernel.library, "")
        rows.append((name, kernel.title, kernel.path, "absent" if reason else "present", outcome))
    print_table("peers", ("backend", "kernel", "path", "", "version or reason"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
