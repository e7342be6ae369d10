"""The four designs on the CPU interpreter: shapes, tails, masks, lengths, dtypes, n and splits.

Every slot at and beyond a request's length holds NaN and every output starts as NaN, so a kernel
that reads or leaves out too much cannot pass.
"""

from __future__ import annotations

import pytest
import torch

from .kernel_support import (
    DESIGNS,
    INPUT_NAMES,
    Case,
    make_plan,
    plan_of,
    require,
    require_end_to_end,
)

FP16 = "float16"

CASES = [
    # one of everything; the smallest sizes
    Case(s=1, t=1, h=8, lengths=(1,), n=1, splits=1),
    Case(s=1, t=2, h=16, lengths=(2, 1, 0), n=1, dtype=FP16),
    # fewer tokens than a tile, all kinds of lengths
    Case(s=1, t=7, h=8, lengths=(7, 0, 2), n=3),
    Case(s=2, t=31, h=24, lengths=(31, 1, 2, 30), n=4, dtype=FP16),
    # whole tiles, one more, one less
    Case(s=2, t=64, h=16, lengths=(64, 1), n=32),
    Case(s=4, t=128, h=8, lengths=(128, 127, 4), n=64),
    Case(s=4, t=65, h=8, lengths=(65, 64, 63), n=1, dtype=FP16),
    Case(s=8, t=256, h=16, lengths=(256, 129), n=128, splits=4),
    # primes and tails in every dimension
    Case(s=3, t=67, h=16, lengths=(67, 0, 22), n=30),
    Case(s=5, t=151, h=24, lengths=(151, 3, 50), n=100, splits=3),
    Case(s=7, t=193, h=8, lengths=(193, 192, 1), n=65, dtype=FP16),
    Case(s=9, t=257, h=8, lengths=(257, 0, 9), n=200, splits=5),
    # lengths around s: some or all queries of a request see nothing when causal
    Case(s=6, t=101, h=24, lengths=(6, 5, 7), n=6),
    Case(s=9, t=20, h=8, lengths=(1, 8, 20), n=19, dtype=FP16),
    # more queries than a tile, also more than tokens
    Case(s=65, t=66, h=8, lengths=(66, 65), n=33),
    Case(s=70, t=131, h=8, lengths=(131, 0, 43), n=40),
    Case(s=70, t=64, h=8, lengths=(64, 63), n=20, dtype=FP16),
    # 128 heads: one query fills two row tiles
    Case(s=1, t=65, h=128, lengths=(65, 0), n=13),
    Case(s=2, t=40, h=128, lengths=(13,), n=7, dtype=FP16),
]


MASKED = [pytest.param(case, True, id=f"{case}-causal") for case in CASES]
UNMASKED = [pytest.param(case, False, id=f"{case}-full") for case in CASES[1::3]]
"""Without a mask only the lengths limit a row: a third of the table is enough."""


@pytest.mark.parametrize(("case", "causal"), MASKED + UNMASKED)
@pytest.mark.parametrize("design", DESIGNS)
def test_shapes(design: str, case: Case, causal: bool) -> None:
    plan = plan_of(design, case, causal=causal)
    stage = require(plan)
    require_end_to_end(plan, stage)


def test_the_table_covers_what_it_should() -> None:
    assert {case.s for case in CASES} >= {*range(1, 10), 70}
    assert {case.h for case in CASES} == {8, 16, 24, 128}
    assert {case.dtype for case in CASES} == {"bfloat16", FP16}
    kinds = {
        kind
        for case in CASES
        for length in case.lengths
        for kind, holds in {
            "empty": length == 0,
            "one": length == 1,
            "below s": 0 < length < case.s,
            "s": length == case.s,
            "full": length == case.t,
        }.items()
        if holds
    }
    assert kinds == {"empty", "one", "below s", "s", "full"}


@pytest.mark.parametrize("design", DESIGNS)
def test_unused_slots_of_the_inputs_are_poisoned(design: str) -> None:
    """What the other tests rely on."""
    case = Case(s=2, t=40, h=8, lengths=(40, 13, 0), n=20)
    inputs = dict(
        zip(INPUT_NAMES[design], plan_of(design, case).prepare_inputs("cpu"), strict=True)
    )
    old = [max(length - case.n, 0) for length in case.lengths]
    windows = [length - begin for length, begin in zip(case.lengths, old, strict=True)]
    used_slots = {"c_kv": case.lengths, "k_rope": case.lengths, "k": case.lengths}
    used_slots |= {"v": case.lengths, "k_new": windows, "v_new": windows, "k_rope_new": windows}
    checked = 0
    for name, tensor in inputs.items():
        for request, used in enumerate(used_slots.get(name, ())):
            slots = tensor[request].movedim(-2, 0)  # [t, ...]
            assert not slots[:used].isnan().any(), name
            assert slots[used:].isnan().all(), name
            checked += 1
    assert checked >= 2 * len(case.lengths)


# --- the choices of single designs ----------------------------------------------------------------

WINDOW_T = 70


@pytest.mark.parametrize(
    ("s", "n", "causal"),
    [
        *((9, n, True) for n in (0, 1, 2, WINDOW_T // 2, WINDOW_T - 1, WINDOW_T)),
        *((1, n, True) for n in (0, 1, WINDOW_T)),
        *((9, n, False) for n in (1, WINDOW_T // 2, WINDOW_T)),
    ],
)
def test_any_window(s: int, n: int, causal: bool) -> None:
    """With n < s the causal limit reaches into the old tokens, with len < n there are none."""
    plan = make_plan(
        "mla_var6_plus", b=4, s=s, t=WINDOW_T, h=8, n=n, causal=causal, lengths=(70, 0, 1, 40)
    )
    require_end_to_end(plan, require(plan))


@pytest.mark.parametrize("n", [0, 5, 140], ids="n{}".format)
def test_any_window_with_many_queries(n: int) -> None:
    plan = make_plan("mla_var6_plus", b=2, s=70, t=140, h=8, n=n, lengths=(140, 66))
    require_end_to_end(plan, require(plan))


@pytest.mark.parametrize("n", [1, 30, 69], ids="n{}".format)
def test_the_window_is_read_from_its_own_arrays_only(n: int) -> None:
    """The latent cache of the newest tokens may be stale: their window is what counts."""
    plan = make_plan("mla_var6_plus", b=3, s=3, t=70, h=8, n=n, lengths=(70, 20, 0))
    inputs = dict(zip(INPUT_NAMES["mla_var6_plus"], plan.prepare_inputs("cpu"), strict=True))
    for request, length in enumerate(plan.lengths or ()):
        inputs["c_kv"][request, max(length - n, 0) :] = torch.nan
        inputs["k_rope"][request, max(length - n, 0) :] = torch.nan
    require(plan, tuple(inputs.values()))


SPLIT_T = 260
SPLIT_TILES = 5


@pytest.mark.parametrize(
    ("splits", "causal"),
    [*((splits, True) for splits in (1, 2, 3, SPLIT_TILES, 7, SPLIT_TILES + 4)), (SPLIT_T, False)],
)
def test_any_number_of_splits(splits: int, causal: bool) -> None:
    """Also more splits than a request has tiles: the empty ones must have no weight."""
    plan = make_plan(
        "flash_mla_split_kv", b=3, s=2, t=SPLIT_T, h=8, splits=splits, causal=causal,
        lengths=(SPLIT_T, 0, 66),
    )  # fmt: skip
    require_end_to_end(plan, require(plan))


def test_the_split_count_follows_from_the_shape() -> None:
    """One request of many tiles is split; many requests are not."""
    one = make_plan("flash_mla_split_kv", b=1, s=1, t=8192, h=128).resolve(800.0, 4000.0)
    many = make_plan("flash_mla_split_kv", b=256, s=16, t=8192, h=128).resolve(800.0, 4000.0)
    assert one.splits > 8  # type: ignore[attr-defined]
    assert many.splits == 1  # type: ignore[attr-defined]


def test_an_unresolved_window_is_named() -> None:
    with pytest.raises(ValueError, match="^n: expected a number"):
        make_plan("mla_var6_plus", b=1, s=1, t=8, h=8).prepare_inputs("cpu")


@pytest.mark.parametrize(
    "sizes",
    [{"d": 64, "p": 32, "k": 256}, {"h": 1}, {"h": 3}, {"d": 32, "p": 16, "k": 128}],
    ids=lambda sizes: "-".join(f"{key}{value}" for key, value in sizes.items()),
)
@pytest.mark.parametrize("design", ["flash_attention", "flash_mla", "mla_var6_plus"])
def test_other_widths_and_head_counts(design: str, sizes: dict[str, int]) -> None:
    own = {"n": 20} if design == "mla_var6_plus" else {}
    fields = {"b": 2, "s": 3, "t": 70, "h": 8, "lengths": (70, 33), **own, **sizes}
    plan = make_plan(design, **fields)
    require_end_to_end(plan, require(plan))
