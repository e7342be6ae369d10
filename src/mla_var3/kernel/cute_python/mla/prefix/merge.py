"""merge_prefix: merge attention over shared prefixes into attention over own tokens, in place.

    o [rows, 512], lse [rows]                 of the own tokens; both are overwritten
    per level of prefixes, one or two:
        o_part [rows, 512], lse_part [rows]   in the order of the groups
        places [tokens] int32                 where a query token is in it; -1 for none
    rows = tokens * heads; outputs in the input dtype, normalised within the partial; LSEs float32,
    natural logarithm, -inf for a row without a visible token.

A warp takes a row, a lane 16 of its columns. Rows of a part that no place names are never read.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, LOG2_E

THREADS = 256
WARPS = THREADS // 32
COLUMNS = 8
"""Columns that a lane reads at once: 16 bytes."""
CHUNKS = LATENT // (32 * COLUMNS)


class MergeArguments(NamedTuple):
    """The launch contract, in the order of the host arguments; see the module."""

    o: Tensor
    lse: Tensor
    o_0: Tensor
    lse_0: Tensor
    places_0: Tensor
    o_1: Tensor | None
    lse_1: Tensor | None
    places_1: Tensor | None
    rows: int
    heads: int
    ctas: int


class MergePrefix:
    """Host and device code for one element type."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        o: cute.Pointer,
        lse: cute.Pointer,
        first_o: cute.Pointer,
        first_lse: cute.Pointer,
        first_places: cute.Pointer,
        second_o: cute.Pointer | None,
        second_lse: cute.Pointer | None,
        second_places: cute.Pointer | None,
        rows: Int32,
        heads: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.merge_prefix(
            o, lse, first_o, first_lse, first_places, second_o, second_lse, second_places, rows,
            heads,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def merge_prefix(
        self,
        o: cute.Pointer,
        lse: cute.Pointer,
        first_o: cute.Pointer,
        first_lse: cute.Pointer,
        first_places: cute.Pointer,
        second_o: cute.Pointer | None,
        second_lse: cute.Pointer | None,
        second_places: cute.Pointer | None,
        rows: Int32,
        heads: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        own_lses = cute.make_tensor(lse, cute.make_layout(rows))
        for row in cutlass.range(cta * WARPS + thread // 32, rows, ctas * WARPS, unroll=1):
            own_lse = own_lses[row]
            first_row, first = placed(first_lse, first_places, row, rows, heads)
            second_row, second = Int32(-1), -Float32.inf
            if const_expr(second_o is not None):
                second_row, second = placed(second_lse, second_places, row, rows, heads)
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
                    merged = self.columns(o, row, column) * own_weight
                    if first_weight > 0.0:
                        merged = merged + self.columns(first_o, first_row, column) * first_weight
                    if const_expr(second_o is not None):
                        if second_weight > 0.0:
                            other = self.columns(second_o, second_row, column)
                            merged = merged + other * second_weight
                    narrow = cute.make_rmem_tensor(COLUMNS, self.dtype)
                    narrow.store((merged * scale).to(self.dtype))
                    place = (o + (Int64(row) * LATENT + column)).align(16)
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
