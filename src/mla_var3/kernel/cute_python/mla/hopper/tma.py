"""Tensors that TMA copies tile by tile between global and shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

EVICT_FIRST = 0x12F0_0000_0000_0000
"""Cache policy of a copy whose data is replaced first in L2, as the hardware encodes it.

KV blocks stream through L2 and would push out what the next launch begins with: its code, lengths,
block table and queries. On an H200, 12 layers in a graph, batches of 16 took 4 to 9 % less, 64 with
16 heads 4 % less (docs/results/2026-11-16-nvidia-h200-engine-shapes.md)."""


@dataclass(frozen=True)
class TmaTensor:
    """A tensor in global memory and the copy that moves its tiles."""

    copy: Any
    tensor: Any


@dataclass(frozen=True)
class Transfer:
    """A copy and its tiles in global and in shared memory, a tile as the first mode of each."""

    copy: Any
    tiles: Any
    shared: Any


def transfer(given: TmaTensor, shared: cute.Tensor, tile: tuple[int, ...]) -> Transfer:
    """What TMA moves between shared memory and a tensor.

    Args:
        given: the tensor.
        shared: tiles in shared memory, the modes of a tile first.
        tile: sizes of a tile.
    """
    tiles = cute.local_tile(given.tensor, tile, (None,) * cute.rank(given.tensor))
    together = (cute.group_modes(each, 0, len(tile)) for each in (shared, tiles))
    in_shared, in_global = cpasync.tma_partition(given.copy, 0, cute.make_layout(1), *together)
    return Transfer(given.copy, in_global, in_shared)
