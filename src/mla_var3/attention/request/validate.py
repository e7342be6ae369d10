"""From the arguments of the public calls to an `AttentionTask`, with every check on the way.

Values are checked where the host has them, on a GPU only with HYPER_MLA_DEBUG=1. A wrong one there
never leads outside of a buffer: lengths beyond the capacity end there, block table entries are
clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.prefix.groups import DecompressedPrefixes
from mla_var3.attention.prefix.layout import (
    Prefix,
    PrefixLayout,
    groups_in,
    require_groups,
    sharing,
)
from mla_var3.attention.request.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    debug_on,
    index_tensor,
    readable,
    require_bounds,
    require_range,
    require_tensor,
)
from mla_var3.attention.request.masks import checked_tree
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MOST, require_int, require_scale
from mla_var3.op.mla.window.packed import SLOT_MULTIPLE, TOKEN_GROUP
from mla_var3.op.mla.window.quantise import E4M3

Cache = LatentCache | CacheView | tuple[Tensor, Tensor]
"""What the calls take as `cache`: ours, a view of a foreign cache, or `(c_kv, k_rope)`."""


@dataclass(frozen=True)
class Options:
    """The optional arguments that both public calls share; see `mla_attention`."""

    lengths: Tensor | Sequence[int] | None = None
    causal: bool = True
    scale: float | None = None
    out: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    max_q: int | None = None
    tree_mask: Tensor | None = None
    max_kv: int | None = None
    total_lengths: Tensor | Sequence[int] | None = None
    shards: int = 1
    shard: int = 0
    batch_invariant: bool = False
    prefix: Prefix | None = None
    sliding_window: int | None = None


def full_task(
    q_nope: Tensor, q_rope: Tensor, cache: Cache, w_uk: Tensor, w_uv: Tensor, options: Options
) -> AttentionTask:
    """The task of `mla_attention`."""
    rows = _query_rows("q_nope", q_nope, options)
    h, d = ("h", q_nope.shape[-2]), ("d", q_nope.shape[-1])
    dtypes, device = [q_nope.dtype], q_nope.device
    require_tensor("w_uk", w_uk, [h, d, ("k", None)], dtypes, device)
    k = ("k", w_uk.shape[2])
    require_tensor("w_uv", w_uv, [h, k, ("v", None)], dtypes, device)
    if not w_uv.shape[2]:
        raise InvalidArgumentError("w_uv", "v of at least 1", list(w_uv.shape))
    _require_rope(q_rope, [*rows, h], q_nope)
    view = _checked_view(cache, w_uk.shape[2], q_rope, options)
    _require_decompressed(view, q_nope, ("v", w_uv.shape[2]), ("p", q_rope.shape[-1]))
    width = q_nope.shape[-1] + q_rope.shape[-1]
    return _task(q_nope, q_rope, view, w_uk, w_uv, options, width, w_uv.shape[2])


def latent_task(
    q_latent: Tensor, q_rope: Tensor, cache: Cache, options: Options, head_width: int
) -> AttentionTask:
    """The task of `mla_latent_attention`; `head_width` is d, for the default scale."""
    rows = _query_rows("q_latent", q_latent, options)
    require_int("d", head_width, minimum=1)
    _require_rope(q_rope, [*rows, ("h", q_latent.shape[-2])], q_latent)
    view = _checked_view(cache, q_latent.shape[-1], q_rope, options).without_copies()
    width = head_width + q_rope.shape[-1]
    return _task(q_latent, q_rope, view, None, None, options, width, q_latent.shape[-1])


def _query_rows(name: str, q: object, options: Options) -> list[tuple[str, int | None]]:
    """Checks the queries; their dimensions before the heads."""
    ragged = options.cu_seqlens_q is not None
    labels = ("total_q",) if ragged else ("b", "s")
    every = (*labels, "h", "d" if name == "q_nope" else "k")
    checked = require_tensor(name, q, [(label, None) for label in every], FLOAT_DTYPES, None)
    for label, size in zip(every, checked.shape, strict=True):
        if size == 0 and label != "total_q":
            raise InvalidArgumentError(name, f"{label} of at least 1", list(checked.shape))
    return [(label, size) for label, size in zip(labels, checked.shape, strict=False)]


def _require_rope(q_rope: object, rows: list[tuple[str, int | None]], q: Tensor) -> None:
    p = q_rope.shape[-1] if isinstance(q_rope, Tensor) and q_rope.dim() else None
    require_tensor("q_rope", q_rope, [*rows, ("p", p)], [q.dtype], q.device)


def _checked_view(cache: object, k: int, q_rope: Tensor, options: Options) -> CacheView:
    """The view of any accepted cache, with the lengths of the call."""
    device, dtype, p = q_rope.device, q_rope.dtype, q_rope.shape[-1]
    ragged = options.cu_seqlens_q is not None
    b = None if ragged else q_rope.shape[0]
    if isinstance(cache, LatentCache):
        view = cache.view()
    elif isinstance(cache, CacheView):
        view = cache
    elif isinstance(cache, (tuple, list)) and len(cache) == 2:
        c_kv, k_rope = cache
        shape = [("b", b), ("t", None), ("k", k)]
        require_tensor("cache[0] (c_kv)", c_kv, shape, [dtype], device)
        full = torch.full((c_kv.shape[0],), c_kv.shape[1], dtype=torch.int32, device=device)
        view = CacheView(c_kv, k_rope, full)
    else:
        expected = "a LatentCache, a CacheView or a pair (c_kv, k_rope)"
        raise InvalidArgumentError("cache", expected, type(cache).__name__)
    paged: list[tuple[str, int | None]] = [("num_pages", None), ("page_size", None)]
    rows = [("b", b), ("t", None)] if view.block_table is None else paged
    fmt = view.format
    latent_dtype, rope_dtype = (dtype, dtype) if fmt is None else (E4M3, fmt.rope_dtype)
    require_tensor("cache.c_kv", view.latent, [*rows, ("k", k)], [latent_dtype], device)
    same = [(label, size) for (label, _), size in zip(rows, view.latent.shape, strict=False)]
    name = "cache[1] (k_rope)" if isinstance(cache, (tuple, list)) else "cache.k_rope"
    require_tensor(name, view.rope, [*same, ("p", p)], [rope_dtype], device)
    if fmt is not None:
        count = fmt.scales(k)
        scales = [*same, ("k/128" if count > 1 else "1", count)] if count else [("1", 1)]
        require_tensor("cache.scales", view.scales, scales, [torch.float32], device)
    requests = [("b", view.requests if b is None else b)]
    require_tensor("cache.lengths", view.lengths, requests, [torch.int32], device)
    if view.block_table is not None:
        table = [*requests, ("max_pages", None)]
        require_tensor("cache.block_table", view.block_table, table, [torch.int32], device)
    if view.capacity == 0:
        raise InvalidArgumentError("cache", "at least one slot per request", "none")
    if options.lengths is not None and options.lengths is not view.lengths:
        limits = (0, view.capacity, "t")
        given = index_tensor("lengths", options.lengths, requests, device, torch.int32, limits)
        view = view.at_lengths(given)
    return view


def _require_decompressed(
    view: CacheView, q_nope: Tensor, v: tuple[str, int | None], p: tuple[str, int | None]
) -> None:
    """Checks the ring and the shared prefix, each of which is whole or not there."""
    h, d = ("h", q_nope.shape[-2]), ("d", q_nope.shape[-1])
    dtypes, device = [q_nope.dtype], view.latent.device
    rows: list[tuple[str, int | None]] = [("b", view.requests)]
    for suffix, label, leading in (("new", "n", rows), ("prefix", "m", [])):
        keys, values, rope = (getattr(view, f"{part}_{suffix}") for part in ("k", "v", "k_rope"))
        start = view.window_start if suffix == "new" else None
        scales = view.window_scales if suffix == "new" else None
        if keys is None:
            if any(part is not None for part in (values, rope, start, scales)):
                raise InvalidArgumentError(f"cache.k_{suffix}", "one beside its other parts", None)
            continue
        stored = dtypes if scales is None else [E4M3]
        shape = [*leading, h, (label, None), d]
        require_tensor(f"cache.k_{suffix}", keys, shape, stored, device)
        length = (label, keys.shape[-2])
        shape = [*leading, h, length, v]
        if scales is not None:
            if keys.shape[-2] % SLOT_MULTIPLE:
                expected = f"slots in multiples of {SLOT_MULTIPLE}"
                raise InvalidArgumentError("cache.k_new", expected, keys.shape[-2])
            pairs = [*leading, h, length, ("of key and value", 2)]
            require_tensor("cache.window_scales", scales, pairs, [torch.float32], device)
            groups = ("n/16", keys.shape[-2] // TOKEN_GROUP)
            shape = [*leading, h, groups, v, ("tokens", TOKEN_GROUP)]
        require_tensor(f"cache.v_{suffix}", values, shape, stored, device)
        if rope is not None:
            shape = [*leading, length, p]
            require_tensor(f"cache.k_rope_{suffix}", rope, shape, dtypes, device)
        if start is not None:
            require_tensor("cache.window_start", start, rows, [torch.int32], device)


def _require_copies(
    prefix: DecompressedPrefixes, q_nope: Tensor, q_rope: Tensor, v: tuple[str, int]
) -> None:
    """Checks that the decompressed prefixes are of the heads and widths of the call."""
    h, d = ("h", q_nope.shape[-2]), ("d", q_nope.shape[-1])
    dtypes, device = [q_nope.dtype], q_nope.device
    for number, copy in enumerate(prefix.copies):
        name, tokens = f"prefix.copies[{number}]", ("tokens", copy.tokens)
        require_tensor(f"{name}.keys", copy.keys, [h, tokens, d], dtypes, device)
        require_tensor(f"{name}.values", copy.values, [h, tokens, v], dtypes, device)
        shape = [tokens, ("p", q_rope.shape[-1])]
        require_tensor(f"{name}.rope", copy.rope, shape, dtypes, device)


def _task(
    q: Tensor,
    q_rope: Tensor,
    view: CacheView,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    options: Options,
    key_width: int,
    out_width: int,
) -> AttentionTask:
    device, b = q.device, view.requests
    for name in ("causal", "batch_invariant"):
        flag = getattr(options, name)
        if not isinstance(flag, bool):
            raise InvalidArgumentError(name, "True or False", repr(flag))
    for name in ("max_q", "max_kv", "sliding_window"):
        if getattr(options, name) is not None:
            require_int(name, getattr(options, name), minimum=1)
    query_bounds, max_q = options.cu_seqlens_q, options.max_q
    ragged = query_bounds is not None
    if query_bounds is not None:
        bounds = [("b+1", b + 1)]
        require_tensor("cu_seqlens_q", query_bounds, bounds, INDEX_DTYPES, device)
        if query_bounds.dtype is not torch.int32:
            require_bounds("cu_seqlens_q", query_bounds, q.shape[0])  # 32 bits would cut them
            query_bounds = query_bounds.to(torch.int32)
        # Kernels count query rows with 32 bits, and differences of positions: see the window below.
        if max_q is not None and options.tree_mask is None and b * max_q * q.shape[-2] > MOST:
            max_q = min(max_q, max(1, q.shape[0]))
    else:
        if max_q is not None and max_q != q.shape[1]:
            raise InvalidArgumentError("max_q", f"s={q.shape[1]} without cu_seqlens_q", max_q)
        max_q = q.shape[1]
        if options.causal and options.total_lengths is None and max_q > view.capacity:
            expected = f"at most the t={view.capacity} slots of a request (causal)"
            raise InvalidArgumentError("s", expected, max_q)
    tree = options.tree_mask
    if tree is not None:
        if not options.causal:
            raise InvalidArgumentError("tree_mask", "none with causal=False", "a tree")
        if not isinstance(tree, Tensor):
            raise InvalidArgumentError("tree_mask", "a tensor", type(tree).__name__)
        s = tree.shape[-1] if ragged and max_q is None and tree.dim() else max_q
        tree = checked_tree(tree, b, s or 0, device)
        max_q = s
    total = options.total_lengths
    require_int("shards", options.shards, minimum=1)
    require_int("shard", options.shard, minimum=0, maximum=options.shards - 1)
    if options.shards > 1:
        if total is None:
            raise InvalidArgumentError("shards", "total_lengths beside it", "none")
        if tree is not None:
            raise InvalidArgumentError("tree_mask", "none with shards", "a tree")
    if total is not None:
        limits = (-MOST, MOST, "")  # negative where a rank has later tokens only
        total = index_tensor("total_lengths", total, [("b", b)], device, torch.int32, limits)
    prefix = None if options.prefix is None else sharing(options.prefix)
    if prefix is not None:
        require_groups(groups_in(prefix), view)
    if isinstance(prefix, DecompressedPrefixes) and w_uk is not None:
        _require_copies(prefix, q, q_rope, ("v", out_width))
    if isinstance(prefix, PrefixLayout) and options.lengths is not None:
        expected = "none beside a PrefixLayout, which holds them"
        raise InvalidArgumentError("lengths", expected, "some")
    out = options.out
    if out is not None:
        labels = ("total_q",) if ragged else ("b", "s")
        leading = [(label, size) for label, size in zip(labels, q.shape, strict=False)]
        shape = [*leading, ("h", q.shape[-2]), ("v" if w_uv is not None else "k", out_width)]
        require_tensor("out", out, shape, [q.dtype], device)
        if any(size > 1 and not step for size, step in zip(out.shape, out.stride(), strict=True)):
            got = f"strides {out.stride()}, as of an expanded tensor"
            raise InvalidArgumentError("out", "a place of its own for every value", got)
    if options.scale is not None:
        require_scale(options.scale)
    window = options.sliding_window
    as_given = ("causal", "max_kv", "shards", "shard", "batch_invariant")
    task = AttentionTask(
        q=q,
        q_rope=q_rope,
        cache=view,
        w_uk=w_uk,
        w_uv=w_uv,
        **{name: getattr(options, name) for name in as_given},
        scale=float(key_width**-0.5 if options.scale is None else options.scale),
        tree=tree,
        cu_seqlens_q=query_bounds,
        max_q=max_q,
        total_lengths=total,
        sliding_window=None if window is None else min(window, MOST // 2),
        prefix=prefix,
        out=out,
    )
    check_values(task)
    return task


def check_values(task: AttentionTask) -> None:
    """Check lengths, block table, window and query bounds of a call, where they can be read."""
    cache = task.cache
    limit, limit_name = cache.capacity, "t"
    if task.max_kv is not None and task.max_kv < limit:
        limit, limit_name = task.max_kv, "max_kv"
    require_range("lengths", cache.lengths, 0, limit, limit_name)
    if task.cu_seqlens_q is not None:
        require_bounds("cu_seqlens_q", task.cu_seqlens_q, task.q.shape[0])
    if readable(cache.lengths):
        _check_block_table(task)
        _check_queries(task)
        _check_window(task)


def _check_window(task: AttentionTask) -> None:
    start, lengths, n = task.cache.window_start, task.cache.lengths, task.cache.window
    if start is None:
        return
    for request, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if first < max(0, length - n):
            expected = f"a position among the newest n={n} of {length}"
            raise InvalidArgumentError(f"window_start[{request}]", expected, first)


def _check_queries(task: AttentionTask) -> None:
    lengths = task.cache.lengths.tolist()
    if task.cu_seqlens_q is None:
        counts = [task.q.shape[1]] * len(lengths)
    else:
        counts = [b - a for a, b in pairwise(task.cu_seqlens_q.tolist())]
        if task.max_q is not None and max(counts, default=0) > task.max_q:
            raise InvalidArgumentError("max_q", f"at least {max(counts)}", task.max_q)
    if not debug_on() or not task.causal or task.total_lengths is not None:
        return
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        # A request without tokens is padding of the batch; its rows are zero by definition.
        if count > length > 0:
            expected = f"at least the s={count} query tokens, or 0"
            raise InvalidArgumentError(f"lengths[{request}]", expected, length)


def _check_block_table(task: AttentionTask) -> None:
    table, page = task.cache.block_table, task.cache.page_size
    if table is None or page is None:
        return
    used = -(-task.cache.lengths // page)
    columns = torch.arange(table.shape[1], device=table.device)
    # Entries beyond a request's tokens may be anything.
    entries = torch.where(columns < used[:, None], table, 0)
    last = task.cache.latent.shape[0] - 1
    wrong = ((entries < 0) | (entries > last)).nonzero()
    if len(wrong):
        request, column = wrong[0].tolist()
        name, got = f"block_table[{request}, {column}]", int(table[request, column])
        raise InvalidArgumentError(name, f"a page from 0 to {last}", got)
