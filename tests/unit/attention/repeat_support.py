"""A kernel on the CPU that can be repeated by addresses, for the short way of the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mla_var3.attention import backends
from mla_var3.attention.absorbed import AbsorbedKernel
from mla_var3.attention.task import AttentionTask
from mla_var3.attention.tiled import TorchTiled
from mla_var3.attention.view import CacheView

KERNEL = "repeatable"


def attend(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    table: torch.Tensor | None,
    lengths: torch.Tensor,
    bounds: torch.Tensor | None,
    tree: torch.Tensor | None,
    max_q: int,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    empty_positive: bool = False,
) -> None:
    """The kernel's work, by the PyTorch path."""
    task = AttentionTask(
        q=q, q_rope=q_rope, cache=CacheView(latent, rope, lengths, table), w_uk=None, w_uv=None,
        causal=causal, scale=scale, tree=tree, cu_seqlens_q=bounds, max_q=max_q,
    )  # fmt: skip
    output, sums = TorchTiled().run(task)
    out.copy_(output)
    lse.copy_(sums)
    if empty_positive:
        lse[lse == -torch.inf] = torch.inf


class MemoryLaunch:
    """Repeats the work on the memory at other addresses, as a GPU would."""

    def __init__(
        self, kernel: RepeatableKernel, arguments: tuple[Any, ...], empty_positive: bool
    ) -> None:
        self.kernel = kernel
        self.empty_positive = empty_positive
        self.numbers = arguments[8:11]
        tensors = (*arguments[:8], *arguments[11:])
        self.forms = [None if t is None else (t.shape, t.stride(), t.dtype) for t in tensors]

    def ready(self) -> bool:
        return self.kernel.ready

    def __call__(self, *addresses: int) -> bool:
        if any(address % 16 for address in addresses):
            return False
        tensors = [self._at(*pair) for pair in zip(addresses, self.forms, strict=True)]
        attend(*tensors[:8], *self.numbers, *tensors[8:], self.empty_positive)
        self.kernel.repeats += 1
        return True

    @staticmethod
    def _at(address: int, form: Any) -> Any:
        if form is None:
            assert address == 0
            return None
        shape, strides, dtype = form
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        bytes_long = (reach + 1) * dtype.itemsize
        memory = (ctypes.c_char * bytes_long).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class RepeatableKernel:
    """The kernel with counters.

    Attributes:
        calls: calls that went the whole way.
        repeats: calls that went the short way.
        ready: what launches say when they are asked.
    """

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.ready = True

    def __call__(self, *arguments: Any, empty_positive: bool = False) -> MemoryLaunch:
        attend(*arguments, empty_positive)
        self.calls += 1
        return MemoryLaunch(self, arguments, empty_positive)


@contextmanager
def repeatable_kernel() -> Iterator[RepeatableKernel]:
    """The kernel, as a backend of the name `KERNEL`."""
    kernel = RepeatableKernel()
    backends.register(AbsorbedKernel(KERNEL, "torch", kernel, runs_on_cpu=True))
    try:
        yield kernel
    finally:
        backends.unregister(KERNEL, "torch")
