"""Access to single elements: gather, scatter, advanced indexing, raw memory, atomics."""

import cuda.tile as ct
import pytest
import torch

from mla_var3.errors import InterpreterError
from tests.unit.runtime.interpreter.interpreter_support import values

ZERO = ct.PaddingMode.ZERO


def grid_of(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def test_gather_bounds_mask_and_padding():
    x = grid_of(2, 3)

    def body(a):
        rows = ct.arange(4, dtype=ct.int32)[:, None] - 1
        columns = ct.arange(2, dtype=ct.int64)[None, :] * 2
        return ct.gather(a, (rows, columns), mask=columns < 2, padding_value=-1)

    assert values(body, x) == [[-1.0, -1.0], [0.0, -1.0], [3.0, -1.0], [-1.0, -1.0]]


def test_gather_from_an_empty_array():
    assert values(lambda a: ct.gather(a, ct.arange(2, dtype=ct.int32)), torch.zeros(0)) == [0, 0]


def test_atomics_see_each_other():
    x = torch.zeros(2, dtype=torch.int32)
    index = torch.tensor([0, 1, 0, 0], dtype=torch.int32)

    def body(a, i):
        return ct.atomic_add(a, ct.load(i, (0,), (4,)), ct.arange(4, dtype=ct.int32) + 1)

    assert values(body, x, index) == [0, 0, 1, 4]
    assert x.tolist() == [8, 2]


def test_atomics_take_no_mask():
    """cuTile has none: an index out of bounds, such as -1, leaves an element out."""
    x = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="unexpected keyword argument 'mask'"):
        values(lambda a: ct.atomic_add(a, 0, 1, mask=True), x)
    values(lambda a: ct.atomic_add(a, -ct.arange(2, dtype=ct.int32), 1), x)
    assert x.tolist() == [1, 0]


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
def test_atomic_operations(operation, update, expected):
    x = torch.tensor([1, 2, 3], dtype=torch.int32)

    def body(a):
        index = ct.arange(4, dtype=ct.int32)
        return operation(a, index, ct.full((), update, a.dtype))

    old = values(body, x)
    assert old[:3] == [1, 2, 3]
    assert x.tolist() == expected
