"""LatentCache: sizes, appending, dropping, paging, the ring; many steps: `test_fork.py`, fuzz."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError

from .attention_support import filled_cache, make_model

K, P, H, D = 3, 2, 2, 4
W_UK, W_UV = torch.ones(H, D, K), torch.ones(H, K, D)


def make_cache(b: int = 2, t: int | None = 130, **options: Any) -> LatentCache:
    options = {"dtype": torch.float32, **options}
    return LatentCache.allocate(b, t, k=K, p=P, heads=H, head_dim=D, **options)


def rows(*counts: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Recognisable tokens `[b, m, ...]`: request and number."""
    m = max(counts)
    token = first + torch.arange(m) + 1000.0 * torch.arange(len(counts))[:, None]
    return token[..., None].expand(-1, -1, K).clone(), token[..., None].expand(-1, -1, P) + 0.5


def held(cache: LatentCache) -> list[list[float]]:
    """The tokens that the cache says it has, by their first latent column."""
    view = cache.view()
    found = []
    for request, length in enumerate(cache.lengths.tolist()):
        positions = torch.arange(length).expand(view.requests, -1)
        latent, rope = view.rows(positions)
        assert torch.equal(latent[request, :, 0] + 0.5, rope[request, :, 0])
        found.append(latent[request, :, 0].tolist())
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"t": 100},
        {"t": 100, "window": 16},
        {"t": 100, "prefix": 30},
        {"t": 128, "page_size": 64},
        {"t": 500, "page_size": 128, "num_pages": 3, "window": 8, "prefix": 128},
        {"t": 101, "dtype": "fp8_per_token", "window": 8},
        {"t": 128, "page_size": 64, "dtype": "fp8"},
        {"t": 200, "window": 128, "window_dtype": "fp8", "prefix": 30},
    ],
)
def test_sizes_are_those_of_the_tensors(options):
    cache = make_cache(3, **options)
    tensors: list[torch.Tensor] = [cache.lengths, cache.refused]
    if cache.pages is not None:
        pool = cache.pages
        tensors += [pool.block_table, pool.owners, pool.free, pool.free_count]
    if cache.window is not None:
        window = cache.window
        tensors += [window.start, window.k_new, window.v_new, window.k_rope_new]
        tensors += [] if window.scales is None else [window.scales]
    if cache.prefix is not None:
        prefix = cache.prefix
        tensors += [prefix.k_prefix, prefix.v_prefix, prefix.k_rope_prefix]
    tensors.append(cache.buffer)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert cache.sizes().total_bytes == total
    assert cache.sizes().to_dict()["total_bytes"] == total


@pytest.mark.parametrize("page_size", [None, 64, 128])
@pytest.mark.parametrize("window", [0, 10])
def test_a_budget_is_used_and_kept(page_size, window):
    for budget in (60_000, 100_001):
        t = 8192 if page_size else None
        cache = make_cache(2, t, page_size=page_size, window=window, budget_bytes=budget)
        used = cache.sizes().total_bytes
        step = 64 * 2 if page_size is None else page_size
        assert used <= budget
        assert used + step * (K + P) * 4 + 4 > budget
        if page_size is None:
            more, fewer = (make_cache(2, t, window=window, budget_bytes=budget) for t in (8192, 20))
            assert more.sizes() == cache.sizes() and fewer.view().capacity == 20


@pytest.mark.parametrize(("prefix", "slots"), [(0, 64), (130, 192)])
def test_the_budget_that_an_error_asks_for_is_enough(prefix, slots):
    """For 64 slots per request, or as many as a shared prefix takes."""
    with pytest.raises(InvalidArgumentError, match="at least") as caught:
        make_cache(2, None, prefix=prefix, budget_bytes=100)
    least = int(str(caught.value).split()[4])
    cache = make_cache(2, None, prefix=prefix, budget_bytes=least)
    assert cache.view().capacity == slots and cache.sizes().total_bytes == least


def test_slots_are_rounded_up_where_their_layout_needs_it():
    for slots, options in (
        (101, {}), (101, {"dtype": "fp8"}), (104, {"dtype": "fp8_per_token"}),
        (128, {"page_size": 64}),
    ):  # fmt: skip
        assert make_cache(1, 101, **options).view().capacity == slots


def test_a_budget_buys_no_pages_that_no_request_can_hold():
    """The pages of a shared prefix are there once."""
    options = {"page_size": 64, "prefix": 256}
    bought, needed = (
        make_cache(4, 320, **options, budget_bytes=10**8),
        make_cache(4, 320, **options),
    )
    assert bought.sizes() == needed.sizes()
    assert bought.sizes().tokens == 256 + 4 * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b": 0}, "b: expected a positive integer, got 0"),
        ({"t": None}, "t: expected slots per request"),
        ({"t": 0}, "t: expected a positive integer, got 0"),
        ({"k": 0}, "k: expected a positive integer, got 0"),
        ({"value_dim": 0}, "value_dim: expected a positive integer, got 0"),
        ({"p": -1}, "p: expected an integer >= 0, got -1"),
        ({"page_size": 63}, "page_size: expected a multiple of 64, got 63"),
        ({"num_pages": 3}, "num_pages: expected none without page_size, got 3"),
        (
            {"page_size": 64, "num_pages": 3, "budget_bytes": 10**6},
            "num_pages: .* budget_bytes, got 3",
        ),
        ({"window": 131}, "window: expected an integer from 0 to t=130, got 131"),
        ({"window": 8, "heads": None}, "heads: expected a positive integer, got None"),
        ({"page_size": 64, "prefix": 10}, "prefix: expected whole pages"),
        ({"budget_bytes": 100}, "budget_bytes: expected at least"),
        ({"page_size": 64, "budget_bytes": 100}, "budget_bytes: expected at least"),
        ({"device": "nowhere"}, "device: expected a device of this machine, such as cpu, got 'now"),
        ({"device": 1.5}, "device: expected a device of this machine, such as cpu, got 1.5"),
        ({"heads": "x"}, "heads: expected a positive integer, got 'x'"),
        ({"b": 2**40}, "b: expected an integer from 1 to 1048576, got 1099511627776"),
        ({"t": 2**40}, "t: expected an integer from 1 to 2147483647, got 1099511627776"),
        ({"t": None, "budget_bytes": 10**30}, "budget_bytes: expected an integer from 1 to 92233"),
        ({"page_size": 64, "num_pages": 2**40}, "num_pages: expected an integer from 1 to 21474"),
        ({"t": 2**31 - 1, "k": 2**20}, "b, t: expected no more than fits into memory, got 9007"),
        ({"dtype": torch.float64}, "dtype: expected bfloat16, float16, float32 or one"),
        ({"dtype": "fp8_ds_mla"}, "k: expected a multiple of 128"),
        ({"scale": 2.0}, "scale: expected none unless dtype is 'fp8', got 2.0"),
        ({"dtype": "fp8", "scale": 0.0}, "scale: expected a positive finite number"),
        ({"window": 64, "window_dtype": "fp4"}, "window_dtype: expected 'fp8' or None, got 'fp4'"),
        ({"window_dtype": "fp8"}, "window: expected a positive multiple of 64 with window_dtype"),
        (
            {"window": 100, "window_dtype": "fp8"},
            "window: expected a positive multiple of 64 .* 100",
        ),
    ],
)
def test_wrong_sizes(options, message):
    arguments = {"b": 2, "t": 130, "k": K, "p": P, "heads": H, "head_dim": D, **options}
    with pytest.raises(InvalidArgumentError, match=message):
        LatentCache.allocate(**arguments)


def test_the_name_of_a_torch_dtype_is_no_format():
    message = "unknown cache format 'bfloat16'.* takes a torch dtype, such as torch.bfloat16"
    with pytest.raises(UnknownNameError, match=message):
        LatentCache.allocate(2, 130, dtype="bfloat16")


def test_a_refusal_can_be_handled_and_forgotten():
    cache = make_cache(3, 8)
    cache.append(*rows(6, 6, 6))
    cache.append(*rows(3, 3, 3), [3, 0, 3])
    assert cache.read_refused(reset=False) == [3, 0, 3]
    cache.evict([0])  # a new request starts without the refusals of the old one
    with pytest.raises(UnsupportedError, match=r"by request: {2: 3}"):
        cache.check()
    assert cache.read_refused() == [0, 0, 3]
    cache.check()


def test_addresses_stay():
    cache = make_cache(2, page_size=64, window=5)
    weights = {"w_uk": torch.randn(H, D, K), "w_uv": torch.randn(H, K, D)}
    names = (
        "latent", "rope", "lengths", "block_table", "k_new", "v_new", "k_rope_new", "window_start",
    )  # fmt: skip
    before = [getattr(cache.view(), name).data_ptr() for name in names]
    cache.append(*rows(70, 70), **weights)
    cache.truncate([5, 6], **weights, most=6)
    cache.evict([0])
    assert [getattr(cache.view(), name).data_ptr() for name in names] == before


def saved(cache: LatentCache) -> LatentCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def pickled(cache: LatentCache) -> LatentCache:
    return pickle.loads(pickle.dumps(cache))  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("window_dtype", [None, "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, "fp8_per_token", "fp8"])
def test_a_copy_is_a_cache_of_its_own(dtype, window_dtype, copied, generator):
    """Its views show its own buffer, also after both have changed."""
    cache = LatentCache.allocate(
        2, 128, k=16, p=8, dtype=dtype, page_size=64, window=128, window_dtype=window_dtype,
        heads=H, head_dim=D,
    )  # fmt: skip
    weights = {"w_uk": torch.randn(H, D, 16), "w_uv": torch.randn(H, 16, D)}
    weights = {name: weight.bfloat16() for name, weight in weights.items()}

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(2, count, width).bfloat16() for width in (16, 8))  # type: ignore[return-value]

    cache.append(*some(70), **weights)
    other = copied(cache)
    more = some(5)
    for one in (cache, other):
        one.append(*more, **weights)
        one.truncate([1, 2])
    assert other.view().ring_whole is cache.view().ring_whole is (window_dtype is None)
    before = [part.float().clone() for part in cache.view().tile(0, 128)]
    for found, expected in zip(other.view().tile(0, 128), before, strict=True):
        assert torch.equal(found.float(), expected)
    ring, held = other.window, cache.window
    assert ring is not None and held is not None
    assert torch.equal(ring.k_new.float(), held.k_new.float())
    other.append(*some(1), **weights)
    assert other.lengths.tolist() == [75, 74] and cache.lengths.tolist() == [74, 73]
    assert torch.equal(cache.view().tile(0, 128)[0].float(), before[0])


def ring(cache: LatentCache) -> list[dict[int, float]]:
    """Position -> mark of the key, for every position that the ring claims to hold."""
    assert cache.window is not None
    n, found = cache.window.n, []
    bounds = zip(cache.window.start.tolist(), cache.lengths.tolist(), strict=True)
    for request, (start, length) in enumerate(bounds):
        slots = torch.arange(start, length) % n
        marks = cache.window.k_new[request, 0, slots, 0]
        assert torch.equal(cache.window.k_rope_new[request, slots, 0], marks + 0.5)
        found.append(dict(zip(range(start, length), marks.tolist(), strict=True)))
    return found


def marked(*counts: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Keys and values with the same marks as `rows`."""
    latent, _ = rows(*counts, first=first)
    mark = latent[..., :1, None].expand(-1, -1, H, D)
    return {"k_new": mark, "v_new": -mark}


def test_the_ring_holds_the_newest_and_survives_dropping():
    cache = make_cache(2, window=4)
    cache.append(*rows(6, 6), [6, 2], **marked(6, 6))
    assert ring(cache) == [{2: 2, 3: 3, 4: 4, 5: 5}, {0: 1000, 1: 1001}]
    cache.truncate([3, 1])  # 3, 4 and 5 overwrote 0 and 1: only 2 is left of the newest four
    assert ring(cache) == [{2: 2}, {0: 1000}]
    cache.append(*rows(2, 2, first=70), [2, 0], **marked(2, 2, first=70))
    assert ring(cache) == [{2: 2, 3: 70, 4: 71}, {0: 1000}]
    cache.truncate([9, 0])
    assert ring(cache) == [{}, {0: 1000}]
    cache.append(*rows(1, 1, first=90), [1, 1], **marked(1, 1, first=90))
    assert ring(cache) == [{0: 90}, {0: 1000, 1: 1090}]


@pytest.mark.parametrize("most", [None, 1, 2, 9])
def test_refill_brings_tokens_back(most, generator):
    model = make_model(generator, H, D, K)
    cache, tokens = filled_cache(generator, [40, 2], model, p=P, window=8)
    assert cache.window is not None
    cache.truncate([3, 1], w_uk=model.w_uk, w_uv=model.w_uv, most=most)
    missing = 0 if most is None else max(0, 3 - most)
    assert cache.window.start.tolist() == [29 + missing, 0]
    for request, length in enumerate((37, 1)):
        for x in range(int(cache.window.start[request]), length):
            keys = torch.einsum("k,hdk->hd", tokens[request][x, :K], model.w_uk)
            torch.testing.assert_close(cache.window.k_new[request, :, x % 8], keys)
            assert torch.equal(cache.window.k_rope_new[request, x % 8], tokens[request][x, K:])


def test_a_cache_without_a_window_takes_weights_of_any_width():
    """So that a rollback is one call, whether the cache has a window or not."""
    cache = LatentCache.allocate(2, 8, k=K, p=P, dtype=torch.float32)
    cache.append(*rows(5, 5))
    cache.truncate([3, 1], w_uk=torch.randn(H, D, K), w_uv=torch.randn(H, K, D + 1))
    assert held(cache) == [[0, 1], [1000, 1001, 1002, 1003]]


def test_a_prefix_is_shared_and_stays(generator):
    for page_size in (None, 64):
        cache = make_cache(2, 200, page_size=page_size, prefix=64, window=4)
        latent, rope = rows(64)
        weights = {"w_uk": torch.randn(H, D, K), "w_uv": torch.randn(H, K, D)}
        with pytest.raises(InvalidArgumentError, match=r"latent: expected \[prefix=64, k=3\], got"):
            cache.set_prefix(latent[0, 1:], rope[0, 1:], **weights)
        with pytest.raises(InvalidArgumentError, match=r"w_uv: expected \[h=2, k=3, v=4\], got"):
            cache.set_prefix(latent[0], rope[0], W_UK, W_UK)
        with pytest.raises(InvalidArgumentError, match="prefix: expected set_prefix before"):
            cache.append(*rows(1, 1), **weights)
        cache.evict([0])
        cache.truncate([0, 1])
        cache.fork(0, into=[1])
        assert cache.lengths.tolist() == [0, 0]  # there is no prefix yet that could stay
        cache.set_prefix(latent[0], rope[0], **weights)
        cache.append(*rows(70, 70), [70, 0], **weights)
        assert held(cache) == [[*range(64), *range(70)], list(range(64))]
        cache.truncate([500, 500])
        assert held(cache) == [list(range(64))] * 2
        cache.append(*rows(1, 1), **weights)
        cache.evict([0, 1])
        assert held(cache) == [list(range(64))] * 2
        assert cache.prefix is not None
        expected = torch.einsum("mk,hdk->hmd", latent[0], weights["w_uk"])
        torch.testing.assert_close(cache.prefix.k_prefix, expected)
        assert torch.equal(cache.prefix.k_rope_prefix, rope[0])
        assert torch.equal(replace(cache.view(), k_rope_prefix=None).prefix_rope(), rope[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.append(*rows(2)), r"latent: expected \[b=2, m, k=3\], got \[1, 2, 3\]"),
        (lambda c: c.append(rows(2, 2)[0], rows(3, 3)[1]), r"rope: expected .* got \[2, 3, 2\]"),
        (lambda c: c.append(*rows(2, 2), [1]), r"counts: expected \[b=2\], got \[1\]"),
        (lambda c: c.append(*rows(5, 5), [6, -1]), r"counts\[0\]: expected .* 0 to 5, got 6"),
        (lambda c: c.append(*rows(5, 5), torch.tensor([5, -1])), r"counts\[1\]: .*, got -1"),
        (
            lambda c: c.append(rows(2)[0][0], rows(2)[1][0], cu_seqlens=torch.tensor([0, 2, 1])),
            r"cu_seqlens: expected ascending bounds from 0 to at most 2 rows, got \[0, 2, 1\]",
        ),
        (
            lambda c: c.append(*rows(2, 2), cu_seqlens=torch.tensor([0, 1, 2]), counts=[1, 1]),
            "counts: expected none beside cu_seqlens",
        ),
        (lambda c: c.append(*rows(2, 2)), "k_new: .* or w_uk and w_uv, .* got none of them"),
        (lambda c: c.append(*rows(2, 2), w_uk=W_UK), "k_new: .* or w_uk and w_uv, .* got w_uk"),
        (lambda c: c.append(*rows(2, 2), **marked(3, 3)), r"k_new: .* got \[2, 3, 2, 4\]"),
        (lambda c: c.append(*rows(2, 2), w_uk=W_UK, w_uv=W_UK), r"w_uv: .* got \[2, 4, 3\]"),
        (lambda c: c.truncate([1, 2], w_uk=W_UK), "w_uk: .* or neither, got one of them"),
        (lambda c: c.truncate([1, 2], w_uk=W_UK[0], w_uv=W_UV), r"w_uk: .* got \[4, 3\]"),
        (lambda c: c.truncate([1, 2], w_uk=W_UK, w_uv=W_UV, most=-1), "most: .* >= 0, got -1"),
        (lambda c: c.refill(W_UK, W_UV, 1.5), "most: expected an integer >= 0, got 1.5"),
        (lambda c: c.evict([2]), r"requests\[0\]: expected a number from 0 to b-1=1, got 2"),
        (lambda c: c.evict(torch.tensor([0, -1])), r"requests\[1\]: expected .* b-1=1, got -1"),
        (lambda c: c.truncate([0, -1]), r"counts\[1\]: expected a number from 0 to .*, got -1"),
        (lambda c: c.evict(torch.ones(3, dtype=torch.bool)), r"requests: expected \[b=2\], got"),
        (lambda c: c.set_prefix(*rows(2), W_UK, W_UV), "prefix: expected .* prefix > 0, got 0"),
    ],
)
def test_wrong_changes(change, message):
    cache = make_cache(2, window=4)
    cache.append(*rows(3, 3), **marked(3, 3))
    before = held(cache), ring(cache)
    with pytest.raises(InvalidArgumentError, match=message):
        change(cache)
    assert (held(cache), ring(cache)) == before
    assert before[0] == [[0, 1, 2], [1000, 1001, 1002]]
