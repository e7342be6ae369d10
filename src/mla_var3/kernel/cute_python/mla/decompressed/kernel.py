"""Decompressed attention over a window of tokens, for Hopper.

    q_nope [b, s, h, 128]   q_rope [b, s, h, 64]   contiguous
    keys, values [b, h, slots, 128], k_rope [b, slots, 64]
    lengths [b] int32       window: slot j is position max(len - window, 0) + j
    -> o [b, s, h, 128] in the input dtype, lse [b, s, h] float32 (natural logarithm)

In 8 bits keys are e4m3 and values are e4m3 [b, h, slots / 16, 128, 16]: transposed in
groups of 16 tokens, whose order is 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15; slots is a multiple of
64; scales [b, h, slots, 2] float32 hold the key's and the exponent of the value's
(`op/mla/packed_window.py`).
`shared`: the window is a prefix of all requests, keys and values [h, slots, 128], slot j is its
position, and rows of different requests meet it in one tile. `wide`: windows are cut into parts, o
and lse get one more dimension in front, and o is float32 (see `window_merge.py`).

`ring`: slot x holds the position with position % window == x among the newest `window` ones, as a
cache writes them, and starts [b] int32 is the oldest position that it has. The blocks are read as
they lie, because a softmax has no order; only masks ask for positions, which blocks without one of
the newest tokens do not need. Somebody else shows all tokens before starts to every query, or, in
a ring that is `alone`, nobody does. Where tokens are missing because of that the rows are NaN.
slots = window, a multiple of 64.

Rows without a visible token give 0 and -inf; slots that hold no token may hold NaN.

How it works. A warp loads blocks of 64 tokens into a ring as deep as shared memory allows, so that
100 to 200 KB are on their way: an SM pulls 98 GB/s without products, about 60 GB/s with them. Two
warpgroups take a head each, or a tile of rows each, and run at their own pace, so that one
multiplies while the other is at its softmax. Queries stay in registers; with 8 bits
and few of them they are on the N side of the products, in shared memory (`window_fp8.py`).
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from mla_var3.kernel.cute_python.mla.decompressed.compute import compute
from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import EXCHANGE_BYTES, compute_8
from mla_var3.kernel.cute_python.mla.decompressed.jobs import BLOCK, GROUPS, HEAD, Window, job_at
from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.warps import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    GROUP_WARPS,
    LOADER,
    LOADER_REGISTERS,
    THREADS,
    next_stage,
)
from mla_var3.kernel.cute_python.mla.latent.ops import ROPE, TILE, copy_places
from mla_var3.kernel.cute_python.mla.latent.schedule import ROWS

SHARED_BYTES = 220 << 10


@dataclass(frozen=True)
class Ring:
    """The ring of token blocks.

    Attributes:
        barriers: per stage: keys have arrived, values have arrived, all readers of the keys are
            done, all readers of the values are done.
        stages: its depth.
        units: heads in a stage.
    """

    barriers: Any
    stages: int
    units: int

    def keys(self, stage: Any) -> Any:
        """Barrier of a stage's keys, rope keys and scales."""
        return self.barriers + stage * 4

    def values(self, stage: Any) -> Any:
        """Barrier of a stage's values."""
        return self.barriers + (stage * 4 + 1)

    def keys_free(self, stage: Any) -> Any:
        """Barrier of the readers of a stage's keys, rope keys and scales."""
        return self.barriers + (stage * 4 + 2)

    def values_free(self, stage: Any) -> Any:
        """Barrier of the readers of a stage's values."""
        return self.barriers + (stage * 4 + 3)

    def after(self, stage: Any, phase: Any) -> Any:
        """The next stage, and the phase of its barriers."""
        return next_stage(stage, phase, self.stages)


@dataclass(eq=False, repr=False)
class WindowSm90:
    """Host and device code of one variant.

    Attributes:
        dtype: element type of queries and output, and of keys and values of 16 bits.
        form: what the warpgroups of a block have in common, "heads" or "tiles".
        fp8: whether keys and values have 8 bits.
        columns: query rows on the N side of the products, with 8 bits; 0 for the M side.
        shared, wide, ring, alone: see above.
    """

    dtype: Any
    form: str = "heads"
    fp8: bool = False
    columns: int = 0
    shared: bool = False
    wide: bool = False
    ring: bool = False
    alone: bool = False

    def __post_init__(self):
        self.units = 1 if self.form == "tiles" else GROUPS
        element, scale_bytes = (1, 8) if self.fp8 else (2, 0)
        self.key_bytes = self.units * BLOCK * (HEAD * element + scale_bytes) + BLOCK * ROPE * 2
        self.value_bytes = self.units * BLOCK * HEAD * element
        room = SHARED_BYTES - GROUPS * self.columns * EXCHANGE_BYTES
        self.stages = room // (self.key_bytes + self.value_bytes)

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Pointer,
        q_rope: cute.Pointer,
        keys: cute.Pointer,
        values: cute.Pointer,
        k_rope: cute.Pointer,
        scales: cute.Pointer | None,
        lengths: cute.Pointer,
        starts: cute.Pointer | None,
        o: cute.Pointer,
        lse: cute.Pointer,
        scale_log2e: Float32,
        requests: Int32,
        queries: Int32,
        heads: Int32,
        slots: Int32,
        k_token: Int32,
        k_head: Int64,
        k_request: Int64,
        v_row: Int32,
        v_head: Int64,
        v_request: Int64,
        r_token: Int32,
        r_request: Int64,
        window: Int32,
        causal: Int32,
        parts: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        dtype = self.dtype
        element = Float8E4M3FN if const_expr(self.fp8) else dtype
        windows = 1 if const_expr(self.shared) else requests
        kinds = warpgroup.SmemLayoutAtomKind

        def aligned(stride):
            return cute.assume(stride, divby=16 if const_expr(self.fp8) else 8)

        def tensor(pointer, shape, stride):
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

        def copies(source, atom, tile, stages):
            """A copy of one tile, what it reads, and the layout of all stages."""
            one = cute.tile_to_shape(atom, tile, order=(0, 1))
            load = cpasync.CopyBulkTensorTileG2SOp()
            copy, view = cpasync.make_tiled_tma_atom(load, source, one, tile)
            return copy, view, cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2))

        wide_atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, element)
        slots_of_heads = self.stages * self.units
        if const_expr(self.fp8):
            columns: Any = HEAD
            column_strides: Any = 1
            # Memory holds what shared memory is to hold, so a plain copy without a tensor does.
            plain_atom = warpgroup.make_smem_layout_atom(kinds.K_INTER, element)
            value_tensor = tensor(
                values,
                (BLOCK * HEAD, slots // BLOCK, heads, windows),
                (1, BLOCK * HEAD, aligned(v_head), aligned(v_request)),
            )
            value_layout = cute.tile_to_shape(
                plain_atom, (HEAD, BLOCK, slots_of_heads), order=(0, 1, 2)
            )
            value_copies = (
                cute.make_copy_atom(cpasync.CopyBulkG2SOp(), element), value_tensor, value_layout,
            )  # fmt: skip
            scale_tensor = tensor(
                scales, (2 * slots, heads, windows), (1, 2 * slots, Int64(heads) * 2 * slots)
            )
            scale_load = cpasync.CopyBulkTensorTileG2SOp()
            scale_copies = cpasync.make_tiled_tma_atom(
                scale_load, scale_tensor, cute.make_layout(2 * BLOCK), (2 * BLOCK,)
            )
        else:
            columns, column_strides = (TILE, HEAD // TILE), (1, TILE)
            value_tensor = tensor(
                values,
                (slots, columns, heads, windows),
                (aligned(v_row), column_strides, aligned(v_head), aligned(v_request)),
            )
            value_copies = copies(value_tensor, wide_atom, (BLOCK, HEAD), slots_of_heads)
            scale_copies = (None, None)
        key_tensor = tensor(
            keys,
            (slots, columns, heads, windows),
            (aligned(k_token), column_strides, aligned(k_head), aligned(k_request)),
        )
        rope_tensor = tensor(
            k_rope,
            (slots, (TILE, 1), windows),
            (cute.assume(r_token, divby=8), (1, TILE), cute.assume(r_request, divby=8)),
        )
        rope_atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype)
        key_copies = copies(key_tensor, wide_atom, (BLOCK, HEAD), slots_of_heads)
        rope_copies = copies(rope_tensor, rope_atom, (BLOCK, ROPE), self.stages)

        def mma(kind, b_major, columns):
            source = warpgroup.OperandSource.RMEM  # queries, or weights
            if const_expr(self.columns > 0):
                source, columns = warpgroup.OperandSource.SMEM, self.columns
            return sm90.make_trivial_tiled_mma(
                kind, kind, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (ROWS, columns), source
            )

        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        stages, units = self.stages, self.units
        scale_count = 2 * BLOCK * units * stages if const_expr(self.fp8) else 0

        head_elements = BLOCK * HEAD * units * stages
        rows_8 = GROUPS * self.columns

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, 4 * stages]
            q_scales: cute.struct.Align[cute.struct.MemRange[Float32, rows_8], 16]
            warp_rows: cute.struct.Align[cute.struct.MemRange[Float32, rows_8 * GROUP_WARPS], 16]
            q_nope: cute.struct.Align[cute.struct.MemRange[element, rows_8 * HEAD], 1024]
            q_rope: cute.struct.Align[cute.struct.MemRange[dtype, rows_8 * ROPE], 1024]
            weights: cute.struct.Align[cute.struct.MemRange[element, rows_8 * 2 * BLOCK], 128]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, scale_count], 128]
            keys: cute.struct.Align[cute.struct.MemRange[element, head_elements], 1024]
            values: cute.struct.Align[cute.struct.MemRange[element, head_elements], 1024]
            rope: cute.struct.Align[cute.struct.MemRange[dtype, BLOCK * ROPE * stages], 1024]

        self.Shared = Shared
        start_tensor = None
        if const_expr(self.ring):
            start_tensor = cute.make_tensor(starts, cute.make_layout(requests))
        rows = requests * queries * heads
        outputs = rows * parts if const_expr(self.wide) else rows
        self.window_attention(
            mma(element, K, BLOCK),
            mma(dtype, K, BLOCK),
            mma(element, K if const_expr(self.fp8) else MN, HEAD),
            *key_copies,
            *value_copies,
            *rope_copies,
            *scale_copies,
            q_nope,
            q_rope,
            cute.make_tensor(lengths, cute.make_layout(requests)),
            start_tensor,
            o,
            cute.make_tensor(lse, cute.make_layout(outputs)),
            scale_log2e,
            requests,
            queries,
            heads,
            slots,
            window,
            causal,
            parts,
            blocks,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def window_attention(
        self,
        qk_mma: cute.TiledMma,
        rope_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        k_copy: cute.CopyAtom,
        k_global: cute.Tensor,
        k_layout: cute.ComposedLayout,
        v_copy: cute.CopyAtom,
        v_global: cute.Tensor,
        v_layout: cute.ComposedLayout,
        r_copy: cute.CopyAtom,
        r_global: cute.Tensor,
        r_layout: cute.ComposedLayout,
        scale_copy: cute.CopyAtom | None,
        scale_global: cute.Tensor | None,
        q_nope: cute.Pointer,
        q_rope: cute.Pointer,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        o: cute.Pointer,
        lse: cute.Tensor,
        scale_log2e: Float32,
        requests: Int32,
        queries: Int32,
        heads: Int32,
        slots: Int32,
        window: Int32,
        causal: Int32,
        parts: Int32,
        blocks: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        ring = Ring(store.barriers.data_ptr(), self.stages, self.units)
        if thread == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(ring.keys(stage), 1)
                cute.arch.mbarrier_init(ring.values(stage), 1)
                cute.arch.mbarrier_init(ring.keys_free(stage), CONSUMERS // 32)
                cute.arch.mbarrier_init(ring.values_free(stage), CONSUMERS // 32)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        s_k = store.keys.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        s_v = store.values.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        s_r = store.rope.get_tensor(r_layout.outer, swizzle=r_layout.inner)
        s_scales = None
        if const_expr(self.fp8):
            scale_layout = cute.make_layout((2 * BLOCK, self.units * self.stages))
            s_scales = store.scales.get_tensor(scale_layout)
        copies = (k_copy, k_global, v_copy, v_global, r_copy, r_global, scale_copy, scale_global)
        work = Window(
            lengths, requests, queries, heads, slots, window, causal, parts,
            self.form == "tiles", self.shared, starts, self.alone,
        )  # fmt: skip
        if warp_index >= LOADER:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp_index == LOADER:
                self.load(copies, (s_k, s_v, s_r, s_scales), ring, work, block, blocks)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            products, rows, outputs = (qk_mma, rope_mma, pv_mma), (q_nope, q_rope), (o, lse)
            if const_expr(self.columns > 0):
                compute_8(
                    products, (s_k, s_v, s_r, s_scales), self.exchange(store), ring, rows,
                    outputs, scale_log2e, block, blocks, work, self.dtype, self.columns, self.wide,
                )  # fmt: skip
            else:
                by_column = s_v  # columns first, then tokens
                if const_expr(not self.fp8):
                    swapped = cute.select(s_v.layout, mode=[1, 0, 2])
                    by_column = cute.make_tensor(s_v.iterator, swapped)
                compute(
                    products, (s_k, by_column, s_r, s_scales), ring, rows, outputs, scale_log2e,
                    block, blocks, work, self.dtype, self.fp8, self.wide,
                )  # fmt: skip

    def exchange(self, store):
        """What the warpgroups keep in shared memory with rows on the N side, see `compute_8`."""
        kinds = warpgroup.SmemLayoutAtomKind

        def tiles(memory, element, kind, *shape):
            atom = warpgroup.make_smem_layout_atom(kind, element)
            layout = cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        rows = self.columns
        return (
            tiles(store.q_nope, Float8E4M3FN, kinds.K_SW128, rows, HEAD, GROUPS),
            tiles(store.q_rope, self.dtype, kinds.K_SW128, rows, ROPE, GROUPS),
            store.q_scales.get_tensor(cute.make_layout((rows, 1, GROUPS))),
            store.warp_rows.get_tensor(cute.make_layout((rows, GROUP_WARPS, GROUPS))),
            tiles(store.weights, Float8E4M3FN, kinds.K_INTER, rows, BLOCK, 2, GROUPS),
        )

    @cute.jit
    def load(
        self,
        copies: cutlass.Constexpr,
        shared: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        work: cutlass.Constexpr,
        block: Int32,
        blocks: Int32,
    ):
        """Fill the ring, as its places become free; one warp calls it."""
        k_copy, k_global, v_copy, v_global, r_copy, r_global, scale_copy, scale_global = copies
        s_k, s_v, s_r, s_scales = shared
        k_target, k_source = copy_places(k_copy, s_k, k_global, (BLOCK, HEAD))
        v_target, v_source = s_v, v_global
        if const_expr(self.fp8):
            flat = cute.make_layout((BLOCK * HEAD, self.units * self.stages))
            v_target = cute.make_tensor(s_v.iterator, flat)
        else:
            v_target, v_source = copy_places(v_copy, s_v, v_global, (BLOCK, HEAD))
        r_target, r_source = copy_places(r_copy, s_r, r_global, (BLOCK, ROPE))
        scale_target: Any = None
        scale_source: Any = None
        if const_expr(self.fp8):
            scale_target, scale_source = copy_places(
                scale_copy, s_scales, scale_global, (2 * BLOCK,)
            )
        keys = (
            (k_copy, k_source, k_target), (r_copy, r_source, r_target),
            (scale_copy, scale_source, scale_target),
        )  # fmt: skip
        stage = Int32(0)
        phase = Int32(0)
        for index in cutlass.range(block, work.jobs, blocks, unroll=1):
            job = job_at(index, work)
            for at in cutlass.range(job.first, job.last, unroll=1):
                self.load_keys(keys, ring, work, at, job.head, job.request, stage, phase)
                cute.arch.mbarrier_wait(ring.values_free(stage), phase ^ 1)
                arrived = ring.values(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(arrived, self.value_bytes)
                for unit in cutlass.range_constexpr(self.units):
                    head = cutlass.min(job.head + unit, work.heads - 1)
                    target = v_target[(None, stage * self.units + unit)]
                    if const_expr(self.fp8):
                        # Nothing stops this copy at the end of the window.
                        held = cutlass.min(at, work.slots // BLOCK - 1)
                        source = v_source[(None, held, head, job.request)]
                        with cute.arch.elect_one():
                            cute.copy(v_copy, source, target, mbar_ptr=arrived)
                    else:
                        source = v_source[(None, at, 0, head, job.request)]
                        cute.copy(v_copy, source, target, tma_bar_ptr=arrived)
                stage, phase = ring.after(stage, phase)
        if const_expr(self.columns == 0):
            # First scores are computed one job ahead, so behind the last job as well: there the
            # copy engine reads a block that does not exist as zeros, without touching memory.
            if block < work.jobs:
                nowhere = (work.slots + BLOCK - 1) // BLOCK
                self.load_keys(keys, ring, work, nowhere, Int32(0), Int32(0), stage, phase)

    @cute.jit
    def load_keys(
        self,
        keys: cutlass.Constexpr,
        ring: cutlass.Constexpr,
        work: cutlass.Constexpr,
        at: Int32,
        first_head: Int32,
        request: Int32,
        stage: Int32,
        phase: Int32,
    ):
        """Copy keys, rope keys and, in 8 bits, scales of a block into a stage, once it is free."""
        (k_copy, k_source, k_target), (r_copy, r_source, r_target), scales = keys
        scale_copy, scale_source, scale_target = scales
        cute.arch.mbarrier_wait(ring.keys_free(stage), phase ^ 1)
        arrived = ring.keys(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, self.key_bytes)
        for unit in cutlass.range_constexpr(self.units):
            # An odd head out reads the last one again.
            head = cutlass.min(first_head + unit, work.heads - 1)
            slot = stage * self.units + unit
            cute.copy(
                k_copy, k_source[(None, at, 0, head, request)], k_target[(None, slot)],
                tma_bar_ptr=arrived,
            )  # fmt: skip
            if const_expr(self.fp8):
                cute.copy(
                    scale_copy, scale_source[(None, at, head, request)],
                    scale_target[(None, slot)], tma_bar_ptr=arrived,
                )  # fmt: skip
        cute.copy(
            r_copy, r_source[(None, at, 0, request)], r_target[(None, stage)],
            tma_bar_ptr=arrived,
        )  # fmt: skip
