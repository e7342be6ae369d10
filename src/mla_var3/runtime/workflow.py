"""The steps that every profiling mode shares: pick the device, plan, tune, check."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.runtime.markdown import byte_count
from mla_var3.runtime.plan import ASSUMED_DEVICE, KernelPlan, Target, plan_dtype
from mla_var3.runtime.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from mla_var3.runtime.autotune.tune import StageTuning
    from mla_var3.runtime.check import CheckResult

log = logging.getLogger(__name__)

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")

Progress = Callable[[str, int, int, str], None]
"""(what, done, total, detail): called during long work."""


def no_progress(what: str, done: int, total: int, detail: str) -> None:
    """The silent progress reporter."""


@dataclass
class RunOptions:
    """How to run a plan, apart from what it computes.

    Attributes:
        device: "auto", "cuda" or "cpu".
        autotune: search tilings (GPU only); otherwise the plan's own tiling is used.
        retune: search again although a cached result exists.
        tune_max_iters: time at most this many candidates per stage.
        tune_seconds: stop searching after so long; of each stage at least one candidate is timed.
        refine: let timing refine the choices of the model (for example n of mla_var6_plus).
        check: compare with the reference before timing.
        bench_runs: timed repetitions.
        out_dir: folder for artifacts.
        label: suffix of the artifact folder.
        targets: compile targets of the static mode; None for those of the plan.
        progress: reporter for long work.
    """

    device: str = "auto"
    autotune: bool = True
    retune: bool = False
    tune_max_iters: int | None = None
    tune_seconds: float | None = None
    refine: bool = False
    check: bool = False
    bench_runs: int | None = None
    out_dir: Path | None = None
    label: str | None = None
    targets: tuple[str, ...] | None = None
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cuda", "cpu"):
            raise InvalidArgumentError("device", "auto, cuda or cpu", repr(self.device))
        limits = (("tune_max_iters", int, 1), ("bench_runs", int, 1), ("tune_seconds", float, 0))
        for name, kind, least in limits:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, kind)) and value >= least):
                raise InvalidArgumentError(name, f"a number of at least {least}", repr(value))
        if isinstance(self.targets, str):
            raise InvalidArgumentError("targets", "a sequence of GPU codes", repr(self.targets))


@dataclass
class Prepared:
    """A plan made ready to run: its choices made, its runtime object with the chosen tilings.

    There is no device entry on the CPU, no tuning or check where none was asked for.
    """

    plan: KernelPlan
    inputs: tuple[Tensor, ...]
    stage: Stage
    device: DeviceSpec | None
    tuning: dict[str, StageTuning] = field(default_factory=dict)
    check: CheckResult | None = None

    def require_device(self) -> DeviceSpec:
        if self.device is None:
            raise UnsupportedError(f"{self.plan.name}: expected a plan on a GPU, got the CPU")
        return self.device


def cuda_available() -> bool:
    """Whether a CUDA device can be used."""
    import torch

    return torch.cuda.is_available()


def device_kind(device: str) -> str:
    """The kind of a device; "cuda:N" must be the current GPU, because nothing moves to another."""
    kind, _, index = device.partition(":")
    if kind == "cuda" and index and cuda_available():
        import torch

        current = torch.cuda.current_device()
        if index != str(current):
            raise InvalidArgumentError(
                "device", f"the current device cuda:{current} (torch.cuda.set_device)", device
            )
    return kind


def pick_device(device: str) -> str:
    """Resolve "auto"; an explicit "cuda" without a usable GPU is an error, never a fallback."""
    if device == "cuda" and not cuda_available():
        raise UnsupportedError(
            "device: expected a usable CUDA GPU for --device=cuda, got none "
            "(torch.cuda.is_available() is false); use --device=cpu or --prof_type=static"
        )
    if device == "auto":
        return "cuda" if cuda_available() else "cpu"
    return device


def current_device_spec() -> DeviceSpec:
    """The table entry of the current CUDA device; nothing is guessed for an unknown one."""
    import torch

    return device_spec(torch.cuda.get_device_name())


def prepare(plan: KernelPlan, options: RunOptions) -> Prepared:
    """Plan on the chosen device, tune when asked, check when asked.

    Raises:
        InvalidArgumentError: the tensors do not fit the memory of the device.
        UnsupportedError: there is no such device, or a kernel of the plan cannot run on it.
    """
    from mla_var3.runtime.autotune import tune
    from mla_var3.runtime.check import check_stage

    where = pick_device(options.device)
    device = current_device_spec() if where == "cuda" else None
    plan = plan.resolved(Target.of(device)) if device else plan.on_device(planning_device())
    stage = empty_stage(plan)
    if device is not None:
        # Otherwise every candidate of the tuner would fail in the same way.
        for kernel in stage.kernels():
            kernel.require_target(device.target, device.name)
    require_memory(plan, stage, where)
    start = time.monotonic()
    if device is not None and options.refine:
        plan = tune.refine_plan(plan, device, options)
    inputs = plan.prepare_inputs(where)
    stage = plan.plan(*inputs)
    tuning: dict[str, StageTuning] = {}
    if device is not None and options.autotune:
        # refine_plan has just retuned the plan that it returned, in the same seconds.
        again, left = options.retune and not options.refine, options.tune_seconds
        if options.refine and left is not None:
            left = max(left - (time.monotonic() - start), 0.0)
        share = dataclasses.replace(options, retune=again, tune_seconds=left)
        tuning = tune.autotune(stage, plan, device, share)
    prepared = Prepared(plan, inputs, stage, device, tuning)
    if options.check:
        prepared.check = check_stage(plan, inputs, stage)
    return prepared


def empty_stage(plan: KernelPlan) -> Stage:
    """The plan's runtime object without tensors, for costs, tilings and compiling."""
    device = plan.target.device or planning_device()
    return plan.plan_empty(*Target.of(device).rates(plan_dtype(plan)))


def require_memory(plan: KernelPlan, stage: Stage, where: str) -> None:
    """Refuse a problem whose tensors alone exceed the free memory, before anything is allocated."""
    need, free = tensor_bytes(stage), free_memory(where)
    if free is not None and need > free:
        sizes = " ".join(f"{k}={v}" for k, v in plan.params().items() if type(v) is int)
        raise InvalidArgumentError(
            "sizes",
            f"tensors that fit the {byte_count(free)} of free "
            f"{'GPU' if where == 'cuda' else 'main'} memory",
            f"{plan.name} with {sizes}, which needs at least {byte_count(need)}",
        )


def tensor_bytes(stage: Stage) -> int:
    """Bytes of all tensors that the kernels of a runtime object read and write, each once."""
    lists = (tensors for k in stage.kernels() for tensors in (k.input_tensors, k.output_tensors))
    storages = [tensor.untyped_storage() for tensors in lists for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def free_memory(where: str) -> int | None:
    """Bytes that can be allocated on the GPU or in main memory; None where nothing tells."""
    if where == "cuda":
        import torch

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    limits = []
    try:
        fields = dict(line.split(":") for line in MEMORY_INFO.read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, ValueError, KeyError):
        log.debug("%s tells no free memory", MEMORY_INFO)
    with suppress(OSError, ValueError):  # no control group, or "max": no limit
        most = int((CONTROL_GROUP / "memory.max").read_text())
        used = int((CONTROL_GROUP / "memory.current").read_text())
        with suppress(OSError, ValueError, KeyError):  # file cache gives way to tensors
            stat = (CONTROL_GROUP / "memory.stat").read_text()
            cache = dict(line.split() for line in stat.splitlines())["inactive_file"]
            used = max(used - int(cache), 0)
        limits.append(most - used)
    return min(limits, default=None)


def planning_device() -> DeviceSpec:
    """The device that model-driven choices assume: the current one, or an H200 without one."""
    if cuda_available():
        try:
            return current_device_spec()
        except UnknownNameError:
            log.warning("unknown GPU; model-driven choices assume an %s", ASSUMED_DEVICE)
    return device_spec(ASSUMED_DEVICE)
