"""Requests that continue from another one's tokens: pages shared until one of them is written."""

import random
from collections import Counter
from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.errors import InvalidArgumentError, UnsupportedError

K, P, PAGE = 3, 2, 64


def make_cache(b: int, t: int = 256, **options: Any) -> LatentCache:
    return LatentCache.allocate(b, t, k=K, p=P, dtype=torch.float32, **options)


def tokens(*marks: list[float]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Rows `[b, m, ...]` that carry a mark each, and how many every request has."""
    m = max(len(own) for own in marks)
    rows = torch.full((len(marks), m, 1), torch.nan)
    for request, own in enumerate(marks):
        rows[request, : len(own), 0] = torch.tensor(own)
    return rows.expand(-1, -1, K), rows.expand(-1, -1, P), [len(own) for own in marks]


def held(cache: LatentCache) -> list[list[float]]:
    view = cache.view()
    positions = torch.arange(view.capacity).expand(view.requests, -1)
    latent, rope = view.rows(positions)
    lengths = cache.lengths.tolist()
    for request, length in enumerate(lengths):
        assert torch.equal(latent[request, :length, :P], rope[request, :length])
    return [latent[r, :length, 0].tolist() for r, length in enumerate(lengths)]


def owned_pages(cache: LatentCache) -> Counter[int]:
    """Owners of every page by the block table; they agree with the counts and the free list."""
    pool = cache.pages
    assert pool is not None
    found = Counter(page for page in pool.block_table.flatten().tolist() if page >= 0)
    assert [found[page] for page in range(pool.num_pages)] == pool.owners.tolist()
    free = pool.free[: int(pool.free_count)].tolist()
    assert sorted(free) == [page for page in range(pool.num_pages) if not found[page]]
    return found


@pytest.mark.parametrize("page_size", [None, PAGE])
def test_forks_continue_on_their_own(page_size):
    cache = make_cache(4, page_size=page_size)
    prompt = [float(x) for x in range(100)]
    cache.append(*tokens(prompt, [7.0], [], []))
    cache.fork(0, into=[1, 2])
    assert held(cache) == [prompt, prompt, prompt, []]
    if cache.pages is not None:
        assert sorted(owned_pages(cache).values()) == [3, 3]
    cache.append(*tokens([200.0], [201.0, 301.0], [], [5.0]))
    assert held(cache) == [[*prompt, 200.0], [*prompt, 201.0, 301.0], prompt, [5.0]]
    if cache.pages is not None:  # the first page is still shared, the second was copied twice
        assert sorted(owned_pages(cache).values()) == [1, 1, 1, 1, 3]
    cache.evict([0, 2])
    assert held(cache) == [[], [*prompt, 201.0, 301.0], [], [5.0]]
    cache.truncate([0, 50, 0, 0])
    cache.fork(torch.tensor([1]), torch.tensor([False, True, False, True]))
    assert held(cache) == [[], prompt[:52], [], prompt[:52]]
    if cache.pages is not None:
        assert list(owned_pages(cache).values()) == [2]


def test_appending_copies_one_page_per_request_and_no_more():
    cache = make_cache(3, 512, page_size=PAGE)
    cache.append(*tokens([1.0] * 200, [], []))
    cache.fork(0, into=[1, 2])
    before = len(owned_pages(cache))
    cache.append(*tokens([], [2.0], [3.0]))
    assert len(owned_pages(cache)) == before + 2
    cache.truncate([8, 9, 9])  # whole pages: nothing to copy
    cache.append(*tokens([4.0], [5.0], [6.0]))
    assert [own[191:] for own in held(cache)] == [[1.0, 4.0], [1.0, 5.0], [1.0, 6.0]]
    assert sorted(owned_pages(cache).values()) == [1, 1, 1, 3, 3, 3]


def test_the_ring_and_a_prefix_come_along():
    weights = {"w_uk": torch.randn(2, 4, K), "w_uv": torch.randn(2, K, 4)}
    cache = make_cache(3, page_size=PAGE, window=8, prefix=PAGE, heads=2, head_dim=4)
    latent, rope, _ = tokens([0.5] * PAGE)
    cache.set_prefix(latent[0], rope[0], **weights)
    cache.append(*tokens([1.0] * 20, [2.0], []), **weights)
    cache.fork(0, into=[2])
    assert cache.window is not None
    assert cache.window.start.tolist() == [76, 64, 76]
    assert torch.equal(cache.window.k_new[2], cache.window.k_new[0])
    assert torch.equal(cache.window.k_rope_new[2], cache.window.k_rope_new[0])
    assert held(cache)[2] == [0.5] * PAGE + [1.0] * 20
    assert owned_pages(cache)[0] == 3  # the prefix
    cache.evict([0, 1, 2])
    assert owned_pages(cache) == {0: 3}


def test_wrong_forks():
    cache = make_cache(2, page_size=PAGE)
    with pytest.raises(InvalidArgumentError, match=r"request\[0\]: expected .* b-1=1, got 2"):
        cache.fork(2, into=[0])
    with pytest.raises(InvalidArgumentError, match=r"into\[1\]: expected .* b-1=1, got 3"):
        cache.fork(0, into=[1, 3])


def test_a_graph_that_cannot_copy_pages_forbids_forks():
    cache = make_cache(2, page_size=PAGE)
    cache.index.captured_without_forks = True
    with pytest.raises(UnsupportedError, match="expected a first fork before a CUDA graph"):
        cache.fork(0, into=[1])


def test_thousands_of_forks_appends_truncates_and_evicts():
    """Every request holds what a list says, no page leaks, and refusals are deserved."""
    chance, b, pages = random.Random(3), 6, 14
    cache = make_cache(b, page_size=PAGE, num_pages=pages)
    lists: list[list[float]] = [[] for _ in range(b)]
    mark, refusals = 0.0, 0
    for step in range(3_000):
        action = chance.random()
        if action < 0.15:
            source = chance.randrange(b)
            into = chance.sample(range(b), chance.randrange(3))
            cache.fork(source, into)
            for request in into:
                lists[request] = list(lists[source])
        elif action < 0.25:
            gone = chance.randrange(b)
            cache.evict([gone])
            lists[gone] = []
        elif action < 0.5:
            counts = [chance.choice((0, 0, 1, 5, 90)) for _ in range(b)]
            cache.truncate(counts)
            lists = [own[: max(0, len(own) - c)] for own, c in zip(lists, counts, strict=True)]
        else:
            counts = [chance.choice((0, 1, 3, 40)) for _ in range(b)]
            new = [[mark + 100 * r + i for i in range(c)] for r, c in enumerate(counts)]
            mark += 1000
            expected = expected_taken(cache, lists, counts)
            latent, rope, _ = tokens(*new)
            assert cache.append(latent, rope, counts).tolist() == expected
            refusals += expected != counts
            for request, taken in enumerate(expected):
                lists[request] += new[request][:taken]
        if step % 10 == 0:
            owned_pages(cache)
            assert held(cache) == lists
    assert held(cache) == lists and refusals > 50
    cache.evict(list(range(b)))
    assert not owned_pages(cache)


def expected_taken(cache: LatentCache, lists: list[list[float]], counts: list[int]) -> list[int]:
    """Whose tokens fit, by the pages that are held: a page with other owners is copied."""
    assert cache.pages is not None
    owners, table = owned_pages(cache), cache.pages.block_table.tolist()
    free, used, taken = cache.pages.num_pages - len(owners), 0, []
    for request, count in enumerate(counts):
        length = len(lists[request])
        fits, held_pages = length + count <= 256, -(-length // PAGE)
        if fits and count:
            need = -(-(length + count) // PAGE) - held_pages
            need += bool(length % PAGE) and owners[table[request][held_pages - 1]] > 1
            used += need
            fits = need == 0 or used <= free
        taken.append(count if fits else 0)
    return taken
