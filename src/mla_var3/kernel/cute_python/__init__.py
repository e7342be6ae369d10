"""Kernels written in CuTe DSL (`cute-dsl`)."""
