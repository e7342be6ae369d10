"""The call of the serving engines on a GPU: padding, graphs, what warm-up compiles."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.attention.merge import merge_partials
from mla_var3.integrations import paged
from mla_var3.kernel.cute_python.mla.hopper.constants import DEFAULT_SM_COUNT, ROWS
from mla_var3.kernel.cute_python.mla.latent.groups import (
    balanced_items,
    group_shape,
    ragged_tiles,
)

from ..unit.integrations.paged_support import Batch, K

pytestmark = pytest.mark.gpu

TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("h", [8, 16, 128])
@pytest.mark.parametrize(
    ("counts", "lengths"), [([1, 1, 1], [1, 64, 200]), ([3, 1, 7], [70, 1, 64]), ([4, 4], [4, 129])]
)
def test_rows_of_no_request_are_left_untouched(h, counts, lengths) -> None:
    batch = Batch(counts, lengths, padding=5, h=h).on_gpu()
    out = torch.full((sum(counts) + 5, h, K), 7.0, dtype=torch.bfloat16, device="cuda")
    output, lse = batch.attend(out=out, return_lse=True)
    assert output is out
    assert bool((out[-5:] == 7.0).all())
    batch.require(out[:-5], lse[:-5], **TOLERANCE)


@pytest.mark.parametrize("h", [2, 8, 12, 16, 64, 128])
@pytest.mark.parametrize("starts", [True, False], ids=["packed", "uniform"])
@pytest.mark.parametrize("count", [1, 3])
def test_head_major_queries(h, starts, count) -> None:
    """Read where they lie for most head counts, and copied for others."""
    batch = Batch([count] * 3, [65, 70, 300], h=h).on_gpu()
    given = {} if starts else {"query_start_loc": None}
    batch.require(batch.attend(q_latent=batch.head_major(), **given)[0], **TOLERANCE)


def test_head_major_queries_are_not_copied() -> None:
    batch = Batch([2] * 64, [64] * 64, h=128).on_gpu()
    queries, out = batch.head_major(), torch.empty_like(batch.q[..., :K])
    batch.attend(q_latent=queries, out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch.attend(q_latent=queries, out=out)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < queries.numel() * queries.element_size()


@pytest.mark.parametrize("h", [8, 128])
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_merge_to_the_whole(h, shards) -> None:
    """Decode context parallelism with several query tokens."""
    batch = Batch([4, 1, 8, 3], [1300, 1, 66, 700], h=h)
    parts = [batch.shard(shard, shards).on_gpu() for shard in range(shards)]
    batch.on_gpu()
    partials = []
    for shard, part in enumerate(parts):
        part.q = batch.q
        output, lse = part.attend(
            total_lengths=batch.lengths, shards=shards, shard=shard, return_lse=True
        )
        partials.append((output.float(), lse))
    batch.require(*merge_partials(partials), **TOLERANCE)


@pytest.mark.parametrize("h", [8, 16, 128])
@pytest.mark.parametrize("others", [0, 150])
def test_batch_invariant_results_are_those_of_the_request_alone(h, others) -> None:
    """Many others make more items than CTAs, which are taken in the order of their lengths."""
    counts = [4, 1, 8, 3, 1, 1] + [1 + i % 4 for i in range(others)]
    lengths = [5000, 1, 66, 700, 9000, 64] + [20 + i * 37 % 300 for i in range(others)]
    batch = Batch(counts, lengths, h=h).on_gpu()
    output, lse = batch.attend(batch_invariant=True, return_lse=True)
    batch.require(output, **TOLERANCE)
    for request in range(6):
        own = slice(int(batch.starts[request]), int(batch.starts[request + 1]))
        alone, alone_lse = batch.only(request).attend(batch_invariant=True, return_lse=True)
        assert torch.equal(alone, output[own])
        assert torch.equal(alone_lse, lse[own])


@pytest.mark.parametrize(("h", "requests", "most"), [(64, 60, 3), (24, 60, 8)])
def test_packed_requests_of_which_some_are_split(h, requests, most) -> None:
    """CTA groups take whole items, and parts of the shortest ones."""
    counts = [1 + i % most for i in range(requests)]
    lengths = [1200 + i * 37 % 400 for i in range(requests)]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    known = ragged_tiles(sum(counts), requests, most, h)
    shape = group_shape(-(-most * h // ROWS), requests, sms, 0, *known)
    items = [-(-count * h // (ROWS * shape.group_ctas)) for count in counts]
    taken = balanced_items(lengths, shape, items)
    assert sms != DEFAULT_SM_COUNT or sum(map(len, taken or [])) > sum(items)
    batch = Batch(counts, lengths, h=h).on_gpu()
    output, lse = batch.attend(out=torch.full_like(batch.q[..., :K], torch.nan), return_lse=True)
    batch.require(output, lse, **TOLERANCE)


def test_wrong_values_on_the_device_stay_inside_the_buffers() -> None:
    """Lengths, pages and query offsets that no check on the host sees: other requests keep theirs.

    The outputs lie inside of a larger tensor, which nothing may touch.
    """
    counts, lengths = [2, 3, 1], [130, 70, 200]
    memory = torch.full((40, 16, K), 7.0, dtype=torch.bfloat16, device="cuda")
    out = memory[16:22]
    for wrong in ("length", "negative length", "page", "offset", "negative offset"):
        batch = Batch(counts, lengths, h=16).on_gpu()
        batch.cache.nan_to_num_(0.5)
        expected = batch.expected()[0]
        if wrong == "length":
            batch.lengths[1] = 2**30
        elif wrong == "negative length":
            batch.lengths[1] = -5
        elif wrong == "page":
            batch.table[1, 0] = 2**30
            batch.table[1, 1] = -7
        else:
            batch.starts[-1] = 2**30 if wrong == "offset" else -7
        batch.attend(out=out, max_q=3)
        torch.cuda.synchronize()
        assert bool((memory[:16] == 7.0).all() and (memory[22:] == 7.0).all()), wrong
        kept = slice(0, 2) if "offset" not in wrong else slice(0, 5)
        torch.testing.assert_close(out[kept].cpu().double(), expected[kept], **TOLERANCE)


@pytest.mark.parametrize(("requests", "max_q"), [(11, 64), (529, 1)])
def test_no_request_with_queries_has_tokens(requests: int, max_q: int) -> None:
    """Their rows are 0 and -inf, also where the bounds make room for many more query tiles."""
    counts = [1] * requests if max_q > 1 else [1] + [0] * (requests - 1)
    batch = Batch(counts, [0] * requests, h=128 if max_q > 1 else 16).on_gpu()
    out = torch.full_like(batch.q[..., :K], torch.nan)
    _, lse = batch.attend(out=out, max_q=max_q, return_lse=True)
    assert lse is not None and bool((lse == -torch.inf).all())
    assert bool((out == 0.0).all())


def test_captured_calls_share_their_workspace() -> None:
    """A graph of many layers needs no more than one call's partials."""
    batch = Batch([1] * 4, [3000] * 4, h=16).on_gpu()
    out = torch.empty_like(batch.q[..., :K])
    batch.attend(out=out)
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        for _ in range(20):
            batch.attend(out=out)
    assert torch.cuda.memory_reserved() - before < 100 * 2**20
    out.zero_()
    graph.replay()
    batch.require(out, **TOLERANCE)


def test_a_graph_replays_ragged_verify_batches() -> None:
    """Captured with one token each; replayed with other counts, lengths and idle requests."""
    bound = 4
    batch = Batch([4, 1, 3, 2], [200, 1, 67, 130], h=16).on_gpu()
    starts, lengths = batch.starts.clone(), batch.lengths.clone()
    batch.starts = torch.arange(5, dtype=torch.int32, device="cuda")
    batch.lengths = torch.ones_like(lengths)
    out = torch.zeros((10, 16, K), dtype=torch.bfloat16, device="cuda")
    paged.warm_up(16, bound)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batch.attend(out=out, max_q=bound)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.attend(out=out, max_q=bound)
    batch.starts.copy_(starts)
    batch.lengths.copy_(lengths)
    graph.replay()
    batch.starts = starts
    batch.require(out, **TOLERANCE)


def layer_of(seed: int, counts: list[int], lengths: list[int], h: int, eight_bits: bool) -> Batch:
    """One layer's queries and cache, the latter perhaps in 8 bits; `expected` needs 16."""
    layer = Batch(counts, lengths, h=h, seed=seed).on_gpu()
    if eight_bits:
        layer.cache = layer.cache.to(torch.float8_e4m3fn)
    return layer


def require_same_alone(step: paged.Step, layer: Batch) -> None:
    """The layer's results in a step are those of a call of its own, bit by bit."""
    out = torch.full_like(layer.q[..., :K], torch.nan)
    alone, alone_lse = layer.attend(return_lse=True)
    shared, lse = layer.attend(return_lse=True, step=step, out=out)
    assert torch.equal(shared, alone)
    assert torch.equal(lse, alone_lse)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(
    ("counts", "lengths", "h"),
    [
        ([1] * 16, [4096] * 16, 16),  # aligned ranges
        ([1] * 16, [1000 + 211 * i for i in range(16)], 128),  # a range ends in another item
        ([1, 3, 2], [65, 70, 9000], 64),  # packed, one long
        ([1] * 30, [640] * 30, 128),  # halves in a cluster
        ([1] * 200, [64] * 200, 16),  # whole items in turns
        ([1 + i % 3 for i in range(60)], [1200 + i * 37 % 400 for i in range(60)], 64),  # balanced
        ([2, 2], [0, 3], 8),
    ],
)
def test_layers_of_a_step_share_their_ranges(counts, lengths, h, eight_bits) -> None:
    step = paged.Step("cuda")
    step._memory.random_(-(2**31), 2**31 - 1)
    for shorter in (1, 2):
        step = step.next()
        for seed in range(3):
            tokens = [length // shorter for length in lengths]
            layer = layer_of(seed, counts, tokens, h, eight_bits)
            require_same_alone(step, layer)
            if seed == 1 and not eight_bits:
                layer.require(layer.attend(step=step)[0], **TOLERANCE)
            if seed == 1:  # a layer of other heads
                require_same_alone(step, layer_of(9, counts, tokens, 2 * h, eight_bits))


def test_a_step_takes_nothing_from_the_one_before() -> None:
    """Also not ranges of more CTAs than its first launch has."""
    counts, lengths = [1] * 16, [1000 + 211 * i for i in range(16)]
    before = paged.Step("cuda")
    for seed in range(2):
        require_same_alone(before, layer_of(seed, counts, lengths, 128, False))
    step = before.next()
    for heads in (16, 128):
        require_same_alone(step, layer_of(heads, counts, lengths[::-1], heads, False))


def test_a_graph_of_a_step_follows_the_lengths() -> None:
    counts, lengths = [1] * 16, [1000 + 211 * i for i in range(16)]
    layers = [layer_of(seed, counts, lengths, 16, False) for seed in range(3)]
    shared = torch.tensor(lengths[::-1], dtype=torch.int32, device="cuda") // 2
    for layer in layers:
        layer.lengths = shared
    outs = [torch.zeros_like(layer.q[..., :K]) for layer in layers]
    step = paged.Step("cuda")
    pages = [paged.Pages.of(layer.cache, K) for layer in layers]

    def attend() -> None:
        for layer, cache, out in zip(layers, pages, outs, strict=True):
            layer.attend(pages=cache, out=out, step=step)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for replayed in (lengths, [7] * 16, lengths[::-1]):
        shared.copy_(torch.tensor(replayed, dtype=torch.int32).clamp(max=1000))
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            assert torch.equal(out, layer.attend()[0])


@pytest.mark.parametrize("step", [False, True])
def test_warm_up_leaves_nothing_to_compile(step) -> None:
    """A program takes seconds to compile."""
    paged.warm_up(8, 9, step=step)
    more = {"step": paged.Step("cuda")} if step else {}
    for count in range(1, 10):
        batch = Batch([count, 1], [count + 60, 3], h=8).on_gpu()
        started = time.perf_counter()
        batch.attend(max_q=count, **more)
        batch.attend(max_q=count, q_latent=batch.head_major(), **more)
        torch.cuda.synchronize()
        assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize("h", [4, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_on_packed_keys(h, causal) -> None:
    """Keys with their rope part behind them and values inside of a wider tensor, as in vLLM."""
    from mla_var3.kernel.cute_python.mla.decompressed.stage import attend_request
    from mla_var3.op.mla.reference import reference_decompressed

    d, p = 128, 64
    for s, t in ((300, 300), (70, 1000), (1, 5)):
        q, k, kv = (
            torch.randn(n, h, width, dtype=torch.bfloat16, device="cuda")
            for n, width in ((s, d + p), (t, d + p), (t, 2 * d))
        )
        q_nope, q_rope = q[..., :d].contiguous(), q[..., d:].contiguous()
        keys, k_rope, values = k[..., :d], k[:, 0, d:], kv[..., d:]
        length = torch.tensor([t], dtype=torch.int32, device="cuda")
        o, lse = torch.empty_like(q_nope), torch.empty(s, h, device="cuda")
        given = {"causal": causal, "scale": 0.1}
        attend_request(q_nope, q_rope, keys, values, k_rope, length, o, lse, **given)
        expected, expected_lse = reference_decompressed(
            q_nope[None], q_rope[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
            k_rope[None], length, **given,
        )  # fmt: skip
        torch.testing.assert_close(o.float(), expected[0].float(), **TOLERANCE)
        torch.testing.assert_close(lse, expected_lse[0].float(), **TOLERANCE)
