"""Second stage of flash_mla_split_kv: merge the partials of each row by LSE.

    o_partial [b, splits, s, h, k] float32   lse_partial [b, splits, s, h] float32
    -> o_latent [b, s, h, k] in the problem's dtype, lse [b, s, h] float32

Memory bound: every partial output is read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.plan import CutilePlan
from mla_var3.kernel.cutile.mla.tile_ops import LOG2_E, SCORE_FLOOR, log_sum_exp, normalise
from mla_var3.kernel.cutile.mla.tilings import divides, tile_sides
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_mla_split_kv_stages
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.ct_kernel import CtKernel
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import check_tensor, require_view

ConstInt = ct.Constant[int]


@dataclass
class SplitKVReduceTiling(Tiling):
    """Sp partials of Br rows and Kc latent columns at once.

    There are few rows, so the partials of a row are read together instead of one after another:
    the kernel waits for memory once instead of `splits` times.
    """

    Sp: int = 8
    Br: int = 1
    Kc: int = 512
    occupancy: int | None = None

    def validate(self, pd: "CtSplitKVReduce") -> Constraints:
        return Constraints(
            *tile_sides(Sp=self.Sp, Br=self.Br, Kc=self.Kc),
            divides("Kc", self.Kc, "k", pd.k),
        )


@ct.kernel
def split_kv_reduce(
    o_partial, lse_partial, o_latent, lse, splits: int, SP: ConstInt, BR: ConstInt, KC: ConstInt
):  # fmt: skip
    # o_partial [b, splits, s*h, K], lse_partial [b, splits, s*h]
    # o_latent [b, s*h, K], lse [b, s*h]
    row_tile = ct.bid(0)
    column_tile = ct.bid(1)
    request = ct.bid(2)
    m = ct.full((BR, 1), SCORE_FLOOR, dtype=ct.float32)
    l = ct.zeros((BR, 1), dtype=ct.float32)  # noqa: E741
    acc = ct.zeros((BR, KC), dtype=ct.float32)
    for chunk in range(ct.cdiv(splits, SP)):
        # part [SP, BR, KC], part_lse [SP, BR, 1] in base 2
        part = ct.load(
            o_partial, (request, chunk, row_tile, column_tile), (1, SP, BR, KC),
            padding_mode=ct.PaddingMode.ZERO,
        ).reshape((SP, BR, KC))  # fmt: skip
        part_lse = ct.load(
            lse_partial, (request, chunk, row_tile), (1, SP, BR),
            padding_mode=ct.PaddingMode.NEG_INF,
        ).reshape((SP, BR, 1)) * LOG2_E  # fmt: skip
        m_new = ct.maximum(m, ct.max(part_lse, axis=0))
        alpha = ct.exp2(m - m_new)
        weight = ct.exp2(part_lse - m_new[None, :, :])
        l = l * alpha + ct.sum(weight, axis=0)  # noqa: E741
        acc = acc * alpha + ct.sum(part * weight, axis=0)
        m = m_new
    out = normalise(acc, l).astype(o_latent.dtype)
    ct.store(o_latent, (request, row_tile, column_tile), out.reshape((1, BR, KC)))
    if column_tile == 0:
        ct.store(lse, (request, row_tile), log_sum_exp(m, l).reshape((1, BR)))


@dataclass
class CtSplitKVReduce(CutilePlan):
    """Plan of the merging stage."""

    splits: int = field(default=1, metadata={"help": "splits of each request's tokens"})
    tiling: SplitKVReduceTiling = field(default_factory=SplitKVReduceTiling)

    needs_rope: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("splits", self.splits, minimum=1)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        shape = (self.b, self.splits, self.s, self.h)
        return tuple(self.random(device, (*shape, self.k), shape))

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        o_partial, lse_partial = inputs
        lse = torch.logsumexp(lse_partial.double(), dim=1)
        weight = torch.exp(lse_partial.double() - lse[:, None]).nan_to_num(0.0)
        out = (o_partial.double() * weight[..., None]).sum(dim=1)
        return out.to(compute_dtype or torch.float32), lse.float()

    def _autotune_configs(self) -> Sequence[SplitKVReduceTiling]:
        shapes = ((8, 512), (16, 512), (16, 256), (16, 128))
        fitting = dict.fromkeys((Sp, min(Kc, self.k)) for Sp, Kc in shapes)
        return [SplitKVReduceTiling(Sp, 1, Kc) for Sp, Kc in fitting]

    def cost(self) -> Cost:
        return flash_mla_split_kv_stages(self.problem(), self.splits)[1]

    def plan(self, *inputs: Tensor) -> CtKernel:
        o_partial, lse_partial = inputs
        b, s, h, k, splits = self.b, self.s, self.h, self.k, self.splits
        device = o_partial.device
        partials = [("b", b), ("splits", splits), ("s", s), ("h", h)]
        check_tensor("o_partial", o_partial, [*partials, ("k", k)], torch.float32, device)
        check_tensor("lse_partial", lse_partial, partials, torch.float32, device)
        partial_rows = require_view("o_partial", o_partial, b, splits, s * h, k)
        partial_lses = require_view("lse_partial", lse_partial, b, splits, s * h)
        o_latent = o_partial.new_empty((b, s, h, k), dtype=self.torch_dtype)
        lse = lse_partial.new_empty((b, s, h))

        def grid_fn(tiling: SplitKVReduceTiling) -> tuple[int, int, int]:
            return (ct.cdiv(s * h, tiling.Br), k // tiling.Kc, b)

        def args_fn(tiling: SplitKVReduceTiling) -> tuple[object, ...]:
            results = o_latent.view(b, s * h, k), lse.view(b, s * h)
            return partial_rows, partial_lses, *results, splits, tiling.Sp, tiling.Br, tiling.Kc

        return self.kernel(split_kv_reduce, grid_fn, args_fn, inputs, [o_latent, lse])
