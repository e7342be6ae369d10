"""Profiling modes: one module per mode, found by name.

A mode `x` is the module `mla_var3.runtime.profiling.x` with a function `x_profile_plan`. Adding the
module is all it takes to offer the mode.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UnknownNameError, UnsupportedError

if TYPE_CHECKING:
    from mla_var3.runtime.check import CheckResult
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.workflow import RunOptions


log = logging.getLogger(__name__)


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
        """Module that implements the mode."""
        return f"{__name__}.{self.value}"

    @property
    def available(self) -> bool:
        """Whether this version of HyperMLA has the mode."""
        return importlib.util.find_spec(self.module) is not None


@dataclass
class StageFigures:
    """Figures of one stage or of the whole run.

    Attributes:
        name: stage name.
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
        """Achieved TFLOP/s."""
        return None if not self.time_us else self.flops / self.time_us / 1e6

    @property
    def gbps(self) -> float | None:
        """Achieved GB/s."""
        return None if not self.time_us else self.bytes / self.time_us / 1e3


@dataclass
class ProfileResult:
    """What a profiling run returns.

    Attributes:
        kernel: full kernel name.
        mode: profiling mode.
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
    """A mode from its command line name."""
    if isinstance(mode, NsightProfType):
        return mode
    try:
        return NsightProfType(mode)
    except ValueError:
        raise UnknownNameError("prof_type", mode, [m.value for m in NsightProfType]) from None


def default_mode(device: str) -> NsightProfType:
    """The richest mode that works for a device ("cuda" or "cpu"); logs when it is a lesser one."""
    if device != "cuda":
        return NsightProfType.STATIC
    reason = _why_no_annotation()
    if reason is None:
        return NsightProfType.ANNOTATION
    log.warning("event mode instead of annotation mode: %s", reason)
    return NsightProfType.EVENT


@functools.cache
def _why_no_annotation() -> str | None:
    """Why annotation mode cannot run here; asked once, because it starts the profiler."""
    annotation = importlib.import_module(NsightProfType.ANNOTATION.module)
    reason: str | None = annotation.annotation_available()
    return reason


def profile_plan(
    plan: KernelPlan, prof_type: NsightProfType | str | None, options: RunOptions
) -> ProfileResult:
    """Run a plan in a profiling mode."""
    from mla_var3.runtime.workflow import pick_device

    mode = default_mode(pick_device(options.device)) if prof_type is None else parse_mode(prof_type)
    if not mode.available:
        offered = ", ".join(m.value for m in NsightProfType if m.available)
        raise UnsupportedError(
            f"prof_type: expected one of the modes of this version ({offered}), got {mode.value}"
        )
    module = importlib.import_module(mode.module)
    result: ProfileResult = getattr(module, f"{mode.value}_profile_plan")(plan, options=options)
    return result
