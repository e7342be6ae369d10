"""The backend that reads shared prefixes once: two kinds of passes of a latent kernel, merged.

One pass per level attends with all queries of a group over the shared pages, another one with each
request's queries over its own tokens; then outputs and LSEs are merged. The passes do not depend on
each other. They run one after the other on the current stream, or, where both are short and the
groups say how much work there is, at the same time on a share of the SMs each (`shared_sms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_var3.attention.backends.latent import (
    Attended,
    LatentBackend,
    Launch,
    StreamLaunch,
    boxed_rows,
    is_dense,
    project_heads,
)
from mla_var3.attention.backends.plans import PlannedBackend
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.merge import merge_partials
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import (
    PrefixLayout,
    PrefixPart,
    as_pages,
    groups_in,
    laid_out,
    layout_kernels,
    prefix_kernels,
    prefix_layout,
    require_groups,
)
from mla_var3.attention.request.shape import BATCH_INVARIANT, PARTIAL, CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.op.mla.prefix.problem import overlap_sms

Partial = tuple[Tensor, Tensor]
"""Output and LSE."""
FUSED_WIDTH, FUSED_ROPE = 512, 64
"""Latent and rope width of the small kernels; only the one that gathers queries reads rope."""

Operands = Mapping[str, str]
"""The step's operand of each pointer that it takes, by the pointer's name."""

LAYOUT_INPUTS = {
    name: name for name in ("prefix_of", "prefix_length", "lengths", "cu_seqlens_q", "block_table")
}
_CACHE = {name: name for name in ("latent", "rope", "scales")}
OWN_PASS = {
    **_CACHE,
    **{name: name for name in ("q_latent", "q_rope", "cu_seqlens_q", "tree", "o_latent", "lse")},
    "own_table": "block_table",
    "own_lengths": "lengths",
}
MERGE = {
    "o_latent": "o",
    "lse": "lse",
    **{f"{name}_{level}": f"{name}_{level}" for name in ("o", "lse", "places") for level in (0, 1)},
}


Inner = LatentBackend | PlannedBackend | TorchTiled


class Wrapper:
    """What a backend has from the one that runs its passes."""

    suffix: ClassVar[str]

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        self.kernel, self.language = f"{inner.kernel}_{self.suffix}", inner.language
        self.runs_on_cpu, self.targets = inner.runs_on_cpu, inner.targets

    def missing(self) -> str | None:
        return self._inner.missing()


class PrefixBackend(Wrapper):
    """A latent backend that reads shared prefixes once."""

    suffix = "prefix"

    def unsupported(self, shape: CallShape) -> str | None:
        if not shape.shared:
            return "requests that share no first tokens"
        if shape.partial:
            return PARTIAL
        if shape.batch_invariant:
            return BATCH_INVARIANT
        if shape.sliding_window is not None:
            return "a sliding window"
        return self._inner.unsupported(shape)

    def run(self, task: AttentionTask) -> Partial:
        return self.run_repeatable(task)[:2]

    def run_repeatable(self, task: AttentionTask) -> Attended:
        """Output, LSE and, where kernels did everything on the call's tensors, the launch."""
        if task.w_uk is None or task.w_uv is None:
            output, lse, launch = self._attend(task)
            if task.out is not None and output is not task.out:
                output = task.out.copy_(output)
        else:
            q_latent = project_heads(task.q, task.w_uk)
            latent = replace(task, q=q_latent, w_uk=None, w_uv=None, out=None)
            found, lse, launch = self._attend(latent)
            output = project_heads(found, task.w_uv, task.out)
        # The launch does not know that empty rows are to be +inf.
        return output, task.with_empty_sums(lse), None if task.empty_positive else launch

    def _attend(self, task: AttentionTask) -> Attended:
        kernels = prefix_kernels(task.q.device) if _fits_kernels(task) else None
        if kernels is None or isinstance(self._inner, TorchTiled):
            layout = layout_of(task)
            own = self._inner.run(own_pass(task, layout))
            parts = [self._inner.run(shared_pass(task, layout, part)) for part in layout.parts]
            return *merge(own, parts, [part.places for part in layout.parts]), None
        return self._by_kernels(task, kernels)

    def _by_kernels(self, task: AttentionTask, kernels: Any) -> Attended:
        """Every step a launch, so that the call can be replayed."""
        assert isinstance(self._inner, LatentBackend)
        steps = PrefixLaunch()
        layout = self._layout(task, kernels, steps)
        own_task = own_pass(task, layout)
        if is_dense(task.out):
            own_task = replace(own_task, out=task.out)
        sms = kernels.sm_count_of(task.q.device.index) if self._overlaps(task) else 0
        shared = shared_sms(task, layout, sms) if sms else 0
        own = None
        if not shared:
            own = self._inner.run_repeatable(own_task)
            steps.add(own[2], OWN_PASS)
        parts = []
        for level, part in enumerate(layout.parts):
            gathered = None
            if part.order is not None:
                given = task.q, task.q_rope
                flat = [boxed_rows(rows).flatten(0, -3) for rows in given]
                gathered = tuple(rows.new_empty(rows.shape) for rows in flat)
                launch = kernels.gather(*flat, part.order, part.bounds, *gathered)
                same = all(a.data_ptr() == b.data_ptr() for a, b in zip(flat, given, strict=True))
                steps.add(launch if same else None, gather_operands(level))
                steps.keep(**{f"q_latent_{level}": gathered[0], f"q_rope_{level}": gathered[1]})
            o_part, lse_part, launch = self._inner.run_repeatable(
                shared_pass(task, layout, part, gathered), shared, "first" if shared else ""
            )
            steps.add(launch, pass_operands(level, gathered is not None))
            steps.keep(**{f"o_{level}": o_part, f"lse_{level}": lse_part})
            parts.append((o_part, lse_part, part.places))
            if own is None:
                # Memory of copies that the first pass reads must not become the second's output.
                second = (sms - shared, "second") if launch is not None else (0, "")
                own = self._inner.run_repeatable(own_task, *second)
                steps.add(own[2], OWN_PASS)
        assert own is not None
        output, lse, _ = own
        if lse.numel():
            steps.add(kernels.merge(output, lse, parts), MERGE)
        return output, lse, steps.repeatable()

    def _overlaps(self, task: AttentionTask) -> bool:
        """Whether the passes of a call can run at the same time."""
        return self._inner.language == "cute-dsl" and task.cache.scales is None

    def _layout(self, task: AttentionTask, kernels: Any, steps: PrefixLaunch) -> PrefixLayout:
        given, view = groups_of(task), task.cache
        if isinstance(given, PrefixLayout):
            return layout_of(task)
        require_groups(given, view)
        if layout_kernels(given, view, task.cu_seqlens_q) is None:
            steps.add(None, {})
            return layout_of(task)
        layout, launch, written = laid_out(
            kernels, given, task.q, view, cu_seqlens_q=task.cu_seqlens_q, causal=task.causal
        )
        steps.add(launch, {**LAYOUT_INPUTS, **{name: name for name in written}})
        steps.keep(**written)
        if task.prefix is None:  # groups of this call shape, not of the caller
            steps.constants.update(given.tensors)
        return layout


def _fits_kernels(task: AttentionTask) -> bool:
    """Whether the small kernels take queries and outputs of a call."""
    if task.cache.latent.shape[-1] != FUSED_WIDTH or task.q.element_size() != 2:
        return False
    ordered = task.prefix is None or groups_in(task.prefix).ordered
    return ordered or task.q_rope.shape[-1] == FUSED_ROPE


def shared_sms(task: AttentionTask, layout: PrefixLayout, sms: int) -> int:
    """SMs of the pass over shared tokens, of those of the device; see `overlap_sms`."""
    groups, b = layout.groups, task.cache.requests
    shared, own = groups.about, groups.about_own
    if shared is None or own is None or len(layout.parts) != 1 or not layout.total:
        return 0
    rows = layout.total * task.q.shape[-2]
    return overlap_sms(-(-rows // ROWS) * shared, b * -(-rows // (b * ROWS)) * own, sms)


def groups_of(task: AttentionTask) -> PrefixGroups | PrefixLayout:
    """The groups of a call: as given, or the prefix that `LatentCache.set_prefix` wrote."""
    if isinstance(task.prefix, PrefixLayout):
        return task.prefix
    if task.prefix is not None:
        return groups_in(task.prefix)
    view = task.cache
    of = torch.zeros((1, view.requests), dtype=torch.int32, device=view.lengths.device)
    return PrefixGroups(of, torch.full_like(of[:, :1], view.prefix), ordered=True)


def layout_of(task: AttentionTask) -> PrefixLayout:
    """The layout of a call: as given, or made from its groups."""
    given, view = groups_of(task), task.cache
    if isinstance(given, PrefixLayout):
        tokens = task.q.shape[:-2].numel()
        if (given.total, given.causal) != (tokens, task.causal):
            raise InvalidArgumentError(
                "prefix",
                f"a layout of {tokens} queries with causal={task.causal}",
                f"one of {given.total} with causal={given.causal}",
            )
        page = view.page_size or PAGE_STEP
        if given.page != page:
            raise InvalidArgumentError("prefix", f"a layout of pages of {page} tokens", given.page)
        return given
    return prefix_layout(given, task.q, view, cu_seqlens_q=task.cu_seqlens_q, causal=task.causal)


def own_pass(task: AttentionTask, layout: PrefixLayout) -> AttentionTask:
    """The queries of each request over its own tokens."""
    cache = as_pages(task.cache, layout.lengths, layout.table)
    alone: dict[str, Any] = {"prefix": None, "schedule": None, "out": None, "empty_positive": False}
    return replace(task, cache=cache, **alone)


def shared_pass(
    task: AttentionTask,
    layout: PrefixLayout,
    part: PrefixPart,
    gathered: tuple[Tensor, ...] | None = None,
) -> AttentionTask:
    """The queries of each group over its shared tokens, all of which they see.

    They are gathered here, unless a kernel has brought them in the order of the groups.
    """
    if gathered is not None:
        q, q_rope = gathered
    else:
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


def merge(own: Partial, parts: list[Partial], places: list[Tensor]) -> Partial:
    """Merge the parts, whose rows are at `places`, into the result over the own tokens."""
    output, lse = own
    partials = [(output.flatten(0, -3), lse.flatten(0, -2))]
    for (part, part_lse), place in zip(parts, places, strict=True):
        index, hidden = place.long().clamp(min=0), (place < 0)[:, None]
        # Rows that take no part may never have been written.
        rows = part[index].masked_fill(hidden[..., None], 0.0)
        partials.append((rows, part_lse[index].masked_fill(hidden, -torch.inf)))
    merged, merged_lse = merge_partials(partials)
    return merged.to(output.dtype).view_as(output), merged_lse.view_as(lse)


def gather_operands(level: int) -> Operands:
    """Operands of the gathered queries of a level."""
    return {
        "q_latent": "q_latent",
        "q_rope": "q_rope",
        f"order_{level}": "order",
        f"bounds_{level}": "bounds",
        f"q_latent_{level}": "packed_latent",
        f"q_rope_{level}": "packed_rope",
    }


def pass_operands(level: int, gathered: bool) -> Operands:
    """Operands of the pass over a level; `gathered` for queries that were copied."""
    queries = f"_{level}" if gathered else ""
    return {
        **_CACHE,
        f"q_latent{queries}": "q_latent",
        f"q_rope{queries}": "q_rope",
        f"table_{level}": "block_table",
        f"lengths_{level}": "lengths",
        f"bounds_{level}": "cu_seqlens_q",
        f"o_{level}": "o_latent",
        f"lse_{level}": "lse",
    }


class PrefixLaunch:
    """The steps of a call over shared prefixes, noted as it goes, and what repeats it.

    A call is several launches: the layout of groups, gathered queries, the passes and their merge.
    A replay brings one list of pointers, named after the call's tensors and the workspace. Each
    step knows which of them are its operands, under its own names. See `Launch`.

    Attributes:
        workspace: bytes of what the steps write for each other, by name.
        constants: tensors that belong to the call shape, by name.
    """

    def __init__(self) -> None:
        self.workspace: Mapping[str, int] = {}
        self.constants: dict[str, Tensor] = {}
        self._steps: list[tuple[Any, Operands]] = []
        self._attention: Launch  # of the pass over own tokens

    def add(self, launch: Any, operands: Operands) -> None:
        """Add a step; one without a launch makes the call unrepeatable."""
        self._steps.append((launch, operands))
        if operands is OWN_PASS:
            self._attention = launch

    def keep(self, **tensors: Tensor) -> None:
        """Name tensors that one step writes for another."""
        sizes = {name: each.numel() * each.element_size() for name, each in tensors.items()}
        self.workspace = {**self.workspace, **sizes}

    def repeatable(self) -> PrefixLaunch | None:
        """The launch; None where a step cannot be repeated."""
        return None if any(launch is None for launch, _ in self._steps) else self

    def stream(self) -> int | None:
        return self._attention.stream()

    def bind(self, names: Sequence[str], fixed: Mapping[str, int]) -> tuple[StreamLaunch, Any]:
        kept = {name: tensor.data_ptr() for name, tensor in self.constants.items()} | dict(fixed)
        launches, owners = [], []
        for step, operands in self._steps:
            taken = [operands.get(name, "") for name in names]
            own = {operands[name]: pointer for name, pointer in kept.items() if name in operands}
            launch, owner = step.bind(taken, own)
            launches.append(launch)
            owners.append(owner)

        def launch_all(pointers: Sequence[int]) -> bool:
            return all(launch(pointers) for launch in launches)

        return launch_all, (owners, self.constants)
