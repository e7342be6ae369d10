"""A kernel, a tiling and a plan that need neither a DSL nor a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import CompiledKernel, Constraints, KernelStage, Tiling


@dataclass
class FakeTiling(Tiling):
    rows: int = 64
    columns: int | None = None
    occupancy: int | None = None
    num_ctas: int | None = None

    def validate(self, pd: Any) -> Constraints:
        limit = getattr(pd, "limit", 1000)
        return Constraints(
            (self.rows > 0, f"rows: expected a positive number, got {self.rows}"),
            (self.rows <= limit, f"rows: expected at most {limit}, got {self.rows}"),
        )


@dataclass
class FakeKernel(KernelStage):
    """Notes its launches in `log`; its name is `kernel_fn`."""

    log: list[str] = field(default_factory=list)

    language = "cutile-dsl"

    @property
    def name(self) -> str:
        return str(self.kernel_fn)

    def _launch_cuda(self) -> None:
        self.log.append(f"{self.name} on cuda")

    def _launch_cpu(self) -> None:
        self.log.append(self.name)

    def compile(self, target: str, tiling: Any = None) -> CompiledKernel:
        return CompiledKernel(target, b"machine code", 0.1)

    def source_files(self) -> list[Path]:
        return [Path(__file__)]


def fake_kernel(
    name: str,
    log: list[str] | None = None,
    *,
    flops: float = 1e6,
    nbytes: float = 1e3,
    device: str = "cpu",
    **tiling: Any,
) -> FakeKernel:
    """A kernel with one input and one output on a device."""
    return FakeKernel(
        kernel_fn=name,
        tiling=FakeTiling(**tiling),
        plan=None,
        input_tensors=[torch.zeros(2, device=device)],
        output_tensors=[torch.zeros(2, device=device)],
        algorithmic_flops_bytes_fn=lambda tiling: (flops, nbytes),
        log=[] if log is None else log,
    )


@dataclass
class DoublingKernel(FakeKernel):
    """Writes twice its input, in the output's dtype, plus `error`."""

    error: float = 0.0

    def _launch_cpu(self) -> None:
        super()._launch_cpu()
        doubled = self.input_tensors[0].float() * 2 + self.error
        self.output_tensors[0].copy_(doubled.to(self.output_tensors[0].dtype))


@dataclass
class DoublingPlan(KernelPlan):
    """Computes `2 * x` for `b` random numbers."""

    b: int = 8
    dtype: str = "bfloat16"
    limit: int = 1000
    error: float = 0.0
    choice: int | None = None
    tiling: FakeTiling = field(default_factory=FakeTiling)

    def prepare_inputs(self, device: Any) -> tuple[Tensor, ...]:
        values = torch.linspace(-1.0, 1.0, self.b, device=device)
        return (values.to(getattr(torch, self.dtype)),)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return ((inputs[0].float() * 2).to(compute_dtype or torch.float32),)

    def _model_fields(self, peak_tflops: float, peak_gbps: float) -> dict[str, Any]:
        return {} if self.choice is not None else {"choice": round(peak_tflops)}

    def _default_tiling(self, name: str) -> FakeTiling | None:
        return {"sm_90": None, "sm_120": FakeTiling(rows=16)}.get(self.target.code)

    def _autotune_configs(self) -> Sequence[FakeTiling]:
        return [FakeTiling(), FakeTiling(rows=32)]

    def _algorithmic_flops_bytes(self, tiling: FakeTiling) -> tuple[float, float]:
        return 2.0 * self.b, 4.0 * self.b

    def plan(self, *inputs: Tensor) -> DoublingKernel:
        return DoublingKernel(
            kernel_fn="doubling",
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[torch.empty_like(inputs[0])],
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
            autotune_configs=self._autotune_configs(),
            error=self.error,
        )
