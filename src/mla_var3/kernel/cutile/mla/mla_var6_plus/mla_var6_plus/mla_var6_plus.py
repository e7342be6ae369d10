"""mla_var6_plus: old tokens latent, the n newest decompressed, at the same time.

A pipeline of two kernels: `attention_block_specialized` reads the old tokens in latent space on
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
Base version. Limits: both roles are one kernel, so the head role gets the one CTA per SM that
the latent role's shared memory allows, and the latent role runs at flash_mla's rate.
"""

from dataclasses import dataclass, field

from mla_var3.kernel.cutile.mla.decompress_combine import DecompressCombineTiling
from mla_var3.kernel.cutile.mla.mix_stages import CutileMixPlan
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus.attention_block_specialized import (
    AttentionBlockSpecializedTiling,
    CtAttentionBlockSpecialized,
)


@dataclass
class CtMlaVar6Plus(CutileMixPlan):
    """Plan of the base version of mla_var6_plus."""

    tiling: AttentionBlockSpecializedTiling = field(default_factory=AttentionBlockSpecializedTiling)
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    attention = CtAttentionBlockSpecialized


if __name__ == "__main__":
    raise SystemExit(CtMlaVar6Plus().benchmark_kernel_argparse())
