"""gather_queries: bring the queries of a group side by side.

    q_latent [tokens, h, 512], q_rope [tokens, h, 64]   any strides between tokens and heads
    order [tokens] int32                                the query token of each packed row
    bounds [chunks+1] int32                             the last one ends the rows of all groups
    -> packed_latent [tokens, h, 512], packed_rope [tokens, h, 64], contiguous

A warp takes a row, a lane 16 of its latent columns. Rows of no group are not written.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, ROPE

THREADS = 256
WARPS = THREADS // 32
COLUMNS = 8
"""Columns that a lane copies at once: 16 bytes."""

Operand = Tensor | cute.Pointer
Size = int | Int32


class GatherArguments(NamedTuple):
    """The launch contract, in the order of the host arguments; strides in elements."""

    q_latent: Operand
    q_rope: Operand
    order: Operand
    bounds: Operand
    packed_latent: Operand
    packed_rope: Operand
    tokens: Size
    heads: Size
    chunks: Size
    latent_token_stride: Size
    latent_head_stride: Size
    rope_token_stride: Size
    rope_head_stride: Size
    ctas: Size


@cute.jit
def copy_columns(
    source: cute.Pointer, start: Int64, target: cute.Pointer, to: Int64, column: Int32,
    dtype: cutlass.Constexpr,
):  # fmt: skip
    """Copy eight columns of a row."""
    held = cute.make_rmem_tensor(COLUMNS, dtype)
    cute.autovec_copy(cute.make_tensor((source + (start + column)).align(16), COLUMNS), held)
    cute.autovec_copy(held, cute.make_tensor((target + (to + column)).align(16), COLUMNS))


@cute.jit
def gather_row(
    row: Int32, lane: Int32, lanes: cutlass.Constexpr, given: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):  # fmt: skip
    """Copy one head of one query token."""
    order = cute.make_tensor(given.order, cute.make_layout(given.tokens))
    token, head = Int64(order[row // given.heads]), Int64(row % given.heads)
    latent = token * given.latent_token_stride + head * given.latent_head_stride
    rope = token * given.rope_token_stride + head * given.rope_head_stride
    for part in cutlass.range(lane, LATENT // COLUMNS, lanes, unroll=1):
        to, column = Int64(row) * LATENT, part * COLUMNS
        copy_columns(given.q_latent, latent, given.packed_latent, to, column, dtype)
    for part in cutlass.range(lane, ROPE // COLUMNS, lanes, unroll=1):
        to, column = Int64(row) * ROPE, part * COLUMNS
        copy_columns(given.q_rope, rope, given.packed_rope, to, column, dtype)


@cute.jit
def row_count(given: cutlass.Constexpr):
    """Rows of all groups."""
    bounds = cute.make_tensor(given.bounds, cute.make_layout(given.chunks + 1))
    return cutlass.min(bounds[given.chunks], given.tokens) * given.heads


class GatherQueries:
    """Host and device code for one element type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(self, *arguments):
        """Launch the kernel."""
        *values, stream = arguments
        given = GatherArguments(*values)
        self.gather_queries(given).launch(
            grid=(given.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def gather_queries(self, given: GatherArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        first, rows = cta * WARPS + thread // 32, row_count(given)
        for row in cutlass.range(first, rows, ctas * WARPS, unroll=1):
            gather_row(row, thread % 32, 32, given, self.dtype)
