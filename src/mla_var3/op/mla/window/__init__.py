"""Formats of decompressed keys and values."""
