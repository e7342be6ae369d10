"""The program that runs under the profiler: launches every stage of a plan in its NVTX range.

    python -m mla_var3.runtime.profiling.target <spec.json>

The spec says which plan, with which tilings, how often, so that nothing is tuned here. Planning,
inputs, compilation and warm-up happen outside the ranges: a profiler that filters by range sees the
stages only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mla_var3
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.measure import CudaClock, timeout_s, wait_for_device
from mla_var3.runtime.paths import module_of
from mla_var3.runtime.plan import KernelPlan, Target
from mla_var3.runtime.profiling.timeline.model import HOST_PACED, QUEUED, WARMUP
from mla_var3.runtime.stage import Stage, by_unique_name, tiling_from_dict

MODULE = "mla_var3.runtime.profiling.target"
RANGE_PREFIX = "hyper_mla."
NSIGHT_REPORT = "ncu-output-launch_stages-0.ncu-rep"
"""How nsight-python names the report of `_run_nsight`, after the prefix it was given."""

REPLAYS = 100
"""Passes of the full Nsight Compute set, and some to spare."""

Range = Callable[[str], Any]

_HEAD_START_MARGIN = 2.0
_MIN_HEAD_START_S = 2e-4
_MAX_HEAD_START_S = 2e-2
_CYCLES_PER_SECOND = 2e9
"""No known GPU runs much faster, so the spin lasts at least as long as requested."""


@dataclass
class TargetSpec:
    """What the profiled program runs: a plan by its class and fields, with its tilings.

    Attributes:
        plan_tilings: the plan's own tilings by field name; shapes may depend on them.
        tilings: the tiling of every leaf kernel in launch order, with the kernel's name.
        runs: launches of each stage inside its range.
        warmup: launches of the whole before.
        timeline: launch the whole, as `record_runs` does, not each stage alone.
        nsight: arguments for nsight-python; None to mark the ranges only.
        device: table entry that the plan was made for: splits and shares of SMs follow it; None
            where only the GPU code was known.
    """

    module: str
    plan: str
    params: dict[str, Any]
    plan_tilings: dict[str, dict[str, Any]]
    target: str
    tilings: list[dict[str, Any]]
    runs: int = 1
    warmup: int = 2
    timeline: bool = False
    nsight: dict[str, Any] | None = None
    device: str | None = None

    @classmethod
    def of(cls, plan: KernelPlan, stage: Stage, runs: int) -> Self:
        """The spec of a plan and the runtime object made from it, with its active tilings."""
        kind = type(plan)
        return cls(
            module=_importable_module(kind),
            plan=kind.__qualname__,
            params=plan.params(),
            plan_tilings={name: t.to_dict() for name, t in plan.tiling_fields().items()},
            target=plan.target.code,
            tilings=[
                {"kernel": kernel.name, "tiling": kernel.tiling.to_dict()}
                for kernel in stage.kernels()
            ],
            runs=runs,
            device=None if plan.target.device is None else plan.target.device.name,
        )

    def write(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def build_plan(self) -> KernelPlan:
        found: Any = importlib.import_module(self.module)
        for part in self.plan.split("."):
            found = getattr(found, part)
        # JSON has no tuples; a plan has no lists.
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in self.params.items()}
        plan: KernelPlan = found(**values)
        for name, fields in self.plan_tilings.items():
            setattr(plan, name, tiling_from_dict(type(getattr(plan, name)), fields))
        plan.target = Target(self.target, None if self.device is None else device_spec(self.device))
        return plan

    def build_stage(self, plan: KernelPlan, device: str) -> Stage:
        """The runtime object with the tilings of the spec."""
        stage = plan.plan(*plan.prepare_inputs(device))
        kernels = list(stage.kernels())
        expected, got = [k.name for k in kernels], [entry["kernel"] for entry in self.tilings]
        if got != expected:
            raise InvalidArgumentError("tilings", f"one for each of {expected}", got)
        for kernel, entry in zip(kernels, self.tilings, strict=True):
            kernel.tiling = tiling_from_dict(type(kernel.tiling), entry["tiling"])
        return stage


def run_profiler(
    command: Sequence[str], env: dict[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a profiler to its end; what it and its programs print is in `stdout`.

    When it is cut off, the programs that it started are ended too, so that none stays on the GPU.

    Raises:
        subprocess.TimeoutExpired: it takes longer than `limit_s`.
    """
    with subprocess.Popen(
        list(command), env=env, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except BaseException:  # an interrupt reaches this process only
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, printed, "")


def package_environment() -> dict[str, str]:
    """Environment of a program that a profiler starts: it imports this very package."""
    root = str(Path(mla_var3.__file__).resolve().parents[1])
    python_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": python_path}


def _importable_module(kind: type) -> str:
    module = module_of(kind)
    if module == "__main__":
        raise UnsupportedError(
            f"{kind.__qualname__}: expected a plan class in a module that another process can "
            "import, got one defined in a script; run the script with python -m, or use event mode"
        )
    return module


def launch_ranges(stage: Stage, mark: Range, wait: Callable[[str], None]) -> None:
    """Launch every leaf kernel once, alone, inside a range of its unique name.

    `/` and `@` mean something to the profiler's range filter and do not occur.
    """
    for name, kernel in by_unique_name(stage.kernels()).items():
        with mark(f"{RANGE_PREFIX}{name}"):
            kernel.launch()
        wait(kernel.name)


def record_runs(
    stage: Stage, mark: Range, queued: int, host_paced: int = 5, warmup: int = 3
) -> None:
    """Launch a runtime object on the current GPU, every run inside a range of its own.

    A *queued* run waits behind a spinning GPU until all of it is enqueued, so its timeline shows
    what the GPU can do. A *host-paced* run starts on an idle GPU, so its timeline shows what the
    host's launches cost.

    The L2 cache is flushed before every queued run, as in event mode, so that the times compare.
    """
    import torch

    clock = CudaClock()
    host_s = 0.0
    with ranges_below(stage, mark):
        for _ in range(warmup):
            wait_for_device(stage.name)
            began = time.perf_counter()
            with mark(f"{WARMUP}{stage.name}"):
                stage.launch()
            host_s = time.perf_counter() - began
        cycles = head_start_cycles(host_s)
        for _ in range(queued):
            clock.flush_l2()
            torch.cuda._sleep(cycles)
            with mark(f"{QUEUED}{stage.name}"):
                stage.launch()
            wait_for_device(stage.name)
    for _ in range(host_paced):
        wait_for_device(stage.name)
        with mark(f"{HOST_PACED}{stage.name}"):
            stage.launch()
    wait_for_device(stage.name)


def head_start_cycles(host_s: float) -> int:
    """How long the GPU must spin so that a host that takes `host_s` per run gets ahead of it."""
    wanted = min(max(_HEAD_START_MARGIN * host_s, _MIN_HEAD_START_S), _MAX_HEAD_START_S)
    return int(wanted * _CYCLES_PER_SECOND)


@contextlib.contextmanager
def ranges_below(stage: Stage, mark: Range) -> Iterator[None]:
    """While active, every stage below the given one launches inside a range of its name."""
    nodes = [*stage.children]
    for node in nodes:
        nodes += node.children

    def launch_in_range(launch: Callable[[], None], name: str) -> None:
        with mark(name):
            launch()

    try:
        for node in nodes:
            # An instance attribute hides the method; deleting it brings the method back.
            name = f"{QUEUED}{node.name}"
            vars(node)["launch"] = functools.partial(launch_in_range, node.launch, name)
        yield
    finally:
        for node in nodes:
            vars(node).pop("launch", None)


def _wait_for_profiler(kernel: str) -> None:
    """Wait for a launch that the profiler replays, once per pass."""
    wait_for_device(kernel, REPLAYS * timeout_s())


def _prepared_stage(spec: TargetSpec) -> Stage:
    """The runtime object on the GPU, compiled and warm."""
    stage = spec.build_stage(spec.build_plan(), "cuda")
    for _ in range(spec.warmup):
        stage.launch()
        wait_for_device(stage.name)
    return stage


def _run_nsight(spec: TargetSpec) -> None:
    """Let nsight-python profile: it starts this program again, under ncu."""
    import nsight

    under_profiler = "NSPY_NCU_PROFILE" in os.environ
    stage = _prepared_stage(spec) if under_profiler else None

    def launch_stages() -> None:
        if stage is not None:
            launch_ranges(stage, nsight.annotate, _wait_for_profiler)

    nsight.analyze.kernel(
        runs=spec.runs,
        output="quiet",
        thermal_mode="off",
        # A stage may launch several kernels, which is an error without a function to combine them.
        combine_kernel_metrics=lambda first, second: first + second,
        **(spec.nsight or {}),
    )(launch_stages)()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the spec whose file is the only argument, by default that of the process."""
    import torch

    _leave_script_folder()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1:
        raise InvalidArgumentError("arguments", "one spec file", given)
    spec = TargetSpec.read(Path(given[0]))
    if spec.nsight is not None:
        _run_nsight(spec)
        return 0
    stage = _prepared_stage(spec)
    if spec.timeline:
        record_runs(stage, torch.cuda.nvtx.range, spec.runs)
        return 0
    for _ in range(spec.runs):
        launch_ranges(stage, torch.cuda.nvtx.range, _wait_for_profiler)
    return 0


def _leave_script_folder() -> None:
    """Started by path, Python would look for top-level modules beside this file first."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]


if __name__ == "__main__":
    raise SystemExit(main())
