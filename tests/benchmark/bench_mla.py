"""Sweep over b, s, t, h and the backends: both kernel languages and every peer.

python -m tests.benchmark.bench_mla [--s 1,4,16,64] [--backends cutile-dsl,fa3_qv,flashmla]
"""

import sys

from mla_var3.cli.commands.bench import bench_program

if __name__ == "__main__":
    sys.exit(bench_program("sweep", "bench_mla", sys.argv[1:]))
