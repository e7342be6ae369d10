"""The reference of every attention path.

All paths are one computation: a softmax over the union of KV segments, where each segment brings
its own query form, keys and values. The decompressed path has one segment of per-head keys, the
latent path one segment of latent rows shared by the heads, the mix has both. So there is one
implementation, `attend`, and the functions here only arrange its segments.

Operands and results:

    q_nope [b, s, h, d]     q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]          k_rope [b, t, p]        latent cache, shared by the heads
    k [b, h, t, d]          v [b, h, t, v]          decompressed
    k_new [b, h, n, d], v_new [b, h, n, v], k_rope_new [b, n, p]
                            window: slot j of request r is position max(len_r - n, 0) + j
    w_uv [h, k, v]          lengths [b]             KV tokens of each request
    -> output [b, s, h, v], or [b, s, h, k] in the latent space, and LSE [b, s, h]

The options are mask, scale and dtype, see `attend`.

With a 16-bit `compute_dtype` the same functions are the yardstick for a kernel's rounding error:
what PyTorch gets for the same computation in the kernel's dtype.
"""

from __future__ import annotations

from typing import Unpack

import torch

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


def reference_decompressed(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over decompressed keys and values."""
    positions = _slots(k.shape[2], q_nope)
    segment = decompressed_segment(q_nope, q_rope, k, v, k_rope, positions)
    (output,), lse = attend([segment], lengths=lengths, **options)
    return output, lse


def reference_latent(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in the latent space, before the up-projection of the output."""
    positions = _slots(c_kv.shape[1], q_latent)
    segment = latent_segment(q_latent, q_rope, c_kv, k_rope, positions)
    (output,), lse = attend([segment], lengths=lengths, **options)
    return output, lse


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

    Of request `r` only positions `< max(len_r - n, 0)` of the latent cache are read.
    """
    n = k_new.shape[2]
    old = (lengths_tensor(lengths, c_kv.shape[0], c_kv.device) - n).clamp(min=0)[:, None]
    slots = _slots(c_kv.shape[1], q_nope)
    segments = [
        latent_segment(q_latent, q_rope, c_kv, k_rope, torch.where(slots < old, slots, -1)),
        decompressed_segment(q_nope, q_rope, k_new, v_new, k_rope_new, _slots(n, q_nope) + old),
    ]
    (latent, newest), lse = attend(segments, lengths=lengths, **options)
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

    `compute_dtype` is also the dtype of both projections; the problem gives mask and scale.
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
    b = q_nope.shape[0]
    keys, values = k.expand(b, -1, -1, -1), v.expand(b, -1, -1, -1)
    return KvSegment(q_nope, keys, values, positions, q_rope, k_rope.expand(b, -1, -1))


def latent_segment(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    positions: torch.Tensor,
) -> KvSegment:
    """The segment of latent rows `[b, m, k]` with rope keys `[b, m, p]`, shared by the heads."""
    return KvSegment(q_latent, c_kv[:, None], c_kv[:, None], positions, q_rope, k_rope)


def _slots(count: int, queries: torch.Tensor) -> torch.Tensor:
    """Positions 0, 1, ... of the slots of each request, `[b, count]`."""
    return torch.arange(count, device=queries.device).expand(queries.shape[0], -1)
