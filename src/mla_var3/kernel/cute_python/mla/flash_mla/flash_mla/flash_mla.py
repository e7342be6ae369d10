"""flash_mla: absorbed attention over the latent cache, scheduled by hand for Hopper.

Computes, for every request, o = softmax(q_latent c_kv^T + q_rope k_rope^T) c_kv.

    q_latent [b, s, h, 512]   absorbed queries        q_rope [b, s, h, 64]
    c_kv     [b, t, 512]      latent cache            k_rope [b, t, 64]
             or [pages, page, 512] and [pages, page, 64] with a block table [b, pages of a request]
    lengths  [b] int32        KV length per request, on the device
    -> o_latent [b, s, h, 512] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any b, s, t >= 1 and h; page sizes that are
multiples of 64; slots beyond a length may hold NaN. Rows without a visible key give 0 and -inf.
`absorbed` also takes packed queries of different counts (`query_begins`) and trees of draft tokens;
the device code can leave out the `newest` tokens. One compilation per dtype, cache layout, `few`
and set of these options serves all shapes. Target: sm_90a.

How it works. A block has 64 query rows and two warpgroups; each holds half of the 512 output
columns and, of every pair of KV blocks, computes the scores of one:

    warpgroup 0                            warpgroup 1
    softmax of the even block              scores of the odd block (still running)
    P even -> shared memory                O right += P even V right
    O left += P even V left                softmax of the odd block
                                           P odd -> shared memory
    O left += P odd V left                 O right += P odd V right
    scores of the next even block          scores of the next odd block

So the tensor cores have work during either softmax. A third warpgroup gives its registers to
these two, except for one warp that loads: each half of a KV block is replaced as soon as its last
reader is done. The rope columns of a block make room for P. Results of an item are written while
the next item's queries and first blocks are on their way (see `schedule.py` for items and cuts;
`merge_partials.py` joins what was cut).

Base version. Limits: 25 to 63 rows are padded to 64 (fewer go to the N side, see `few_rows.py`);
only k=512 and p=64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from torch import Tensor

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.few_rows import compute_few
from mla_var3.kernel.cute_python.mla.latent_call import (
    ELEMENT_TYPES,
    AbsorbedLaunch,
    allocate_partials,
    attention_arguments,
    launch_absorbed,
)
from mla_var3.kernel.cute_python.mla.latent_loader import (
    CONSUMERS,
    LEFT,
    SIGNALS,
    init_signals,
    load_all,
)
from mla_var3.kernel.cute_python.mla.latent_ops import (
    HALF,
    LATENT,
    ROPE,
    ROPE_TILE,
    TILE,
)
from mla_var3.kernel.cute_python.mla.many_rows import compute_many
from mla_var3.kernel.cute_python.mla.merge_partials import MergeTiling, merge_stage
from mla_var3.kernel.cute_python.mla.paging import check_paged, dense_inputs, paged_inputs
from mla_var3.kernel.cute_python.mla.schedule import (
    DEFAULT_SM_COUNT,
    KV_BLOCK,
    ROWS,
    GangShape,
    Work,
    gang_shape,
    part_range,
    pieces,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import require_view

THREADS = CONSUMERS + 128
"""Registers go to warpgroups, so the loading warp has one of its own, the rest of which idles."""
LOADER = CONSUMERS // 32
LOADER_REGISTERS = 40
FEW_BELOW = 25
"""Fewer query rows than this go to the N side of the products."""
CONSUMER_REGISTERS = 232


class FlashMLASm90:
    """Host and device code for one element type."""

    def __init__(self, dtype, few=0, strict=False):
        self.dtype = dtype
        self.few = few
        self.strict = strict

    @cute.jit
    def __call__(
        self,
        q_latent: cute.Pointer,
        q_rope: cute.Pointer,
        latent: cute.Pointer,
        rope: cute.Pointer,
        table: cute.Pointer | None,
        lengths: cute.Pointer,
        query_begins: cute.Pointer | None,
        tree: cute.Pointer | None,
        o_latent: cute.Pointer,
        lse: cute.Pointer,
        o_partial: cute.Pointer,
        lse_partial: cute.Pointer,
        merges: cute.Pointer,
        scale_log2e: Float32,
        requests: Int32,
        queries: Int32,
        heads: Int32,
        total_rows: Int32,
        q_latent_stride: Int32,
        q_rope_stride: Int32,
        pages: Int32,
        page_tokens: Int32,
        latent_page_stride: Int64,
        latent_stride: Int32,
        rope_page_stride: Int64,
        rope_stride: Int32,
        table_stride: Int32,
        tree_stride: Int32,
        tree_row_stride: Int32,
        newest: Int32,
        causal: Int32,
        gang: Int32,
        groups: Int32,
        parts: Int32,
        stream: cuda.CUstream,
    ):
        dtype = self.dtype

        # Columns as (64, tiles): a copy then takes several column tiles at once.
        def rows_of(pointer, tiles, stride):
            shape, strides = (total_rows, (TILE, tiles)), (cute.assume(stride, divby=8), (1, TILE))
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))

        def pages_of(pointer, tiles, stride, page_stride):
            shape = (page_tokens, (TILE, tiles), pages)
            strides = (cute.assume(stride, divby=8), (1, TILE), cute.assume(page_stride, divby=8))
            return cute.make_tensor(pointer, cute.make_layout(shape, stride=strides))

        swizzle = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        row_layout = cute.tile_to_shape(swizzle, (TILE, LATENT + ROPE), order=(0, 1))

        def copies_of(tensor, tiles):
            load = cpasync.CopyBulkTensorTileG2SOp()
            layout = cute.tile_to_shape(swizzle, (TILE, tiles * TILE), order=(0, 1))
            return cpasync.make_tiled_tma_atom(load, tensor, layout, (TILE, tiles * TILE))

        def mma(a_major, b_major, columns, a_source):
            shape = (ROWS, columns)
            return sm90.make_trivial_tiled_mma(
                dtype, dtype, a_major, b_major, Float32, (1, 1, 1), shape, a_source
            )

        @cute.struct
        class Shared:
            signals: cute.struct.MemRange[Int64, SIGNALS]
            row_max: cute.struct.MemRange[Float32, ROWS]
            scale_even: cute.struct.MemRange[Float32, ROWS]
            scale_odd: cute.struct.MemRange[Float32, ROWS]
            row_sum: cute.struct.MemRange[Float32, 2 * ROWS]
            row_max_few: cute.struct.MemRange[Float32, 2 * ROWS]
            scales_few: cute.struct.MemRange[Float32, 2 * ROWS]
            warp_rows: cute.struct.MemRange[Float32, CONSUMERS // 32 * ROWS]
            q: cute.struct.Align[cute.struct.MemRange[dtype, ROWS * (LATENT + ROPE)], 1024]
            even: cute.struct.Align[cute.struct.MemRange[dtype, KV_BLOCK * (LATENT + ROPE)], 1024]
            odd: cute.struct.Align[cute.struct.MemRange[dtype, KV_BLOCK * (LATENT + ROPE)], 1024]

        self.Shared = Shared
        line = cute.make_layout
        slots = gang * parts * 2
        table_tensor = None
        if const_expr(table is not None):
            table_tensor = cute.make_tensor(
                table, line((requests, table_stride), stride=(table_stride, 1))
            )
        begins_tensor = None
        if const_expr(query_begins is not None):
            begins_tensor = cute.make_tensor(query_begins, line(requests + 1))
        tree_tensor = None
        if const_expr(tree is not None):
            strides = (tree_stride, tree_row_stride, 1)
            tree_tensor = cute.make_tensor(tree, line((requests, queries, queries), stride=strides))
        K, MN = OperandMajorMode.K, OperandMajorMode.MN
        shared, registers = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        if const_expr(self.few > 0):
            transposed = mma(MN, K, self.few, shared)
            products = (mma(K, K, self.few, shared), transposed, transposed)
        else:
            products = (
                mma(K, K, KV_BLOCK, shared),
                mma(K, MN, HALF, registers),
                mma(K, MN, HALF, shared),
            )
        self.flash_mla(
            *products,
            *copies_of(rows_of(q_latent, ROPE_TILE, q_latent_stride), len(LEFT)),
            *copies_of(rows_of(q_rope, 1, q_rope_stride), 1),
            *copies_of(
                pages_of(latent, ROPE_TILE, latent_stride, latent_page_stride),
                len(LEFT),
            ),
            *copies_of(pages_of(rope, 1, rope_stride, rope_page_stride), 1),
            table_tensor,
            cute.make_tensor(lengths, line(requests)),
            begins_tensor,
            tree_tensor,
            o_latent,
            cute.make_tensor(lse, line(total_rows)),
            o_partial,
            cute.make_tensor(lse_partial, line(slots * ROWS)),
            cute.make_tensor(merges, line((slots, 4), stride=(4, 1))),
            scale_log2e,
            requests,
            queries,
            heads,
            pages,
            page_tokens,
            newest,
            causal,
            gang,
            groups,
            parts,
            row_layout,
        ).launch(
            grid=(gang, parts, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def flash_mla(
        self,
        qk_mma: cute.TiledMma,
        pv_mma: cute.TiledMma,
        pv_mma_shared: cute.TiledMma,
        q_copy: cute.CopyAtom,
        q_global: cute.Tensor,
        qr_copy: cute.CopyAtom,
        qr_global: cute.Tensor,
        c_copy: cute.CopyAtom,
        c_global: cute.Tensor,
        r_copy: cute.CopyAtom,
        r_global: cute.Tensor,
        table: cute.Tensor | None,
        lengths: cute.Tensor,
        query_begins: cute.Tensor | None,
        tree: cute.Tensor | None,
        o_latent: cute.Pointer,
        lse: cute.Tensor,
        o_partial: cute.Pointer,
        lse_partial: cute.Tensor,
        merges: cute.Tensor,
        scale_log2e: Float32,
        requests: Int32,
        queries: Int32,
        heads: Int32,
        pages: Int32,
        page_tokens: Int32,
        newest: Int32,
        causal: Int32,
        gang: Int32,
        groups: Int32,
        parts: Int32,
        row_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        member, part, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        signals = store.signals.data_ptr()
        if thread == 0:
            init_signals(signals, 2 if self.few > 0 else 1)
            for i in cutlass.range_constexpr(2):
                merges[(part * gang + member) * 2 + i, 0] = Int32(0)
        cute.arch.sync_threads()
        work = Work(
            part_range(lengths, requests, groups, newest, part, parts),
            lengths, query_begins, tree, queries, heads, gang, groups, newest, causal, member,
        )  # fmt: skip
        swizzle = row_layout.inner
        s_q = store.q.get_tensor(row_layout.outer, swizzle=swizzle)
        s_even = store.even.get_tensor(row_layout.outer, swizzle=swizzle)
        s_odd = store.odd.get_tensor(row_layout.outer, swizzle=swizzle)
        if warp_index >= LOADER:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp_index == LOADER:
                load_all(
                    q_copy, q_global, qr_copy, qr_global, c_copy, c_global, r_copy, r_global,
                    s_q, s_even, s_odd, signals, table, pages, page_tokens, work,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            outputs = (o_latent, lse, o_partial, lse_partial, merges)
            line, two = cute.make_layout(ROWS), cute.make_layout((ROWS, 2))
            if const_expr(self.few > 0):
                by_group = (
                    store.row_max_few.get_tensor(two),
                    store.scales_few.get_tensor(two),
                    store.warp_rows.get_tensor(cute.make_layout((ROWS, CONSUMERS // 32))),
                )
                compute_few(
                    qk_mma, pv_mma, s_q, s_even, s_odd, signals, by_group, outputs, scale_log2e,
                    part, work, self.few, self.dtype, self.strict,
                )  # fmt: skip
            else:
                exchange = (
                    store.row_max.get_tensor(line),
                    store.scale_even.get_tensor(line),
                    store.scale_odd.get_tensor(line),
                    store.row_sum.get_tensor(two),
                )
                compute_many(
                    qk_mma, pv_mma, pv_mma_shared, s_q, s_even, s_odd, signals, exchange,
                    outputs, scale_log2e, part, work, self.dtype, self.strict,
                )  # fmt: skip
            # Not from the idle warps, which would ask for the merge at the start.
            cute.arch.griddepcontrol_launch_dependents()


@dataclass
class FlashMLATiling(Tiling):
    """How blocks work together; the tiles themselves are fixed by what fits an SM.

    Attributes:
        gang: blocks that walk through the same KV blocks in step; 0 lets the shape decide.
        sms: SMs to use; 0 takes all of the device. The kernel is persistent and needs no more.
        few: query rows on the N side of the products, a multiple of 8 that holds all rows of a
            request; 0 puts 64 of them on the M side.
    """

    gang: int = 0
    sms: int = 0
    few: int = 0

    def validate(self, pd: "CuteFlashMLA") -> Constraints:
        return Constraints(
            (
                self.few == 0 or (self.few % 8 == 0 and pd.s * pd.h <= self.few < ROWS),
                f"few: expected 0, or a multiple of 8 from s*h={pd.s * pd.h} to 56, got {self.few}",
            ),
            (
                0 <= self.gang <= pd.row_tiles,
                f"gang: expected 0 to {pd.row_tiles} (tiles of 64 rows), got {self.gang}",
            ),
            (
                0 <= self.sms <= pd.sm_count,
                f"sms: expected 0 to {pd.sm_count} (SMs of the device), got {self.sms}",
            ),
        )


def default_few(rows: int) -> int:
    """Query rows for the N side of the products: all of them when one tile would not be full."""
    return 0 if rows >= FEW_BELOW else -(-rows // 8) * 8


@dataclass
class CuteFlashMLA(MlaPlan):
    """Plan of the base version of flash_mla in CuTe DSL."""

    page: int = field(
        default=0,
        metadata={"help": "tokens of a cache page, a multiple of 64; 0 for a dense cache"},
    )
    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)
    merge_tiling: MergeTiling = field(default_factory=MergeTiling)

    targets = ("sm_90",)
    sm_count = DEFAULT_SM_COUNT

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, wanted in (("k", LATENT), ("p", ROPE)):
            if getattr(self, name) != wanted:
                raise InvalidArgumentError(
                    name, f"{wanted}, which the tiles are made for", getattr(self, name)
                )
        if self.page < 0 or self.page % KV_BLOCK:
            raise InvalidArgumentError("page", f"a multiple of {KV_BLOCK}, or 0", self.page)

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 query rows per request."""
        return -(-self.s * self.h // ROWS)

    def copy(self, **changes: object) -> Self:
        duplicate = super().copy(**changes)
        duplicate.__dict__["sm_count"] = self.sm_count
        return duplicate

    def on_device(self, spec: DeviceSpec) -> Self:
        duplicate = super().on_device(spec).copy()
        duplicate.__dict__["sm_count"] = spec.sm_count
        return duplicate

    def gangs(self, tiling: FlashMLATiling) -> GangShape:
        """The gangs of a launch with this tiling."""
        return gang_shape(self.row_tiles, self.b, tiling.sms or self.sm_count, tiling.gang)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        inputs = self.absorbed_inputs(device)
        return paged_inputs(inputs, self.page, self.seed) if self.page else inputs

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        dense = dense_inputs(inputs, self.t) if self.page else inputs
        return self.absorbed_reference(*dense, compute_dtype=compute_dtype)

    def _default_tiling(self, name: str) -> Tiling | None:
        return FlashMLATiling(few=default_few(self.s * self.h)) if name == "tiling" else None

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        sizes = [0, *(size for size in (1, 2, 4, 8, 16, 32) if size < self.row_tiles)]
        configs = [FlashMLATiling(gang=size) for size in sizes]
        rows = self.s * self.h
        if rows < ROWS - 7:
            configs.append(FlashMLATiling(few=-(-rows // 8) * 8))
        return configs

    def _algorithmic_flops_bytes(self, tiling: FlashMLATiling) -> tuple[float, float]:
        cost = flash_mla_cost(self.problem())
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        q_latent, q_rope, latent, rope, lengths, *rest = inputs
        rows = self.absorbed_rows(*inputs[:5]) if not self.page else self.paged_rows(*inputs)
        # All rows lie at one distance from each other, across requests too.
        count = self.b * self.s * self.h
        rows = (
            require_view("q_latent", rows[0], count, self.k),
            require_view("q_rope", rows[1], count, self.p),
        )
        table = rest[0] if rest else None
        o_latent = q_latent.new_empty(q_latent.shape)
        lse = q_latent.new_empty(q_latent.shape[:-1], dtype=torch.float32)
        partials = allocate_partials(q_latent.device, self.sm_count)
        dtype = ELEMENT_TYPES[self.torch_dtype]

        def args_fn(tiling: FlashMLATiling) -> tuple[object, ...]:
            return attention_arguments(
                *rows, latent, rope, table, lengths, None, None, o_latent, lse, partials,
                self.scale_log2e, self.s, self.h, self.causal, self.gangs(tiling),
            )  # fmt: skip

        attention = CuteKernel(
            kernel_fn=FlashMLASm90.flash_mla,
            host_fn=lambda tiling: FlashMLASm90(dtype, tiling.few),
            args_fn=args_fn,
            requires_arch="sm_90a",
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[o_latent, lse, *partials[:2]],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )
        shape = self.gangs(self.tiling)
        cut = pieces(self.problem().kv_lengths, shape) * shape.gang
        merge = merge_stage(
            self, self.merge_tiling, dtype, partials, (o_latent, lse),
            attention, self.gangs, self.sm_count, cut,
        )  # fmt: skip
        return KernelPipeline(_name=self.name, stages=[attention, merge])

    def paged_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Check paged inputs; returns the queries as rows."""
        return check_paged(self, self.page, inputs)


def unsupported(shape: Any) -> str | None:
    """Why the kernel cannot serve a call of this shape; None when it can."""
    if (shape.k, shape.p) != (LATENT, ROPE):
        return f"k={shape.k} and p={shape.p}; it is made for {LATENT} and {ROPE}"
    if shape.page_size is not None and shape.page_size % KV_BLOCK:
        return f"pages of {shape.page_size} tokens; it takes multiples of {KV_BLOCK}"
    return None


def absorbed(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor | None,
    lengths: Tensor,
    query_begins: Tensor | None,
    tree: Tensor | None,
    max_queries: int,
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> AbsorbedLaunch | None:
    """Attention on tensors that change from call to call; safe in a CUDA graph.

    Args:
        q_latent, q_rope: rows at equal distances, [b, s, h, ...], or [queries, h, ...] with
            `query_begins`.
        latent, rope: dense [b, t, ...] or paged [pages, page, ...] cache.
        block_table: [b, pages of a request] int32 for a paged cache.
        lengths: [b] int32, on the device.
        query_begins: [b + 1] int32, on the device; None when all requests have s queries.
        tree: [b, max_queries, max_queries] bool, which of the newest tokens a query sees, within
            causal order; None for causal order alone.
        max_queries: most queries of any request.
        causal: whether a query sees no later token.
        scale: factor on the logits.
        out: like q_latent.
        lse: float32, like q_latent without the last dimension.

    Returns:
        What to launch again for a call of the same form; None when there was nothing to launch.
    """
    rows = max_queries * q_latent.shape[-2]
    few = default_few(rows)
    return launch_absorbed(
        FlashMLASm90.flash_mla,
        FlashMLASm90,
        FlashMLATiling(few=few),
        few,
        q_latent,
        q_rope,
        latent,
        rope,
        block_table,
        lengths,
        query_begins,
        tree,
        max_queries,
        causal,
        scale,
        out,
        lse,
    )


if __name__ == "__main__":
    raise SystemExit(CuteFlashMLA().benchmark_kernel_argparse())
