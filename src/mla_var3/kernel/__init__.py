"""Kernels, by language, layer, design and version."""
