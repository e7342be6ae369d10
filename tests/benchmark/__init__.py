"""Benchmark drivers; run as modules, for example `python -m tests.benchmark.bench_figures`."""
