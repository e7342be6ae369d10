"""project_queries: the projection of the queries into the latent space, head by head.

    q_nope [m, h, d]   w_uk [h, d, k]   -> q_latent [m, h, k] in the input dtype

All three contiguous; m is the queries of all requests. d is 64, 128, 192 or 256, k a multiple of
128. bfloat16 or float16, accumulated in float32. Any m and h from 1 on; nothing is written behind
the last query. Target: sm_90a.

How it works. A work tile is 64 queries of one head by 128 latent columns: one product over all d
columns of the queries. A CTA of one warpgroup takes work tiles in order: its weights, [d, 128],
stay in shared memory while it walks down the queries, the next queries arrive during the product,
and the result takes the place of the queries, from where TMA writes whole rows of 256 bytes. The
kernel is memory bound, and most of its bytes are written, so CTAs share an SM (three at d=128)
instead of a deeper pipeline: one's stores run under another's loads and products.
"""

from enum import IntEnum

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    HEAD,
    LATENT,
    MMA_DEPTH,
    ROWS,
    TILE,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, transfer
from mla_var3.kernel.cute_python.mla.hopper.warps import fence_and_sync_warpgroup, sync_warpgroup

TILE_COLUMNS = 128
"""Latent columns of a work tile, as many as a query has at d=128: a result then fits where its
queries were."""
STAGES = 2
THREADS = WARPGROUP
CTAS_PER_SM = {64: 4, 128: 3, 192: 2, 256: 1}
"""CTAs on an SM by d: what fits of weights, queries and results, 64 KiB each at d=128. Other
numbers were not measured."""
CTA_BARRIER = 1
"""The named barrier of the CTA's warps."""


class Mbarrier(IntEnum):
    """Mbarriers: queries of a stage, or the weights, have arrived."""

    QUERIES_0_FULL = 0
    QUERIES_1_FULL = 1
    WEIGHTS_FULL = 2


def tile_count(queries: int, heads: int, k: int = LATENT) -> int:
    """Work tiles of a projection."""
    return heads * (k // TILE_COLUMNS) * -(-queries // ROWS)


def cta_count(queries: int, heads: int, sm_count: int, k: int = LATENT, d: int = HEAD) -> int:
    """CTAs to launch: as many as run at once, unless there are fewer work tiles."""
    return min(tile_count(queries, heads, k), CTAS_PER_SM[d] * sm_count)


class ProjectQueriesSm90:
    """Host and device code for one element type and pair of widths."""

    def __init__(self, dtype, k=LATENT, d=HEAD):
        self.dtype = dtype
        self.k = k
        self.d = d
        self.column_parts = k // TILE_COLUMNS

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Pointer,
        w_uk: cute.Pointer,
        q_latent: cute.Pointer,
        queries: Int32,
        heads: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        dtype, k, d = self.dtype, self.k, self.d
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)

        def copies_of(pointer, layout, shape, copy=None):
            shared = cute.tile_to_shape(swizzle, shape, order=(0, 1))
            return TmaTensor.of(cute.make_tensor(pointer, layout), shared, shape, copy)

        # Columns as (64, tiles): a copy then takes both column tiles of a work tile at once.
        def rows_of(columns):
            shape = (queries, (TILE, columns // TILE), heads)
            stride = cute.assume(Int64(heads) * columns, divby=8)
            return cute.make_layout(shape, stride=(stride, (1, TILE), columns))

        weights = cute.make_layout((d, (TILE, k // TILE), heads), stride=(k, (1, TILE), d * k))
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            (ROWS, TILE_COLUMNS), warpgroup.OperandSource.SMEM,
        )  # fmt: skip

        held = max(d, TILE_COLUMNS)  # columns of queries, then of their result

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, len(Mbarrier)]
            x: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * held * STAGES], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, d * TILE_COLUMNS], 1024]

        self.Shared = Shared
        self.project_queries(
            mma,
            copies_of(q_nope, rows_of(d), (ROWS, d)),
            copies_of(w_uk, weights, (d, TILE_COLUMNS)),
            copies_of(
                q_latent, rows_of(k), (ROWS, TILE_COLUMNS), cpasync.CopyBulkTensorTileS2GOp()
            ),
            queries,
            heads,
            cute.tile_to_shape(swizzle, (ROWS, held, STAGES), order=(0, 1, 2)),
            cute.tile_to_shape(swizzle, (d, TILE_COLUMNS), order=(0, 1)),
        ).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM[d],
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def project_queries(
        self,
        mma: cute.TiledMma,
        read_x: TmaTensor,
        read_w: TmaTensor,
        written: TmaTensor,
        queries: Int32,
        heads: Int32,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator().allocate(self.Shared)
        barriers = shared.barriers.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(len(Mbarrier)):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The attention may take SMs as they become free; it waits for the end of all CTAs here.
        cute.arch.griddepcontrol_launch_dependents()
        held = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        s_x = self.first_columns(held, self.d)  # (64, d, stage)
        s_y = self.first_columns(held, TILE_COLUMNS)  # (64, 128, stage)
        s_w = shared.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (d, 128)

        load_x = transfer(read_x, s_x, (ROWS, self.d))
        load_w = transfer(read_w, s_w, (self.d, TILE_COLUMNS))
        store_y = transfer(written, s_y, (ROWS, TILE_COLUMNS))

        part_of = mma.get_slice(thread)
        x = mma.make_fragment_A(part_of.partition_A(s_x))
        w_view = cute.make_tensor(s_w.iterator, cute.select(s_w.layout, mode=[1, 0]))
        w = mma.make_fragment_B(part_of.partition_B(w_view))
        acc = cute.make_rmem_tensor(part_of.partition_shape_C((ROWS, TILE_COLUMNS)), Float32)
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        to_shared = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma
        ).get_slice(thread)
        y_place = to_shared.partition_D(s_y)
        atom = cute.make_mma_atom(mma.op)

        row_tiles = (queries + ROWS - 1) // ROWS
        tiles = heads * self.column_parts * row_tiles
        share, rest = tiles // ctas, tiles % ctas
        tile = cta * share + cutlass.min(cta, rest)
        end = tile + share
        if cta < rest:
            end += 1
        if warp_index == 0 and tile < end:
            self.load_weights(load_w, barriers, tile // row_tiles)
            self.load_queries(load_x, barriers, tile, row_tiles, Int32(0))
        stage = Int32(0)
        phase = Int32(0)
        w_phase = Int32(0)
        while tile < end:
            following = tile + 1
            cute.arch.mbarrier_wait(barriers + Mbarrier.WEIGHTS_FULL, w_phase)
            cute.arch.mbarrier_wait(barriers + Mbarrier.QUERIES_0_FULL + stage, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(self.d // MMA_DEPTH):
                atom.set(warpgroup.Field.ACCUMULATE, i > 0)
                cute.gemm(atom, acc, x[(None, None, i, stage)], w[(None, None, i)], acc)
            warpgroup.commit_group()
            if warp_index == 0:
                # The result before this one has left the other stage.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if following < end:
                    self.load_queries(load_x, barriers, following, row_tiles, stage ^ 1)
            warpgroup.wait_group(0)
            # No warp reads the queries or weights any more.
            sync_warpgroup(CTA_BARRIER)
            if following % row_tiles == 0:
                if warp_index == 0 and following < end:
                    self.load_weights(load_w, barriers, following // row_tiles)
                w_phase ^= 1
            narrow.store(acc.load().to(self.dtype))
            cute.copy(to_shared, to_shared.retile(narrow), y_place[(None, None, None, stage)])
            fence_and_sync_warpgroup(CTA_BARRIER)
            if warp_index == 0:
                part = tile // row_tiles
                at = (None, tile % row_tiles, part % self.column_parts, part // self.column_parts)
                cute.copy(written.copy, store_y.shared[(None, stage)], store_y.tiles[at])
                cute.arch.cp_async_bulk_commit_group()
            stage ^= 1
            if stage == 0:
                phase ^= 1
            tile = following
        if warp_index == 0:
            # Shared memory has to stay until the last result is read from it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def first_columns(self, held, columns):
        """The first columns of the queries' buffer, of all stages."""
        if columns == max(self.d, TILE_COLUMNS):
            return held
        return cute.local_tile(held, (ROWS, columns, STAGES), (0, 0, 0))

    @cute.jit
    def load_weights(self, load: cutlass.Constexpr, barriers: cute.Pointer, part: Int32):
        """Load the weights of a part, 128 columns of a head; one warp calls it."""
        full = barriers + Mbarrier.WEIGHTS_FULL
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.d * TILE_COLUMNS * 2)
        at = (None, 0, part % self.column_parts, part // self.column_parts)
        cute.copy(load.copy, load.tiles[at], load.shared, tma_bar_ptr=full)

    @cute.jit
    def load_queries(
        self,
        load: cutlass.Constexpr,
        barriers: cute.Pointer,
        tile: Int32,
        row_tiles: Int32,
        stage: Int32,
    ):
        """Load the queries of a work tile, zeros behind the last one; one warp calls it."""
        full = barriers + Mbarrier.QUERIES_0_FULL + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * self.d * 2)
        at = (None, tile % row_tiles, 0, tile // row_tiles // self.column_parts)
        cute.copy(load.copy, load.tiles[at], load.shared[(None, stage)], tma_bar_ptr=full)
