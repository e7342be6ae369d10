"""Benchmarks: our kernels beside the peers, records, pages."""
