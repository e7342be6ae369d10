"""A small CuTe DSL kernel with its host function, tiling and plan; importing it needs cutlass.

It computes `y = x * factor + bias` for a vector of any length, the bias being optional.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import cute
from torch import Tensor

from mla_var3.runtime import cute_kernel
from mla_var3.runtime.cute.arguments import Int64Arg
from mla_var3.runtime.cute_kernel import CuteKernel
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Constraints, Tiling
from tests.programs import run_program


@dataclass
class ScaleTiling(Tiling):
    threads: int = 128
    unknown: bool = False

    def validate(self, pd: Any) -> Constraints:
        return Constraints(
            (self.threads <= 1024, f"threads: expected at most 1024, got {self.threads}")
        )


@cute.kernel
def scale_add(
    x: cute.Tensor, y: cute.Tensor, bias, factor: cutlass.Float32, threads: cutlass.Constexpr
):
    index = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
    if index < cute.size(x):
        value = x[index].to(cutlass.Float32) * factor
        if cutlass.const_expr(bias is not None):
            value += bias[index]
        y[index] = value.to(y.element_type)


class ScaleAdd:
    """The host function for one tiling; `offset` is added to the factor, as a constant."""

    def __init__(
        self, threads: int, unknown: bool = False, offset: float = 0.0, shared: int = 0
    ) -> None:
        self.threads, self.unknown, self.offset, self.shared = threads, unknown, offset, shared

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        bias,
        size: cutlass.Int32,
        stride: cutlass.Int64,
        factor: cutlass.Float32,
        stream: cuda.CUstream,
    ):
        layout = cute.make_layout((size,), stride=(stride,))
        bias_vector = None
        if cutlass.const_expr(bias is not None):
            bias_vector = cute.make_tensor(bias, cute.make_layout((size,)))
        if cutlass.const_expr(self.unknown):
            undefined_name(x)  # noqa: F821
        scale_add(
            cute.make_tensor(x, layout),
            cute.make_tensor(y, cute.make_layout((size,))),
            bias_vector,
            factor + self.offset,
            self.threads,
        ).launch(
            grid=(cute.ceil_div(size, self.threads), 1, 1),
            block=(self.threads, 1, 1),
            smem=self.shared,
            stream=stream,
        )


@dataclass
class ScalePlan(KernelPlan):
    """`y = x * factor + bias` for `n` numbers."""

    n: int = 1000
    factor: float = 2.0
    offset: float = 0.0
    with_bias: bool = True
    dtype: str = "bfloat16"
    requires_arch: str = ""
    tiling: ScaleTiling = field(default_factory=ScaleTiling)

    def prepare_inputs(self, device: Any) -> tuple[Tensor, ...]:
        x = torch.linspace(-1.0, 1.0, self.n, device=device).to(getattr(torch, self.dtype))
        return x, torch.linspace(0.0, 3.0, self.n, device=device)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        x, bias = inputs
        wanted = x.float() * (self.factor + self.offset) + (bias if self.with_bias else 0.0)
        return (wanted.to(compute_dtype or torch.float32),)

    def _autotune_configs(self) -> Sequence[ScaleTiling]:
        return [ScaleTiling(), ScaleTiling(threads=256), ScaleTiling(unknown=True)]

    def _algorithmic_flops_bytes(self, tiling: ScaleTiling) -> tuple[float, float]:
        return 2.0 * self.n, 8.0 * self.n

    def plan(self, *inputs: Tensor) -> CuteKernel:
        x, bias = inputs
        y = torch.empty_like(x)

        def host_fn(tiling: ScaleTiling) -> ScaleAdd:
            return ScaleAdd(tiling.threads, tiling.unknown, self.offset)

        def args_fn(tiling: ScaleTiling) -> Sequence[Any]:
            given = bias if self.with_bias else None
            return x, y, given, x.numel(), Int64Arg(x.stride(0)), self.factor

        return CuteKernel(
            kernel_fn=scale_add,
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[y],
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
            autotune_configs=self._autotune_configs(),
            host_fn=host_fn,
            args_fn=args_fn,
            requires_arch=self.requires_arch,
        )


def empty(**fields: Any) -> CuteKernel:
    return ScalePlan(**fields).plan_empty(1.0, 1.0)


def note_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start from empty caches in memory; the list gets the key of what is really compiled."""
    noted: list[str] = []
    original = cute_kernel._trace_and_compile

    def trace_and_compile(key: Any, host: Any, kinds: Any) -> Any:
        noted.append(key.digest)
        return original(key, host, kinds)

    monkeypatch.setattr(cute_kernel, "_trace_and_compile", trace_and_compile)
    monkeypatch.setattr(cute_kernel, "_compiled", {})
    monkeypatch.setattr(cute_kernel, "_programs", {})
    return noted


OTHER_PROCESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.runtime.cute.cute_support import ScalePlan
from mla_var3.runtime import cute_kernel
kernel = ScalePlan().plan_empty(1.0, 1.0)
made = []
original = cute_kernel._trace_and_compile
cute_kernel._trace_and_compile = lambda *a: made.append(1) or original(*a)
compiled = kernel.compile("sm_90")
host, args = kernel._host_and_args(kernel.tiling)
key = cute_kernel._key(
    kernel.kernel_fn, host, cute_kernel.kinds_of(args), kernel.tiling, "sm_90a"
)
function = cute_kernel._link(key, cute_kernel._compiled[key.digest])
print(json.dumps({"made": len(made), "size": len(compiled.cubin), "linked": bool(function)}))
"""


def run_process(code: str, repo_root: Path, environment: dict[str, str], **extra: str) -> Any:
    done = run_program([sys.executable, "-c", code, str(repo_root)], env={**environment, **extra})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
