"""The check: outputs against the float32 reference, with a bound that PyTorch itself sets.

A 16-bit kernel cannot be exact. Its error may be twice that of the same computation in the kernel's
dtype in plain PyTorch, plus a small constant.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_var3.errors import CheckFailedError
from mla_var3.runtime.measure import wait_for_device
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Stage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mla_var3.op.compare import ErrorFigures

FACTOR = 2.0
RELATIVE_SLACK = 1e-5
"""Added to the relative bound; a float32 output (the LSE) has about 1e-7 of its own."""


@dataclass(frozen=True)
class OutputCheck:
    """One output against its reference.

    Attributes:
        index: position among the outputs.
        error: figures of the kernel.
        baseline: figures of the same computation in PyTorch in the kernel's dtype; None for a plan
            whose reference takes no `compute_dtype`, then the dtype's epsilon sets the bounds.
        relative_bound: largest relative Frobenius error that passes.
        max_bound: largest absolute error that passes.
    """

    index: int
    shape: tuple[int, ...]
    error: ErrorFigures
    baseline: ErrorFigures | None
    relative_bound: float
    max_bound: float

    @property
    def passed(self) -> bool:
        """Within both bounds; NaN compares false and so never passes."""
        return (
            self.error.nan_count == 0
            and self.error.mismatched_inf == 0
            and self.error.relative_frobenius <= self.relative_bound
            and self.error.max_abs <= self.max_bound
        )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class CheckResult:
    """The check of one run."""

    outputs: tuple[OutputCheck, ...]

    @property
    def passed(self) -> bool:
        return all(output.passed for output in self.outputs)

    def require(self) -> None:
        failed = [
            f"output {o.index}: relative error {o.error.relative_frobenius:.3g} "
            f"(bound {o.relative_bound:.3g}), largest {o.error.max_abs:.3g} "
            f"(bound {o.max_bound:.3g}), {o.error.nan_count} NaN, "
            f"{o.error.mismatched_inf} wrong infinities"
            for o in self.outputs
            if not o.passed
        ]
        if failed:
            raise CheckFailedError("; ".join(failed))

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "outputs": [output.to_dict() for output in self.outputs]}


def poison_outputs(stage: Stage) -> None:
    """Fill every kernel's floating-point outputs with NaN: what a kernel forgets to write shows."""
    for kernel in stage.kernels():
        for tensor in kernel.output_tensors:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def check_stage(plan: KernelPlan, inputs: tuple[Tensor, ...], stage: Stage) -> CheckResult:
    """Run a stage once on poisoned outputs and compare it with the plan's reference."""
    import torch

    from mla_var3.op.compare import compare

    poison_outputs(stage)
    stage.launch()
    if stage.device_type == "cuda":
        wait_for_device(stage.name)
    dtype = _kernel_dtype(stage)
    references = plan.reference_fn(*inputs)
    baselines: Sequence[Tensor | None] = [None] * len(references)
    if "compute_dtype" in inspect.signature(plan.reference_fn).parameters:
        baselines = plan.reference_fn(*inputs, compute_dtype=dtype)
    results = []
    for index, (output, reference, baseline) in enumerate(
        zip(stage.output_tensors, references, baselines, strict=True)
    ):
        own = compare(output, reference)
        finite = reference[torch.isfinite(reference)]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        if baseline is None:
            other, eps = None, torch.finfo(dtype).eps
            allowed = eps, eps * largest
        else:
            other = compare(baseline, reference)
            allowed = other.relative_frobenius, other.max_abs
        bounds = _bound(allowed[0], 1.0), _bound(allowed[1], largest)
        results.append(OutputCheck(index, tuple(output.shape), own, other, *bounds))
    return CheckResult(tuple(results))


def _bound(baseline: float, scale: float) -> float:
    """Without a finite baseline only the slack is left."""
    return (FACTOR * baseline if math.isfinite(baseline) else 0.0) + RELATIVE_SLACK * scale


def _kernel_dtype(stage: Stage) -> torch.dtype:
    """The 16-bit dtype among the kernels' tensors, which is what they compute in."""
    import torch

    for kernel in stage.kernels():
        for tensor in (*kernel.input_tensors, *kernel.output_tensors):
            if tensor.is_floating_point() and tensor.element_size() == 2:
                return tensor.dtype
    return torch.float32
