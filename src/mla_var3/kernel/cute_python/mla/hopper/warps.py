"""Synchronisation that the kernels for Hopper share: pipeline stages, warpgroup barriers, order.

A CTA has two consumer warpgroups, which compute, and one producer warp, which loads.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from mla_var3.kernel.cute_python.mla.hopper.constants import WARPGROUP


@cute.jit
def release(empty: cute.Pointer, lane: Int32):
    """Arrive at an `empty` barrier: this warp has read what it needs of a buffer."""
    if lane == 0:
        cute.arch.mbarrier_arrive(empty)


def lane_behind(lane: Int32, *numbers: Any) -> Int32:
    """This lane, as a number that follows from others, none of which is negative.

    A warp that loads from a buffer and uses what it loaded later releases it by this lane: the
    arrival then comes when the numbers have been read. By themselves the two keep no order.
    """
    for number in numbers:
        lane = lane | Int32(number < 0)
    return lane


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of a pipeline, and the phase of its barriers."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def sync_warpgroup(barrier: Int32):
    """Wait for the other threads of the warpgroup at a named barrier of theirs."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


@cute.jit
def fence_and_sync_warpgroup(barrier: Int32):
    """Make what the warpgroup's threads wrote to shared memory visible to its wgmma and TMA."""
    cute.arch.fence_view_async_shared()
    sync_warpgroup(barrier)


@cute.jit
def keep_order(total: Float32):
    """Keep what follows in the program, such as a wait for a wgmma, behind the value of `total`.

    The assembler moves a wait in front of arithmetic that does not depend on it, and the wgmma then
    runs alone. It keeps the order of a wait and a store; this store is never executed. A branch
    instead would make it wait after every wgmma.

    Args:
        total: the value that has to be computed first; not negative.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 a; setp.lt.f32 p, {$r0}, 0f00000000; mov.b32 a, {$r0};"
        " @p st.volatile.shared.f32 [a], {$r0}; }",
        read_only_args=[total],
    )
