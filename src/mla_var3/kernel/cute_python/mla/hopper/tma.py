"""Tensors that TMA copies tile by tile between global and shared memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

EVICT_NORMAL, EVICT_FIRST = 0x1000_0000_0000_0000, 0x12F0_0000_0000_0000
"""Cache policies of a copy, as the hardware encodes them: which data L2 replaces first."""


class TmaTensor(NamedTuple):
    """A tensor in global memory and the copy that moves its tiles."""

    copy: Any
    tensor: Any

    @classmethod
    def of(cls, tensor: cute.Tensor, layout: Any, tile: Any, copy: Any = None) -> "TmaTensor":
        """A tensor, copied to shared memory unless `copy` says otherwise."""
        operation = copy or cpasync.CopyBulkTensorTileG2SOp()
        return cls(*cpasync.make_tiled_tma_atom(operation, tensor, layout, tile))


def prefetch_descriptors(*tensors: TmaTensor | None) -> None:
    """Fetch the descriptors of those tensors that there are; one warp calls it."""
    for each in tensors:
        if each is not None:
            cpasync.prefetch_descriptor(each.copy)


@dataclass(frozen=True)
class Transfer:
    """A copy and its tiles in global and in shared memory, a tile as the first mode of each."""

    copy: Any
    tiles: Any
    shared: Any


def transfer(given: TmaTensor, shared: cute.Tensor, tile: tuple[int, ...]) -> Transfer:
    """What TMA moves between shared memory and a tensor.

    Args:
        shared: tiles in shared memory, the modes of a tile first.
    """
    tiles = cute.local_tile(given.tensor, tile, (None,) * cute.rank(given.tensor))
    together = (cute.group_modes(each, 0, len(tile)) for each in (shared, tiles))
    in_shared, in_global = cpasync.tma_partition(given.copy, 0, cute.make_layout(1), *together)
    return Transfer(given.copy, in_global, in_shared)
