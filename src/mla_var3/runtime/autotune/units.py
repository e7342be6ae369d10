"""What is tuned together, and judging candidates without the GPU: constraints, then machine code.

A unit is a kernel that runs alone, or all kernels of a `ConcurrentKernels` group: those compete for
the same machine, so their tilings are chosen together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mla_var3.conf.devices import DeviceSpec
from mla_var3.errors import MissingToolError
from mla_var3.runtime.autotune.history import Entry, canonical
from mla_var3.runtime.compile import CompileReport, compile_report, fits_shared_memory
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.measure import Timing, cuda_is_healthy, time_gpu
from mla_var3.runtime.stage import (
    KernelStage,
    Stage,
    Tiling,
    by_unique_name,
    constraint_failures,
)

log = logging.getLogger(__name__)

Combo = tuple[Tiling, ...]
"""One tiling per kernel of a unit."""


@dataclass(frozen=True)
class Unit:
    """What is tuned together, with the ranges of kernels of the concurrent groups in it."""

    name: str
    stage: Stage
    kernels: dict[str, KernelStage]
    groups: tuple[tuple[ConcurrentKernels, slice], ...] = ()

    @property
    def joint(self) -> bool:
        """Whether a config names one tiling per kernel."""
        return isinstance(self.stage, ConcurrentKernels)

    def config(self, combo: Combo) -> dict[str, Any]:
        pairs = zip(self.kernels, combo, strict=True)
        if self.joint:
            return {name: tiling.to_dict() for name, tiling in pairs}
        return combo[0].to_dict()

    def by_kernel(self, recorded: dict[str, Any]) -> dict[str, Any]:
        return recorded if self.joint else dict.fromkeys(self.kernels, recorded)

    def candidates(self) -> dict[str, list[Tiling]]:
        """The tilings to try per kernel: the active one first, then the others, each once."""
        found = {}
        for name, kernel in self.kernels.items():
            distinct: dict[str, Tiling] = {}
            for tiling in (kernel.tiling, *kernel.autotune_configs):
                distinct.setdefault(canonical(tiling.to_dict()), tiling)
            found[name] = list(distinct.values())
        return found

    def joint_failures(self, combo: Combo) -> tuple[str, ...]:
        return tuple(
            failure
            for group, members in self.groups
            for failure in group.joint_failures(combo[members])
        )

    def set_tilings(self, combo: Combo) -> None:
        for kernel, tiling in zip(self.kernels.values(), combo, strict=True):
            kernel.tiling = tiling


def units_of(stage: Stage) -> list[Unit]:
    """The tuning units of a runtime object, in launch order."""
    return [
        Unit(name, part, by_unique_name(part.kernels()), tuple(_groups(part)))
        for name, part in by_unique_name(_parts(stage)).items()
    ]


def _parts(stage: Stage) -> Iterator[Stage]:
    if isinstance(stage, KernelPipeline):
        for part in stage.stages:
            yield from _parts(part)
    else:
        yield stage


def _groups(stage: Stage, start: int = 0) -> Iterator[tuple[ConcurrentKernels, slice]]:
    if isinstance(stage, ConcurrentKernels):
        yield stage, slice(start, start + sum(1 for _ in stage.kernels()))
    for part in stage.children:
        yield from _groups(part, start)
        start += sum(1 for _ in part.kernels())


_time = partial(time_gpu, max_seconds=0.5)


@dataclass(frozen=True)
class Instruments:
    """What a search measures with, with a cold L2 cache; tests bring their own."""

    time: Callable[[Callable[[], None]], Timing] = _time
    compile: Callable[[KernelStage, str, Any], CompileReport] = compile_report
    healthy: Callable[[], bool] = cuda_is_healthy


@dataclass(frozen=True)
class Check:
    """What is known of a tiling before it runs: why it cannot (hard), would run badly (soft)."""

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
        # By the kernel's name and the tiling's canonical text.
        self._checks: dict[tuple[str, str], Check] = {}
        self._reports: dict[tuple[str, str], CompileReport] = {}
        for entry in known:
            configs = unit.by_kernel(entry["config"])
            for name, summary in unit.by_kernel(entry["compile"] or {}).items():
                if name in configs and summary.get("target") == spec.target:
                    values = {"kernel": name, "tiling": configs[name], **summary}
                    key = (name, canonical(configs[name]))
                    self._reports[key] = CompileReport.from_dict(values)

    def check(self, name: str, tiling: Tiling) -> Check:
        key = name, canonical(tiling.to_dict())
        if key not in self._checks:
            self._checks[key] = self._make_check(name, tiling, self._reports.get(key))
        return self._checks[key]

    def summary(self, checks: dict[str, Check]) -> dict[str, Any] | None:
        """The compile figures for an entry, without what its config says already."""
        reports = {name: check.report for name, check in checks.items() if check.report is not None}
        summaries = {name: report.to_dict() for name, report in reports.items()}
        for summary in summaries.values():
            del summary["kernel"], summary["tiling"]
        if not summaries:
            return None
        return summaries if self._unit.joint else next(iter(summaries.values()))

    def _make_check(self, name: str, tiling: Tiling, report: CompileReport | None) -> Check:
        failures = constraint_failures(tiling, self._unit.kernels[name].plan)
        if failures:
            return Check(hard=failures)
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
            offered = f"{self._spec.name} has {self._spec.shared_memory_per_block_bytes}"
            text = f"needs {report.shared_bytes} B of shared memory per CTA, {offered}"
            return Check(hard=(text,), report=report)
        bad = report.spills or report.misses_tensor_core
        return Check(soft=(report.verdict,) if bad else (), report=report)
