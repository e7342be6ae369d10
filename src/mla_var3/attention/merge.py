"""Joining attention over parts of the KV tokens, by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def joint_lse(lses: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp over the first dimension; -inf where no part has a key."""
    return torch.logsumexp(lses, dim=0)


def share_of(lse: torch.Tensor, joint: torch.Tensor) -> torch.Tensor:
    """The weight of a part in the whole, 0 where the part (or the whole) has no key."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - joint))


def merge_parts(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention out of several over disjoint KV tokens.

    Args:
        parts: normalised output `[..., e]` and natural log-sum-exp `[...]` of each.

    Returns:
        Output and log-sum-exp over all tokens, float32.
    """
    if len(parts) == 1:
        return parts[0][0].float(), parts[0][1]
    joint = joint_lse(torch.stack([lse for _, lse in parts]))
    output = torch.zeros_like(parts[0][0], dtype=torch.float32)
    for part, lse in parts:
        output += part * share_of(lse, joint)[..., None]
    return output, joint
