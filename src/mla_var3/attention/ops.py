"""The calls as `torch.library` operators, for `torch.compile` and `torch.export`.

`hyper_mla::mla_attention` and `hyper_mla::latent_attention` take the tensors of a checked call one
by one. A traced program holds the operator; which kernel it runs is decided when it runs. A kernel
that reads the window may first decompress tokens that it lacks after a rollback, in place: the
operator declares that it changes the window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.execute import execute
from mla_var3.attention.request.task import AttentionTask

WINDOW = ("k_new", "v_new", "window_start", "k_rope_new", "window_scales")
"""Arguments that a call may change."""


@torch.library.custom_op("hyper_mla::mla_attention", mutates_args=WINDOW)
def mla_attention_op(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    lengths: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor | None,
    k_new: Tensor | None,
    v_new: Tensor | None,
    window_start: Tensor | None,
    k_prefix: Tensor | None,
    v_prefix: Tensor | None,
    k_rope_new: Tensor | None,
    k_rope_prefix: Tensor | None,
    scales: Tensor | None,
    window_scales: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tree: Tensor | None,
    total_lengths: Tensor | None,
    causal: bool,
    scale: float,
    max_q: int | None,
    max_kv: int | None,
    shards: int,
    shard: int,
    batch_invariant: bool,
    sliding_window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """`mla_attention` on checked operands: output and LSE."""
    cache = CacheView(
        latent, rope, lengths, block_table, k_new, v_new, window_start, k_prefix, v_prefix,
        k_rope_new, k_rope_prefix, scales, window_scales,
    )  # fmt: skip
    task = AttentionTask(
        q=q_nope,
        q_rope=q_rope,
        cache=cache,
        w_uk=w_uk,
        w_uv=w_uv,
        causal=causal,
        scale=scale,
        tree=tree,
        cu_seqlens_q=cu_seqlens_q,
        max_q=max_q,
        max_kv=max_kv,
        total_lengths=total_lengths,
        shards=shards,
        shard=shard,
        batch_invariant=batch_invariant,
        sliding_window=sliding_window,
    )
    output, lse, _ = execute(task, kernel)
    return output.contiguous(), lse.contiguous()


@mla_attention_op.register_fake
def _(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    lengths: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *others: object,
) -> tuple[Tensor, Tensor]:
    return _shaped(q_nope, w_uv.shape[2])


@torch.library.custom_op("hyper_mla::latent_attention", mutates_args=())
def latent_attention_op(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    lengths: Tensor,
    block_table: Tensor | None,
    scales: Tensor | None,
    cu_seqlens_q: Tensor | None,
    tree: Tensor | None,
    total_lengths: Tensor | None,
    causal: bool,
    scale: float,
    max_q: int | None,
    max_kv: int | None,
    shards: int,
    shard: int,
    batch_invariant: bool,
    sliding_window: int | None,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """`mla_latent_attention` on checked operands: latent output and LSE."""
    task = AttentionTask(
        q=q_latent,
        q_rope=q_rope,
        cache=CacheView(latent, rope, lengths, block_table, scales=scales),
        w_uk=None,
        w_uv=None,
        causal=causal,
        scale=scale,
        tree=tree,
        cu_seqlens_q=cu_seqlens_q,
        max_q=max_q,
        max_kv=max_kv,
        total_lengths=total_lengths,
        shards=shards,
        shard=shard,
        batch_invariant=batch_invariant,
        sliding_window=sliding_window,
    )
    output, lse, _ = execute(task, kernel)
    return output.contiguous(), lse.contiguous()


@latent_attention_op.register_fake
def _(q_latent: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return _shaped(q_latent, q_latent.shape[-1])


def _shaped(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Output and LSE without values, contiguous as the operators return them."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, width)), q.new_empty(rows, dtype=torch.float32)


def traced(task: AttentionTask, kernel: str) -> tuple[Tensor, Tensor]:
    """Call the operator of a checked call."""
    cache = task.cache
    options = (
        task.cu_seqlens_q,
        task.tree,
        task.total_lengths,
        task.causal,
        task.scale,
        task.max_q,
        task.max_kv,
        task.shards,
        task.shard,
        task.batch_invariant,
        task.sliding_window,
        kernel,
    )
    operands = (task.q, task.q_rope, cache.latent, cache.rope, cache.lengths)
    if task.w_uk is None or task.w_uv is None:
        result = latent_attention_op(*operands, cache.block_table, cache.scales, *options)
    else:
        result = mla_attention_op(
            *operands,
            task.w_uk,
            task.w_uv,
            cache.block_table,
            cache.k_new,
            cache.v_new,
            cache.window_start,
            cache.k_prefix,
            cache.v_prefix,
            cache.k_rope_new,
            cache.k_rope_prefix,
            cache.scales,
            cache.window_scales,
            *options,
        )
    output, lse = result
    return output, lse
