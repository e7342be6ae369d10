"""A decoding step in a CUDA graph, for tests that replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from mla_var3.attention.cache.latent_cache import LatentCache

from ..unit.attention.attention_support import normal


def replayed_steps(
    step: Callable[[], None],
    cache: LatentCache,
    inputs: Sequence[torch.Tensor],
    rejected: torch.Tensor,
    generator: torch.Generator,
    turns: int,
) -> Iterator[int]:
    """Capture a step and replay it with other inputs and other rejections; yields each turn.

    Args:
        step: what is captured. It runs once before, outside of the graph.
        cache: its cache, empty before it is captured and before the first turn.
        inputs: tensors that it reads, refilled for every turn.
        rejected: int32 [2], the tokens that it drops of each request, likewise.
        generator: of the inputs.
        turns: replays.
    """
    requests = list(range(len(rejected)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    cache.evict(requests)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.evict(requests)
    for turn in range(turns):
        for tensor in inputs:
            tensor.copy_(normal(generator, *tensor.shape, dtype=torch.bfloat16))
        rejected.copy_(torch.tensor([turn % 3, (turn + 1) % 2], dtype=torch.int32))
        graph.replay()
        yield turn
