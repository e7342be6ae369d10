"""The profiling modes: running a plan in one, and what a run returns.

A mode `x` is the module `mla_var3.runtime.profiling.x` with a function `x_profile_plan`. Adding the
module, and its name to `NsightProfType`, is all it takes to offer the mode.
"""

from __future__ import annotations

import enum
import functools
import importlib
import logging
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.errors import UnknownNameError, UnsupportedError
from mla_var3.runtime.check import CheckResult
from mla_var3.runtime.workflow import RunOptions, device_kind, pick_device

if TYPE_CHECKING:
    import torch

    from mla_var3.runtime.plan import KernelPlan

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
        return f"{__package__}.{self.value}"


@dataclass
class StageFigures:
    """Figures of one stage or of the whole run.

    Its median time is None where nothing was timed; the spread is half the distance between the
    10th and the 90th percentile. `flops` and `bytes` are what the algorithm needs, `predicted_us`
    the ideal time on the device of the result at the vendor's peaks, `extra` is up to the mode.
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
    """What a profiling run returns: figures, and all of it as a JSON-ready `record`."""

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
    """Run a plan in a profiling mode; None takes the default mode of the device."""
    mode = default_mode(pick_device(options.device)) if prof_type is None else parse_mode(prof_type)
    module = importlib.import_module(mode.module)
    result: ProfileResult = getattr(module, f"{mode.value}_profile_plan")(plan, options=options)
    return result


def benchmark_kernel(
    plan: KernelPlan,
    device: torch.device | str = "auto",
    prof_type: NsightProfType | str | None = None,
    out_dir: str | Path | None = None,
    **options: Any,
) -> ProfileResult:
    """Tune, optionally check, profile and report a plan; see `KernelPlan.benchmark_kernel`."""
    known = {field.name for field in fields(RunOptions)} - {"device", "out_dir"}
    for name in options.keys() - known:
        raise UnknownNameError("option", name, known)
    kind = device_kind(str(device))
    run = RunOptions(device=kind, out_dir=Path(out_dir) if out_dir else None, **options)
    return profile_plan(plan, prof_type, run)
