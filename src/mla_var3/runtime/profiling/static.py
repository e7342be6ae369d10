"""Static mode: no GPU. Compile report per stage and target, roofline prediction per device."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from mla_var3.conf.devices import DeviceSpec, load_devices
from mla_var3.errors import UnknownNameError
from mla_var3.runtime.compile import CompileReport, compile_report
from mla_var3.runtime.markdown import microseconds, number, table
from mla_var3.runtime.plan import KernelPlan, Target, plan_dtype, plan_targets
from mla_var3.runtime.profiling import common
from mla_var3.runtime.profiling.figures import compile_markdown, has_estimate
from mla_var3.runtime.profiling.modes import NsightProfType, ProfileResult
from mla_var3.runtime.stage import Stage, by_unique_name
from mla_var3.runtime.workflow import Prepared, RunOptions, empty_stage, planning_device


@common.profiling_mode(NsightProfType.STATIC, gpu=False)
def static_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Compile every stage for every target, and predict.

    Each target is planned for a device that has it, so model-driven fields and default tilings are
    those that such a device would get.
    """
    with common.artifact_folder(NsightProfType.STATIC, plan, run) as folder:
        return _profile(plan, run, folder)


def _profile(plan: KernelPlan, run: RunOptions, folder: Path) -> ProfileResult:
    here = _planning_device(plan)
    dtype = plan_dtype(plan)

    def planned(target: Target) -> tuple[KernelPlan, Stage]:
        resolved = plan.resolved(target)
        return resolved, empty_stage(resolved)

    reports: list[CompileReport] = []
    of_kernel: dict[str, list[CompileReport]] = defaultdict(list)
    sections: list[str] = []
    targets = plan_targets(plan) if run.targets is None else run.targets
    for code in targets:
        if code not in plan_targets(plan):
            raise UnknownNameError("target", code, plan_targets(plan))
    for done, code in enumerate(targets):
        target = Target.of_code(code, here)
        _, stage = planned(target)
        for name, kernel in by_unique_name(stage.kernels()).items():
            run.progress("compile", done, len(targets), f"{name} for {code}")
            report = compile_report(kernel, code, artifacts_dir=folder / "compiled" / name)
            reports.append(report)
            of_kernel[name].append(report)
        title = f"### {code}, planned for {target.require_device().name}"
        sections.append(f"{title}\n\n{common.tiling_table(stage)}")
    run.progress("compile", len(targets), len(targets), "done")

    chosen, stage = planned(Target.of(here))
    predictions = {
        spec.name: planned(Target.of(spec))[1].predict_us(*spec.peak_rates(dtype))
        for spec in load_devices().values()
        if _is_meant_for(plan, spec)
    }
    total = common.stage_figures(stage, here, dtype)
    stages = common.kernel_figures(stage, here, dtype)
    for figures in stages:
        figures.extra["compile"] = of_kernel[figures.name]
    prepared = Prepared(chosen, (), stage, None)
    result = common.make_result(
        NsightProfType.STATIC,
        prepared,
        total,
        stages,
        folder,
        planned_for=here.name,
        compile=[report.to_dict() for report in reports],
        predicted_us=predictions,
    )
    parts = [
        common.header(f"{plan.name}, static mode", result.record),
        "## Compile report\n",
        compile_markdown(reports),
        common.compiled_note(stage),
        "## Instruction mix\n",
        _instruction_table(reports),
        "## Prediction\n",
        _prediction_table(result, predictions, here),
        "## Tilings\n",
        *sections,
    ]
    common.write_artifacts(result, prepared, parts)
    return result


def _is_meant_for(plan: KernelPlan, spec: DeviceSpec) -> bool:
    return bool(set(spec.targets) & set(plan_targets(plan)))


def _planning_device(plan: KernelPlan) -> DeviceSpec:
    """The device that figures are for: this one, or the first that the plan supports."""
    here = planning_device()
    known = (here, *load_devices().values())
    return next((spec for spec in known if _is_meant_for(plan, spec)), here)


def _instruction_table(reports: list[CompileReport]) -> str:
    rows = []
    for r in reports:
        mix = " ".join(f"{name} {count}" for name, count in r.instructions.items() if count)
        rows.append((r.kernel, r.target, mix))
    return table(("kernel", "target", "instructions"), rows)


def _prediction_table(
    result: ProfileResult, predictions: dict[str, float], here: DeviceSpec
) -> str:
    per_stage = table(
        ("stage", f"ideal on {here.name}", "GFLOP", "MB", "FLOP/byte"),
        [
            (
                s.name,
                microseconds(s.predicted_us),
                number(s.flops / 1e9),
                number(s.bytes / 1e6),
                number(s.intensity),
            )
            for s in result.rows
        ],
    )
    per_device = table(
        ("device", "ideal, vendor peaks"),
        [(name, microseconds(value)) for name, value in predictions.items()],
    )
    note = "An ideal time is a lower bound: perfect overlap at the vendor's peaks.\n"
    if has_estimate(result):
        note += "`hyper-mla predict` shows what the kernels are expected to take.\n"
    return f"{per_stage}\n{per_device}\n{note}"
