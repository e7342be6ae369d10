"""What kernels of this package reach on a device, and what their work costs in energy.

`kernel_rates.json` has the rates of each kernel version on a device, read off the record that the
entry names: `flash_mla:cute-dsl` in 16 bits, `flash_mla:cute-dsl:fp8` over an 8-bit cache.
`energy.json` has the energy of the work and the power limit of a device: a kernel that runs without
a pause takes at least its energy over that limit, because the clock falls until it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from mla_var3.conf import read_json, shipped
from mla_var3.errors import UnknownNameError

OWN_PROJECTION_QUERIES = 256
"""Queries of all requests up to which a kernel that can do so launches the projections itself. On
an H200 a call takes the GPU no longer with them, up to this number; at 1024 queries and 128 heads
the projections take 132 instead of 109 us, and the host has time to launch those of torch."""
PROJECTED_D, PROJECTED_V = (64, 128, 192, 256), (64, 128, 256)
"""d and v of the projections that such a kernel can launch itself."""


@dataclass(frozen=True)
class KernelRates:
    """What a kernel version reaches on a device.

    Attributes:
        tflops: Matrix rate where it is compute bound.
        gbps: Read rate where it is memory bound.
        overlap: Exponent of the norm by which compute and memory time add up where both count;
            None for the larger of the two, a perfect overlap.
        fixed_us: Time of a launch with next to nothing to do.
        tile_us: Time of a query tile beside its KV tokens, on the SM that has it: loading the
            queries, writing the output.
        cut_us: Time that splitting the KV tokens takes to fill all SMs whatever the shape; None for
            a kernel that has as many CTAs as query tiles.
        error: Relative root mean square error of estimated call times on the rows of `source`, the
            record that shows it.
    """

    tflops: float
    gbps: float
    fixed_us: float
    error: float
    source: str
    date: str
    overlap: float | None = None
    tile_us: float = 0.0
    cut_us: float | None = None

    def work_us(self, flops: float, moved_bytes: float) -> float:
        """Microseconds of so much work, evenly spread over the SMs."""
        times = flops / (self.tflops * 1e6), moved_bytes / (self.gbps * 1e3)
        least, most = sorted(times)
        if self.overlap is None or most == 0.0:
            return most
        return float(most * (1.0 + (least / most) ** self.overlap) ** (1.0 / self.overlap))


@dataclass(frozen=True)
class EnergyRates:
    """Energy of the kernels' work on a device, everything else that the card draws included.

    Attributes:
        latent_joules_per_tflop: Latent attention, per 10**12 operations.
        fp8_joules_per_tflop: Latent attention with 8-bit products, by format of the cache
            (docs/results/2026-11-16-nvidia-h200-fp8-latent.md).
        heads_joules_per_tflop: Decompressed attention, likewise, beside the bytes that it reads.
        joules_per_gb: Moving 10**9 bytes from or to device memory.
    """

    latent_joules_per_tflop: float
    fp8_joules_per_tflop: Mapping[str, float] = field(hash=False)
    heads_joules_per_tflop: float
    joules_per_gb: float
    power_limit_w: float
    source: str
    date: str

    def joules(
        self,
        latent_flops: float,
        heads_flops: float,
        moved_bytes: float,
        cache_dtype: str | None = None,
    ) -> float:
        """Energy of latent and decompressed attention that move so many bytes.

        `cache_dtype` is the format of an 8-bit latent cache that is multiplied in 8 bits.

        Raises:
            UnknownNameError: The energy of that format was not measured.
        """
        latent = self.latent_joules_per_tflop
        if cache_dtype is not None:
            known = self.fp8_joules_per_tflop
            if cache_dtype not in known:
                hint = f"Energies were measured in {self.source}"
                raise UnknownNameError("cache format with an energy", cache_dtype, known, hint)
            latent = known[cache_dtype]
        operations = latent * latent_flops
        operations += self.heads_joules_per_tflop * heads_flops
        return operations / 1e12 + self.joules_per_gb * moved_bytes / 1e9

    def least_us(self, joules: float) -> float:
        """Microseconds that an energy takes at the power limit."""
        return joules / self.power_limit_w * 1e6


def kernel_rates(
    device: str, kernel: str, language: str, cache_dtype: str | None = None
) -> KernelRates | None:
    """The rates of a kernel version, over a 16-bit or an 8-bit cache; None where not recorded."""
    suffix = "" if cache_dtype is None else f":{cache_dtype}"
    return _kernels().get(device, {}).get(f"{kernel}:{language}{suffix}")


def energy_rates(device: str) -> EnergyRates | None:
    """The energy rates of a device; None where none were measured."""
    return _energies().get(device)


@cache
def _kernels() -> dict[str, dict[str, KernelRates]]:
    return {
        device: {kernel: KernelRates(**values) for kernel, values in kernels.items()}
        for device, kernels in read_json(shipped("kernel_rates.json"), "a table").items()
    }


@cache
def _energies() -> dict[str, EnergyRates]:
    entries = read_json(shipped("energy.json"), "a table")
    return {device: EnergyRates(**values) for device, values in entries.items()}
