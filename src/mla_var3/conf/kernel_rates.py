"""How fast each kernel has been seen to compute and to read on a device: `kernel_rates.json`.

The roofline says what a device allows; what a kernel makes of it differs from kernel to kernel. An
entry holds the rates that the named record shows for one version of a kernel, for estimates of
other shapes. A kernel or device without an entry is estimated by the roofline alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from mla_var3.errors import InvalidArgumentError

OWN_PRODUCT_QUERIES = 256
"""Queries of all requests up to which a kernel that can do so launches the products around it. On
an H200 a whole call takes the GPU no longer with them, up to this number; at 1024 queries and 128
heads the products take 132 instead of 109 us, and the host has time for those of torch."""

_FIELDS = {"tflops", "gbps", "fixed_us", "tile_us", "cut_us", "source", "date"}


@dataclass(frozen=True)
class KernelRates:
    """What a kernel reaches on a device.

    Attributes:
        tflops: matrix rate where it is compute bound.
        gbps: rate of reading where it is memory bound.
        fixed_us: time of a launch with next to nothing to do.
        tile_us: time of a tile of query rows beside its tokens, on the SM that has it: its queries
            come and its output goes.
        cut_us: time that it takes to share its work out over all SMs whatever the shape, by cutting
            it over the tokens; None for a kernel that has as many blocks as tiles.
        source: the record that shows it.
        date: when that was.
    """

    tflops: float
    gbps: float
    fixed_us: float
    tile_us: float
    cut_us: float | None
    source: str
    date: str

    def __post_init__(self) -> None:
        for name in ("tflops", "gbps"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(name, "a positive number", getattr(self, name))
        for name in ("fixed_us", "tile_us", "cut_us"):
            if not (getattr(self, name) or 0.0) >= 0:
                raise InvalidArgumentError(name, "a number of at least 0", getattr(self, name))


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, KernelRates]]:
    text = (resources.files("mla_var3.conf") / "kernel_rates.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, KernelRates]] = {}
    for device, kernels in json.loads(text).items():
        for kernel, values in kernels.items():
            if set(values) != _FIELDS:
                raise InvalidArgumentError(
                    f"kernel_rates.json, {device}, {kernel}", sorted(_FIELDS), sorted(values)
                )
            table.setdefault(device, {})[kernel] = KernelRates(**values)
    return table


def kernel_rates(device: str, kernel: str, language: str) -> KernelRates | None:
    """The rates of a kernel version on a device; None where none were recorded."""
    return _table().get(device, {}).get(f"{kernel}:{language}")
