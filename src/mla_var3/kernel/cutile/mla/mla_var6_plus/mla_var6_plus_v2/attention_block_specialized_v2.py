"""First stage of mla_var6_plus_v2: old tokens latent, newest tokens decompressed, at the same time.

Every CTA has one of two roles. A latent CTA attends a tile of s*h query rows of a request to its
old tokens in the latent cache (compute bound). A head CTA attends the queries of one head to the
decompressed window of the n newest tokens (memory bound). The roles are interleaved over the grid
in proportion, with one exception: the role whose tiles take longer leads. It has the first CTA, and
a share of the other role's CTAs (`HoldBack`) comes last. So both roles run from the start, and when
the last long tile begins, short tiles are left to fill the SMs beside it.

Inputs, outputs and masks: see `mix_stages.py`.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import cuda.tile as ct
from torch import Tensor

from mla_var3.kernel.cutile.mla.mix_stages import MixAttentionPlan, MixTiling
from mla_var3.kernel.cutile.mla.tile_ops import store_new_tokens, store_old_tokens
from mla_var3.kernel.cutile.mla.tilings import PERCENT, percentage
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class AttentionBlockSpecializedTilingV2(MixTiling):
    """Tiles of both roles: Bm x Bn in latent space (in parts of Kp columns), Hm x Hn per head.

    HoldBack is the percentage of the CTAs of the role with the shorter tiles that come after all
    others; 0 interleaves to the end of the grid.
    """

    HoldBack: int = field(
        default=25, metadata={"help": "percent of the shorter role's CTAs kept for the end"}
    )

    def own_rules(self) -> list[tuple[bool, str]]:
        return [percentage("HoldBack", self.HoldBack)]

    def variants(self) -> list[Self]:
        return [replace(self, HoldBack=share) for share in (25, 0, 10, 50)]


@ct.kernel
def attention_block_specialized_v2(
    q_nope, q_latent, q_rope, q_rope_rows, c_kv, k_rope, k_new, v_new, k_rope_new, lengths,
    o_latent, lse_latent, o_new, lse_new,
    scale_log2e: float, s: int, n: int, leading_blocks: int, spread: int, latent_leads: int,
    latent_row_tiles: int, head_query_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, HM: ConstInt, HN: ConstInt,
    KP: ConstInt, PARTS: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # CTA i has the leading role when more leading CTAs are due among the first i+1 than among the
    # first i, both rounded up so that CTA 0 leads: an even interleaving over the first `spread`
    # CTAs for any ratio, and none after them. 64 bits, because i * leading_blocks exceeds 2^31 on
    # large batches.
    i = ct.bid(0).astype(ct.int64)
    before = ct.cdiv(min(i, spread) * leading_blocks, spread).astype(ct.int32)
    after = ct.cdiv(min(i + 1, spread) * leading_blocks, spread).astype(ct.int32)
    leads = after - before
    work = leads * before + (1 - leads) * (ct.bid(0) - before)
    if leads == latent_leads:
        # q_latent [b, s*h, K], q_rope_rows [b, s*h, P], o_latent [b, s*h, K], lse_latent [b, s*h]
        store_old_tokens(
            q_latent, q_rope_rows, c_kv, k_rope, lengths, o_latent, lse_latent,
            work, latent_row_tiles, s, n, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
        )  # fmt: skip
    else:
        # q_nope [b, s, h, D], q_rope [b, s, h, P], o_new [b, s, h, D], lse_new [b, s, h]
        store_new_tokens(
            q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse_new,
            work, head_query_tiles, c_kv.shape[1], s, n, scale_log2e, CAUSAL, H, HM, HN, D, P,
        )  # fmt: skip


@dataclass
class CtAttentionBlockSpecializedV2(MixAttentionPlan):
    """Plan of the attention stage."""

    tiling: AttentionBlockSpecializedTilingV2 = field(
        default_factory=AttentionBlockSpecializedTilingV2
    )

    def latent_tiles_are_longer(self, tiling: AttentionBlockSpecializedTilingV2) -> bool:
        """Whether a latent tile of the longest request has more operations than a head tile."""
        longest = max(self.problem().kv_lengths)
        old, new = max(longest - self.n, 0), min(self.n, longest)
        latent = tiling.Bm * old * (2 * self.k + self.p)
        return latent >= tiling.Hm * new * (2 * self.d + self.p)

    def plan(self, *inputs: Tensor) -> CtKernel:
        tensors, outputs = self.operands(*inputs)

        def args_fn(tiling: AttentionBlockSpecializedTilingV2) -> tuple[object, ...]:
            latent, head, *rest = self.tile_counts(tiling)
            latent_leads = self.latent_tiles_are_longer(tiling)
            leading, other = (latent, head) if latent_leads else (head, latent)
            spread = leading + other - other * tiling.HoldBack // PERCENT
            order = leading, max(spread, 1), int(latent_leads)
            sizes = self.scale_log2e, self.s, self.n, *order, *rest
            return (*tensors, *sizes, *self.constants(tiling))

        return self.kernel(attention_block_specialized_v2, self.one_grid, args_fn, inputs, outputs)
