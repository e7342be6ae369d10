"""mla_var6_plus in detail, version v3: over s and the window n, beside the pure paths.

python -m tests.benchmark.bench_mla_var6_plus_v3 [--s 16,32,64] [--n 0,1024,2048]
"""

import sys

from tests.benchmark.var6_plus import main

if __name__ == "__main__":
    sys.exit(main("v3"))
