"""Attention with one softmax over several KV segments, in plain PyTorch.

This is the only implementation of the attention itself that the references have. It loops over
requests and groups of heads to bound its memory, and it never branches on a value, so nothing is
copied to the host on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, NotRequired, TypedDict

import torch

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.product import product

Lengths = torch.Tensor | Sequence[int]

# Elements of scores and upcast keys alive at a time: 256 MiB in float32.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class KvSegment:
    """KV slots that share one query form.

    Attributes:
        q: Queries as these keys expect them, `[b, s, h, e]`.
        keys: `[b, h, m, e]`, or `[b, 1, m, e]` when all heads share them.
        values: `[b, h, m, ev]`, or `[b, 1, m, ev]`.
        positions: KV position of each slot, integer `[b, m]`; -1 for a slot not in use, whose
            contents are ignored whatever they are.
        q_rope: Further columns of the queries, `[b, s, h, p]`.
        k_rope: Those of the keys, `[b, m, p]`, shared by the heads.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    q_rope: torch.Tensor | None = None
    k_rope: torch.Tensor | None = None


class AttendOptions(TypedDict):
    """Keyword arguments of `attend` that every reference passes on to it."""

    causal: bool
    scale: float
    compute_dtype: NotRequired[torch.dtype]
    sliding_window: NotRequired[int | None]


def attend(
    segments: Sequence[KvSegment],
    *,
    lengths: Lengths,
    causal: bool,
    scale: float,
    compute_dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Attention with one softmax over all segments.

    Args:
        segments: The KV slots; a position must appear at most once over all segments.
        lengths: KV tokens of each request, `[b]`. Slots at or beyond it are not attended.
        causal: Whether query `i` attends positions `< len - s + i + 1` only.
        scale: Factor on the logits.
        compute_dtype: Dtype of both matrix products and of the probabilities between them. The
            softmax itself is in float32 (float64 for float64); outputs are rounded to the dtype.
        sliding_window: Newest tokens, up to itself, that a query attends: those at positions
            `> len - s + i - sliding_window`; None or 0 for all.

    Returns:
        Per segment its share of the normalised output, `[b, s, h, ev]`, and the natural
        LSE of the logits, `[b, s, h]`; float32, or float64 when that is the compute
        dtype. A row that sees no key has zero output and an LSE of -inf.
    """
    _require_segments(segments)
    accumulate = torch.float64 if compute_dtype is torch.float64 else torch.float32
    b, s, h, _ = segments[0].q.shape
    device = segments[0].q.device
    kv_lengths = lengths_tensor(lengths, b, device)
    limits = _visible_limits(kv_lengths, s, causal)  # [b, s]
    begins = torch.zeros_like(limits)
    if sliding_window:
        begins = _visible_limits(kv_lengths - sliding_window, s, True)
    outputs = [
        torch.zeros((b, s, h, segment.values.shape[-1]), dtype=accumulate, device=device)
        for segment in segments
    ]
    lse = torch.empty((b, s, h), dtype=accumulate, device=device)
    with ieee_float32():
        for request in range(b):
            positions = [segment.positions[request].to(device) for segment in segments]
            used = [(slots >= 0) & (slots < kv_lengths[request]) for slots in positions]
            begin, limit = begins[request][:, None], limits[request][:, None]  # [s, 1]
            hidden = [
                ~(mask & (slots >= begin) & (slots < limit))  # [s, m]
                for mask, slots in zip(used, positions, strict=True)
            ]
            for heads in _head_chunks(segments, s, h):
                parts = [
                    _operands(segment, request, heads, mask, hide, compute_dtype)
                    for segment, mask, hide in zip(segments, used, hidden, strict=True)
                ]
                chunk_outputs, chunk_lse = _attend_heads(parts, scale, compute_dtype, accumulate)
                for output, chunk in zip(outputs, chunk_outputs, strict=True):
                    output[request, :, heads] = chunk.transpose(0, 1)
                lse[request, :, heads] = chunk_lse.transpose(0, 1)
    return outputs, lse


def lengths_tensor(lengths: Lengths, b: int, device: torch.device) -> torch.Tensor:
    """Checks the lengths and brings them to the device as int64 `[b]`."""
    values = torch.as_tensor(lengths, device=device).long()
    if values.shape != (b,):
        raise InvalidArgumentError("lengths", f"[b={b}]", list(values.shape))
    return values


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Keeps TF32 out of float32 matrix products on a GPU, and restores the caller's choice."""
    matmul = torch.backends.cuda.matmul
    # Not through allow_tf32: PyTorch refuses to read the old flag once the new one differs.
    previous = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = previous


class _Operands(NamedTuple):
    """One segment, one request, some heads: clean operands in the compute dtype."""

    q: torch.Tensor  # [hc, s, e]
    keys: torch.Tensor  # [hc or 1, m, e]
    values: torch.Tensor  # [hc or 1, m, ev]
    hidden: torch.Tensor  # [s, m]


def _operands(
    segment: KvSegment,
    request: int,
    heads: slice,
    used: torch.Tensor,
    hidden: torch.Tensor,
    dtype: torch.dtype,
) -> _Operands:
    """Cuts the heads out, and zeroes unused slots because 0 * NaN is still NaN."""

    def clean(rows: torch.Tensor) -> torch.Tensor:
        mine = rows[request] if rows.shape[1] == 1 else rows[request, heads]
        return mine.to(dtype).masked_fill(~used[:, None], 0.0)

    q, keys = segment.q[request, :, heads].to(dtype), clean(segment.keys)
    if segment.q_rope is not None and segment.k_rope is not None:
        # Joined here, so that joined keys exist for one request only.
        rope = clean(segment.k_rope[:, None]).expand(keys.shape[0], -1, -1)
        q = torch.cat([q, segment.q_rope[request, :, heads].to(dtype)], dim=-1)
        keys = torch.cat([keys, rope], dim=-1)
    return _Operands(q.transpose(0, 1), keys, clean(segment.values), hidden)


def _attend_heads(
    parts: Sequence[_Operands], scale: float, dtype: torch.dtype, accumulate: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The joint softmax of one request and some heads: outputs `[hc, s, ev]`, lse `[hc, s]`."""
    logits = [
        _matmul(part.q, part.keys.transpose(1, 2))
        .to(accumulate)
        .mul_(scale)
        .masked_fill_(part.hidden, -math.inf)
        for part in parts
    ]
    peak = torch.full(logits[0].shape[:2], -math.inf, dtype=accumulate, device=logits[0].device)
    for values in logits:
        if values.shape[-1]:  # an empty window has no maximum
            peak = torch.maximum(peak, values.amax(-1))
    # A row without keys has a peak of -inf, and -inf - -inf would be NaN.
    shift = torch.where(peak.isinf(), 0.0, peak)
    weights = [values.sub_(shift[..., None]).exp_() for values in logits]
    total = torch.stack([weight.sum(-1) for weight in weights]).sum(0)
    divisor = torch.where(total == 0.0, 1.0, total)[..., None]
    outputs = [
        _matmul(weight.div_(divisor).to(dtype), part.values).to(accumulate)
        for weight, part in zip(weights, parts, strict=True)
    ]
    return outputs, shift + total.log()


def _matmul(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """`[hc, s, x] @ [hc or 1, x, y]`; a shared matrix becomes one large product."""
    if matrices.shape[0] == 1:
        joined = product(rows.flatten(0, 1), matrices[0])
        return joined.view(*rows.shape[:2], matrices.shape[-1])
    return product(rows, matrices)


def _visible_limits(lengths: torch.Tensor, s: int, causal: bool) -> torch.Tensor:
    """First position that each query does not see, `[b, s]`."""
    limits = lengths[:, None].expand(-1, s)
    if causal:
        limits = limits - s + 1 + torch.arange(s, device=lengths.device)
    return limits


def _head_chunks(segments: Sequence[KvSegment], s: int, h: int) -> Iterator[slice]:
    """Heads in groups whose scores and upcast operands stay within the chunk size."""
    per_head = 0
    for segment in segments:
        slots = segment.keys.shape[2]
        shared = segment.keys.shape[1] == 1
        per_head += slots * s
        rope = 0 if segment.k_rope is None else segment.k_rope.shape[2]
        width = segment.keys.shape[3] + rope + segment.values.shape[3]
        per_head += 0 if shared else slots * width
    size = max(1, _CHUNK_ELEMENTS // max(1, per_head))
    for start in range(0, h, size):
        yield slice(start, min(start + size, h))


def _require_segments(segments: Sequence[KvSegment]) -> None:
    if not segments:
        raise InvalidArgumentError("segments", "at least one segment", "none")
    b, s, h, _ = segments[0].q.shape
    for index, segment in enumerate(segments):
        name = f"segments[{index}]"
        e, m = segment.q.shape[-1], segment.keys.shape[2]
        shapes = {
            "q": f"{b}, {s}, {h}, e",
            "keys": f"{b}, {h} or 1, {m}, {e}",
            "values": f"{b}, {h} or 1, {m}, ev",
            "positions": f"{b}, {m}",
        }
        if segment.q_rope is not None:
            p = segment.q_rope.shape[-1]
            shapes |= {"q_rope": f"{b}, {s}, {h}, {p}", "k_rope": f"{b}, {m}, {p}"}
        for field, shape in shapes.items():
            got, sizes = list(getattr(segment, field).shape), shape.split(", ")
            if len(got) != len(sizes) or not all(
                size.isalpha() or str(found) in size.split(" or ")
                for found, size in zip(got, sizes, strict=True)
            ):
                raise InvalidArgumentError(f"{name}.{field}", f"[{shape}]", got)
