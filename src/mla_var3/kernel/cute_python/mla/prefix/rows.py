"""gather_queries and merge_prefix: queries of a group side by side, and the way back.

    gather_queries
        q_latent [tokens, h, 512], q_rope [tokens, h, 64]   any strides between tokens and heads
        order [tokens] int32                                the query token of each packed row
        bounds [chunks+1] int32                             the last one ends the rows of all groups
        -> packed_latent [tokens, h, 512], packed_rope [tokens, h, 64], contiguous

    merge_prefix, in place
        o [rows, 512], lse [rows]                 of the own tokens; both are overwritten
        per level of prefixes, one or two:
            o_part [rows, 512], lse_part [rows]   in the order of the groups
            places [tokens] int32                 where a query token is in it; -1 for none

rows = tokens * heads; outputs in the input dtype, normalised within the partial; LSEs float32,
natural logarithm, -inf for a row without a visible token. A warp takes a row, a lane 16 of its
latent columns. Rows of no group are not written; rows of a part that no place names are never read.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, LOG2_E, ROPE

THREADS = 256
WARPS = THREADS // 32
COLUMNS = 8
"""Columns that a lane reads or copies at once: 16 bytes."""
CHUNKS = LATENT // (32 * COLUMNS)

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


class MergeArguments(NamedTuple):
    """The launch contract, in the order of the host arguments; without a second level no `_1`."""

    o: Operand
    lse: Operand
    o_0: Operand
    lse_0: Operand
    places_0: Operand
    o_1: Operand | None
    lse_1: Operand | None
    places_1: Operand | None
    rows: Size
    heads: Size
    ctas: Size | None


class MergePrefix:
    """Host and device code for one element type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(self, *arguments):
        """Launch the kernel."""
        *values, stream = arguments
        given = MergeArguments(*values)
        self.merge_prefix(given._replace(ctas=None)).launch(
            grid=(given.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def merge_prefix(self, given: MergeArguments):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane, rows, heads = thread % 32, given.rows, given.heads
        own_lses = cute.make_tensor(given.lse, cute.make_layout(rows))
        for row in cutlass.range(cta * WARPS + thread // 32, rows, ctas * WARPS, unroll=1):
            own_lse = own_lses[row]
            first_row, first = placed(given.lse_0, given.places_0, row, rows, heads)
            second_row, second = Int32(-1), -Float32.inf
            if const_expr(given.o_1 is not None):
                second_row, second = placed(given.lse_1, given.places_1, row, rows, heads)
            top = cute.arch.fmax(own_lse, cute.arch.fmax(first, second))
            if first_row >= 0 or second_row >= 0:
                floor = top
                if top == -Float32.inf:  # no part has a key: all weights are 0, not NaN
                    floor = Float32(0.0)
                own_weight = weight_of(own_lse, floor)
                first_weight = weight_of(first, floor)
                second_weight = weight_of(second, floor)
                total = own_weight + first_weight + second_weight
                scale = Float32(0.0)
                if total > 0.0:
                    scale = 1.0 / total
                for chunk in cutlass.range_constexpr(CHUNKS):
                    column = (chunk * 32 + lane) * COLUMNS
                    merged = self.columns(given.o, row, column) * own_weight
                    if first_weight > 0.0:
                        merged = merged + self.columns(given.o_0, first_row, column) * first_weight
                    if const_expr(given.o_1 is not None):
                        if second_weight > 0.0:
                            other = self.columns(given.o_1, second_row, column)
                            merged = merged + other * second_weight
                    narrow = cute.make_rmem_tensor(COLUMNS, self.dtype)
                    narrow.store((merged * scale).to(self.dtype))
                    place = (given.o + (Int64(row) * LATENT + column)).align(16)
                    cute.autovec_copy(narrow, cute.make_tensor(place, COLUMNS))
                cute.arch.sync_warp()  # all lanes have read the LSE that lane 0 overwrites
                if lane == 0 and total > 0.0:
                    own_lses[row] = top + cute.math.log(total)

    @cute.jit
    def columns(self, o: cute.Pointer, row: Int32, column: Int32):
        """Eight columns of a row, float32."""
        found = cute.make_rmem_tensor(COLUMNS, self.dtype)
        source = (o + (Int64(row) * LATENT + column)).align(16)
        cute.autovec_copy(cute.make_tensor(source, COLUMNS), found)
        return found.load().to(Float32)


@cute.jit
def placed(lses: cute.Pointer, places: cute.Pointer, row: Int32, rows: Int32, heads: Int32):
    """The row of a part that belongs to a row of the output, and its LSE; -1 and -inf for none."""
    place = cute.make_tensor(places, cute.make_layout(rows))[row // heads]
    found, lse = Int32(-1), -Float32.inf
    if place >= 0:
        found = place * heads + row % heads
        lse = cute.make_tensor(lses, cute.make_layout(rows))[found]
    return found, lse


@cute.jit
def weight_of(lse: Float32, top: Float32):
    """Weight of a part; 0 where it has no key."""
    return cute.math.exp2((lse - top) * LOG2_E, fastmath=True)
