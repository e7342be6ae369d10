"""Replays: what a repeated call does instead of checking, choosing and preparing again.

The first call of a key goes the full path. If its kernel took every tensor as it was, the launch is
kept (see `key.py`), and the next call of that key allocates its outputs, writes pointers and
launches. Everything else goes the full path again: another key, an unaligned pointer, the capture
of a CUDA graph, another current device.

What the calls of one thread on one stream have in common is prepared once. Threads do not share it,
because a launch writes its arguments into its own memory before it releases the interpreter.

Checks of values on the device and traced programs never come here.

Memory that calls do not allocate belongs to one thread and stream. Workspace is shared by all calls
of a thread on a stream. Work on a stream runs in order, so the next call may write where the one
before has read; another thread may enqueue between the steps of a call. The LSE of a call goes to
its caller. It is small, and allocating and freeing it costs the host as much as the output does. So
memory is allocated for several and handed out in turn. No part is handed out twice, and each is a
tensor of its own that keeps the whole allocation alive: writing into one reaches no other, however
long it is kept. The memory was allocated on the stream that it is handed out on, as if each call
had done it, so the allocator's rules about streams hold for every part. Captured calls must not use
this memory: a CUDA graph may be replayed on any stream.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.backends.latent import Launch, StreamLaunch
from mla_var3.attention.replay.key import CallKey, Layout, Tensors, store_replay, tensor_names
from mla_var3.attention.request.task import AttentionTask
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute.torch_fast import (
    Maker,
    raw_stream,
    separate_rows,
    tensor_maker,
    view_as,
    without_gradients,
)
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

_is_inference = torch.is_inference_mode_enabled
_LSE_BYTES = torch.float32.itemsize

StreamState = tuple[StreamLaunch, list[Tensor], int, Any]
"""What the calls of one thread on one stream in one mode have in common: the launch; LSE tensors
that no call has had yet; the pointer of an LSE that no caller asked for, 0
where callers always do; and objects to keep alive. A plain tuple, which unpacks faster."""

PointerReader = Callable[[Tensors, int, int], tuple[int, ...]]
"""Takes the tensors of a call and the pointers of output and LSE; returns all pointers in order."""


def _read(tensors: Tensors, *last: int) -> tuple[int, ...]:
    return (*[tensor.data_ptr() for tensor in tensors], *last)


# The most frequent numbers of tensors. Calls that are written out cost two thirds of a loop.
def _read5(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
    a, b, c, d, e = tensors
    return a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), out, lse


def _read6(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
    a, b, c, d, e, f = tensors
    return (
        a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), f.data_ptr(),
        out, lse,
    )  # fmt: skip


def _read7(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
    a, b, c, d, e, f, g = tensors
    return (
        a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), f.data_ptr(),
        g.data_ptr(), out, lse,
    )  # fmt: skip


def _read8(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
    a, b, c, d, e, f, g, h = tensors
    return (
        a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(), e.data_ptr(), f.data_ptr(),
        g.data_ptr(), h.data_ptr(), out, lse,
    )  # fmt: skip


READERS: dict[int, PointerReader] = {5: _read5, 6: _read6, 7: _read7, 8: _read8}
"""By number of tensors; all read the pointers in the order of the tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A call that is one launch, of the latent kernel alone or with its projections.

    Attributes:
        launch: launches the kernels.
        names: the operand that each of the call's pointers is for.
        outputs: names of the operands for output and LSE, whose pointers come last.
        fixed: tensors that all calls share, by operand.
        output, lse: shape and strides of the results.
        dtype, device: of the output.
        empty: makes tensors there.
        out_at: place of a given output among the tensors; None without one.
        pointers: reads the call's pointers in the order of `names`, then output and LSE.
    """

    launch: Launch
    names: Sequence[str]
    outputs: Sequence[str]
    fixed: Mapping[str, Tensor]
    output: Layout
    lse: Layout
    dtype: torch.dtype
    device: torch.device
    empty: Maker
    out_at: int | None = None
    pointers: PointerReader = _read
    _threads: threading.local = field(default_factory=threading.local, compare=False)

    def attend(
        self, tensors: Tensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None] | None:
        """Output and, if asked for, LSE; None when this call has to go the full path."""
        stream = self.launch.stream()
        if stream is None:
            return None
        launch, lses, lse_pointer, _ = self.prepared(stream, _is_inference())
        if self.out_at is None:
            shape, strides = self.output
            out = self.empty(shape, strides, self.dtype)
        else:
            out = tensors[self.out_at]
        lse = None
        if with_lse:
            lse = lses.pop() if lses else new_lse(lses, self.lse, self.empty)
            lse_pointer = lse.data_ptr()
        done = launch(self.pointers(tensors, out.data_ptr(), lse_pointer))
        return (out, lse) if done else None

    def prepared(self, stream: int, inference: bool) -> StreamState:
        """What the calls of this thread have in common; the first of them prepares it."""
        try:
            known: StreamState = self._threads.prepared[stream, inference]
        except (AttributeError, KeyError):
            lses = kept_lses(self.device, stream, inference, self.lse)
            launch, pointer, kept = self._bind()
            known = launch, lses, pointer, kept
            self._threads.__dict__.setdefault("prepared", {})[stream, inference] = known
        return known

    def _bind(self) -> tuple[StreamLaunch, int, Any]:
        """The launch on the current stream, the pointer of an unused LSE, objects to keep alive.

        A launch with a workspace gets memory that all calls share. It begins with the LSE that no
        caller asks for. Where it is too large to be kept, each call allocates its own.
        """
        if not self.launch.workspace:
            launch, kept = self.launch.bind([*self.names, *self.outputs], self._fixed())
            return launch, 0, kept
        lse_bytes = aligned(math.prod(self.lse[0]) * _LSE_BYTES)
        launch, memory, kept = self._bind_workspace(lse_bytes)
        if memory is not None:
            return launch, memory.data_ptr(), kept

        def launch_with_lse(pointers: Sequence[int]) -> bool:
            *given, lse = pointers
            if lse:
                return launch(pointers)
            unused = self.empty((lse_bytes,), (1,), torch.uint8)
            return launch((*given, unused.data_ptr()))

        return launch_with_lse, 0, kept

    def _fixed(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.fixed.items()}

    def _bind_workspace(self, first: int) -> tuple[StreamLaunch, Tensor | None, Any]:
        """The launch on the current stream, memory for its workspace, and objects to keep alive.

        The memory begins with the `first` bytes, aligned, that the replay needs itself. It is None
        where it is too large to be kept; then each launch allocates the workspace.
        """
        names, parts = [*self.names, *self.outputs], self.launch.workspace
        sizes = [aligned(size) for size in parts.values()]
        starts = [first + sum(sizes[:place]) for place in range(len(sizes))]
        memory = shared_memory(self.device, first + sum(sizes))
        if memory is not None:
            begin = memory.data_ptr()
            own = {name: begin + start for name, start in zip(parts, starts, strict=True)}
            launch, kept = self.launch.bind(names, self._fixed() | own)
            return launch, memory, (memory, kept)
        launch, kept = self.launch.bind([*names, *parts], self._fixed())
        if not parts:
            return launch, None, kept

        def launch_with_workspace(pointers: Sequence[int]) -> bool:
            workspace = self.empty((sum(sizes),), (1,), torch.uint8)
            begin = workspace.data_ptr() - first
            return launch((*pointers, *(begin + start for start in starts)))

        return launch_with_workspace, None, kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedReplay(Replay):
    """A call whose projections are batched products of torch, around a launch of the latent kernel.

    Its tensors begin with w_uk, w_uv and q_nope. By head, the layouts are those of `q_nope`, `[h,
    count, d]`, of latent queries and outputs, and of the output.
    """

    queries: Layout
    latents: Layout
    by_head: Layout

    def attend(
        self, tensors: Tensors, with_lse: bool = True
    ) -> tuple[Tensor, Tensor | None] | None:
        if _is_inference():
            return self._attend(tensors, with_lse, True)
        with without_gradients():
            return self._attend(tensors, with_lse, False)

    def _attend(
        self, tensors: Tensors, with_lse: bool, inference: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        stream = self.launch.stream()
        if stream is None:
            return None
        launch, lses, _, (workspace, _) = self.prepared(stream, inference)
        q_latent, o_latent, lse = workspace or self._allocated()
        w_uk, w_uv, q_nope = tensors[:3]
        torch.bmm(view_as(q_nope, *self.queries, 0), w_uk, out=q_latent)
        if with_lse:
            lse = lses.pop() if lses else new_lse(lses, self.lse, self.empty)
        written = q_latent.data_ptr(), o_latent.data_ptr(), lse.data_ptr()
        if not launch(_read(tensors, *written)):
            return None
        at = self.out_at
        out = self.empty(*self.output, self.dtype) if at is None else tensors[at]
        torch.bmm(o_latent, w_uv, out=view_as(out, *self.by_head, 0))
        return out, lse if with_lse else None

    def _bind(self) -> tuple[StreamLaunch, int, Any]:
        shape, strides = self.latents
        count, lse_bytes = math.prod(shape), math.prod(self.lse[0]) * _LSE_BYTES
        start, rows_bytes = aligned(lse_bytes), 2 * count * self.dtype.itemsize
        launch, memory, kept = self._bind_workspace(aligned(start + rows_bytes))
        if memory is None:
            return launch, 0, (None, kept)
        rows = memory[start : start + rows_bytes].view(self.dtype).view(2, count)
        first, second = (part.as_strided(shape, strides) for part in rows)
        return launch, 0, ((first, second, memory[:lse_bytes].view(torch.float32)), kept)

    def _allocated(self) -> tuple[Tensor, ...]:
        """Latent queries and outputs by head, and an LSE, for one call."""
        rows = (self.empty(*self.latents, self.dtype) for _ in range(2))
        return (*rows, self.empty(*self.lse, torch.float32))


def keep_replay(
    key: CallKey | None,
    task: AttentionTask,
    launch: Launch | None,
    cache: Any,
    options: Mapping[str, Any],
) -> None:
    """Keep the launch of a checked call for the next calls of its key, where they can use it.

    Cache and options are as the caller gave them.
    """
    if key is None or launch is None or not _as_given(task, options):
        return
    if launch.stream() is None:
        return  # captured: tensors that the call made hold nothing before the graph has run
    if not (task.out is None or task.out.is_contiguous()):
        return  # it is written through a copy
    if task.w_uk is None or task.q.is_contiguous():
        store_replay(key, _replay_of(task, launch, tensor_names(key, cache, options)))


def _replay_of(task: AttentionTask, launch: Launch, names: list[str]) -> Replay:
    fixed = {} if "lengths" in names else {"lengths": task.cache.lengths}
    rows, d, h = tuple(task.q.shape[:-1]), task.q.shape[-1], task.h
    k, width = task.cache.latent.shape[-1], task.width
    common: dict[str, Any] = {
        "launch": launch,
        "names": ["tree" if name == "tree_mask" else name for name in names],
        "fixed": fixed,
        "output": _dense((*rows, width)),
        "lse": _dense(rows),
        "dtype": task.q.dtype,
        "device": task.q.device,
        "empty": tensor_maker(task.q.device),
        "out_at": names.index("out") if "out" in names else None,
        "pointers": READERS.get(len(names), _read),
    }
    if task.w_uk is None:
        return Replay(outputs=("o_latent", "lse"), **common)
    if "q_latent" in launch.workspace:  # it projects by itself
        return Replay(outputs=("out", "lse"), **common)
    count = math.prod(rows[:-1])
    queries, latents, by_head = (
        ((h, count, columns), (columns, h * columns, 1)) for columns in (d, k, width)
    )
    return ProjectedReplay(
        outputs=("q_latent", "o_latent", "lse"), queries=queries, latents=latents,
        by_head=by_head, **common,
    )  # fmt: skip


def _dense(shape: tuple[int, ...]) -> Layout:
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return shape, tuple(strides)


def _as_given(task: AttentionTask, options: Mapping[str, Any]) -> bool:
    """Whether the checks passed the caller's own tensors on, not copies of them."""
    pairs = (
        (options.get("lengths"), task.cache.lengths),
        (options.get("cu_seqlens_q"), task.cu_seqlens_q),
        (options.get("tree_mask"), task.tree),
        (options.get("total_lengths"), task.total_lengths),
    )
    return all(
        given is None or (isinstance(given, Tensor) and given.data_ptr() == taken.data_ptr())
        for given, taken in pairs
        if taken is not None
    )


# --- memory ---------------------------------------------------------------------------------------

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
