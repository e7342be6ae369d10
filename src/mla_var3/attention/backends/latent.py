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

It may also offer the products around the attention as kernels of the same launch,

    whole(q_nope, q_rope, w_uk, w_uv, latent, rope, block_table, lengths, cu_seqlens_q, tree, max_q,
          causal, scale, out=None, empty_positive=False)

which returns output, log-sum-exp and a `Launch` or None; or None for a call whose products it
leaves to torch, as for widths, layouts or counts of queries that its kernels are not made for.
Which of the two computes the products follows from the call's tensors alone, so that results do not
depend on whether a form was seen before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from mla_var3.attention.backends.projections import project_heads
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.runtime.paths import (
    LANGUAGE_DISTRIBUTIONS,
    KernelId,
    import_kernel_module,
)
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

ABSORBED_DESIGNS = ("flash_mla",)
LANGUAGE_MODULES = {"cutile-dsl": "cuda.tile", "cute-dsl": "cutlass"}


StreamLaunch = Callable[[Sequence[int]], bool]
"""Takes addresses and launches on one stream, for one thread at a time. False, and nothing is
launched, where an address is not aligned as it has to be."""


class Launch(Protocol):
    """Repeats a call on tensors that differ from the first ones in their addresses only.

    The addresses are those of q_latent, q_rope, latent, rope, block_table, lengths, cu_seqlens_q,
    tree, out and lse; 0 for what is absent. Of a launch with the products around the attention they
    are those of w_uk, w_uv, q_nope, q_rope and so on to lse, then of memory between the steps, for
    the latent queries and outputs.

    Attributes:
        between: how many pieces of memory there are between the steps: 2, or 0 without products.
    """

    between: int

    def stream(self) -> int | None:
        """The stream that it would launch on now; None where it cannot be used now.

        The current device or a capture may forbid it.
        """

    def bound(self, *between: int) -> tuple[StreamLaunch, Any]:
        """The launch on the current stream, where it can be used now.

        Args:
            between: addresses of the memory between the steps, to be fixed; none to leave them
                to each launch.

        Returns:
            What takes the other addresses and launches; and what has to live as long as it is used.
        """


AbsorbedFunction = Callable[..., Launch | None]
WholeFunction = Callable[..., tuple[torch.Tensor, torch.Tensor, Launch | None] | None]
Attended = tuple[torch.Tensor, torch.Tensor, Launch | None]
"""Output, log-sum-exp and, where every tensor was taken as it is, the launch."""
Indices = tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]
"""Block table, lengths and bounds of packed queries."""
Taken = tuple[torch.Tensor, Indices, bool]
"""Rope part and indices as kernels take them, and whether all are those of the call."""


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
        whole: WholeFunction | None = None,
    ) -> None:
        """Wrap a function; with a kernel id the functions are found in its module when needed."""
        self.runs_on_cpu = runs_on_cpu
        self.kernel = kernel
        self.language = language
        self._function = function
        self._whole = whole
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

    def run_repeatable(self, task: AttentionTask) -> Attended:
        """Output, log-sum-exp and, where every tensor was taken as it is, the launch."""
        absorbed = self._resolve()
        taken = _taken(task)
        if task.w_uk is None or task.w_uv is None:
            direct = task.out if _is_dense(task.out) else None
            out, lse, launch = self._attend(absorbed, task, taken, task.q, direct)
            if task.out is None or direct is not None:
                return out, lse, launch
            return task.out.copy_(out), lse, None
        found = None if self._whole is None else self._run_whole(self._whole, task, taken)
        if found is not None:
            return found
        q = project_heads(task.q, task.w_uk)
        latent, lse, launch = self._attend(absorbed, task, taken, q, None)
        if self._whole is not None and not _takes_addresses(task):
            launch = None  # the next call of this form may have its products from the kernel
        return project_heads(latent, task.w_uv, task.out), lse, launch

    def _attend(
        self,
        absorbed: AbsorbedFunction,
        task: AttentionTask,
        taken: Taken,
        q: torch.Tensor,
        out: torch.Tensor | None,
    ) -> Attended:
        """The part in the latent space; `q` is in it, and so is `out`, if there is one."""
        q_latent, same_rows = _unless_copied(q, _equal_rows(q))
        q_rope, indices, same = taken
        # Not like q_latent, whose rows may lie further apart.
        result = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        cache = task.cache
        launch = absorbed(
            q_latent, q_rope, cache.latent, cache.rope, *indices, task.tree, _most_queries(task),
            task.causal, task.scale, result, lse, empty_positive=task.empty_positive,
        )  # fmt: skip
        return result, lse, launch if same_rows and same else None

    def _run_whole(
        self, whole: WholeFunction, task: AttentionTask, taken: Taken
    ) -> Attended | None:
        """The whole call by the kernel's own products; None where it leaves them to torch."""
        q_rope, indices, same = taken
        cache = task.cache
        done = whole(
            task.q, q_rope, task.w_uk, task.w_uv, cache.latent, cache.rope, *indices, task.tree,
            _most_queries(task), task.causal, task.scale, task.out,
            empty_positive=task.empty_positive,
        )  # fmt: skip
        if done is None:
            return None
        out, lse, launch = done
        return out, lse, launch if same else None

    def _resolve(self) -> AbsorbedFunction:
        if self._function is None:
            assert self._kernel_id is not None
            module: Any = import_kernel_module(self._kernel_id)
            self._function = module.absorbed
            self._whole = getattr(module, "whole", None)
        return self._function


def missing_language(language: str) -> str | None:
    """What to install for a kernel language; None when it is there."""
    try:
        found = find_spec(LANGUAGE_MODULES[language]) is not None
    except ModuleNotFoundError:  # not even the parent package
        found = False
    return None if found else f"the package {LANGUAGE_DISTRIBUTIONS[language]} is not installed"


def _taken(task: AttentionTask) -> Taken:
    cache, bounds = task.cache, task.cu_seqlens_q
    q_rope, same = _unless_copied(task.q_rope, _equal_rows(task.q_rope))
    lengths, same_lengths = _unless_copied(cache.lengths, _dense_inside(cache.lengths))
    table = cache.block_table
    if table is not None:
        table, unchanged = _unless_copied(table, _dense_inside(table))
        same = same and unchanged
    if bounds is not None:
        bounds, unchanged = _unless_copied(bounds, _dense_inside(bounds))
        same = same and unchanged
    return q_rope, (table, lengths, bounds), same and same_lengths


def _unless_copied(given: torch.Tensor, taken: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What is taken, and whether it is the memory that was given."""
    return taken, given.data_ptr() == taken.data_ptr()


def _most_queries(task: AttentionTask) -> int:
    return task.q.shape[1] if task.cu_seqlens_q is None else task.max_q or task.q.shape[0]


def _takes_addresses(task: AttentionTask) -> bool:
    """Whether kernels can read queries and weights, and write the output, where they are."""
    tensors = (task.q, task.w_uk, task.w_uv, task.out)
    return all(tensor is None or tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in tensors)


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
