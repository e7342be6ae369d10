"""Kernels that attend in the latent space through one function, for paged and ragged batches too.

The function has the signature

    absorbed(q_latent, q_rope, latent, rope, block_table, lengths, cu_seqlens_q, tree, max_q,
             causal, scale, out, lse)

with the tensors of `AttentionTask` and `CacheView`: contiguous queries `[b, s, h, ...]`, or
`[total_q, h, ...]` with `cu_seqlens_q`; no request has more than `max_q` queries. It writes `out`,
of the shape of `q_latent`, and `lse`, float32, without the last dimension. A kernel of the package
offers `absorbed` in its version module, and beside it `unsupported(shape) -> str | None`, which
gets a `CallShape`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from mla_var3.attention.checks import kernel_ready
from mla_var3.attention.shape import CallShape
from mla_var3.attention.task import AttentionTask
from mla_var3.op.mla.inputs import absorb_queries, up_project
from mla_var3.runtime.paths import (
    LANGUAGE_DISTRIBUTIONS,
    KernelId,
    import_kernel_module,
)

ABSORBED_DESIGNS = ("flash_mla",)
LANGUAGE_MODULES = {"cutile-dsl": "cuda.tile", "cute-dsl": "cutlass"}

AbsorbedFunction = Callable[..., None]


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
        q_latent = kernel_ready(task.q if task.w_uk is None else _absorb(task.q, task.w_uk))
        latent_out = task.out if task.latent_only else None
        out = torch.empty_like(q_latent) if latent_out is None else latent_out
        lse = q_latent.new_empty(q_latent.shape[:-1], dtype=torch.float32)
        cache = task.cache
        self._resolve()(
            q_latent,
            kernel_ready(task.q_rope),
            cache.latent,
            cache.rope,
            cache.block_table,
            kernel_ready(cache.lengths),
            task.cu_seqlens_q,
            task.tree,
            task.q.shape[1] if task.cu_seqlens_q is None else task.max_q or task.q.shape[0],
            task.causal,
            task.scale,
            out,
            lse,
        )
        if task.w_uv is None:
            return out, lse
        output = _project(out, task.w_uv)
        return (output if task.out is None else task.out.copy_(output)), lse

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


def _absorb(q_nope: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
    if q_nope.dim() == 4:
        return absorb_queries(q_nope, w_uk)
    return absorb_queries(q_nope[None], w_uk)[0]


def _project(o_latent: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    if o_latent.dim() == 4:
        return up_project(o_latent, w_uv)
    return up_project(o_latent[None], w_uv)[0]
