"""Which KV positions a query sees: causal order, trees of draft tokens, ragged query counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_var3.attention.request.checks import INDEX_DTYPES, readable, require_tensor
from mla_var3.errors import InvalidArgumentError


def tree_ancestors(parents: Tensor) -> Tensor:
    """The mask of a tree of tokens: which tokens are on the path from a token to the root.

    Args:
        parents: int `[..., s]`, for every token the index of its parent, which comes before it;
            -1 for a child of the context. On a GPU, where values are not read, any index that is
            not before the token counts as -1.

    Returns:
        bool `[..., s, s]`: row i is true at i and at all ancestors of i.
    """
    if not isinstance(parents, Tensor) or not parents.dim():
        got = list(parents.shape) if isinstance(parents, Tensor) else type(parents).__name__
        raise InvalidArgumentError("parents", "a tensor [..., s]", got)
    _require_dtype("parents", parents, INDEX_DTYPES)
    return _ancestors("parents", parents)


def _require_dtype(name: str, given: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if given.dtype not in dtypes:
        raise InvalidArgumentError(name, f"dtype {' or '.join(map(str, dtypes))}", given.dtype)


def _ancestors(name: str, parents: Tensor) -> Tensor:
    """See `tree_ancestors`; `name` is what a caller calls the parents."""
    s = parents.shape[-1]
    order = torch.arange(s, device=parents.device)
    if readable(parents):
        wrong = ((parents < -1) | (parents >= order)).nonzero()
        if len(wrong):
            index = wrong[0].tolist()
            expected = f"-1 or the index of a token before token {index[-1]}"
            raise InvalidArgumentError(f"{name}{index}", expected, parents[tuple(index)].item())
    is_parent = (parents[..., None] == order) & (order < order[:, None])
    reach = (is_parent | torch.eye(s, dtype=torch.bool, device=parents.device)).float()
    steps = 1
    while steps < s:  # reach covers `steps` generations; squaring doubles them
        reach = (reach @ reach).clamp(max=1.0)
        steps *= 2
    return reach > 0


def checked_tree(tree: Tensor, b: int, s: int, device: torch.device) -> Tensor:
    """Any accepted tree mask on the device, see `mla_attention`, as bool `[b, s, s]`."""
    dtypes = (torch.bool, *INDEX_DTYPES)
    _require_dtype("tree_mask", tree, dtypes)  # the shape follows from it
    is_mask = tree.dtype is torch.bool
    tail = [("s", s), ("s", s)] if is_mask else [("s", s)]
    shape = tail if tree.dim() == len(tail) else [("b", b), *tail]
    require_tensor("tree_mask", tree, shape, dtypes, device)
    mask = tree if is_mask else _ancestors("tree_mask", tree)
    return mask.expand(b, s, s)


@dataclass(frozen=True)
class Visibility:
    """What the queries of a batch see.

    Attributes:
        lengths: int64 `[b]`, tokens in the cache.
        ends: int64 `[b]`, length of each request counted from the first slot of the cache; beyond
            `lengths` where the cache holds only the first part of a request.
        counts: int64 `[b]`, query tokens of each request, its newest tokens.
        s: query rows per request, of which each request uses the first `counts`.
        causal, tree, shards, shard, sliding_window: as of `AttentionTask`; slot i of the cache
            holds token i * shards + shard of the request.
    """

    lengths: Tensor
    ends: Tensor
    counts: Tensor
    s: int
    causal: bool
    tree: Tensor | None
    shards: int = 1
    shard: int = 0
    sliding_window: int | None = None

    def first_seen(self) -> Tensor | None:
        """First slot in the sliding window of any query, int64 `[b]`; None without a window."""
        if self.sliding_window is None:
            return None
        token = self.ends - self.counts - self.sliding_window + 1
        return (token - self.shard + self.shards - 1).div(self.shards, rounding_mode="floor")

    def __call__(self, positions: Tensor) -> Tensor:
        """Whether query i sees a position: bool `[b, s, m]` for int64 `[b, m]`; -1 is unseen."""
        query = torch.arange(self.s, device=positions.device)  # [s]
        at = positions[:, None, :]  # [b, 1, m]
        first = (self.ends - self.counts)[:, None, None]  # position of the first query
        seen = (at >= 0) & (at < self.lengths[:, None, None])
        seen = seen & (query < self.counts[:, None])[:, :, None]
        own, token = first + query[:, None], at * self.shards + self.shard
        if self.causal:
            seen = seen & (token <= own)
        if self.sliding_window is not None:
            seen = seen & (token > own - self.sliding_window)
        if self.tree is not None:
            draft = at - first  # index among the newest tokens
            column = draft.clamp(0, self.s - 1).expand(-1, self.s, -1)
            seen = seen & ((draft < 0) | self.tree.gather(2, column))
        return seen
