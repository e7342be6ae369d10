"""Sliding windows in the latent kernel: which tokens its rows see, by the device code on numbers.

Without their decorators the functions of the tile scheduler are Python, see `test_cute_ring.py`.
"""

import inspect
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, ROWS
from mla_var3.kernel.cute_python.mla.latent import scheduler as device
from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape, range_begins
from mla_var3.kernel.cute_python.mla.latent.scheduler import (
    PackedQueries,
    Scheduler,
    SlidingWindow,
    WorkRange,
)

DEVICE_FUNCTIONS = (
    "tokens_of", "kv_blocks", "first_block", "packed_queries", "deal", "work_tile_at",
    "group_share", "causal_limit", "row_limit",
    "window_begin", "row_begin", "needs_mask", "first_hidden",
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICE_FUNCTIONS:
        monkeypatch.setattr(device, name, inspect.unwrap(getattr(device, name)))
    monkeypatch.setattr(device, "Int32", int)
    monkeypatch.setattr(device, "Boolean", bool)


def visible(scheduler: Scheduler, tile: Any, row: int) -> set[int]:
    """Tokens whose scores a row of a work tile keeps."""
    lowest = device.first_hidden(tile, scheduler)
    limit, begin = (f(tile, row, scheduler) for f in (device.row_limit, device.row_begin))
    found = set()
    for block in range(tile.first, tile.last):
        tokens = range(block * KV_BLOCK, (block + 1) * KV_BLOCK)
        masked = device.needs_mask(tokens[0], lowest, tile, scheduler)
        found |= {token for token in tokens if not masked or begin <= token < limit}
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
    tiles = -(-queries * heads // ROWS)
    ctas = draw(st.integers(1, tiles))
    shape = GroupShape(ctas, -(-tiles // ctas), draw(st.integers(1, 9)))
    total_lengths = totals if shards > 1 or draw(st.booleans()) else None
    sliding = SlidingWindow(window, queries, total_lengths, shards, shard)
    blocks = [device.kv_blocks(lengths, r, 0, 2048, sliding) for r in range(len(counts))]
    packed = PackedQueries(begins, queries, begins[-1], heads, ctas * shape.visits)
    shares = [device.group_share(r, packed) for r in range(len(counts))]
    ranges = range_begins([count * KV_BLOCK for count in blocks], shape, shares)
    seen: dict[tuple[int, int], set[int]] = {}
    for group, (begin, end) in enumerate(itertools.pairwise(ranges)):
        for rank in range(ctas):
            scheduler = Scheduler(
                WorkRange(*begin, *end, 1), lengths, total_lengths, begins, None, queries,
                begins[-1], heads, 2048, ctas, shape.visits, 0, int(causal), shards, shard,
                sliding, group, rank,
            )  # fmt: skip
            tile = scheduler.first_tile()
            while tile.valid:
                request = tile.item // shape.visits
                oldest = device.row_begin(tile, 0, scheduler)
                assert (tile.first + 1) * KV_BLOCK > oldest, "a KV block that no row sees"
                if tile.split:  # the merge looks for the partials of tile i at CTA i
                    assert tile.row // ROWS % ctas == rank
                for row in range(min(ROWS, tile.rows - tile.row)):
                    own = seen.setdefault((request, tile.row + row), set())
                    tokens = visible(scheduler, tile, row)
                    assert not own & tokens, "two splits see the same token"
                    own |= tokens
                tile = scheduler.next_tile(tile)
    for request, count in enumerate(counts):
        for row in range(count * heads):
            own = totals[request] - count + row // heads
            wanted = {
                slot
                for slot in range(lengths[request])
                if slot * shards + shard > own - window
                and (not causal or slot * shards + shard <= own)
            }
            assert seen[request, row] == wanted


def test_a_group_deals_the_tiles_of_packed_requests_out_in_turn():
    """Of 1 to 4 query tokens with 128 heads, 8 CTAs get as many tiles each, in turns or not."""
    counts = [1, 4, 2, 3, 1, 1, 4, 2, 3, 3]
    begins, lengths = list(itertools.accumulate(counts, initial=0)), [640] * len(counts)
    for step, items in ((1, range(len(counts))), (2, range(1, len(counts), 2))):
        tiles = []
        for rank in range(8):
            scheduler = Scheduler(
                WorkRange(items[0], 0, len(counts), 0, step), lengths, None, begins, None, 4,
                begins[-1], 128, 2048, 8, 1, 0, 1, 1, 0, None, 0, rank,
            )  # fmt: skip
            tile, found = scheduler.first_tile(), 0
            while tile.valid:
                found += 1
                tile = scheduler.next_tile(tile)
            tiles.append(found)
        assert sum(tiles) == sum(2 * counts[item] for item in items)
        assert max(tiles) - min(tiles) <= 1


def test_few_query_tiles_make_an_item_short():
    """A boundary lies where the work is, not where the tokens are; no query, no length."""
    shape = GroupShape(8, 1, 2)
    assert range_begins([6400] * 4, shape, [8, 8, 8, 8]) == [(0, 0), (2, 0), (4, 0)]
    assert range_begins([6400] * 4, shape, [8, 2, 2, 4])[1] == (1, 0)
    assert range_begins([6400] * 4, shape, [0, 8, 0, 8])[1][0] in (2, 3)
    packed = PackedQueries([0, 0, 1, 4, 9], 4, 9, 128, 8)
    assert [device.group_share(r, packed) for r in range(4)] == [0, 2, 6, 8]
