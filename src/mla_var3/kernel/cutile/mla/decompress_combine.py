"""Last stage of mla_var6_plus: up-project the latent part and merge it with the window's part.

    o_latent [b, s, h, k], lse_latent [b, s, h] float32    over the old tokens
    o_new    [b, s, h, d], lse_new    [b, s, h] float32    over the window
    w_uv     [h, k, d]
    -> o [b, s, h, d] in the input dtype, lse [b, s, h] float32

o = (o_latent w_uv) * exp(lse_latent - lse) + o_new * exp(lse_new - lse), lse = logaddexp of both.
A part that has no tokens for any request (`parts`) is not read at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tile_ops import LN_2, LOG2_E, NEG_INF
from mla_var3.kernel.cutile.mla.tilings import (
    divides,
    fits_shared_memory,
    tile_sides,
    tiling_target,
)
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import decompress_combine_cost
from mla_var3.op.mla.inputs import up_project
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import require_view

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]

PARTS = ("both", "latent", "new")


@dataclass
class DecompressCombineTiling(Tiling):
    """Cm rows (b*s) of one head, the k dimension in steps of Ck."""

    Cm: int = 64
    Ck: int = 128
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None

    @classmethod
    def default(cls, target: str) -> Self | None:
        """The tiling to start from on a compile target; None for the fields' own defaults."""
        return cls(64, 64) if tiling_target(target) == "sm_120" else None

    def validate(self, pd: "CtDecompressCombine") -> Constraints:
        return Constraints(
            *tile_sides(Cm=self.Cm, Ck=self.Ck, d=pd.d),
            divides("Ck", self.Ck, "k", pd.k),
            fits_shared_memory(pd, (self.Cm, self.Ck), (self.Ck, pd.d)),
        )


@ct.kernel
def decompress_combine(
    o_latent, lse_latent, o_new, lse_new, w_uv, o, lse,
    HAS_LATENT: ConstBool, HAS_NEW: ConstBool,
    CM: ConstInt, CK: ConstInt, STEPS: ConstInt, D: ConstInt,
):  # fmt: skip
    # o_latent [b*s, h, K], K = STEPS * CK, lse_latent [b*s, h], o_new [b*s, h, D], w_uv [h, K, D]
    row_tile = ct.bid(0)
    head = ct.bid(1)
    acc = ct.zeros((CM, D), dtype=ct.float32)
    latent = ct.full((CM, 1), NEG_INF, dtype=ct.float32)
    new = ct.full((CM, 1), NEG_INF, dtype=ct.float32)
    if HAS_LATENT:
        latent = ct.load(
            lse_latent, (row_tile, head), (CM, 1), padding_mode=ct.PaddingMode.NEG_INF
        ) * LOG2_E  # fmt: skip
        for step in range(STEPS):
            # x [CM, CK], w [CK, D]
            x = ct.load(
                o_latent, (row_tile, head, step), (CM, 1, CK), padding_mode=ct.PaddingMode.ZERO
            ).reshape((CM, CK))  # fmt: skip
            w = ct.load(w_uv, (head, step, 0), (1, CK, D)).reshape((CK, D))
            acc = ct.mma(x, w, acc)
    if HAS_NEW:
        new = ct.load(
            lse_new, (row_tile, head), (CM, 1), padding_mode=ct.PaddingMode.NEG_INF
        ) * LOG2_E  # fmt: skip
    top = ct.maximum(latent, new)
    # A row that saw no key at all has -inf in both parts; 0 avoids inf - inf.
    top = ct.where(top == NEG_INF, 0.0, top)
    latent_weight = ct.exp2(latent - top)
    new_weight = ct.exp2(new - top)
    total = latent_weight + new_weight
    seen = total > 0.0
    total = ct.where(seen, total, 1.0)
    out = acc * (latent_weight / total)
    if HAS_NEW:
        part = ct.load(o_new, (row_tile, head, 0), (CM, 1, D), padding_mode=ct.PaddingMode.ZERO)
        out = out + part.reshape((CM, D)).astype(ct.float32) * (new_weight / total)
    ct.store(o, (row_tile, head, 0), out.reshape((CM, 1, D)).astype(o.dtype))
    row_lse = ct.where(seen, (top + ct.log2(total)) * LN_2, NEG_INF)
    ct.store(lse, (row_tile, head), row_lse)


@dataclass
class CtDecompressCombine(CutilePlan):
    """Plan of the merging stage."""

    parts: str = field(default="both", metadata={"help": "both, latent or new: what has tokens"})
    tiling: DecompressCombineTiling = field(default_factory=DecompressCombineTiling)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts not in PARTS:
            raise InvalidArgumentError("parts", " or ".join(PARTS), repr(self.parts))

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        rows = (self.b, self.s, self.h)
        o_latent, o_new, lse_latent, lse_new = self.random(
            device, (*rows, self.k), (*rows, self.d), rows, rows
        )
        o_latent, o_new = o_latent.to(self.torch_dtype), o_new.to(self.torch_dtype)
        return o_latent, lse_latent, o_new, lse_new, self.make_inputs(device).w_uv

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        o_latent, lse_latent, o_new, lse_new, w_uv = inputs
        dtype = compute_dtype or torch.float32
        absent = torch.full_like(lse_latent, -torch.inf)
        latent = absent if self.parts == "new" else lse_latent
        new = absent if self.parts == "latent" else lse_new
        lse = torch.logaddexp(latent, new)
        out = torch.zeros(o_new.shape, dtype=torch.float32, device=o_new.device)
        if self.parts != "new":
            projected = up_project(o_latent.to(dtype), w_uv.to(dtype)).float()
            out += projected * torch.exp(latent - lse).nan_to_num(0.0)[..., None]
        if self.parts != "latent":
            out += o_new.float() * torch.exp(new - lse).nan_to_num(0.0)[..., None]
        return out.to(dtype), lse

    def _autotune_configs(self) -> Sequence[DecompressCombineTiling]:
        two_per_sm = [
            DecompressCombineTiling(Cm, Ck, occupancy=2)
            for Cm, Ck in ((64, 64), (64, 128), (128, 64))
        ]
        return [DecompressCombineTiling(), *two_per_sm, DecompressCombineTiling(128, 128)]

    def _default_tiling(self, name: str) -> DecompressCombineTiling | None:
        return DecompressCombineTiling.default(self.target.code)

    def cost(self) -> Cost:
        return decompress_combine_cost(self.problem())

    def plan(self, *inputs: Tensor) -> CtKernel:
        o_latent, lse_latent, o_new, lse_new, w_uv = inputs
        b, s, h, d, k = self.b, self.s, self.h, self.d, self.k
        shapes = {"o_latent": "bshk", "lse_latent": "bsh", "o_new": "bshd", "lse_new": "bsh"}
        self.check_inputs({**shapes, "w_uv": "hkd"}, inputs)
        parts = (
            require_view("o_latent", o_latent, b * s, h, k),
            require_view("lse_latent", lse_latent, b * s, h),
            require_view("o_new", o_new, b * s, h, d),
            require_view("lse_new", lse_new, b * s, h),
        )
        o = o_new.new_empty((b, s, h, d))
        lse = lse_latent.new_empty((b, s, h))

        def grid_fn(tiling: DecompressCombineTiling) -> tuple[int, int]:
            return (ct.cdiv(b * s, tiling.Cm), h)

        def args_fn(tiling: DecompressCombineTiling) -> tuple[object, ...]:
            tensors = (*parts, w_uv, o.view(b * s, h, d), lse.view(b * s, h))
            has_parts = self.parts != "new", self.parts != "latent"
            return (*tensors, *has_parts, tiling.Cm, tiling.Ck, k // tiling.Ck, d)

        return self.kernel(decompress_combine, grid_fn, args_fn, inputs, [o, lse])
