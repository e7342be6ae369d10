"""Batches as serving engines hand them over, and what comes out, in float64."""

from __future__ import annotations

import copy

import torch

from mla_var3.integrations import paged
from tests.unit.attention.attention_support import latent_oracle
from tests.unit.attention.attention_support import paged as in_pages

K, P, H, PAGE = 512, 64, 4, 64
SCALE = 192**-0.5


class Batch:
    """Requests in a cache whose pages are scattered; what nobody may read is NaN."""

    def __init__(
        self, counts: list[int], lengths: list[int], padding: int = 0, h: int = H, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(len(counts) + 100 * seed)
        pages = [-(-n // PAGE) for n in lengths]
        self._order = torch.randperm(sum(pages) + 3, generator=g)
        self.put([torch.randn((length, K + P), generator=g) for length in lengths])
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.counts = counts
        starts = torch.tensor([0, *counts]).cumsum(0)
        self.starts = starts.to(torch.int32)
        self.q = torch.randn((sum(counts) + padding, h, K + P), generator=g)

    def put(self, rows: list[torch.Tensor]) -> None:
        """Give the requests these tokens."""
        self.rows, columns = rows, max(-(-len(own) // PAGE) for own in rows) + 1
        self.cache, self.table = in_pages(rows, PAGE, columns, self._order, 9999)

    def attend(self, **options):
        given = {
            "q_latent": self.q[..., :K],
            "q_rope": self.q[..., K:],
            "pages": paged.Pages.of(self.cache, K),
            "block_table": self.table,
            "lengths": self.lengths,
            "scale": SCALE,
            "max_q": max(self.counts),
            "query_start_loc": self.starts,
        }
        return paged.paged_attention(**(given | options))

    def head_major(self) -> torch.Tensor:
        """The latent queries as a view of `[h, tokens, k]`."""
        return self.q[..., :K].transpose(0, 1).contiguous().transpose(0, 1)

    def only(self, request: int) -> Batch:
        """A batch of one of the requests."""
        one = copy.copy(self)
        own = slice(int(self.starts[request]), int(self.starts[request + 1]))
        one.q, one.counts = self.q[own], self.counts[request : request + 1]
        one.starts = (self.starts[request : request + 2] - own.start).to(torch.int32)
        one.table, one.lengths = self.table[request : request + 1], self.lengths[request, None]
        return one

    def shard(self, shard: int, shards: int) -> Batch:
        """The same requests with every `shards`-th token from `shard` on in the cache."""
        part = Batch(self.counts, [len(rows[shard::shards]) for rows in self.rows])
        part.q = self.q
        part.put([rows[shard::shards] for rows in self.rows])
        return part

    def on_gpu(self) -> Batch:
        """The same batch on a GPU in bfloat16; what `expected` reads is rounded alike."""
        self.rows = [rows.bfloat16().float() for rows in self.rows]
        self.q = self.q.cuda().bfloat16()
        self.cache = self.cache.cuda().bfloat16()
        self.table, self.lengths, self.starts = (
            tensor.cuda() for tensor in (self.table, self.lengths, self.starts)
        )
        return self

    def require(
        self, output: torch.Tensor, lse: torch.Tensor | None = None, *, tree=None, **tolerance
    ) -> None:
        """Compare with float64."""
        tolerance = {"atol": 1e-5, "rtol": 1e-4, **tolerance}
        expected, expected_lse = self.expected(tree)
        torch.testing.assert_close(output.cpu().double(), expected, **tolerance)
        if lse is not None:
            torch.testing.assert_close(lse.cpu().double(), expected_lse, **tolerance)

    def expected(self, tree: torch.Tensor | None = None):
        """Output and LSE in float64, request by request."""
        outputs, lses = [], []
        for request, (rows, count) in enumerate(zip(self.rows, self.counts, strict=True)):
            begin = int(self.starts[request])
            q = self.q[begin : begin + count].cpu()
            output, lse = latent_oracle(
                q[..., :K], q[..., K:], rows[:, :K], rows[:, K:], scale=SCALE,
                tree=None if tree is None else tree[request],
            )  # fmt: skip
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs), torch.cat(lses)
