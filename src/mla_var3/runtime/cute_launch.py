"""Launching compiled CuTe DSL programs: prepared arguments, current stream, architecture check.

A launch costs the host a few microseconds: the arguments lie in memory already, and only the stream
and what has changed are written before the compiled host function is called. Nothing here waits for
the GPU or allocates on it, so a CUDA graph can capture a launch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.cute_arguments import ArgumentBuffer, ArgumentKind

Entry = Callable[[Any], Any]
"""The compiled host function: takes the addresses of its arguments."""


class BoundLaunch:
    """A program with arguments of its own.

    One thread at a time may use it; programs give each caller another.
    """

    def __init__(
        self, name: str, entry: Entry, buffer: ArgumentBuffer, device: int, args: Sequence[Any]
    ) -> None:
        self._name = name
        self._entry = entry
        self._buffer = buffer
        self._device = device
        self._args: tuple[Any, ...] = ()
        self.update(*args)

    def update(self, *args: Any) -> None:
        """Take other arguments of the same kinds; tensors are kept alive until the next update."""
        self._buffer.write(args)
        self._args = args

    def launch(self) -> None:
        """Launch on the current CUDA stream."""
        _call(self._name, self._entry, self._buffer, self._device)


class CuteProgram:
    """A compiled and loaded host function, for arguments of certain kinds and any shape.

    Attributes:
        name: kernel name.
        kinds: kinds of the arguments, without the stream.
        device: index of the GPU it is loaded on.
    """

    def __init__(
        self,
        name: str,
        kinds: Sequence[ArgumentKind],
        device: int,
        entry: Entry,
        owners: Sequence[Any] = (),
    ) -> None:
        """Wrap a loaded host function.

        Args:
            name: kernel name.
            kinds: kinds of the arguments.
            device: index of the GPU.
            entry: the compiled host function.
            owners: what keeps the code loaded as long as it is referred to.
        """
        self.name = name
        self.kinds = tuple(kinds)
        self.device = device
        self._entry = entry
        self._owners = tuple(owners)
        self._own = threading.local()

    def bind(self, *args: Any) -> BoundLaunch:
        """The program with arguments of its own, for repeated launches."""
        buffer = ArgumentBuffer(self.kinds, self.device)
        return BoundLaunch(self.name, self._entry, buffer, self.device, args)

    def __call__(self, *args: Any) -> None:
        """Launch on the current CUDA stream, with other arguments than last time.

        The caller keeps the tensors, as with any operation of torch.
        """
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = ArgumentBuffer(self.kinds, self.device)
        buffer.write(args)
        _call(self.name, self._entry, buffer, self.device)


def _call(name: str, entry: Entry, buffer: ArgumentBuffer, device: int) -> None:
    if current_device_index() != device:
        raise InvalidArgumentError(
            f"{name}: device",
            f"cuda:{device} as the current device, where its tensors are",
            f"cuda:{current_device_index()}",
        )
    buffer.stream.value = raw_stream(device)
    entry(buffer.packed)
    if buffer.result.value:
        raise UnsupportedError(f"{name}: {describe_cuda_error(buffer.result.value)}")


def current_device_index() -> int:
    """Index of the current GPU."""
    return int(torch._C._cuda_getDevice())


def current_device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", current_device_index())


def raw_stream(device: int) -> int:
    """Handle of the current CUDA stream of a device.

    torch's own generated code asks in this way; making a Stream object takes longer than all else
    in a launch.
    """
    return int(torch._C._cuda_getCurrentRawStream(device))


def describe_cuda_error(code: int) -> str:
    """A CUDA error code in words."""
    from cuda.bindings import runtime

    try:
        name = runtime.cudaError_t(code).name
    except ValueError:
        name = "an unknown CUDA error"
    return f"the launch failed with {name} (code {code})"


def arch_of_target(target: str) -> str:
    """The architecture that a compile target means: "sm_90" is "sm_90a", "sm_90a" is itself.

    From Hopper on the matrix and bulk-copy instructions exist in the architecture-specific form
    only.
    """
    match = re.fullmatch(r"sm_(\d+)([af]?)", target)
    if match is None:
        raise InvalidArgumentError("target", "a target such as sm_90 or sm_90a", repr(target))
    if match[2] or int(match[1]) < 90:
        return target
    return f"{target}a"


def arch_of_device(device: torch.device) -> str:
    """The architecture of a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    return arch_of_target(f"sm_{major}{minor}")


def require_arch(name: str, required: str, device: torch.device) -> None:
    """Refuse a GPU that lacks the instructions of a kernel, before anything is launched on it.

    Args:
        name: kernel name.
        required: architecture that the kernel is written for; empty for any.
        device: the GPU.
    """
    if required and required != arch_of_device(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedError(
            f"{name}: expected a GPU of {required}, whose instructions it is written with, got "
            f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
        )
