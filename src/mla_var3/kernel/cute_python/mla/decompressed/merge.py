"""merge_windows: join the parts into which the decompressed kernel cut its windows.

    o_parts [parts, rows, 128] float32, normalised within the part; lse_parts [parts, rows]
    -> o [rows, 128] in the input dtype, lse [rows] (natural logarithm)

A warp takes a row, a lane four of its columns. Parts without a visible token have -inf and weigh
nothing.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from mla_var3.kernel.cute_python.mla.decompressed.jobs import HEAD
from mla_var3.kernel.cute_python.mla.latent.ops import LN_2

THREADS = 256
COLUMNS = HEAD // 32
"""Columns of a lane: 16 bytes of float32."""


class WindowMerge:
    """Host and device code for one element type."""

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        o_parts: cute.Pointer,
        lse_parts: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        rows: Int32,
        parts: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.merge_windows(
            o_parts,
            cute.make_tensor(lse_parts, cute.make_layout((rows, parts))),
            o,
            cute.make_tensor(lse, cute.make_layout(rows)),
            rows,
            parts,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def merge_windows(
        self,
        o_parts: cute.Pointer,
        lse_parts: cute.Tensor,
        o: cute.Pointer,
        lse: cute.Tensor,
        rows: Int32,
        parts: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warps = THREADS // 32
        for row in cutlass.range(block * warps + thread // 32, rows, blocks * warps, unroll=1):
            top = -Float32.inf
            for part in cutlass.range(parts, unroll=1):
                top = cute.arch.fmax(top, lse_parts[row, part])
            total = Float32(0.0)
            mixed = cute.make_rmem_tensor(COLUMNS, Float32)
            mixed.fill(0.0)
            if top > -Float32.inf:
                for part in cutlass.range(parts, unroll=1):
                    weight = cute.math.exp2((lse_parts[row, part] - top) / LN_2, fastmath=True)
                    total += weight
                    at = (Int64(part) * rows + row) * HEAD + lane * COLUMNS
                    columns = cute.make_rmem_tensor(COLUMNS, Float32)
                    cute.autovec_copy(cute.make_tensor((o_parts + at).align(16), COLUMNS), columns)
                    mixed.store(mixed.load() + columns.load() * weight)
                mixed.store(mixed.load() * cute.arch.rcp_approx(total))
                top += cute.math.log2(total, fastmath=True) * LN_2
            narrow = cute.make_rmem_tensor(COLUMNS, self.dtype)
            narrow.store(mixed.load().to(self.dtype))
            place = (o + (Int64(row) * HEAD + lane * COLUMNS)).align(8)
            cute.autovec_copy(narrow, cute.make_tensor(place, COLUMNS))
            if lane == 0:
                lse[row] = top
