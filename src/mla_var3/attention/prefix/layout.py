"""What attention over groups needs: which queries go over which shared pages, and what is left.

Everything is computed on the device with fixed shapes and without a copy to the host. Values that
cannot be right (groups that do not exist, prefixes longer than a request) lead to less sharing,
never to a wrong result or a read outside of a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.cache.tokens import TokenRows, padded_rows, ragged_rows
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix.groups import LEVELS, DecompressedPrefixes, PrefixGroups
from mla_var3.attention.request.checks import INDEX_DTYPES, readable, require_bounds, require_tensor
from mla_var3.errors import InvalidArgumentError

CHUNK_ROWS = 4096
"""Query rows of a group that are one request to the latent kernel, 64 of its query tiles. Its
scheduler balances requests by their tokens alone, so that a large group must not be one request
beside small ones. Other numbers were not measured."""
PART_OUTPUTS = ("places", "order", "bounds", "lengths", "table")
"""Tensors of a level, as `PrefixPart` names them; the kernels add the level's number."""
INT_STEP = 4
"""Tensors of one allocation begin at multiples of so many numbers, 16 bytes."""


@dataclass(frozen=True)
class PrefixPart:
    """Attention of one level: chunks of a group's queries, each a request over its shared pages.

    Attributes:
        order: int32 `[total_q]`, the query token of each packed row; None where they are in order.
        places: int32 `[total_q]`, the packed row of each query token; -1 where it takes no part.
        bounds: int32 `[chunks + 1]`, first packed row of each chunk.
        lengths: int32 `[chunks]`, shared tokens.
        table: int32 `[chunks, max_pages]`, their pages.
        most: host-side bound on the rows of a chunk.
    """

    order: Tensor | None
    places: Tensor
    bounds: Tensor
    lengths: Tensor
    table: Tensor
    most: int


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """Groups resolved for one step; `prefix_layout` makes it.

    Attributes:
        groups: what it was made from.
        parts: one per level.
        table, lengths: int32 `[b, max_pages]` and `[b]`, pages and number of each request's own
            tokens.
        page: tokens per page.
        total: query tokens.
        causal: whether a query sees no later position.
    """

    groups: PrefixGroups
    parts: tuple[PrefixPart, ...]
    table: Tensor
    lengths: Tensor
    page: int
    total: int
    causal: bool

    @cached_property
    def key(self) -> tuple[Any, ...]:
        most = tuple(part.most for part in self.parts)
        return ("layout", *self.groups.key, self.page, self.total, self.causal, *most)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        found = {"own_table": self.table, "own_lengths": self.lengths}
        for level, part in enumerate(self.parts):
            for name in PART_OUTPUTS:
                tensor = getattr(part, name)
                if tensor is not None:
                    found[f"{name}_{level}"] = tensor
        return found


Prefix = PrefixGroups | PrefixLayout | DecompressedPrefixes
"""What the calls take as `prefix`."""


def groups_in(prefix: Prefix) -> PrefixGroups:
    """The groups that a caller gave, whatever was made of them."""
    return prefix if isinstance(prefix, PrefixGroups) else prefix.groups


def sharing(prefix: object) -> Prefix | None:
    """What a caller gave as `prefix`, if it is groups; None where they share nothing."""
    if not isinstance(prefix, (PrefixGroups, PrefixLayout, DecompressedPrefixes)):
        expected = "PrefixGroups, PrefixLayout or DecompressedPrefixes"
        raise InvalidArgumentError("prefix", expected, type(prefix).__name__)
    return prefix if groups_in(prefix).levels else None


def is_pageable(view: CacheView) -> bool:
    """Whether a cache can be read in pages: paged, or dense with whole blocks in one buffer."""
    if view.block_table is not None:
        return True
    b, t = view.latent.shape[:2]
    return t % PAGE_STEP == 0 and all(
        b == 1 or rows.stride(0) == t * rows.stride(1)
        for rows in (view.latent, view.rope, view.scales)
        if rows is not None and rows.dim() > 1
    )


def as_pages(view: CacheView, lengths: Tensor, table: Tensor) -> CacheView:
    """A cache for which `is_pageable` in pages `[pages, page, ...]`, without a copy.

    The new view has requests of its own, with these lengths and this block table.
    """
    latent, rope, scales = view.latent, view.rope, view.scales
    if view.block_table is not None:
        return CacheView(latent, rope, lengths, table, scales=scales)
    count = view.latent.shape[0] * view.latent.shape[1] // PAGE_STEP

    def paged(rows: Tensor) -> Tensor:
        step, width = rows.stride(1), rows.shape[2]
        return rows.as_strided((count, PAGE_STEP, width), (PAGE_STEP * step, step, rows.stride(2)))

    if scales is not None and scales.dim() > 1:
        scales = paged(scales)
    return CacheView(paged(latent), paged(rope), lengths, table, scales=scales)


def prefix_layout(
    groups: PrefixGroups,
    q: Tensor,
    cache: LatentCache | CacheView,
    *,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
) -> PrefixLayout:
    """Resolve groups for one step, on the device.

    The attention calls do it themselves when they are given groups. A model with many layers does
    it once per step and gives all of them the layout. Queries and options are those of the call;
    only the shape of the queries and the block table, lengths and sizes of the cache count.

    Example:
        >>> layout = prefix_layout(groups, q, caches[0])
        >>> for q, q_rope, cache in layers:
        ...     output, lse = mla_var3.mla_latent_attention(q, q_rope, cache, prefix=layout)
    """
    view = cache.view() if isinstance(cache, LatentCache) else cache
    require_groups(groups, view)
    _require_queries(q, view, cu_seqlens_q, causal)
    kernels = layout_kernels(groups, view, cu_seqlens_q)
    if kernels is not None:
        return laid_out(kernels, groups, q, view, cu_seqlens_q=cu_seqlens_q, causal=causal)[0]
    b, device = view.requests, view.lengths.device
    page, table = _page_table(view)
    if cu_seqlens_q is None:
        rows = padded_rows(b, q.shape[1], None, device)
    else:
        rows = ragged_rows(cu_seqlens_q, q.shape[0])
    chunk = _chunk(groups, q, b, packed=cu_seqlens_q is not None)
    lengths = view.lengths.long().clamp(0, view.capacity)
    seen = lengths - rows.counts if causal else lengths
    start, parts = torch.zeros_like(lengths), []
    for level in range(groups.levels):
        found = _level(groups, level, start, seen, page)
        if readable(groups.prefix_of):
            _check(groups, level, found, None if view.block_table is None else table, page)
        parts.append(_part(found, rows, table, page, chunk, groups.ordered))
        start = start + torch.where(found.member, found.of_request(found.tokens), 0)
    own = _pages_from(table, start // page)
    own_lengths = (lengths - start).to(torch.int32)
    total = rows.requests.shape[0]
    return PrefixLayout(groups, tuple(parts), own, own_lengths, page, total, causal)


def _chunk(groups: PrefixGroups, q: Tensor, b: int, packed: bool) -> int:
    most = b if groups.most is None else min(groups.most, b)
    longest = q.shape[0] if packed else q.shape[1] * most
    return max(1, min(longest, -(-CHUNK_ROWS // q.shape[-2])))


@cache
def _cute_kernels() -> Any:
    """The small kernels in CuTe DSL; None where it is not installed."""
    if find_spec("cutlass") is None:
        return None
    from mla_var3.kernel.cute_python.mla.prefix import call

    return call


def prefix_kernels(device: torch.device) -> Any:
    """The kernels around attention over prefixes for a device; None where torch has to do."""
    return _cute_kernels() if device.type == "cuda" else None


def layout_kernels(groups: PrefixGroups, view: CacheView, cu_seqlens_q: Tensor | None) -> Any:
    """The kernels, if they take these tensors as they are."""
    indices = (groups.prefix_of, groups.prefix_length, view.lengths, cu_seqlens_q)
    given = [index for index in indices if index is not None]
    plain = all(index.dtype == torch.int32 and index.is_contiguous() for index in given)
    table = view.block_table
    if table is not None:
        plain = plain and table.dtype == torch.int32 and table.stride(1) == 1
    return prefix_kernels(view.lengths.device) if plain and view.requests else None


def laid_out(
    kernels: Any,
    groups: PrefixGroups,
    q: Tensor,
    view: CacheView,
    *,
    cu_seqlens_q: Tensor | None,
    causal: bool,
) -> tuple[PrefixLayout, Any, dict[str, Tensor]]:
    """`prefix_layout` by kernels: the layout, the launch that repeats it, and its outputs."""
    b, table, device = view.requests, view.block_table, view.lengths.device
    packed = cu_seqlens_q is not None
    page = PAGE_STEP if table is None else view.latent.shape[1]
    columns = view.capacity // page if table is None else table.shape[1]
    total = q.shape[0] if packed else b * q.shape[1]
    chunk, levels = _chunk(groups, q, b, packed), groups.levels
    chunks = groups.groups + max(total - 1, 0) // chunk
    shapes: dict[str, tuple[int, ...]] = {"own_table": (b, columns), "own_lengths": (b,)}
    for level in range(levels):
        order = {} if groups.ordered else {f"order_{level}": (total,)}
        shapes |= {f"places_{level}": (total,), **order, f"bounds_{level}": (chunks + 1,)}
        shapes |= {f"lengths_{level}": (chunks,), f"table_{level}": (chunks, columns)}
    shapes["scratch"] = (kernels.scratch_size(b, groups.groups, chunks, levels),)
    written = _empty_each(shapes, device)
    names = [f"{name}_{level}" for level in range(LEVELS) for name in PART_OUTPUTS]
    launch = kernels.lay_out(
        {**dict.fromkeys(names), **written},
        {
            **groups.tensors,
            "lengths": view.lengths,
            "cu_seqlens_q": cu_seqlens_q,
            "block_table": table,
        },
        {
            "requests": b,
            "groups": groups.groups,
            "columns": columns,
            "chunks": chunks,
            "tokens": total,
            "queries": 0 if packed else q.shape[1],
            "page": page,
            "capacity": view.capacity,
            "chunk": chunk,
            "causal": int(causal),
            "table_stride": columns if table is None else table.stride(0),
        },
    )
    most = min(chunk, max(total, 1))
    parts = []
    for level in range(levels):
        found: dict[str, Any] = {name: written.get(f"{name}_{level}") for name in PART_OUTPUTS}
        parts.append(PrefixPart(**found, most=most))
    own = written["own_table"], written["own_lengths"]
    return PrefixLayout(groups, tuple(parts), *own, page, total, causal), launch, written


def _empty_each(shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
    """Tensors of int32 in one allocation."""
    counts = {name: -(-math.prod(shape) // INT_STEP) * INT_STEP for name, shape in shapes.items()}
    memory = torch.empty(sum(counts.values()), dtype=torch.int32, device=device)
    found = memory.split(list(counts.values()))
    pairs = zip(shapes.items(), found, strict=True)
    return {name: part[: math.prod(shape)].view(shape) for (name, shape), part in pairs}


def require_groups(groups: PrefixGroups, view: CacheView) -> None:
    """Require groups of the cache's requests, and a cache that can be read in pages."""
    if not isinstance(groups, PrefixGroups):
        raise InvalidArgumentError("groups", "PrefixGroups", type(groups).__name__)
    if not isinstance(view, CacheView):
        raise InvalidArgumentError("cache", "a LatentCache or a CacheView", type(view).__name__)
    shape = [("levels", None), ("b", view.requests)]
    require_tensor("prefix_of", groups.prefix_of, shape, INDEX_DTYPES, view.lengths.device)
    if not is_pageable(view):
        raise InvalidArgumentError(
            "prefix",
            f"a paged cache, or a contiguous one whose t is a multiple of {PAGE_STEP}",
            f"a dense cache with t={view.capacity} and strides {list(view.latent.stride())}",
        )


def _require_queries(q: Tensor, view: CacheView, cu_seqlens_q: Tensor | None, causal: bool) -> None:
    """Require queries of the cache's requests; only their shape counts."""
    b, packed = view.requests, cu_seqlens_q is not None
    if not b:
        raise InvalidArgumentError("cache", "at least one request", "none")
    expected = "[total_q, h, ...]" if packed else f"[b={b}, s, h, ...]"
    if not isinstance(q, Tensor):
        raise InvalidArgumentError("q", f"a tensor {expected}", type(q).__name__)
    if q.dim() < 3 - packed or not (packed or q.shape[0] == b):
        raise InvalidArgumentError("q", expected, list(q.shape))
    if packed:
        bounds = [("b+1", b + 1)]
        device = view.lengths.device
        given = require_tensor("cu_seqlens_q", cu_seqlens_q, bounds, INDEX_DTYPES, device)
        require_bounds("cu_seqlens_q", given, q.shape[0])
    if not isinstance(causal, bool):
        raise InvalidArgumentError("causal", "True or False", repr(causal))


@dataclass(frozen=True)
class _Level:
    """The groups of a level.

    Attributes:
        group: int64 `[b]`; the number of groups for a request without one.
        tokens, begin: int64 `[groups]`, shared tokens in whole pages, and where they begin.
        leader: int64 `[groups]`, a request that holds them.
        member: bool `[b]`, whether the request uses them.
    """

    group: Tensor
    tokens: Tensor
    begin: Tensor
    leader: Tensor
    member: Tensor

    def of_request(self, values: Tensor) -> Tensor:
        """Values `[groups]` of each request's group; 0 for requests without one."""
        return torch.cat([values, values.new_zeros(1)])[self.group]


def _level(groups: PrefixGroups, level: int, start: Tensor, seen: Tensor, page: int) -> _Level:
    """The groups of a level, with so many tokens per page.

    Of each request, int64 `[b]`: where the shared tokens end so far, and the first tokens that all
    its queries see.
    """
    b, count = start.shape[0], groups.groups
    group = groups.prefix_of[level].long()
    group = torch.where((group >= 0) & (group < count), group, count)
    tokens = groups.prefix_length[level].long().clamp(min=0) // page * page
    found = _Level(group, tokens, tokens, tokens, group < 0)
    wanted = found.of_request(tokens)
    fits = (wanted > 0) & (start + wanted <= seen)
    requests = torch.where(fits, torch.arange(b, device=start.device), b)
    first = torch.full_like(tokens, b)
    first = torch.cat([first, first[:1]]).scatter_reduce_(0, group, requests, "amin")[:count]
    leader = first.clamp(max=b - 1)
    tokens, begin = torch.where(first < b, tokens, 0), start[leader]
    found = replace(found, tokens=tokens, begin=begin, leader=leader)
    return replace(found, member=fits & (start == found.of_request(begin)))


def _part(
    found: _Level, rows: TokenRows, table: Tensor, page: int, chunk: int, ordered: bool
) -> PrefixPart:
    """The chunks of a level, of at most `chunk` queries each."""
    count, device = found.tokens.shape[0], table.device
    total = rows.requests.shape[0]
    group = torch.where(rows.valid, found.group[rows.requests], count)  # [total]
    index = torch.arange(total, device=device)
    order, place = None, index
    if not ordered:
        order = torch.sort(group, stable=True).indices
        place = torch.empty_like(index).scatter_(0, order, index)
    member = rows.valid & found.member[rows.requests]
    queries = torch.zeros_like(torch.cat([found.tokens, found.tokens[:1]]))
    queries = queries.index_add_(0, group, torch.ones_like(group))[:count]
    chunks = (queries + chunk - 1) // chunk
    ends, first_row = chunks.cumsum(0), queries.cumsum(0) - queries
    number = torch.arange(count + max(total - 1, 0) // chunk, device=device)
    of = torch.searchsorted(ends, number, right=True)
    used, of = of < count, of.clamp(max=count - 1)
    bounds = first_row[of] + (number - (ends - chunks)[of]) * chunk
    last = queries.sum()[None]
    bounds = torch.cat([torch.where(used, bounds, last), last])
    pages = _pages_from(table[found.leader[of]], (found.begin // page)[of])
    return PrefixPart(
        order=None if order is None else order.to(torch.int32),
        places=torch.where(member, place, -1).to(torch.int32),
        bounds=bounds.to(torch.int32),
        lengths=torch.where(used, found.tokens[of], 0).to(torch.int32),
        table=pages,
        most=min(chunk, max(total, 1)),
    )


def _page_table(view: CacheView) -> tuple[int, Tensor]:
    """Tokens per page, and the pages of each request, int64 `[b, max_pages]`."""
    if view.block_table is not None:
        return view.latent.shape[1], view.block_table.long()
    each = view.capacity // PAGE_STEP
    pages = torch.arange(view.requests * each, device=view.lengths.device)
    return PAGE_STEP, pages.view(view.requests, each)


def _pages_from(table: Tensor, first: Tensor) -> Tensor:
    """Rows of a table, int64 `[m, max_pages]`, from a column on; what is behind it is arbitrary."""
    columns = first[:, None] + torch.arange(table.shape[1], device=table.device)
    return table.gather(1, columns.clamp(max=table.shape[1] - 1)).to(torch.int32)


def _check(
    groups: PrefixGroups, level: int, found: _Level, table: Tensor | None, page: int
) -> None:
    """Check what the host may read: the order, and that members hold the pages of their group."""
    if groups.ordered and not bool((found.group[1:] >= found.group[:-1]).all()):
        got = groups.prefix_of[level].tolist()
        raise InvalidArgumentError("prefix_of", "ascending groups (ordered=True)", got)
    if table is None:
        return
    begin, tokens = found.of_request(found.begin)[:, None], found.of_request(found.tokens)[:, None]
    at = torch.arange(table.shape[1], device=table.device) * page
    shared = found.member[:, None] & (at >= begin) & (at < begin + tokens)
    wrong = (shared & (table != table[found.of_request(found.leader)])).any(1).nonzero()
    if len(wrong):
        request = int(wrong[0])
        raise not_shared(level, request, int(tokens[request]), int(found.group[request]))


def not_shared(level: int, request: int, tokens: int, group: int) -> InvalidArgumentError:
    """The error for a request whose pages are not those of its group."""
    expected = f"a group that shares {tokens} tokens, the same pages, with the request"
    return InvalidArgumentError(f"prefix_of[{level}, {request}]", expected, group)
