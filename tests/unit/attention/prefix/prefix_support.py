"""Batches whose requests share first tokens, and the float64 oracle over what each one holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mla_var3.attention.cache.view import CacheView
from tests.unit.attention.attention_support import assert_close, latent_oracle, normal

PAGE = 64


@dataclass
class Batch:
    """Requests with their tokens `[m, k+p]`, and a cache that holds them.

    Slots and pages that hold no token are NaN.
    """

    cache: CacheView
    tokens: list[torch.Tensor]

    @property
    def k(self) -> int:
        return self.cache.latent.shape[-1]

    def require(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        causal: bool = True,
        trees: torch.Tensor | None = None,
    ) -> None:
        """Compare a latent call with the oracle, request by request."""
        b = len(self.tokens)
        each = [q.shape[1]] * b if counts is None else list(counts)
        flat = [x.flatten(0, -3) if counts is None else x for x in (q, q_rope, output)]
        flat_lse = lse.flatten(0, -2) if counts is None else lse
        first = 0
        for request, (rows, count) in enumerate(zip(self.tokens, each, strict=True)):
            own = slice(first, first + count)
            first += count
            expected, expected_lse = latent_oracle(
                flat[0][own].cpu(), flat[1][own].cpu(), rows[:, : self.k], rows[:, self.k :],
                scale=(128 + q_rope.shape[-1]) ** -0.5, causal=causal,
                tree=None if trees is None else trees[request],
            )  # fmt: skip
            assert_close(flat[2][own].cpu(), expected, flat_lse[own].cpu(), expected_lse)


def make_batch(
    generator: torch.Generator,
    lengths: Sequence[int],
    prefixes: Sequence[Sequence[tuple[int, int]]],
    *,
    paged: bool,
    k: int = 8,
    p: int = 4,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    t: int | None = None,
) -> Batch:
    """A batch in which requests start with the same tokens.

    Args:
        generator: of the tokens.
        lengths: tokens of each request.
        prefixes: of each request (segment, tokens) in order; equal segments hold equal tokens, and
            pages of whole segments are shared.
        paged: paged, or dense with a copy of every token.
        k: latent width.
        p: rope width.
        dtype: of the cache.
        device: of the cache.
        t: slots per request; by default as many as the longest needs.
    """
    longest = max([t or 1, *lengths])
    pages_each = -(-longest // PAGE)
    stock: dict[tuple[tuple[int, int], ...], torch.Tensor] = {}
    tokens = []
    for length, segments in zip(lengths, prefixes, strict=True):
        rows = []
        for depth, (_, count) in enumerate(segments):
            path = tuple(segments[: depth + 1])
            if path not in stock:
                stock[path] = normal(generator, count, k + p, dtype=dtype)
            rows.append(stock[path])
        own = normal(generator, max(0, length), k + p, dtype=dtype)
        tokens.append(torch.cat([*rows, own])[:length])
    counts = torch.tensor(lengths, dtype=torch.int32)
    if not paged:
        dense = torch.full((len(lengths), pages_each * PAGE, k + p), torch.nan, dtype=dtype)
        for request, held in enumerate(tokens):
            dense[request, : len(held)] = held
        dense = dense.to(device)
        return Batch(CacheView(dense[..., :k], dense[..., k:], counts.to(device)), tokens)
    known: dict[tuple[object, ...], int] = {}  # pages by request, or by segments
    table = torch.full((len(lengths), pages_each), 10**6, dtype=torch.int32)
    pages = [torch.full((PAGE, k + p), torch.nan, dtype=dtype)]
    for request, held in enumerate(tokens):
        shared = sum(count for _, count in prefixes[request])
        for column in range(-(-len(held) // PAGE)):
            own = (column + 1) * PAGE > min(shared, len(held))
            path = _path(prefixes[request], column)
            key = (request, column) if own else (column, *path)
            if key not in known:
                known[key] = len(pages)
                page = torch.full((PAGE, k + p), torch.nan, dtype=dtype)
                part = held[column * PAGE : (column + 1) * PAGE]
                page[: len(part)] = part
                pages.append(page)
            table[request, column] = known[key]
    pool = torch.stack(pages).to(device)
    view = CacheView(pool[..., :k], pool[..., k:], counts.to(device), table.to(device))
    return Batch(view, tokens)


def _path(segments: Sequence[tuple[int, int]], column: int) -> tuple[tuple[int, int], ...]:
    """The segments that a page touches and those before."""
    end, found = 0, []
    for segment in segments:
        if end >= (column + 1) * PAGE:
            break
        found.append(segment)
        end += segment[1]
    return tuple(found)
