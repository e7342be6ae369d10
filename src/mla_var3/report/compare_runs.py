"""The runs that a comparison is made of: read from records on disk, or made from results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem

if TYPE_CHECKING:
    from mla_var3.runtime.profiling import ProfileResult

RECORD = "params.json"
PROBLEM_KEYS = tuple(MlaProblem.__dataclass_fields__)
"""The fields of a plan that say what is computed; others say how."""


@dataclass(frozen=True)
class Figures:
    """Figures of one stage or of the whole; None for what a mode does not measure."""

    time_us: float | None = None
    predicted_us: float | None = None
    flops: float | None = None
    bytes: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        """Achieved TFLOP/s."""
        return self.flops / self.time_us / 1e6 if self.time_us and self.flops else None

    @property
    def gbps(self) -> float | None:
        """Achieved GB/s."""
        return self.bytes / self.time_us / 1e3 if self.time_us and self.bytes else None

    @property
    def of_roofline(self) -> float | None:
        """Predicted over measured time, in percent."""
        return (
            100 * self.predicted_us / self.time_us if self.time_us and self.predicted_us else None
        )


@dataclass(frozen=True)
class Run:
    """One side of a comparison.

    Attributes:
        label: what the columns call it.
        kernel, mode, device: from its record; the device is None for a prediction of no device.
        params: the plan's fields.
        total: the whole.
        stages: by stage name, in launch order.
        clocks: whether the clocks were locked; None where the record does not say.
        folder: where its artifacts lie.
    """

    label: str
    kernel: str
    mode: str
    device: str | None
    params: Mapping[str, Any]
    total: Figures
    stages: Mapping[str, Figures]
    clocks: bool | None = None
    folder: Path | None = None

    @property
    def problem(self) -> dict[str, Any]:
        """The fields that say what was computed."""
        return {key: self.params[key] for key in PROBLEM_KEYS if key in self.params}

    @property
    def choices(self) -> dict[str, Any]:
        """The other fields, such as n or splits."""
        skipped = (*PROBLEM_KEYS, "seed")
        return {key: value for key, value in self.params.items() if key not in skipped}


def load_run(path: Path) -> Run:
    """Read a profile output folder, or its record itself.

    Raises:
        InvalidArgumentError: there is no record, or not one that can be compared.
    """
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        below = sorted(path.rglob(RECORD)) if path.is_dir() else []
        hint = f"; there are {len(below)} below it, the last is {below[-1].parent}" if below else ""
        raise InvalidArgumentError(
            str(path), f"a profile output folder with {RECORD}", f"none{hint}"
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return run_of_record(record, file.parent)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(str(file), "the record of a profile", repr(error)) from error


def run_of_record(record: Mapping[str, Any], folder: Path | None = None) -> Run:
    """A run from its record; figures that the mode did not make are None."""
    device = record.get("device") or record.get("planned_for")
    total = _figures(record.get("total") or {})
    predictions = record.get("predicted_us") or {}
    if total.predicted_us is None and device in predictions:
        total = Figures(predicted_us=float(predictions[device]))
    clocks = record.get("clocks")
    return Run(
        label=str(record["kernel"]),
        kernel=str(record["kernel"]),
        mode=str(record["prof_type"]),
        device=device,
        params=dict(record["params"]),
        total=total,
        stages={str(s["name"]): _figures(s) for s in record.get("stages") or []},
        clocks=bool(clocks.get("locked")) if isinstance(clocks, Mapping) else None,
        folder=folder,
    )


def run_of_result(result: ProfileResult) -> Run:
    """A run from the result of a profile."""
    record = {
        **result.record,
        "total": vars(result.total),
        "stages": [vars(stage) for stage in result.stages],
    }
    return run_of_record(record, result.out_dir)


def _figures(data: Mapping[str, Any]) -> Figures:
    extra = dict(_numbers(data.get("extra") or {}))
    return Figures(
        time_us=_number(data.get("time_us")),
        predicted_us=_number(data.get("predicted_us")),
        flops=_number(data.get("flops")),
        bytes=_number(data.get("bytes")),
        extra=extra,
    )


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _numbers(extra: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The plain numbers among the extra figures of a mode, also those grouped under "metrics"."""
    metrics = extra.get("metrics")
    pairs = list(metrics.items()) if isinstance(metrics, Mapping) else []
    pairs += [(key, value) for key, value in extra.items() if key != "metrics"]
    return [(str(key), found) for key, value in pairs if (found := _number(value)) is not None]
