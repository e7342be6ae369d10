"""What the consumers of the 8-bit latent kernel work on: constants, shared memory, registers."""

from dataclasses import dataclass
from typing import Any

from mla_var3.kernel.cute_python.mla.hopper.constants import (
    KV_BLOCK,
    LATENT,
)

HALF = LATENT // 2
"""Output columns of a warpgroup."""
WEIGHT_BITS = 6.0
"""A weight at the running maximum is 2**6 or up to twice that: small weights stay above e4m3's
least number, 2**-9."""
RISE_BITS = 2.75
"""A weight 2**2.75 above the running maximum raises it: 2**8.75 = 430 is the last that rounds to
less than 448, e4m3's largest number. With scales per token the maximum is up to 1 bit too low."""
FIRST_BITS = 2.0
"""How far above the first KV block's highest score a maximum begins: most rows then see no weight
that saturates. With normal scores of 1.9 bits standard deviation and 4096 tokens 29 % of the KV
blocks have one in 64 rows without it and none with it; errors rise from 2.6 to 2.7 %."""
FLUSH_PAIRS = 32
"""Pairs of KV blocks, 4096 tokens, after which an output moves to float32."""
MEAN_PAIRS = 4
"""Pairs of KV blocks between two subtractions of the means (`means.py`), the first after half as
many. With 8 what is lost doubles, 0.5 and 0.7 % over 131072 tokens instead of 0.2 and 0.5, and the
time where means are subtracted rises by 2 % less
(docs/results/2026-11-18-nvidia-h200-fp8-means-rows.json)."""
MEAN_WARPS = 2
"""Warps that compute means, each for half of the columns."""
MEAN_COPIES = 32
"""How often a weight of the means counts: the K side of an 8-bit wgmma has 32 bytes. e4m3 ends at
448, so what is subtracted at once ends at 14336, an average weight of 28 over an interval. Weights
at a maximum that began `FIRST_BITS` too high are 16 to 32."""
TILE_BYTES = KV_BLOCK * 128
"""Bytes of a column tile of a KV block or query tile: 64 rows of 128 columns."""


@dataclass(frozen=True)
class Queries:
    """Query rows in memory.

    Attributes:
        latent, rope: pointers to row 0.
        latent_stride, rope_stride: between heads of a query token.
        latent_token_stride, rope_token_stride: between query tokens.
        heads: query heads.
        dtype: element type.
    """

    latent: Any
    rope: Any
    latent_stride: Any
    rope_stride: Any
    latent_token_stride: Any
    rope_token_stride: Any
    heads: Any
    dtype: Any


@dataclass(frozen=True)
class Exchange:
    """Shared memory of the consumers.

    Attributes:
        q: [64, 512] e4m3 and its pointer `q_bytes`.
        q_rope: [64, 64] in the type of the cache's rope part, and its pointer `q_rope_bytes`.
        p: [columns, 64, stage] e4m3 weights and their words `p_words`.
        q_scale: [64] scales of the query rows, when a tile begins; later sums of `row_sum`.
        row_max: [64] running maximum.
        scales: [64, warpgroup] factors by which the maximum of its last block rescales.
        risen: [warpgroup] number of its last block in which a maximum rose.
        row_sum: [64, warpgroup] sums of probabilities.
        tops, carried: [64, warpgroup] maxima of now and of the output in memory (`flush`); where
            these have been used, the factors that follow from them.
    """

    q: Any
    q_bytes: Any
    q_rope: Any
    q_rope_bytes: Any
    p: Any
    p_words: Any
    q_scale: Any
    row_max: Any
    scales: Any
    risen: Any
    row_sum: Any
    tops: Any
    carried: Any


@dataclass(frozen=True)
class Means:
    """Shared memory of what `means.py` does.

    Attributes:
        values: pointer to minus the means of all columns as e4m3, by consumer thread.
        found: [half of the columns] whether one has a mean that makes subtracting worth while: not
            0.
        scale: [1] mean scale of the tokens; 1 with one scale for the whole cache.
        weights: [columns, 32, stage] e4m3 weights of the means, where the weights of a KV block
            are otherwise.
        removed: [64, warpgroup] what was subtracted from a row, in weights of the means.
        tops: [64, warpgroup] the maxima to which that is relative.
        phases: [warpgroup] phase of `ready`.
        first_block: [1] see `produce`.
        ready, free: mbarriers of means that are there, and of those of a tile that has ended.
    """

    values: Any
    found: Any
    scale: Any
    weights: Any
    removed: Any
    tops: Any
    phases: Any
    first_block: Any
    ready: Any
    free: Any


@dataclass(frozen=True)
class FirstToken:
    """Shared memory of a first token that is apart from the others (`first_token.py`).

    Attributes:
        values: pointer to its values as e4m3, in the order of `Means.values`.
        scores: pointer to 64 floats, what a CTA of a cluster gets from the other one.
        scale: [1] its scale, 1 with one scale for the whole cache; `NOT_APART` where it is not
            apart.
    """

    values: Any
    scores: Any
    scale: Any


@dataclass(frozen=True)
class Mmas:
    """Scores, their rope part and values."""

    qk: Any
    rope: Any
    pv: Any


@dataclass(frozen=True)
class Fragments:
    """Operands and accumulators of a thread.

    Attributes:
        q, q_rope, keys, rope, p, mean_weights: in shared memory.
        acc_s: scores, and as [row of this thread, (column of a pair, group of 8 columns)] `s`.
        acc_o: output, and by query row `o`.
    """

    q: Any
    q_rope: Any
    keys: Any
    rope: Any
    p: Any
    mean_weights: Any
    acc_s: Any
    s: Any
    acc_o: Any
    o: Any


@dataclass(frozen=True)
class State:
    """Numbers of a thread, per row of its scores.

    Attributes:
        sums: sums of its probabilities.
        scale: factor by which the last maximum rescales.
        top: running maximum.
        factors: from scores to powers of two.
    """

    sums: Any
    scale: Any
    top: Any
    factors: Any


@dataclass(frozen=True)
class Step:
    """What a step of the consumers works on: see `consume`.

    Attributes:
        mmas, work, values, state, exchange: `Mmas`, `Fragments`, `values_tensor`, `State`,
            `Exchange`.
        scales: of the tokens in all stages, or None.
        places: where this lane reads values.
        barriers: mbarriers.
        scheduler: the CTA's work tiles.
        columns: query rows on the N side.
    """

    mmas: Any
    work: Any
    values: Any
    state: Any
    exchange: Any
    scales: Any
    places: Any
    barriers: Any
    scheduler: Any
    columns: Any
