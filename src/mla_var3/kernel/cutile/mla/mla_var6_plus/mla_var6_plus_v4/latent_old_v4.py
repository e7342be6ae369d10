"""One of two concurrent kernels of mla_var6_plus_v4: latent attention over the old tokens.

    q_latent [b, s, h, k]   q_rope [b, s, h, p]
    c_kv [b, t, k]          k_rope [b, t, p]      old tokens are positions < len - n
    lengths [b] int32
    -> o_latent [b, s, h, k] in the input dtype, lse_latent [b, s, h] float32: over the old tokens

Compute bound. Persistent CTAs on a share of the SMs; of g CTAs each takes every g-th tile of s*h
query rows. The tiles fill the shared memory of an SM, so no CTA of the other kernel runs beside
one. Where n < s the causal limit reaches into the old tokens. Rows without an old token give 0 and
-inf.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.mla_var6_plus.mla_var6_plus_v4.sm_shares import (
    DEFAULT_SHARE,
    SHARES,
    SharingPlan,
)
from mla_var3.kernel.cutile.mla.tile_ops import store_old_tokens
from mla_var3.kernel.cutile.mla.tilings import (
    divides,
    fits_shared_memory,
    latent_tiles,
    mma_part,
    percentage,
    tile_sides,
    tiling_target,
)
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, Tiling

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class LatentOldTilingV4(Tiling):
    """Bm query rows against Bn latent tokens, in parts of Kp columns, on Share percent of the SMs.

    On sm_90 the 64 x 512 accumulator needs num_worker_warps=8, as in LatentTiling.
    """

    Bm: int = 64
    Bn: int = 64
    Kp: int = 128
    Share: int = field(
        default=DEFAULT_SHARE, metadata={"help": "percent of the SMs that this kernel takes"}
    )
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = 8

    def validate(self, pd: "CtLatentOldV4") -> Constraints:
        blocks_per_sm = self.occupancy or 1
        return Constraints(
            *tile_sides(Bm=self.Bm, Bn=self.Bn, Kp=self.Kp, p=pd.p),
            divides("Kp", self.Kp, "k", pd.k),
            fits_shared_memory(pd, *(latent_tiles(pd, self.Bm, self.Bn) * blocks_per_sm)),
            percentage("Share", self.Share, least=1),
        )

    @classmethod
    def candidates(cls, target: str) -> list["LatentOldTilingV4"]:
        """Candidates per target, the default first (compare LatentTiling)."""
        by_target = {"sm_100": (64, 64, 512), "sm_120": (32, 32, mma_part(target))}
        sides = by_target.get(tiling_target(target), (64, 64, 128))
        return [cls(*sides, Share=share) for share in SHARES]


@ct.kernel
def latent_old_v4(
    q_latent, q_rope, c_kv, k_rope, lengths, o_latent, lse_latent,
    scale_log2e: float, s: int, n: int, tiles: int, row_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, KP: ConstInt, PARTS: ConstInt,
    P: ConstInt,
):  # fmt: skip
    # q_latent [b, s*h, K], q_rope [b, s*h, P], o_latent [b, s*h, K], lse_latent [b, s*h]
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        store_old_tokens(
            q_latent, q_rope, c_kv, k_rope, lengths, o_latent, lse_latent, tile, row_tiles,
            s, n, scale_log2e, CAUSAL, H, BM, BN, KP, PARTS, P,
        )  # fmt: skip


@dataclass
class CtLatentOldV4(SharingPlan):
    """Plan of the kernel over the old tokens."""

    tiling: LatentOldTilingV4 = field(default_factory=LatentOldTilingV4)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        return self.latent_inputs(device)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return self.old_reference(inputs, compute_dtype)

    def _autotune_configs(self) -> Sequence[LatentOldTilingV4]:
        found = super()._autotune_configs()
        return found[:1] if self.alone else found

    def cost(self) -> Cost:
        problem = self.problem()
        old = problem.total_tokens - problem.tokens_up_to(self.n)
        return flash_mla_cost(problem, tokens=old)

    def plan(self, *inputs: Tensor) -> CtKernel:
        latent_rows, rope_rows = self.latent_rows(*inputs)
        q_latent, _, c_kv, k_rope, lengths = inputs
        b, s, h, k, p = self.b, self.s, self.h, self.k, self.p
        o_latent = q_latent.new_empty((b, s, h, k))
        lse_latent = q_latent.new_empty((b, s, h), dtype=torch.float32)

        def grid_fn(tiling: LatentOldTilingV4) -> tuple[int]:
            return self.persistent_ctas(tiling, q_latent.device, b * ct.cdiv(s * h, tiling.Bm))

        def args_fn(tiling: LatentOldTilingV4) -> tuple[object, ...]:
            row_tiles = ct.cdiv(s * h, tiling.Bm)
            results = o_latent.view(b, s * h, k), lse_latent.view(b, s * h)
            sizes = self.scale_log2e, s, self.n, b * row_tiles, row_tiles
            sides = tiling.Bm, tiling.Bn, tiling.Kp, k // tiling.Kp
            return (
                *(latent_rows, rope_rows, c_kv, k_rope, lengths, *results),
                *(*sizes, h, self.causal, *sides, p),
            )

        return self.kernel(latent_old_v4, grid_fn, args_fn, inputs, [o_latent, lse_latent])
