"""`hyper-mla show`: the contract, options, cost, candidates and cached tunings of one kernel."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from mla_var3.cli.console import say, stdout, usage_errors
from mla_var3.cli.options import (
    RUN_OPTIONS,
    build_parser,
    build_request,
    plan_options,
)
from mla_var3.cli.parsing import parse
from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime import paths
from mla_var3.runtime.markdown import byte_count, flop_count, json_ready, microseconds, number
from mla_var3.runtime.paths import KernelId
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.workflow import plan_targets, planning_device


def show_command(kernel: KernelId, argv: list[str]) -> int:
    """Print what one kernel offers.

    Args:
        kernel: the kernel version.
        argv: plan options, the cost is that of the problem they describe; and --json.
    """
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
    dtype = str(getattr(plan, "dtype", "bfloat16"))
    rates = device.burst_rates(dtype)
    return {
        "kernel": kernel.full_name,
        "language": kernel.language,
        "module": kernel.module,
        "contract": inspect.cleandoc(sys.modules[type(plan).__module__].__doc__ or ""),
        "targets": list(targets),
        "fields": plan.params(),
        "tilings": {field: tiling.to_dict() for field, tiling in plan.tiling_fields().items()},
        "predicted_on": device.name,
        "resolved": plan.resolve(*rates).params(),
        "stages": [
            {
                "name": stage.name,
                "flops": stage.cost().flops,
                "bytes": stage.cost().bytes,
                "intensity": stage.cost().intensity,
                "predicted_us": stage.predict_us(*device.peak_rates(dtype)),
            }
            for stage in plan.plan_empty(*rates).kernels()
        ],
        "candidates": {target: _candidates(plan, target, device) for target in targets},
        "tunings": [str(path) for path in _tuning_files(kernel)],
    }


def _candidates(
    plan: KernelPlan, target: str, device: DeviceSpec
) -> dict[str, list[dict[str, Any]]]:
    """Tilings the autotuner would try, by stage."""
    dtype = str(getattr(plan, "dtype", "bfloat16"))
    stage = plan.for_target(target).plan_empty(*device.burst_rates(dtype))
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
