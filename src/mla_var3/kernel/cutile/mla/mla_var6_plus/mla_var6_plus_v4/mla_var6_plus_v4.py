"""mla_var6_plus_v4: old tokens latent, the n newest decompressed, at the same time.

Three kernels. `latent_old_v4` reads the old tokens in latent space (compute bound) while
`window_new_v4` streams the decompressed window (memory bound) on other SMs and another stream; then
`decompress_combine` up-projects the latent part and merges both by LSE.

    q_nope [b, s, h, d]   q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]        k_rope [b, t, p]
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]   window: slot j is position max(len-n,0)+j
    w_uv [h, k, d]        lengths [b] int32
    -> o [b, s, h, d] in the input dtype, lse [b, s, h] float32 (natural logarithm)

bfloat16 and float16; causal (bottom-right) or not; any s, t >= 1 and any n in 0..t; slots beyond a
length may hold NaN. Rows without a visible key give 0 and -inf. Targets: sm_90, sm_100, sm_120.

n follows from the cost model (`--n` pins it, `--refine` lets timing move it).
Parent: mla_var6_plus. Idea: each role is a kernel of its own, with its own tiles, hints and CTAs
per SM. Both are persistent and share the SMs by the size of their grids, as `Share` of each tiling
says; a pair of tilings that needs more SMs than there are is refused. With n=0 or n=t one kernel
has no tokens: it is left out and the other takes all SMs.
Limits: the shares are fixed at launch, so the SMs of the kernel that ends first are idle until the
other has ended, and the latent kernel runs at flash_mla's rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.decompress_combine import DecompressCombineTiling
from mla_var3.kernel.cutile.mla.mix_stages import CutileMixPlan
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v4.latent_old_v4 import (
    CtLatentOldV4,
    LatentOldTilingV4,
)
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v4.sm_shares import (
    FEWEST_SMS,
    joint_constraints,
)
from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v4.window_new_v4 import (
    CtWindowNewV4,
    WindowNewTilingV4,
)
from mla_var3.kernel.cutile.mla.tilings import multiprocessors
from mla_var3.runtime.composite import ConcurrentKernels
from mla_var3.runtime.plan import Constraints
from mla_var3.runtime.stage import Stage

LATENT_PRIORITY, WINDOW_PRIORITY = -1, 0
"""CUDA stream priorities; the lower one starts first."""


@dataclass
class CtMlaVar6PlusV4(CutileMixPlan):
    """Plan of version 4 of mla_var6_plus."""

    tiling: LatentOldTilingV4 = field(default_factory=LatentOldTilingV4)
    window_tiling: WindowNewTilingV4 = field(default_factory=WindowNewTilingV4)
    combine_tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    def _latent_plan(self) -> CtLatentOldV4:
        n = self.chosen_n
        stage: CtLatentOldV4 = self.stage_plan(CtLatentOldV4, n=n, alone=n == 0, tiling=self.tiling)
        return stage

    def _window_plan(self) -> CtWindowNewV4:
        n = self.chosen_n
        stage: CtWindowNewV4 = self.stage_plan(
            CtWindowNewV4, n=n, alone=n == self.t, tiling=self.window_tiling
        )
        return stage

    def attention_stage(self, *inputs: Tensor) -> tuple[Stage, Sequence[Tensor]]:
        (
            q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, k_rope_new, _, lengths,
        ) = inputs  # fmt: skip
        latent_inputs = (q_latent, q_rope, c_kv, k_rope, lengths)
        window_inputs = (q_nope, q_rope, k_new, v_new, k_rope_new, lengths)
        n, rows = self.chosen_n, (self.b, self.s, self.h)
        members: list[Stage] = []
        # The outputs of a kernel that is left out must exist, but nobody reads them.
        outputs = [
            *(q_nope.new_empty((*rows, self.k)), q_nope.new_empty(rows, dtype=torch.float32)),
            *(q_nope.new_empty((*rows, self.d)), q_nope.new_empty(rows, dtype=torch.float32)),
        ]
        if n < self.t:
            members.append(self._latent_plan().plan(*latent_inputs))
            outputs[:2] = members[-1].output_tensors
        if n > 0:
            members.append(self._window_plan().plan(*window_inputs))
            outputs[2:] = members[-1].output_tensors
        both = len(members) == 2
        return self._overlapped(members, q_nope.device) if both else members[0], outputs

    def _overlapped(self, members: list[Stage], device: torch.device) -> ConcurrentKernels:
        """Both kernels at the same time, the latent one first.

        The order matters. Latent CTAs that find all SMs empty take one SM each. If the window CTAs
        came first they would spread over all SMs, and no latent CTA would fit beside them.
        """
        latent, window = self._latent_plan(), self._window_plan()
        sm_count = multiprocessors(device, self.target.code, FEWEST_SMS)

        def validate(tilings: list[Any]) -> Constraints:
            of_latent, of_window = tilings
            return joint_constraints(
                latent.sm_share(of_latent, sm_count),
                window.sm_share(of_window, sm_count),
                sm_count,
            )

        return ConcurrentKernels(
            _name="old_and_new",
            concurrent_kernels=members,
            validate_joint_tiling_fn=validate,
            stream_priorities=[LATENT_PRIORITY, WINDOW_PRIORITY],
        )


if __name__ == "__main__":
    raise SystemExit(CtMlaVar6PlusV4().benchmark_kernel_argparse())
