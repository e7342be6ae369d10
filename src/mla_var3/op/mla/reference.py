"""The reference of every attention path.

All paths are one computation: a softmax over the union of KV segments, where each segment brings
its own query form, keys and values. The decompressed path has one segment of per-head keys, the
latent path one segment of latent rows shared by the heads, the mix has both. So there is one
implementation, `attend`, and the functions here only arrange its segments.

With a 16-bit `compute_dtype` the same functions are the yardstick for a kernel's rounding error:
what PyTorch gets for the same computation in the kernel's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from mla_var3.op.compare import ErrorFigures, compare
from mla_var3.op.mla.attend import (
    AttendOptions,
    KvSegment,
    Lengths,
    attend,
    ieee_float32,
    lengths_tensor,
)
from mla_var3.op.mla.inputs import MlaInputs, project_queries, up_project
from mla_var3.op.mla.problem import MlaProblem

__all__ = [
    "ErrorFigures",
    "KvSegment",
    "attend",
    "compare",
    "reference_decompressed",
    "reference_from_latent",
    "reference_latent",
    "reference_mix",
]


def reference_decompressed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over decompressed keys and values.

    Args:
        q_nope: `[b, s, h, d]`.
        q_rope: `[b, s, h, p]`.
        k: `[b, h, t, d]`.
        v: `[b, h, t, v]`.
        k_rope: `[b, t, p]`, shared by the heads.
        lengths: KV tokens of each request, `[b]`.
        **options: Mask, scale and dtype, see `attend`.

    Returns:
        The output `[b, s, h, v]` and the LSE `[b, s, h]`.
    """

    def segments(one: slice) -> list[KvSegment]:
        rows = q_nope[one], q_rope[one], k[one], v[one], k_rope[one]
        return [decompressed_segment(*rows, _slots(k.shape[2], k))]

    outputs, lse = _by_request(segments, lengths, q_nope, options)
    return outputs[0], lse


def reference_latent(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the latent space, before the up-projection of the output.

    Args:
        q_latent: `[b, s, h, k]`.
        q_rope: `[b, s, h, p]`.
        c_kv: `[b, t, k]`.
        k_rope: `[b, t, p]`.
        lengths: KV tokens of each request, `[b]`.
        **options: Mask, scale and dtype, see `attend`.

    Returns:
        The latent output `[b, s, h, k]` and the LSE `[b, s, h]`.
    """

    def segments(one: slice) -> list[KvSegment]:
        rows = q_latent[one], q_rope[one], c_kv[one], k_rope[one]
        return [latent_segment(*rows, _slots(c_kv.shape[1], c_kv))]

    outputs, lse = _by_request(segments, lengths, q_latent, options)
    return outputs[0], lse


def reference_mix(
    q_nope: torch.Tensor,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_rope_new: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Old tokens in the latent space, the `n` newest decompressed, under one softmax.

    Args:
        q_nope: `[b, s, h, d]`.
        q_latent: `[b, s, h, k]`.
        q_rope: `[b, s, h, p]`.
        c_kv: `[b, t, k]`; of request `r` only positions `< max(len_r - n, 0)` are read.
        k_rope: `[b, t, p]`, likewise.
        k_new: `[b, h, n, d]`, slot `j` at position `max(len_r - n, 0) + j`.
        v_new: `[b, h, n, v]`.
        k_rope_new: `[b, n, p]`.
        w_uv: `[h, k, v]`, for the latent share of the output.
        lengths: KV tokens of each request, `[b]`.
        **options: Mask, scale and dtype, see `attend`.

    Returns:
        The output `[b, s, h, v]` and the LSE `[b, s, h]`.
    """
    b, t, n = c_kv.shape[0], c_kv.shape[1], k_new.shape[2]
    old = (lengths_tensor(lengths, b, c_kv.device) - n).clamp(min=0)  # [b]

    def segments(one: slice) -> list[KvSegment]:
        slots = _slots(t, c_kv)
        old_slots = torch.where(slots < old[one, None], slots, -1)
        new_slots = _slots(n, c_kv) + old[one, None]
        latent = q_latent[one], q_rope[one], c_kv[one], k_rope[one]
        newest = q_nope[one], q_rope[one], k_new[one], v_new[one], k_rope_new[one]
        return [latent_segment(*latent, old_slots), decompressed_segment(*newest, new_slots)]

    (latent, newest), lse = _by_request(segments, lengths, q_nope, options)
    return add_latent_share(newest, latent, w_uv, options), lse


def add_latent_share(
    share: torch.Tensor, latent: torch.Tensor, w_uv: torch.Tensor, options: AttendOptions
) -> torch.Tensor:
    """The output of a mix: the decompressed share `[b, s, h, v]` plus the projected latent one."""
    dtype = options.get("compute_dtype", torch.float32)
    with ieee_float32():
        projected = up_project(latent.to(dtype), w_uv.to(dtype))
    return (projected.to(share.dtype) + share).to(dtype).to(share.dtype)


def reference_from_latent(
    inputs: MlaInputs,
    problem: MlaProblem,
    *,
    compute_dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole operation from the raw latent cache, by the latent path.

    Args:
        inputs: The raw operands.
        problem: Gives the mask and the softmax scale.
        compute_dtype: See `attend`; also the dtype of both projections.
        sliding_window: See `attend`.

    Returns:
        The output `[b, s, h, v]` and the LSE `[b, s, h]`.
    """
    with ieee_float32():
        q_latent = project_queries(inputs.q_nope.to(compute_dtype), inputs.w_uk.to(compute_dtype))
    latent, lse = reference_latent(
        q_latent,
        inputs.q_rope,
        inputs.c_kv,
        inputs.k_rope,
        inputs.lengths,
        causal=problem.causal,
        scale=problem.softmax_scale,
        compute_dtype=compute_dtype,
        sliding_window=sliding_window,
    )
    with ieee_float32():
        output = up_project(latent.to(compute_dtype), inputs.w_uv.to(compute_dtype))
    return output.to(lse.dtype), lse


def _by_request(
    build: Callable[[slice], list[KvSegment]],
    lengths: Lengths,
    q: torch.Tensor,
    options: AttendOptions,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Attends one request at a time, so that joined keys exist for one request only."""
    b = q.shape[0]
    kv_lengths = lengths_tensor(lengths, b, q.device)
    outputs: list[list[torch.Tensor]] = []
    lses = []
    for request in range(b):
        one = slice(request, request + 1)
        output, lse = attend(build(one), lengths=kv_lengths[one], **options)
        outputs.append(output)
        lses.append(lse)
    return [torch.cat(share) for share in zip(*outputs, strict=True)], torch.cat(lses)


def decompressed_segment(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
) -> KvSegment:
    """The segment of per-head keys `[b, h, m, d]` and values, with rope keys `[b, m, p]`.

    Keys, values and rope keys that all requests share have 1 instead of b, and are not copied.
    """
    rope = k_rope[:, None].expand(-1, k.shape[1], -1, -1)  # [b, h, m, p]
    queries, keys = torch.cat([q_nope, q_rope], dim=-1), torch.cat([k, rope], dim=-1)
    every = (q_nope.shape[0], -1, -1, -1)
    return KvSegment(queries, keys.expand(every), v.expand(every), positions)


def latent_segment(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
) -> KvSegment:
    """The segment of latent rows `[b, m, k]` with rope keys `[b, m, p]`, shared by the heads."""
    queries, keys = torch.cat([q_latent, q_rope], dim=-1), torch.cat([c_kv, k_rope], dim=-1)
    return KvSegment(queries, keys[:, None], c_kv[:, None], positions)


def _slots(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(count, device=like.device)[None]  # [1, count]
