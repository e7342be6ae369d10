"""Launching a CuTe DSL program on other pointers, without a GPU: on a Python function."""

import ctypes
import threading
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.cute import launch as cute_launch
from mla_var3.runtime.cute.arguments import Int64Arg, kinds_of
from mla_var3.runtime.cute.launch import CuteProgram

STREAM = 0x7000
READ: list[Any] = [
    ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_int64,
    ctypes.c_uint64,
]  # fmt: skip


def arguments() -> tuple[Any, ...]:
    """A pointer, a number, an absent pointer, a pointer, two more numbers."""
    return torch.zeros(4), -5, None, torch.zeros(4, dtype=torch.int32), 0.25, Int64Arg(1 << 40)


class Device:
    """Reads the cells as the compiled host function would: the stream behind the arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.code = 0

    def __call__(self, packed: Any) -> int:
        values = [kind.from_address(packed[i]).value for i, kind in enumerate(READ)]
        self.seen.append(tuple(values))
        ctypes.c_int32.from_address(packed[len(READ)]).value = self.code
        return self.code


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(cute_launch, "raw_stream", lambda index: STREAM)
    return Device()


def test_addresses_change_and_numbers_stay(device):
    args = arguments()
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    repeated(16, 0, 32)
    repeated(48, 9, 64)  # what stands for the absent one is not read
    assert device.seen == [(16, -5, 32, 0.25, 1 << 40, STREAM), (48, -5, 64, 0.25, 1 << 40, STREAM)]
    launch = repeated.on_stream(5, [0], {3: 96})
    launch((80,))
    repeated(16, 0, 32)
    launch((112,))
    assert [seen[:3:2] + seen[-1:] for seen in device.seen[2:]] == [
        (80, 96, 5), (16, 32, STREAM), (112, 96, 5)
    ]  # fmt: skip
    assert all(seen[1] == -5 and seen[3:5] == (0.25, 1 << 40) for seen in device.seen)


def test_what_is_not_aligned_is_not_launched(device):
    """As the program was compiled for: 16 bytes for floats, 4 for integers, none for the absent."""
    args = arguments()
    launch = (
        CuteProgram("scale", kinds_of(args), 0, device).repeated(*args).on_stream(5, [0, 2, 3], {})
    )
    assert launch((16, 3, 4))
    for addresses in (
        (8, 0, 4),
        (16 + 1, 0, 4),
        (16, 0, 2),
        (1 << 47 | 4, 0, 4),
        (0, 0, 1 << 40 | 1),
    ):
        assert not launch(addresses)
    assert len(device.seen) == 1
    assert launch((1 << 47, 0, 1 << 47 | 4))
    assert device.seen[-1][:3:2] == (1 << 47, 1 << 47 | 4)


def test_pointers_come_in_any_order(device):
    """Those that the program does not take are skipped, and the last of two counts."""
    args = arguments()
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    launch = repeated.on_stream(5, [3, None, 0, 3], {})
    assert launch((1, 2, 16, 64))
    assert device.seen == [(16, -5, 64, 0.25, 1 << 40, 5)]
    assert not launch((1, 2, 8, 64)) and not launch((4, 0, 16, 65))
    with pytest.raises(InvalidArgumentError, match=r"scale: pointers: expected one for \[3\]"):
        repeated.on_stream(5, [0], {})


def test_an_error_of_the_driver_is_raised(device):
    args = arguments()
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    device.code = 1
    with pytest.raises(UnsupportedError, match="scale: the launch failed with cudaError"):
        repeated(16, 0, 32)
    with pytest.raises(UnsupportedError, match="scale: the launch failed with cudaError"):
        repeated.on_stream(5, [0, 2, 3], {})((16, 0, 32))


def test_every_thread_has_its_own_memory(device):
    args = arguments()
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    both = threading.Barrier(2)
    inner = device.seen
    pairs: list[tuple[int, int]] = []

    class Slow(Device):
        def __call__(self, packed: Any) -> int:
            before = ctypes.c_uint64.from_address(packed[0]).value
            both.wait(10)  # both have written their addresses
            pairs.append((before, ctypes.c_uint64.from_address(packed[0]).value))
            return super().__call__(packed)

    repeated._entry = Slow()
    threads = [threading.Thread(target=repeated, args=(n * 16, 0, 32)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pairs) == [(16, 16), (32, 32)] and not inner


def test_tensors_are_not_kept_alive(device):
    import weakref

    args = arguments()
    watched = weakref.ref(args[0])
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    del args
    assert watched() is None
    repeated(16, 0, 32)
