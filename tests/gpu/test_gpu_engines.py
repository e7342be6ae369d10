"""The call of the serving engines on a GPU: padding, graphs, what warm-up compiles."""

from __future__ import annotations

import time

import pytest
import torch

from mla_var3.integrations import paged

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
    expected, expected_lse = batch.expected()
    assert output is out
    assert bool((out[-5:] == 7.0).all())
    torch.testing.assert_close(out[:-5].cpu().double(), expected, **TOLERANCE)
    torch.testing.assert_close(lse[:-5].cpu().double(), expected_lse, **TOLERANCE)


def test_head_major_queries() -> None:
    batch = Batch([2, 3], [65, 70], h=16).on_gpu()
    head_major = batch.q[..., :K].transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(batch.attend(q_latent=head_major)[0].cpu().double(),
                               batch.expected()[0], **TOLERANCE)  # fmt: skip


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
    torch.testing.assert_close(out.cpu().double(), batch.expected()[0], **TOLERANCE)


def test_warm_up_leaves_nothing_to_compile() -> None:
    """A program takes seconds to compile."""
    paged.warm_up(8, 9)
    for count in range(1, 10):
        batch = Batch([count, 1], [count + 60, 3], h=8).on_gpu()
        started = time.perf_counter()
        batch.attend(max_q=count)
        torch.cuda.synchronize()
        assert time.perf_counter() - started < 1.0
