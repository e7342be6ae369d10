"""merge_partials: join the pieces that an absorbed kernel left of the items it had to cut.

    o_partial [slots, 64, 512] float32, normalised within the piece
    lse_partial [slots, 64] float32, in powers of two; -inf for a row without a visible token
    merges [slots, 4] int32: what the slot holds (`Piece`), first output row, rows
    -> rows of o_latent [rows, 512] and lse [rows] (natural logarithm) of the items that were cut

Every block of the attention kernel owns two slots: an even one for the first item of its part, an
odd one for the last. The pieces of an item are in order: its first in either slot of some block,
the others in the even slots of the same member in the parts that follow. Without pieces the kernel
ends after one look at `merges`. It is launched before the attention kernel has ended and waits for
it on the device (programmatic dependent launch).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator
from torch import Tensor

from mla_var3.kernel.cute_python.mla.latent_ops import LATENT, LN_2
from mla_var3.kernel.cute_python.mla.schedule import ROWS, GangShape, Piece
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import Constraints, Tiling

THREADS = 512
"""Also the most slots: a thread looks at one each."""
WARPS = THREADS // 32
CHUNKS = LATENT // 128


@dataclass
class MergeTiling(Tiling):
    """Blocks of 16 warps for every SM; they share all units of work evenly."""

    blocks_per_sm: int = 2

    def validate(self, pd: MlaPlan) -> Constraints:
        most = 4
        return Constraints(
            (
                1 <= self.blocks_per_sm <= most,
                f"blocks_per_sm: expected 1 to {most}, which fit an SM, got {self.blocks_per_sm}",
            )
        )


@cute.jit
def final_lse(log_sum: Float32, empty_positive: cutlass.Constexpr):
    """The log-sum-exp of a row as it is returned, from one in powers of two.

    A row without a visible token has -inf, or +inf where `empty_positive` asks for it, as FlashMLA
    returns it. Pieces have -inf in any case.
    """
    result = log_sum * LN_2
    if const_expr(empty_positive):
        if log_sum == -Float32.inf:
            result = Float32.inf
    return result


class MergePartials:
    """Host and device code for one element type; see `final_lse` for `empty_positive`."""

    def __init__(self, dtype, empty_positive=False):
        self.dtype = dtype
        self.empty_positive = empty_positive

    @cute.jit
    def __call__(
        self,
        o_partial: cute.Pointer,
        lse_partial: cute.Pointer,
        merges: cute.Pointer,
        o_latent: cute.Pointer,
        lse: cute.Pointer,
        total_rows: Int32,
        gang: Int32,
        parts: Int32,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        slots = gang * parts * 2
        flat = cute.make_layout

        @cute.struct
        class Shared:
            counts: cute.struct.MemRange[Int32, THREADS // 32]
            owners: cute.struct.MemRange[Int32, THREADS]
            flags: cute.struct.MemRange[Int32, THREADS]
            shares: cute.struct.MemRange[Float32, THREADS * 4]

        self.Shared = Shared
        self.merge_partials(
            cute.make_tensor(o_partial, flat((slots * ROWS, LATENT), stride=(LATENT, 1))),
            cute.make_tensor(lse_partial, flat(slots * ROWS)),
            cute.make_tensor(merges, flat((slots, 4), stride=(4, 1))),
            cute.make_tensor(o_latent, flat((total_rows, LATENT), stride=(LATENT, 1))),
            cute.make_tensor(lse, flat(total_rows)),
            gang,
            slots,
        ).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def merge_partials(
        self,
        o_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        merges: cute.Tensor,
        o_latent: cute.Tensor,
        lse: cute.Tensor,
        gang: Int32,
        slots: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        store = SmemAllocator().allocate(self.Shared)
        counts = store.counts.get_tensor(cute.make_layout(THREADS // 32))
        owners = store.owners.get_tensor(cute.make_layout(THREADS))
        flags = store.flags.get_tensor(cute.make_layout(THREADS))
        shares = store.shares.get_tensor(cute.make_layout((WARPS, 4, 32), stride=(128, 32, 1)))

        cute.arch.griddepcontrol_wait()
        # The list of split tiles, in the same order in every block.
        flag = Int32(0)
        if thread < slots:
            flag = merges[thread, 0]
        flags[thread] = flag
        mine = cute.arch.vote_ballot_sync((flag & Piece.FIRST) != 0)
        if lane == 0:
            counts[warp] = cute.arch.popc(mine)
        cute.arch.sync_threads()
        before = Int32(0)
        total = Int32(0)
        for i in cutlass.range_constexpr(THREADS // 32):
            count = counts[i]
            if i < warp:
                before += count
            total += count
        if (flag & Piece.FIRST) != 0:
            owners[before + cute.arch.popc(mine & ((Int32(1) << lane) - 1))] = thread
        cute.arch.sync_threads()

        # A unit is 128 columns of a row. With few units, several warps share one, each with some
        # of its pieces: a single warp would wait for memory once per handful of pieces.
        units = total * ROWS * CHUNKS
        team = Int32(1)
        for _ in cutlass.range_constexpr(4):
            if units * team * 2 <= blocks * WARPS:
                team = team * 2
        teams = WARPS // team
        rank = warp % team
        rounds = (units + blocks * teams - 1) // (blocks * teams)
        for turn in cutlass.range(rounds, unroll=1):
            unit = (turn * blocks + block) * teams + warp // team
            first = Int32(0)
            row = Int32(0)
            live = False
            if unit < units:
                first = owners[unit // (ROWS * CHUNKS)]
                row = unit // CHUNKS % ROWS
                live = row < merges[first, 2]
            top = Float32(0.0)
            weight_sum = Float32(0.0)
            acc = cute.make_rmem_tensor(4, Float32)
            acc.fill(0.0)
            column = unit % CHUNKS * 128 + lane * 4
            if live:
                top, weight_sum = self.add_pieces(
                    o_partial, lse_partial, flags, acc, first, row, column, gang, slots, lane,
                    rank, team,
                )  # fmt: skip
            if team > 1:
                for e in cutlass.range_constexpr(4):
                    shares[warp, e, lane] = acc[e]
                cute.arch.sync_threads()
                if live and rank == 0:
                    for other in cutlass.range(1, team, unroll=1):
                        for e in cutlass.range_constexpr(4):
                            acc[e] = acc[e] + shares[warp + other, e, lane]
                cute.arch.sync_threads()
            if live and rank == 0:
                self.store(o_latent, lse, acc, top, weight_sum, merges[first, 1] + row, column)

    @cute.jit
    def add_pieces(
        self,
        o_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        flags: cute.Tensor,
        acc: cute.Tensor,
        first: Int32,
        row: Int32,
        column: Int32,
        gang: Int32,
        slots: Int32,
        lane: Int32,
        rank: Int32,
        team: Int32,
    ):
        """Add every `team`-th piece of a row, weighted; returns the maximum and all weights' sum.

        The pieces after the first lie in slot 0 of the parts that follow.
        """
        step = gang * 2
        second = first // 2 * 2 + step
        # Pieces lie a part apart up to the one marked as last; every lane looks at another part.
        pieces = Int32(1)
        looking = cutlass.Boolean(True)
        base = Int32(0)
        while looking:
            slot = second + (base + lane) * step
            is_last = False
            if slot < slots:
                is_last = (flags[slot] & Piece.LAST) != 0
            found = cute.arch.vote_ballot_sync(is_last)
            if found != 0:
                looking = cutlass.Boolean(False)
                pieces = base + 1 + cute.arch.popc((found & -found) - 1) + 1
            else:
                base += 32
                looking = second + base * step < slots

        top = -Float32.inf
        for i in cutlass.range(lane, pieces, 32, unroll=1):
            top = cute.arch.fmax(top, self.piece_lse(lse_partial, first, second, step, i, row))
        top = cute.arch.warp_reduction_max(top)
        if top == -Float32.inf:
            top = Float32(0.0)
        weight_sum = Float32(0.0)
        for i in cutlass.range(lane, pieces, 32, unroll=1):
            own = self.piece_lse(lse_partial, first, second, step, i, row)
            weight_sum += cute.math.exp2(own - top, fastmath=True)
        weight_sum = cute.arch.warp_reduction_sum(weight_sum)
        for i in cutlass.range(rank, pieces, team, unroll=8):
            slot = second + (i - 1) * step
            if i == 0:
                slot = first
            weight = cute.math.exp2(lse_partial[slot * ROWS + row] - top, fastmath=True)
            part = cute.make_rmem_tensor(4, Float32)
            source = cute.local_tile(o_partial[slot * ROWS + row, None], (4,), (column // 4,))
            cute.autovec_copy(source, part)
            acc.store(acc.load() + part.load() * weight)
        return top, weight_sum

    @cute.jit
    def store(
        self,
        o_latent: cute.Tensor,
        lse: cute.Tensor,
        acc: cute.Tensor,
        top: Float32,
        weight_sum: Float32,
        row: Int32,
        column: Int32,
    ):
        """Write 4 columns of the merged row, and with the first ones its log-sum-exp."""
        inverse = Float32(0.0)
        log_sum = -Float32.inf
        if weight_sum > 0.0:
            inverse = Float32(1.0) / weight_sum
            log_sum = top + cute.math.log2(weight_sum, fastmath=True)
        narrow = cute.make_rmem_tensor(4, self.dtype)
        narrow.store((acc.load() * inverse).to(self.dtype))
        cute.autovec_copy(narrow, cute.local_tile(o_latent[row, None], (4,), (column // 4,)))
        if column == 0:
            lse[row] = final_lse(log_sum, self.empty_positive)

    @cute.jit
    def piece_lse(
        self,
        lse_partial: cute.Tensor,
        first: Int32,
        second: Int32,
        step: Int32,
        i: Int32,
        row: Int32,
    ) -> Float32:
        slot = second + (i - 1) * step
        if i == 0:
            slot = first
        return lse_partial[slot * ROWS + row]


def merge_stage(
    plan: MlaPlan,
    tiling: MergeTiling,
    dtype: type,
    partials: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    attention: CuteKernel,
    shape_fn: Callable[[Any], GangShape],
    sm_count: int,
    pieces: int,
) -> CuteKernel:
    """The stage that joins the pieces of an absorbed kernel.

    Args:
        plan: the plan that it belongs to.
        tiling: its tiling.
        dtype: element type of the output, as the language names it.
        partials: o_partial, lse_partial and merges.
        outputs: o_latent and lse.
        attention: the kernel that leaves the pieces.
        shape_fn: its gangs with a tiling.
        sm_count: SMs to use.
        pieces: pieces to expect, for the cost.
    """
    o_latent, lse = outputs

    def args_fn(tiling: MergeTiling) -> tuple[object, ...]:
        shape = shape_fn(attention.tiling)
        blocks = sm_count * tiling.blocks_per_sm
        return (*partials, o_latent, lse, lse.numel(), shape.gang, shape.parts, blocks)

    def cost_fn(tiling: MergeTiling) -> tuple[float, float]:
        rows = pieces * ROWS
        return 2.0 * rows * LATENT, float(
            rows * (LATENT * 4 + 4 + LATENT * o_latent.element_size())
        )

    return CuteKernel(
        kernel_fn=MergePartials.merge_partials,
        host_fn=lambda tiling: MergePartials(dtype),
        args_fn=args_fn,
        requires_arch="sm_90a",
        follows=attention,
        tiling=tiling,
        plan=plan,
        input_tensors=list(partials),
        output_tensors=[o_latent, lse],
        algorithmic_flops_bytes_fn=cost_fn,
        autotune_configs=[MergeTiling(blocks) for blocks in (1, 2, 4)],
    )
