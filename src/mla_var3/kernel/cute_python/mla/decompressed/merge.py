"""merge_splits: merge the partials of the decompressed kernel's splits.

    o_partial [splits, rows, v] float32, normalised within the split; lse_partial [splits, rows]
    -> o [rows, v] in the input dtype, lse [rows] (natural logarithm)

A warp takes a row, a lane v / 32 of its columns. Splits without a visible token have -inf and weigh
nothing.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, LN_2

THREADS = 256


class MergeSplits:
    """Host and device code for one element type and width of the values."""

    def __init__(self, dtype, v=HEAD):
        self.dtype = dtype
        self.v = v

    @cute.jit
    def __call__(
        self,
        o_partial: cute.Pointer,
        lse_partial: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        rows: Int32,
        splits: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        self.merge_splits(
            o_partial,
            cute.make_tensor(lse_partial, cute.make_layout((rows, splits))),
            o,
            cute.make_tensor(lse, cute.make_layout(rows)),
            rows,
            splits,
        ).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def merge_splits(
        self,
        o_partial: cute.Pointer,
        lse_partial: cute.Tensor,
        o: cute.Pointer,
        lse: cute.Tensor,
        rows: Int32,
        splits: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warps = THREADS // 32
        v, count = self.v, self.v // 32  # columns of a row and of a lane
        for row in cutlass.range(cta * warps + thread // 32, rows, ctas * warps, unroll=1):
            top = -Float32.inf
            for split in cutlass.range(splits, unroll=1):
                top = cute.arch.fmax(top, lse_partial[row, split])
            total = Float32(0.0)
            merged = cute.make_rmem_tensor(count, Float32)
            merged.fill(0.0)
            if top > -Float32.inf:
                for split in cutlass.range(splits, unroll=1):
                    weight = cute.math.exp2((lse_partial[row, split] - top) / LN_2, fastmath=True)
                    total += weight
                    at = (Int64(split) * rows + row) * v + lane * count
                    columns = cute.make_rmem_tensor(count, Float32)
                    source = cute.make_tensor((o_partial + at).align(min(16, 4 * count)), count)
                    cute.autovec_copy(source, columns)
                    merged.store(merged.load() + columns.load() * weight)
                merged.store(merged.load() * cute.arch.rcp_approx(total))
                top += cute.math.log2(total, fastmath=True) * LN_2
            narrow = cute.make_rmem_tensor(count, self.dtype)
            narrow.store(merged.load().to(self.dtype))
            place = (o + (Int64(row) * v + lane * count)).align(min(16, 2 * count))
            cute.autovec_copy(narrow, cute.make_tensor(place, count))
            if lane == 0:
                lse[row] = top
