"""Launching compiled CuTe DSL programs: prepared arguments, current stream, architecture check.

A launch costs the host a few microseconds: only the stream and changed arguments are written before
the compiled host function is called. Nothing here waits for the GPU or allocates on it, so a CUDA
graph can capture a launch.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.cute.arguments import (
    ABSENT,
    FLOAT32,
    INT32,
    INT64,
    POINTER,
    ArgumentBuffer,
    ArgumentKind,
    Int64Arg,
)
from mla_var3.runtime.cute.torch_fast import current_device_index, raw_stream

Entry = Callable[[Any], Any]
"""The compiled host function: takes pointers to its arguments."""


def short_entry(host_function: Any) -> Entry:
    """A compiled host function as ctypes calls it fastest.

    Without declared parameters and result ctypes converts nothing: the host function takes an
    array of pointers and writes its error code into the last argument.
    """
    address = ctypes.cast(host_function, ctypes.c_void_p).value
    if address is None:
        raise InvalidArgumentError("host_function", "a function of compiled code", "a null pointer")
    return ctypes.CFUNCTYPE(None)(address)


_NUMBER_FORMATS = {INT32: "i4x", INT64: "q", FLOAT32: "f4x"}
"""How `struct` writes a number into a cell of 8 bytes."""


class RepeatedLaunch:
    """A program whose numbers stay while every launch brings new pointers.

    The shortest way to launch on changing tensors: all pointers are written at once and nothing is
    checked. The caller makes sure that the tensors differ only in their pointers from those of an
    earlier launch. Safe in several threads.
    """

    def __init__(self, program: CuteProgram, args: Sequence[Any]) -> None:
        """Keep the numbers among the arguments, and no tensor."""
        self.device = program.device
        self._name, self._entry, self._kinds = program.name, program.entry, program.kinds
        self._numbers = {
            place: value.value if isinstance(value, Int64Arg) else value
            for place, (kind, value) in enumerate(zip(program.kinds, args, strict=True))
            if kind.tag in _NUMBER_FORMATS
        }
        self._pointers = [place for place in range(len(args)) if place not in self._numbers]
        self._own = threading.local()

    def __call__(self, *pointers: int) -> None:
        """Launch on the current CUDA stream of the device, which is the current one."""
        try:
            write, cells, packed, result = self._own.memory
        except AttributeError:
            cells, packed, result = self._lay_out(self._pointers, {}, 0)
            write = _cells(len(self._pointers) + 1).pack_into
            self._own.memory = write, cells, packed, result
        write(cells, 0, *pointers, raw_stream(self.device))
        self._entry(packed)
        if result.value:
            raise self._failure(result.value)

    def on_stream(
        self, stream: int, order: Sequence[int | None], fixed: Mapping[int, int]
    ) -> Callable[[Sequence[int]], bool]:
        """The launch on one CUDA stream.

        Args:
            stream: handle of the stream.
            order: which argument each pointer of a launch is for; None for a pointer that the
                program does not take. The last of several for one argument counts.
            fixed: pointers that stay, by argument.

        Returns:
            A function that takes the pointers in this order and launches. It returns False, and
            launches nothing, when a pointer is not aligned as the program was compiled for. One
            thread at a time may use it.
        """
        cells, packed, result = self._lay_out(order, fixed, stream)
        pack, entry = _cells(len(order)).pack, self._entry
        changing = memoryview(cells).cast("B")[: 8 * len(order)]
        # All pointers as one integer, and the bits that must be clear in it: one operation checks
        # the alignment of all of them.
        number = int.from_bytes
        low_bits = [
            0 if place is None or place in order[at + 1 :] else self._low_bits(place)
            for at, place in enumerate(order)
        ]
        unaligned = number(pack(*low_bits), "little")

        def launch(pointers: Sequence[int]) -> bool:
            content = pack(*pointers)
            if number(content, "little") & unaligned:
                return False
            changing[:] = content
            entry(packed)
            if result.value:
                raise self._failure(result.value)
            return True

        return launch

    def _low_bits(self, place: int) -> int:
        """The bits that are clear in an aligned pointer of an argument; 0 for an absent one."""
        return max(self._kinds[place].alignment - 1, 0)

    def _failure(self, code: int) -> UnsupportedError:
        return UnsupportedError(f"{self._name}: {describe_cuda_error(code)}")

    def _lay_out(
        self, order: Sequence[int | None], fixed: Mapping[int, int], stream: int
    ) -> tuple[Any, Any, ctypes.c_int32]:
        """Memory for the arguments, which one thread at a time may use.

        The host function reads each argument through a pointer of its own, so the arguments may lie
        in any order: changing pointers, stream, fixed pointers, numbers, error code, 8 bytes each.
        """
        kinds = self._kinds
        cell_of = {place: cell for cell, place in enumerate(order) if place is not None}
        others = [
            place for place in self._pointers
            if place not in cell_of and kinds[place].tag == POINTER
        ]  # fmt: skip
        missing = [place for place in others if place not in fixed]
        if missing:
            raise InvalidArgumentError(f"{self._name}: pointers", f"one for {missing}", "none")
        count = len(order)
        for cell, place in enumerate((*others, *self._numbers), count + 1):
            cell_of[place] = cell
        formats = "".join(_NUMBER_FORMATS[kinds[place].tag] for place in self._numbers)
        pointers = _cells(count + 1 + len(others)).pack(
            *(0,) * count, stream, *(fixed[place] for place in others)
        )
        content = pointers + struct.pack(f"={formats}8x", *self._numbers.values())
        cells = (ctypes.c_uint64 * (len(content) // 8)).from_buffer_copy(content)
        # The host function has no parameter for what is absent.
        present = [place for place, kind in enumerate(kinds) if kind.tag != ABSENT]
        used = [*(cell_of[place] for place in present), count, len(cells) - 1]
        base = ctypes.addressof(cells)
        packed = (ctypes.c_void_p * len(used))(*(base + 8 * cell for cell in used))
        return cells, packed, ctypes.c_int32.from_buffer(cells, len(content) - 8)


def _cells(count: int) -> struct.Struct:
    """How pointers are written into cells of 8 bytes.

    As sizes of memory (N), which `struct` packs in half the time that it needs for Q.
    """
    return struct.Struct(f"{count}N")


@dataclass(eq=False)
class CuteProgram:
    """A compiled and loaded host function, for arguments of certain kinds and any shape."""

    name: str
    kinds: Sequence[ArgumentKind]
    device: int
    entry: Entry
    owners: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self._own = threading.local()

    def bind(self, *args: Any) -> Callable[[], None]:
        """The launch with these arguments, for one thread at a time; it keeps the tensors alive."""
        buffer = ArgumentBuffer(self.kinds, self.device)
        buffer.write(args)

        def launch(_alive: Any = args) -> None:
            self.launch(buffer)

        return launch

    def repeated(self, *args: Any) -> RepeatedLaunch:
        """The program with the numbers of these arguments, for launches on other tensors."""
        return RepeatedLaunch(self, args)

    def __call__(self, *args: Any) -> None:
        """Launch on the current CUDA stream, with other arguments than last time.

        The caller keeps the tensors alive, as with any operation of torch.
        """
        buffer = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = ArgumentBuffer(self.kinds, self.device)
        buffer.write(args)
        self.launch(buffer)

    def launch(self, buffer: ArgumentBuffer) -> None:
        if current_device_index() != self.device:
            raise InvalidArgumentError(
                f"{self.name}: device",
                f"cuda:{self.device} as the current device, where its tensors are",
                f"cuda:{current_device_index()}",
            )
        buffer.stream.value = raw_stream(self.device)
        self.entry(buffer.packed)
        if buffer.result.value:
            raise UnsupportedError(f"{self.name}: {describe_cuda_error(buffer.result.value)}")


def current_device() -> torch.device:
    """The current GPU."""
    return torch.device("cuda", current_device_index())


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
    """Refuse a GPU that lacks the instructions of a kernel, before anything is launched on it."""
    if required and required != arch_of_device(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise UnsupportedError(
            f"{name}: expected a GPU of {required}, whose instructions it is written with, got "
            f"{torch.cuda.get_device_name(device)} of compute capability {major}.{minor}"
        )
