"""First stage of mla_var6_plus: old tokens latent and newest tokens decompressed, at the same time.

Every CTA has one of two roles. A latent CTA attends a tile of s*h query rows of a request to its
old tokens in the latent cache (compute bound). A head CTA attends the queries of one head to the
decompressed window of the n newest tokens (memory bound). The roles are interleaved over the grid
in proportion, so that at any time some SMs compute while others stream.

Inputs, outputs and masks: see `mix_stages.py`.
"""

from dataclasses import dataclass, field

import cuda.tile as ct
from torch import Tensor

from mla_var3.kernel.cutile.mla.mix_stages import MixAttentionPlan, MixTiling
from mla_var3.kernel.cutile.mla.tile_ops import store_new_tokens, store_old_tokens
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class AttentionBlockSpecializedTiling(MixTiling):
    """Tiles of both roles: Bm x Bn in latent space (in parts of Kp columns), Hm x Hn per head."""


@ct.kernel
def attention_block_specialized(
    q_nope, q_latent, q_rope, q_rope_rows, c_kv, k_rope, k_new, v_new, k_rope_new, lengths,
    o_latent, lse_latent, o_new, lse_new,
    scale_log2e: float, s: int, n: int, latent_blocks: int, head_blocks: int,
    latent_row_tiles: int, head_query_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, HM: ConstInt, HN: ConstInt,
    KP: ConstInt, PARTS: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # CTA i is latent when more latent CTAs are due among the first i+1 than among the first i: an
    # even interleaving for any ratio. 64 bits, because i * latent_blocks exceeds 2^31 on large
    # batches.
    blocks = latent_blocks + head_blocks
    i = ct.bid(0).astype(ct.int64)
    latent_before = (i * latent_blocks // blocks).astype(ct.int32)
    latent_after = ((i + 1) * latent_blocks // blocks).astype(ct.int32)
    if latent_after > latent_before:
        # q_latent [b, s*h, K], q_rope_rows [b, s*h, P], o_latent [b, s*h, K], lse_latent [b, s*h]
        store_old_tokens(
            q_latent, q_rope_rows, c_kv, k_rope, lengths, o_latent, lse_latent,
            latent_before, latent_row_tiles, s, n, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
        )  # fmt: skip
    else:
        # q_nope [b, s, h, D], q_rope [b, s, h, P], o_new [b, s, h, D], lse_new [b, s, h]
        store_new_tokens(
            q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse_new,
            ct.bid(0) - latent_before, head_query_tiles, c_kv.shape[1], s, n,
            scale_log2e, CAUSAL, H, HM, HN, D, P,
        )  # fmt: skip


@dataclass
class CtAttentionBlockSpecialized(MixAttentionPlan):
    """Plan of the attention stage."""

    tiling: AttentionBlockSpecializedTiling = field(default_factory=AttentionBlockSpecializedTiling)

    def plan(self, *inputs: Tensor) -> CtKernel:
        tensors, outputs = self.operands(*inputs)

        def args_fn(tiling: AttentionBlockSpecializedTiling) -> tuple[object, ...]:
            sizes = self.scale_log2e, self.s, self.n, *self.tile_counts(tiling)
            return (*tensors, *sizes, *self.constants(tiling))

        return self.kernel(attention_block_specialized, self.one_grid, args_fn, inputs, outputs)
