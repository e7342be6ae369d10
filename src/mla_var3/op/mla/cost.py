"""FLOPs and bytes of the MLA kernels, and the choices that follow from them: `n` and splits.

FLOPs count every pair of a query and a KV token of the request, whether the causal mask hides it
or not; with per-request lengths the sum over them replaces `b * t` in the formulas. Bytes count
each input once and each output once, the least any kernel can move. The derivation is in
docs/cost-analysis.md; times are in `op/mla/model`.
"""

from __future__ import annotations

from bisect import bisect_left

from mla_var3.op.cost import Cost
from mla_var3.op.mla.problem import MlaProblem, require_int
from mla_var3.op.mla.window.formats import PLAIN, WindowForm

_FLOAT32 = 4
# Beyond this many waves of tiles a last, partly filled wave costs less than a quarter of the
# time, while each further split writes and reads another float32 partial output.
_MAX_SPLIT_WAVES = 4


def flash_attention_cost(problem: MlaProblem, tokens: int | None = None) -> Cost:
    """Attention over decompressed keys and values; the rope keys are shared by the heads.

    `tokens` are those attended in the whole batch; None for all.
    """
    d, p, v = problem.d, problem.p, problem.v
    tokens = problem.total_tokens if tokens is None else tokens
    flops = 2 * problem.h * problem.s * tokens * (d + p + v)
    cache = problem.h * tokens * (d + v) + tokens * p
    elements = _rows(problem) * (d + p) + cache + _rows(problem) * v
    return Cost(flops, elements * problem.element_size + _lse_bytes(problem))


def flash_mla_cost(
    problem: MlaProblem, token_bytes: int | None = None, tokens: int | None = None
) -> Cost:
    """Attention over the latent cache, from latent queries to the latent output.

    `token_bytes` are those of a token of an 8-bit cache; None for one in the problem's dtype.
    """
    k, p, element = problem.k, problem.p, problem.element_size
    tokens = problem.total_tokens if tokens is None else tokens
    flops = 2 * problem.h * problem.s * tokens * (2 * k + p)
    cache = tokens * ((k + p) * element if token_bytes is None else token_bytes)
    return Cost(flops, _rows(problem) * (2 * k + p) * element + cache + _lse_bytes(problem))


def flash_mla_split_kv_cost(
    problem: MlaProblem, splits: int, token_bytes: int | None = None
) -> Cost:
    """`flash_mla` through float32 partial outputs: both stages together."""
    attention, reduction = flash_mla_split_kv_stages(problem, splits, token_bytes)
    return attention + reduction


def flash_mla_split_kv_stages(
    problem: MlaProblem, splits: int, token_bytes: int | None = None
) -> tuple[Cost, Cost]:
    """The attention stage, which writes the partials, and the reduction, which reads them.

    The reduction's FLOPs are left out: it has two per element and runs at memory speed.
    `token_bytes` as of `flash_mla_cost`.
    """
    require_int("splits", splits, minimum=1)
    whole = flash_mla_cost(problem, token_bytes)
    partials = splits * (_rows(problem) * problem.k * _FLOAT32 + _lse_bytes(problem))
    result = _rows(problem) * problem.k * problem.element_size + _lse_bytes(problem)
    return Cost(whole.flops, whole.bytes - result + partials), Cost(0, partials + result)


def attention_block_specialized_cost(problem: MlaProblem, n: int, form: WindowForm = PLAIN) -> Cost:
    """First stage of mla_var6_plus: old tokens latent, the `n` newest decompressed.

    Its 2bhstp + 2bhsn(d+v) + 4bhsok FLOPs are those its TFLOP/s are quoted on.
    Reads the queries in all three forms, the latent cache of the old tokens and the window of the
    new ones; writes a latent and a decompressed partial in the problem's dtype, each with its LSE.
    """
    return mix_cost(problem, *_old_new(problem, n), form)


def decompress_combine_cost(problem: MlaProblem) -> Cost:
    """Second stage of mla_var6_plus: up-projects the latent partial and merges both by lse."""
    rows, k, v = _rows(problem), problem.k, problem.v
    elements = rows * k + rows * v + problem.h * k * v + rows * v
    return Cost(2 * rows * k * v, elements * problem.element_size + 3 * _lse_bytes(problem))


def query_projection_cost(problem: MlaProblem) -> Cost:
    """`q_latent = q_nope @ w_uk`."""
    rows, k, d = _rows(problem), problem.k, problem.d
    elements = rows * d + problem.h * d * k + rows * k
    return Cost(2 * rows * d * k, elements * problem.element_size)


def output_up_projection_cost(problem: MlaProblem) -> Cost:
    """`o = o_latent @ w_uv`."""
    rows, k, v = _rows(problem), problem.k, problem.v
    elements = rows * k + problem.h * k * v + rows * v
    return Cost(2 * rows * k * v, elements * problem.element_size)


def decompression_cost(problem: MlaProblem, n: int) -> Cost:
    """Keys and values of the `n` newest tokens of each request, and their rope part copied."""
    _, new = _old_new(problem, n)
    h, k, p, both = problem.h, problem.k, problem.p, problem.d + problem.v
    elements = new * (k + p) + h * k * both + new * (h * both + p)
    return Cost(2 * new * h * k * both, elements * problem.element_size)


def decompressed_bytes(problem: MlaProblem, n: int, form: WindowForm = PLAIN) -> int:
    """Memory of the decompressed window: keys, values and rope keys of `n` slots per request."""
    problem.require_window(n)
    return problem.b * n * form.token_bytes(problem)


def best_n(problem: MlaProblem, peak_tflops: float, peak_gbps: float, multiple: int = 1) -> int:
    """The window with the shortest attention stage if both paths overlap perfectly.

    FLOP time and byte time are both linear in the number of new tokens, so their maximum is
    smallest at one end or where they meet. Only multiples of `multiple` up to `t` are considered.

    Returns:
        The best `n`; of equally good ones the smallest, because the window costs memory.
    """
    require_int("multiple", multiple, minimum=1)
    peaks = peak_tflops, peak_gbps

    def cost(n: int) -> Cost:
        return attention_block_specialized_cost(problem, n)

    # Past the longest request a larger window holds nothing more.
    most = min(problem.t // multiple, _ceil_div(problem.longest, multiple)) * multiple
    windows, bound = range(0, most + 1, multiple), cost(0).bound(*peaks)
    turn = bisect_left(windows, True, key=lambda n: cost(n).bound(*peaks) != bound)
    candidates: list[int] = [0, *windows[max(turn - 1, 0) : turn + 1], windows[-1]]
    return min(candidates, key=lambda n: cost(n).time_us(*peaks))


def split_count(
    problem: MlaProblem, sm_count: int = 132, rows_per_tile: int = 64, kv_tile: int = 64
) -> int:
    """How many splits of the KV tokens flash_mla_split_kv makes.

    Time is taken as waves of tiles, one per SM, times steps of `kv_tile` KV tokens per split, for
    the longest request.

    Returns:
        The split count of least estimated time, the smallest of equally good ones; never more
        than there are KV tiles.
    """
    sizes = {"sm_count": sm_count, "rows_per_tile": rows_per_tile, "kv_tile": kv_tile}
    for argument, value in sizes.items():
        require_int(argument, value, minimum=1)
    tiles = problem.b * _ceil_div(problem.s * problem.h, rows_per_tile)
    kv_tiles = max(1, _ceil_div(problem.longest, kv_tile))
    most = max(1, min(kv_tiles, _ceil_div(_MAX_SPLIT_WAVES * sm_count, tiles)))

    def steps(splits: int) -> int:
        return _ceil_div(tiles * splits, sm_count) * _ceil_div(kv_tiles, splits)

    return min(range(1, most + 1), key=steps)


def _rows(problem: MlaProblem) -> int:
    return problem.b * problem.s * problem.h


def _lse_bytes(problem: MlaProblem) -> int:
    return _rows(problem) * _FLOAT32


def _old_new(problem: MlaProblem, n: int) -> tuple[int, int]:
    """Old and new tokens of the whole batch."""
    new = problem.tokens_up_to(n)
    return problem.total_tokens - new, new


def mix_cost(
    problem: MlaProblem, old: int, new: int, form: WindowForm, stored: int | None = None
) -> Cost:
    """Attention over `old` latent and `new` decompressed tokens of the whole batch.

    The latter are stored once for each request, or `stored` in all.
    """
    h, s, d, p, k, v = problem.h, problem.s, problem.d, problem.p, problem.k, problem.v
    flops = 2 * h * s * ((old + new) * p + new * (d + v) + 2 * old * k)
    queries = _rows(problem) * (d + k + p)
    partials = _rows(problem) * (k + v)
    elements = queries + old * (k + p) + partials
    window = (new if stored is None else stored) * form.token_bytes(problem)
    return Cost(flops, elements * problem.element_size + window + 2 * _lse_bytes(problem))


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
