"""Launching a CuTe DSL program on other pointers, without a GPU: on a Python function."""

import ctypes
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.cute.arguments import Int64Arg, kinds_of
from mla_var3.runtime.cute.launch import CuteProgram, RepeatedLaunch
from tests.unit.runtime.cute.fake_device import FakeDevice, install

READ = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_int64]


def arguments() -> tuple[Any, ...]:
    """A pointer, a number, an absent pointer, a pointer, two more numbers."""
    return torch.zeros(4), -5, None, torch.zeros(4, dtype=torch.int32), 0.25, Int64Arg(1 << 40)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(FakeDevice(READ), monkeypatch)


@pytest.fixture
def repeated(device: FakeDevice) -> RepeatedLaunch:
    args = arguments()
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
    args = arguments()
    watched = weakref.ref(args[0])
    repeated = CuteProgram("scale", kinds_of(args), 0, device).repeated(*args)
    del args
    assert watched() is None
    repeated(16, 0, 32)
