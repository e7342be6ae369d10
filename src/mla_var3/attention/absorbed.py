"""Kernels that attend in the latent space through one function, for paged and ragged batches too.

The function has the signature

    absorbed(q_latent, q_rope, latent, rope, block_table, lengths, cu_seqlens_q, tree, max_q,
             causal, scale, out, lse, empty_positive=False)

with the tensors of `AttentionTask` and `CacheView`: queries `[b, s, h, ...]`, or `[total_q, h,
...]` with `cu_seqlens_q`, whose rows lie at equal distances, the stride of h; no request has more
than `max_q` queries. It writes `out`, of the shape of `q_latent`, and `lse`, float32, without the
last dimension, both contiguous; `empty_positive` is that of `AttentionTask`. It may return a
`Launch`, which repeats what it did on other tensors of the same form. A kernel of the package
offers `absorbed` in its version module, and beside it `unsupported(shape) -> str | None`, which
gets a `CallShape`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from mla_var3.attention.projections import project_heads
from mla_var3.attention.shape import CallShape
from mla_var3.attention.task import AttentionTask
from mla_var3.runtime.paths import (
    LANGUAGE_DISTRIBUTIONS,
    KernelId,
    import_kernel_module,
)
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

ABSORBED_DESIGNS = ("flash_mla",)
LANGUAGE_MODULES = {"cutile-dsl": "cuda.tile", "cute-dsl": "cutlass"}


class Launch(Protocol):
    """Repeats a call on tensors that differ from the first ones in their addresses only."""

    def ready(self) -> bool:
        """Whether it can be used now; the current device or a capture may forbid it."""

    def __call__(self, *addresses: int) -> bool:
        """Launch on the current stream.

        Args:
            addresses: of q_latent, q_rope, latent, rope, block_table, lengths, cu_seqlens_q, tree,
                out and lse; 0 for what is absent.

        Returns:
            False, and nothing is launched, where an address is not aligned as it has to be.
        """


AbsorbedFunction = Callable[..., Launch | None]


class AbsorbedKernel:
    """A backend around such a function.

    Attributes:
        kernel, language: its id.
        runs_on_cpu: whether the function takes CPU tensors.
    """

    def __init__(
        self,
        kernel: str,
        language: str,
        function: AbsorbedFunction | None,
        unsupported: Callable[[CallShape], str | None] = lambda shape: None,
        *,
        runs_on_cpu: bool = False,
        kernel_id: KernelId | None = None,
    ) -> None:
        """Wrap a function; with a kernel id the function is found in its module when needed."""
        self.runs_on_cpu = runs_on_cpu
        self.kernel = kernel
        self.language = language
        self._function = function
        self._unsupported = unsupported
        self._kernel_id = kernel_id

    @classmethod
    def of_package(cls, kernel: KernelId) -> AbsorbedKernel:
        """The backend of a kernel version of the package; nothing is imported yet."""
        return cls(kernel.full_name, kernel.language, None, kernel_id=kernel)

    def missing(self) -> str | None:
        return None if self._kernel_id is None else missing_language(self.language)

    def unsupported(self, shape: CallShape) -> str | None:
        if shape.dtype == "float32":
            return "float32; it takes bfloat16 and float16"
        if not shape.aligned:
            return "cache rows that are not 16-byte aligned"
        if shape.partial:
            return "a cache that holds a part of each request (total_lengths)"
        if self._kernel_id is not None:
            if missing_language(self.language):
                return None  # the shape alone says nothing against it
            module = import_kernel_module(self._kernel_id)
            if not hasattr(module, "absorbed"):
                return "calls through the package: it has no function `absorbed`"
            refuses = getattr(module, "unsupported", None)
            return None if refuses is None else refuses(shape)
        return self._unsupported(shape)

    def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse, _ = self.run_repeatable(task)
        return output, lse

    def run_repeatable(
        self, task: AttentionTask
    ) -> tuple[torch.Tensor, torch.Tensor, Launch | None]:
        """Output, log-sum-exp and, where every tensor was taken as it is, the launch."""
        cache = task.cache
        absorbed = task.q if task.w_uk is None else project_heads(task.q, task.w_uk)
        given = (absorbed, task.q_rope, cache.block_table, cache.lengths, task.cu_seqlens_q)
        taken = (
            _equal_rows(absorbed),
            _equal_rows(task.q_rope),
            *(None if index is None else _dense_inside(index) for index in given[2:]),
        )
        q_latent, q_rope, table, lengths, bounds = taken
        direct = task.out if task.latent_only and _is_dense(task.out) else None
        # Not like q_latent, whose rows may lie further apart.
        out = absorbed.new_empty(absorbed.shape) if direct is None else direct
        lse = absorbed.new_empty(absorbed.shape[:-1], dtype=torch.float32)
        launch = self._resolve()(
            q_latent,
            q_rope,
            cache.latent,
            cache.rope,
            table,
            lengths,
            bounds,
            task.tree,
            task.q.shape[1] if task.cu_seqlens_q is None else task.max_q or task.q.shape[0],
            task.causal,
            task.scale,
            out,
            lse,
            empty_positive=task.empty_positive,
        )
        for before, after in zip(given, taken, strict=True):
            if before is not None and after is not None and before.data_ptr() != after.data_ptr():
                launch = None
        if task.w_uv is not None:
            return project_heads(out, task.w_uv, task.out), lse, launch
        if task.out is None or direct is not None:
            return out, lse, launch
        return task.out.copy_(out), lse, None

    def _resolve(self) -> AbsorbedFunction:
        if self._function is None:
            assert self._kernel_id is not None
            module: Any = import_kernel_module(self._kernel_id)
            self._function = module.absorbed
        return self._function


def missing_language(language: str) -> str | None:
    """What to install for a kernel language; None when it is there."""
    try:
        found = find_spec(LANGUAGE_MODULES[language]) is not None
    except ModuleNotFoundError:  # not even the parent package
        found = False
    return None if found else f"the package {LANGUAGE_DISTRIBUTIONS[language]} is not installed"


def _equal_rows(q: torch.Tensor) -> torch.Tensor:
    """The queries with their rows at equal distances, the stride of h; copied if need be."""
    *sizes, width = q.shape
    *strides, step = q.stride()
    apart = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    distance = apart[-1][1] if apart else width
    covered = distance
    for size, stride in reversed(apart):
        if stride != covered:
            return _aligned(q.contiguous())
        covered *= size
    if step != 1 or distance < width or distance * q.element_size() % ALIGNMENT_BYTES:
        return _aligned(q.contiguous())
    if distance != strides[-1]:  # of a single head the stride says nothing
        q = q.as_strided(q.shape, (*strides[:-1], distance, 1))
    return _aligned(q)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    offset = tensor.storage_offset() * tensor.element_size()
    if offset % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _dense_inside(index: torch.Tensor) -> torch.Tensor:
    """Integers that lie side by side in the last dimension."""
    return index if index.stride(-1) == 1 else index.contiguous()


def _is_dense(out: torch.Tensor | None) -> bool:
    return out is not None and out.is_contiguous() and _aligned(out) is out
