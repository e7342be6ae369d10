"""Autotuning: the fastest tiling of every kernel."""
