"""Disabled mode: plain execution, with the check when asked; no artifacts."""

from __future__ import annotations

from mla_var3.runtime.measure import wait_for_device
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling.common import (
    kernel_figures,
    make_result,
    profiling_mode,
    stage_figures,
)
from mla_var3.runtime.profiling.modes import NsightProfType, ProfileResult
from mla_var3.runtime.workflow import RunOptions, planning_device, prepare


@profiling_mode(NsightProfType.DISABLED, gpu=False)
def disabled_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Run a plan once."""
    prepared = prepare(plan, run)
    if prepared.check is None:
        prepared.stage.launch()
        if prepared.device is not None:
            wait_for_device(prepared.stage.name)
    device = prepared.device or planning_device()
    dtype = plan_dtype(prepared.plan)
    total = stage_figures(prepared.stage, device, dtype)
    stages = kernel_figures(prepared.stage, device, dtype)
    return make_result(
        NsightProfType.DISABLED, prepared, total, stages, None, planned_for=device.name
    )
