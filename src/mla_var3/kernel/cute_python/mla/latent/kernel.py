"""The latent (absorbed) kernel for Hopper: attention over latent rows, for flash_mla and the mix.

    q_latent [b, s, h, k]   q_rope [b, s, h, p]
    latent [b, t, k] and rope [b, t, p], or pages of them with a block table
    -> o_latent [b, s, h, k] in the input dtype, lse [b, s, h] float32 (natural logarithm)

(k, p) is one of `LATENT_WIDTHS`, a constant of the program; with p=0 there is no rope part.

The contract is that of flash_mla; in addition the `newest` tokens of every request can be left out.
A sliding window is an option of the program: KV blocks that no row of a tile sees are skipped.

How it works. A CTA has 64 query rows and two consumer warpgroups; each accumulates half of the
output columns and, of every pair of KV blocks, computes the scores of one:

    warpgroup 0                            warpgroup 1
    softmax of the even block              scores of the odd block (still running)
    P even -> shared memory                O right += P even V right
    O left += P even V left                softmax of the odd block
                                           P odd -> shared memory
    O left += P odd V left                 O right += P odd V right
    scores of the next even block          scores of the next odd block

So the tensor cores have work during either softmax. A third warpgroup gives its registers to these
two, except for one producer warp: each half of a KV block is replaced as soon as its last reader
has released it. The rope tile of a block holds P once its scores exist. Results of a work tile
are written while the next tile's queries and first KV blocks are loaded (`scheduler.py` says which
tiles a CTA has, and what it splits). In the end the CTAs merge partials, in the same launch
(`merge.py`), unless tiles are whole or two CTAs of a cluster share every one (`cluster.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPS,
    KV_BLOCK,
    MOST_TAKEN,
    PRODUCER_REGISTERS,
    PRODUCER_WARP,
    ROWS,
    THREADS,
    TILE,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, prefetch_descriptors
from mla_var3.kernel.cute_python.mla.hopper.widths import LatentWidths
from mla_var3.kernel.cute_python.mla.latent import ops, producer
from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES, allocate_partials
from mla_var3.kernel.cute_python.mla.latent.cluster import ClusterHost, mailbox_of
from mla_var3.kernel.cute_python.mla.latent.few_rows import FewExchange, compute_few
from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape, partial_count
from mla_var3.kernel.cute_python.mla.latent.merge import (
    TRIAL_WARP,
    WATCHER_WARP,
    merge_cost,
    merge_partials,
    open_merge,
    outputs_of,
    watch_starts,
)
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    LatentSizes,
    Partials,
    groups_of,
    latent_arguments,
)
from mla_var3.kernel.cute_python.mla.latent.ranges import CLUSTER
from mla_var3.kernel.cute_python.mla.latent.records import (
    TABLE_WORDS,
    TRIAL_WORDS,
    merge_shared,
    prepare_trial,
    records_of,
    reset_merge,
)
from mla_var3.kernel.cute_python.mla.latent.rows64 import Exchange, compute_rows64
from mla_var3.kernel.cute_python.mla.latent.scheduler import Scheduler
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling

FEW_BELOW = 25
"""Fewer query rows than this go to the N side of the products. On an H200 16 rows are 5 to 7 %
faster there and 32 rows 3 % slower (run 9 of
docs/results/2026-11-15-nvidia-h200-cute-development.md); between them nothing was measured."""


def exchanged_type(few: int) -> Any:
    """The type in which CTAs exchange partials and halves: 16 bits where there are 64 rows."""
    return Float32 if few > 0 else Float16


@dataclass(eq=False, repr=False)
class FlashMLASm90(ClusterHost):
    """Host and device code for one element type and pair of widths.

    See `final_lse` for `empty_positive`.

    With `early` it is launched before the kernel in front of it has ended (programmatic dependent
    launch). It waits for that kernel before it reads the queries, and writes nothing before that
    except states and records of its own workspace. The kernel in front must not use this workspace,
    and must have been launched without overlap.

    Two launches that do not depend on each other can share the SMs: with `overlap` "first" the next
    launch may start as soon as all CTAs of this one run. With "second" it is that next launch. It
    waits for nothing, ends after the first, and what is launched behind it finds both complete.
    Each needs a workspace of its own, and both together no more CTAs than there are SMs.

    See `ClusterHost` for `clusters`.
    """

    dtype: Any
    few: int = 0
    strict: bool = False
    empty_positive: bool = False
    early: bool = False
    head_box: int = 0
    widths: LatentWidths = LatentWidths()
    overlap: str = ""
    clusters: Any = None

    def __post_init__(self) -> None:
        self.q_rows = self.few if self.few > 0 else ROWS

    @property
    def tries_merge(self) -> bool:
        """Whether an idle warp runs the merge in a trial, see `merge.py`.

        With so few query rows consumers need no more registers than all warps begin with.
        """
        return 0 < self.few < FEW_BELOW

    @cute.jit
    def launch(self, *arguments: Any):
        operands, partials, sizes, (stream,) = groups_of(
            arguments, LatentOperands, Partials, LatentSizes
        )
        dtype, widths = self.dtype, self.widths
        read = ops.LaunchSizes.of(sizes)

        # Latent columns as (64, tiles): a copy then takes several column tiles at once.
        latent_columns, rope_columns = (TILE, widths.tiles), widths.p

        def strides_of(columns):
            return (1, TILE) if columns is latent_columns else 1

        def rows_of(pointer, columns, stride, token_stride):
            rows, strides = (sizes.total_rows,), (cute.assume(stride, divby=8),)
            if const_expr(self.head_box > 0):
                rows = (sizes.heads, read.total_queries)
                strides = (*strides, cute.assume(token_stride, divby=8))
            layout = cute.make_layout((*rows, columns), stride=(*strides, strides_of(columns)))
            return cute.make_tensor(pointer, layout)

        def pages_of(pointer, columns, stride, page_stride):
            shape = (sizes.page_tokens, columns, sizes.pages)
            row, page = cute.assume(stride, divby=8), cute.assume(page_stride, divby=8)
            layout = cute.make_layout(shape, stride=(row, strides_of(columns), page))
            return cute.make_tensor(pointer, layout)

        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        row_layout = cute.tile_to_shape(swizzle, (TILE, widths.columns), order=(0, 1))
        q_rows = self.q_rows
        q_layout = cute.tile_to_shape(swizzle, (q_rows, widths.columns), order=(0, 1))

        def copies_of(tensor, columns, rows=TILE, head_box=0):
            layout = cute.tile_to_shape(swizzle, (rows, columns), order=(0, 1))
            box = (rows, columns)
            if const_expr(head_box > 0):
                box = (head_box, rows // head_box, columns)
                layout = cute.composition(layout, cute.make_layout(box))
            return TmaTensor.of(tensor, layout, box)

        def mma(a_major, b_major, columns, a_source):
            shape = (ROWS, columns)
            return sm90.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, (1, 1, 1), shape, a_source
            )

        table_words = TABLE_WORDS + (TRIAL_WORDS if self.tries_merge else 0)

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, len(producer.Mbarrier)]
            merge: cute.struct.MemRange[Int32, table_words]
            taken: cute.struct.MemRange[Int16, MOST_TAKEN]
            row_max: cute.struct.MemRange[Float32, ROWS]
            scale_even: cute.struct.MemRange[Float32, ROWS]
            scale_odd: cute.struct.MemRange[Float32, ROWS]
            row_sum: cute.struct.MemRange[Float32, 2 * ROWS]
            row_max_few: cute.struct.MemRange[Float32, 2 * ROWS]
            scales_few: cute.struct.MemRange[Float32, 2 * ROWS]
            peaks: cute.struct.MemRange[Float32, 2 * ROWS]
            warp_rows: cute.struct.MemRange[Float32, CONSUMER_WARPS * ROWS]
            q: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * widths.columns], 1024]
            even: cute.struct.Align[cute.struct.MemRange[dtype, KV_BLOCK * widths.columns], 1024]
            odd: cute.struct.Align[cute.struct.MemRange[dtype, KV_BLOCK * widths.columns], 1024]

        self.Shared = Shared
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        if const_expr(self.few > 0):
            transposed = mma(MN, K, self.few, shared)
            products = (mma(K, K, self.few, shared), transposed, transposed)
        else:
            products = (
                mma(K, K, KV_BLOCK, shared),
                mma(K, MN, widths.half, registers),
                mma(K, MN, widths.half, shared),
            )
        q_latent = rows_of(
            operands.q_latent, latent_columns, sizes.q_latent_stride, sizes.q_latent_token_stride
        )
        latent = pages_of(
            operands.latent, latent_columns, sizes.latent_stride, sizes.latent_page_stride
        )
        q_rope = rope = None
        if const_expr(widths.p > 0):
            q_rope_rows = rows_of(
                operands.q_rope, rope_columns, sizes.q_rope_stride, sizes.q_rope_token_stride
            )
            q_rope = copies_of(q_rope_rows, TILE, q_rows, self.head_box)
            rope_pages = pages_of(
                operands.rope, rope_columns, sizes.rope_stride, sizes.rope_page_stride
            )
            rope = copies_of(rope_pages, TILE)
        self.flash_mla(
            *products,
            copies_of(q_latent, widths.half, q_rows, self.head_box),
            q_rope,
            copies_of(latent, widths.half),
            rope,
            ops.IndexTensors.of(operands, sizes),
            outputs_of(operands, partials, sizes),
            sizes.scale_log2e,
            read,
            row_layout,
            q_layout,
        ).launch(
            grid=(sizes.group_ctas, sizes.group_count, 1),
            block=(THREADS, 1, 1),
            cluster=(1, CLUSTER, 1) if self.clusters else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.early or self.overlap == "second",
        )

    @cute.kernel
    def flash_mla(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        pv_mma_shared: cute.TiledMma,
        q_latent: TmaTensor,
        q_rope: TmaTensor | None,
        latent: TmaTensor,
        rope: TmaTensor | None,
        index: ops.IndexTensors,
        written: ops.OutputTensors,
        scale_log2e: Float32,
        sizes: ops.LaunchSizes,
        row_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        rank, group, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        barriers = store.barriers.data_ptr()
        merge = merge_shared(store.merge.data_ptr(), store.q.data_ptr())
        if thread == 0:
            producer.init_barriers(barriers, 2 if self.few > 0 else 1)
            reset_merge(merge)
            if const_expr(self.tries_merge):
                prepare_trial(merge, sizes.total_queries * sizes.heads)
        if warp_index == PRODUCER_WARP:
            prefetch_descriptors(latent, q_latent, rope, q_rope)
        scheduler = Scheduler.of(
            index, sizes, group, rank, self.clusters, self.tile_rows,
            *(() if self.clusters else (store.merge.data_ptr(), store.taken.data_ptr())),
        )  # fmt: skip
        cute.arch.sync_threads()
        if const_expr(self.overlap == "first"):
            cute.arch.griddepcontrol_launch_dependents()
        group_ctas = sizes.group_ctas
        ctas, cta = group_ctas * sizes.group_count, group * group_ctas + rank
        splits = scheduler.range.splits
        if thread == WATCHER_WARP * 32 and splits:
            open_merge(written.merges, ctas, cta, scheduler, index.schedule)
        q, even, odd = (
            memory.get_tensor(layout.outer, swizzle=layout.inner)
            for memory, layout in (
                (store.q, q_layout), (store.even, row_layout), (store.odd, row_layout),
            )
        )  # fmt: skip
        tiles = producer.SharedTiles(q, even, odd, self.widths, self.q_rows)
        if warp_index >= PRODUCER_WARP:
            if const_expr(not self.tries_merge):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == PRODUCER_WARP:
                if const_expr(self.early):
                    cute.arch.griddepcontrol_wait()
                sources = producer.Sources(
                    q_latent, q_rope, latent, rope, index.table, sizes.pages, sizes.page_tokens,
                    sizes.heads, self.head_box,
                )  # fmt: skip
                producer.produce(sources, tiles, barriers, scheduler)
                if const_expr(self.overlap == "second"):
                    cute.arch.griddepcontrol_wait()
            elif warp_index == WATCHER_WARP:
                if splits:
                    records = records_of(written.merges, index.schedule, ctas)
                    watch_starts(written.merges, records, merge, ctas, cta)
        else:
            if const_expr(not self.tries_merge):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            outputs = self._outputs(written)
            line, two = cute.make_layout(ROWS), cute.make_layout((ROWS, 2))
            mailbox = None
            if const_expr(self.clusters):
                accumulators = self.widths.half * self.q_rows // WARPGROUP
                mailbox = mailbox_of(
                    store.even.data_ptr(), store.odd.data_ptr(), accumulators,
                    exchanged_type(self.few),
                )  # fmt: skip
            if const_expr(self.few > 0):
                few_exchange = FewExchange(
                    store.row_max_few.get_tensor(two),
                    store.scales_few.get_tensor(two),
                    store.warp_rows.get_tensor(cute.make_layout((ROWS, CONSUMER_WARPS))),
                )
                compute_few(
                    qk_mma, pv_mma, tiles, barriers, few_exchange, outputs, scale_log2e,
                    scheduler, self.few, self.dtype, self.strict, mailbox,
                )  # fmt: skip
            else:
                exchange = Exchange(
                    store.row_max.get_tensor(line),
                    store.scale_even.get_tensor(line),
                    store.scale_odd.get_tensor(line),
                    store.row_sum.get_tensor(two),
                    store.peaks.get_tensor(two),
                )
                compute_rows64(
                    qk_mma, pv_mma, pv_mma_shared, tiles, barriers, exchange, outputs,
                    scale_log2e, scheduler, self.dtype, self.strict, mailbox,
                )  # fmt: skip
            # All CTAs that get here have an SM, so a kernel that was launched to start early may
            # have theirs as they end. Not from the idle warps, which are here at the start.
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(not self.tries_merge):
                if splits:
                    working = group_ctas * scheduler.range.groups
                    merge_partials(
                        outputs, merge, group_ctas, ctas, working, cta, self.q_rows, self.dtype
                    )
        if const_expr(self.tries_merge):
            if splits and (warp_index < PRODUCER_WARP or warp_index == TRIAL_WARP):
                outputs = self._outputs(written)
                working = group_ctas * scheduler.range.groups
                trial = warp_index // CONSUMER_WARPS
                merge_partials(
                    outputs, merge, group_ctas, ctas, working, cta, self.q_rows, self.dtype, trial
                )

    def _outputs(self, written: ops.OutputTensors) -> ops.Outputs:
        """What the consumers write, in the kernel."""
        partials = cute.recast_ptr(written.o_partial, dtype=exchanged_type(self.few))
        written = written._replace(o_partial=partials)
        return ops.Outputs(*written, self.empty_positive, self.widths)


@dataclass
class FlashMLATiling(Tiling):
    """How CTAs work together; the tiles themselves are fixed by what fits an SM.

    Attributes:
        group_ctas: CTAs of a CTA group, which walk the same KV blocks in step; 0 lets the shape
            decide.
        sms: SMs to use; 0 takes all of the device. The kernel is persistent and needs no more.
        few: query rows on the N side of the products, a multiple of 8 that holds all rows of a
            request; 0 puts 64 of them on the M side.
    """

    group_ctas: int = 0
    sms: int = 0
    few: int = 0

    def validate(self, pd: Any) -> Constraints:
        return Constraints(
            (
                self.few == 0 or (self.few % 8 == 0 and pd.s * pd.h <= self.few < ROWS),
                f"few: expected 0, or a multiple of 8 from s*h={pd.s * pd.h} to 56, got {self.few}",
            ),
            (
                0 <= self.group_ctas <= pd.row_tiles,
                f"group_ctas: expected 0 to {pd.row_tiles} (tiles of 64 rows), "
                f"got {self.group_ctas}",
            ),
            (
                0 <= self.sms <= pd.sm_count,
                f"sms: expected 0 to {pd.sm_count} (SMs of the device), got {self.sms}",
            ),
        )


def default_few(rows: int) -> int:
    """Query rows for the N side of the products: all of them when one tile would not be full."""
    return 0 if rows >= FEW_BELOW else -(-rows // 8) * 8


def latent_stage(
    plan: HopperPlan,
    tiling: FlashMLATiling,
    operands: LatentOperands,
    groups: Callable[[FlashMLATiling], GroupShape],
    kv_lengths: Sequence[int],
    cost_fn: Callable[[Any], tuple[float, float]],
    configs: Sequence[FlashMLATiling],
    newest: int = 0,
    sliding_window: int | None = None,
    clusters: bool | None = None,
) -> CuteKernel:
    """The attention over latent rows; its outputs are `o_latent` and `lse`.

    Args:
        groups: the CTA groups of a launch with a tiling.
        cost_fn: FLOPs and bytes of the attention, without those of the merge.
    """
    o_latent = operands.o_latent
    partials = allocate_partials(o_latent.device, plan.sm_count)
    dtype = ELEMENT_TYPES[plan.torch_dtype]
    options = LatentOptions(
        plan.s, plan.causal, plan.scale_log2e, newest, sliding_window=sliding_window
    )

    def host_fn(tiling: FlashMLATiling) -> FlashMLASm90:
        widths = LatentWidths(plan.k, plan.p)
        return FlashMLASm90(dtype, tiling.few, widths=widths, clusters=clusters)

    def args_fn(tiling: FlashMLATiling) -> tuple[object, ...]:
        return latent_arguments(operands, partials, options, groups(tiling))

    def whole_cost_fn(tiling: FlashMLATiling) -> tuple[float, float]:
        shape = groups(tiling)
        flops, moved = cost_fn(tiling)
        rows = partial_count(kv_lengths, shape) * shape.group_ctas * (tiling.few or ROWS)
        more_flops, more_moved = merge_cost(
            rows, exchanged_type(tiling.few).width // 8, o_latent.element_size(), plan.k
        )
        return flops + more_flops, moved + more_moved

    return CuteKernel(
        kernel_fn=FlashMLASm90.flash_mla,
        host_fn=host_fn,
        args_fn=args_fn,
        requires_arch="sm_90a",
        tiling=tiling,
        plan=plan,
        input_tensors=operands.inputs,
        output_tensors=[o_latent, operands.lse],
        autotune_configs=configs,
        algorithmic_flops_bytes_fn=whole_cost_fn,
    )
