"""Access to single elements: gather, scatter, raw memory, foreign pointers, atomics.

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
from mla_var3.runtime.interpreter.cutile_api import (
    DType,
    PaddingMode,
    RawArrayMemory,
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import as_bits, padding, poison
from mla_var3.runtime.interpreter.memory import check_hints, in_view_shape, view_origin, window
from mla_var3.runtime.interpreter.values import (
    Array,
    ForeignPointer,
    RawMemory,
    Tile,
    TiledView,
    as_array,
    as_tile,
    broadcast,
    describe,
    implicit,
    index_value,
    items_of,
    static_ints,
    tile_shape,
)

_UNDETERMINED = ct.PaddingMode.UNDETERMINED


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


def _locate(
    array: Array, indices: tuple[torch.Tensor, ...], mask: Any, check_bounds: bool
) -> Elements:
    """Finds array elements by one index tensor per axis; negative means out of bounds."""
    tensor = array.tensor
    indices = torch.broadcast_tensors(*indices) if indices else ()
    shape = tuple(indices[0].shape) if indices else ()
    offsets = torch.zeros(shape, dtype=torch.int64)
    inside = torch.ones(shape, dtype=torch.bool)
    span = 1
    for index, extent, stride in zip(indices, tensor.shape, tensor.stride(), strict=True):
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


def locate_indices(array: Any, indices: Any, mask: Any, check_bounds: bool) -> Elements:
    """The elements that a gather, a scatter or an atomic operation names."""
    array = as_array(array)
    items = items_of(indices)
    if len(items) != array.ndim:
        raise TileTypeError(
            f"array {array.name} of rank {array.ndim} needs {array.ndim} indices, got {len(items)}"
        )
    tensors = tuple(_integer_index(item, axis) for axis, item in enumerate(items))
    return _locate(array, tensors, mask, check_bounds)


def locate_offsets(raw: RawMemory, offset: Any, mask: Any) -> Elements:
    """The elements at offsets from an array's first one, anywhere in its allocation."""
    tensor = raw.array.tensor
    offsets = _integer_index(offset, 0).add(int(tensor.storage_offset()))
    accessed = _mask_of(mask, tuple(offsets.shape))
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    inside = (offsets >= 0) & (offsets < total)
    if not bool((inside if accessed is None else inside | ~accessed).all()):
        raise InterpreterError(f"an offset is outside the memory of array {raw.array.name}")
    memory = tensor.as_strided((total,), (1,), 0)
    if accessed is None:
        return Elements(memory, offsets, None)
    return Elements(memory, torch.where(accessed, offsets, 0), accessed)


def _locate_any(target: Any, where: Any, mask: Any, check_bounds: bool) -> tuple[Elements, DType]:
    """The elements of an array by index, or of raw memory by offset, and their dtype."""
    if isinstance(target, RawMemory):
        return locate_offsets(target, where, mask), target.array.element
    elements = locate_indices(target, where, mask, check_bounds)
    return elements, target.element


@implements(ct.gather, RawArrayMemory.load_offset)
def _gather(
    target: Any,
    where: Any,
    /,
    *,
    mask: Any = None,
    padding_value: Any = 0,
    check_bounds: bool = True,
    **hints: Any,
) -> Tile:
    check_hints(**hints)
    elements, element = _locate_any(target, where, mask, check_bounds)
    if padding_value is None:
        return Tile(elements.read(poison(element)), element)
    otherwise = broadcast(implicit(padding_value, element), elements.shape, "padding value")
    return Tile(elements.read(otherwise), element)


@implements(ct.scatter, RawArrayMemory.store_offset)
def _scatter(
    target: Any,
    where: Any,
    value: Any,
    /,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    **hints: Any,
) -> None:
    check_hints(**hints)
    elements, element = _locate_any(target, where, mask, check_bounds)
    elements.write(broadcast(implicit(value, element), elements.shape, "value"))


@implements(ct.Slice.__init__)
def _init_slice(index: Any, start: Any, length: Any, /) -> None:
    index.start, index.length = index_value(start), index_value(length)


def _locate_advanced(array: Any, indices: Any) -> Elements:
    """The elements of `load_advanced_indexing`: one axis by index tile, the others by slice."""
    array = as_array(array)
    if array.ndim < 2 or not isinstance(indices, tuple) or len(indices) != array.ndim:
        raise TileTypeError(
            f"advanced indexing of array {array.name} needs an array of rank 2 or more and a "
            f"tuple with one entry per axis; the rank is {array.ndim}"
        )
    tensors = []
    sparse_axes = 0
    for axis, item in enumerate(indices):
        if isinstance(item, ct.Slice):
            tile_shape(item.length)
            positions = torch.arange(item.start, item.start + item.length)
        else:
            positions = _integer_index(item, axis)
            sparse_axes += 1
            if positions.ndim != 1:
                raise TileTypeError(f"index {axis} must be a 1-D tile, got {describe(item)}")
        tensors.append(positions.reshape([-1 if i == axis else 1 for i in range(array.ndim)]))
    if sparse_axes != 1:
        raise TileTypeError(f"exactly one index must be a tile, got {sparse_axes}")
    elements = _locate(array, tuple(tensors), None, check_bounds=True)
    if elements.valid is not None and not bool(elements.valid.any()):
        raise InterpreterError(
            f"the tile lies wholly outside array {array.name} of shape "
            f"{tuple(array.tensor.shape)}: undefined behaviour"
        )
    return elements


@implements(ct.load_advanced_indexing)
def _load_advanced(
    array: Any, indices: Any, /, *, padding_mode: PaddingMode = _UNDETERMINED, **hints: Any
) -> Tile:
    check_hints(**hints)
    elements = _locate_advanced(array, indices)
    return Tile(elements.read(padding(array.element, padding_mode)), array.element)


@implements(ct.store_advanced_indexing)
def _store_advanced(array: Any, indices: Any, tile: Any, /, **hints: Any) -> None:
    check_hints(**hints)
    elements = _locate_advanced(array, indices)
    value = implicit(tile, array.element)
    if tuple(value.shape) != elements.shape:
        raise TileTypeError(
            f"a tile of shape {tuple(value.shape)} does not match the indices, which form "
            f"{elements.shape}"
        )
    elements.write(value)


@implements(ct.Array.from_foreign)
def _from_foreign(pointer: Any, shape: Any, strides: Any) -> Array:
    if not isinstance(pointer, ForeignPointer):
        raise TileTypeError(f"expected a foreign pointer, got {describe(pointer)}")
    sizes, steps = static_ints(shape, "a size"), static_ints(strides, "a stride")
    if len(sizes) != len(steps) or min(sizes + steps, default=0) < 0:
        raise TileTypeError(f"expected as many sizes as strides, all >= 0: {sizes}, {steps}")
    source = pointer.array
    tensor = source.tensor
    offset = tensor.storage_offset()
    last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    total = tensor.untyped_storage().nbytes() // tensor.element_size()
    if 0 not in sizes and last >= total:
        raise InterpreterError(
            f"an array of shape {sizes} and strides {steps} does not fit into the memory of "
            f"array {source.name}"
        )
    view = tensor.as_strided(sizes, steps, offset)
    return Array(view, source.element, f"{source.name} (foreign)", source.index_dtype)


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


def _locate_atomic(
    operation: Any,
    target: Any,
    where: Any,
    *,
    mask: Any = None,
    check_bounds: bool = True,
    memory_order: Any = ct.MemoryOrder.ACQ_REL,
    memory_scope: Any = ct.MemoryScope.DEVICE,
) -> tuple[Elements, DType]:
    api.validate_memory_order_and_scope(memory_order, memory_scope, operation)
    return _locate_any(target, where, mask, check_bounds)


@implements(ct.atomic_cas, RawArrayMemory.atomic_cas_offset)
def _compare_and_swap(
    target: Any, where: Any, expected: Any, desired: Any, /, **options: Any
) -> Tile:
    elements, element = _locate_atomic(api.TileAtomicCAS, target, where, **options)
    if element not in api.CAS_DTYPES:
        raise TileTypeError(f"atomic_cas does not support dtype {element}")
    shape = elements.shape
    wanted = broadcast(implicit(expected, element), shape, "expected value").reshape(-1)
    new = broadcast(implicit(desired, element), shape, "desired value").reshape(-1)
    old = wanted.clone()

    def change(read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        put(old, positions, read)
        return torch.where(read == wanted[positions], new[positions], read)

    elements.update(change)
    return Tile(old.reshape(shape), element)


def _register(name: str) -> None:
    def read_modify_write(target: Any, where: Any, update: Any, /, **options: Any) -> Tile:
        elements, element = _locate_atomic(api.TileAtomicRMW, target, where, **options)
        value = broadcast(_update_elements(name, update, element), elements.shape, "update")
        value = value.reshape(-1)
        # What an element that is not accessed returns is undefined.
        old = poison(element).repeat(elements.offsets.numel())

        def change(read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            put(old, positions, read)
            return _modified(name, read, value[positions], element)

        elements.update(change)
        return Tile(old.reshape(elements.shape), element)

    def on_view(view: TiledView, index: Any, update: Any, /) -> None:
        array = view.array
        value = in_view_shape(view, _update_elements(name, update, array.element), "update")
        start = view_origin(view, index)
        memory, inside = window(array.tensor, array.name, start, tuple(value.shape), checked=True)
        if inside is not None:
            value = value[inside]
        memory.copy_(_modified(name, memory, value, array.element))

    implement(getattr(ct, f"atomic_{name}"), read_modify_write)
    implement(getattr(RawArrayMemory, f"atomic_{name}_offset"), read_modify_write)
    if name != "xchg":
        implement(getattr(ct.TiledView, f"atomic_store_{name}"), on_view)


for _name in api.ATOMIC_SPECS:
    _register(_name)
