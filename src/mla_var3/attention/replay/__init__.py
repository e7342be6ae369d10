"""The short path of repeated calls."""
