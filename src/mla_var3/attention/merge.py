"""Merging attention over disjoint KV tokens by LSE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError


def joint_lse(lses: Tensor) -> Tensor:
    """LSE over the first dimension; -inf where no partial has a key."""
    return torch.logsumexp(lses, dim=0)


def weight_of(lse: Tensor, joint: Tensor) -> Tensor:
    """The weight of a partial in the merged result; 0 where it has no key."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - joint))


def merge_partials(partials: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One attention, in float32, out of several over disjoint KV tokens.

    Each is a normalised output `[..., e]` with its LSE `[...]`; there is at least one.
    """
    if not partials:
        raise InvalidArgumentError("partials", "one or more outputs with their LSE", "none")
    shape = partials[0][0].shape
    for partial, lse in partials:
        if partial.shape != shape or lse.shape != shape[:-1]:
            wanted = f"outputs {list(shape)} and LSEs {list(shape[:-1])}, as the first output has"
            found = f"{list(partial.shape)} and {list(lse.shape)}"
            raise InvalidArgumentError("partials", wanted, found)
    if len(partials) == 1:
        return partials[0][0].float(), partials[0][1]
    joint = joint_lse(torch.stack([lse for _, lse in partials]))
    output = torch.zeros_like(partials[0][0], dtype=torch.float32)
    for partial, lse in partials:
        output += partial * weight_of(lse, joint)[..., None]
    return output, joint
