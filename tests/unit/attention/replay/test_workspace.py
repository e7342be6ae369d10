"""The LSE of replays: memory for several at once, each a tensor of its own."""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.call import mla_attention, mla_latent_attention
from mla_var3.attention.replay import replay as workspace
from mla_var3.attention.select import choice
from mla_var3.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute import torch_fast

from .replay_support import KERNEL, RepeatableKernel, RepeatableWhole
from .test_replay import MODEL, B, D, H, K, P, S, cache_of, queries, same

CALLS = 2 * workspace.LSES_AT_ONCE + 3
LAYOUT = (B, S, H), (S * H, H, 1)
CPU = torch.device("cpu")

Once = Callable[[], tuple[Any, Any]]
"""A call on new tensors: what it found, and what it should have."""


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """No memory is left over from other tests."""
    CALL_STATE.clear()
    yield
    CALL_STATE.clear()


@pytest.fixture
def whole() -> RepeatableWhole:
    return RepeatableWhole()


@pytest.fixture(params=["latent", "whole", "projected by torch", "flash_mla"])
def once(
    request: pytest.FixtureRequest,
    whole: RepeatableWhole,
    kernel: RepeatableKernel,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> Once:
    """Each of the calls that are repeated."""
    cache = cache_of(generator)
    weights = MODEL.w_uk, MODEL.w_uv
    whole.is_served = request.param == "whole"

    def latent() -> tuple[Any, Any]:
        q = queries(generator, K)
        found = mla_latent_attention(*q, cache, kernel=KERNEL)
        return found, mla_latent_attention(*q, cache, kernel="torch_tiled")

    def full() -> tuple[Any, Any]:
        operands = (*queries(generator, D), cache, *weights)
        found, wanted = (
            mla_attention(*operands, kernel=name, return_lse=True)
            for name in (KERNEL, "torch_tiled")
        )
        return found, wanted

    backend = LatentBackend(KERNEL, "torch", kernel, runs_on_cpu=True)
    metadata, _ = get_mla_metadata()
    paged = cache_of(generator, page_size=64)

    def flash() -> tuple[Any, Any]:
        q = torch.cat(queries(generator, K), dim=-1)
        with monkeypatch.context() as patch:
            patch.setattr(choice, "backend_for", lambda shape, name, device: backend)
            found = flash_mla_with_kvcache(
                q, paged.buffer[:, :, None], paged.block_table, paged.lengths, K, metadata,
                causal=True,
            )  # fmt: skip
        q_latent, q_rope = q[..., :K].contiguous(), q[..., K:].contiguous()
        wanted = mla_latent_attention(
            q_latent, q_rope, paged, kernel="torch_tiled", scale=(K + P) ** -0.5
        )
        return found, (wanted[0], wanted[1].mT)

    return {"latent": latent, "flash_mla": flash}.get(request.param, full)


def extents(lses: list[torch.Tensor]) -> list[tuple[int, int]]:
    """First and last byte of each, in order."""
    return sorted((one.data_ptr(), one.data_ptr() + one.numel() * 4) for one in lses)


def apart(lses: list[torch.Tensor]) -> bool:
    places = extents(lses)
    return all(end <= start for (_, end), (start, _) in pairwise(places))


@pytest.mark.parametrize("inference", [False, True])
def test_results_that_live_at_once(inference, once, whole, kernel):
    """More calls than there is memory for at once; none writes into the result of another."""
    with torch.inference_mode(inference):
        results = [once() for _ in range(CALLS)]
        for found, wanted in results:
            same(found, wanted)
    assert whole.repeats + kernel.repeats == CALLS - 1
    lses = [found[1] for found, _ in results]
    assert apart(lses) and all(one.data_ptr() % 16 == 0 for one in lses)
    memory = {one.untyped_storage().data_ptr() for one in lses}
    assert len(memory) <= 2 + -(-CALLS // workspace.LSES_AT_ONCE)


@pytest.mark.parametrize("inference", [False, True])
def test_lses_are_like_new_tensors(inference, once):
    """Everything that a caller can see of them, except the memory behind them."""
    once()
    with torch.inference_mode(inference):
        found, wanted = (result[1] for result in once())
        another = once()[0][1]
        fresh = torch.empty_strided(found.shape, found.stride(), dtype=torch.float32)
        for name in ("shape", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad_fn"):
            assert getattr(found, name) == getattr(fresh, name), name
        assert type(found) is torch.Tensor and not found._is_view()
        assert found.is_inference() is fresh.is_inference() is inference
        before = another.clone()
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)
        found.fill_(7.0)
        assert torch.equal(another, before)
        if not inference:
            assert (found._version, another._version) == (fresh.fill_(7.0)._version, 0)
            factor = torch.full_like(found, 3.0, requires_grad=True)
            found.mul_(factor)
            assert not another.requires_grad
            found.sum().backward()
            assert factor.grad is not None and (factor.grad == 7.0).all()
            found = found.detach()
        stored = io.BytesIO()
        torch.save(found, stored)
        stored.seek(0)
        for same_lse in (
            pickle.loads(pickle.dumps(found)), copy.deepcopy(found), torch.load(stored)
        ):  # fmt: skip
            assert torch.equal(same_lse, found)


def test_a_result_outlives_the_memory_that_is_kept(once):
    once()
    found, wanted = once()
    CALL_STATE.clear()
    gc.collect()
    others = [torch.full((B, S, H), torch.nan) for _ in range(4 * workspace.LSES_AT_ONCE)]
    same(found, wanted)
    del others


@pytest.mark.parametrize("missing", ["memory", "torch"])
def test_lses_of_one_call(missing, once, monkeypatch):
    """Where they are large, or torch cannot share memory, each call allocates its own."""
    if missing == "memory":
        monkeypatch.setattr(workspace, "LSES_BYTES", 2 * B * S * H * 4 - 1)
    else:
        monkeypatch.setattr(torch_fast, "_below_views", None)
    results = [once() for _ in range(4)]
    for found, wanted in results:
        same(found, wanted)
        assert found[1].untyped_storage().nbytes() == B * S * H * 4


def test_threads_take_from_memory_of_their_own(kernel, generator):
    cache = cache_of(generator)
    given = [queries(generator, K) for _ in range(2)]
    wanted = [mla_latent_attention(*q, cache, kernel=KERNEL) for q in given]
    results: list[list[Any]] = [[], []]
    both = threading.Barrier(2)

    def work(index: int) -> None:
        both.wait(10)
        for _ in range(CALLS):
            results[index].append(mla_latent_attention(*given[index], cache, kernel=KERNEL))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, found in enumerate(results):
        assert len(found) == CALLS
        for one in found:
            assert all(torch.equal(*pair) for pair in zip(one, wanted[index], strict=True))
    assert apart([one[1] for found in results for one in found])
    memory = [{one[1].untyped_storage().data_ptr() for one in found} for found in results]
    assert not memory[0] & memory[1]


def test_streams_take_from_memory_of_their_own(kernel, generator):
    """Memory belongs to the stream that it was allocated on."""
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    memory: dict[int, set[int]] = {7: set(), 8: set()}
    kept = []
    for _ in range(3):
        for stream, known in memory.items():
            kernel.stream = stream
            kept.append(mla_latent_attention(*q, cache, kernel=KERNEL)[1])
            known.add(kept[-1].untyped_storage().data_ptr())
    assert not memory[7] & memory[8] and [len(known) for known in memory.values()] == [1, 1]


def test_an_allocation_that_fails_leaves_nothing_behind():
    def out_of_memory(*layout: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    kept: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        workspace.new_lse(kept, LAYOUT, out_of_memory)
    assert not kept
    assert workspace.new_lse(kept, LAYOUT, torch_fast.tensor_maker(CPU)).shape == (B, S, H)
