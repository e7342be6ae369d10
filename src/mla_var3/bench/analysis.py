"""What a benchmark record says: who is fastest where, by how much, and where that changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mla_var3.bench.record import OK, OURS, PEER, PREDICTED, PROJECTION, BenchRow, shape_text
from mla_var3.bench.suites import COMMON
from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import UnknownNameError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.paths import split_full_name

END_TO_END, KERNEL_ONLY = "end to end", "kernel only"
BASIS_TEXT = {
    END_TO_END: "end to end, from q_nope to o: kernel and the projections it leaves to others",
    KERNEL_ONLY: "by the kernel alone; those on the latent cache leave projections to others",
}
PURE = ("flash_mla", "flash_mla_split_kv", "flash_attention")
"""Designs that take one path only."""
LARGE_WIN = 1.10


@dataclass(frozen=True)
class ShapeGroup:
    """The rows of one shape on one device; `only_kernels` leaves the projections out of account."""

    problem: MlaProblem
    device: str
    kind: str
    rows: tuple[BenchRow, ...]
    only_kernels: bool = False

    @property
    def title(self) -> str:
        """The shape in words."""
        return shape_text(self.problem)

    @property
    def timed(self) -> list[BenchRow]:
        """Kernels with a time, projections left out."""
        return [row for row in self.rows if row.status == OK and row.source != PROJECTION]

    @property
    def basis(self) -> str:
        """End to end where every kernel has that figure, otherwise the kernel alone."""
        known = all(row.end_to_end_us is not None for row in self.timed)
        return END_TO_END if known and not self.only_kernels else KERNEL_ONLY

    def figure(self, row: BenchRow) -> float:
        """The time to compare a row by."""
        value = row.end_to_end_us if self.basis == END_TO_END else row.time_us
        return math.inf if value is None else value

    def best(self, rows: Iterable[BenchRow]) -> BenchRow | None:
        """The fastest of some rows, None of none."""
        return min(rows, key=self.figure, default=None)

    @property
    def rivals(self) -> list[BenchRow]:
        """What our kernels are compared with: the peers; in a prediction the pure paths."""
        if self.kind == PREDICTED:
            return [row for row in self.timed if is_pure(row)]
        return [row for row in self.timed if row.source == PEER]

    @property
    def best_ours(self) -> BenchRow | None:
        """Our fastest row; in a prediction the fastest that is no pure path."""
        ours = [row for row in self.timed if row.source == OURS]
        if self.kind == PREDICTED:
            ours = [row for row in ours if not is_pure(row)]
        return self.best(ours)

    @property
    def best_rival(self) -> BenchRow | None:
        """The fastest rival."""
        return self.best(self.rivals)

    def speedup(self, row: BenchRow) -> float | None:
        """Time of the best rival over the row's; None without a rival or a time."""
        rival = self.best_rival
        if rival is None or row.status != OK or row.source == PROJECTION:
            return None
        return self.figure(rival) / self.figure(row)


def is_pure(row: BenchRow) -> bool:
    """Whether a row of ours is some version of a design that takes one path only."""
    return row.source == OURS and split_full_name(row.kernel)[0] in PURE


def shape_groups(rows: Sequence[BenchRow]) -> list[ShapeGroup]:
    """The rows by shape, device and kind, in the order of their first row."""
    found: dict[tuple[MlaProblem, str, str], list[BenchRow]] = {}
    for row in rows:
        found.setdefault((row.problem, row.device, row.kind), []).append(row)
    return [
        ShapeGroup(problem, device, kind, tuple(group))
        for (problem, device, kind), group in found.items()
    ]


def row_speedups(rows: Sequence[BenchRow]) -> dict[int, float]:
    """Index of a row -> its speed-up over the best rival at its shape."""
    group_of = {id(row): group for group in shape_groups(rows) for row in group.rows}
    found = {index: group_of[id(row)].speedup(row) for index, row in enumerate(rows)}
    return {index: value for index, value in found.items() if value is not None}


@dataclass(frozen=True)
class Crossing:
    """Between two measured query lengths another kernel becomes the fastest.

    Attributes:
        s: where the two lines meet, in between the lengths where both were measured.
        before, after: the fastest on either side.
    """

    s: float
    before: str
    after: str


@dataclass(frozen=True)
class TimesOverS:
    """Times against the query length for one set of the other sizes.

    Attributes:
        title: the other sizes.
        device, kind: whose times.
        basis: what the times include.
        series: name -> (s, microseconds), ascending.
        crossings: where the fastest changes.
    """

    title: str
    device: str
    kind: str
    basis: str
    series: dict[str, list[tuple[int, float]]]
    crossings: list[Crossing]


def times_over_s(rows: Sequence[BenchRow]) -> TimesOverS | None:
    """The set of shapes with the most query lengths; None where no set has two."""

    def rank(groups: list[ShapeGroup]) -> tuple[int, bool]:
        usual = replace(groups[0].problem, s=COMMON.s) == COMMON
        return len({group.problem.s for group in groups}), usual

    best = max(_families(rows, lambda problem: replace(problem, s=1)), key=rank, default=[])
    if len({group.problem.s for group in best}) < 2:
        return None
    best = _one_basis(best)
    series: dict[str, dict[int, float]] = {}
    for group in best:
        for row in group.timed:
            at = series.setdefault(row.series, {})
            at[row.problem.s] = min(group.figure(row), at.get(row.problem.s, math.inf))
    lines = {name: sorted(points.items()) for name, points in series.items()}
    first = best[0]
    title = " ".join(part for part in first.title.split() if not part.startswith("s="))
    crossings = find_crossings(lines)
    return TimesOverS(title, first.device, first.kind, first.basis, lines, crossings)


def find_crossings(series: dict[str, list[tuple[int, float]]]) -> list[Crossing]:
    """Where the fastest series changes from one measured s to the next, by log-log lines."""
    points = {name: dict(values) for name, values in series.items()}
    lengths = sorted({s for values in points.values() for s in values})

    def fastest(s: int) -> str:
        return min((name for name in points if s in points[name]), key=lambda n: points[n][s])

    found: list[Crossing] = []
    before = fastest(lengths[0]) if lengths else ""
    for low, high in pairwise(lengths):
        after = fastest(high)
        if points[before].get(high) == points[after][high]:
            continue  # predictions are often equal: a tie changes nothing
        found.append(Crossing(_meet(points[before], points[after], low, high), before, after))
        before = after
    return found


def _meet(one: dict[int, float], other: dict[int, float], low: int, high: int) -> float:
    middle = math.sqrt(low * high)
    if not all(s in line for s in (low, high) for line in (one, other)):
        return middle
    gap_low = math.log(other[low] / one[low])
    gap_high = math.log(other[high] / one[high])
    if gap_low == gap_high:
        return middle
    share = gap_low / (gap_low - gap_high)
    return float(low * (high / low) ** share)


@dataclass(frozen=True)
class TimesOverN:
    """Times of mla_var6_plus against its window: series name -> (n, microseconds)."""

    problem: MlaProblem
    device: str
    kind: str
    series: dict[str, list[tuple[int, float]]]


def times_over_n(rows: Sequence[BenchRow]) -> TimesOverN | None:
    """Kernels measured at two or more windows; None where there is none.

    Kernel times, because the window changes nothing about the projections.
    """
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    problems: dict[tuple[str, str], MlaProblem] = {}
    for row in rows:
        if row.status == OK and "n" in row.choices and row.time_us is not None:
            family = (row.device, row.kind)
            problems.setdefault(family, row.problem)
            same = replace(problems[family], s=1) == replace(row.problem, s=1)
            if same:
                line = found.setdefault(family, {})
                line.setdefault(f"{row.series}, s={row.problem.s}", {})[row.choices["n"]] = (
                    row.time_us
                )
    for (device, kind), lines in found.items():
        series = {name: sorted(at.items()) for name, at in lines.items() if len(at) > 1}
        if series:
            return TimesOverN(problems[device, kind], device, kind, series)
    return None


@dataclass(frozen=True)
class SpeedupGrid:
    """Speed-up of our best kernel over the best rival: (s, t) -> ratio."""

    title: str
    device: str
    kind: str
    basis: str
    cells: dict[tuple[int, int], float]


def _without_s_and_t(problem: MlaProblem) -> MlaProblem:
    """The problem with s and t out of account; given lengths belong to their t."""
    return replace(problem, s=1) if problem.lengths else replace(problem, s=1, t=1)


def speedup_grid(rows: Sequence[BenchRow]) -> SpeedupGrid | None:
    """The family of shapes with the most cells over s and t; None without any."""
    best: SpeedupGrid | None = None
    for groups in map(_one_basis, _families(rows, _without_s_and_t)):
        cells = {}
        for group in groups:
            ours = group.best_ours
            ratio = group.speedup(ours) if ours is not None else None
            if ratio is not None:
                cells[group.problem.s, group.problem.t] = ratio
        if cells and (best is None or len(cells) > len(best.cells)):
            first = groups[0]
            words = [w for w in first.title.split() if not w.startswith(("s=", "t="))]
            best = SpeedupGrid(" ".join(words), first.device, first.kind, first.basis, cells)
    return best


def _one_basis(groups: Sequence[ShapeGroup]) -> list[ShapeGroup]:
    """The groups, all compared by the same kind of time."""
    mixed = len({group.basis for group in groups}) > 1
    return [replace(group, only_kernels=mixed) for group in groups]


def _families(
    rows: Sequence[BenchRow], without: Callable[[MlaProblem], MlaProblem]
) -> list[list[ShapeGroup]]:
    """Groups of shapes that differ only in the sizes that `without` drops."""
    found: dict[tuple[Any, ...], list[ShapeGroup]] = {}
    for group in shape_groups(rows):
        if group.timed:
            found.setdefault((without(group.problem), group.device, group.kind), []).append(group)
    return list(found.values())


def doubts(rows: Sequence[BenchRow]) -> list[str]:
    """Rows too good to be believed before they are explained.

    A time below what the vendor's peak rates allow, or a large win of ours over the best peer, is
    more often a mistake in the measurement than a fast kernel.
    """
    found = []
    for group in shape_groups(rows):
        if group.kind == PREDICTED:
            continue
        spec = find_device(group.device)
        for row in group.timed:
            if spec is not None and row.flops and row.bytes and row.time_us:
                rates = (spec.peak_tflops(row.problem.dtype), spec.peak_gbps)
                least = Cost(row.flops, row.bytes).time_us(*rates)
                if row.time_us < least:
                    found.append(
                        f"{row.label}, {group.title}: {row.time_us:.1f} µs is below the "
                        f"{least:.1f} µs that the vendor's peak rates allow"
                    )
        ours = group.best_ours
        ratio = group.speedup(ours) if ours is not None else None
        if ours is not None and ratio is not None and ratio > LARGE_WIN:
            found.append(
                f"{ours.label}, {group.title}: {ratio:.2f}x as fast as the best peer; "
                "a win of this size needs an explanation"
            )
    return found


def find_device(name: str) -> DeviceSpec | None:
    """The table entry of a device, None for one that is not there."""
    try:
        return device_spec(name)
    except UnknownNameError:
        return None
