"""The main job, `make run`: what the product does for one shape, in one report.

With a GPU: the kernel that `mla_attention` chooses and why, then one table of the call, the mix and
the pure paths in both languages and the installed peers, checked and timed as `hyper-mla bench`
does. Without one: a small problem on the CPU interpreter with the check, the compile report for all
targets, and predicted times for the known devices.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.bench import page, session
from mla_var3.bench.analysis import shape_groups
from mla_var3.bench.measure import QUICK_ROUNDS, QUICK_SECONDS
from mla_var3.bench.page import group_rows, method, troubles
from mla_var3.bench.plots import draw_plots, line_plot
from mla_var3.bench.record import PROJECTION, BenchRecord
from mla_var3.bench.suites import DESIGN, EIGHT_BIT_PEERS, PEERS, main_job_case, mla_kernels
from mla_var3.conf.devices import load_devices
from mla_var3.errors import CheckFailedError, HyperMlaError, KernelCompileError
from mla_var3.op.mla.model.times import IDEAL
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.sweep import DeviceSweep, sweep
from mla_var3.runtime import paths
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.environment import environment, environment_rows
from mla_var3.runtime.markdown import front_matter, microseconds, table, write_json
from mla_var3.runtime.paths import TARGETS, output_folder, write_atomic
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, figures, profile_plan
from mla_var3.runtime.workflow import Progress, RunOptions, no_progress, pick_device, prepare

log = logging.getLogger(__name__)

TITLE = "MLA attention, end to end"
KERNEL = DESIGN
SIZES = {"b": 32, "s": 16, "t": 4096, "h": 128}
"""The shape of the published comparison."""
S_VALUES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Query lengths of the predictions."""
CPU_SIZES = {"b": 2, "s": 4, "t": 200, "h": 16}
QUICK_CPU_SIZES = {"b": 2, "s": 2, "t": 100, "h": 8}
MAIN_PEERS = tuple(name for name in PEERS if name not in ("fa3_one_split", *EIGHT_BIT_PEERS))

TUNE_SECONDS = 15.0
"""On an H200 the rest of the job takes about 45 s."""

StepHook = Callable[["Step"], None]


@dataclass
class OverviewOptions:
    """What to do.

    Attributes:
        quick: on a GPU one short round with default tilings; on the CPU a smaller problem and one
            compile target.
        tune_seconds: time to search tilings on a GPU, for all kernels together.
        sizes: b, s, t, h where they differ from `SIZES`; widths where they are not the default.
        on_lost: called with the record when a kernel destroyed the CUDA context or does not
            return; in the second case it must end the process.
    """

    quick: bool = False
    out_dir: Path | None = None
    device: str = "auto"
    tune_seconds: float = TUNE_SECONDS
    peer_libs: Path | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    progress: Progress = no_progress
    on_start: StepHook = lambda step: None
    on_end: StepHook = lambda step: None
    on_lost: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        # Checks both, also where nothing is measured.
        session.SessionOptions(tune_seconds=self.tune_seconds, peer_libs=self.peer_libs)


@dataclass
class Step:
    """One step of the job and its outcome, "ok" or "failed" for a reason.

    The summary is one line for the screen, the text markdown, the data JSON-ready.
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
    """The report, a markdown page in a folder, and what is in it."""

    folder: Path
    report: Path
    steps: list[Step] = field(default_factory=list)
    plots: list[Path] = field(default_factory=list)
    compiled: list[CompileReport] = field(default_factory=list)
    sweeps: list[DeviceSweep] = field(default_factory=list)
    record: BenchRecord | None = None

    @property
    def ok(self) -> bool:
        """Whether no step failed."""
        return all(step.status != "failed" for step in self.steps)


@dataclass
class _Job:
    options: OverviewOptions
    sizes: dict[str, Any]
    environment: dict[str, Any]
    result: OverviewResult

    @property
    def folder(self) -> Path:
        return self.result.folder

    def do(self, name: str, title: str, action: Callable[[_Job, Step], None]) -> None:
        step = Step(name, title)
        self.result.steps.append(step)
        self.options.on_start(step)
        start = time.perf_counter()
        try:
            action(self, step)
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
    sizes: dict[str, Any] = {**SIZES, **options.sizes}
    MlaProblem(**sizes)  # bad sizes are the caller's mistake, not a failed step
    with output_folder(folder):
        job = _Job(options, sizes, environment(), OverviewResult(folder, folder / "report.md"))
        if where == "cuda":
            job.do("choose", "The choice of mla_attention", _choose)
            job.do("measure", "Measured", _measure)
        else:
            job.do("check", f"{KERNEL} on the CPU interpreter", _cpu_check)
            job.do("compile", f"{KERNEL} compiled", _compile)
            job.do("predict", "Predicted times, not measured", _predict)
        _write(job)
    return job.result


def _choose(job: _Job, step: Step) -> None:
    from mla_var3.attention.call import explain

    choice = explain(**job.sizes)
    step.summary = str(choice)
    rows = []
    for each in choice.candidates:
        time_us = microseconds(each.measured_us or each.predicted_us)
        remark = each.refusal or each.missing or each.source
        rows.append((each.kernel, each.language, time_us, remark))
    headers = ("kernel", "language", "call, estimated", "remark")
    step.text = f"By the sizes alone: {choice}.\n\n{table(headers, rows)}"
    step.data = choice.to_dict()


def _measure(job: _Job, step: Step) -> None:
    quick = job.options.quick
    record = job.result.record = BenchRecord("overview", job.environment)
    options = session.SessionOptions(
        tune=not quick,
        tune_seconds=job.options.tune_seconds,
        peer_libs=job.options.peer_libs,
        progress=job.options.progress,
        on_lost=job.options.on_lost,
    )
    if quick:
        options.rounds, options.max_seconds = QUICK_ROUNDS, QUICK_SECONDS
    case = main_job_case(MlaProblem(**job.sizes), mla_kernels(), MAIN_PEERS)
    session.measure(record, [case], options, job.folder / "record.json")
    headers, lines = measured_table(record)
    absent = troubles(record)
    step.text = table(headers, lines)
    step.text += "\n" + "".join(f"- {row.kernel}: {row.note}\n" for row in record.rows if row.note)
    step.text += "\n" + table(("not measured", "status", "reason"), absent) if absent else ""
    step.text += "\n" + "".join(f"- {text}\n" for text in method(record))
    plots = [plot for plot in draw_plots(record, job.folder) if plot.files]
    job.result.plots += [file for plot in plots for file in plot.files]
    pictures = (f"![{p.title}]({p.files[0].name})\n\n{p.caption}\n" for p in plots)
    step.text += "\n" + "\n".join(pictures)
    rows = [dict(zip(headers, line, strict=True)) for line in lines]
    step.data = {"record": "record.json", "rows": rows}
    step.summary = ", ".join(f"{row['kernel']} {row['call µs']} µs" for row in rows[:3])
    if record.failed:
        raise CheckFailedError("; ".join(f"{row.label}: {row.reason}" for row in record.failed))


def measured_table(record: BenchRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows of the main job's shape, fastest call first."""
    for group in shape_groups(record.rows):
        shown = [row for row in group_rows(group) if row.source != PROJECTION]
        return page.headers(group), [page.cells(group, row) for row in shown]
    return page.HEADERS, []


def _plan(**sizes: Any) -> KernelPlan:
    plan: KernelPlan = paths.plan_class(paths.find_kernel(KERNEL))(**sizes)
    return plan


def _cpu_check(job: _Job, step: Step) -> None:
    sizes = QUICK_CPU_SIZES if job.options.quick else CPU_SIZES
    lengths = (sizes["t"], sizes["t"] // 3 + 1)
    plan = _plan(**sizes, lengths=lengths, n=sizes["t"] // 3)
    options = RunOptions(device="cpu", check=True, progress=job.options.progress)
    prepared = prepare(plan, options)
    check, params = prepared.check, prepared.plan.params()
    assert check is not None
    shown = " ".join(f"{k}={v}" for k, v in params.items() if v is not None)
    step.text = (
        "The kernels' own code, run tile by tile on the CPU by the interpreter, against the fp32 "
        f"reference.\n\nProblem: {shown}\n\n" + figures.check_markdown(check)
    )
    step.data = {"params": params, "check": check.to_dict()}
    step.summary = figures.check_summary(check)
    check.require()


def _compile(job: _Job, step: Step) -> None:
    plan = _plan(**job.sizes)
    targets = TARGETS[:1] if job.options.quick else TARGETS
    options = RunOptions(
        targets=targets, out_dir=job.folder / "static", progress=job.options.progress
    )
    result = profile_plan(plan, NsightProfType.STATIC, options)
    reports = job.result.compiled = figures.compile_reports(result)
    step.text = (
        "Compiled ahead of time, without a GPU; figures read from the machine code. Artifacts: "
        "[static](static/report.md).\n\n" + figures.compile_markdown(reports)
    )
    step.data = {"params": plan.params(), "reports": [report.to_dict() for report in reports]}
    failed = [report for report in reports if report.error]
    spilling = [report for report in reports if not report.error and report.spills]
    compiled = f"{len(reports) - len(failed)} of {len(reports)} compile"
    step.summary = f"{compiled}, {len(spilling)} with spills"
    if failed:
        names = ", ".join(f"{report.kernel} for {report.target}" for report in failed)
        raise KernelCompileError(f"{names}: does not compile: {failed[0].error}")


def _predict(job: _Job, step: Step) -> None:
    problem = MlaProblem(**job.sizes)
    lengths = sorted({*S_VALUES, problem.s})
    sweeps = job.result.sweeps = [sweep(problem, spec, lengths) for spec in load_devices().values()]
    # Kernels are ranked only where they were timed.
    shown = next((entry for entry in sweeps if entry.fitted), sweeps[0])
    series = {
        kernel: [(s, each.advised_us) for s, each in zip(shown.s_values, estimates, strict=True)]
        for kernel, estimates in shown.predictions.items()
    }
    sizes = ", ".join(f"{name}={value}" for name, value in job.sizes.items() if name != "s")
    labels: dict[str, Any] = {"title": f"{shown.spec.name}, {sizes}"}
    labels |= {"x_label": "query tokens per request, s"}
    labels |= {"y_label": f"predicted {shown.heading}, µs"}
    job.result.plots += line_plot(series, job.folder / "crossover", log=True, **labels)
    step.text = f"{_prediction_markdown(sweeps)}\n![crossover](crossover.png)\n"
    step.data = [entry.to_dict() for entry in sweeps]
    step.summary = f"{len(sweeps)} devices, s from {lengths[0]} to {lengths[-1]}"


def _prediction_markdown(sweeps: Sequence[DeviceSweep]) -> str:
    """Predicted times; only devices on which the kernels were timed name the fastest."""
    parts = [
        "These are predictions, not measurements: call times, from q_nope to the output. Where "
        "kernels were timed on a device they follow from recorded rates, at the power limit where "
        f"energies are known. Elsewhere they are {IDEAL}: lower bounds that rank nothing.\n",
    ]
    for entry in sweeps:
        rows: list[tuple[object, ...]] = []
        for i, s in enumerate(entry.s_values):
            times = [microseconds(values[i].advised_us) for values in entry.predictions.values()]
            fastest = (entry.fastest(i),) if entry.fitted else ()
            rows.append((s, *times, entry.predictions[KERNEL][i].choice.get("n"), *fastest))
        parts.append(f"### {entry.spec.name} ({entry.spec.target}), {entry.heading}\n")
        last = ("fastest",) if entry.fitted else ()
        parts.append(table(("s", *entry.predictions, f"n of {KERNEL}", *last), rows))
    return "\n".join(parts)


SUMMARY_HEADERS = ("step", "outcome", "seconds", "result")


def summary_rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """One line per step, under `SUMMARY_HEADERS`."""
    return [(s.title, s.status, f"{s.seconds:.1f}", s.reason or s.summary) for s in steps]


def _page(job: _Job) -> str:
    """The whole report: circumstances, summary and one section per step."""
    device = (job.environment.get("gpu") or {}).get("name")
    facts = [
        ("device", device or "no GPU: CPU interpreter, compile reports and predictions"),
        ("problem", " ".join(f"{name}={value}" for name, value in job.sizes.items())),
        *environment_rows(job.environment),
    ]
    head = {"kind": "overview", "sizes": job.sizes, "ok": job.result.ok, "device": device}
    parts = [
        front_matter(head),
        f"# {TITLE}\n",
        table(("", ""), facts),
        "## Summary\n",
        table(SUMMARY_HEADERS, summary_rows(job.result.steps)),
    ]
    for step in job.result.steps:
        parts.append(f"## {step.title}\n")
        if step.status != "ok":
            parts.append(f"**{step.status}**: {step.reason}\n")
        if step.text:
            parts.append(step.text)
    return "\n".join(parts)


def _write(job: _Job) -> None:
    result = job.result
    write_atomic(result.report, _page(job))
    steps = [{**vars(step), "seconds": round(step.seconds, 3)} for step in result.steps]
    for step in steps:
        del step["text"]
    report = {"kind": "overview", "sizes": job.sizes, "ok": result.ok}
    report |= {"environment": job.environment, "steps": steps}
    report |= {"plots": [path.name for path in result.plots]}
    write_json(job.folder / "report.json", report)
