"""Judging candidates without the GPU: constraints, then machine code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import MissingToolError
from mla_var3.runtime.autotune.history import Entry, canonical
from mla_var3.runtime.autotune.units import Member, Unit, member
from mla_var3.runtime.compile import CompileReport, compile_report, fits_shared_memory
from mla_var3.runtime.measure import Timing, cuda_is_healthy, time_gpu
from mla_var3.runtime.stage import KernelStage, Tiling, constraint_failures

log = logging.getLogger(__name__)

_time = partial(time_gpu, cold_l2=True, max_seconds=0.5)


@dataclass(frozen=True)
class Instruments:
    """What a search measures with; tests bring their own.

    Attributes:
        time: times what a function launches, with a cold L2 cache.
        compile: compiles a kernel for a target with a tiling.
        healthy: whether the GPU can still be used after an error.
    """

    time: Callable[[Callable[[], None]], Timing] = _time
    compile: Callable[[KernelStage, str, Any], CompileReport] = compile_report
    healthy: Callable[[], bool] = cuda_is_healthy


@dataclass(frozen=True)
class Check:
    """What is known about a tiling of one kernel before it runs.

    Attributes:
        hard: why it cannot run.
        soft: why it would run badly.
        report: its compile report; None when it was not compiled.
    """

    hard: tuple[str, ...] = ()
    soft: tuple[str, ...] = ()
    report: CompileReport | None = None

    @property
    def stack_bytes(self) -> int:
        return 0 if self.report is None else self.report.stack_bytes or 0


class StaticFilter:
    """Compiles the tilings of a unit's kernels, each at most once, and judges them."""

    def __init__(
        self, unit: Unit, spec: DeviceSpec, instruments: Instruments, known: Iterable[Entry]
    ) -> None:
        self.unavailable: str | None = None
        self._unit = unit
        self._spec = spec
        self._instruments = instruments
        self._checks: dict[Member, Check] = {}
        self._reports: dict[Member, CompileReport] = {}
        for entry in known:
            configs = unit.by_kernel(entry["config"])
            for name, summary in unit.by_kernel(entry["compile"] or {}).items():
                if name in configs and summary.get("target") == spec.target:
                    values = {"kernel": name, "tiling": configs[name], **summary}
                    key = (name, canonical(configs[name]))
                    self._reports[key] = CompileReport.from_dict(values)

    def check(self, name: str, tiling: Tiling) -> Check:
        key = member(name, tiling)
        if key not in self._checks:
            self._checks[key] = self._make_check(name, tiling)
        return self._checks[key]

    def summary(self, checks: dict[str, Check]) -> dict[str, Any] | None:
        """The compile figures for an entry, without what its config says already."""
        summaries = {
            name: {
                field: value
                for field, value in check.report.to_dict().items()
                if field not in ("kernel", "tiling")
            }
            for name, check in checks.items()
            if check.report is not None
        }
        if not summaries:
            return None
        return summaries if self._unit.joint else next(iter(summaries.values()))

    def _make_check(self, name: str, tiling: Tiling) -> Check:
        failures = constraint_failures(tiling, self._unit.kernels[name].plan)
        if failures:
            return Check(hard=failures)
        report = self._reports.get(member(name, tiling))
        if report is None:
            if self.unavailable:
                return Check()
            try:
                kernel = self._unit.kernels[name]
                report = self._instruments.compile(kernel, self._spec.target, tiling)
            except MissingToolError as error:
                self.unavailable = str(error)
                log.warning("%s: candidates are not filtered by compiling: %s", name, error)
                return Check()
        if report.error:
            return Check(hard=(report.verdict,), report=report)
        if not fits_shared_memory(report, self._spec):
            offered = self._spec.shared_memory_per_block_bytes
            text = (
                f"needs {report.shared_bytes} B of shared memory per CTA, "
                f"{self._spec.name} has {offered}"
            )
            return Check(hard=(text,), report=report)
        bad = report.spills or report.misses_tensor_core
        return Check(soft=(report.verdict,) if bad else (), report=report)
