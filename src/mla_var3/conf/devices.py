"""The device table: what each GPU can do, every value with its unit, kind, source and date.

The table is `devices.json` beside this module. The environment variable HYPER_MLA_DEVICES may name
another file of the same form, whose entries are added; an entry of the same name replaces the
shipped one, and `DeviceSpec.origin` says where a device came from. Such an entry may be flat, keys
with plain numbers; what it leaves out is then taken from the shipped entry. An entry that is `like`
another has its facts of the compute capability; float16 has the rates of bfloat16 where no others
are given. A value that is neither published nor measured is left out: a missing key is an error
where it is needed.

Rates come in three kinds. Peak rates are the vendor's. Burst rates were measured over milliseconds
on a cool card. Steady rates were measured over a second or more, at the power limit.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from mla_var3.conf import read_json, shipped
from mla_var3.errors import InvalidArgumentError, UnknownNameError

ENVIRONMENT_VARIABLE: Final = "HYPER_MLA_DEVICES"

KINDS: Final = {
    "spec": "printed in the source",
    "dense": "the source's figure for dense matrices, half of the one it prints for sparse ones",
    "measured": "measured, or reported by a driver",
    "derived": "computed from other published values",
    "given": "a plain number in a file of the user",
}

_LOG = logging.getLogger(__name__)

_UNITS: Final = {
    **{
        f"{kind}_{dtype}_float32_tflops": "TFLOP/s"
        for kind in ("peak", "burst", "steady")
        for dtype in ("bfloat16", "float16")
    },
    "peak_dram_bw_GBps": "GB/s",
    "burst_dram_bw_GBps": "GB/s",
    "sm_count": "SM",
    "sm_clock_MHz": "MHz",
    "mem_clock_MHz": "MHz",
    "tensor_flops_per_clock_per_sm": "FLOP/clock/SM",
    "shared_memory_per_sm_KiB": "KiB",
    "shared_memory_per_block_KiB": "KiB",
    "l2_cache_MiB": "MiB",
    "registers_per_sm": "32-bit register",
    "dram_GiB": "GiB",
    "compute_capability": "",
    "targets": "",
}
"""Every key of an entry with its unit; the last two are no numbers."""
_INTEGERS: Final = (
    "sm_count", "tensor_flops_per_clock_per_sm", "shared_memory_per_sm_KiB",
    "shared_memory_per_block_KiB", "registers_per_sm",
)  # fmt: skip
_FIELDS: Final = ("value", "unit", "kind", "source", "date")
_OF_CAPABILITY: Final = (
    "compute_capability", "targets", "shared_memory_per_sm_KiB", "shared_memory_per_block_KiB",
    "registers_per_sm",
)  # fmt: skip
REQUIRED_KEYS: Final = (
    "peak_bfloat16_float32_tflops", "peak_dram_bw_GBps", "sm_count", "shared_memory_per_block_KiB",
    "compute_capability", "targets",
)  # fmt: skip


@dataclass(frozen=True)
class Value:
    """One recorded value, of one of `KINDS`, and where it comes from; names have no unit."""

    value: float | str | tuple[str, ...]
    unit: str
    kind: str
    source: str
    date: str


@dataclass(frozen=True)
class DeviceSpec:
    """One device of the table, by its name in nvidia-smi, and the file that it comes from.

    `spec["peak_dram_bw_GBps"]` gives a recorded number.
    """

    name: str
    aliases: tuple[str, ...]
    values: Mapping[str, Value]
    origin: str

    def entry(self, key: str) -> Value:
        """The recorded value of a key with its provenance; UnknownNameError where there is none."""
        if key not in self.values:
            hint = f"Values are recorded in {self.origin}"
            raise UnknownNameError(f"value of {self.name}", key, self.values, hint)
        return self.values[key]

    def __getitem__(self, key: str) -> float:
        """The number recorded for a key."""
        value = self.entry(key).value
        if isinstance(value, (str, tuple)):
            raise InvalidArgumentError("key", "the name of a number", f"{key!r} ({value!r})")
        return float(value)

    def get(self, key: str, default: float) -> float:
        """The number recorded for a key, or the default where there is none."""
        return self[key] if key in self.values else default

    def __contains__(self, key: object) -> bool:
        """Whether a value is recorded."""
        return key in self.values

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""
        major, minor = str(self.entry("compute_capability").value).split(".")
        return int(major), int(minor)

    @property
    def targets(self) -> tuple[str, ...]:
        """GPU codes to compile for, the portable one first."""
        value = self.entry("targets").value
        return value if isinstance(value, tuple) else (str(value),)

    @property
    def target(self) -> str:
        """The portable GPU code, for example "sm_90"."""
        return self.targets[0]

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""
        return int(self["sm_count"])

    @property
    def peak_gbps(self) -> float:
        """Vendor's memory bandwidth in GB/s."""
        return self["peak_dram_bw_GBps"]

    @property
    def burst_gbps(self) -> float:
        """Measured memory bandwidth in GB/s; the peak where none was measured."""
        return self.get("burst_dram_bw_GBps", self.peak_gbps)

    @property
    def has_burst(self) -> bool:
        """Whether both bfloat16 rate and bandwidth were measured, so that neither falls back."""
        return {"burst_bfloat16_float32_tflops", "burst_dram_bw_GBps"} <= set(self.values)

    @property
    def shared_memory_per_block_bytes(self) -> int:
        """Most shared memory one thread block can opt in to."""
        return int(self["shared_memory_per_block_KiB"]) * 1024

    def peak_tflops(self, dtype: str) -> float:
        """Vendor's dense matrix rate in TFLOP/s for a 16-bit dtype with float32 accumulation."""
        return self[_rate_key("peak", dtype)]

    def burst_tflops(self, dtype: str) -> float:
        """Measured matrix rate in TFLOP/s; the peak where none was measured for the dtype."""
        return self.get(_rate_key("burst", dtype), self.peak_tflops(dtype))

    def peak_rates(self, dtype: str) -> tuple[float, float]:
        """TFLOP/s and GB/s of an ideal time: the vendor's peaks, which no kernel exceeds."""
        return self.peak_tflops(dtype), self.peak_gbps

    def burst_rates(self, dtype: str) -> tuple[float, float]:
        """TFLOP/s and GB/s as measured in a burst; each the peak where none was measured."""
        return self.burst_tflops(dtype), self.burst_gbps

    def ridge_point(self, dtype: str = "bfloat16") -> float:
        """FLOPs per byte at which compute and memory peaks balance."""
        return self.peak_tflops(dtype) * 1e3 / self.peak_gbps


def devices_path() -> Path:
    """The table that ships with the package."""
    return shipped("devices.json")


def load_devices(path: str | Path | None = None) -> dict[str, DeviceSpec]:
    """The devices by name: of a given table, or of the shipped one and HYPER_MLA_DEVICES.

    Raises:
        InvalidArgumentError: A file cannot be used; names the file, device, key and problem.
    """
    if path is not None:
        return dict(_load((str(path),)))
    extra = os.environ.get(ENVIRONMENT_VARIABLE)
    return dict(_load((str(devices_path()), *([extra] if extra else []))))


def device_spec(name: str) -> DeviceSpec:
    """Finds a device by name or alias, whatever the case."""
    if not isinstance(name, str):
        raise InvalidArgumentError("device_name", "the name of a device", repr(name))
    devices = load_devices()
    wanted = _normalised(name)
    for spec in devices.values():
        if wanted in {_normalised(known) for known in (spec.name, *spec.aliases)}:
            return spec
    hint = (
        f"To add it, write an entry like those of {devices_path()} into a JSON file and point "
        f"{ENVIRONMENT_VARIABLE} at it; required keys: {', '.join(REQUIRED_KEYS)}, "
        f"each with {', '.join(_FIELDS)}"
    )
    raise UnknownNameError("device", name, devices, hint)


def _rate_key(prefix: str, dtype: str) -> str:
    if dtype not in ("bfloat16", "float16"):
        raise InvalidArgumentError("dtype", "'bfloat16' or 'float16'", repr(dtype))
    return f"{prefix}_{dtype}_float32_tflops"


def _normalised(name: str) -> str:
    return " ".join(name.lower().split())


@lru_cache(maxsize=8)
def _load(paths: tuple[str, ...]) -> Mapping[str, DeviceSpec]:
    devices: dict[str, DeviceSpec] = {}
    for path in paths:
        for name, spec in _read(path, devices).items():
            if name in devices:
                _LOG.warning("%s: the entry of %s replaces it", name, path)
            devices[name] = spec
    owners: dict[str, str] = {}
    for spec in devices.values():
        for known in (spec.name, *spec.aliases):
            owner = owners.setdefault(_normalised(known), spec.name)
            if owner != spec.name:
                where = f"{spec.origin}: {spec.name}: aliases"
                got = f"{known!r}, which is also {owner}"
                raise InvalidArgumentError(where, "names that no other device has", got)
    return MappingProxyType(devices)


def _read(path: str, known: Mapping[str, DeviceSpec]) -> dict[str, DeviceSpec]:
    table = read_json(path, "a readable device table")
    if not isinstance(table, dict) or not table:
        raise InvalidArgumentError(path, "an object with one entry per device", _kind_of(table))
    found: dict[str, DeviceSpec] = {}
    for name, entry in table.items():
        found[name] = _device(path, name, entry, {**known, **found})
    return found


def _device(path: str, name: str, entry: object, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    where, shipped = f"{path}: {name}", known.get(name)
    if not isinstance(entry, dict):
        raise InvalidArgumentError(where, "an object with one entry per key", _kind_of(entry))
    entry = dict(entry)
    aliases, like = entry.pop("aliases", None), entry.pop("like", None)
    if aliases is not None and not (
        isinstance(aliases, list) and all(isinstance(each, str) and each for each in aliases)
    ):
        raise InvalidArgumentError(f"{where}: aliases", "a list of names", repr(aliases))
    values = {key: _value(f"{where}: {key}", key, raw, path) for key, raw in entry.items()}
    if shipped is not None and any(value.kind == "given" for value in values.values()):
        values = {**shipped.values, **values}
        aliases = shipped.aliases if aliases is None else aliases
    if like is not None:
        if not isinstance(like, str) or like not in known:
            raise InvalidArgumentError(f"{where}: like", "a device above it", repr(like))
        shared = known[like].values
        values = {key: shared[key] for key in _OF_CAPABILITY if key in shared} | values
    missing = [key for key in REQUIRED_KEYS if key not in values]
    if missing:
        expected = "the keys " + ", ".join(REQUIRED_KEYS)
        raise InvalidArgumentError(where, expected, "none for " + ", ".join(missing))
    bfloat16, float16 = (_rate_key("peak", dtype) for dtype in ("bfloat16", "float16"))
    values.setdefault(float16, values[bfloat16])
    return DeviceSpec(name, tuple(aliases or ()), MappingProxyType(values), path)


def _value(where: str, key: str, raw: object, path: str) -> Value:
    if key not in _UNITS:
        nearest = difflib.get_close_matches(key, _UNITS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidArgumentError(where, f"one of the keys {', '.join(_UNITS)}", f"{key!r}{hint}")
    unit = _UNITS[key]
    if not isinstance(raw, dict):
        return Value(_checked(where, key, raw), unit, "given", path, "")
    if set(raw) != set(_FIELDS):
        raise InvalidArgumentError(where, ", ".join(_FIELDS), ", ".join(sorted(raw)) or "nothing")
    kind, source, date = raw["kind"], raw["source"], raw["date"]
    kinds = [known for known in KINDS if known != "given"]
    for name, right, expected in (
        ("kind", kind in kinds, " or ".join(kinds)),
        ("source", isinstance(source, str) and source.strip(), "the title of a source"),
        ("date", re.fullmatch(r"\d{4}(-\d{2}){0,2}", str(date)), "YYYY, YYYY-MM or YYYY-MM-DD"),
        ("unit", raw["unit"] == unit, repr(unit)),
    ):
        if not right:
            raise InvalidArgumentError(f"{where}: {name}", expected, repr(raw[name]))
    return Value(_checked(f"{where}: value", key, raw["value"]), unit, kind, source, date)


def _checked(where: str, key: str, value: object) -> float | str | tuple[str, ...]:
    if key == "compute_capability":
        if isinstance(value, str) and re.fullmatch(r"\d+\.\d+", value):
            return value
        raise InvalidArgumentError(where, 'a string such as "9.0"', repr(value))
    if key == "targets":
        codes = value if isinstance(value, list) else []
        if codes and all(re.fullmatch(r"sm_\d+[af]?", str(code)) for code in codes):
            return tuple(codes)
        raise InvalidArgumentError(where, 'a list of GPU codes such as "sm_90"', repr(value))
    integer = key in _INTEGERS
    plain = isinstance(value, int if integer else (int, float)) and not isinstance(value, bool)
    if plain and isinstance(value, (int, float)) and 0 < value < float("inf"):
        return value
    expected = "a positive integer" if integer else "a positive number"
    raise InvalidArgumentError(where, expected, repr(value))


def _kind_of(value: object) -> str:
    return f"{type(value).__name__} {value!r:.40}"


_SHARED_KIB: Final = {"sm_86": 99, "sm_87": 163, "sm_88": 99, "sm_110": 227}
"""Shared memory per CTA of targets without a device in the table; CUDA C++ Programming Guide,
Technical Specifications per Compute Capability."""


def shared_memory_limit(target: str) -> int | None:
    """Bytes of shared memory that one CTA may use on every known device of a target, if known."""
    known = [spec for spec in load_devices().values() if spec.target == target]
    if not known and target in _SHARED_KIB:
        return _SHARED_KIB[target] * 1024
    return min((spec.shared_memory_per_block_bytes for spec in known), default=None)
