"""The cuTile runtime without a GPU: what it caches, passes on, refuses and reports."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, KernelCompileError
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.stage import Constraints, Tiling

ct = pytest.importorskip("cuda.tile")


from mla_var3.runtime import ct_kernel  # noqa: E402
from mla_var3.runtime.ct_kernel import CtKernel, hinted_kernel, signature_of  # noqa: E402

Const = ct.Constant[int]


@ct.kernel
def add_number(x, out, number: float, SIDE: Const):
    tile = ct.load(x, (ct.bid(0),), (SIDE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(out, (ct.bid(0),), tile + number)


@ct.kernel
def narrowing(x, out, number: float, SIDE: Const):
    wide = ct.zeros((SIDE,), dtype=ct.float32)
    ct.store(out, (0,), wide)  # float32 into bfloat16 needs an explicit cast


@dataclass
class AddTiling(Tiling):
    side: int = 8
    occupancy: int | None = None
    num_worker_warps: int | None = None

    def validate(self, pd: Any) -> Constraints:
        return Constraints((self.side <= 32, f"side: expected at most 32, got {self.side}"))


def make_kernel(
    function: Any = add_number,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    calls: list[tuple[str, int]] | None = None,
    **tiling: Any,
) -> CtKernel:
    """Notes in `calls` when the parts of a launch are built."""
    x = torch.arange(20.0, device=device).to(dtype)
    out = torch.zeros_like(x)
    noted = [] if calls is None else calls

    def grid_fn(chosen: AddTiling) -> tuple[int]:
        noted.append(("grid", chosen.side))
        return (ct.cdiv(20, chosen.side),)

    def args_fn(chosen: AddTiling) -> Sequence[Any]:
        noted.append(("args", chosen.side))
        return (x, out, 0.5, chosen.side)

    return CtKernel(
        kernel_fn=function,
        tiling=AddTiling(**tiling),
        input_tensors=[x],
        output_tensors=[out],
        algorithmic_flops_bytes_fn=lambda chosen: (20.0, 160.0),
        grid_fn=grid_fn,
        args_fn=args_fn,
    )


def wanted() -> torch.Tensor:
    return torch.arange(20.0) + 0.5


@pytest.mark.parametrize("how", ["mutated", "replaced"])
def test_another_tiling_is_noticed(how):
    """Also when the autotuner or a user changes a field of the very same object."""
    calls: list[tuple[str, int]] = []
    kernel = make_kernel(calls=calls)
    kernel.launch()
    if how == "mutated":
        kernel.tiling.side = 16
    else:
        kernel.tiling = AddTiling(side=16)
    kernel.output_tensors[0].zero_()
    kernel.launch()
    assert torch.equal(kernel.output_tensors[0], wanted())
    assert sorted(calls) == [("args", 8), ("args", 16), ("grid", 8), ("grid", 16)]


def test_a_copy_launches_with_its_own_arguments():
    kernel, other = make_kernel(), torch.zeros(20)
    kernel.launch()
    replace(kernel, args_fn=lambda tiling: (kernel.input_tensors[0], other, 1.0, 8)).launch()
    assert torch.equal(other, torch.arange(20.0) + 1.0)


def test_an_illegal_tiling_is_refused_even_after_a_good_launch():
    kernel = make_kernel()
    kernel.launch()
    kernel.tiling.side = 64
    with pytest.raises(InvalidArgumentError, match="side: expected at most 32, got 64"):
        kernel.launch()
    with pytest.raises(InvalidArgumentError, match="side: expected at most 32, got 64"):
        kernel.compile("sm_90")


@pytest.mark.parametrize("hints", [{}, {"occupancy": 1, "num_worker_warps": 8}])
def test_hints_are_passed_to_the_compiler(hints):
    seen: list[dict[str, int]] = []
    function = SimpleNamespace(_pyfunc=add_number._pyfunc)
    function.replace_hints = lambda **given: seen.append(given) or add_number
    make_kernel(function, **hints).launch()
    assert seen == [hints]


def test_two_threads_get_the_same_kernel_with_hints():
    """The code that a CUDA graph captured belongs to the kernel object, which must not go."""

    both = threading.Barrier(2, timeout=5.0)
    function = SimpleNamespace(replace_hints=lambda **hints: (both.wait(), object())[1])
    hints = {"occupancy": 2}
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(hinted_kernel, [function] * 2, [hints] * 2)
    assert one is other is hinted_kernel(function, hints)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], CtKernel]:
    """Makes a kernel whose launch on "cuda" calls the given function instead of cuTile's."""

    def make(launch: Any) -> CtKernel:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
        monkeypatch.setattr(ct_kernel.ct, "launch", launch)
        kernel = make_kernel()
        kernel.output_tensors = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
        return kernel

    return make


def test_a_launch_on_cuda_goes_to_the_current_stream(on_gpu):
    seen: list[tuple[Any, ...]] = []
    on_gpu(lambda *arguments, **options: seen.append((*arguments, options))).launch()
    [(stream, grid, _, args, options)] = seen
    assert options == {"programmatic_dependent_launch": False}
    assert (stream, grid, args[2:]) == ("the stream", (3,), (0.5, 8))


def test_a_kernel_that_does_not_compile_at_its_first_launch(on_gpu):
    """The just-in-time compiler's error is one of ours, like that of `compile`."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise ct.TileError("no room in shared memory", None)

    with pytest.raises(KernelCompileError, match="add_number"):
        on_gpu(fail).launch()


def test_a_compile_error_is_ours_and_names_kernel_and_target(capfd):
    kernel = make_kernel(narrowing, dtype=torch.bfloat16, device="meta")
    with pytest.raises(KernelCompileError, match="^narrowing for sm_90: ") as caught:
        kernel.compile("sm_90")
    assert caught.value.__cause__ is not None
    assert capfd.readouterr().err == ""
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n", "stderr must come back"


def parameters(*args: Any, kernel: Any = add_number) -> Any:
    return signature_of(kernel, args).parameters


def array(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("tensor", "constant", "divisible", "sizes"),
    [
        (array(32, 64), (None, 1), (8, 1), (16, 16)),
        (array(3, 64), (None, 1), (8, 1), (1, 16)),
        (array(16, 9), (None, 1), (1, 1), (16, 1)),
        (array(16, 4, dtype=torch.float32), (None, 1), (4, 1), (16, 1)),
        (array(8, 16).T, (1, None), (1, 8), (16, 1)),
        (array(1, 16).expand(4, 16), (None, 1), (8, 1), (1, 16)),
    ],
    ids=["aligned", "odd-rows", "odd-columns", "float32", "transposed", "expanded"],
)
def test_what_an_array_promises(tensor, constant, divisible, sizes):
    """Strides of 1 and of whole 16-byte steps, sizes of whole 16s: all that the compiler needs."""
    promise = parameters(tensor, array(20), 0.5, 8)[0]
    steps = (promise.stride_constant, promise.stride_divisible_by, promise.shape_divisible_by)
    assert tuple(map(tuple, steps)) == (constant, divisible, sizes)
    assert promise.ndim == tensor.ndim


@ct.kernel
def wide_number(x, out, number: ct.ScalarInt64, SIDE: Const):
    """As `add_number`, with a number beyond 32 bits."""


def test_numbers_and_arrays_have_the_types_of_a_launch_on_a_gpu():
    wide = parameters(array(20), array(20), 1, 8, kernel=wide_number)[2]
    assert (wide.dtype, parameters(array(20), array(20), 1, 8)[2].dtype) == (ct.int64, ct.int32)
    for name in ("uint8", "uint64", "int16", "float64", "float8_e5m2", "bool"):
        given = array(16, dtype=getattr(torch, name))
        assert parameters(given, array(20), 0.5, 8)[0].ndim == 1
    with pytest.raises(InvalidArgumentError, match=r"dtypes that cuTile has, got torch\.complex64"):
        parameters(array(16, dtype=torch.complex64), array(20), 0.5, 8)


def test_wrong_arguments_are_named():
    for args, message in (
        ((), "expected 4 kernel arguments, got 2$"),
        (("half", 8), "expected tensors, ints, floats or constants, got str"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"^args_fn: {message}"):
            parameters(array(20), array(20), *args)


@pytest.mark.parametrize(
    ("design", "fields", "names"),
    [
        ("flash_attention", {}, "flash_attention tile_ops"),
        ("flash_mla", {}, "flash_mla tile_ops"),
        ("mla_var6_plus", {"n": 1}, "attention_block_specialized tile_ops"),
    ],
)
def test_source_files_follow_the_device_helpers(design, fields, names):
    plan = plan_class(find_kernel(design))(b=1, s=1, t=8, h=8, **fields)
    kernel = next(plan.plan(*plan.prepare_inputs("meta")).kernels())
    files = kernel.source_files()
    assert {file.stem for file in files} == set(names.split())
    assert all(file.is_file() for file in files)
    assert files == sorted(files)
