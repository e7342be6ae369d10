"""What work costs in energy on a device, and the power that it may draw: `energy.json`.

A kernel that runs without a pause takes at least its energy over the power limit, however fast its
units are: the clock falls until it does. The figures are for kernels of this package and hold what
the card draws in the meantime for everything else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from mla_var3.errors import InvalidArgumentError

_NUMBERS = (
    "latent_joules_per_tflop",
    "heads_joules_per_tflop",
    "joules_per_gb",
    "power_limit_w",
)


@dataclass(frozen=True)
class EnergyRates:
    """Energy of work on a device.

    Attributes:
        latent_joules_per_tflop: of products in absorbed attention, per 10**12 operations.
        heads_joules_per_tflop: of products in decompressed attention, which come on top of the
            bytes that are read for them.
        joules_per_gb: of moving 10**9 bytes from or to device memory.
        power_limit_w: what the device may draw for long.
        source: the record that shows it.
        date: when that was.
    """

    latent_joules_per_tflop: float
    heads_joules_per_tflop: float
    joules_per_gb: float
    power_limit_w: float
    source: str
    date: str

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(name, "a positive number", getattr(self, name))


@lru_cache(maxsize=1)
def _table() -> dict[str, EnergyRates]:
    text = (resources.files("mla_var3.conf") / "energy.json").read_text(encoding="utf-8")
    fields = {*_NUMBERS, "source", "date"}
    table = {}
    for device, values in json.loads(text).items():
        if set(values) != fields:
            raise InvalidArgumentError(f"energy.json, {device}", sorted(fields), sorted(values))
        table[device] = EnergyRates(**values)
    return table


def energy_rates(device: str) -> EnergyRates | None:
    """The rates of a device; None where none were measured."""
    return _table().get(device)
