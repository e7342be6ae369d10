"""Files of a timeline: reading the Chrome trace of torch.profiler, writing CSV statistics."""

from __future__ import annotations

import json
import statistics
from decimal import Decimal
from pathlib import Path

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.markdown import write_csv
from mla_var3.runtime.profiling.timeline.model import ApiCall, GpuActivity, HostRange, Timeline

GPU_TRACE = "cuda_gpu_trace"
NVTX_PROJECTION = "nvtx_gpu_proj_trace"
API_SUMMARY = "cuda_api_sum"

_MB = 1e6
_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_API_KINDS = ("cuda_runtime", "cuda_driver")
_RANGE_KIND = "user_annotation"


def write_stats(timeline: Timeline, folder: Path) -> list[Path]:
    """Write the files that `nsys stats` would write, with the columns that CUPTI fills.

    CUPTI counts static and dynamic shared memory as one; the sum is in the dynamic column.
    """
    tables = {
        GPU_TRACE: [_gpu_row(timeline, activity) for activity in timeline.gpu],
        NVTX_PROJECTION: _nvtx_rows(timeline),
        API_SUMMARY: _api_rows(timeline),
    }
    written = []
    for name, rows in tables.items():
        written.append(folder / f"report_{name}.csv")
        write_csv(written[-1], list(rows[0]) if rows else [], [list(row.values()) for row in rows])
    return written


def _gpu_row(timeline: Timeline, activity: GpuActivity) -> dict[str, object]:
    shared = activity.shared_bytes
    return {
        "Start (ns)": activity.start,
        "Duration (ns)": activity.duration,
        "CorrId": activity.correlation,
        **dict(zip(("GrdX", "GrdY", "GrdZ"), activity.grid or ("",) * 3, strict=True)),
        **dict(zip(("BlkX", "BlkY", "BlkZ"), activity.block or ("",) * 3, strict=True)),
        "Reg/Trd": activity.registers,
        "DymSMem (MB)": None if shared is None else f"{shared / _MB:.3f}",
        "Device": timeline.device_name,
        "Strm": activity.stream,
        "Name": activity.name,
    }


def _nvtx_rows(timeline: Timeline) -> list[dict[str, object]]:
    """Ranges that launched something, projected on the GPU."""
    rows: list[dict[str, object]] = []
    for found, activities in zip(
        timeline.ranges, timeline.activities_in(timeline.ranges), strict=True
    ):
        if activities:
            start = min(activity.start for activity in activities)
            rows.append(
                {
                    "Name": f":{found.name}",
                    "Projected Start (ns)": start,
                    "Projected Duration (ns)": max(a.end for a in activities) - start,
                    "Orig Start (ns)": found.start,
                    "Orig Duration (ns)": found.duration,
                    "TID": found.thread,
                    "NumGPUOps": len(activities),
                }
            )
    return rows


def _api_rows(timeline: Timeline) -> list[dict[str, object]]:
    calls: dict[str, list[int]] = {}
    for call in timeline.api:
        calls.setdefault(call.name, []).append(call.duration)
    total = sum(call.duration for call in timeline.api) or 1
    return [
        {
            "Time (%)": f"{100 * sum(times) / total:.1f}",
            "Total Time (ns)": sum(times),
            "Num Calls": len(times),
            "Avg (ns)": f"{statistics.fmean(times):.1f}",
            "Med (ns)": f"{statistics.median(times):.1f}",
            "Min (ns)": min(times),
            "Max (ns)": max(times),
            "StdDev (ns)": f"{statistics.stdev(times) if len(times) > 1 else 0.0:.1f}",
            "Name": name,
        }
        for name, times in sorted(calls.items(), key=lambda item: -sum(item[1]))
    ]


def read_chrome_trace(path: Path) -> Timeline:
    """The timeline in a Chrome trace of torch.profiler."""
    try:
        # Times are microseconds with decimals; floats would not give whole nanoseconds.
        data = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(str(path), "a Chrome trace", repr(error)) from error
    gpu, api, ranges = [], [], []
    for event in events:
        kind, args = event.get("cat"), event.get("args", {})
        start, duration = (round(Decimal(event.get(key, 0)) * 1000) for key in ("ts", "dur"))
        timed = (event["name"], start, duration)
        if kind in _GPU_KINDS:
            gpu.append(
                GpuActivity(
                    *timed,
                    stream=int(args["stream"]),
                    correlation=int(args["correlation"]),
                    kind=kind,
                    grid=tuple(args.get("grid", ())) or None,
                    block=tuple(args.get("block", ())) or None,
                    registers=args.get("registers per thread"),
                    shared_bytes=args.get("shared memory"),
                )
            )
        elif kind in _API_KINDS:
            api.append(ApiCall(*timed, int(event["tid"]), int(args.get("correlation", 0))))
        elif kind == _RANGE_KIND:
            ranges.append(HostRange(*timed, int(event["tid"])))
    devices = data.get("deviceProperties") or [{}]
    return Timeline(gpu, api, ranges, str(devices[0].get("name", "")))
