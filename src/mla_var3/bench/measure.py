"""Measuring one shape: check first, then time in several rounds with a rotating order.

A card warms up while it works, which favours the first to run. So every contender is timed once
per round, and each round starts at another place in the list. A watchdog ends a run when a
contender does not return.
"""

from __future__ import annotations

import gc
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from mla_var3.bench import record
from mla_var3.bench.contenders import MISSING_PROJECTIONS, Contender, Ready
from mla_var3.bench.record import BenchRow, first_line
from mla_var3.errors import UnsupportedError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.measure import Timing, cuda_is_healthy, time_gpu
from mla_var3.runtime.workflow import Progress, no_progress

log = logging.getLogger(__name__)

ROUNDS = 3
MAX_SECONDS = 0.4
QUICK_ROUNDS = 1
QUICK_SECONDS = 0.15
WARM_UP_SECONDS = 0.5
ENDED = "the process ended while it ran"
PATIENCE = 180.0
"""Seconds; a peer that compiles on first use may take more than a minute."""
TUNING_FACTOR = 10
"""Tuning compiles and times many tilings, so a contender may take this much longer."""

Timer = Callable[[Callable[[], None]], Timing]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Watchdog:
    """Calls `give_up` with the rows of the shape when one contender takes too long in a round.

    The host waits inside a synchronisation when a kernel hangs, so another thread calls it; it
    should end the process.
    """

    seconds: float
    give_up: Callable[[Sequence[BenchRow]], None]

    @contextmanager
    def over(self, rows: Callable[[str], Sequence[BenchRow]]) -> Iterator[None]:
        """Watch the body; `rows` makes the rows from the reason if the time runs out."""
        reason = f"did not finish within {self.seconds:g} s"
        timer = threading.Timer(self.seconds, lambda: self.give_up(rows(reason)))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@dataclass
class _Outcome:
    ready: Ready | None = None
    error: float | None = None
    status: str = record.OK
    reason: str = ""
    timings: list[Timing] = field(default_factory=list)


def _released() -> float:
    raise UnsupportedError("a contender is built again for every round")


def gpu_timer(max_seconds: float = MAX_SECONDS) -> Timer:
    """Times CUDA-graph replays with a cold L2 cache."""
    return partial(time_gpu, graph=True, max_seconds=max_seconds)


def rotated(items: Sequence[Item], round_index: int, rounds: int) -> list[Item]:
    """The order of one round: the starts of the rounds are spread evenly over the list."""
    start = round_index * max(1, len(items) // rounds) % max(1, len(items))
    return [*items[start:], *items[:start]]


def summarise(timings: Sequence[Timing]) -> Timing:
    """One figure for several rounds: the median of their medians, the widest of their spreads."""
    return Timing(
        median_us=statistics.median(timing.median_us for timing in timings),
        p10_us=min(timing.p10_us for timing in timings),
        p90_us=max(timing.p90_us for timing in timings),
        min_us=min(timing.min_us for timing in timings),
        runs=sum(timing.runs for timing in timings),
        timer=timings[0].timer,
        cold_l2=all(timing.cold_l2 for timing in timings),
    )


def measure_case(
    problem: MlaProblem,
    contenders: Sequence[Contender],
    timer: Timer,
    around: Mapping[str, Any],
    *,
    rounds: int = ROUNDS,
    progress: Progress = no_progress,
    release: Callable[[], None] | None = None,
    healthy: Callable[[], bool] | None = None,
    watchdog: Watchdog | None = None,
    checkpoint: Callable[[Sequence[BenchRow]], None] | None = None,
) -> list[BenchRow]:
    """Check and time all contenders of one shape; returns their rows in the given order.

    `around` is the device, date, command and versions of the rows. After each contender `release`
    frees memory; after a failure `healthy` tells whether the device still works. `checkpoint` is
    called before a contender runs, in every round, with the rows to read should it end the whole
    process. Contenders that never ran because the device was lost are "lost".
    """
    release, healthy = release or release_memory, healthy or cuda_is_healthy
    outcomes = [_Outcome() for _ in contenders]
    total, done = rounds * len(contenders), 0

    def without_the_device(culprit: int, why: str) -> list[_Outcome]:
        """The outcomes if nothing more can run: contenders without all their rounds are lost."""
        reason = f"{why} {contenders[culprit].kernel}"
        return [
            replace(other, status=record.LOST, reason=reason)
            if index != culprit and other.status == record.OK and len(other.timings) < rounds
            else other
            for index, other in enumerate(outcomes)
        ]

    def rows(results: Sequence[_Outcome]) -> list[BenchRow]:
        found = zip(contenders, results, strict=True)
        return with_projections([_row(problem, *each, around) for each in found])

    def rows_if_ended(culprit: int, reason: str) -> list[BenchRow]:
        results = without_the_device(culprit, "the run ended with")
        results[culprit] = replace(results[culprit], status=record.FAILED, reason=reason)
        return rows(results)

    for round_index in range(rounds):
        for index in rotated(range(len(contenders)), round_index, rounds):
            outcome, contender = outcomes[index], contenders[index]
            progress("bench", done, total, contender.kernel)
            done += 1
            if outcome.status != record.OK:
                continue
            if checkpoint is not None:
                checkpoint(rows_if_ended(index, ENDED))
            with watchdog.over(partial(rows_if_ended, index)) if watchdog else nullcontext():
                _one_round(outcome, contender, timer)
                release()
            if outcome.status == record.FAILED and not healthy():
                outcomes = without_the_device(index, "the CUDA context was lost with")
    progress("bench", total, total, "")
    return rows(outcomes)


def _one_round(outcome: _Outcome, contender: Contender, timer: Timer) -> None:
    try:
        ready = contender.build()
        if outcome.ready is None:
            # Keep the figures only: run and check hold the contender's tensors.
            outcome.ready = replace(ready, run=_released, check=_released)
            outcome.error = ready.check()
        outcome.timings.append(timer(ready.run))
    except UnsupportedError as reason:
        outcome.status, outcome.reason = record.ABSENT, first_line(reason)
    except (Exception, SystemExit) as error:
        # Whatever one contender raises, the others still run; a library may also call sys.exit.
        log.debug("%s failed", contender.kernel, exc_info=True)
        called = "called sys.exit: " if isinstance(error, SystemExit) else ""
        outcome.status, outcome.reason = record.FAILED, called + first_line(error)


def _row(
    problem: MlaProblem, contender: Contender, outcome: _Outcome, around: Mapping[str, Any]
) -> BenchRow:
    same = ("kernel", "source", "language", "asked", "cache_dtype")
    known: dict[str, Any] = {name: getattr(contender, name) for name in same}
    known |= {name: getattr(outcome, name) for name in ("status", "reason", "error")}
    known |= {**around, "versions": {**around.get("versions", {}), **contender.versions}}
    row = BenchRow(problem, kind=record.MEASURED, choices=contender.asked, **known)
    if ready := outcome.ready:
        known = {name: getattr(ready, name) for name in ("path", "choices", "note")}
        row = replace(row, flops=ready.cost.flops, bytes=ready.cost.bytes, **known)
    if outcome.status != record.OK:
        return row
    timing = summarise(outcome.timings)
    return replace(
        row,
        time_us=timing.median_us,
        spread_us=timing.spread_us,
        rounds_us=tuple(each.median_us for each in outcome.timings),
        runs=timing.runs,
        timer=timing.timer + ("" if timing.cold_l2 else ", warm L2"),
    )


def with_projections(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with the time of the projections that each path does not do, where it is known."""
    times = {row.kernel: row.time_us for row in rows if row.source == record.PROJECTION}
    found = []
    for row in rows:
        total: float | None = None
        if row.status == record.OK and row.path in MISSING_PROJECTIONS:
            missing = record.PROJECTIONS[: MISSING_PROJECTIONS[row.path]]
            needed = [times.get(name) for name in missing]
            known = [time_us for time_us in needed if time_us is not None]
            total = sum(known) if len(known) == len(needed) else None
        found.append(replace(row, projections_us=total))
    return found


def release_memory() -> None:
    """Free cached GPU memory, so that every contender starts with the same free memory."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and cuda_is_healthy():
        torch.cuda.empty_cache()


def warm_up(seconds: float = WARM_UP_SECONDS) -> None:
    """Bring the clocks up before the first timing."""
    import torch

    x = torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            torch.mm(x, x)
        torch.cuda.synchronize()
