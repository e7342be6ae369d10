"""The steps that every profiling mode shares: pick the device, plan, tune, check."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Stage

if TYPE_CHECKING:
    from torch import Tensor

    from mla_var3.runtime.autotune.tune import StageTuning
    from mla_var3.runtime.check import CheckResult

log = logging.getLogger(__name__)

TARGETS = ("sm_90", "sm_100", "sm_120")
"""Compile targets of a static report: Hopper, data-centre Blackwell, consumer Blackwell."""

Progress = Callable[[str, int, int, str], None]
"""(what, done, total, detail): called as long work goes on."""


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
        for name in ("tune_max_iters", "bench_runs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgumentError(name, "a number of at least 1", value)


@dataclass
class Prepared:
    """A plan made ready to run.

    Attributes:
        plan: the plan with every model-driven field resolved.
        inputs: its inputs.
        stage: the runtime object, with the chosen tilings.
        device: the device entry, None on the CPU.
        tuning: tuning result per stage name; empty when nothing was tuned.
        check: the outcome of the check, None when none was asked for.
    """

    plan: KernelPlan
    inputs: tuple[Tensor, ...]
    stage: Stage
    device: DeviceSpec | None
    tuning: dict[str, StageTuning] = field(default_factory=dict)
    check: CheckResult | None = None

    def require_device(self) -> DeviceSpec:
        """The device entry of a plan prepared on a GPU."""
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


def plan_targets(plan: KernelPlan | type[KernelPlan]) -> tuple[str, ...]:
    """The compile targets that a plan is meant for: its `targets`, or all there are."""
    return tuple(getattr(plan, "targets", TARGETS))


def require_target(plan: KernelPlan, spec: DeviceSpec) -> None:
    """Refuse a GPU that a kernel of the plan cannot run on, before anything is allocated on it.

    Tuning would otherwise note the same failure for every candidate.
    """
    for kernel in plan.plan(*plan.prepare_inputs("meta")).kernels():
        kernel.require_target(spec.target, spec.name)


def prepare(plan: KernelPlan, options: RunOptions) -> Prepared:
    """Plan on the chosen device, tune when asked, check when asked."""
    from mla_var3.runtime.check import check_stage

    where = pick_device(options.device)
    tuning: dict[str, StageTuning] = {}
    if where == "cuda":
        from mla_var3.runtime.autotune.tune import autotune, refine_plan

        spec = current_device_spec()
        plan = plan.for_target(spec.target).on_device(spec)
        require_target(plan, spec)
        if options.refine:
            plan = refine_plan(plan, spec, options)
        inputs = plan.prepare_inputs("cuda")
        stage = plan.plan(*inputs)
        if options.autotune:
            # refine_plan has just retuned the plan that it returned.
            again = options.retune and not options.refine
            tuning = autotune(stage, plan, spec, dataclasses.replace(options, retune=again))
        device: DeviceSpec | None = spec
    else:
        plan = plan.on_device(planning_device())
        inputs = plan.prepare_inputs("cpu")
        stage = plan.plan(*inputs)
        device = None
    prepared = Prepared(plan, inputs, stage, device, tuning)
    if options.check:
        prepared.check = check_stage(plan, inputs, stage)
    return prepared


def planning_device() -> DeviceSpec:
    """The device that model-driven choices assume: the current one, or an H200 without one."""
    if cuda_available():
        try:
            return current_device_spec()
        except UnknownNameError:
            log.warning("unknown GPU; model-driven choices assume an NVIDIA H200")
    return device_spec("NVIDIA H200")
