"""The device code of shared prefixes on the CPU: CuTe DSL compiles it as host code.

Threads run one after the other, phase by phase, which is one of the orders that a CTA may take.
`CpuKernels` is what `kernel/cute_python/mla/prefix/call.py` is on a GPU.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_ptr

from mla_var3.attention.merge import merge_partials
from mla_var3.kernel.cute_python.mla.prefix.layout import (
    LayoutArguments,
    copy_row,
    level_count,
    phases,
    scratch_size,
)
from mla_var3.kernel.cute_python.mla.prefix.rows import GatherArguments, gather_row, row_count
from tests.unit.attention.replay.replay_support import layout_of, tensor_at

THREADS = 64
ELEMENTS = {
    torch.int32: cutlass.Int32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
}


class LayOutOnCpu:
    """What both kernels of the layout do."""

    @cute.jit
    def __call__(self, *arguments: Any):
        given = LayoutArguments(*arguments)
        for phase, level in phases(level_count(given)):
            for thread in cutlass.range(0, THREADS, 1, unroll=1):
                phase(thread, THREADS, given, level)
        rows = given.requests + level_count(given) * given.chunks
        for row in cutlass.range(0, rows, 1, unroll=1):
            copy_row(row, 0, 1, given)


class GatherOnCpu:
    """What the kernel of the queries does."""

    @cute.jit
    def __call__(self, *arguments: Any):
        given = GatherArguments(*arguments)
        for row in cutlass.range(0, row_count(given), 1, unroll=1):
            gather_row(row, 0, 1, given, cutlass.BFloat16)


@lru_cache(maxsize=32)
def _compiled(host: type, kinds: tuple[Any, ...]) -> Any:
    given = [_example(kind) for kind in kinds]
    return cute.compile(host(), *given)


def _example(kind: Any) -> Any:
    if kind is None or kind is int:
        return kind and Int32(1)
    return _pointer(torch.zeros(16, dtype=kind))


def _pointer(tensor: torch.Tensor) -> Any:
    align = 4 if tensor.dtype == torch.int32 else 16
    space = cute.AddressSpace.gmem
    return make_ptr(ELEMENTS[tensor.dtype], tensor.data_ptr(), space, assumed_align=align)


def run_on_cpu(host: type, arguments: Sequence[Any]) -> None:
    """Run device code on CPU tensors and numbers."""
    kinds = tuple(
        value.dtype if isinstance(value, torch.Tensor) else value if value is None else int
        for value in arguments
    )
    program = _compiled(host, kinds)
    program(
        *(
            _pointer(value)
            if isinstance(value, torch.Tensor)
            else value if value is None else Int32(value)
            for value in arguments
        )
    )  # fmt: skip


class MemoryStep:
    """Repeats a function on the memory at other pointers."""

    def __init__(self, function: Callable[..., None], tensors: Mapping[str, Any]) -> None:
        self.function, self.layouts = function, {k: layout_of(v) for k, v in tensors.items()}

    def bind(self, names: Sequence[str], fixed: Mapping[str, int]) -> tuple[Any, Any]:
        def launch(pointers: Sequence[int]) -> bool:
            at = {**fixed, **dict(zip(names, pointers, strict=True))}
            self.function(
                **{
                    name: None if layout is None else tensor_at(at[name], layout)
                    for name, layout in self.layouts.items()
                }
            )
            return True

        return launch, None


class CpuKernels:
    """The small kernels, with the number of their first launches."""

    scratch_size = staticmethod(scratch_size)
    sm_count_of = staticmethod(lambda index: 132)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def lay_out(self, outputs: Any, inputs: Any, sizes: Any) -> MemoryStep:
        self.calls.append("lay_out")

        def function(**tensors: Any) -> None:
            run_on_cpu(LayOutOnCpu, LayoutArguments(**tensors, **sizes, copy_ctas=1))

        return self._run(function, {**inputs, **outputs})

    def gather(self, *tensors: torch.Tensor) -> MemoryStep:
        self.calls.append("gather")
        q, q_rope = tensors[:2]
        strides = (q.stride(-3), q.stride(-2), q_rope.stride(-3), q_rope.stride(-2))
        tokens, heads = tensors[4].shape[:2]

        def function(**named: Any) -> None:
            last = len(named["bounds"]) - 1
            values = (*named.values(), tokens, heads, last, *strides, 1)
            run_on_cpu(GatherOnCpu, GatherArguments(*values))

        return self._run(function, dict(zip(GatherArguments._fields, tensors, strict=False)))

    def merge(self, o: torch.Tensor, lse: torch.Tensor, parts: Sequence[Any]) -> MemoryStep:
        self.calls.append("merge")
        tensors = {"o": o, "lse": lse}
        for level, part in enumerate(parts):
            named = zip((f"o_{level}", f"lse_{level}", f"places_{level}"), part, strict=True)
            tensors |= dict(named)
        return self._run(_merge, tensors)

    def _run(self, function: Callable[..., None], tensors: Mapping[str, Any]) -> MemoryStep:
        function(**tensors)
        return MemoryStep(function, tensors)


def _merge(o: torch.Tensor, lse: torch.Tensor, **parts: torch.Tensor) -> None:
    rows, lses = o.view(-1, *o.shape[-2:]), lse.view(-1, lse.shape[-1])
    partials = [(rows.float(), lses)]
    for level in range(len(parts) // 3):
        place = parts[f"places_{level}"].long()
        hidden = (place < 0)[:, None]
        part, part_lse = (parts[f"{name}_{level}"][place.clamp(min=0)] for name in ("o", "lse"))
        part = part.float().masked_fill(hidden[..., None], 0.0)
        partials.append((part, part_lse.masked_fill(hidden, -torch.inf)))
    merged, merged_lse = merge_partials(partials)
    rows.copy_(merged)
    lses.copy_(merged_lse)
