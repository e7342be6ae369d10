"""Stages of plans on operands that change from call to call: built once, then only launched.

A plan checks its operands, chooses and builds; that takes the host longer than many kernels run.
What remains of a stage for later calls on operands of the same form are its programs, the numbers
among their arguments, and for every pointer which operand or which memory of its own it is. Such
memory is allocated by torch in every call. Nothing waits for the device, so a CUDA graph can
capture a call, once an earlier one has loaded the programs.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.cute.cache import host_identity
from mla_var3.runtime.cute.launch import RepeatedLaunch
from mla_var3.runtime.cute_kernel import CuteKernel, CuteProgram, program_for, require_arch
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

Operands = Sequence[Tensor | None]
MOST_KEPT = 512
"""Forms that are kept; then all are forgotten, which costs building again."""

_programs: dict[tuple[Any, ...], CuteProgram] = {}
_kept: dict[Hashable, "KeptStage"] = {}
_own = threading.local()
"""Of each thread, `streams`: those of kernels at the same time, by device and priorities."""


def run_stage(form: Hashable, operands: Operands, build: Callable[[], Stage]) -> list[Tensor]:
    """Launch a stage on the current stream of the current GPU, where its operands are.

    Args:
        form: what decides the stage beside shapes, strides and dtypes of the operands.
        operands: all tensors that the stage reads. Its kernels take them from their first element
            on: a view that begins elsewhere is an operand of its own.
        build: makes the stage on these operands; called for the first of a form.

    Returns:
        Its outputs.
    """
    whole = True
    parts: list[Any] = [form, torch.cuda.current_device()]
    for operand in operands:
        if operand is None:
            parts.append(None)
            continue
        parts += (operand.shape, operand.stride(), operand.dtype)
        floating = operand.dtype.is_floating_point
        whole = whole and not (floating and operand.data_ptr() % ALIGNMENT_BYTES)
    key = tuple(parts)
    kept = _kept.get(key) if whole else None
    if kept is None:
        # Plans refuse operands at odd addresses, so that nothing of these is kept.
        kept = KeptStage(build(), operands)
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = kept
    return kept.launch(operands)


@dataclass(frozen=True)
class _Launch:
    """One kernel: its launch, and per pointer the number of an operand or of own memory."""

    program: RepeatedLaunch
    pointers: tuple[int, ...]

    def run(self, addresses: Sequence[int]) -> None:
        self.program(*(addresses[number] for number in self.pointers))


@dataclass(frozen=True)
class _InTurn:
    """Steps one after another."""

    steps: "tuple[_Launch | _InTurn | _AtOnce, ...]"

    def run(self, addresses: Sequence[int]) -> None:
        for step in self.steps:
            step.run(addresses)


@dataclass(frozen=True)
class _AtOnce:
    """Steps on streams of their own, which start after the current stream and end before it."""

    steps: "tuple[_Launch | _InTurn | _AtOnce, ...]"
    priorities: tuple[int, ...]

    def run(self, addresses: Sequence[int]) -> None:
        current = torch.cuda.current_stream()
        fork = current.record_event()
        for step, stream in zip(self.steps, _streams(current, self.priorities), strict=True):
            stream.wait_event(fork)
            with torch.cuda.stream(stream):
                step.run(addresses)
            current.wait_stream(stream)


class KeptStage:
    """What later calls need of a stage; no tensor of the call that it was built for."""

    def __init__(self, stage: Stage, operands: Operands) -> None:
        """Note the launches of a stage that was built on these operands.

        Raises:
            InvalidArgumentError: a kernel reads a part of an operand that is none itself.
        """
        # Number 0 is for arguments that are absent.
        self._numbers = {
            operand.data_ptr(): number
            for number, operand in enumerate(operands, 1)
            if operand is not None and operand.numel()
        }
        self._storages = {
            operand.untyped_storage().data_ptr() for operand in operands if operand is not None
        }
        self._operands = len(operands)
        self._memory: list[tuple[torch.Size, torch.dtype]] = []
        self._alive: list[Any] = []  # so that no two of the stage's tensors have one address
        self._steps = self._noted(stage)
        self._outputs = [
            self._number(tensor) - self._operands - 1 for tensor in stage.output_tensors
        ]
        self._device = stage.output_tensors[0].device
        del self._numbers, self._storages, self._alive

    def launch(self, operands: Operands) -> list[Tensor]:
        """Launch on operands of the same form; returns the outputs."""
        memory = [
            torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._memory
        ]
        addresses = [0]
        addresses += [0 if operand is None else operand.data_ptr() for operand in operands]
        addresses += [tensor.data_ptr() for tensor in memory]
        self._steps.run(addresses)
        return [memory[number] for number in self._outputs]

    def _noted(self, stage: Stage) -> "_Launch | _InTurn | _AtOnce":
        if isinstance(stage, KernelPipeline):
            return _InTurn(tuple(self._noted(part) for part in stage.stages))
        if isinstance(stage, ConcurrentKernels):
            failures = stage.joint_failures()
            if failures:
                raise InvalidArgumentError(
                    "tiling", "a joint tiling that fits", "; ".join(failures)
                )
            members = stage.concurrent_kernels
            priorities = tuple(stage.stream_priorities) or (0,) * len(members)
            return _AtOnce(tuple(self._noted(member) for member in members), priorities)
        if not isinstance(stage, CuteKernel) or stage.host_fn is None or stage.args_fn is None:
            raise InvalidArgumentError("stage", "kernels with host_fn and args_fn", stage.name)
        host, arguments = stage.host_fn(stage.tiling), tuple(stage.args_fn(stage.tiling))
        self._alive.append(arguments)
        pointers = tuple(
            0 if argument is None else self._number(argument)
            for argument in arguments
            if argument is None or isinstance(argument, Tensor)
        )
        return _Launch(_program(stage, host, arguments).repeated(*arguments), pointers)

    def _number(self, tensor: Tensor) -> int:
        address = tensor.data_ptr()
        number = self._numbers.get(address)
        if number is None:
            if tensor.untyped_storage().data_ptr() in self._storages:
                raise InvalidArgumentError(
                    "operands", "every view that a kernel reads", f"not one of {tensor.shape}"
                )
            self._memory.append((tensor.shape, tensor.dtype))
            number = self._numbers[address] = self._operands + len(self._memory)
        return number


def _program(kernel: CuteKernel, host: Any, arguments: tuple[Any, ...]) -> CuteProgram:
    """The program of a kernel, found by what its host function was made with.

    The way of `program_for` reads sources; one program serves many forms.
    """
    device = kernel.output_tensors[0].device
    # A fresh host object carries what it was made with, and nothing else.
    key = (
        kernel.kernel_fn,
        str(host_identity(host)),
        tuple(each.dtype if isinstance(each, Tensor) else type(each) for each in arguments),
        getattr(kernel.tiling, "opt_level", None),
        device.index,
    )
    program = _programs.get(key)
    if program is None:
        require_arch(kernel.name, kernel.requires_arch, device)
        program = program_for(kernel.kernel_fn, host, arguments, kernel.tiling, device)
        _programs[key] = program
    return program


def _streams(current: torch.cuda.Stream, priorities: tuple[int, ...]) -> list[torch.cuda.Stream]:
    """Streams of this thread for kernels at the same time, always the same ones.

    The first call of a form is not captured, so that a capture finds them and makes none.
    """
    known: dict[Any, list[torch.cuda.Stream]] = _own.__dict__.setdefault("streams", {})
    key = (current.device_index, priorities)
    found = known.get(key)
    if found is None:
        found = known[key] = [torch.cuda.Stream(priority=each) for each in priorities]
    return found
