"""The language of kernels: control flow, builtins, helpers, static evaluation, printing."""

import threading
import types

import cuda.tile as ct
import pytest
import torch

from mla_var3.runtime import interpreter
from tests.unit.runtime.interpreter.interpreter_support import evaluate, values

TILE = 4


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
