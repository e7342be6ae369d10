"""One of two concurrent kernels of mla_var6_plus_v4: decompressed attention over the newest tokens.

    q_nope [b, s, h, d]   q_rope [b, s, h, p]
    k_new, v_new [b, h, n, d], k_rope_new [b, n, p]: the window, slot j is position max(len-n,0)+j
    lengths [b] int32
    -> o_new [b, s, h, d] in the input dtype, lse_new [b, s, h] float32: over the window

Memory bound. Persistent CTAs on a share of the SMs, by default two per SM, so that one loads while
the other computes; of g CTAs each takes every g-th tile of the queries of a head. n >= 1. Rows that
see no token of the window give 0 and -inf.
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
from mla_var3.kernel.cutile.mla.tile_ops import store_new_tokens
from mla_var3.kernel.cutile.mla.tilings import (
    fits_shared_memory,
    head_tiles,
    percentage,
    tile_sides,
    tiling_target,
)
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_attention_cost
from mla_var3.op.mla.inputs import decompress_newest
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, Tiling

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class WindowNewTilingV4(Tiling):
    """Bm queries of one head against Bn tokens of the window, on Share percent of the SMs."""

    Bm: int = 64
    Bn: int = 128
    Share: int = field(
        default=DEFAULT_SHARE, metadata={"help": "percent of the SMs that this kernel takes"}
    )
    num_ctas: int | None = None
    occupancy: int | None = 2
    num_worker_warps: int | None = None

    def validate(self, pd: "CtWindowNewV4") -> Constraints:
        blocks_per_sm = self.occupancy or 1
        return Constraints(
            *tile_sides(Bm=self.Bm, Bn=self.Bn, d=pd.d, p=pd.p),
            fits_shared_memory(pd, *(head_tiles(pd, self.Bm, self.Bn) * blocks_per_sm)),
            percentage("Share", self.Share, least=1),
        )

    @classmethod
    def candidates(cls, target: str) -> list["WindowNewTilingV4"]:
        """Candidates per target, the default first (compare HeadTiling)."""
        target = tiling_target(target)
        if target == "sm_120":
            return [cls(64, 64, share, occupancy=None) for share in SHARES]
        if target == "sm_100":
            return [cls(64, 128, share, occupancy=None) for share in SHARES]
        return [cls(64, Bn, share) for Bn in (128, 64) for share in SHARES]


@ct.kernel
def window_new_v4(
    q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse_new,
    scale_log2e: float, s: int, n: int, t: int, tiles: int, query_tiles: int,
    H: ConstInt, CAUSAL: ConstBool, BM: ConstInt, BN: ConstInt, D: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_nope [b, s, h, D], q_rope [b, s, h, P], o_new [b, s, h, D], lse_new [b, s, h]
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        store_new_tokens(
            q_nope, q_rope, k_new, v_new, k_rope_new, lengths, o_new, lse_new, tile, query_tiles,
            t, s, n, scale_log2e, CAUSAL, H, BM, BN, D, P,
        )  # fmt: skip


@dataclass
class CtWindowNewV4(SharingPlan):
    """Plan of the kernel over the newest tokens."""

    n: int = field(default=1, metadata={"help": "newest tokens, kept decompressed"})
    tiling: WindowNewTilingV4 = field(default_factory=WindowNewTilingV4)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("n", self.n, minimum=1, maximum=self.t, maximum_name="t")

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        return raw.q_nope, raw.q_rope, *decompress_newest(raw, self.n), raw.lengths

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return self.window_reference(inputs, compute_dtype)

    def _autotune_configs(self) -> Sequence[WindowNewTilingV4]:
        found = super()._autotune_configs()
        return [each for each in found if not self.alone or each.Share == DEFAULT_SHARE]

    def cost(self) -> Cost:
        problem = self.problem()
        return flash_attention_cost(problem, problem.tokens_up_to(self.n))

    def plan(self, *inputs: Tensor) -> CtKernel:
        window = {"k_new": "bhnd", "v_new": "bhnd", "k_rope_new": "bnp", "lengths": "b"}
        self.check_inputs({"q_nope": "bshd", "q_rope": "bshp", **window}, inputs, n=self.n)
        q_nope = inputs[0]
        b, s, h, d = self.b, self.s, self.h, self.d
        o_new = q_nope.new_empty((b, s, h, d))
        lse_new = q_nope.new_empty((b, s, h), dtype=torch.float32)

        def grid_fn(tiling: WindowNewTilingV4) -> tuple[int]:
            return self.persistent_ctas(tiling, q_nope.device, b * h * ct.cdiv(s, tiling.Bm))

        def args_fn(tiling: WindowNewTilingV4) -> tuple[object, ...]:
            query_tiles = ct.cdiv(s, tiling.Bm)
            sizes = self.scale_log2e, s, self.n, self.t, b * h * query_tiles, query_tiles
            constants = h, self.causal, tiling.Bm, tiling.Bn, d, self.p
            return (*inputs, o_new, lse_new, *sizes, *constants)

        return self.kernel(window_new_v4, grid_fn, args_fn, inputs, [o_new, lse_new])
