"""Memory that replays do not allocate in every call; each belongs to one thread and stream.

Workspace is shared by all calls of a thread on a stream. Work on a stream runs in order, so the
next call may write where the one before has read. Another thread may enqueue between the steps of a
call, so it has memory of its own.

The LSE of a call goes to its caller. It is small, and allocating and freeing it costs the host as
much as the output does. So memory is allocated for several and handed out in turn. No part is
handed out twice, and each is a tensor of its own that keeps the whole allocation alive: writing
into one reaches no other, however long it is kept. The memory was allocated on the stream that it
is handed out on, as if each call had done it, so the allocator's rules about streams hold for every
part.

Captured calls must not use this memory: a CUDA graph may be replayed on any stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mla_var3.attention.replay.key import Layout
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute.torch_fast import Maker, raw_stream, separate_rows
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26
"""Above this a call runs so long that allocating costs nothing, and keeping memory does."""

LSES_AT_ONCE = 32
LSES_BYTES = 1 << 16
"""An allocation for the LSEs of several calls takes no more than this. A larger LSE is allocated by
its call, which runs longer."""

_buffers = CALL_STATE.per_thread()
"""Workspace by device, stream, size and mode."""
_lses = CALL_STATE.per_thread()
"""LSE tensors by device, stream, mode and layout."""


def stream_reader(device: torch.device) -> Callable[[], int]:
    """What tells the stream that work on a device goes to; always 0 where there are none."""
    return partial(raw_stream, device.index) if device.type == "cuda" else int


def shared_memory(device: torch.device, needed: int) -> Tensor | None:
    """Workspace that the calls of this thread on the current stream share; None for too much.

    It is uint8, on the device, the current one when it is a GPU, with at least the bytes that are
    needed. Sizes are powers of two, so all buffers of a stream together take less than twice the
    largest. Inference mode has its own: its memory cannot be written outside of it, and operations
    on other memory cost more in it.
    """
    if needed > LARGEST_BYTES:
        return None
    size = max(SMALLEST_BYTES, 1 << (needed - 1).bit_length())
    key = (device, stream_reader(device)(), size, torch.is_inference_mode_enabled())
    buffers: dict[tuple[torch.device, int, int, bool], Tensor] = _buffers.values
    found = buffers.get(key)
    if found is None:
        found = buffers[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return found


def kept_lses(device: torch.device, stream: int, inference: bool, layout: Layout) -> list[Tensor]:
    """LSE tensors of one layout that no call of this thread has had yet; may be empty.

    A call on the stream, in inference mode or not, takes the last, or has `new_lse` add some.
    """
    known: dict[tuple[torch.device, int, bool, Layout], list[Tensor]] = _lses.values
    return known.setdefault((device, stream, inference, layout), [])


def new_lse(kept: list[Tensor], layout: Layout, empty: Maker) -> Tensor:
    """An LSE tensor for one call on the current stream; of small ones, `kept` takes some more."""
    shape, strides = layout
    step = aligned(math.prod(shape) * torch.float32.itemsize)
    count = min(LSES_AT_ONCE, LSES_BYTES // max(step, 1))
    if count > 1:
        step //= torch.float32.itemsize
        kept += separate_rows(empty((count, *shape), (step, *strides), torch.float32))
    return kept.pop() if kept else empty(shape, strides, torch.float32)


def aligned(size: int) -> int:
    """A number of bytes, rounded up to the alignment that kernels need."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
