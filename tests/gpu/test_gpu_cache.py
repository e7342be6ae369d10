"""Appending to a latent cache and dropping from it: the kernels against torch, both on the GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.storage import Storage
from mla_var3.kernel.cutile.mla import append_rows, reserve_pages
from mla_var3.op.mla.cache_formats import FORMATS

from ..kernel.cache_steps import PAGE, B, K, P, Steps, differing, make_cache
from ..unit.attention.attention_support import normal

pytestmark = pytest.mark.gpu

DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, *FORMATS])
SHARE = 1e-4
"""Numbers of an 8-bit buffer that may differ by the rounding of a division."""


def by_torch(cache: LatentCache) -> LatentCache:
    """The cache without kernels; one may have written its prefix already."""
    kernels = cache.index.kernels
    kernels.pages = kernels.rows = False
    kernels._launched.clear()
    return cache


def pair(dtype: Any, **options: Any) -> list[LatentCache]:
    options = {"device": "cuda", **options}
    caches = [by_torch(make_cache(dtype, **options)), make_cache(dtype, **options)]
    assert caches[1].index.kernels.pages and caches[1].index.kernels.rows
    return caches


def share_of(dtype: Any) -> float:
    return SHARE if isinstance(dtype, str) else 0.0


def launched(cache: LatentCache) -> set[object]:
    return {key[0] for key in cache.index.kernels._launched}


@DTYPE
@pytest.mark.parametrize(
    "options", [{}, {"page_size": PAGE}, {"page_size": PAGE, "window": 12, "prefix": PAGE}]
)
def test_every_step_gives_the_state_of_torch(dtype: Any, options: dict[str, Any]) -> None:
    caches = pair(dtype, **options)
    steps = Steps(caches, seed=5, forks=True, share=share_of(dtype))
    steps.run(300)
    assert {reserve_pages.reserve_pages, append_rows.append_rows} < launched(caches[1])
    assert not launched(caches[0]) and steps.seen["refused"] > 5


@DTYPE
@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_step(
    dtype: Any, packed: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Append and truncate in a graph, replayed with other counts, between forks and evictions."""
    chance, m, caches = random.Random(4), 3, pair(dtype, page_size=PAGE)
    leading = (B * m,) if packed else (B, m)
    rows = torch.zeros((*leading, K + P), dtype=torch.bfloat16, device="cuda")
    counts, dropped = (torch.zeros(B, dtype=torch.int32, device="cuda") for _ in range(2))
    bounds = torch.zeros(B + 1, dtype=torch.int32, device="cuda")

    def step(cache: LatentCache) -> torch.Tensor:
        how = {"cu_seqlens": bounds} if packed else {"counts": counts}
        taken = cache.append(rows[..., :K], rows[..., K:], **how)
        cache.truncate(dropped)
        return taken

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for cache in caches:
            cache.fork(0, into=[])
            step(cache)
            cache.evict(list(range(B)))
    torch.cuda.current_stream().wait_stream(stream)
    before, graph = set(caches[1].index.kernels._launched), torch.cuda.CUDAGraph()
    with monkeypatch.context() as patch, torch.cuda.graph(graph):
        patch.setattr(Storage, "put", None)  # torch must not write
        found = step(caches[1])
    assert caches[1].index.kernels._launched == before
    for turn in range(60):
        rows.copy_(normal(generator, *rows.shape, dtype=torch.bfloat16))
        asked = [chance.choice((0, 1, m)) for _ in range(B)]
        counts.copy_(torch.tensor(asked))
        bounds[1:].copy_(torch.tensor(asked).cumsum(0))
        dropped.copy_(torch.tensor([chance.choice((0, 0, 1)) for _ in range(B)]))
        graph.replay()
        wanted = step(caches[0])
        assert torch.equal(found, wanted)
        assert not differing(*caches, share=share_of(dtype)), turn
        source, gone = chance.randrange(B), chance.randrange(B)
        for cache in caches:
            if turn % 9 == 3:
                cache.fork(source, into=[(source + 1) % B, (source + 2) % B])
            if turn % 20 == 19:
                cache.evict([gone])
    torch.cuda.synchronize()


@pytest.mark.parametrize("b", [1, 37, 300, 1024])
def test_batches_of_other_sizes(b: int, generator: torch.Generator) -> None:
    """Up to the largest that a CTA serves, with pages that run out and pages of several owners."""
    options: dict[str, Any] = {"k": K, "p": P, "device": "cuda", "page_size": PAGE}
    caches = [LatentCache.allocate(b, 512, num_pages=3 * b, **options) for _ in range(2)]
    by_torch(caches[0])
    chance = random.Random(b)
    for turn in range(40):
        counts = torch.tensor([chance.choice((0, 1, 1, 40)) for _ in range(b)])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).cuda()
        rows = normal(generator, max(1, int(counts.sum())), K + P, dtype=torch.bfloat16).cuda()
        dropped = torch.tensor([chance.choice((0, 1, 30)) for _ in range(b)], device="cuda")
        for cache in caches:
            cache.append(rows[:, :K], rows[:, K:], cu_seqlens=bounds)
            cache.truncate(dropped)
            if turn % 5 == 4:
                cache.fork(turn % b, into=list(range(0, b, 7)))
            if turn % 10 == 9:
                cache.evict(list(range(0, b, 3)))
        assert not differing(*caches), turn


def test_many_launches(generator: torch.Generator) -> None:
    """Thousands of launches end, and give the state of torch."""
    b, turns = 300, 3000
    caches = [
        LatentCache.allocate(b, 256, device="cuda", k=K, p=P, page_size=PAGE) for _ in range(2)
    ]
    by_torch(caches[0])
    rows = normal(generator, b, 2, K + P, dtype=torch.bfloat16).cuda()
    counts = (torch.arange(b, device="cuda") % 3).int()
    for turn, cache in enumerate(caches):
        for _ in range(turns if turn else 30):
            cache.append(rows[..., :K], rows[..., K:], counts)
            cache.truncate(counts)
    assert not differing(*caches)


def test_wrong_values_on_the_device_touch_nothing_else(generator: torch.Generator) -> None:
    """Lengths, block table, stack and bounds of garbage: the memory around a cache stays."""
    wild = torch.tensor([-(2**31), -1, 0, 1, 63, 64, 65, 255, 256, 257, 2**31 - 1])
    pages, row = 9, K + P
    whole = torch.full(((pages + 2) * PAGE, row), 7.0, dtype=torch.bfloat16, device="cuda")
    cache = LatentCache.allocate(B, 256, k=K, p=P, device="cuda", page_size=PAGE, num_pages=pages)
    assert cache.pages is not None
    cache.storage.buffer = whole[PAGE:-PAGE].view(pages, PAGE, row)
    cache.fork(0, into=[1])

    def garbage(*shape: int) -> torch.Tensor:
        return wild[torch.randint(0, len(wild), shape, generator=generator)].int().cuda()

    rows = torch.ones((B, 7, row), dtype=torch.bfloat16, device="cuda")
    flat = rows.flatten(0, 1)
    for _ in range(50):
        cache.lengths.copy_(garbage(B))
        for part in (cache.pages.block_table, cache.pages.free, cache.pages.free_count):
            part.copy_(garbage(*part.shape))
        cache.append(rows[..., :K], rows[..., K:], garbage(B))
        cache.append(flat[:, :K], flat[:, K:], cu_seqlens=garbage(B + 1))
        cache.truncate(garbage(B))
        cache.evict(garbage(B) > 0)
    torch.cuda.synchronize()
    assert (whole[:PAGE] == 7.0).all() and (whole[-PAGE:] == 7.0).all()
