"""Latent attention on an engine's paged cache: the one call that the engine plug-ins make.

The engine does the projections. It hands over latent and rope queries apart, its whole cache of
`[blocks, page, k+p]` rows, in 16 bits or in e4m3 with one scale, an int32 block table, and lengths
and query offsets on the device. Nothing is copied, nothing is read back, so CUDA graphs can capture
it. Head-major queries, views of `[h, tokens, k]` as batched products give them, are read in place
if h divides 64 or is a multiple of it, or if the cache is in 8 bits; with other head counts they
are copied. Queries are in 16 bits; with an 8-bit cache the kernel rounds them itself.

Rows after `query_start_loc[-1]` belong to no request; engines pad batches for CUDA graphs with
them. Such rows of `out` are left untouched, and their LSE is unspecified.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention import CacheView, explain, mla_latent_attention
from mla_var3.attention import Step as Step  # engines find what they need here
from mla_var3.attention.request.checks import INDEX_DTYPES, require_device, require_tensor
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.kernel.cute_python.mla.hopper.widths import LATENT_WIDTHS
from mla_var3.op.mla.cache_formats import BYTE_DTYPES, PER_TENSOR
from mla_var3.op.mla.problem import require_int

LATENT_WIDTH, ROPE_WIDTH = 512, 64
"""k and p of most models: DeepSeek V2, V3 and R1, Kimi-K2, GLM-4.7-Flash, LongCat."""
ROW_WIDTHS = {widths.k + widths.p: (widths.k, widths.p) for widths in LATENT_WIDTHS}
"""k and p that the kernel serves, by the width of a cache row."""
PAGE_SIZE = 64
"""Tokens of a cache page; multiples work too."""
SERVING_KERNEL = "flash_mla:cute-dsl"
"""The kernel on a GPU. On the CPU the calls run in PyTorch."""
KERNEL_ROWS = 64
"""Query rows (query tokens x heads) from which on one compiled program serves all counts."""

MOST_LATENT_QUERIES = 512
"""Upper end of the search for the crossover with decompressed attention."""
CROSSOVER_REQUESTS, CROSSOVER_TOKENS = 8, 4096
"""Batch and context that the crossover is computed for. It varies little with the batch, and
moves up with the context."""
DEFAULT_CROSSOVER = 128
"""The crossover on a device that the cost model does not know."""


@dataclass(frozen=True)
class Pages:
    """One layer's cache: views of the latent and the rope columns of `[blocks, page, k+p]`.

    A cache in e4m3 has a scale, float32 `[1]`.
    """

    latent: Tensor
    rope: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, cache: Tensor, k: int = LATENT_WIDTH, scale: Tensor | None = None) -> Pages:
        """The views; keep them per layer, so that a call need not make them again.

        The rows of the cache, with k latent columns, are in 16 bits or in 8 (e4m3, or bytes of it).
        The scale of an 8-bit cache, float32 of one element, None for 1, is read by every call.
        """
        require_int("k", k, minimum=1)
        if not isinstance(cache, Tensor):
            raise InvalidArgumentError("cache", "a tensor", type(cache).__name__)
        if cache.dim() != 3 or cache.shape[-1] < k:
            shape = list(cache.shape)
            raise InvalidArgumentError("cache", f"[blocks, page, {k}+p]", shape)
        if cache.dtype not in BYTE_DTYPES:
            return cls(cache[..., :k], cache[..., k:])
        parts = PER_TENSOR.parts(cache, k, cache.shape[-1] - k, scale)
        return cls(parts.latent, parts.rope, parts.scales)


def moved(known: Tensor, cache: Tensor) -> bool:
    """Whether a cache is another memory than the one that is known, or another view of it."""
    return (known.data_ptr(), known.shape, known.stride(), known.dtype) != (
        cache.data_ptr(), cache.shape, cache.stride(), cache.dtype,
    )  # fmt: skip


def paged_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    pages: Pages,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    max_q: int,
    query_start_loc: Tensor | None = None,
    causal: bool = True,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    total_lengths: Tensor | None = None,
    shards: int = 1,
    shard: int = 0,
    batch_invariant: bool = False,
    step: Step | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the newest tokens of every request over its latent cache.

    What is not described here is as for `mla_latent_attention`. Queries are packed, `[tokens, h,
    k]` and `[tokens, h, p]`; the rope part may be a view with a larger head stride.
    `query_start_loc` is int32 `[b+1]`, the first query of each request; None where each has
    `max_q`, which is otherwise an upper bound. The block table is int32 `[b, max_pages]`; entries
    beyond a request's tokens may be anything. `lengths` are int32 `[b]`, tokens of each request
    with its new ones, on the device. A tree mask is bool `[b, max_q, max_q]`. Where decode context
    parallelism interleaves tokens over ranks, `lengths` are those on this rank, `total_lengths`
    those on all. The kernel is by default `flash_mla:cute-dsl` on a GPU and PyTorch on the CPU.

    Returns:
        The latent output `[tokens, h, k]`, in `out` or new, and the LSE `[tokens, h]` in float32 or
        None.
    """
    if not (
        isinstance(q_latent, Tensor) and isinstance(q_rope, Tensor)
        and isinstance(lengths, Tensor) and isinstance(pages, Pages)
        and isinstance(max_q, int) and (out is None or isinstance(out, Tensor))
    ):  # fmt: skip
        raise _wrong_type(q_latent=q_latent, q_rope=q_rope, lengths=lengths, out=out, pages=pages,
                          max_q=max_q)  # fmt: skip
    if kernel is None:
        kernel = SERVING_KERNEL if q_latent.is_cuda else "auto"
    view = CacheView(pages.latent, pages.rope, lengths, block_table, scales=pages.scales)
    if q_latent.dim() != 3:
        raise InvalidArgumentError("q_latent", "[tokens, h, k]", list(q_latent.shape))
    tokens, h, k = q_latent.shape
    # The rows are sliced or divided by request below, which would hide others.
    for name, given in (("q_rope", q_rope), ("out", out)):
        if given is not None and given.shape[:1] != (tokens,):
            raise InvalidArgumentError(name, f"[tokens={tokens}, h, ...]", list(given.shape))
    options: dict[str, Any] = {}  # only what is given, so that the key of the call stays short
    if total_lengths is not None or shards != 1 or shard != 0:
        options |= {"total_lengths": total_lengths, "shards": shards, "shard": shard}
    if batch_invariant:
        options["batch_invariant"] = True
    if step is not None:
        options["step"] = step
    if query_start_loc is None:
        b = lengths.shape[0]
        if tokens != b * max_q:
            raise InvalidArgumentError("q_latent", f"{b} requests x {max_q} tokens", tokens)
        shape = (b, max_q, h)
        into = None if out is None else out.unflatten(0, shape[:2])
        output, lse = mla_latent_attention(
            q_latent.unflatten(0, shape[:2]), q_rope.unflatten(0, shape[:2]), view, kernel=kernel,
            scale=scale, causal=causal, tree_mask=tree_mask, out=into, **options,
        )  # fmt: skip
        return output.view(tokens, h, k), lse.view(tokens, h) if return_lse else None
    rows = slice(None)
    if not q_latent.is_cuda:  # PyTorch would write the rows that no request has
        bounds = [("b+1", lengths.shape[0] + 1)]
        require_tensor("query_start_loc", query_start_loc, bounds, INDEX_DTYPES, q_latent.device)
        out = q_latent.new_empty(q_latent.shape) if out is None else out
        rows = slice(int(query_start_loc[-1]))
    output, lse = mla_latent_attention(
        q_latent[rows], q_rope[rows], view, kernel=kernel, scale=scale, causal=causal,
        tree_mask=tree_mask, cu_seqlens_q=query_start_loc, max_q=max(max_q, 1),
        out=None if out is None else out[rows], **options,
    )  # fmt: skip
    if out is None:
        return output, lse if return_lse else None
    if return_lse and lse.shape[0] < tokens:
        lse = torch.cat([lse, lse.new_full((tokens - lse.shape[0], h), -torch.inf)])
    return out, lse if return_lse else None


def _wrong_type(**given: Any) -> InvalidArgumentError:
    """What to say of the first argument of `paged_attention` whose type is wrong."""
    others = {
        "pages": (Pages, "Pages, as Pages.of makes them"),
        "max_q": (int, "an integer"),
        "out": ((Tensor, type(None)), "a tensor"),
    }
    for name, value in given.items():
        kind, expected = others.get(name, (Tensor, "a tensor"))
        if not isinstance(value, kind):  # type: ignore[arg-type]
            break
    got = repr(value) if kind is int else type(value).__name__
    return InvalidArgumentError(name, expected, got)


def warm_up(
    h: int,
    max_q: int,
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    k: int = LATENT_WIDTH,
    p: int = ROPE_WIDTH,
    page_size: int = PAGE_SIZE,
    packed: bool = True,
    tree: bool = False,
    head_major: bool = True,
    shards: int = 1,
    batch_invariant: bool = False,
    step: bool = False,
    kernel: str | None = None,
) -> None:
    """Compile every program that calls of up to `max_q` query tokens need, before graph capture.

    The calls that it makes are small: an engine may have counted its memory before. They have `h`
    heads on the device, queries in `dtype`, and pages of rows of width k+p in `cache_dtype`,
    float8_e4m3fn for 8 bits, by default that of the queries. They may be packed (bring
    `query_start_loc`), bring a tree mask or a `Step`, and head-major latent queries, views of `[h,
    tokens, k]`, beside token-major ones. Shards, batch invariance and kernel are as for
    `paged_attention`.
    """
    device = require_device(device)
    require_int("h", h, minimum=1)
    require_int("max_q", max_q, minimum=1)
    b = 2  # head-major queries of one token are token-major too
    # One program serves all counts of `KERNEL_ROWS` and more, but for one token, perhaps.
    counts = range(1, min(max_q, -(-KERNEL_ROWS // h) + 1) + 1)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for s in counts:
        blocks = -(-s // page_size)
        cache = torch.empty((blocks, page_size, k + p), dtype=cache_dtype or dtype, device=device)
        cache.view(torch.uint8).zero_()
        q = torch.zeros((b * s, h, k + p), dtype=dtype, device=device)
        token_major, rope = q[..., :k].contiguous(), q[..., k:]
        by_head = token_major.transpose(0, 1).contiguous().transpose(0, 1)
        for q_latent in (token_major, by_head)[: 2 if head_major else 1]:
            paged_attention(
                q_latent, rope, Pages.of(cache, k), ints(*range(blocks)).expand(b, -1), ints(s, s),
                scale=1.0, max_q=s, query_start_loc=ints(0, s, b * s) if packed else None,
                tree_mask=torch.ones((b, s, s), dtype=torch.bool, device=device) if tree else None,
                total_lengths=ints(s, s) if shards > 1 else None, shards=shards,
                batch_invariant=batch_invariant, kernel=kernel,
                step=Step(device) if step else None,
            )  # fmt: skip


@lru_cache(maxsize=64)
def latent_crossover(h: int, device_name: str, cache_dtype: str | None = None) -> int:
    """The most query tokens per request that are faster latent than decompressed.

    By the cost model, with h query heads on a device of the package's table: at most
    `MOST_LATENT_QUERIES`, and `DEFAULT_CROSSOVER` for a device that the model does not know. The
    format of an 8-bit cache counts for latent attention; decompressed it is in 16 bits either way.
    """

    def time_us(kernel: str, s: int, cache_dtype: str | None) -> float:
        found = explain(
            b=CROSSOVER_REQUESTS, s=s, t=CROSSOVER_TOKENS, h=h, page_size=PAGE_SIZE,
            device_name=device_name, cache_dtype=cache_dtype,
        )  # fmt: skip
        known = (candidate for candidate in found.candidates if candidate.language == "cute-dsl")
        times = {each.kernel: each.predicted_us for each in known if each.predicted_us is not None}
        return times[kernel]

    def latent_wins(s: int) -> bool:
        return time_us("flash_mla", s, cache_dtype) <= time_us("flash_attention", s, None)

    try:
        low, high = 1, MOST_LATENT_QUERIES + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if latent_wins(middle) else (low, middle)
    except (UnknownNameError, KeyError):  # another device, or one without rates of these kernels
        return DEFAULT_CROSSOVER
    return low
