"""The call that serving engines make: `mla_var3.integrations.paged`."""

from __future__ import annotations

import pytest
import torch

from mla_var3.attention import explain
from mla_var3.attention.merge import merge_partials
from mla_var3.errors import InvalidArgumentError
from mla_var3.integrations import paged

from .paged_support import Batch, H, K


@pytest.mark.parametrize(
    ("counts", "lengths"),
    [([1, 1, 1], [1, 64, 200]), ([4, 4], [4, 129]), ([3, 1, 7], [70, 1, 64])],
    ids=["decode", "verify", "ragged"],
)
def test_packed_queries(counts, lengths):
    batch = Batch(counts, lengths)
    output, lse = batch.attend(return_lse=True)
    batch.require(output, lse)
    assert lse.shape == output.shape[:2]
    if len(set(counts)) == 1:  # the same without offsets
        uniform, none = batch.attend(query_start_loc=None)
        assert none is None
        torch.testing.assert_close(uniform, output)


@pytest.mark.parametrize("step", [1, 2])
def test_block_tables_lie_in_any_order(step):
    """Such as a view of `[max_pages, b]`, or of every second entry."""
    batch = Batch([3, 1, 7], [70, 1, 130])
    batch.table = batch.table.t().repeat_interleave(step, 0)[::step].t()
    assert not batch.table.is_contiguous()
    batch.require(batch.attend()[0])


def test_a_cache_in_8_bits():
    """Its scale is read by every call, so an engine may set it after the pages were made."""
    batch = Batch([2, 1], [65, 7])
    batch.q = batch.q.bfloat16()
    batch.cache = (batch.cache / 0.25).to(torch.float8_e4m3fn)
    batch.rows = [(rows / 0.25).to(torch.float8_e4m3fn).float() * 0.25 for rows in batch.rows]
    scale = torch.ones(())
    pages = paged.Pages.of(batch.cache, K, scale)
    scale.fill_(0.25)
    output, lse = batch.attend(pages=pages, return_lse=True)
    batch.require(output, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), batch.expected()[1], atol=1e-2, rtol=1e-2)


def test_trees():
    batch = Batch([3, 3], [65, 3])
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, dtype=torch.bool)
    for starts in (batch.starts, None):
        batch.require(batch.attend(tree_mask=tree, query_start_loc=starts)[0], tree=tree)


def test_rows_of_no_request_are_left_untouched():
    batch = Batch([2, 1], [65, 7], padding=3)
    out = torch.full((6, H, K), 7.0)
    output, lse = batch.attend(out=out, return_lse=True)
    assert output is out and lse.shape == (6, H)
    assert torch.equal(out[3:], torch.full((3, H, K), 7.0))
    batch.require(out[:3])


def test_requests_without_queries_as_graphs_are_padded_with():
    batch = Batch([2, 1], [65, 7])
    batch.table = torch.cat([batch.table, torch.zeros_like(batch.table)])
    batch.lengths = torch.cat([batch.lengths, torch.tensor([0, 1], dtype=torch.int32)])
    batch.starts = torch.cat([batch.starts, batch.starts[-1:].repeat(2)])
    batch.require(batch.attend()[0])


@pytest.mark.parametrize("starts", [True, False], ids=["packed", "uniform"])
def test_head_major_queries(starts):
    batch = Batch([2, 2], [65, 70])
    given = {} if starts else {"query_start_loc": None}
    batch.require(batch.attend(q_latent=batch.head_major(), **given)[0])


@pytest.mark.parametrize("shards", [2, 3])
def test_shards_merge_to_the_whole(shards):
    """Decode context parallelism: tokens dealt out one by one, several queries per request."""
    batch = Batch([4, 1, 3], [130, 1, 66])
    partials = [
        batch.shard(shard, shards).attend(
            total_lengths=batch.lengths, shards=shards, shard=shard, return_lse=True
        )
        for shard in range(shards)
    ]
    batch.require(*merge_partials(partials))


def test_batch_invariant_results_are_those_of_the_request_alone():
    batch = Batch([4, 1, 3], [130, 1, 66])
    output, lse = batch.attend(batch_invariant=True, return_lse=True)
    batch.require(output)
    for request in range(3):
        own = slice(int(batch.starts[request]), int(batch.starts[request + 1]))
        alone, alone_lse = batch.only(request).attend(batch_invariant=True, return_lse=True)
        assert torch.equal(alone, output[own])
        assert torch.equal(alone_lse, lse[own])


def test_uniform_batches_need_all_their_rows():
    batch = Batch([2, 1], [65, 7])
    with pytest.raises(InvalidArgumentError, match="2 requests x 2 tokens"):
        batch.attend(query_start_loc=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": 2, "shard": 1}, "shards: expected total_lengths beside it, got none"),
        ({"shard": 1}, "shard: expected an integer from 0 to 0, got 1"),
        ({"out": torch.zeros(H, 2, K)}, r"out: expected \[tokens=2, h, .* got \[4, 2, 512\]"),
        ({"out": torch.zeros(3, H, K)}, r"out: expected \[tokens=2, h, .* got \[3, 4, 512\]"),
        ({"out": torch.zeros(2, K, H)}, r"out: expected \[.* got \[2, .*512, 4\]"),
        (
            {"q_latent": torch.zeros(1, H, K)},
            r"q_rope: expected \[tokens=1, h, .* got \[2, 4, 64\]",
        ),
        ({"q_latent": torch.zeros(2, 1, H, K)}, r"q_latent: expected \[tokens, h, k\], got"),
        ({"q_latent": [1]}, "q_latent: expected a tensor, got list"),
        ({"q_rope": None}, "q_rope: expected a tensor, got NoneType"),
        ({"lengths": [65, 7]}, "lengths: expected a tensor, got list"),
        ({"pages": torch.zeros(2, 64, K + 64)}, "pages: expected Pages, .* got Tensor"),
        ({"max_q": 1.0}, "max_q: expected an integer, got 1.0"),
        ({"out": [1]}, "out: expected a tensor, got list"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_refused(packed, changes, message):
    """Not taken for something else: no shard for a whole cache, no other order of rows."""
    batch = Batch([1, 1], [65, 7])
    uniform = {} if packed else {"query_start_loc": None}
    with pytest.raises(InvalidArgumentError, match=message):
        batch.attend(**uniform, **changes)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([], dtype=torch.int32), r"query_start_loc: expected \[b\+1=3\], got \[0\]"),
        ([0, 1, 2], r"query_start_loc: expected a tensor \[b\+1=3\], got list"),
        (torch.tensor([0.0, 1.0, 2.0]), "query_start_loc: expected dtype torch.int32"),
    ],
)
def test_wrong_starts_of_queries(starts, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Batch([1, 1], [65, 7]).attend(query_start_loc=starts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"h": 0}, "h: expected a positive integer, got 0"),
        ({"max_q": 0}, "max_q: expected a positive integer, got 0"),
        ({"device": "nothing"}, "device: expected a device of this machine"),
    ],
)
def test_warm_up_of_nothing(sizes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        paged.warm_up(**{"h": 16, "max_q": 1, "device": "cpu", **sizes})


def test_wrong_pages():
    rows = torch.zeros(2, 64, 576)
    for given, message in (
        ((rows, -1), "k: expected a positive integer, got -1"),
        ((rows, "k"), "k: expected a positive integer, got 'k'"),
        ((rows[..., :500],), r"cache: expected \[blocks, page, 512\+p\]"),
        ((rows[0],), r"cache: expected \[blocks, page, 512\+p\]"),
        (([1],), "cache: expected a tensor, got list"),
        ((rows.byte(), K, 0.5), "scale: expected one float32 .* got float"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            paged.Pages.of(*given)


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("packed", "tree", "shards"), [(True, False, 1), (True, False, 2), (False, True, 1)]
)
def test_warm_up_calls_with_every_count_that_may_differ(
    monkeypatch, packed, tree, shards, cache_dtype
):
    """Below 64 query rows the kernel has programs for several row counts."""
    seen = []
    real = paged.paged_attention

    def record(*operands, **options):
        by_head = operands[0].stride(0) < operands[0].stride(1)
        seen.append((options["max_q"], by_head, options["query_start_loc"] is None))
        assert (options["tree_mask"] is not None) == tree
        assert options["shards"] == shards
        assert (operands[2].scales is not None) == (cache_dtype is not None)
        return real(*operands, **options)

    monkeypatch.setattr(paged, "paged_attention", record)
    paged.warm_up(
        16, 9, device="cpu", dtype=torch.bfloat16, cache_dtype=cache_dtype, packed=packed,
        tree=tree, shards=shards,
    )  # fmt: skip
    assert seen == [(s, by_head, not packed) for s in range(1, 6) for by_head in (False, True)]


@pytest.mark.parametrize("h", [1, 8, 12, 64, 128])
def test_warm_up_makes_small_calls_for_all_programs(monkeypatch, h):
    """vLLM has counted its memory before, and asks for up to 512 query tokens."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    from mla_var3.kernel.cute_python.mla.latent.kernel import default_few
    from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import columns_for

    counts = []
    monkeypatch.setattr(
        paged, "paged_attention", lambda *operands, max_q, **options: counts.append(max_q)
    )
    paged.warm_up(h, paged.MOST_LATENT_QUERIES, device="cpu", head_major=False)
    assert max(counts) * h < paged.KERNEL_ROWS + 2 * h
    for program in (default_few, columns_for):
        of_calls = {program(s * h) for s in range(1, paged.MOST_LATENT_QUERIES + 1)}
        assert {program(s * h) for s in counts} == of_calls


def test_crossover_of_known_and_unknown_devices():
    paged.latent_crossover.cache_clear()
    assert 128 < paged.latent_crossover(128, "NVIDIA H200") <= paged.MOST_LATENT_QUERIES
    assert paged.latent_crossover(128, "no such GPU") == paged.DEFAULT_CROSSOVER
    most = paged.latent_crossover(128, "NVIDIA H200")
    for s, winner in ((most, "flash_mla"), (most + 1, "flash_attention")):
        found = explain(b=8, s=s, t=4096, h=128, page_size=64, device_name="NVIDIA H200")
        times = {c.kernel: c.predicted_us or 0.0 for c in found.candidates if "cute" in c.language}
        assert min(("flash_mla", "flash_attention"), key=times.__getitem__) == winner
    # With a faster latent kernel the decompressed one wins later.
    assert paged.latent_crossover(128, "NVIDIA H200") < paged.latent_crossover(
        128, "NVIDIA H200", "fp8"
    )
