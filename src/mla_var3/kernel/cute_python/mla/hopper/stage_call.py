"""Stages of plans on operands that change from call to call: built once, then only launched.

A plan checks its operands, chooses and builds, which takes the host longer than many kernels run.
For later calls of the same key only this is kept: the programs, the numbers among their arguments,
and for every pointer which operand or which workspace it is. Workspace is allocated by torch in
every call. Nothing waits for the device, so a CUDA graph can capture a call once an earlier one has
loaded the programs.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.cute.cache import host_identity
from mla_var3.runtime.cute.launch import RepeatedLaunch
from mla_var3.runtime.cute_kernel import CuteKernel, CuteProgram, program_for, require_arch
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

Operands = Sequence[Tensor | None]
MOST_KEPT = 512
"""The oldest stage goes when there are more, and is built again when it is called again."""

_programs = CALL_STATE.table(1024)
_kept = CALL_STATE.table(MOST_KEPT)
_streams_of = CALL_STATE.per_thread()
"""Streams for concurrent kernels, by device and priorities."""


def run_stage(key: Hashable, operands: Operands, build: Callable[[], Stage]) -> list[Tensor]:
    """Launch a stage on the current stream of the current GPU, where its operands are.

    Args:
        key: what decides the stage beside shapes, strides and dtypes of the operands.
        operands: all tensors that the stage reads. Its kernels take them from their first element
            on: a view that begins elsewhere is an operand of its own.
        build: makes the stage on these operands; called for the first of a key.

    Returns:
        Its outputs.
    """
    is_aligned = True
    parts: list[Any] = [key, torch.cuda.current_device()]
    addresses = []
    for operand in operands:
        if operand is None:
            parts.append(None)
            continue
        parts += (operand.shape, operand.stride(), operand.dtype)
        addresses.append(operand.data_ptr())
        floating = operand.dtype.is_floating_point
        is_aligned = is_aligned and not (floating and addresses[-1] % ALIGNMENT_BYTES)
    if len(set(addresses)) < len(addresses):
        # Operands in the same memory are one to a stage; calls that have two need another stage.
        parts.append(tuple(addresses.index(address) for address in addresses))
    full_key = tuple(parts)
    kept: KeptStage | None = _kept.get(full_key) if is_aligned else None
    if kept is None:
        # A plan refuses unaligned operands, so nothing is kept for them.
        kept = KeptStage(build(), operands)
        _kept.keep(full_key, kept)
    return kept.launch(operands)


Step = Callable[[Sequence[int]], None]
"""Launches on the pointers of a call: those of its operands, then of its workspace."""


def _in_order(steps: Sequence[Step]) -> Step:
    """Steps one after another."""

    def run(pointers: Sequence[int]) -> None:
        for step in steps:
            step(pointers)

    return run


def _at_once(steps: Sequence[Step], priorities: tuple[int, ...]) -> Step:
    """Steps on streams of their own, which fork from the current stream and join it again."""

    def run(pointers: Sequence[int]) -> None:
        current = torch.cuda.current_stream()
        fork = current.record_event()
        for step, stream in zip(steps, _streams(current, priorities), strict=True):
            stream.wait_event(fork)
            with torch.cuda.stream(stream):
                step(pointers)
            current.wait_stream(stream)

    return run


def _launch(program: RepeatedLaunch, numbers: Sequence[int]) -> Step:
    """One kernel, and per pointer the number of an operand or of workspace."""
    return lambda pointers: program(*(pointers[number] for number in numbers))


class KeptStage:
    """What later calls need of a stage; no tensor of the call that it was built for."""

    def __init__(self, stage: Stage, operands: Operands) -> None:
        """Record the launches of a stage that was built on these operands.

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
        self._workspace: list[tuple[torch.Size, torch.dtype]] = []
        self._alive: list[Any] = []  # so that no two tensors of the stage share a pointer
        self._steps = self._recorded(stage)
        self._outputs = [
            self._number(tensor) - self._operands - 1 for tensor in stage.output_tensors
        ]
        self._device = stage.output_tensors[0].device
        del self._numbers, self._storages, self._alive

    def launch(self, operands: Operands) -> list[Tensor]:
        """Launch on operands of the same key; returns the outputs."""
        workspace = [
            torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._workspace
        ]
        pointers = [0]
        pointers += [0 if operand is None else operand.data_ptr() for operand in operands]
        pointers += [tensor.data_ptr() for tensor in workspace]
        self._steps(pointers)
        return [workspace[number] for number in self._outputs]

    def _recorded(self, stage: Stage) -> Step:
        if isinstance(stage, KernelPipeline):
            return _in_order([self._recorded(part) for part in stage.stages])
        if isinstance(stage, ConcurrentKernels):
            failures = stage.joint_failures()
            if failures:
                raise InvalidArgumentError(
                    "tiling", "a joint tiling that fits", "; ".join(failures)
                )
            members = stage.concurrent_kernels
            priorities = tuple(stage.stream_priorities) or (0,) * len(members)
            return _at_once([self._recorded(member) for member in members], priorities)
        if not isinstance(stage, CuteKernel) or stage.host_fn is None or stage.args_fn is None:
            raise InvalidArgumentError("stage", "kernels with host_fn and args_fn", stage.name)
        host, arguments = stage.host_fn(stage.tiling), tuple(stage.args_fn(stage.tiling))
        self._alive.append(arguments)
        pointers = tuple(
            0 if argument is None else self._number(argument)
            for argument in arguments
            if argument is None or isinstance(argument, Tensor)
        )
        return _launch(_program(stage, host, arguments).repeated(*arguments), pointers)

    def _number(self, tensor: Tensor) -> int:
        pointer = tensor.data_ptr()
        number = self._numbers.get(pointer)
        if number is None:
            if tensor.untyped_storage().data_ptr() in self._storages:
                raise InvalidArgumentError(
                    "operands", "every view that a kernel reads", f"not one of {tensor.shape}"
                )
            self._workspace.append((tensor.shape, tensor.dtype))
            number = self._numbers[pointer] = self._operands + len(self._workspace)
        return number


def _program(kernel: CuteKernel, host: Any, arguments: tuple[Any, ...]) -> CuteProgram:
    """The program of a kernel, looked up by what its host function was made with.

    `program_for` reads sources, which costs more; one program serves many keys.
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
    program: CuteProgram | None = _programs.get(key)
    if program is None:
        require_arch(kernel.name, kernel.requires_arch, device)
        program = program_for(kernel.kernel_fn, host, arguments, kernel.tiling, device)
        _programs.keep(key, program)
    return program


def _streams(current: torch.cuda.Stream, priorities: tuple[int, ...]) -> list[torch.cuda.Stream]:
    """Streams of this thread for concurrent kernels, always the same ones.

    The first call of a key is not captured, so a capture finds them and makes none.
    """
    known: dict[Any, list[torch.cuda.Stream]] = _streams_of.values
    key = (current.device_index, priorities)
    found = known.get(key)
    if found is None:
        found = known[key] = [torch.cuda.Stream(priority=each) for each in priorities]
    return found
