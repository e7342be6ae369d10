"""Whole items balanced by length, without a GPU: the rule and the device's own code.

And what the merge relies on.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.conf.devices import load_devices
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    DEFAULT_SM_COUNT,
    KV_BLOCK,
    MOST_CTAS,
    ROWS,
)
from mla_var3.kernel.cute_python.mla.latent import balance, ranges
from mla_var3.kernel.cute_python.mla.latent.groups import (
    GroupShape,
    balanced_items,
    group_shape,
    partial_count,
    ragged_tiles,
)
from mla_var3.kernel.cute_python.mla.latent.merge import CtaState
from mla_var3.kernel.cute_python.mla.latent.records import TABLE_WORDS, Total

from .compile_once import as_written
from .test_cute_schedule import Number, Warp


def spread(requests: int, t: int, least: float = 0.5) -> list[int]:
    """Lengths from a share of t up to t, in no order."""
    lengths = [round(t * (least + (1 - least) * i / (requests - 1))) for i in range(requests)]
    random.Random(0).shuffle(lengths)
    return lengths


@pytest.mark.parametrize(
    ("heads", "requests", "t", "queries", "pays"),
    [
        (16, 256, 4096, 1, True),
        (16, 140, 4096, 1, False),
        (64, 160, 1024, 1, True),
        (128, 64, 1024, 2, True),
        (128, 64, 4096, 2, True),
        (128, 64, 16384, 1, False),  # an item per group, nearly
        (128, 80, 4096, 1, False),
        (128, 120, 4096, 1, True),
        (16, 256, 16384, 8, True),
        (16, 256, 1024, 1, True),  # in turns they would be longer by a fifth
        (16, 300, 1024, 1, False),  # more than are sorted
        (16, 128, 1024, 1, False),  # an item per group
    ],
)
def test_balancing_pays_where_it_was_measured(heads, requests, t, queries, pays):
    """Shapes of docs/results/2026-11-18-nvidia-h200-balance-rows.json, and limits."""
    counts = [1 + i % queries for i in range(requests)]
    tiles = -(-queries * heads // ROWS)
    known = ragged_tiles(sum(counts), requests, queries, heads)
    shape = group_shape(tiles, requests, DEFAULT_SM_COUNT, 0, *known)
    items = [-(-count * heads // (ROWS * shape.group_ctas)) for count in counts]
    found = balanced_items(spread(requests, t), shape, items)
    assert (found is not None) == pays
    if found is not None:
        wanted = [r * shape.visits + i for r, count in enumerate(items) for i in range(count)]
        assert sorted({item for own in found for item, _, _ in own}) == wanted


@pytest.mark.parametrize(
    ("heads", "requests", "t", "queries"),
    [
        (128, 64, 4096, 2),
        (128, 64, 16384, 2),
        (128, 64, 4096, 4),
        (128, 64, 4096, 8),
        (128, 48, 4096, 8),
        (128, 100, 16384, 4),
        (32, 64, 4096, 8),
    ],
)
def test_items_that_are_left_make_up_for_what_sums_lack(heads, requests, t, queries):
    counts = [1 + i % queries for i in range(requests)]
    shape = GroupShape(2, -(-queries * heads // (2 * ROWS)), 66)
    items = [-(-count * heads // (2 * ROWS)) for count in counts]
    lengths = spread(requests, t)
    found = balanced_items(lengths, shape, items)
    assert found is not None
    pieces: dict[int, list[tuple[int, int]]] = {}
    for own in found:
        for item, first, last in own:
            pieces.setdefault(item, []).append((first, last))
    wanted = [r * shape.visits + i for r, count in enumerate(items) for i in range(count)]
    assert sorted(pieces) == wanted
    for item, parts in pieces.items():  # in the order of the groups
        borders = [0, *itertools.chain(*parts), -(-lengths[item // shape.visits] // KV_BLOCK)]
        assert borders[::2] == borders[1::2], item
    partials = sum(len(parts) for parts in pieces.values() if len(parts) > 1)
    assert 0 < partials < 2 * 66
    sums = [sum(last - first + ranges.ITEM_COST for _, first, last in own) for own in found]
    assert max(sums) <= sum(sums) / 66 + 6  # a step of the splits, and the cost of a piece


@pytest.mark.parametrize(
    ("requests", "visits", "longest", "fits"),
    [
        (256, 8, 32767, True), (257, 3, 20, False), (200, 11, 20, False), (256, 8, 32768, False),
        (1, 255, 20, True), (1, 256, 20, False),
    ],
)  # fmt: skip
def test_what_a_key_cannot_hold_is_not_sorted(requests, visits, longest, fits):
    items = requests * visits
    total = items * longest // 2  # of different lengths
    most = balance.most_sum(1, items, visits, longest, total, 66)
    found = balance.worth_sorting(1, requests, visits, items, longest, total, 66, most)
    assert found == fits
    key = ((longest << balance.REQUEST_BITS) + requests - 1 << balance.VISIT_BITS) + visits
    assert not fits or (key < 2**31 and visits < balance.MOST_VISITS)


@pytest.mark.parametrize("t", [1024, 4096])
def test_equal_items_are_not_even_sorted(t):
    """100 items for 66 groups: two each would take twice as long as one and a half."""
    shape = GroupShape(2, 1, 66)
    assert balanced_items([t] * 100, shape) is None
    assert (partial_count([t] * 100, shape) > 0) == (t == 4096)  # 1024 tokens are taken in turns
    blocks = t // KV_BLOCK
    total = 100 * (blocks + ranges.ITEM_COST)
    splits = int(not ranges.takes_turns(blocks, 100, 66, total))
    most = balance.most_sum(splits, 100, 1, blocks, total, 66)
    assert not balance.worth_sorting(splits, 100, 1, 100, blocks, total, 66, most)


def test_nothing_is_split_where_items_are_balanced():
    lengths, shape = spread(256, 1024), GroupShape(2, 1, 64)
    assert balanced_items(lengths, shape) and partial_count(lengths, shape) == 0


@pytest.mark.parametrize(("turn", "wanted"), [(0, 1), (1, 8), (2, 11), (3, 18)])
def test_every_second_turn_is_in_reverse(turn, wanted):
    assert balance.turn_place(turn, 1, 5) == wanted


def test_the_order_fits_shared_memory_beside_what_the_merge_resets():
    assert TABLE_WORDS - len(Total) >= balance.ORDER_WORDS
    assert balance.REQUEST_BITS + balance.VISIT_BITS + balance.BLOCK_BITS <= 31
    assert balance.REQUEST_BITS + balance.VISIT_BITS <= 16


def test_the_records_of_every_known_device_fit():
    served = [spec for spec in load_devices().values() if spec.compute_capability == (9, 0)]
    assert served and all(spec.sm_count <= MOST_CTAS for spec in served)


def test_a_state_is_no_number_that_memory_has_by_chance():
    """Not zeros, no repeated filling, no small numbers, no two floats of usual size."""
    assert len(set(CtaState)) == 3
    for state in CtaState:
        data = int(state).to_bytes(8, "little")
        assert 0 < state < 2**63
        assert len(set(data)) == 8
        assert all(int(state) >> shift & 0xFFFFFFFF > 2**24 for shift in (0, 32))


class Words(list):
    """Shared memory; its iterator plus a number is a place in it."""

    iterator = 0


class Signed(list):
    """Numbers of 16 bits, as a load on the device reads them."""

    def __getitem__(self, place: int) -> Number:
        return Number(((super().__getitem__(place) + 0x8000) & 0xFFFF) - 0x8000)


@pytest.mark.parametrize("seed", range(16))
def test_the_device_code_balances_as_the_host(seed, monkeypatch):
    draw = random.Random(seed)
    block = Warp(0.0)  # a CTA of 32 threads
    words = Words([Number(7)] * balance.KEY_WORDS)
    order, taken = (Signed([Number(7)] * n) for n in (balance.MOST_ITEMS, balance.MOST_TAKEN))

    def atomic(combine: Any) -> Any:
        def change(place: int, value: int, **how: Any) -> None:
            words[place] = combine(words[place], value)  # one step of the interpreter's lock

        return change

    vars(block.cute.arch).update(
        thread_idx=lambda: (block.cute.arch.lane_idx(), 0, 0), make_warp_uniform=lambda n: n,
        sync_threads=lambda: block._exchanged(0), atomic_max=atomic(max),
        atomic_add=atomic(operator.add),
    )  # fmt: skip
    for name in (
        "tokens_of", "kv_blocks", "packed_queries", "item_count", "inclusive_sum", "split_range",
        "split_in_request",
    ):  # fmt: skip
        monkeypatch.setattr(ranges, name, as_written(getattr(ranges, name)))
    monkeypatch.setattr(balance, "left_items", as_written(balance.left_items))
    for name, value in {"Int32": Number, "Int16": Number, "Boolean": bool, "THREADS": 32}.items():
        monkeypatch.setattr(balance, name, value)
    for module in (balance, ranges):
        monkeypatch.setattr(module, "cutlass", block.cutlass)
    monkeypatch.setattr(balance, "cute", block.cute)
    monkeypatch.setattr(ranges, "Int32", Number)

    requests, visits = draw.choice((50, 131, 255, 256)), draw.choice((1, 2, 4))
    groups, most = draw.choice((7, 33, 66)), draw.choice((1024, 4096, 40_000))
    lengths = [Number(draw.choice((0, draw.randint(500, most)))) for _ in range(requests)]
    counts = [draw.randint(0, visits) for _ in range(requests)]
    ctas = Number(draw.choice((1, 2)))
    shape, packed = GroupShape(ctas, visits, groups), None
    if seed % 2:
        begins = [Number(begin) for begin in itertools.accumulate(counts, initial=0)]
        packed = ranges.PackedQueries(begins, visits, begins[-1], 64 * ctas, ROWS * ctas)
    else:
        counts = [visits] * requests
    kept = [-(-n // KV_BLOCK) for n, c in zip(lengths, counts, strict=True) for _ in range(c)]
    total = sum(n + ranges.ITEM_COST for n in kept)
    splits = not ranges.takes_turns(max(kept), requests * visits, groups, total)
    own = ranges.WorkRange(
        0, 0, 1, 1, 1, total, groups, splits=splits, present=Number(len(kept)), longest=max(kept)
    )
    batch = ranges.Batch(
        lengths, Number(requests), Number(visits), Number(0), 1 << 30, None, packed
    )
    wanted = balanced_items(lengths, shape, counts)
    groups_of = Counter(item for items in wanted or [] for item, _, _ in items)
    run = as_written(balance.balance)
    for group in (0, groups // 2, groups - 1):
        given = (batch, own, words, order, taken, ctas, Number(group), Number(groups))
        found = block.run(lambda given=given: run(*given))
        assert len(set(found)) == 1
        balanced, begin, begin_block, end, end_block, step, still_splits = found[0]
        assert balanced == (wanted is not None)
        if wanted is None:
            assert found[0] == (False, 0, 0, 1, 1, 1, splits)
            continue
        assert (begin, step) == (0, 1)
        pieces = []
        request, visit = balance.item_at(taken, 0)
        while visit != balance.NO_VISIT:
            i = len(pieces)
            last = end_block if i == end else -(-lengths[request] // KV_BLOCK)
            pieces.append((request * visits + visit, begin_block if i == 0 else 0, last))
            request, visit = balance.item_at(taken, i + 1)
        assert pieces == wanted[group]
        assert still_splits == (max(groups_of.values()) > 1)
