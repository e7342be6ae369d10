"""Whole calls on a GPU: the products against float32, and results that do not depend on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from mla_var3.attention.backends.latent import project_heads
from mla_var3.attention.call import mla_attention
from mla_var3.attention.replay import key as keys
from mla_var3.attention.replay.replay import ProjectedReplay
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.runtime.call_state import CALL_STATE

from ..unit.attention.attention_support import make_model, normal
from .products_alone import output_product, query_product
from .test_gpu_repeated_calls import KERNEL, PAGE, B, filled, require_thread_safe, same

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

D, K, P = 128, 512, 64
GUARD = 8
"""Rows behind the end, for which nothing may be read or written."""
DTYPES = [torch.bfloat16, torch.float16]

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], None]]


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    CALL_STATE.clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("h", [1, 16, 128])
@pytest.mark.parametrize("m", [1, 3, 63, 64, 65, 128, 130, 1000])
@pytest.mark.parametrize(("product", "x", "y"), [(query_product, D, K), (output_product, K, D)])
def test_a_product(
    product: Product, x: int, y: int, m: int, h: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Queries behind the end are NaN, results there stay as they were."""
    rows = torch.full((m + GUARD, h, x), torch.nan, dtype=dtype, device="cuda")
    rows[:m] = normal(generator, m, h, x, dtype=dtype).cuda()
    weight = (normal(generator, h, x, y, dtype=torch.float32) * x**-0.5).to(dtype).cuda()
    found = torch.full((m + GUARD, h, y), torch.nan, dtype=dtype, device="cuda")
    found[m:] = 7.0
    launch = product(rows[:m], weight, found)
    launch()
    wanted = torch.einsum("mhx,hxy->mhy", rows[:m].double(), weight.double())
    of_torch = project_heads(rows[:m], weight).double()
    allowed = 2 * (of_torch - wanted).abs().max().item() + 1e-4
    assert (found[:m].double() - wanted).abs().max().item() <= allowed
    assert bool((found[m:] == 7.0).all())
    first = found[:m].clone()
    for _ in range(20):
        found[:m] = torch.nan
        launch()
        assert torch.equal(found[:m], first)


def inputs(
    generator: torch.Generator, s: int, h: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (normal(generator, B, s, h, width, dtype=dtype).cuda() for width in (D, P))
    return first, second


def weights_of(generator: torch.Generator, h: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = make_model(generator, h, D, K, torch.bfloat16)
    return model.w_uk.cuda(), model.w_uv.cuda()


def replay_of(operands: Any, **options: Any) -> Any:
    return keys.find_replay(keys.whole_key(*operands, KERNEL, options))


@pytest.mark.parametrize("page_size", [None, PAGE])
@pytest.mark.parametrize(("s", "h"), [(1, 16), (2, 64), (1, 128), (3, 5), (60, 16), (80, 16)])
def test_repeated_calls_equal_first_calls(
    s: int, h: int, page_size: int | None, generator: torch.Generator
) -> None:
    """Bit for bit, with and without the log-sum-exp and memory of their own between the steps."""
    weights, cache = weights_of(generator, h), filled(generator, page_size)
    given = [(*inputs(generator, s, h), cache, *weights) for _ in range(3)]
    first = []
    for operands in given:
        CALL_STATE.clear()
        first.append(mla_attention(*operands, kernel=KERNEL, return_lse=True))
        same(first[-1], mla_attention(*operands, kernel="torch_tiled", return_lse=True))
    replay = replay_of(given[0])
    assert replay is not None and not isinstance(replay, ProjectedReplay)
    for _ in range(2):
        for operands, (output, lse) in zip(given, first, strict=True):
            again = mla_attention(*operands, kernel=KERNEL, return_lse=True)
            assert torch.equal(again[0], output) and torch.equal(again[1], lse)
            into = torch.full_like(output, torch.nan)
            mla_attention(*operands, kernel=KERNEL, out=into)
            assert torch.equal(into, output)
            with torch.inference_mode():
                assert torch.equal(mla_attention(*operands, kernel=KERNEL), output)


def test_more_queries_than_the_products_take(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch projects, before and after the key is known."""
    monkeypatch.setattr(whole_call, "OWN_PROJECTION_QUERIES", B * 2 - 1)
    operands = (*inputs(generator, 2, 16), filled(generator, PAGE), *weights_of(generator, 16))
    wanted = mla_attention(*operands, kernel=KERNEL)
    assert isinstance(replay_of(operands), ProjectedReplay)
    assert torch.equal(mla_attention(*operands, kernel=KERNEL), wanted)


def test_streams_do_not_mix(generator: torch.Generator) -> None:
    """Each stream has memory between the steps of its own; all results as those of one stream."""
    weights, cache = weights_of(generator, 64), filled(generator, PAGE)
    given = [(*inputs(generator, 2, 64), cache, *weights) for _ in range(16)]
    wanted = [mla_attention(*operands, kernel=KERNEL) for operands in given]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        found = []
        for turn, operands in enumerate(given):
            with torch.cuda.stream(streams[turn % 2]):
                found.append(mla_attention(*operands, kernel=KERNEL))
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_threads_on_one_stream(generator: torch.Generator) -> None:
    weights, cache = weights_of(generator, 64), filled(generator, PAGE)
    given = [(*inputs(generator, 2, 64), cache, *weights) for _ in range(4)]
    require_thread_safe(
        [
            partial(mla_attention, *each, kernel=KERNEL, return_lse=lse)
            for each in given
            for lse in (False, True)
        ]
    )


def test_calls_one_after_another_without_waiting(generator: torch.Generator) -> None:
    """The memory between the steps is the same for all of them: none reads another's."""
    weights, cache = weights_of(generator, 128), filled(generator, PAGE)
    given = [(*inputs(generator, 1, 128), cache, *weights) for _ in range(8)]
    wanted = [mla_attention(*operands, kernel=KERNEL) for operands in given]
    torch.cuda.synchronize()
    for _ in range(20):
        found = [mla_attention(*operands, kernel=KERNEL) for operands in given]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_captured_call(generator: torch.Generator) -> None:
    """Replays compute on what the tensors hold then, with memory of their own."""
    weights, cache = weights_of(generator, 16), filled(generator, PAGE)
    operands = (*inputs(generator, 2, 16), cache, *weights)
    others = [(*inputs(generator, 2, 16), cache, *weights) for _ in range(3)]
    mla_attention(*operands, kernel=KERNEL)
    wanted = [mla_attention(*other, kernel=KERNEL) for other in others]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mla_attention(*operands, kernel=KERNEL)
    side = torch.cuda.Stream()
    for turn, other in enumerate(others * 5):
        operands[0].copy_(other[0])
        operands[1].copy_(other[1])
        captured.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            mla_attention(*others[turn % 2], kernel=KERNEL)
        torch.cuda.synchronize()
        assert torch.equal(captured, wanted[turn % 3])


def test_packed_queries(generator: torch.Generator) -> None:
    h = 16
    weights, cache = weights_of(generator, h), filled(generator, PAGE)
    for bounds in ([0, 1, 4, 6], [0, 0, 3, 6]):
        q_nope, q_rope = (
            normal(generator, 6, h, width, dtype=torch.bfloat16).cuda() for width in (D, P)
        )
        options: dict[str, Any] = {
            "cu_seqlens_q": torch.tensor(bounds, dtype=torch.int32).cuda(),
            "max_q": 3,
        }
        operands = (q_nope, q_rope, cache, *weights)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True, **options)
        for _ in range(2):
            found = mla_attention(*operands, kernel=KERNEL, return_lse=True, **options)
            same(found, wanted)
