"""Memory of repeated calls that is not allocated by each of them, of one thread and stream.

Between the steps of a call lies memory that all calls share. Work on a stream is in order, so the
next call may write where the one before has read. Another thread may enqueue between the steps of a
call, so it has memory of its own.

The log-sum-exp of a call goes to its caller. It is small, and to allocate and free it costs the
host as much as for the output. So memory is allocated for several and handed out in turn. No part
is handed out twice, and each is a tensor of its own that keeps all of the memory alive, so what a
caller writes into one reaches no other, however long it is kept. The memory was allocated on the
stream that it is handed out on, as if each call had done it: what the allocator promises about
streams holds for every part.

Captured calls must not come here: a CUDA graph may be replayed on any stream.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial

import torch

from mla_var3.attention.replay.key import Layout
from mla_var3.runtime.tensors import ALIGNMENT_BYTES
from mla_var3.runtime.torch_fast import Maker, raw_stream, separate_rows

SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26
"""Above this a call runs so long that allocating costs nothing, and keeping memory does."""

SUMS_AT_ONCE = 32
SUMS_BYTES = 1 << 16
"""Memory for the sums of several calls takes no more than this; one that is larger is allocated by
its call, which runs longer."""

_own = threading.local()
"""Of each thread, `buffers`: memory by device, stream, size and mode; and `stocks`: memory for sums
by device, stream, mode and layout."""


def stream_reader(device: torch.device) -> Callable[[], int]:
    """What tells the stream that work on a device goes to; always 0 where there are none."""
    return partial(raw_stream, device.index) if device.type == "cuda" else int


def shared_memory(device: torch.device, needed: int) -> torch.Tensor | None:
    """Memory that the calls of this thread on the current stream share.

    Sizes are powers of two, so all buffers of a stream together take less than twice the largest.
    In inference mode it is other memory than outside: memory of inference mode cannot be written
    outside of it, and operations on other memory cost more in it.

    Args:
        device: where; the current one when it is a GPU.
        needed: bytes.

    Returns:
        At least so many bytes, as uint8; None for more than is kept.
    """
    if needed > LARGEST_BYTES:
        return None
    size = max(SMALLEST_BYTES, 1 << (needed - 1).bit_length())
    key = (device, stream_reader(device)(), size, torch.is_inference_mode_enabled())
    buffers: dict[tuple[torch.device, int, int, bool], torch.Tensor]
    buffers = _own.__dict__.setdefault("buffers", {})
    found = buffers.get(key)
    if found is None:
        found = buffers[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return found


def sums_stock(
    device: torch.device, stream: int, inference: bool, layout: Layout
) -> list[torch.Tensor]:
    """Memory for sums of one layout that no call of this thread has had yet; may be empty.

    A call takes the last of it, or has `add_sums` fill it.

    Args:
        device: where.
        stream: the stream that the calls go to.
        inference: whether they are in inference mode, whose tensors are others.
        layout: shape and strides of the sums of a call.
    """
    stocks: dict[tuple[torch.device, int, bool, Layout], list[torch.Tensor]]
    stocks = _own.__dict__.setdefault("stocks", {})
    return stocks.setdefault((device, stream, inference, layout), [])


def add_sums(stock: list[torch.Tensor], layout: Layout, empty: Maker) -> torch.Tensor:
    """Memory for the sums of one call, and of some later ones where it is small.

    Args:
        stock: takes that of the later ones.
        layout: shape and strides.
        empty: makes tensors on the current stream.
    """
    shape, strides = layout
    step = aligned(math.prod(shape) * torch.float32.itemsize)
    count = min(SUMS_AT_ONCE, SUMS_BYTES // max(step, 1))
    if count > 1:
        step //= torch.float32.itemsize
        stock += separate_rows(empty((count, *shape), (step, *strides), torch.float32))
    return stock.pop() if stock else empty(shape, strides, torch.float32)


def aligned(size: int) -> int:
    """A number of bytes, in whole units of what kernels ask of addresses."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
