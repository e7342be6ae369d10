"""Work tiles of the latent kernel: which tokens their rows see, and which requests have them.

Without their decorators the functions of the tile scheduler are Python, see `test_cute_ring.py`.
"""

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, ROWS
from mla_var3.kernel.cute_python.mla.hopper.tma import EVICT_FIRST, EVICT_NORMAL
from mla_var3.kernel.cute_python.mla.latent import (
    balance,
    mask,
    producer,
    ranges,
    records,
    schedule,
)
from mla_var3.kernel.cute_python.mla.latent import scheduler as device
from mla_var3.kernel.cute_python.mla.latent.groups import (
    GroupShape,
    balanced_items,
    group_shape,
    ragged_tiles,
    range_begins,
)
from mla_var3.kernel.cute_python.mla.latent.scheduler import Scheduler

from .compile_once import as_written
from .test_cute_balance import Signed
from .test_cute_schedule import Number

DEVICE_FUNCTIONS = {
    mask: (
        "causal_limit", "row_limit", "window_begin", "row_begin", "needs_mask", "first_hidden",
        "divided",
    ),
    ranges: (
        "causal_limit", "tokens_of", "kv_blocks", "first_block", "packed_queries", "item_count",
    ),
    device: ("causal_limit", "window_begin", "divided", "work_tile_at"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, plain in {"min": min, "max": max}.items():  # those of the language are slow
        monkeypatch.setattr(f"cutlass.{name}", plain)
    for module, names in DEVICE_FUNCTIONS.items():
        for name in names:
            monkeypatch.setattr(module, name, as_written(getattr(module, name)))
    for module in (mask, ranges, balance, device, records):
        monkeypatch.setattr(module, "Int32", int)
    for module in (mask, device, records):
        monkeypatch.setattr(module, "Boolean", bool)
    monkeypatch.setattr(records, "work_tile_at", device.work_tile_at)
    monkeypatch.setattr(records, "record_partial", as_written(records.record_partial))
    monkeypatch.setattr(records, "record_partials", as_written(records.record_partials))


def scheduler_of(
    own: ranges.WorkRange,
    lengths: list[int],
    begins: list[int] | None,
    queries: int,
    heads: int,
    shape: GroupShape,
    group: int = 0,
    rank: int = 0,
    **others: Any,
) -> Scheduler:
    """The scheduler of a CTA, causal over the whole cache unless other fields say otherwise."""
    given = {
        "total_lengths": None, "tree": None, "max_tokens": 1 << 20, "newest": 0, "causal": 1,
        "shards": 1, "shard": 0, "window": None, "total_queries": begins[-1] if begins else queries,
    }  # fmt: skip
    return Scheduler(
        range=own, lengths=lengths, query_begins=begins, queries=queries, heads=heads,
        group_ctas=shape.group_ctas, visits=shape.visits, group=group, rank=rank,
        **(given | others),
    )  # fmt: skip


def tiles_of(scheduler: Scheduler) -> Iterator[Any]:
    tile = scheduler.first_tile()
    while tile.valid:
        yield tile
        tile = scheduler.next_tile(tile)


def visible(scheduler: Scheduler, tile: Any, row: int) -> int:
    """Tokens whose scores a row of a work tile keeps, a bit for each: sets of them take long."""
    lowest = mask.first_hidden(tile, scheduler)
    limit, begin = (f(tile, row, scheduler) for f in (mask.row_limit, mask.row_begin))
    found = 0
    for block in range(tile.first, tile.last):
        first, last = block * KV_BLOCK, (block + 1) * KV_BLOCK
        if mask.needs_mask(first, lowest, tile, scheduler):
            first, last = max(first, begin), min(last, limit)
        found |= (1 << max(first, last)) - (1 << first)
    return found


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_a_row_sees_its_window_once(data):
    """Over all CTAs, whatever is split; and no tile begins before its first row's window."""
    draw = data.draw
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3))
    heads, window = draw(st.sampled_from([1, 5, 16, 64])), draw(st.integers(1, 700))
    causal = draw(st.booleans())
    shards = draw(st.sampled_from([1, 1, 2, 3]))
    shard = draw(st.integers(0, shards - 1))
    totals = [draw(st.integers(0, 1500)) for _ in counts]
    lengths = [(total - shard + shards - 1) // shards for total in totals]
    queries, begins = max(*counts, 1), list(itertools.accumulate(counts, initial=0))
    tile_rows = draw(st.sampled_from([16, 48, ROWS]))
    tiles = -(-queries * heads // tile_rows)
    ctas = draw(st.integers(1, tiles))
    shape = GroupShape(ctas, -(-tiles // ctas), draw(st.integers(1, 9)))
    total_lengths = totals if shards > 1 or draw(st.booleans()) else None
    sliding = ranges.SlidingWindow(window, queries, total_lengths, shards, shard)
    batch = ranges.Batch(lengths, len(counts), shape.visits, 0, 2048, sliding)
    blocks = [ranges.kv_blocks(batch, r) for r in range(len(counts))]
    packed = ranges.PackedQueries(begins, queries, begins[-1], heads, ctas * tile_rows)
    items = [ranges.item_count(r, shape.visits, packed) for r in range(len(counts))]
    halves, behind = draw(st.booleans()), len(counts) * shape.visits
    borders = range_begins([count * KV_BLOCK for count in blocks], shape, items)
    parts = [ranges.WorkRange(*begin, *end, 1, 0, 1) for begin, end in itertools.pairwise(borders)]
    if halves:  # two groups share every item
        parts = [
            ranges.WorkRange(g // 2, 0, behind, 0, behind, 0, 1, True) for g in range(2 * behind)
        ]
    seen: dict[tuple[int, int], int] = {}
    for group, part in enumerate(parts):
        for rank in range(ctas):
            scheduler = scheduler_of(
                part, lengths, begins, queries, heads, shape, group, rank, causal=int(causal),
                total_lengths=total_lengths, shards=shards, shard=shard, window=sliding,
                clusters=halves, max_tokens=2048, tile_rows=tile_rows,
            )  # fmt: skip
            for tile in tiles_of(scheduler):
                request = tile.item // shape.visits
                oldest = mask.row_begin(tile, 0, scheduler)
                assert (tile.first + 1) * KV_BLOCK > oldest, "a KV block that no row sees"
                if tile.split:  # the merge looks for the partials of tile i at CTA i
                    assert tile.row // tile_rows % ctas == rank
                for row in range(min(tile_rows, tile.rows - tile.row)):
                    own = seen.get((request, tile.row + row), 0)
                    tokens = visible(scheduler, tile, row)
                    assert not own & tokens, "two splits see the same token"
                    seen[request, tile.row + row] = own | tokens
    for request, count in enumerate(counts):
        for query in range(count):
            own = totals[request] - count + query
            wanted = sum(
                1 << slot
                for slot in range(lengths[request])
                if slot * shards + shard > own - window
                and (not causal or slot * shards + shard <= own)
            )
            for row in range(query * heads, (query + 1) * heads):
                assert seen[request, row] == wanted


@pytest.mark.parametrize("step", [1, 3])
def test_a_request_has_items_only_for_its_query_tiles(step):
    """Visits that find no tile are passed over together: no search of thousands."""
    counts, visits = [1, 0, 4, 0, 0, 2, 0], 2000
    begins, heads = list(itertools.accumulate(counts, initial=0)), 128
    lengths = [640] * len(counts)
    packed = ranges.PackedQueries(begins, 4, begins[-1], heads, 2 * ROWS)
    assert [ranges.item_count(r, visits, packed) for r in range(len(counts))] == counts
    found, reads = [], []

    class Begins(list):  # counts what the search reads
        def __getitem__(self, index):
            reads.append(index)
            return super().__getitem__(index)

    for begin in range(step):
        own = ranges.WorkRange(begin, 0, len(counts) * visits, 0, step, 0, 1)
        shape = GroupShape(2, visits, 1)
        scheduler = scheduler_of(own, lengths, Begins(begins), 4, heads, shape, rank=1)
        found += [(tile.item // visits, tile.row) for tile in tiles_of(scheduler)]
    wanted = [(r, (2 * i + 1) * ROWS) for r, count in enumerate(counts) for i in range(count)]
    assert sorted(found) == wanted
    assert len(reads) < 100


@pytest.mark.parametrize(("t", "splits"), [(1024, False), (16384, True)])
@pytest.mark.parametrize("group_ctas", [1, 2])
def test_balanced_items_have_all_work_tiles(group_ctas, t, splits):
    """Whole items, or also parts of those that are left."""
    draw = random.Random(group_ctas)
    heads, queries, groups = 32, 8, 33
    counts = [draw.randint(1, queries) for _ in range(100 - 45 * (2 - group_ctas) * splits)]
    begins = list(itertools.accumulate(counts, initial=0))
    lengths = [t - i * 37 % 64 * t // 128 for i in range(len(counts))]
    tiles = [-(-count * heads // ROWS) for count in counts]
    shape = GroupShape(group_ctas, -(-max(tiles) // group_ctas), groups)
    items = [-(-count // group_ctas) for count in tiles]
    taken = balanced_items(lengths, shape, items)
    assert taken is not None
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for group, own in enumerate(taken):
        listed = Signed([Number(-1)] * balance.MOST_TAKEN)
        ends = -1, 0
        for i, (item, _, last) in enumerate(own):
            request, visit = divmod(item, shape.visits)
            listed[i] = Number((request << balance.VISIT_BITS) + visit)
            if last < -(-lengths[request] // KV_BLOCK):
                ends = i, last
        own_range = ranges.WorkRange(0, own[0][1], *ends, 1, 0, 1, balanced=True)
        for rank in range(group_ctas):
            scheduler = scheduler_of(
                own_range, lengths, begins, queries, heads, shape, group, rank, causal=0,
                taken=listed,
            )  # fmt: skip
            for tile in tiles_of(scheduler):
                piece = (tile.first, tile.last, tile.split)
                found.setdefault((tile.request, tile.row), []).append(piece)
    wanted = [(r, i * ROWS) for r, count in enumerate(tiles) for i in range(count)]
    assert sorted(found) == wanted
    for (request, _), pieces in found.items():
        borders = [0, *(n for piece in pieces for n in piece[:2]), -(-lengths[request] // KV_BLOCK)]
        assert borders[::2] == borders[1::2]
        assert [bool(split) for *_, split in pieces] == [len(pieces) > 1] * len(pieces)
    assert any(len(pieces) > 1 for pieces in found.values()) == splits


def test_boundaries_lie_where_the_query_tiles_are():
    """Not where the tokens are; a request without queries has no length."""
    lengths, shape = [6400] * 8, GroupShape(2, 4, 2)
    assert range_begins(lengths, shape)[1] == (16, 0)
    assert range_begins(lengths, shape, [4] * 8) == range_begins(lengths, shape)
    assert range_begins(lengths, shape, [4, 4, 1, 1, 1, 1, 2, 2])[1] == (8, 0)
    assert range_begins(lengths, shape, [0, 4, 0, 4, 0, 4, 0, 4])[1] == (20, 0)


def test_ragged_batches_get_small_groups():
    """Half as many query tokens as the longest request has: the tiles of one token walk in step."""
    for max_q in (2, 4, 8):
        tiles, queries = max_q * 2, 64 * (max_q + 1) // 2
        ragged = group_shape(tiles, 64, 132, 0, *ragged_tiles(queries, 64, max_q, 128))
        assert ragged == GroupShape(2, max_q, 66)
        full = ragged_tiles(64 * max_q, 64, max_q, 128)
        assert group_shape(tiles, 64, 132, 0, *full) == group_shape(tiles, 64, 132)
    # Requests of one tile each keep their groups. Those of several have groups of one CTA where
    # their items are balanced, so that tiles of a request share KV blocks without a group.
    assert ragged_tiles(64, 16, 8, 8) == (0, 1)
    for requests, max_q, heads, wanted in (
        (64, 8, 16, 2), (256, 8, 16, 1), (256, 4, 32, 1), (64, 8, 32, 2), (256, 8, 32, 1),
        (300, 8, 16, 2),  # more than are sorted
    ):  # fmt: skip
        ragged = ragged_tiles(requests * (max_q + 1) // 2, requests, max_q, heads)
        tiles = -(-max_q * heads // 64)
        assert group_shape(tiles, requests, 132, 0, *ragged).group_ctas == wanted


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_cta_records_at_its_start_what_its_tiles_write(data):
    """The merge reads partials by the records, and the tiles write them by `partial_slot`."""
    draw = data.draw
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    lengths = [draw(st.integers(0, 4000)) for _ in counts]
    heads, causal = draw(st.sampled_from([1, 16, 64])), draw(st.booleans())
    queries, begins = max(*counts, 1), list(itertools.accumulate(counts, initial=0))
    tile_rows = draw(st.sampled_from([16, 48, ROWS]))
    tiles = -(-queries * heads // tile_rows)
    ctas = draw(st.integers(1, tiles))
    shape = GroupShape(ctas, -(-tiles // ctas), draw(st.integers(1, 40)))
    packed = ranges.PackedQueries(begins, queries, begins[-1], heads, ctas * tile_rows)
    items = [ranges.item_count(r, shape.visits, packed) for r in range(len(counts))]
    for group, (begin, end) in enumerate(itertools.pairwise(range_begins(lengths, shape, items))):
        for rank in range(ctas):
            own = ranges.WorkRange(*begin, *end, 1, 0, 1)
            scheduler = scheduler_of(
                own, lengths, begins, queries, heads, shape, group, rank, causal=int(causal),
                tile_rows=tile_rows,
            )  # fmt: skip
            recorded: dict[tuple[int, int], int] = {}
            cta = group * ctas + rank
            records.record_partials(recorded, cta, scheduler)
            written = {}
            for tile in tiles_of(scheduler):
                if tile.split:
                    slot = as_written(device.partial_slot)(tile, scheduler)
                    assert slot not in written and slot // 2 == cta
                    rows = min(tile.rows - tile.row, tile_rows)
                    written[slot] = [tile.split, tile.base + tile.row, rows]
            for slot in (2 * cta, 2 * cta + 1):
                found = [recorded[slot, column] for column in records.Record]
                assert found == written.get(slot, [0, *found[1:]])


class Memory:
    """A schedule, and the pointers into it that device code makes."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.iterator = self
        self.at = 0

    def __setitem__(self, place: tuple[int, int], word: int) -> None:
        assert place[1] < device.RECORDS_AT
        self.words[place[0] * device.RANGE_WORDS + place[1]] = word

    def __add__(self, words: int) -> Any:
        return SimpleNamespace(align=lambda size: [*range(words, words + device.RANGE_WORDS)])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_schedule_holds_ranges_and_first_tiles(data):
    """What a CTA reads there is what it would find."""
    draw, memory = data.draw, Memory()

    def copy_words(places: list[int], into: list[int]) -> None:
        into[:] = [memory.words.get(place, -1) for place in places[: len(into)]]

    stand_in = SimpleNamespace(
        make_rmem_tensor=lambda count, kind: [0] * count, make_layout=lambda shape: None,
        make_tensor=lambda place, layout: place, autovec_copy=copy_words,
        arch=SimpleNamespace(make_warp_uniform=lambda number: number),
    )  # fmt: skip
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    lengths = [draw(st.integers(0, 4000)) for _ in counts]
    queries, begins = max(*counts, 1), list(itertools.accumulate(counts, initial=0))
    shape = GroupShape(draw(st.integers(1, 3)), 3, draw(st.integers(1, 40)))
    borders = list(itertools.pairwise(range_begins(lengths, shape)))
    flags = [[draw(st.booleans()) for _ in range(3)] for _ in borders]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "Int32", int)
        patch.setattr(schedule, "Boolean", lambda flag: Number(bool(flag)))
        patch.setattr(device, "cute", stand_in)
        found = []
        for group, ((begin, end), (halves, splits, balances)) in enumerate(
            zip(borders, flags, strict=True)
        ):
            own = ranges.WorkRange(
                *begin, *end, 1, draw(st.integers(0, 2**31 - 1)), 7, halves, splits,
                balanced=balances,
            )  # fmt: skip
            for rank in range(shape.group_ctas):
                scheduler = scheduler_of(own, lengths, begins, queries, 16, shape, group, rank)
                cta = group * shape.group_ctas + rank
                as_written(schedule.write_range)(memory, cta, scheduler)
                found.append((cta, own, scheduler.first_tile()))
        for cta, own, tile in found:
            assert device.scheduled(memory, cta) == (own, tile)
    # Behind these words lie the records of two slots, then the items of the group.
    assert device.RECORDS_AT + 2 * len(records.Record) <= device.ITEMS_AT


@pytest.mark.parametrize(
    ("group_ctas", "visits", "total", "first"),
    [(1, 1, 1100, True), (2, 1, 1800, True), (1, 1, 1801, False), (4, 1, 100, False)],
)
def test_small_launches_leave_l2_first(group_ctas, visits, total, first, monkeypatch):
    """Not those whose KV blocks several CTAs read, or many."""
    monkeypatch.setattr(producer, "Int64", int)
    own, shape = ranges.WorkRange(0, 0, 0, 0, 1, total, 1), GroupShape(group_ctas, visits, 1)
    policy = as_written(producer.kv_policy)(scheduler_of(own, [], None, 1, 16, shape))
    assert policy == (EVICT_FIRST if first else EVICT_NORMAL)
