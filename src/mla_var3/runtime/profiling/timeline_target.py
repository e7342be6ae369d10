"""The program that Nsight Systems watches: rebuild a plan from JSON and launch it in NVTX ranges.

`python -m mla_var3.runtime.profiling.timeline_target <request.json>`. The request holds the plan's
class and fields and the tiling of every kernel, so that nothing is tuned under the profiler.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling.timeline_launch import RunCounts, record_runs
from mla_var3.runtime.stage import Stage

MODULE = "mla_var3.runtime.profiling.timeline_target"


def write_request(path: Path, plan: KernelPlan, stage: Stage, counts: RunCounts) -> None:
    """Write down what to launch.

    Raises:
        UnsupportedError: another process cannot build the plan.
    """
    owner = type(plan)
    if owner.__module__ == "__main__" or "<locals>" in owner.__qualname__:
        raise UnsupportedError(
            f"{owner.__qualname__}: expected a plan class in a module that another process can "
            f"import, got {owner.__module__}"
        )
    kernels = [{"name": k.name, "tiling": k.tiling.to_dict()} for k in stage.kernels()]
    request = {
        "module": owner.__module__,
        "class": owner.__qualname__,
        "target": plan._target,
        "params": plan.params(),
        "kernels": kernels,
        "counts": dataclasses.asdict(counts),
    }
    rebuilt = json.loads(json.dumps(request["params"]))
    if _tuples(rebuilt) != _tuples(plan.params()):
        raise UnsupportedError(f"{plan.name}: its fields cannot be written as JSON")
    write_json(path, request)


def rebuild(request: dict[str, Any], device: str) -> Stage:
    """The runtime object that a request describes, on a device."""
    owner: Any = importlib.import_module(request["module"])
    for part in str(request["class"]).split("."):
        owner = getattr(owner, part)
    plan: KernelPlan = owner(**_tuples(request["params"])).for_target(request["target"])
    stage = plan.plan(*plan.prepare_inputs(device))
    kernels = list(stage.kernels())
    wanted = request["kernels"]
    if [kernel.name for kernel in kernels] != [entry["name"] for entry in wanted]:
        raise InvalidArgumentError(
            "kernels",
            ", ".join(kernel.name for kernel in kernels),
            ", ".join(entry["name"] for entry in wanted),
        )
    for kernel, entry in zip(kernels, wanted, strict=True):
        kernel.tiling = dataclasses.replace(kernel.tiling, **entry["tiling"])
    return stage


def _tuples(params: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples; the fields of a plan are hashable, so a list was one."""
    return {k: tuple(v) if isinstance(v, (list, tuple)) else v for k, v in params.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a request; returns the exit code."""
    import torch

    (path,) = sys.argv[1:] if argv is None else argv
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    stage = rebuild(request, "cuda")
    stage.launch()  # compiles
    torch.cuda.synchronize()
    record_runs(stage, torch.cuda.nvtx.range, RunCounts(**request["counts"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
