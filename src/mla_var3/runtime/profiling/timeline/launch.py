"""Launching a runtime object so that a profiler sees each run by itself.

Two kinds of runs are recorded. A *queued* run waits behind a spinning GPU until all of it is
enqueued, so its timeline shows what the GPU can do. A *host-paced* run starts on an idle GPU, so
its timeline shows what the host's launches cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.profiling.timeline.model import HOST_PACED, QUEUED, SETTLING
from mla_var3.runtime.stage import Stage

RangeMaker = Callable[[str], AbstractContextManager[object]]
"""Makes the context manager that marks a named range for the profiler."""

DEFAULT_RUNS = 20
HOST_PACED_RUNS = 5
SETTLING_RUNS = 3

_HEAD_START_MARGIN = 2.0
_MIN_HEAD_START_S = 2e-4
_MAX_HEAD_START_S = 2e-2
_CYCLES_PER_SECOND = 2e9
"""No GPU we know runs much faster, so the spin lasts at least as long as asked for."""
_MIN_FLUSH_BYTES = 64 << 20


@dataclass(frozen=True)
class RunCounts:
    """How many runs of each kind to record."""

    queued: int = DEFAULT_RUNS
    host_paced: int = HOST_PACED_RUNS
    settling: int = SETTLING_RUNS


def record_runs(stage: Stage, make_range: RangeMaker, counts: RunCounts) -> None:
    """Launch a runtime object on the current GPU, every run inside a range of its own.

    The L2 cache is flushed before every queued run, as in event mode, so that the times compare.
    """
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flush_bytes = max(2 * int(properties.L2_cache_size), _MIN_FLUSH_BYTES)
    flush = torch.zeros(flush_bytes // 4, dtype=torch.int32, device="cuda")
    host_s = 0.0
    with stage_ranges(stage, make_range):
        for _ in range(counts.settling):
            torch.cuda.synchronize()
            began = time.perf_counter()
            with make_range(f"{SETTLING}{stage.name}"):
                stage.launch()
            host_s = time.perf_counter() - began
        cycles = head_start_cycles(host_s)
        for _ in range(counts.queued):
            flush.sum()
            torch.cuda._sleep(cycles)
            with make_range(f"{QUEUED}{stage.name}"):
                stage.launch()
            torch.cuda.synchronize()
    for _ in range(counts.host_paced):
        torch.cuda.synchronize()
        with make_range(f"{HOST_PACED}{stage.name}"):
            stage.launch()
    torch.cuda.synchronize()


def head_start_cycles(host_s: float) -> int:
    """How long the GPU spins so that the host, which took this long, gets ahead of it."""
    wanted = min(max(_HEAD_START_MARGIN * host_s, _MIN_HEAD_START_S), _MAX_HEAD_START_S)
    return int(wanted * _CYCLES_PER_SECOND)


@contextmanager
def stage_ranges(stage: Stage, make_range: RangeMaker) -> Iterator[None]:
    """While this is active, every stage below the given one launches inside a range of its name."""
    nodes = list(_below(stage))
    try:
        for node in nodes:
            # An instance attribute hides the method; deleting it brings the method back.
            vars(node)["launch"] = _ranged(node.launch, f"{QUEUED}{node.name}", make_range)
        yield
    finally:
        for node in nodes:
            vars(node).pop("launch", None)


def _below(stage: Stage) -> Iterator[Stage]:
    children: tuple[Stage, ...] = ()
    if isinstance(stage, KernelPipeline):
        children = tuple(stage.stages)
    elif isinstance(stage, ConcurrentKernels):
        children = tuple(stage.concurrent_kernels)
    for child in children:
        yield child
        yield from _below(child)


def _ranged(launch: Callable[[], None], name: str, make_range: RangeMaker) -> Callable[[], None]:
    def launch_in_range() -> None:
        with make_range(name):
            launch()

    return launch_in_range
