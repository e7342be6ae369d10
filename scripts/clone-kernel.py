#!/usr/bin/env python3
"""Make a new version of a kernel: scripts/clone-kernel.py <source> <version> [--dry_run].

The same as `hyper-mla clone`, always on the checkout that the script lies in.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    from mla_var3.cli.main import main as hyper_mla

    return hyper_mla(["clone", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
