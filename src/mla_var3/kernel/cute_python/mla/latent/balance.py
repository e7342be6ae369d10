"""Whole work items for every CTA group, balanced by length.

Ranges of equal length (`ranges.py`) split items, and writing and merging partials takes as long as
several KV blocks. Where there are more items than groups, whole items are often balanced as well:
in the order of their lengths, the longest first, the groups take one each in turns, and every
second turn in reverse. Query tiles of one request are neighbours in this order, so their groups
walk its KV blocks at the same time and share them in L2.

Every CTA sorts the items when it starts, in shared memory, and knows from the longest sum of any
group whether this is shorter than equal ranges and a merge.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from mla_var3.kernel.cute_python.mla.hopper.constants import THREADS
from mla_var3.kernel.cute_python.mla.latent.ops import quotient
from mla_var3.kernel.cute_python.mla.latent.ranges import (
    ITEM_COST,
    MERGE_COST,
    Batch,
    WorkRange,
    item_count,
    kv_blocks,
    turns_length,
)

REQUEST_BITS, VISIT_BITS, BLOCK_BITS = 8, 8, 15
"""Bits of a request, of its visits and of its KV blocks: most that are sorted. A key has all
three, an item in the order the first two."""
MOST_REQUESTS, MOST_VISITS, MOST_BLOCKS = 1 << REQUEST_BITS, 1 << VISIT_BITS, 1 << BLOCK_BITS
MOST_ITEMS = 2048
"""As many find room in shared memory."""
ORDER_WORDS = MOST_REQUESTS + MOST_ITEMS // 2 + 1
"""Words of shared memory: a key per request, the longest sum of a group, the items in order, in 16
bits each."""
SPLIT_WORTH = MERGE_COST + 1
"""KV blocks by which the longest sum of a group may exceed an equal share: the merge is saved, and
sorting costs something. On an H200 batches that exceed it by up to 11 gained 0 to 15 %, by 15 to 21
they lost 0 to 8 % (docs/results/2026-11-18-nvidia-h200-balance-rows.json)."""
SHARED_WORTH = 7
"""Where requests have several visits the sum may be longer by 1 in so many, because groups share
their KV blocks. From the same rows: 1.20 to 1.27 times an equal share gained 1 to 8 %, 1.18 to 1.30
times with 16384 tokens lost 3 to 10 %."""
SORT_WORTH = 2
"""KV blocks that are to be gained where groups would take whole items in turns without an order;
not measured."""
SHORT_ITEMS = 32
"""KV blocks up to which items are sorted in any case. Few long ones are hard to balance: they are
sorted from one and a half per group on, or where requests have several visits."""


# --- plain arithmetic, on numbers of the host or of the device ------------------------------------


def turn_place(turn, group, group_count):
    """Place of a group's item in the order."""
    odd = turn & 1
    return turn * group_count + group + odd * (group_count - 1 - 2 * group)


def most_sum(splits, items, visits, longest, total, group_count):
    """What the longest sum of a group may be, times the number of groups, for balancing to pay.

    Args:
        splits: 1 where items would be split otherwise, 0 where groups would take turns.
        items: items of all requests, also those that find no query tile.
        visits: visits of a request.
        longest: most KV blocks of any item.
        total: length of the line.
        group_count: number of CTA groups.
    """
    shared = quotient(total, SHARED_WORTH) * cutlass.min(visits - 1, 1)
    in_turns = (turns_length(longest, items, group_count) - SORT_WORTH) * group_count
    return splits * (total + shared + SPLIT_WORTH * group_count) + (1 - splits) * in_turns


def worth_sorting(requests, visits, present, longest, total, group_count, most):
    """Whether balancing may pay.

    The group with most items has no less than the shortest, whose length follows from the mean and
    the longest where lengths are spread evenly. Equal items are never sorted in vain.

    Args:
        requests: requests of the batch.
        present: items that find a query tile.
        visits, longest, total, group_count: as for `most_sum`.
        most: `most_sum`.
    """
    hopeful = cutlass.max(SHORT_ITEMS + 1 - longest, 2 * present - 3 * group_count + 1)
    hopeful = cutlass.min(cutlass.max(hopeful, visits - 1), most - total)
    shortest = 2 * quotient(total, cutlass.max(present, 1)) - (longest + ITEM_COST)
    least = quotient(present + group_count - 1, group_count) * shortest * group_count
    hopeful = cutlass.min(hopeful, most - least + 1)
    fits = cutlass.min(MOST_ITEMS + 1 - present, MOST_BLOCKS - longest)
    fits = cutlass.min(cutlass.min(fits, MOST_REQUESTS + 1 - requests), MOST_VISITS - visits)
    several = cutlass.min(present - group_count, group_count - 1)
    return cutlass.min(cutlass.min(hopeful, fits), several) > 0


# --- on the device --------------------------------------------------------------------------------


def item_at(order: cute.Tensor, place: Int32) -> tuple[Int32, Int32]:
    """Request and visit of an item in the order; a load of 16 bits extends the sign."""
    item = order[place].to(Int32)
    return (item >> VISIT_BITS) & (MOST_REQUESTS - 1), item & (MOST_VISITS - 1)


@cute.jit
def balance(
    batch: cutlass.Constexpr,
    own: cutlass.Constexpr,
    words: cute.Tensor,
    order: cute.Tensor,
    group: Int32,
    group_count: Int32,
):
    """Sort the items if that may pay; all threads of the CTA call it together.

    Args:
        batch: the items.
        own: the `WorkRange` of this group.
        words, order: see `ORDER_WORDS`.
        group, group_count: this group, and how many there are.

    Returns:
        Whether items are taken in the order of `words`, by numbers of turns; first and last of the
        range, each with its KV block; step; whether items may be split.
    """
    thread, _, _ = cute.arch.thread_idx()
    requests, visits = batch.requests, batch.visits
    most = MOST_REQUESTS
    balanced = Boolean(False)
    begin, begin_block, end, end_block = own.begin, own.begin_block, own.end, own.end_block
    step, splits = own.step, own.splits
    otherwise = Int32(0)
    if splits:
        otherwise = Int32(1)
    limit = most_sum(otherwise, requests * visits, visits, own.longest, own.total, group_count)
    if worth_sorting(requests, visits, own.present, own.longest, own.total, group_count, limit):
        padded = (requests + 3) & -4
        for request in cutlass.range(thread, padded, THREADS, unroll=1):
            key = Int32(0)
            if request < requests:
                key = (kv_blocks(batch, request) << REQUEST_BITS) + (MOST_REQUESTS - 1 - request)
                key = (key << VISIT_BITS) + item_count(request, visits, batch.packed)
            words[request] = key
        if thread == 0:
            words[most] = Int32(0)
        cute.arch.sync_threads()
        for request in cutlass.range(thread, requests, THREADS, unroll=1):
            key = words[request]
            place = Int32(0)
            for four in cutlass.range(0, padded, 4, unroll=2):
                for i in cutlass.range_constexpr(4):
                    other = words[four + i]
                    if other > key:  # longer, or as long and before this one
                        place += other & (MOST_VISITS - 1)
            for visit in cutlass.range(key & (MOST_VISITS - 1), unroll=1):
                order[place + visit] = ((request << VISIT_BITS) + visit).to(Int16)
        cute.arch.sync_threads()
        if thread < group_count:
            cost = Int32(0)
            place = turn_place(Int32(0), thread, group_count)
            turn = Int32(0)
            while place < own.present:
                request, _ = item_at(order, place)
                cost += (words[request] >> (REQUEST_BITS + VISIT_BITS)) + ITEM_COST
                turn += 1
                place = turn_place(turn, thread, group_count)
            cute.arch.atomic_max(words.iterator + most, cost, sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        balanced = words[most] * group_count <= limit
        if balanced:
            begin, begin_block, end_block, step = Int32(0), Int32(0), Int32(0), Int32(1)
            splits = Boolean(False)
            end = quotient(own.present, group_count)
            if turn_place(end, group, group_count) < own.present:  # not all have a last turn
                end += 1
    return balanced, begin, begin_block, end, end_block, step, splits


def balanced(
    batch: Batch, own: WorkRange, words: cute.Pointer, group: Int32, group_count: Int32
) -> tuple[WorkRange, cute.Tensor]:
    """The range of a group, of turns where whole items in order are shorter, and the order.

    The arguments are those of `balance`.
    """
    keys = cute.make_tensor(words, cute.make_layout(MOST_REQUESTS + 1))
    items = cute.recast_ptr(words + (MOST_REQUESTS + 1), dtype=Int16)
    order = cute.make_tensor(items, cute.make_layout(MOST_ITEMS))
    chosen, begin, begin_block, end, end_block, step, splits = balance(
        batch, own, keys, order, group, group_count
    )
    taken = dataclasses.replace(
        own, begin=begin, begin_block=begin_block, end=end, end_block=end_block, step=step,
        splits=splits, balanced=chosen,
    )  # fmt: skip
    return taken, order
