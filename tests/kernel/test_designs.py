"""The four designs on the CPU interpreter: shapes, tails, masks, lengths, dtypes, n and splits.

Every slot at and beyond a request's length holds NaN and every output starts as NaN, so a kernel
that reads or leaves out too much cannot pass.
"""

from dataclasses import replace

import pytest
import torch

from .kernel_support import DESIGNS, Case, make_plan, plan_of, require, require_end_to_end

FP16 = "float16"

CASES = [
    # one of everything; the smallest sizes
    Case(s=1, t=1, h=8, lengths=(1,), n=1, splits=1),
    # fewer tokens than a tile, all kinds of lengths
    Case(s=2, t=31, h=3, lengths=(31, 1, 2, 30), n=4, dtype=FP16),
    # whole tiles, one more, one less
    Case(s=4, t=128, h=2, lengths=(128, 127, 4), n=64),
    Case(s=4, t=65, h=2, lengths=(65, 64, 63), n=1, dtype=FP16),
    # primes and tails in every dimension
    Case(s=5, t=151, h=5, lengths=(151, 3, 50), n=100, splits=3),
    Case(s=7, t=193, h=2, lengths=(193, 192, 1), n=65, dtype=FP16),
    Case(s=9, t=257, h=2, lengths=(257, 0, 9), n=200, splits=5),
    # lengths around s: some or all queries of a request see nothing when causal
    Case(s=6, t=101, h=3, lengths=(6, 5, 7), n=6),
    Case(s=9, t=20, h=2, lengths=(1, 8, 20), n=19, dtype=FP16),
    # more queries than a tile, also more than tokens
    Case(s=70, t=131, h=2, lengths=(131, 0, 43), n=40),
    Case(s=70, t=64, h=1, lengths=(64, 63), n=20, dtype=FP16),
    # one query fills more than a row tile
    Case(s=1, t=20, h=65, lengths=(20, 0), n=13),
]
"""Few heads where their number does not matter: the interpreter takes its time per head."""


VERSIONS = tuple(f"mla_var6_plus_v{number}" for number in (2, 3, 4))


@pytest.mark.parametrize("name", [*DESIGNS, *VERSIONS])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_wrong_lengths_on_the_device_are_clamped(name, causal):
    """The host cannot check them. The interpreter raises at whatever lies outside of an array."""
    own = {"n": 30} if name.startswith("mla_var6_plus") else {}
    plan = make_plan(name, b=4, s=3, t=70, h=2, lengths=(70, 0, 0, 70), causal=causal, **own)
    *inputs, lengths = plan.prepare_inputs("cpu")
    right = plan.plan(*inputs, lengths)
    right.launch()
    largest = torch.iinfo(torch.int32).max
    wrong = plan.plan(*inputs, torch.tensor([71, -1, -(2**20), largest], dtype=torch.int32))
    wrong.launch()
    for found, wanted in zip(wrong.output_tensors, right.output_tensors, strict=True):
        assert torch.equal(found, wanted)


WINDOW, SPLIT = Case(s=9, t=70, h=2, lengths=(70, 0, 1, 40), n=0), (260, 0, 66)
SPECIAL = [
    # any window: with n < s the causal limit reaches into the old tokens, with len < n there are
    # none
    *(("mla_var6_plus", replace(WINDOW, n=n), True) for n in (0, 1, 35, 69, 70)),
    *(("mla_var6_plus", replace(WINDOW, s=1, n=n), True) for n in (0, 70)),
    ("mla_var6_plus", replace(WINDOW, n=35), False),
    *(("mla_var6_plus", replace(WINDOW, s=70, h=1, n=n), True) for n in (0, 5, 70)),
    # any number of splits, also more than a request has tiles: empty ones must have no weight
    *(
        ("flash_mla_split_kv", Case(2, 260, 3, SPLIT, 0, splits), splits < 260)
        for splits in (1, 3, 5, 9, 260)
    ),
]


@pytest.mark.parametrize(
    ("design", "case", "causal"),
    [
        *((design, case, True) for design in DESIGNS for case in CASES),
        # Without a mask only the lengths limit a row: a third of the table is enough.
        *((design, case, False) for design in DESIGNS for case in CASES[1::3]),
        *SPECIAL,
    ],
    ids=str,
)
def test_shapes(design, case, causal):
    plan = plan_of(design, case, causal=causal)
    require_end_to_end(plan, require(plan))


@pytest.mark.parametrize(
    "sizes",
    [{"d": 64, "p": 32, "k": 256}, {"h": 3}],
    ids=lambda sizes: "-".join(f"{key}{value}" for key, value in sizes.items()),
)
@pytest.mark.parametrize("design", ["flash_attention", "flash_mla", "mla_var6_plus"])
def test_other_widths_and_head_counts(design, sizes):
    own = {"n": 20} if design == "mla_var6_plus" else {}
    fields = {"b": 2, "s": 3, "t": 70, "h": 2, "lengths": (70, 33), **own, **sizes}
    plan = make_plan(design, **fields)
    require_end_to_end(plan, require(plan))
