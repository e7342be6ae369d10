"""What the latent calls of a model's layers share in one forward pass: the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.constants import SCHEDULE_SIZE

if TYPE_CHECKING:
    from mla_var3.attention.replay.key import CallKey

_MEMORY = Tensor, torch.nn.Parameter


class Step:
    """One forward pass, whose layers attend to tokens of the same lengths.

    The kernel divides the work over the SMs by the lengths on the device. The first layer's call
    finds this schedule, and those of the others read it. All calls must have the same lengths and
    query counts, and come one after another on one stream. A call that differs from the one before
    in sizes or options finds its own schedule.

    Make a step for every pass, or use one again for another pass of the same layers in the same
    order: the first layer, known by its cache, begins it anew. So it may be captured in a CUDA
    graph, which may be replayed with other lengths.
    """

    def __init__(self, device: torch.device | str, memory: Tensor | None = None) -> None:
        """Begin a pass on a device, with the memory of the pass before, if there was one."""
        if memory is None:
            memory = torch.zeros(SCHEDULE_SIZE, dtype=torch.int32, device=device)
        self._memory = memory
        self._first: int | None = None  # the address of the first layer's cache
        self._found: Any = None  # what the schedule that is there was found for
        self._asked: Any = None  # the same of the call being made
        self._scheduled = False

    def next(self) -> Step:
        """A step for the next pass, on the same memory, which graphs hold."""
        return Step(self._memory.device, self._memory)

    def join(self, key: CallKey | None) -> CallKey | None:
        """The key of a call in this step; unchanged for a call that takes no part.

        Such are calls without a key, and on what is no memory.
        """
        found, self._found, self._asked = self._found, None, None
        if key is None:
            return None
        values, tensors = key
        q, _, latent, _, *index = tensors
        if type(q) not in _MEMORY or type(latent) not in _MEMORY:
            return key
        # With a block table the slots of a request follow from it, else from the cache.
        table = index[0].shape if index and isinstance(index[0], Tensor) else None
        self._asked = asked = values, q.shape, latent.shape, latent.dtype, table
        cache = latent.data_ptr()
        if self._first is None:
            self._first = cache
        self._scheduled = scheduled = cache != self._first and asked == found
        return (*values, "schedule", scheduled), (*tensors, self._memory)

    def options(self, device: torch.device) -> dict[str, Any]:
        """What the call that has joined adds to its task; nothing for one that takes no part."""
        if self._asked is None:
            return {}
        if self._memory.device != device:
            raise InvalidArgumentError("step", f"one on {device}", self._memory.device)
        return {"schedule": self._memory, "scheduled": self._scheduled}

    def done(self) -> None:
        self._found = self._asked
