"""The templates of the specification, as they are written there, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Tiling

ct = pytest.importorskip("cuda.tile")

from mla_var3.runtime.ct_kernel import CtKernel  # noqa: E402

RATES = (800.0, 4000.0)


@ct.kernel
def my_kernel(x, y, Bm: ct.Constant[int], Bn: ct.Constant[int]):
    tile = ct.load(x, (ct.bid(0), ct.bid(1)), (Bm, Bn))
    ct.store(y, (ct.bid(0), ct.bid(1)), tile + tile)


@dataclass
class MyKernelTiling(Tiling):
    Bm: int = 32
    Bn: int = 64
    num_ctas: int = None
    occupancy: int = None

    def validate(self, pd: CtMyKernel) -> bool:
        return self.Bm <= pd.s and self.Bn <= pd.t


@dataclass
class CtMyKernel(KernelPlan):
    """Template 1: a single kernel; it doubles a matrix."""

    s: int = 64
    t: int = 128
    tiling: MyKernelTiling = field(default_factory=MyKernelTiling)

    def prepare_inputs(self, device) -> tuple:
        return (torch.ones((self.s, self.t), dtype=torch.bfloat16, device=device),)

    def reference_fn(self, *inputs) -> tuple:
        return (2 * inputs[0].float(),)

    def _autotune_configs(self) -> list[MyKernelTiling]:
        return [MyKernelTiling(), MyKernelTiling(Bm=64)]

    def _algorithmic_flops_bytes(self, *inputs, tiling) -> tuple[int, int]:
        (x,) = inputs
        return x.numel(), 4 * x.numel()

    def plan(self, *inputs) -> CtKernel:
        (x,) = inputs
        y = torch.empty_like(x)
        return CtKernel(
            kernel_fn=my_kernel,
            grid_fn=lambda tiling: (ct.cdiv(self.s, tiling.Bm), ct.cdiv(self.t, tiling.Bn)),
            args_fn=lambda tiling: (x, y, tiling.Bm, tiling.Bn),
            input_tensors=[x],
            output_tensors=[y],
            tiling=self.tiling,
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )


@dataclass
class MyPipeline(CtMyKernel):
    """Template 2: stages in order, two of them at the same time."""

    def reference_fn(self, *inputs) -> tuple:
        return (4 * inputs[0].float(),)

    def plan(self, *inputs) -> KernelPipeline:
        first = CtMyKernel(self.s, self.t, self.tiling).plan(*inputs)
        a = CtMyKernel(self.s, self.t).plan(first.output_tensors[0])
        b = CtMyKernel(self.s, self.t).plan(first.output_tensors[0])
        concurrent = ConcurrentKernels(
            _name="my_overlap_group",
            concurrent_kernels=[a, b],
            validate_joint_tiling_fn=lambda tilings: sum(t.Bm for t in tilings) <= 128,
        )
        return KernelPipeline(
            pipeline_name="my_pipeline", stages=[first, concurrent], output_tensors=a.output_tensors
        )


@pytest.mark.parametrize("plan", [CtMyKernel(), MyPipeline()], ids=lambda plan: type(plan).__name__)
def test_a_cutile_template_runs_from_its_command_line(plan, capsys):
    argv = ["--device=cpu", "--prof_type=disabled", "--check"]
    assert plan.benchmark_kernel_argparse(argv) == 0
    assert "check passed" in capsys.readouterr().out
    stage = plan.plan_empty(*RATES)  # predicted without tensors
    assert stage.cost().flops == 64 * 128 * len(list(stage.kernels()))
    assert stage.predict_us(*RATES) > 0
    assert plan.benchmark_kernel_argparse([*argv, "--Bm=512"]) == 2, "validate sees the plan"
    assert "MyKernelTiling.validate rejects Bm=512" in capsys.readouterr().err


def test_a_wrong_result_of_a_template_is_caught():
    """Its reference takes no compute_dtype, so the dtype's epsilon sets the bounds."""

    class Wrong(CtMyKernel):
        def reference_fn(self, *inputs) -> tuple:
            return (2.1 * inputs[0].float(),)

    result = Wrong().benchmark_kernel("cpu", prof_type="disabled", check=True)
    assert result.check is not None and not result.check.passed


def test_the_cute_template_plans_and_predicts():
    """Template 3: a closure that launches. It needs a GPU to run, and says so."""
    pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")
    from mla_var3.runtime.cute_kernel import CuteKernel

    def device_kernel() -> None:
        """Stands for a `@cute.kernel` function, of which only the name is used."""

    @dataclass
    class CuteTiling(Tiling):
        tile_m: int = 64
        num_warpgroups: int = 2

        def validate(self, pd: CuteMyKernel) -> bool:
            return self.tile_m <= pd.s

    @dataclass
    class CuteMyKernel(CtMyKernel):
        tiling: CuteTiling = field(default_factory=CuteTiling)

        def plan(self, *inputs) -> CuteKernel:
            output = torch.empty_like(inputs[0])

            def launch_fn(tiling: CuteTiling) -> None:
                raise AssertionError("launched without a GPU")

            return CuteKernel(
                kernel_fn=device_kernel,
                launch_fn=launch_fn,
                input_tensors=list(inputs),
                output_tensors=[output],
                tiling=self.tiling,
                autotune_configs=self._autotune_configs(),
                algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
            )

    plan = CuteMyKernel()
    stage = plan.plan_empty(*RATES)
    assert stage.name == "device_kernel"
    assert stage.cost().bytes == 4 * 64 * 128
    assert stage.plan is plan
    with pytest.raises(UnsupportedError, match="device_kernel: CuTe DSL kernels need a GPU"):
        plan.plan(*plan.prepare_inputs("cpu")).launch()
