"""One attention over several GPUs: parallel over heads, or over KV tokens.

Heads: each rank has some of the heads with their weights and the whole latent cache, and computes
their outputs; `gather_heads` collects the outputs where the next layer needs all of them.

KV tokens: each rank has all heads and a range of every request's tokens. The ranks attend to their
ranges, and the partials are merged by LSE: one gather of the LSEs and one sum of the weighted
outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mla_var3.attention.call import mla_attention
from mla_var3.attention.merge import joint_lse, weight_of
from mla_var3.attention.request.checks import INDEX_DTYPES, require_tensor
from mla_var3.attention.request.validate import Cache
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.problem import require_int

Group = dist.ProcessGroup | None
"""A process group; None is the default one."""


def head_range(h: int, rank: int, world: int) -> slice:
    """The heads of a rank: consecutive; the first ranks have one more where h does not divide."""
    require_int("h", h, minimum=1)
    require_int("world", world, minimum=1, maximum=h, maximum_name="h")
    require_int("rank", rank, minimum=0, maximum=world - 1, maximum_name="world-1")
    base, more = divmod(h, world)
    first = rank * base + min(rank, more)
    return slice(first, first + base + (rank < more))


def gather_heads(o: Tensor, h: int, group: Group = None) -> Tensor:
    """The outputs of all h heads, `[..., h, d]`, on every rank of a group.

    This rank's, `o`, are `[..., h_rank, d]`.
    """
    rank, world = _place(group)
    ranges = [head_range(h, index, world) for index in range(world)]
    own = ranges[rank]
    if o.dim() < 2 or o.shape[-2] != own.stop - own.start:
        expected = f"[..., {own.stop - own.start} heads of rank {rank}, d]"
        raise InvalidArgumentError("o", expected, list(o.shape))
    # Collectives need equal sizes: ranks with fewer heads add a row of zeros.
    padded = o.new_zeros((*o.shape[:-2], ranges[0].stop, o.shape[-1]))
    padded[..., : o.shape[-2], :] = o
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    pairs = zip(parts, ranges, strict=True)
    return torch.cat([part[..., : own.stop - own.start, :] for part, own in pairs], dim=-2)


@dataclass(frozen=True)
class KvShare:
    """The range of every request's tokens that a rank has: `start..start+size-1`.

    Attributes:
        rank, world: the rank and how many there are.
        size: slots per rank.
    """

    rank: int
    world: int
    size: int

    def __post_init__(self) -> None:
        require_int("world", self.world, minimum=1)
        require_int("rank", self.rank, minimum=0, maximum=self.world - 1, maximum_name="world-1")
        require_int("size", self.size, minimum=1)

    @classmethod
    def of(cls, t: int, group: Group = None) -> KvShare:
        """Equal ranges of t slots for the ranks of a group."""
        rank, world = _place(group)
        return cls(rank, world, -(-t // world))

    @property
    def start(self) -> int:
        return self.rank * self.size

    def lengths(self, total_lengths: Tensor) -> Tensor:
        """Tokens of each request that this rank has, int32 `[b]`."""
        return (total_lengths - self.start).clamp(0, self.size).to(torch.int32)


def kv_parallel_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Cache,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    total_lengths: Tensor,
    share: KvShare,
    group: Group = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`mla_attention` over KV tokens that are on several ranks; every rank gets the result.

    Queries and weights are the same on all ranks. `cache` is this rank's range, `share`, of every
    request's tokens, its first slot being position `share.start`; `total_lengths` are the tokens
    over all ranks of the group, int32 `[b]`. Options are those of `mla_attention`, except
    `lengths`, `out`, `shards` and `shard`.
    """
    require_tensor("total_lengths", total_lengths, [("b", None)], INDEX_DTYPES, q_nope.device)
    for name in ("lengths", "out", "shards", "shard"):
        if name in options:
            raise InvalidArgumentError(name, "none where ranks have ranges of tokens", "one")
    _, world = _place(group)
    if share.world != world:
        expected = f"one of {world} ranks, as the group has"
        raise InvalidArgumentError("share", expected, f"one of {share.world}")
    result = mla_attention(
        q_nope,
        q_rope,
        cache,
        w_uk,
        w_uv,
        lengths=share.lengths(total_lengths),
        total_lengths=(total_lengths - share.start).to(torch.int32),
        return_lse=True,
        **options,
    )
    assert isinstance(result, tuple)
    output, lse = merge_over_ranks(*result, group=group)
    return (output, lse) if return_lse else output


def merge_over_ranks(o: Tensor, lse: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """Merge attention over KV tokens that are on different ranks.

    This rank's is a normalised output `[..., e]` with its LSE `[...]`, float32; the result has the
    dtype of `o`.
    """
    _, world = _place(group)
    lse = lse.contiguous()
    lses = [torch.empty_like(lse) for _ in range(world)]
    dist.all_gather(lses, lse, group=group)
    joint = joint_lse(torch.stack(lses))
    # Ranks add memory, not elements: it has to be laid out alike.
    weighted = (o.float() * weight_of(lse, joint)[..., None]).contiguous()
    dist.all_reduce(weighted, group=group)
    return weighted.to(o.dtype), joint


def _place(group: Group) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        expected = "an initialised torch.distributed process group"
        raise UnsupportedError(f"group: expected {expected}, got none")
    return dist.get_rank(group), dist.get_world_size(group)
