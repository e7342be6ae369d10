"""Attention over shared prefixes, on the CPU with the passes in PyTorch, against float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.backends import registry
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.call import execute
from mla_var3.attention.prefix import layout as layouts
from mla_var3.attention.prefix.attend import PrefixBackend, layout_of, own_pass, shared_pass
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import prefix_layout
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from tests.unit.attention.attention_support import (
    filled_cache,
    make_model,
    normal,
    random_parents,
    registered,
    require_oracle,
)

from .prefix_support import PAGE, Batch, make_batch

H, K, P = 2, 8, 4
KERNEL = "torch_tiled_prefix"
A, B, C = (0, 128), (1, 192), (2, 64)

# Requests in two groups and in none, mixed; one too short for its prefix, one without tokens.
LENGTHS = [300, 150, 210, 128, 250, 0, 193]
PREFIXES: list[list[tuple[int, int]]] = [[A], [], [B], [A], [A], [], [B]]
GROUPS = PrefixGroups(
    torch.tensor([[0, -1, 1, 0, 0, 7, 1]], dtype=torch.int32),
    torch.tensor([[128, 192, 0]], dtype=torch.int32),
)


@pytest.fixture(autouse=True)
def passes_in_torch() -> Iterator[None]:
    with registered(PrefixBackend(TorchTiled())):
        yield


def queries(generator: torch.Generator, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
    q, q_rope = (normal(generator, *leading, H, w, dtype=torch.float32) for w in (K, P))
    return q, q_rope


def attended(batch: Batch, q: Any, groups: Any = GROUPS, **options: Any) -> Any:
    return mla_var3.mla_latent_attention(*q, batch.cache, prefix=groups, kernel=KERNEL, **options)


def shared_tokens(batch: Batch, q: torch.Tensor, groups: PrefixGroups = GROUPS) -> list[int]:
    """Tokens of each request that the prefix passes read."""
    layout = prefix_layout(groups, q, batch.cache)
    return (batch.cache.lengths - layout.lengths).tolist()


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("s", [1, 3])
def test_groups_change_no_result(paged, causal, s, generator):
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=paged)
    q = queries(generator, len(LENGTHS), s)
    batch.require(*q, *attended(batch, q, causal=causal), causal=causal)
    short = 0 if s > 1 else 192  # 193 tokens: two of three queries would see beyond the prefix
    assert shared_tokens(batch, q[0]) == [128, 0, 192, 0, 128, 0, short]


@pytest.mark.parametrize("paged", [True, False])
def test_two_levels(paged, generator):
    lengths = [400, 330, 260, 300, 100]
    prefixes = [[A, B], [A, B], [A, C], [A, C], []]
    batch = make_batch(generator, lengths, prefixes, paged=paged)
    groups = PrefixGroups(
        torch.tensor([[0, 0, 0, 0, -1], [0, 0, 1, 1, -1]]),
        torch.tensor([[128, 0], [192, 64]]),
        ordered=True,
        most=4,
    )
    q = queries(generator, 5, 2)
    batch.require(*q, *attended(batch, q, groups))
    assert shared_tokens(batch, q[0], groups) == [320, 320, 192, 192, 0]
    layout = prefix_layout(groups, q[0], batch.cache)
    assert [part.order for part in layout.parts] == [None, None]


def test_a_level_that_starts_elsewhere_is_not_shared(generator):
    """The third request is in no group of level 0, so its level 1 would start at 0."""
    batch = make_batch(generator, [400, 350, 370], [[A, B]] * 3, paged=True)
    groups = PrefixGroups(torch.tensor([[0, 0, -1], [0, 0, 0]]), torch.tensor([[128], [192]]))
    q = queries(generator, 3, 2)
    batch.require(*q, *attended(batch, q, groups))
    assert shared_tokens(batch, q[0], groups) == [320, 320, 0]


@pytest.mark.parametrize("options", ["tree", "packed"])
def test_trees_and_packed_queries(options, generator):
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    b, s = len(LENGTHS), 4
    if options == "tree":
        q, parents = queries(generator, b, s), random_parents(generator, b, s)
        trees = mla_var3.attention.tree_ancestors(parents)
        batch.require(*q, *attended(batch, q, tree_mask=parents), trees=trees)
        return
    counts = [2, 0, 1, 3, 4, 0, 1]
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    q = queries(generator, sum(counts) + 2)  # two rows of no request
    found = attended(batch, q, cu_seqlens_q=bounds, max_q=4)
    batch.require(*q, *found, counts=counts)
    assert not found[0][-2:].any() and bool((found[1][-2:] == -torch.inf).all())


@pytest.mark.parametrize("rows", [1, 6, 4096])
def test_large_groups_are_split(rows, monkeypatch, generator):
    monkeypatch.setattr(layouts, "CHUNK_ROWS", rows)
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 2)
    batch.require(*q, *attended(batch, q))
    (part,) = prefix_layout(GROUPS, q[0], batch.cache).parts
    counts = (part.bounds[1:] - part.bounds[:-1]).tolist()
    assert sum(counts) == 10 and max(counts) <= part.most == min(14, max(1, -(-rows // H)))
    used = [length for length, count in zip(part.lengths.tolist(), counts, strict=True) if count]
    assert set(used) == {128, 192}


@pytest.mark.parametrize("grouped", [True, False])
def test_rows_that_take_no_part_are_never_used(grouped, generator):
    """A kernel leaves rows of no group unwritten: whatever they hold has to stay out."""
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 3)

    class Poisoned(TorchTiled):
        def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
            output, lse = super().run(task)
            if task.cu_seqlens_q is not None:
                output[int(task.cu_seqlens_q[-1]) :] = torch.nan
                lse[int(task.cu_seqlens_q[-1]) :] = torch.nan
            return output, lse

    registry.register(PrefixBackend(Poisoned()))
    groups = GROUPS if grouped else replace(GROUPS, prefix_of=GROUPS.prefix_of.clamp(max=-1))
    batch.require(*q, *attended(batch, q, groups))


@pytest.mark.parametrize("prefix_of", [[[0, 0, 0, 0, 0, 0, 0]], [[5, -9, 3, 2**31 - 1, 0, 0, -1]]])
def test_wrong_groups_on_a_device_share_less(prefix_of, monkeypatch, generator):
    """Nothing is read on a device; lengths and groups that cannot be are left out there."""
    monkeypatch.setattr(layouts, "readable", lambda tensor: False)
    batch = make_batch(generator, LENGTHS, [[A]] * 7, paged=True)
    for tokens in (128, 10**6, -5):
        groups = PrefixGroups(torch.tensor(prefix_of), torch.tensor([[tokens]]))
        q = queries(generator, 7, 1)
        batch.require(*q, *attended(batch, q, groups))


def test_the_host_checks_what_it_can_read(generator):
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 1)
    of = GROUPS.prefix_of.clone()
    of[0, 1] = 0
    layout = prefix_layout(GROUPS, q[0], batch.cache)
    uncausal = prefix_layout(GROUPS, q[0], batch.cache, causal=False)
    for groups, message in (
        (replace(GROUPS, prefix_of=of), r"prefix_of\[0, 1\]: expected a group that shares"),
        (replace(GROUPS, ordered=True), "prefix_of: expected ascending groups"),
        (replace(GROUPS, prefix_of=of[:, :6]), r"prefix_of: expected \[levels, b=7\], got"),
        ([0, 0], "prefix: expected PrefixGroups, PrefixLayout"),
        (uncausal, "a layout of 7 queries with causal=True, got"),
        (replace(layout, page=128), "a layout of pages of 64 tokens, got 128"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            attended(batch, q, groups)
    with pytest.raises(InvalidArgumentError, match="lengths: expected none beside a PrefixLayout"):
        attended(batch, q, layout, lengths=batch.cache.lengths.clone())
    for changed, message in (
        ({"tokens": -1}, "tokens: expected"),
        ({"own": 2.0}, "own: expected"),
        ({"most": 0}, "most: expected"),
        ({"ordered": 1}, "ordered: expected"),
        ({"prefix_of": of.expand(3, -1)}, "prefix_of: expected at most 2 levels, got 3"),
        ({"prefix_length": of[:, :0]}, "prefix_length: expected at least one group"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            replace(GROUPS, **changed)
    for operand, options, message in (
        (None, {}, r"q: expected a tensor \[b=7, s, h, ...\], got NoneType"),
        (q[0][:6], {}, r"q: expected \[b=7, s, h, ...\], got \[6, 1, "),
        (q[0][0, 0], {}, r"q: expected \[b=7, s, h, ...\], got \["),
        (q[0], {"causal": 1}, "causal: expected True or False, got 1"),
        (q[0][:, 0], {"cu_seqlens_q": [0]}, r"cu_seqlens_q: expected a tensor \[b\+1=8\], got li"),
        (q[0][:, 0], {"cu_seqlens_q": torch.arange(2, 10)}, "cu_seqlens_q: expected ascending bou"),
        (q[0][0, 0, 0], {"cu_seqlens_q": of[0]}, r"q: expected \[total_q, h, ...\], got \["),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            prefix_layout(GROUPS, operand, batch.cache, **options)
    none = replace(GROUPS, prefix_of=of[:, :0])
    with pytest.raises(InvalidArgumentError, match="cache: expected at least one request, got n"):
        prefix_layout(none, q[0][:0], batch.cache.span(0, 0))
    dense = make_batch(generator, LENGTHS, PREFIXES, paged=False)
    odd = replace(dense.cache, latent=dense.cache.latent[:, :310], rope=dense.cache.rope[:, :310])
    with pytest.raises(InvalidArgumentError, match="prefix: expected a paged cache, or a contig"):
        mla_var3.mla_latent_attention(*q, odd, prefix=GROUPS)
    with pytest.raises(UnsupportedError, match="requests that share no first tokens"):
        mla_var3.mla_latent_attention(*q, dense.cache, kernel=KERNEL)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"sliding_window": 5}, "a sliding window"),
        ({"batch_invariant": True}, "a result that does not depend on the batch"),
        ({"total_lengths": LENGTHS}, "a cache that holds a part of each request"),
    ],
)
def test_what_the_passes_do_not_do(options, refusal, generator):
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    with pytest.raises(UnsupportedError, match=f"it does not support {refusal}"):
        attended(batch, queries(generator, len(LENGTHS), 1), **options)


def test_other_kernels_may_ignore_groups(generator):
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 2)
    batch.require(*q, *mla_var3.mla_latent_attention(*q, batch.cache, prefix=GROUPS))
    nothing = PrefixGroups(torch.empty(0, 7, dtype=torch.int32), torch.empty(0, 1).int())
    with pytest.raises(UnsupportedError, match="requests that share no first tokens"):
        attended(batch, q, nothing)


@pytest.mark.parametrize("page_size", [None, PAGE])
def test_whole_calls_and_the_prefix_of_a_cache(page_size, generator):
    """Projected, into a given output, with the prefix that `set_prefix` wrote."""
    model = make_model(generator, H, 6, K)
    lengths = [200, 130, 128]
    cache, tokens = filled_cache(
        generator, lengths, model, t=256, page_size=page_size, prefix=128, steps=1
    )
    q = [normal(generator, 3, 2, H, w, dtype=torch.float32) for w in (6, P)]
    out = torch.empty_like(q[0])
    output, lse = mla_var3.mla_attention(
        *q, cache, model.w_uk, model.w_uv, kernel=KERNEL, out=out, return_lse=True
    )
    assert output is out
    require_oracle(output, lse, q, tokens, model)


def test_forked_requests_are_found_and_shared(generator):
    cache = LatentCache.allocate(4, 512, k=K, p=P, dtype=torch.float32, page_size=PAGE)
    cache.buffer.fill_(torch.nan)
    first = normal(generator, 4, 300, K + P, dtype=torch.float32)
    cache.append(first[..., :K], first[..., K:], [300, 0, 0, 7])
    cache.fork(0, into=[1, 2])
    new = normal(generator, 4, 5, K + P, dtype=torch.float32)
    cache.append(new[..., :K], new[..., K:])
    groups = mla_var3.find_shared_prefixes(cache.block_table, cache.lengths)
    assert groups.prefix_of.tolist() == [[0, 0, 0, -1]]
    assert groups.prefix_length.tolist() == [[256]] and groups.ordered
    tokens = [torch.cat([first[0], new[r]]) for r in range(3)] + [torch.cat([first[3, :7], new[3]])]
    batch, q = Batch(cache.view(), tokens), queries(generator, 4, 2)
    batch.require(*q, *attended(batch, q, groups))


def test_a_traced_program_takes_no_groups(generator, monkeypatch):
    """Its operators have no argument for them."""
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 1)
    monkeypatch.setattr("mla_var3.attention.call._is_compiling", lambda: True)
    task = AttentionTask(*q, batch.cache, None, None, True, 0.1, prefix=GROUPS)
    with pytest.raises(UnsupportedError, match="prefix: expected none in a traced program"):
        execute(task, "auto")


def test_what_the_passes_read(generator):
    """The shared pages once per group, and nothing of them again."""
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    q = queries(generator, len(LENGTHS), 1)
    task = AttentionTask(*q, batch.cache, None, None, True, 0.1, prefix=GROUPS)
    layout = layout_of(task)
    shared = shared_pass(task, layout, layout.parts[0])
    assert shared.cache.lengths.tolist()[:2] == [128, 192] and not shared.causal
    read = set(shared.cache.block_table[0, :2].tolist())
    assert read == set(batch.cache.block_table[0, :2].tolist())
    own = own_pass(task, layout).cache
    for request, length in enumerate(own.lengths.tolist()):
        pages = set(own.block_table[request, : -(-length // PAGE)].tolist())
        assert request == 3 or not read & pages
