"""Whole work items for every CTA group, balanced by length.

Ranges of equal length (`ranges.py`) split items, and writing and merging partials takes as long as
several KV blocks. Where there are more items than groups, whole items are often balanced as well:
in the order of their lengths, the longest first, the groups take one each in turns, and every
second turn in reverse. Query tiles of one request are neighbours in this order, so their groups
walk its KV blocks at the same time and share them in L2.

Every CTA sorts the items when it starts, in shared memory, and knows from the longest sum of any
group whether this is shorter than equal ranges and a merge. Where requests have several visits, and
that is shorter still, the groups take whole items only for as many turns as all of them have. The
shortest items, which are left, form a line, and every group begins with a range of it that makes up
for what its sum lacks.
"""

import dataclasses
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32

from mla_var3.kernel.cute_python.mla.hopper.constants import MOST_TAKEN, THREADS
from mla_var3.kernel.cute_python.mla.latent import ranges
from mla_var3.kernel.cute_python.mla.latent.ops import quotient

REQUEST_BITS, VISIT_BITS, BLOCK_BITS = 8, 8, 15
"""Bits of a request, of its visits and of its KV blocks: most that are sorted. A key has all
three, an item in the order the first two."""
MOST_REQUESTS, MOST_VISITS, MOST_BLOCKS = 1 << REQUEST_BITS, 1 << VISIT_BITS, 1 << BLOCK_BITS
MOST_ITEMS = 2048
"""As many find room in shared memory."""
NO_VISIT = MOST_VISITS - 1
"""Stands behind the last item of a group."""
SPLIT_WORTH = ranges.MERGE_COST + 1
"""KV blocks by which the longest sum of a group may exceed an equal share: the merge is saved, and
sorting costs something. On an H200 batches that exceed it by up to 11 gained 0 to 15 %, by 15 to 21
they lost 0 to 8 % (docs/results/2026-11-18-nvidia-h200-balance-rows.json)."""
SHARED_WORTH = 7
"""Where requests have several visits the sum may be longer by 1 in so many, because groups share
their KV blocks. From the same rows: 1.20 to 1.27 times an equal share gained 1 to 8 %, 1.18 to 1.30
times with 16384 tokens lost 3 to 10 %."""
ALONE_COST = 3
"""Where every group is one CTA, 1 in so many KV blocks of the items that are left is added: no
group shares them. On an H200 256 requests of up to two visits and 8192 to 16384 tokens, with a
quarter of the KV blocks left, took 6 % more so, of which 2 % was the build, though the longest sum
was 3 % shorter (run 5 of the same rows)."""
SORT_WORTH = 2
"""KV blocks that are to be gained where groups would take whole items in turns without an order. On
an H200 256 requests of 512 to 1024 tokens with 16 heads took 75.9 us instead of 76.2 (run 3)."""
SHORT_ITEMS = 32
"""KV blocks up to which items are sorted in any case. Few long ones are hard to balance: they are
sorted from one and a half per group on, or where requests have several visits."""


class Sums(IntEnum):
    """Words of shared memory about the groups, behind the keys."""

    LONGEST = MOST_REQUESTS
    """The longest sum of a group that takes whole items only."""
    LONGEST_WHOLE = auto()
    """The same without the last turn, which not all groups have."""
    BEFORE = auto()
    """Where this group's range begins on the line of items that are left."""
    OWN = auto()
    """How long it is."""


KEY_WORDS = MOST_REQUESTS + len(Sums)
ORDER_WORDS = KEY_WORDS + MOST_ITEMS // 2
"""Words of shared memory while items are sorted: a key per request, `Sums`, and the items in order,
in 16 bits each."""


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
    """
    shared = quotient(total, SHARED_WORTH) * cutlass.min(visits - 1, 1)
    in_turns = (ranges.turns_length(longest, items, group_count) - SORT_WORTH) * group_count
    return splits * (total + shared + SPLIT_WORTH * group_count) + (1 - splits) * in_turns


def filled_sum(splits, visits, group_ctas, longest, longest_whole, total, group_count):
    """What the longest sum of a group is like where items that are left may be split.

    With their merge; `longest` where nothing may be split, or no KV blocks would be shared.

    Args:
        longest: longest sum of a group that takes whole items only.
        longest_whole: the same without the last turn, which not all groups have.
    """
    share = quotient(total + group_count - 1, group_count)
    allowed = cutlass.min(splits * (visits - 1), 1)
    alone = 2 - cutlass.min(group_ctas, 2)
    left = quotient(cutlass.max(share - longest_whole, 0), ALONE_COST)
    filled = cutlass.max(share, longest_whole) + SPLIT_WORTH + alone * left
    return allowed * filled + (1 - allowed) * longest


def worth_sorting(splits, requests, visits, present, longest, total, group_count, most):
    """Whether balancing may pay.

    Where what is left may be split it does. Else the group with most items has no less than the
    shortest, whose length follows from the mean and the longest where lengths are spread evenly.
    Equal items are never sorted in vain.

    Args:
        present: items that find a query tile.
    """
    hopeful = cutlass.max(SHORT_ITEMS + 1 - longest, 2 * present - 3 * group_count + 1)
    hopeful = cutlass.min(cutlass.max(hopeful, visits - 1), most - total)
    shortest = 2 * quotient(total, cutlass.max(present, 1)) - (longest + ranges.ITEM_COST)
    least = quotient(present + group_count - 1, group_count) * shortest * group_count
    hopeful = cutlass.max(cutlass.min(hopeful, most - least + 1), splits * (visits - 1))
    fits = cutlass.min(MOST_ITEMS + 1 - present, MOST_BLOCKS - longest)
    fits = cutlass.min(cutlass.min(fits, MOST_REQUESTS + 1 - requests), NO_VISIT + 1 - visits)
    several = cutlass.min(present - group_count, group_count - 1)
    # A group takes one item more than there are full turns, or some of those that are left.
    several = cutlass.min(several, (MOST_TAKEN - group_count) * group_count - present)
    return cutlass.min(cutlass.min(hopeful, fits), several) > 0


# --- on the device --------------------------------------------------------------------------------


def item_at(order: cute.Tensor, place: Int32) -> tuple[Int32, Int32]:
    """Request and visit of an item in the order; a load of 16 bits extends the sign."""
    item = order[place].to(Int32)
    return (item >> VISIT_BITS) & (MOST_REQUESTS - 1), item & (MOST_VISITS - 1)


@dataclass(frozen=True)
class ItemsLeft:
    """Items of the order as a line, for `split_range`: each like a request of one visit."""

    words: Any
    order: Any
    first: Any
    requests: Any
    visits: int = 1

    def lane_items(self, chunk: Int32) -> tuple[Int32, Int32]:
        """KV blocks of this lane's item in a chunk of 32, and 1; both 0 where there is none."""
        return left_items(self, chunk)


@cute.jit
def left_items(line: cutlass.Constexpr, chunk: Int32) -> tuple[Int32, Int32]:
    """See `ItemsLeft`."""
    index = chunk * 32 + cute.arch.lane_idx()
    blocks, count = Int32(0), Int32(0)
    if index < line.requests:
        request, _ = item_at(line.order, line.first + index)
        blocks, count = line.words[request] >> (REQUEST_BITS + VISIT_BITS), Int32(1)
    return blocks, count


@cute.jit
def balance(
    batch: cutlass.Constexpr,
    own: cutlass.Constexpr,
    words: cute.Tensor,
    order: cute.Tensor,
    taken: cute.Tensor,
    group_ctas: Int32,
    group: Int32,
    group_count: Int32,
):
    """Sort the items if that may pay; all threads of the CTA call it together.

    Args:
        words, order: see `ORDER_WORDS`.
        taken: `MOST_TAKEN` items of 16 bits; then those that this group takes.

    Returns:
        The fields of `WorkRange` that change: balanced, begin, begin_block, end, end_block, step,
        splits.
    """
    thread, _, _ = cute.arch.thread_idx()
    requests, visits, present = batch.requests, batch.visits, own.present
    balanced = Boolean(False)
    begin, begin_block, end, end_block = own.begin, own.begin_block, own.end, own.end_block
    step, splits = own.step, own.splits
    otherwise = Int32(0)
    if splits:
        otherwise = Int32(1)
    total = own.total
    limit = most_sum(otherwise, requests * visits, visits, own.longest, total, group_count)
    if worth_sorting(otherwise, requests, visits, present, own.longest, total, group_count, limit):
        padded = (requests + 3) & -4
        for request in cutlass.range(thread, padded, THREADS, unroll=1):
            key = Int32(0)
            if request < requests:
                key = (ranges.kv_blocks(batch, request) << REQUEST_BITS) + (
                    MOST_REQUESTS - 1 - request
                )
                key = (key << VISIT_BITS) + ranges.item_count(request, visits, batch.packed)
            words[request] = key
        if thread < len(Sums):
            words[MOST_REQUESTS + thread] = Int32(0)
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
        turns = quotient(present, group_count)  # that all groups have
        if thread < group_count:
            cost, last = Int32(0), Int32(0)
            place = turn_place(Int32(0), thread, group_count)
            turn = Int32(0)
            while place < present:
                request, _ = item_at(order, place)
                last = (words[request] >> (REQUEST_BITS + VISIT_BITS)) + ranges.ITEM_COST
                cost += last
                turn += 1
                place = turn_place(turn, thread, group_count)
            cute.arch.atomic_max(words.iterator + Sums.LONGEST, cost, sem="relaxed", scope="cta")
            if turn > turns:
                cost -= last
            whole = words.iterator + Sums.LONGEST_WHOLE
            cute.arch.atomic_max(whole, cost, sem="relaxed", scope="cta")
            lacks = cutlass.max(quotient(total + group_count - 1, group_count) - cost, 0)
            if thread < group:
                before = words.iterator + Sums.BEFORE
                cute.arch.atomic_add(before, lacks, sem="relaxed", scope="cta")
            if thread == group:
                words[Sums.OWN] = lacks
        cute.arch.sync_threads()
        longest = words[Sums.LONGEST]
        filled = filled_sum(
            otherwise, visits, group_ctas, longest, words[Sums.LONGEST_WHOLE], total, group_count
        )
        balanced = cutlass.min(longest, filled) * group_count <= limit
        if balanced:
            begin, begin_block, end, end_block = Int32(0), Int32(0), Int32(-1), Int32(0)
            step, pieces = Int32(1), Int32(0)
            first_left = turns * group_count
            splits = filled < longest
            if not splits and turn_place(turns, group, group_count) < present:
                turns += 1  # not all have it
            if splits:
                line = ItemsLeft(words, order, first_left, present - first_left)
                blocks, count = line.lane_items(Int32(0))
                left, begin_block, left_end, end_block = ranges.split_range(
                    line, (line.requests + 31) >> 5, blocks, count, words[Sums.BEFORE],
                    words[Sums.BEFORE] + words[Sums.OWN], ranges.split_step(1, visits),
                )  # fmt: skip
                first_left += left
                pieces = left_end - left
                if end_block > 0:
                    end = pieces
                    pieces += 1
            for i in cutlass.range(thread, pieces + turns, THREADS, unroll=1):
                place = first_left + i
                if i >= pieces:
                    place = turn_place(i - pieces, group, group_count)
                taken[i] = order[place]
            if thread == 0:
                taken[pieces + turns] = Int16(-1)
    # Numbers that the assembler does not know to be uniform put the loops' counters into registers
    # of every thread: 2 % more time.
    begin, begin_block, end, end_block, step = (
        cute.arch.make_warp_uniform(number) for number in (begin, begin_block, end, end_block, step)
    )
    return balanced, begin, begin_block, end, end_block, step, splits


def balanced(
    batch: ranges.Batch,
    own: ranges.WorkRange,
    words: cute.Pointer,
    taken: cute.Tensor,
    group_ctas: Int32,
    group: Int32,
    group_count: Int32,
) -> ranges.WorkRange:
    """The range of a group, of the items that it takes where these are balanced.

    The arguments are those of `balance`.
    """
    keys = cute.make_tensor(words, cute.make_layout(KEY_WORDS))
    items = cute.recast_ptr(words + KEY_WORDS, dtype=Int16)
    order = cute.make_tensor(items, cute.make_layout(MOST_ITEMS))
    chosen, begin, begin_block, end, end_block, step, splits = balance(
        batch, own, keys, order, taken, group_ctas, group, group_count
    )
    return dataclasses.replace(
        own, begin=begin, begin_block=begin_block, end=end, end_block=end_block, step=step,
        splits=splits, balanced=chosen,
    )  # fmt: skip
