"""Launching CuTe DSL programs without a GPU: the GPU is a Python function."""

import ctypes
import dataclasses
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.cute import launch as cute_launch
from mla_var3.runtime.cute.arguments import Int64Arg, kinds_of
from mla_var3.runtime.cute.launch import CuteProgram, RepeatedLaunch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.runtime import cute_kernel
from mla_var3.runtime.cute import cache as cute_cache
from mla_var3.runtime.cute_kernel import CuteKernel, compile_program
from tests.unit.runtime.cute.cute_support import ScalePlan, ScaleTiling, empty, scale_add


class FakeDevice:
    """The entry of a program: reads its arguments as compiled host code would, and notes them."""

    def __init__(self, types: list[Any]) -> None:
        self.types = types
        self.calls: list[tuple[Any, ...]] = []
        self.code, self.stream, self.index = 0, 7, 0  # CUDA error, current stream, current GPU

    def __call__(self, packed: Any) -> None:
        read = [*self.types, ctypes.c_uint64]
        self.calls.append(tuple(t.from_address(packed[i]).value for i, t in enumerate(read)))
        ctypes.c_int32.from_address(packed[len(read)]).value = self.code


def install(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Make a device and its stream the current ones."""
    monkeypatch.setattr(cute_launch, "current_device_index", lambda: device.index)
    monkeypatch.setattr(cute_launch, "raw_stream", lambda index: device.stream)
    return device


TYPES = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(FakeDevice(TYPES), monkeypatch)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on the first GPU."""

    def get_device(self) -> int:
        return 0


def on_gpu(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype).as_subclass(OnGpu)


def arguments(size: int = 64) -> tuple[Any, ...]:
    return on_gpu(size), on_gpu(size), None, size, Int64Arg(1 << 40), 0.5


def program(gpu: FakeDevice) -> CuteProgram:
    return CuteProgram("scale_add", kinds_of(arguments()), 0, gpu)


def test_a_bound_launch_passes_its_arguments_and_the_current_stream(gpu):
    """Callers of one program do not share arguments."""
    args, shared = arguments(), program(gpu)
    bound, other = shared.bind(*args), shared.bind(*arguments(128))
    shared(*arguments(256))
    bound()
    gpu.stream = 9
    bound()
    other()
    expected = [args[0].data_ptr(), args[1].data_ptr(), 64, 1 << 40, 0.5]
    assert gpu.calls[1:3] == [(*expected, 7), (*expected, 9)]
    assert [call[2] for call in gpu.calls] == [256, 64, 64, 128]


def test_a_cuda_error_is_raised_by_name(gpu):
    gpu.code = 9
    with pytest.raises(UnsupportedError, match=r"scale_add: .*cudaErrorInvalidConfiguration"):
        program(gpu)(*arguments())
    gpu.code = 123456
    with pytest.raises(UnsupportedError, match=r"unknown CUDA error.*123456"):
        program(gpu)(*arguments())


def test_another_current_device_is_refused(gpu):
    bound = program(gpu).bind(*arguments())
    gpu.index = 1
    with pytest.raises(InvalidArgumentError, match=r"cuda:0 as the current device.*cuda:1"):
        bound()
    assert gpu.calls == []


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, on_gpu(64, torch.float16), "argument 0: expected a tensor of torch.bfloat16"),
        (0, None, "argument 0: expected a tensor"),
        (1, on_gpu(65)[1:], "argument 1: expected a pointer aligned to 16 bytes"),
        (1, torch.zeros(4, dtype=torch.bfloat16), "argument 1: expected a tensor on cuda:0"),
        (2, on_gpu(64), "argument 2: expected None"),
        (3, 1 << 31, "argument 3: expected a number that fits int32"),
        (3, True, "argument 3: expected an int"),
        (3, Int64Arg(3), "argument 3: expected an int"),
        (3, 3.0, "argument 3: expected an int"),
        (4, 3, "argument 4: expected an Int64Arg"),
        (4, Int64Arg(1 << 63), "argument 4: expected a number that fits int64"),
        (5, 1, "argument 5: expected a float"),
    ],
)
def test_an_argument_of_another_kind_is_refused(place, value, message, gpu):
    args = [*arguments()]
    args[place] = value
    with pytest.raises(InvalidArgumentError, match=message):
        program(gpu)(*args)
    assert gpu.calls == []


@pytest.fixture
def stage_on_gpu(gpu: FakeDevice, compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A way to plan whose kernels believe to be on a GPU; the code is compiled, not loaded."""
    gpu.types = [ctypes.c_void_p] * 3 + TYPES[2:]
    monkeypatch.setattr(CuteKernel, "device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.code == -1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def load(key: Any, host: Any, kinds: Any, device: int) -> CuteProgram:
        cute_kernel._compile(key, host, kinds)
        return CuteProgram(key.name, kinds, device, gpu)

    monkeypatch.setattr(cute_kernel, "_load", load)

    def plan(**fields: Any) -> CuteKernel:
        made = ScalePlan(**fields)
        inputs = [tensor.as_subclass(OnGpu) for tensor in made.prepare_inputs("cpu")]
        return made.plan(*inputs)

    return plan


def test_a_stage_launches_and_two_shapes_share_a_program(stage_on_gpu, gpu, compilations):
    first, second = stage_on_gpu(n=100), stage_on_gpu(n=300, factor=3.0)
    for stage in (first, second, first):
        stage.launch()
    assert [call[3:6:2] for call in gpu.calls] == [(100, 2.0), (300, 3.0), (100, 2.0)]
    tensors = (*first.input_tensors[:1], *first.output_tensors)
    assert gpu.calls[0][:2] == tuple(tensor.data_ptr() for tensor in tensors)
    assert len(compilations) == len(cute_kernel._programs) == 1


def test_arguments_are_prepared_once_per_tiling(stage_on_gpu, gpu, compilations):
    stage = stage_on_gpu()
    built: list[int] = []
    args_fn = stage.args_fn

    def counted(tiling: ScaleTiling) -> Any:
        built.append(tiling.threads)
        return args_fn(tiling)

    stage.args_fn = counted
    stage.launch()
    stage.launch()
    stage.tiling.threads = 256
    stage.launch()
    stage.tiling = ScaleTiling(threads=64)
    stage.launch()
    assert built == [128, 256, 64]
    assert len(gpu.calls) == 4 and len(compilations) == 3


def test_the_first_launch_inside_a_capture_is_refused(stage_on_gpu, gpu):
    stage = stage_on_gpu()
    gpu.code = -1
    with pytest.raises(UnsupportedError, match="one launch before the capture"):
        stage.launch()
    gpu.code = 0
    stage.launch()
    gpu.code = -1
    with pytest.raises(UnsupportedError, match="the launch failed"):  # it got as far as the GPU
        stage.launch()


def test_a_stored_program_that_does_not_link_is_made_again(compilations, monkeypatch, caplog):
    """It gets as far as loading machine code, which fails for want of a GPU."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there: loading would succeed")
    kernel = empty()
    host, args = kernel._host_and_args(kernel.tiling)
    kinds = kinds_of(args)
    good = compile_program(scale_add, host, kinds, kernel.tiling, "sm_90a")
    key = cute_kernel._key(scale_add, host, kinds, kernel.tiling, "sm_90a")
    cute_cache.write_entry(key, dataclasses.replace(good, object_code=b"no object"))
    cute_kernel._compiled.clear()
    with pytest.raises(UnsupportedError, match="scale_add: expected machine code that loads"):
        cute_kernel._load(key, host, kinds, 0)
    assert len(compilations) == 2 and "compiled again" in caplog.text
    stored = cute_cache.read_entry(key)
    assert stored is not None and stored.object_code != b"no object"


READ = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_int64]


def numbers_and_pointers() -> tuple[Any, ...]:
    """A pointer, a number, an absent pointer, a pointer, two more numbers."""
    return torch.zeros(4), -5, None, torch.zeros(4, dtype=torch.int32), 0.25, Int64Arg(1 << 40)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(FakeDevice(READ), monkeypatch)


@pytest.fixture
def repeated(device: FakeDevice) -> RepeatedLaunch:
    args = numbers_and_pointers()
    return CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)


def test_addresses_change_and_numbers_stay(device, repeated):
    repeated(16, 0, 32)
    repeated(48, 9, 64)  # what stands for the absent one is not read
    assert device.calls == [
        (16, -5, 32, 0.25, 1 << 40, device.stream),
        (48, -5, 64, 0.25, 1 << 40, device.stream),
    ]
    launch = repeated.on_stream(5, [0], {3: 96})
    launch((80,))
    repeated(16, 0, 32)
    launch((112,))
    assert [seen[:3:2] + seen[-1:] for seen in device.calls[2:]] == [
        (80, 96, 5), (16, 32, device.stream), (112, 96, 5)
    ]  # fmt: skip
    assert all(seen[1] == -5 and seen[3:5] == (0.25, 1 << 40) for seen in device.calls)


def test_what_is_not_aligned_is_not_launched(device, repeated):
    """As the program was compiled for: 16 bytes for floats, 4 for integers, none for the absent."""
    launch = repeated.on_stream(5, [0, 2, 3], {})
    assert launch((16, 3, 4))
    high = 1 << 47
    for addresses in ((8, 0, 4), (17, 0, 4), (16, 0, 2), (high | 4, 0, 4), (0, 0, high | 1)):
        assert not launch(addresses)
    assert len(device.calls) == 1
    assert launch((high, 0, high | 4))
    assert device.calls[-1][:3:2] == (high, high | 4)


def test_pointers_come_in_any_order(device, repeated):
    """Those that the program does not take are skipped, and the last of two counts."""
    launch = repeated.on_stream(5, [3, None, 0, 3], {})
    assert launch((1, 2, 16, 64))
    assert device.calls == [(16, -5, 64, 0.25, 1 << 40, 5)]
    assert not launch((1, 2, 8, 64)) and not launch((4, 0, 16, 65))
    with pytest.raises(InvalidArgumentError, match=r"scale: pointers: expected one for \[3\]"):
        repeated.on_stream(5, [0], {})


def test_an_error_of_the_driver_is_raised(device, repeated):
    device.code = 1
    with pytest.raises(UnsupportedError, match="scale: the launch failed with cudaError"):
        repeated(16, 0, 32)
    with pytest.raises(UnsupportedError, match="scale: the launch failed with cudaError"):
        repeated.on_stream(5, [0, 2, 3], {})((16, 0, 32))


def test_every_thread_has_its_own_memory(repeated):
    both = threading.Barrier(2)
    pairs: list[tuple[int, int]] = []

    def slow(packed: Any) -> None:
        before = ctypes.c_uint64.from_address(packed[0]).value
        both.wait(10)  # both have written their addresses
        pairs.append((before, ctypes.c_uint64.from_address(packed[0]).value))

    repeated._entry = slow
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(repeated, (16, 32), (0, 0), (32, 32)))
    assert sorted(pairs) == [(16, 16), (32, 32)]


def test_tensors_are_not_kept_alive(device):
    args = numbers_and_pointers()
    watched = weakref.ref(args[0])
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    del args
    assert watched() is None
    repeated(16, 0, 32)
