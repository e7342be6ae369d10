"""What the latent calls of a model's layers share in one forward pass: the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mla_var3.kernel.cute_python.mla.hopper.constants import SCHEDULE_SIZE

if TYPE_CHECKING:
    from mla_var3.attention.replay.key import CallKey

_MEMORY = torch.Tensor, torch.nn.Parameter


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

    def __init__(self, device: torch.device | str, memory: torch.Tensor | None = None) -> None:
        """Begin a pass.

        Args:
            device: where its calls run.
            memory: that of the pass before; allocated where there is none.
        """
        if memory is None:
            memory = torch.zeros(SCHEDULE_SIZE, dtype=torch.int32, device=device)
        self._memory = memory
        self._first: int | None = None  # the address of the first layer's cache
        self._found: Any = None  # what the schedule that is there was found for
        self._asked: Any = None  # the same of the call being made

    def next(self) -> Step:
        """A step for the next pass, on the same memory, which graphs hold."""
        return Step(self._memory.device, self._memory)

    def options(self, key: CallKey | None) -> dict[str, Any]:
        """What a call adds to its options: the memory, and whether its schedule is there.

        Nothing for a call without a key, or on what is no memory.
        """
        found, self._found, self._asked = self._found, None, None
        if key is None or any(type(tensor) not in _MEMORY for tensor in key[1]):
            return {}
        values, tensors = key
        self._asked = values, [tensor.shape for tensor in tensors]
        cache: int = tensors[values[0].names.index("latent")].data_ptr()
        if self._first is None:
            self._first = cache
        scheduled = cache != self._first and self._asked == found
        return {"schedule": self._memory, "scheduled": scheduled}

    def done(self) -> None:
        """The call has been made."""
        self._found = self._asked
