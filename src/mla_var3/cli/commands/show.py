"""`hyper-mla show`: the contract, options, cost, candidates and cached tunings of one kernel."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

from mla_var3.cli.arguments import Parser, require_kernel
from mla_var3.cli.console import EXIT_OK, print_json, print_table, say, usage_errors
from mla_var3.cli.options import PlanParser
from mla_var3.runtime import paths
from mla_var3.runtime.markdown import byte_count, flop_count, microseconds, number
from mla_var3.runtime.paths import KernelId
from mla_var3.runtime.plan import KernelPlan, Target, plan_dtype, plan_targets
from mla_var3.runtime.workflow import empty_stage, planning_device


def add_arguments(parser: Parser) -> None:
    """The arguments that are not the kernel's own."""
    parser.add_argument("kernel", help="kernel id, such as mla_var6_plus")
    parser.add_argument("version", nargs="?", help="version such as v2; v0 is the base version")
    parser.add_argument("--language", metavar="NAME", help="cutile-dsl or cute-dsl")
    parser.add_json()


def show_command(parser: Parser, argv: Sequence[str]) -> int:
    """Print what one kernel offers, and its cost for the problem that the options describe."""
    kernel, rest = require_kernel(parser, argv)
    own = PlanParser(paths.plan_class(kernel)(), f"hyper-mla show {kernel.full_name}")
    own.add_json()
    with usage_errors():
        values = own.parse(rest)
        request = own.request(values)
    facts = _facts(kernel, request.plan)
    if values["json"]:
        print_json(facts)
    else:
        _print_facts(facts)
    return EXIT_OK


def _facts(kernel: KernelId, plan: KernelPlan) -> dict[str, Any]:
    device = planning_device()
    targets = plan_targets(plan)
    here = Target.of(device)
    resolved = plan.resolved(here)
    rates = device.peak_rates(plan_dtype(plan))
    tunings = paths.cache_root() / "kernel-autotune"
    stages = []
    for stage in empty_stage(resolved).kernels():
        cost, time_us = stage.cost(), stage.predict_us(*rates)
        work = {"flops": cost.flops, "bytes": cost.bytes, "intensity": cost.intensity}
        stages.append({"name": stage.name, **work, "predicted_us": time_us})
    return {
        **{"kernel": kernel.full_name, "language": kernel.language, "module": kernel.module},
        "contract": inspect.cleandoc(sys.modules[type(plan).__module__].__doc__ or ""),
        "targets": list(targets),
        "fields": plan.params(),
        "tilings": {field: tiling.to_dict() for field, tiling in plan.tiling_fields().items()},
        "predicted_on": device.name,
        "resolved": resolved.params(),
        "stages": stages,
        "candidates": {code: _candidates(plan, Target(code, device)) for code in targets},
        "tunings": sorted(map(str, tunings.glob(f"*/{kernel.language}/{kernel.full_name}/*.json"))),
    }


def _candidates(plan: KernelPlan, target: Target) -> dict[str, list[dict[str, Any]]]:
    """Tilings the autotuner would try, by stage."""
    stage = empty_stage(plan.resolved(target))
    return {k.name: [tiling.to_dict() for tiling in k.autotune_configs] for k in stage.kernels()}


def _print_facts(facts: dict[str, Any]) -> None:
    say(f"{facts['kernel']} ({facts['language']}), {facts['module']}", "bold")
    say(facts["contract"] + "\n")
    fields = []
    for name, value in facts["fields"].items():
        chosen = facts["resolved"].get(name)
        shown = "none" if value is None else str(value)
        if value is None and chosen is not None:
            shown += f" ({chosen} by default on {facts['predicted_on']})"
        fields.append((name, shown))
    fields += [(owner, _label(tiling)) for owner, tiling in facts["tilings"].items()]
    print_table("plan", ("field", "value"), fields)
    cost = []
    for stage in facts["stages"]:
        work = (flop_count(stage["flops"]), byte_count(stage["bytes"]), number(stage["intensity"]))
        cost.append((stage["name"], *work, microseconds(stage["predicted_us"])))
    headers = ("stage", "FLOPs", "bytes", "FLOP/B", f"ideal on {facts['predicted_on']}")
    print_table("cost at these sizes", headers, cost)
    candidates = [
        (target, stage, "\n".join(_label(tiling) for tiling in tilings))
        for target, stages in facts["candidates"].items()
        for stage, tilings in stages.items()
    ]
    title = "tiling candidates, the default first"
    print_table(title, ("target", "stage", "tiling"), candidates)
    say("cached tunings: " + ("" if facts["tunings"] else "none"))
    for path in facts["tunings"]:
        say(f"  {path}")


def _label(tiling: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in tiling.items() if value is not None)
