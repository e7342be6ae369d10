"""Every candidate tiling computes the same thing, for every target."""

import pytest

from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.stage import constraint_failures

from .kernel_support import STAGES, make_plan, require

KERNELS = ("flash_attention", "flash_mla", *STAGES)
TARGETS = ("sm_90", "sm_100", "sm_120", "sm_89")
SMALL = {"b": 2, "s": 3, "t": 67, "h": 4, "lengths": (67, 30)}
MANY_QUERIES = {**SMALL, "s": 70, "h": 1}
OWN = {
    "split_kv_partial": {"splits": 2},
    "split_kv_reduce": {"splits": 3},
    "attention_block_specialized": {"n": 30},
}


def candidates() -> dict[str, MlaPlan]:
    """A plan per distinct candidate of all targets, by a readable id."""
    found: dict[str, MlaPlan] = {}
    for kernel in KERNELS:
        for sizes in (SMALL, MANY_QUERIES):
            for target in TARGETS:
                plan = make_plan(kernel, **sizes, **OWN.get(kernel, {})).for_target(target)
                for tiling in plan._autotune_configs():
                    # Hints do not reach the interpreter, so tilings that differ in them only
                    # are one.
                    sides = {k: v for k, v in tiling.to_dict().items() if k[0].isupper()}
                    text = "-".join(f"{key}{value}" for key, value in sides.items())
                    found.setdefault(f"{kernel}-{text}", plan.copy(tiling=tiling))
    return found


CANDIDATES = candidates()


@pytest.mark.parametrize("plan", CANDIDATES.values(), ids=CANDIDATES)
def test_candidate(plan):
    require(plan)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_candidates_are_legal_and_distinct(kernel, target):
    for sizes in (SMALL, MANY_QUERIES):
        plan = make_plan(kernel, **sizes, **OWN.get(kernel, {})).for_target(target)
        tilings = list(plan._autotune_configs())
        assert tilings
        assert len({tiling.label() for tiling in tilings}) == len(tilings)
        for tiling in tilings:
            assert constraint_failures(tiling, plan) == ()
