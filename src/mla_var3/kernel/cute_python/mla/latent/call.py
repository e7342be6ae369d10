"""Absorbed kernels on tensors that change from call to call: what a serving engine needs.

A plan fixes its tensors and prepares its arguments. Here programs are kept by what they were
compiled for, and arguments are written anew for every launch. A call is one launch: the blocks
of the attention join its pieces themselves.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cutlass import BFloat16, Float16
from torch import Tensor

from mla_var3.errors import UnsupportedError
from mla_var3.kernel.cute_python.mla.hopper.constants import LATENT, ROWS
from mla_var3.kernel.cute_python.mla.latent.merge import merge_rows
from mla_var3.kernel.cute_python.mla.latent.scheduler import GroupShape, group_shape
from mla_var3.runtime.cute.launch import RepeatedLaunch
from mla_var3.runtime.cute_kernel import CuteProgram, Int64Arg, program_for, require_arch
from mla_var3.runtime.torch_fast import current_device_index, is_capturing, raw_stream

ELEMENT_TYPES = {torch.bfloat16: BFloat16, torch.float16: Float16}

Partials = tuple[Tensor, Tensor, Tensor]
"""o_partial, lse_partial and merges, see `merge_partials.py`."""

_programs: dict[tuple[Any, ...], CuteProgram] = {}
_own = threading.local()
"""Of each thread, `rooms`: room for pieces by device, stream and SMs."""

shape_for = functools.lru_cache(maxsize=4096)(group_shape)


@functools.cache
def sm_count_of(index: int) -> int:
    """SMs of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def allocate_partials(device: torch.device, sm_count: int) -> Partials:
    """Room for pieces: o_partial, lse_partial, merges, with two slots for every block.

    The kernel takes it as it is, so nothing is written here, nor in a CUDA graph at every replay.
    """
    slots = 2 * sm_count
    return (
        torch.empty((slots, ROWS, LATENT), dtype=torch.float32, device=device),
        torch.empty((slots, ROWS), dtype=torch.float32, device=device),
        torch.empty((merge_rows(sm_count), 4), dtype=torch.int32, device=device),
    )


def workspace(device: torch.device, sm_count: int) -> Partials:
    """Room for pieces that the calls of a thread share.

    Work on one stream is in order, so calls on it share their room. Other threads have their own,
    because the default stream of each is the same number. A CUDA graph gets room of its own too,
    because it may be replayed on any stream.
    """
    if is_capturing():
        return allocate_partials(device, sm_count)
    rooms: dict[tuple[int, int, int], Partials] = _own.__dict__.setdefault("rooms", {})
    key = (device.index, raw_stream(device.index), sm_count)
    found = rooms.get(key)
    if found is None:
        found = rooms[key] = allocate_partials(device, sm_count)
    return found


class AbsorbedLaunch:
    """Repeats an absorbed launch on other tensors of the same shapes, strides and dtypes.

    Its addresses are those of q_latent, q_rope, latent, rope, block_table, lengths, query_begins,
    tree, out and lse; any number for absent ones.
    """

    between = 0
    """Pieces of memory between the steps of the launch, last of its addresses."""

    def __init__(self, launch: RepeatedLaunch, device: torch.device, sm_count: int) -> None:
        """Keep what the launches have in common.

        Args:
            launch: the program with its numbers.
            device: the GPU.
            sm_count: its SMs.
        """
        self._launch = launch
        self._device = device
        self._index: int = device.index
        self._sm_count = sm_count

    def stream(self) -> int | None:
        """The current stream; None where it cannot launch now.

        It launches on its device, outside of a capture: a captured launch needs room of its own,
        see `workspace`.
        """
        index = self._index
        if current_device_index() != index:
            return None
        stream = raw_stream(index)
        # The default stream, 0, is never captured: neither torch nor the driver allows it.
        return None if stream and is_capturing() else stream

    def bound(self, *between: int) -> tuple[Callable[[Sequence[int]], bool], Any]:
        """The launch on the current stream.

        Args:
            between: addresses of the memory between the steps, to be fixed; none to leave them to
                each launch.

        Returns:
            What takes the other addresses and launches, for one thread at a time; False, and
            nothing is launched, where an address is not aligned as compiled for. And what has to
            live as long as it is used: the room for pieces.
        """
        partials = workspace(self._device, self._sm_count)
        room = (*between, *(part.data_ptr() for part in partials))
        return self._launch.on_stream(raw_stream(self._index), *room), partials


def attention_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor | None,
    lengths: Tensor,
    query_begins: Tensor | None,
    tree: Tensor | None,
    out: Tensor,
    lse: Tensor,
    partials: Partials,
    scale_log2e: float,
    queries: int,
    heads: int,
    causal: bool,
    shape: GroupShape,
    newest: int = 0,
) -> tuple[object, ...]:
    """The arguments of an absorbed kernel's host function, in order.

    Args:
        q_latent, q_rope: queries whose rows, the last dimension but one, lie at equal distances.
        latent, rope: dense [b, t, ...] or paged [pages, page, ...] cache.
        block_table: for a paged cache.
        lengths: [b] int32.
        query_begins: [b + 1] int32, or None when all requests have `queries`.
        tree: bool [b, queries, queries] with stride 1 in a row, or None.
        out, lse: outputs.
        partials: room for pieces.
        scale_log2e: softmax scale times log2 e.
        queries: queries of a request, the most of any where they differ.
        heads: query heads.
        causal: whether a query sees no later token.
        shape: the gangs.
        newest: newest tokens to leave out.
    """
    return (
        q_latent, q_rope, latent, rope, block_table, lengths, query_begins,
        None if tree is None else tree.view(torch.uint8), out, lse, *partials,
        scale_log2e, lengths.shape[0], queries, heads, lse.numel(),
        q_latent.stride(-2), q_rope.stride(-2), latent.shape[0], latent.shape[1],
        Int64Arg(latent.stride(0)), latent.stride(1), Int64Arg(rope.stride(0)), rope.stride(1),
        0 if block_table is None else block_table.stride(0),
        0 if tree is None else tree.stride(0), 0 if tree is None else tree.stride(1),
        newest, int(causal), shape.group_ctas, shape.visits, shape.group_count,
    )  # fmt: skip


def call_arguments(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor | None,
    lengths: Tensor,
    query_begins: Tensor | None,
    tree: Tensor | None,
    max_queries: int,
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[tuple[Any, ...], int, bool]:
    """The arguments of an absorbed kernel for one call on changing tensors.

    Args:
        q_latent, q_rope: [b, s, h, ...], or [queries, h, ...] with `query_begins`; rows, the last
            dimension but one, at equal distances.
        latent, rope: dense [b, t, ...] or paged [pages, page, ...] cache.
        block_table: [b, pages of a request] int32 for a paged cache.
        lengths: [b] int32, on the device.
        query_begins: [b + 1] int32, on the device; None when all requests have `max_queries`.
        tree: bool [b, max_queries, max_queries], which of the newest tokens a query sees, within
            causal order; None for causal order alone.
        max_queries: most queries of any request.
        causal: whether a query sees no later token.
        scale: factor on the logits.
        out: like q_latent, contiguous.
        lse: float32, like q_latent without the last dimension, contiguous.

    Returns:
        The arguments, the SMs of the device, and whether a tensor was copied for them.
    """
    device, heads = q_latent.device, q_latent.shape[-2]
    sm_count = sm_count_of(device.index)
    shape: GroupShape = shape_for(-(-max_queries * heads // ROWS), lengths.shape[0], sm_count)
    copied = tree is not None and tree.stride(2) != 1
    if tree is not None and copied:
        tree = tree.contiguous()
    arguments = attention_arguments(
        q_latent, q_rope, latent, rope, block_table, lengths, query_begins, tree, out, lse,
        workspace(device, sm_count), scale / math.log(2.0), max_queries, heads, causal, shape,
    )  # fmt: skip
    return arguments, sm_count, copied


def call_program(
    kernel_fn: Any,
    host_class: Any,
    tiling: Any,
    empty_positive: bool,
    arguments: tuple[Any, ...],
    like: Tensor,
) -> CuteProgram:
    """The program of a call, compiled for its dtype and for which of its tensors there are.

    Args:
        kernel_fn: the kernel function of the attention.
        host_class: the host code, made with an element type, `few` and `empty_positive`.
        tiling: the tiling of the attention, which says `few`: query rows on the N side, or 0.
        empty_positive: see `final_lse`.
        arguments: those of the host code.
        like: a tensor of the call's dtype and device.
    """
    present = tuple(argument is not None for argument in arguments)
    few = tiling.few
    key = (kernel_fn, host_class, like.dtype, few, present, empty_positive, like.device.index)
    program = _programs.get(key)
    if program is None:
        require_arch(kernel_fn.__name__, "sm_90a", like.device)
        element = ELEMENT_TYPES.get(like.dtype)
        if element is None:
            raise UnsupportedError(
                f"{kernel_fn.__name__}: expected a 16-bit dtype, got {like.dtype}"
            )
        host = host_class(element, few, empty_positive=empty_positive)
        program = _programs[key] = program_for(kernel_fn, host, arguments, tiling, like.device)
    return program
