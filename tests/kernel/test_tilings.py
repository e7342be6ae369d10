"""Every candidate tiling computes the same thing, for every target."""

import pytest

from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.stage import constraint_failures

from .kernel_support import STAGES, make_plan, require

KERNELS = ("flash_attention", "flash_mla", *STAGES)
TARGETS = ("sm_90", "sm_100", "sm_120", "sm_89")
VERSIONS = [f"mla_var6_plus_v{number}" for number in (2, 3, 4)]
SMALL = {"b": 2, "s": 3, "t": 67, "h": 4, "lengths": (67, 30)}
MANY_QUERIES = {**SMALL, "s": 70, "h": 1}
OWN = {
    "split_kv_partial": {"splits": 2},
    "split_kv_reduce": {"splits": 3},
    **{name: {"n": 30} for name in ("attention_block_specialized", *VERSIONS)},
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
@pytest.mark.parametrize("name", [*KERNELS, *VERSIONS])
def test_candidates_are_legal_and_distinct(name, target):
    large = {"b": 32, "s": 16, "t": 4096, "h": 128}
    for sizes in (SMALL, MANY_QUERIES, large):
        plan = make_plan(name, **sizes, **OWN.get(name, {})).for_target(target)
        for kernel in plan.plan(*plan.prepare_inputs("meta")).kernels():
            tilings = kernel.autotune_configs
            assert len({tiling.label() for tiling in tilings}) == len(tilings) > 0
            for tiling in (kernel.tiling, *tilings):
                assert constraint_failures(tiling, kernel.plan) == ()
