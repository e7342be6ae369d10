"""A plan that computes nothing, for the tests of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from mla_var3.cli.console import usage_errors
from mla_var3.cli.options import PlanParser, Request
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.compare import ErrorFigures
from mla_var3.op.cost import Cost
from mla_var3.runtime.check import CheckResult, OutputCheck
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.stage import Constraints, Stage, Tiling


@dataclass
class FakeTiling(Tiling):
    Bm: int = 64
    Bn: int = 128
    occupancy: int | None = None

    def validate(self, pd: Any) -> Constraints:
        return Constraints((self.Bm > 0, f"Bm: expected a positive number, got {self.Bm}"))


@dataclass
class FakePlan(KernelPlan):
    """A plan of 1e6 * b FLOPs."""

    b: int = 1
    t: int = 4096
    scale: float = 1.0
    fraction: float | None = None
    dtype: str = "bfloat16"
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    seed: int | None = field(default=None, metadata={"help": "a text of its own, 100% of it"})
    tiling: FakeTiling = field(default_factory=FakeTiling)

    targets: ClassVar[tuple[str, ...]] = ("sm_90", "sm_100")

    def __post_init__(self) -> None:
        if self.b < 1:
            raise InvalidArgumentError("b", "a positive integer", self.b)

    def prepare_inputs(self, device: Any) -> tuple[Any, ...]:
        return ()

    def reference_fn(self, *inputs: Any, compute_dtype: Any = None) -> tuple[Any, ...]:
        return ()

    def _autotune_configs(self) -> Sequence[Tiling]:
        return []

    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        return 1e6 * self.b, 1.0

    def cpu_check_plan(self) -> FakePlan:
        return self.copy(b=2)

    def plan(self, *inputs: Any) -> Stage:
        leaf = SimpleNamespace(
            tiling=self.tiling, plan=self, runs_on_cpu=True, input_tensors=[], output_tensors=[]
        )
        cost = Cost(1e6 * self.b, 1.0)
        return SimpleNamespace(cost=lambda: cost, kernels=lambda: [leaf])


def check_result(passes: bool) -> CheckResult:
    """The check of one output, which has NaN where it does not pass."""
    error = ErrorFigures(0.001, 0.01, 0 if passes else 3, 0)
    return CheckResult((OutputCheck(0, (2, 4), error, error, 0.002, 0.02),))


def read(plan: KernelPlan, *argv: str) -> Request:
    """What a command line asks of a plan."""
    parser = PlanParser(plan, "prog")
    with usage_errors():
        return parser.request(parser.parse(argv))
