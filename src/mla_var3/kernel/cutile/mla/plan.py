"""What the plans of all cuTile MLA kernels share: default tiling, cost, making a kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.cost import Cost
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Tiling

KernelT = TypeVar("KernelT", bound=CtKernel)


@dataclass
class CutilePlan(MlaPlan):
    """Plan of a cuTile kernel; the first of its candidate tilings is the default."""

    @abstractmethod
    def cost(self) -> Cost:
        """FLOPs and bytes, whatever the tiling."""

    def _default_tiling(self, name: str) -> Tiling | None:
        return self._autotune_configs()[0]

    def _algorithmic_flops_bytes(self, tiling: Any) -> tuple[float, float]:
        cost = self.cost()
        return cost.flops, cost.bytes

    def kernel(
        self,
        kernel_fn: Any,
        grid_fn: Callable[[Any], tuple[int, ...]],
        args_fn: Callable[[Any], tuple[object, ...]],
        inputs: Sequence[Tensor | None],
        outputs: list[Tensor],
        runtime: type[KernelT] = CtKernel,  # type: ignore[assignment]
        **own: Any,
    ) -> KernelT:
        """The kernel with this plan's tilings and cost; inputs that a call lacks are None."""
        return runtime(
            kernel_fn=kernel_fn,
            grid_fn=grid_fn,
            args_fn=args_fn,
            tiling=self.tiling_fields()["tiling"],
            plan=self,
            input_tensors=[tensor for tensor in inputs if tensor is not None],
            output_tensors=outputs,
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
            **own,
        )
