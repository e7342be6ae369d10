"""Device code shared by the cuTile MLA kernels: causal limits, the two attention loops, the merge.

Everything here runs inside a `@ct.kernel` function. Scores are kept in base 2 (`scale_log2e` is the
softmax scale times log2 e); the LSE leaves the kernel as a natural logarithm.

Cache slots at and beyond a request's length may hold anything, NaN included. The loops therefore
read a dense cache through a view that ends at `stop` (`Array.slice`): the load fills what lies
beyond with zeros, so a masked probability of 0 never meets a NaN, and the inner loop need not clean
the value tile element by element. With pages, only the KV tile that holds `stop` has unused slots.
It comes after the loop over the others, on such a view of its page: a view per tile would cost a
new TMA descriptor per tile.

What the host cannot check is clamped here. cuTile leaves a tile that lies wholly outside of its
array, and a slice beyond its array, undefined; a gather out of bounds gives its padding value.
"""

import math

import cuda.tile as ct

NEG_INF = -math.inf
LN_2 = math.log(2.0)
LOG2_E = 1.0 / math.log(2.0)
NAN = math.nan
SCORE_FLOOR = -3.0e38
"""Start of the running maximum. Finite, so that a row whose keys are all masked computes
exp2(-inf - floor) = 0 instead of exp2(-inf + inf); below every finite scaled score."""
ONE_SCALE, TOKEN_SCALE, GROUP_SCALES = 1, 2, 3
"""Values of CACHE, the format of the latent cache; 0 for one in the dtype of the queries. The names
in op/mla/cache_formats.py are `fp8` (one scale for the cache), `fp8_per_token` (a scale per token,
for its rope key too) and `fp8_ds_mla` (a scale per GROUP_COLUMNS of a latent row)."""
GROUP_COLUMNS = 128
QUERIES_STAY = 64
"""Query rows of a tile from which the queries are loaded once, before the latent loop: wgmma and
tcgen05 read them from shared memory. mma reads registers, 144 of a thread for 16 rows of 576
columns, and with those every tiling spills (stack on sm_86: 16 x 64 and 32 x 32 112 B). So smaller
tiles load them at every step: with 32 rows and 32 tokens as many bytes as the KV tile, mostly from
L2, and no spills."""
LATENT_LATENCY = 4
"""Load-latency hint of the latent tiles. It decides how deep the compiler buffers them: with four
parts, 4 gives two buffers and 494 TFLOP/s on an H200, 1 gives 405."""
SHORT_LATENCY, SHORT_TILE = 2, 32
"""The same for KV tiles of fewer tokens than the latter, which pages of 16 tokens make, with rope:
on sm_80 deeper buffers spill 112 B, without rope shallower ones do."""
LONG_TILE = 64
"""Tokens of a KV tile from which the loop reads the last tile of a paged cache, too, if tiles have
QUERIES_STAY rows. A step of its own has buffers of its own in shared memory: on an H200 flash_mla
takes 1526 instead of 1341 us (b=32 s=16 t=4096 h=128), flash_mla_split_kv 262 instead of 149 (b=64
s=1 h=16). With smaller tiles, sliding windows and trees in fewer than four parts the one loop
spills; with one part the compiler fails for sm_100 (cuTile 1.7)."""


def visible(row, length, s, CAUSAL, ROWS_PER_QUERY):
    """Number of KV positions that a query row sees: `length - s + query + 1`, or all of them.

    ROWS_PER_QUERY consecutive rows (int32 tile or scalar) belong to one query token.
    """
    if CAUSAL:
        return ct.minimum(length - s + 1 + row // ROWS_PER_QUERY, length)
    return row * 0 + length


def clamped_length(lengths, request, slots):
    """KV length of a request, within the slots that it has."""
    return min(max(ct.load(lengths, (request,), ()), 0), slots)


def packed_queries(bounds, request, s, tokens):
    """First query token and number of query tokens of a request, at most s, within `tokens`."""
    first = min(max(ct.load(bounds, (request,), ()), 0), tokens)
    last = min(ct.load(bounds, (request + 1,), ()), tokens)
    return first, min(max(last - first, 0), s)


def mask_scores(scores, tile, first_row, length, s, start, stop, CAUSAL, ROWS_PER_QUERY, BM, BN):
    """Scores [BM, BN] of a KV tile with -inf where a row does not see the position.

    Slot 0 of the array that the tile was read from is position `start`; positions from `stop` on
    are not in it. The limits are computed here, not in the caller, so that they occupy no registers
    in the loop over unmasked tiles.
    """
    rows = first_row + ct.arange(BM, dtype=ct.int32)
    limits = ct.minimum(visible(rows, length, s, CAUSAL, ROWS_PER_QUERY), stop)
    limits = limits - (start + tile * BN)
    return ct.where(ct.arange(BN, dtype=ct.int32)[None, :] < limits[:, None], scores, NEG_INF)


def window_begin(row, length, s, WINDOW, ROWS_PER_QUERY):
    """First KV position in the sliding window of a query row; may be negative. See `visible`."""
    return length - s + 1 + row // ROWS_PER_QUERY - WINDOW


def hide_before_window(scores, tile, first_row, length, s, WINDOW, H, BM, BN):
    """Scores [BM, BN] of a KV tile with -inf at positions before a row's sliding window."""
    rows = first_row + ct.arange(BM, dtype=ct.int32)
    begins = window_begin(rows, length, s, WINDOW, H) - tile * BN
    return ct.where(ct.arange(BN, dtype=ct.int32)[None, :] >= begins[:, None], scores, NEG_INF)


def needs_mask(tile, full_tile):
    """Whether a KV tile is among the masked ones, `tile >= full_tile`.

    Written as a difference on purpose: at a plain comparison with the loop counter the compiler
    splits the loop in two, which is slower (flash_mla on an H200: 404 instead of 494 TFLOP/s).
    """
    return tile - full_tile >= 0


def softmax_step(scores, m, l, scale_log2e):  # noqa: E741 - l is the usual name of the row sum
    """One online-softmax step over float32 scores [BM, BN], of which masked entries are -inf.

    m, l [BM, 1]: running row maximum in base 2, SCORE_FLOOR before the first key; row sum.

    Returns:
        (p, alpha, m, l): probabilities [BM, BN] relative to the new maximum, the factor [BM, 1] by
        which earlier accumulators shrink, and the new state.
    """
    m_new = ct.maximum(m, ct.max(scores, axis=-1, keepdims=True) * scale_log2e)
    p = ct.exp2(scores * scale_log2e - m_new, flush_to_zero=True)
    alpha = ct.exp2(m - m_new, flush_to_zero=True)
    return p, alpha, m_new, l * alpha + ct.sum(p, axis=-1, keepdims=True)


def load_column_parts(rows, request, row_tile, BM, KP, PARTS):
    """A tile of BM rows of `rows` [b, s*h, K] as PARTS tiles [BM, KP]."""
    parts = ()
    for i in ct.static_iter(range(PARTS)):
        part = ct.load(rows, (request, row_tile, i), (1, BM, KP), padding_mode=ct.PaddingMode.ZERO)
        parts += (part.reshape((BM, KP)),)
    return parts


def load_query_part(rows, given, tile, request, row_tile, part, BM, WIDTH):
    """The tile [BM, WIDTH] of `rows` at a part of its columns: as given, or loaded again.

    No tile is negative, but the compiler does not know it, and leaves the load in the loop.

    Args:
        rows: array [b, s*h, K].
        given: the same tile, loaded before the loop; see QUERIES_STAY.
        tile: the KV tile, a loop counter.
    """
    queries = given
    if BM < QUERIES_STAY:
        at = (request, row_tile + min(tile, 0), part)
        queries = ct.load(rows, at, (1, BM, WIDTH), padding_mode=ct.PaddingMode.ZERO)
        queries = queries.reshape((BM, WIDTH))
    return queries


def hide_by_tree(scores, tree, tile, request, first_row, length, s, H, BM, BN):
    """Scores [BM, BN] of a KV tile with -inf at drafts that are no ancestors of a row's query.

    `tree` [b*s, s] int8 is 1 where a query (row) sees a draft (column). Positions before the drafts
    are out of its bounds, where the gather gives 1. An array with an axis per request would spill
    on sm_90. Either way to hide a score spills somewhere: `minimum` with tiles of 64 x 32 on sm_90,
    `where` on sm_86, and with dense caches of k=256 on sm_90.
    """
    query = (first_row + ct.arange(BM, dtype=ct.int32)) // H
    draft = tile * BN + ct.arange(BN, dtype=ct.int32) - (length - s)
    row = request * tree.shape[1] + query
    seen = ct.gather(tree, (row[:, None], draft[None, :]), padding_value=1)
    if BM >= QUERIES_STAY and BN < LONG_TILE:
        return ct.where(seen != 0, scores, NEG_INF)
    return ct.minimum(scores, ct.where(seen != 0, math.inf, NEG_INF))


def load_kv_tile(view, block, row, part, BN, WIDTH, P):
    """Tile [BN, WIDTH] of a cache at (block, row) and a part of its columns; P as of the kernel."""
    tile = ct.load(
        view, (block, row, part), (1, BN, WIDTH), padding_mode=ct.PaddingMode.ZERO,
        latency=SHORT_LATENCY if BN < SHORT_TILE and P > 0 else LATENT_LATENCY,
    )  # fmt: skip
    return tile.reshape((BN, WIDTH))


def e4m3_values(tile):
    """An e4m3 tile in float32; before sm_90, where cuTile has no float8, its bytes as int8.

    Sign, exponent and mantissa go to their places in a float32, 2**120 makes up for its other
    exponent bias, subnormals included. The byte of a NaN would be worth 480; the largest finite
    number is 448.
    """
    if ct.static_eval(tile.dtype == ct.int8):
        bits = (tile.astype(ct.int32) << 20) & -0x78100000  # 0x87F00000
        values = ct.bitcast(bits, ct.float32) * 2.0**120
        return ct.where(ct.abs(values) > 448.0, NAN, values)
    return tile.astype(ct.float32)


def dequantised(tile, scales, dtype, BN, WIDTH):
    """An e4m3 tile [BN, WIDTH] times its scales [BN or 1, G], each for WIDTH / G columns."""
    GROUPS = scales.shape[1]
    values = e4m3_values(tile).reshape((BN, GROUPS, WIDTH // GROUPS)) * scales[:, :, None]
    return values.reshape((BN, WIDTH)).astype(dtype)


def latent_step(
    q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope, c_view, r_view, s_view, tree,
    block, row, tile, acc_parts, m, l, full_tile,  # noqa: E741
    request, first_row, length, s, stop, scale_log2e,
    TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
):  # fmt: skip
    """One step of `attend_cache`: the KV tile at (block, row) of the views."""
    dtype = q_parts[0].dtype
    scores = ct.zeros((BM, BN), dtype=ct.float32)
    if CACHE == ONE_SCALE:
        scales = ct.load(s_view, (0, 0, 0), (1, 1, 1)).reshape((1, 1))
    if CACHE == TOKEN_SCALE:
        scales = load_kv_tile(s_view, block, row, 0, BN, 1, P)
    c_parts = ()
    for i in ct.static_iter(range(PARTS)):
        # c [BN, KP]
        c = load_kv_tile(c_view, block, row, i, BN, KP, P)
        if CACHE == GROUP_SCALES:
            scales = load_kv_tile(s_view, block, row, i, BN, KP // GROUP_COLUMNS, P)
        if CACHE > 0:
            c = dequantised(c, scales, dtype, BN, KP)
        q = load_query_part(q_rows, q_parts[i], tile, batch, row_tile, i, BM, KP)
        scores = ct.mma(q, ct.permute(c, (1, 0)), scores)
        c_parts += (c,)
    if P > 0:
        r = load_kv_tile(r_view, block, row, 0, BN, P, P)
        if CACHE == ONE_SCALE:
            r = dequantised(r, scales, dtype, BN, P)
        if CACHE == TOKEN_SCALE:
            r = (r.astype(ct.float32) * scales).astype(dtype)
        if CACHE == GROUP_SCALES:
            r = r.astype(dtype)
        q = load_query_part(q_rope_rows, q_rope, tile, batch, row_tile, 0, BM, P)
        scores = ct.mma(q, ct.permute(r, (1, 0)), scores)
    masked = needs_mask(tile, full_tile)
    if WINDOW > 0:  # the last row sees the fewest old positions
        last_begin = window_begin(first_row + BM - 1, length, s, WINDOW, H)
        masked = masked | (tile * BN - last_begin < 0)
    if masked:
        scores = mask_scores(scores, tile, first_row, length, s, 0, stop, CAUSAL, H, BM, BN)
        if TREE == 1:
            scores = hide_by_tree(scores, tree, tile, request, first_row, length, s, H, BM, BN)
        if WINDOW > 0:
            scores = hide_before_window(scores, tile, first_row, length, s, WINDOW, H, BM, BN)
    p, alpha, m, l = softmax_step(scores, m, l, scale_log2e)  # noqa: E741
    p = p.astype(dtype)
    updated = ()
    for i in ct.static_iter(range(PARTS)):
        updated += (ct.mma(p, c_parts[i], acc_parts[i] * alpha),)
    return updated, m, l


def page_of(table, request, tile, pages, TILES):
    """Page of a KV tile, TILES of which fill a page; a wrong entry gives some page of the pool."""
    return min(max(ct.load(table, (request, tile // TILES), ()), 0), pages - 1)


def page_view(pool, page, tokens):
    """The first tokens of a page of a pool [pages, PAGE, width], as an array of one page."""
    page = page.astype(ct.int64)  # times the stride: pools may have many gigabytes
    return pool.slice(0, page, page + 1).slice(1, 0, tokens)


def attend_cache(
    q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope,
    c_kv, k_rope, scales, table, tree, request, first_tile, full_tile, last_tile,
    first_row, length, s, stop, scale_log2e,
    PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
):  # fmt: skip
    """Latent attention of BM query rows over KV tiles first_tile..last_tile-1.

    The latent tile serves as keys and as values, so it is read once. It is read as PARTS tiles of
    KP columns with an accumulator each: a part's buffer is free for the next tile as soon as its
    own P V is done, so the compiler can overlap loads with the products (on an H200
    494 TFLOP/s with four parts of 128, 418 with two, 357 with one of 512).

    Args:
        q_rows: array [.., s*H, K] of latent queries. q_rope_rows: array [.., s*H, P].
        batch, row_tile: the row tile in these arrays.
        q_parts: that tile of q_rows, PARTS tiles [BM, KP]; not read below QUERIES_STAY rows.
        q_rope: that tile of q_rope_rows, [BM, P], likewise; not read if P is 0.
        c_kv: array [b, t, K], K = PARTS * KP; [pages, PAGE, K] with pages.
        k_rope: array [b, t, P] or [pages, PAGE, P].
        scales: array [b, t, G] or [pages, PAGE, G] float32, or [1, 1, 1] (ONE_SCALE); not read if
            CACHE is 0.
        table: array [b, pages of a request] int32, not read if PAGE is 0.
        tree: array [b*s, s] int8, see `hide_by_tree`; not read unless TREE is 1.
        request: index into the batch.
        first_tile, full_tile, last_tile: tiles from full_tile on are masked.
        first_row: row of the tile's first query among the s*H of the request.
        length, s: KV length and query tokens of the request.
        stop: end of the positions that this call attends to; at most `length`.
        PAGE: tokens of a page, a multiple of BN; 0 for a dense cache.
        WINDOW: newest positions, up to its own, that a query sees; 0 for all.
        CACHE: format of the cache, see ONE_SCALE. Tiles of e4m3 are converted to the dtype of the
            queries in registers.

    Returns:
        (acc_parts, m, l): unnormalised output, PARTS tiles [BM, KP] float32; row maximum and row
        sum [BM, 1].
    """
    m = ct.full((BM, 1), SCORE_FLOOR, dtype=ct.float32)
    l = ct.zeros((BM, 1), dtype=ct.float32)  # noqa: E741
    acc_parts = ()
    for _ in ct.static_iter(range(PARTS)):
        acc_parts += (ct.zeros((BM, KP), dtype=ct.float32),)
    if PAGE == 0:
        c_view = c_kv.slice(1, 0, stop)
        r_view = k_rope.slice(1, 0, stop)
        s_view = scales
        if CACHE > ONE_SCALE:
            s_view = scales.slice(1, 0, stop)
        for j in range(first_tile, last_tile):
            acc_parts, m, l = latent_step(  # noqa: E741
                q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope,
                c_view, r_view, s_view, tree, request, j, j, acc_parts, m, l,
                full_tile, request, first_row, length, s, stop, scale_log2e,
                TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
    elif BM < QUERIES_STAY or BN < LONG_TILE or WINDOW > 0 or PARTS < (4 if TREE == 1 else 2):
        pages, TILES = c_kv.shape[0], PAGE // BN
        whole = min(stop // BN, last_tile)
        for j in range(first_tile, whole):
            page = page_of(table, request, j, pages, TILES)
            acc_parts, m, l = latent_step(  # noqa: E741
                q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope,
                c_kv, k_rope, scales, tree, page, j % TILES, j, acc_parts, m, l,
                full_tile, request, first_row, length, s, stop, scale_log2e,
                TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
        if (whole < last_tile) & (first_tile <= whole):
            page = page_of(table, request, whole, pages, TILES)
            rest = stop - whole // TILES * PAGE  # tokens of the request in its last page
            s_view = scales
            if CACHE > ONE_SCALE:
                s_view = page_view(scales, page, rest)
            acc_parts, m, l = latent_step(  # noqa: E741
                q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope,
                page_view(c_kv, page, rest), page_view(k_rope, page, rest), s_view, tree,
                0, whole % TILES, whole, acc_parts, m, l,
                full_tile, request, first_row, length, s, stop, scale_log2e,
                TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
    else:
        # Whole tiles, then the one that holds `stop`, if any: the same code on another view.
        pages, TILES = c_kv.shape[0], PAGE // BN
        whole = min(stop // BN, last_tile)
        rest = min(max(stop - whole // TILES * PAGE, 0), PAGE)
        for last in range(2):
            tokens = PAGE - last * (PAGE - rest)
            c_view = c_kv.slice(1, 0, tokens)
            r_view = k_rope.slice(1, 0, tokens)
            s_view = scales
            if CACHE > ONE_SCALE:
                s_view = scales.slice(1, 0, tokens)
            for j in range(max(first_tile, last * whole), whole + last * (last_tile - whole)):
                page = page_of(table, request, j, pages, TILES)
                acc_parts, m, l = latent_step(  # noqa: E741
                    q_rows, q_rope_rows, batch, row_tile, q_parts, q_rope,
                    c_view, r_view, s_view, tree, page, j % TILES, j, acc_parts, m, l,
                    full_tile, request, first_row, length, s, stop, scale_log2e,
                    TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
                )  # fmt: skip
    return acc_parts, m, l


def store_rows(
    q_latent, q_rope, c_kv, k_rope, scales, lengths, table, tree, out, lse, index, batch, request,
    split, splits, s, scale_log2e, PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
):  # fmt: skip
    """Latent attention of one tile of query rows over one split of the request's KV tiles.

    Args:
        q_latent: array [.., s*H, K]. q_rope: array [.., s*H, P].
        out: array [..., s*H, K]. lse: array [..., s*H].
        index: the row tile in both; its last entry is the number of the tile in the request.
        batch: of the tile in the queries. request: index into the cache.
        split, splits: which of how many equal splits.
        Others: see `attend_cache`.
    """
    row_tile = index[-1]
    q = load_column_parts(q_latent, batch, row_tile, BM, KP, PARTS)
    qr = q[0]
    if P > 0:
        qr = ct.load(q_rope, (batch, row_tile, 0), (1, BM, P), padding_mode=ct.PaddingMode.ZERO)
        qr = qr.reshape((BM, P))
    slots = c_kv.shape[1]
    if PAGE > 0:
        slots = table.shape[1] * PAGE
    length = clamped_length(lengths, request, slots)
    first_row = row_tile * BM
    lowest = visible(first_row, length, s, CAUSAL, H)
    if TREE == 1:
        lowest = length - s
    highest = visible(first_row + BM - 1, length, s, CAUSAL, H)
    if WINDOW > 0:
        # Splits divide the tiles that some query sees; a tile of rows may see fewer.
        oldest = max(window_begin(0, length, s, WINDOW, H), 0) // BN
        split_tiles = ct.cdiv(ct.cdiv(length, BN) - oldest, splits)
        first_tile = oldest + split * split_tiles
        last_tile = min(first_tile + split_tiles, ct.cdiv(max(highest, 0), BN))
        first_tile = max(first_tile, max(window_begin(first_row, length, s, WINDOW, H), 0) // BN)
    else:
        split_tiles = ct.cdiv(ct.cdiv(length, BN), splits)
        first_tile = split * split_tiles
        last_tile = min(first_tile + split_tiles, ct.cdiv(max(highest, 0), BN))
    acc_parts, m, l = attend_cache(
        q_latent, q_rope, batch, row_tile, q, qr,
        c_kv, k_rope, scales, table, tree, request, first_tile, max(lowest, 0) // BN,
        last_tile, first_row, length, s, length, scale_log2e,
        PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
    )  # fmt: skip
    store_column_parts(out, lse, index, acc_parts, m, l, BM, KP, PARTS)


def attend_heads(
    q_nope, q_rope, keys, values, k_rope, request, head, full_tile, last_tile,
    first_row, length, s, start, scale_log2e, CAUSAL, BM, BN, D, P,
):  # fmt: skip
    """Decompressed attention of BM query rows of one head over KV tiles 0..last_tile-1.

    The rope part of the keys is one array for all heads.

    Args:
        q_nope: [BM, D]. q_rope: [BM, P].
        keys, values: arrays [b, h, t, D]. k_rope: array [b, t, P].
        request, head: indices into the batch and the heads.
        full_tile, last_tile: tiles from full_tile on are masked.
        first_row: the tile's first query token.
        length, s: KV length and query tokens of the request.
        start: position of slot 0 of the arrays; 0 when they hold the whole request.

    Returns:
        (acc, m, l): unnormalised output [BM, D] float32, row maximum and row sum [BM, 1].
    """
    k_view = keys.slice(2, 0, length - start)
    v_view = values.slice(2, 0, length - start)
    r_view = k_rope.slice(1, 0, length - start)
    m = ct.full((BM, 1), SCORE_FLOOR, dtype=ct.float32)
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
        if needs_mask(j, full_tile):
            scores = mask_scores(scores, j, first_row, length, s, start, length, CAUSAL, 1, BM, BN)
        p, alpha, m, l = softmax_step(scores, m, l, scale_log2e)  # noqa: E741
        v = ct.load(v_view, (request, head, j, 0), (1, 1, BN, D), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(p.astype(values.dtype), v.reshape((BN, D)), acc * alpha)
    return acc, m, l


def normalise(acc, l):  # noqa: E741
    """Normalised output; a row that saw no key gives 0."""
    return acc / ct.where(l > 0.0, l, 1.0)


def log_sum_exp(m, l):  # noqa: E741
    """Natural LSE [BM, 1] of rows with maximum m (base 2) and sum l; -inf without a key."""
    seen = l > 0.0
    return ct.where(seen, (m + ct.log2(ct.where(seen, l, 1.0))) * LN_2, NEG_INF)


def store_column_parts(rows, lse, index, acc_parts, m, l, BM, KP, PARTS):  # noqa: E741
    """Store what `attend_cache` returned at the row tile `index`.

    Args:
        rows: array [..., s*H, K]. lse: array [..., s*H].
    """
    lead = ct.static_eval((1,) * (len(index) - 1))
    for i in ct.static_iter(range(PARTS)):
        out = normalise(acc_parts[i], l).astype(rows.dtype)
        ct.store(rows, (*index, i), out.reshape((*lead, BM, KP)))
    ct.store(lse, index, log_sum_exp(m, l).reshape((*lead, BM)))


def store_old_tokens(
    q_latent, q_rope, c_kv, k_rope, lengths, o_latent, lse, tile, row_tiles, s, n, scale_log2e,
    CAUSAL, H, BM, BN, KP, PARTS, P,
):  # fmt: skip
    """A latent work tile of mla_var6_plus: BM query rows over all but the n newest tokens.

    Args:
        q_latent: array [b, s*H, K]. q_rope: array [b, s*H, P].
        o_latent: array [b, s*H, K]. lse: array [b, s*H].
        tile, row_tiles: which one, in order of requests; tiles of a request.
        Others: see `attend_cache`. The cache is dense and in the dtype of the queries.
    """
    request = tile // row_tiles
    row_tile = tile % row_tiles
    q_parts = load_column_parts(q_latent, request, row_tile, BM, KP, PARTS)
    qr = ct.load(q_rope, (request, row_tile, 0), (1, BM, P), padding_mode=ct.PaddingMode.ZERO)
    qr = qr.reshape((BM, P))
    length = clamped_length(lengths, request, c_kv.shape[1])
    old = max(length - n, 0)
    first_row = row_tile * BM
    lowest = min(visible(first_row, length, s, CAUSAL, H), old)
    highest = min(visible(first_row + BM - 1, length, s, CAUSAL, H), old)
    acc_parts, m, l = attend_cache(
        q_latent, q_rope, request, row_tile, q_parts, qr,
        c_kv, k_rope, c_kv, c_kv, c_kv, request, 0, max(lowest, 0) // BN,
        ct.cdiv(max(highest, 0), BN), first_row, length, s, old, scale_log2e,
        0, 0, 0, 0, CAUSAL, H, BM, BN, KP, PARTS, P,
    )  # fmt: skip
    store_column_parts(o_latent, lse, (request, row_tile), acc_parts, m, l, BM, KP, PARTS)


def store_new_tokens(
    q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse, tile, query_tiles, slots, s, n,
    scale_log2e, CAUSAL, H, BM, BN, D, P,
):  # fmt: skip
    """A decompressed work tile of mla_var6_plus: BM queries of a head over the n newest tokens.

    Args:
        k_new, v_new: arrays [b, H, n, D]. k_rope_new: array [b, n, P].
        tile, query_tiles: which one, by request and head; tiles of a head and request.
        slots: most tokens of a request.
        Others: see `store_head_tile`.
    """
    query_tile = tile % query_tiles
    head = tile // query_tiles % H
    request = tile // (query_tiles * H)
    length = clamped_length(lengths, request, slots)
    store_head_tile(
        q_nope, q_rope, k_new, v_new, k_rope_new, o_new, lse, request, head, query_tile,
        length, s, max(length - n, 0), scale_log2e, CAUSAL, BM, BN, D, P,
    )  # fmt: skip


def store_head_tile(
    q_nope, q_rope, keys, values, k_rope, o, lse, request, head, query_tile, length, s, start,
    scale_log2e, CAUSAL, BM, BN, D, P,
):  # fmt: skip
    """A decompressed work tile: BM queries of one head over the tokens of a request from `start`.

    Args:
        q_nope: array [b, s, h, D]. q_rope: array [b, s, h, P].
        o: array [b, s, h, D]. lse: array [b, s, h].
        length: KV length of the request, at most `start` plus the slots of `keys`.
        Others: see `attend_heads`.
    """
    at = (request, query_tile, head, 0)
    q = ct.load(q_nope, at, (1, BM, 1, D), padding_mode=ct.PaddingMode.ZERO).reshape((BM, D))
    qr = ct.load(q_rope, at, (1, BM, 1, P), padding_mode=ct.PaddingMode.ZERO).reshape((BM, P))
    first_row = query_tile * BM
    lowest = visible(first_row, length, s, CAUSAL, 1) - start
    highest = visible(min(first_row + BM, s) - 1, length, s, CAUSAL, 1) - start
    acc, m, l = attend_heads(
        q, qr, keys, values, k_rope, request, head,
        max(lowest, 0) // BN, ct.cdiv(max(highest, 0), BN),
        first_row, length, s, start, scale_log2e, CAUSAL, BM, BN, D, P,
    )  # fmt: skip
    ct.store(o, at, normalise(acc, l).astype(o.dtype).reshape((1, BM, 1, D)))
    ct.store(lse, (request, query_tile, head), log_sum_exp(m, l).reshape((1, BM, 1)))
