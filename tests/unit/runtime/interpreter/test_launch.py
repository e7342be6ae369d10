"""Launching: grids, arguments, errors that say where; and the language of kernels."""

import importlib.metadata
import re
import threading
import types

import cuda.tile as ct
import pytest
import torch
from cuda.tile._execution import is_stub

from mla_var3.errors import InterpreterError, InvalidArgumentError, MissingToolError
from mla_var3.runtime import interpreter
from mla_var3.runtime.interpreter import require_pinned_cutile
from mla_var3.runtime.interpreter.cutile_api import IMPLEMENTATIONS
from mla_var3.runtime.interpreter.language import SUBSTITUTES
from tests.unit.runtime.interpreter.interpreter_support import (
    REFUSED,
    evaluate,
    public_objects,
    values,
)

TILE = 4
Const = ct.Constant[int]


@ct.kernel
def copy_tile(x, out):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (TILE,)))


@pytest.mark.parametrize("found", ["1.6.0", "1.7.1", None])
def test_other_cutile_version_is_refused(found, monkeypatch):
    def version(name: str) -> str:
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingToolError, match=re.escape("cuda-tile==1.7.0")) as caught:
        require_pinned_cutile()
    assert (found or "not installed") in str(caught.value)


def test_every_operation_is_implemented():
    known = IMPLEMENTATIONS | SUBSTITUTES
    stubs = {n: f for n, f in public_objects() if isinstance(f, types.FunctionType) and is_stub(f)}
    assert len(stubs) > 100
    missing = [name for name, stub in stubs.items() if stub not in known]
    assert [name for name in missing if not REFUSED.search(name)] == []


@pytest.mark.parametrize("grid", [(), (0,), (-1, 2), (1, 1, 1, 1), (1.0,), 4, (True,), "1", None])
def test_bad_grid(grid):
    with pytest.raises(InvalidArgumentError, match="grid: expected one to three positive integers"):
        interpreter.launch(grid, copy_tile, (torch.zeros(4), torch.zeros(4)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, device="meta"), "x: expected a tensor on the CPU, got one on meta"),
        (torch.zeros(4, dtype=torch.complex64), "x: expected a dtype that cuTile has"),
        (torch.zeros(4, 4).to_sparse(), "x: expected a strided tensor"),
        ("text", "x: expected a CPU tensor, a number"),
        (None, "x: expected a CPU tensor, a number"),
        ((1, "text"), r"x\[1\]: expected a CPU tensor"),
        ([1], r"x\[0\]: expected a CPU tensor"),
        (2**31, "x: expected an integer that fits int32"),
        (torch.zeros(1).expand(2**32), "x: expected a shape and strides that fit int32"),
    ],
)
def test_bad_argument(value, message):
    with pytest.raises(InvalidArgumentError, match=message):
        interpreter.launch((1,), copy_tile, (value, torch.zeros(4)))


def test_scalars_become_typed_and_constants_stay():
    seen = {}

    @ct.kernel
    def kernel(i, f, b, big: ct.ScalarInt64, size: Const, pair: ct.Constant[tuple[int, float]]):
        seen["dtypes"] = [str(value.dtype) for value in (i, f, b, big)]
        seen["float"] = f == f * 1.0 and str(f)
        seen["constants"] = (size, *pair)

    interpreter.launch((1,), kernel, (3, 0.1, True, 2**40, 8, (2, 0.5)))
    assert seen["dtypes"] == ["int32", "float32", "bool_", "int64"]
    assert seen["constants"] == (8, 2, 0.5)


def test_tuples_and_lists_of_arrays():
    out = torch.zeros(2, 4)

    @ct.kernel
    def kernel(pair: tuple[ct.Array, int], arrays, out):
        array, scale = pair
        last = ct.load(arrays[len(arrays) - 1], (0,), (4,))
        ct.store(out, (0, 0), (ct.load(array, (0,), (4,)) * scale).reshape((1, 4)))
        for i in range(len(arrays)):
            last = last + ct.load(arrays[i], (0,), (4,))
        ct.store(out, (1, 0), last[None, :])

    ones = torch.ones(4)
    interpreter.launch((1,), kernel, ((ones, 3), [ones, 2 * ones], out))
    assert out.tolist() == [[3.0] * 4, [5.0] * 4]
    for body in (lambda arrays: arrays[-1], lambda arrays: arrays[1], lambda arrays: [*arrays]):
        with pytest.raises(InterpreterError, match="a list of"):
            evaluate(body, [ones])


def test_default_device_is_not_used():
    x, out = torch.ones(4), torch.zeros(4)
    with torch.device("meta"):
        interpreter.launch((1,), copy_tile, (x, out))
    assert out.tolist() == [1.0] * 4


@ct.kernel
def fails_in_second_block(x, out):
    tile = ct.load(x, (ct.bid(0),), (TILE,))
    ct.store(out, (ct.bid(0),), tile)  # the line to be named


def test_error_names_kernel_block_operation_and_line():
    with pytest.raises(InterpreterError) as caught:
        interpreter.launch((3,), fails_in_second_block, (torch.zeros(12), torch.zeros(4)))
    message = str(caught.value)
    assert "kernel fails_in_second_block, block (1, 0, 0), operation store" in message
    assert "wholly outside array out of shape (4,)" in message
    line = fails_in_second_block._pyfunc.__code__.co_firstlineno + 3
    assert f"{__file__}:{line} in fails_in_second_block: ct.store(out" in message
    assert isinstance(caught.value.__cause__, InterpreterError)


def failing_helper(x):
    return ct.reshape(x, (3,))


def test_error_in_a_helper_names_both_lines():
    @ct.kernel
    def kernel(x):
        failing_helper(ct.load(x, (0,), (TILE,)))

    with pytest.raises(InterpreterError, match="operation reshape") as caught:
        interpreter.launch((1,), kernel, (torch.zeros(4),))
    for line in ("failing_helper: return ct.reshape(x, (3,))", "kernel: failing_helper(ct.load(x,"):
        assert f"in {line}" in str(caught.value)
    assert isinstance(caught.value.__cause__, ct.TileTypeError)


def test_unknown_operation_is_named(monkeypatch):
    monkeypatch.delitem(IMPLEMENTATIONS, ct.bid)
    with pytest.raises(InterpreterError, match="bid is not supported by the CPU interpreter"):
        evaluate(lambda: ct.bid(0))


def test_while_if_and_logic_on_dynamic_scalars():
    def collatz(n):
        steps = 0 * n
        while n != 1 and not n < 1:
            steps += 1
            if n % 2 == 0:
                n = n // 2
                continue
            n = 3 * n + 1
        return steps

    assert values(collatz, 27) == 111


def plain_helper(x, limit):
    total = ct.zeros((TILE,), ct.int32)
    for i in range(2):
        total = total + min(x, limit) * max(i, 1).astype(ct.int32)
    return total


@ct.function
def decorated_helper(x, limit):
    return plain_helper(x, limit) + max(x, 0)


helper_module = types.ModuleType("helper_module")
exec("def through_module(x, limit):\n    return max(min(x, limit), 0)", vars(helper_module))


def test_builtins_in_helpers():
    def nested(x, limit, inner=plain_helper):
        def local(y):
            return max(inner(x, limit), y)

        return local(decorated_helper(x, limit))

    x = torch.tensor([-3, 0, 5, 9], dtype=torch.int32)

    def body(array):
        tile = ct.load(array, (0,), (TILE,))
        return nested(tile, 6) + helper_module.through_module(tile, 6) + (lambda t: min(t, 1))(tile)

    plain = 2 * x.clamp(max=6)
    expected = torch.maximum(plain, plain + x.clamp(min=0)) + x.clamp(0, 6) + x.clamp(max=1)
    assert values(body, x) == expected.tolist()


def test_recursive_helper():
    def factorial(n):
        return 1 if n == 0 else max(n, 1) * factorial(n - 1)

    assert evaluate(lambda: factorial(5)) == 120


def test_host_code_at_the_same_time_is_not_affected():
    meeting = threading.Barrier(2, timeout=10)
    seen = []

    def host_thread() -> None:
        meeting.wait()
        seen.append((max(1, 2), list(range(2)), type(range(2)) is range))
        with pytest.raises(RuntimeError, match="Device functions can only be called from device"):
            ct.bid(0)
        seen.append("refused")
        meeting.wait()

    @ct.kernel
    def kernel():
        meeting.wait()
        meeting.wait()

    thread = threading.Thread(target=host_thread)
    thread.start()
    interpreter.launch((1,), kernel, ())
    thread.join()
    assert seen == [(2, [0, 1], True), "refused"]


def test_printing(capsys):
    def body():
        x = ct.arange(2, dtype=ct.float32) / 2
        ct.print("x:", x, sep="", end=";\n")
        print(f"{x[None, :]:.2f} {ct.bid(0)} {x > 0.1}")

    evaluate(body)
    assert capsys.readouterr().out == ("x:[0.000000, 0.500000];\n[[0.00, 0.50]] 0 [0, 1]\n")
