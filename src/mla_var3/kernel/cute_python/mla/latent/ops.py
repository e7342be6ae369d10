"""Device pieces that several parts of the latent kernel use."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    KV_BLOCK_BITS,
    LN_2,
    MMA_DEPTH,
    RANGE_WORDS,
)
from mla_var3.kernel.cute_python.mla.hopper.widths import LatentWidths


class OutputTensors(NamedTuple):
    """What the kernels write, in the order of their arguments.

    Attributes:
        o_latent: pointer to the output, [rows, k].
        lse: [rows] float32.
        o_partial, lse_partial, merges: partials of split work tiles, see `merge.py`.
    """

    o_latent: Any
    lse: Any
    o_partial: Any
    lse_partial: Any
    merges: Any


@dataclass(frozen=True)
class Outputs:
    """What the consumers write.

    Attributes:
        empty_positive: see `final_lse`; constant.
    """

    o_latent: Any
    lse: Any
    o_partial: Any
    lse_partial: Any
    merges: Any
    empty_positive: bool
    widths: LatentWidths


class IndexTensors(NamedTuple):
    """What the scheduler and the producer read, in the order of the kernels' arguments.

    Attributes:
        total_lengths, query_begins, tree: see `scheduler.Scheduler`; None where not given.
        schedule: `[CTAs, RANGE_WORDS]`, see `schedule.py`; None for ranges that CTAs find.
    """

    table: Any
    lengths: Any
    total_lengths: Any
    query_begins: Any
    tree: Any
    schedule: Any

    @classmethod
    def of(cls, operands: Any, sizes: Any) -> "IndexTensors":
        """The tensors of a traced host entry's `LatentOperands` and `LatentSizes`."""
        requests, queries = sizes.requests, sizes.queries

        def tensor(pointer: Any, shape: Any, stride: Any = None) -> Any:
            if pointer is None:
                return None
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

        row, ctas = sizes.block_table_stride, sizes.group_ctas * sizes.group_count
        tree_strides = (sizes.tree_stride, sizes.tree_row_stride, 1)
        return cls(
            tensor(operands.block_table, (requests, row), (row, 1)),
            tensor(operands.lengths, requests),
            tensor(operands.total_lengths, requests),
            tensor(operands.cu_seqlens_q, requests + 1),
            tensor(operands.tree, (requests, queries, queries), tree_strides),
            tensor(operands.schedule, (ctas, RANGE_WORDS), (RANGE_WORDS, 1)),
        )


class LaunchSizes(NamedTuple):
    """The numbers of `operands.LatentSizes` that the kernels read, in the order of their arguments.

    In addition, `total_queries`: query tokens of all requests.
    """

    requests: Any
    queries: Any
    total_queries: Any
    heads: Any
    pages: Any
    page_tokens: Any
    max_tokens: Any
    newest: Any
    causal: Any
    sliding_window: Any
    shards: Any
    shard: Any
    whole_items: Any
    group_ctas: Any
    visits: Any
    group_count: Any

    @classmethod
    def of(cls, sizes: Any) -> "LaunchSizes":
        """The numbers of a traced host entry's `LatentSizes`."""
        own = {name: getattr(sizes, name) for name in cls._fields if name != "total_queries"}
        return cls(total_queries=sizes.total_rows // sizes.heads, **own)


def quotient(dividend, divisor):
    """`dividend // divisor` of numbers that are not negative; on the device without signs."""
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor
    return (Uint32(dividend) // Uint32(divisor)).to(Int32)


def blocks_of(tokens):
    """KV blocks that hold so many tokens, which are not negative."""
    return (tokens + (KV_BLOCK - 1)) >> KV_BLOCK_BITS


@cute.jit
def divided(dividend: Int32, divisor: Int32) -> Int32:
    """`quotient` by a number that is 1 in most launches; nothing is divided then."""
    result = dividend
    if divisor > 1:
        result = quotient(dividend, divisor)
    return result


@cute.jit
def final_lse(lse_log2: Float32, empty_positive: cutlass.Constexpr):
    """The LSE of a row as it is returned (natural logarithm), from one in powers of two.

    A row without a visible token has -inf, or +inf where `empty_positive` asks for it, as FlashMLA
    returns it. Partials have -inf in any case.
    """
    result = lse_log2 * LN_2
    if const_expr(empty_positive):
        if lse_log2 == -Float32.inf:
            result = Float32.inf
    return result


@cute.jit
def compute_scores(
    mma: cute.TiledMma,
    a: cute.Tensor,
    b: cute.Tensor,
    acc: cute.Tensor,
    barriers: cute.Pointer,
    phase: Int32,
    parts: cutlass.Constexpr,
):
    """Issue acc = a b^T over the column tiles of a KV block as its parts arrive; does not wait."""
    # A private atom: setting a field of a shared one inside dynamic control flow is rejected.
    atom = cute.make_mma_atom(mma.op)
    for part in cutlass.range_constexpr(len(parts)):
        steps = parts[part].steps
        cute.arch.mbarrier_wait(barriers + parts[part].full, phase)
        warpgroup.fence()
        for i in cutlass.range_constexpr(len(steps)):
            at = (None, None, steps[i])
            atom.set(warpgroup.Field.ACCUMULATE, part + i > 0)
            cute.gemm(atom, acc, a[at], b[at], acc)
    warpgroup.commit_group()


@cute.jit
def add_values(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    """Issue acc += a b over the tokens of a KV block, P and V in either order; does not wait."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for step in cutlass.range_constexpr(KV_BLOCK // MMA_DEPTH):
        cute.gemm(atom, acc, a[(None, None, step)], b[(None, None, step)], acc)
    warpgroup.commit_group()
