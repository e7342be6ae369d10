"""What an 8-bit latent cache costs in accuracy: attention over rounded tokens, against float64.

Only the cache is rounded. Queries, scores, probabilities and sums are in float64 on both sides, so
the figures are those of the format, whatever kernel reads it. On a Hopper GPU the latent kernel has
columns of its own, with everything that it rounds beside the cache. Tokens come in tiles, so that
long contexts need little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mla_var3.attention.backends.latent import missing_language
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.call import mla_latent_attention
from mla_var3.bench.plots import log_axes, new_figure, save_figure, series_colour
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS, LATENT, ROPE
from mla_var3.op.mla.cache_formats import FORMATS, PER_TENSOR, dequantise, quantise

K, P, ROWS = 512, 64, 64
"""Widths of made latents, and their query rows."""
BFLOAT16 = "bfloat16"
CACHES = (BFLOAT16, *FORMATS)
"""What is compared, the 16-bit cache first."""
LOGITS = {"flat": 0.5, "peaky": 6.0}
"""Standard deviation of the logits of made queries."""
TOKENS, QUICK_TOKENS = (1024, 16384, 131072), (256, 2048)
CAPTURED = "captured"
EXACT = "exact"
"""The tokens before any rounding."""
KERNEL = "flash_mla:cute-dsl"
KERNEL_COLUMN = "{} kernel"
"""Name of the column of the kernel on a cache of a format."""
_COLUMNS = (*CACHES, *map(KERNEL_COLUMN.format, FP8_FORMATS))
_TILE = 4096
_HOT = 100.0
"""What the hot channel is multiplied by."""
_DEGREES = 3
"""Degrees of freedom of the heavy-tailed latents, a Student t distribution."""

Tile = tuple[torch.Tensor, torch.Tensor]
"""Latent rows `[m, k]` and rope keys `[m, p]`."""
Result = tuple[torch.Tensor, torch.Tensor]
"""Output `[rows, k]` and LSE `[rows]`, float64."""
HOPPER = (9, 0)


MADE = ("normal", "heavy-tailed", "hot channel")
"""Distributions of made latent rows; rope keys are normal."""


def _made(name: str, generator: torch.Generator) -> torch.Tensor:
    """A tile of latent rows of a distribution."""

    def normal() -> torch.Tensor:
        return torch.randn((_TILE, K), generator=generator)

    if name == "heavy-tailed":
        squares = sum(normal().square() for _ in range(_DEGREES))
        return normal() / torch.as_tensor(squares / _DEGREES).sqrt()
    rows = normal()
    if name == "hot channel":
        rows[:, 7] *= _HOT
    return rows


@dataclass(frozen=True)
class Latents:
    """Tokens to round, float32 or wider; made ones, without tensors, come tile by tile.

    Attributes:
        latent: `[t, k]`.
        rope: `[t, p]`.
        queries: `[rows, k+p]`, latent queries with the scale of the logits in them.
    """

    name: str
    latent: torch.Tensor | None = None
    rope: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of latent rows and rope keys."""
        if self.latent is None or self.rope is None:
            return K, P
        return self.latent.shape[1], self.rope.shape[1]

    def tiles(self, lengths: Sequence[int], seed: int) -> Iterator[Tile]:
        """The tokens up to the largest length, with a border at each; the same ones for a seed."""
        for index, start in enumerate(range(0, max(lengths), _TILE)):
            stop = min(start + _TILE, max(lengths))
            if self.latent is not None and self.rope is not None:
                latent, rope = self.latent[start:stop], self.rope[start:stop]
            else:
                generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
                latent = _made(self.name, generator)
                rope = torch.randn((_TILE, P), generator=generator)
            borders = sorted({start, stop, *(t for t in lengths if start < t < stop)})
            for first, last in pairwise(borders):
                own = slice(first - start, last - start)
                yield latent[own], rope[own]


@dataclass(frozen=True)
class FormatError:
    """The error of one format.

    Attributes:
        channels: Root mean square over the latent channels of each channel's
            `||out - ref|| / ||ref||` over all query rows; a hot channel does not hide the others.
        output: `||out - ref|| / ||ref||` over everything.
        lse: Largest absolute difference of an LSE.
    """

    channels: float
    output: float
    lse: float


@dataclass(frozen=True)
class AccuracyRow:
    """The errors of one case by cache; attention is "flat", "peaky" or "captured"."""

    latents: str
    attention: str
    t: int
    errors: dict[str, FormatError]


def read_latents(path: Path) -> Latents:
    """Latents of a file that `torch.save` wrote.

    It holds a dict: `latent [t, k]`, `rope [t, p]` and, optionally, `queries [rows, k+p]` with the
    scale of the logits in them.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # pickle, zip and torch raise errors of their own
        got = f"{path} ({type(error).__name__})"
        raise InvalidArgumentError("latents", "a file of torch.save", got) from error
    if not isinstance(found, dict) or not {"latent", "rope"} <= set(found):
        raise InvalidArgumentError("latents", "a dict with latent [t, k] and rope [t, p]", path)
    parts = {name: found.get(name) for name in ("latent", "rope", "queries")}
    for name, part in parts.items():
        if part is not None and not (isinstance(part, torch.Tensor) and part.dim() == 2):
            raise InvalidArgumentError(name, "a matrix", type(part).__name__)
        if part is not None and not bool(part.isfinite().all()):
            raise InvalidArgumentError(name, "finite numbers", "NaN or infinity")
    latent, rope, queries = parts.values()
    if latent is None or rope is None or latent.shape[0] != rope.shape[0] or not len(latent):
        raise InvalidArgumentError("rope", "as many tokens as latent, at least one", path)
    width = latent.shape[1] + rope.shape[1]
    if queries is not None and (queries.shape[1] != width or not len(queries)):
        expected = f"[rows, {width}], at least one row"
        raise InvalidArgumentError("queries", expected, list(queries.shape))
    return Latents(path.stem, latent, rope, queries)


def kernel_here() -> str | None:
    """The kernel that reads 8-bit caches on the GPU here; None where there is none."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return None
    return None if missing_language(KERNEL.partition(":")[2]) else KERNEL


def measure(
    latents: Latents,
    lengths: Sequence[int],
    *,
    scale: float = 1.0,
    seed: int = 0,
    kernel: str | None = None,
    device: str = "cuda",
) -> list[AccuracyRow]:
    """The errors of all formats, with the queries of the latents or with flat and peaky ones.

    All lengths, numbers of tokens, are measured in one pass. `scale` is that of the format with one
    scale for the cache. A kernel is measured on the 8-bit caches that it reads.
    """
    most, caches = max(lengths), _caches(latents)
    queries = {name: _queries(latents, logits, most, seed) for name, logits in LOGITS.items()}
    if latents.queries is not None:
        queries = {CAPTURED: latents.queries.double()}
    attended = {
        (attention, cache): _Attention(rows)
        for attention, rows in queries.items()
        for cache in (EXACT, *caches)
    }
    stored = _kernel_caches(latents, max(lengths), scale, device) if kernel else {}
    found: dict[tuple[str, int], AccuracyRow] = {}
    t = 0
    for latent, rope in latents.tiles(lengths, seed):
        for own in stored.values():
            own.append(*(rows[None].to(device, torch.bfloat16) for rows in (latent, rope)))
        for cache in (EXACT, *caches):
            rows = _worth(cache, latent, rope, scale)
            for attention in queries:
                attended[attention, cache].add(*rows)
        t += latent.shape[0]
        if t in lengths:
            for attention in queries:
                exact = attended[attention, EXACT].result()
                results = {cache: attended[attention, cache].result() for cache in caches}
                for name, own in stored.items():
                    column = KERNEL_COLUMN.format(name)
                    results[column] = _attend_by_kernel(own, queries[attention], str(kernel))
                errors = {name: _error(exact, result) for name, result in results.items()}
                found[attention, t] = AccuracyRow(latents.name, attention, t, errors)
    return [found[attention, t] for attention in queries for t in sorted(set(lengths))]


def cases(given: Latents | None, quick: bool) -> list[tuple[Latents, tuple[int, ...]]]:
    """What `measure` takes, for given latents or for all made ones."""
    if given is not None and given.latent is not None:
        return [(given, (given.latent.shape[0],))]
    return [(Latents(name), QUICK_TOKENS if quick else TOKENS) for name in MADE]


def accuracy_plot(rows: Sequence[AccuracyRow], path: Path) -> list[Path]:
    """Draw the error over the context, one small plot per latents and attention."""
    panels = list(dict.fromkeys((row.latents, row.attention) for row in rows))
    columns = len({attention for _, attention in panels})
    lines = math.ceil(len(panels) / columns)
    with new_figure(3.9 * columns + 0.6, 2.5 * lines + 0.8) as figure:
        grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axis, panel in zip(grid.flat, panels, strict=False):
            own = [row for row in rows if (row.latents, row.attention) == panel]
            for name in own[0].errors:
                points = [(row.t, 100 * row.errors[name].channels) for row in own]
                colour = series_colour(name, _COLUMNS)
                axis.plot(*zip(*points, strict=True), "o-", label=name, color=colour, markersize=4)
            log_axes(axis, sorted({row.t for row in rows}))
            axis.set_title(f"{panel[0]} latents, {panel[1]}", fontsize=10, fontweight="normal")
        for axis in grid[-1]:
            axis.set_xlabel("tokens, t")
        for axis in grid[:, 0]:
            axis.set_ylabel("output error, %")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return save_figure(figure, path)


class _Attention:
    """Softmax attention of queries `[rows, k+p]` over tiles of tokens, in float64."""

    def __init__(self, queries: torch.Tensor) -> None:
        self._q = queries
        self._peak = queries.new_full((queries.shape[0],), -math.inf)
        self._total = torch.zeros_like(self._peak)
        self._output: torch.Tensor | None = None

    def add(self, latent: torch.Tensor, rope: torch.Tensor) -> None:
        """More tokens."""
        scores = self._q @ torch.cat([latent, rope], dim=-1).mT
        peak = torch.maximum(self._peak, scores.amax(-1))
        fade, weights = torch.exp(self._peak - peak), torch.exp(scores - peak[:, None])
        before = 0.0 if self._output is None else self._output * fade[:, None]
        self._output = before + weights @ latent
        self._total = self._total * fade + weights.sum(-1)
        self._peak = peak

    def result(self) -> Result:
        """The output `[rows, k]` and the LSE `[rows]`."""
        assert self._output is not None
        return self._output / self._total[:, None], self._peak + self._total.log()


def _attend_by_kernel(cache: LatentCache, queries: torch.Tensor, kernel: str) -> Result:
    """The result of a kernel on a cache of one request, with queries `[rows, k+p]` of one head."""
    k, device = cache.c_kv.shape[-1], cache.buffer.device
    q = queries.to(device, torch.bfloat16)[None, None]
    parts = q[..., :k].contiguous(), q[..., k:].contiguous()
    output, lse = mla_latent_attention(*parts, cache, scale=1.0, causal=False, kernel=kernel)
    return output[0, 0].double().cpu(), lse[0, 0].double().cpu()


def _kernel_caches(latents: Latents, t: int, scale: float, device: str) -> dict[str, LatentCache]:
    """Empty caches of the formats that the kernel reads; none for other widths than its own."""
    if latents.widths != (LATENT, ROPE):
        return {}
    found = {}
    for name in FP8_FORMATS:
        own: dict[str, Any] = {"scale": scale if name == PER_TENSOR.name else 1.0}
        own |= {"dtype": name, "device": device}
        found[name] = LatentCache.allocate(1, t, k=LATENT, p=ROPE, **own)
    return found


def _error(exact: Result, found: Result) -> FormatError:
    """How far a result is from the exact one."""
    output, lse = exact
    wrong = found[0] - output
    ratios = wrong.square().sum(0) / output.square().sum(0)
    ratios = torch.where(wrong.eq(0.0).all(0), 0.0, ratios)  # a channel that is always zero
    return FormatError(
        channels=math.sqrt(float(ratios.mean())),
        output=float(wrong.norm() / output.norm()),
        lse=float((found[1] - lse).abs().max()),
    )


def _caches(latents: Latents) -> list[str]:
    """The caches whose formats can hold the widths of some latents."""
    fitting = [BFLOAT16]
    for name, fmt in FORMATS.items():
        with suppress(InvalidArgumentError):
            fmt.require_widths(*latents.widths)
            fitting.append(name)
    return fitting


def _worth(name: str, latent: torch.Tensor, rope: torch.Tensor, scale: float) -> Tile:
    """What a cache gives back for tokens, in float64."""
    if name == EXACT:
        return latent.double(), rope.double()
    # Models write bfloat16, and engines round that.
    stored = latent.to(torch.bfloat16), rope.to(torch.bfloat16)
    if name == BFLOAT16:
        return stored[0].double(), stored[1].double()
    one = torch.tensor([scale]) if name == PER_TENSOR.name else None
    return dequantise(quantise(*stored, FORMATS[name], one), torch.float64)


def _queries(latents: Latents, deviation: float, t: int, seed: int) -> torch.Tensor:
    """Random queries whose logits over the first tokens have a standard deviation."""
    rows = torch.cat([part.double() for part in next(latents.tiles([t], seed))], dim=-1)
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn((ROWS, rows.shape[1]), generator=generator, dtype=torch.float64)
    spread = (queries @ rows.mT).std(-1, correction=0)
    # A single token, or equal ones, spread nothing.
    return queries * (deviation / torch.where(spread == 0.0, 1.0, spread))[:, None]
