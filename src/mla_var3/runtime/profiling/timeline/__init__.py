"""Timelines: collecting, analysing and drawing them."""
