"""Chrome traces: reading what torch.profiler records, and writing a timeline for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.profiling.timeline.model import (
    CUPTI,
    ApiCall,
    GpuActivity,
    HostRange,
    Timeline,
)

_GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_API_KINDS = ("cuda_runtime", "cuda_driver")
_RANGE_KIND = "user_annotation"
_GPU_PROCESS, _HOST_PROCESS = 0, 1


def read_chrome_trace(path: Path, source: str = CUPTI) -> Timeline:
    """The timeline in a Chrome trace of torch.profiler, or in one that `write_chrome_trace` made.

    Raises:
        InvalidArgumentError: the file is no such trace.
    """
    try:
        # Times are microseconds with decimals; as floats they would not be whole nanoseconds.
        data = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        events = data["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(str(path), "a Chrome trace", repr(error)) from error
    gpu, api, ranges = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = event.get("cat")
        if kind in _GPU_KINDS:
            gpu.append(_activity(event, _GPU_KINDS[kind]))
        elif kind in _API_KINDS:
            start, duration = _time(event)
            correlation = int(event.get("args", {}).get("correlation", 0))
            api.append(ApiCall(event["name"], start, duration, int(event["tid"]), correlation))
        elif kind == _RANGE_KIND:
            start, duration = _time(event)
            ranges.append(
                HostRange(event["name"], start, duration, int(event["tid"]), int(event["pid"]))
            )
    devices = data.get("deviceProperties") or [{}]
    return Timeline(source, gpu, api, ranges, str(devices[0].get("name", "")))


def _time(event: Mapping[str, Any]) -> tuple[int, int]:
    return round(Decimal(event["ts"]) * 1000), round(Decimal(event.get("dur", 0)) * 1000)


def _activity(event: Mapping[str, Any], kind: str) -> GpuActivity:
    start, duration = _time(event)
    args = event.get("args", {})
    return GpuActivity(
        kind=kind,
        name=event["name"],
        start=start,
        duration=duration,
        stream=int(args["stream"]),
        correlation=int(args["correlation"]),
        device=int(args.get("device", 0)),
        context=int(args.get("context", 1)),
        grid=_triple(args.get("grid")),
        block=_triple(args.get("block")),
        registers=_integer(args.get("registers per thread")),
        shared_bytes=_integer(args.get("shared memory")),
        bytes=_integer(args.get("bytes")),
    )


def _triple(value: Any) -> tuple[int, int, int] | None:
    if value is None:
        return None
    x, y, z = map(int, value)
    return x, y, z


def _integer(value: Any) -> int | None:
    return None if value is None else int(value)


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    """Write a timeline in the form that Perfetto and `read_chrome_trace` read."""
    events: list[dict[str, Any]] = [
        _name("process_name", _GPU_PROCESS, 0, f"GPU {timeline.device_name}".strip()),
        _name("process_name", _HOST_PROCESS, 0, "host"),
    ]
    for stream in sorted({activity.stream for activity in timeline.gpu}):
        events.append(_name("thread_name", _GPU_PROCESS, stream, f"stream {stream}"))
    categories = {kind: category for category, kind in _GPU_KINDS.items()}
    for activity in timeline.gpu:
        args = {
            "stream": activity.stream,
            "correlation": activity.correlation,
            "device": activity.device,
            "context": activity.context,
            "grid": activity.grid,
            "block": activity.block,
            "registers per thread": activity.registers,
            "shared memory": activity.shared_bytes,
            "bytes": activity.bytes,
        }
        args = {key: value for key, value in args.items() if value is not None}
        where = (categories[activity.kind], activity.name, _GPU_PROCESS, activity.stream)
        events.append(_complete(*where, activity.start, activity.duration, args))
    for call in timeline.api:
        where = (_API_KINDS[0], call.name, _HOST_PROCESS, call.thread)
        args = {"correlation": call.correlation}
        events.append(_complete(*where, call.start, call.duration, args))
    for found in timeline.ranges:
        where = (_RANGE_KIND, found.name, _HOST_PROCESS, found.thread)
        events.append(_complete(*where, found.start, found.duration, {}))
    launches = timeline.launches()
    for activity in timeline.gpu:
        launch = launches.get(activity.correlation)
        if launch is not None:
            flow = {"id": activity.correlation, "cat": "ac2g", "name": "ac2g"}
            begin = {"pid": _HOST_PROCESS, "tid": launch.thread, "ts": launch.start / 1e3}
            end = {"pid": _GPU_PROCESS, "tid": activity.stream, "ts": activity.start / 1e3}
            events += [{"ph": "s", **flow, **begin}, {"ph": "f", "bp": "e", **flow, **end}]
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "deviceProperties": [{"id": 0, "name": timeline.device_name}],
        "traceEvents": events,
    }
    write_atomic(path, json.dumps(document))


def _name(kind: str, process: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}}


def _complete(
    category: str,
    name: str,
    process: int,
    thread: int,
    start: int,
    duration: int,
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start / 1e3,
        "dur": duration / 1e3,
        "args": args,
    }
