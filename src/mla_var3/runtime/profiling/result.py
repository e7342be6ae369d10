"""What a profiling run returns: its mode, the figures per stage, and the record."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.errors import UnknownNameError, UnsupportedError
from mla_var3.runtime.check import CheckResult


class NsightProfType(enum.Enum):
    """The profiling modes, by their command line names."""

    ANNOTATION = "annotation"
    EVENT = "event"
    NCU = "ncu"
    NSYS = "nsys"
    STATIC = "static"
    DISABLED = "disabled"

    @property
    def module(self) -> str:
        return f"{__package__}.{self.value}"


@dataclass
class StageFigures:
    """Figures of one stage or of the whole run.

    Attributes:
        time_us: median time in microseconds; None where nothing was timed (static mode).
        spread_us: half the distance between the 10th and the 90th percentile.
        flops, bytes: what the algorithm needs.
        predicted_us: ideal time on the device named in the result, at the vendor's peaks.
        extra: mode-specific figures.
    """

    name: str
    time_us: float | None
    spread_us: float | None
    flops: float
    bytes: float
    predicted_us: float | None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def tflops(self) -> float | None:
        return self.flops / self.time_us / 1e6 if self.time_us else None

    @property
    def gbps(self) -> float | None:
        return self.bytes / self.time_us / 1e3 if self.time_us else None

    @property
    def intensity(self) -> float | None:
        return self.flops / self.bytes if self.bytes else None

    @property
    def of_roofline_pct(self) -> float | None:
        """Ideal over measured time, in percent."""
        if not self.time_us or not self.predicted_us:
            return None
        return 100 * self.predicted_us / self.time_us


@dataclass
class ProfileResult:
    """What a profiling run returns.

    Attributes:
        total: figures of the whole runtime object.
        stages: figures per kernel.
        out_dir: folder of the artifacts; None in disabled mode.
        check: outcome of the check; None when none ran.
        record: environment, parameters and figures, JSON-ready.
    """

    kernel: str
    mode: NsightProfType
    total: StageFigures
    stages: list[StageFigures]
    out_dir: Path | None = None
    check: CheckResult | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[StageFigures]:
        """The rows of a table: the stages and, if there are several, the whole."""
        return [*self.stages, self.total] if len(self.stages) != 1 else list(self.stages)

    def get_total_time_us(self) -> float:
        """Median time of the whole runtime object in microseconds.

        Raises:
            UnsupportedError: when the mode times nothing.
        """
        if self.total.time_us is None:
            raise UnsupportedError(
                f"{self.mode.value} mode measures no time; use event mode on a GPU"
            )
        return self.total.time_us


def parse_mode(mode: NsightProfType | str) -> NsightProfType:
    """A mode, itself or from its command line name."""
    try:
        return NsightProfType(mode)
    except ValueError:
        raise UnknownNameError("prof_type", str(mode), [m.value for m in NsightProfType]) from None
