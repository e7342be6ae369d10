"""The cuTile latent kernels behind the attention call: pages, packed queries, trees, 8-bit caches.

They run in the interpreter, which refuses every access outside of an array.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_var3 import mla_latent_attention
from mla_var3.attention.cache.view import CacheView
from mla_var3.op.mla.cache_formats import (
    FORMATS,
    PER_TENSOR,
    CacheFormat,
    cache_format,
    dequantise,
    quantise,
)

from .attention_support import (
    ancestors_by_walking,
    assert_close,
    latent_oracle,
    paged,
    pool_in_8_bits,
    random_parents,
)

KERNELS = ("flash_mla:cutile-dsl", "flash_mla_split_kv:cutile-dsl")
LENGTHS = (130, 47, 0, 64)
F64 = torch.float64
FORMAT = pytest.mark.parametrize("cache_dtype", FORMATS)
SLOTS = 192


class Call:
    """Latent queries over a cache whose unused slots and pages hold NaN."""

    def __init__(
        self,
        generator: torch.Generator,
        *,
        counts: tuple[int, ...] = (3, 3, 3, 3),
        h: int = 5,
        k: int = 128,
        p: int = 16,
        page: int | None = 64,
        lengths: tuple[int, ...] = LENGTHS,
        cache_dtype: str | None = None,
    ) -> None:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(torch.bfloat16)

        self.k, self.counts = k, counts
        self.tokens = [normal(length, k + p) for length in lengths]
        self.q, self.q_rope = normal(sum(counts), h, k), normal(sum(counts), h, p)
        used = torch.tensor(lengths, dtype=torch.int32)
        b = len(lengths)
        if page is None:
            rows, table = torch.full((b, SLOTS, k + p), torch.nan, dtype=torch.bfloat16), None
            for request, tokens in enumerate(self.tokens):
                rows[request, : len(tokens)] = tokens
        else:
            each = -(-SLOTS // page)
            order = torch.randperm(b * each, generator=generator) + 1
            # What lies beyond a request's tokens is never looked up in the pool.
            rows, table = paged(self.tokens, page, each, order, 2**31 - 1)
            table[:, 1::2][table[:, 1::2] == 2**31 - 1] = -7
        self.cache = CacheView(rows[..., :k], rows[..., k:], used, table)
        if cache_dtype is not None:
            self._store_in_8_bits(cache_format(cache_dtype))

    def _store_in_8_bits(self, fmt: CacheFormat) -> None:
        """The same cache in bytes; `tokens` become what it is worth. A NaN row has NaN scales."""
        view, scale = self.cache, torch.tensor([0.013]) if fmt is PER_TENSOR else None
        pool, _ = pool_in_8_bits(view.latent, view.rope, fmt, scale)
        parts = fmt.parts(pool, self.k, view.rope.shape[-1], scale)
        self.cache = CacheView(
            parts.latent, parts.rope, view.lengths, view.block_table, scales=parts.scales
        )
        self.tokens = [
            torch.cat(
                dequantise(quantise(rows[:, : self.k], rows[:, self.k :], fmt, scale), F64), -1
            )
            for rows in self.tokens
        ]

    @property
    def bounds(self) -> torch.Tensor:
        return torch.tensor((0, *self.counts)).cumsum(0).to(torch.int32)

    def packing(self) -> dict[str, Any]:
        """The options of packed queries, where requests have different numbers of them."""
        if len(set(self.counts)) == 1:
            return {}
        return {"cu_seqlens_q": self.bounds, "max_q": max(self.counts)}

    def random_trees(self, generator: torch.Generator) -> torch.Tensor:
        parents = random_parents(generator, len(self.counts), max(self.counts)).tolist()
        return torch.stack([ancestors_by_walking(row) for row in parents])

    def run(self, kernel: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE as [tokens, h, ...]."""
        q, q_rope = self.q, self.q_rope
        if "cu_seqlens_q" not in options:
            shape = len(self.counts), self.counts[0], *q.shape[1:2]
            q, q_rope = q.view(*shape, -1), q_rope.view(*shape, -1)
        output, lse = mla_latent_attention(
            q, q_rope, self.cache, d=self.k, kernel=kernel, **options
        )
        return output.reshape(self.q.shape), lse.reshape(self.q.shape[:2])

    def check(self, kernel: str, tree: torch.Tensor | None = None, **options: Any) -> None:
        """Compare a call with float64, request by request."""
        if tree is not None:
            options["tree_mask"] = tree
        output, lse = self.run(kernel, **options)
        for request, (first, last) in enumerate(pairwise(self.bounds.tolist())):
            tokens, own = self.tokens[request], slice(first, last)
            mask = None if tree is None else tree[request, : last - first, : last - first]
            expected, expected_lse = latent_oracle(
                self.q[own], self.q_rope[own], tokens[:, : self.k], tokens[:, self.k :],
                causal=options.get("causal", True), tree=mask,
                sliding_window=options.get("sliding_window"),
            )  # fmt: skip
            if last > first:
                assert_close(output[own], expected, lse[own], expected_lse)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [None, 16, 32, 48, 64, 128])
def test_pages(kernel, page, causal, generator):
    Call(generator, page=page).check(kernel, causal=causal)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page", [None, 32])
@pytest.mark.parametrize("max_q", [None, 33])
def test_packed_queries(kernel, page, max_q, generator):
    """One tile, several tiles, no query and no token."""
    call = Call(generator, counts=(33, 1, 2, 0), page=page)
    call.check(kernel, cu_seqlens_q=call.bounds, max_q=max_q)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize("counts", [(33, 33, 33, 33), (7, 1, 0, 5)])
def test_trees(kernel, page, counts, generator):
    """33 drafts reach over several KV tiles, so that later row tiles also mask earlier ones."""
    call = Call(generator, counts=counts, page=page)
    call.check(kernel, call.random_trees(generator), **call.packing())


@pytest.mark.parametrize("kernel", (*KERNELS, "torch_tiled"))
@pytest.mark.parametrize("page", [None, 16, 64])
@pytest.mark.parametrize(
    ("window", "counts"), [(1, (3, 3, 3, 3)), (20, (33, 1, 2, 0)), (70, (3, 3, 3, 3))]
)
@pytest.mark.parametrize("causal", [True, False])
def test_sliding_windows(kernel, page, window, counts, causal, generator):
    """Pages that no query sees have gone to others: the table says nothing about them."""
    call = Call(generator, counts=counts, page=page)
    table = call.cache.block_table
    for request, (tokens, count) in enumerate(zip(call.tokens, counts, strict=True)):
        freed = max(len(tokens) - count + 1 - window, 0)
        if table is not None and page is not None:
            table[request, : freed // page] = 0  # a page of NaN
    call.check(kernel, causal=causal, sliding_window=window, **call.packing())


@FORMAT
@pytest.mark.parametrize("kernel", (*KERNELS, "torch_tiled"))
@pytest.mark.parametrize(
    ("case", "page"), [("plain", None), ("packed", 16), ("tree", 64), ("window", 32)]
)
def test_8_bit_caches(cache_dtype, kernel, page, case, generator):
    counts = (7, 1, 0, 5) if case in ("packed", "tree") else (3, 3, 3, 3)
    call = Call(generator, counts=counts, k=512, page=page, cache_dtype=cache_dtype)
    tree = call.random_trees(generator) if case == "tree" else None
    options = {"sliding_window": 40} if case == "window" else {}
    call.check(kernel, tree, **call.packing(), **options)


@FORMAT
def test_8_bit_caches_are_read_where_they_lie(cache_dtype, generator, monkeypatch):
    """The kernel gets views of the pool: nothing is dequantised or copied before."""
    call = Call(generator, k=512, p=64, cache_dtype=cache_dtype)
    seen: list[Any] = []
    monkeypatch.setattr(
        "mla_var3.runtime.interpreter.launch", lambda grid, kernel, args: seen.extend(args)
    )
    call.run(KERNELS[0])
    given = {tensor.data_ptr() for tensor in seen if isinstance(tensor, torch.Tensor)}
    cache = call.cache
    assert cache.scales is not None
    assert {part.data_ptr() for part in (cache.latent, cache.rope, cache.scales)} <= given


def test_a_pool_of_more_than_2_gib(generator):
    """The last page of a request is a slice of the pool; most of its memory is never touched."""
    call = Call(generator, k=512, p=64, counts=(3,), lengths=(70,), cache_dtype="fp8_ds_mla")
    small, fmt = call.cache, cache_format("fp8_ds_mla")
    pages = 2**31 // (64 * 656) + 4
    parts = fmt.parts(torch.empty((pages, 64, 656), dtype=torch.uint8), 512, 64)
    assert small.block_table is not None and small.scales is not None
    first = pages - len(small.latent)
    for name in ("latent", "rope", "scales"):
        getattr(parts, name)[first:].view(torch.uint8).copy_(getattr(small, name).view(torch.uint8))
    table = small.block_table + first
    table[:, 2:] = 0
    call.cache = CacheView(parts.latent, parts.rope, small.lengths, table, scales=parts.scales)
    for kernel in KERNELS:
        call.check(kernel)


@FORMAT
def test_nan_in_an_8_bit_cache_is_not_hidden(cache_dtype, generator):
    call = Call(generator, k=512, counts=(3,), lengths=(47,), page=None, cache_dtype=cache_dtype)
    call.cache.latent.view(torch.uint8)[0, 5, 300] = 0x7F
    output, _ = call.run(KERNELS[0])
    assert output.isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("k", "p"), [(512, 64), (512, 0), (256, 64), (256, 32)])
@pytest.mark.parametrize("h", [1, 12, 20])
def test_widths_and_heads(kernel, k, p, h, generator):
    call = Call(generator, h=h, k=k, p=p, counts=(5, 5), lengths=(70, 33))
    call.check(kernel)


@pytest.mark.parametrize("kernel", (*KERNELS, "torch_tiled"))
def test_padding_behind_the_last_request(kernel, generator):
    """Rows of no request, as in a CUDA graph for a larger batch: 0 and -inf."""
    call = Call(generator, counts=(3, 2, 1, 5))
    bounds = call.bounds
    bounds[-1] -= 2
    output, lse = call.run(kernel, cu_seqlens_q=bounds, max_q=3)
    assert torch.count_nonzero(output[-2:]) == 0
    assert bool((lse[-2:] == -torch.inf).all())
    assert bool(output.isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_wrong_values_stay_inside_the_tensors(kernel, generator, monkeypatch):
    """What only the device knows is not checked by the host: the interpreter checks accesses."""
    monkeypatch.setattr("mla_var3.attention.request.validate.check_values", lambda task: None)
    for page in (None, 16, 64):
        for length in (-5, SLOTS + 1, 2**31 - 1):
            call = Call(generator, page=page)
            call.cache.lengths[1] = length
            call.run(kernel)
    call = Call(generator)
    assert call.cache.block_table is not None
    call.cache.block_table[0] = torch.tensor([-1, 10**6, -(2**31)])
    call.run(kernel)
    for wrong in ([0, -3, 99, 2, 12], [5, 4, 3, 2, 1], [99, 99, 99, 99, 99]):
        call.run(kernel, cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32), max_q=3)
