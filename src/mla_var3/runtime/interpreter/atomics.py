"""Atomic operations on arrays, raw memory and tiled views.

Blocks run one after the other, so every access is atomic by itself; what remains is to let accesses
of one tile to the same element see each other.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.runtime.interpreter.arithmetic import combine_elements
from mla_var3.runtime.interpreter.cutile_api import (
    ATOMIC_SPECS,
    CAS_DTYPES,
    DType,
    RawArrayMemory,
    TileAtomicCAS,
    TileAtomicRMW,
    TileTypeError,
    ct,
    validate_memory_order_and_scope,
)
from mla_var3.runtime.interpreter.dtypes import poison
from mla_var3.runtime.interpreter.indexed import Elements, locate_indices, locate_offsets, put
from mla_var3.runtime.interpreter.memory import in_view_shape, view_origin, window
from mla_var3.runtime.interpreter.operands import as_tile, broadcast, implicit
from mla_var3.runtime.interpreter.registry import implement, implements
from mla_var3.runtime.interpreter.values import RawMemory, Tile, TiledView

_ACQ_REL = ct.MemoryOrder.ACQ_REL
_DEVICE = ct.MemoryScope.DEVICE

_COMBINE_OPERATIONS = {
    "add": "add",
    "min": "min",
    "max": "max",
    "and": "and_",
    "or": "or_",
    "xor": "xor",
}


def _modified(name: str, old: torch.Tensor, update: torch.Tensor, element: DType) -> torch.Tensor:
    if name == "xchg":
        return update
    return combine_elements(_COMBINE_OPERATIONS[name], old, update, element)


def _update_elements(name: str, update: Any, element: DType) -> torch.Tensor:
    """The update operand in the target's dtype; bitwise operations do not cast."""
    spec = ATOMIC_SPECS[name]
    if element not in spec.supported_dtypes:
        raise TileTypeError(f"atomic {name} does not support dtype {element}")
    if spec.bitwise and as_tile(update).element != element:
        raise TileTypeError(
            f"atomic {name} needs an update of dtype {element}, got {as_tile(update).element}"
        )
    return implicit(update, element)


def _read_modify_write(name: str, elements: Elements, update: Any, element: DType) -> Tile:
    value = broadcast(_update_elements(name, update, element), elements.shape, "update")
    value = value.reshape(-1)
    # What an element that is not accessed returns is not defined.
    old = poison(element).repeat(elements.offsets.numel())

    def change(read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        put(old, positions, read)
        return _modified(name, read, value[positions], element)

    elements.update(change)
    return Tile(old.reshape(elements.shape), element)


def _compare_and_swap(elements: Elements, expected: Any, desired: Any, element: DType) -> Tile:
    if element not in CAS_DTYPES:
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


@implements(ct.atomic_cas)
def _atomic_cas(
    array: Any,
    indices: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    check_bounds: bool = True,
    memory_order: Any = _ACQ_REL,
    memory_scope: Any = _DEVICE,
) -> Tile:
    validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicCAS)
    elements = locate_indices(array, indices, None, check_bounds)
    return _compare_and_swap(elements, expected, desired, array.element)


@implements(RawArrayMemory.atomic_cas_offset)
def _atomic_cas_offset(
    raw: RawMemory,
    offset: Any,
    expected: Any,
    desired: Any,
    /,
    *,
    mask: Any = None,
    memory_order: Any = _ACQ_REL,
    memory_scope: Any = _DEVICE,
) -> Tile:
    validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicCAS)
    elements = locate_offsets(raw, offset, mask)
    return _compare_and_swap(elements, expected, desired, raw.array.element)


def _register(name: str) -> None:
    def on_array(
        array: Any,
        indices: Any,
        update: Any,
        /,
        *,
        check_bounds: bool = True,
        memory_order: Any = _ACQ_REL,
        memory_scope: Any = _DEVICE,
    ) -> Tile:
        validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicRMW)
        elements = locate_indices(array, indices, None, check_bounds)
        return _read_modify_write(name, elements, update, array.element)

    def on_raw_memory(
        raw: RawMemory,
        offset: Any,
        update: Any,
        /,
        *,
        mask: Any = None,
        memory_order: Any = _ACQ_REL,
        memory_scope: Any = _DEVICE,
    ) -> Tile:
        validate_memory_order_and_scope(memory_order, memory_scope, TileAtomicRMW)
        elements = locate_offsets(raw, offset, mask)
        return _read_modify_write(name, elements, update, raw.array.element)

    def on_view(view: TiledView, index: Any, update: Any, /) -> None:
        array = view.array
        value = in_view_shape(view, _update_elements(name, update, array.element), "update")
        start = view_origin(view, index)
        memory, inside = window(array.tensor, array.name, start, tuple(value.shape), checked=True)
        if inside is not None:
            value = value[inside]
        memory.copy_(_modified(name, memory, value, array.element))

    implement(getattr(ct, f"atomic_{name}"), on_array)
    implement(getattr(RawArrayMemory, f"atomic_{name}_offset"), on_raw_memory)
    if name != "xchg":
        implement(getattr(ct.TiledView, f"atomic_store_{name}"), on_view)


for _name in ATOMIC_SPECS:
    _register(_name)
