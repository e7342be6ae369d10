"""Timing on the GPU: one figure per run by CUDA events, with the L2 cache cold.

What is timed, how often and how the figures are summed up is decided here; the calls that need a
GPU are behind `GpuClock`, so that tests can put a clock of their own in its place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mla_var3.errors import InvalidArgumentError, UnsupportedError

EVENT_TIMER = "cuda-event"
GRAPH_TIMER = "cuda-graph"

MIN_RUNS = 10
MAX_RUNS = 200

_L2_FACTOR = 2
"""The flush reads this many times the L2 cache, so that nothing of the last run survives. It reads
rather than writes: dirty lines would be written back during the timed run (flash_attention at
b=8 s=16 t=4096 on an H200: 507 instead of 489 us)."""
_MIN_FLUSH_BYTES = 64 << 20
_HEAD_START_CYCLES = 400_000
"""The GPU spins this long before a timed run (about 0.2 ms), so that the whole run is enqueued by
the time it starts. Without it the host's launch time (up to 77 us for the two kernels of
mla_var6_plus, seen under the profiler) would be in the figure whenever the kernel is shorter."""


@dataclass(frozen=True)
class Timing:
    """Times of repeated runs, in microseconds.

    Attributes:
        median_us: the figure to report.
        p10_us, p90_us: 10th and 90th percentile.
        min_us: fastest run.
        runs: number of timed runs.
        timer: "cuda-event" or "cuda-graph".
        cold_l2: whether the L2 cache was flushed before each run.
    """

    median_us: float
    p10_us: float
    p90_us: float
    min_us: float
    runs: int
    timer: str
    cold_l2: bool

    @property
    def spread_us(self) -> float:
        """Half the distance between the 10th and the 90th percentile."""
        return (self.p90_us - self.p10_us) / 2

    def to_dict(self) -> dict[str, Any]:
        """The fields and the spread, JSON-ready."""
        return {**dataclasses.asdict(self), "spread_us": self.spread_us}


class GpuClock(Protocol):
    """The device calls that timing needs."""

    def capture(self, fn: Callable[[], None], warmup: int) -> Callable[[], None]:
        """Capture `fn` in a CUDA graph; the result replays it."""

    def enqueue(self, fn: Callable[[], None], cold_l2: bool) -> Any:
        """Enqueue one timed run; the handle is good for `elapsed_us` after `synchronize`."""

    def synchronize(self) -> None:
        """Wait until everything enqueued is done."""

    def elapsed_us(self, handle: Any) -> float:
        """The time of one run."""


def time_gpu(
    fn: Callable[[], None],
    *,
    runs: int | None = None,
    warmup: int = 3,
    cold_l2: bool = True,
    graph: bool = False,
    max_seconds: float = 2.0,
    clock: GpuClock | None = None,
) -> Timing:
    """Time what `fn` enqueues on the current CUDA stream.

    Args:
        fn: launches the work; it must not synchronise.
        runs: timed runs; None for as many as fit `max_seconds`, between 10 and 200.
        warmup: runs before the first timed one; they also compile what is compiled on first use.
        cold_l2: flush the L2 cache before every run, outside the timed part.
        graph: capture `fn` in a CUDA graph once and time its replays.
        max_seconds: budget of the timed runs, flushes included, when `runs` is None.
        clock: what measures; the current CUDA device by default.

    Raises:
        UnsupportedError: there is no CUDA device.
    """
    if runs is not None and runs < 1:
        raise InvalidArgumentError("runs", "a number of at least 1", runs)
    if warmup < 1:
        raise InvalidArgumentError("warmup", "a number of at least 1", warmup)
    if not max_seconds > 0:
        raise InvalidArgumentError("max_seconds", "a positive number", max_seconds)
    clock = CudaClock() if clock is None else clock
    work = clock.capture(fn, warmup) if graph else fn
    for _ in range(warmup):
        clock.enqueue(work, cold_l2)
    clock.synchronize()
    if runs is None:
        runs = _runs_that_fit(clock, work, cold_l2, max_seconds)
    handles = [clock.enqueue(work, cold_l2) for _ in range(runs)]
    clock.synchronize()
    samples = [clock.elapsed_us(handle) for handle in handles]
    return summarise(samples, timer=GRAPH_TIMER if graph else EVENT_TIMER, cold_l2=cold_l2)


def summarise(samples_us: Sequence[float], *, timer: str, cold_l2: bool) -> Timing:
    """The figures of some runs."""
    return Timing(
        median_us=percentile(samples_us, 50),
        p10_us=percentile(samples_us, 10),
        p90_us=percentile(samples_us, 90),
        min_us=float(min(samples_us)),
        runs=len(samples_us),
        timer=timer,
        cold_l2=cold_l2,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation between the two nearest values."""
    import numpy as np

    if not values:
        raise InvalidArgumentError("values", "at least one value", "none")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def _runs_that_fit(
    clock: GpuClock, work: Callable[[], None], cold_l2: bool, max_seconds: float
) -> int:
    """How many runs fit the budget, judged by the wall time of a few, flushes included."""
    probe = 3
    start = time.perf_counter()
    for _ in range(probe):
        clock.enqueue(work, cold_l2)
    clock.synchronize()
    per_run = (time.perf_counter() - start) / probe
    return int(min(MAX_RUNS, max(MIN_RUNS, max_seconds / max(per_run, 1e-9))))


def require_cuda(what: str) -> None:
    """Raise UnsupportedError, naming what asked for it, where no CUDA device can be used."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"{what}: expected a usable CUDA GPU, got none (torch.cuda.is_available() is false); "
            "the static mode predicts without one"
        )


def cuda_is_healthy() -> bool:
    """Whether the CUDA context still works: after some errors every later call fails."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class CudaClock:
    """Times with CUDA events on the current device and stream.

    Raises:
        UnsupportedError: there is no CUDA device.
    """

    def __init__(self) -> None:
        import torch

        require_cuda("time_gpu")
        self._torch = torch
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._flush_bytes = max(_L2_FACTOR * properties.L2_cache_size, _MIN_FLUSH_BYTES)
        self._flush_buffer: Any = None

    def capture(self, fn: Callable[[], None], warmup: int) -> Callable[[], None]:
        """Warm up on a side stream, as PyTorch asks for, then capture."""
        torch = self._torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):  # compiles and allocates, which a capture must not
                fn()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        replay: Callable[[], None] = graph.replay
        return replay

    def enqueue(self, fn: Callable[[], None], cold_l2: bool) -> Any:
        """Flush, let the host get ahead, then run between two events."""
        torch = self._torch
        if cold_l2:
            if self._flush_buffer is None:
                self._flush_buffer = torch.zeros(
                    self._flush_bytes // 4, dtype=torch.int32, device="cuda"
                )
            self._flush_buffer.sum()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        stop.record()
        return start, stop

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()

    def elapsed_us(self, handle: Any) -> float:
        """The time between the two events."""
        start, stop = handle
        return float(start.elapsed_time(stop)) * 1e3
