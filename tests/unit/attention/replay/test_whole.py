"""Whole calls whose projections are the kernel's own: one launch, the same results."""

import threading
from typing import Any

import pytest
import torch

from mla_var3.attention.backends import latent as latent_backend
from mla_var3.attention.call import mla_attention
from mla_var3.attention.replay import key as keys
from mla_var3.attention.replay import replay as workspace
from mla_var3.attention.replay.replay import ProjectedReplay
from mla_var3.runtime.call_state import CALL_STATE

from .replay_support import KERNEL, RepeatableWhole
from .test_replay import DTYPE, MAKES, MODEL, B, D, H, K, S, cache_of, queries, same

WEIGHTS = MODEL.w_uk, MODEL.w_uv


@pytest.fixture
def whole() -> RepeatableWhole:
    return RepeatableWhole()


def replay_of(operands: Any, **options: Any) -> Any:
    return keys.find_replay(keys.whole_key(*operands, KERNEL, options))


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same content at a pointer that is not aligned."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("largest", [0, workspace.LARGEST_BYTES])
@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_one_launch_does_everything(make, give_out, largest, whole, kernel, generator, monkeypatch):
    """With a workspace that is kept, and with one for each call."""
    monkeypatch.setattr(workspace, "LARGEST_BYTES", largest)
    monkeypatch.setattr(latent_backend, "project_heads", None)  # torch projects nothing
    results = []
    for turn, asked in enumerate((True, False, True, False)):
        cache, options = make(generator)
        operands = (*queries(generator, D), cache, *WEIGHTS)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True, **options)
        if give_out:
            options["out"] = torch.full((B, S, H, D), torch.nan, dtype=DTYPE)
        found = mla_attention(*operands, kernel=KERNEL, return_lse=asked, **options)
        assert (whole.calls, whole.repeats, kernel.calls, kernel.repeats) == (1, turn, 0, 0)
        result = found if asked else (found,)
        assert not give_out or result[0] is options["out"]
        results.append((result, wanted if asked else wanted[:1]))
    for result, wanted in results:  # no later call has written into an earlier result
        same(result, wanted)


def test_repeated_calls_give_what_first_calls_give(whole, kernel, generator):
    """Bit for bit, also where torch projects."""
    cache = cache_of(generator)
    for serves in (True, False):
        whole.is_served = serves
        CALL_STATE.clear()
        known = [(*queries(generator, D), cache, *WEIGHTS) for _ in range(3)]
        repeated = [mla_attention(*operands, kernel=KERNEL) for operands in known]
        assert isinstance(replay_of(known[0]), ProjectedReplay) is not serves
        for operands, found in zip(known, repeated, strict=True):
            CALL_STATE.clear()
            assert torch.equal(mla_attention(*operands, kernel=KERNEL), found)


@pytest.mark.parametrize("place", range(4))
def test_a_pointer_that_is_not_aligned(place, whole, kernel, generator):
    """Torch projects, before and after the key is known, and nothing is kept for it."""
    cache, q = cache_of(generator), queries(generator, D)
    tensors = [q[0], *WEIGHTS, torch.empty(B, S, H, D, dtype=DTYPE)]
    odd = [shifted(tensor) if i == place else tensor for i, tensor in enumerate(tensors)]

    def call(q_nope: Any, w_uk: Any, w_uv: Any, out: Any) -> Any:
        return mla_attention(q_nope, q[1], cache, w_uk, w_uv, out=out, kernel=KERNEL).clone()

    first = call(*odd)
    assert (whole.calls, kernel.calls) == (0, 1)
    wanted = call(*tensors)
    assert (whole.calls, kernel.calls, kernel.repeats) == (1, 1, 0)
    later = call(*odd)
    assert (whole.calls, whole.repeats, kernel.calls, kernel.repeats) == (1, 0, 2, 0)
    assert torch.equal(first, later)
    same((first,), (wanted,))


def test_a_launch_that_is_not_ready(whole, kernel, generator):
    operands = (*queries(generator, D), cache_of(generator), *WEIGHTS)
    wanted = mla_attention(*operands, kernel=KERNEL)
    whole.stream = None
    assert torch.equal(mla_attention(*operands, kernel=KERNEL), wanted)
    assert (whole.calls, whole.repeats) == (2, 0)


def test_what_is_copied_is_not_kept(whole, kernel, generator):
    cache = cache_of(generator)
    for turn in range(2):
        q_nope, q_rope = queries(generator, D)
        uneven = q_rope.transpose(1, 2).contiguous().transpose(1, 2)
        found = mla_attention(q_nope, uneven, cache, *WEIGHTS, kernel=KERNEL)
        assert (whole.calls, whole.repeats, kernel.calls) == (turn + 1, 0, 0)
        same((found,), (mla_attention(q_nope, q_rope, cache, *WEIGHTS, kernel="torch_tiled"),))


def test_threads_have_memory_of_their_own(whole, kernel, generator):
    """Each binds the launch once, to memory that no other uses."""
    cache = cache_of(generator)
    given = [(*queries(generator, D), cache, *WEIGHTS) for _ in range(3)]
    wanted = [mla_attention(*operands, kernel=KERNEL) for operands in given]
    replay = replay_of(given[0])
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(3):
            if not torch.equal(mla_attention(*given[index], kernel=KERNEL), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(given))]
    for thread in threads:
        thread.start()
        thread.join()
    assert not wrong
    # That of a thread that has ended may be another's later; this one lives.
    here, *there = replay.launch.bindings
    assert len(there) == len(given) and here not in there


def test_parts_of_the_workspace_do_not_overlap(whole, kernel, generator, monkeypatch):
    monkeypatch.setattr(workspace, "SMALLEST_BYTES", 1)
    operands = (*queries(generator, D), cache_of(generator), *WEIGHTS)
    mla_attention(*operands, kernel=KERNEL)
    replay = replay_of(operands)
    _, _, lse, (memory, _) = replay.prepared(0, False)
    (fixed,) = replay.launch.bindings
    q_latent, o_latent = fixed["q_latent"], fixed["o_latent"]
    rows = B * S * H
    assert lse == memory.data_ptr() and lse + rows * 4 <= q_latent
    assert q_latent + rows * K * DTYPE.itemsize <= o_latent
    assert o_latent + rows * K * DTYPE.itemsize <= lse + memory.numel()
    assert all(pointer % 16 == 0 for pointer in (lse, q_latent, o_latent))
