"""mla_var6_plus: old tokens latent, the n newest decompressed, at the same time, on Hopper.

The latent kernel reads the old tokens (compute bound) on some SMs while the decompressed kernel
streams the window (memory bound) on the others; then `decompress_combine` up-projects the latent
part and merges both by LSE.

    q_nope [b, s, h, 128]   q_latent [b, s, h, 512]   q_rope [b, s, h, 64]
    c_kv [b, t, 512]        k_rope [b, t, 64]
    k_new, v_new [b, h, n, 128], k_rope_new [b, n, 64]   window: slot j is position max(len-n,0)+j
    w_uv [h, 512, 128]      lengths [b] int32
    -> o [b, s, h, 128] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any b, s, t >= 1, h and any n in 0..t; slots
beyond a length may hold NaN. Rows without a visible key give 0 and -inf. Target: sm_90a.

n follows from the cost model (`--n` pins it, `--refine` lets timing move it). With n=0 the latent
kernel has all SMs and is followed by the up-projection alone, with n=t the decompressed kernel
writes the output. In between each kernel is persistent on SMs of its own: `sms` of the two tilings,
by default as many as make both end together; a pair that needs more than there are is refused.

A cache may keep the window as a ring, slot x holding the position with position % n == x; the
stages of `plan_parts` read it as it lies.

Base version. Kernels: `latent/kernel.py`, `decompressed/kernel.py`, `projections/outputs.py`.
Limits: the split of the SMs is fixed at the launch, so those of the kernel that ends first idle
until the other has ended; only d=128, k=512 and p=64.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens, NewestMixPlan
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_attention_cost
from mla_var3.runtime.composite import KernelPipeline


@dataclass
class CuteMlaVar6Plus(NewestMixPlan):
    """Plan of the base version of mla_var6_plus in CuTe DSL."""

    targets = ("sm_90",)

    def decompressed_cost(self) -> Cost:
        return flash_attention_cost(replace(self.problem(), lengths=tuple(self.new_lengths())))

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        (
            q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, w_uv, lengths,
        ) = inputs  # fmt: skip
        latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, newest=self.chosen_n)
        window = DecompressedOperands(q_nope, q_rope, k_new, v_new, k_rope_new, lengths)
        return self.plan_parts(latent, window, w_uv)


if __name__ == "__main__":
    raise SystemExit(CuteMlaVar6Plus().benchmark_kernel_argparse())
