"""First stage of flash_mla_split_kv: latent attention over each split of a request's KV tokens.

    q_latent [b, s, h, k]   q_rope [b, s, h, p]   c_kv [b, t, k]   k_rope [b, t, p]   lengths [b]
    -> o_partial [b, splits, s, h, k] float32, normalised within the split,
       lse_partial [b, splits, s, h] float32; an empty split gives 0 and -inf

The KV tiles of a request divide into `splits` splits of equal size, by its own length. float32
partial outputs keep the result independent of the number of splits up to float32 rounding.
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
from mla_var3.op.mla.attend import KvSegment, attend
from mla_var3.op.mla.cost import flash_mla_split_kv_stages
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class SplitKVPartialTiling(LatentTiling):
    """Bm query rows (s*h of one request, packed) against Bn latent tokens of one split."""


@ct.kernel
def split_kv_partial(
    q_latent, q_rope, c_kv, k_rope, lengths, o_partial, lse_partial,
    scale_log2e: float, s: int, splits: int, H: ConstInt, CAUSAL: ConstBool,
    BM: ConstInt, BN: ConstInt, KP: ConstInt, PARTS: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_latent [b, s*h, K], q_rope [b, s*h, P]
    # o_partial [b, splits, s*h, K], lse_partial [b, splits, s*h]
    row_tile = ct.bid(0)
    split = ct.bid(1)
    request = ct.bid(2)
    q = load_column_parts(q_latent, request, row_tile, BM, KP, PARTS)
    qr = ct.load(q_rope, (request, row_tile, 0), (1, BM, P), padding_mode=ct.PaddingMode.ZERO)
    qr = qr.reshape((BM, P))
    length = ct.load(lengths, (request,), ())
    first_row = row_tile * BM
    lowest = visible(first_row, length, s, CAUSAL, H)
    highest = visible(first_row + BM - 1, length, s, CAUSAL, H)
    split_tiles = ct.cdiv(ct.cdiv(length, BN), splits)
    first_tile = split * split_tiles
    last_tile = min(first_tile + split_tiles, ct.cdiv(max(highest, 0), BN))
    acc, m, l = attend_latent(
        q, qr, c_kv, k_rope, request, first_tile, max(lowest, 0) // BN, last_tile,
        first_row, length, s, length, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
    )  # fmt: skip
    store_column_parts(o_partial, (request, split, row_tile), acc, l, BM, KP, PARTS)
    ct.store(lse_partial, (request, split, row_tile), log_sum_exp(m, l).reshape((1, 1, BM)))


@dataclass
class CtSplitKVPartial(MlaPlan):
    """Plan of the partial-attention stage."""

    splits: int = field(default=1, metadata={"help": "splits of each request's tokens"})
    tiling: SplitKVPartialTiling = field(default_factory=SplitKVPartialTiling)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("splits", self.splits, minimum=1)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return self.latent_inputs(device)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Output and LSE of each split: positions outside it count as unused."""
        q_latent, q_rope, c_kv, k_rope, lengths = inputs
        split_slots = -(-(-(-lengths // self.tiling.Bn)) // self.splits) * self.tiling.Bn  # [b]
        slots = torch.arange(self.t, device=c_kv.device)
        outs, lses = [], []
        for split in range(self.splits):
            begin, end = (split * split_slots)[:, None], ((split + 1) * split_slots)[:, None]
            inside = (slots >= begin) & (slots < end) & (slots < lengths[:, None])
            segment = KvSegment(
                q=torch.cat([q_latent, q_rope], dim=-1),
                keys=torch.cat([c_kv, k_rope], dim=-1)[:, None],
                values=c_kv[:, None],
                positions=torch.where(inside, slots, -1),
            )
            [out], lse = attend(
                [segment],
                lengths=lengths,
                causal=self.causal,
                scale=self.problem().softmax_scale,
                compute_dtype=compute_dtype or torch.float32,
            )
            outs.append(out)
            lses.append(lse)
        return torch.stack(outs, dim=1), torch.stack(lses, dim=1)

    def _autotune_configs(self) -> Sequence[SplitKVPartialTiling]:
        return SplitKVPartialTiling.candidates(self.target.code, self.k)

    def _default_tiling(self, name: str) -> SplitKVPartialTiling | None:
        return SplitKVPartialTiling.candidates(self.target.code, self.k)[0]

    def _algorithmic_flops_bytes(self, tiling: SplitKVPartialTiling) -> tuple[float, float]:
        cost = flash_mla_split_kv_stages(self.problem(), self.splits)[0]
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> CtKernel:
        q_latent, _, c_kv, k_rope, lengths = inputs
        latent_rows, rope_rows = self.latent_rows(*inputs)
        b, s, h, k, p = self.b, self.s, self.h, self.k, self.p
        splits = self.splits
        o_partial = q_latent.new_empty((b, splits, s, h, k), dtype=torch.float32)
        lse_partial = q_latent.new_empty((b, splits, s, h), dtype=torch.float32)

        def grid_fn(tiling: SplitKVPartialTiling) -> tuple[int, int, int]:
            return (ct.cdiv(s * h, tiling.Bm), splits, b)

        def args_fn(tiling: SplitKVPartialTiling) -> tuple[object, ...]:
            return (
                latent_rows,
                rope_rows,
                c_kv,
                k_rope,
                lengths,
                o_partial.view(b, splits, s * h, k),
                lse_partial.view(b, splits, s * h),
                self.scale_log2e,
                s,
                splits,
                h,
                self.causal,
                tiling.Bm,
                tiling.Bn,
                tiling.Kp,
                k // tiling.Kp,
                p,
            )

        return CtKernel(
            kernel_fn=split_kv_partial,
            grid_fn=grid_fn,
            args_fn=args_fn,
            tiling=self.tiling,
            plan=self,
            input_tensors=list(inputs),
            output_tensors=[o_partial, lse_partial],
            autotune_configs=self._autotune_configs(),
            algorithmic_flops_bytes_fn=self._algorithmic_flops_bytes,
        )
