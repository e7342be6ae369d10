"""The calls as `torch.library` operators, for `torch.compile` and `torch.export`.

`hyper_mla::mla_attention` and `hyper_mla::latent_attention` take the tensors of a checked call one
by one. A traced program holds the operator; which kernel it runs is decided when it runs. A kernel
that reads the window may first decompress tokens that it lacks after a rollback, in place: the
operator declares that it changes the window.

A schema names the fields of `CacheView` and `AttentionTask` that an operator takes. Operator, fake
and call follow from it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.select.choice import run as run_call

_CACHE_FIELDS = frozenset(field.name for field in fields(CacheView))
_OPTIONS = (
    "Tensor? cu_seqlens_q, Tensor? tree, Tensor? total_lengths, bool causal, float scale, "
    "SymInt? max_q, SymInt? max_kv, SymInt shards, SymInt shard, bool batch_invariant, "
    "SymInt? sliding_window, str kernel"
)
_LATENT = (
    "Tensor q_latent, Tensor q_rope, Tensor latent, Tensor rope, Tensor lengths, "
    f"Tensor? block_table, Tensor? scales, {_OPTIONS}"
)
# An argument that the call may change has an alias of its own.
_WHOLE = (
    "Tensor q_nope, Tensor q_rope, Tensor latent, Tensor rope, Tensor lengths, Tensor w_uk, "
    "Tensor w_uv, Tensor? block_table, Tensor(a8!)? k_new, Tensor(a9!)? v_new, "
    "Tensor(a10!)? window_start, Tensor? k_prefix, Tensor? v_prefix, Tensor(a13!)? k_rope_new, "
    f"Tensor? k_rope_prefix, Tensor? scales, Tensor(a16!)? window_scales, {_OPTIONS}"
)


def _names(schema: str) -> list[str]:
    """The arguments of a schema; the first one, the queries, by its name in `AttentionTask`."""
    return ["q", *(argument.split()[-1] for argument in schema.split(", ")[1:])]


def _operator(name: str, schema: str) -> Any:
    names = _names(schema)
    changed = [argument.split()[-1] for argument in schema.split(", ") if "!" in argument]

    def run(*arguments: object) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, arguments, strict=True))
        kernel = given.pop("kernel")
        cache = {key: given.pop(key) for key in names if key in _CACHE_FIELDS}
        weights = {"w_uk": None, "w_uv": None}
        task = AttentionTask(**{**weights, **given, "cache": CacheView(**cache)})  # type: ignore[arg-type]
        output, lse, _ = run_call(task, str(kernel))
        return output.contiguous(), lse.contiguous()

    def fake(*arguments: object) -> tuple[Tensor, Tensor]:
        given = dict(zip(names, arguments, strict=True))
        q, w_uv = given["q"], given.get("w_uv")
        assert isinstance(q, Tensor)
        width = w_uv.shape[2] if isinstance(w_uv, Tensor) else q.shape[-1]
        rows = q.shape[:-1]
        return q.new_empty((*rows, width)), q.new_empty(rows, dtype=torch.float32)

    operator = torch.library.custom_op(
        f"hyper_mla::{name}", run, mutates_args=changed, schema=f"({schema}) -> (Tensor, Tensor)"
    )
    operator.register_fake(fake)
    return operator


mla_attention_op = _operator("mla_attention", _WHOLE)
"""`mla_attention` on checked operands: output and LSE."""
latent_attention_op = _operator("latent_attention", _LATENT)
"""`mla_latent_attention` on checked operands: latent output and LSE."""


def traced(task: AttentionTask, kernel: str) -> tuple[Tensor, Tensor]:
    """Call the operator of a checked call."""
    latent = task.w_uk is None
    operator, schema = (latent_attention_op, _LATENT) if latent else (mla_attention_op, _WHOLE)
    *names, _ = _names(schema)
    given = (getattr(task.cache if name in _CACHE_FIELDS else task, name) for name in names)
    output, lse = operator(*given, kernel)
    return output, lse
