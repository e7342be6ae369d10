"""The backend that reads shared prefixes once: two kinds of passes of a latent kernel, merged.

One pass per level attends with all queries of a group over the shared pages, another one with each
request's queries over its own tokens; then outputs and LSEs are merged. The passes do not depend on
each other. They run one after the other on the current stream.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_var3.attention.backends.latent import LatentBackend, missing_language, project_heads
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.merge import merge_partials
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import (
    PrefixLayout,
    PrefixPart,
    as_pages,
    prefix_layout,
)
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output and LSE."""
FUSED_WIDTH = 512
"""Latent width of the merge kernel."""


class PrefixBackend:
    """A latent backend that reads shared prefixes once."""

    def __init__(self, inner: LatentBackend | TorchTiled) -> None:
        """Wrap the backend that runs the passes."""
        self._inner = inner
        self.kernel = f"{inner.kernel}_prefix"
        self.language = inner.language
        self.runs_on_cpu = inner.runs_on_cpu
        self.targets = inner.targets

    def missing(self) -> str | None:
        return self._inner.missing()

    def unsupported(self, shape: CallShape) -> str | None:
        if not shape.shared:
            return "requests that share no first tokens"
        if shape.partial:
            return "a cache that holds a part of each request (total_lengths)"
        if shape.batch_invariant:
            return "a result that does not depend on the batch (batch_invariant)"
        return self._inner.unsupported(shape)

    def run(self, task: AttentionTask) -> Partial:
        """Output and LSE of a call."""
        if task.w_uk is None or task.w_uv is None:
            output, lse = self._attend(task)
            return (output if task.out is None else task.out.copy_(output)), lse
        q_latent = project_heads(task.q, task.w_uk)
        latent, lse = self._attend(replace(task, q=q_latent, w_uk=None, w_uv=None, out=None))
        return project_heads(latent, task.w_uv, task.out), lse

    def _attend(self, task: AttentionTask) -> Partial:
        layout = layout_of(task)
        own = self._inner.run(own_pass(task, layout))
        parts = [self._inner.run(shared_pass(task, layout, part)) for part in layout.parts]
        return merge(own, parts, [part.places for part in layout.parts])


def layout_of(task: AttentionTask) -> PrefixLayout:
    """The layout of a call: as given, or made from its groups or the prefix of its cache."""
    given, view = task.prefix, task.cache
    if isinstance(given, PrefixLayout):
        tokens = task.q.shape[:-2].numel()
        if (given.total, given.causal) != (tokens, task.causal):
            raise InvalidArgumentError(
                "prefix",
                f"a layout of {tokens} queries with causal={task.causal}",
                f"one of {given.total} with causal={given.causal}",
            )
        return given
    if given is None:  # what `LatentCache.set_prefix` wrote
        of = torch.zeros((1, view.requests), dtype=torch.int32, device=view.lengths.device)
        given = PrefixGroups(of, torch.full_like(of[:, :1], view.prefix), ordered=True)
    return prefix_layout(given, task.q, view, cu_seqlens_q=task.cu_seqlens_q, causal=task.causal)


def own_pass(task: AttentionTask, layout: PrefixLayout) -> AttentionTask:
    """The queries of each request over its own tokens."""
    cache = as_pages(task.cache, layout.lengths, layout.table)
    return replace(task, cache=cache, prefix=None, out=None, empty_positive=False)


def shared_pass(task: AttentionTask, layout: PrefixLayout, part: PrefixPart) -> AttentionTask:
    """The queries of each group over its shared tokens, all of which they see."""
    q, q_rope = task.q.flatten(0, -3), task.q_rope.flatten(0, -3)
    if part.order is not None:
        q, q_rope = q.index_select(0, part.order), q_rope.index_select(0, part.order)
    return replace(
        own_pass(task, layout),
        q=q,
        q_rope=q_rope,
        cache=as_pages(task.cache, part.lengths, part.table),
        causal=False,
        tree=None,
        cu_seqlens_q=part.bounds,
        max_q=part.most,
    )


def merge(own: Partial, parts: list[Partial], places: list[torch.Tensor]) -> Partial:
    """Merge the parts, whose rows are at `places`, into the result over the own tokens."""
    output, lse = own
    fused = output.is_cuda and output.shape[-1] == FUSED_WIDTH and output.dtype.itemsize == 2
    if fused and output.is_contiguous() and not missing_language("cute-dsl"):
        from mla_var3.kernel.cute_python.mla.prefix.merge import merge_in_place

        found = zip(parts, places, strict=True)
        return merge_in_place(output, lse, [(*part, place) for part, place in found])
    partials = [(output.flatten(0, -3), lse.flatten(0, -2))]
    for (part, part_lse), place in zip(parts, places, strict=True):
        index, hidden = place.long().clamp(min=0), (place < 0)[:, None]
        # Rows that take no part may never have been written.
        rows = part[index].masked_fill(hidden[..., None], 0.0)
        partials.append((rows, part_lse[index].masked_fill(hidden, -torch.inf)))
    merged, merged_lse = merge_partials(partials)
    return merged.to(output.dtype).view_as(output), merged_lse.view_as(lse)
