"""The 8-bit kernels in plain Python: where numbers lie, and between which blocks means go."""

import inspect
import random
from types import SimpleNamespace

import pytest

from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import (
    BYTE_CHOICES,
    COLUMN_CHOICES,
    word_place,
)
from mla_var3.kernel.cute_python.mla.hopper import warps
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_WARPS,
    CONSUMERS,
    LATENT,
    ROWS,
    WARPGROUP,
    WARPGROUP_WARPS,
)
from mla_var3.kernel.cute_python.mla.latent import mask
from mla_var3.kernel.cute_python.mla.latent_fp8 import (
    first_token,
    means,
    producer,
    queries,
    results,
    scores,
    values,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    STAGE_ROWS,
    STAGES,
    has_means,
    phase_of,
    stage_of,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.results import SLOT_WORDS, four_of, own_words
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    FLUSH_PAIRS,
    HALF,
    MEAN_PAIRS,
    MEAN_WARPS,
)
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
    """Every pair of KV blocks once, means in the middle of an interval."""
    plain = SimpleNamespace(min=min, range=lambda number, unroll: range(number))
    monkeypatch.setattr(means, "cutlass", plain)
    monkeypatch.setattr(means, "Int32", int)
    uniform = SimpleNamespace(make_warp_uniform=lambda number: number)
    monkeypatch.setattr(means, "cute", SimpleNamespace(arch=uniform))
    monkeypatch.setattr(means, "wait_means", lambda given, phase: found)
    monkeypatch.setattr(means, "part_end", as_written(means.part_end))
    taken, subtracted, flushed = [], [], []

    def take(begin, end):
        assert end > begin
        taken.extend(range(begin, end))

    tile = SimpleNamespace(pairs=pairs)
    removing = as_written(means.walk_parts)(
        tile, None, 0, take, subtracted.append, lambda before: flushed.append((before, len(taken)))
    )
    assert flushed == [(i, FLUSH_PAIRS * (i + 1)) for i in range((pairs - 1) // FLUSH_PAIRS)]
    assert means.flushes(tile) == len(flushed)
    assert bool(removing) == (has_means(tile) and found)
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
    """The score warpgroup copies them, four columns per thread, to where threads read them."""
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


class Registers(dict):
    """Registers of any number."""

    def fill(self, value):
        self[0] = self[1] = value


class Scales:
    """Scales of tokens in shared memory."""

    def __getitem__(self, at):
        return Read(1.0)


class Read(float):
    """A number from shared memory, or one that follows from such numbers."""

    def __add__(self, other):
        return Read(float(self) + float(other))

    __radd__ = __add__

    def __lt__(self, other):
        return Read(float(self) < float(other))

    def __ror__(self, other):
        return Read(other | int(self))


def test_stages_are_released_behind_the_scales_that_the_means_read(monkeypatch):
    """What releases them follows from the scales: loads and arrivals keep no order by themselves.

    The mean of the scales differed from launch to launch.
    """
    released = []
    arch = SimpleNamespace(
        thread_idx=lambda: (means.FIRST_MEAN_WARP * 32 + 3, 0, 0),
        sync_warp=lambda: None,
        mbarrier_wait=lambda barrier, phase: None,
        vote_ballot_sync=lambda found: 0,
        shuffle_sync_bfly=lambda number, offset: number,
    )
    device = SimpleNamespace(arch=arch, make_rmem_tensor=lambda *args: Registers())
    plain = SimpleNamespace(range=lambda *ends, unroll: range(*ends), range_constexpr=range)
    for name, value in {
        "cute": device, "cutlass": plain, "const_expr": bool, "hidden": lambda value, number: value,
        "Int32": lambda number: number, "Float32": lambda number: number,
        "add_columns": lambda *args: None, "store_means": lambda *args: 0,
        "release": lambda barrier, lane: released.append((barrier, lane)),
    }.items():  # fmt: skip
        monkeypatch.setattr(means, name, value)
    monkeypatch.setattr(warps, "Int32", lambda number: number)
    waits = iter([1, 1, 1, means.NO_BLOCK])
    monkeypatch.setattr(means, "wait_block", lambda *args: next(waits))
    found = SimpleNamespace(
        first_block=[0], values=SimpleNamespace(toint=lambda: 0), found=[0, 0], scale=[0.0],
        free=None, ready="ready",
    )  # fmt: skip
    given = dict.fromkeys(inspect.signature(means.compute_means).parameters)
    given |= {"means": found, "keys_bytes": SimpleNamespace(toint=lambda: 0), "barriers": 0}
    as_written(means.compute_means)(**given | {"scales": Scales()})
    stages = [lane for barrier, lane in released if barrier != "ready"]
    assert len(stages) == 2 and stages == [3, 3]
    assert all(isinstance(lane, Read) for lane in stages)


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


@pytest.mark.parametrize("row, rows, own", [(0, 144, 48), (96, 144, 48), (96, 100, 4), (0, 20, 20)])
def test_a_tile_of_48_rows_keeps_scores_of_its_rows_only(row, rows, own, monkeypatch):
    """The first token's are where the LSE of the rows goes, beside those of the next tile."""
    arch = SimpleNamespace(inline_ptx=lambda *args, **options: None)
    monkeypatch.setattr(first_token, "cute", SimpleNamespace(arch=arch))
    plain = {"range_constexpr": range, "select_": lambda chosen, one, other: other}
    monkeypatch.setattr(first_token, "cutlass", SimpleNamespace(**plain))
    monkeypatch.setattr(first_token, "const_expr", bool)
    monkeypatch.setattr(first_token, "Float32", type("Float", (float,), {"inf": float("inf")}))
    monkeypatch.setattr(mask, "cutlass", SimpleNamespace(min=min))
    kept: dict[int, float] = {}
    tile = SimpleNamespace(row=row, rows=rows, base=1000)
    work = SimpleNamespace(s={(r, (0, 0)): 1.0 for r in range(2)})
    state, scheduler = SimpleNamespace(factors=[1.0, 1.0]), SimpleNamespace(tile_rows=48)
    step = SimpleNamespace(work=work, scales=None, scheduler=scheduler, state=state)
    pointer = SimpleNamespace(toint=lambda: 0)
    first = SimpleNamespace(values=pointer, scale=[0.0])
    set_apart = as_written(first_token.set_apart)
    for t in range(WARPGROUP):
        set_apart(step, first, SimpleNamespace(lse=kept), pointer, tile, True, 0, t)
    assert sorted(kept) == [1000 + row + i for i in range(own)]


# --- the score warpgroup ahead of the values ------------------------------------------------------

ARRIVALS = {
    **dict.fromkeys((producer.full(0, i) for i in range(STAGES)), 1),
    **dict.fromkeys((producer.empty(0, i) for i in range(STAGES)), CONSUMER_WARPS + MEAN_WARPS),
    **dict.fromkeys((producer.weighed(0, i) for i in range(STAGES)), WARPGROUP_WARPS),
}
"""Arrivals that complete an mbarrier, as `init_barriers` sets it up."""


class Word(int):
    """An Int32 that is asked for its bits."""

    def __or__(self, other: int) -> "Word":
        return Word(int(self) | other)

    def bitcast(self, kind: type) -> None: ...


def events_of(
    monkeypatch, pairs: tuple[int, ...], ahead: int, load_early: bool
) -> dict[str, list[tuple]]:
    """What the warps of a CTA do on tiles of so many pairs of KV blocks, in their order.

    The queries of each tile take so many stages.
    """
    events: list[tuple] = []

    own_blocks: range = range(0)

    def take(number):
        if number in own_blocks:  # behind a tile's last block anything may be loaded
            events.append(("read", number))

    arch = SimpleNamespace(
        make_warp_uniform=lambda number: number,
        mbarrier_wait=lambda barrier, phase: events.append(("wait", barrier, phase)),
        mbarrier_test_wait=lambda barrier, phase: False,  # the scores then wait at the latest
        sync_warp=lambda: None,
        fence_view_async_shared=lambda: None,
    )
    tensor = SimpleNamespace(fill=lambda value: None)
    plain = SimpleNamespace(range_constexpr=range)
    for module in (scores, values, queries):
        device = SimpleNamespace(arch=arch, make_rmem_tensor=lambda *args: tensor)
        monkeypatch.setattr(module, "cute", device)
        monkeypatch.setattr(module, "cutlass", plain)
        monkeypatch.setattr(
            module, "release", lambda barrier, lane: events.append(("arrive", barrier, 4))
        )
    for name in ("issue_scores", "keep_order", "keep_maxima"):
        monkeypatch.setattr(scores, name, lambda *args: None)
    for name in ("hides", "words_of"):
        monkeypatch.setattr(scores, name, lambda *args: Word(0))
    monkeypatch.setattr(scores, "weigh", lambda *args: events.append(("store", args[2])))
    monkeypatch.setattr(values, "rescale_output", lambda *args: None)
    monkeypatch.setattr(values, "load_values", lambda step, number, k: take(number))
    monkeypatch.setattr(values, "add_values", lambda *args: events.append(("products",)))
    group = SimpleNamespace(wait_group=lambda left: events.append(("done",)) if not left else None)
    monkeypatch.setattr(values, "warpgroup", group)
    monkeypatch.setattr(scores, "warpgroup", SimpleNamespace(wait_group=lambda number: None))
    weigh_block, load_block, await_block, add_block = (
        as_written(each)
        for each in (scores.weigh_block, values.load_block, values.await_block, values.add_block)
    )
    monkeypatch.setattr(values, "load_block", load_block)
    monkeypatch.setattr(values, "await_block", await_block)
    step = SimpleNamespace(
        barriers=0, exchange=None, columns=ROWS, scales=None, tokens=None, mmas=None, mma=None,
        places=None, state=None, work=SimpleNamespace(values=None, s=None, o=None),
        load_early=load_early,
    )  # fmt: skip
    found: dict[str, list[tuple]] = {}

    def collect(role, tile_events):
        events.clear()
        base = 0
        for count in pairs:
            tile_events(count, base, base + ahead)
            base += ahead + 2 * count
        if tile_events is add:  # the tile that is not valid
            arch.mbarrier_wait(producer.full(0, stage_of(base)), phase_of(base))
        found[role] = list(events)

    tiles = {"begun": 0, "ended": 0}

    def score(count, first, base):
        """The queries, which only this warpgroup reads, then the KV blocks."""
        for number in range(first, base):
            arch.mbarrier_wait(producer.full(0, stage_of(number)), phase_of(number))
            events.append(("read", number))
        queries.hand_over_queries(0, first, 0, ahead * STAGE_ROWS)
        arch.mbarrier_wait(producer.full(0, stage_of(base)), phase_of(base))
        tiles["begun"] += 1
        events.append(("until", "begun", 2 * tiles["begun"]))
        tile = SimpleNamespace(first=0, pairs=count)
        for number in range(base, base + 2 * count):
            weigh_block(step, tile, number, base, 0, 0, 0, False, 0, Word(0))
        events.append(("count", "ended"))

    def add(count, first, base):
        nonlocal own_blocks
        own_blocks = range(base, base + 2 * count)
        tiles["ended"] += 1
        arch.mbarrier_wait(producer.full(0, stage_of(first)), phase_of(first))  # `receive_tile`
        events.append(("read", first))
        events.append(("count", "begun"))
        values.release_queries(0, first, 0, ahead * STAGE_ROWS)
        load_block(step, base, 10**6, True, 0, 0)
        for block in range(2 * count):
            events.append(("block", base + block))
            add_block(step, base + block, 10**6, block + 1 < 2 * count, 0, 0)
        events.append(("until", "ended", tiles["ended"]))

    collect("scores", score)
    for side in "left", "right":
        tiles["ended"] = 0
        collect(f"{side} values", add)
    found["producer"], found["means"] = [], []
    # The last stage is not loaded: it tells those that it has ended.
    for n in range(2 * sum(pairs) + ahead * len(pairs) + 1):
        stage, phase = stage_of(n), phase_of(n)
        full, empty = producer.full(0, stage), producer.empty(0, stage)
        found["producer"] += [("wait", empty, phase ^ 1), ("load", n), ("arrive", full, 1)]
        found["means"] += [("wait", full, phase), ("arrive", empty, MEAN_WARPS)]
    found["means"].pop()
    return found


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("pairs", [(1, 1, 1, 1), (2, 3, 1), (9,)])
@pytest.mark.parametrize("load_early", [False, True])
def test_weights_are_not_overwritten_while_they_are_read(load_early, pairs, ahead, monkeypatch):
    """In any order in which the warps may run, and they never wait for each other in a circle."""
    found = events_of(monkeypatch, pairs, ahead, load_early)
    for seed in range(200):
        run(found, random.Random(seed))


def run(found: dict[str, list[tuple]], draw: random.Random) -> None:
    """Run the events of all roles in a random order that the barriers allow."""
    arrived, phases = dict.fromkeys(ARRIVALS, 0), dict.fromkeys(ARRIVALS, 0)
    counts = {"begun": 0, "ended": 0}
    at = dict.fromkeys(found, 0)
    slots: dict[int, int] = {}
    loaded: dict[int, int] = {}
    current = {"left values": -1, "right values": -1}
    ready = dict.fromkeys(current, -1)  # the last block whose products are done

    def allowed(event):
        if event[0] == "wait":
            return phases[event[1]] % 2 != event[2]
        return event[0] != "until" or counts[event[1]] >= event[2]

    while True:
        left = [role for role in found if at[role] < len(found[role])]
        if not left:
            return
        able = [role for role in left if allowed(found[role][at[role]])]
        assert able, {role: found[role][at[role]] for role in left}
        role = draw.choice(able)
        kind, *details = found[role][at[role]]
        at[role] += 1
        if kind == "arrive":
            barrier, number = details
            arrived[barrier] += number
            assert arrived[barrier] <= ARRIVALS[barrier]
            if arrived[barrier] == ARRIVALS[barrier]:
                arrived[barrier], phases[barrier] = 0, phases[barrier] + 1
        elif kind == "count":
            counts[details[0]] += 1
        elif kind == "load":
            loaded[stage_of(details[0])] = details[0]
        elif kind == "read":
            assert loaded[stage_of(details[0])] == details[0]
        elif kind == "store":
            number = details[0]
            assert min(ready.values()) >= slots.get(number % STAGES, -1), (number, ready)
            slots[number % STAGES] = number
        elif kind == "block":
            current[role] = details[0]
        elif kind == "products":
            assert slots[current[role] % STAGES] == current[role]
        elif kind == "done":
            ready[role] = current[role]
