"""The merge inside the latent kernel without a GPU: what decides it, and its workspace."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.conf.devices import load_devices
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, MOST_CTAS
from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape, group_shape, partial_count
from mla_var3.kernel.cute_python.mla.latent.merge import CtaState
from mla_var3.kernel.cute_python.mla.latent.ranges import ITEM_COST, takes_turns


def may_split(lengths: Sequence[int], shape: GroupShape) -> bool:
    """Whether a launch may split items, by the rule of `work_range`."""
    blocks = [-(-length // KV_BLOCK) for length in lengths for _ in range(shape.visits)]
    total = sum(blocks) + ITEM_COST * len(blocks)
    in_turn = takes_turns(max(blocks), len(blocks), shape.group_count, total)
    return shape.group_count > 1 and not in_turn


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 150),
    st.booleans(),
)
@example([64 * 1000], 1, 132, False)
@example([64 * 1000], 1, 1, False)
@example([4096, 4096], 3, 6, True)
@example([64, 128, 64], 1, 3, False)  # in turn, though they differ
def test_a_launch_that_does_not_split_writes_no_partial(lengths, tiles, sms, equal):
    """Otherwise partials would be left unmerged."""
    if equal:
        lengths = lengths[:1] * len(lengths)
    shape = group_shape(tiles, len(lengths), sms)
    assert may_split(lengths, shape) or partial_count(lengths, shape) == 0


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
