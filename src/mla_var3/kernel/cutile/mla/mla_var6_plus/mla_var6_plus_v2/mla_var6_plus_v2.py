"""mla_var6_plus_v2: old tokens latent, the n newest decompressed, at the same time.

A pipeline of two kernels: `attention_block_specialized_v2` reads the old tokens in latent space on
some SMs (compute bound) while other SMs stream the decompressed window (memory bound), and
`decompress_combine` up-projects the latent part and merges both by LSE.

    q_nope [b, s, h, d]   q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]        k_rope [b, t, p]
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]   window: slot j is position max(len-n,0)+j
    w_uv [h, k, d]        lengths [b] int32
    -> o [b, s, h, d] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any s, t >= 1 and any n in 0..t; slots beyond a
length may hold NaN. Rows without a visible key give 0 and -inf. Targets: sm_90, sm_100, sm_120.

n follows from the cost model (`--n` pins it, `--refine` lets timing move it).
Parent: mla_var6_plus. Idea: a launch order that follows from how long a tile takes. The roles stay
interleaved in proportion, but the role with the longer tiles leads, and some tiles of the other are
held back for the end, so that the grid does not end with one long tile per SM.
Limits: both roles are one kernel, so the head role gets the one CTA per SM that the latent role's
shared memory allows, and the latent role runs at flash_mla's rate.
"""

from dataclasses import dataclass, field

from mla_var3.kernel.cutile.mla.decompress_combine import DecompressCombineTiling
from mla_var3.kernel.cutile.mla.mix_stages import CutileMixPlan
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v2.attention_block_specialized_v2 import (  # noqa: E501
    AttentionBlockSpecializedTilingV2,
    CtAttentionBlockSpecializedV2,
)


@dataclass
class CtMlaVar6PlusV2(CutileMixPlan):
    """Plan of version 2 of mla_var6_plus."""

    tiling: AttentionBlockSpecializedTilingV2 = field(
        default_factory=AttentionBlockSpecializedTilingV2
    )
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    attention = CtAttentionBlockSpecializedV2


if __name__ == "__main__":
    raise SystemExit(CtMlaVar6PlusV2().benchmark_kernel_argparse())
