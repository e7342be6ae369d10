"""KernelPlan: the public entry point of a kernel version.

A plan owns the problem sizes and dtype, makes inputs, knows the reference, proposes tilings, states
its FLOPs and bytes, and builds the runtime object that is executed. Its dataclass fields, and those
of its tiling, are the options of its command line.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import mla_var3
from mla_var3.conf.devices import DeviceSpec, load_devices
from mla_var3.errors import InvalidArgumentError
from mla_var3.runtime.paths import TARGETS, KernelId, kernel_id_of_module, module_of
from mla_var3.runtime.stage import Constraints, Stage, Tiling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_var3.runtime.profiling.modes import NsightProfType, ProfileResult

__all__ = ["Constraints", "KernelPlan", "Target", "Tiling"]

_INTERNAL = {"internal": True}
"""Metadata of a field that is no parameter of the problem and no option of the command line."""


ASSUMED_DEVICE = "NVIDIA H200"
"""The device that plans are made for on a machine without a known GPU."""


@dataclass(frozen=True)
class Target:
    """The hardware that a plan is made for: a compile target, for example "sm_90", and a device.

    The plan's choices follow the device; it is None where only the target is known.
    """

    code: str = TARGETS[0]
    device: DeviceSpec | None = None

    @classmethod
    def of(cls, device: DeviceSpec) -> Target:
        """The target of a device: its portable compile target and its table entry."""
        return cls(device.target, device)

    @classmethod
    def of_code(cls, code: str, here: DeviceSpec) -> Target:
        """A compile target with a device that has it, or with `here` where none is known."""
        known = (here, *load_devices().values())
        return cls(code, next((spec for spec in known if spec.target == code), here))

    def sm_count(self, default: int) -> int:
        """SMs of the device, or `default` where none is known."""
        return default if self.device is None else self.device.sm_count

    def require_device(self) -> DeviceSpec:
        if self.device is None:
            raise InvalidArgumentError("target", "a device of the table", f"{self.code} alone")
        return self.device

    def rates(self, dtype: str) -> tuple[float, float]:
        """Burst rates of the device, TFLOP/s and GB/s, which the plan's own choices follow."""
        return self.require_device().burst_rates(dtype)


@dataclass
class KernelPlan(ABC):
    """Base of all kernel plans.

    A subclass adds its problem sizes and a `tiling` as dataclass fields and implements the abstract
    methods. A plan of several stages builds each stage from a plan of its own, with its own
    `target`, and connects them.

    Attributes:
        target: the hardware that the plan is made for; `resolved` sets it.
        pinned: names of the tiling fields that a user chose; no default replaces them.
    """

    target: Target = field(default=Target(), kw_only=True, repr=False, metadata=_INTERNAL)
    pinned: frozenset[str] = field(
        default=frozenset(), kw_only=True, repr=False, metadata=_INTERNAL
    )

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "plan" in cls.__dict__:
            setattr(cls, "plan", _binding(cls.__dict__["plan"]))  # noqa: B010

    @property
    def kernel_id(self) -> KernelId:
        """The id of this version, from the module that defines the plan."""
        module = module_of(type(self))
        if module == "__main__":
            module = Path(getattr(sys.modules[module], "__file__", None) or module).stem
        found = kernel_id_of_module(module)
        if found is None:
            return KernelId(module.rsplit(".", 1)[-1], 0, "cutile-dsl", "local")
        return found

    @property
    def name(self) -> str:
        """Full kernel name with version, for example `mla_var6_plus_v4`."""
        return self.kernel_id.full_name

    # -- what a kernel author writes -------------------------------------------------------------

    @abstractmethod
    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """Allocate and fill the inputs; `device` may be "meta", then nothing is allocated."""

    @abstractmethod
    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Reference outputs for the given inputs, in the order of the runtime object's outputs.

        Args:
            inputs: what `prepare_inputs` returned.
            compute_dtype: None for float32. The kernel's own dtype gives the same computation as
                plain PyTorch does it, whose error sets the bound of the check. A plan may leave
                this argument out; then the check uses a fixed bound.
        """

    @abstractmethod
    def _autotune_configs(self) -> Sequence[Tiling]:
        """Candidate tilings for the autotuner."""

    @abstractmethod
    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        """FLOPs and bytes that the algorithm needs, for the roofline.

        A plan may also take the inputs: `_algorithmic_flops_bytes(self, *inputs, tiling)`.
        """

    @abstractmethod
    def plan(self, *inputs: Tensor) -> Stage:
        """Build the runtime object for real tensors."""

    def plan_empty(self, peak_tflops: float, peak_gbps: float) -> Stage:
        """Build the same runtime object without allocating anything, for prediction and compiling.

        Model-driven choices may use the two peaks.
        """
        chosen = self.resolve(peak_tflops, peak_gbps)
        return chosen.plan(*chosen.prepare_inputs("meta"))

    # -- optional hooks --------------------------------------------------------------------------

    def _model_fields(self, peak_tflops: float, peak_gbps: float) -> dict[str, Any]:
        """Values for the fields that are left to the cost model, none by default.

        `self.target` and the tilings are set when this is called.
        """
        return {}

    def _default_tiling(self, name: str) -> Tiling | None:
        """The tiling to start from for the field `name`, by shape and `self.target`.

        None keeps the default of the tiling class.
        """
        return None

    def cpu_check_plan(self) -> Self:
        """A copy small enough to be checked in the CPU interpreter within seconds."""
        return self

    def refinements(self) -> list[Self]:
        """Neighbouring plans that timing may prefer over the model's choice; none by default."""
        return []

    # -- copies ----------------------------------------------------------------------------------

    def copy(self, **changes: Any) -> Self:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def pin(self, *tilings: str) -> Self:
        """A copy whose tilings, by field name, a user chose: no default replaces them."""
        return self.copy(pinned=self.pinned | set(tilings))

    def resolved(self, target: Target) -> Self:
        """A copy for a target with every choice made: tilings, and fields left to the model.

        Tilings that are still the default of their class become the default for that target and
        shape; a tiling that a user chose, or pinned, stays as it is.
        """
        chosen = self.copy(target=target)._with_default_tilings()
        return chosen if target.device is None else chosen.on_device(target.device)

    def for_target(self, code: str) -> Self:
        """A copy with the tilings for a compile target; fields left to the model stay so."""
        return self.copy(target=dataclasses.replace(self.target, code=code))._with_default_tilings()

    def on_device(self, spec: DeviceSpec) -> Self:
        """`resolved` for a device without touching the tilings or the compile target."""
        target = dataclasses.replace(self.target, device=spec)
        return self.copy(target=target).resolve(*target.rates(plan_dtype(self)))

    def resolve(self, peak_tflops: float, peak_gbps: float) -> Self:
        """The plan with every field that is left to the model set, by these rates."""
        changes = self._model_fields(peak_tflops, peak_gbps)
        return self.copy(**changes) if changes else self

    def _with_default_tilings(self) -> Self:
        chosen = {
            name: self._default_tiling(name) or tiling
            for name, tiling in self.tiling_fields().items()
            if name not in self.pinned and tiling == type(tiling)()
        }
        return self.copy(**chosen)

    # -- identity and parameters -----------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """The plan's own fields without target and tilings, JSON-ready."""
        tilings = self.tiling_fields()
        names = (f.name for f in option_fields(self))
        return {name: getattr(self, name) for name in names if name not in tilings}

    def params_label(self) -> str:
        """Folder name of the parameters, for example `b32_s16_t4096_...`."""
        given = {key: value for key, value in self.params().items() if value is not None}
        for key, value in given.items():
            if isinstance(value, (tuple, list)):
                short = "-".join(map(str, value))
                given[key] = f"{len(value)}values" if len(value) > 4 else short
        return "_".join(f"{key}{value}" for key, value in given.items())

    def tiling_fields(self) -> dict[str, Tiling]:
        """The plan's tilings by field name: one for a single kernel, one per stage otherwise."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tiling)}

    # -- running ---------------------------------------------------------------------------------

    def benchmark_kernel(
        self,
        device: torch.device | str = "auto",
        prof_type: NsightProfType | str | None = None,
        out_dir: str | Path | None = None,
        **options: Any,
    ) -> ProfileResult:
        """Tune, optionally check, profile and report this plan.

        Args:
            device: "auto", "cuda" or "cpu", or a torch device; of several GPUs the current one.
            prof_type: profiling mode; None takes the default of the device.
            out_dir: folder for the artifacts; by default one below `out/profiles`.
            options: fields of `mla_var3.runtime.workflow.RunOptions`.
        """
        result: ProfileResult = mla_var3.benchmark_kernel(
            self, device, prof_type, out_dir, **options
        )
        return result

    def benchmark_kernel_argparse(self, argv: Sequence[str] | None = None) -> int:
        """Command line of this plan; returns the exit code.

        The package loads the command line, which is above the runtime, on first use.
        """
        return int(mla_var3.run_plan(self, argv))


def _binding(build: Callable[..., Stage]) -> Callable[..., Stage]:
    """`plan` of a subclass; the kernels that it builds without a plan get the one it belongs to."""

    @functools.wraps(build)
    def plan(self: KernelPlan, *inputs: Any, **options: Any) -> Stage:
        stage = build(self, *inputs, **options)
        for kernel in stage.kernels():
            if kernel.plan is None:
                kernel.plan = self
        return stage

    return plan


def option_fields(plan: Any) -> list[dataclasses.Field[Any]]:
    """The fields of a plan or tiling that are parameters: all but `target` and `pinned`."""
    return [f for f in dataclasses.fields(plan) if not f.metadata.get("internal")]


def plan_dtype(plan: KernelPlan) -> str:
    """The dtype whose rates apply to a plan."""
    return str(getattr(plan, "dtype", "bfloat16"))


def plan_targets(plan: KernelPlan | type[KernelPlan]) -> tuple[str, ...]:
    """The compile targets that a plan supports: its `targets`, or all there are."""
    return tuple(getattr(plan, "targets", TARGETS))
