"""Small CuTe DSL kernels whose machine code the documentation cites.

CuTe DSL traces functions from source files, so they cannot be made in the tests themselves.
"""

import collections
import re
import tempfile
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator
from cutlass.runtime import make_fake_stream

from mla_var3.runtime.compile import disassemble

ROWS, COLUMNS, DEPTH = 64, 256, 64


def pointer(element: Any, alignment: int = 16) -> Any:
    return make_ptr(element, 0, cute.AddressSpace.gmem, assumed_align=alignment)


def compiled(host: Any, *arguments: Any) -> collections.Counter[str]:
    """How often each instruction, with its suffixes, occurs in the code for sm_90a."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {folder}"
        program = cute.compile(host, *arguments, make_fake_stream(), options=options)
        return instructions(program.__cubin__)


def instructions(cubin: bytes) -> collections.Counter[str]:
    """Instructions of a cubin, each by its full name and by the part before the first dot."""
    names = re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", disassemble(cubin).sass
    )
    return collections.Counter(names) + collections.Counter(
        name.split(".")[0] for name in names if "." in name
    )


@cute.kernel
def copy_rows(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    source = cute.local_tile(x, (1, 8), (block, thread))[(0, None)]
    target = cute.local_tile(y, (1, 8), (block, thread))[(0, None)]
    target.store(source.load())


class CopyRows:
    """Eight 16-bit elements per thread, with and without a stated row stride."""

    def __init__(self, stated: bool) -> None:
        self.stated = stated

    @cute.jit
    def __call__(
        self, x: cute.Pointer, y: cute.Pointer, rows: Int32, stride: Int32, stream: cuda.CUstream
    ):
        step = cute.assume(stride, divby=8) if self.stated else stride
        layout = cute.make_layout((rows, 512), stride=(step, 1))
        copy_rows(cute.make_tensor(x, layout), cute.make_tensor(y, layout)).launch(
            grid=(rows, 1, 1), block=(64, 1, 1), stream=stream
        )


def row_copy(stated: bool, alignment: int) -> collections.Counter[str]:
    element = pointer(BFloat16, alignment)
    return compiled(CopyRows(stated), element, element, Int32(1), Int32(512))


@cute.kernel
def power(x: cute.Tensor, fast: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    x[thread] = cute.math.exp2(x[thread], fastmath=fast)


@cute.jit
def power_host(x: cute.Pointer, fast: cutlass.Constexpr, stream: cuda.CUstream):
    power(cute.make_tensor(x, cute.make_layout(256)), fast).launch(
        grid=(1, 1, 1), block=(256, 1, 1), stream=stream
    )


def exponential(fast: bool) -> collections.Counter[str]:
    return compiled(power_host, pointer(Float32), fast)


class Products:
    """Products in a loop, the first of which starts from zero; three ways to say so."""

    def __init__(self, way: str) -> None:
        self.way = way

    @cute.jit
    def __call__(self, d: cute.Pointer, steps: Int32, stream: cuda.CUstream):
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        a_layout = cute.tile_to_shape(atom, (ROWS, DEPTH), order=(0, 1))
        b_layout = cute.tile_to_shape(atom, (COLUMNS, DEPTH), order=(0, 1))
        major = OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (ROWS, COLUMNS)
        )

        @cute.struct
        class Shared:
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(b_layout)], 1024]

        self.Shared = Shared
        out = cute.make_tensor(d, cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1)))
        self.products(mma, out, steps, a_layout, b_layout).launch(
            grid=(1, 1, 1), block=(128, 1, 1), stream=stream
        )

    @cute.jit
    def by_flag(
        self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, keep: Boolean
    ):
        mma.set(warpgroup.Field.ACCUMULATE, keep)
        for part in cutlass.range_constexpr(DEPTH // 16):
            at = (None, None, part)
            cute.gemm(mma, acc, a[at], b[at], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)

    @cute.jit
    def by_own_atom(
        self, tiled: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, keep: Boolean
    ):
        self.by_flag(cute.make_mma_atom(tiled.op), acc, a, b, keep)

    @cute.kernel
    def products(
        self,
        mma: cute.TiledMma,
        d: cute.Tensor,
        steps: Int32,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        shared = SmemAllocator().allocate(self.Shared)
        mine = mma.get_slice(thread)
        a_shared = shared.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b_shared = shared.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        a = mma.make_fragment_A(mine.partition_A(a_shared))
        b = mma.make_fragment_B(mine.partition_B(b_shared))
        acc = cute.make_rmem_tensor(mine.partition_shape_C((ROWS, COLUMNS)), Float32)
        if cutlass.const_expr(self.way == "flag in the loop"):
            mma.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range(steps, unroll=1):
            warpgroup.fence()
            if cutlass.const_expr(self.way == "flag in the loop"):
                for part in cutlass.range_constexpr(DEPTH // 16):
                    at = (None, None, part)
                    cute.gemm(mma, acc, a[at], b[at], acc)
                    mma.set(warpgroup.Field.ACCUMULATE, True)
            elif cutlass.const_expr(self.way == "atom in a helper"):
                if step == 0:
                    self.by_own_atom(mma, acc, a, b, False)
                else:
                    self.by_own_atom(mma, acc, a, b, True)
            else:
                if step == 0:
                    self.by_flag(mma, acc, a, b, False)
                else:
                    self.by_flag(mma, acc, a, b, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
        cute.autovec_copy(acc, mine.partition_C(d))


def accumulation(way: str) -> collections.Counter[str]:
    return compiled(Products(way), pointer(Float32), Int32(1))
