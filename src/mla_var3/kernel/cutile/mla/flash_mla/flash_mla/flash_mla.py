"""flash_mla: latent attention (absorbed queries over the latent cache), one CTA per query tile.

Computes, for every request, o = softmax(q_latent c_kv^T + q_rope k_rope^T) c_kv. The s*h query
rows of a request are packed into tiles of Bm rows, because all heads share the one latent cache:
any number of heads fills the tiles, and only a request's last tile is padded.

    q_latent [b, s, h, k]   latent queries          q_rope [b, s, h, p]
    c_kv     [b, t, k]      latent cache            k_rope [b, t, p]
    lengths  [b] int32      KV length per request
    -> o_latent [b, s, h, k] in the input dtype, lse [b, s, h] float32 (natural logarithm)

Also paged caches, packed queries, trees of drafts and sliding windows: `latent_plan.py`. bfloat16
and float16. The cache may be in 8 bits (`fp8`, `fp8_per_token`, `fp8_ds_mla`), read where it lies:
its tiles are converted to the dtype of the queries in registers, and all products are in 16 bits.
k=512 or 256 and p=64, 32 or 0 (powers of two; without rope its product is left out);
causal (bottom-right) or not; any s, t >= 1; slots beyond a length may hold NaN. Rows without a
visible key give 0 and -inf. Targets: sm_90 (wgmma, TMA), sm_10x and sm_110 (tcgen05, TMA), sm_12x
(mma, TMA), sm_8x (mma).

Base version. Limits: few CTAs when b*s*h is small (then use flash_mla_split_kv); fewer than 64 rows
(32 on sm_8x and sm_12x) are padded to as many; pages of 16 and 32 tokens make KV tiles as short.
sm_8x has no float8 in cuTile: bytes are decoded by integer operations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs, LatentPlan, LatentTiling
from mla_var3.kernel.cutile.mla.tile_ops import packed_queries, store_rows
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class FlashMLATiling(LatentTiling):
    """Bm query rows (s*h of one request, packed) against Bn latent tokens."""


@ct.kernel
def flash_mla(
    q_latent, q_rope, c_kv, k_rope, lengths, table, bounds, tree, o_latent, lse,
    scale_log2e: float, s: int, scales,
    PAGE: ConstInt, PACKED: ConstInt, TREE: ConstInt, WINDOW: ConstInt, CACHE: ConstInt,
    CAUSAL: ConstBool,
    H: ConstInt, BM: ConstInt, BN: ConstInt, KP: ConstInt, PARTS: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_latent [b, s*h, K], q_rope [b, s*h, P], o_latent [b, s*h, K], lse [b, s*h]; packed: b = 1
    row_tile = ct.bid(0)
    request = ct.bid(1)
    if PACKED == 1:
        first, count = packed_queries(bounds, request, s, lse.shape[1] // H)
        if row_tile * BM < count * H:
            begin, end = first * H, (first + count) * H
            store_rows(
                q_latent.slice(1, begin, end), q_rope.slice(1, begin, end), c_kv, k_rope,
                scales, lengths, table, tree, o_latent.slice(1, begin, end),
                lse.slice(1, begin, end), (0, row_tile), 0, request, 0, 1, count, scale_log2e,
                PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
    else:
        store_rows(
            q_latent, q_rope, c_kv, k_rope, scales, lengths, table, tree, o_latent, lse,
            (request, row_tile), request, request, 0, 1, s, scale_log2e,
            PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
        )  # fmt: skip


@dataclass
class CtFlashMLA(LatentPlan):
    """Plan of the base version of flash_mla."""

    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)

    targets = (
        "sm_90", "sm_100", "sm_120",
        "sm_80", "sm_86", "sm_87", "sm_89", "sm_103", "sm_110", "sm_121",
    )  # fmt: skip

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        return FlashMLATiling.candidates(self)

    def cost(self) -> Cost:
        return flash_mla_cost(self.problem().within(self.sliding_window), self.token_bytes)

    def plan(self, *inputs: Tensor | None) -> CtKernel:
        operands = self.operands(LatentInputs.of(inputs))
        lead, h, k = operands.lead, self.h, self.k
        o_latent = operands.results(*lead, h, k, dtype=self.torch_dtype)
        lse = operands.results(*lead, h, dtype=torch.float32, empty=-math.inf)

        def grid_fn(tiling: FlashMLATiling) -> tuple[int, int]:
            return (ct.cdiv(self.s * h, tiling.Bm), self.b)

        def args_fn(tiling: FlashMLATiling) -> tuple[object, ...]:
            rows = lead[0], lead[1] * h
            given = (*operands.tensors, o_latent.view(*rows, k), lse.view(rows))
            constants = (*operands.options, self.causal, h, *tiling.sides(k), self.p)
            return (*given, self.scale_log2e, self.s, operands.scales, *constants)

        results = operands.as_given(o_latent, lse)
        return self.kernel(flash_mla, grid_fn, args_fn, inputs, results)


if __name__ == "__main__":
    raise SystemExit(CtFlashMLA().benchmark_kernel_argparse())
