"""The fuzzer: random calls and caches against float64, `python -m tests.fuzz --help`."""
