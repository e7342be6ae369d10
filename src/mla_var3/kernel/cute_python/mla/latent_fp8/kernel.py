"""The latent kernel for Hopper over a cache in 8 bits, for decode and speculative decode.

    q_latent [b, s, h, 512]   q_rope [b, s, h, 64]   in 16 bits, any strides of tokens and heads
    latent [b, t, 512] e4m3 and rope [b, t, 64], or pages of them with a block table
    scales [b, t] float32 with a rope part in bfloat16, or one scale with a rope part in e4m3
    -> o_latent [b, s, h, 512] in the dtype of the queries, lse [b, s, h] float32 (natural log)

The contract is that of the 16-bit latent kernel (`latent/kernel.py`), whose scheduler, masks and
merge it uses. Queries are rounded to e4m3 with a scale per row in shared memory, probabilities
times the scale of their token are e4m3 too, and all products but a 16-bit rope part are of 8 bits.
A CTA has four warpgroups: one for queries, scores and weights (`queries.py`, `scores.py`), two for
half of the output columns each (`values.py`), and one whose warps load query rows and KV blocks
(`producer.py`), compute means (`means.py`) and watch the partials of others.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    LATENT,
    MOST_TAKEN,
    PRODUCER_WARP,
    ROPE,
    ROWS,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, prefetch_descriptors
from mla_var3.kernel.cute_python.mla.hopper.widths import LatentWidths
from mla_var3.kernel.cute_python.mla.latent.cluster import ClusterHost, mailbox_of
from mla_var3.kernel.cute_python.mla.latent.merge import (
    WATCHER_WARP,
    merge_partials,
    open_merge,
    outputs_of,
    watch_starts,
)
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentSizes,
    Partials,
    groups_of,
)
from mla_var3.kernel.cute_python.mla.latent.ops import (
    IndexTensors,
    LaunchSizes,
    Outputs,
    OutputTensors,
)
from mla_var3.kernel.cute_python.mla.latent.ranges import CLUSTER
from mla_var3.kernel.cute_python.mla.latent.records import (
    TABLE_WORDS,
    merge_shared,
    records_of,
    reset_merge,
)
from mla_var3.kernel.cute_python.mla.latent.scheduler import Scheduler
from mla_var3.kernel.cute_python.mla.latent_fp8.means import (
    MEAN_BYTES,
    compute_means,
    weights_layout,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.producer import (
    MBARRIERS,
    NO_BLOCK,
    NO_BLOCK_YET,
    STAGES,
    Cache,
    SharedBlocks,
    init_barriers,
    means_free,
    means_ready,
    produce,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.scores import compute_all_scores
from mla_var3.kernel.cute_python.mla.latent_fp8.state import (
    HALF,
    SCORE_WARP,
    THREADS,
    Exchange,
    FirstToken,
    Means,
    Mmas,
    Queries,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.values import consume

LAUNCH_REGISTERS, PRODUCER_REGISTERS = 128, 24
"""Registers per thread of a CTA of 512 threads, and then of the producer's warpgroup."""
COLUMN_TILE = 128
"""Columns of a tile of e4m3 elements: 128 bytes, the widest swizzle of shared memory."""
COLUMN_CHOICES = (16, 32, 48, ROWS)
"""Query rows on the N side of the second product that the kernel is compiled for."""


def columns_for(rows: int, ragged: bool = False) -> int:
    """Query rows on the N side for requests of so many, so that their tiles are alike.

    Args:
        rows: of the request that has most.
        ragged: whether others may have fewer. In tiles of less than 64 rows they could need more of
            them.
    """
    tiles = -(-rows // ROWS)
    most = ROWS if ragged and tiles > 1 else -(-rows // max(tiles, 1))
    return next(columns for columns in COLUMN_CHOICES if most <= columns)


def registers(columns: int) -> tuple[int, int]:
    """Registers per thread of the value warpgroups and of the score warpgroup: all that are left.

    With 184 for 64 columns the products are serialised.
    """
    values = 192 if columns == ROWS else 160
    return values, 4 * LAUNCH_REGISTERS - PRODUCER_REGISTERS - 2 * values


def whole_scale(cache_scale: cute.Tensor | None) -> Float32:
    """The scale of the whole cache; 1 with scales per token."""
    return Float32(1.0) if cache_scale is None else cache_scale[0]


class LatentFp8Sm90(ClusterHost):
    """Host and device code for one element type of the queries and one cache format.

    Attributes:
        dtype: element type of the queries and the output.
        columns: see `COLUMN_CHOICES`.
        per_token: whether every token has a scale and a rope part in bfloat16; otherwise the cache
            has one scale and its rope part is e4m3.
        empty_positive: see `latent.ops.final_lse`.
        early: see `FlashMLASm90`. The kernel in front writes queries only, so the first KV blocks
            go to the L2 cache before the wait.
        clusters: see `ClusterHost`.
    """

    def __init__(
        self,
        dtype,
        columns=ROWS,
        per_token=True,
        empty_positive=False,
        early=False,
        clusters=None,
    ):
        self.dtype = dtype
        self.columns = columns
        self.per_token = per_token
        self.empty_positive = empty_positive
        self.early = early
        self.clusters = clusters
        self.tile_rows = columns

    @cute.jit
    def launch(self, *arguments: Any):
        operands, partials, sizes, (stream,) = groups_of(
            arguments, LatentOperands, Partials, LatentSizes
        )
        kinds = warpgroup.SmemLayoutAtomKind
        element = Float8E4M3FN
        rope_element = BFloat16 if const_expr(self.per_token) else Float8E4M3FN
        rope_kind = kinds.K_SW128 if const_expr(self.per_token) else kinds.K_SW64
        rope_step = 16 * 8 // rope_element.width  # elements of 16 bytes
        wide = warpgroup.make_smem_layout_atom(kinds.K_SW128, element)
        rope_atom = warpgroup.make_smem_layout_atom(rope_kind, rope_element)
        # Without a swizzle the places of a thread's weights differ by constants.
        p_atom = warpgroup.make_smem_layout_atom(kinds.K_INTER, element)

        def pages_of(pointer, columns, stride, page_stride, step):
            shape = (sizes.page_tokens, columns, sizes.pages)
            inner = (1, COLUMN_TILE) if const_expr(isinstance(columns, tuple)) else 1
            strides = (cute.assume(stride, divby=step), inner, cute.assume(page_stride, divby=step))
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))

        def copies_of(tensor, atom, tile):
            layout = cute.tile_to_shape(atom, tile, order=(0, 1))
            return TmaTensor.of(tensor, layout, tile)

        def mma(kind, columns, source):
            K = OperandMajorMode.K
            shape = (ROWS, columns)
            return sm90.make_trivial_tiled_mma(kind, kind, K, K, Float32, (1, 1, 1), shape, source)

        key_layout = cute.tile_to_shape(wide, (KV_BLOCK, LATENT, STAGES), order=(0, 1, 2))
        rope_layout = cute.tile_to_shape(rope_atom, (KV_BLOCK, ROPE, STAGES), order=(0, 1, 2))
        q_layout = cute.tile_to_shape(wide, (ROWS, LATENT), order=(0, 1))
        q_rope_layout = cute.tile_to_shape(rope_atom, (ROWS, ROPE), order=(0, 1))
        p_layout = cute.tile_to_shape(p_atom, (self.columns, KV_BLOCK, STAGES), order=(0, 1, 2))

        scales = cache_scale = None
        if const_expr(self.per_token):
            stride = cute.assume(sizes.scales_page_stride, divby=4)
            scale_tensor = cute.make_tensor(
                operands.scales,
                cute.make_layout((sizes.page_tokens, sizes.pages), stride=(1, stride)),
            )
            scales = TmaTensor.of(scale_tensor, cute.make_layout(KV_BLOCK), (KV_BLOCK,))
        else:
            cache_scale = cute.make_tensor(operands.scales, cute.make_layout(1))
        self.block_bytes = KV_BLOCK * (LATENT + ROPE * rope_element.width // 8)
        if const_expr(self.per_token):
            self.block_bytes += KV_BLOCK * 4

        p_size = self.columns * KV_BLOCK * STAGES

        @cute.struct
        class Shared:
            scales: cute.struct.Align[cute.struct.MemRange[Float32, KV_BLOCK * STAGES], 128]
            mean_weights: cute.struct.Align[
                cute.struct.MemRange[element, MEAN_BYTES * self.columns], 128
            ]
            barriers: cute.struct.MemRange[Int64, MBARRIERS]
            merge: cute.struct.MemRange[Int32, TABLE_WORDS]
            taken: cute.struct.MemRange[Int16, MOST_TAKEN]
            risen: cute.struct.MemRange[Int32, STAGES]
            row_max: cute.struct.MemRange[Float32, ROWS]
            flush: cute.struct.MemRange[Float32, ROWS]
            fall: cute.struct.MemRange[Float32, ROWS]
            rescales: cute.struct.MemRange[Float32, STAGES * ROWS]
            row_sum: cute.struct.MemRange[Float32, ROWS]
            means_found: cute.struct.MemRange[Int32, 2]
            removed: cute.struct.MemRange[Float32, ROWS]
            mean_scale: cute.struct.MemRange[Float32, 1]
            first_block: cute.struct.MemRange[Int32, 1]
            means: cute.struct.Align[cute.struct.MemRange[element, LATENT], 16]
            first_values: cute.struct.Align[cute.struct.MemRange[element, LATENT], 16]
            first_scale: cute.struct.MemRange[Float32, 1]
            q: cute.struct.Align[cute.struct.MemRange[element, ROWS * LATENT], 1024]
            q_rope: cute.struct.Align[cute.struct.MemRange[rope_element, ROWS * ROPE], 1024]
            p: cute.struct.Align[cute.struct.MemRange[element, p_size], 1024]
            rope: cute.struct.Align[
                cute.struct.MemRange[rope_element, KV_BLOCK * ROPE * STAGES], 1024
            ]
            keys: cute.struct.Align[cute.struct.MemRange[element, KV_BLOCK * LATENT * STAGES], 1024]

        self.Shared = Shared
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        self.latent_fp8(
            mma(element, KV_BLOCK, shared),
            mma(rope_element, KV_BLOCK, shared),
            mma(element, KV_BLOCK, registers),
            mma(element, self.columns, registers),
            copies_of(
                pages_of(
                    operands.latent, (COLUMN_TILE, LATENT // COLUMN_TILE), sizes.latent_stride,
                    sizes.latent_page_stride, 16,
                ),
                wide, (KV_BLOCK, LATENT),
            ),
            copies_of(
                pages_of(
                    operands.rope, ROPE, sizes.rope_stride, sizes.rope_page_stride, rope_step
                ),
                rope_atom, (KV_BLOCK, ROPE),
            ),
            scales,
            cache_scale,
            operands.q_latent,
            operands.q_rope,
            IndexTensors.of(operands, sizes),
            outputs_of(operands, partials, sizes),
            sizes.scale_log2e,
            (
                sizes.q_latent_stride, sizes.q_rope_stride, sizes.q_latent_token_stride,
                sizes.q_rope_token_stride,
            ),
            LaunchSizes.of(sizes),
            key_layout,
            rope_layout,
            q_layout,
            q_rope_layout,
            p_layout,
        ).launch(
            grid=(sizes.group_ctas, sizes.group_count, 1),
            block=(THREADS, 1, 1),
            cluster=(1, CLUSTER, 1) if self.clusters else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.early,
        )  # fmt: skip

    @cute.kernel
    def latent_fp8(
        self,
        qk_mma: cute.TiledMma,
        rope_mma: cute.TiledMma,
        held_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        latent: TmaTensor,
        rope: TmaTensor,
        token_scales: TmaTensor | None,
        cache_scale: cute.Tensor | None,
        q_latent: cute.Pointer,
        q_rope: cute.Pointer,
        index: IndexTensors,
        written: OutputTensors,
        scale_log2e: Float32,
        q_strides: tuple[Int32, Int32, Int32, Int32],
        sizes: LaunchSizes,
        key_layout: cute.ComposedLayout,
        rope_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
        q_rope_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rank, group, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        barriers = store.barriers.data_ptr()
        merge = merge_shared(store.merge.data_ptr(), store.keys.data_ptr())
        risen = store.risen.get_tensor(cute.make_layout(STAGES))
        first_block = store.first_block.get_tensor(cute.make_layout(1))
        work_tiles = cute.make_tensor(
            cute.recast_ptr(store.scales.data_ptr(), dtype=Int32),
            cute.make_layout((KV_BLOCK, STAGES)),
        )
        if thread == 0:
            init_barriers(barriers)
            first_block[0] = Int32(NO_BLOCK_YET)
            reset_merge(merge)
            for stage in cutlass.range_constexpr(STAGES):
                risen[stage] = Int32(NO_BLOCK)
        if warp_index == PRODUCER_WARP:
            prefetch_descriptors(latent, rope, token_scales)
        scheduler = Scheduler.of(
            index, sizes, group, rank, self.clusters, self.tile_rows,
            *(() if self.clusters else (store.merge.data_ptr(), store.taken.data_ptr())),
        )  # fmt: skip
        cute.arch.sync_threads()
        group_ctas = sizes.group_ctas
        ctas, cta = group_ctas * sizes.group_count, group * group_ctas + rank
        splits = scheduler.range.splits
        if thread == WATCHER_WARP * 32 and splits:
            open_merge(written.merges, ctas, cta, scheduler, index.schedule)

        def tiles(memory, layout):
            return memory.get_tensor(layout.outer, swizzle=layout.inner)

        scales = None
        if const_expr(self.per_token):
            scales = store.scales.get_tensor(cute.make_layout((KV_BLOCK, STAGES)))
        keys_bytes = store.keys.data_ptr()
        blocks = SharedBlocks(
            tiles(store.keys, key_layout), keys_bytes, tiles(store.rope, rope_layout),
            store.rope.data_ptr(), scales,
        )  # fmt: skip
        line, rescales = cute.make_layout(ROWS), cute.make_layout((ROWS, STAGES))
        pairs = cute.make_layout((ROWS, (2, STAGES // 2)))
        means = Means(
            store.means.data_ptr(), store.means_found.get_tensor(cute.make_layout(2)),
            store.mean_scale.get_tensor(cute.make_layout(1)),
            store.mean_weights.get_tensor(weights_layout(self.columns)),
            store.removed.get_tensor(line), first_block, means_ready(barriers),
            means_free(barriers),
        )  # fmt: skip
        first_token = FirstToken(
            store.first_values.data_ptr(),
            cute.recast_ptr(store.rope.data_ptr(), dtype=Float32) + 2 * ROWS,  # behind `Mailbox`
            store.first_scale.get_tensor(cute.make_layout(1)),
        )  # fmt: skip
        widths = LatentWidths()
        # Partials in 16 bits take half the time, and what they lose is little beside 8 bits.
        partials = cute.recast_ptr(written.o_partial, dtype=BFloat16)
        outputs = Outputs(*written._replace(o_partial=partials), self.empty_positive, widths)
        exchange = Exchange(
            tiles(store.q, q_layout), store.q.data_ptr(),
            tiles(store.q_rope, q_rope_layout), store.q_rope.data_ptr(),
            tiles(store.p, p_layout), store.p.data_ptr(),
            store.row_sum.get_tensor(line), store.row_max.get_tensor(line),
            store.flush.get_tensor(line), store.fall.get_tensor(line),
            store.rescales.get_tensor(rescales), risen,
            *(store.rescales.get_tensor(pairs)[None, (None, i)] for i in range(2)),
        )  # fmt: skip
        value_registers, score_registers = registers(self.columns)
        if warp_index >= SCORE_WARP:
            if const_expr(score_registers > LAUNCH_REGISTERS):
                cute.arch.setmaxregister_increase(score_registers)
            else:
                cute.arch.setmaxregister_decrease(score_registers)
            compute_all_scores(
                Mmas(qk_mma, rope_mma, held_mma), blocks, barriers, exchange, means, first_token,
                outputs, whole_scale(cache_scale), scale_log2e, scheduler, self.columns, self.dtype,
            )  # fmt: skip
        elif warp_index >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == PRODUCER_WARP:
                cache = Cache(
                    latent, rope, token_scales, index.table, sizes.pages,
                    sizes.page_tokens // KV_BLOCK, self.block_bytes,
                )  # fmt: skip
                queries = Queries(q_latent, q_rope, *q_strides, sizes.heads)
                produce(
                    cache, blocks, barriers, scheduler, queries, work_tiles, self.columns,
                    first_block, self.early,
                )  # fmt: skip
            elif warp_index == WATCHER_WARP:
                if splits:
                    records = records_of(written.merges, index.schedule, ctas)
                    watch_starts(written.merges, records, merge, ctas, cta)
            else:
                compute_means(means, keys_bytes, scales, barriers)
        else:
            cute.arch.setmaxregister_increase(value_registers)
            mailbox = None
            if const_expr(self.clusters):
                # In 16 bits, as partials: 0.7 to 1.4 us less with 64 query rows
                # (docs/results/2026-11-18-nvidia-h200-fp8-cluster-rows.json).
                mailbox = mailbox_of(
                    keys_bytes, store.rope.data_ptr(), HALF * self.columns // WARPGROUP,
                    BFloat16,
                )  # fmt: skip
            if const_expr(self.early):
                # In a CTA without work too: the grid must not end before the kernel in front.
                cute.arch.griddepcontrol_wait()
            consume(
                pv_mma, keys_bytes, barriers, exchange, means, first_token, outputs,
                whole_scale(cache_scale), self.per_token, scheduler, work_tiles, self.columns,
                self.dtype, mailbox,
            )  # fmt: skip
            if const_expr(self.early):
                cute.arch.griddepcontrol_launch_dependents()  # where the 16-bit kernel does
            if splits:
                working = group_ctas * scheduler.range.groups
                merge_partials(
                    outputs, merge, group_ctas, ctas, working, cta, self.columns, self.dtype
                )
