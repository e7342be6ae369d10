"""KernelPlan: the public entry point of a kernel version.

A plan owns the problem sizes and dtype, makes inputs, knows the reference, proposes tilings, states
its FLOPs and bytes, and builds the runtime object that is executed. Its dataclass fields, and those
of its tiling, are the options of its command line.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.paths import KernelId, kernel_id_of_module
from mla_var3.runtime.stage import Stage
from mla_var3.runtime.tiling import Constraints, Tiling

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_var3.runtime.profiling import NsightProfType, ProfileResult

__all__ = ["Constraints", "KernelPlan", "Tiling"]


@dataclass
class KernelPlan(ABC):
    """Base of all kernel plans.

    A subclass adds its problem sizes and a `tiling` as dataclass fields and implements the abstract
    methods. A plan of several stages keeps each stage as a plan of its own and only connects them.
    """

    @property
    def kernel_id(self) -> KernelId:
        """The id of this version, from the module that defines the plan."""
        found = kernel_id_of_module(type(self).__module__)
        if found is None:
            module = type(self).__module__
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
                plain PyTorch does it, whose error sets the bound of the check.
        """

    @abstractmethod
    def _autotune_configs(self) -> Sequence[Tiling]:
        """Candidate tilings for the autotuner."""

    @abstractmethod
    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        """FLOPs and bytes that the algorithm needs, for the roofline."""

    @abstractmethod
    def plan(self, *inputs: Tensor) -> Stage:
        """Build the runtime object for real tensors."""

    def plan_empty(self, peak_tflops: float, peak_gbps: float) -> Stage:
        """Build the same runtime object without allocating anything, for prediction and compiling.

        Args:
            peak_tflops: matrix peak that model-driven choices may use.
            peak_gbps: memory bandwidth that model-driven choices may use.
        """
        chosen = self.resolve(peak_tflops, peak_gbps)
        return chosen.plan(*chosen.prepare_inputs("meta"))

    # -- optional hooks --------------------------------------------------------------------------

    def resolve(self, peak_tflops: float, peak_gbps: float) -> Self:
        """A copy in which every field left to the model has a value; the plan itself by default."""
        return self

    def _default_tiling(self, name: str) -> Tiling | None:
        """The tiling to start from for the field `name`, by shape and `self._target`.

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

    _target = "sm_90"
    _pinned: ClassVar[frozenset[str]] = frozenset()

    def copy(self, **changes: Any) -> Self:
        """A copy with some fields replaced, meant for the same target, its tilings as pinned."""
        duplicate = dataclasses.replace(self, **changes)
        duplicate.__dict__.update(_target=self._target, _pinned=self._pinned)
        return duplicate

    def pin(self, *tilings: str) -> Self:
        """A copy whose tilings, by field name, somebody chose: no default replaces them."""
        duplicate = self.copy()
        duplicate.__dict__["_pinned"] = self._pinned | set(tilings)
        return duplicate

    def for_target(self, target: str) -> Self:
        """A copy meant for a compile target.

        Tilings that are still the default of their class become the default for that target and
        shape; a tiling that somebody chose, or pinned, stays as it is.
        """
        duplicate = self.copy()
        duplicate._target = target
        for name, tiling in duplicate.tiling_fields().items():
            if name in duplicate._pinned or tiling != type(tiling)():
                continue
            better = duplicate._default_tiling(name)
            if better is not None:
                setattr(duplicate, name, better)
        return duplicate

    # -- identity and parameters -----------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """The plan's own fields without the tiling, JSON-ready."""
        tilings = self.tiling_fields()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if name not in tilings}

    def params_label(self) -> str:
        """Folder name of the parameters, for example `b32_s16_t4096_...`."""
        parts = []
        for key, value in self.params().items():
            if value is None:
                continue
            if isinstance(value, (tuple, list)):
                value = f"{len(value)}values" if len(value) > 4 else "-".join(map(str, value))
            parts.append(f"{key}{value}")
        return "_".join(parts)

    def tiling_fields(self) -> dict[str, Tiling]:
        """The plan's tilings by field name: one for a single kernel, one per stage otherwise."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tiling)}

    def on_device(self, spec: DeviceSpec) -> Self:
        """`resolve` with a device's burst rates."""
        dtype = str(getattr(self, "dtype", "bfloat16"))
        return self.resolve(*spec.burst_rates(dtype))

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
        from mla_var3.runtime.profiling import profile_plan
        from mla_var3.runtime.workflow import RunOptions, device_kind

        kind = device_kind(str(device))
        run = RunOptions(device=kind, out_dir=Path(out_dir) if out_dir else None, **options)
        return profile_plan(self, prof_type, run)

    def benchmark_kernel_argparse(self, argv: Sequence[str] | None = None) -> int:
        """Command line of this plan; returns the exit code.

        The command line lies above the runtime and is loaded only here, by name.
        """
        command_line = importlib.import_module("mla_var3.cli.commands.kernel")
        return int(command_line.run_plan(self, argv))
