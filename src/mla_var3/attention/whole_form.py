"""Repeated whole calls whose products are kernels of the launch itself.

One launch does everything, without a product of torch. What is between the steps, latent queries
and outputs, is memory that only the launch knows; it is kept for each thread and stream where it is
small.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_var3.attention.absorbed import WholeLaunch
from mla_var3.attention.addresses import AddressReader
from mla_var3.attention.forms import Layout, Tensors
from mla_var3.attention.scratch import shared_memory
from mla_var3.runtime.tensors import ALIGNMENT_BYTES
from mla_var3.runtime.torch_fast import Maker


@dataclass(frozen=True, slots=True)
class WholeForm:
    """A form of call with the products around the latent space, with its launch.

    Attributes:
        launch: launches products and attention.
        addresses: finds the addresses of its tensors.
        outputs: shape and strides of the output.
        sums: shape and strides of the log-sum-exp.
        between: elements of the latent queries, and of the latent outputs.
        dtype, device: of the output.
        empty: makes tensors there.
        out_at: place of a given output among the tensors; None without one.
        stream: tells the current stream.
    """

    launch: WholeLaunch
    addresses: AddressReader
    outputs: Layout
    sums: Layout
    between: int
    dtype: torch.dtype
    device: torch.device
    empty: Maker
    out_at: int | None
    stream: Callable[[], int]
    _own: threading.local = field(default_factory=threading.local, compare=False)

    def attend(
        self, tensors: Tensors, with_sums: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Output and, if asked for, log-sum-exp; None where this call has to go the whole way."""
        if not self.launch.ready():
            return None
        try:
            launch, own_sums, _ = self._own.bound[self.stream()]
        except (AttributeError, KeyError):
            launch, own_sums, _ = self._bind()
        empty, out_at = self.empty, self.out_at
        out = empty(*self.outputs, self.dtype) if out_at is None else tensors[out_at]
        if with_sums:
            sums = empty(*self.sums, torch.float32)
            done = launch(*self.addresses(tensors), out.data_ptr(), sums.data_ptr())
            return (out, sums) if done else None
        done = launch(*self.addresses(tensors), out.data_ptr(), own_sums)
        return (out, None) if done else None

    def _bind(self) -> tuple[Callable[..., bool], int, Any]:
        """The launch in this thread on the current stream.

        Returns:
            What takes the addresses of all tensors of a call and launches; the address of sums
            that nobody asked for; and what has to live as long as these.
        """
        sums, rows = self._room_bytes()
        memory = shared_memory(self.device, sums + 2 * rows)
        if memory is None:
            found: tuple[Callable[..., bool], int, Any] = self._with_own_room, 0, None
        else:
            start = memory.data_ptr()
            launch, kept = self.launch.bound(start + sums, start + sums + rows)
            found = launch, start, (memory, kept)
        self._own.__dict__.setdefault("bound", {})[self.stream()] = found
        return found

    def _with_own_room(self, *addresses: int) -> bool:
        """Launch with memory between the steps that is allocated for this call alone."""
        *given, asked = addresses
        sums, rows = self._room_bytes()
        room = self.empty((sums + 2 * rows,), (1,), torch.uint8)
        start = room.data_ptr()
        return self.launch(*given, asked or start, start + sums, start + sums + rows)

    def _room_bytes(self) -> tuple[int, int]:
        """Bytes of the log-sum-exp, and of the latent queries or outputs, in aligned units."""
        sums = math.prod(self.sums[0]) * torch.float32.itemsize
        return _aligned(sums), _aligned(self.between * self.dtype.itemsize)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
