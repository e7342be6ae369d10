"""Random calls of the attention, and a float64 oracle that knows every option."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.backends import registry
from mla_var3.attention.cache.copies import Window
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.op.compare import compare
from mla_var3.op.mla.cache_formats import PER_TENSOR, CacheFormat, QuantisedCache, quantise
from mla_var3.op.mla.window.packed import unpack_window
from mla_var3.op.mla.window.quantise import QuantisedRows, dequantise

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass
class Model:
    """Weights of one attention layer."""

    w_uk: torch.Tensor
    w_uv: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """h, d, k."""
        h, d, k = self.w_uk.shape
        return h, d, k


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def make_model(
    generator: torch.Generator,
    h: int = 2,
    d: int = 6,
    k: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Model:
    return Model(
        (normal(generator, h, d, k, dtype=torch.float32) * (d * k) ** -0.25).to(dtype),
        (normal(generator, h, k, d, dtype=torch.float32) * k**-0.5).to(dtype),
    )


def attended(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: queries [s, h, x], keys and values [h, m, ...], visible [s, m]."""
    logits = torch.einsum("shx,hmx->shm", q.double(), keys.double()) * scale
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    weights = torch.where((lse == -torch.inf)[..., None], 0.0, torch.exp(logits - lse[..., None]))
    held = visible.any(0)[None, :, None]
    values = torch.where(held, values.double(), 0.0)
    return torch.einsum("shm,hmd->shd", weights, values), lse


def visible_tokens(
    s: int,
    m: int,
    *,
    causal: bool = True,
    tree: torch.Tensor | None = None,
    end: int | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Which of m tokens each of the s newest queries sees, bool `[s, m]`.

    `end` is the length of the whole request when the tokens are only its first part.
    """
    end = m if end is None else end
    visible = torch.ones((s, m), dtype=torch.bool)
    for i in range(s):
        first_hidden = max(0, end - s + i + 1)
        if causal:
            visible[i, first_hidden:] = False
        if sliding_window is not None:
            visible[i, : max(0, first_hidden - sliding_window)] = False
        for draft in range(s):
            if tree is not None and 0 <= end - s + draft < m and not tree[i, draft]:
                visible[i, end - s + draft] = False
    return visible


def oracle(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    model: Model,
    *,
    scale: float | None = None,
    held: tuple[QuantisedRows, QuantisedRows, list[int]] | None = None,
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: queries `[s, h, ...]` over its tokens `[m, ...]`.

    The masks are those of `visible_tokens`. Some tokens may be as a `ring` in 8 bits holds them.
    """
    keys = torch.einsum("mk,hdk->hmd", latent.double(), model.w_uk.double())
    values = torch.einsum("mk,hkd->hmd", latent.double(), model.w_uv.double())
    if held is not None:
        keys[:, held[2]] = dequantise(held[0], torch.float64)
        values[:, held[2]] = dequantise(held[1], torch.float64)
    keys = torch.cat([keys, rope.double().expand(len(keys), -1, -1)], -1)
    q = torch.cat([q_nope, q_rope], -1)
    visible = visible_tokens(len(q), len(latent), **masks)
    return attended(q, keys, values, visible, q.shape[-1] ** -0.5 if scale is None else scale)


def latent_oracle(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    *,
    scale: float | None = None,
    **masks: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in the latent space, where the rows are the keys of every head."""
    q = torch.cat([q_latent, q_rope], -1)
    keys = torch.cat([latent, rope], -1).expand(q.shape[1], -1, -1)
    visible = visible_tokens(len(q), len(latent), **masks)
    values = keys[..., : latent.shape[-1]]
    return attended(q, keys, values, visible, q.shape[-1] ** -0.5 if scale is None else scale)


def assert_close(
    output: torch.Tensor,
    expected: torch.Tensor,
    lse: torch.Tensor,
    expected_lse: torch.Tensor,
    tolerance: float | None = None,
) -> None:
    tolerance = TOLERANCE[output.dtype] if tolerance is None else tolerance
    figures = compare(output, expected.to(torch.float64))
    assert figures.nan_count == 0
    # Values have unit variance: an output near zero comes from sums that cancel, whose rounding
    # error is that of the terms.
    norm = float(expected.double().norm())
    allowed = tolerance * (norm + expected.numel() ** 0.5)
    assert norm == 0.0 or figures.relative_frobenius * norm <= allowed, figures
    assert norm > 0.0 or figures.max_abs == 0.0, figures
    lse_figures = compare(lse, expected_lse.to(torch.float64))
    size = torch.nan_to_num(expected_lse, neginf=0.0).abs().sum() / max(1, expected_lse.numel())
    assert lse_figures.max_abs <= tolerance * (1 + float(size)), lse_figures


def require_oracle(
    output: torch.Tensor,
    lse: torch.Tensor,
    q: Sequence[torch.Tensor],
    tokens: Sequence[torch.Tensor],
    model: Model,
    view: CacheView | None = None,
    **options: Any,
) -> None:
    """Compare a call with the oracle, request by request; both queries are `[b, s, h, ...]`.

    Keys and values are as the ring of the view holds them, if it is in 8 bits.
    """
    k = model.sizes[2]
    for request, rows in enumerate(tokens):
        if view is not None and view.window_scales is not None:
            options["held"] = ring(view, request)
        expected, expected_lse = oracle(
            q[0][request], q[1][request], rows[:, :k], rows[:, k:], model, **options
        )
        assert_close(output[request], expected, lse[request], expected_lse)


def ring(view: CacheView, request: int) -> tuple[QuantisedRows, QuantisedRows, list[int]]:
    """Keys and values that a request's ring in 8 bits holds, and their positions."""
    assert view.packed_window is not None and view.window_start is not None
    keys, values = unpack_window(view.packed_window, view.window)
    positions = list(range(int(view.window_start[request]), int(view.lengths[request])))
    slots = [position % view.window for position in positions]
    return (
        QuantisedRows(keys.values[request][:, slots], keys.scales[request][:, slots]),
        QuantisedRows(values.values[request][:, slots], values.scales[request][:, slots]),
        positions,
    )


def operator_operands(
    q: Sequence[torch.Tensor], view: CacheView, model: Model, kernel: str = "auto"
) -> tuple[Any, ...]:
    """What the operator of a whole call takes."""
    parts = (
        view.k_new, view.v_new, view.window_start, view.k_prefix, view.v_prefix, view.k_rope_new,
        view.k_rope_prefix, view.scales, view.window_scales,
    )  # fmt: skip
    options = (None, None, None, True, 0.3, None, None, 1, 0, False, None, kernel)
    cache = view.latent, view.rope, view.lengths
    return (*q, *cache, model.w_uk, model.w_uv, view.block_table, *parts, *options)


@contextmanager
def registered(backend: Any) -> Iterator[Any]:
    """A backend that calls may name while the context lasts."""
    registry.register(backend)
    try:
        yield backend
    finally:
        registry.unregister(backend.kernel, backend.language)


def filled_cache(
    generator: torch.Generator,
    lengths: Sequence[int],
    model: Model,
    *,
    p: int = 4,
    t: int = 130,
    dtype: torch.dtype = torch.float32,
    cache_dtype: str | None = None,
    page_size: int | None = None,
    window: int = 0,
    window_dtype: str | None = None,
    prefix: int = 0,
    steps: int = 2,
) -> tuple[LatentCache, list[torch.Tensor]]:
    """A cache filled in a few appends, NaN where no token lies, and its tokens `[m, k+p]`."""
    h, d, k = model.sizes
    cache = LatentCache.allocate(
        len(lengths), t, k=k, p=p, dtype=cache_dtype or dtype, page_size=page_size, window=window,
        window_dtype=window_dtype, prefix=prefix, heads=h, head_dim=d,
    )  # fmt: skip
    cache.buffer.fill_(0xFF if cache_dtype else torch.nan)  # bytes of NaN in every dtype
    if cache.window is not None:
        poison_window(cache.window)
    shared = normal(generator, prefix, k + p, dtype=dtype)
    if prefix:
        cache.set_prefix(shared[:, :k], shared[:, k:], model.w_uk, model.w_uv)
    tokens = [
        torch.cat([shared, normal(generator, max(0, m - prefix), k + p, dtype=dtype)])
        for m in lengths
    ]
    done = [prefix] * len(lengths)
    for step in range(steps, 0, -1):
        counts = [
            (len(rows) - at + step - 1) // step for rows, at in zip(tokens, done, strict=True)
        ]
        width = max(counts)
        padded = torch.full((len(lengths), width, k + p), torch.nan, dtype=dtype)
        for request, (rows, at, count) in enumerate(zip(tokens, done, counts, strict=True)):
            padded[request, :count] = rows[at : at + count]
        taken = cache.append(
            padded[..., :k], padded[..., k:], counts, w_uk=model.w_uk, w_uv=model.w_uv
        )
        assert taken.tolist() == counts
        done = [at + count for at, count in zip(done, counts, strict=True)]
    assert cache.lengths.tolist() == [len(rows) for rows in tokens]
    return cache, tokens


def poison_window(window: Window) -> None:
    """NaN in all parts of a ring."""
    for part in (window.k_new, window.v_new, window.scales, window.k_rope_new):
        if part is not None and part.dtype.itemsize == 1:
            part.view(torch.uint8).fill_(0xFF)
        elif part is not None:
            part.fill_(torch.nan)


def paged(
    tokens: Sequence[torch.Tensor], page: int, columns: int, order: torch.Tensor, unused: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens `[m, width]` on the pages of a pool, NaN elsewhere, and their block table.

    The pages are taken in this order; `unused` stands where a request has none.
    """
    first = tokens[0]
    shape = int(order.max()) + 2, page, first.shape[-1]
    pool = torch.full(shape, torch.nan, dtype=first.dtype)
    table, free = torch.full((len(tokens), columns), unused, dtype=torch.int32), iter(order)
    for request, rows in enumerate(tokens):
        for column in range(-(-len(rows) // page)):
            part = rows[column * page : (column + 1) * page]
            table[request, column] = at = next(free)
            pool[at, : len(part)] = part
    return pool, table


def pool_in_8_bits(
    latent: torch.Tensor, rope: torch.Tensor, fmt: CacheFormat, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, QuantisedCache]:
    """Tokens `[pages, page, ...]` as the bytes of a pool, and what they were rounded to.

    Rows of NaN have bytes of NaN in every part, scales too.
    """
    k, p = latent.shape[-1], rope.shape[-1]
    pool = torch.full((*latent.shape[:2], fmt.row_bytes(k, p)), 0xFF, dtype=torch.uint8)
    parts, values = fmt.parts(pool, k, p), quantise(latent, rope, fmt, scale)
    used = ~latent.isnan().all(-1)
    for part in ("latent", "rope") if fmt is PER_TENSOR else ("latent", "rope", "scales"):
        stored, new = getattr(parts, part), getattr(values, part)
        stored.view(torch.uint8)[used] = new.view(torch.uint8)[used]
    return pool, values


def random_parents(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Parents of random trees: each token's parent is an earlier one or the context."""
    s = shape[-1]
    draws = torch.rand(shape, generator=generator)
    order = torch.arange(s)
    return (draws * (order + 1)).long() - 1


def ancestors_by_walking(parents: Sequence[int]) -> torch.Tensor:
    s = len(parents)
    mask = torch.zeros((s, s), dtype=torch.bool)
    for token in range(s):
        at = token
        while at >= 0:
            mask[token, at] = True
            at = parents[at]
    return mask
