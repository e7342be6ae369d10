"""`torch_tiled`: the attention in PyTorch, tile by tile, with every option, on any device.

An online softmax over tiles of KV tokens: products of the input dtype, accumulated in float32, as
the kernels do it. Tiles of an 8-bit cache or window are dequantised to the dtype of the queries,
one at a time. Every shape is known on the host and nothing is read back on a GPU, so a CUDA graph
can capture a call. On the CPU it reads the lengths and skips unused tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mla_var3.attention.cache.tokens import ragged_rows
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.merge import merge_partials
from mla_var3.attention.request.masks import Visibility
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.inputs import project_queries, up_project
from mla_var3.op.mla.window.packed import unpack_window
from mla_var3.op.mla.window.quantise import dequantise

TORCH_TILED = "torch_tiled"

# Scores alive at a time: 128 MiB in float32. Long tiles amortise the launches of a step.
_SCORE_ELEMENTS = 1 << 25
_TILE_STEP = 64
_TILE_MOST = 2048

Tile = tuple[Tensor, Tensor, Tensor]
"""Keys `[b, g, m, e]`, values `[b, g, m, ev]` (g = 1 or h) and positions int64 `[b, m]`."""


class TorchTiled:
    """The backend that serves every call, and the one that "auto" takes on the CPU."""

    kernel = TORCH_TILED
    language = "torch"
    runs_on_cpu = True
    targets: tuple[str, ...] | None = None

    def missing(self) -> str | None:
        return None

    def unsupported(self, shape: CallShape) -> str | None:
        return None

    def run(self, task: AttentionTask) -> tuple[Tensor, Tensor]:
        if task.batch_invariant:
            return _one_by_one(task)
        return _attention(task) if task.cu_seqlens_q is None else _ragged(task)


def _one_by_one(task: AttentionTask) -> tuple[Tensor, Tensor]:
    """Every request alone, so that no product's shape depends on the rest of the batch."""
    b, s = task.cache.requests, task.q.shape[1]
    bounds = [request * s for request in range(b + 1)]
    if task.cu_seqlens_q is not None:
        if task.q.device.type != "cpu":
            raise UnsupportedError(
                f"{TORCH_TILED}: batch_invariant with cu_seqlens_q needs a kernel on a GPU"
            )
        bounds = task.cu_seqlens_q.tolist()
    rows, rope = (q.flatten(0, -3) for q in (task.q, task.q_rope))
    output = task.q.new_zeros((*task.q.shape[:-1], task.width))
    lse = task.q.new_full(task.q.shape[:-1], -math.inf, dtype=torch.float32)
    flat, flat_lse = output.view(-1, task.h, task.width), lse.view(-1, task.h)
    for request, (first, last) in enumerate(itertools.pairwise(bounds)):
        if first == last:
            continue
        own, one = slice(first, last), slice(request, request + 1)
        flat[own], flat_lse[own] = _attention(
            replace(
                task, q=rows[None, own], q_rope=rope[None, own], cache=task.cache.request(request),
                tree=None if task.tree is None else task.tree[one, : last - first, : last - first],
                total_lengths=None if task.total_lengths is None else task.total_lengths[one],
                cu_seqlens_q=None, out=None,
            )
        )  # fmt: skip
    return _deliver(task, output), lse


def _ragged(task: AttentionTask) -> tuple[Tensor, Tensor]:
    """Pads the queries of every request to the same number, and packs the result again."""
    assert task.cu_seqlens_q is not None
    total = task.q.shape[0]
    rows = ragged_rows(task.cu_seqlens_q, total)
    s = task.max_q
    if s is None:
        if task.q.device.type != "cpu":
            raise InvalidArgumentError(
                "max_q", f"the most queries of any request, for {TORCH_TILED} on a GPU", None
            )
        s = int(rows.counts.max()) if rows.counts.numel() else 0
    lse = task.q.new_full((total, task.h), -math.inf, dtype=torch.float32)
    if s == 0 or total == 0:
        return _deliver(task, task.q.new_zeros((total, task.h, task.width))), lse
    first = task.cu_seqlens_q[:-1].long()
    places = (first[:, None] + torch.arange(s, device=first.device)).clamp(0, total - 1)
    padded = replace(task, q=task.q[places], q_rope=task.q_rope[places], out=None)
    attended, attended_lse = _attention(padded)
    offsets = rows.offsets.clamp(0, s - 1)
    valid = rows.valid & (rows.offsets < s)
    output = torch.where(valid[:, None, None], attended[rows.requests, offsets], 0.0)
    lse = torch.where(valid[:, None], attended_lse[rows.requests, offsets], lse)
    return _deliver(task, output), lse


def _attention(task: AttentionTask) -> tuple[Tensor, Tensor]:
    cache, dtype = task.cache, task.q.dtype
    sees = task.visibility(task.q.shape[1])
    extent = _extent(cache, task.max_kv)
    if task.w_uk is None or task.w_uv is None:
        latent, lse = _attend_latent(task.q, task, sees, extent, None)
        return _deliver(task, latent), lse
    q_latent = project_queries(task.q, task.w_uk)
    latent, lse = _attend_latent(q_latent, task, sees, extent, cache.window_start)
    partials = [(up_project(latent.to(dtype), task.w_uv), lse)]
    q_heads = torch.cat([task.q, task.q_rope], dim=-1).transpose(1, 2)  # [b, h, s, d+p]
    held = {
        _prefix_tiles: cache.k_prefix is not None,
        _ring_tiles: cache.k_new is not None and cache.window_start is not None,
    }
    for tiles in (make(cache, dtype) for make, there in held.items() if there):
        part, part_lse = _online(q_heads, tiles, sees, task.scale, task.width)
        partials.append((part.transpose(1, 2), part_lse.transpose(1, 2)))
    output, lse = merge_partials(partials)
    return _deliver(task, output), lse


def _deliver(task: AttentionTask, output: Tensor) -> Tensor:
    return output.to(task.q.dtype) if task.out is None else task.out.copy_(output)


def _extent(cache: CacheView, max_kv: int | None) -> int:
    """Slots per request that have to be looked at."""
    extent = cache.capacity if max_kv is None else min(max_kv, cache.capacity)
    if cache.lengths.device.type == "cpu" and cache.lengths.numel():
        extent = min(extent, max(0, int(cache.lengths.max())))
    return extent


def _attend_latent(
    q_latent: Tensor,
    task: AttentionTask,
    sees: Visibility,
    extent: int,
    window_start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Latent output `[b, s, h, k]` in float32 and its LSE."""
    b, s, h, _ = q_latent.shape
    q = torch.cat([q_latent, task.q_rope], dim=-1).reshape(b, 1, s * h, -1)
    skip = 0 if task.latent_only else task.cache.prefix
    step = _tile_size(b * s * h, task.cache.page_size)
    begin = sees.first_seen()
    tiles = _latent_tiles(task.cache, skip, extent, step, window_start, begin, q.dtype)
    output, lse = _online(q, tiles, sees, task.scale, task.cache.latent.shape[-1], heads=h)
    return output.view(b, s, h, -1), lse.view(b, s, h)


def _tile_size(rows: int, page_size: int | None) -> int:
    size = max(1, min(_TILE_MOST, _SCORE_ELEMENTS // max(1, rows)))
    step = page_size or _TILE_STEP
    return max(1, size // step) * step


def _latent_tiles(
    cache: CacheView,
    skip: int,
    extent: int,
    step: int,
    window_start: Tensor | None,
    begin: Tensor | None,
    dtype: torch.dtype,
) -> Iterator[Tile]:
    """Latent rows from the shared prefix (`skip`) up to the ring, those in 8 bits dequantised.

    Rows of the slots before `begin`, which no query sees, may hold anything.
    """
    b, page = cache.requests, cache.page_size or 1
    extent = -(-extent // page) * page
    for first in range(skip // page * page, extent, step):
        last = min(first + step, extent)
        latent, rope = cache.tile(first, last, dtype)
        positions = torch.arange(first, last, device=latent.device).expand(b, -1)
        if first < skip:  # the prefix of a foreign cache may end inside of a page
            positions = torch.where(positions < skip, -1, positions)
        if window_start is not None:
            positions = torch.where(positions < window_start.long()[:, None], positions, -1)
        keys = torch.cat([latent, rope], dim=-1)
        unused = (positions < 0) | (positions >= cache.lengths[:, None])
        if begin is not None:
            unused = unused | (positions < begin[:, None])
        keys = keys.masked_fill(unused[:, :, None], 0.0)  # 0 * NaN would still be NaN
        yield keys[:, None], keys[:, None, :, : latent.shape[-1]], positions


def _ring_tiles(cache: CacheView, dtype: torch.dtype) -> Iterator[Tile]:
    """The ring, slot by slot; a slot's position is the newest that belongs into it."""
    assert cache.k_new is not None and cache.v_new is not None and cache.window_start is not None
    b, h, n, _ = cache.k_new.shape
    packed = cache.packed_window
    newest = cache.lengths.long()[:, None] - 1  # [b, 1]
    start = cache.window_start.long().clamp(min=cache.prefix)[:, None]
    step = _tile_size(b * h, None)
    for first in range(0, n, step):
        last = min(first + step, n)
        slots = torch.arange(first, last, device=start.device)
        positions = newest - (newest - slots) % n
        positions = torch.where(positions >= start, positions, -1)
        unused = (positions < 0)[:, None, :, None]
        if cache.scales is None or cache.k_rope_new is None:
            rope = cache.rows(positions, dtype)[1]
        else:  # not rounded to 8 bits
            rope = cache.k_rope_new[:, first:last]
        if packed is None:
            k_tile, v_tile = (part[:, :, first:last] for part in (cache.k_new, cache.v_new))
        else:
            rounded = unpack_window(packed.part(first, last), last - first)
            k_tile, v_tile = (dequantise(rows, dtype) for rows in rounded)
        keys = torch.cat([k_tile, rope[:, None].expand(-1, h, -1, -1)], dim=-1)
        yield keys.masked_fill(unused, 0.0), v_tile.masked_fill(unused, 0.0), positions


def _prefix_tiles(cache: CacheView, dtype: torch.dtype) -> Iterator[Tile]:
    """The shared prefix; every request has it, as far as its length goes."""
    k_prefix, v_prefix = cache.k_prefix, cache.v_prefix
    assert k_prefix is not None and v_prefix is not None
    b, (h, m, _) = cache.requests, k_prefix.shape
    step = _tile_size(b * h, None)
    for first in range(0, m, step):
        last = min(first + step, m)
        positions = torch.arange(first, last, device=k_prefix.device).expand(b, -1)
        if cache.scales is None or cache.k_rope_prefix is None:
            rope = cache.rows(positions, dtype)[1]
        else:  # not rounded to 8 bits
            rope = cache.k_rope_prefix[first:last].expand(b, -1, -1)
        unused = (positions >= cache.lengths[:, None])[:, :, None]
        rope = rope.masked_fill(unused, 0.0)[:, None].expand(-1, h, -1, -1)
        keys = torch.cat([k_prefix[:, first:last].expand(b, -1, -1, -1), rope], dim=-1)
        yield keys, v_prefix[:, first:last].expand(b, -1, -1, -1), positions


def _online(
    q: Tensor,
    tiles: Iterator[Tile],
    sees: Callable[[Tensor], Tensor],
    scale: float,
    width: int,
    heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over tiles of KV tokens that come one by one.

    The rows of `q`, `[b, g, r, e]`, are the queries, or with g = 1 (query, head), `heads` per
    query. `sees` says of positions whether each query sees them, `[b, s, m]`; values are `width`
    wide. Returns the normalised output `[b, g, r, ev]` and the LSE `[b, g, r]`, float32.
    """
    peak = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    total = torch.zeros_like(peak)
    output = torch.zeros((*q.shape[:3], width), dtype=torch.float32, device=q.device)
    for keys, values, positions in tiles:
        hidden = ~sees(positions)
        if heads is None:
            hidden = hidden[:, None]  # [b, 1, s, m]
        else:
            hidden = hidden[:, :, None].expand(-1, -1, heads, -1).flatten(1, 2)[:, None]
        scores = _matmul(q, keys.transpose(2, 3)) * scale
        scores = scores.masked_fill(hidden, -math.inf)
        new_peak = torch.maximum(peak, scores.amax(-1))
        # A row that has seen no key has a peak of -inf, and -inf - -inf would be NaN.
        shift = torch.where(new_peak == -math.inf, 0.0, new_peak)
        weights = torch.exp(scores - shift[..., None])
        fade = torch.exp(peak - shift)
        total = total * fade + weights.sum(-1)
        output = output * fade[..., None] + _matmul(weights.to(q.dtype), values)
        peak = new_peak
    divisor = torch.where(total == 0.0, 1.0, total)
    lse = torch.where(total == 0.0, -math.inf, peak + divisor.log())
    return output / divisor[..., None], lse


def _matmul(rows: Tensor, matrices: Tensor) -> Tensor:
    """`[b, g, r, x] @ [b, g, x, y]` in float32: exact products of the inputs, float32 sums."""
    if rows.is_cuda and rows.dtype is not torch.float32:
        product = torch.bmm(rows.flatten(0, 1), matrices.flatten(0, 1), out_dtype=torch.float32)
        return product.view(*rows.shape[:3], matrices.shape[-1])
    return torch.matmul(rows.float(), matrices.float())
