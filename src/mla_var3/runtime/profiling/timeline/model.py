"""The timeline of a run: what the GPU did, what the host called, and the ranges around it.

All times are whole nanoseconds on one clock. Both collectors, Nsight Systems and CUPTI through
torch.profiler, end in this form; everything after them is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mla_var3.runtime.profiling.timeline.intervals import Interval

NSYS = "Nsight Systems"
CUPTI = "CUPTI through torch.profiler"

QUEUED = "hyper_mla@"
"""Prefix of the range around a run that was enqueued as a whole before the GPU began it."""
HOST_PACED = "hyper_mla_host@"
"""Prefix of the range around a run that started on an idle GPU, at the pace of the host."""
SETTLING = "hyper_mla_settle@"
"""Prefix of the range around a run that only warms up; it counts for nothing."""


@dataclass(frozen=True)
class GpuActivity:
    """One kernel, copy or fill on the GPU.

    Attributes:
        kind: "kernel", "memcpy" or "memset".
        name: as the driver knows it.
        start, duration: nanoseconds.
        stream: stream number.
        correlation: number that it shares with the host call that launched it.
        device, context: device index and context number.
        grid, block: launch sizes; None for copies and fills.
        registers: per thread.
        shared_bytes: shared memory per thread block, static and dynamic.
        bytes: of a copy or fill.
    """

    kind: str
    name: str
    start: int
    duration: int
    stream: int
    correlation: int
    device: int = 0
    context: int = 1
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    bytes: int | None = None

    @property
    def end(self) -> int:
        """When it finished."""
        return self.start + self.duration

    @property
    def interval(self) -> Interval:
        """Start and end."""
        return self.start, self.end

    @property
    def blocks(self) -> int | None:
        """Thread blocks of the launch."""
        return None if self.grid is None else self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int | None:
        """Threads per block."""
        return None if self.block is None else self.block[0] * self.block[1] * self.block[2]


@dataclass(frozen=True)
class ApiCall:
    """One call of the CUDA runtime or driver on the host."""

    name: str
    start: int
    duration: int
    thread: int
    correlation: int

    @property
    def end(self) -> int:
        """When it returned."""
        return self.start + self.duration


@dataclass(frozen=True)
class HostRange:
    """A named range on a host thread."""

    name: str
    start: int
    duration: int
    thread: int
    process: int = 0

    @property
    def end(self) -> int:
        """When it was left."""
        return self.start + self.duration

    def holds(self, call: ApiCall) -> bool:
        """Whether a call was made inside the range."""
        return self.thread == call.thread and self.start <= call.start < self.end


@dataclass
class Timeline:
    """A recorded run.

    Attributes:
        source: `NSYS` or `CUPTI`.
        gpu, api, ranges: each in ascending order of start.
        device_name: as the driver knows it.
    """

    source: str
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

        A runtime call and the driver call below it may share a number; the outer one, which began
        first, is what the program waited for.
        """
        wanted = {activity.correlation for activity in self.gpu}
        found: dict[int, ApiCall] = {}
        for call in self.api:
            if call.correlation in wanted:
                found.setdefault(call.correlation, call)
        return found

    def activities_in(self, ranges: Iterable[HostRange]) -> Iterator[list[GpuActivity]]:
        """For each range, what was launched inside it, in the order of the launches."""
        launches = self.launches()
        pairs = [(launches[a.correlation], a) for a in self.gpu if a.correlation in launches]
        pairs.sort(key=lambda pair: (pair[0].start, pair[1].start))
        for found in ranges:
            yield [activity for call, activity in pairs if found.holds(call)]

    def calls_in(self, found: HostRange) -> list[ApiCall]:
        """The host calls made inside a range."""
        return [call for call in self.api if found.holds(call)]
