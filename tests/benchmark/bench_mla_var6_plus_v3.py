"""mla_var6_plus in detail, version v3: over s and the window n, beside the pure paths.

python -m tests.benchmark.bench_mla_var6_plus_v3 [--s 16,32,64] [--n 0,1024,2048]
"""

import sys

from mla_var3.cli.commands.bench import bench_program

if __name__ == "__main__":
    sys.exit(bench_program("var6_plus", "bench_mla_var6_plus_v3", sys.argv[1:], version="v3"))
