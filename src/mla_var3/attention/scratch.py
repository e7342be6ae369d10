"""Memory between the steps of one call, which the calls of a thread on one stream share.

Work on a stream is in order, so the next call may write where the one before has read. Another
thread may enqueue between the steps of a call, so it has memory of its own. Captured calls must not
come here: a CUDA graph may be replayed on any stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from mla_var3.runtime.torch_fast import raw_stream

SMALLEST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26
"""Above this a call runs so long that allocating costs nothing, and keeping memory does."""

_own = threading.local()
"""Of each thread, `buffers`: memory by device, stream, size and mode."""


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
