"""Disabled mode: plain execution, with the check when asked; no artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.runtime.profiling import NsightProfType, ProfileResult
from mla_var3.runtime.profiling.common import (
    make_record,
    plan_dtype,
    plan_of_version,
    run_options,
    stage_figures,
)
from mla_var3.runtime.workflow import RunOptions, planning_device, prepare

if TYPE_CHECKING:
    from mla_var3.runtime.plan import KernelPlan


def disabled_profile_plan(
    plan: KernelPlan,
    out_dir: str | Path | None = None,
    version: str | None = None,
    label: str | None = None,
    bench_runs: int | None = None,
    *,
    options: RunOptions | None = None,
) -> ProfileResult:
    """Run a plan once; the arguments are those of the other modes."""
    run = run_options(options, out_dir, label, bench_runs)
    prepared = prepare(plan_of_version(plan, version), run)
    if prepared.check is None:
        prepared.stage.launch()
    device = prepared.device or planning_device()
    dtype = plan_dtype(prepared.plan)
    return ProfileResult(
        kernel=prepared.plan.name,
        mode=NsightProfType.DISABLED,
        total=stage_figures(prepared.stage, None, None, device, dtype),
        stages=[stage_figures(k, None, None, device, dtype) for k in prepared.stage.kernels()],
        check=prepared.check,
        record=make_record(NsightProfType.DISABLED, prepared.plan, prepared.device),
    )
