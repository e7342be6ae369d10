"""head_products: queries of every head times the head's key weights, into the latent space.

    q_nope [m, h, 128]   w_uk [h, 128, 512]   -> q_latent [m, h, 512] in the input dtype

All three contiguous; m is queries of all requests. Products of the input dtype, bfloat16 or
float16, accumulated in float32. Any m and h from 1 on; nothing is written behind the last query.
Target: sm_90a.

How it works. The work is cut into items of 64 queries of one head by 128 latent columns; an item is
one product over all 128 columns of the queries. A block of one warpgroup takes items in a row: the
weights of a part, [128, 128], stay in shared memory while it walks down the queries, the next
queries arrive during the product, and the result takes the place of the queries it was made of,
from where the copy engine writes whole rows of 256 bytes. The kernel is bound by memory, and most
of its bytes are written, so three blocks share an SM instead of a deeper ring: one's stores run
under another's loads and products.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from mla_var3.kernel.cute_python.mla.decompressed.jobs import HEAD
from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.warps import settle
from mla_var3.kernel.cute_python.mla.latent.ops import LATENT, MMA_DEPTH, TILE, copy_places

ITEM_ROWS = 64
"""Queries of an item: the M side of one warpgroup's product."""
ITEM_COLUMNS = HEAD
"""Latent columns of an item, as many as a query has: a result then fits where its queries were."""
COLUMN_PARTS = LATENT // ITEM_COLUMNS
STAGES = 2
THREADS = 128
BLOCKS_PER_SM = 3
"""What fits: 64 KiB of weights, queries and results each."""
X_BYTES = ITEM_ROWS * HEAD * 2
W_BYTES = HEAD * ITEM_COLUMNS * 2

ARRIVED, WEIGHTS = 0, STAGES
"""First barrier of each kind: queries have arrived, weights have."""
SIGNALS = STAGES + 1
ALL = 1
"""The named barrier of the block's warps."""


def item_count(queries: int, heads: int) -> int:
    """Items that a product has."""
    return heads * COLUMN_PARTS * -(-queries // ITEM_ROWS)


def block_count(queries: int, heads: int, sm_count: int) -> int:
    """Blocks to launch: as many as run at once, unless there are fewer items."""
    return min(item_count(queries, heads), BLOCKS_PER_SM * sm_count)


class HeadProductsSm90:
    """Host and device code for one element type."""

    def __init__(self, dtype):
        self.dtype = dtype

    @cute.jit
    def __call__(
        self,
        q_nope: cute.Pointer,
        w_uk: cute.Pointer,
        q_latent: cute.Pointer,
        queries: Int32,
        heads: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        dtype = self.dtype
        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()

        def copies_of(copy, pointer, layout, shape):
            shared = cute.tile_to_shape(swizzle, shape, order=(0, 1))
            return cpasync.make_tiled_tma_atom(
                copy, cute.make_tensor(pointer, layout), shared, shape
            )

        # Columns as (64, tiles): a copy then takes both column tiles of an item at once.
        def rows_of(columns):
            shape = (queries, (TILE, columns // TILE), heads)
            stride = cute.assume(Int64(heads) * columns, divby=8)
            return cute.make_layout(shape, stride=(stride, (1, TILE), columns))

        weights = cute.make_layout(
            (HEAD, (TILE, LATENT // TILE), heads), stride=(LATENT, (1, TILE), HEAD * LATENT)
        )
        mma = sm90.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (ITEM_ROWS, ITEM_COLUMNS),
            warpgroup.OperandSource.SMEM,
        )

        @cute.struct
        class Shared:
            signals: cute.struct.MemRange[Int64, SIGNALS]
            x: cute.struct.Align[cute.struct.MemRange[dtype, ITEM_ROWS * HEAD * STAGES], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, HEAD * ITEM_COLUMNS], 1024]

        self.Shared = Shared
        self.head_products(
            mma,
            *copies_of(load, q_nope, rows_of(HEAD), (ITEM_ROWS, HEAD)),
            *copies_of(load, w_uk, weights, (HEAD, ITEM_COLUMNS)),
            *copies_of(store, q_latent, rows_of(LATENT), (ITEM_ROWS, ITEM_COLUMNS)),
            queries,
            heads,
            cute.tile_to_shape(swizzle, (ITEM_ROWS, HEAD, STAGES), order=(0, 1, 2)),
            cute.tile_to_shape(swizzle, (HEAD, ITEM_COLUMNS), order=(0, 1)),
        ).launch(
            grid=(blocks, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=BLOCKS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def head_products(
        self,
        mma: cute.TiledMma,
        x_copy: cute.CopyAtom,
        x_global: cute.Tensor,
        w_copy: cute.CopyAtom,
        w_global: cute.Tensor,
        y_copy: cute.CopyAtom,
        y_global: cute.Tensor,
        queries: Int32,
        heads: Int32,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator().allocate(self.Shared)
        signals = shared.signals.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(SIGNALS):
                cute.arch.mbarrier_init(signals + i, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # The attention may take SMs as they become free; it waits for the end of all blocks here.
        cute.arch.griddepcontrol_launch_dependents()
        s_x = shared.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (64, 128, stage)
        s_w = shared.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (128, 128)

        loads = (
            (x_copy, *copy_places(x_copy, s_x, x_global, (ITEM_ROWS, HEAD))),
            (w_copy, *copy_places(w_copy, s_w, w_global, (HEAD, ITEM_COLUMNS))),
        )
        y_from, y_to = copy_places(y_copy, s_x, y_global, (ITEM_ROWS, ITEM_COLUMNS))

        part_of = mma.get_slice(thread)
        x = mma.make_fragment_A(part_of.partition_A(s_x))
        w_view = cute.make_tensor(s_w.iterator, cute.select(s_w.layout, mode=[1, 0]))
        w = mma.make_fragment_B(part_of.partition_B(w_view))
        acc = cute.make_rmem_tensor(part_of.partition_shape_C((ITEM_ROWS, ITEM_COLUMNS)), Float32)
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        to_shared = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma
        ).get_slice(thread)
        y_place = to_shared.partition_D(s_x)
        atom = cute.make_mma_atom(mma.op)

        tiles = (queries + ITEM_ROWS - 1) // ITEM_ROWS
        items = heads * COLUMN_PARTS * tiles
        share, rest = items // blocks, items % blocks
        item = block * share + cutlass.min(block, rest)
        end = item + share
        if block < rest:
            end += 1
        if warp_index == 0 and item < end:
            self.load_weights(loads[1], signals, item // tiles)
            self.load_queries(loads[0], signals, item, tiles, Int32(0))
        stage = Int32(0)
        phase = Int32(0)
        w_phase = Int32(0)
        while item < end:
            following = item + 1
            cute.arch.mbarrier_wait(signals + WEIGHTS, w_phase)
            cute.arch.mbarrier_wait(signals + ARRIVED + stage, phase)
            warpgroup.fence()
            for i in cutlass.range_constexpr(HEAD // MMA_DEPTH):
                atom.set(warpgroup.Field.ACCUMULATE, i > 0)
                cute.gemm(atom, acc, x[(None, None, i, stage)], w[(None, None, i)], acc)
            warpgroup.commit_group()
            if warp_index == 0:
                # The result before this one has left the other place.
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                if following < end:
                    self.load_queries(loads[0], signals, following, tiles, stage ^ 1)
            warpgroup.wait_group(0)
            # No warp reads the queries or weights any more.
            cute.arch.barrier(barrier_id=ALL, number_of_threads=THREADS)
            if following % tiles == 0:
                if warp_index == 0 and following < end:
                    self.load_weights(loads[1], signals, following // tiles)
                w_phase ^= 1
            narrow.store(acc.load().to(self.dtype))
            cute.copy(to_shared, to_shared.retile(narrow), y_place[(None, None, None, stage)])
            settle(ALL)
            if warp_index == 0:
                part = item // tiles
                at = (None, item % tiles, part % COLUMN_PARTS, part // COLUMN_PARTS)
                cute.copy(y_copy, y_from[(None, stage)], y_to[at])
                cute.arch.cp_async_bulk_commit_group()
            stage ^= 1
            if stage == 0:
                phase ^= 1
            item = following
        if warp_index == 0:
            # Shared memory has to stay until the last result is read from it.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_weights(self, load: tuple, signals: cute.Pointer, part: Int32):
        """Bring the weights of a part, 128 columns of a head; one warp calls it."""
        copy, to, source = load
        signal = signals + WEIGHTS
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(signal, W_BYTES)
        at = (None, 0, part % COLUMN_PARTS, part // COLUMN_PARTS)
        cute.copy(copy, source[at], to, tma_bar_ptr=signal)

    @cute.jit
    def load_queries(
        self, load: tuple, signals: cute.Pointer, item: Int32, tiles: Int32, stage: Int32
    ):
        """Bring the queries of an item, zeros behind the last one; one warp calls it."""
        copy, to, source = load
        signal = signals + ARRIVED + stage
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(signal, X_BYTES)
        at = (None, item % tiles, 0, item // tiles // COLUMN_PARTS)
        cute.copy(copy, source[at], to[(None, stage)], tma_bar_ptr=signal)
