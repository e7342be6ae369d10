"""Benchmark drivers; run as modules, for example `python -m tests.benchmark.bench_figures`.

Each pins a suite of `hyper-mla bench` and a folder below `out/tests`; the measuring code is in the
package, under `mla_var3.bench`.
"""
