"""Event mode: times by CUDA events, end to end through the runtime, beside the roofline."""

from __future__ import annotations

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.plan import KernelPlan, plan_dtype
from mla_var3.runtime.profiling import common
from mla_var3.runtime.profiling.figures import stage_markdown
from mla_var3.runtime.profiling.modes import NsightProfType, ProfileResult, StageFigures
from mla_var3.runtime.stage import Stage, by_unique_name
from mla_var3.runtime.workflow import RunOptions


@common.profiling_mode(NsightProfType.EVENT, gpu=True)
def event_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and time a plan on the current GPU."""
    with common.measuring(NsightProfType.EVENT, plan, run) as (prepared, folder):
        stage, spec, dtype = prepared.stage, prepared.require_device(), plan_dtype(prepared.plan)

        def timed(part: Stage, name: str = "") -> StageFigures:
            timing = time_gpu(part.launch, runs=run.bench_runs)
            times = (timing.median_us, timing.spread_us)
            figures = common.stage_figures(part, spec, dtype, *times, name)
            figures.extra["timing"] = timing.to_dict()
            return figures

        kernels = by_unique_name(stage.kernels())
        total = timed(stage)
        stages = [total]
        if len(kernels) > 1:
            stages = [timed(kernel, name) for name, kernel in kernels.items()]
        result = common.measured_result(NsightProfType.EVENT, prepared, total, stages, folder)
        missing = common.write_compiled(kernels.values(), spec.target, folder)
        result.record["not_disassembled"] = missing
        common.write_artifacts(result, prepared, _report(result, stage, spec, dtype))
    return result


def _report(result: ProfileResult, stage: Stage, spec: DeviceSpec, dtype: str) -> list[str]:
    timing, missing = result.total.extra["timing"], result.record["not_disassembled"]
    return [
        common.header(f"{result.kernel}, event mode", result.record),
        common.clocks_line(result),
        "## Measured against roofline\n",
        stage_markdown(result),
        f"Median of {timing['runs']} runs by CUDA events, L2 cache cold; the spread is half the "
        "distance from the 10th to the 90th percentile. The whole is timed as launched, each "
        "stage also alone. The roofline takes the vendor's peaks: "
        f"{spec.peak_tflops(dtype):.0f} TFLOP/s and {spec.peak_gbps:.0f} GB/s.\n",
        common.roofline_warning(result),
        f"No compiled code is kept: {missing}\n" if missing else "",
        common.compiled_note(stage),
        *common.closing_sections(result, stage),
    ]
