"""A cuTile kernel of your own on the workbench: check it, compile it, predict its time.

    python examples/own_kernel.py
    python examples/own_kernel.py --rows=100 --Br=8 --device=cpu --check
    python examples/own_kernel.py --target=sm_90,sm_100

The kernel scales latent rows by their root mean square. `docs/tutorial.md` takes the same kernel
further: into the package, through tuning and profiling, to a second version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, KernelPlan, Tiling

ConstInt = ct.Constant[int]
EPS = 1e-6


@dataclass
class NormTiling(Tiling):
    """Br rows per block."""

    Br: int = 4

    def validate(self, pd: "LatentNorm") -> Constraints:
        power = self.Br > 0 and self.Br & (self.Br - 1) == 0
        return Constraints((power, f"Br: expected a power of two, got {self.Br}"))


@ct.kernel
def latent_norm(x, y, BR: ConstInt, K: ConstInt):
    # x and y [rows, K]
    block = ct.bid(0)
    tile = ct.load(x, (block, 0), (BR, K), padding_mode=ct.PaddingMode.ZERO)  # [BR, K]
    row = tile.astype(ct.float32)
    mean = ct.sum(row * row, axis=1, keepdims=True) / K  # [BR, 1]
    ct.store(y, (block, 0), (row * ct.rsqrt(mean + EPS)).astype(y.dtype))


@dataclass
class LatentNorm(KernelPlan):
    """y = x / sqrt(mean(x^2) + eps), row by row."""

    rows: int = field(default=8192, metadata={"help": "latent rows"})
    k: int = field(default=512, metadata={"help": "latent width"})
    tiling: NormTiling = field(default_factory=NormTiling)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return (torch.randn((self.rows, self.k), device=device, dtype=torch.bfloat16),)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        x = inputs[0].to(compute_dtype or torch.float32)
        return (x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS),)

    def _autotune_configs(self) -> Sequence[NormTiling]:
        return [NormTiling(rows) for rows in (4, 8, 16)]

    def _algorithmic_flops_bytes(self, tiling: NormTiling) -> tuple[float, float]:
        elements = self.rows * self.k
        return 4.0 * elements, 4.0 * elements

    def plan(self, *inputs: Tensor) -> CtKernel:
        (x,) = inputs
        y = torch.empty_like(x)
        return CtKernel(
            kernel_fn=latent_norm,
            grid_fn=lambda tiling: (ct.cdiv(self.rows, tiling.Br), 1, 1),
            args_fn=lambda tiling: (x, y, tiling.Br, self.k),
            tiling=self.tiling,
            plan=self,
            input_tensors=[x],
            output_tensors=[y],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )

    def cpu_check_plan(self) -> "LatentNorm":
        """Few rows, the last block not full."""
        return self.copy(rows=min(self.rows, 37))


if __name__ == "__main__":
    raise SystemExit(LatentNorm().benchmark_kernel_argparse())
