"""How the kernels for Hopper divide a block's warps, and the rings that pass data between them.

Two warpgroups compute. Registers go to warpgroups, so the warp that loads has one of its own, the
rest of which idles.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

CONSUMERS = 256
"""Threads of the two computing warpgroups."""
THREADS = CONSUMERS + 128
LOADER = CONSUMERS // 32
"""The warp that loads; also how many warps compute."""
GROUP_WARPS = 4
"""Warps of a warpgroup."""
LOADER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@cute.jit
def free(signal: cute.Pointer, lane: Int32):
    """Tell the loading warp that this warp has read what it needs."""
    if lane == 0:
        cute.arch.mbarrier_arrive(signal)


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr):
    """The next stage of a ring, and the phase of its barriers."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def settle(barrier: Int32):
    """What a warpgroup's threads wrote to shared memory is there for its products.

    All its 128 threads call it; `barrier` is a named barrier of theirs.
    """
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=128)


@cute.jit
def keep_order(total: Float32):
    """What comes later in the program, such as waiting for a product, waits for `total`.

    The compiler for the GPU moves a wait in front of arithmetic that does not need it, and the
    product then runs alone. It keeps the order of a wait and a store, which never happens here; a
    branch instead would make it wait after every product.

    Args:
        total: what has to be there; not negative.
    """
    cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .b32 a; setp.lt.f32 p, {$r0}, 0f00000000; mov.b32 a, {$r0};"
        " @p st.volatile.shared.f32 [a], {$r0}; }",
        read_only_args=[total],
    )
