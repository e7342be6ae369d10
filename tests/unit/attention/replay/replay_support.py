"""A kernel on the CPU that can be repeated by pointers, for the tests of replays."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mla_var3.attention.backends.latent import LatentBackend, project_heads
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.task import AttentionTask
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    ProjectionOperands,
)
from tests.unit.attention.attention_support import registered

KERNEL = "repeatable"


def attend(operands: LatentOperands, options: LatentOptions) -> None:
    """The kernel's work, by the PyTorch path."""
    scales = operands.scales
    if scales is not None and scales.dim() > 1:
        scales = scales[..., None]
    q_rope, rope = operands.q_rope, operands.rope
    if q_rope is None or rope is None:  # p is 0
        q_rope, rope = operands.q_latent[..., :0], operands.latent[..., :0]
    view = CacheView(operands.latent, rope, operands.lengths, operands.block_table, scales=scales)
    task = AttentionTask(
        q=operands.q_latent, q_rope=q_rope, cache=view, w_uk=None, w_uv=None,
        causal=options.causal, scale=options.scale_log2e * math.log(2.0), tree=operands.tree,
        cu_seqlens_q=operands.cu_seqlens_q, max_q=options.max_q,
        total_lengths=operands.total_lengths,
    )  # fmt: skip
    output, lse = TorchTiled().run(task)
    operands.o_latent.copy_(output)
    operands.lse.copy_(lse)
    if options.empty_positive:
        operands.lse[operands.lse == -torch.inf] = torch.inf


def attend_whole(
    projections: ProjectionOperands, operands: LatentOperands, options: LatentOptions
) -> None:
    """Projections and attention."""
    operands.q_latent.copy_(project_heads(projections.q_nope, projections.w_uk))
    attend(operands, options)
    projections.out.copy_(project_heads(operands.o_latent, projections.w_uv))


class MemoryLaunch:
    """Repeats the work on the memory at other pointers, as a GPU would.

    Attributes:
        bindings: the fixed pointers of each binding.
    """

    def __init__(
        self,
        kernel: RepeatableKernel | RepeatableWhole,
        groups: Sequence[Any],
        options: LatentOptions,
        workspace: Sequence[str] = (),
    ) -> None:
        self.kernel, self.options = kernel, options
        named = {name: tensor for group in groups for name, tensor in group._asdict().items()}
        self.workspace = {
            name: named[name].numel() * named[name].element_size() for name in workspace
        }
        self.groups = [type(group) for group in groups]
        self.layouts = {name: layout_of(tensor) for name, tensor in named.items()}
        self.bindings: list[dict[str, int]] = []

    def stream(self) -> int | None:
        return self.kernel.stream

    def bind(self, names: Sequence[str], fixed: Mapping[str, int]) -> tuple[Any, Any]:
        self.bindings.append(dict(fixed))
        owner: set[object] = set()
        owned = weakref.ref(owner)

        def launch(pointers: Sequence[int]) -> bool:
            assert owned() is not None, "what a launch needs is kept with it"
            return self.launch(dict(zip(names, pointers, strict=True)), fixed)

        return launch, owner

    def launch(self, given: Mapping[str, int], fixed: Mapping[str, int]) -> bool:
        pointers = {**fixed, **given}
        wanted = {name: layout for name, layout in self.layouts.items() if layout is not None}
        if any(pointers[name] % 16 for name in wanted):
            return False
        tensors = {name: tensor_at(pointers[name], layout) for name, layout in wanted.items()}
        made = [
            group(**{name: tensors.get(name) for name in group._fields}) for group in self.groups
        ]
        self.kernel.compute(*made, self.options)
        self.kernel.repeats += 1
        return True


def layout_of(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def tensor_at(pointer: int, layout: Any) -> torch.Tensor:
    """The memory at a pointer, as a tensor."""
    shape, strides, dtype = layout
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    bytes_long = (reach + 1) * dtype.itemsize
    memory = (ctypes.c_char * bytes_long).from_address(pointer)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class RepeatableKernel:
    """The kernel with counters.

    Attributes:
        calls: calls that went the full path.
        repeats: calls that were replayed.
        stream: what launches say when they are asked; None where they cannot be used.
        options: options of the calls that went the full path.
    """

    compute = staticmethod(attend)

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.options: list[LatentOptions] = []
        self.stream: int | None = 0

    def __call__(self, operands: LatentOperands, options: LatentOptions) -> MemoryLaunch:
        attend(operands, options)
        self.calls += 1
        self.options.append(options)
        return MemoryLaunch(self, [operands], options)


class RepeatableWhole:
    """Whole calls of the kernel, with counters.

    Attributes:
        calls, repeats, stream: as of `RepeatableKernel`.
        is_served: whether the projections are its own.
    """

    compute = staticmethod(attend_whole)

    def __init__(self) -> None:
        self.calls = self.repeats = 0
        self.stream: int | None = 0
        self.is_served = True

    def serves(self, projections: ProjectionOperands) -> bool:
        return self.is_served and all(
            tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in projections
        )

    def attend(
        self, projections: ProjectionOperands, operands: LatentOperands, options: LatentOptions
    ) -> MemoryLaunch:
        attend_whole(projections, operands, options)
        self.calls += 1
        return MemoryLaunch(self, [projections, operands], options, ("q_latent", "o_latent"))


@contextmanager
def repeatable_kernel(whole: RepeatableWhole | None = None) -> Iterator[RepeatableKernel]:
    """The kernel, as a backend of the name `KERNEL`."""
    kernel = RepeatableKernel()
    backend = LatentBackend(
        KERNEL, "torch", kernel, runs_on_cpu=True, whole=whole, cache_formats=FP8_FORMATS
    )
    with registered(backend):
        yield kernel
