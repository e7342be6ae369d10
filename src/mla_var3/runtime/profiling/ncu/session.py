"""One run under Nsight Compute: prepare in this process, profile in another, read the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.environment import environment
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.profiling.bottleneck import StageMeasurement, diagnose
from mla_var3.runtime.profiling.clocks import ClockState, announce_clocks
from mla_var3.runtime.profiling.common import (
    measured_result,
    open_folder,
    prepare_checked,
    require_gpu,
    stage_figures,
    write_compiled,
)
from mla_var3.runtime.profiling.lock import current_device_name, device_lock
from mla_var3.runtime.profiling.ncu.collect import Collection, collect, wanted_collector
from mla_var3.runtime.profiling.ncu.driver import NcuTool, find_ncu, load_ncu_report
from mla_var3.runtime.profiling.ncu.reader import (
    StageProfile,
    combine_figures,
    read_launches,
    stage_profiles,
)
from mla_var3.runtime.profiling.target import (
    RANGE_PREFIX,
    TargetSpec,
    apply_tilings,
    stage_ranges,
)
from mla_var3.runtime.workflow import Prepared, RunOptions

if TYPE_CHECKING:
    from mla_var3.conf.devices import DeviceSpec
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.stage import Stage


@dataclass
class Session:
    """Everything a report needs.

    Attributes:
        mode: profiling mode.
        prepared: the plan; its stage holds no GPU memory any more.
        device: the device entry.
        folder: where the artifacts go.
        tool: the profiler.
        collection: how it was driven.
        clock_control: ncu's clock option.
        clocks: whether our scripts hold the clocks.
        profiles: what was measured, per stage.
        event_us: time of each stage by CUDA events, by stage name.
        not_disassembled: why no compiled code is kept, if so.
    """

    mode: NsightProfType
    prepared: Prepared
    device: DeviceSpec
    folder: Path
    tool: NcuTool
    collection: Collection
    clock_control: str
    clocks: ClockState
    profiles: list[StageProfile]
    event_us: dict[str, float] = field(default_factory=dict)
    not_disassembled: str | None = None

    @property
    def report_path(self) -> Path:
        """The profiler's report."""
        return self.folder / "report.ncu-rep"

    @property
    def dtype(self) -> str:
        """The plan's 16-bit type."""
        return str(getattr(self.prepared.plan, "dtype", "bfloat16"))

    @property
    def is_concurrent(self) -> bool:
        """Whether some stages are meant to run at the same time."""
        return has_concurrency(self.prepared.stage)


def profile(
    mode: NsightProfType,
    plan: KernelPlan,
    options: RunOptions,
    *,
    metrics: Sequence[str] | None,
    runs: int,
) -> Session:
    """Tune, check, time by events, then profile every stage under Nsight Compute.

    Args:
        mode: the mode that asks.
        plan: what to profile.
        options: how to run it.
        metrics: what to collect; None for the full set with sources.
        runs: profiled launches of each stage, unless the options say otherwise.

    Raises:
        MissingToolError: ncu or ncu-report is not installed.
        UnsupportedError: no GPU, ncu too old, no right to the counters, or the profiled program
            failed.
        CheckFailedError: the result is wrong.
    """
    require_gpu(mode, options)
    tool = find_ncu()
    load_ncu_report(tool)  # before minutes of tuning, not after them
    collector = wanted_collector()
    clocks = announce_clocks(environment())
    count = options.bench_runs or runs
    with device_lock(current_device_name()):
        prepared = prepare_checked(plan, options)
        device = prepared.require_device()
        folder = open_folder(mode, prepared.plan, options).resolve()
        target_spec = TargetSpec.of(prepared.plan, prepared.stage, count)
        event_us = {}
        for name, kernel in stage_ranges(prepared.stage):
            event_us[name.removeprefix(RANGE_PREFIX)] = time_gpu(kernel.launch).median_us
        not_disassembled = write_compiled(prepared.stage.kernels(), device.target, folder)
        prepared = _without_tensors(prepared, target_spec)
        options.progress("profile", 0, 1, f"{prepared.plan.name} under ncu {tool.version}")
        collection = collect(tool, folder, target_spec, metrics, "none", collector)
        options.progress("profile", 1, 1, "done")
    names = [name.removeprefix(RANGE_PREFIX) for name, _ in stage_ranges(prepared.stage)]
    launches = read_launches(folder / "report.ncu-rep", tool)
    return Session(
        mode=mode,
        prepared=prepared,
        device=device,
        folder=folder,
        tool=tool,
        collection=collection,
        clock_control="none",
        clocks=clocks,
        profiles=stage_profiles(launches, names, count),
        event_us=event_us,
        not_disassembled=not_disassembled,
    )


def _without_tensors(prepared: Prepared, spec: TargetSpec) -> Prepared:
    """The same without GPU memory, which the profiled program needs for itself."""
    import torch

    stage = prepared.plan.plan(*prepared.plan.prepare_inputs("meta"))
    apply_tilings(stage, spec.tilings)
    light = dataclasses.replace(prepared, inputs=(), stage=stage)
    prepared.inputs, prepared.stage = (), stage
    torch.cuda.empty_cache()
    return light


def has_concurrency(stage: Stage) -> bool:
    """Whether a runtime object contains a concurrent group of more than one kernel."""
    if isinstance(stage, ConcurrentKernels):
        return len(list(stage.kernels())) > 1
    if isinstance(stage, KernelPipeline):
        return any(has_concurrency(part) for part in stage.stages)
    return False


def measurements(session: Session) -> list[StageMeasurement]:
    """The stages as the bottleneck rules see them."""
    found = []
    kernels = list(session.prepared.stage.kernels())
    for kernel, measured in zip(kernels, session.profiles, strict=True):
        roofline = kernel.predict_us(*session.device.peak_rates(session.dtype))
        found.append(
            StageMeasurement(
                measured.name, measured.figures, roofline, kernel.cost().bytes, measured.stalls
            )
        )
    return found


def make_result(session: Session) -> ProfileResult:
    """The result of a session, with its record; reports are not written yet."""
    stage, device, dtype = session.prepared.stage, session.device, session.dtype
    stages = []
    for kernel, measured in zip(stage.kernels(), session.profiles, strict=True):
        time_us = measured.figures["time_us"]
        figures = stage_figures(kernel, time_us, measured.spread_us, device, dtype)
        figures.name = measured.name
        figures.extra = _extra(measured, session.event_us.get(measured.name))
        stages.append(figures)
    total_us = sum(measured.figures["time_us"] for measured in session.profiles)
    total = stage_figures(stage, total_us, None, device, dtype)
    total.extra = combine_figures([measured.figures for measured in session.profiles])
    result = measured_result(
        session.mode, session.prepared, total, stages, session.folder, session.clocks
    )
    result.record["not_disassembled"] = session.not_disassembled
    result.record["profiler"] = {
        "tool": f"ncu {session.tool.version}",
        "collector": session.collection.collector,
        "collector_note": session.collection.note,
        "metrics_not_available": session.collection.dropped,
        "clock_control": session.clock_control,
        "runs": session.profiles[0].runs,
    }
    return result


def _extra(measured: StageProfile, event_us: float | None) -> dict[str, Any]:
    diagnosis = diagnose(StageMeasurement(measured.name, measured.figures))
    return {
        **measured.figures,
        "function": measured.main.function,
        "stalls": measured.stalls,
        "event_us": event_us,
        "bottleneck": diagnosis.bound.label,
        "issues": [dataclasses.asdict(issue) for issue in diagnosis.issues],
    }


def total_stages(result: ProfileResult) -> list[StageFigures]:
    """The rows of a table: the stages and, if there are several, the whole."""
    return [*result.stages, result.total] if len(result.stages) > 1 else list(result.stages)
