"""The three CSV files of a timeline, in the columns that `nsys stats` prints, and reading them."""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.profiling.timeline import intervals as intervals
from mla_var3.runtime.profiling.timeline.model import (
    NSYS,
    ApiCall,
    GpuActivity,
    HostRange,
    Timeline,
)

GPU_TRACE = "cuda_gpu_trace"
NVTX_PROJECTION = "nvtx_gpu_proj_trace"
API_SUMMARY = "cuda_api_sum"
API_TRACE = "cuda_api_trace"

GPU_COLUMNS = (
    *("Start (ns)", "Duration (ns)", "CorrId", "GrdX", "GrdY", "GrdZ", "BlkX", "BlkY", "BlkZ"),
    *("Reg/Trd", "StcSMem (MB)", "DymSMem (MB)", "Bytes (MB)", "Throughput (MB/s)"),
    *("SrcMemKd", "DstMemKd", "Device", "Ctx", "GreenCtx", "Strm", "Name"),
)
NVTX_COLUMNS = (
    *("Name", "Projected Start (ns)", "Projected Duration (ns)", "Orig Start (ns)"),
    *("Orig Duration (ns)", "Style", "PID", "TID", "NumGPUOps", "Lvl", "NumChild", "RangeId"),
    *("ParentId", "RangeStack"),
)
API_COLUMNS = (
    *("Time (%)", "Total Time (ns)", "Num Calls", "Avg (ns)", "Med (ns)", "Min (ns)"),
    *("Max (ns)", "StdDev (ns)", "Name"),
)
_MB = 1e6


def write_stats(timeline: Timeline, folder: Path) -> list[Path]:
    """Write the files `report_<name>.csv` that Nsight Systems would have written."""
    tables = {
        GPU_TRACE: (GPU_COLUMNS, _gpu_rows(timeline)),
        NVTX_PROJECTION: (NVTX_COLUMNS, _nvtx_rows(timeline)),
        API_SUMMARY: (API_COLUMNS, _api_rows(timeline)),
    }
    written = []
    for name, (columns, rows) in tables.items():
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        path = folder / f"report_{name}.csv"
        write_atomic(path, text.getvalue())
        written.append(path)
    return written


def _gpu_rows(timeline: Timeline) -> Iterable[Sequence[object]]:
    device = timeline.device_name or "GPU"
    for a in timeline.gpu:
        megabytes = None if a.bytes is None else a.bytes / _MB
        rate = None if megabytes is None or not a.duration else megabytes / a.duration * 1e9
        # CUPTI counts static and dynamic shared memory as one; it is given as dynamic.
        shared = (
            ("0.000", f"{a.shared_bytes / _MB:.3f}") if a.shared_bytes is not None else ("",) * 2
        )
        yield (
            *(a.start, a.duration, a.correlation),
            *(a.grid or ("",) * 3),
            *(a.block or ("",) * 3),
            "" if a.registers is None else a.registers,
            *shared,
            "" if megabytes is None else f"{megabytes:.3f}",
            "" if rate is None else f"{rate:.3f}",
            *("", "", f"{device} ({a.device})", a.context, "", a.stream, a.name),
        )


def _nvtx_rows(timeline: Timeline) -> Iterable[Sequence[object]]:
    """Ranges that launched something, projected on the GPU; nesting by containment."""
    ranges = timeline.ranges
    parents = [_parent(ranges, index) for index in range(len(ranges))]
    for index, (found, activities) in enumerate(
        zip(ranges, timeline.activities_in(ranges), strict=True)
    ):
        projected = intervals.span(activity.interval for activity in activities)
        if projected is None:
            continue
        stack = [index]
        while (above := parents[stack[0]]) is not None:
            stack.insert(0, above)
        parent = parents[index]
        yield (
            f":{found.name}",
            *(projected[0], projected[1] - projected[0], found.start, found.duration),
            *("PushPop", found.process, found.thread, len(activities), len(stack) - 1),
            parents.count(index),
            index + 1,
            "" if parent is None else parent + 1,
            "".join(f":{place + 1}" for place in stack),
        )


def _parent(ranges: Sequence[HostRange], index: int) -> int | None:
    """The innermost range around a range; ranges are in order of start, outer ones first."""
    inner = ranges[index]
    for place in range(index - 1, -1, -1):
        outer = ranges[place]
        if outer.thread == inner.thread and inner.end <= outer.end:
            return place
    return None


def _api_rows(timeline: Timeline) -> Iterable[Sequence[object]]:
    calls: dict[str, list[int]] = {}
    for call in timeline.api:
        calls.setdefault(call.name, []).append(call.duration)
    total = sum(call.duration for call in timeline.api) or 1
    for name, times in sorted(calls.items(), key=lambda item: -sum(item[1])):
        yield (
            *(f"{100 * sum(times) / total:.1f}", sum(times), len(times)),
            *(f"{statistics.fmean(times):.1f}", f"{statistics.median(times):.1f}"),
            *(min(times), max(times)),
            f"{statistics.stdev(times) if len(times) > 1 else 0.0:.1f}",
            name,
        )


def read_stats(folder: Path) -> Timeline:
    """The timeline in the CSV files that `nsys stats` wrote, `cuda_api_trace` among them.

    Raises:
        InvalidArgumentError: a file is missing or has other columns.
    """
    rows = _read(folder / f"report_{GPU_TRACE}.csv", ("Start (ns)", "CorrId", "Strm", "Name"))
    gpu = [_gpu(row) for row in rows]
    calls = _read(folder / f"report_{API_TRACE}.csv", ("Start (ns)", "CorrID", "Tid", "Name"))
    api = [
        ApiCall(
            row["Name"],
            int(row["Start (ns)"]),
            int(row["Duration (ns)"]),
            int(row["Tid"]),
            _optional(row.get("CorrID")) or 0,
        )
        for row in calls
    ]
    found = _read(folder / f"report_{NVTX_PROJECTION}.csv", ("Name", "Orig Start (ns)", "TID"))
    ranges = [
        HostRange(
            row["Name"].lstrip(":"),
            int(row["Orig Start (ns)"]),
            int(row["Orig Duration (ns)"]),
            int(row["TID"]),
            _optional(row.get("PID")) or 0,
        )
        for row in found
    ]
    name = re.sub(r" \(\d+\)$", "", rows[0].get("Device", "")) if rows else ""
    return Timeline(NSYS, gpu, api, ranges, name)


def _gpu(row: Mapping[str, str]) -> GpuActivity:
    name = row["Name"]
    kind = "kernel"
    if name.startswith("[CUDA "):
        kind = "memset" if "memset" in name.lower() else "memcpy"
    grid = [_optional(row.get(f"Grd{axis}")) for axis in "XYZ"]
    block = [_optional(row.get(f"Blk{axis}")) for axis in "XYZ"]
    shared = [_optional_float(row.get(f"{part}SMem (MB)")) for part in ("Stc", "Dym")]
    device = re.search(r"\((\d+)\)$", row.get("Device", ""))
    size = _optional_float(row.get("Bytes (MB)"))
    return GpuActivity(
        kind=kind,
        name=name,
        start=int(row["Start (ns)"]),
        duration=int(row["Duration (ns)"]),
        stream=int(row["Strm"]),
        correlation=int(row["CorrId"]),
        device=int(device[1]) if device else 0,
        context=_optional(row.get("Ctx")) or 0,
        grid=_triple(grid),
        block=_triple(block),
        registers=_optional(row.get("Reg/Trd")),
        shared_bytes=None if kind != "kernel" else round(sum(s or 0 for s in shared) * _MB),
        bytes=None if size is None else round(size * _MB),
    )


def _triple(values: Sequence[int | None]) -> tuple[int, int, int] | None:
    x, y, z = values
    return None if x is None or y is None or z is None else (x, y, z)


def _optional(text: str | None) -> int | None:
    return int(text) if text else None


def _optional_float(text: str | None) -> float | None:
    return float(text) if text else None


def _read(path: Path, needed: Sequence[str]) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(str(path), "a report of nsys stats", error.strerror) from error
    lines = text.splitlines()
    # Some releases print what they do before the header.
    start = next((i for i, line in enumerate(lines) if needed[0] in line.split(",")), None)
    if start is None:
        if not text.strip() or "SKIPPED" in text:
            return []
        raise InvalidArgumentError(str(path), f"a column {needed[0]!r}", repr(lines[0]))
    reader = csv.DictReader(lines[start:])
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        found = ", ".join(reader.fieldnames or ())
        raise InvalidArgumentError(str(path), f"the columns {', '.join(missing)}", found)
    return list(reader)
