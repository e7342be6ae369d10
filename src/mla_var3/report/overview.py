"""The main job: mla_var6_plus end to end, with one report for people and one for programs.

Without a GPU: a small problem through the CPU interpreter with the check, the compile report for
all targets, the predicted times on all known devices. With a GPU: tuned, checked and timed beside
the two pure paths, and the predictions next to the measurements.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.conf.devices import load_devices
from mla_var3.errors import HyperMlaError, KernelCompileError, UnsupportedError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.overview_page import measured_markdown, overview_page, prediction_markdown
from mla_var3.report.overview_plots import (
    crossover_panels,
    dense_sweeps,
    speedup_series,
)
from mla_var3.report.plots import crossover_plot, line_plot
from mla_var3.report.sweep import S_VALUES, DeviceSweep, sweep
from mla_var3.runtime import paths
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.environment import environment
from mla_var3.runtime.files import make_folder, write_atomic
from mla_var3.runtime.markdown import byte_count, microseconds, write_json
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, figures, profile_plan
from mla_var3.runtime.workflow import (
    TARGETS,
    Progress,
    RunOptions,
    current_device_spec,
    no_progress,
    pick_device,
    prepare,
)

log = logging.getLogger(__name__)

KERNEL = "mla_var6_plus"
COMPARED = ("flash_mla", "flash_attention")
SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128}
"""The shape of the published comparison."""
CPU_SIZES = {"b": 2, "s": 4, "t": 200, "h": 16}
QUICK_CPU_SIZES = {"b": 2, "s": 2, "t": 100, "h": 8}

# Inputs, outputs and the float32 reference of the check, relative to the bytes a kernel moves.
_MEMORY_FACTOR = 3.0

StepHook = Callable[["Step"], None]
Measured = tuple[str, float, float | None]
"""Kernel, measured and predicted microseconds."""


@dataclass
class OverviewOptions:
    """What to do.

    Attributes:
        quick: smaller problem on the CPU, one compile target; on a GPU a short search.
        out_dir: folder of the report; `out/overview/<timestamp>` by default.
        device: "auto", "cuda" or "cpu".
        sizes: b, s, t, h where they differ from `SIZES`.
        progress: reporter for long work.
        on_start, on_end: called around each step.
    """

    quick: bool = False
    out_dir: Path | None = None
    device: str = "auto"
    sizes: dict[str, int] = field(default_factory=dict)
    progress: Progress = no_progress
    on_start: StepHook = lambda step: None
    on_end: StepHook = lambda step: None


@dataclass
class Step:
    """One step of the job and its outcome.

    Attributes:
        name: id in the JSON report.
        title: heading.
        status: "ok", "failed" or "skipped".
        seconds: duration.
        reason: why it failed or was skipped.
        summary: one line for the screen.
        text: markdown for the report.
        data: the figures, JSON-ready.
    """

    name: str
    title: str
    status: str = "ok"
    seconds: float = 0.0
    reason: str = ""
    summary: str = ""
    text: str = ""
    data: Any = None


@dataclass
class OverviewResult:
    """Where the report lies and what is in it.

    Attributes:
        folder: folder of the report.
        report: the markdown page.
        steps: the steps in order.
        plots: image files.
        compiled: what the kernels became per target.
        sweeps: predictions per device.
        measured: kernel, measured and predicted microseconds.
    """

    folder: Path
    report: Path
    steps: list[Step]
    plots: list[Path]
    compiled: list[CompileReport]
    sweeps: list[DeviceSweep]
    measured: list[Measured]

    @property
    def ok(self) -> bool:
        """Whether no step failed."""
        return all(step.status != "failed" for step in self.steps)


@dataclass
class _Job:
    options: OverviewOptions
    folder: Path
    sizes: dict[str, int]
    steps: list[Step] = field(default_factory=list)
    plots: list[Path] = field(default_factory=list)
    sweeps: list[DeviceSweep] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    compiled: list[CompileReport] = field(default_factory=list)

    def do(self, name: str, title: str, action: Callable[..., None], *arguments: object) -> None:
        step = Step(name, title)
        self.steps.append(step)
        self.options.on_start(step)
        start = time.perf_counter()
        try:
            action(self, step, *arguments)
        except Exception as error:
            # The other steps and the report are still worth having.
            step.status = "failed"
            step.reason = str(error) or type(error).__name__
            if not isinstance(error, HyperMlaError):
                step.reason = f"{type(error).__name__}: {step.reason}"
                step.data = {"traceback": traceback.format_exc()}
            log.debug("step %s failed", name, exc_info=True)
        step.seconds = time.perf_counter() - start
        self.options.on_end(step)


def run_overview(options: OverviewOptions) -> OverviewResult:
    """Run the main job and write `report.md`, `report.json` and the plots."""
    where = pick_device(options.device)
    folder = options.out_dir or paths.output_root() / "overview" / paths.timestamp()
    job = _Job(options, folder, {**SIZES, **options.sizes})
    _problem(job)  # bad sizes are the caller's mistake, not a failed step
    make_folder(folder)
    started = environment()
    if where == "cuda":
        for kernel in (KERNEL, *(() if options.quick else COMPARED)):
            job.do(f"profile_{kernel}", f"{kernel} on the GPU", _profile, kernel)
        job.do("compare", "Measured beside predicted", _compare)
    else:
        job.do("check", f"{KERNEL} on the CPU interpreter", _cpu_check)
        job.do("compile", f"{KERNEL} compiled", _compile)
    job.do("predict", "Predicted times", _predict)
    job.do("plot", "Plots", _plot)
    return _write(job, started)


def _problem(job: _Job) -> MlaProblem:
    b, s, t, h = (job.sizes[name] for name in ("b", "s", "t", "h"))
    return MlaProblem(b=b, s=s, t=t, h=h)


def _plan(kernel: str, **sizes: Any) -> KernelPlan:
    plan: KernelPlan = paths.plan_class(paths.find_kernel(kernel))(**sizes)
    return plan


def _cpu_check(job: _Job, step: Step) -> None:
    sizes = QUICK_CPU_SIZES if job.options.quick else CPU_SIZES
    lengths = (sizes["t"], sizes["t"] // 3 + 1)
    plan = _plan(KERNEL, **sizes, lengths=lengths, n=sizes["t"] // 3)
    options = RunOptions(device="cpu", check=True, progress=job.options.progress)
    prepared = prepare(plan, options)
    if prepared.check is None:
        raise UnsupportedError("check: expected figures from prepare(check=True), got none")
    shown = " ".join(f"{k}={v}" for k, v in prepared.plan.params().items() if v is not None)
    step.text = (
        "The kernels' own code, run tile by tile on CPU tensors by the interpreter, against the "
        f"fp32 reference.\n\nProblem: {shown}\n\n" + figures.check_markdown(prepared.check)
    )
    step.data = {"params": prepared.plan.params(), "check": prepared.check.to_dict()}
    step.summary = figures.check_summary(prepared.check)
    prepared.check.require()


def _compile(job: _Job, step: Step) -> None:
    plan = _plan(KERNEL, **job.sizes)
    options = RunOptions(
        device="auto",
        targets=TARGETS[:1] if job.options.quick else TARGETS,
        out_dir=job.folder / "static",
        progress=job.options.progress,
    )
    result = profile_plan(plan, NsightProfType.STATIC, options)
    reports = job.compiled = figures.compile_reports(result)
    step.text = (
        "Compiled ahead of time, without a GPU; figures read from the machine code. Artifacts: "
        "[static](static/report.md).\n\n" + figures.compile_markdown(reports)
    )
    step.data = {"params": plan.params(), "reports": [report.to_dict() for report in reports]}
    failed = [report for report in reports if report.error]
    spilling = [report for report in reports if not report.error and report.spills]
    step.summary = (
        f"{len(reports) - len(failed)} of {len(reports)} compile, {len(spilling)} with spills"
    )
    if failed:
        names = ", ".join(f"{report.kernel} for {report.target}" for report in failed)
        raise KernelCompileError(f"{names}: does not compile: {failed[0].error}")


def _profile(job: _Job, step: Step, kernel: str) -> None:
    plan = _plan(kernel, **job.sizes)
    if reason := _too_large(plan):
        step.status, step.reason = "skipped", reason
        return
    options = RunOptions(
        device="cuda",
        check=True,
        tune_max_iters=2 if job.options.quick else None,
        out_dir=job.folder / kernel,
        progress=job.options.progress,
    )
    result = profile_plan(plan, None, options)
    step.text = f"Artifacts: [{kernel}]({kernel}/report.md).\n\n" + figures.stage_markdown(result)
    step.data = figures.result_data(result)
    step.summary = figures.stage_summary(result)
    if result.total.time_us is not None:
        job.measured.append((kernel, result.total.time_us, result.total.predicted_us))
    if result.check is not None:
        step.text += "\n" + figures.check_markdown(result.check)
        result.check.require()


def _compare(job: _Job, step: Step) -> None:
    if not job.measured:
        raise UnsupportedError("nothing was measured")
    device = current_device_spec()
    step.text = measured_markdown(job.measured, device.name)
    step.text += (
        f"\nIdeal times: {device.peak_tflops('bfloat16'):g} TFLOP/s, {device.peak_gbps:g} GB/s.\n"
    )
    step.data = [
        {"kernel": kernel, "time_us": time_us, "predicted_us": predicted}
        for kernel, time_us, predicted in job.measured
    ]
    step.summary = ", ".join(f"{kernel} {microseconds(t)}" for kernel, t, _ in job.measured)


def _too_large(plan: KernelPlan) -> str:
    """Why the GPU's free memory does not hold a plan; empty when it does."""
    import torch

    torch.cuda.empty_cache()  # what the step before held counts as free
    free, _ = torch.cuda.mem_get_info()
    device = current_device_spec()
    rates = device.burst_rates("bfloat16")
    need = _MEMORY_FACTOR * plan.plan_empty(*rates).cost().bytes
    if need <= free:
        return ""
    return f"needs about {byte_count(need)} of GPU memory, {byte_count(free)} are free"


def _predict(job: _Job, step: Step) -> None:
    problem = _problem(job)
    job.sweeps = [sweep(problem, spec, S_VALUES) for spec in load_devices().values()]
    step.text = prediction_markdown(job.sweeps, KERNEL)
    step.data = [entry.to_dict() for entry in job.sweeps]
    step.summary = f"{len(job.sweeps)} devices, s from {S_VALUES[0]} to {S_VALUES[-1]}"


def _plot(job: _Job, step: Step) -> None:
    if not job.sweeps:
        raise UnsupportedError("plots need the predictions, which failed")
    sizes = ", ".join(f"{name}={value}" for name, value in job.sizes.items() if name != "s")
    dense = dense_sweeps(job.sweeps)
    job.plots += crossover_plot(
        crossover_panels(dense),
        job.folder / "crossover",
        f"Predicted call time of MLA attention, {sizes}",
    )
    job.plots += line_plot(
        speedup_series(dense),
        job.folder / "speedup",
        title=f"{KERNEL}: predicted gain over the better pure path\n{sizes}",
        x_label="query tokens per request, s",
        y_label="time of the better pure path / time of mla_var6_plus",
        log_x=True,
        reference=1.0,
    )
    step.data = [path.name for path in job.plots]
    step.summary = ", ".join(path.name for path in job.plots)
    images = [path for path in job.plots if path.suffix == ".png"]
    step.text = "\n\n".join(f"![{path.stem}]({path.name})" for path in images) + "\n"


def _write(job: _Job, env: dict[str, Any]) -> OverviewResult:
    report = job.folder / "report.md"
    write_atomic(report, overview_page(job.steps, env, job.sizes, KERNEL))
    write_json(
        job.folder / "report.json",
        {
            "kind": "overview",
            "kernel": KERNEL,
            "sizes": job.sizes,
            "ok": all(step.status != "failed" for step in job.steps),
            "environment": env,
            "steps": [
                {
                    "name": step.name,
                    "title": step.title,
                    "status": step.status,
                    "seconds": round(step.seconds, 3),
                    "reason": step.reason or None,
                    "summary": step.summary,
                    "data": step.data,
                }
                for step in job.steps
            ],
            "plots": [path.name for path in job.plots],
        },
    )
    return OverviewResult(
        job.folder, report, job.steps, job.plots, job.compiled, job.sweeps, job.measured
    )
