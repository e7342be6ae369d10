"""Event mode: times by CUDA events, end to end through the runtime, beside the roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mla_var3.runtime.environment import environment
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import plan_dtype
from mla_var3.runtime.profiling import common
from mla_var3.runtime.profiling.clocks import ClockState, announce_clocks
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.result import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.workflow import RunOptions

if TYPE_CHECKING:
    from mla_var3.conf.devices import DeviceSpec
    from mla_var3.runtime.plan import KernelPlan
    from mla_var3.runtime.stage import Stage


@common.profiling_mode(NsightProfType.EVENT, gpu=True)
def event_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and time a plan on the current GPU."""
    with common.measuring(NsightProfType.EVENT, plan, run) as (prepared, folder):
        stage, spec = prepared.stage, prepared.require_device()
        dtype = plan_dtype(prepared.plan)
        kernels = list(stage.kernels())
        total = _timed(stage, spec, dtype, run.bench_runs)
        stages = [total]
        if len(kernels) > 1:
            stages = [_timed(kernel, spec, dtype, run.bench_runs) for kernel in kernels]
        clocks = announce_clocks(environment())
        result = common.measured_result(
            NsightProfType.EVENT, prepared, total, stages, folder, clocks
        )
        record = result.record
        record["not_disassembled"] = common.write_compiled(kernels, spec.target, folder)
        common.write_artifacts(folder, record, prepared)
        write_atomic(folder / "report.md", _report(result, stage, spec, dtype))
    return result


def _timed(stage: Stage, spec: DeviceSpec, dtype: str, runs: int | None) -> StageFigures:
    timing = time_gpu(stage.launch, runs=runs)
    figures = common.stage_figures(stage, timing.median_us, timing.spread_us, spec, dtype)
    figures.extra["timing"] = timing.to_dict()
    return figures


def _report(result: ProfileResult, stage: Stage, spec: DeviceSpec, dtype: str) -> str:
    timing = result.total.extra["timing"]
    clocks = ClockState(**result.record["clocks"])
    parts = [
        common.header(f"{result.kernel}, event mode", result.record),
        f"GPU clocks: {clocks.describe()}.\n",
        "## Measured against roofline\n",
        stage_markdown(result),
        f"Median of {timing['runs']} runs by CUDA events, L2 cache cold; the spread is half the "
        "distance from the 10th to the 90th percentile. The whole is timed as launched, each "
        "stage also alone. The roofline takes the vendor's peaks: "
        f"{spec.peak_tflops(dtype):.0f} TFLOP/s and {spec.peak_gbps:.0f} GB/s.\n",
        common.roofline_warning(result),
    ]
    if result.record["not_disassembled"]:
        parts.append(f"No compiled code is kept: {result.record['not_disassembled']}\n")
    parts += [common.compiled_note(stage), *common.closing_sections(result, stage)]
    return "\n".join(part for part in parts if part)
