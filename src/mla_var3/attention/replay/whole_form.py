"""Repeated whole calls whose products are kernels of the launch itself.

One launch does everything, without a product of torch. What is between the steps, latent queries
and outputs, is memory that only the launch knows; it is kept for each thread and stream where it is
small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.backends.latent import StreamLaunch
from mla_var3.attention.replay.launch_form import LaunchForm
from mla_var3.attention.replay.scratch import aligned, shared_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeForm(LaunchForm):
    """A form of call with the products around the latent space, with its launch.

    Attributes:
        between: elements of the latent queries, and of the latent outputs.
    """

    between: int

    def _bind(self) -> tuple[StreamLaunch, int, Any]:
        """The launch with its memory between the steps, which begins with sums of its own."""
        sums, rows = self._room_bytes()
        memory = shared_memory(self.device, sums + 2 * rows)
        if memory is None:
            launch, kept = self.launch.bound()
            return self._with_own_room(launch), 0, kept
        start = memory.data_ptr()
        launch, kept = self.launch.bound(start + sums, start + sums + rows)
        return launch, start, (memory, kept)

    def _with_own_room(self, launch: StreamLaunch) -> StreamLaunch:
        """The launch with memory between the steps that is allocated for each call alone."""
        sums, rows = self._room_bytes()

        def launch_with_room(addresses: Sequence[int]) -> bool:
            *given, asked = addresses
            room = self.empty((sums + 2 * rows,), (1,), torch.uint8)
            start = room.data_ptr()
            return launch((*given, asked or start, start + sums, start + sums + rows))

        return launch_with_room

    def _room_bytes(self) -> tuple[int, int]:
        """Bytes of the log-sum-exp, and of the latent queries or outputs, in aligned units."""
        sums = math.prod(self.sums[0]) * torch.float32.itemsize
        return aligned(sums), aligned(self.between * self.dtype.itemsize)
