"""How a plan serves calls, and the operands of cuTile plans.

A kernel of the package that is driven by a plan serves calls through a `Service`. The ones in this
module are for dense caches; those of CuTe DSL are in `decompressed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.request.checks import kernel_ready
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.op.mla.inputs import (
    MlaInputs,
    absorb_queries,
    decompress_all,
    decompress_newest,
)
from mla_var3.runtime.stage import Stage

Operands = tuple[torch.Tensor | None, ...]
SIZES = ("b", "s", "t", "h", "d", "p", "k", "causal")
"""Fields that every plan has and a call decides."""


def build_and_launch(
    form: Hashable, operands: Operands, build: Callable[[], Stage]
) -> list[torch.Tensor]:
    """Build a stage and launch it by its own way; returns its outputs."""
    stage = build()
    stage.launch()
    return stage.output_tensors


def plan_of_operands(plan: Any, shape: CallShape, operands: Operands) -> Stage:
    """The stage of a plan that takes its operands one by one."""
    stage: Stage = plan.plan(*operands)
    return stage


@dataclass(frozen=True)
class Service:
    """How a plan serves calls.

    Attributes:
        operands: the tensors that the stage of a call reads, of its task, shape and plan.
        refusal: why calls of a shape cannot be served, beside what no plan serves; None if they
            can.
        fields: fields of the plan that a shape decides beside dtype and scale.
        build: makes the stage of a plan on operands of a call of some shape.
        run: launches a stage of a form on operands, which it may have built for others of the same
            form; returns its outputs.
        latent: whether the output is in the latent space.
        runs_on_cpu: whether it takes CPU tensors.
        targets: what it is written for; None for all.
    """

    operands: Callable[[AttentionTask, CallShape, Any], Operands]
    refusal: Callable[[CallShape], str | None]
    fields: Callable[[CallShape], dict[str, Any]]
    build: Callable[[Any, CallShape, Operands], Stage] = plan_of_operands
    run: Callable[[Hashable, Operands, Callable[[], Stage]], list[torch.Tensor]] = build_and_launch
    latent: bool = False
    runs_on_cpu: bool = True
    targets: tuple[str, ...] | None = None


def sizes_of(shape: CallShape) -> dict[str, Any]:
    """The sizes of a shape as fields of a plan."""
    return {name: getattr(shape, name) for name in SIZES}


def needs_q_nope(shape: CallShape) -> str | None:
    """The refusal of kernels that read decompressed tokens."""
    return "queries in the latent space: it needs q_nope" if shape.latent_only else None


def _dense_only(shape: CallShape) -> str | None:
    return "a paged cache" if shape.page_size is not None else None


def _dense_decompressed(shape: CallShape) -> str | None:
    return needs_q_nope(shape) or _dense_only(shape)


def _dense_rows(task: AttentionTask, shape: CallShape) -> tuple[torch.Tensor, torch.Tensor]:
    return task.cache.latent[:, : shape.t], task.cache.rope[:, : shape.t]


def _absorbed_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    q_latent = task.q if task.w_uk is None else absorb_queries(task.q, task.w_uk)
    queries = kernel_ready(q_latent), kernel_ready(task.q_rope)
    return *queries, *_dense_rows(task, shape), kernel_ready(task.cache.lengths)


def _decompressed_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    cache = task.cache
    c_kv, k_rope = _dense_rows(task, shape)
    copy = cache.full_copy()
    if copy is None:
        keys, values = decompress_all(c_kv, task.w_uk, task.w_uv)
    else:
        keys, values = (part[:, :, : shape.t] for part in copy)
    queries = kernel_ready(task.q), kernel_ready(task.q_rope)
    return *queries, keys, values, k_rope, kernel_ready(cache.lengths)


def _mixed_fields(shape: CallShape) -> dict[str, Any]:
    window = {"n": min(shape.window, shape.t)} if shape.window else {}
    return {**sizes_of(shape), **window}


def _mixed_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    c_kv, k_rope = _dense_rows(task, shape)
    q_nope, q_rope = kernel_ready(task.q), kernel_ready(task.q_rope)
    raw = MlaInputs(q_nope, q_rope, c_kv, k_rope, task.w_uk, task.w_uv, task.cache.lengths)
    window = _straight_window(task, plan.n) if shape.window else decompress_newest(raw, plan.n)
    q_latent = absorb_queries(q_nope, task.w_uk)
    weights, lengths = kernel_ready(task.w_uv), kernel_ready(task.cache.lengths)
    return q_nope, q_latent, q_rope, c_kv, k_rope, *window, weights, lengths


def _straight_window(
    task: AttentionTask, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ring in the order that the kernel reads: slot j at position max(len - n, 0) + j.

    A token that is missing, because others were dropped and the ring was not filled up, becomes
    NaN: the result is visibly wrong rather than quietly.
    """
    cache = task.cache
    assert cache.k_new is not None and cache.v_new is not None
    assert cache.window_start is not None
    lengths = cache.lengths.long()[:, None]
    positions = (lengths - n).clamp(min=0) + torch.arange(n, device=lengths.device)  # [b, n]
    held = (positions >= cache.window_start[:, None]) & (positions < lengths)
    slots = (positions % cache.window)[:, None, :, None].expand(-1, task.h, -1, task.q.shape[-1])
    gone = ~held[:, None, :, None]
    nan = float("nan")
    k_new = cache.k_new.gather(2, slots).masked_fill_(gone, nan)
    v_new = cache.v_new.gather(2, slots).masked_fill_(gone, nan)
    _, rope = cache.rows(positions)
    return k_new, v_new, rope.masked_fill(~held[:, :, None], nan)


_ABSORBED = Service(_absorbed_operands, _dense_only, sizes_of, latent=True)

CUTILE_SERVICES: dict[str, Service] = {
    "flash_mla": _ABSORBED,
    "flash_mla_split_kv": _ABSORBED,
    "flash_attention": Service(_decompressed_operands, _dense_decompressed, sizes_of),
    "mla_var6_plus": Service(_mixed_operands, _dense_decompressed, _mixed_fields),
}
"""By design: all versions of a design take the same operands."""
