"""Device code shared by the cuTile MLA kernels: causal limits, the two attention loops, the merge.

Everything here runs inside a `@ct.kernel` function. Scores are kept in base 2 (`scale_log2e` is the
softmax scale times log2 e), the log-sum-exp leaves the kernel as a natural logarithm.

Cache slots at and beyond a request's length may hold anything, NaN included. The loops therefore
read the cache through a view cut at `stop` (`Array.slice`): the copy engine fills what lies beyond
with zeros, so a masked probability of 0 never meets a NaN, and no element-wise clean-up of the
value tile is needed in the inner loop.
"""

import math

import cuda.tile as ct

NEG_INF = -math.inf
LN_2 = math.log(2.0)
LOG2_E = 1.0 / math.log(2.0)


def causal_limits(query_index, length, s, causal):
    """Number of KV positions that each query sees: `length - s + query + 1`, or all of them.

    Args:
        query_index: int32 tile or scalar of query positions in 0..s-1 (may exceed it in padding).
        length: KV length of the request.
        s: query tokens of the request.
        causal: compile-time flag.
    """
    if causal:
        return ct.minimum(length - s + 1 + query_index, length)
    return query_index * 0 + length


def softmax_step(scores, m, l, scale_log2e):  # noqa: E741 - l is the usual name of the row sum
    """One online-softmax step over a tile of scores.

    Args:
        scores: [BM, BN] float32 scores, masked entries are -inf.
        m: [BM, 1] running row maximum in base 2.
        l: [BM, 1] running row sum.
        scale_log2e: softmax scale times log2 e.

    Returns:
        (p, alpha, m, l): probabilities [BM, BN] relative to the new maximum, the factor [BM, 1] by
        which earlier accumulators shrink, and the new state.
    """
    m_new = ct.maximum(m, ct.max(scores, axis=-1, keepdims=True) * scale_log2e)
    # A row that has seen no key keeps m = -inf; subtracting 0 instead avoids inf - inf.
    shift = ct.where(m_new == NEG_INF, 0.0, m_new)
    p = ct.exp2(scores * scale_log2e - shift, flush_to_zero=True)
    alpha = ct.exp2(m - shift, flush_to_zero=True)
    return p, alpha, m_new, l * alpha + ct.sum(p, axis=-1, keepdims=True)


def attend_latent(
    q_latent, q_rope, c_kv, k_rope, request, first_tile, full_tile, last_tile, limits, stop,
    scale_log2e, BM, BN, K, P,
):  # fmt: skip
    """Absorbed attention of BM query rows over latent KV tiles first_tile..last_tile-1.

    The latent tile serves as keys and as values, so it is read once. Tiles from `full_tile` on are
    masked; `limits` [BM] is the number of positions that each row sees, `stop` where the cache ends.

    Args:
        q_latent: [BM, K] absorbed queries. q_rope: [BM, P].
        c_kv: array [b, t, K]. k_rope: array [b, t, P].

    Returns:
        (acc, m, l): unnormalised output [BM, K] float32, row maximum and row sum [BM, 1].
    """
    c_view = c_kv.slice(1, 0, stop)
    r_view = k_rope.slice(1, 0, stop)
    m = ct.full((BM, 1), NEG_INF, dtype=ct.float32)
    l = ct.zeros((BM, 1), dtype=ct.float32)  # noqa: E741
    acc = ct.zeros((BM, K), dtype=ct.float32)
    for j in range(first_tile, last_tile):
        # c [BN, K], r [BN, P]
        c = ct.load(c_view, (request, j, 0), (1, BN, K), padding_mode=ct.PaddingMode.ZERO)
        c = c.reshape((BN, K))
        r = ct.load(r_view, (request, j, 0), (1, BN, P), padding_mode=ct.PaddingMode.ZERO)
        r = r.reshape((BN, P))
        scores = ct.mma(q_latent, ct.permute(c, (1, 0)), ct.zeros((BM, BN), dtype=ct.float32))
        scores = ct.mma(q_rope, ct.permute(r, (1, 0)), scores)
        if j >= full_tile:
            position = j * BN + ct.arange(BN, dtype=ct.int32)
            scores = ct.where(position[None, :] < limits[:, None], scores, NEG_INF)
        p, alpha, m, l = softmax_step(scores, m, l, scale_log2e)  # noqa: E741
        acc = ct.mma(p.astype(c_kv.dtype), c, acc * alpha)
    return acc, m, l


def attend_heads(
    q_nope, q_rope, keys, values, k_rope, request, head, full_tile, last_tile, limits, stop,
    scale_log2e, BM, BN, D, P,
):  # fmt: skip
    """Decompressed attention of BM query rows of one head over KV tiles 0..last_tile-1.

    The rope part of the keys is one array for all heads.

    Args:
        q_nope: [BM, D]. q_rope: [BM, P].
        keys, values: arrays [b, h, t, D]. k_rope: array [b, t, P].

    Returns:
        (acc, m, l): unnormalised output [BM, D] float32, row maximum and row sum [BM, 1].
    """
    k_view = keys.slice(2, 0, stop)
    v_view = values.slice(2, 0, stop)
    r_view = k_rope.slice(1, 0, stop)
    m = ct.full((BM, 1), NEG_INF, dtype=ct.float32)
    l = ct.zeros((BM, 1), dtype=ct.float32)  # noqa: E741
    acc = ct.zeros((BM, D), dtype=ct.float32)
    for j in range(last_tile):
        # k [BN, D], r [BN, P], v [BN, D]
        k = ct.load(k_view, (request, head, j, 0), (1, 1, BN, D), padding_mode=ct.PaddingMode.ZERO)
        k = k.reshape((BN, D))
        r = ct.load(r_view, (request, j, 0), (1, BN, P), padding_mode=ct.PaddingMode.ZERO)
        r = r.reshape((BN, P))
        scores = ct.mma(q_nope, ct.permute(k, (1, 0)), ct.zeros((BM, BN), dtype=ct.float32))
        scores = ct.mma(q_rope, ct.permute(r, (1, 0)), scores)
        if j >= full_tile:
            position = j * BN + ct.arange(BN, dtype=ct.int32)
            scores = ct.where(position[None, :] < limits[:, None], scores, NEG_INF)
        p, alpha, m, l = softmax_step(scores, m, l, scale_log2e)  # noqa: E741
        v = ct.load(v_view, (request, head, j, 0), (1, 1, BN, D), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(p.astype(values.dtype), v.reshape((BN, D)), acc * alpha)
    return acc, m, l


def normalise(acc, m, l):  # noqa: E741
    """Normalised output and natural log-sum-exp; a row that saw no key gives 0 and -inf."""
    seen = l > 0.0
    out = acc / ct.where(seen, l, 1.0)
    lse = ct.where(seen, (m + ct.log2(ct.where(seen, l, 1.0))) * LN_2, NEG_INF)
    return out, lse
