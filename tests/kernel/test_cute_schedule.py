"""The tile scheduler of the latent kernel on plain integers: splits, balance, CTA groups, merging.

What the device code does with its range (`work_tile_at`, the two slots of a CTA, the search of the
merge) is modelled below after the docstrings, and driven by `range_begins`. That the device finds
the same ranges is tested here with its own code on 32 threads, and on a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.hopper.constants import DEFAULT_SM_COUNT, KV_BLOCK
from mla_var3.kernel.cute_python.mla.latent import merge, records
from mla_var3.kernel.cute_python.mla.latent import ranges as device
from mla_var3.kernel.cute_python.mla.latent.groups import (
    GROUP_WORTH,
    SPLIT_COST,
    STREAM_COST,
    GroupShape,
    aligned_span,
    balanced_items,
    group_shape,
    in_halves,
    partial_count,
    range_begins,
)
from mla_var3.kernel.cute_python.mla.latent.merge import merge_rows
from mla_var3.kernel.cute_python.mla.latent.records import MOST_SLOTS, Record, Total
from mla_var3.kernel.cute_python.mla.latent.scheduler import Split

from .compile_once import as_written

INT32_MAX = 2**31 - 1
SPLIT_MOVES = device.ITEM_COST + 1
"""KV blocks by which a split leaves its ideal place: down to an item's start, whose fixed cost is
not divided, or up by one to the end of a pair."""

LENGTHS = st.lists(
    st.one_of(st.just(0), st.integers(1, 200), st.integers(1, 20_000)), min_size=1, max_size=40
)
SHAPES = st.builds(GroupShape, st.integers(1, 8), st.integers(1, 5), st.integers(1, 150))


@dataclass(frozen=True)
class Span:
    """KV blocks `first` to `last` of an item, as a CTA takes them; `split` as in `WorkTile`."""

    item: int
    first: int
    last: int
    split: int


def block_counts(lengths: Sequence[int], groups: int) -> list[int]:
    return [-(-length // KV_BLOCK) for length in lengths for _ in range(groups)]


def spans(lengths: Sequence[int], shape: GroupShape) -> list[list[Span]]:
    """Per range, the items that a CTA group goes through."""
    counts = block_counts(lengths, shape.visits)
    begins = range_begins(lengths, shape)
    return [list(part_spans(counts, begin, end)) for begin, end in itertools.pairwise(begins)]


def part_spans(counts: list[int], begin: tuple[int, int], end: tuple[int, int]) -> Iterator[Span]:
    stop = end[0] + (end[1] > 0)
    for item in range(begin[0], stop):
        first = begin[1] if item == begin[0] else 0
        last = end[1] if item == end[0] else counts[item]
        split = 0
        if first > 0 or last < counts[item]:
            split = Split.PARTIAL | (Split.FIRST if first == 0 else 0)
            split |= Split.LAST if last == counts[item] else 0
        yield Span(item, first, last, split)


def cost(group: Sequence[Span], item_cost: int = device.ITEM_COST) -> int:
    """Length of a range on the line: an item's fixed cost lies at its start."""
    return sum(span.last - span.first + item_cost * (span.first == 0) for span in group)


@settings(max_examples=150, deadline=None)
@given(LENGTHS, SHAPES)
@example([0], GroupShape(1, 1, 132))
@example([1], GroupShape(1, 1, 132))
@example([0, 0, 0], GroupShape(2, 3, 7))
@example([64] * 12, GroupShape(1, 1, 4))
@example([64 * 100], GroupShape(1, 1, 132))
@example([0, 20_000, 0, 1], GroupShape(1, 2, 132))
def test_ranges_cover_every_block_once_and_in_order(lengths, shape):
    counts = block_counts(lengths, shape.visits)
    begins = range_begins(lengths, shape)
    assert begins[0] == (0, 0)
    assert begins[-1] == (len(counts), 0)
    assert begins == sorted(begins)
    # Splits are inside the item, between pairs of KV blocks unless CTAs share none.
    step = device.split_step(shape.group_ctas, shape.visits)
    assert step == (1 if shape.group_ctas == shape.visits == 1 else 2)
    assert all(block % step == 0 and (block == 0 or block < counts[item]) for item, block in begins)
    reached = [0] * len(counts)
    finished: list[int] = []
    for span in itertools.chain.from_iterable(spans(lengths, shape)):
        assert span.first == reached[span.item], "a gap or an overlap"
        assert span.first <= span.last <= counts[span.item]
        reached[span.item] = span.last
        if span.last == counts[span.item]:
            finished.append(span.item)
    # Also an item without blocks is visited, once: its rows are written too.
    assert finished == list(range(len(counts)))


@pytest.mark.parametrize(
    ("shape", "lengths", "counts"),
    [
        (GroupShape(1, 1, 132), [0] * 529, [1] + [0] * 528),
        (GroupShape(2, 32, 66), [0] + [18_000] * 63, [1] + [0] * 63),
        (GroupShape(1, 128, 132), [0] * 11, [2] * 11),
    ],
)
def test_items_without_blocks_are_visited_where_all_are_such(shape, lengths, counts):
    """Packed queries of which no request has tokens: their rows are written all the same."""
    begins = range_begins(lengths, shape, counts)
    wanted = {r * shape.visits + visit for r, n in enumerate(counts) for visit in range(n)}
    visited = {
        item for (begin, _), (end, _) in itertools.pairwise(begins) for item in range(begin, end)
    }
    assert begins[0] == (0, 0) and wanted <= visited


@settings(max_examples=150, deadline=None)
@given(LENGTHS, SHAPES)
def test_ranges_are_balanced(lengths, shape):
    """Both ends of a range are at their ideal place, but for what a split may move.

    Without splits no range is longer than splitting would make all of them. Aligned ranges have
    one item each, and shorter ones would not do.
    """
    counts, groups = block_counts(lengths, shape.visits), shape.group_count
    step = device.split_step(shape.group_ctas, shape.visits)
    total = sum(count + device.ITEM_COST for count in counts)
    found = spans(lengths, shape)
    costs = [cost(group) for group in found]
    assert sum(costs) == total
    span = aligned_span(counts, groups, step)
    if device.takes_turns(max(counts), len(counts), groups, total):
        assert max(costs) <= total // groups + device.MERGE_COST
        assert partial_count(lengths, shape) == 0
    elif span:
        assert all(len(group) <= 1 for group in found)
        assert max(one.last - one.first for group in found for one in group) <= span
        assert span <= 1.05 * total / groups + 1 + step
        shorter = span - device.span_step(device.shortest_span(sum(counts), groups, step), step)
        assert shorter * groups < sum(counts) or (
            sum(max(-(-count // shorter), 1) for count in counts) > groups
        )
    else:
        assert max(costs) <= -(-total // groups) + SPLIT_MOVES
        assert min(costs) >= total // groups - SPLIT_MOVES


@pytest.mark.parametrize("t", [0, 65, 4096])
@pytest.mark.parametrize(("requests", "groups"), [(12, 4), (132, 132), (1, 1)])
def test_equal_lengths_that_divide_evenly_are_not_split(t, requests, groups):
    shape = GroupShape(1, 1, groups)
    assert [len(group) for group in spans([t] * requests, shape)] == [requests // groups] * groups
    assert partial_count([t] * requests, shape) == 0


@pytest.mark.parametrize("blocks", [16, 33, 64, 65, 66, 1000])
@pytest.mark.parametrize("tiles", [1, 2])
def test_equal_items_are_split_evenly(blocks, tiles):
    """16 requests on 132 SMs: as short as by eight CTA groups each, or by four of two CTAs."""
    shape = GroupShape(tiles, 1, 132 // tiles)
    found = spans([blocks * KV_BLOCK] * 16, shape)
    assert max(len(group) for group in found) == 1
    parts = [span for group in found for span in group]
    step = device.split_step(tiles, 1)
    most = max(span.last - span.first for span in parts)
    least = -(-blocks // (shape.group_count // 16 * step)) * step
    assert least <= most <= least + least // 50


def test_ranges_of_different_lengths_have_one_item_each():
    """16 requests, 132 CTAs: none has parts of two requests, and none more than six blocks."""
    blocks = [38, 53, 59, 45, 41, 38, 54, 48, 50, 36, 51, 50, 51, 64, 37, 33]
    found = spans([count * KV_BLOCK for count in blocks], GroupShape(1, 1, 132))
    assert max(len(group) for group in found) == 1
    assert max(span.last - span.first for group in found for span in group) == 6
    assert -(-sum(blocks) // 132) == 6


def test_items_that_would_leave_groups_idle_are_not_aligned():
    """48 equal requests for 132 CTAs: two each would leave 36 idle."""
    found = spans([64 * KV_BLOCK] * 48, GroupShape(1, 1, 132))
    assert all(found) and max(len(group) for group in found) == 2


@pytest.mark.parametrize(("t", "split"), [(64, False), (448, False), (640, True)])
def test_few_tokens_are_not_split(t, split):
    """One work tile for 132 CTA groups: merging partials costs more than a few KV blocks."""
    assert (partial_count([t], GroupShape(1, 1, 132)) > 0) == split


@given(st.integers(0, INT32_MAX), st.integers(1, 512), st.data())
def test_range_position_is_exact(total, groups, data):
    group = data.draw(st.integers(0, groups))
    assert device.range_position(total, group, groups) == total * group // groups


class Number(int):
    """An Int32, of the host or of a lane; so are the results of arithmetic, which must fit."""

    def __new__(cls, value: int) -> Number:
        assert -INT32_MAX - 1 <= value <= INT32_MAX, f"{value} overflows 32 bits"
        return super().__new__(cls, value)

    def to(self, kind: Any) -> Any:
        return kind(self)


def operation(name: str) -> Any:
    def result(self: Number, *others: int) -> Number:
        value = getattr(int, name)(self, *others)
        return value if value is NotImplemented else Number(value)

    return result


NAMES = ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "rshift", "and", "neg")
for name in NAMES:
    setattr(Number, f"__{name}__", operation(f"__{name}__"))


LARGEST = [(100_000, 1_000_000), (1, 1_000_000), (100_000, 1), (25_000, 5_000_000)]
"""(items, tokens of each) of the largest batches whose line still fits."""


@pytest.mark.parametrize(("items", "t"), LARGEST)
@pytest.mark.parametrize("groups", [1, 7, DEFAULT_SM_COUNT, MOST_SLOTS // 2])
def test_no_step_overflows_for_the_largest_sizes(items, t, groups):
    blocks = -(-t // KV_BLOCK)
    total = Number((blocks + device.ITEM_COST) * items)
    whole = device.takes_turns(Number(blocks), Number(items), Number(groups), total)
    assert whole == (
        -(-items // groups) * (blocks + device.ITEM_COST) <= total // groups + device.MERGE_COST
    )
    if items <= groups:
        span = device.shortest_span(total, Number(groups), 2)
        assert device.aligning_pays(Number(span), total, Number(groups), 2)
        assert not device.aligning_pays(Number(span) + span // 20 + 6, total, Number(groups), 2)
    for group in (0, 1, groups // 2, groups - 1, groups):
        position = device.range_position(total, Number(group), Number(groups))
        assert position == int(total) * group // groups
        local = position % (blocks + device.ITEM_COST)
        for step in (1, 2):
            assert device.split_block(Number(local), device.ITEM_COST, step) <= blocks + step - 1


def test_the_overflow_check_sees_an_overflow():
    with pytest.raises(AssertionError, match="overflows"):
        Number(INT32_MAX) * 2


@settings(max_examples=150, deadline=None)
@given(LENGTHS, SHAPES)
@example([64 * 100], GroupShape(1, 1, 132))
@example([64 * 7, 64 * 5], GroupShape(1, 1, 3))
@example([897, 897], GroupShape(2, 2, 3))  # three whole items, and the fourth in three parts
def test_partials_are_counted_as_they_are_made(lengths, shape):
    made = [(part.item, part.first, part.last) for own in spans(lengths, shape) for part in own]
    balanced = balanced_items(lengths, shape)
    if balanced:
        made = [part for own in balanced for part in own]
    counts = block_counts(lengths, shape.visits)
    split = [first > 0 or last < counts[item] for item, first, last in made if last > first]
    assert partial_count(lengths, shape) == sum(split)


# --- the device's own code, a thread per lane -----------------------------------------------------


class Real:
    """A Float32 of a lane."""

    def __init__(self, value: float) -> None:
        self.value = np.float32(value)

    def __add__(self, other: float) -> Real:
        return Real(self.value + np.float32(other))

    def __mul__(self, other: Real) -> Real:
        return Real(self.value * other.value)

    def to(self, kind: Any) -> Any:
        return kind(int(self.value))


class Warp:
    """32 threads in the place of `cute` and `cutlass`: what lanes exchange goes through a list."""

    def __init__(self, rounding: float) -> None:
        self.rounding = np.float32(rounding)
        self._barrier, self._values = threading.Barrier(32, timeout=60), [0] * 32
        self._lane = threading.local()
        self.cute = SimpleNamespace(
            arch=SimpleNamespace(
                lane_idx=lambda: Number(self._lane.number),
                warp_redux_sync=lambda value, kind: Number(
                    {"add": sum, "max": max}[kind](self._exchanged(value))
                ),
                shuffle_sync=lambda value, lane: self._exchanged(value)[lane],
                shuffle_sync_up=lambda value, offset: self._exchanged(value)[
                    max(self._lane.number - offset, 0)
                ],
                # Off by one unit in the last place, as the instruction may be.
                rcp_approx=lambda x: Real(np.nextafter(np.float32(1) / x.value, self.rounding)),
            ),
            make_rmem_tensor=lambda size, kind: [0] * size,
        )
        self.cutlass = SimpleNamespace(
            max=lambda *numbers: Number(max(numbers)),
            min=lambda *numbers: Number(min(numbers)),
            range=lambda *bounds, unroll: map(Number, range(*bounds)),
            range_constexpr=range,
        )

    def _exchanged(self, value: int) -> list[int]:
        self._values[self._lane.number] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def run(self, function: Callable[[], Any]) -> list[Any]:
        """What all lanes return."""

        def one(lane: int) -> Any:
            self._lane.number = lane
            try:
                return function()
            except Exception:
                self._barrier.abort()  # the others wait for this lane
                raise

        with ThreadPoolExecutor(32) as pool:
            lanes = [pool.submit(one, lane) for lane in range(32)]
        errors = [error for lane in lanes if (error := lane.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [lane.result() for lane in lanes]


RANGE_FUNCTIONS = (
    "tokens_of", "kv_blocks", "packed_queries", "item_count", "lane_items", "work_range",
    "divided_range", "aligned_span", "ranges_of", "inclusive_sum", "aligned_range", "split_range",
    "split_in_request",
)  # fmt: skip


def trimmed(end: tuple[int, int], items: Sequence[int], visits: int) -> tuple[int, int]:
    """The end of a range, right behind the last item that has a query tile."""
    item, block = end
    while block == 0 and item > 0 and (item - 1) % visits >= items[(item - 1) // visits]:
        item -= 1
    return item, block


@pytest.mark.parametrize("seed", range(24))
def test_the_device_code_finds_the_ranges_of_the_host(seed, monkeypatch):
    draw = random.Random(seed)
    warp = Warp(draw.choice((0.0, 2.0)))
    for name in RANGE_FUNCTIONS:
        monkeypatch.setattr(device, name, as_written(getattr(device, name)))
    kinds = {"Int32": Number, "Float32": Real, "Boolean": bool}
    for name, value in {**kinds, "cute": warp.cute, "cutlass": warp.cutlass}.items():
        monkeypatch.setattr(device, name, value)
    requests, most = draw.choice((1, 5, 16, 32, 33, 70)), draw.choice((700, 5000, 200_000))
    lengths = [Number(draw.randint(most // 2, most)) for _ in range(requests)]
    lengths[draw.randrange(requests)] = Number(draw.choice((0, most)))
    shape = GroupShape(draw.choice((1, 2)), draw.choice((1, 1, 3)), draw.choice((66, 132)))
    if shape.group_count >= device.CLUSTER * requests * shape.visits:
        shape = dataclasses.replace(shape, cluster_ctas=device.CLUSTER)
    queries = 64 * shape.group_ctas * shape.visits
    counts = [draw.choice((0, 1, queries // 2, queries)) for _ in lengths]
    packed, items = None, None
    if seed % 3 == 0:
        begins = [Number(begin) for begin in itertools.accumulate(counts, initial=0)]
        packed = device.PackedQueries(begins, queries, begins[-1], 1, shape.group_ctas * 64)
        items = [-(-count // (64 * shape.group_ctas)) for count in counts]
    ranges = list(itertools.pairwise(range_begins(lengths, shape, items)))
    kept = [
        (n, c)
        for n, c in zip(block_counts(lengths, 1), items or [shape.visits] * requests, strict=True)
        if c
    ]
    total = sum((n + device.ITEM_COST) * c for n, c in kept)
    turns = device.takes_turns(
        max((n for n, _ in kept), default=0), requests * shape.visits, shape.group_count, total
    )
    batch = device.Batch(
        lengths, Number(requests), Number(shape.visits), Number(0), Number(1 << 30), None, packed
    )
    halves = in_halves(lengths, shape, items)
    for group in (0, 1, shape.group_count // 3, shape.group_count - 2, shape.group_count - 1):
        found = warp.run(
            lambda group=group: device.work_range(
                batch, 0, Number(shape.group_ctas), Number(group), Number(shape.group_count),
                shape.cluster_ctas > 1,
            )
        )  # fmt: skip
        assert len({dataclasses.astuple(one) for one in found}) == 1, "lanes differ"
        assert found[0].halves == halves
        assert found[0].splits == (not halves and not turns and shape.group_count > 1)
        if halves:  # the item of this group and its neighbour, and no other
            assert (found[0].begin, found[0].begin_block) == (group // 2, 0)
            assert found[0].step == shape.group_count
            continue
        begin, end = ((group, 0), (requests * shape.visits, 0)) if turns else ranges[group]
        own, per_request = found[0], items or [shape.visits] * requests
        assert (own.begin, own.begin_block) == begin
        ends = ((own.end, own.end_block), end)
        assert len({trimmed(one, per_request, shape.visits) for one in ends}) == 1
        # Groups behind those that have work have none.
        assert group < own.groups or ranges[group][0] == ranges[group][1]


@pytest.mark.parametrize("step", [1, 2])
def test_halves_of_an_item_have_all_its_blocks(step):
    for blocks in range(200):
        half = device.half_of(blocks, step)
        assert half % step == 0 and half <= blocks + 1
        first, second = min(blocks, half), max(blocks - half, 0)
        assert first + second == blocks and first - second < 2 * step


@pytest.mark.parametrize(
    ("requests", "heads", "lengths", "pays"),
    [
        (64, 16, (4096, 4096), True),
        (64, 16, (2048, 4096), True),
        (64, 16, (1024, 1024), True),
        (64, 16, (100, 100), False),  # nothing to divide
        (64, 16, (64, 4096), False),  # one request would keep two CTAs busy while others idle
        (40, 16, (4096, 4096), False),  # 80 of 132 SMs
        (16, 16, (4096, 4096), False),
        (16, 16, (512, 512), True),
        (32, 128, (4096, 4096), True),
    ],
)
def test_halves_pay_where_they_use_most_sms_or_little_is_to_do(requests, heads, lengths, pays):
    """The shapes of docs/results/2026-11-17-nvidia-h200-cluster-rows.json, and extremes."""
    shape = group_shape(-(-heads // 64), requests, DEFAULT_SM_COUNT)
    assert shape.cluster_ctas == device.CLUSTER
    short, longest = lengths
    mixed = [short + (longest - short) * i // max(requests - 1, 1) for i in range(requests)]
    if short == 64:
        mixed = [short] * (requests - 1) + [longest]
    assert in_halves(mixed, shape) == pays
    assert partial_count(mixed, shape) == 0 or not pays
    assert not in_halves(mixed, dataclasses.replace(shape, cluster_ctas=1))


@pytest.mark.parametrize(("requests", "heads"), [(67, 16), (34, 128), (33, 130), (256, 16)])
def test_items_with_less_than_two_groups_are_not_shared(requests, heads):
    assert group_shape(-(-heads // 64), requests, DEFAULT_SM_COUNT).cluster_ctas == 1


def has_rows(rows: Sequence[int], item: int, shape: GroupShape, rank: int) -> bool:
    """Whether a rank of a group_ctas has a tile in the item of a request with so many tiles."""
    return (item % shape.visits) * shape.group_ctas + rank < rows[item // shape.visits]


def filled_slots(
    lengths: Sequence[int], tiles: Sequence[int], shape: GroupShape
) -> tuple[dict[int, Span], set[tuple[int, int]]]:
    """What all CTAs write: splits by slot, and the (item, rank) that were not split."""
    slots: dict[int, Span] = {}
    whole: set[tuple[int, int]] = set()
    begins = range_begins(lengths, shape)
    for group, taken in enumerate(spans(lengths, shape)):
        for rank in range(shape.group_ctas):
            for span in taken:
                if not has_rows(tiles, span.item, shape, rank):
                    continue
                if not span.split:
                    assert (span.item, rank) not in whole
                    whole.add((span.item, rank))
                    continue
                slot = (group * shape.group_ctas + rank) * 2 + (span.item != begins[group][0])
                assert slot not in slots, "two partials in one slot"
                slots[slot] = span
    return slots, whole


def merged(slots: dict[int, Span], shape: GroupShape) -> Iterator[tuple[int, int, list[Span]]]:
    """By the merge's rule: the slots of each tile's first and last split, and its splits.

    The merge lists the slots of first and of last splits, and takes those of equal place together.
    """
    firsts, lasts = (
        sorted(slot for slot, span in slots.items() if span.split & flag)
        for flag in (Split.FIRST, Split.LAST)
    )
    step = 2 * shape.group_ctas
    for first, last in zip(firsts, lasts, strict=True):
        others = range((first & -2) + step, last + 1, step)
        yield first, last, [slots[first], *(slots[slot] for slot in others)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], GroupShape]:
    """Lengths, tiles per request (packed queries: each its own count), and CTA groups for them."""
    lengths = draw(LENGTHS)
    equal = draw(st.booleans())
    most = draw(st.integers(1, 12))
    count = len(lengths)
    counts = st.lists(st.integers(0, most), min_size=count, max_size=count)
    tiles = [most] * count if equal else draw(counts)
    sms = draw(st.integers(1, 150))
    chosen = draw(st.integers(0, min(sms, most)))
    return lengths, tiles, group_shape(most, count, sms, chosen)


@settings(max_examples=150, deadline=None)
@given(batches())
@example(([64 * 100], [1], GroupShape(1, 1, 132)))
@example(([64 * 9, 0, 64 * 3], [3, 0, 2], GroupShape(2, 2, 5)))
def test_the_merge_finds_every_partial(batch):
    lengths, tiles, shape = batch
    counts = block_counts(lengths, shape.visits)
    slots, done = filled_slots(lengths, tiles, shape)
    for first, _, found in merged(slots, shape):
        span = found[0]
        assert {one.item for one in found} == {span.item}
        # Together they are the whole item, in order.
        edges = [0, *(one.last for one in found)]
        assert edges[:-1] == [one.first for one in found]
        assert edges[-1] == counts[span.item]
        rank = first // 2 % shape.group_ctas
        assert (span.item, rank) not in done
        done.add((span.item, rank))
    wanted = {
        (item, rank)
        for item in range(len(counts))
        for rank in range(shape.group_ctas)
        if has_rows(tiles, item, shape, rank)
    }
    assert done == wanted
    assert all(slot < 2 * shape.ctas < merge_rows(shape.ctas) for slot in slots)


@pytest.mark.parametrize("seed", range(6))
def test_the_device_code_lists_the_tiles_of_the_host(seed, monkeypatch):
    """The slots of their first and last splits, from the records of all CTAs."""
    rng = random.Random(seed)
    tiles = [rng.randint(0, 4) for _ in range(rng.randint(2, 30))]
    lengths = [rng.choice([0, 64, rng.randint(65, 9000)]) for _ in tiles]
    shape = group_shape(4, len(tiles), rng.randint(40, 144), rng.randint(0, 4))
    slots, _ = filled_slots(lengths, tiles, shape)
    records = {
        (slot, column): 0
        for slot in range(2 * shape.ctas)
        for column in (Record.SPLIT, Record.ROWS)
    }
    for slot, span in slots.items():
        records[slot, Record.SPLIT], records[slot, Record.ROWS] = span.split, slot + 1
    listed: dict[tuple[int, int], int] = {}
    shared = SimpleNamespace(records=records, tiles=SimpleNamespace(iterator=None), totals={})
    warp = Warp(0.0)
    arch = warp.cute.arch
    arch.vote_ballot_sync = lambda chosen: sum(
        bool(lane) << i for i, lane in enumerate(warp._exchanged(chosen))
    )
    arch.popc = int.bit_count
    warp.cute.recast_ptr = warp.cute.make_layout = lambda *args, **options: None
    warp.cute.make_tensor = lambda place, layout: listed
    for name, value in {"cute": warp.cute, "cutlass": warp.cutlass}.items():
        monkeypatch.setattr(merge, name, value)
    for name in ("Int16", "Int32"):
        monkeypatch.setattr(merge, name, int)
    monkeypatch.setattr(merge, "list_slots", as_written(merge.list_slots))
    count_tiles = as_written(merge.count_tiles)
    warp.run(lambda: count_tiles(shared, shape.ctas, 7))
    wanted = [(first, last) for first, last, _ in merged(slots, shape)]
    assert [(listed[i, 0], listed[i, 1]) for i in range(len(listed) // 2)] == wanted
    most = max((first + 1 for first, _ in wanted), default=0)
    totals = {Total.TILES: len(wanted), Total.MOST_ROWS: most, Total.CTAS: shape.ctas}
    assert shared.totals == {**totals, Total.RANK: 7}


@pytest.mark.parametrize("ctas", [2, 66, 132])
@pytest.mark.parametrize("partial_rows", [1, 3, 16, 60, 2000])
def test_a_trial_of_the_merge_runs_its_code_and_writes_nothing(partial_rows, ctas, monkeypatch):
    """The idle warp takes one unit, of the first slot; consumers with the same numbers write."""
    trial = SimpleNamespace(totals={}, tiles={}, records={})
    warp = Number(merge.TRIAL_WARP)
    arch = SimpleNamespace(
        thread_idx=lambda: (warp * 32, 0, 0), make_warp_uniform=lambda number: number,
        lane_idx=lambda: 0,
    )  # fmt: skip
    calls: list[tuple[str, Any]] = []
    plain = {
        "cute": SimpleNamespace(
            arch=arch, make_rmem_tensor=lambda *args: SimpleNamespace(fill=lambda value: None)
        ),
        "cutlass": SimpleNamespace(max=max),
        "Int32": Number, "Boolean": bool, "Float32": type("Real", (float,), {"inf": 1.0}),
        "vector_columns": lambda partials: 8, "quotient": lambda a, b: Number(a // b),
        "merge_units": as_written(merge.merge_units),
        "add_partials": lambda *args: calls.append(("slots", args[5:8])) or (0.0, 1.0),
        "add_team": lambda *args: calls.append(("team", args[-1])) or (0.0, 1.0),
        "store_merged": lambda *args: calls.append(("store", args[-1])),
    }  # fmt: skip
    for name, value in plain.items():
        monkeypatch.setattr(merge, name, value)
    monkeypatch.setattr(records, "Int32", Number)
    monkeypatch.setattr(records, "cutlass", SimpleNamespace(max=max))
    as_written(records.prepare_trial)(SimpleNamespace(during=lambda which: trial), partial_rows)
    outputs = SimpleNamespace(
        widths=SimpleNamespace(k=512), o_partial=SimpleNamespace(dtype=None), lse_partial=None
    )
    run = as_written(merge.merge_own_rows)
    run(outputs, trial, 1, ctas, merge.ROWS, None, True)
    [(kind, (slots, row, chunk)), *rest] = calls
    assert (kind, slots) == ("slots", 0) and row < merge.ROWS and chunk < 2
    assert not any(writing for _, writing in rest)
    # The code is that of so many split rows: a team where there are few.
    assert ("team" in dict(rest)) is (max(partial_rows, 8) * 2 * 2 <= ctas * 8)
    calls.clear()
    trial.records[0, Record.FIRST_ROW] = Number(0)
    warp = Number(0)
    run(outputs, trial, 1, ctas, merge.ROWS, None, True)
    assert [writing for kind, writing in calls if kind == "store"] == [True]


TILES = st.one_of(st.integers(1, 12), st.integers(1, 500))
REQUESTS = st.one_of(st.integers(1, 12), st.integers(1, 3000))
SM_COUNTS = st.one_of(st.integers(1, 16), st.integers(1, 256))


@given(TILES, REQUESTS, SM_COUNTS, st.data())
def test_groups_fit_the_device_and_cover_all_tiles(tiles, requests, sms, data):
    """Also groups of a given size; 0 leaves the size to the scheduler."""
    group_ctas = data.draw(st.integers(0, min(tiles, sms)))
    shape = group_shape(tiles, requests, sms, group_ctas)
    assert group_ctas in (0, shape.group_ctas)
    assert 1 <= shape.ctas <= sms and shape.group_count >= 1
    assert shape.group_ctas * (shape.visits - 1) < tiles <= shape.group_ctas * shape.visits


BLOCKS = 20_000
"""KV blocks of a request: so many that the fixed cost of an item and even splits hardly count."""
COARSENESS = 0.01


def busy_share(tiles: int, requests: int, sms: int, shape: GroupShape) -> float:
    """Share of all SMs that have work, on average until the last is done; equal lengths."""
    slowest = max(cost(group) for group in spans([BLOCKS * KV_BLOCK] * requests, shape))
    return requests * tiles * BLOCKS / (sms * slowest)


def worth(tiles: int, requests: int, sms: int, shape: GroupShape) -> float:
    """That share, less what CTA groups cost that are alone on their KV blocks."""
    in_step = requests * shape.visits % shape.group_count == 0  # then they take turns
    streams = -(-shape.group_count // shape.visits) if in_step else shape.group_count
    return busy_share(tiles, requests, sms, shape) - STREAM_COST * streams


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 16))
@example(1, 1, 1)
@example(3, 1, 16)
@example(8, 4, 13)
@example(10, 1, 11)
def test_the_choice_keeps_the_sms_busy(tiles, requests, sms):
    """Against every size and number of CTA groups that fit."""
    best = max(
        worth(tiles, requests, sms, GroupShape(group_ctas, -(-tiles // group_ctas), groups))
        for group_ctas in range(1, min(tiles, sms) + 1)
        for groups in range(1, sms // group_ctas + 1)
    )
    chosen = worth(tiles, requests, sms, group_shape(tiles, requests, sms))
    assert chosen >= best - SPLIT_COST - GROUP_WORTH - COARSENESS


def test_a_group_that_shares_its_kv_blocks_is_worth_some_idle_sms():
    """86 tiles: 66 CTA groups of two fill all SMs, three of 44 read the cache a 22nd as often."""
    assert group_shape(86, 32, 132) == GroupShape(44, 2, 3)


@pytest.mark.parametrize("tiles", [1, 2, 4, 32])
def test_the_largest_group_among_equals_is_taken(tiles):
    """It reads the cache least often."""
    sms = 4 * tiles
    assert group_shape(tiles, 4, sms) == GroupShape(tiles, 1, 4)
