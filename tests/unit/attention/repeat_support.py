"""A kernel on the CPU that can be repeated by addresses, for the short way of the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mla_var3.attention.backends import registry as backends
from mla_var3.attention.backends.latent import AbsorbedKernel
from mla_var3.attention.backends.projections import project_heads
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.call import _backend
from mla_var3.attention.request.task import AttentionTask

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

    between = 0

    def __init__(
        self, kernel: RepeatableKernel, arguments: tuple[Any, ...], empty_positive: bool
    ) -> None:
        self.kernel = kernel
        self.empty_positive = empty_positive
        self.numbers = arguments[8:11]
        tensors = (*arguments[:8], *arguments[11:])
        self.forms = [form_of(tensor) for tensor in tensors]

    def stream(self) -> int | None:
        return self.kernel.stream

    def bound(self) -> tuple[Any, Any]:
        return self.launch, None

    def launch(self, addresses: Sequence[int]) -> bool:
        if any(address % 16 for address in addresses):
            return False
        tensors = [tensor_at(*pair) for pair in zip(addresses, self.forms, strict=True)]
        attend(*tensors[:8], *self.numbers, *tensors[8:], self.empty_positive)
        self.kernel.repeats += 1
        return True


def form_of(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def tensor_at(address: int, form: Any) -> Any:
    """The memory at an address, as a tensor."""
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
        stream: what launches say when they are asked; None where they cannot be used.
    """

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.stream: int | None = 0

    def __call__(self, *arguments: Any, empty_positive: bool = False) -> MemoryLaunch:
        attend(*arguments, empty_positive)
        self.calls += 1
        return MemoryLaunch(self, arguments, empty_positive)


class WholeMemoryLaunch:
    """Repeats a whole call on the memory at other addresses.

    Attributes:
        bindings: the memory between the steps that it was bound to, each time.
    """

    between = 2

    def __init__(
        self, whole: RepeatableWhole, tensors: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> None:
        self.whole = whole
        self.numbers = numbers
        self.forms = [form_of(tensor) for tensor in tensors]
        self.bindings: list[tuple[int, ...]] = []

    def stream(self) -> int | None:
        return self.whole.stream

    def launch(self, addresses: Sequence[int]) -> bool:
        if any(address % 16 for address in addresses):
            return False
        tensors = [tensor_at(*pair) for pair in zip(addresses, self.forms, strict=True)]
        self.whole.compute(tensors, self.numbers)
        self.whole.repeats += 1
        return True

    def bound(self, *between: int) -> tuple[Any, Any]:
        self.bindings.append(between)
        return (lambda addresses: self.launch((*addresses, *between))), None


class RepeatableWhole:
    """Whole calls of the kernel, with counters.

    Attributes:
        calls, repeats, stream: as of `RepeatableKernel`.
        serves: whether the products are its own.
    """

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.stream: int | None = 0
        self.serves = True

    @staticmethod
    def compute(tensors: Any, numbers: Any) -> None:
        """Products and attention into the tensors of a launch, in its order."""
        w_uk, w_uv, q_nope, *read, out, lse, q_latent, o_latent = tensors
        q_latent.copy_(project_heads(q_nope, w_uk))
        attend(q_latent, *read, *numbers, o_latent, lse)
        out.copy_(project_heads(o_latent, w_uv))

    def __call__(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor,
        *rest: Any, empty_positive: bool = False,
    ) -> Any:  # fmt: skip
        *read, max_q, causal, scale, given = rest
        aligned = all(
            tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
            for tensor in (q_nope, w_uk, w_uv, given)
        )
        if not (self.serves and aligned):
            return None
        out = torch.empty_like(q_nope) if given is None else given
        lse = q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)
        between = [q_nope.new_empty((*q_nope.shape[:-1], w_uk.shape[2])) for _ in range(2)]
        tensors = (w_uk, w_uv, q_nope, q_rope, *read, out, lse, *between)
        numbers = (max_q, causal, scale)
        self.compute(tensors, numbers)
        self.calls += 1
        return out, lse, WholeMemoryLaunch(self, tensors, numbers)


@contextmanager
def repeatable_kernel(whole: RepeatableWhole | None = None) -> Iterator[RepeatableKernel]:
    """The kernel, as a backend of the name `KERNEL`."""
    kernel = RepeatableKernel()
    backends.register(AbsorbedKernel(KERNEL, "torch", kernel, runs_on_cpu=True, whole=whole))
    _backend.cache_clear()
    try:
        yield kernel
    finally:
        backends.unregister(KERNEL, "torch")
        _backend.cache_clear()
