"""Replays on a GPU: against the PyTorch path, on streams, in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.call import HEAD_WIDTH, mla_attention, mla_latent_attention
from mla_var3.attention.replay import key as keys
from mla_var3.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_var3.runtime.call_state import CALL_STATE

from ..unit.attention.attention_support import make_model, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

B, S, H, D, P, K, T, PAGE = 3, 2, 64, 128, 64, 512, 1024, 64
KERNEL = "flash_mla:cute-dsl"
LENGTHS = (1000, 77, 640)


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    CALL_STATE.clear()


def filled(generator: torch.Generator, page_size: int | None) -> LatentCache:
    options = {} if page_size is None else {"page_size": page_size}
    cache = LatentCache.allocate(B, T, device="cuda", **options)
    cache.buffer.fill_(torch.nan)
    rows = normal(generator, B, max(LENGTHS), K + P, dtype=torch.bfloat16).cuda()
    cache.append(rows[..., :K], rows[..., K:], LENGTHS)
    return cache


def queries(generator: torch.Generator, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (
        normal(generator, B, S, H, columns, dtype=torch.bfloat16).cuda() for columns in (width, P)
    )
    return first, second


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("page_size", [None, PAGE])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_other_tensors_of_the_same_key(
    page_size: int | None, scale: float | None, generator: torch.Generator
) -> None:
    model = make_model(generator, H, D, K, torch.bfloat16)
    weights = model.w_uk.cuda(), model.w_uv.cuda()
    for turn in range(3):
        cache = filled(generator, page_size)
        latent, whole = queries(generator, K), queries(generator, D)
        found = mla_latent_attention(*latent, cache, kernel=KERNEL, scale=scale)
        same(found, mla_latent_attention(*latent, cache, kernel="torch_tiled", scale=scale))
        options: dict[str, Any] = {"scale": scale, "return_lse": True}
        found = mla_attention(*whole, cache, *weights, kernel=KERNEL, **options)
        same(found, mla_attention(*whole, cache, *weights, kernel="torch_tiled", **options))
        for inference in (False, True):  # the memory between the products is another
            with torch.inference_mode(inference):
                alone = mla_attention(*whole, cache, *weights, kernel=KERNEL, scale=scale)
            torch.testing.assert_close(alone, found[0], rtol=0.02, atol=0.02)
        assert len(keys._replays) == 2, f"turn {turn}: one replay of each call"


@pytest.mark.parametrize(("s", "h"), [(1, H), (2, H), (2, 128), (1, 16), (4, 2)])
def test_flash_mla(s: int, h: int, generator: torch.Generator) -> None:
    metadata, _ = get_mla_metadata()
    lengths = torch.tensor([1000, 0, 640], dtype=torch.int32, device="cuda")
    for _ in range(3):
        pages = normal(generator, B * T // PAGE, PAGE, 1, K + P, dtype=torch.bfloat16).cuda()
        table = torch.randperm(B * T // PAGE, generator=generator).view(B, -1).int().cuda()
        q = normal(generator, B, s, h, K + P, dtype=torch.bfloat16).cuda()
        out, lse = flash_mla_with_kvcache(q, pages, table, lengths, K, metadata, causal=True)
        view = LatentCache.allocate(B, T, device="cuda", page_size=PAGE).view()
        view.latent.copy_(pages[:, :, 0, :K])
        view.rope.copy_(pages[:, :, 0, K:])
        assert view.block_table is not None
        view.block_table.copy_(table)
        view.lengths.copy_(lengths)
        wanted = mla_latent_attention(
            q[..., :K], q[..., K:], view, scale=(K + P) ** -0.5, kernel="torch_tiled"
        )
        wanted_lse = wanted[1].transpose(1, 2).masked_fill(lengths.view(B, 1, 1) == 0, torch.inf)
        same((out, lse), (wanted[0], wanted_lse))


def test_streams_do_not_mix(generator: torch.Generator) -> None:
    """Each stream has room for pieces of its own; all results as those of one stream."""
    cache = filled(generator, PAGE)
    inputs = [queries(generator, K) for _ in range(16)]
    wanted = [mla_latent_attention(*q, cache, kernel=KERNEL) for q in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for turn, q in enumerate(inputs):
        with torch.cuda.stream(streams[turn % 4]):
            found.append(mla_latent_attention(*q, cache, kernel=KERNEL))
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def require_thread_safe(calls: Sequence[Callable[[], Any]]) -> None:
    """Calls at the same time, each in a thread of its own, give the bits that they give alone."""
    wanted = [call() for call in calls]

    def agrees(index: int) -> bool:
        turns = (calls[index]() for _ in range(100))
        return all(
            torch.equal(*pair) for found in turns for pair in zip(found, wanted[index], strict=True)
        )

    with ThreadPoolExecutor(len(calls)) as pool:
        assert all(pool.map(agrees, range(len(calls))))


def test_threads_on_one_stream(generator: torch.Generator) -> None:
    cache = filled(generator, PAGE)
    inputs = [queries(generator, K) for _ in range(4)]
    require_thread_safe([partial(mla_latent_attention, *q, cache, kernel=KERNEL) for q in inputs])


def test_a_graph_captured_after_the_form_is_known(generator: torch.Generator) -> None:
    """It has room of its own: eager calls between its replays change nothing in it."""
    cache = filled(generator, PAGE)
    q, other = queries(generator, K), queries(generator, K)
    wanted = mla_latent_attention(*q, cache, kernel=KERNEL)
    key = keys.latent_key(*q, cache, HEAD_WIDTH, KERNEL, {})
    assert keys.find_replay(key) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mla_latent_attention(*q, cache, kernel=KERNEL)
    side = torch.cuda.Stream()
    for _ in range(20):
        for tensor in captured:
            tensor.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            mla_latent_attention(*other, cache, kernel=KERNEL)
        torch.cuda.synchronize()
        assert torch.equal(captured[0], wanted[0]) and torch.equal(captured[1], wanted[1])


def test_addresses_that_are_not_aligned_are_copied(generator: torch.Generator) -> None:
    cache, q = filled(generator, PAGE), queries(generator, K)
    wanted = mla_latent_attention(*q, cache, kernel=KERNEL)
    room = torch.empty(q[0].numel() + 1, dtype=torch.bfloat16, device="cuda")
    shifted = room[1:].view(q[0].shape).copy_(q[0])
    found = mla_latent_attention(shifted, q[1], cache, kernel=KERNEL)
    assert torch.equal(found[0], wanted[0])
