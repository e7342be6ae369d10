"""What the warpgroups of the 8-bit latent kernel compute with: constants, memory, registers."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from mla_var3.kernel.cute_python.mla.hopper import constants
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, LATENT, WARPGROUP

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
MOST_RISE = 64.0
"""Where a maximum has risen by more powers of two since its row was first flushed, what was flushed
is dropped: it is far below what e4m3 weights resolve. Up to there numbers fit a float32."""
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
SCORE_WARP = constants.THREADS // 32
"""The first warp of the score warpgroup. The value warpgroups are where other kernels have their
consumers."""
THREADS = constants.THREADS + WARPGROUP
COMPUTING = constants.CONSUMERS + WARPGROUP
"""Threads of the value warpgroups and the score warpgroup."""


class Handover(IntEnum):
    """Named barriers between the score warpgroup and the value warpgroups, behind `Barrier`.

    All their threads take part, and those of one side only arrive.
    """

    TILE_BEGINS = 8  # what the values needed of the tile before is no longer read
    TILE = 9  # what the values need of the rows when a tile ends
    FLUSH = 10  # factors of an output that moves to memory
    MEANS = 11  # weights of the means
    SCORES = 12  # of the score warpgroup alone


@dataclass(frozen=True)
class Queries:
    """Query rows in memory.

    Attributes:
        latent, rope: pointers to row 0.
        latent_stride, rope_stride: between heads of a query token.
        latent_token_stride, rope_token_stride: between query tokens.
        heads: query heads.
    """

    latent: Any
    rope: Any
    latent_stride: Any
    rope_stride: Any
    latent_token_stride: Any
    rope_token_stride: Any
    heads: Any


@dataclass(frozen=True)
class Exchange:
    """Shared memory of the score warpgroup and the value warpgroups.

    Attributes:
        q: [64, 512] e4m3 and its pointer `q_bytes`.
        q_rope: [64, 64] in the type of the cache's rope part, and its pointer `q_rope_bytes`.
        p: [columns, 64, stage] e4m3 weights and their pointer `p_bytes`.
        row_sum, row_max: [64] sums of probabilities and maxima, when a tile ends.
        flush: [64] factors of an output that moves to memory.
        fall: [64] maxima to which the output in memory is relative; when a tile ends, its factors.
        scales: [64, stage] factors by which the maximum of a KV block rescales.
        risen: [stage] number of the last stage in whose KV block a maximum rose.
        factors, shares: [64, value warpgroup] factors of the output and of the first token, when a
            tile ends: where `scales` are otherwise.
    """

    q: Any
    q_bytes: Any
    q_rope: Any
    q_rope_bytes: Any
    p: Any
    p_bytes: Any
    row_sum: Any
    row_max: Any
    flush: Any
    fall: Any
    scales: Any
    risen: Any
    factors: Any
    shares: Any


@dataclass(frozen=True)
class Means:
    """Shared memory of what `means.py` does.

    Attributes:
        values: pointer to minus the means of all columns as e4m3, by consumer thread.
        found: [half of the columns] whether one has a mean that makes subtracting worth while: not
            0.
        scale: [1] mean scale of the tokens; 1 with one scale for the whole cache.
        weights: [columns, 32] e4m3 weights of the means.
        removed: [64] what was subtracted from a row so far, in weights of the means.
        first_block: [1] see `produce`.
        ready, free: mbarriers of means that are there, and of those of a tile that has ended.
    """

    values: Any
    found: Any
    scale: Any
    weights: Any
    removed: Any
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
    """Scores, their rope part, and scores of queries in registers."""

    qk: Any
    rope: Any
    held: Any


@dataclass(frozen=True)
class ScoreFragments:
    """Operands and accumulators of a thread of the score warpgroup.

    Attributes:
        q, q_rope, keys, rope: in shared memory.
        held: the first columns of the queries in registers, or None.
        acc: scores, and as [row of this thread, (column of a pair, group of 8 columns)] `s`.
    """

    q: Any
    q_rope: Any
    keys: Any
    rope: Any
    held: Any
    acc: Any
    s: Any


@dataclass(frozen=True)
class ScoreState:
    """Numbers of a thread of the score warpgroup, per row.

    Attributes:
        sums: of its probabilities.
        odd: how much more every other KV block has of them than the others, with either sign
            (`means.py`).
        bases: what makes powers of two weights: `WEIGHT_BITS` less the running maximum.
        factors: from scores to powers of two.
    """

    sums: Any
    odd: Any
    bases: Any
    factors: Any


@dataclass(frozen=True)
class ScoreStep:
    """What the score warpgroup works on: see `compute_all_scores`.

    Attributes:
        mmas, work, state, exchange: `Mmas`, `ScoreFragments`, `ScoreState`, `Exchange`.
        removed: see `Means`.
        scales: of the tokens in all stages, or None.
        tokens: scales of this thread's tokens of a KV block in registers, or None.
        barriers: mbarriers.
        scheduler: the CTA's work tiles.
        columns: query rows on the N side of the second product.
        words_at, rescales_at: addresses of this thread's first weights and factors in stage 0.
    """

    mmas: Any
    work: Any
    state: Any
    exchange: Any
    removed: Any
    scales: Any
    tokens: Any
    barriers: Any
    scheduler: Any
    columns: Any
    words_at: Any
    rescales_at: Any


@dataclass(frozen=True)
class ValueFragments:
    """Operands and accumulators of a thread of a value warpgroup.

    Attributes:
        p, mean_weights: in shared memory.
        values: registers of V^T, see `values_tensor`.
        acc: output, and by query row `o`.
    """

    p: Any
    mean_weights: Any
    values: Any
    acc: Any
    o: Any


@dataclass(frozen=True)
class ValueStep:
    """What a value warpgroup works on: see `consume`.

    Attributes:
        mma, work, exchange: that of the values, `ValueFragments`, `Exchange`.
        places: where this lane reads values.
        barriers: mbarriers.
        columns: query rows on the N side.
        load_early: whether values are loaded to registers as soon as half of the products of the
            KV block before are done. With one scale that is 3 to 5 % slower: these loads then meet
            the powers of two. With scales per token, where weights take longer, the best
            build does so (docs/results/2026-11-19-nvidia-h200-fp8-held-rows.json).
    """

    mma: Any
    work: Any
    exchange: Any
    places: Any
    barriers: Any
    columns: Any
    load_early: Any
