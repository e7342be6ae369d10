"""The 8-bit kernels in plain Python: where numbers lie, and between which blocks means go."""

import inspect
from types import SimpleNamespace

import pytest

from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import (
    BYTE_CHOICES,
    COLUMN_CHOICES,
    word_place,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import CONSUMERS, LATENT, ROWS, WARPGROUP
from mla_var3.kernel.cute_python.mla.latent_fp8 import means, results
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import has_means
from mla_var3.kernel.cute_python.mla.latent_fp8.results import SLOT_WORDS, four_of, own_words
from mla_var3.kernel.cute_python.mla.latent_fp8.state import FLUSH_PAIRS, HALF, MEAN_PAIRS
from mla_var3.op.mla.window.packed import TOKEN_ORDER

from .compile_once import as_written

LANES = 32


def pick_bytes(first: list[object], second: list[object], selector: int) -> list[object]:
    """What `prmt` does: each nibble names one of eight bytes."""
    together = first + second
    return [together[selector >> 4 * i & 7] for i in range(4)]


@pytest.mark.parametrize("columns", COLUMN_CHOICES)
def test_weights_arrive_in_the_order_of_the_tokens(columns):
    """Every byte of the block carries its query row and its token."""
    stored: dict[int, list[object]] = {}
    for warp in range(4):
        words = {}  # per lane and group of 8 rows: two rows of two tokens each
        for lane in range(LANES):
            tokens = [warp * 16 + lane // 4 + 8 * r for r in range(2)]
            for j in range(columns // 8):
                own = [j * 8 + lane % 4 * 2 + e for e in range(2)]
                words[lane, j] = [(row, token) for row in own for token in tokens]
        for j in range(0, columns // 8, 2):
            going = {
                lane: pick_bytes(words[lane, j], words[lane, j + 1], BYTE_CHOICES[lane // 4 % 2][0])
                for lane in range(LANES)
            }
            for lane in range(LANES):
                _, *choices = BYTE_CHOICES[lane // 4 % 2]
                for k in range(2):
                    place = word_place(warp * LANES + lane, columns) + (j + k) * 32
                    assert place not in stored
                    stored[place] = pick_bytes(words[lane, j + k], going[lane ^ 4], choices[k])
    assert sorted(stored) == list(range(columns * 64 // 4))
    for place, found in stored.items():
        # 16 bytes of a row, rows one behind the other, then the next 16 tokens.
        group, row, first = place // (columns * 4), place // 4 % columns, place % 4 * 4
        order = [group * 16 + TOKEN_ORDER[first + i] for i in range(4)]
        assert found == [(row, token) for token in order]


@pytest.mark.parametrize("pairs", [*range(1, 12), 31, 32, 33, 34, 36, 37, 64, 100])
@pytest.mark.parametrize("found", [False, True])
def test_parts_of_a_tile_meet_where_means_are_subtracted(pairs, found, monkeypatch):
    """The loop of `consume`: every pair of KV blocks once, means in the middle of an interval."""
    monkeypatch.setattr(means, "cutlass", SimpleNamespace(min=min))
    uniform = SimpleNamespace(make_warp_uniform=lambda number: number)
    monkeypatch.setattr(means, "cute", SimpleNamespace(arch=uniform))
    part_end = as_written(means.part_end)
    removing, taken, subtracted = has_means(SimpleNamespace(pairs=pairs)), [], []
    for first in range(0, pairs, FLUSH_PAIRS):
        begin, last = first, min(first + FLUSH_PAIRS, pairs)
        while begin < last:
            end = part_end(begin, last, removing)
            assert end > begin
            taken += range(begin, end)
            if end < last:
                removing = removing and found
                if removing:
                    subtracted.append(end)
            begin = end
    assert taken == list(range(pairs))
    long = found and pairs > MEAN_PAIRS
    middles = range(MEAN_PAIRS // 2, pairs, MEAN_PAIRS) if long else ()
    assert subtracted == list(middles)


@pytest.mark.parametrize("cta", [0, 5])
def test_flushed_output_leaves_room_for_both_partials(cta, monkeypatch):
    """A CTA may have written partials of other tiles when an output moves to memory."""
    monkeypatch.setattr(
        results, "cute", SimpleNamespace(recast_ptr=lambda p, dtype: WordPointer(p))
    )
    monkeypatch.setattr(results, "Int64", int)
    address = as_written(own_words)
    scheduler = SimpleNamespace(group=cta, group_ctas=1, rank=0)
    outputs = SimpleNamespace(o_partial=0)
    offsets = [
        four_of(j, e, half)[0] for j in range(ROWS // 8) for e in range(2) for half in range(2)
    ]
    taken = {
        address(outputs, t, group, scheduler) + offset
        for group in range(2)
        for t in range(WARPGROUP)
        for offset in offsets
    }
    assert len(taken) == CONSUMERS * len(offsets)
    slot_bytes = SLOT_WORDS * 4
    assert {place // slot_bytes for place in taken} == {2 * cta, 2 * cta + 1}
    # Partials have 16 bits, from the start of their slot on.
    assert min(place % slot_bytes for place in taken) == ROWS * LATENT * 2
    assert max(place % slot_bytes for place in taken) + 16 == slot_bytes


class WordPointer(int):
    """An address in words."""

    def __add__(self, words: int) -> "WordPointer":
        return WordPointer(int(self) + words)

    def toint(self) -> int:
        return 4 * int(self)


def test_values_of_the_first_token_find_their_threads(monkeypatch):
    """The score warpgroup copies them, four columns per thread, to where their threads read them."""
    stored: dict[int, int] = {}
    for t in range(WARPGROUP):
        column = t % 32 * 4
        place = t // 64 * HALF + means.thread_place(column) + t // 32 % 2 * 4
        for i in range(4):
            stored[place + i // 2 * 8 + i % 2] = t // 32 * 128 + column + i
    assert sorted(stored) == list(range(LATENT))
    read: list[int] = []

    def noted(*code, read_only_args, **kinds):
        read.extend(read_only_args)

    monkeypatch.setattr(means.cute.arch, "inline_ptx", noted)
    for group in range(2):
        for t in range(WARPGROUP):
            means.column_bytes(SimpleNamespace(toint=lambda: 0), t, group)
            for m in range(HALF // 64):
                for r in range(2):
                    own = group * HALF + m * 64 + t // 32 * 16 + t % 32 // 4 * 2 + r
                    assert stored[read[-1] + 2 * m + r] == own


@pytest.mark.parametrize("flushed", [0, 1, 4])
@pytest.mark.parametrize("removing", [0, 1, -1])  # of 32 lanes, as a vote gives them
def test_the_end_of_a_tile_adds_what_was_taken_from_the_output(flushed, removing, monkeypatch):
    """Two segments with means lost both where the two numbers were added."""

    class Added(Exception):
        """Behind here nothing is added any more."""

    def end_tile(*args):
        raise Added

    added = []
    for name in ("own_score", "own_words"):
        monkeypatch.setattr(results, name, lambda *args: 0)
    monkeypatch.setattr(results, "end_tile", end_tile)
    monkeypatch.setattr(results, "read_back", lambda *args: added.append("flushed"))
    monkeypatch.setattr(results, "restore", lambda *args: added.append("means"))
    arch = SimpleNamespace(barrier=lambda **options: None)
    monkeypatch.setattr(results, "cute", SimpleNamespace(arch=arch))
    given = dict.fromkeys(inspect.signature(results.finish).parameters)
    given |= {"flushed": flushed, "removing": removing, "t": 0, "group": 0}
    given |= {"exchange": SimpleNamespace(row_sum=[0], row_max=[0])}
    with pytest.raises(Added):
        as_written(results.finish)(**given)
    assert added == ["flushed"] * (flushed != 0) + ["means"] * (removing != 0)
