"""One run under Nsight Compute: prepare in this process, profile in another, read the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.environment import environment
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, common
from mla_var3.runtime.profiling.bottleneck import StageMeasurement
from mla_var3.runtime.profiling.clocks import ClockState, announce_clocks
from mla_var3.runtime.profiling.ncu import driver, reader
from mla_var3.runtime.profiling.target import TargetSpec
from mla_var3.runtime.profiling.timeline.analysis import outline
from mla_var3.runtime.stage import by_unique_name
from mla_var3.runtime.workflow import Prepared, RunOptions


@dataclass
class Session:
    """Everything a report needs."""

    mode: NsightProfType
    prepared: Prepared
    folder: Path
    tool: driver.NcuTool
    collection: driver.Collection
    clocks: ClockState
    profiles: list[reader.StageProfile]
    event_us: dict[str, float] = field(default_factory=dict)
    not_disassembled: str | None = None

    @property
    def report_path(self) -> Path:
        """The profiler's report."""
        return self.folder / "report.ncu-rep"

    @property
    def device(self) -> DeviceSpec:
        """The device entry."""
        return self.prepared.require_device()

    @property
    def dtype(self) -> str:
        """The dtype whose rates apply."""
        return plan_dtype(self.prepared.plan)

    @property
    def is_concurrent(self) -> bool:
        """Whether some stages are meant to run at the same time."""
        return bool(outline(self.prepared.stage).groups)


def profile(
    mode: NsightProfType,
    plan: KernelPlan,
    options: RunOptions,
    *,
    metrics: Sequence[str] | None,
    runs: int,
) -> Session:
    """Tune, check, time by events, then profile every stage under Nsight Compute."""
    import torch

    tool = driver.find_ncu()
    driver.load_ncu_report()  # fails before minutes of tuning, not after
    clocks = announce_clocks(environment())
    count = options.bench_runs or runs
    with common.measuring(mode, plan, options) as (prepared, made):
        folder = made.resolve()
        target_spec = TargetSpec.of(prepared.plan, prepared.stage, count)
        event_us = {
            name: time_gpu(kernel.launch).median_us
            for name, kernel in by_unique_name(prepared.stage.kernels()).items()
        }
        not_disassembled = common.write_compiled(
            prepared.stage.kernels(), prepared.require_device().target, folder
        )
        # The profiled program needs the GPU memory.
        prepared.inputs, prepared.stage = (), target_spec.build_stage(prepared.plan, "meta")
        torch.cuda.empty_cache()
        options.progress("profile", 0, 1, f"{prepared.plan.name} under ncu {tool.version}")
        collection = driver.collect(tool, folder, target_spec, metrics)
        options.progress("profile", 1, 1, "done")
    launches = reader.read_launches(folder / "report.ncu-rep")
    return Session(
        mode=mode,
        prepared=prepared,
        folder=folder,
        tool=tool,
        collection=collection,
        clocks=clocks,
        profiles=reader.stage_profiles(launches, list(event_us), count),
        event_us=event_us,
        not_disassembled=not_disassembled,
    )


def measurements(session: Session) -> list[StageMeasurement]:
    """The stages as the bottleneck rules see them."""
    rates = session.device.peak_rates(session.dtype)
    return [
        StageMeasurement(
            measured.name,
            measured.figures,
            kernel.predict_us(*rates),
            kernel.cost().bytes,
            measured.stalls,
        )
        for kernel, measured in zip(session.prepared.stage.kernels(), session.profiles, strict=True)
    ]


def make_result(session: Session) -> ProfileResult:
    """The result of a session, with its record; reports are not written yet."""
    stage, device, dtype = session.prepared.stage, session.device, session.dtype
    stages = []
    for kernel, measured, found in zip(
        stage.kernels(), session.profiles, measurements(session), strict=True
    ):
        time_us, spread_us = measured.figures["time_us"], measured.spread_us
        figures = common.stage_figures(kernel, device, dtype, time_us, spread_us, measured.name)
        figures.extra = {
            **measured.figures,
            "function": measured.main.function,
            "stalls": measured.stalls,
            "event_us": session.event_us.get(measured.name),
            "bottleneck": found.bound.label,
            "issues": [dataclasses.asdict(issue) for issue in found.issues],
        }
        stages.append(figures)
    total_us = sum(measured.figures["time_us"] for measured in session.profiles)
    total = common.stage_figures(stage, device, dtype, total_us)
    total.extra = reader.combine_figures([measured.figures for measured in session.profiles])
    result = common.measured_result(
        session.mode, session.prepared, total, stages, session.folder, session.clocks
    )
    result.record["not_disassembled"] = session.not_disassembled
    result.record["profiler"] = {
        "tool": f"ncu {session.tool.version}",
        "collector": session.collection.collector,
        "collector_note": session.collection.note,
        "metrics_not_available": session.collection.dropped,
        "clock_control": driver.CLOCK_CONTROL,
        "runs": session.profiles[0].runs,
    }
    return result
