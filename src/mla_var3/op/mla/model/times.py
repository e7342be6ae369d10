"""How long a kernel and a call take on a device: the one model behind every prediction.

Named quantities, in microseconds:

- kernel time: the launches of a kernel, from its own inputs to its own output;
- call time: from `q_nope` to `o`, the kernel time and the work around it (`Estimate.around`):
  projections, and decompressing where the cache lacks the tokens that a kernel reads;
- burst: over milliseconds on a cool card;
- steady: repeated for a second or more. A kernel then takes at least its energy over the power
  limit. Known where energies were measured; advice follows it.

An estimate is fitted where the rates of the kernel on the device were recorded, and names the
record. A cuTile kernel on an 8-bit cache multiplies in 16 bits: until it is timed there, it has the
rates of its 16-bit cache (`BORROWED`). Otherwise a time is ideal: the work at the vendor's peaks, a
lower bound by which kernels are not ranked. `op/mla/model/designs.py` has the estimate of each
design.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.conf.kernel_rates import KernelRates, energy_rates, kernel_rates
from mla_var3.op.cost import Bound, Cost
from mla_var3.op.mla.problem import MlaProblem

FP8_SPEED = 2.0
"""Peak of 8-bit products over that of 16-bit ones."""
IDEAL = "ideal, vendor peaks"
"""What heads times of kernels that were never timed on a device."""
BORROWED = "estimate, rates of a 16-bit cache"
"""The same for kernels that were timed there on a 16-bit cache, not on an 8-bit one."""


@dataclass(frozen=True)
class Workload:
    """One attention call as the model sees it.

    Attributes:
        window: Newest tokens of each request that the cache keeps decompressed; None for as many
            as the kernel reads, so that no call decompresses any.
        prefix: Shared first tokens that the cache keeps decompressed.
        shared: First tokens that the requests of a group share.
        groups: Groups, each with first tokens of its own.
        latent_only: Whether the caller does the projections.
        n: Decompressed tokens that a mix reads; None where the window or the model decides.
        cache_dtype: Format of an 8-bit latent cache; None for one in the problem's dtype.
        token_bytes: Bytes of a token of such a cache.
        window_dtype: "fp8" for a window in 8 bits; None for one in the problem's dtype.
        whole_copy: Whether a window of all tokens is known to hold them; a call that reads it
            decompresses them otherwise, because only the device knows which it lacks.
    """

    problem: MlaProblem
    window: int | None = None
    prefix: int = 0
    latent_only: bool = False
    n: int | None = None
    shared: int = 0
    groups: int = 1
    cache_dtype: str | None = None
    token_bytes: int | None = None
    window_dtype: str | None = None
    whole_copy: bool = True


@dataclass(frozen=True)
class Target:
    """A kernel version on a device.

    Attributes:
        language: Language key; empty for any.
        dtype: Of the products.
        rates: What the version, or the base version of its design, reached there; None if it was
            never timed.
        cache_dtype: Format of the 8-bit latent cache that it reads; None for 16 bits.
        borrowed: Whether the rates are those on a 16-bit cache: the kernel was not timed in 8 bits.
    """

    kernel: str
    language: str
    spec: DeviceSpec
    dtype: str
    rates: KernelRates | None = None
    cache_dtype: str | None = None
    borrowed: bool = False

    def of(self, kernel: str) -> Target:
        """Another kernel in the same language on the same device."""
        rates = kernel_rates(self.spec.name, kernel, self.language, self.cache_dtype)
        borrowed = rates is None and self.cache_dtype is not None and not self.has_8_bit_products
        if borrowed:
            rates = kernel_rates(self.spec.name, kernel, self.language)
        return replace(self, kernel=kernel, rates=rates, borrowed=borrowed and rates is not None)

    @property
    def has_8_bit_products(self) -> bool:
        """Whether it multiplies an 8-bit cache in 8 bits; cuTile converts it to 16 bits."""
        return self.cache_dtype is not None and self.language != "cutile-dsl"

    @property
    def other_rates(self) -> tuple[float, float]:
        """TFLOP/s and GB/s of work without rates of its own: burst, or the peaks if ideal."""
        ideal = self.rates is None
        return self.spec.peak_rates(self.dtype) if ideal else self.spec.burst_rates(self.dtype)


@dataclass(frozen=True)
class Estimate:
    """Predicted times of one kernel for one workload, in microseconds.

    Attributes:
        kernel, language: The kernel version; the language is empty for an ideal time of any.
        kernel_us: Kernel time in a burst.
        limit_us: Kernel time that its energy takes at the power limit; None where energies are
            unknown.
        around: What the call adds, by name.
        bound: What limits its attention.
        fitted: Whether recorded rates went in; otherwise the times are ideal.
        error: Relative error to expect of a fitted time.
        source: The record of the rates, or what a time without them assumes.
        choice: `n`, `prefix` or `splits` that the kernel would use.
        mixes: Whether both kinds of attention run at the same time.
    """

    kernel: str
    language: str
    kernel_us: float
    limit_us: float | None
    around: dict[str, float]
    cost: Cost
    bound: Bound
    fitted: bool
    error: float
    source: str
    choice: dict[str, int] = field(default_factory=dict)
    mixes: bool = False

    @property
    def around_us(self) -> float:
        """Time of the work around the kernel."""
        return sum(self.around.values())

    @property
    def steady_kernel_us(self) -> float | None:
        """Kernel time when repeated; None where energies are unknown, or the time is ideal."""
        if self.limit_us is None or not self.fitted:
            return None
        return max(self.kernel_us, self.limit_us)

    @property
    def call_us(self) -> float:
        """Call time in a burst."""
        return self.kernel_us + self.around_us

    @property
    def steady_call_us(self) -> float | None:
        """Call time when repeated; None where energies are unknown."""
        return None if self.steady_kernel_us is None else self.steady_kernel_us + self.around_us

    @property
    def advised_us(self) -> float:
        """The call time that advice goes by: steady where it is known."""
        return self.call_us if self.steady_call_us is None else self.steady_call_us

    @property
    def basis(self) -> str:
        """What the times rest on, in a few words."""
        return f"fitted, {self.source}" if self.fitted else self.source

    def to_dict(self) -> dict[str, Any]:
        times = ("kernel_us", "call_us", "steady_kernel_us", "steady_call_us")
        return {
            **{name: getattr(self, name) for name in ("kernel", "language", *times)},
            **{"around_us": dict(self.around), "flops": self.cost.flops, "bytes": self.cost.bytes},
            **{name: getattr(self, name) for name in ("bound", "fitted", "error", "source")},
            **self.choice,
        }


Estimator = Callable[[Workload, Target], Estimate]


def power_limit_us(
    device: str,
    latent: Cost | None = None,
    heads: Cost | None = None,
    others_us: float = 0.0,
    cache_dtype: str | None = None,
) -> float | None:
    """Time of a kernel by the energy of its attention at the power limit; None where unknown.

    `others_us` is the time of its other launches, `cache_dtype` the format of an 8-bit latent cache
    that is multiplied in 8 bits.
    """
    rates = energy_rates(device)
    if rates is None or (cache_dtype is not None and cache_dtype not in rates.fp8_joules_per_tflop):
        return None
    latent, heads = latent or Cost(0, 0), heads or Cost(0, 0)
    moved = latent.bytes + heads.bytes
    joules = rates.joules(latent.flops, heads.flops, moved, cache_dtype)
    return rates.least_us(joules) + others_us


def attention_us(cost: Cost, tiles: int, target: Target, filled: float = 1.0) -> float:
    """Burst time of an attention kernel with so many query tiles, a share of their rows `filled`.

    A kernel that splits its work over the KV tokens does so where that is faster than whole tiles
    on some of the SMs. Those in cuTile do not, and compute whole tiles.
    """
    rates, sms = target.rates, target.spec.sm_count
    whole_tiles = target.language == "cutile-dsl"  # which splits only in a design of its own
    turns = -(-tiles // sms)
    fill = tiles / (turns * sms)  # share of SM turns that have a work tile
    if rates is None:
        tflops, gbps = target.other_rates
        if target.has_8_bit_products:
            tflops *= FP8_SPEED
        return cost.time_us(tflops * fill if whole_tiles else tflops, gbps)
    if whole_tiles:
        work_us = rates.work_us(cost.flops / (fill * filled), cost.bytes)
        return rates.fixed_us + turns * rates.tile_us + work_us
    even_us = rates.work_us(cost.flops, cost.bytes) + tiles / sms * rates.tile_us
    whole_us = even_us / fill
    if rates.cut_us is not None:
        whole_us = min(whole_us, even_us + rates.cut_us)
    return rates.fixed_us + whole_us
