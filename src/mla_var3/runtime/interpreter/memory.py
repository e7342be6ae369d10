"""Access to arrays: tiles (load, store, slice) and elements (gather, atomic_add).

A load always copies: a later store of the kernel must not change a tile that was loaded before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime.interpreter import cutile_api as api
from mla_var3.runtime.interpreter.cutile_api import PaddingMode, TileTypeError, ct, implements
from mla_var3.runtime.interpreter.dtypes import padding, poison
from mla_var3.runtime.interpreter.values import (
    Array,
    Tile,
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
    tile_shape,
)


def _window(
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
    memory, inside = _window(tensor, array.name, start, shape or (1,) * tensor.ndim, checked)
    if inside is None:
        elements = memory.clone()
    else:
        elements = padding(array.element, padding_mode).repeat(shape or (1,) * tensor.ndim)
        elements[inside] = memory
    return Tile(elements if shape else elements.reshape(()), array.element)


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


def _origin(array: Any, index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element position of the tile of `shape` at `index` of an array."""
    position = index_tuple(index, as_array(array).ndim, f"array {array.name}")
    return tuple(place * size for place, size in zip(position, shape, strict=True))


@implements(ct.load)
def _load(
    array: Any,
    /,
    index: Any,
    shape: Any,
    *,
    order: Any = "C",
    padding_mode: PaddingMode = ct.PaddingMode.UNDETERMINED,
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> Tile:
    api.check_load_store_hints(latency, allow_tma)
    sizes = tile_shape(shape, as_array(array).ndim, zero_d=True)
    start = _origin(array, index, sizes or (1,) * array.ndim)
    return _read(array, _in_order(array, order), start, sizes, padding_mode, check_bounds)


@implements(ct.store)
def _store(
    array: Any,
    /,
    index: Any,
    tile: Any,
    *,
    order: Any = "C",
    check_bounds: bool = True,
    latency: int | None = None,
    allow_tma: bool | None = None,
) -> None:
    api.check_load_store_hints(latency, allow_tma)
    value = implicit(tile, as_array(array).element)
    if value.ndim == 0:
        value = value.reshape((1,) * array.ndim)
    if value.ndim != array.ndim:
        raise TileTypeError(
            f"cannot store a tile of shape {tuple(value.shape)} to array {array.name} of rank "
            f"{array.ndim}"
        )
    start = _origin(array, index, tuple(value.shape))
    memory, inside = _window(
        _in_order(array, order), array.name, start, tuple(value.shape), check_bounds
    )
    memory.copy_(value if inside is None else value[inside])


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


# --- elements ---


class _Elements(NamedTuple):
    """Elements of an array picked by index.

    Attributes:
        memory: The array's memory as one axis.
        offsets: Position of each element in `memory`; 0 for those outside the array.
        inside: Which elements are inside the array; None for all of them.
    """

    memory: torch.Tensor
    offsets: torch.Tensor
    inside: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tile that the elements form."""
        return tuple(self.offsets.shape)


def _integer_index(value: Any, axis: int) -> torch.Tensor:
    tile = as_tile(value)
    if not api.is_integral(tile.element):
        raise TileTypeError(f"index {axis} must be of an integer dtype, got {describe(value)}")
    return tile.tensor.to(torch.int64)


def _locate(array: Any, indices: Any, check_bounds: bool) -> _Elements:
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
    memory = tensor.as_strided((span if tensor.numel() else 0,), (1,), tensor.storage_offset())
    if bool(inside.all()):
        return _Elements(memory, offsets, None)
    if not check_bounds:
        raise InterpreterError(
            f"check_bounds=False, but an index is outside array {array.name} of shape "
            f"{tuple(tensor.shape)}"
        )
    return _Elements(memory, torch.where(inside, offsets, 0), inside)


@implements(ct.gather)
def _gather(
    array: Any, indices: Any, /, *, padding_value: Any = 0, check_bounds: bool = True
) -> Tile:
    memory, offsets, inside = found = _locate(array, indices, check_bounds)
    if inside is None:
        return Tile(memory[offsets], array.element)
    if padding_value is None:
        otherwise = poison(array.element)
    else:
        otherwise = implicit(padding_value, array.element)
    otherwise = broadcast(otherwise, found.shape, "padding value")
    if not memory.numel():
        return Tile(otherwise, array.element)
    return Tile(torch.where(inside, memory[offsets], otherwise), array.element)


@implements(ct.atomic_add)
def _atomic_add(
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
    memory, offsets, inside = found = _locate(array, indices, check_bounds)
    if array.element not in api.ATOMIC_SPECS["add"].supported_dtypes:
        raise TileTypeError(f"atomic_add does not support dtype {array.element}")
    value = broadcast(implicit(update, array.element), found.shape, "update").reshape(-1)
    # What an element outside the array returns is undefined.
    old = poison(array.element).repeat(offsets.numel())
    # One by one: a tile may add to one element several times, and each addition sees the last.
    for position, offset in enumerate(offsets.reshape(-1).tolist()):
        if inside is None or inside.reshape(-1)[position]:
            old[position] = memory[offset]
            memory[offset] += value[position]
    return Tile(old.reshape(found.shape), array.element)
