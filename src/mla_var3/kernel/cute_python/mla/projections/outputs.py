"""decompress_combine: up-project a latent output and merge it with a decompressed one.

    o_latent [b*s, h, k]      lse_latent [b*s, h] float32    over the latent tokens
    o_new    [b*s, h, v]      lse_new    [b*s, h] float32    over the decompressed tokens
    w_uv     [h, k, v]
    -> o [b*s, h, v] in the input dtype, lse [b*s, h] float32 (natural logarithm)

o = (o_latent w_uv) * exp(lse_latent - lse) + o_new * exp(lse_new - lse), lse = logaddexp of both.
Without o_new only the up-projection is left, and no LSE is read or written. Rows without a token in
either part give 0 and -inf. k=512 or 256; v=64, 128 or 256, with o_new 64 or 128. bfloat16 and
float16. Target: sm_90a.

How it works. A CTA keeps w_uv of one head in shared memory, up to 128 of its columns, or fewer
where there are few rows and heads, and takes every `head_ctas`-th tile of 128 rows. A producer warp
loads o_latent in steps of 64 latent columns through a pipeline, two consumer warpgroups multiply 64
rows each and merge from registers, so the up-projected part never leaves the SM. The kernel is
memory bound: it reads o_latent once, twice at v=256, and w_uv once per CTA.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from torch import Tensor

from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.constants import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    CONSUMER_WARPS,
    HEAD,
    LATENT,
    LN_2,
    LOG2_E,
    MMA_DEPTH,
    PRODUCER_REGISTERS,
    PRODUCER_WARP,
    ROWS,
    THREADS,
    TILE,
    WARPGROUP,
)
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.hopper.rows import (
    columns_at,
    own_columns,
    store_row,
    two_rows,
)
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, transfer
from mla_var3.kernel.cute_python.mla.hopper.warps import next_stage, release
from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES
from mla_var3.op.mla.cost import decompress_combine_cost, output_up_projection_cost
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import require_view

COMBINE_ROWS = CONSUMER_WARPGROUPS * ROWS
"""Rows of a tile: 64 for each of the two warpgroups."""
STAGES = 5
"""Steps of o_latent in flight: five fit an SM beside w_uv of a head at k=512, v=128 (128 KiB)."""
COLUMNS = (128, 64, 32)
"""Output columns that a CTA may compute, as far as a head has so many."""


@dataclass(frozen=True)
class Barriers:
    """Mbarriers: steps of w_uv are full; stages of o_latent are full or empty."""

    first: Any
    steps: int
    stages: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.steps + 2 * self.stages

    def weights_full(self, step: Any) -> Any:
        """A step of w_uv has arrived."""
        return self.first + step

    def full(self, stage: Any) -> Any:
        """A stage of o_latent has arrived."""
        return self.first + self.steps + stage

    def empty(self, stage: Any) -> Any:
        """The consumers have released a stage of o_latent."""
        return self.first + (self.steps + self.stages) + stage


@dataclass(frozen=True)
class Share:
    """What a CTA computes."""

    rows: Any
    heads: Any
    head_ctas: Any
    head: Any
    rank: Any
    column_part: Any

    @property
    def tiles(self) -> Any:
        """Tiles that the rows make."""
        return (self.rows + COMBINE_ROWS - 1) // COMBINE_ROWS


class Merge(NamedTuple):
    """What the merge reads beside the projected rows, and where the LSE goes; None without one."""

    lse_latent: cute.Tensor | None
    lse_new: cute.Tensor | None
    lse: cute.Tensor | None
    o_new: cute.Pointer | None


@dataclass
class DecompressCombineTiling(Tiling):
    """How many CTAs share the rows of a head.

    Attributes:
        head_ctas: CTAs per head; 0 takes as many as fill the device.
    """

    head_ctas: int = 0

    def validate(self, pd: Any) -> Constraints:
        most = row_tiles(pd.b * pd.s)
        return Constraints(
            (
                0 <= self.head_ctas <= most,
                f"head_ctas: expected 0 to {most} (tiles of {COMBINE_ROWS} rows), "
                f"got {self.head_ctas}",
            )
        )


def row_tiles(rows: int) -> int:
    """Tiles that the rows of a head make."""
    return -(-rows // COMBINE_ROWS)


def default_head_ctas(rows: int, heads: int, sm_count: int) -> int:
    """CTAs per head: as many as fill the device and have a tile each."""
    return max(1, min(sm_count // heads, row_tiles(rows)))


def column_choices(v: int) -> tuple[int, ...]:
    """Output columns that a CTA may compute of a head, most first."""
    return tuple(columns for columns in COLUMNS if columns <= v)


def columns_for(rows: int, heads: int, sm_count: int, v: int = HEAD) -> int:
    """Output columns of a CTA that merges nothing: as many as it may, or fewer.

    With one tile of rows the weights are most of what is read, and one SM reads slowly, so few
    heads are spread over more SMs. With more tiles all CTAs of a head have rows.
    """
    choices = column_choices(v)
    if row_tiles(rows) > 1:
        return choices[0]
    return min(
        columns for columns in choices if columns == choices[0] or heads * v <= sm_count * columns
    )


@dataclass(eq=False, repr=False)
class DecompressCombineSm90:
    """Host and device code for one element type, the widths k and v, and `columns` of a CTA.

    With `early` it starts before the kernel in front of it has ended (programmatic dependent
    launch): it loads w_uv at once, o_latent after that kernel, and writes nothing before. The
    kernel in front must have waited for those before it, or have been launched without overlap.
    """

    dtype: Any
    early: bool = False
    columns: int = HEAD
    k: int = LATENT
    v: int = HEAD

    def __post_init__(self):
        self.steps = self.k // TILE
        # Beside less of w_uv a whole tile fits.
        self.stages = STAGES if self.k * self.columns == LATENT * HEAD else self.steps

    @cute.jit
    def __call__(
        self,
        o_latent: cute.Pointer,
        w_uv: cute.Pointer,
        lse_latent: cute.Pointer | None,
        o_new: cute.Pointer | None,
        lse_new: cute.Pointer | None,
        o: cute.Pointer,
        lse: cute.Pointer | None,
        rows: Int32,
        heads: Int32,
        head_ctas: Int32,
        stream: cuda.CUstream,
    ):
        dtype, columns, stages, k, v = self.dtype, self.columns, self.stages, self.k, self.v
        kinds = warpgroup.SmemLayoutAtomKind
        swizzle = warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype)
        # As long as the rows of the CTA's weights.
        w_kind = kinds.K_SW128 if columns >= TILE else kinds.K_SW64
        w_swizzle = warpgroup.make_smem_layout_atom(w_kind, dtype)

        def copies_of(tensor, atom, shape):
            layout = cute.tile_to_shape(atom, shape, order=(0, 1))
            return TmaTensor.of(tensor, layout, shape)

        row_stride = cute.assume(Int64(heads) * k, divby=8)
        latent_rows = cute.make_layout((rows, k, heads), stride=(row_stride, 1, k))
        # Columns as (64, 2): a copy then takes both column tiles at once.
        wide = min(columns, TILE)
        weight_shape = (k, (wide, v // wide), heads)
        weights = cute.make_layout(weight_shape, stride=(v, (1, wide), k * v))
        mma = sm90.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            (ROWS, columns), warpgroup.OperandSource.SMEM,
        )  # fmt: skip

        @cute.struct
        class Shared:
            barriers: cute.struct.MemRange[Int64, Barriers(None, self.steps, stages).count]
            x: cute.struct.Align[cute.struct.MemRange[dtype, COMBINE_ROWS * TILE * stages], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, k * columns], 1024]

        self.Shared = Shared
        merge = Merge(None, None, None, None)
        if const_expr(o_new is not None):
            line, given = cute.make_layout(rows * heads), (lse_latent, lse_new, lse)
            merge = Merge._make([*(cute.make_tensor(each, line) for each in given), o_new])
        self.decompress_combine(
            mma,
            copies_of(cute.make_tensor(o_latent, latent_rows), swizzle, (COMBINE_ROWS, TILE)),
            copies_of(cute.make_tensor(w_uv, weights), w_swizzle, (TILE, columns)),
            merge,
            o,
            rows,
            heads,
            head_ctas,
            cute.tile_to_shape(swizzle, (COMBINE_ROWS, TILE, stages), order=(0, 1, 2)),
            cute.tile_to_shape(w_swizzle, (TILE, columns, self.steps), order=(0, 1, 2)),
        ).launch(
            grid=(heads, head_ctas, v // columns),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.early,
        )

    @cute.kernel
    def decompress_combine(
        self,
        mma: cute.TiledMma,
        x: TmaTensor,
        w: TmaTensor,
        merge: Merge,
        o: cute.Pointer,
        rows: Int32,
        heads: Int32,
        head_ctas: Int32,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, rank, column_part = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        barriers = Barriers(store.barriers.data_ptr(), self.steps, self.stages)
        if thread == 0:
            for i in cutlass.range_constexpr(barriers.count):
                empty = i >= self.steps + self.stages
                cute.arch.mbarrier_init(barriers.first + i, CONSUMER_WARPS if empty else 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        s_x = store.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (128, 64, stage)
        s_w = store.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (64, columns, step)
        share = Share(rows, heads, head_ctas, head, rank, column_part)
        if warp_index >= PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == PRODUCER_WARP:
                self.produce(x, w, s_x, s_w, barriers, share)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.compute(mma, s_x, s_w, barriers, merge, o, share)

    @cute.jit
    def produce(
        self,
        x: cutlass.Constexpr,
        w: cutlass.Constexpr,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        barriers: cutlass.Constexpr,
        share: cutlass.Constexpr,
    ):
        """Load w_uv of the head, then fill the pipeline with the CTA's tiles."""
        load_x = transfer(x, s_x, (COMBINE_ROWS, TILE))
        load_w = transfer(w, s_w, (TILE, self.columns))
        if share.rank < share.tiles:  # a CTA must not end while a load is in flight
            for step in cutlass.range_constexpr(self.steps):
                full = barriers.weights_full(step)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, TILE * self.columns * 2)
                at = (None, step, share.column_part, share.head)
                target = load_w.shared[(None, step)]
                cute.copy(w.copy, load_w.tiles[at], target, tma_bar_ptr=full)
        if const_expr(self.early):
            # The consumers follow: what they write depends on steps that come after this.
            cute.arch.griddepcontrol_wait()
        stage = Int32(0)
        phase = Int32(1)  # all stages are empty at the start
        for tile in cutlass.range(share.rank, share.tiles, share.head_ctas, unroll=1):
            for step in cutlass.range_constexpr(self.steps):
                cute.arch.mbarrier_wait(barriers.empty(stage), phase)
                full = barriers.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, COMBINE_ROWS * TILE * 2)
                at = (None, tile, step, share.head)
                target = load_x.shared[(None, stage)]
                cute.copy(x.copy, load_x.tiles[at], target, tma_bar_ptr=full)
                stage, phase = next_stage(stage, phase, self.stages)

    @cute.jit
    def compute(
        self,
        mma: cute.TiledMma,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        barriers: cutlass.Constexpr,
        merge: cutlass.Constexpr,
        o: cute.Pointer,
        share: cutlass.Constexpr,
    ):
        """Multiply 64 rows of every tile by w_uv, merge and store them."""
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        t = thread % WARPGROUP
        lane = t % 32
        part_of = mma.get_slice(t)
        half = cute.local_tile(s_x, (ROWS, TILE, self.stages), (group, 0, 0))
        x = mma.make_fragment_A(part_of.partition_A(half))
        w_view = cute.make_tensor(s_w.iterator, cute.select(s_w.layout, mode=[1, 0, 2]))
        w = mma.make_fragment_B(part_of.partition_B(w_view))
        acc = cute.make_rmem_tensor(part_of.partition_shape_C((ROWS, self.columns)), Float32)
        atom = cute.make_mma_atom(mma.op)
        stage = Int32(0)
        phase = Int32(0)
        for tile in cutlass.range(share.rank, share.tiles, share.head_ctas, unroll=1):
            for step in cutlass.range_constexpr(self.steps):
                cute.arch.mbarrier_wait(barriers.full(stage), phase)
                cute.arch.mbarrier_wait(barriers.weights_full(step), 0)
                warpgroup.fence()
                for i in cutlass.range_constexpr(TILE // MMA_DEPTH):
                    atom.set(warpgroup.Field.ACCUMULATE, step + i > 0)
                    cute.gemm(atom, acc, x[(None, None, i, stage)], w[(None, None, i, step)], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                release(barriers.empty(stage), lane)
                stage, phase = next_stage(stage, phase, self.stages)
            projected = two_rows(acc, self.columns)
            first = tile * COMBINE_ROWS + group * ROWS + (t // 32) * 16 + lane // 4
            for r in cutlass.range_constexpr(2):
                row = first + 8 * r
                if row < share.rows:
                    at = Int64(row) * share.heads + share.head
                    if const_expr(merge.o_new is None):
                        place = at * self.v + share.column_part * self.columns
                        store_row(projected[r, None], self.columns, o, place, lane, self.dtype)
                    else:
                        self.merge_row(projected[r, None], merge, o, at, lane)

    @cute.jit
    def merge_row(
        self,
        row: cute.Tensor,
        merge: cutlass.Constexpr,
        o: cute.Pointer,
        at: Int64,
        lane: Int32,
    ):
        """Add the other part to a thread's columns of row `at`, both weighted, and store them."""
        lse = merge.lse
        latent, new = merge.lse_latent[at] * LOG2_E, merge.lse_new[at] * LOG2_E
        top = cute.arch.fmax(latent, new)
        if top == -Float32.inf:
            top = Float32(0.0)  # no difference of infinities
        latent_weight = cute.math.exp2(latent - top, fastmath=True)
        new_weight = cute.math.exp2(new - top, fastmath=True)
        total = latent_weight + new_weight
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
        v = self.v
        other = cute.make_rmem_tensor((2, v // 8), self.dtype)
        cute.autovec_copy(columns_at(merge.o_new, at * v, v, lane, self.dtype), other)
        mine = own_columns(row, v)
        added = other.load().to(Float32) * (new_weight * inverse)
        mine.store(mine.load() * (latent_weight * inverse) + added)
        store_row(row, v, o, at * v, lane, self.dtype)
        if lane % 4 == 0:
            lse_natural = -Float32.inf
            if total > 0.0:
                lse_natural = (top + cute.math.log2(total, fastmath=True)) * LN_2
            lse[at] = lse_natural


def combine_stage(
    plan: HopperPlan,
    tiling: DecompressCombineTiling,
    latent: Sequence[Tensor],
    new: Sequence[Tensor] | None,
    w_uv: Tensor,
) -> CuteKernel:
    """The stage that up-projects the latent part and merges the other one, if there is one.

    Args:
        latent: o_latent [b, s, h, 512] and its LSE, both contiguous.
        new: o_new [b, s, h, 128] and its LSE, likewise; None to up-project only.
        w_uv: [h, 512, 128], contiguous.

    Returns:
        The stage; its outputs are o and lse, which is that of `latent` when there is no other.
    """
    o_latent, lse_latent = latent
    b, s, h, k = o_latent.shape
    weights = require_view("w_uv", w_uv, h * k * plan.d)
    o = o_latent.new_empty((b, s, h, plan.d))
    lse = lse_latent if new is None else torch.empty_like(lse_latent)
    parts = (None, None, None, o, None) if new is None else (lse_latent, *new, o, lse)
    default = default_head_ctas(b * s, h, plan.sm_count)
    cost_of = output_up_projection_cost if new is None else decompress_combine_cost

    def cost_fn(tiling: DecompressCombineTiling) -> tuple[float, float]:
        cost = cost_of(plan.problem())
        return cost.flops, cost.bytes

    wanted = {default, default + 1, 2 * default}
    configs = [0, *sorted(n for n in wanted if n <= row_tiles(b * s) and n != default)]
    return CuteKernel(
        kernel_fn=DecompressCombineSm90.decompress_combine,
        host_fn=lambda tiling: DecompressCombineSm90(ELEMENT_TYPES[plan.torch_dtype]),
        args_fn=lambda tiling: (
            o_latent, weights, *parts, b * s, h, tiling.head_ctas or default,
        ),
        requires_arch="sm_90a",
        tiling=tiling,
        plan=plan,
        input_tensors=[*latent, *(new or ()), w_uv],
        output_tensors=[o, lse],
        algorithmic_flops_bytes_fn=cost_fn,
        autotune_configs=[DecompressCombineTiling(n) for n in configs],
    )  # fmt: skip
