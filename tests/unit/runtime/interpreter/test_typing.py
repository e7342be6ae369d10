"""The interpreter accepts, rejects and types operations as cuTile's compiler does.

Each case is a kernel that goes through the compiler's front end (no GPU, no assembler) and through
the interpreter. Both must give a tile of the same dtype and shape, or both must refuse.
"""

import io
import itertools
import linecache
import math
from collections.abc import Iterable
from typing import Any

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

from mla_var3.errors import InterpreterError
from mla_var3.runtime import interpreter

INTEGERS = ["bool_", "int8", "int32", "int64", "uint8"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "tfloat32", "float8_e4m3fn"]
ALL_DTYPES = INTEGERS + FLOATS
MAIN_DTYPES = [name for name in ALL_DTYPES if not name.endswith("64") and name != "tfloat32"]
# The front end lets float8 and tfloat32 pass where the assembler refuses them.
COMPUTABLE = [name for name in ALL_DTYPES if name not in ("tfloat32", "float8_e4m3fn")]
ALL_PAIRS = list(itertools.product(MAIN_DTYPES, MAIN_DTYPES))
SOME_PAIRS = [
    *((name, name) for name in ALL_DTYPES),
    ("int32", "float32"),
    ("float32", "bfloat16"),
    ("bool_", "int32"),
]
COMPUTABLE_PAIRS = [pair for pair in [*ALL_PAIRS, *SOME_PAIRS] if set(pair) <= set(COMPUTABLE)]
NUMBERS = ["True", "3", "-3", "300", "2**40", "2.5", "math.inf"]

# Expressions of x and y, with the pairs of dtypes to try.
BINARY = {
    **dict.fromkeys(
        ["x + y", "x / y", "x & y", "max(x, y)", "ct.where(ct.bid(0) == 0, x, y)"], ALL_PAIRS
    ),
    **dict.fromkeys(["x < y", "x == y"], COMPUTABLE_PAIRS),
    **dict.fromkeys(
        [
            *("x - y", "x * y", "x // y", "x % y", "x ** y", "x ^ y", "x << y", "divmod(x, y)[1]"),
            *("ct.cdiv(x, y)", "min(x, y)", "ct.atan2(x, y)", "ct.add(x, y, flush_to_zero=True)"),
            "ct.truediv(x, y, rounding_mode=ct.RoundingMode.APPROX)",
            "ct.sub(x, y, rounding_mode=ct.RoundingMode.APPROX)",
            "ct.maximum(x, y, flush_to_zero=True)",
        ],
        SOME_PAIRS,
    ),
}
MATRICES = {
    **dict.fromkeys(["x @ y", "ct.mma(x, y, ct.zeros((4, 4), ct.float32))"], ALL_PAIRS),
    **dict.fromkeys(
        [
            "ct.mma(x, y, ct.zeros((4, 4), ct.float16))",
            "ct.mma(x, y, ct.zeros((4, 4), ct.int32))",
            "ct.mma(x, y, ct.zeros((4, 4), ct.float32), use_fast_acc=True)",
            *("ct.cat((x, y), 0)", "ct.insert(x, (0, 0), y)"),
        ],
        SOME_PAIRS,
    ),
}
WITH_NUMBERS = ["x + y", "x / y", "x & y", "x ** y", "x >> y", "x == y", "max(x, y)", "x % y"]
UNARY = [
    *("-x", "+x", "~x", "abs(x)", "ct.exp(x)", "ct.floor(x)", "ct.isnan(x)", "ct.sum(x, 1)"),
    "ct.exp(x, rounding_mode=ct.RoundingMode.FULL)",
    "ct.exp2(x, flush_to_zero=True)",
    "ct.sqrt(x, rounding_mode=ct.RoundingMode.APPROX)",
    "ct.sum(x, flush_to_zero=True)",
    "ct.max(x, (0, 1), keepdims=True)",
    "ct.argmax(x, 0)",
    "ct.bitcast(x, ct.int32)",
    "ct.full((4,), x.extract((0, 0), ()), ct.float16)",
]
SHAPES = [
    "ct.zeros((3,), ct.float32)",
    "ct.zeros((0,), ct.float32)",
    "ct.zeros(8, torch.bfloat16)",
    "ct.arange(6, dtype=ct.int32)",
    "ct.arange(8, dtype=ct.int32).reshape((2, -1))",
    "ct.arange(8, dtype=ct.int32).reshape((3, -1))",
    "ct.arange(8, dtype=ct.int32).reshape((-1, -1))",
    "ct.arange(8, dtype=ct.int32).reshape((2, 2))",
    "ct.zeros((2, 4, 8), ct.int8).permute((2, 0, -2))",
    "ct.zeros((2, 4), ct.int8).permute((0, 0))",
    "ct.zeros((2, 4), ct.int8).permute((0,))",
    "ct.zeros((2,), ct.int8).transpose()",
    "ct.zeros((2, 4, 8), ct.int8).transpose()",
    "ct.zeros((2, 4, 8), ct.int8).transpose(0, -1)",
    "ct.zeros((2, 4, 8), ct.int8).transpose(0)",
    "ct.broadcast_to(ct.zeros((4, 1), ct.int8), (2, 4, 8))",
    "ct.broadcast_to(ct.zeros((4, 2), ct.int8), (4, 8))",
    "ct.broadcast_to(1.5, (4,))",
    "ct.zeros((4,), ct.int32) + ct.zeros((2,), ct.int32)",
    "ct.zeros((4,), ct.int32)[None, ..., None]",
    "ct.zeros((4,), ct.int32)[None]",
    "ct.zeros((4,), ct.int32)[0]",
    "ct.zeros((4,), ct.int32)[0:2]",
    "ct.zeros((4,), ct.int32)[:, :]",
    "ct.zeros((4, 8), ct.int32).extract((1, 1), (2, 4))",
    "ct.zeros((4, 8), ct.int32).extract((1, 1), ())",
    "ct.zeros((4,), ct.int32).extract((2,), (2,))",
    "ct.zeros((4,), ct.int32).extract((0,), (8,))",
    "ct.zeros((4,), ct.int32).extract((0, 0), (2,))",
    "ct.cat((ct.zeros((4,), ct.int8), ct.zeros((8,), ct.int8)), 0)",
    "ct.cat((ct.zeros((4,), ct.int8), ct.zeros((4, 1), ct.int8)), 0)",
    "ct.expand_dims(ct.zeros((4,), ct.int8), -1)",
    "ct.expand_dims(ct.zeros((4,), ct.int8), 3)",
    "ct.sum(ct.zeros((4,), ct.int32), 1)",
    "ct.sum(ct.zeros((4, 4), ct.int32), (0, -2))",
    "ct.argmax(ct.zeros((4, 4), ct.int32), keepdims=True)",
    "ct.zeros((1, 1), ct.int32).item()",
    "ct.zeros((2,), ct.int32).item()",
    "ct.astile(((1, 2), (3, ct.bid(0))), dtype=ct.float16)",
    "ct.astile(((1, 2), (3,)), dtype=ct.float16)",
    "ct.zeros((4, 8), ct.float16) @ ct.zeros((4, 8), ct.float16)",
    "ct.zeros((4, 8), ct.float16) @ ct.zeros((8,), ct.float16)",
    "ct.zeros((8,), ct.float16) @ ct.zeros((8, 4), ct.float16)",
    "ct.zeros((2, 4, 8), ct.float16) @ ct.zeros((8, 4), ct.float16)",
    "ct.mma(ct.zeros((4,), ct.float16), ct.zeros((4, 4), ct.float16), ct.zeros(4, ct.float32))",
    "ct.bid(0) * 2",
    "ct.bid(3)",
    "ct.cdiv(ct.bid(0), 4)",
    "ct.bid(0) + 2**31",
    "ct.ones((4,), ct.float32).astype(ct.float8_e8m0fnu)",
    "ct.ones((4,), ct.int32).astype(ct.float32, rounding_mode=ct.RoundingMode.RZ)",
    "ct.float16(ct.bid(0)) + 1",
    "ct.zeros((4,), ct.float32).dtype(ct.bid(0))",
    "int(ct.bid(0))",
]

_numbers = itertools.count()


def kernel_of(statements: str, parameters: str = "", **names: Any) -> Any:
    """A kernel with the given body; the compiler finds its source by file name."""
    source = f"@ct.kernel\ndef kernel({parameters}):\n    {statements}\n"
    file_name = f"<typing case {next(_numbers)}>"
    linecache.cache[file_name] = (len(source), None, source.splitlines(True), file_name)
    namespace = {"ct": ct, "math": math, "torch": torch, **names}
    exec(compile(source, file_name, "exec"), namespace)
    return namespace["kernel"]


def by_compiler(kernel: Any, constraints: list[Any]) -> None:
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v2(), symbol="kernel")
    target = io.BytesIO()
    export_kernel(kernel, [signature], target, gpu_code=None, output_format="tileir_bytecode")


def outcomes(statements: str) -> tuple[Any, Any]:
    """What compiler and interpreter make of `result`: its dtype and shape, or "rejected"."""
    seen: list[Any] = []

    def note(result: Any) -> None:
        typed = hasattr(result, "dtype")
        seen.append((str(result.dtype), tuple(result.shape)) if typed else type(result).__name__)

    # Printed, so that the compiler does not drop the computation before it looks at it closely.
    kernel = kernel_of(f"{statements}; ct.static_eval(note(result)); print(result)", note=note)
    try:
        by_compiler(kernel, [])
    except Exception:
        seen = ["rejected"]
    try:
        interpreter.launch((1,), kernel, ())
    except InterpreterError:
        seen.append("rejected")
    compiled, interpreted = seen
    return compiled, interpreted


def differences(cases: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Cases in which the interpreter does not do what the compiler does."""
    found = {}
    for statements in cases:
        compiled, interpreted = outcomes(statements)
        if compiled != interpreted:
            found[statements] = (compiled, interpreted)
    return found


@pytest.mark.parametrize("expression", BINARY)
def test_two_tiles(expression):
    make = "x = ct.ones((2, 4), ct.{}); y = ct.ones((4,), ct.{}); result = {}"
    assert differences(make.format(*pair, expression) for pair in BINARY[expression]) == {}


@pytest.mark.parametrize("expression", MATRICES)
def test_two_matrices(expression):
    make = "x = ct.ones((4, 4), ct.{}); y = ct.ones((4, 4), ct.{}); result = {}"
    assert differences(make.format(*pair, expression) for pair in MATRICES[expression]) == {}


@pytest.mark.parametrize("expression", WITH_NUMBERS)
def test_tile_and_number(expression):
    cases = [
        f"{x} = ct.ones((4,), ct.{dtype}); {y} = {number}; result = {expression}"
        for dtype, number in itertools.product(MAIN_DTYPES, NUMBERS)
        if dtype in COMPUTABLE
        for x, y in ("xy", "yx")
    ]
    assert differences(cases) == {}


@pytest.mark.parametrize("expression", UNARY)
def test_one_tile(expression):
    cases = [f"x = ct.ones((2, 4), ct.{dtype}); result = {expression}" for dtype in COMPUTABLE]
    assert differences(cases) == {}


def test_casts():
    pairs = itertools.product(ALL_DTYPES, ALL_DTYPES)
    cases = [f"result = ct.ones((4,), ct.{source}).astype(ct.{to})" for source, to in pairs]
    assert differences(cases) == {}


def test_shapes():
    assert differences(f"result = {expression}" for expression in SHAPES) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_stores(dtype):
    """Which dtypes may be stored to an array without a cast."""
    element = getattr(ct, str(dtype).removeprefix("torch."))
    constraint = ArrayConstraint(
        element,
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
    )
    found = {}
    for name in ALL_DTYPES:
        kernel = kernel_of(f"ct.store(array, (0,), ct.ones((4,), ct.{name}))", "array")
        accepted = []
        for run in (
            lambda: by_compiler(kernel, [constraint]),  # noqa: B023
            lambda: interpreter.launch((1,), kernel, (torch.zeros(4, dtype=dtype),)),  # noqa: B023
        ):
            try:
                run()
                accepted.append(True)
            except (ct.TileError, InterpreterError):
                accepted.append(False)
        if accepted[0] != accepted[1]:
            found[name] = accepted
    assert found == {}
