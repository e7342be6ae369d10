"""A recorded timeline, its files, and exact arithmetic on its time intervals.

Times are whole nanoseconds on one clock, so nothing here rounds. An interval is a half-open pair
`(start, end)`: touching intervals do not overlap, and an empty one counts for nothing.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.markdown import write_csv

QUEUED = "hyper_mla@"
"""Range prefix of a run that was enqueued as a whole before the GPU began it."""
HOST_PACED = "hyper_mla_host@"
"""Range prefix of a run that started on an idle GPU, at the pace of the host."""
WARMUP = "hyper_mla_warmup@"
"""Range prefix of a warm-up run, which the analysis ignores."""

GPU_TRACE = "cuda_gpu_trace"
NVTX_PROJECTION = "nvtx_gpu_proj_trace"
API_SUMMARY = "cuda_api_sum"

_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_API_KINDS = ("cuda_runtime", "cuda_driver")
_RANGE_KIND = "user_annotation"

Interval = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """Something with a name, a start and a duration."""

    name: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        return self.start + self.duration

    @property
    def interval(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class GpuActivity(Event):
    """One kernel, copy or fill on the GPU.

    Attributes:
        correlation: number that it shares with the host call that launched it.
        kind: its category in a Chrome trace: "kernel", "gpu_memcpy" or "gpu_memset"; copies and
            fills have no launch sizes.
        shared_bytes: shared memory per CTA, static and dynamic.
    """

    stream: int
    correlation: int
    kind: str = "kernel"
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None

    @property
    def ctas(self) -> int | None:
        return None if self.grid is None else math.prod(self.grid)


@dataclass(frozen=True)
class ApiCall(Event):
    """One call of the CUDA runtime or driver on a host thread."""

    thread: int
    correlation: int


@dataclass(frozen=True)
class HostRange(Event):
    """A named range on a host thread."""

    thread: int

    def holds(self, call: ApiCall) -> bool:
        """Whether a call was made inside the range."""
        return self.thread == call.thread and self.start <= call.start < self.end


@dataclass
class Timeline:
    """A recorded run."""

    gpu: list[GpuActivity] = field(default_factory=list)
    api: list[ApiCall] = field(default_factory=list)
    ranges: list[HostRange] = field(default_factory=list)
    device_name: str = ""

    def __post_init__(self) -> None:
        self.gpu.sort(key=lambda activity: (activity.start, activity.correlation))
        self.api.sort(key=lambda call: (call.start, call.correlation))
        self.ranges.sort(key=lambda found: (found.start, -found.duration))

    def launches(self) -> dict[int, ApiCall]:
        """The host call of every correlation number that a GPU activity carries.

        A runtime call and the driver call below it may share a number. The outer one, which began
        first, is the one the program waited for.
        """
        wanted = {activity.correlation for activity in self.gpu}
        found: dict[int, ApiCall] = {}
        for call in self.api:
            if call.correlation in wanted:
                found.setdefault(call.correlation, call)
        return found

    def activities_in(self, ranges: Iterable[HostRange]) -> Iterator[list[GpuActivity]]:
        """For each range, what was launched inside it, in launch order."""
        launches = self.launches()
        pairs = [(launches[a.correlation], a) for a in self.gpu if a.correlation in launches]
        pairs.sort(key=lambda pair: (pair[0].start, pair[1].start))
        for found in ranges:
            yield [activity for call, activity in pairs if found.holds(call)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in ascending order; touching ones are merged."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """The time that at least one of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


def overlap(sets: Sequence[Iterable[Interval]]) -> int:
    """The time that at least two of the sets cover.

    A set counts once at each point, also where its own intervals overlap.
    """
    changes: list[tuple[int, int]] = []
    for intervals in sets:
        for start, end in union(intervals):
            changes += [(start, 1), (end, -1)]
    total, depth, before = 0, 0, 0
    for time, change in sorted(changes):
        total += time - before if depth >= 2 else 0
        depth, before = depth + change, time
    return total


def gaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The uncovered stretches between the first start and the last end."""
    return [(before[1], after[0]) for before, after in itertools.pairwise(union(intervals))]


def most_overlap(lengths: Sequence[int]) -> int:
    """The longest time for which sets of these lengths could overlap.

    Each overlapped moment needs a second set, so what lies outside the longest set is a bound; it
    also uses up two units of the sum.
    """
    total = sum(lengths)
    return min(total - max(lengths, default=0), total // 2)


def write_stats(timeline: Timeline, folder: Path) -> None:
    """Write the files that `nsys stats` would write, with the columns that CUPTI fills.

    CUPTI counts static and dynamic shared memory as one; the sum is in the dynamic column.
    """
    tables = {
        GPU_TRACE: [_gpu_row(timeline, activity) for activity in timeline.gpu],
        NVTX_PROJECTION: _nvtx_rows(timeline),
        API_SUMMARY: _api_rows(timeline),
    }
    for name, rows in tables.items():
        values = [list(row.values()) for row in rows]
        write_csv(folder / f"report_{name}.csv", list(rows[0]) if rows else [], values)


def _gpu_row(timeline: Timeline, activity: GpuActivity) -> dict[str, object]:
    shared = activity.shared_bytes
    return {
        "Start (ns)": activity.start,
        "Duration (ns)": activity.duration,
        "CorrId": activity.correlation,
        **dict(zip(("GrdX", "GrdY", "GrdZ"), activity.grid or ("",) * 3, strict=True)),
        **dict(zip(("BlkX", "BlkY", "BlkZ"), activity.block or ("",) * 3, strict=True)),
        "Reg/Trd": activity.registers,
        "DymSMem (MB)": None if shared is None else f"{shared / 1e6:.3f}",
        "Device": timeline.device_name,
        "Strm": activity.stream,
        "Name": activity.name,
    }


def _nvtx_rows(timeline: Timeline) -> list[dict[str, object]]:
    """Ranges that launched something, projected on the GPU."""
    inside = zip(timeline.ranges, timeline.activities_in(timeline.ranges), strict=True)
    return [
        {
            "Name": f":{found.name}",
            "Projected Start (ns)": (start := min(activity.start for activity in activities)),
            "Projected Duration (ns)": max(activity.end for activity in activities) - start,
            "Orig Start (ns)": found.start,
            "Orig Duration (ns)": found.duration,
            "TID": found.thread,
            "NumGPUOps": len(activities),
        }
        for found, activities in inside
        if activities
    ]


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
