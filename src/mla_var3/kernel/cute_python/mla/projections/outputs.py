"""decompress_combine: up-project the latent part of an output and merge it with the other part.

    o_latent [b*s, h, 512]    lse_latent [b*s, h] float32    over the tokens that stay latent
    o_new    [b*s, h, 128]    lse_new    [b*s, h] float32    over the decompressed tokens
    w_uv     [h, 512, 128]
    -> o [b*s, h, 128] in the input dtype, lse [b*s, h] float32 (natural logarithm)

o = (o_latent w_uv) * exp(lse_latent - lse) + o_new * exp(lse_new - lse), lse = logaddexp of both.
Without o_new only the up-projection is left, and no log-sum-exp is read or written. Rows that
neither part has a token for give 0 and -inf. bfloat16 and float16. Target: sm_90a.

How it works. A block keeps w_uv of one head in shared memory, or a part of its columns where there
are few rows and heads, and takes every splits-th tile of 128 rows. A warp loads o_latent in steps
of 64 latent columns through a ring, two warpgroups multiply 64 rows each and merge from registers,
so the up-projected part never leaves the SM. The kernel is bound by memory: it reads o_latent once,
and w_uv once per block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from torch import Tensor

from mla_var3.kernel.cute_python.mla.decompressed.jobs import HEAD
from mla_var3.kernel.cute_python.mla.hopper.compat import SmemAllocator
from mla_var3.kernel.cute_python.mla.hopper.warps import (
    CONSUMER_REGISTERS,
    LOADER,
    LOADER_REGISTERS,
    THREADS,
    free,
    next_stage,
)
from mla_var3.kernel.cute_python.mla.latent.ops import (
    LATENT,
    LN_2,
    MMA_DEPTH,
    TILE,
    columns_at,
    copy_places,
    own_columns,
    store_row,
    two_rows,
)
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cost import decompress_combine_cost, output_up_projection_cost
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import check_tensor, require_view

COMBINE_ROWS = 128
"""Rows of a tile: 64 for each of the two warpgroups."""
GROUP_ROWS = 64
STEPS = LATENT // TILE
STAGES = 5
"""Steps of o_latent on their way: beside w_uv of a head (128 KiB) an SM has room for five."""
LOG2_E = 1.4426950408889634
COLUMNS = (HEAD, HEAD // 2, HEAD // 4)
"""Output columns that a block may make: all of a head, or a part."""

WEIGHTS, ARRIVED = 0, STEPS
"""First barrier of each kind: a step of w_uv is there, a step of o_latent has arrived in its place;
behind these, as many that say that a place is free."""


@dataclass
class DecompressCombineTiling(Tiling):
    """How many blocks share the rows of a head.

    Attributes:
        splits: blocks per head; 0 takes as many as fill the device.
    """

    splits: int = 0

    def validate(self, pd: Any) -> Constraints:
        most = row_tiles(pd.b * pd.s)
        return Constraints(
            (
                0 <= self.splits <= most,
                f"splits: expected 0 to {most} (tiles of {COMBINE_ROWS} rows), got {self.splits}",
            )
        )


def row_tiles(rows: int) -> int:
    """Tiles that the rows of a head make."""
    return -(-rows // COMBINE_ROWS)


def default_splits(rows: int, heads: int, sm_count: int) -> int:
    """Blocks per head: as many as fill the device and have a tile each."""
    return max(1, min(sm_count // heads, row_tiles(rows)))


def columns_for(rows: int, heads: int, sm_count: int) -> int:
    """Output columns of a block without another part to merge: all of a head, or a part.

    With one tile of rows the weights are most of what is read, and an SM alone reads slowly, so
    that few heads are spread over more SMs. With more tiles all blocks of a head have rows.
    """
    if row_tiles(rows) > 1:
        return HEAD
    return min(
        columns for columns in COLUMNS if columns == HEAD or heads * HEAD <= sm_count * columns
    )


class DecompressCombineSm90:
    """Host and device code for one element type, and `columns` of the output for each block.

    With `early` it starts before the kernel in front of it has ended (programmatic dependent
    launch): w_uv comes at once, o_latent after that kernel, and nothing is written before either.
    The kernel in front must have waited for those before it, or have been launched without overlap.
    """

    def __init__(self, dtype, early=False, columns=HEAD):
        self.dtype = dtype
        self.early = early
        self.columns = columns
        # Beside less of w_uv a whole tile has room.
        self.stages = STAGES if columns == HEAD else STEPS
        self.first_free = ARRIVED + self.stages
        self.signal_count = self.first_free + self.stages

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
        splits: Int32,
        stream: cuda.CUstream,
    ):
        dtype, columns, stages = self.dtype, self.columns, self.stages
        kinds = warpgroup.SmemLayoutAtomKind
        swizzle = warpgroup.make_smem_layout_atom(kinds.K_SW128, dtype)
        # As long as the rows of the block's weights.
        w_kind = kinds.K_SW128 if columns >= TILE else kinds.K_SW64
        w_swizzle = warpgroup.make_smem_layout_atom(w_kind, dtype)
        load = cpasync.CopyBulkTensorTileG2SOp()

        def copies_of(tensor, atom, shape):
            layout = cute.tile_to_shape(atom, shape, order=(0, 1))
            return cpasync.make_tiled_tma_atom(load, tensor, layout, shape)

        row_stride = cute.assume(Int64(heads) * LATENT, divby=8)
        latent_rows = cute.make_layout((rows, LATENT, heads), stride=(row_stride, 1, LATENT))
        # Columns as (64, 2): a copy then takes both column tiles at once.
        wide = min(columns, TILE)
        weight_shape = (LATENT, (wide, HEAD // wide), heads)
        weights = cute.make_layout(weight_shape, stride=(HEAD, (1, wide), LATENT * HEAD))
        mma = sm90.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.MN,
            Float32,
            (1, 1, 1),
            (GROUP_ROWS, columns),
            warpgroup.OperandSource.SMEM,
        )

        @cute.struct
        class Shared:
            signals: cute.struct.MemRange[Int64, self.signal_count]
            x: cute.struct.Align[cute.struct.MemRange[dtype, COMBINE_ROWS * TILE * stages], 1024]
            w: cute.struct.Align[cute.struct.MemRange[dtype, LATENT * columns], 1024]

        self.Shared = Shared
        parts = None
        if const_expr(o_new is not None):
            line = cute.make_layout(rows * heads)
            parts = tuple(cute.make_tensor(each, line) for each in (lse_latent, lse_new, lse))
        self.decompress_combine(
            mma,
            *copies_of(cute.make_tensor(o_latent, latent_rows), swizzle, (COMBINE_ROWS, TILE)),
            *copies_of(cute.make_tensor(w_uv, weights), w_swizzle, (TILE, columns)),
            parts,
            o_new,
            o,
            rows,
            heads,
            splits,
            cute.tile_to_shape(swizzle, (COMBINE_ROWS, TILE, stages), order=(0, 1, 2)),
            cute.tile_to_shape(w_swizzle, (TILE, columns, STEPS), order=(0, 1, 2)),
        ).launch(
            grid=(heads, splits, HEAD // columns),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.early,
        )

    @cute.kernel
    def decompress_combine(
        self,
        mma: cute.TiledMma,
        x_copy: cute.CopyAtom,
        x_global: cute.Tensor,
        w_copy: cute.CopyAtom,
        w_global: cute.Tensor,
        log_sums: tuple | None,
        o_new: cute.Pointer | None,
        o: cute.Pointer,
        rows: Int32,
        heads: Int32,
        splits: Int32,
        x_layout: cute.ComposedLayout,
        w_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, part, column_part = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        signals = store.signals.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.signal_count):
                # A place is free when the eight computing warps are done with it.
                cute.arch.mbarrier_init(signals + i, LOADER if i >= self.first_free else 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        s_x = store.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)  # (128, 64, stage)
        s_w = store.w.get_tensor(w_layout.outer, swizzle=w_layout.inner)  # (64, columns, step)
        if warp_index >= LOADER:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp_index == LOADER:
                self.load(
                    x_copy, x_global, w_copy, w_global, s_x, s_w, signals, rows, splits, head, part,
                    column_part,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.compute(
                mma, s_x, s_w, signals, log_sums, o_new, o, rows, heads, splits, head, part,
                column_part,
            )  # fmt: skip

    @cute.jit
    def load(
        self,
        x_copy: cute.CopyAtom,
        x_global: cute.Tensor,
        w_copy: cute.CopyAtom,
        w_global: cute.Tensor,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        signals: cute.Pointer,
        rows: Int32,
        splits: Int32,
        head: Int32,
        part: Int32,
        column_part: Int32,
    ):
        """Bring w_uv of the head, then fill the ring with the block's tiles."""
        x_to, x_from = copy_places(x_copy, s_x, x_global, (COMBINE_ROWS, TILE))
        w_to, w_from = copy_places(w_copy, s_w, w_global, (TILE, self.columns))
        if part < self.tiles(rows):  # what is on its way has to be waited for
            for step in cutlass.range_constexpr(STEPS):
                there = signals + (WEIGHTS + step)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(there, TILE * self.columns * 2)
                at = (None, step, column_part, head)
                cute.copy(w_copy, w_from[at], w_to[(None, step)], tma_bar_ptr=there)
        if const_expr(self.early):
            # The computing warps follow: they write what they made of steps that come after this.
            cute.arch.griddepcontrol_wait()
        stage = Int32(0)
        phase = Int32(1)  # all places are free at the start
        for tile in cutlass.range(part, self.tiles(rows), splits, unroll=1):
            for step in cutlass.range_constexpr(STEPS):
                cute.arch.mbarrier_wait(signals + self.first_free + stage, phase)
                arrived = signals + ARRIVED + stage
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(arrived, COMBINE_ROWS * TILE * 2)
                at = (None, tile, step, head)
                cute.copy(x_copy, x_from[at], x_to[(None, stage)], tma_bar_ptr=arrived)
                stage, phase = next_stage(stage, phase, self.stages)

    @cute.jit
    def compute(
        self,
        mma: cute.TiledMma,
        s_x: cute.Tensor,
        s_w: cute.Tensor,
        signals: cute.Pointer,
        log_sums: tuple | None,
        o_new: cute.Pointer | None,
        o: cute.Pointer,
        rows: Int32,
        heads: Int32,
        splits: Int32,
        head: Int32,
        part: Int32,
        column_part: Int32,
    ):
        """Multiply 64 rows of every tile with w_uv, merge and store them."""
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // 128)
        own = thread % 128
        lane = own % 32
        part_of = mma.get_slice(own)
        half = cute.local_tile(s_x, (GROUP_ROWS, TILE, self.stages), (group, 0, 0))
        x = mma.make_fragment_A(part_of.partition_A(half))
        w_view = cute.make_tensor(s_w.iterator, cute.select(s_w.layout, mode=[1, 0, 2]))
        w = mma.make_fragment_B(part_of.partition_B(w_view))
        acc = cute.make_rmem_tensor(part_of.partition_shape_C((GROUP_ROWS, self.columns)), Float32)
        atom = cute.make_mma_atom(mma.op)
        stage = Int32(0)
        phase = Int32(0)
        for tile in cutlass.range(part, self.tiles(rows), splits, unroll=1):
            for step in cutlass.range_constexpr(STEPS):
                cute.arch.mbarrier_wait(signals + ARRIVED + stage, phase)
                cute.arch.mbarrier_wait(signals + (WEIGHTS + step), 0)
                warpgroup.fence()
                for i in cutlass.range_constexpr(TILE // MMA_DEPTH):
                    atom.set(warpgroup.Field.ACCUMULATE, step + i > 0)
                    cute.gemm(atom, acc, x[(None, None, i, stage)], w[(None, None, i, step)], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                free(signals + self.first_free + stage, lane)
                stage, phase = next_stage(stage, phase, self.stages)
            projected = two_rows(acc, self.columns)
            first = tile * COMBINE_ROWS + group * GROUP_ROWS + (own // 32) * 16 + lane // 4
            for r in cutlass.range_constexpr(2):
                row = first + 8 * r
                if row < rows:
                    at = Int64(row) * heads + head
                    if const_expr(log_sums is None):
                        place = at * HEAD + column_part * self.columns
                        store_row(projected[r, None], self.columns, o, place, lane, self.dtype)
                    else:
                        self.merge(projected[r, None], log_sums, o_new, o, at, lane)

    @cute.jit
    def merge(
        self,
        row: cute.Tensor,
        log_sums: tuple,
        o_new: cute.Pointer,
        o: cute.Pointer,
        at: Int64,
        lane: Int32,
    ):
        """Add the other part to a thread's columns of a row, both weighted, and store the result.

        Args:
            row: the up-projected columns.
            log_sums: of the latent part, of the new part, and where the joint one goes.
            o_new, o: the other part and the output.
            at: which row, of all heads.
            lane: this thread's place in its warp.
        """
        lse_latent, lse_new, lse = log_sums
        latent, new = lse_latent[at] * LOG2_E, lse_new[at] * LOG2_E
        top = cute.arch.fmax(latent, new)
        if top == -Float32.inf:
            top = Float32(0.0)  # no difference of infinities
        latent_weight = cute.math.exp2(latent - top, fastmath=True)
        new_weight = cute.math.exp2(new - top, fastmath=True)
        total = latent_weight + new_weight
        inverse = Float32(0.0)
        if total > 0.0:
            inverse = cute.arch.rcp_approx(total)
        other = cute.make_rmem_tensor((2, HEAD // 8), self.dtype)
        cute.autovec_copy(columns_at(o_new, at * HEAD, HEAD, lane, self.dtype), other)
        mine = own_columns(row, HEAD)
        shares = other.load().to(Float32) * (new_weight * inverse)
        mine.store(mine.load() * (latent_weight * inverse) + shares)
        store_row(row, HEAD, o, at * HEAD, lane, self.dtype)
        if lane % 4 == 0:
            log_sum = -Float32.inf
            if total > 0.0:
                log_sum = (top + cute.math.log2(total, fastmath=True)) * LN_2
            lse[at] = log_sum

    def tiles(self, rows):
        """Tiles that the rows make."""
        return (rows + COMBINE_ROWS - 1) // COMBINE_ROWS


def combine_stage(
    plan: MlaPlan,
    tiling: DecompressCombineTiling,
    dtype: type,
    latent: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor] | None,
    w_uv: Tensor,
    sm_count: int,
) -> CuteKernel:
    """The stage that up-projects the latent part and merges the other one, if there is one.

    Args:
        plan: the plan that it belongs to.
        tiling: its tiling.
        dtype: element type, as the language names it.
        latent: o_latent [b, s, h, 512] and its log-sum-exp, both contiguous.
        new: o_new [b, s, h, 128] and its log-sum-exp, likewise; None to up-project only.
        w_uv: [h, 512, 128], contiguous.
        sm_count: SMs of the device.

    Returns:
        The stage; its outputs are o and lse, which is that of `latent` when there is no other.
    """
    o_latent, lse_latent = latent
    b, s, h, k = o_latent.shape
    shape = [("h", h), ("k", k), ("d", plan.d)]
    check_tensor("w_uv", w_uv, shape, o_latent.dtype, o_latent.device)
    weights = require_view("w_uv", w_uv, h * k * plan.d)
    o = o_latent.new_empty((b, s, h, plan.d))
    lse = lse_latent if new is None else torch.empty_like(lse_latent)
    parts = (None, None, None, o, None) if new is None else (lse_latent, *new, o, lse)
    default = default_splits(b * s, h, sm_count)

    def args_fn(tiling: DecompressCombineTiling) -> tuple[object, ...]:
        return (o_latent, weights, *parts, b * s, h, tiling.splits or default)

    cost_of: Callable[..., Any] = (
        output_up_projection_cost if new is None else decompress_combine_cost
    )

    def cost_fn(tiling: DecompressCombineTiling) -> tuple[float, float]:
        cost = cost_of(plan.problem())
        return cost.flops, cost.bytes

    wanted = {default, default + 1, 2 * default}
    configs = [0, *sorted(n for n in wanted if n <= row_tiles(b * s) and n != default)]
    return CuteKernel(
        kernel_fn=DecompressCombineSm90.decompress_combine,
        host_fn=lambda tiling: DecompressCombineSm90(dtype),
        args_fn=args_fn,
        requires_arch="sm_90a",
        tiling=tiling,
        plan=plan,
        input_tensors=[*latent, *(new or ()), w_uv],
        output_tensors=[o, lse],
        algorithmic_flops_bytes_fn=cost_fn,
        autotune_configs=[DecompressCombineTiling(n) for n in configs],
    )
