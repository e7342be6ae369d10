"""How the CTAs of a latent kernel's launch work together: the number and size of CTA groups.

`ranges.py` divides the work among them on the device; `range_begins` finds the same ranges on the
host.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, ROWS
from mla_var3.kernel.cute_python.mla.latent import balance, ranges

SPLIT_COST = 0.05
"""Share of the time that writing and merging partials costs at most. Not measured on its own."""
SPLIT_ITEMS = 0.2
"""The same cost in items, for a range that has many of them. Not measured on its own."""
STREAM_COST = 0.0015
"""Share of the time that every CTA group costs that is alone on its KV blocks: memory is read for
it alone, which takes power from the tensor cores. On an H200 66 such groups took 9 % (b=32 s=43;
docs/results/2026-11-15-nvidia-h200-mix-development.md)."""
EVEN_SHARE, EVEN_GROUPS = 0.95, 5
"""Least share of the CTA groups to use where that gives each item as many, and most groups of an
item. On an H200 with 128 of 132 CTAs 32 requests of 2048 to 4096 tokens with 16 heads took 39.9 us
instead of 41.5, 64 of 4096 91.3 instead of 92.5, 32 of equal length the same; 16 requests of 2048
to 4096 tokens took 29.4 instead of 27.1, since few lengths divide well by eight
(docs/results/2026-11-16-nvidia-h200-engine-shapes.md). Numbers between were not measured."""
STREAMS = 92
"""CTA groups whose KV blocks memory delivers as fast as they compute; more wait for memory. By the
time of a KV block on an H200, 1.6 us for 74 KB and a query tile, and 4.2 TB/s. Where requests have
one or two query tiles and there are fewer tiles than SMs, 132 groups of one CTA took 0 to 6 % more
than 66 of two (docs/results/2026-11-18-nvidia-h200-vllm-layers-rows.json beside those of the day
before, batch 64)."""
SURE_TURNS = 2
"""Items per group from which on they are balanced for most lengths (`balance.py`): groups on the
tiles of a request then read the same KV blocks. On an H200 256 requests of one or two tiles and 512
to 1024 tokens took 102 us with groups of one CTA, and 128 with groups of two (the same rows; 16
heads with up to 8 query tokens, 32 with up to 4)."""
GROUP_WORTH = 0.03
"""Share of the time that a larger CTA group, which reads L2 in step, may cost. From the same runs:
3 groups of 44 CTAs took 2089 us where 66 groups of 2 took 2280."""


@dataclass(frozen=True)
class GroupShape:
    """How the CTAs of a launch work together.

    Attributes:
        group_ctas: CTAs of a CTA group.
        visits: visits of a request by a group, each with other query tiles.
        group_count: CTA groups, all on the device at the same time.
        cluster_ctas: CTAs of a cluster: 2 where two groups may share every item, see `cluster.py`.
    """

    group_ctas: int
    visits: int
    group_count: int
    cluster_ctas: int = 1

    @property
    def ctas(self) -> int:
        """CTAs of the launch."""
        return self.group_ctas * self.group_count


def group_shape(
    tiles: int,
    requests: int,
    sm_count: int,
    group_ctas: int = 0,
    total_tiles: int = 0,
    token_tiles: int = 1,
) -> GroupShape:
    """CTA groups for a number of query tiles.

    Args:
        tiles: query tiles of the request with most rows.
        sm_count: CTAs that the device runs at the same time.
        group_ctas: a chosen size of a group; 0 takes the one that leaves the fewest SMs idle.
        total_tiles: query tiles of all requests, about, where most have fewer than `tiles`; 0
            where all have as many.
        token_tiles: query tiles of a query token with many heads, else 1.
    """

    def rated(size: int) -> tuple[float, GroupShape]:
        visits, most = -(-tiles // size), max(sm_count // size, 1)
        items = requests * visits
        ideal = requests * tiles / sm_count
        each = items / most
        cost = min(SPLIT_COST, SPLIT_ITEMS / each)
        if total_tiles:
            # A request fills its last visit in part.
            unfilled = (size - token_tiles if size % token_tiles == 0 else size - 1) / 2
            taken = min(total_tiles + requests * unfilled, items * size)
            # Where every item has two groups or more, those on one request read the same blocks.
            shared = most * min(1.0, requests * size / taken)
            streams = shared if 2 * taken <= most * size else most
            # They also do where items are balanced.
            sorts = requests <= balance.MOST_REQUESTS and taken <= balance.MOST_ITEMS * size
            balanced = sorts and taken >= SURE_TURNS * most * size
            used = most * size / sm_count / max(1.0, (shared if balanced else streams) / STREAMS)
            share = (1.0 - cost) * total_tiles / taken * used - STREAM_COST * streams
            return share, GroupShape(size, visits, most)
        split = (1.0 - cost) * ideal / each - STREAM_COST * most, GroupShape(size, visits, most)
        even = most // items * items
        if items < most < EVEN_GROUPS * items and even >= EVEN_SHARE * most:
            return split[0], GroupShape(size, visits, even)
        rounds = -(-items // most)
        if items % rounds:
            return split
        # Groups that all take the same number of items split nothing when lengths are equal, and
        # those on one request walk in step.
        groups = items // rounds
        streams = -(-groups // visits)
        whole = ideal / rounds - STREAM_COST * streams, GroupShape(size, visits, groups)
        return max(whole, split, key=lambda pair: pair[0])

    most = min(tiles, sm_count)
    sizes = [min(group_ctas, most)] if group_ctas else range(1, most + 1)
    candidates = [rated(size) for size in sizes]
    best = max(share for share, _ in candidates)
    near = (shape for share, shape in candidates if share >= best - GROUP_WORTH)
    found = max(near, key=lambda shape: shape.group_ctas)
    paired = found.group_count % ranges.CLUSTER == 0
    if paired and found.group_count >= ranges.CLUSTER * requests * found.visits:
        return replace(found, cluster_ctas=ranges.CLUSTER)
    return found


def ragged_tiles(queries: int, requests: int, max_q: int, heads: int) -> tuple[int, int]:
    """`total_tiles` and `token_tiles` of `group_shape`, as far as the host knows them."""
    # The last tile of a request is half full on average, unless tokens fill tiles.
    part = 0.0 if heads % ROWS == 0 else 0.5 * (1 - min(heads, ROWS) / ROWS)
    total = round(max(queries * heads / ROWS + requests * part, requests))
    if queries >= requests * max_q or total >= requests * -(-max_q * heads // ROWS):
        return 0, 1
    return total, heads // ROWS if heads % ROWS == 0 else 1


def aligned_groups(blocks: int, span: int) -> int:
    """CTA groups of an item where every range has up to `span` KV blocks of one item."""
    return max(-(-blocks // span), 1)


def aligned_span(blocks: Sequence[int], groups: int, step: int) -> int:
    """KV blocks of a range where all ranges are aligned to items, 0 where they are not."""
    if len(blocks) > groups or max(blocks, default=0) >= ranges.LONGEST_ALIGNED:
        return 0
    shortest = ranges.shortest_span(sum(blocks), groups, step)
    total = sum(blocks) + ranges.ITEM_COST * len(blocks)
    for span in itertools.islice(
        itertools.count(shortest, ranges.span_step(shortest, step)), ranges.SPANS
    ):
        if sum(aligned_groups(n, span) for n in blocks) <= groups:
            return span if ranges.aligning_pays(span, total, groups, step) else 0
    return 0


def range_begins(
    lengths: Sequence[int], shape: GroupShape, counts: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Where each group's range begins, as (item, KV block), and where the last one ends.

    The same boundaries as `divided_range` finds on the device, for planning and tests. Items that
    are taken in turns there are in order here; each group still gets its number of them.

    Args:
        counts: items of each packed request (`scheduler.item_count`); None where all have one for
            every visit.
    """
    items = _items(lengths, shape, counts)
    groups, step = shape.group_count, ranges.split_step(shape.group_ctas, shape.visits)
    total, behind = sum(n + ranges.ITEM_COST for _, n in items), len(lengths) * shape.visits
    if ranges.takes_turns(max((n for _, n in items), default=0), behind, groups, total):
        each, rest = divmod(behind, groups)
        return [(group * each + min(group, rest), 0) for group in range(groups + 1)]
    span = aligned_span([n for _, n in items], groups, step)
    item_cost, align = (0, span) if span else (ranges.ITEM_COST, 1)
    sizes = (aligned_groups(n + item_cost, align) * align for _, n in items)
    starts = list(itertools.accumulate(sizes, initial=0))
    line, begins = span * groups or total, []
    for group in range(groups + 1):
        position = ranges.range_position(line, group, groups)
        at, more, block = _split_at(position, starts, items, item_cost, step)
        begins.append((behind, 0) if at == len(items) else (items[at][0] + more, block))
    return begins


def _split_at(
    position: int,
    starts: Sequence[int],
    items: Sequence[tuple[int, int]],
    item_cost: int,
    step: int,
) -> tuple[int, int, int]:
    """Where a line of items is split: the place of an item among them, and 0 and its KV block.

    Or 1 and 0: behind that item. The number of items, 0 and 0: behind the last one.
    """
    at = bisect.bisect_right(starts, position) - 1
    if at == len(items):
        return at, 0, 0
    local, blocks = position - starts[at], items[at][1]
    block = ranges.split_block(local, item_cost, step)
    return (at, 1, 0) if block >= blocks and local > 0 else (at, 0, block)


def _items(
    lengths: Sequence[int], shape: GroupShape, counts: Sequence[int] | None
) -> list[tuple[int, int]]:
    """The items that find a query tile, each with its KV blocks."""
    counts = [shape.visits] * len(lengths) if counts is None else counts
    return [
        (request * shape.visits + visit, -(-lengths[request] // KV_BLOCK))
        for request, count in enumerate(counts)
        for visit in range(count)
    ]


def in_halves(
    lengths: Sequence[int], shape: GroupShape, counts: Sequence[int] | None = None
) -> bool:
    """Whether two groups share every item, as `work_range` decides; arguments of `range_begins`."""
    blocks = [n for _, n in _items(lengths, shape, counts)]
    total, step = (
        sum(blocks) + ranges.ITEM_COST * len(blocks),
        ranges.split_step(shape.group_ctas, shape.visits),
    )
    longest = max(blocks, default=0)
    return shape.cluster_ctas > 1 and ranges.halves_pay(longest, shape.group_count, total, step)


def balanced_items(
    lengths: Sequence[int], shape: GroupShape, counts: Sequence[int] | None = None
) -> list[list[tuple[int, int, int]]] | None:
    """The items of each group, as `balance` decides; None where it does not.

    Each with its first KV block and the one behind the last. The arguments are those of
    `range_begins`.
    """
    if len(lengths) > balance.MOST_REQUESTS:
        return None
    items = _items(lengths, shape, counts)
    groups, longest = shape.group_count, max((n for _, n in items), default=0)
    total, behind = sum(n + ranges.ITEM_COST for _, n in items), len(lengths) * shape.visits
    splits = int(groups > 1 and not ranges.takes_turns(longest, behind, groups, total))
    most = balance.most_sum(splits, behind, shape.visits, longest, total, groups)
    sizes = (splits, len(lengths), shape.visits, len(items), longest, total, groups, most)
    if not balance.worth_sorting(*sizes):
        return None
    order = sorted(items, key=lambda item: -item[1])
    turns = len(order) // groups
    places = [
        [balance.turn_place(turn, group, groups) for turn in range(turns + 1)]
        for group in range(groups)
    ]
    taken = [[order[place] for place in own if place < len(order)] for own in places]
    sums = [[n + ranges.ITEM_COST for _, n in own] for own in taken]
    whole = [sum(own[:turns]) for own in sums]
    longest_sum = max(map(sum, sums))
    filled = balance.filled_sum(
        splits, shape.visits, shape.group_ctas, longest_sum, max(whole), total, groups
    )
    if min(longest_sum, filled) * groups > most:
        return None
    found = [[(item, 0, n) for item, n in own] for own in taken]
    if filled >= longest_sum:
        return found
    left = order[turns * groups :]
    starts = list(itertools.accumulate((n + ranges.ITEM_COST for _, n in left), initial=0))
    lacks = (max(-(-total // groups) - own, 0) for own in whole)
    begins, step = [], ranges.split_step(1, shape.visits)
    for position in itertools.accumulate(lacks, initial=0):
        at, more, block = _split_at(position, starts, left, ranges.ITEM_COST, step)
        begins.append((at + more, block))
    return [
        _pieces(left, *borders) + own[:turns]
        for own, borders in zip(found, itertools.pairwise(begins), strict=True)
    ]


def _pieces(
    items: Sequence[tuple[int, int]], begin: tuple[int, int], end: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Items between two places on a line, each with its first KV block and that behind the last."""
    pieces = []
    for at in range(begin[0], end[0] + (end[1] > 0)):
        item, blocks = items[at]
        first, last = begin[1] if at == begin[0] else 0, end[1] if at == end[0] else blocks
        pieces.append((item, first, last))
    return pieces


def partial_count(lengths: Sequence[int], shape: GroupShape) -> int:
    """Partials that a launch writes to memory, per CTA of a group."""
    if in_halves(lengths, shape):
        return 0
    balanced = balanced_items(lengths, shape)
    if balanced:
        pieces = Counter(item for own in balanced for item, _, _ in own)
        return sum(count for count in pieces.values() if count > 1)
    begins = range_begins(lengths, shape)
    items = len(lengths) * shape.visits
    inside = [begin for begin in dict.fromkeys(begins) if begin[1] > 0 and begin[0] < items]
    return len(inside) + len({item for item, _ in inside})
