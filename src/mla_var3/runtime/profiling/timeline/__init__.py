"""Timelines: recording, file formats, analysis, report and plot."""
