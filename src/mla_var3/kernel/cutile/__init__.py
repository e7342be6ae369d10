"""Kernels written in cuTile (`cutile-dsl`)."""
