"""The launch contract of the latent kernel: its operands and sizes, in argument order.

A compiled host entry takes flat arguments: tensors become pointers, ints and floats become numbers
(see `runtime/cute/arguments.py`). The order is that of the fields below and is written down here
only:

    latent kernel            LatentOperands, Partials, LatentSizes
    with the projections     ProjectionOperands, ProjectionSizes, then those of the latent kernel

`LATENT_FIELDS` and `WHOLE_FIELDS` name the arguments one by one. A replay gives pointers by these
names. In a traced host entry the same tuples hold device pointers and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.kernel.cute_python.mla.hopper.widths import LatentWidths
from mla_var3.runtime.cute.arguments import Int64Arg

if TYPE_CHECKING:
    from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape


class LatentOperands(NamedTuple):
    """The tensors of one call of the latent kernel.

    Attributes:
        q_latent: latent queries `[b, s, h, k]`, or `[total_q, h, k]` with `cu_seqlens_q`; query
            tokens at equal distances, and heads (see `head_box`).
        q_rope: their rope part, p wide; None where p is 0.
        latent: dense cache `[b, t, k]`, or pages `[pages, page, k]`.
        rope: its rope part, p wide; None where p is 0.
        block_table: `[b, pages of a request]` int32 for a paged cache, stride 1 in a row.
        lengths: `[b]` int32; counted as at most `max_tokens`.
        total_lengths: `[b]` int32, tokens of each request over all shards, where this cache is
            one; None where it holds every token.
        cu_seqlens_q: `[b + 1]` int32, the first query of each request; None when all requests have
            the same number.
        tree: bool or uint8 `[b, s, s]`, which of the newest tokens a query sees within causal
            order, stride 1 in a row; None for causal order alone.
        scales: float32 of an 8-bit cache, `[pages, page]` or `[b, t]`, or `[1]` for all of it; None
            in 16 bits.
        schedule: int32 `[SCHEDULE_SIZE]` that launches share, see `schedule.py`; None where every
            CTA finds its range itself.
        o_latent: output like `q_latent`, contiguous.
        lse: natural log-sum-exp, float32, like `q_latent` without the last dimension, contiguous.
    """

    q_latent: Tensor
    q_rope: Tensor | None
    latent: Tensor
    rope: Tensor | None
    block_table: Tensor | None
    lengths: Tensor
    total_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    tree: Tensor | None
    scales: Tensor | None
    schedule: Tensor | None
    o_latent: Tensor
    lse: Tensor

    @classmethod
    def allocate(
        cls,
        rows: Sequence[int],
        q_latent: Tensor,
        q_rope: Tensor | None,
        latent: Tensor,
        rope: Tensor | None,
        lengths: Tensor,
        block_table: Tensor | None = None,
        total_lengths: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        tree: Tensor | None = None,
        o_latent: Tensor | None = None,
        scales: Tensor | None = None,
        schedule: Tensor | None = None,
    ) -> LatentOperands:
        """The operands with new outputs of `rows` rows, such as `(b, s, h)`."""
        if o_latent is None:
            o_latent = q_latent.new_empty((*rows, latent.shape[-1]))
        lse = q_latent.new_empty(tuple(rows), dtype=torch.float32)
        return cls(
            q_latent, q_rope, latent, rope, block_table, lengths, total_lengths, cu_seqlens_q, tree,
            scales, schedule, o_latent, lse,
        )  # fmt: skip

    @property
    def widths(self) -> LatentWidths:
        """The widths of the rows."""
        return LatentWidths(self.latent.shape[-1], 0 if self.rope is None else self.rope.shape[-1])

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the kernel reads."""
        return [tensor for tensor in self[: self._fields.index("o_latent")] if tensor is not None]


class Partials(NamedTuple):
    """Workspace for the outputs and LSEs of splits; see `merge.py`."""

    o_partial: Tensor
    lse_partial: Tensor
    merges: Tensor


class LatentSizes(NamedTuple):
    """Numbers of one call of the latent kernel. Strides are in elements.

    Attributes:
        queries: queries per request, the most of any where they differ.
        q_latent_stride, q_rope_stride: between heads, and between all query rows unless the
            program has a `head_box`.
        q_latent_token_stride, q_rope_token_stride: between query tokens.
        pages, page_tokens: the first two dimensions of the cache, b and t for a dense one.
        max_tokens: slots of a request. Longer lengths are cut to it, so that no wrong length on the
            device makes the kernel read outside of the block table.
        tree_stride, tree_row_stride: between requests and between queries.
        shards, shard: with `total_lengths`, token i of a request lies in shard i % shards, and
            this cache is number `shard`.
        whole_items: 1 if no request is split, see `LatentOptions.batch_invariant`.
        group_ctas, visits, group_count, cluster_ctas: see `GroupShape` in `groups.py`.
        scales_page_stride: between the scales of two pages; 0 without scales per token.
    """

    scale_log2e: float
    requests: int
    queries: int
    heads: int
    total_rows: int
    q_latent_stride: int
    q_rope_stride: int
    q_latent_token_stride: int
    q_rope_token_stride: int
    pages: int
    page_tokens: int
    max_tokens: int
    latent_page_stride: Int64Arg
    latent_stride: int
    rope_page_stride: Int64Arg
    rope_stride: int
    scales_page_stride: Int64Arg
    block_table_stride: int
    tree_stride: int
    tree_row_stride: int
    newest: int
    causal: int
    sliding_window: int | None
    shards: int
    shard: int
    whole_items: int
    scheduled: int
    group_ctas: int
    visits: int
    group_count: int
    cluster_ctas: int


class ProjectionOperands(NamedTuple):
    """The tensors of the projections around the latent kernel, all contiguous.

    Attributes:
        w_uk, w_uv: `[h, d, k]` and `[h, k, v]`.
        q_nope: queries without rope, `[..., h, d]`.
        out: output, `[..., h, v]`.
    """

    w_uk: Tensor
    w_uv: Tensor
    q_nope: Tensor
    out: Tensor


class ProjectionSizes(NamedTuple):
    """Numbers of the projections."""

    tokens: int
    query_ctas: int
    output_head_ctas: int
    output_columns: int


LATENT_FIELDS = (*LatentOperands._fields, *Partials._fields, *LatentSizes._fields)
"""Arguments of the latent kernel's host entry, without the stream."""
WHOLE_FIELDS = (*ProjectionOperands._fields, *ProjectionSizes._fields, *LATENT_FIELDS)
"""Arguments of the host entry with the projections, without the stream."""


def groups_of(arguments: Sequence[Any], *groups: Any) -> tuple[Any, ...]:
    """Flat arguments as the given tuples in order, then the list of those that remain."""
    found, start = [], 0
    for group in groups:
        end = start + len(group._fields)
        found.append(group(*arguments[start:end]))
        start = end
    return (*found, list(arguments[start:]))


@dataclass(frozen=True)
class LatentOptions:
    """Options of one call of the latent kernel.

    Attributes:
        max_q: most queries of any request.
        newest: newest tokens to leave out.
        sliding_window: newest tokens, up to itself, that a query sees; None for all.
        empty_positive: whether a query that sees no token has an LSE of +inf, not -inf.
        shards, shard: see `LatentSizes`.
        batch_invariant: whether the result of a request must not depend, bit by bit, on the other
            requests of the batch: nothing is split, and one program serves all batches.
        sms: SMs to use; 0 for all of the device.
        overlap: "first" where the next call may run at the same time, on other SMs, "second" for
            that call; see `FlashMLASm90`.
    """

    max_q: int
    causal: bool
    scale_log2e: float
    newest: int = 0
    empty_positive: bool = False
    shards: int = 1
    shard: int = 0
    batch_invariant: bool = False
    sliding_window: int | None = None
    scheduled: bool = False
    sms: int = 0
    overlap: str = ""


def may_cluster(options: LatentOptions) -> bool:
    """Whether two CTA groups may share items, see `cluster.py`."""
    return not options.batch_invariant and not options.overlap


def head_box(operands: LatentOperands) -> int:
    """Heads of a query token that one copy takes, where heads and tokens have own strides.

    0 when all query rows of both parts are at equal distances, as in `[tokens, h, k]`. Head-major
    queries, a view of `[h, tokens, k]`, have two strides. A copy then takes a box of heads and
    tokens, together 64 rows, so h must divide 64 or be a multiple of it; `can_box` says whether.
    """
    heads = operands.lse.shape[-1]
    parts = [part for part in operands[:2] if part is not None]
    if all(token_stride(part, heads) == heads * part.stride(-2) for part in parts):
        return 0
    return min(heads, ROWS)


def token_stride(q: Tensor, heads: int) -> int:
    """Distance between query tokens, from the innermost dimension that has several."""
    for size, stride in zip(reversed(q.shape[:-2]), reversed(q.stride()[:-2]), strict=True):
        if size > 1:
            return stride
    return heads * q.stride(-2)


def can_box(heads: int) -> bool:
    """Whether queries with a stride for tokens and one for heads can be read as they are."""
    return ROWS % heads == 0 or heads % ROWS == 0


def latent_arguments(
    operands: LatentOperands, partials: Partials, options: LatentOptions, shape: GroupShape
) -> tuple[Any, ...]:
    """The arguments of the latent kernel's host entry, in the order of `LATENT_FIELDS`."""
    q_latent, q_rope, latent, rope = operands[:4]
    table, tree, scales = operands.block_table, operands.tree, operands.scales
    heads = operands.lse.shape[-1]
    sizes = LatentSizes(
        scale_log2e=options.scale_log2e,
        requests=operands.lengths.shape[0],
        queries=options.max_q,
        heads=heads,
        total_rows=operands.lse.numel(),
        q_latent_stride=q_latent.stride(-2),
        q_rope_stride=0 if q_rope is None else q_rope.stride(-2),
        q_latent_token_stride=token_stride(q_latent, heads),
        q_rope_token_stride=0 if q_rope is None else token_stride(q_rope, heads),
        pages=latent.shape[0],
        page_tokens=latent.shape[1],
        max_tokens=latent.shape[1] * (1 if table is None else table.shape[1]),
        latent_page_stride=Int64Arg(latent.stride(0)),
        latent_stride=latent.stride(1),
        rope_page_stride=Int64Arg(0 if rope is None else rope.stride(0)),
        rope_stride=0 if rope is None else rope.stride(1),
        scales_page_stride=Int64Arg(0 if scales is None or scales.dim() < 2 else scales.stride(0)),
        block_table_stride=0 if table is None else table.stride(0),
        tree_stride=0 if tree is None else tree.stride(0),
        tree_row_stride=0 if tree is None else tree.stride(1),
        newest=options.newest,
        causal=int(options.causal),
        sliding_window=options.sliding_window,
        shards=options.shards,
        shard=options.shard,
        whole_items=int(options.batch_invariant),
        scheduled=int(options.scheduled),
        group_ctas=shape.group_ctas,
        visits=shape.visits,
        group_count=shape.group_count,
        cluster_ctas=shape.cluster_ctas if may_cluster(options) else 1,
    )
    if tree is not None:  # a pointer to bytes
        operands = operands._replace(tree=tree.view(torch.uint8))
    return (*operands, *partials, *sizes)
