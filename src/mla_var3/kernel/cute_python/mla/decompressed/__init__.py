"""The decompressed attention kernel for Hopper."""
