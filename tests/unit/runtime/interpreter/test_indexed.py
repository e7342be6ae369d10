"""Access to single elements: gather, scatter, advanced indexing, raw memory, atomics."""

from __future__ import annotations

from typing import Any

import cuda.tile as ct
import pytest
import torch

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter
from tests.unit.runtime.interpreter.interpreter_support import elements, evaluate, values

ZERO = ct.PaddingMode.ZERO


def grid_of(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


# -------------------------------------------------------------------- gather, scatter and the like


def test_gather_bounds_mask_and_padding() -> None:
    x = grid_of(2, 3)

    def body(a):
        rows = ct.arange(4, dtype=ct.int32)[:, None] - 1
        columns = ct.arange(2, dtype=ct.int64)[None, :] * 2
        return ct.gather(a, (rows, columns), mask=columns < 2, padding_value=-1)

    assert values(body, x) == [[-1.0, -1.0], [0.0, -1.0], [3.0, -1.0], [-1.0, -1.0]]


def test_gather_from_an_empty_array() -> None:
    assert values(lambda a: ct.gather(a, ct.arange(2, dtype=ct.int32)), torch.zeros(0)) == [0, 0]


def test_advanced_indexing() -> None:
    x = grid_of(4, 6)
    rows = torch.tensor([3, 0, 7, 1], dtype=torch.int32)

    def body(a, r, start):
        index = (ct.load(r, (0,), (4,)), ct.Slice(start, 4))
        tile = ct.load_advanced_indexing(a, index, padding_mode=ZERO)
        ct.store_advanced_indexing(a, index, tile * 0 - 1)
        return tile

    tile = elements(body, x, rows, 4)
    assert tile.tolist() == [[22, 23, 0, 0], [4, 5, 0, 0], [0, 0, 0, 0], [10, 11, 0, 0]]
    assert x[:, 4:].tolist() == [[-1, -1], [-1, -1], [16, 17], [-1, -1]]
    undetermined = elements(
        lambda a: ct.load_advanced_indexing(a, (ct.arange(8, dtype=ct.int32), ct.Slice(0, 4))), x
    )
    assert undetermined[4:].isnan().all()


def test_raw_memory() -> None:
    memory = torch.arange(12.0)
    view = memory[4:8]

    def body(a):
        raw = a.get_raw_memory()
        offsets = ct.arange(4, dtype=ct.int32) - 2
        raw.store_offset(offsets, -1.0, mask=offsets >= 0)
        return raw.load_offset(offsets, mask=offsets < 1, padding_value=9)

    assert values(body, view) == [2.0, 3.0, -1.0, 9.0]
    assert memory.tolist() == [0, 1, 2, 3, -1, -1, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("offset", [-5, 8])
def test_raw_memory_outside_the_allocation(offset: int) -> None:
    view = torch.arange(12.0)[4:8]
    with pytest.raises(InterpreterError, match="outside the memory of array"):
        evaluate(lambda a: a.get_raw_memory().load_offset(offset), view)


def test_foreign_pointer() -> None:
    x = grid_of(4, 4)

    def body(a):
        transposed = ct.Array.from_foreign(a.foreign_pointer, (4, 2), (1, 8))
        return ct.load(transposed, (0, 0), (4, 2))

    assert torch.equal(elements(body, x), x[::2].T)
    with pytest.raises(InterpreterError, match="does not fit into the memory"):
        evaluate(lambda a: ct.Array.from_foreign(a.foreign_pointer, (5,), (4,)), x)
    with pytest.raises(InterpreterError, match="supports no tile operation"):
        evaluate(lambda a: a.foreign_pointer + 1, x)


# ----------------------------------------------------------------------------------------- atomics


def test_atomics_see_each_other() -> None:
    x = torch.zeros(2, dtype=torch.int32)
    index = torch.tensor([0, 1, 0, 0], dtype=torch.int32)

    def body(a, i):
        return ct.atomic_add(a, ct.load(i, (0,), (4,)), ct.arange(4, dtype=ct.int32) + 1)

    assert values(body, x, index) == [0, 0, 1, 4]
    assert x.tolist() == [8, 2]


def test_counter_across_blocks() -> None:
    counter, order = torch.zeros(1, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)

    @ct.kernel
    def kernel(counter, order):
        ticket = ct.atomic_add(counter, 0, 1)
        ct.store(order, (ct.bid(0),), ticket)
        if ticket == ct.num_blocks(0) - 1:
            ct.store(counter, (0,), 100)

    interpreter.launch((5,), kernel, (counter, order))
    assert order.tolist() == [0, 1, 2, 3, 4]
    assert counter.item() == 100


@pytest.mark.parametrize(
    ("operation", "update", "expected"),
    [
        (ct.atomic_xchg, 5, [5, 5, 5]),
        (ct.atomic_max, 2, [2, 2, 3]),
        (ct.atomic_min, 2, [1, 2, 2]),
        (ct.atomic_and, 2, [0, 2, 2]),
        (ct.atomic_or, 4, [5, 6, 7]),
        (ct.atomic_xor, 1, [0, 3, 2]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_atomic_operations(
    operation: Any, update: int, expected: list[int], dtype: torch.dtype
) -> None:
    x = torch.tensor([1, 2, 3]).to(dtype)

    def body(a):
        index = ct.arange(4, dtype=ct.int32)
        return operation(a, index, ct.full((), update, a.dtype))

    old = values(body, x)
    assert old[:3] == [1, 2, 3]
    assert x.tolist() == expected


def test_masked_raw_atomics() -> None:
    x = torch.ones(4)

    def body(a):
        index = ct.arange(4, dtype=ct.int32)
        raw = a.get_raw_memory()
        raw.atomic_add_offset(index, 1.0, mask=index < 2)
        return raw.atomic_cas_offset(index, 2.0, 5.0, mask=index != 1)

    assert values(body, x) == [2.0, 2.0, 1.0, 1.0]
    assert x.tolist() == [5.0, 2.0, 1.0, 1.0]
