"""The backend of kernels that attend over latent rows, for dense, paged and ragged batches.

Such a kernel is a function `attend(operands, options)`, see `LatentKernel`, on the tensors of one
call (`kernel/cute_python/mla/latent/operands.py`). It writes `o_latent` and `lse`, and may return a
`Launch` that repeats the call on other tensors of the same call key. A kernel of the package offers
`attend` in its version module, and beside it `unsupported(shape: CallShape) -> str | None`.

A kernel may also run the projections around the attention in the same launch. It then offers
`whole`, a `WholeKernel`: an object or module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_var3.attention.request.shape import FLOAT32, PARTIAL, UNALIGNED, CallShape, refusal_of
from mla_var3.attention.request.task import AttentionTask
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    ProjectionOperands,
    can_box,
)
from mla_var3.op.mla.problem import MOST
from mla_var3.runtime.paths import (
    LANGUAGE_DISTRIBUTIONS,
    KernelId,
    declared_targets,
    import_kernel_module,
)
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

LATENT_DESIGNS = ("flash_mla",)
"""Designs whose CuTe DSL versions offer `attend`."""
LANGUAGE_MODULES = {"cutile-dsl": "cuda.tile", "cute-dsl": "cutlass"}


StreamLaunch = Callable[[Sequence[int]], bool]
"""Takes pointers and launches on one stream, for one thread at a time. It returns False, and
launches nothing, when a pointer is not aligned."""


class Launch(Protocol):
    """Repeats a call on tensors that differ from the first ones only in their pointers.

    `workspace` are the bytes of each operand that is workspace, by name.
    """

    workspace: Mapping[str, int]

    def stream(self) -> int | None:
        """The stream that it would launch on now; None on another device or in a capture."""

    def bind(self, names: Sequence[str], fixed: Mapping[str, int]) -> tuple[StreamLaunch, Any]:
        """What takes pointers and launches on the current stream, and what to keep alive for it.

        The pointers are for the operands of these names; unknown ones are ignored, and the last of
        two equal ones counts. Those of the `fixed` operands stay.
        """


class WholeKernel(Protocol):
    """The projections and the attention in one launch.

    `serves` refuses widths, layouts or counts of queries that its projection kernels are not made
    for; then torch does the projections. It looks at the tensors of the call alone, so results do
    not depend on whether a call was seen before.
    """

    def serves(self, projections: ProjectionOperands) -> bool:
        """Whether the projections of a call are its own."""

    def attend(
        self, projections: ProjectionOperands, operands: LatentOperands, options: LatentOptions
    ) -> Launch | None:
        """Compute a whole call; `q_latent` and `o_latent` are workspace."""


LatentKernel = Callable[[LatentOperands, LatentOptions], Launch | None]
Attended = tuple[Tensor, Tensor, Launch | None]
"""Output, LSE and, where the kernel took every tensor as it was, the launch."""


class LatentBackend:
    """A backend around such a kernel."""

    def __init__(
        self,
        kernel: str,
        language: str,
        attend: LatentKernel | None,
        unsupported: Callable[[CallShape], str | None] = lambda shape: None,
        *,
        runs_on_cpu: bool = False,
        targets: tuple[str, ...] | None = None,
        kernel_id: KernelId | None = None,
        whole: WholeKernel | None = None,
        sliding_window: bool = False,
        cache_formats: Sequence[str] = (),
    ) -> None:
        """Wrap a kernel, None for one of the package, whose module is imported when it is needed.

        It serves targets (None for all), 8-bit formats and perhaps sliding windows as said here. Of
        the others `unsupported` says why it cannot serve a call shape.
        """
        self.kernel, self.language = kernel, language
        self.runs_on_cpu, self.targets = runs_on_cpu, targets
        self.cache_formats, self._sliding_window = tuple(cache_formats), sliding_window
        self._attend_fn, self._whole = attend, whole
        self._unsupported, self._kernel_id = unsupported, kernel_id

    @classmethod
    def of_package(cls, kernel: KernelId) -> LatentBackend:
        """The backend of a kernel version of the package; nothing is imported yet."""
        return cls(
            kernel.full_name, kernel.language, None, targets=declared_targets(kernel),
            kernel_id=kernel, sliding_window=True, cache_formats=FP8_FORMATS,
        )  # fmt: skip

    def missing(self) -> str | None:
        return None if self._kernel_id is None else missing_language(self.language)

    def unsupported(self, shape: CallShape) -> str | None:
        windowed = shape.sliding_window is not None
        reasons = {
            FLOAT32: shape.dtype == "float32",
            UNALIGNED: not shape.aligned,
            "a sliding window": windowed and not self._sliding_window,
            "a tree mask of 2**31 entries or more": shape.tree and shape.b * shape.s**2 > MOST,
            f"a tree of tokens in {PARTIAL}": shape.partial and shape.tree,
        }
        refused = shape.refused_cache(self.cache_formats) or refusal_of(reasons)
        if refused is not None:
            return refused
        if self._kernel_id is not None:
            if missing_language(self.language):
                return None  # the shape alone says nothing against it
            module = import_kernel_module(self._kernel_id)
            if not hasattr(module, "attend"):
                return "calls through the package: it has no function `attend`"
            refuses = getattr(module, "unsupported", None)
            return None if refuses is None else refuses(shape)
        return self._unsupported(shape)

    def run(self, task: AttentionTask) -> tuple[Tensor, Tensor]:
        return self.run_repeatable(task)[:2]

    def run_repeatable(self, task: AttentionTask, sms: int = 0, overlap: str = "") -> Attended:
        """Output, LSE and, where the kernel took every tensor as it was, the launch.

        For `sms` and `overlap` see `LatentOptions`.
        """
        attend = self._resolve()
        taken = _taken(task)
        options = LatentOptions(
            max_q=task.q.shape[1] if task.cu_seqlens_q is None else task.max_q or task.q.shape[0],
            causal=task.causal,
            scale_log2e=task.scale / math.log(2.0),
            empty_positive=task.empty_positive,
            shards=task.shards,
            shard=task.shard,
            batch_invariant=task.batch_invariant,
            sliding_window=task.sliding_window,
            scheduled=task.scheduled,
            sms=sms,
            overlap=overlap,
        )
        if task.w_uk is None or task.w_uv is None:
            return _run_latent(attend, task, taken, options)
        rows = tuple(task.q.shape[:-1])
        q_latent = task.q.new_empty((*rows, task.cache.latent.shape[-1]))
        operands = _operands(task, taken, q_latent)
        out = task.q.new_empty((*rows, task.width)) if task.out is None else task.out
        projections = ProjectionOperands(task.w_uk, task.w_uv, task.q, out)
        whole = self._whole
        if whole is not None and whole.serves(projections):
            launch = whole.attend(projections, operands, options)
            return out, operands.lse, launch if taken.same else None
        project_heads(task.q, task.w_uk, q_latent)
        launch = attend(operands, options)
        aligned = all(tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in projections)
        if not taken.same or (whole is not None and not aligned):
            launch = None  # the next call of this key may project in the kernel's launch
        return project_heads(operands.o_latent, task.w_uv, out), operands.lse, launch

    def _resolve(self) -> LatentKernel:
        if self._attend_fn is None:
            assert self._kernel_id is not None
            module: Any = import_kernel_module(self._kernel_id)
            self._whole = getattr(module, "whole", None)
            self._attend_fn = module.attend  # last: another thread takes it as a sign for both
        return self._attend_fn


def _run_latent(
    attend: LatentKernel, task: AttentionTask, taken: _Taken, options: LatentOptions
) -> Attended:
    """A call whose queries and output are latent."""
    any_heads = taken.scales is not None
    q_latent, same_rows = _unless_copied(task.q, boxed_rows(task.q, any_heads))
    direct = task.out if is_dense(task.out) else None
    operands = _operands(task, taken, q_latent, direct)
    launch = attend(operands, options)
    if task.out is None or direct is not None:
        return operands.o_latent, operands.lse, launch if same_rows and taken.same else None
    return task.out.copy_(operands.o_latent), operands.lse, None


def _operands(
    task: AttentionTask, taken: _Taken, q_latent: Tensor, out: Tensor | None = None
) -> LatentOperands:
    return LatentOperands.allocate(
        task.q.shape[:-1],
        q_latent,
        taken.q_rope,
        task.cache.latent,
        None if taken.q_rope is None else task.cache.rope,
        taken.lengths,
        taken.block_table,
        taken.total_lengths,
        taken.cu_seqlens_q,
        task.tree,
        out,
        taken.scales,
        task.schedule,
    )


def project_heads(rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply every head's rows with the head's weight, in one batched product without a copy.

    Rows are `[..., h, x]`, weights `[h, x, y]`; the result is `[..., h, y]`, `out` or contiguous.
    """
    *leading, h, width = rows.shape
    count, columns = math.prod(leading), weight.shape[2]
    result = out
    if result is None or not result.is_contiguous():
        result = rows.new_empty((*leading, h, columns))
    by_head = rows.reshape(count, h, width).transpose(0, 1)
    torch.bmm(by_head, weight, out=result.view(count, h, columns).transpose(0, 1))
    return result if out is None or out is result else out.copy_(result)


def missing_language(language: str) -> str | None:
    """What to install for a kernel language; None when it is there."""
    try:
        found = find_spec(LANGUAGE_MODULES[language]) is not None
    except ModuleNotFoundError:  # not even the parent package
        found = False
    return None if found else f"the package {LANGUAGE_DISTRIBUTIONS[language]} is not installed"


class _Taken(NamedTuple):
    """The parts of a call as kernels take them.

    Attributes:
        q_rope: rows at equal distances, or (latent queries) as `boxed_rows` takes them; None where
            p is 0.
        block_table, lengths, total_lengths, cu_seqlens_q: stride 1 in the last dimension.
        scales: of an 8-bit cache, `[pages, page]` or `[1]`; None in 16 bits.
        same: whether all of them are the caller's own memory.
    """

    q_rope: Tensor | None
    block_table: Tensor | None
    lengths: Tensor
    total_lengths: Tensor | None
    cu_seqlens_q: Tensor | None
    scales: Tensor | None
    same: bool


def _taken(task: AttentionTask) -> _Taken:
    cache = task.cache
    q_rope, same = None, True
    if task.q_rope.shape[-1]:
        if task.latent_only:
            rope = boxed_rows(task.q_rope, any_heads=cache.scales is not None)
        else:
            rope = _equal_rows(task.q_rope)
        q_rope, same = _unless_copied(task.q_rope, rope)
    indices: list[Tensor | None] = []
    for index in (cache.block_table, cache.lengths, task.total_lengths, task.cu_seqlens_q):
        if index is None:
            indices.append(None)
            continue
        dense = index if index.stride(-1) == 1 else index.contiguous()
        taken, unchanged = _unless_copied(index, dense)
        indices.append(taken)
        same = same and unchanged
    table, lengths, total, bounds = indices
    assert lengths is not None
    scales = cache.scales
    if scales is not None and scales.dim() == 1:  # one number, which may lie anywhere
        scales = _aligned(scales)
        same = same and scales is cache.scales
    elif scales is not None:
        scales = scales[..., 0]
    return _Taken(q_rope, table, lengths, total, bounds, scales, same)


def _unless_copied(given: Tensor, taken: Tensor) -> tuple[Tensor, bool]:
    """What is taken, and whether it is the memory that was given."""
    return taken, given.data_ptr() == taken.data_ptr()


def _row_distance(sizes: Sequence[int], strides: Sequence[int], alone: int) -> int | None:
    """The one distance of all rows; None where there are several, `alone` for a single row."""
    apart = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if not apart:
        return alone
    distance = covered = apart[-1][1]
    for size, stride in reversed(apart):
        if stride != covered:
            return None
        covered *= size
    return distance


def _are_whole(q: Tensor, *distances: int) -> bool:
    """Whether rows of stride 1 at these distances do not overlap and start at 16 bytes."""
    width, size = q.shape[-1], q.element_size()
    return q.stride(-1) == 1 and all(
        distance >= width and distance * size % ALIGNMENT_BYTES == 0 for distance in distances
    )


def _equal_rows(q: Tensor) -> Tensor:
    """The queries with their rows at equal distances, the stride of h; copied if need be."""
    distance = _row_distance(q.shape[:-1], q.stride()[:-1], q.shape[-1])
    if distance is None or not _are_whole(q, distance):
        return _aligned(q.contiguous())
    if distance != q.stride(-2):  # a single head has an arbitrary stride
        q = q.as_strided(q.shape, (*q.stride()[:-2], distance, 1))
    return _aligned(q)


def boxed_rows(q: Tensor, any_heads: bool = False) -> Tensor:
    """The queries with one distance for heads and one for tokens; copied if need be.

    Head-major queries, views of `[h, tokens, width]`, stay where they are, if the kernel's copies
    can take boxes of their heads and tokens: `can_box`, or any number (8-bit caches).
    """
    h = q.shape[-2]
    distance = _row_distance(q.shape[:-2], q.stride()[:-2], 0)
    boxed = h > 1 and (any_heads or can_box(h))
    if not boxed or not distance or not _are_whole(q, distance, q.stride(-2)):
        return _equal_rows(q)
    return _aligned(q)


def _aligned(tensor: Tensor) -> Tensor:
    offset = tensor.storage_offset() * tensor.element_size()
    if offset % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_dense(out: Tensor | None) -> bool:
    """Whether there is an output that kernels can write as it is: contiguous and aligned."""
    return out is not None and out.is_contiguous() and _aligned(out) is out
