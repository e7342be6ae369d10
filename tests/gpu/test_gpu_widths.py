"""The CuTe DSL kernels at the widths of published models, and sliding windows, on a GPU.

Against float64. Slots beyond a length, and pages that no query sees, hold NaN.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import CacheView
from mla_var3.op.mla.inputs import MlaInputs
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_from_latent, reference_latent

from ..unit.attention.attention_support import assert_close
from .compile_ahead import compile_ahead, compile_call, compile_stage

pytestmark = pytest.mark.gpu

LENGTHS, T, PAGE = (1500, 333, 64), 1536, 64
B = len(LENGTHS)
LATENT = "flash_mla:cute-dsl"

Case = tuple[int, int, bool, int, int]
"""k, p, paged, s, h."""
CASES: list[Case] = [
    *((k, p, True, s, h) for k, p in ((512, 0), (256, 64), (256, 32)) for s, h in (
        (1, 12), (3, 20), (8, 16), (1, 128),
    )),
    *((k, p, False, s, h) for k, p in ((512, 0), (256, 64), (256, 32)) for s, h in (
        (17, 5), (8, 64),
    )),
    (512, 64, True, 1, 12), (512, 64, True, 17, 20), (512, 64, False, 3, 64),
    (256, 32, False, 3, 1), (512, 0, True, 1, 20), (256, 64, True, 17, 128),
]  # fmt: skip
"""Each width with few rows, a part of a tile, whole tiles and several tiles; dense and paged."""
Sliding = tuple[int, int, int, int, tuple[int, ...] | None, bool]
SLIDING: list[Sliding] = [
    (512, 64, 16, 100, None, True), (512, 64, 64, 1, None, True), (512, 64, 16, 640, None, False),
    (512, 64, 12, 100, (1, 1, 1), True), (256, 32, 40, 200, (9, 1, 4), True),
    (512, 64, 128, 2000, None, True),
]  # fmt: skip
"""k, p, h, window, query counts (None for 3 each), causal; paged."""
MODELS = [
    ("glm-5", 8, 4), ("glm-4.7-flash", 1, 1), ("glm-5.3-flash", 8, 1), ("mistral-small-4", 1, 4),
    ("minicpm3", 8, 2), ("minicpm3", 1, 8),
]  # fmt: skip
"""Model, TP, s."""
HEADS = [
    (d, p, v, k, s, h)
    for d, p, v, k in (
        (192, 64, 256, 512), (256, 0, 256, 512), (64, 64, 128, 256), (64, 32, 64, 256),
    )
    for s, h in ((4, 5), (100, 3))
]  # fmt: skip
"""d, p, v, k, s, h of the decompressed kernel: pairs of heads, and of query tiles."""


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    """All programs of this module, compiled in parallel."""
    jobs: dict[str, Any] = {}

    def add(function: Any, *arguments: Any) -> None:
        jobs.setdefault(repr((function.__name__, arguments)), (function, arguments))

    for k, p, paged, s, h in CASES:
        # One program serves all counts of rows from 25 on.
        rows = s * h if s * h < 25 else 64
        add(compile_latent, k, p, rows, paged, False, None)
    for k, p, h, window, counts, _ in SLIDING:
        s = 3 if counts is None else max(counts)
        rows = s * h if s * h < 25 else 64
        add(compile_latent, k, p, rows, True, counts is not None, window)
    for name, tp, s in MODELS:
        sizes = mla_var3.model(name).sizes(tp)
        add(compile_call, {"b": B, "s": s, **sizes})
    for d, p, v, k, s, h in HEADS:
        add(compile_stage, "flash_attention", heads_fields(d, p, v, k, s, h))
    compile_ahead(list(jobs.values()))


def compile_latent(
    k: int, p: int, rows: int, paged: bool, packed: bool, window: int | None
) -> None:
    sizes = {"b": B, "s": 1, "h": rows, "k": k, "p": p}
    compile_call(sizes, paged=paged, packed=packed, sliding_window=window)


def heads_fields(d: int, p: int, v: int, k: int, s: int, h: int) -> dict[str, Any]:
    sizes = {"b": B, "s": s, "t": T, "h": h, "d": d, "p": p, "v": v, "k": k}
    return {**sizes, "lengths": LENGTHS}


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def poisoned(k: int, p: int, paged: bool) -> tuple[torch.Tensor, CacheView]:
    """Rows [b, T, k+p] with NaN beyond the lengths, and a cache with them."""
    rows = random(B, T, k + p)
    for request, length in enumerate(LENGTHS):
        rows[request, length:] = torch.nan
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    if not paged:
        return rows, CacheView(rows[..., :k], rows[..., k:], lengths)
    each = T // PAGE
    table = torch.randperm(B * each, device="cuda").int().view(B, each) + 1
    pool = torch.full((B * each + 2, PAGE, k + p), torch.nan, dtype=rows.dtype, device="cuda")
    pool[table.long()] = rows.view(B, each, PAGE, k + p)
    for request, length in enumerate(LENGTHS):
        table[request, -(-length // PAGE) :] = 2**30  # never looked up
    return rows, CacheView(pool[..., :k], pool[..., k:], lengths, table)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_latent(case: Case) -> None:
    k, p, paged, s, h = case
    torch.manual_seed(0)
    rows, cache = poisoned(k, p, paged)
    q, q_rope, scale = random(B, s, h, k), random(B, s, h, p), 0.5 * (k + p) ** -0.5
    found = mla_var3.mla_latent_attention(q, q_rope, cache, kernel=LATENT, scale=scale)
    wanted = reference_latent(
        q, q_rope, rows[..., :k], rows[..., k:], LENGTHS, causal=True, scale=scale,
        compute_dtype=torch.float64,
    )  # fmt: skip
    assert_close(found[0].cpu(), wanted[0].cpu(), found[1].cpu(), wanted[1].cpu())
    again = mla_var3.mla_latent_attention(q, q_rope, cache, kernel=LATENT, scale=scale)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))  # the replay


@pytest.mark.parametrize("case", SLIDING, ids=str)
@pytest.mark.parametrize("kernel", [LATENT, "flash_mla:cutile-dsl"])
def test_sliding_window(case: Sliding, kernel: str) -> None:
    k, p, h, window, counts, causal = case
    torch.manual_seed(0)
    rows, cache = poisoned(k, p, True)
    assert cache.block_table is not None
    given = (3,) * B if counts is None else counts
    for request, (length, count) in enumerate(zip(LENGTHS, given, strict=True)):
        seen = max(length - count + 1 - window, 0)
        cache.block_table[request, : seen // PAGE] = 0  # a page of NaN
    bounds = torch.tensor((0, *given)).cumsum(0).tolist()
    q, q_rope = random(bounds[-1], h, k), random(bounds[-1], h, p)
    options: dict[str, Any] = {"scale": 0.03, "causal": causal, "sliding_window": window}
    if counts is None:
        queries = q.unflatten(0, (B, 3)), q_rope.unflatten(0, (B, 3))
    else:
        options["cu_seqlens_q"] = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        options["max_q"], queries = max(counts), (q, q_rope)
    output, lse = mla_var3.mla_latent_attention(*queries, cache, kernel=kernel, **options)
    output, lse = output.view(-1, h, k), lse.view(-1, h)
    for request, (first, last) in enumerate(pairwise(bounds)):
        one, own = slice(request, request + 1), slice(first, last)
        wanted = reference_latent(
            q[None, own], q_rope[None, own], rows[one, :, :k], rows[one, :, k:],
            LENGTHS[request : request + 1], causal=causal, scale=0.03,
            compute_dtype=torch.float64, sliding_window=window,
        )  # fmt: skip
        assert_close(output[own].cpu(), wanted[0][0].cpu(), lse[own].cpu(), wanted[1][0].cpu())


def whole_call(h: int, d: int, p: int, k: int, v: int, s: int) -> tuple[tuple[Any, ...], Any]:
    """Operands of a call on a cache with poisoned slots, and its output and LSE in float64."""
    torch.manual_seed(0)
    rows, cache = poisoned(k, p, False)
    w_uk, w_uv = random(h, d, k, scale=k**-0.5), random(h, k, v, scale=k**-0.5)
    q, q_rope = random(B, s, h, d), random(B, s, h, p)
    problem = MlaProblem(b=B, s=s, t=T, h=h, d=d, p=p, k=k, v=v, lengths=LENGTHS)
    raw = MlaInputs(q, q_rope, rows[..., :k], rows[..., k:], w_uk, w_uv, cache.lengths)
    wanted = reference_from_latent(raw, problem, compute_dtype=torch.float64)
    return (q, q_rope, cache, w_uk, w_uv), wanted


@pytest.mark.parametrize(("name", "tp", "s"), MODELS)
def test_whole_calls(name: str, tp: int, s: int) -> None:
    """With projections in the launch; then the same call is replayed."""
    sizes = mla_var3.model(name).sizes(tp)
    h, d, p, k, v = (sizes[size] for size in ("h", "d", "p", "k", "v"))
    operands, (wanted, wanted_lse) = whole_call(h, d, p, k, v, s)
    for _ in range(2):
        found, lse = mla_var3.mla_attention(*operands, kernel=LATENT, return_lse=True)
        assert found.shape == (B, s, h, v)
        assert_close(found.cpu(), wanted.cpu(), lse.cpu(), wanted_lse.cpu())


@pytest.mark.parametrize("case", HEADS, ids=str)
def test_decompressed(case: tuple[int, ...]) -> None:
    d, p, v, k, s, h = case
    operands, (wanted, wanted_lse) = whole_call(h, d, p, k, v, s)
    found, lse = mla_var3.mla_attention(
        *operands, kernel="flash_attention:cute-dsl", return_lse=True
    )
    assert_close(found.cpu(), wanted.cpu(), lse.cpu(), wanted_lse.cpu())
