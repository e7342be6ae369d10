"""`hyper-mla show`: the contract, options, cost, candidates and cached tunings of one kernel."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mla_var3.cli.arguments import Parser, parse, take_kernel
from mla_var3.cli.console import EXIT_OK, UsageError, say, stdout, usage_errors
from mla_var3.cli.options import (
    RUN_OPTIONS,
    build_parser,
    build_request,
    plan_options,
)
from mla_var3.runtime import paths
from mla_var3.runtime.markdown import byte_count, flop_count, json_ready, microseconds, number
from mla_var3.runtime.paths import KernelId
from mla_var3.runtime.plan import KernelPlan, Target, plan_dtype, plan_targets
from mla_var3.runtime.workflow import empty_stage, planning_device


def add_arguments(parser: Parser) -> None:
    """The arguments that are not the kernel's own."""
    parser.add_argument("kernel", help="kernel id, such as mla_var6_plus")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    parser.add_argument("--language", metavar="NAME", help="cutile-dsl or cute-dsl")
    parser.add_argument("--json", action="store_true", help="print JSON")


def show_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print what one kernel offers, and its cost for the problem that the options describe."""
    kernel, rest = take_kernel(argv)
    if kernel is None:
        if {"-h", "--help"} & set(rest):
            parser.print_help()
            return EXIT_OK
        raise UsageError("kernel: expected the name of a kernel, got none")
    return _show(kernel, rest)


def _show(kernel: KernelId, argv: list[str]) -> int:
    options = plan_options(paths.plan_class(kernel)(), RUN_OPTIONS)
    parser = build_parser(options, f"hyper-mla show {kernel.full_name}")
    parser.add_argument("--json", action="store_true", help="print JSON")
    with usage_errors():
        values = parse(parser, argv, options)
        request = build_request(options, values)
    facts = _facts(kernel, request.plan)
    if values["json"]:
        print(json.dumps(json_ready(facts), indent=2))
    else:
        _print_facts(facts)
    return 0


def _facts(kernel: KernelId, plan: KernelPlan) -> dict[str, Any]:
    device = planning_device()
    targets = plan_targets(plan)
    here = Target.of(device)
    dtype = plan_dtype(plan)
    rates = here.rates(dtype)
    resolved = plan.resolve(*rates)
    return {
        "kernel": kernel.full_name,
        "language": kernel.language,
        "module": kernel.module,
        "contract": inspect.cleandoc(sys.modules[type(plan).__module__].__doc__ or ""),
        "targets": list(targets),
        "fields": plan.params(),
        "tilings": {field: tiling.to_dict() for field, tiling in plan.tiling_fields().items()},
        "predicted_on": device.name,
        "resolved": resolved.params(),
        "stages": [
            {
                "name": stage.name,
                "flops": stage.cost().flops,
                "bytes": stage.cost().bytes,
                "intensity": stage.cost().intensity,
                "predicted_us": stage.predict_us(*device.peak_rates(dtype)),
            }
            for stage in resolved.plan_empty(*rates).kernels()
        ],
        "candidates": {code: _candidates(plan, Target(code, device)) for code in targets},
        "tunings": [str(path) for path in _tuning_files(kernel)],
    }


def _candidates(plan: KernelPlan, target: Target) -> dict[str, list[dict[str, Any]]]:
    """Tilings the autotuner would try, by stage."""
    stage = empty_stage(plan.resolved(target))
    return {k.name: [tiling.to_dict() for tiling in k.autotune_configs] for k in stage.kernels()}


def _tuning_files(kernel: KernelId) -> list[Path]:
    root = paths.cache_root() / "kernel-autotune"
    return sorted(root.glob(f"*/{kernel.language}/{kernel.full_name}/*.json"))


def _print_facts(facts: dict[str, Any]) -> None:
    console = stdout()
    say(f"{facts['kernel']} ({facts['language']}), {facts['module']}", "bold")
    say(facts["contract"])
    say("")
    fields = Table("field", "value", title="plan", title_justify="left")
    for name, value in facts["fields"].items():
        chosen = facts["resolved"].get(name)
        shown = "none" if value is None else str(value)
        if value is None and chosen is not None:
            shown += f" ({chosen} by the model for {facts['predicted_on']})"
        fields.add_row(name, shown)
    for owner, tiling in facts["tilings"].items():
        fields.add_row(owner, _label(tiling))
    console.print(fields)
    cost = Table(
        *("stage", "FLOPs", "bytes", "FLOP/B", f"ideal on {facts['predicted_on']}"),
        title="cost at these sizes",
        title_justify="left",
    )
    for stage in facts["stages"]:
        cost.add_row(
            stage["name"],
            flop_count(stage["flops"]),
            byte_count(stage["bytes"]),
            number(stage["intensity"]),
            microseconds(stage["predicted_us"]),
        )
    console.print(cost)
    candidates = Table(
        "target", "stage", "tiling candidates, the default first", title_justify="left"
    )
    for target, stages in facts["candidates"].items():
        for stage, tilings in stages.items():
            candidates.add_row(target, stage, "\n".join(_label(tiling) for tiling in tilings))
    console.print(candidates)
    found = facts["tunings"]
    say("cached tunings: " + ("none" if not found else ""))
    for path in found:
        say(f"  {path}")


def _label(tiling: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in tiling.items() if value is not None)
