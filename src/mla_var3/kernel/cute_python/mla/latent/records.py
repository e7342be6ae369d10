"""Records of partials: what each of the two slots of a CTA will hold.

A CTA records at its start which parts of split items it will write, so that behind the last product
only states are read (`merge.py`). In a step they are part of the schedule (`schedule.py`).
"""

from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from mla_var3.kernel.cute_python.mla.hopper.constants import RANGE_WORDS, ROWS
from mla_var3.kernel.cute_python.mla.latent.scheduler import RECORDS_AT, work_tile_at


class Record(IntEnum):
    """Columns of a slot's record."""

    SPLIT = 0
    """Flags of `Split`; 0 for an empty slot."""
    FIRST_ROW = 1
    """First output row."""
    ROWS = 2


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
            rows = cutlass.min(tile.rows - tile.row, ROWS)
    records[slot, Record.SPLIT] = split
    records[slot, Record.FIRST_ROW] = first_row
    records[slot, Record.ROWS] = rows
