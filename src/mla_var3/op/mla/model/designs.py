"""The estimate of each design; `estimate` finds it by the kernel's id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.conf.kernel_rates import OWN_PROJECTION_QUERIES, PROJECTED_D, PROJECTED_V
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import (
    attention_block_specialized_cost,
    best_n,
    decompress_combine_cost,
    decompressed_bytes,
    decompression_cost,
    flash_attention_cost,
    flash_mla_cost,
    flash_mla_split_kv_stages,
    output_up_projection_cost,
    query_projection_cost,
    split_count,
)
from mla_var3.op.mla.model.mix import MixModel, mix_work
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.model.times import (
    BORROWED,
    IDEAL,
    Estimate,
    Estimator,
    Target,
    Workload,
    attention_us,
    power_limit_us,
)
from mla_var3.op.mla.prefix.problem import (
    SharedPrefixProblem,
    latent_shared_passes,
    overlap_sms,
    shared_prefix_attention_cost,
)
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import FP8, PLAIN, WindowForm

WINDOW_STEP = 128
"""The model's n is rounded to whole KV blocks of the kernel that reads it."""
TILE_ROWS = 64
"""Query rows per query tile of all kernels."""

# What the work around a kernel takes on a fitted device: so many microseconds, and so many times
# its roofline at the burst rates. Projections: docs/results/2026-11-15-nvidia-h200-suite-mix.md;
# the others: docs/results/2026-11-15-nvidia-h200-attention-grid.md.
QUERY_PROJECTION = (3.0, 1.3)
OUTPUT_PROJECTION = (4.0, 1.07)
OWN_PROJECTION = (2.0, 1.0)
"""Of a projection that the kernel launches itself."""
DECOMPRESSION = (25.0, 2.2)
MIXED_COMBINE = (0.0, 1.6)
"""Up-projection and merge after both kinds of attention."""
MIX_US, MIX_EFFORT = 45.0, 1.08
"""What a mix takes beyond the model of its attention: fork and join of its kernels, and an n that
the cache decides."""
MIX_ERROR = 0.15
"""Relative error of the mix on the rows of the attention grid."""

LAYOUT_US = 8.0
"""Two small launches that lay out the prefix of a cache, in every call. Not measured."""

OWN_PROJECTIONS = ("flash_mla", "cute-dsl")
"""The kernel that launches the projections itself, over 16-bit and 8-bit caches."""
READS_RINGS = ("cute-dsl",)
"""Languages whose mix reads a ring in the order of its slots."""
_VERSION = re.compile(r"_v\d+$")


def estimate(kernel: str, work: Workload, spec: DeviceSpec, language: str = "") -> Estimate | None:
    """The estimate of a kernel version; None for one that the model does not know.

    A version without an estimator or rates of its own is estimated like the base version of its
    design. Without a language the times are ideal.
    """
    design = _VERSION.sub("", kernel)
    estimator = _VERSIONS.get((kernel, language)) or _DESIGNS.get(design)
    if estimator is None:
        return None
    target = Target(kernel, language, spec, work.problem.dtype, cache_dtype=work.cache_dtype)
    own = target.of(kernel)
    if own.rates is None:
        own = replace(target.of(design), kernel=kernel)
    return estimator(work, own)


def design_estimates(problem: MlaProblem, spec: DeviceSpec) -> dict[str, Estimate]:
    """One estimate per design, with every decompressed token that it reads in the cache.

    On a device with recorded rates each design is shown in its fastest language, on others its
    times are ideal.
    """
    work, found = Workload(problem), {}
    for design in _DESIGNS:
        options = [estimate(design, work, spec, language) for language in LANGUAGES]
        fitted = [option for option in options if option is not None and option.fitted]
        ideal = estimate(design, work, spec)
        assert ideal is not None
        found[design] = min(fitted, key=lambda option: option.advised_us, default=ideal)
    return found


def _flash_mla(work: Workload, target: Target) -> Estimate:
    cost, tiles = flash_mla_cost(work.problem, work.token_bytes), _latent_tiles(work.problem)
    time_us = attention_us(cost, tiles, target, _filled(work.problem, tiles))
    return _estimate(target, time_us, [cost], _projections(work, target), latent=cost)


def _flash_mla_split_kv(work: Workload, target: Target) -> Estimate:
    problem, tiles = work.problem, _latent_tiles(work.problem)
    splits = split_count(problem, target.spec.sm_count)
    costs = flash_mla_split_kv_stages(problem, splits, work.token_bytes)
    time_us = attention_us(costs[0], tiles * splits, target, _filled(problem, tiles))
    around, choice = _projections(work, target), {"splits": splits}
    merge_us = costs[1].time_us(*target.other_rates)
    return _estimate(
        target, time_us, costs, around, latent=costs[0], merge_us=merge_us, choice=choice
    )


def _flash_attention(work: Workload, target: Target) -> Estimate:
    problem, cost = work.problem, flash_attention_cost(work.problem)
    tiles = _head_tiles(problem)
    time_us = attention_us(cost, tiles, target, _filled(problem, tiles))
    has_copy = work.window is None or (work.window >= problem.t and not work.prefix)
    has_copy = has_copy and work.window_dtype is None and work.whole_copy
    around = {} if has_copy else {"decompression": _decompression_us(problem, problem.t, target)}
    return _estimate(target, time_us, [cost], around, heads=cost)


def _mix(work: Workload, target: Target, form: WindowForm = PLAIN) -> Estimate:
    """The n newest tokens decompressed, the older ones latent."""
    model = fitted_mix(target, form)
    n, around = _window(work, target, model)
    if model is None:
        return _mix_by_rates(work.problem, n, form, target, around)
    return _mix_by_model(work.problem, n, model, target, around)


def _mix_by_model(
    problem: MlaProblem, n: int, model: MixModel, target: Target, around: dict[str, float]
) -> Estimate:
    """The mix in CuTe DSL at one `n`, on a device with the parameters of `model`.

    The ends are the pure paths: nothing decompressed is latent attention and the merge kernel, a
    window that holds every token is decompressed attention.
    """
    whole = n >= problem.longest
    at, parts = model.at(problem, n), mix_work(problem, n, model.form)
    burst, combine = target.spec.burst_rates(target.dtype), decompress_combine_cost(problem)
    latent, heads = target.of("flash_mla"), target.of("flash_attention")
    merge_us, costs = 0.0, [parts.latent + parts.heads]
    if n == 0 and latent.rates is not None:
        time_us = attention_us(parts.latent, _latent_tiles(problem), latent)
        merge_us = _work_us(OUTPUT_PROJECTION, combine, burst)
    elif whole and model.form is PLAIN and heads.rates is not None:
        time_us = attention_us(parts.heads, _head_tiles(problem), heads)
    elif whole:
        time_us = at.attention_us + (heads.rates.fixed_us if heads.rates else 0.0)
    else:
        time_us = at.attention_us
        if n and latent.rates is not None:
            time_us += _latent_tiles(problem) / at.split * latent.rates.tile_us
        time_us = MIX_EFFORT * time_us + MIX_US
        merge_us = MIX_EFFORT * _work_us(MIXED_COMBINE, combine, burst)
    if not whole:
        query_us = _work_us(QUERY_PROJECTION, query_projection_cost(problem), burst)
        around, costs = {**around, "query projection": query_us}, [*costs, combine]
    work = {"latent": parts.latent, "heads": parts.heads}
    found = _estimate(target, time_us, costs, around, **work, merge_us=merge_us, choice={"n": n})
    return _by_parameters(found, model, mixes=n > 0 and not whole)


def _mix_by_rates(
    problem: MlaProblem, n: int, form: WindowForm, target: Target, around: dict[str, float]
) -> Estimate:
    """The mix of cuTile, or anywhere at the vendor's peaks."""
    parts, longest = mix_work(problem, n, form), problem.longest
    work, choice = {"latent": parts.latent, "heads": parts.heads}, {"n": n}
    if target.rates is None and n >= longest:
        # A lower bound: some kernels then leave out projections and merge, others do not.
        time_us = attention_us(parts.heads, _head_tiles(problem), target)
        return _estimate(target, time_us, [parts.heads], around, heads=parts.heads, choice=choice)
    around["query projection"] = _part_us(target, QUERY_PROJECTION, query_projection_cost(problem))
    tiles = _latent_tiles(problem) if n < longest or n == 0 else 0
    tiles += _head_tiles(problem) if n else 0
    attention = attention_block_specialized_cost(problem, n, form)
    combine = decompress_combine_cost(problem)
    merge_us = combine.time_us(*target.other_rates) + (MIX_US if target.rates else 0.0)
    time_us, costs = attention_us(attention, tiles, target), [attention, combine]
    found = _estimate(target, time_us, costs, around, **work, merge_us=merge_us, choice=choice)
    return replace(found, mixes=0 < n < longest)


def _shared_prefix(work: Workload, target: Target) -> Estimate:
    """The shared tokens decompressed and read once, then the others latent.

    The rates count the work of both kernels together.
    """
    problem = work.problem
    shared = SharedPrefixProblem(problem, min(work.prefix, problem.t))
    attention = shared_prefix_attention_cost(shared)
    latent = flash_mla_cost(problem, tokens=shared.own_tokens)
    time_us = attention.time_us(*target.other_rates)
    if target.rates is not None:
        time_us = target.rates.fixed_us + target.rates.work_us(attention.flops, attention.bytes)
    around, costs, merge_us = {}, [attention], 0.0
    if shared.own_tokens:
        costs.append(decompress_combine_cost(problem))
        merge_us = costs[1].time_us(*target.other_rates)
        projection = query_projection_cost(problem)
        around["query projection"] = _part_us(target, QUERY_PROJECTION, projection)
    heads = Cost(attention.flops - latent.flops, attention.bytes - latent.bytes)
    work_of, choice = {"latent": latent, "heads": heads}, {"prefix": shared.prefix}
    return _estimate(target, time_us, costs, around, **work_of, merge_us=merge_us, choice=choice)


def _grouped_prefix(work: Workload, target: Target) -> Estimate:
    """The same for several groups of about equal size, one after the other."""
    groups = min(work.groups, work.problem.b)
    lengths = work.problem.kv_lengths[::groups]
    one = replace(work, problem=replace(work.problem, b=len(lengths), lengths=lengths))
    found = _shared_prefix(one, replace(target.of("mla_var6_plus_v6"), kernel=target.kernel))
    return replace(
        found,
        kernel_us=groups * found.kernel_us,
        limit_us=None if found.limit_us is None else groups * found.limit_us,
        around={name: groups * time_us for name, time_us in found.around.items()},
        cost=Cost(groups * found.cost.flops, groups * found.cost.bytes),
    )


def _latent_prefix(work: Workload, target: Target) -> Estimate:
    """Latent attention that reads shared tokens once: two passes of `flash_mla`, merged.

    Short ones run at the same time: one kernel's work, and what a second launch costs.
    """
    if not work.shared:
        return replace(_flash_mla(work, target.of("flash_mla")), kernel=target.kernel)
    problem, target = work.problem, replace(target.of("flash_mla"), kernel=target.kernel)
    shared = SharedPrefixProblem(problem, min(work.shared, problem.t), min(work.groups, problem.b))
    own, of_groups, merge = latent_shared_passes(shared)
    costs = [flash_mla_cost(each, work.token_bytes) for each in (own, of_groups)]
    tiles = [_latent_tiles(each) for each in (own, of_groups)]
    own_tokens, shared_tokens = (
        count * sum(each.kv_lengths) / each.b
        for count, each in zip(tiles, (own, of_groups), strict=True)
    )
    if (
        target.language == "cute-dsl"
        and target.rates is not None
        and work.cache_dtype is None
        and overlap_sms(shared_tokens, own_tokens, target.spec.sm_count)
    ):
        time_us = attention_us(costs[0] + costs[1], sum(tiles), target) + target.rates.fixed_us
    else:
        passes = zip(costs, tiles, strict=True)
        time_us = sum(attention_us(cost, count, target) for cost, count in passes)
    around = _projections(work, target) | ({"layout": LAYOUT_US} if work.prefix else {})
    merge_us, latent = _part_us(target, QUERY_PROJECTION, merge), costs[0] + costs[1]
    costs, choice = [*costs, merge], {"prefix": shared.prefix}
    return _estimate(
        target, time_us, costs, around, latent=latent, merge_us=merge_us, choice=choice
    )


def window_estimate(problem: MlaProblem, n: int, model: MixModel) -> Estimate:
    """The best CuTe DSL kernel for a window of n tokens: a pure path at the ends, else the mix."""
    spec, fitted = device_spec(model.parameters.device), model.parameters.fitted
    whole = n >= problem.longest
    name = "mla_var6_plus_v5" if model.form is FP8 else "mla_var6_plus"
    if n == 0 or (whole and model.form is PLAIN):
        name = "flash_mla" if n == 0 else "flash_attention"
    target = Target(name, "cute-dsl" if fitted else "", spec, problem.dtype)
    if not fitted or (target.of("flash_mla").rates is None and (n == 0 or whole)):
        at, parts = model.at(problem, n), mix_work(problem, n, model.form)
        around = {"projections and merge": at.others_us} if at.others_us else {}
        costs, choice = [parts.latent + parts.heads], {"n": n}
        latent, heads = parts.latent, parts.heads
        found = _estimate(
            target, at.attention_us, costs, around, latent=latent, heads=heads, choice=choice
        )
        return _by_parameters(found, model, mixes=n > 0 and not whole)
    if name.startswith("mla_var6_plus"):
        return _mix_by_model(problem, n, model, target, {})
    return _DESIGNS[name](Workload(problem), target.of(name))


def _by_parameters(found: Estimate, model: MixModel, mixes: bool) -> Estimate:
    """An estimate by the parameters of the mix, which may be fitted or not."""
    if not model.parameters.fitted:
        return replace(found, limit_us=None, mixes=mixes)
    source = model.parameters.chip_tflops.source
    return replace(found, fitted=True, error=MIX_ERROR, source=source, mixes=mixes)


_DESIGNS: dict[str, Estimator] = {
    "flash_mla": _flash_mla,
    "flash_mla_split_kv": _flash_mla_split_kv,
    "flash_attention": _flash_attention,
    "mla_var6_plus": _mix,
}
DESIGNS = frozenset(_DESIGNS)
"""The designs of `design_estimates`."""
_VERSIONS: dict[tuple[str, str], Estimator] = {
    ("mla_var6_plus_v5", "cute-dsl"): partial(_mix, form=FP8),
    ("mla_var6_plus_v6", "cute-dsl"): _shared_prefix,
    ("mla_var6_plus_v6_groups", "cute-dsl"): _grouped_prefix,
    ("flash_mla_prefix", "cute-dsl"): _latent_prefix,
}
LANGUAGES = ("cute-dsl", "cutile-dsl")


def fitted_mix(target: Target, form: WindowForm = PLAIN) -> MixModel | None:
    """The model of the mix where it was fitted to kernels of the language on the device."""
    if target.language != "cute-dsl":
        return None
    parameters = mix_parameters(target.spec, target.dtype)
    return MixModel(parameters, form) if parameters.fitted else None


def _window(work: Workload, target: Target, model: MixModel | None) -> tuple[int, dict[str, float]]:
    """Decompressed tokens that a mix reads, and what the call adds to have them."""
    problem = work.problem
    if work.n is not None:
        n = work.n
    elif work.window:
        n = min(work.window, problem.t)
    elif model is None:
        rates = target.spec.burst_rates(problem.dtype)
        n = min(best_n(problem, *rates, multiple=WINDOW_STEP), problem.t)
    elif work.window is None:
        n = model.worthwhile_n(problem, multiple=WINDOW_STEP)
    else:
        n = model.best_n(problem, multiple=WINDOW_STEP)
    around = {}
    if (work.window == 0 and n) or (work.window and not work.whole_copy):
        around["decompression"] = _decompression_us(problem, n, target)
    if work.window and target.language not in READS_RINGS:
        moved = Cost(0, 2 * decompressed_bytes(problem, n))
        around["ring in order"] = moved.time_us(*target.other_rates)
    return n, around


def _projections(work: Workload, target: Target) -> dict[str, float]:
    if work.latent_only:
        return {}
    problem = work.problem
    own = (target.kernel, target.language) == OWN_PROJECTIONS
    own = own and problem.b * problem.s <= OWN_PROJECTION_QUERIES
    own = own and problem.d in PROJECTED_D and problem.v in PROJECTED_V
    return {
        name: _part_us(target, OWN_PROJECTION if own else effort, cost(problem))
        for name, effort, cost in (
            ("query projection", QUERY_PROJECTION, query_projection_cost),
            ("output projection", OUTPUT_PROJECTION, output_up_projection_cost),
        )
    }


def _decompression_us(problem: MlaProblem, tokens: int, target: Target) -> float:
    return _part_us(target, DECOMPRESSION, decompression_cost(problem, tokens))


def part_us(
    spec: DeviceSpec, effort: tuple[float, float], cost: Cost, dtype: str, *, fitted: bool
) -> float:
    """Work around a kernel: as it was seen to take, or ideal."""
    if not fitted:
        return cost.time_us(*spec.peak_rates(dtype))
    return _work_us(effort, cost, spec.burst_rates(dtype))


def _part_us(target: Target, effort: tuple[float, float], cost: Cost) -> float:
    fitted = target.rates is not None or fitted_mix(target) is not None
    return part_us(target.spec, effort, cost, target.dtype, fitted=fitted)


def _work_us(effort: tuple[float, float], cost: Cost, rates: tuple[float, float]) -> float:
    return effort[0] + effort[1] * cost.time_us(*rates)


def _estimate(
    target: Target,
    attention_us: float,
    costs: Sequence[Cost],
    around: dict[str, float],
    *,
    latent: Cost | None = None,
    heads: Cost | None = None,
    merge_us: float = 0.0,
    choice: dict[str, int] | None = None,
) -> Estimate:
    """An estimate from the time of the attention, the work of each kind, and that of the merge."""
    rates = target.rates
    limit_us = None  # the energy of an 8-bit cache in 16-bit products was not measured
    if target.cache_dtype is None or target.has_8_bit_products:
        limit_us = power_limit_us(target.spec.name, latent, heads, merge_us, target.cache_dtype)
    return Estimate(
        kernel=target.kernel,
        language=target.language,
        kernel_us=attention_us + merge_us,
        limit_us=limit_us,
        around=around,
        cost=sum(costs[1:], start=costs[0]),
        bound=costs[0].bound(*target.other_rates),
        fitted=rates is not None and not target.borrowed,
        error=0.0 if rates is None or target.borrowed else rates.error,
        source=BORROWED if target.borrowed else IDEAL if rates is None else rates.source,
        choice=choice or {},
    )


def _latent_tiles(problem: MlaProblem) -> int:
    return problem.b * -(-problem.s * problem.h // TILE_ROWS)


def _filled(problem: MlaProblem, tiles: int) -> float:
    """Share of the rows of so many query tiles that are query rows."""
    return problem.b * problem.s * problem.h / (tiles * TILE_ROWS)


def _head_tiles(problem: MlaProblem) -> int:
    return problem.b * problem.h * -(-problem.s // TILE_ROWS)
