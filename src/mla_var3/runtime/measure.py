"""Timing on the GPU: one figure per run by CUDA events, with the L2 cache cold.

`time_gpu` decides what is timed and how often. The calls that need a GPU are in `CudaClock`, so
that tests can bring a clock of their own. Every wait on the GPU goes through `wait_for_device`,
which has a time limit.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mla_var3.errors import DeviceTimeoutError, InvalidArgumentError, UnsupportedError

EVENT_TIMER = "cuda-event"
GRAPH_TIMER = "cuda-graph"

MIN_RUNS = 10
MAX_RUNS = 200

TIMEOUT_VARIABLE = "HYPER_MLA_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 60.0
"""How long one launch may run; kernels of the largest benchmark shapes take well under a second."""
_HEALTH_TIMEOUT_S = 5.0
_FIRST_POLL_S, _LAST_POLL_S = 20e-6, 5e-3

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
    """Times of repeated runs, in microseconds; the median is the figure to report.

    Attributes:
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
        return (self.p90_us - self.p10_us) / 2

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "spread_us": self.spread_us}


def time_gpu(
    fn: Callable[[], None],
    *,
    runs: int | None = None,
    warmup: int = 3,
    cold_l2: bool = True,
    graph: bool = False,
    max_seconds: float = 2.0,
    clock: Any = None,
) -> Timing:
    """Time what `fn` enqueues on the current CUDA stream.

    Args:
        fn: launches the work; it must not synchronise.
        runs: timed runs; None for as many as fit `max_seconds`, between 10 and 200.
        warmup: runs before the first timed one; they also compile what is compiled on first use.
        cold_l2: flush the L2 cache before every run, outside the timed part.
        graph: capture `fn` in a CUDA graph once and time its replays.
        max_seconds: budget of the timed runs, flushes included, when `runs` is None.
        clock: what measures, with the methods of `CudaClock`; the current CUDA device by default.

    Raises:
        UnsupportedError: there is no CUDA device.
        DeviceTimeoutError: a run does not end.
    """
    clock = CudaClock() if clock is None else clock
    # A timeout names the stage whose `launch` is timed.
    what = str(getattr(getattr(fn, "__self__", None), "name", "the timed work"))
    work = clock.capture(fn, warmup, what) if graph else fn

    def run(count: int) -> list[Any]:
        handles = [clock.enqueue(work, cold_l2) for _ in range(count)]
        for handle in handles:
            clock.wait(handle, what)
        return handles

    run(warmup)
    if runs is None:
        runs = _runs_that_fit(run, max_seconds)
    samples = [clock.elapsed_us(handle) for handle in run(runs)]
    return summarise(samples, timer=GRAPH_TIMER if graph else EVENT_TIMER, cold_l2=cold_l2)


def summarise(samples_us: Sequence[float], *, timer: str, cold_l2: bool) -> Timing:
    """The figures of some runs."""
    median, low, high = (percentile(samples_us, percent) for percent in (50, 10, 90))
    return Timing(median, low, high, float(min(samples_us)), len(samples_us), timer, cold_l2)


def spread(values: Sequence[float]) -> float:
    """Half the distance between the 10th and the 90th percentile."""
    return (percentile(values, 90) - percentile(values, 10)) / 2


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation between the two nearest values."""
    import numpy as np

    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def _runs_that_fit(run: Callable[[int], object], max_seconds: float) -> int:
    """How many runs fit the budget, judged by the wall time of a few, flushes included."""
    probe = 3
    start = time.perf_counter()
    run(probe)
    per_run = (time.perf_counter() - start) / probe
    return int(min(MAX_RUNS, max(MIN_RUNS, max_seconds / max(per_run, 1e-9))))


def timeout_s() -> float:
    """The time limit of one launch in seconds: $HYPER_MLA_TIMEOUT_S, or 60."""
    text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    with suppress(ValueError):
        limit = float(text)
        if limit > 0:
            return limit
    raise InvalidArgumentError(TIMEOUT_VARIABLE, "a positive number of seconds", repr(text))


def wait_for_device(what: str, limit_s: float | None = None, event: Any = None) -> None:
    """Wait for the GPU, but not forever: a kernel that hangs cannot be stopped by its process.

    It waits for an event, by default for everything enqueued on the current stream; `what` names
    the kernel in the message.

    Raises:
        DeviceTimeoutError: the work has not ended within the limit, by default `timeout_s()`.
    """
    limit = timeout_s() if limit_s is None else limit_s
    if event is None:
        import torch

        event = torch.cuda.Event()
        event.record()
    end = time.monotonic() + limit
    pause = _FIRST_POLL_S
    while not event.query():
        if time.monotonic() >= end:
            raise DeviceTimeoutError(
                f"{what}: expected to end on the GPU within {limit:g} s, got no answer: it hangs "
                f"or is very slow ({TIMEOUT_VARIABLE} sets the limit); this process cannot use the "
                "GPU any more"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_POLL_S)


def cuda_is_healthy() -> bool:
    """Whether the CUDA context still works: after some errors every later call fails or hangs."""
    try:
        wait_for_device("the GPU", _HEALTH_TIMEOUT_S)
    except (RuntimeError, DeviceTimeoutError):
        return False
    return True


class CudaClock:
    """Times with CUDA events on the current device and stream."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(
                "time_gpu: expected a usable CUDA GPU, got none "
                "(torch.cuda.is_available() is false)"
            )
        self._torch = torch
        self._flush_buffer: Any = None

    def capture(self, fn: Callable[[], None], warmup: int, what: str) -> Callable[[], None]:
        """Warm up on a side stream, as PyTorch asks for, then capture."""
        torch = self._torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):  # compiles and allocates, which a capture must not
                fn()
        torch.cuda.current_stream().wait_stream(side)
        wait_for_device(what)  # torch waits too before a capture, without a limit
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        replay: Callable[[], None] = graph.replay
        return replay

    def enqueue(self, fn: Callable[[], None], cold_l2: bool) -> Any:
        """Flush, let the host get ahead, then run between two events."""
        torch = self._torch
        if cold_l2:
            self.flush_l2()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        stop.record()
        return start, stop

    def flush_l2(self) -> None:
        """Enqueue a read of more than the L2 cache holds."""
        if self._flush_buffer is None:
            cuda = self._torch.cuda
            l2_bytes = cuda.get_device_properties(cuda.current_device()).L2_cache_size
            size = max(_L2_FACTOR * l2_bytes, _MIN_FLUSH_BYTES) // 4
            self._flush_buffer = self._torch.zeros(size, dtype=self._torch.int32, device="cuda")
        self._flush_buffer.sum()

    def wait(self, handle: Any, what: str) -> None:
        wait_for_device(what, event=handle[1])

    def elapsed_us(self, handle: Any) -> float:
        start, stop = handle
        return float(start.elapsed_time(stop)) * 1e3
