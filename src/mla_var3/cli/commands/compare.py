"""`hyper-mla compare`: runs, versions or kernels side by side, against the first of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.bench.predict import plan_estimate
from mla_var3.cli import console
from mla_var3.cli.arguments import Parser
from mla_var3.cli.options import RUN_OPTIONS, PlanParser, Request
from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnsupportedError
from mla_var3.report import compare as comparison
from mla_var3.runtime import workflow
from mla_var3.runtime.paths import KernelId, find_kernel, output_root, plan_class, timestamp
from mla_var3.runtime.plan import KernelPlan, Target, plan_dtype
from mla_var3.runtime.profiling import profile_plan
from mla_var3.runtime.profiling.common import kernel_figures, stage_figures

_RUN_OPTIONS = ("prof_type", "bench_runs", "no_autotune", "retune", "check")


def add_arguments(parser: Parser) -> None:
    """The options of the command."""
    text = "profile output folder, or kernel[:version]; the first is the baseline"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)
    parser.add_flag("force", "also different problems or devices")
    parser.add_option("json", "FILE", "write the figures here too", type=Path)
    text = "folder of table and plot (default: out/compare/<timestamp>)"
    parser.add_option("out_dir", "FOLDER", text, type=Path)
    group = parser.add_argument_group("kernels", "for runs that are given as kernel[:version]")
    group.add_flag("static", "compare predictions; runs nothing and needs no GPU")
    text = "device of the predictions (default: this one, or an NVIDIA H200)"
    group.add_option("for_device", "NAME", text)
    unset: dict[str, Any] = {"default": argparse.SUPPRESS}
    group.add_sizes(note="", **unset)
    group.add_option("dtype", "NAME", "bfloat16 or float16", **unset)
    group.add_lengths(note="", **unset)
    PlanParser.add_run_options(group, ("language", *_RUN_OPTIONS))


def compare_command(parser: Parser, argv: Sequence[str]) -> int:
    """Compare what the command line names; returns the exit code."""
    values = parser.parse(argv)
    items: list[str] = values.pop("runs")
    if len(items) < 2:
        raise console.UsageError(
            f"RUN: expected at least two folders or kernel[:version] to compare, got {len(items)}"
        )
    own = {name: values.pop(name) for name in ("force", "json", "out_dir")}
    sources = [_source(item, values) for item in items]
    if values["for_device"] and not values["static"]:
        raise console.UsageError("--for_device: only together with --static")
    if values["static"] and (running := [n for n in _RUN_OPTIONS if n in values]):
        raise console.UsageError(f"--{running[0]}: not together with --static, which runs nothing")
    given = [n for n in values if n not in ("static", "for_device") or values[n]]
    if given and all(isinstance(source, Path) for source in sources):
        options = ", ".join(f"--{name}" for name in given)
        raise console.UsageError(
            f"{options}: only for runs given as kernel[:version], got folders alone"
        )
    # Records first: one that cannot be read should not cost a profiling run.
    recorded = {s: comparison.load_run(s) for s in sources if isinstance(s, Path)}
    runs = [recorded[s] if isinstance(s, Path) else _made(s, values) for s in sources]
    result = comparison.compare(runs, force=own["force"])
    baseline = result.runs[0]
    title = f"vs baseline {baseline.label}, {baseline.device or 'no device'}"
    console.print_table(title, result.headers(), result.cells())
    for text in result.notes():
        console.say(f"note: {text}", "yellow")
    folder = own["out_dir"] or output_root() / "compare" / timestamp()
    console.say(f"comparison: {comparison.write_comparison(result, folder, own['json'])}", "bold")
    return console.EXIT_OK


def _source(item: str, values: dict[str, Any]) -> Path | KernelId:
    """A folder that exists, or a kernel."""
    path = Path(item)
    if path.exists() or "/" in item:
        return path
    with console.usage_errors():
        return find_kernel(item, None, values.get("language"))


def _made(kernel: KernelId, values: dict[str, Any]) -> comparison.Run:
    """Predict or profile a kernel with the options that all kernels share."""
    shared = {k: v for k, v in values.items() if k not in ("static", "for_device", "language")}
    parser = PlanParser(plan_class(kernel)(), kernel.full_name)
    unknown = [name for name in shared if name not in parser.flags and name not in RUN_OPTIONS]
    if unknown:
        raise console.UsageError(f"--{unknown[0]}: {kernel.full_name} has no such field")
    with console.usage_errors():
        request = parser.request(shared)
    if values["static"]:
        return _predicted(request.plan, values["for_device"])
    return _profiled(request)


CALL_TIME, STEADY_TIME = "call time, predicted (us)", "call time, steady (us)"


def _predicted(plan: KernelPlan, device: str | None) -> comparison.Run:
    with console.usage_errors():
        spec = device_spec(device) if device else workflow.planning_device()
    dtype = plan_dtype(plan)
    chosen = plan.resolved(Target.of(spec))
    stage = workflow.empty_stage(chosen)
    total = stage_figures(stage, spec, dtype)
    expected = plan_estimate(chosen, spec)
    if expected is not None and expected.fitted:
        total.extra = {comparison.PREDICTED_TIME: expected.kernel_us, CALL_TIME: expected.call_us}
        if expected.steady_call_us is not None:
            total.extra[STEADY_TIME] = expected.steady_call_us
    return comparison.Run(
        label=chosen.name,
        kernel=chosen.name,
        language=chosen.kernel_id.language,
        mode="predicted",
        device=spec.name,
        params=chosen.params(),
        total=total,
        stages={figures.name: figures for figures in kernel_figures(stage, spec, dtype)},
    )


def _profiled(request: Request) -> comparison.Run:
    if not workflow.cuda_available():
        raise UnsupportedError(
            f"{request.plan.name}: expected a GPU to run it on, got none; --static compares "
            "predictions, and folders of earlier runs can be compared anywhere"
        )
    console.show_log()
    with console.ProgressReporter() as progress:
        request.run.progress = progress
        result = profile_plan(request.plan, request.mode, request.run)
    if result.check is not None:
        result.check.require()
    return comparison.run_of_result(result)
