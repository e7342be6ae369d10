"""flash_mla: latent attention (absorbed queries over the latent cache), one CTA per query tile.

Computes, for every request, o = softmax(q_latent c_kv^T + q_rope k_rope^T) c_kv. The s*h query
rows of a request are packed into tiles of Bm rows, because all heads share the one latent cache.

    q_latent [b, s, h, k]   latent queries          q_rope [b, s, h, p]
    c_kv     [b, t, k]      latent cache            k_rope [b, t, p]
    lengths  [b] int32      KV length per request
    -> o_latent [b, s, h, k] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any s, t >= 1; slots beyond a length may hold
NaN. Rows without a visible key give 0 and -inf. Targets: sm_90 (wgmma, TMA), sm_100, sm_120.

Base version. Limits: few CTAs when b*s*h is small (then use flash_mla_split_kv); fewer than 64 rows
are padded to 64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.tile_ops import (
    attend_latent,
    load_column_parts,
    log_sum_exp,
    store_column_parts,
    visible,
)
from mla_var3.kernel.cutile.mla.tilings import LatentTiling
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class FlashMLATiling(LatentTiling):
    """Bm query rows (s*h of one request, packed) against Bn latent tokens."""


@ct.kernel
def flash_mla(
    q_latent, q_rope, c_kv, k_rope, lengths, o_latent, lse,
    scale_log2e: float, s: int, H: ConstInt, CAUSAL: ConstBool,
    BM: ConstInt, BN: ConstInt, KP: ConstInt, PARTS: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_latent [b, s*h, K], q_rope [b, s*h, P], o_latent [b, s*h, K], lse [b, s*h]
    row_tile = ct.bid(0)
    request = ct.bid(1)
    q = load_column_parts(q_latent, request, row_tile, BM, KP, PARTS)
    qr = ct.load(q_rope, (request, row_tile, 0), (1, BM, P), padding_mode=ct.PaddingMode.ZERO)
    qr = qr.reshape((BM, P))
    length = ct.load(lengths, (request,), ())
    first_row = row_tile * BM
    lowest = visible(first_row, length, s, CAUSAL, H)
    highest = visible(first_row + BM - 1, length, s, CAUSAL, H)
    acc, m, l = attend_latent(
        q, qr, c_kv, k_rope, request, 0, max(lowest, 0) // BN, ct.cdiv(max(highest, 0), BN),
        first_row, length, s, length, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
    )  # fmt: skip
    store_column_parts(o_latent, (request, row_tile), acc, l, BM, KP, PARTS)
    ct.store(lse, (request, row_tile), log_sum_exp(m, l).reshape((1, BM)))


@dataclass
class CtFlashMLA(MlaPlan):
    """Plan of the base version of flash_mla."""

    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)

    needs_v = False

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return self.latent_inputs(device)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return self.latent_reference(*inputs, compute_dtype=compute_dtype)

    def _default_tiling(self, name: str) -> FlashMLATiling | None:
        return FlashMLATiling.candidates(self.target.code, self.k)[0]

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        return FlashMLATiling.candidates(self.target.code, self.k)

    def _algorithmic_flops_bytes(self, tiling: FlashMLATiling) -> tuple[float, float]:
        cost = flash_mla_cost(self.problem())
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> CtKernel:
        q_latent, _, c_kv, k_rope, lengths = inputs
        latent_rows, rope_rows = self.latent_rows(*inputs)
        b, s, h, k, p = self.b, self.s, self.h, self.k, self.p
        o_latent = q_latent.new_empty((b, s, h, k))
        lse = q_latent.new_empty((b, s, h), dtype=torch.float32)

        def grid_fn(tiling: FlashMLATiling) -> tuple[int, int]:
            return (ct.cdiv(s * h, tiling.Bm), b)

        def args_fn(tiling: FlashMLATiling) -> tuple[object, ...]:
            return (
                latent_rows,
                rope_rows,
                c_kv,
                k_rope,
                lengths,
                o_latent.view(b, s * h, k),
                lse.view(b, s * h),
                self.scale_log2e,
                s,
                h,
                self.causal,
                tiling.Bm,
                tiling.Bn,
                tiling.Kp,
                k // tiling.Kp,
                p,
            )

        return CtKernel(
            kernel_fn=flash_mla,
            grid_fn=grid_fn,
            args_fn=args_fn,
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[o_latent, lse],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )


if __name__ == "__main__":
    raise SystemExit(CtFlashMLA().benchmark_kernel_argparse())
