"""Merges the two halves of a work tile within a cluster of two CTAs, through their shared memory.

The other way, `merge.py`, writes partials to memory and waits for all CTAs of the launch. Where two
CTA groups share every item (`ranges.halves_pay`), the CTAs of equal rank in them are a cluster:

    CTA 0: first half of the KV blocks        CTA 1: second half
    warpgroup 0 keeps the left columns        warpgroup 0 sends them to CTA 0
    warpgroup 1 sends the right columns       warpgroup 1 keeps them

A warpgroup sends its accumulators, with the sum and the maximum of every row. They arrive where KV
blocks were. The thread that receives them has the same rows and columns of its own.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS, VECTOR_BITS, WARPGROUP
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentSizes,
    Partials,
    groups_of,
)
from mla_var3.kernel.cute_python.mla.latent.ranges import CLUSTER
from mla_var3.kernel.cute_python.mla.latent.schedule import ScheduleSm90


class ClusterHost(ABC):
    """Host code of a latent kernel in which two CTA groups may share every item, or not.

    Attributes:
        clusters: whether they may. None makes a program of both kernels, of which each launch takes
            the one for its `cluster_ctas`: a call of any batch then finds its program compiled, and
            large batches the loops that were timed without clusters.
        tile_rows: query rows of a tile.
    """

    clusters: Any
    tile_rows = ROWS

    @abstractmethod
    def launch(self, *arguments: Any) -> None:
        """Launch the kernel that `clusters` says; the arguments of `__call__`."""

    def _kernel(self, clusters: bool) -> Self:
        chosen = copy.copy(self)
        chosen.clusters = clusters
        return chosen

    @cute.jit
    def __call__(self, *arguments: Any):
        """The arguments of `LATENT_FIELDS` and the stream."""
        operands, _, sizes, (stream,) = groups_of(arguments, LatentOperands, Partials, LatentSizes)
        if const_expr(self.clusters is not None):
            if const_expr(operands.schedule is not None):
                if sizes.scheduled == 0:
                    ScheduleSm90(self.clusters, self.tile_rows)(operands, sizes, stream)
            self.launch(*arguments)
        else:
            if sizes.cluster_ctas == CLUSTER:
                self._kernel(True)(*arguments)
            else:
                self._kernel(False)(*arguments)


@dataclass(frozen=True)
class Mailbox:
    """Shared memory where a CTA receives what the other one sends.

    Attributes:
        values: [number of a vector, thread of the warpgroup, vector], in the type that is sent.
        rows: [row, (sum, maximum)].
    """

    values: Any
    rows: Any


def mailbox_of(
    values: cute.Pointer, rows: cute.Pointer, accumulators: int, dtype: Any = Float32
) -> Mailbox:
    """A mailbox over tiles that no warp reads any more.

    Args:
        values: where the accumulators of a warpgroup find room.
        rows: where two numbers per row do.
        accumulators: of a thread.
        dtype: type in which they are sent.
    """
    vector = VECTOR_BITS // dtype.width
    shape = (vector, WARPGROUP, accumulators // vector)
    return Mailbox(
        cute.make_tensor(
            cute.recast_ptr(values, dtype=dtype), cute.make_ordered_layout(shape, order=(0, 1, 2))
        ),
        cute.make_tensor(
            cute.recast_ptr(rows, dtype=Float32), cute.make_layout((ROWS, 2), stride=(2, 1))
        ),
    )


@cute.jit
def meet():
    """Wait for all threads of the cluster; behind it one may read what they wrote before."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def send_values(accumulator: cute.Tensor, mailbox: cutlass.Constexpr, rank: Int32, t: Int32):
    """Write this thread's accumulators into the mailbox of another CTA of the cluster.

    Args:
        accumulator: the accumulators, in any layout.
        mailbox: that of this CTA.
        rank: the other CTA.
        t: this thread of its warpgroup.
    """
    flat = cute.make_tensor(accumulator.iterator, cute.make_layout(cute.size(accumulator)))
    vector, dtype = cute.size(mailbox.values, mode=[0]), mailbox.values.element_type
    for i in cutlass.range_constexpr(cute.size(mailbox.values, mode=[2])):
        place = (mailbox.values[None, t, i].iterator).toint().to(Int32)
        sent = cute.make_rmem_tensor(vector, dtype)
        for n in cutlass.range_constexpr(vector):
            sent[n] = flat[vector * i + n].to(dtype)
        words = cute.recast_tensor(sent, Int32)
        cute.arch.inline_ptx(
            "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1};"
            " st.shared::cluster.v4.b32 [a], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
            read_only_args=[place, rank, *(words[n] for n in range(VECTOR_BITS // 32))],
        )


@cute.jit
def send_row(total: Float32, top: Float32, row: Int32, mailbox: cutlass.Constexpr, rank: Int32):
    """Write the sum and the maximum of a row into the mailbox of another CTA of the cluster."""
    place = (mailbox.rows[row, None].iterator).toint().to(Int32)
    cute.arch.inline_ptx(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, {$r1};"
        " st.shared::cluster.v2.f32 [a], {{$r2}, {$r3}}; }",
        read_only_args=[place, rank, total, top],
    )


@cute.jit
def weights(total: Float32, top: Float32, other_total: Float32, other_top: Float32):
    """Of a row's own and the other half: the sum of both, their maximum, and a factor for each."""
    both = cute.arch.fmax(top, other_top)
    own = cute.math.exp2(top - both, fastmath=True)
    other = cute.math.exp2(other_top - both, fastmath=True)
    return total * own + other_total * other, both, own, other
