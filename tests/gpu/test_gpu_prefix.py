"""Shared prefixes on a Hopper GPU: the latent kernel's passes and their merge, against float64.

Every output is poisoned before a call; slots and pages that hold no token are NaN.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import decompress_prefixes
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix import attend as attends
from mla_var3.attention.prefix import layout as layouts
from mla_var3.attention.prefix.find import find_shared_prefixes
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import prefix_layout

from ..unit.attention.attention_support import (
    Model,
    assert_close,
    make_model,
    normal,
    oracle,
    random_parents,
)
from ..unit.attention.prefix.prefix_support import PAGE, Batch, make_batch
from .gpu_support import captured
from .test_gpu_repeated_calls import same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

K, P, D = 512, 64, 128
KERNEL = "flash_mla_prefix:cute-dsl"


def batch_of(
    generator: torch.Generator, lengths: list[int], prefixes: list[Any], **options: Any
) -> Batch:
    return make_batch(
        generator, lengths, prefixes, k=K, p=P, dtype=torch.bfloat16, device="cuda", **options
    )


def queries(generator: torch.Generator, *leading: int) -> list[torch.Tensor]:
    return [normal(generator, *leading, w, dtype=torch.bfloat16).cuda() for w in (K, P)]


def attended(
    batch: Batch, q: list[torch.Tensor], groups: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The call with memory that was NaN before."""
    torch.full((2 * q[0].numel(),), torch.nan, dtype=q[0].dtype, device="cuda")  # freed again
    options = {"kernel": KERNEL, **options}
    return mla_var3.mla_latent_attention(*q, batch.cache, prefix=groups, **options)


def random_case(
    seed: int, b: int, levels: int, generator: torch.Generator, paged: bool, s: int
) -> tuple[Batch, PrefixGroups]:
    """Requests in random groups, some in none, some too short for their prefix."""
    chance = random.Random(seed)
    count = max(1, b // 5)
    tokens = [[PAGE * chance.randrange(1, 5) for _ in range(count)] for _ in range(levels)]
    first = [chance.randrange(-1, count) for _ in range(b)]
    # A group of level 1 lies inside of one group of level 0.
    inside = {group: chance.randrange(-1, count) for group in range(-1, count)}
    home = {below: group for group, below in inside.items()}
    second = [
        inside[g] if home.get(inside[g]) == g and chance.random() < 0.8 else -1 for g in first
    ]
    prefixes: list[list[tuple[int, int]]] = []
    for one, two in zip(first, second, strict=True):
        path = [(one, tokens[0][one])] if one >= 0 else []
        if levels > 1 and two >= 0:
            path.append((100 + two, tokens[1][two]))
        prefixes.append(path)
    lengths = [sum(n for _, n in path) + chance.choice((0, s, s + 1, 70, 300)) for path in prefixes]
    of = torch.tensor([first, second][:levels], dtype=torch.int32, device="cuda")
    groups = PrefixGroups(of, torch.tensor(tokens, dtype=torch.int32, device="cuda"))
    return batch_of(generator, lengths, prefixes, paged=paged), groups


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("b", "s", "h"), [(1, 1, 128), (7, 4, 16), (24, 1, 12), (64, 2, 8)])
@pytest.mark.parametrize("levels", [1, 2])
def test_groups_change_no_result(
    paged: bool, b: int, s: int, h: int, levels: int, generator: torch.Generator
) -> None:
    batch, groups = random_case(b + levels, b, levels, generator, paged, s)
    q = queries(generator, b, s, h)
    for causal in (True, False):
        batch.require(*q, *attended(batch, q, groups, causal=causal), causal=causal)


@pytest.mark.parametrize("h", [16, 128])
def test_trees_and_packed_queries(h: int, generator: torch.Generator) -> None:
    b, s = 9, 5
    batch, groups = random_case(3, b, 2, generator, True, s)
    q, parents = queries(generator, b, s, h), random_parents(generator, b, s)
    found = attended(batch, q, groups, tree_mask=parents.cuda())
    batch.require(*q, *found, trees=mla_var3.attention.tree_ancestors(parents))
    counts = [r % 4 for r in range(b)]
    bounds = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    q = queries(generator, sum(counts), h)
    found = attended(batch, q, groups, cu_seqlens_q=bounds, max_q=3)
    batch.require(*q, *found, counts=counts)


@pytest.mark.parametrize("ordered", [False, True])
def test_one_prefix_of_many_rows(ordered: bool, generator: torch.Generator) -> None:
    """Chunks of one group, on more tiles than a launch has CTAs; against the whole call."""
    b, s, h, prefix = 64, 1, 128, 1024
    batch = batch_of(generator, [prefix + 1 + 7 * r for r in range(b)], [[(0, prefix)]] * b,
                     paged=True)  # fmt: skip
    groups = PrefixGroups(
        torch.zeros((1, b), dtype=torch.int32, device="cuda"),
        torch.tensor([[prefix]], dtype=torch.int32, device="cuda"),
        ordered=ordered, most=b, tokens=prefix,
    )  # fmt: skip
    q = queries(generator, b, s, h)
    found = attended(batch, q, groups)
    wanted = mla_var3.mla_latent_attention(*q, batch.cache, kernel="flash_mla:cute-dsl")
    same(found, wanted)
    again = attended(batch, q, prefix_layout(groups, q[0], batch.cache))
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])


def test_the_merge_equals_that_of_torch(generator: torch.Generator) -> None:
    """Against float64, with rows of no place and of no key poisoned."""
    from mla_var3.kernel.cute_python.mla.prefix import call

    tokens, h = 37, 5
    o, *parts = (torch.randn((tokens, h, K), generator=generator).bfloat16() for _ in range(3))
    lse, *lses = (5 * torch.randn((tokens, h), generator=generator) for _ in range(3))
    places = [torch.randperm(tokens, generator=generator).int() for _ in parts]
    places[0][::3] = -1
    lse[4], o[4] = -torch.inf, 0.0
    for part, part_lse, place in zip(parts, lses, places, strict=True):
        unused = torch.ones(tokens, dtype=torch.bool)
        unused[place[place >= 0].long()] = False
        part[unused], part_lse[unused] = torch.nan, torch.nan
        part_lse[place[4]], part[place[4]] = -torch.inf, 0.0
    for levels in (1, 2):
        total, weighted = lse.double().exp(), o.double() * lse.double().exp()[..., None]
        for part, part_lse, place in list(zip(parts, lses, places, strict=True))[:levels]:
            taken = place >= 0
            weight = part_lse[place[taken].long()].double().exp()
            total[taken] += weight
            weighted[taken] += part[place[taken].long()].double() * weight[..., None]
        expected = weighted / torch.where(total == 0, 1.0, total)[..., None]
        given = [
            (part.cuda(), part_lse.cuda(), place.cuda())
            for part, part_lse, place in zip(parts, lses, places, strict=True)
        ][:levels]
        found = o.clone().cuda(), lse.clone().cuda()
        call.merge(*found, given)
        assert_close(found[0].cpu(), expected, found[1].cpu(), total.log())


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("b", "levels"), [(1, 1), (7, 2), (64, 2), (1500, 1)])
def test_the_layout_equals_that_of_torch(
    b: int, levels: int, paged: bool, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    batch, groups = random_case(b, b, levels, generator, paged, 2)
    q = torch.empty((b, 2, 16, K), dtype=torch.bfloat16, device="cuda")
    found = prefix_layout(groups, q, batch.cache)
    monkeypatch.setattr(layouts, "prefix_kernels", lambda device: None)
    wanted = prefix_layout(groups, q, batch.cache)
    for name, tensor in wanted.tensors.items():
        other = found.tensors[name]
        if name.startswith(("order", "table")):  # rows that no chunk uses are arbitrary
            level = int(name[-1])
            part = wanted.parts[level]
            used = int(part.bounds[-1]) if name.startswith("order") else part.lengths > 0
            rows = slice(used) if name.startswith("order") else used
            tensor, other = tensor[rows], other[rows]
        assert torch.equal(tensor, other), name


def small_launches(step: Any) -> list[str]:
    """Kernels of a step on the GPU, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [event.key for event in on_gpu for _ in range(event.count)]


def test_a_layout_takes_two_launches(generator: torch.Generator) -> None:
    batch, groups = random_case(5, 64, 2, generator, True, 1)
    q = torch.empty((64, 1, 16, K), dtype=torch.bfloat16, device="cuda")
    prefix_layout(groups, q, batch.cache)
    names = small_launches(lambda: prefix_layout(groups, q, batch.cache))
    assert len(names) == 2, names


@pytest.mark.parametrize("laid_out", [False, True])
def test_replays(laid_out: bool, generator: torch.Generator) -> None:
    """Repeated calls on other tensors, queries, groups and lengths of the same shapes."""
    b, s, h = 24, 2, 16
    for seed in range(3):
        batch, groups = random_case(seed, b, 2, generator, True, s)
        view = batch.cache
        assert view.block_table is not None
        table = torch.zeros((b, 16), dtype=torch.int32, device="cuda")
        table[:, : view.block_table.shape[1]] = view.block_table
        pages = torch.full((600, PAGE, K + P), torch.nan, dtype=torch.bfloat16, device="cuda")
        pages[: len(view.latent), :, :K], pages[: len(view.latent), :, K:] = view.latent, view.rope
        same = CacheView(pages[..., :K], pages[..., K:], view.lengths, table)
        q = queries(generator, b, s, h)
        prefix = prefix_layout(groups, q[0], same) if laid_out else groups
        for _ in range(2):
            found = attended(Batch(same, batch.tokens), q, prefix)
            batch.require(*q, *found)


@pytest.mark.parametrize("page_size", [None, PAGE])
def test_whole_calls_and_the_prefix_of_a_cache(
    page_size: int | None, generator: torch.Generator
) -> None:
    b, s, h, prefix = 6, 3, 16, 256
    model = make_model(generator, h, D, K, torch.bfloat16)
    weights = {"w_uk": model.w_uk.cuda(), "w_uv": model.w_uv.cuda()}
    cache = LatentCache.allocate(
        b, 512, device="cuda", page_size=page_size, prefix=prefix, heads=h, head_dim=D
    )
    cache.buffer.fill_(torch.nan)
    shared = normal(generator, prefix, K + P, dtype=torch.bfloat16)
    cache.set_prefix(shared[:, :K].cuda(), shared[:, K:].cuda(), **weights)
    own = normal(generator, b, 200, K + P, dtype=torch.bfloat16)
    counts = [200, 3, 0, 64, 2, 100]
    cache.append(own[..., :K].cuda(), own[..., K:].cuda(), counts)
    q = [normal(generator, b, s, h, w, dtype=torch.bfloat16) for w in (D, P)]
    for kernel in (KERNEL, "mla_var6_plus_v6", "auto"):
        out = torch.full((b, s, h, D), torch.nan, dtype=torch.bfloat16, device="cuda")
        found = mla_var3.mla_attention(
            *(x.cuda() for x in q), cache, **weights, kernel=kernel, out=out, return_lse=True
        )
        for request, count in enumerate(counts):
            rows = torch.cat([shared, own[request, :count]])
            expected = oracle(
                q[0][request], q[1][request], rows[:, :K], rows[:, K:],
                Model(model.w_uk, model.w_uv),
            )  # fmt: skip
            assert_close(out[request].cpu(), expected[0], found[1][request].cpu(), expected[1])


@pytest.mark.parametrize("laid_out", [False, True])
def test_a_captured_graph_with_changing_groups(laid_out: bool, generator: torch.Generator) -> None:
    """Groups, lengths and block tables of other batches, in one graph with a bound on groups."""
    b, s, h, levels, pages = 10, 2, 16, 2, 16
    cases = [random_case(seed, b, levels, generator, True, s) for seed in range(4)]
    nothing = batch_of(generator, [100 + r for r in range(b)], [[]] * b, paged=True)
    none = PrefixGroups(
        torch.full((levels, b), -1, dtype=torch.int32, device="cuda"),
        torch.zeros((levels, 2), dtype=torch.int32, device="cuda"),
    )
    cases.append((nothing, none))
    most = max(case.cache.latent.shape[0] for case, _ in cases)
    pool = torch.full((most, PAGE, K + P), torch.nan, dtype=torch.bfloat16, device="cuda")
    view = CacheView(
        pool[..., :K], pool[..., K:], torch.zeros(b, dtype=torch.int32, device="cuda"),
        torch.zeros((b, pages), dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    held = PrefixGroups(none.prefix_of.clone(), none.prefix_length.clone())
    q = queries(generator, b, s, h)
    out = torch.empty_like(q[0])
    lse = torch.empty(b, s, h, device="cuda")

    def step() -> None:
        prefix = prefix_layout(held, q[0], view) if laid_out else held
        found = mla_var3.mla_latent_attention(*q, view, prefix=prefix, kernel=KERNEL, out=out)
        lse.copy_(found[1])

    graph = captured(step)
    for case, groups in (*cases, cases[0]):
        assert case.cache.block_table is not None and view.block_table is not None
        pool.fill_(torch.nan)
        used = case.cache.latent.shape[0]
        pool[:used, :, :K].copy_(case.cache.latent)
        pool[:used, :, K:].copy_(case.cache.rope)
        view.lengths.copy_(case.cache.lengths)
        view.block_table[:, : case.cache.block_table.shape[1]].copy_(case.cache.block_table)
        held.prefix_of.copy_(groups.prefix_of)
        held.prefix_length.copy_(groups.prefix_length)
        for tensor in (*q, out, lse):
            tensor.fill_(torch.nan)
        for tensor in q:
            tensor.copy_(normal(generator, *tensor.shape, dtype=torch.bfloat16))
        graph.replay()
        case.require(*q, out, lse)


def test_forks_in_a_captured_graph(generator: torch.Generator) -> None:
    """Fork, append and attend: pages of siblings are copied inside of the graph."""
    b, h = 4, 16
    cache = LatentCache.allocate(b, 512, device="cuda", page_size=PAGE)
    cache.buffer.fill_(torch.nan)
    cache.fork(0, into=[])
    first = normal(generator, b, 200, K + P, dtype=torch.bfloat16)
    new = torch.zeros((b, 1, K + P), dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        cache.append(new[..., :K], new[..., K:])

    graph = captured(step)
    cache.evict(list(range(b)))
    cache.append(first[..., :K].cuda(), first[..., K:].cuda(), [200, 0, 0, 0])
    cache.fork(0, into=[1, 2, 3])
    tokens = [first[0]] * b
    for _ in range(3):
        added = normal(generator, b, 1, K + P, dtype=torch.bfloat16)
        new.copy_(added)
        graph.replay()
        tokens = [torch.cat([rows, added[r]]) for r, rows in enumerate(tokens)]
    assert cache.block_table is not None and cache.pages is not None
    groups = mla_var3.find_shared_prefixes(
        cache.block_table.cpu(), cache.lengths.cpu(), device="cuda"
    )
    assert groups.prefix_length.tolist() == [[192]]
    batch, q = Batch(cache.view(), tokens), queries(generator, b, 1, h)
    batch.require(*q, *attended(batch, q, groups))
    cache.evict(list(range(b)))
    assert int(cache.pages.free_count) == cache.pages.num_pages
    assert not cache.pages.owners.any()


def test_nothing_shared_is_the_plain_call(generator: torch.Generator) -> None:
    b = 64
    batch = batch_of(generator, [300 + r for r in range(b)], [[]] * b, paged=True)
    q = queries(generator, b, 1, 128)
    view = batch.cache
    assert view.block_table is not None
    groups = mla_var3.find_shared_prefixes(
        view.block_table.cpu(), view.lengths.cpu(), device="cuda"
    )
    assert groups.levels == 0
    plain = mla_var3.mla_latent_attention(*q, view)
    found = mla_var3.mla_latent_attention(*q, view, prefix=groups)
    assert torch.equal(found[0], plain[0]) and torch.equal(found[1], plain[1])


@pytest.mark.parametrize("paged", [True, False])
def test_decompressed_prefixes_of_several_groups(paged: bool, generator: torch.Generator) -> None:
    """Two groups and requests without one, each group by the kernel of one prefix."""
    h, s, lengths = 16, 2, [400, 330, 257, 500, 320, 90, 70]
    prefixes = [[(0, 256)]] * 3 + [[(1, 192)]] * 2 + [[], []]
    batch = batch_of(generator, lengths, prefixes, paged=paged)
    of = torch.tensor([[0, 0, 0, 1, 1, -1, -1]], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([[256, 192]], dtype=torch.int32, device="cuda")
    model = make_model(generator, h, D, K, torch.bfloat16)
    weights = model.w_uk.cuda(), model.w_uv.cuda()
    copies = decompress_prefixes(PrefixGroups(of, tokens), batch.cache, *weights)
    assert [copy.tokens for copy in copies.copies] == [256, 192]
    q = [normal(generator, len(lengths), s, h, w, dtype=torch.bfloat16) for w in (D, P)]
    for kernel in ("mla_var6_plus_v6_groups", KERNEL, "auto"):
        found = mla_var3.mla_attention(
            *(x.cuda() for x in q), batch.cache, *weights, prefix=copies, kernel=kernel,
            return_lse=True,
        )  # fmt: skip
        for request, rows in enumerate(batch.tokens):
            expected = oracle(q[0][request], q[1][request], rows[:, :K], rows[:, K:], model)
            assert_close(found[0][request].cpu(), expected[0], found[1][request].cpu(), expected[1])


@pytest.mark.parametrize(("b", "h", "prefix"), [(16, 12, 8192), (7, 16, 1024), (33, 8, 4096)])
def test_passes_at_the_same_time(
    b: int, h: int, prefix: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, the same in every launch, eager and in a graph with other lengths."""
    chosen: list[int] = []
    choose = attends.shared_sms
    monkeypatch.setattr(
        attends, "shared_sms", lambda *given: chosen.append(choose(*given)) or chosen[-1]
    )
    lengths = [prefix + 64 + 37 * r for r in range(b)]
    batch = batch_of(generator, lengths, [[(0, prefix)]] * b, paged=True)
    groups = find_shared_prefixes(batch.cache.block_table.cpu(), lengths, device="cuda")
    assert groups.own and groups.tokens == prefix
    q = queries(generator, b, 1, h)
    first = attended(batch, q, groups)
    assert min(chosen) > 0
    batch.require(*q, *first)
    for _ in range(300):
        again = attended(batch, q, groups)
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attended(batch, q, groups) for _ in range(3)]  # neighbours share memory
    for turn in range(20):
        for rows in q:
            rows.copy_(normal(generator, *rows.shape, dtype=rows.dtype))
        for one in found:
            for tensor in one:
                tensor.fill_(torch.nan)
        graph.replay()
        for one in found[1:]:
            assert all(torch.equal(a, z) for a, z in zip(found[0], one, strict=True))
        if turn % 10 == 0:
            batch.require(*q, *found[-1])
