"""The project's headline figures, ours and the peers' in one run.

    python -m tests.benchmark.bench_figures [--out_dir FOLDER] [--peer_libs FOLDER]

Every row is checked against the float32 reference first and then timed the same way, ours and
theirs. Peers that are not installed are reported absent. Without a GPU: predictions, marked so.
"""

import sys

from mla_var3.cli.commands.bench import bench_program

if __name__ == "__main__":
    sys.exit(bench_program("figures", "bench_figures", sys.argv[1:]))
