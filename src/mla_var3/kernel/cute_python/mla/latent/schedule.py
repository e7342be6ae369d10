"""The schedule of a step: what every CTA of a launch does, found once for all layers of a model.

    lengths, query offsets and sizes, as in the latent kernel's contract
    -> schedule [CTAs, RANGE_WORDS] int32, of every CTA
        its range and its first work tile (`scheduler.scheduled`)
        the records of its two partials (`records.Record`)
        the items of its group where they are balanced (`balance.py`)

A launch of its own finds all that at its start. Layers attend to tokens of the same lengths, so
where a caller says that calls belong together the first one's launch runs this kernel in front, and
the attention of all reads what it wrote: it loads KV blocks after fewer steps, and fetches less
code, which is cold behind other kernels.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import MOST_TAKEN, THREADS
from mla_var3.kernel.cute_python.mla.latent.balance import ORDER_WORDS
from mla_var3.kernel.cute_python.mla.latent.ops import IndexTensors, LaunchSizes
from mla_var3.kernel.cute_python.mla.latent.records import record_partials, records_of
from mla_var3.kernel.cute_python.mla.latent.scheduler import (
    FLAGS,
    ITEMS_AT,
    RANGE_NUMBERS,
    TILE_NUMBERS,
    Scheduler,
)


class ScheduleSm90:
    """Host and device code."""

    def __init__(self, clusters: bool, tile_rows: int) -> None:
        self.clusters = clusters
        self.tile_rows = tile_rows

    @cute.jit
    def __call__(self, operands: Any, sizes: Any, stream: Any):
        """Launch it for the `LatentOperands` and `LatentSizes` of a latent kernel."""

        @cute.struct
        class Shared:
            order: cute.struct.MemRange[Int32, ORDER_WORDS]
            taken: cute.struct.MemRange[Int16, MOST_TAKEN]

        self.Shared = Shared
        index = IndexTensors.of(operands, sizes)
        # What it need not read.
        index = index._replace(table=None, tree=None)
        read = LaunchSizes.of(sizes)._replace(pages=None, page_tokens=None)
        self.schedule(index, read).launch(
            grid=(sizes.group_ctas, sizes.group_count, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def schedule(self, index: IndexTensors, sizes: LaunchSizes):
        thread, _, _ = cute.arch.thread_idx()
        rank, group, _ = cute.arch.block_idx()
        store = SmemAllocator().allocate(self.Shared)
        words = index.schedule
        scheduler = Scheduler.of(
            index._replace(schedule=None), sizes, group, rank, self.clusters, self.tile_rows,
            *(() if self.clusters else (store.order.data_ptr(), store.taken.data_ptr())),
        )  # fmt: skip
        cute.arch.sync_threads()
        cta = group * sizes.group_ctas + rank
        if thread == 0:
            write_range(words, cta, scheduler)
            records = records_of(words, words, sizes.group_ctas * sizes.group_count)
            record_partials(records, cta, scheduler)
        if const_expr(scheduler.taken is not None):
            if scheduler.range.balanced:
                items = cute.recast_tensor(scheduler.taken, Int32)
                for place in cutlass.range(thread, MOST_TAKEN // 2, THREADS, unroll=1):
                    words[cta, ITEMS_AT + place] = items[place]


@cute.jit
def write_range(schedule: cute.Tensor, cta: Int32, scheduler: cutlass.Constexpr):
    """Write the range of a CTA and its first work tile; one thread calls it."""
    own, tile = scheduler.range, scheduler.first_tile()
    numbers = [getattr(own, name) for name in RANGE_NUMBERS]
    numbers += [getattr(tile, name) for name in TILE_NUMBERS]
    for place, number in enumerate((*numbers, flags_of(own, tile))):
        schedule[cta, place] = Int32(number)


def flags_of(own: Any, tile: Any) -> Any:
    """The word of the flags."""
    word = Int32(0)
    for bit, name in enumerate(FLAGS):
        flag = Boolean(getattr(tile if name == "valid" else own, name))
        word = word | ((flag.to(Int32) & 1) << bit)
    return word
