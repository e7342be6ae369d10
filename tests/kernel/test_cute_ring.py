"""The decompressed kernel on a ring: which slots its rows see, by the device code on plain numbers.

The functions of the tile scheduler are traced for a GPU; without their decorators they are Python,
and plain numbers go through them as through the kernel.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed import scheduler as device
from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import COLUMN_CHOICES
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import Scheduler, WorkTile
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedShape, DecompressedTiling
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus.mla_var6_plus import (
    CuteMlaVar6Plus,
)
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus_v5.mla_var6_plus_v5 import (
    CuteMlaVar6PlusV5,
)
from tests.unit.attention.emulated_stages import named_arguments

from .compile_once import as_written, ring_operands

ROWS = 64
DEVICE_FUNCTIONS = ("work_tile_at", "ring_state", "row_limit", "places_end", "place_of")


@pytest.fixture(autouse=True)
def plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, plain in {"min": min, "max": max}.items():  # those of the language are slow
        monkeypatch.setattr(f"cutlass.{name}", plain)
    for name in DEVICE_FUNCTIONS:
        monkeypatch.setattr(device, name, as_written(getattr(device, name)))
    monkeypatch.setattr(device, "Int32", int)


def scheduler_of(
    lengths: list[int],
    starts: list[int] | None,
    n: int,
    queries: int,
    causal: bool,
    *,
    heads: int = 3,
    splits: int = 1,
    pair_tiles: bool = False,
    alone: bool = False,
    kv_block: int = KV_BLOCK,
) -> Scheduler:
    return Scheduler(
        lengths, len(lengths), queries, heads, n, n, int(causal), splits, pair_tiles, False, starts,
        alone, kv_block,
    )  # fmt: skip


def tiles_of(scheduler: Scheduler) -> Iterator[WorkTile]:
    return (device.work_tile_at(index, scheduler) for index in range(scheduler.work_tiles))


def seen_slots(tile: WorkTile, row: int, lowest: int, scheduler: Scheduler) -> set[int]:
    """Slots whose scores a row keeps, with the mask of a warp whose lowest limit is given."""
    limit = device.row_limit(tile, row, scheduler)
    kept = set()
    for block in range(tile.first, tile.last):
        token = block * KV_BLOCK
        masked = tile.dropped > 0 or device.places_end(token, tile, scheduler) > lowest
        for slot in range(token, token + KV_BLOCK):
            place = device.place_of(slot, tile, scheduler)
            if not masked or (tile.dropped <= place < limit):
                kept.add(slot)
    return kept


def wanted_slots(length: int, start: int, n: int, queries: int, row: int, causal: bool) -> set[int]:
    end = min(length, length - queries + row + 1) if causal else length
    return {x % n for x in range(min(start, length), end)}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_row_sees_the_positions_of_its_ring(data):
    n = KV_BLOCK * data.draw(st.integers(1, 4))
    queries = data.draw(st.sampled_from([1, 2, 5, 63, 64, 65, 100]))
    causal, pair_tiles = data.draw(st.booleans()), data.draw(st.booleans())
    length = data.draw(st.one_of(st.integers(0, 3 * n), st.sampled_from([n - 1, n, n + 1, 2 * n])))
    oldest = max(length - n, 0)
    start = data.draw(st.one_of(st.just(oldest), st.integers(oldest, length)))
    splits = data.draw(st.integers(1, 4))
    scheduler = scheduler_of(
        [length], [start], n, queries, causal, splits=splits, pair_tiles=pair_tiles
    )
    missing = causal and start > max(length - queries + 1, 0)
    tile_rows = range(-(-queries // ROWS))
    found: dict[tuple[int, int], set[int]] = {}
    for tile in tiles_of(scheduler):
        assert tile.incomplete is missing
        for number in {tile.tile, tile.tile + 1} if pair_tiles else {tile.tile}:
            if number not in tile_rows:
                continue
            rows = range(number * ROWS, min(number * ROWS + ROWS, queries))
            # A warp has 16 rows; those that do not exist count like the others.
            for warp in range(number * ROWS, number * ROWS + ROWS, 16):
                limits = [device.row_limit(tile, row, scheduler) for row in range(warp, warp + 16)]
                for row in set(rows) & set(range(warp, warp + 16)):
                    slots = seen_slots(tile, row, min(limits), scheduler)
                    before = found.setdefault((tile.head, row), set())
                    assert not slots & before, "two splits see the same slot"
                    before |= slots
    heads = {head for head, _ in found}
    for head, row in itertools.product(heads, range(queries)):
        wanted = wanted_slots(length, start, n, queries, row, causal)
        assert found[head, row] == wanted, (head, row)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_first_block_shows_a_token_to_every_row_of_a_whole_ring(data):
    """With few rows in 8 bits it sets their maxima, unless the ring lacks tokens."""
    n = KV_BLOCK * data.draw(st.integers(1, 4))
    queries = data.draw(st.integers(1, max(COLUMN_CHOICES)))
    length = data.draw(st.one_of(st.integers(0, 3 * n), st.sampled_from([n - 1, n, n + 1])))
    splits = data.draw(st.integers(1, 4))
    scheduler = scheduler_of([length], [max(length - n, 0)], n, queries, True, splits=splits)
    for tile in tiles_of(scheduler):
        assert tile.dropped == 0
        for row in range(queries):
            slots = seen_slots(tile, row, -1, scheduler)
            first = range(tile.first * KV_BLOCK, (tile.first + 1) * KV_BLOCK)
            assert not slots or slots & set(first), (length, row)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 5))
def test_slots_without_a_token_are_at_the_end_of_the_last_block(blocks, length, splits):
    """Those may hold NaN: they are never kept, and the rows to clear begin behind the tokens."""
    n = blocks * KV_BLOCK
    scheduler = scheduler_of([length], [max(length - n, 0)], n, 1, True, splits=splits)
    for tile in tiles_of(scheduler):
        assert tile.tokens == min(length, n)
        assert all(slot < tile.tokens for slot in seen_slots(tile, 0, -1, scheduler))
        # Blocks before a tile's last one are full.
        assert (tile.last - 1) * KV_BLOCK <= tile.tokens


def test_most_blocks_need_no_mask():
    """Only those that hold one of the newest tokens, two of them where these lie across a border.

    That is what makes a ring as fast as a window in order.
    """
    n, queries = 32 * KV_BLOCK, 16
    for length in (n, n + 7, 5 * n + 700):
        (tile, *_) = tiles_of(scheduler_of([length], [length - n], n, queries, True))
        scheduler = scheduler_of([length], [length - n], n, queries, True)
        lowest = device.row_limit(tile, 0, scheduler)
        masked = [
            block
            for block in range(tile.first, tile.last)
            if device.places_end(block * KV_BLOCK, tile, scheduler) > lowest
        ]
        newest = {(length - 1 - i) % n // KV_BLOCK for i in range(queries - 1)}
        assert set(masked) >= newest
        assert len(masked) <= 2


@pytest.mark.parametrize(
    ("length", "start", "queries", "causal", "alone", "missing"),
    [
        (300, 172, 4, True, False, False),
        (300, 171, 4, True, False, True),  # a token before the oldest place of the ring
        (300, 297, 4, True, False, False),
        (300, 298, 4, True, False, True),  # the first query must not see token 297
        (300, 300, 4, False, False, False),
        (300, 400, 4, False, False, False),  # a call that looks at fewer tokens than the cache has
        (2, 0, 4, True, False, False),
        (0, 0, 4, True, False, False),
        (100, 0, 4, True, True, False),
        (100, 1, 4, True, True, True),  # no other kernel has token 0
    ],
)
def test_missing_tokens_are_noticed(length, start, queries, causal, alone, missing):
    scheduler = scheduler_of([length], [start], 128, queries, causal, alone=alone)
    assert {tile.incomplete for tile in tiles_of(scheduler)} == {missing}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_row_sees_its_tokens_once_in_blocks_of_any_length(data):
    """Of slots in order; the first block of a work tile is computed whether it holds any or not."""
    kv_block = data.draw(st.sampled_from([64, 128]))
    queries = data.draw(st.sampled_from([1, 5, 64, 65, 130]))
    length, splits = data.draw(st.integers(0, 700)), data.draw(st.integers(1, 5))
    causal = data.draw(st.booleans())
    scheduler = scheduler_of(
        [length], None, 700, queries, causal, splits=splits, pair_tiles=True, kv_block=kv_block
    )
    found: dict[tuple[int, int], list[int]] = {}
    for tile in tiles_of(scheduler):
        for row in range(tile.tile * ROWS, min((tile.tile + 2) * ROWS, queries)):
            limit = device.row_limit(tile, row, scheduler)
            end = max(tile.last, tile.first + 1) * kv_block
            seen = range(tile.first * kv_block, min(end, limit))
            found.setdefault((tile.head, row), []).extend(seen)
    for (_, row), tokens in found.items():
        end = min(length, length - queries + row + 1) if causal else length
        assert tokens == list(range(max(end, 0)))


def test_a_window_in_order_is_no_ring():
    scheduler = scheduler_of([300, 20], None, 128, 4, True)
    assert not scheduler.ring
    assert {
        (tile.oldest_slot, tile.dropped, bool(tile.incomplete)) for tile in tiles_of(scheduler)
    } == {(0, 0, False)}


def test_stage_and_kernel_count_the_same_work_tiles():
    for rows, heads, splits in itertools.product((1, 64, 65, 130), (1, 3, 16), (1, 3)):
        shape = DecompressedShape(5, rows, heads, 256)
        tiling = DecompressedTiling(splits=splits)
        pair_tiles = shape.pairing(tiling) == "tiles"
        scheduler: Any = scheduler_of(
            [300] * 5, [44] * 5, 256, rows, True, heads=heads, splits=splits, pair_tiles=pair_tiles
        )
        tiles = shape.requests * shape.request_tiles(shape.pairing(tiling)) * splits
        assert tiles == scheduler.work_tiles


def ring_plan(**fields: Any) -> tuple[CuteMlaVar6Plus, Any, Any, torch.Tensor]:
    plan = CuteMlaVar6Plus(**{"b": 2, "s": 2, "t": 300, "h": 4, "n": 128, **fields})
    return plan, *ring_operands(plan)


def test_the_older_tokens_are_shown_to_every_query():
    plan, latent, window, w_uv = ring_plan()
    stage = plan.plan_parts(latent, window, w_uv)
    kernels: dict[str, Any] = {kernel.name: kernel for kernel in stage.kernels()}
    assert named_arguments(kernels["flash_mla"])["causal"] == 0
    decompressed = kernels["decompressed_attention"]
    assert named_arguments(decompressed)["causal"] == 1
    assert decompressed.host_fn(DecompressedTiling()).ring


def test_a_ring_in_8_bits():
    plan = CuteMlaVar6PlusV5(b=2, s=2, t=300, h=4, n=128)
    latent, window, w_uv = ring_operands(plan)
    stage = plan.plan_parts(latent, window, w_uv)
    [kernel] = [each for each in stage.kernels() if each.name == "decompressed_attention"]
    host = kernel.host_fn(DecompressedTiling())
    assert host.ring and host.fp8 and not host.alone
    arguments = named_arguments(kernel)
    assert arguments["scales"] is window.scales and arguments["starts"] is window.starts
    with pytest.raises(InvalidArgumentError, match="scales: expected those of a window in 8 bits"):
        plan.plan_parts(latent, window._replace(scales=None), w_uv)
    odd = CuteMlaVar6PlusV5(b=2, s=2, t=300, h=4, n=100)
    with pytest.raises(InvalidArgumentError, match="window: expected a multiple of 64 for a ring"):
        odd.plan_parts(*ring_operands(odd))


def test_a_ring_has_whole_kv_blocks():
    plan, latent, window, w_uv = ring_plan(n=100)
    with pytest.raises(InvalidArgumentError, match="window: expected a multiple of 64 for a ring"):
        plan.plan_parts(latent, window, w_uv)
    plan, *operands = ring_plan(n=0)  # no window, no ring
    assert plan.plan_parts(*operands)


def test_wrong_operands_are_named():
    plan, latent, window, w_uv = ring_plan()
    with pytest.raises(InvalidArgumentError, match="starts: expected"):
        starts = torch.zeros(3, dtype=torch.int32, device="meta")
        plan.plan_parts(latent, window._replace(starts=starts), w_uv)
    with pytest.raises(InvalidArgumentError, match="starts: expected none for a shared prefix"):
        plan._mixed(latent, window, w_uv, shared=True)
    with pytest.raises(InvalidArgumentError, match="latent: expected the tokens beside 128 of 300"):
        plan.plan_parts(None, window, w_uv)
    with pytest.raises(InvalidArgumentError, match=r"table: expected \[b=2, at least 5 pages\]"):
        pages = replace(
            latent,
            latent=torch.zeros(9, 64, 512, dtype=torch.bfloat16, device="meta"),
            rope=torch.zeros(9, 64, 64, dtype=torch.bfloat16, device="meta"),
            table=torch.zeros(2, 4, dtype=torch.int32, device="meta"),
        )
        plan.plan_parts(pages, window, w_uv, 64)


def test_a_settled_plan_has_the_same_split():
    plan = CuteMlaVar6Plus(b=32, s=43, t=4096, h=128, n=2048).on_device(device_spec("NVIDIA H200"))
    settled = plan.settled()
    assert settled.split() == plan.split()
    assert settled.groups(settled.tiling) == plan.groups(plan.tiling)
    assert settled.tiling.sms and settled.decompressed_tiling.sms
    for n in (0, 4096):
        alone = plan.copy(n=n)
        assert alone.settled() == alone
