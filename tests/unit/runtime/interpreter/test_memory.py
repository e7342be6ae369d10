"""Memory access: tiles (loads, stores, slices, views) and elements (gather, atomics)."""

import math

import cuda.tile as ct
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter
from tests.unit.runtime.interpreter.interpreter_support import elements, evaluate, values

DTYPES = [
    torch.bool, torch.int8, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
]  # fmt: skip
ZERO = ct.PaddingMode.ZERO


def grid_of(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_moved(dtype):
    x = torch.tensor([1, 0, 1, 1, 1]).to(dtype)
    out = torch.zeros(7).to(dtype)

    @ct.kernel
    def kernel(x, out):
        tile = ct.load(x, (0,), (8,), padding_mode=ZERO)
        tile = ct.where(ct.arange(8, dtype=ct.int32) < 8, tile, tile)
        ct.store(out, (0,), ct.cat((ct.extract(tile, (0,), (4,)), ct.extract(tile, (1,), 4)), 0))
        index = ct.arange(4, dtype=ct.int32)
        ct.scatter(out, index + 5, ct.gather(x, index))

    interpreter.launch((1,), kernel, (x, out))
    padding = torch.zeros(1).to(dtype).float().item()
    given = x.float().tolist()
    assert out.float().tolist() == [*given, *given[:2]]
    tail = values(lambda a: ct.load(a, (1,), (4,), padding_mode=ZERO).astype(ct.float32), x)
    assert tail == [given[4], *[padding] * 3]


PADDING = {"ZERO": 0.0, "NAN": math.nan, "UNDETERMINED": math.nan}
PADDING |= {"POS_INF": math.inf, "NEG_INF": -math.inf}


@pytest.mark.parametrize("name", PADDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_modes(name, dtype):
    x, mode = grid_of(3, 3).to(dtype), getattr(ct.PaddingMode, name)
    tile = elements(lambda a: ct.load(a, (1, 0), (2, 4), padding_mode=mode), x).float()
    wanted = torch.full((2, 4), PADDING[name])
    wanted[0, :3] = x[2].float()
    torch.testing.assert_close(tile, wanted, equal_nan=True)


@settings(max_examples=60, deadline=None, database=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tile=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    index=st.tuples(st.integers(-2, 9), st.integers(-2, 9)),
)
def test_load_and_store_agree_with_slices(shape, tile, index):
    x, out = grid_of(*shape), torch.full(shape, -1.0)

    @ct.kernel
    def kernel(x, out, i, j):
        ct.store(out, (i, j), ct.load(x, (i, j), tile, padding_mode=ZERO))

    start = [i * n for i, n in zip(index, tile, strict=True)]
    if any(not 0 <= s < n for s, n in zip(start, shape, strict=True)):
        with pytest.raises(InterpreterError, match="wholly outside"):
            interpreter.launch((1,), kernel, (x, out, *index))
        return
    interpreter.launch((1,), kernel, (x, out, *index))
    covered = tuple(slice(s, s + n) for s, n in zip(start, tile, strict=True))
    expected = torch.full(shape, -1.0)
    expected[covered] = x[covered]
    assert torch.equal(out, expected)


def test_loaded_tile_does_not_change_with_the_array():
    x = torch.arange(4.0)

    @ct.kernel
    def kernel(x):
        before = ct.load(x, (0,), (4,))
        ct.store(x, (0,), before * 0)
        ct.store(x, (0,), before + 1)

    interpreter.launch((1,), kernel, (x,))
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("index", [2, -1])
def test_tile_wholly_outside(index):
    x = torch.zeros(6)
    with pytest.raises(InterpreterError, match=r"operation load: tile .* lies wholly outside"):
        evaluate(lambda a: ct.load(a, (index,), (4,), padding_mode=ZERO), x)
    with pytest.raises(InterpreterError, match=r"operation store: tile .* lies wholly outside"):
        evaluate(lambda a: ct.store(a, (index,), ct.zeros(4, ct.float32)), x)


def test_unchecked_bounds_that_are_violated():
    x = torch.zeros(6)
    assert values(lambda a: ct.load(a, (0,), (4,), check_bounds=False), x) == [0.0] * 4
    for body in (
        lambda a: ct.load(a, (1,), (4,), check_bounds=False),
        lambda a: ct.store(a, (1,), ct.zeros(4, ct.float32), check_bounds=False),
        lambda a: a.tiled_view(4).load(1, check_bounds=False),
        lambda a: ct.gather(a, ct.arange(8, dtype=ct.int32), check_bounds=False),
        lambda a: ct.scatter(a, -1, 0.0, check_bounds=False),
        lambda a: ct.atomic_add(a, 6, 1.0, check_bounds=False),
    ):
        with pytest.raises(InterpreterError, match="check_bounds=False, but"):
            evaluate(body, x)


def test_slice_with_dynamic_bounds():
    x = grid_of(8, 4)

    def body(a, start):
        part = a.slice(0, start, start + 3)
        return ct.load(part, (1, 0), (2, 4), padding_mode=ZERO) + part.shape[0]

    expected = torch.zeros(2, 4)
    expected[0] = x[4]
    assert torch.equal(elements(body, x, 2), expected + 3)


def test_slice_offset_beyond_32_bits() -> None:
    """Memory that is never touched: 3 GiB of addresses."""
    pool = torch.empty((3, 2**30), dtype=torch.int8)

    def body(a, start):
        return a.slice(0, start, start + 1)

    assert evaluate(body, pool, 1).ndim == 2
    with pytest.raises(InterpreterError, match="start times stride 1073741824 overflows"):
        evaluate(body, pool, 2)
    assert evaluate(lambda a, start: body(a, start.astype(ct.int64)), pool, 2).ndim == 2


@pytest.mark.parametrize("bounds", [(-1, 2), (8, 8), (3, 2), (0, 9)])
def test_bad_slice(bounds):
    with pytest.raises(InterpreterError, match=r"slice \[.*\] of array parameters\[0\]"):
        evaluate(lambda a, low, high: a.slice(0, low, high), grid_of(8, 4), *bounds)


def test_tiled_view():
    x = grid_of(5, 4)

    def body(a):
        view = a.tiled_view((2, 4), padding_mode=ZERO, traversal_steps=(1, 4))
        assert (view.tile_shape, view.traversal_steps) == ((2, 4), (1, 4))
        assert view.dtype == ct.float32 and view.num_tiles(0) == 5
        view.store((0, 0), ct.full((1, 4), -1.0, ct.float32))
        return view.load((4, 0))

    last = elements(body, x)
    assert last.tolist() == [[16.0, 17.0, 18.0, 19.0], [0.0] * 4]
    assert x[:2].eq(-1).all() and x[2:].ge(0).all()


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


ATOMICS = {"xchg": (5, [5, 5, 5]), "max": (2, [2, 2, 3]), "min": (2, [1, 2, 2])}
ATOMICS |= {"and": (2, [0, 2, 2]), "or": (4, [5, 6, 7]), "xor": (1, [0, 3, 2])}


@pytest.mark.parametrize("name", ATOMICS)
def test_atomic_operations(name):
    x, (update, expected) = torch.tensor([1, 2, 3], dtype=torch.int32), ATOMICS[name]
    operation = getattr(ct, f"atomic_{name}")

    def body(a):
        return operation(a, ct.arange(4, dtype=ct.int32), ct.full((), update, a.dtype))

    old = values(body, x)
    assert old[:3] == [1, 2, 3]
    assert x.tolist() == expected
