"""Several groups with decompressed prefixes in one batch, one group after the other.

Decompressed prefixes pay with about 40 query tokens per group and more (H200, 128 heads). A group
of that size fills the GPU by itself, so its requests are a batch of their own to the kernel of one
shared prefix. Groups are ranges of requests that the host knows; they are no part of a CUDA graph's
input.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_var3.attention.cache.copies import decompress_rows
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix.attend import Inner, Wrapper
from mla_var3.attention.prefix.groups import DecompressedPrefixes, PrefixCopy, PrefixGroups
from mla_var3.attention.prefix.layout import not_shared, require_groups
from mla_var3.attention.request.checks import FLOAT_DTYPES, inference, require_tensor
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError


@inference
def decompress_prefixes(
    groups: PrefixGroups, cache: LatentCache | CacheView, w_uk: Tensor, w_uv: Tensor
) -> DecompressedPrefixes:
    """Decompress the prefix of every group, once for all steps; reads the groups on the host.

    They have one level, and the requests of a group are neighbours. The cache holds the prefixes;
    the up-projections are `[h, d, k]` and `[h, k, v]`. The calls take the result as `prefix`.
    Groups without a whole page, with one request, or with none that holds the whole prefix have no
    copy.
    """
    view = cache.view() if isinstance(cache, LatentCache) else cache
    require_groups(groups, view)
    if groups.levels != 1:
        raise InvalidArgumentError("groups", "one level of prefixes", f"{groups.levels} levels")
    stored = FLOAT_DTYPES if view.scales is not None else [view.latent.dtype]
    k, device = ("k", view.latent.shape[-1]), view.latent.device
    require_tensor("w_uk", w_uk, [("h", None), ("d", None), k], stored, device)
    shape = [("h", w_uk.shape[0]), k, ("v", None)]
    require_tensor("w_uv", w_uv, shape, [w_uk.dtype], device)
    page, tokens = view.page_size or PAGE_STEP, groups.prefix_length[0].tolist()
    held, copies = view.lengths.tolist(), []
    for group, (first, last) in _spans(groups).items():
        length = tokens[group] // page * page
        leader = max(range(first, last), key=held.__getitem__)
        if last - first < 2 or not 0 < length <= min(held[leader], view.capacity):
            continue
        _require_same_pages(view, group, range(first, last), leader, length)
        latent, rope = (rows[0] for rows in view.request(leader).tile(0, length, w_uk.dtype))
        keys, values = (rows.transpose(0, 1) for rows in decompress_rows(latent, w_uk, w_uv))
        copies.append(PrefixCopy(first, last, keys.contiguous(), values.contiguous(), rope.clone()))
    return DecompressedPrefixes(groups, tuple(copies))


def _require_same_pages(
    view: CacheView, group: int, members: range, leader: int, length: int
) -> None:
    """Require that the members of a group hold its first tokens where their leader does."""
    if view.block_table is None:
        return
    at = torch.arange(0, length, view.latent.shape[1], device=view.lengths.device)
    table, own = view.block_table[:, : len(at)], slice(members.start, members.stop)
    held = at < view.lengths[own, None]
    wrong = (held & (table[own] != table[leader])).any(1).nonzero()
    if len(wrong):
        raise not_shared(0, members[int(wrong[0])], length, group)


def _spans(groups: PrefixGroups) -> dict[int, tuple[int, int]]:
    """The requests of each group, by its number, in the order of the requests."""
    found: dict[int, tuple[int, int]] = {}
    for request, group in enumerate(groups.prefix_of[0].tolist()):
        if not 0 <= group < groups.groups:
            continue
        first, last = found.get(group, (request, request))
        if last != request:
            raise InvalidArgumentError(
                "prefix_of", f"neighbours in group {group}", f"requests {first} and {request}"
            )
        found[group] = first, request + 1
    return found


class GroupedPrefixBackend(Wrapper):
    """The kernel of one decompressed prefix, once per group; the other requests latent."""

    suffix = "groups"

    def __init__(self, inner: Inner, others: Inner) -> None:
        """Wrap the backend of a group, and that of requests without one."""
        super().__init__(inner)
        self._others = others

    def unsupported(self, shape: CallShape) -> str | None:
        refused = shape.refused_cache()
        if refused is not None:
            return refused
        if not shape.prefix_copies:
            return "groups without decompressed prefixes (decompress_prefixes)"
        one = replace(
            shape, prefix=shape.prefix_copies, prefix_copies=0, shared=0, groups=1, window=0,
            window_dtype=None,
        )  # fmt: skip
        rest = replace(one, prefix=0)
        return self._inner.unsupported(one) or self._others.unsupported(rest)

    def run(self, task: AttentionTask) -> tuple[Tensor, Tensor]:
        assert isinstance(task.prefix, DecompressedPrefixes)
        rows = tuple(task.q.shape[:-1])
        output = task.q.new_empty((*rows, task.width)) if task.out is None else task.out
        lse = task.q.new_empty(rows, dtype=torch.float32)
        plain = task.cache.without_copies()

        def attend(backend: Inner, view: CacheView, first: int, last: int) -> None:
            """The requests `first..last-1` as a call of their own."""
            own = slice(first, last)
            tree = None if task.tree is None else task.tree[own]
            part = replace(task, q=task.q[own], q_rope=task.q_rope[own], tree=tree)
            part = replace(part, cache=view.span(first, last), prefix=None, out=output[own])
            lse[own] = backend.run(part)[1]

        done = 0
        for copy in task.prefix.copies:
            if done < copy.first:
                attend(self._others, plain, done, copy.first)
            parts = {"k_prefix": copy.keys, "v_prefix": copy.values, "k_rope_prefix": copy.rope}
            attend(self._inner, replace(plain, **parts), copy.first, copy.last)
            done = copy.last
        if done < plain.requests:
            attend(self._others, plain, done, plain.requests)
        return output, lse
