"""Findings of a benchmark record: who is fastest where, by how much, and where that changes.

8-bit kernels have a larger error. They are compared with all peers, but never count as our best,
and 16-bit kernels are not compared with an 8-bit peer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mla_var3.bench.record import OK, OURS, PEER, PREDICTED, PROJECTION, BenchRow, shape_text
from mla_var3.bench.suites import COMMON
from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import UnknownNameError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.model.times import FP8_SPEED
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.paths import split_full_name

CALL_TIME, KERNEL_TIME = "call time", "kernel time"
BASIS_TEXT = {
    CALL_TIME: "call time, from q_nope to o: the kernel and the projections it does not do",
    KERNEL_TIME: "kernel time; latent kernels do not do the projections",
}
PURE = ("flash_mla", "flash_mla_split_kv", "flash_attention")
"""Designs that take one path only."""
LARGE_WIN = 1.10


@dataclass(frozen=True)
class ShapeGroup:
    """The rows of one shape on one device; `only_kernels` compares by kernel time."""

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
        """Call time where every row has one, otherwise kernel time."""
        known = all(row.call_us is not None for row in self.timed)
        return CALL_TIME if known and not self.only_kernels else KERNEL_TIME

    def figure(self, row: BenchRow) -> float:
        """The time to compare a row by."""
        value = row.call_us if self.basis == CALL_TIME else row.time_us
        return math.inf if value is None else value

    def best(self, rows: Iterable[BenchRow]) -> BenchRow | None:
        """The fastest of some rows, None of none."""
        return min(rows, key=self.figure, default=None)

    def _is_rival(self, row: BenchRow) -> bool:
        return is_pure(row) if self.kind == PREDICTED else row.source == PEER

    @property
    def rivals(self) -> list[BenchRow]:
        """What our kernels are compared with: the peers; in a prediction the pure paths."""
        return [row for row in self.timed if self._is_rival(row)]

    @property
    def _ours(self) -> list[BenchRow]:
        return [row for row in self.timed if row.source == OURS and not self._is_rival(row)]

    @property
    def best_ours(self) -> BenchRow | None:
        """Our fastest 16-bit row; in a prediction the fastest that is not a pure path."""
        return self.best(row for row in self._ours if not row.eight_bit)

    @property
    def best_eight_bit(self) -> BenchRow | None:
        """Our fastest 8-bit row."""
        return self.best(row for row in self._ours if row.eight_bit)

    @property
    def best_rival(self) -> BenchRow | None:
        """The fastest rival in 16 bits."""
        return self.best(row for row in self.rivals if not row.eight_bit)

    def rival_of(self, row: BenchRow) -> BenchRow | None:
        """The fastest rival of a row: of an 8-bit row 8-bit peers are rivals, too."""
        return self.best(self.rivals) if row.eight_bit else self.best_rival

    def speedup(self, row: BenchRow) -> float | None:
        """Time of the best rival over the row's; None without a rival or a time."""
        rival = self.rival_of(row)
        if rival is None or row.status != OK or row.source == PROJECTION:
            return None
        return self.figure(rival) / self.figure(row)


def is_pure(row: BenchRow) -> bool:
    """Whether a 16-bit row of ours is some version of a design that takes one path only."""
    return row.source == OURS and not row.cache_dtype and split_full_name(row.kernel)[0] in PURE


def shape_groups(rows: Sequence[BenchRow]) -> list[ShapeGroup]:
    """The rows by shape, device and kind, in the order of their first row."""
    found: dict[tuple[MlaProblem, str, str], list[BenchRow]] = {}
    for row in rows:
        found.setdefault((row.problem, row.device, row.kind), []).append(row)
    return [ShapeGroup(*key, tuple(group)) for key, group in found.items()]


def row_speedups(rows: Sequence[BenchRow]) -> dict[int, float]:
    """Index of a row -> its speed-up over the best rival at its shape."""
    group_of = {id(row): group for group in shape_groups(rows) for row in group.rows}
    found = {index: group_of[id(row)].speedup(row) for index, row in enumerate(rows)}
    return {index: value for index, value in found.items() if value is not None}


@dataclass(frozen=True)
class Crossing:
    """Another kernel becomes the fastest at s, between lengths at which both have a time."""

    s: float
    before: str
    after: str


@dataclass(frozen=True)
class Chart:
    """What a plot shows, for shapes that share the sizes in the title.

    `series` maps names to (s or n, microseconds), ascending; `cells` maps (s, t) to the speed-up of
    our best kernel over the best rival.
    """

    title: str
    device: str
    kind: str
    basis: str
    series: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)
    cells: dict[tuple[int, int], float] = field(default_factory=dict)


def _chart(group: ShapeGroup, *without: str, basis: str = "", **data: Any) -> Chart:
    """A chart of shapes like that of a group, apart from the sizes in `without`."""
    words = [word for word in group.title.split() if word.partition("=")[0] not in without]
    return Chart(" ".join(words), group.device, group.kind, basis or group.basis, **data)


def times_over_s(rows: Sequence[BenchRow]) -> Chart | None:
    """The set of shapes with the most query lengths; None where no set has two."""

    def rank(groups: list[ShapeGroup]) -> tuple[int, bool]:
        usual = replace(groups[0].problem, s=COMMON.s) == COMMON
        return len({group.problem.s for group in groups}), usual

    best = max(_families(rows, lambda problem: replace(problem, s=1)), key=rank, default=[])
    if len({group.problem.s for group in best}) < 2:
        return None
    first, *_ = best = _one_basis(best)
    series: dict[str, dict[int, float]] = {}
    for group in best:
        for row in group.timed:
            at = series.setdefault(row.series, {})
            at[row.problem.s] = min(group.figure(row), at.get(row.problem.s, math.inf))
    lines = {name: sorted(points.items()) for name, points in series.items()}
    # An 8-bit kernel is another computation, so it does not cross the others.
    sixteen_bit = {row.series for row in rows if not row.eight_bit}
    crossings = find_crossings({k: v for k, v in lines.items() if k in sixteen_bit})
    return _chart(first, "s", series=lines, crossings=crossings)


def find_crossings(series: Mapping[str, Sequence[tuple[int, float]]]) -> list[Crossing]:
    """Where the fastest series changes, by log-log lines between neighbouring points.

    A series that merely starts or ends crosses nothing: both must have a time on either side.
    """
    points = {name: dict(values) for name, values in series.items()}
    lengths = sorted({s for values in points.values() for s in values})

    def fastest(s: int) -> str:
        return min((name for name in points if s in points[name]), key=lambda n: points[n][s])

    found: list[Crossing] = []
    before = fastest(lengths[0]) if lengths else ""
    for high in lengths[1:]:
        old, after = points[before], fastest(high)
        new = points[after]
        if high not in old:
            if max(old) < high:  # it ended
                before = after
            continue
        if old[high] == new[high]:
            continue  # predictions are often equal: a tie changes nothing
        if shared := [s for s in lengths if s < high and s in old and s in new]:
            low = shared[-1]
            gap_low, gap_high = (math.log(new[s] / old[s]) for s in (low, high))
            share = gap_low / (gap_low - gap_high) if gap_low != gap_high else 0.5
            s = low * (high / low) ** min(max(share, 0.0), 1.0)
            found.append(Crossing(s, before, after))
        before = after
    return found


def window_series(row: BenchRow) -> str:
    """The name of a row's line in the plot over n."""
    return f"{row.series}, s={row.problem.s}"


def times_over_n(rows: Sequence[BenchRow]) -> Chart | None:
    """Kernel times of kernels at two or more windows; None where there is none."""
    families: dict[tuple[str, str], list[BenchRow]] = {}
    for row in rows:
        if row.status == OK and "n" in row.choices and row.time_us is not None:
            families.setdefault((row.device, row.kind), []).append(row)
    for found in families.values():
        first = shape_groups(found)[0]
        lines: dict[str, dict[int, float]] = {}
        for row in found:
            if replace(row.problem, s=first.problem.s) == first.problem:
                lines.setdefault(window_series(row), {})[row.choices["n"]] = row.time_us or 0.0
        series = {name: sorted(at.items()) for name, at in lines.items() if len(at) > 1}
        if series:
            return _chart(first, "s", basis=KERNEL_TIME, series=series)
    return None


def speedup_grid(rows: Sequence[BenchRow]) -> Chart | None:
    """The family of shapes with the most cells over s and t; None without any."""

    def without(problem: MlaProblem) -> MlaProblem:
        # Given lengths belong to their t.
        return replace(problem, s=1) if problem.lengths else replace(problem, s=1, t=1)

    best: Chart | None = None
    for groups in map(_one_basis, _families(rows, without)):
        cells = {}
        for group in groups:
            ours = group.best_ours
            ratio = group.speedup(ours) if ours is not None else None
            if ratio is not None:
                cells[group.problem.s, group.problem.t] = ratio
        if cells and (best is None or len(cells) > len(best.cells)):
            best = _chart(groups[0], "s", "t", cells=cells)
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
    """Rows that need an explanation before anyone believes them.

    A time below the roofline at vendor peaks, or a large win over the best peer, is more often a
    mistake in the measurement than a fast kernel.
    """
    found = []
    for group in shape_groups(rows):
        if group.kind == PREDICTED:
            continue
        for row in group.timed:
            least = limit_us(row)
            if least is not None and row.time_us and row.time_us < least:
                why = f"is below the {least:.1f} µs that the vendor's peak rates allow"
                found.append(f"{row.label}, {group.title}: {row.time_us:.1f} µs {why}")
        for ours in filter(None, (group.best_ours, group.best_eight_bit)):
            ratio = group.speedup(ours)
            if ratio is not None and ratio > LARGE_WIN:
                why = "as fast as the best peer; a win of this size needs an explanation"
                found.append(f"{ours.label}, {group.title}: {ratio:.2f}x {why}")
    return found


def limit_us(row: BenchRow) -> float | None:
    """The least time of a row: its roofline at the vendor's peak rates; None where unknown."""
    spec = find_device(row.device)
    if spec is None or not row.flops or not row.bytes:
        return None
    speed = FP8_SPEED if row.eight_bit else 1.0
    rates = (speed * spec.peak_tflops(row.problem.dtype), spec.peak_gbps)
    return Cost(row.flops, row.bytes).time_us(*rates)


def find_device(name: str) -> DeviceSpec | None:
    """The table entry of a device, None for one that is not there."""
    try:
        return device_spec(name)
    except UnknownNameError:
        return None
