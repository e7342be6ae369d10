"""The measured part of a benchmark: shape by shape on the device, and what becomes of a lost one.

A contender can end more than itself: a kernel that reads a wrong address takes the CUDA context
with it, one that waits for ever never returns, a compiler may crash. So the record is written all
along; it says who did it, the others of the shape are "lost" until they are measured, and a new
process goes on: by itself where this one can still start it, otherwise with `--resume`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from mla_var3.bench import contenders as bench_contenders
from mla_var3.bench import measure as bench_measure
from mla_var3.bench.measure import measure_case, with_projections
from mla_var3.bench.options import BenchOptions
from mla_var3.bench.record import (
    FAILED,
    LOST,
    BenchRecord,
    BenchRow,
    circumstances,
    row_key,
    save_record,
)
from mla_var3.bench.resume import resumable_rows, split_case
from mla_var3.bench.suites import Case
from mla_var3.bench.watch import TUNING_FACTOR, Watchdog
from mla_var3.runtime.measure import cuda_is_healthy
from mla_var3.runtime.workflow import Progress, current_device_spec

log = logging.getLogger(__name__)

LOST_NOTE = "The device was lost on the way: not everything was measured; --resume goes on."


def measure(record: BenchRecord, cases: Sequence[Case], options: BenchOptions, save: Path) -> None:
    """Measure all cases into a record, which is also written to `save` after each.

    Raises:
        InvalidArgumentError: `options.resume` is no record to go on with.
        UnknownNameError: the GPU is not in the device table.
    """
    from mla_var3.bench.peer_libraries import PeerLibraries
    from mla_var3.bench.peers import peer_kernel

    spec = current_device_spec()
    earlier = resumable_rows(options.resume, options.suite, spec.name) if options.resume else []
    wanted = {peer_kernel(name).library for case in cases for name in case.peers}
    libraries = PeerLibraries(options.peer_libs, wanted) if wanted else None
    record.settings = {
        "rounds": options.rounds,
        "seconds per timing": options.max_seconds,
        "tilings": "tuned" if options.tune else "default",
        **({"grid": "quick"} if options.quick else {}),
    }
    around = circumstances(record.environment, spec.name)
    timer = bench_measure.gpu_timer(options.max_seconds)
    bench_measure.warm_up()
    plan = []
    for case in cases:
        entrants = bench_contenders.contenders(
            case, libraries, spec.target, tune=options.tune, progress=options.progress
        )
        plan.append((case.problem, *split_case(case.problem, entrants, earlier)))
    asked = {case.problem for case in cases}
    results = [kept for _, kept, _ in plan]
    results.append([row for row in earlier if row.problem not in asked])
    total, before = sum(len(waiting) for *_, waiting in plan) * options.rounds, 0

    def keep(place: int, rows: Sequence[BenchRow]) -> None:
        results[place] = unique_rows(with_projections([*plan[place][1], *rows]))
        record.rows = [row for group in results for row in group]
        save_record(record, save)

    record.rows = [row for group in results for row in group]
    for place, (problem, _, waiting) in enumerate(plan):
        if not waiting:
            continue
        try:
            rows = measure_case(
                problem,
                waiting,
                timer,
                around,
                rounds=options.rounds,
                progress=_part_of(options.progress, before, total),
                watchdog=_watchdog(options, partial(keep, place), save),
                checkpoint=partial(keep, place),
            )
        except BaseException:  # an interruption: whoever was running is not to blame
            keep(place, ())
            log.warning("%s holds the shapes that are done; --resume goes on with it", save)
            raise
        before += len(waiting) * options.rounds
        waiting.clear()  # the peers of a case share its float32 references, which are large
        keep(place, rows)
        options.on_rows(results[place])
        unfinished = before < total or any(row.status == LOST for row in rows)
        if unfinished and _device_lost(rows):
            if options.on_lost is not None:
                options.on_lost(save)
            record.notes.append(LOST_NOTE)
            return


def _device_lost(rows: Sequence[BenchRow]) -> bool:
    statuses = {row.status for row in rows}
    return LOST in statuses or (FAILED in statuses and not cuda_is_healthy())


def _watchdog(
    options: BenchOptions, keep: Callable[[Sequence[BenchRow]], None], save: Path
) -> Watchdog | None:
    on_lost = options.on_lost
    if on_lost is None:
        return None

    def give_up(rows: Sequence[BenchRow]) -> None:
        keep(rows)
        on_lost(save)

    return Watchdog(options.patience * (TUNING_FACTOR if options.tune else 1), give_up)


def unique_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows without repetitions: the model may choose an n that was asked for as well."""
    return list({row_key(row): row for row in rows}.values())


def _part_of(progress: Progress, before: int, total: int) -> Progress:
    def report(what: str, done: int, _: int, detail: str) -> None:
        progress("bench", before + done, total, detail)

    return report
