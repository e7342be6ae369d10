"""Going on with a benchmark that was interrupted: which rows stay, and who still has to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mla_var3.bench.contenders import Contender
from mla_var3.bench.record import LOST, BenchRow, load_record
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem


def resumable_rows(path: Path, suite: str, device: str) -> list[BenchRow]:
    """The rows of an interrupted run.

    Raises:
        InvalidArgumentError: the record is none, or that of another suite or device.
    """
    record = load_record(path)
    if record.suite != suite:
        raise InvalidArgumentError("resume", f"a record of the suite {suite}", record.suite)
    others = [name for name in record.devices if name != device]
    if others:
        raise InvalidArgumentError("resume", f"a record of {device}", ", ".join(others))
    return record.rows


def split_case(
    problem: MlaProblem, entrants: Sequence[Contender], rows: Sequence[BenchRow]
) -> tuple[list[BenchRow], list[Contender]]:
    """The rows of a shape that stay, and the contenders that still have to run.

    Rows are recorded shape by shape, so a shape with rows is done, except for those that were lost
    with the device. A row that failed for a reason of its own stays.
    """
    own = [row for row in rows if row.problem == problem]
    kept = [row for row in own if row.status != LOST]
    if own and len(kept) == len(own):
        return kept, []
    done = {_key(row.source, row.kernel, row.language, row.asked) for row in kept}
    waiting = [
        each
        for each in entrants
        if _key(each.source, each.kernel, each.language, each.asked) not in done
    ]
    return kept, waiting


def _key(source: str, kernel: str, language: str, asked: Mapping[str, int]) -> tuple[Any, ...]:
    return source, kernel, language, tuple(sorted(asked.items()))
