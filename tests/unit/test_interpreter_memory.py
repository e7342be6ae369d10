"""Memory: loads, stores, views, gather and scatter, raw memory, atomics."""

from __future__ import annotations

import math
from typing import Any

import cuda.tile as ct
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter

from .interpreter_support import elements, evaluate, values

DTYPES = [
    torch.bool,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
ZERO = ct.PaddingMode.ZERO


def grid_of(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


# ------------------------------------------------------------------------------- load and store


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_moved(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0, 1, 1, 1]).to(dtype)
    out = torch.zeros(7).to(dtype)

    @ct.kernel
    def kernel(x, out):
        tile = ct.load(x, (0,), (8,), padding_mode=ZERO)
        tile = ct.where(tile == tile, tile, tile)
        ct.store(out, (0,), ct.cat((ct.extract(tile, (0,), (4,)), ct.extract(tile, (1,), 4)), 0))
        index = ct.arange(4, dtype=ct.int32)
        ct.scatter(out, index + 5, ct.gather(x, index))

    interpreter.launch((1,), kernel, (x, out))
    padding = torch.zeros(1).to(dtype).float().item()
    expected = [*x.float().tolist(), *x.float().tolist()[:2]]
    assert out.float().tolist() == expected
    assert values(lambda a: ct.load(a, (1,), (4,), padding_mode=ZERO).astype(ct.float32), x) == [
        x.float().tolist()[4],
        *[padding] * 3,
    ]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (ct.PaddingMode.ZERO, 0.0),
        (ct.PaddingMode.NAN, math.nan),
        (ct.PaddingMode.POS_INF, math.inf),
        (ct.PaddingMode.NEG_INF, -math.inf),
        (ct.PaddingMode.UNDETERMINED, math.nan),
    ],
    ids=lambda mode: getattr(mode, "name", ""),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_modes(mode: Any, expected: float, dtype: torch.dtype) -> None:
    x = grid_of(3, 3).to(dtype)
    tile = elements(lambda a: ct.load(a, (1, 0), (2, 4), padding_mode=mode), x).float()
    wanted = torch.full((2, 4), expected)
    wanted[0, :3] = x[2].float()
    torch.testing.assert_close(tile, wanted, equal_nan=True)


def test_negative_zero_padding() -> None:
    mode = ct.PaddingMode.NEG_ZERO
    tile = elements(lambda a: ct.load(a, (0,), (4,), padding_mode=mode), torch.ones(3))
    assert torch.signbit(tile).tolist() == [False, False, False, True]


def test_undetermined_padding_of_integers_is_poison() -> None:
    x = torch.ones(3, dtype=torch.int32)
    assert values(lambda a: ct.load(a, (0,), (4,)), x) == [1, 1, 1, 2**31 - 1]


def test_float_padding_of_an_integer_array() -> None:
    x = torch.ones(3, dtype=torch.int32)
    with pytest.raises(InterpreterError, match="padding mode NAN needs a float array"):
        evaluate(lambda a: ct.load(a, (0,), (4,), padding_mode=ct.PaddingMode.NAN), x)


def test_load_orders() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    fortran = elements(lambda a: ct.load(a, (1, 0, 0), (2, 2, 2), order="F"), x)
    assert torch.equal(fortran, x.permute(2, 1, 0)[2:4, 0:2])
    custom = elements(lambda a: ct.load(a, (0, 1, 0), (1, 2, 2), order=(0, -1, 1)), x)
    assert torch.equal(custom, x.permute(0, 2, 1)[:1, 2:4, :2])


def test_store_order_and_clipping() -> None:
    out = torch.zeros(3, 5)

    @ct.kernel
    def kernel(out):
        tile = ct.arange(8, dtype=ct.float32).reshape((4, 2)) + 1
        ct.store(out, (1, 1), tile, order=(1, 0))

    interpreter.launch((1,), kernel, (out,))
    expected = torch.zeros(3, 5)
    expected[2, 4] = 1.0
    assert torch.equal(out, expected)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    tile=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    index=st.tuples(st.integers(-2, 9), st.integers(-2, 9)),
)
def test_load_and_store_agree_with_slices(
    shape: tuple[int, int], tile: tuple[int, int], index: tuple[int, int]
) -> None:
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


def test_loaded_tile_does_not_change_with_the_array() -> None:
    x = torch.arange(4.0)

    @ct.kernel
    def kernel(x):
        before = ct.load(x, (0,), (4,))
        ct.store(x, (0,), before * 0)
        ct.store(x, (0,), before + 1)

    interpreter.launch((1,), kernel, (x,))
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("index", [2, -1])
def test_tile_wholly_outside(index: int) -> None:
    x = torch.zeros(6)
    with pytest.raises(InterpreterError, match=r"operation load: tile .* lies wholly outside"):
        evaluate(lambda a: ct.load(a, (index,), (4,), padding_mode=ZERO), x)
    with pytest.raises(InterpreterError, match=r"operation store: tile .* lies wholly outside"):
        evaluate(lambda a: ct.store(a, (index,), ct.zeros(4, ct.float32)), x)


def test_unchecked_bounds_that_are_violated() -> None:
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


def test_scalars_in_and_out() -> None:
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert values(lambda a: ct.load(a, (1, 2), ()), x) == 5
    evaluate(lambda a: ct.store(a, (0, 1), 7), x)
    assert x.tolist() == [[0, 7, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("dtype", "tile_dtype", "allowed"),
    [
        (torch.bfloat16, ct.float32, False),
        (torch.float16, ct.float32, False),
        (torch.float16, ct.bfloat16, False),
        (torch.int32, ct.float32, False),
        (torch.int32, ct.int64, False),
        (torch.int32, ct.uint32, False),
        (torch.float32, ct.bfloat16, True),
        (torch.float32, ct.int32, True),
        (torch.int64, ct.int32, True),
        (torch.int32, ct.bool_, True),
    ],
)
def test_implicit_casts_on_store(dtype: torch.dtype, tile_dtype: Any, allowed: bool) -> None:
    out = torch.zeros(4, dtype=dtype)
    index = ct.int32
    stores = [
        lambda a: ct.store(a, (0,), ct.ones((4,), tile_dtype)),
        lambda a: a.tiled_view(4).store(0, ct.ones((4,), tile_dtype)),
        lambda a: ct.scatter(a, ct.arange(4, dtype=index), ct.ones((4,), tile_dtype)),
        lambda a: a.get_raw_memory().store_offset(0, ct.ones((), tile_dtype)),
    ]
    for store in stores:
        if allowed:
            evaluate(store, out)
        else:
            with pytest.raises(InterpreterError, match="cannot implicitly cast"):
                evaluate(store, out)
    assert out.tolist() == [1 if allowed else 0] * 4


def test_constant_out_of_range_on_store() -> None:
    with pytest.raises(InterpreterError, match="300 is out of range of int8"):
        evaluate(lambda a: ct.store(a, 0, 300), torch.zeros(1, dtype=torch.int8))
    with pytest.raises(InterpreterError, match=r"cannot implicitly cast 1.5 to int32"):
        evaluate(lambda a: ct.store(a, 0, 1.5), torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda a: ct.load(a, (0,), (2, 2)), r"index \(0,\) does not match the rank 2"),
        (lambda a: ct.load(a, (0, 0), (2,)), "does not match the rank 2"),
        (lambda a: ct.load(a, (0, 0), (3, 2)), "3 is not a power of two"),
        (lambda a: ct.load(a, (0, 0), (1 << 13, 1 << 12)), "has more than"),
        (lambda a: ct.load(a, (0, 0), (2, 2), order=(0, 0)), "names an axis twice"),
        (lambda a: ct.load(a, (0, 0), (2, 2), order="A"), "order must be"),
        (lambda a: ct.load(a, (0, 0.0), (2, 2)), "signed integer scalar"),
        (lambda a: ct.load(a, (0, 0), (2, 2), latency=11), "Latency must be between 1 and 10"),
        (lambda a: ct.load(a, (0, 0), (2, 2), memory_order=ct.MemoryOrder.RELEASE), "memory order"),
        (lambda a: ct.store(a, (0, 0), ct.zeros((4,), ct.float32)), "of rank 2"),
        (lambda a: ct.load(ct.bid(0), (0,), (2,)), "expected an array"),
        (lambda a: a[0, 0], "not subscriptable"),
        (lambda a: ct.num_tiles(a, 2, (2, 2)), "out of range"),
    ],
)
def test_bad_load_or_store(body: Any, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        evaluate(body, torch.zeros(4, 4))


def test_num_tiles() -> None:
    x = torch.zeros(5, 9)
    assert values(lambda a: ct.num_tiles(a, 1, (2, 4)), x) == 3
    assert values(lambda a: ct.num_tiles(a, 1, (2, 4), order="F"), x) == 2


# --------------------------------------------------------------------------- slices and tiled views


def test_slice_with_dynamic_bounds() -> None:
    x = grid_of(8, 4)

    def body(a, start):
        part = a.slice(0, start, start + 3)
        return ct.load(part, (1, 0), (2, 4), padding_mode=ZERO) + part.shape[0]

    expected = torch.zeros(2, 4)
    expected[0] = x[4]
    assert torch.equal(elements(body, x, 2), expected + 3)


@pytest.mark.parametrize("bounds", [(-1, 2), (8, 8), (3, 2), (0, 9)])
def test_bad_slice(bounds: tuple[int, int]) -> None:
    with pytest.raises(InterpreterError, match=r"slice \[.*\] of array parameters\[0\]"):
        evaluate(lambda a, low, high: a.slice(0, low, high), grid_of(8, 4), *bounds)


def test_tiled_view() -> None:
    x = grid_of(5, 4)

    def body(a):
        view = a.tiled_view((2, 4), padding_mode=ZERO, traversal_steps=(1, 4))
        assert view.tile_shape == (2, 4)
        assert view.traversal_steps == (1, 4)
        assert view.dtype == ct.float32
        assert view.num_tiles(0) == 5
        view.store((0, 0), ct.full((1, 4), -1.0, ct.float32))
        return view.load((4, 0))

    last = elements(body, x)
    assert last.tolist() == [[16.0, 17.0, 18.0, 19.0], [0.0] * 4]
    assert x[:2].eq(-1).all() and x[2:].ge(0).all()


def test_scalar_tiled_view() -> None:
    x = torch.arange(4.0)
    assert values(lambda a: a.tiled_view(()).load(2), x) == 2.0
    evaluate(lambda a: a.tiled_view(()).store(1, 9.0), x)
    assert x.tolist() == [0.0, 9.0, 2.0, 3.0]


def test_tiled_view_atomic_stores() -> None:
    x = torch.tensor([1, 2, 3], dtype=torch.int32)

    def body(a):
        view = a.tiled_view(4)
        view.atomic_store_add(0, ct.arange(4, dtype=ct.int32))
        view.atomic_store_max(0, 4)
        view.atomic_store_xor(0, ct.full((4,), 1, ct.int32))

    evaluate(body, x)
    assert x.tolist() == [5, 5, 4]
    with pytest.raises(InterpreterError, match="wholly outside"):
        evaluate(lambda a: a.tiled_view(4).atomic_store_add(1, 1), x)


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


def test_scatter_ignores_what_is_outside() -> None:
    x = torch.zeros(3)

    def body(a):
        index = ct.arange(8, dtype=ct.int32) - 4
        ct.scatter(a, index, index.astype(ct.float32) + 1, mask=index != 1)

    evaluate(body, x)
    assert x.tolist() == [1.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda a: ct.gather(a, 0), "needs 2 indices, got 1"),
        (lambda a: ct.gather(a, (0, 0.0)), "integer dtype"),
        (lambda a: ct.gather(a, (0, 0), mask=1), "mask must be of dtype bool"),
        (lambda a: ct.gather(a, (0, 0), mask=ct.ones((2,), ct.bool_)), "does not broadcast"),
        (lambda a: ct.gather(a, (0, 0), padding_value=ct.zeros(2, ct.float32)), "not broadcast"),
        (lambda a: ct.scatter(a, (0, 0), ct.zeros((2,), ct.float32)), "does not broadcast"),
    ],
)
def test_bad_gather_or_scatter(body: Any, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        evaluate(body, torch.zeros(4, 4))


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


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (lambda: (ct.Slice(0, 4), ct.Slice(0, 4)), "exactly one index must be a tile"),
        (lambda: (ct.arange(4, dtype=ct.int32), ct.Slice(0, 3)), "power of two"),
        (lambda: (ct.zeros((2, 2), ct.int32), ct.Slice(0, 4)), "must be a 1-D tile"),
        (lambda: (ct.arange(4, dtype=ct.int32),), "one entry per axis"),
        (lambda: (ct.arange(4, dtype=ct.int32) + 9, ct.Slice(0, 4)), "wholly outside"),
    ],
)
def test_bad_advanced_index(index: Any, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        evaluate(lambda a: ct.load_advanced_indexing(a, index()), grid_of(4, 6))


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


# -------------------------------------------------------------------------------------- atomics


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


def test_compare_and_swap() -> None:
    x = torch.tensor([0, 1, 0], dtype=torch.int32)

    def body(a):
        index = ct.astile((0, 0, 1, 3), dtype=ct.int32)
        return ct.atomic_cas(a, index, 0, ct.arange(4, dtype=ct.int32) + 7)

    assert values(body, x) == [0, 7, 1, 0]
    assert x.tolist() == [7, 1, 0]


def test_masked_raw_atomics() -> None:
    x = torch.ones(4)

    def body(a):
        index = ct.arange(4, dtype=ct.int32)
        raw = a.get_raw_memory()
        raw.atomic_add_offset(index, 1.0, mask=index < 2)
        return raw.atomic_cas_offset(index, 2.0, 5.0, mask=index != 1)

    assert values(body, x) == [2.0, 2.0, 1.0, 1.0]
    assert x.tolist() == [5.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda a: ct.atomic_max(a, 0, 1.0), "atomic max does not support dtype float32"),
        (lambda a: ct.atomic_xor(a, 0, 1), "atomic xor does not support dtype float32"),
        (lambda a: ct.atomic_add(a, 0, ct.zeros((), ct.float64)), "cannot implicitly cast"),
        (lambda a: ct.atomic_add(a, 0, 1.0, memory_order=ct.MemoryOrder.WEAK), "memory order"),
    ],
)
def test_bad_atomic(body: Any, message: str) -> None:
    with pytest.raises(InterpreterError, match=message):
        evaluate(body, torch.zeros(4))


def test_bitwise_atomic_needs_the_same_dtype() -> None:
    with pytest.raises(InterpreterError, match="needs an update of dtype int64"):
        evaluate(lambda a: ct.atomic_or(a, 0, 1), torch.zeros(4, dtype=torch.int64))
