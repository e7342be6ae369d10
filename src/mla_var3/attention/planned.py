"""The kernels of the package that are driven by plans: dense caches, the same s for all requests.

A plan is made once per form of call and kept; a call builds its runtime object from the plan and
the tensors and launches it. On CPU tensors that is the interpreter, for small sizes and only when
the kernel was named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from mla_var3.attention.absorbed import missing_language
from mla_var3.attention.checks import kernel_ready
from mla_var3.attention.shape import CallShape
from mla_var3.attention.task import AttentionTask
from mla_var3.attention.tuned import best_tilings
from mla_var3.conf.devices import device_spec
from mla_var3.op.mla.inputs import (
    MlaInputs,
    absorb_queries,
    decompress_all,
    decompress_newest,
    up_project,
)
from mla_var3.runtime.paths import KernelId, plan_class
from mla_var3.runtime.tiling import Tiling, constraint_failures
from mla_var3.runtime.workflow import current_device_spec, planning_device

ABSORBED = ("flash_mla", "flash_mla_split_kv")
Operands = tuple[torch.Tensor, ...]

PLANNED_DESIGNS = (*ABSORBED, "flash_attention", "mla_var6_plus")


class PlannedKernel:
    """A backend around one kernel version and its plan."""

    runs_on_cpu = True

    def __init__(self, kernel_id: KernelId) -> None:
        """Wrap a kernel version; nothing is imported yet."""
        self._id = kernel_id

    @property
    def kernel(self) -> str:
        return self._id.full_name

    @property
    def language(self) -> str:
        return self._id.language

    def missing(self) -> str | None:
        return missing_language(self.language)

    def unsupported(self, shape: CallShape) -> str | None:
        if self._id.design not in ABSORBED and shape.latent_only:
            return "queries in the latent space: it needs q_nope"
        reasons = {
            "a paged cache": shape.page_size is not None,
            "different numbers of queries per request": shape.ragged,
            "a tree of tokens": shape.tree,
            "a cache that holds a part of each request (total_lengths)": shape.partial,
            "float32; it takes bfloat16 and float16": shape.dtype == "float32",
            "cache rows that are not 16-byte aligned": not shape.aligned,
        }
        for reason, holds in reasons.items():
            if holds:
                return reason
        if self.missing():
            return None  # the shape alone says nothing against it
        return _refusal(self._id, shape)

    def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        shape = task.shape()
        spec = current_device_spec() if task.q.is_cuda else planning_device()
        plan = planned(self._id, shape, spec.name)
        inputs = _INPUTS[self._id.design](task, shape, plan)
        stage = plan.plan(*inputs, kernel_ready(task.cache.lengths))
        if task.q.is_cuda:
            tuned = _tuned(self._id, shape, spec.name)
            for kernel in stage.kernels():
                kernel.tiling = tuned.get(kernel.name, kernel.tiling)
        stage.launch()
        output, lse = stage.output_tensors[:2]
        if self._id.design in ABSORBED and task.w_uv is not None:
            output = up_project(output, task.w_uv)
        return (output if task.out is None else task.out.copy_(output)), lse


def _absorbed_inputs(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    q_latent = task.q if task.w_uk is None else absorb_queries(task.q, task.w_uk)
    return kernel_ready(q_latent), kernel_ready(task.q_rope), *_dense_rows(task, shape)


def _decompressed_inputs(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    cache = task.cache
    c_kv, k_rope = _dense_rows(task, shape)
    if cache.k_new is not None and cache.v_new is not None and cache.window == cache.capacity:
        # A ring as long as the cache never turns: slot x is position x.
        keys, values = cache.k_new[:, :, : shape.t], cache.v_new[:, :, : shape.t]
    else:
        keys, values = decompress_all(c_kv, task.w_uk, task.w_uv)
    return kernel_ready(task.q), kernel_ready(task.q_rope), keys, values, k_rope


def _mixed_inputs(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    c_kv, k_rope = _dense_rows(task, shape)
    q_nope, q_rope = kernel_ready(task.q), kernel_ready(task.q_rope)
    raw = MlaInputs(q_nope, q_rope, c_kv, k_rope, task.w_uk, task.w_uv, task.cache.lengths)
    window = _straight_window(task, plan.n) if shape.window else decompress_newest(raw, plan.n)
    q_latent = absorb_queries(q_nope, task.w_uk)
    return q_nope, q_latent, q_rope, c_kv, k_rope, *window, kernel_ready(task.w_uv)


def _dense_rows(task: AttentionTask, shape: CallShape) -> tuple[torch.Tensor, torch.Tensor]:
    return task.cache.latent[:, : shape.t], task.cache.rope[:, : shape.t]


_INPUTS: dict[str, Callable[[AttentionTask, CallShape, Any], Operands]] = {
    "flash_mla": _absorbed_inputs,
    "flash_mla_split_kv": _absorbed_inputs,
    "flash_attention": _decompressed_inputs,
    "mla_var6_plus": _mixed_inputs,
}
"""The inputs of each design, all but the lengths, which come last everywhere."""


@lru_cache(maxsize=512)
def planned(kernel: KernelId, shape: CallShape, device: str) -> Any:
    """The plan of a kernel for a form of call on a device, by its name; every choice made."""
    spec = device_spec(device)
    cls = plan_class(kernel)
    fields = {name: getattr(shape, name) for name in ("b", "s", "t", "h", "d", "p", "k", "causal")}
    if not shape.default_scale:
        fields["scale"] = shape.scale
    if shape.window and kernel.design == "mla_var6_plus":
        fields["n"] = min(shape.window, shape.t)
    plan = cls(**fields, dtype=shape.dtype)
    return plan.for_target(spec.target).on_device(spec)


def tuning_plan(kernel: KernelId, shape: CallShape, device: str) -> Any:
    """The plan under which a call's tuning results are kept: times do not depend on the scale."""
    return planned(kernel, dataclasses.replace(shape, scale=None), device)


@lru_cache(maxsize=512)
def _tuned(kernel: KernelId, shape: CallShape, device: str) -> dict[str, Tiling]:
    return best_tilings(tuning_plan(kernel, shape, device), device_spec(device))


@lru_cache(maxsize=512)
def _refusal(kernel: KernelId, shape: CallShape) -> str | None:
    """What the plan itself has against a form of call."""
    plan = planned(kernel, shape, planning_device().name)
    for tiling in plan.tiling_fields().values():
        failures = constraint_failures(tiling, plan)
        if failures:
            return f"these sizes: {'; '.join(failures)}"
    return None


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
