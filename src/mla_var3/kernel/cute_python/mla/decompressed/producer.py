"""Producer warp of the decompressed kernel, and the pipeline between it and the consumers.

A stage of the pipeline holds keys, values and rope keys of one KV block, of one head or of two. In
8 bits the scales come with the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from mla_var3.kernel.cute_python.mla.decompressed.scheduler import work_tile_at
from mla_var3.kernel.cute_python.mla.hopper.constants import CONSUMER_WARPS, KV_BLOCK
from mla_var3.kernel.cute_python.mla.hopper.tma import TmaTensor, Transfer, transfer
from mla_var3.kernel.cute_python.mla.hopper.warps import next_stage


class Barrier(IntEnum):
    """Named barriers; 0 is the one of the whole CTA."""

    WARPGROUP_0 = 1
    WARPGROUP_1 = 2


def warpgroup_barrier(group: Int32) -> Int32:
    """The named barrier of a warpgroup."""
    return int(Barrier.WARPGROUP_0) + group


class StageBarrier(IntEnum):
    """Mbarriers of a stage: FULL when data has arrived, EMPTY when all readers have released it.

    KEYS stands for keys, rope keys and scales.
    """

    KEYS_FULL = 0
    VALUES_FULL = 1
    KEYS_EMPTY = 2
    VALUES_EMPTY = 3


def _mbarrier(barrier: StageBarrier) -> Callable[[Any, Any], Any]:
    """A method for the pointer to an mbarrier of a stage."""
    return lambda self, stage: self.barriers + (stage * len(StageBarrier) + int(barrier))


@dataclass(frozen=True)
class Pipeline:
    """The stages in shared memory, and their mbarriers by `StageBarrier` in small letters.

    Attributes:
        key_bytes, value_bytes: bytes of a stage that its FULL barriers wait for.
    """

    barriers: Any
    stages: int
    heads: int
    key_bytes: int
    value_bytes: int

    keys_full = _mbarrier(StageBarrier.KEYS_FULL)
    values_full = _mbarrier(StageBarrier.VALUES_FULL)
    keys_empty = _mbarrier(StageBarrier.KEYS_EMPTY)
    values_empty = _mbarrier(StageBarrier.VALUES_EMPTY)

    def after(self, stage: Any, phase: Any) -> Any:
        """The next stage, and the phase of its barriers."""
        return next_stage(stage, phase, self.stages)


@cute.jit
def init_barriers(pipeline: cutlass.Constexpr):
    """Set up the mbarriers; one thread calls it."""
    for stage in cutlass.range_constexpr(pipeline.stages):
        cute.arch.mbarrier_init(pipeline.keys_full(stage), 1)
        cute.arch.mbarrier_init(pipeline.values_full(stage), 1)
        cute.arch.mbarrier_init(pipeline.keys_empty(stage), CONSUMER_WARPS)
        cute.arch.mbarrier_init(pipeline.values_empty(stage), CONSUMER_WARPS)
    cute.arch.mbarrier_init_fence()


class Sources(NamedTuple):
    """What the producer reads; `rope` is None where p is 0, `scales` in 16 bits."""

    keys: TmaTensor
    values: TmaTensor
    rope: TmaTensor | None
    scales: TmaTensor | None


@dataclass(frozen=True)
class SharedKv:
    """Keys, values, rope keys and, in 8 bits, scales of all stages in shared memory."""

    keys: Any
    values: Any
    rope: Any
    scales: Any


@cute.jit
def produce(
    sources: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    pipeline: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
    cta: Int32,
    ctas: Int32,
    widths: cutlass.Constexpr,
    one_tile_ahead: cutlass.Constexpr,
):
    """Fill the pipeline as its stages become empty; one warp calls it.

    Args:
        one_tile_ahead: whether the consumers compute the first scores of the next work tile early,
            behind the last one as well.
    """
    fp8 = sources.scales is not None
    kv_block = scheduler.kv_block
    keys = transfer(sources.keys, shared.keys, (kv_block, widths.d))
    if const_expr(fp8):
        flat = cute.make_layout((KV_BLOCK * widths.v, pipeline.heads * pipeline.stages))
        flat_values = cute.make_tensor(shared.values.iterator, flat)
        values = Transfer(sources.values.copy, sources.values.tensor, flat_values)
    else:
        values = transfer(sources.values, shared.values, (kv_block, widths.v))
    rope = None
    if const_expr(widths.p > 0):
        rope = transfer(sources.rope, shared.rope, (kv_block, widths.p))
    scales = None
    if const_expr(fp8):
        scales = transfer(sources.scales, shared.scales, (2 * KV_BLOCK,))
    stage = Int32(0)
    phase = Int32(0)
    for index in cutlass.range(cta, scheduler.work_tiles, ctas, unroll=1):
        tile = work_tile_at(index, scheduler)
        for block in cutlass.range(tile.first, tile.last, unroll=1):
            load_keys(
                keys, rope, scales, pipeline, scheduler, block, tile.head, tile.request, stage,
                phase,
            )  # fmt: skip
            cute.arch.mbarrier_wait(pipeline.values_empty(stage), phase ^ 1)
            full = pipeline.values_full(stage)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, pipeline.value_bytes)
            for i in cutlass.range_constexpr(pipeline.heads):
                head = cutlass.min(tile.head + i, scheduler.heads - 1)
                target = values.shared[(None, stage * pipeline.heads + i)]
                if const_expr(fp8):
                    # A bulk copy without a tensor map has no bounds check.
                    held = cutlass.min(block, scheduler.slots // KV_BLOCK - 1)
                    source = values.tiles[(None, held, head, tile.request)]
                    with cute.arch.elect_one():
                        cute.copy(values.copy, source, target, mbar_ptr=full)
                else:
                    source = values.tiles[(None, block, 0, head, tile.request)]
                    cute.copy(values.copy, source, target, tma_bar_ptr=full)
            stage, phase = pipeline.after(stage, phase)
    if const_expr(one_tile_ahead):
        # Behind the last work tile TMA fills a block that does not exist with zeros, without
        # touching memory.
        if cta < scheduler.work_tiles:
            nowhere = (scheduler.slots + kv_block - 1) // kv_block
            load_keys(
                keys, rope, scales, pipeline, scheduler, nowhere, Int32(0), Int32(0), stage, phase
            )


@cute.jit
def load_keys(
    keys: cutlass.Constexpr,
    rope: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    pipeline: cutlass.Constexpr,
    scheduler: cutlass.Constexpr,
    block: Int32,
    first_head: Int32,
    request: Int32,
    stage: Int32,
    phase: Int32,
):
    """Load keys, rope keys and, in 8 bits, scales of a KV block into a stage, once it is empty."""
    cute.arch.mbarrier_wait(pipeline.keys_empty(stage), phase ^ 1)
    full = pipeline.keys_full(stage)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, pipeline.key_bytes)
    for i in cutlass.range_constexpr(pipeline.heads):
        # With an odd number of heads the last one is read twice.
        head = cutlass.min(first_head + i, scheduler.heads - 1)
        slot = stage * pipeline.heads + i
        cute.copy(
            keys.copy, keys.tiles[(None, block, 0, head, request)], keys.shared[(None, slot)],
            tma_bar_ptr=full,
        )  # fmt: skip
        if const_expr(scales is not None):
            cute.copy(
                scales.copy, scales.tiles[(None, block, head, request)],
                scales.shared[(None, slot)], tma_bar_ptr=full,
            )  # fmt: skip
    if const_expr(rope is not None):
        cute.copy(
            rope.copy, rope.tiles[(None, block, 0, request)], rope.shared[(None, stage)],
            tma_bar_ptr=full,
        )  # fmt: skip
