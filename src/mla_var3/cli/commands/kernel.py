"""The command line of a kernel: `python -m mla_var3.kernel <kernel> [<version>] [options]`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mla_var3
from mla_var3.cli import console
from mla_var3.cli.arguments import Parser, leading_words, take_kernel
from mla_var3.cli.options import PlanParser, Request
from mla_var3.errors import UnknownNameError, UnsupportedError
from mla_var3.runtime import paths, workflow
from mla_var3.runtime.paths import KernelId
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, default_mode, profile_plan
from mla_var3.runtime.profiling.figures import compile_reports
from mla_var3.runtime.stage import require_valid
from mla_var3.runtime.workflow import RunOptions, cuda_available, empty_stage, pick_device, prepare

CPU_CHECK_FLOPS = 3e9
"""Largest problem that the default check hands to the interpreter: some ten seconds of work."""

_TIMING = ("bench_runs", "retune", "tune_max_iters", "tune_seconds", "refine")
_ARTIFACTS = ("bench_runs", "out_dir", "label")


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m mla_var3.kernel <kernel> [<version>] [options]`; returns the exit code."""
    return console.guarded(lambda: _main(_arguments(argv)))


def main_for_design(package: str, argv: Sequence[str] | None = None) -> int:
    """`python -m mla_var3.kernel.<language>.<layer>.<design> [<version>] [options]`."""
    return console.guarded(lambda: _main_for_design(package, _arguments(argv)))


def run_plan(plan: KernelPlan, argv: Sequence[str] | None = None) -> int:
    """The command line of one plan, whose values are the defaults; returns the exit code."""
    return console.guarded(lambda: _run(_importable(plan), _arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> int:
    kernel, rest = take_kernel(argv)
    prog = f"python -m {paths.KERNEL_PACKAGE}"
    if kernel is not None:
        return run_kernel(kernel, rest, f"{prog} {kernel.full_name}")
    kernels = sorted({k.full_name for k in paths.discover_kernels()})
    text = "Tune, check and profile a kernel; <kernel> --help lists its options."
    usage, known = f"{prog} <kernel> [<version>] [options]", f"kernels: {', '.join(kernels)}"
    if rest:
        Parser(prog=prog, usage=usage, description=text, epilog=known).parse(rest)
    raise console.UsageError(f"kernel: expected one of {', '.join(kernels)}, got none")


def _main_for_design(package: str, argv: list[str]) -> int:
    folder, _, design = package.removeprefix(f"{paths.KERNEL_PACKAGE}.").split(".")
    languages = {name: key for key, name in paths.LANGUAGES.items()}
    words, rest = leading_words(argv, 1)
    with console.usage_errors():
        kernel = paths.find_kernel(design, words[0] if words else None, languages[folder])
    return run_kernel(kernel, rest, f"python -m {package}")


def run_kernel(kernel: KernelId, argv: list[str], prog: str) -> int:
    """The command line of one kernel version."""
    return _run(paths.plan_class(kernel)(), argv, prog)


def _importable(plan: KernelPlan) -> KernelPlan:
    """The same plan, of the class that importing its module gives.

    A kernel file that is run itself is the module `__main__`, which has no kernel id.
    """
    if type(plan).__module__ != "__main__":
        return plan
    module = sys.modules["__main__"]
    if module.__spec__ is not None:
        name = module.__spec__.name
    else:
        root, file = Path(mla_var3.__path__[0]).parent, Path(getattr(module, "__file__", ""))
        name = ".".join(Path(os.path.relpath(file.resolve(), root.resolve())).with_suffix("").parts)
    if paths.kernel_id_of_module(name) is None:
        return plan
    imported: type[KernelPlan] = getattr(importlib.import_module(name), type(plan).__name__)
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init}
    default = imported()
    for field, tiling in plan.tiling_fields().items():
        fields[field] = dataclasses.replace(getattr(default, field), **tiling.to_dict())
    return imported(**fields)


def _run(plan: KernelPlan, argv: list[str], prog: str = "") -> int:
    module = sys.modules.get(type(plan).__module__)
    contract = inspect.cleandoc((module and module.__doc__) or type(plan).__doc__ or "")
    parser = PlanParser(plan, prog or plan.name, contract.split("\n\n")[0])
    with console.usage_errors():
        values = parser.parse(argv)
        language = plan.kernel_id.language
        if values.get("language", language) != language:
            if values["language"] not in paths.LANGUAGES:
                raise UnknownNameError("language", values["language"], paths.LANGUAGES)
            raise console.UsageError(
                f"--language: this is the {language} kernel; use python -m {paths.KERNEL_PACKAGE} "
                f"{plan.kernel_id.design} --language={values['language']}"
            )
        request = parser.request(values)
    return execute(request)


@dataclass(frozen=True)
class Route:
    """How this machine serves a request: `on_cpu` in the interpreter, the check beside the mode.

    `may_shrink`: a problem too large for the interpreter may be run at smaller sizes.
    """

    mode: NsightProfType
    on_cpu: bool
    check: bool = False
    may_shrink: bool = False
    message: str = ""


def choose_route(request: Request, has_gpu: bool) -> Route:
    """Decide how to serve a request; never falls back from what was asked for explicitly."""
    device, static = request.run.device, NsightProfType.STATIC
    on_cpu = device == "cpu" or (device == "auto" and not has_gpu)
    compile_only = "target" in request.given
    mode = request.mode or (static if compile_only else None)
    if mode is None:
        if device == "cuda":
            pick_device(device)  # a missing GPU is the error to show, not what it would have run
        mode = default_mode("cpu" if on_cpu else "cuda")
    if compile_only and mode is not static:
        raise console.UsageError(f"--target: only for --prof_type=static, got {mode.value}")
    if request.tiling_given and request.run.autotune and not (mode is static or on_cpu):
        given = ", ".join(f"--{name}" for name in request.tiling_given)
        raise console.UsageError(
            f"{given}: expected together with --no_autotune, which was not given"
        )
    if device == "cuda" and not (mode is static and not request.run.check):
        pick_device(device)
    by_default = on_cpu and request.mode is None and not compile_only
    interpreted = not on_cpu or runs_on_cpu(request.plan)
    if not interpreted:
        _require_nothing_to_run(request, mode, by_default)
    reason = "--device=cpu" if device == "cpu" else "no GPU here"
    more = "; the check needs a GPU, because this language has no interpreter"
    more = " and the check on the CPU interpreter" if interpreted else more
    message = f"{reason}: static mode (compile report + prediction){more}" if by_default else ""
    explicit = device == "cpu" and (request.run.check or request.mode is not None)
    return Route(
        mode=mode,
        on_cpu=on_cpu,
        check=mode is static and interpreted and (request.run.check or by_default),
        may_shrink=on_cpu and mode in (static, NsightProfType.DISABLED) and not explicit,
        message=message,
    )


def without_effect(request: Request, route: Route) -> list[str]:
    """The options that were given but mean nothing to the mode: it times or writes nothing."""
    names: tuple[str, ...] = _ARTIFACTS if route.mode is NsightProfType.DISABLED else ()
    if route.on_cpu or route.mode is NsightProfType.STATIC:
        names += _TIMING
    if "out_dir" in request.given:
        names += ("label",)
    return [f"--{name}" for name in dict.fromkeys(names) if name in request.given]


def runs_on_cpu(plan: KernelPlan) -> bool:
    """Whether the language of every kernel of a plan has an interpreter for the CPU."""
    return all(kernel.runs_on_cpu for kernel in empty_stage(plan).kernels())


def _require_nothing_to_run(request: Request, mode: NsightProfType, by_default: bool) -> None:
    """Refuse a request to run, on the CPU, kernels that run on GPUs only."""
    if request.run.check:
        asked = "--check"
    elif mode is NsightProfType.DISABLED:
        asked = f"--prof_type={mode.value}"
    elif by_default and request.run.device == "cpu":
        asked = "--device=cpu"
    else:
        return
    kernel = request.plan.kernel_id
    others = {k.language for k in paths.discover_kernels() if k.design == kernel.design}
    instead = "--prof_type=static compiles it and predicts its time here"
    if paths.DEFAULT_LANGUAGE in others and kernel.language != paths.DEFAULT_LANGUAGE:
        instead += f"; --language={paths.DEFAULT_LANGUAGE} has a version that the CPU can run"
    raise UnsupportedError(
        f"{asked}: expected a GPU for {kernel.full_name} ({kernel.language}), whose language has "
        f"no interpreter, got the CPU; {instead}"
    )


def execute(request: Request) -> int:
    """Run a request and print what came out; returns the exit code."""
    route = choose_route(request, cuda_available())
    if route.message:
        console.say(route.message, "bold")
    if unused := without_effect(request, route):
        where = " on the CPU" if route.on_cpu else ""
        console.note(f"without effect in {route.mode.value} mode{where}: {', '.join(unused)}")
    console.show_log()
    plan, run = request.plan, request.run
    static = route.mode is NsightProfType.STATIC
    if route.check and not route.may_shrink:
        # Before minutes of compiling, not after them.
        workflow.require_memory(plan, empty_stage(plan), "cpu" if route.on_cpu else "cuda")
    if request.tilings_chosen:
        for kernel in empty_stage(plan).kernels():
            require_valid(kernel.tiling, kernel.plan)
    if route.may_shrink and not static:
        plan = checkable(plan)
    with console.ProgressReporter() as progress:
        # Static mode runs nothing; what --check asks for is done beside it.
        asked = dataclasses.replace(run, check=run.check and not static, progress=progress)
        result = profile_plan(plan, route.mode, asked)
    console.print_result(result)
    check = result.check
    if route.check:
        plan = checkable(plan) if route.may_shrink else plan
        device = "cpu" if route.on_cpu else run.device
        with console.ProgressReporter() as progress:
            options = RunOptions(device=device, autotune=False, check=True, progress=progress)
            prepared = prepare(plan, options)
        plan, check = prepared.plan, prepared.check
    if check is not None:
        where = "CPU interpreter" if route.on_cpu else "GPU"
        console.print_check(check, f"check on the {where}: {describe_sizes(plan)}")
    if result.out_dir is not None:
        console.say(f"report: {result.out_dir / 'report.md'}", "bold")
    passed = check is None or check.passed
    compiled = not any(report.error for report in compile_reports(result))
    return console.EXIT_OK if passed and compiled else console.EXIT_FAILED


def checkable(plan: KernelPlan) -> KernelPlan:
    """The plan, or a smaller one when the interpreter would take too long; says which."""
    flops = empty_stage(plan).cost().flops
    if flops <= CPU_CHECK_FLOPS:
        return plan
    small = plan.cpu_check_plan()
    console.say(
        f"{describe_sizes(plan)} is {flops / 1e9:.3g} GFLOP, too much for the interpreter: it runs "
        f"{describe_sizes(small)} instead; --device=cpu --check runs the full problem"
    )
    return small


def describe_sizes(plan: KernelPlan) -> str:
    """The plan's fields that are set, in one line."""
    parts = []
    for name, value in plan.params().items():
        if isinstance(value, (tuple, list)):
            value = ",".join(map(str, value)) if len(value) <= 8 else f"<{len(value)} values>"
        if value is not None:
            parts.append(f"{name}={value}")
    return " ".join(parts)
