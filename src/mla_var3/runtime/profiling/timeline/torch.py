"""Collecting a timeline in this process: CUPTI through torch.profiler."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.profiling.timeline.launch import RunCounts, record_runs
from mla_var3.runtime.profiling.timeline.model import Timeline
from mla_var3.runtime.profiling.timeline.trace import read_chrome_trace
from mla_var3.runtime.stage import Stage


def collect_with_torch(stage: Stage, counts: RunCounts, trace: Path) -> Timeline:
    """Run a runtime object under torch.profiler.

    Args:
        stage: planned on a GPU, and launched at least once before, so that it is compiled.
        counts: how many runs to record.
        trace: where to keep the Chrome trace.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        record_runs(stage, record_function, counts)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        # The profiler writes the file's own path into it, hence not straight to its place.
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        text = file.read_text(encoding="utf-8").replace(str(file), trace.name)
    write_atomic(trace, text)
    return read_chrome_trace(trace)
