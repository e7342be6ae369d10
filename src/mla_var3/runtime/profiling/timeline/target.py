"""The program that Nsight Systems watches: runs of the whole runtime object in NVTX ranges.

`python -m mla_var3.runtime.profiling.timeline.target <request.json>`. The request says which plan,
with which tilings, so that nothing is tuned under the profiler, and how many runs of which kind.
(`target` launches every stage alone, as Nsight Compute needs it; a timeline needs them together.)
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling.target import TargetSpec
from mla_var3.runtime.profiling.timeline.launch import RunCounts, record_runs
from mla_var3.runtime.stage import Stage

MODULE = "mla_var3.runtime.profiling.timeline.target"


def write_request(path: Path, plan: KernelPlan, stage: Stage, counts: RunCounts) -> None:
    """Write down what to launch.

    Raises:
        UnsupportedError: another process cannot build the plan.
    """
    spec = TargetSpec.of(plan, stage, counts.queued)
    write_json(path, {"spec": dataclasses.asdict(spec), "counts": dataclasses.asdict(counts)})


def read_request(path: Path) -> tuple[TargetSpec, RunCounts]:
    """Read what `write_request` wrote."""
    request = json.loads(path.read_text(encoding="utf-8"))
    return TargetSpec(**request["spec"]), RunCounts(**request["counts"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a request; returns the exit code."""
    import torch

    given = sys.argv[1:] if argv is None else list(argv)
    if len(given) != 1:
        raise InvalidArgumentError("arguments", "one request file", given)
    spec, counts = read_request(Path(given[0]))
    stage = spec.build_stage(spec.build_plan(), "cuda")
    stage.launch()  # what is compiled at first use must not be in the timeline
    torch.cuda.synchronize()
    record_runs(stage, torch.cuda.nvtx.range, counts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
