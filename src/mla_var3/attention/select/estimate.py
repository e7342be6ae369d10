"""What the cost model expects of each kernel for a call, from `q_nope` to the output.

On top of the roofline of `op/mla/cost` four things count here that decide between kernels: the
rates that a kernel has been seen to reach on the device (`conf/kernel_rates.json`), SMs that have
no tile to work on (the attention stage is stretched by the share of SM turns left empty), the work
that a call has to do because the cache lacks a decompressed copy, or has it as a ring that the
kernel does not read as it lies, and what the operations around a kernel take however small they
are. The mixes in CuTe DSL share the SMs out: with a ring, where the
model of that was fitted on the device, it counts instead; with a shared prefix the times add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mla_var3.attention.request.shape import CallShape
from mla_var3.conf.devices import DeviceSpec
from mla_var3.conf.kernel_rates import OWN_PRODUCT_QUERIES, kernel_rates
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
    q_absorption_cost,
    split_count,
)
from mla_var3.op.mla.model.mix import MixModel, mix_work
from mla_var3.op.mla.model.parameters import mix_parameters
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem, shared_prefix_attention_cost
from mla_var3.runtime.paths import split_full_name

WINDOW_STEP = 128
"""The model's n is rounded to whole tiles of the kernel that reads it."""
TILE_ROWS = 64
"""Query rows per tile of all kernels."""

PRODUCT_US = 5.0
"""What a matrix product of torch takes at least."""
OWN_PRODUCT_US = 2.0
"""The same of a product that the kernel launches itself."""
DECOMPRESSION_US, DECOMPRESSION_EFFORT = 25.0, 2.2
"""What decompressing in a call takes at least, and of its roofline: several operations of torch."""
MIX_US, MIX_EFFORT = 45.0, 1.08
"""The same of a mix, whose model is one of the attention alone at a well chosen n: fork and join of
its kernels, the operations around them, and an n that the cache decides."""
COMBINE_EFFORT = 1.6
"""What up-projection and merge of a mix take of their roofline."""
# The figures are those of docs/results/2026-11-15-nvidia-h200-attention-grid.md.

OWN_PRODUCTS = ("flash_mla", "cute-dsl")
"""The kernel that launches the products around it."""
FITTED_MIX = ("mla_var6_plus", "cute-dsl")
"""Kernel and language whose times the parameters in `conf/mix_rates.json` were fitted to."""
READ_RINGS = ("cute-dsl",)
"""Languages whose mix reads a ring as it lies."""
MIX_RATES = ("flash_mla", "flash_attention")
"""Kernels with the rates of a mix's two: for latent tokens, and for decompressed ones."""
SHARED_PREFIX = ("mla_var6_plus_v6", "cute-dsl")
"""The mix whose decompressed tokens are those that all requests share."""


@dataclass(frozen=True)
class Estimate:
    """Predicted times of one kernel in microseconds.

    Attributes:
        kernel_us: the kernel alone.
        others_us: projections, decompression and reordering around it.
        fill: share of SM turns of the attention stage that have a tile.
        choice: `n`, `prefix` or `splits` that the kernel would use.
        rated: whether the kernel's own rates on the device went in; otherwise it is the roofline.
    """

    kernel_us: float
    others_us: float
    fill: float
    choice: dict[str, int] = field(default_factory=dict)
    rated: bool = False

    @property
    def total_us(self) -> float:
        """The whole call."""
        return self.kernel_us + self.others_us


def estimate(
    kernel: str, shape: CallShape, spec: DeviceSpec, language: str = ""
) -> Estimate | None:
    """The estimate of a kernel; None for one that the cost model does not know.

    Args:
        kernel: its id; versions are estimated like their design.
        shape: the form of the call.
        spec: the device.
        language: its language, for rates that were recorded; without one the device's rates count.
    """
    problem = shape.problem()
    rates = spec.sustained_tflops(problem.dtype), spec.sustained_gbps
    seen = kernel_rates(spec.name, kernel, language)
    rated = seen is not None

    def kernel_us(cost: Cost, tiles: int) -> tuple[float, float]:
        """The attention stage, and the share of SM turns that have a tile."""
        fill = _fill(tiles, spec.sm_count)
        if seen is None:
            return time_us(cost) / fill, fill
        # One SM's tiles, with as many of them on each.
        even_us = cost.time_us(seen.tflops, seen.gbps) + tiles / spec.sm_count * seen.tile_us
        whole_us = even_us / fill
        if seen.cut_us is None or whole_us <= even_us + seen.cut_us:
            return seen.fixed_us + whole_us, fill
        return seen.fixed_us + even_us + seen.cut_us, 1.0

    def time_us(*costs: Cost) -> float:
        return sum(cost.time_us(*rates) for cost in costs)

    def decompression_us(tokens: int) -> float:
        return DECOMPRESSION_US + DECOMPRESSION_EFFORT * time_us(
            decompression_cost(problem, tokens)
        )

    projections = 0.0
    if not shape.latent_only:
        own = (kernel, language) == OWN_PRODUCTS and shape.b * shape.s <= OWN_PRODUCT_QUERIES
        projections = 2 * (OWN_PRODUCT_US if own else PRODUCT_US)
        projections += time_us(q_absorption_cost(problem), output_up_projection_cost(problem))
    latent_tiles = shape.b * _ceil_div(shape.s * shape.h, TILE_ROWS)
    head_tiles = shape.b * shape.h * _ceil_div(shape.s, TILE_ROWS)
    design = split_full_name(kernel)[0]
    if (kernel, language) == SHARED_PREFIX:
        return _shared_prefix(shape, spec)
    if design == "flash_mla":
        attention_us, fill = kernel_us(flash_mla_cost(problem), latent_tiles)
        return Estimate(attention_us, projections, fill, rated=rated)
    if design == "flash_mla_split_kv":
        splits = split_count(problem, spec.sm_count)
        attention, reduction = flash_mla_split_kv_stages(problem, splits)
        attention_us, fill = kernel_us(attention, latent_tiles * splits)
        total_us = attention_us + time_us(reduction)
        return Estimate(total_us, projections, fill, {"splits": splits}, rated)
    if design == "flash_attention":
        attention_us, fill = kernel_us(flash_attention_cost(problem), head_tiles)
        has_copy = shape.window >= shape.t and not shape.prefix
        others = 0.0 if has_copy else decompression_us(shape.t)
        return Estimate(attention_us, others, fill, rated=rated)
    if design == "mla_var6_plus":
        model = _fitted_mix(kernel, problem.dtype, spec, language)
        n, others = min(shape.window, shape.t), 0.0
        if not shape.window:
            if model is not None:
                n = model.best_n(problem, multiple=WINDOW_STEP)
            else:
                n = min(best_n(problem, *rates, multiple=WINDOW_STEP), shape.t)
            others += decompression_us(n) if n else 0.0
        elif shape.window < shape.t and language not in READ_RINGS:
            # Read and written once, to straighten the ring.
            others += time_us(Cost(0, 2 * decompressed_bytes(problem, n)))
        if model is not None:
            mix = model.at(problem, n)
            total_us = mix.attention_us
            latent, window = (kernel_rates(spec.name, name, language) for name in MIX_RATES)
            if n >= shape.t:
                total_us += window.fixed_us if window else 0.0
            else:
                absorption, combine = mix_work(problem, n).others
                turns = latent_tiles / mix.split if n else 0.0
                total_us += turns * latent.tile_us if latent else 0.0
                total_us += COMBINE_EFFORT * time_us(combine)
                total_us = MIX_EFFORT * total_us + MIX_US
                others += PRODUCT_US + time_us(absorption)
            return Estimate(total_us, others, 1.0, {"n": n}, rated=True)
        others += PRODUCT_US + time_us(q_absorption_cost(problem))
        tiles = (latent_tiles if n < shape.t else 0) + (head_tiles if n else 0)
        attention_us, fill = kernel_us(attention_block_specialized_cost(problem, n), tiles)
        total_us = attention_us + time_us(decompress_combine_cost(problem)) + MIX_US
        return Estimate(total_us, others, fill, {"n": n}, rated)
    return None


def _shared_prefix(shape: CallShape, spec: DeviceSpec) -> Estimate:
    """The shared tokens decompressed and read once, the others latent, on SMs of their own.

    Each kernel has some of the SMs for as long as the other has the rest, so their times on all
    SMs add up.
    """
    problem = shape.problem()
    device = spec.sustained_tflops(problem.dtype), spec.sustained_gbps
    shared = SharedPrefixProblem(problem, min(shape.prefix, shape.t))
    attention = shared_prefix_attention_cost(shared)
    own = tuple(length - min(shared.prefix, length) for length in problem.kv_lengths)
    latent = flash_mla_cost(replace(problem, lengths=own))
    window = Cost(attention.flops - latent.flops, attention.bytes - latent.bytes)
    seen = [kernel_rates(spec.name, name, SHARED_PREFIX[1]) for name in MIX_RATES]
    total_us = 0.0
    for cost, rates in zip((latent, window), seen, strict=True):
        if rates is None:
            total_us += cost.time_us(*device)
        elif cost.flops:
            total_us += cost.time_us(rates.tflops, rates.gbps) + rates.fixed_us
    others_us = 0.0
    if shared.own_tokens:
        total_us += decompress_combine_cost(problem).time_us(*device)
        others_us = q_absorption_cost(problem).time_us(*device)
    choice = {"prefix": shared.prefix}
    return Estimate(total_us, others_us, 1.0, choice, all(rates is not None for rates in seen))


def _fitted_mix(kernel: str, dtype: str, spec: DeviceSpec, language: str) -> MixModel | None:
    """The model of the mix where it was fitted to this kernel on this device."""
    if (kernel, language) != FITTED_MIX:
        return None
    parameters = mix_parameters(spec, dtype)
    return MixModel(parameters) if parameters.fitted else None


def _fill(tiles: int, sm_count: int) -> float:
    return tiles / (_ceil_div(tiles, sm_count) * sm_count)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
