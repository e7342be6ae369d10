"""A GPU that is a Python function: it reads its arguments as compiled host code would."""

import ctypes
from typing import Any

import pytest

from mla_var3.runtime.cute import launch as cute_launch


class FakeDevice:
    """The entry of a program; notes the arguments of every launch, and the stream behind them.

    Attributes:
        types: what the cells of the arguments hold.
        calls: the values of each launch.
        code: the CUDA error code that a launch gives.
        stream: the current stream.
        index: the current GPU.
    """

    def __init__(self, types: list[Any]) -> None:
        self.types = types
        self.calls: list[tuple[Any, ...]] = []
        self.code = 0
        self.stream = 7
        self.index = 0

    def __call__(self, packed: Any) -> None:
        read = [*self.types, ctypes.c_uint64]
        self.calls.append(tuple(t.from_address(packed[i]).value for i, t in enumerate(read)))
        ctypes.c_int32.from_address(packed[len(read)]).value = self.code


def install(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Make a device and its stream the current ones."""
    monkeypatch.setattr(cute_launch, "current_device_index", lambda: device.index)
    monkeypatch.setattr(cute_launch, "raw_stream", lambda index: device.stream)
    return device
