"""Access to arrays: tiles (load, store, slice, tiled view), elements (gather, scatter, atomics).

A load always copies: a later store of the kernel must not change a tile that was loaded before.

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
    TileTypeError,
    ct,
    implement,
    implements,
)
from mla_var3.runtime.interpreter.dtypes import as_bits, padding, poison
from mla_var3.runtime.interpreter.values import (
    Array,
    Tile,
    TiledView,
    as_array,
    as_tile,
    axes_of,
    axis_of,
    broadcast,
    describe,
    implicit,
    index_tuple,
    index_value,
    items_of,
    static_ints,
    tile_shape,
)

_tile_shape = tile_shape  # hidden by a parameter of that name below

_UNDETERMINED = ct.PaddingMode.UNDETERMINED


def window(
    tensor: torch.Tensor, name: str, start: tuple[int, ...], shape: tuple[int, ...], checked: bool
) -> tuple[torch.Tensor, tuple[slice, ...] | None]:
    """The part of an array that the tile of `shape` at element `start` covers, as a view.

    Also the part of the tile that lies inside the array, as slices; None for all of it. `checked`
    is False where the kernel states that the tile is inside (check_bounds=False).
    """
    strides = tensor.stride()
    offset = tensor.storage_offset()
    sizes = []
    inside = []
    for axis, (first, size, extent) in enumerate(zip(start, shape, tensor.shape, strict=True)):
        low, high = max(first, 0), min(first + size, extent)
        if low >= high:
            raise InterpreterError(
                f"tile of shape {shape} at element {start} lies wholly outside array {name} of "
                f"shape {tuple(tensor.shape)} along axis {axis}: undefined behaviour"
            )
        offset += low * strides[axis]
        sizes.append(high - low)
        inside.append(slice(low - first, high - first))
    whole = tuple(sizes) == shape
    if not whole and not checked:
        raise InterpreterError(
            f"check_bounds=False, but the tile of shape {shape} at element {start} is not inside "
            f"array {name} of shape {tuple(tensor.shape)}"
        )
    return tensor.as_strided(sizes, strides, offset), None if whole else tuple(inside)


def _read(
    array: Array,
    tensor: torch.Tensor,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    padding_mode: PaddingMode,
    checked: bool,
) -> Tile:
    memory, inside = window(tensor, array.name, start, shape or (1,) * tensor.ndim, checked)
    if inside is None:
        elements = memory.clone()
    else:
        elements = padding(array.element, padding_mode).repeat(shape or (1,) * tensor.ndim)
        elements[inside] = memory
    return Tile(elements if shape else elements.reshape(()), array.element)


def _write(
    array: Array, tensor: torch.Tensor, start: tuple[int, ...], value: torch.Tensor, checked: bool
) -> None:
    memory, inside = window(tensor, array.name, start, tuple(value.shape), checked)
    memory.copy_(value if inside is None else value[inside])


def _in_order(array: Array, order: Any) -> torch.Tensor:
    """The array with its axes permuted as the `order` argument says."""
    if isinstance(order, str):
        if order not in ("C", "F"):
            raise TileTypeError(f"order must be 'C', 'F' or a permutation, got {order!r}")
        return array.tensor if order == "C" else array.tensor.permute(*reversed(range(array.ndim)))
    axes = axes_of(order, array.ndim, "order")
    if len(axes) != array.ndim:
        raise TileTypeError(f"order {axes} does not match the rank {array.ndim} of {array.name}")
    return array.tensor.permute(axes)


def check_hints(latency: int | None = None, allow_tma: bool | None = None) -> None:
    """Refuses hints that cuTile refuses; they have no effect here."""
    api.check_load_store_hints(latency, allow_tma)


def _origin(index: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(position * step for position, step in zip(index, steps, strict=True))


def _position(
    array: Any,
    index: Any,
    operation: Any,
    memory_order: Any = ct.MemoryOrder.WEAK,
    memory_scope: Any = ct.MemoryScope.NONE,
    **hints: Any,
) -> tuple[int, ...]:
    """The index of a tile in an array, after cuTile's checks of the other options."""
    check_hints(**hints)
    api.validate_memory_order_and_scope(memory_order, memory_scope, operation)
    return index_tuple(index, as_array(array).ndim, f"array {array.name}")


@implements(ct.load)
def _load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: PaddingMode = _UNDETERMINED,
    check_bounds: bool = True,
    **options: Any,
) -> Tile:
    position = _position(array, index, api.TileLoad, **options)
    sizes = tile_shape(shape, array.ndim, zero_d=True)
    start = _origin(position, sizes or (1,) * array.ndim)
    return _read(array, _in_order(array, order), start, sizes, padding_mode, check_bounds)


@implements(ct.store)
def _store(
    array: Any, /, index: Any, tile: Any, *, order: Any = "C", check_bounds: bool = True,
    **options: Any,
) -> None:  # fmt: skip
    position = _position(array, index, api.TileStore, **options)
    value = implicit(tile, array.element)
    if value.ndim == 0:
        value = value.reshape((1,) * array.ndim)
    if value.ndim != array.ndim:
        target = f"array {array.name} of rank {array.ndim}"
        raise TileTypeError(f"cannot store a tile of shape {tuple(value.shape)} to {target}")
    start = _origin(position, tuple(value.shape))
    _write(array, _in_order(array, order), start, value, check_bounds)


@implements(ct.num_tiles)
def _num_tiles(array: Any, /, axis: Any, shape: Any, order: Any = "C") -> Tile:
    array = as_array(array)
    sizes = tile_shape(shape, array.ndim, zero_d=True) or (1,) * array.ndim
    axis = axis_of(axis, array.ndim)
    return _count(_in_order(array, order).shape[axis], sizes[axis])


def _count(extent: int, step: int) -> Tile:
    return Tile.of_integer(-(-extent // step), ct.int32)


@implements(ct.Array.slice)
def _slice(array: Array, axis: Any, start: Any, stop: Any) -> Array:
    axis = axis_of(axis, array.ndim)
    first, last = index_value(start), index_value(stop)
    extent = array.tensor.shape[axis]
    if not (0 <= first < extent and first <= last <= extent):
        raise InterpreterError(
            f"slice [{first}:{last}] of array {array.name} along axis {axis}: expected "
            f"0 <= start < {extent} and start <= stop <= {extent}"
        )
    # cuTile multiplies start and stride in the wider of their types.
    widest = api.integer_dtype_max(array.index_dtype)
    if isinstance(start, Tile):
        widest = max(widest, api.integer_dtype_max(start.element))
    if first * array.tensor.stride(axis) > widest:
        raise InterpreterError(
            f"slice [{first}:{last}] of array {array.name} along axis {axis}: start times stride "
            f"{array.tensor.stride(axis)} overflows; expected an int64 start"
        )
    part = array.tensor.narrow(axis, first, last - first)
    return array.replace(part, f"{array.name}.slice({axis}, {first}, {last})", axis)


@implements(ct.Array.tiled_view)
def _tiled_view(
    array: Array,
    tile_shape: Any,
    *,
    padding_mode: PaddingMode = _UNDETERMINED,
    traversal_steps: Any = None,
) -> TiledView:
    sizes = _tile_shape(tile_shape, array.ndim, zero_d=True)
    if traversal_steps is None:
        steps = sizes or (1,) * array.ndim
    else:
        steps = static_ints(traversal_steps, "a traversal step")
        if len(steps) != array.ndim or min(steps, default=1) <= 0:
            raise TileTypeError(f"traversal_steps: expected {array.ndim} steps > 0, got {steps}")
    return TiledView(array, padding_mode, sizes, steps)


@implements(ct.TiledView.num_tiles)
def _view_num_tiles(view: TiledView, axis: Any) -> Tile:
    axis = axis_of(axis, view.array.ndim)
    return _count(view.array.tensor.shape[axis], view.traversal_steps[axis])


def _view_origin(view: TiledView, index: Any) -> tuple[int, ...]:
    """Element position of the tile at `index` of a tiled view."""
    position = index_tuple(index, view.array.ndim, f"the view of array {view.array.name}")
    return _origin(position, view.traversal_steps)


@implements(ct.TiledView.load)
def _view_load(view: TiledView, index: Any, *, check_bounds: bool = True, **hints: Any) -> Tile:
    check_hints(**hints)
    array, start = view.array, _view_origin(view, index)
    return _read(array, array.tensor, start, view.tile_shape, view.padding_mode, check_bounds)


@implements(ct.TiledView.store)
def _view_store(
    view: TiledView, index: Any, tile: Any, *, check_bounds: bool = True, **hints: Any
) -> None:
    check_hints(**hints)
    value = broadcast(implicit(tile, view.array.element), view.tile_shape, "stored tile")
    if not view.tile_shape:
        value = value.reshape((1,) * view.array.ndim)
    _write(view.array, view.array.tensor, _view_origin(view, index), value, check_bounds)


# --- elements ---


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
    # `and` and `or` are keywords, so cuTile's own names end in an underscore.
    own_name = f"{name}_" if name in ("and", "or") else name

    def read_modify_write(
        array: Any,
        indices: Any,
        update: Any,
        /,
        *,
        check_bounds: bool = True,
        memory_order: Any = ct.MemoryOrder.ACQ_REL,
        memory_scope: Any = ct.MemoryScope.DEVICE,
    ) -> Tile:
        api.validate_memory_order_and_scope(memory_order, memory_scope, api.TileAtomicRMW)
        elements, element = locate(array, indices, None, check_bounds), array.element
        value = broadcast(_update_elements(name, update, element), elements.shape, "update")
        value = value.reshape(-1)
        # What an element that is not accessed returns is undefined.
        old = poison(element).repeat(elements.offsets.numel())

        def change(read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            put(old, positions, read)
            chosen = value[positions]
            return chosen if name == "xchg" else combine_elements(own_name, read, chosen, element)

        elements.update(change)
        return Tile(old.reshape(elements.shape), element)

    implement(getattr(ct, f"atomic_{name}"), read_modify_write)


for _name in api.ATOMIC_SPECS:
    _register(_name)
