"""All MLA kernels and versions, both languages, and the peers at one shape.

    python -m tests.benchmark.bench_all_mla [--b 32] [--s 16] [--t 4096] [--h 128]

Writes the comparison as `all.csv`, with the record, plots and pages beside it.
"""

import sys

from mla_var3.cli.commands.bench import bench_program

if __name__ == "__main__":
    sys.exit(bench_program("all", "bench_all_mla", sys.argv[1:]))
