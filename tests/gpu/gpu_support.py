"""Helpers of the tests on a GPU: results of a stage, and CUDA graphs that are replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.op.compare import compare
from mla_var3.runtime.check import poison_outputs

from ..unit.attention.attention_support import normal

RELATIVE = {"bfloat16": 0.003, "float16": 0.0006}
"""Relative error of the output of a CuTe DSL kernel: probabilities, the latent part before its
up-projection and the output are each rounded to 9 or 12 bits."""
LSE_RELATIVE = 1e-5
"""The LSE is float32 throughout."""


def outputs_of(stage: Any) -> list[Tensor]:
    """What a stage has written."""
    torch.cuda.synchronize()
    return [output.clone() for output in stage.output_tensors]


def relaunched(stage: Any) -> list[Tensor]:
    """What a stage writes over poisoned outputs."""
    poison_outputs(stage)
    stage.launch()
    return outputs_of(stage)


def require_equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """The same bits."""
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def require_close(
    got: Sequence[Tensor],
    wanted: Sequence[Tensor],
    relative: float,
    lse_relative: float = LSE_RELATIVE,
) -> None:
    """Output and LSE within their bounds, rows without a key exactly 0 and -inf."""
    out, lse = got
    empty = wanted[1] == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    error, lse_error = compare(out, wanted[0]), compare(lse, wanted[1])
    assert error.relative_frobenius < relative, error
    assert lse_error.relative_frobenius < lse_relative, lse_error


def captured(
    launch: Callable[[], None], between: Callable[[], None] = lambda: None
) -> torch.cuda.CUDAGraph:
    """The launch as a graph. It runs once before, on another stream: a capture compiles nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        launch()
    torch.cuda.current_stream().wait_stream(side)
    between()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


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
    graph = captured(step, lambda: cache.evict(requests))
    cache.evict(requests)
    for turn in range(turns):
        for tensor in inputs:
            tensor.copy_(normal(generator, *tensor.shape, dtype=torch.bfloat16))
        rejected.copy_(torch.tensor([turn % 3, (turn + 1) % 2], dtype=torch.int32))
        graph.replay()
        yield turn
