"""Inputs and reference of requests that share their first tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.attend import AttendOptions, Lengths, attend, lengths_tensor
from mla_var3.op.mla.inputs import MlaInputs, decompress_all, make_inputs
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem
from mla_var3.op.mla.reference import add_latent_share, decompressed_segment, latent_segment

_NAN = float("nan")


@dataclass
class SharedPrefixInputs:
    """The operands of a call with a shared prefix.

    Attributes:
        plain: The same call without sharing: the latent rows of the prefix stand in the cache of
            every request. For a comparison; a kernel must not need it.
        c_kv: Latent cache, `[b, t, k]`, slot = position; NaN in the slots of the prefix and at
            and beyond each length, so that a kernel that reads them fails its check.
        k_rope: Rope part of the keys, `[b, t, p]`; NaN likewise.
        k_prefix: Keys of the prefix, `[h, prefix, d]`.
        v_prefix: Values of the prefix, `[h, prefix, v]`.
        k_rope_prefix: Rope part of its keys, `[prefix, p]`.
    """

    plain: MlaInputs
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    k_prefix: torch.Tensor
    v_prefix: torch.Tensor
    k_rope_prefix: torch.Tensor


def make_shared_prefix_inputs(
    shared: SharedPrefixProblem, device: torch.device | str, seed: int | None = None
) -> SharedPrefixInputs:
    """Makes random inputs whose requests have the same first tokens; see `make_inputs`."""
    problem, prefix = shared.problem, shared.prefix
    # Drawn at full length first: the prefix must hold tokens although request 0 may be shorter.
    plain = make_inputs(replace(problem, lengths=None), device, seed)
    plain.lengths = torch.tensor(problem.kv_lengths, dtype=torch.int32, device=plain.lengths.device)
    latent, k_rope_prefix = plain.c_kv[0, :prefix].clone(), plain.k_rope[0, :prefix].clone()
    keys, values = decompress_all(latent[None], plain.w_uk, plain.w_uv)
    slots = torch.arange(problem.t, device=plain.lengths.device)[None]  # [1, t]
    unused = (slots >= plain.lengths[:, None])[..., None]  # [b, t, 1]
    for rows, first in ((plain.c_kv, latent), (plain.k_rope, k_rope_prefix)):
        rows[:, :prefix] = first
        rows.masked_fill_(unused, _NAN)
    in_prefix = (slots < prefix)[..., None]
    return SharedPrefixInputs(
        plain=plain,
        c_kv=plain.c_kv.masked_fill(in_prefix, _NAN),
        k_rope=plain.k_rope.masked_fill(in_prefix, _NAN),
        k_prefix=keys[0],
        v_prefix=values[0],
        k_rope_prefix=k_rope_prefix,
    )


def reference_shared_prefix(
    q_nope: torch.Tensor,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    k_prefix: torch.Tensor,
    v_prefix: torch.Tensor,
    k_rope_prefix: torch.Tensor,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    w_uv: torch.Tensor,
    lengths: Lengths,
    **options: Unpack[AttendOptions],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shared prefix decompressed, the own tokens in the latent space, under one softmax.

    Operands as of `SharedPrefixInputs`, slot = position. Of the latent cache only positions from
    `prefix` to a request's length are read. The other operands, the options and the results are
    those of `op/mla/reference.py`.
    """
    b, t, _ = c_kv.shape
    prefix = _require_prefix(k_prefix, v_prefix, k_rope_prefix, t)
    kv_lengths = lengths_tensor(lengths, b, c_kv.device)
    slots = torch.arange(t, device=c_kv.device)
    own_slots = torch.where(slots >= prefix, slots, -1).expand(b, -1)
    keys, values, rope = (rows[None] for rows in (k_prefix, v_prefix, k_rope_prefix))
    segments = [
        decompressed_segment(q_nope, q_rope, keys, values, rope, slots[:prefix].expand(b, -1)),
        latent_segment(q_latent, q_rope, c_kv, k_rope, own_slots),
    ]
    (shared, latent), lse = attend(segments, lengths=kv_lengths, **options)
    return add_latent_share(shared, latent, w_uv, options), lse


def _require_prefix(
    k_prefix: torch.Tensor, v_prefix: torch.Tensor, k_rope_prefix: torch.Tensor, t: int
) -> int:
    """Checks the operands of the prefix; `attend` checks the widths."""
    keys, values, rope = (list(rows.shape) for rows in (k_prefix, v_prefix, k_rope_prefix))
    if len(keys) != 3 or keys[1] > t:
        raise InvalidArgumentError("k_prefix", f"[h, prefix, d], prefix <= t={t}", keys)
    h, prefix, _ = keys
    if len(values) != 3 or values[:2] != [h, prefix]:
        raise InvalidArgumentError("v_prefix", f"[{h}, {prefix}, v]", values)
    if len(rope) != 2 or rope[0] != prefix:
        raise InvalidArgumentError("k_rope_prefix", f"[{prefix}, p]", rope)
    return prefix
