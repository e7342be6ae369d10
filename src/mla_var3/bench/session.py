"""A measuring session: shape by shape on the device, saved all along, and resumable.

One contender can take down more than itself: an illegal address destroys the CUDA context, a hung
kernel never returns, a compiler may crash. So the record is written before each contender runs and
names the culprit; the others of the shape are "lost" until a new process measures them. The command
line starts that process by itself where it can, otherwise the user passes `--resume`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mla_var3.bench import contenders as bench_contenders
from mla_var3.bench import measure as bench_measure
from mla_var3.bench import record as records
from mla_var3.bench.contenders import Contender, TuneBudget
from mla_var3.bench.record import FAILED, LOST, BenchRecord, BenchRow
from mla_var3.bench.suites import Case
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.measure import cuda_is_healthy
from mla_var3.runtime.workflow import Progress, current_device_spec, no_progress

log = logging.getLogger(__name__)

LOST_NOTE = "The device was lost: some contenders were not measured; --resume continues."


@dataclass
class SessionOptions:
    """How to measure.

    Attributes:
        max_seconds: time for one timing.
        patience: seconds that one contender may take in one round.
        tune_seconds: time for the searches of all kernels together; None for no limit.
        on_rows: called with the rows of each finished shape.
        on_lost: called with the record when a contender destroyed the CUDA context or does not
            return; it should continue in a new process. Without it the run ends there, and no
            watchdog runs.
    """

    rounds: int = bench_measure.ROUNDS
    max_seconds: float = bench_measure.MAX_SECONDS
    patience: float = bench_measure.PATIENCE
    tune: bool = False
    tune_seconds: float | None = None
    peer_libs: Path | None = None
    resume: Path | None = None
    progress: Progress = no_progress
    on_rows: Callable[[Sequence[BenchRow]], None] = lambda rows: None
    on_lost: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidArgumentError("rounds", "a number of at least 1", self.rounds)
        for name in ("max_seconds", "patience"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidArgumentError(name, "a positive number", getattr(self, name))
        if self.tune_seconds is not None and not self.tune_seconds >= 0:
            raise InvalidArgumentError("tune_seconds", "a number of at least 0", self.tune_seconds)
        if self.peer_libs is not None and not self.peer_libs.is_dir():
            raise InvalidArgumentError("peer_libs", "a folder", self.peer_libs)


def measure(
    record: BenchRecord, cases: Sequence[Case], options: SessionOptions, save: Path
) -> None:
    """Measure all cases into a record, which is written to `save` as it grows."""
    from mla_var3.bench.peers import PeerLibraries, peer_kernel

    spec = current_device_spec()
    record.settings |= {
        "rounds": options.rounds,
        "seconds per timing": options.max_seconds,
        "tilings": "tuned" if options.tune else "default",
    }
    budget, earlier = None, []
    if options.tune:
        budget = TuneBudget(sum(len(case.kernels) for case in cases), options.tune_seconds)
    if options.tune and options.tune_seconds is not None:
        record.settings["seconds of tuning"] = options.tune_seconds
    if options.resume:
        earlier = resumable_rows(options.resume, record.suite, spec.name, record.settings)
    wanted = {peer_kernel(name).library for case in cases for name in case.peers}
    libraries = PeerLibraries(options.peer_libs, wanted) if wanted else None
    around = records.circumstances(record.environment, spec.name)
    timer = bench_measure.gpu_timer(options.max_seconds)
    bench_measure.warm_up()
    agenda, results = [], []
    for case in cases:
        entrants = bench_contenders.contenders(
            case, libraries, spec.target, tune=budget, progress=options.progress
        )
        results.append([row for row in earlier if row.problem == case.problem])
        agenda.append((case.problem, *split_case(entrants, results[-1])))
    asked = {case.problem for case in cases}
    results.append([row for row in earlier if row.problem not in asked])
    total, before = sum(len(waiting) for *_, waiting in agenda) * options.rounds, 0

    def progress(what: str, done: int, _: int, detail: str) -> None:
        options.progress(what, before + done, total, detail)

    def store(place: int, rows: list[BenchRow]) -> None:
        results[place] = rows
        record.rows = [row for group in results for row in group]
        records.save_record(record, save)

    def keep(place: int, rows: Sequence[BenchRow]) -> None:
        kept = agenda[place][1]
        store(place, unique_rows(bench_measure.with_projections([*kept, *rows])))

    def give_up(place: int, rows: Sequence[BenchRow]) -> None:
        keep(place, rows)
        if options.on_lost is not None:
            options.on_lost(save)

    seconds = options.patience * (bench_measure.TUNING_FACTOR if options.tune else 1)
    record.rows = [row for group in results for row in group]
    for place, (problem, _, waiting) in enumerate(agenda):
        if not waiting:
            continue
        own = results[place]
        hooks: dict[str, Any] = {"progress": progress, "checkpoint": partial(keep, place)}
        hooks["rounds"] = options.rounds
        if options.on_lost is not None:
            hooks["watchdog"] = bench_measure.Watchdog(seconds, partial(give_up, place))
        try:
            rows = bench_measure.measure_case(problem, waiting, timer, around, **hooks)
        except BaseException:  # interrupted: the contender that was running is not to blame
            store(place, own)
            log.warning("%s holds the finished shapes; --resume continues it", save)
            raise
        before += len(waiting) * options.rounds
        waiting.clear()  # the peers of a case share float32 references, which are large
        keep(place, rows)
        options.on_rows(results[place])
        statuses = {row.status for row in rows}
        broken = LOST in statuses or (FAILED in statuses and not cuda_is_healthy())
        if broken and (before < total or LOST in statuses):
            if options.on_lost is not None:
                options.on_lost(save)
            record.notes.append(LOST_NOTE)
            return


def unique_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows without repetitions: the model may choose an n that the suite pins as well."""
    return list({records.row_key(row): row for row in rows}.values())


def resumable_rows(
    path: Path, suite: str, device: str, settings: Mapping[str, Any]
) -> list[BenchRow]:
    """The rows of an interrupted run, which has to go on with the same settings for all rows."""
    record = records.load_record(path)
    old = record.settings
    others = ", ".join(name for name in record.devices if name != device)
    differ = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
    now, before = (
        ", ".join(f"{name} {each.get(name, 'not given')}" for name in differ)
        for each in (settings, old)
    )
    for wrong, expected, got in (
        (record.predicted, "a record of measurements", "predictions"),
        (record.suite != suite, f"a record of the suite {suite}", record.suite),
        (others, f"a record of {device}", others),
        (differ, f"a record with {now}", before),
    ):
        if wrong:
            raise InvalidArgumentError("resume", expected, got)
    return record.rows


def split_case(
    entrants: Sequence[Contender], rows: Sequence[BenchRow]
) -> tuple[list[BenchRow], list[Contender]]:
    """The rows of a shape to keep, and the contenders that still have to run.

    Rows are recorded shape by shape, so a shape with rows is done, except for rows that were lost
    with the device. A row that failed for a reason of its own is kept.
    """
    kept = [row for row in rows if row.status != LOST]
    if rows and len(kept) == len(rows):
        return kept, []
    done = {_key(row) for row in kept}
    return kept, [each for each in entrants if _key(each) not in done]


def _key(entry: BenchRow | Contender) -> tuple[Any, ...]:
    asked = tuple(sorted(entry.asked.items()))
    return entry.source, entry.kernel, entry.language, asked, entry.cache_dtype
