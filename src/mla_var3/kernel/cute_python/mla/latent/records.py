"""What there is to merge: records of partials, and what the merge keeps in shared memory.

Each of the two slots of a CTA has a record of what it will hold. A CTA records at its start which
parts of split items it will write, so that behind the last product only states are read
(`merge.py`). In a step they are part of the schedule (`schedule.py`).
"""

import itertools
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    MOST_CTAS,
    RANGE_WORDS,
    ROWS,
    VECTOR_BITS,
)
from mla_var3.kernel.cute_python.mla.latent.mask import existing_rows
from mla_var3.kernel.cute_python.mla.latent.scheduler import RECORDS_AT, work_tile_at

SLOT_BITS = 16
"""Of a slot in `MergeShared.tiles`."""
MOST_SLOTS = 2 * MOST_CTAS
NO_ROW = -(1 << 30)
"""First output row in a trial. No row of it is written."""


class Record(IntEnum):
    """Columns of a slot's record."""

    SPLIT = 0
    """Flags of `Split`; 0 for an empty slot."""
    FIRST_ROW = 1
    """First output row."""
    ROWS = 2


class Total(IntEnum):
    """What the CTAs count before they merge."""

    TILES = 0
    """Split work tiles."""
    MOST_ROWS = 1
    """Most rows of any of them."""
    CTAS = 2
    """CTAs that take part."""
    RANK = 3
    """Those of them before this one."""
    LEFT = 4
    """Not 0 if some CTA has left."""
    MISSING = 5
    """Not 0 if some CTA has not started when this one has computed all."""
    FINISHED = 6
    """Not 0 when this CTA has computed all."""


def records_of(merges: cute.Tensor, schedule: cute.Tensor | None, ctas: Int32) -> cute.Tensor:
    """The records of all slots, [slot, column]: those of a schedule, or of this launch."""
    if schedule is None:
        return merges
    strides = ((len(Record), RANGE_WORDS), 1)
    layout = cute.make_layout(((2, ctas), len(Record)), stride=strides)
    return cute.make_tensor(schedule.iterator + RECORDS_AT, layout)


@cute.jit
def record_partials(records: cute.Tensor, cta: Int32, scheduler: cutlass.Constexpr):
    """Record what the slots of a CTA will hold."""
    own = scheduler.range
    record_partial(records, cta * 2, own.begin, Boolean(True), scheduler)
    ends_inside = own.end_block > 0 and own.end != own.begin
    record_partial(records, cta * 2 + 1, own.end, ends_inside, scheduler)


@cute.jit
def record_partial(
    records: cute.Tensor,
    slot: Int32,
    item: Int32,
    used: Boolean,
    scheduler: cutlass.Constexpr,
):
    """Record which partial of `item` a slot will hold: none if it is not `used`, or not split."""
    split, first_row, rows = Int32(0), Int32(0), Int32(0)
    if used:
        tile = work_tile_at(item, scheduler)
        if tile.valid and tile.item == item:
            split = tile.split
            first_row = tile.base + tile.row
            rows = existing_rows(tile, scheduler)
    records[slot, Record.SPLIT] = split
    records[slot, Record.FIRST_ROW] = first_row
    records[slot, Record.ROWS] = rows


@dataclass(frozen=True)
class MergeShared:
    """Shared memory of the merge.

    Attributes:
        place: pointers to the integers and to the numbers.
        records: [slot, 3] as in `merges`.
        tiles: [split tile]: the slot of its first partial, and above `SLOT_BITS` that of its last.
        stays: [CTA]: whether it takes part.
        totals: see `Total`.
        weights: [warp, 2] maximum and sum of weights of a warp's partials.
        sums: [warp, column of a vector, lane] a warp's weighted sum.
    """

    place: tuple[cute.Pointer, cute.Pointer]
    records: Any
    tiles: Any
    stays: Any
    totals: Any
    weights: Any
    sums: Any

    def during(self, trial: Any) -> "MergeShared":
        """The same, or with `trial` 1 what a trial reads instead; 0 or 1, on the device too."""
        return merge_shared(*self.place, trial)


TABLE_SHAPES = ((MOST_SLOTS, len(Record)), (MOST_SLOTS,), (MOST_CTAS,), (len(Total),))
"""Shapes of the integers of `MergeShared`, which are written while the CTA computes."""
TRIAL_SHAPES = ((1, len(Record)), (1,), (0,), (len(Total),))
"""Shapes of what a trial reads instead, behind them."""
TABLE_WORDS = sum(math.prod(shape) for shape in TABLE_SHAPES)
TRIAL_WORDS = sum(math.prod(shape) for shape in TRIAL_SHAPES)
SUM_SHAPES = ((CONSUMER_WARPS, 2), (CONSUMER_WARPS, VECTOR_BITS // Float16.width, 32))
"""Shapes of its numbers, which lie over tiles that no warp reads any more."""


def merge_shared(table: cute.Pointer, tile: cute.Pointer, trial: Any = 0) -> MergeShared:
    """The shared memory of the merge.

    Args:
        table: `TABLE_WORDS` integers, and `TRIAL_WORDS` where there is a trial.
        tile: what the numbers may overwrite.
        trial: see `MergeShared.during`.
    """

    def begins(shapes: Any) -> list[int]:
        return list(itertools.accumulate(map(math.prod, shapes), initial=0))

    def tensors(place: cute.Pointer, places: Any, shapes: Any) -> list[cute.Tensor]:
        found = []
        for begin, shape in zip(places, shapes, strict=True):
            layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
            found.append(cute.make_tensor(place + begin, layout))
        return found

    count, every = len(TABLE_SHAPES), begins(TABLE_SHAPES + TRIAL_SHAPES)
    # No branch: the compiler would make a copy of the code that reads them for each case.
    places = [every[i] + trial * (every[count + i] - every[i]) for i in range(count)]
    numbers = tensors(cute.recast_ptr(tile, dtype=Float32), begins(SUM_SHAPES)[:-1], SUM_SHAPES)
    return MergeShared((table, tile), *tensors(table, places, TABLE_SHAPES), *numbers)


@cute.jit
def reset_merge(shared: cutlass.Constexpr):
    """Prepare the shared memory; one thread calls it before the CTA's first barrier."""
    for total in cutlass.range_constexpr(Total.LEFT, len(Total)):
        shared.totals[total] = Int32(0)


@cute.jit
def prepare_trial(shared: cutlass.Constexpr, rows: Int32):
    """Write what a trial reads; one thread calls it before the CTA's first barrier.

    The warp finds one unit: columns of a row of the first partial, whatever is there.

    Args:
        rows: query rows of the launch. A trial takes the way of so many split rows.
    """
    trial = shared.during(1)
    trial.totals[Total.TILES] = Int32(1)
    trial.totals[Total.MOST_ROWS] = cutlass.max(rows, CONSUMER_WARPS)
    trial.totals[Total.CTAS] = Int32(1 << 20)
    trial.totals[Total.RANK] = Int32(0)
    trial.tiles[0] = Int32(0)
    trial.records[0, Record.FIRST_ROW] = Int32(NO_ROW)
    trial.records[0, Record.ROWS] = Int32(ROWS)
