"""Repeated calls that are one launch: outputs, addresses, the launch, and nothing else.

What such a call needs is prepared once for each thread and stream, so that later ones find all of
it in one place. Threads do not share it, because a launch writes its arguments into memory of its
own before it releases the interpreter.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_var3.attention.backends.latent import Launch, StreamLaunch
from mla_var3.attention.replay.key import Layout, Tensors
from mla_var3.attention.replay.pointers import AddressReader
from mla_var3.attention.replay.scratch import add_sums, sums_stock
from mla_var3.runtime.torch_fast import Maker

_is_inference = torch.is_inference_mode_enabled


Prepared = tuple[StreamLaunch, list[torch.Tensor], int, Any]
"""What the calls of one thread on one stream in one mode have in common: the launch; memory for
sums that no call has had yet, see `scratch`; the address of sums that nobody asked for, 0 for forms
whose callers always do; and what has to live as long as this. A plain tuple, which is taken apart
faster than one with names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchForm:
    """A form of call that is one launch.

    Attributes:
        launch: launches the kernel.
        addresses: finds the addresses of its tensors.
        outputs: shape and strides of the output.
        sums: shape and strides of the log-sum-exp.
        dtype, device: of the output.
        empty: makes tensors there.
        out_at: place of a given output among the tensors; None without one.
    """

    launch: Launch
    addresses: AddressReader
    outputs: Layout
    sums: Layout
    dtype: torch.dtype
    device: torch.device
    empty: Maker
    out_at: int | None = None
    _own: threading.local = field(default_factory=threading.local, compare=False)

    def attend(
        self, tensors: Tensors, with_sums: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Output and, if asked for, log-sum-exp; None where this call has to go the whole way."""
        stream = self.launch.stream()
        if stream is None:
            return None
        launch, stock, own_sums, _ = self.prepared(stream, _is_inference())
        if self.out_at is None:
            shape, strides = self.outputs
            out = self.empty(shape, strides, self.dtype)
        else:
            out = tensors[self.out_at]
        sums = None
        if with_sums:
            sums = stock.pop() if stock else add_sums(stock, self.sums, self.empty)
            own_sums = sums.data_ptr()
        done = launch(self.addresses(tensors, out.data_ptr(), own_sums))
        return (out, sums) if done else None

    def prepared(self, stream: int, inference: bool) -> Prepared:
        """What the calls of this thread have in common, made by the first of them.

        Args:
            stream: the current stream.
            inference: whether inference mode is on.
        """
        try:
            known: Prepared = self._own.prepared[stream, inference]
        except (AttributeError, KeyError):
            return self._prepare(stream, inference)
        return known

    def _prepare(self, stream: int, inference: bool) -> Prepared:
        launch, own_sums, kept = self._bind()
        stock = sums_stock(self.device, stream, inference, self.sums)
        found = launch, stock, own_sums, kept
        self._own.__dict__.setdefault("prepared", {})[stream, inference] = found
        return found

    def _bind(self) -> tuple[StreamLaunch, int, Any]:
        """The launch on the current stream, the address of own sums, and what has to live on."""
        launch, kept = self.launch.bound()
        return launch, 0, kept
