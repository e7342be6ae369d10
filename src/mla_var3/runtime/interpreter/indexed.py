"""Element-wise access to memory: gather, scatter, advanced indexing, raw memory and atomics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter.arithmetic import combine_elements
from mla_var3.runtime.interpreter.cutile_api import (
    ATOMIC_SPECS,
    CAS_DTYPES,
    DType,
    PaddingMode,
    TileAtomicCAS,
    TileAtomicRMW,
    TileTypeError,
    check_load_store_hints,
    ct,
    is_boolean,
    is_integral,
    validate_memory_order_and_scope,
)
from mla_var3.runtime.interpreter.dtypes import padding, poison
from mla_var3.runtime.interpreter.operands import (
    as_array,
    as_tile,
    broadcast,
    implicit,
    index_value,
    items_of,
    static_int,
    static_ints,
    tile_shape,
)
from mla_var3.runtime.interpreter.registry import implement, implements
from mla_var3.runtime.interpreter.values import Array, ForeignPointer, RawMemory, Tile, describe

_ACQ_REL = ct.MemoryOrder.ACQ_REL
_DEVICE = ct.MemoryScope.DEVICE

Combine = Callable[[torch.Tensor, torch.Tensor, DType], torch.Tensor]

READ_MODIFY_WRITE: dict[str, Combine] = {
    "xchg": lambda old, update, element: update,
    "add": functools.partial(combine_elements, "add"),
    "min": functools.partial(combine_elements, "min"),
    "max": functools.partial(combine_elements, "max"),
    "and": functools.partial(combine_elements, "and_"),
    "or": functools.partial(combine_elements, "or_"),
    "xor": functools.partial(combine_elements, "xor"),
}
"""What the atomic operations write: (old elements, update, dtype) -> new elements."""


class Elements(NamedTuple):
    """Elements of an array picked by index.

    Attributes:
        memory: The array's memory as one axis.
        offsets: Position of each element in `memory`; 0 for those that are not accessed.
        valid: Which elements are accessed; None for all of them.
    """

    memory: torch.Tensor
    offsets: torch.Tensor
    valid: torch.Tensor | None

    def read(self, otherwise: torch.Tensor) -> torch.Tensor:
        """The elements, and `otherwise` where none is accessed."""
        if self.valid is None:
            return self.memory[self.offsets]
        if not self.memory.numel():
            return otherwise.expand(self.offsets.shape)
        return torch.where(self.valid, self.memory[self.offsets], otherwise)

    def write(self, value: torch.Tensor) -> None:
        """Writes `value`, which has one element per offset."""
        if self.valid is None:
            self.memory[self.offsets] = value
        else:
            self.memory[self.offsets[self.valid]] = value[self.valid]

    def update(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Reads, changes and writes elements one access after the other.

        Args:
            change: (elements read, positions in the tile, flat) -> elements to write.
        """
        valid = self.valid
        positions = torch.arange(self.offsets.numel())
        if valid is not None:
            positions = positions[valid.reshape(-1)]
        offsets = self.offsets.reshape(-1)[positions]
        # Accesses to different elements do not see each other, so they can be done at once.
        distinct = torch.unique(offsets).numel() == offsets.numel()
        batches = [slice(None)] if distinct else [slice(i, i + 1) for i in range(len(offsets))]
        for batch in batches:
            chosen = offsets[batch]
            self.memory[chosen] = change(self.memory[chosen], positions[batch])


def _integer_index(value: Any, axis: int) -> torch.Tensor:
    tile = as_tile(value)
    if not is_integral(tile.element):
        raise TileTypeError(f"index {axis} must be of an integer dtype, got {describe(value)}")
    return tile.tensor.to(torch.int64)


def _mask_of(mask: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    if mask is None:
        return None
    tile = as_tile(mask)
    if not is_boolean(tile.element):
        raise TileTypeError(f"the mask must be of dtype bool, got {describe(mask)}")
    return broadcast(tile.tensor, shape, "mask")


def _locate(
    array: Array, indices: tuple[torch.Tensor, ...], mask: Any, check_bounds: bool
) -> Elements:
    """Finds array elements by one index tensor per axis; negative means out of bounds."""
    tensor = array.tensor
    indices = torch.broadcast_tensors(*indices)
    shape = tuple(indices[0].shape) if indices else ()
    offsets = torch.zeros(shape, dtype=torch.int64)
    inside = torch.ones(shape, dtype=torch.bool)
    span = 1
    for index, extent, stride in zip(indices, tensor.shape, tensor.stride(), strict=True):
        inside &= (index >= 0) & (index < extent)
        offsets += index * stride
        span += (extent - 1) * stride
    wanted = _mask_of(mask, shape)
    accessed = inside if wanted is None else inside & wanted
    if not check_bounds and not bool((accessed if wanted is None else inside | ~wanted).all()):
        raise InterpreterError(
            f"check_bounds=False, but an index is outside array {array.name} of shape "
            f"{tuple(tensor.shape)}"
        )
    memory = tensor.as_strided((span if tensor.numel() else 0,), (1,), tensor.storage_offset())
    if bool(accessed.all()):
        return Elements(memory, offsets, None)
    return Elements(memory, torch.where(accessed, offsets, 0), accessed)


def _locate_indices(array: Any, indices: Any, mask: Any, check_bounds: bool) -> Elements:
    array = as_array(array)
    items = items_of(indices)
    if len(items) != array.ndim:
        raise TileTypeError(
            f"array {array.name} of rank {array.ndim} needs {array.ndim} indices, got {len(items)}"
        )
    tensors = tuple(_integer_index(item, axis) for axis, item in enumerate(items))
    return _locate(array, tensors, mask, check_bounds)


def _locate_offsets(raw: RawMemory, offset: Any, mask: Any) -> Elements:
    """Finds elements by offset from an array's first one, anywhere in its allocation."""
    tensor = raw.array.tensor
    offsets = _integer_index(offset, 0) + tensor.storage_offset()
    accessed = _mask_of(mask, tuple(offsets.shape))
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    inside = (offsets >= 0) & (offsets < total)
    if not bool((inside if accessed is None else inside | ~accessed).all()):
        raise InterpreterError(f"an offset is outside the memory of array {raw.array.name}")
    memory = tensor.as_strided((total,), (1,), 0)
    if accessed is None:
        return Elements(memory, offsets, None)
    return Elements(memory, torch.where(accessed, offsets, 0), accessed)


def _gathered(elements: Elements, element: DType, padding_value: Any) -> Tile:
    shape = tuple(elements.offsets.shape)
    otherwise = broadcast(implicit(padding_value, element), shape, "padding value")
    return Tile(elements.read(otherwise), element)


@implements(ct.gather)
def _gather(
    array: Any,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    latency: int | None = None,
) -> Tile:
    check_load_store_hints(latency)
    elements = _locate_indices(array, indices, mask, check_bounds)
    return _gathered(elements, array.element, padding_value)


@implements(ct.scatter)
def _scatter(
    array: Any,
    indices: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    latency: int | None = None,
) -> None:
    check_load_store_hints(latency)
    elements = _locate_indices(array, indices, mask, check_bounds)
    elements.write(broadcast(implicit(value, array.element), tuple(elements.offsets.shape), "value"))


@implements(ct.RawArrayMemory.load_offset if hasattr(ct, "RawArrayMemory") else RawMemory.load_offset)
def _load_offset(
    raw: RawMemory,
    offset: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    latency: int | None = None,
) -> Tile:
    check_load_store_hints(latency)
    elements = _locate_offsets(raw, offset, mask)
    if padding_value is None:
        return Tile(elements.read(poison(raw.array.element)), raw.array.element)
    return _gathered(elements, raw.array.element, padding_value)
