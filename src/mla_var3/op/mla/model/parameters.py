"""The rates that the model of the mix computes with, each with where it comes from.

A parameter is the vendor's, measured, derived from those, assumed because nothing better is known,
or fitted to measured times of the kernels (`op/mla/model/fit.py`). Without a fit all of them follow
from the device table, and then they are limits of the hardware rather than properties of a kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import DTYPES, require_int

Origin = Literal["vendor", "measured", "derived", "assumed", "fitted"]

UNITS = {
    "latent_tflops_per_sm": "TFLOP/s per SM",
    "heads_tflops_per_sm": "TFLOP/s per SM",
    "chip_tflops": "TFLOP/s",
    "stream_gbps_per_sm": "GB/s per SM",
    "stream_gbps": "GB/s",
    "stream_sharpness": "",
    "together": "",
    "starvation": "",
    "launch_us": "µs",
}
"""Every parameter and its unit."""
ORIGINS: tuple[str, ...] = get_args(Origin)
_FIELDS = {"value", "unit", "origin", "source", "error"}
# Parameters of which zero is a value; the others divide something.
_MAY_BE_ZERO = ("together", "starvation", "launch_us")
# Beyond one, the best split would no longer be where both kinds of work end together.
_AT_MOST_ONE = ("starvation",)
# One SM alone is taken to draw this many times its even share of the memory bandwidth.
_ASSUMED_REACH = 2.0


@dataclass(frozen=True)
class Parameter:
    """One number and its provenance.

    Attributes:
        value: The number; positive, infinity allowed, for some also zero.
        origin: One of `ORIGINS`.
        source: What it was read from, computed from or fitted to.
        error: Relative standard error of a fitted value; None for the others.
    """

    value: float
    origin: Origin
    source: str
    error: float | None = None


@dataclass(frozen=True)
class MixParameters:
    """Everything the model knows about a device and the kernels on it.

    Attributes:
        dtype: Element type of the queries and the latent cache.
        sm_count: SMs to share out.
        latent_tflops_per_sm: Rate of the latent work on each SM that it gets.
        heads_tflops_per_sm: Most arithmetic of the decompressed work on each SM that it gets.
        chip_tflops: Most that all SMs do together; power limits it before the SMs do.
        stream_gbps_per_sm: What one SM alone draws from memory.
        stream_gbps: What all of them draw at most.
        stream_sharpness: Exponent of the bend between the two; infinity is a sharp corner.
        together: Least time of both kinds at once, as a share of that of one after the other, each
            on all SMs; they share the power and the memory's queue. 0 is no such limit.
        starvation: How much of its rate the latent work loses to SMs that stream, whose loads
            its own wait behind (`lost_to_stream`); from 0, nothing, to 1.
        launch_us: Fixed time of every kernel launch.
    """

    device: str
    dtype: str
    sm_count: int
    latent_tflops_per_sm: Parameter
    heads_tflops_per_sm: Parameter
    chip_tflops: Parameter
    stream_gbps_per_sm: Parameter
    stream_gbps: Parameter
    stream_sharpness: Parameter
    together: Parameter
    starvation: Parameter
    launch_us: Parameter

    def __post_init__(self) -> None:
        require_int("sm_count", self.sm_count, minimum=2)
        if self.dtype not in DTYPES:
            raise InvalidArgumentError("dtype", " or ".join(DTYPES), repr(self.dtype))
        for name, parameter in self.parameters.items():
            _require_parameter(name, parameter)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters by name."""
        return {name: getattr(self, name) for name in UNITS}

    @property
    def fitted(self) -> bool:
        """Whether any parameter was fitted to measured times."""
        return any(parameter.origin == "fitted" for parameter in self.parameters.values())

    def bandwidth_gbps(self, sms: float) -> float:
        """What a number of SMs draws from memory together.

        Proportional to the SMs while they are few, level once the memory is busy, and rounded off
        in between: `(x ** -q + B ** -q) ** (-1 / q)` with `x` for the SMs alone, `B` for the
        memory and `q` for the sharpness.
        """
        alone, most = sms * self.stream_gbps_per_sm.value, self.stream_gbps.value
        low, high = min(alone, most), max(alone, most)
        if low <= 0.0 or math.isinf(high):
            return low
        sharpness = self.stream_sharpness.value
        # The ratio never exceeds one, so that no power of it overflows.
        return float(low * (1.0 + (low / high) ** sharpness) ** (-1.0 / sharpness))

    def lost_to_stream(self, sms: int) -> float:
        """Share of its rate that the latent work loses while so many SMs stream.

        The share of the SMs that stream, to the power of one over the starvation: all of the rate
        when all of them do, next to nothing when few do. The power is at least one, so that a
        further SM of the latent work never delays its end.
        """
        starvation = self.starvation.value
        return float((sms / self.sm_count) ** (1.0 / starvation)) if starvation else 0.0

    def with_values(self, values: Mapping[str, float]) -> MixParameters:
        """A copy with other numbers, for a search; their provenance stays what it was."""
        changed: dict[str, Any] = {
            name: replace(parameter, value=values[name])
            for name, parameter in self.parameters.items()
            if name in values
        }
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields; infinity is the string "inf"."""
        plain = asdict(self)
        for name, unit in UNITS.items():
            value = plain[name]["value"]
            plain[name] |= {"value": "inf" if math.isinf(value) else value, "unit": unit}
        return plain


def derived_parameters(spec: DeviceSpec, dtype: str = "bfloat16") -> MixParameters:
    """Parameters from the device table alone, by burst rates where they were measured."""
    key = f"burst_{dtype}_float32_tflops"
    key = key if key in spec else f"peak_{dtype}_float32_tflops"
    chip = _from_table(spec, key)
    memory_key = "burst_dram_bw_GBps"
    stream = _from_table(spec, memory_key if memory_key in spec else "peak_dram_bw_GBps")
    sms = spec.sm_count
    per_sm = Parameter(chip.value / sms, "derived", f"{key} / {sms} SMs")
    return MixParameters(
        device=spec.name,
        dtype=dtype,
        sm_count=sms,
        latent_tflops_per_sm=per_sm,
        heads_tflops_per_sm=per_sm,
        chip_tflops=chip,
        stream_gbps_per_sm=Parameter(
            _ASSUMED_REACH * stream.value / sms,
            "assumed",
            f"{_ASSUMED_REACH:g} times an SM's even share of the bandwidth: half of the SMs "
            "saturate the memory",
        ),
        stream_gbps=stream,
        stream_sharpness=Parameter(math.inf, "assumed", "a sharp corner, as in a roofline"),
        together=Parameter(0.0, "assumed", "both kinds of work run beside each other unhindered"),
        starvation=Parameter(0.0, "assumed", "the stream holds up no loads of the latent work"),
        launch_us=Parameter(0.0, "assumed", "launches are left out, as in a roofline"),
    )


def shipped_path() -> Path:
    """Fitted parameters that ship with the package."""
    return Path(str(resources.files("mla_var3.conf") / "mix_rates.json"))


def mix_parameters(
    spec: DeviceSpec, dtype: str = "bfloat16", path: Path | None = None
) -> MixParameters:
    """The parameters of a device: fitted ones where there are any, else derived ones.

    A file of fitted parameters at `path`, used instead of the shipped one, must have an entry for
    the device and dtype: another device's rates are never used.
    """
    for parameters in _shipped(shipped_path()) if path is None else read_parameters(path):
        if (parameters.device, parameters.dtype) == (spec.name, dtype):
            return parameters
    if path is not None:
        raise InvalidArgumentError(str(path), f"parameters of {spec.name} in {dtype}", "none")
    return derived_parameters(spec, dtype)


@lru_cache(maxsize=4)
def _shipped(path: Path) -> tuple[MixParameters, ...]:
    """Read once: the choice of a kernel asks again and again."""
    return tuple(read_parameters(path))


def read_parameters(path: Path) -> list[MixParameters]:
    """Reads a file of parameters: a JSON list of what `MixParameters.to_dict` gives."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(str(path), "a readable file", error.strerror) from error
    except ValueError as error:
        raise InvalidArgumentError(str(path), "parameters in JSON", error) from error
    if not isinstance(entries, list):
        raise InvalidArgumentError(str(path), "a list of parameters", type(entries).__name__)
    try:
        return [_from_dict(entry) for entry in entries]
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"{path}: {error.argument}", error.expected, error.got
        ) from error


def _from_dict(entry: object) -> MixParameters:
    if not isinstance(entry, dict):
        raise InvalidArgumentError("entry", "an object", type(entry).__name__)
    wanted = {"device", "dtype", "sm_count", *UNITS}
    if set(entry) != wanted:
        raise InvalidArgumentError("entry", ", ".join(sorted(wanted)), ", ".join(sorted(entry)))
    parameters = {}
    for name, unit in UNITS.items():
        fields = entry[name]
        if not isinstance(fields, dict) or set(fields) != _FIELDS:
            raise InvalidArgumentError(name, "value, unit, origin, source and error", fields)
        if fields["unit"] != unit:
            raise InvalidArgumentError(f"{name}: unit", repr(unit), repr(fields["unit"]))
        value = math.inf if fields["value"] == "inf" else fields["value"]
        parameters[name] = Parameter(value, fields["origin"], fields["source"], fields["error"])
    return MixParameters(str(entry["device"]), entry["dtype"], entry["sm_count"], **parameters)


def _from_table(spec: DeviceSpec, key: str) -> Parameter:
    entry = spec.entry(key)
    kinds: dict[str, Origin] = {"measured": "measured", "derived": "derived"}
    return Parameter(spec[key], kinds.get(entry.kind, "vendor"), f"{key}: {entry.source}")


def _require_parameter(name: str, parameter: object) -> None:
    if not isinstance(parameter, Parameter):
        raise InvalidArgumentError(name, "a Parameter", repr(parameter))
    value = parameter.value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    least = "zero or a positive number" if name in _MAY_BE_ZERO else "a positive number"
    if not number or not (value > 0 or (value == 0 and name in _MAY_BE_ZERO)):
        raise InvalidArgumentError(name, least, repr(value))
    if name in _AT_MOST_ONE and value > 1:
        raise InvalidArgumentError(name, "a number from 0 to 1", repr(value))
    if parameter.origin not in ORIGINS:
        raise InvalidArgumentError(f"{name}: origin", " or ".join(ORIGINS), repr(parameter.origin))
