"""Access to single elements: gather, scatter and atomics.

Blocks run one after the other, so every access is atomic by itself. Accesses of one tile to the
same element have to see each other: `Elements.update` takes care of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.arithmetic import combine_elements
from mla_var3.runtime.interpreter.cutile_api import DType, TileTypeError, ct, implement, implements
from mla_var3.runtime.interpreter.dtypes import as_bits, poison
from mla_var3.runtime.interpreter.memory import check_hints
from mla_var3.runtime.interpreter.values import (
    Tile,
    as_array,
    as_tile,
    broadcast,
    describe,
    implicit,
    items_of,
)


def put(memory: torch.Tensor, offsets: torch.Tensor, value: torch.Tensor) -> None:
    """Writes `value` to positions of a 1-D tensor.

    Works on the bit patterns: torch cannot index-assign unsigned integers wider than a byte.
    """
    as_bits(memory)[offsets] = as_bits(value)


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile that the elements form."""
        return tuple(self.offsets.shape)

    def read(self, otherwise: torch.Tensor) -> torch.Tensor:
        """The elements, and `otherwise` where none is accessed."""
        if self.valid is None:
            return self.memory[self.offsets]
        if not self.memory.numel():
            return otherwise.expand(self.shape)
        return torch.where(self.valid, self.memory[self.offsets], otherwise)

    def write(self, value: torch.Tensor) -> None:
        """Writes `value`, which has one element per offset."""
        if self.valid is None:
            put(self.memory, self.offsets, value)
        else:
            put(self.memory, self.offsets[self.valid], value[self.valid])

    def update(self, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Reads, changes and writes the elements, one access after the other."""
        positions = torch.arange(self.offsets.numel())
        if self.valid is not None:
            positions = positions[self.valid.reshape(-1)]
        offsets = self.offsets.reshape(-1)[positions]
        # Accesses to different elements do not see each other, so they can be done at once.
        distinct = torch.unique(offsets).numel() == offsets.numel()
        batches = [slice(None)] if distinct else [slice(i, i + 1) for i in range(len(offsets))]
        for batch in batches:
            chosen = offsets[batch]
            put(self.memory, chosen, change(self.memory[chosen], positions[batch]))


def _integer_index(value: Any, axis: int) -> torch.Tensor:
    tile = as_tile(value)
    if not api.is_integral(tile.element):
        raise TileTypeError(f"index {axis} must be of an integer dtype, got {describe(value)}")
    return tile.tensor.to(torch.int64)


def _mask_of(mask: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    if mask is None:
        return None
    tile = as_tile(mask)
    if not api.is_boolean(tile.element):
        raise TileTypeError(f"the mask must be of dtype bool, got {describe(mask)}")
    return broadcast(tile.tensor, shape, "mask")


def locate(array: Any, indices: Any, mask: Any, check_bounds: bool) -> Elements:
    """The array elements at one index per axis; a negative index is out of bounds."""
    array = as_array(array)
    items = items_of(indices)
    if len(items) != array.ndim:
        raise TileTypeError(
            f"array {array.name} of rank {array.ndim} needs {array.ndim} indices, got {len(items)}"
        )
    tensor = array.tensor
    tensors = [_integer_index(item, axis) for axis, item in enumerate(items)]
    tensors = list(torch.broadcast_tensors(*tensors)) if tensors else []
    shape = tuple(tensors[0].shape) if tensors else ()
    offsets = torch.zeros(shape, dtype=torch.int64)
    inside = torch.ones(shape, dtype=torch.bool)
    span = 1
    for index, extent, stride in zip(tensors, tensor.shape, tensor.stride(), strict=True):
        inside &= (index >= 0) & (index < extent)
        offsets += index * stride
        span += (extent - 1) * stride
    wanted = _mask_of(mask, shape)
    if not check_bounds and not bool((inside if wanted is None else inside | ~wanted).all()):
        raise InterpreterError(
            f"check_bounds=False, but an index is outside array {array.name} of shape "
            f"{tuple(tensor.shape)}"
        )
    accessed = inside if wanted is None else inside & wanted
    memory = tensor.as_strided((span if tensor.numel() else 0,), (1,), tensor.storage_offset())
    if bool(accessed.all()):
        return Elements(memory, offsets, None)
    return Elements(memory, torch.where(accessed, offsets, 0), accessed)


@implements(ct.gather)
def _gather(
    array: Any,
    indices: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    **hints: Any,
) -> Tile:
    check_hints(**hints)
    elements, element = locate(array, indices, mask, check_bounds), array.element
    if padding_value is None:
        return Tile(elements.read(poison(element)), element)
    otherwise = broadcast(implicit(padding_value, element), elements.shape, "padding value")
    return Tile(elements.read(otherwise), element)


@implements(ct.scatter)
def _scatter(
    array: Any,
    indices: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    **hints: Any,
) -> None:
    check_hints(**hints)
    elements = locate(array, indices, mask, check_bounds)
    elements.write(broadcast(implicit(value, array.element), elements.shape, "value"))


def _modified(name: str, old: torch.Tensor, update: torch.Tensor, element: DType) -> torch.Tensor:
    if name == "xchg":
        return update
    # `and` and `or` are keywords, so cuTile's own names end in an underscore.
    own = f"{name}_" if name in ("and", "or") else name
    return combine_elements(own, old, update, element)


def _update_elements(name: str, update: Any, element: DType) -> torch.Tensor:
    """The update operand in the target's dtype; bitwise operations do not cast."""
    spec = api.ATOMIC_SPECS[name]
    if element not in spec.supported_dtypes:
        raise TileTypeError(f"atomic {name} does not support dtype {element}")
    if spec.bitwise and as_tile(update).element != element:
        raise TileTypeError(
            f"atomic {name} needs an update of dtype {element}, got {as_tile(update).element}"
        )
    return implicit(update, element)


def _register(name: str) -> None:
    def read_modify_write(
        array: Any,
        indices: Any,
        update: Any,
        /,
        *,
        mask: Any = None,
        check_bounds: bool = True,
        memory_order: Any = ct.MemoryOrder.ACQ_REL,
        memory_scope: Any = ct.MemoryScope.DEVICE,
    ) -> Tile:
        api.validate_memory_order_and_scope(memory_order, memory_scope, api.TileAtomicRMW)
        elements, element = locate(array, indices, mask, check_bounds), array.element
        value = broadcast(_update_elements(name, update, element), elements.shape, "update")
        value = value.reshape(-1)
        # What an element that is not accessed returns is undefined.
        old = poison(element).repeat(elements.offsets.numel())

        def change(read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            put(old, positions, read)
            return _modified(name, read, value[positions], element)

        elements.update(change)
        return Tile(old.reshape(elements.shape), element)

    implement(getattr(ct, f"atomic_{name}"), read_modify_write)


for _name in api.ATOMIC_SPECS:
    _register(_name)
