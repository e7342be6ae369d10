"""Calls of the latent kernel on tensors that change from call to call.

A plan fixes its tensors and prepares its arguments. Here programs are looked up by what they were
compiled for, and arguments are written for every launch. A call is one launch: its CTAs merge the
partials themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from cutlass import BFloat16, Float16
from torch import Tensor

from mla_var3.errors import UnsupportedError
from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, ROWS
from mla_var3.kernel.cute_python.mla.latent.groups import group_shape, ragged_tiles
from mla_var3.kernel.cute_python.mla.latent.merge import merge_rows
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LATENT_FIELDS,
    LatentOperands,
    LatentOptions,
    Partials,
    latent_arguments,
)
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute.launch import RepeatedLaunch
from mla_var3.runtime.cute.torch_fast import current_device_index, is_capturing, raw_stream
from mla_var3.runtime.cute_kernel import CuteProgram, program_for, require_arch

ELEMENT_TYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}

_programs = CALL_STATE.table(1024)
_partials = CALL_STATE.per_thread()
"""Workspaces of each thread by device, stream, SMs and overlap."""
_HELD = "first"
"""Where the workspace of a captured first call is kept until the second has its own."""

shape_for = CALL_STATE.cached(4096)(group_shape)


@CALL_STATE.cached(64)
def sm_count_of(index: int) -> int:
    """SMs of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def allocate_partials(device: torch.device, sm_count: int) -> Partials:
    """Workspace for the partials of a launch, two for every CTA.

    They are as wide as the widest latent rows. The kernel needs no initial content, so nothing is
    written here or in a captured CUDA graph.
    """
    slots = 2 * sm_count
    return Partials(
        torch.empty((slots, ROWS, LATENT), dtype=torch.float32, device=device),
        torch.empty((slots, ROWS), dtype=torch.float32, device=device),
        torch.empty((merge_rows(sm_count), 4), dtype=torch.int32, device=device),
    )


def partials_for(device: torch.device, sm_count: int, overlap: str = "") -> Partials:
    """The workspace that the calls of this thread on the current stream share.

    Work on one stream runs in order, so its calls can share a workspace, but for those that
    overlap. Other threads have their own, because the default stream of each thread has the same
    handle. A CUDA graph gets its own too, because it may be replayed on any stream; torch uses the
    memory of one captured call for the next.
    """
    known: dict[Any, Partials] = _partials.values
    if is_capturing():
        captured = allocate_partials(device, sm_count)
        if overlap == "first":
            known[_HELD] = captured
        elif overlap == "second":
            known.pop(_HELD, None)
        return captured
    key = (device.index, raw_stream(device.index), sm_count, overlap)
    found = known.get(key)
    if found is None:
        found = known[key] = allocate_partials(device, sm_count)
    return found


class PointerLaunch:
    """Repeats a launch on other tensors of the same shapes, strides and dtypes."""

    def __init__(self, launch: RepeatedLaunch, fields: Sequence[str]) -> None:
        """Keep the program with its numbers, and the names of its arguments in order."""
        self._launch = launch
        self._places = {name: place for place, name in enumerate(fields)}

    def bind(
        self, names: Sequence[str], fixed: Mapping[str, int]
    ) -> tuple[Callable[[Sequence[int]], bool], Any]:
        """The launch on the current stream.

        Args:
            names: the operand that each pointer of a launch is for; names that the kernel does not
                have are ignored, and the last of two equal ones counts.
            fixed: pointers that stay, by operand.

        Returns:
            A function that takes the pointers in the order of `names` and launches; see
            `RepeatedLaunch.on_stream`. And an object to keep alive as long as it is used.
        """
        places = self._places
        bound = self._launch.on_stream(
            raw_stream(self._launch.device),
            [places.get(name) for name in names],
            {places[name]: pointer for name, pointer in fixed.items()},
        )
        return bound, None


class LatentLaunch(PointerLaunch):
    """The same for the latent kernel, which has a workspace of its own on every stream.

    Attributes:
        workspace: bytes of each operand that is workspace to the caller, by name; none for the
            latent kernel alone.
    """

    def __init__(
        self,
        launch: RepeatedLaunch,
        device: torch.device,
        sm_count: int,
        fields: Sequence[str] = LATENT_FIELDS,
        workspace: Mapping[str, int] | None = None,
        overlap: str = "",
    ) -> None:
        """Keep what the launches have in common."""
        super().__init__(launch, fields)
        self._overlap = overlap
        self.workspace: Mapping[str, int] = workspace or {}
        self._device = device
        self._index: int = device.index
        self._sm_count = sm_count

    def stream(self) -> int | None:
        """The current stream; None when it cannot launch now.

        It launches on its own device and outside of a capture: a captured launch needs a workspace
        of its own, see `partials_for`.
        """
        index = self._index
        if current_device_index() != index:
            return None
        stream = raw_stream(index)
        # The default stream, 0, is never captured: neither torch nor the driver allows it.
        return None if stream and is_capturing() else stream

    def bind(
        self, names: Sequence[str], fixed: Mapping[str, int]
    ) -> tuple[Callable[[Sequence[int]], bool], Any]:
        """See `PointerLaunch`; the object to keep alive is the workspace."""
        partials = partials_for(self._device, self._sm_count, self._overlap)
        own = {name: tensor.data_ptr() for name, tensor in partials._asdict().items()}
        bound, _ = super().bind(names, {**own, **fixed})
        return bound, partials


def call_arguments(
    operands: LatentOperands, options: LatentOptions
) -> tuple[tuple[Any, ...], int, bool]:
    """The arguments of the latent kernel for one call.

    Returns:
        The arguments, the SMs of the launch, and whether a tensor was copied for them.
    """
    device = operands.q_latent.device
    sm_count = options.sms or sm_count_of(device.index)
    requests, heads = operands.lengths.shape[0], operands.lse.shape[-1]
    tiles = -(-options.max_q * heads // ROWS)
    ragged = ragged_tiles(operands.lse.numel() // heads, requests, options.max_q, heads)
    shape = shape_for(tiles, requests, sm_count, 0, *ragged)
    tree = operands.tree
    copied = tree is not None and tree.stride(2) != 1
    if tree is not None and copied:
        operands = operands._replace(tree=tree.contiguous())
    partials = partials_for(device, sm_count, options.overlap)
    return latent_arguments(operands, partials, options, shape), sm_count, copied


def call_program(
    kernel_fn: Any,
    host_class: Any,
    tiling: Any,
    arguments: tuple[Any, ...],
    like: Tensor,
    **constants: Any,
) -> CuteProgram:
    """The program of a call, compiled for its dtype and for which of its arguments are present."""
    present = tuple(argument is not None for argument in arguments)
    key = (kernel_fn, host_class, like.dtype, present, *constants.items(), like.device.index)
    program: CuteProgram | None = _programs.get(key)
    if program is None:
        require_arch(kernel_fn.__name__, "sm_90a", like.device)
        element = ELEMENT_TYPES.get(like.dtype)
        if element is None:
            raise UnsupportedError(
                f"{kernel_fn.__name__}: expected a 16-bit dtype, got {like.dtype}"
            )
        host = host_class(element, **constants)
        program = program_for(kernel_fn, host, arguments, tiling, like.device)
        _programs.keep(key, program)
    return program
