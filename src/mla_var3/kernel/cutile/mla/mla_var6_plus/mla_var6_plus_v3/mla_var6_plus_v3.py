"""mla_var6_plus_v3: old tokens absorbed, the n newest decompressed, at the same time.

A pipeline of two kernels: `attention_block_specialized_v3` reads the old tokens in latent space on
some SMs (compute bound) while other SMs stream the decompressed window (memory bound), and
`decompress_combine` up-projects the latent part and merges both by log-sum-exp.

    q_nope [b, s, h, d]   q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]        k_rope [b, t, p]
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]   window: slot j is position max(len-n,0)+j
    w_uv [h, k, d]        lengths [b] int32
    -> o [b, s, h, d] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any s, t >= 1 and any n in 0..t; slots beyond a
length may hold NaN. Rows without a visible key give 0 and -inf. Targets: sm_90, sm_100, sm_120.

n follows from the cost model (`--n` pins it, `--refine` lets timing move it).
Parent: mla_var6_plus_v2.
Idea: no launch order at all. Persistent blocks begin with a role each and take its tiles from a
queue; a block whose queue is empty helps the other role, so no SM waits while there is work.
Limits: both roles are one kernel, so the head role gets the one block per SM that the latent
role's shared memory allows, and the latent role runs at flash_mla's rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mla_var3.kernel.cutile.mla.decompress_combine import (
    CtDecompressCombine,
    DecompressCombineTiling,
)
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v3.attention_block_specialized_v3 import (  # noqa: E501
    AttentionBlockSpecializedTilingV3,
    CtAttentionBlockSpecializedV3,
)
from mla_var3.kernel.newest_window import NewestWindowPlan
from mla_var3.op.mla.cost import decompress_combine_cost, mla_var6_plus_cost
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.plan import Tiling


@dataclass
class CtMlaVar6PlusV3(NewestWindowPlan):
    """Plan of version 3 of mla_var6_plus."""

    tiling: AttentionBlockSpecializedTilingV3 = field(
        default_factory=AttentionBlockSpecializedTilingV3
    )
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    def _attention_plan(self) -> CtAttentionBlockSpecializedV3:
        return CtAttentionBlockSpecializedV3(
            **self.stage_fields(), n=self.chosen_n, tiling=self.tiling
        )

    def _combine_plan(self) -> CtDecompressCombine:
        n = self.chosen_n
        parts = "latent" if n == 0 else "new" if n == self.t else "both"
        return CtDecompressCombine(**self.stage_fields(), parts=parts, tiling=self.combine_tiling)

    def _default_tiling(self, name: str) -> Tiling | None:
        if name == "tiling":
            return AttentionBlockSpecializedTilingV3.candidates(self.target.code)[0]
        return DecompressCombineTiling.default(self.target.code)

    def _autotune_configs(self) -> Sequence[Tiling]:
        return []

    def _algorithmic_flops_bytes(self, tiling: Tiling) -> tuple[float, float]:
        problem = self.problem()
        cost = mla_var6_plus_cost(problem, self.chosen_n) + decompress_combine_cost(problem)
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        *attention_inputs, w_uv, lengths = inputs
        attention = self._attention_plan().plan(*attention_inputs, lengths)
        combine = self._combine_plan().plan(*attention.output_tensors, w_uv)
        return KernelPipeline(_name="mla_var6_plus_v3", stages=[attention, combine])


if __name__ == "__main__":
    raise SystemExit(CtMlaVar6PlusV3().benchmark_kernel_argparse())
