"""flash_attention: attention over decompressed keys and values, one CTA per head and query tile.

Computes, for every request and head, o = softmax(q_nope k^T + q_rope k_rope^T) v. The rope part of
the keys is one array for all heads, so a token costs 2*d elements per head and p once.

    q_nope [b, s, h, d]     q_rope [b, s, h, p]
    k, v   [b, h, t, d]     k_rope [b, t, p]
    lengths [b] int32       KV length per request
    -> o [b, s, h, d] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any s, t >= 1; slots beyond a length may hold
NaN. Rows without a visible key give 0 and -inf. Targets: sm_90 (wgmma, TMA), sm_100, sm_120.

Base version. Limits: fewer than Bm queries are padded to Bm rows (free while memory bound), and
with small b*h there are few CTAs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tile_ops import clamped_length, store_head_tile
from mla_var3.kernel.cutile.mla.tilings import HeadTiling
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_attention_cost
from mla_var3.op.mla.inputs import decompress_all
from mla_var3.op.mla.reference import reference_decompressed
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class FlashAttentionTiling(HeadTiling):
    """Bm queries of one head against Bn tokens."""


@ct.kernel
def flash_attention(
    q_nope, q_rope, keys, values, k_rope, lengths, o, lse,
    scale_log2e: float, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_nope [b, s, h, D], q_rope [b, s, h, P], keys and values [b, h, t, D], k_rope [b, t, P]
    query_tile = ct.bid(0)
    head = ct.bid(1)
    request = ct.bid(2)
    length = clamped_length(lengths, request, keys.shape[2])
    store_head_tile(
        q_nope, q_rope, keys, values, k_rope, o, lse, request, head, query_tile,
        length, q_nope.shape[1], 0, scale_log2e, CAUSAL, BM, BN, D, P,
    )  # fmt: skip


@dataclass
class CtFlashAttention(CutilePlan):
    """Plan of the base version of flash_attention."""

    tiling: FlashAttentionTiling = field(default_factory=FlashAttentionTiling)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
        return raw.q_nope, raw.q_rope, keys, values, raw.k_rope, raw.lengths

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return reference_decompressed(*inputs, **self.attend_options(compute_dtype))

    def _autotune_configs(self) -> Sequence[FlashAttentionTiling]:
        return FlashAttentionTiling.candidates(self.target.code, self.s)

    def cost(self) -> Cost:
        return flash_attention_cost(self.problem())

    def plan(self, *inputs: Tensor) -> CtKernel:
        q_nope, q_rope, keys, values, k_rope, lengths = inputs
        shapes = {"q_nope": "bshd", "q_rope": "bshp", "k": "bhtd", "v": "bhtd", "k_rope": "btp"}
        self.check_inputs({**shapes, "lengths": "b"}, inputs)
        b, s, h, d, p = self.b, self.s, self.h, self.d, self.p
        o = q_nope.new_empty((b, s, h, d))
        lse = q_nope.new_empty((b, s, h), dtype=torch.float32)

        def grid_fn(tiling: FlashAttentionTiling) -> tuple[int, int, int]:
            return (ct.cdiv(s, tiling.Bm), h, b)

        def args_fn(tiling: FlashAttentionTiling) -> tuple[object, ...]:
            tensors = (q_nope, q_rope, keys, values, k_rope, lengths, o, lse)
            return (*tensors, self.scale_log2e, self.causal, tiling.Bm, tiling.Bn, d, p)

        return self.kernel(flash_attention, grid_fn, args_fn, inputs, [o, lse])


if __name__ == "__main__":
    raise SystemExit(CtFlashAttention().benchmark_kernel_argparse())
