"""First stage of flash_mla_split_kv: latent attention over each split of a request's KV tokens.

    inputs as of flash_mla, dense or paged, with packed queries, trees and sliding windows
    -> o_partial [b, splits, s, h, k] float32, normalised within the split,
       lse_partial [b, splits, s, h] float32; an empty split gives 0 and -inf

The KV tiles of a request divide into `splits` splits of equal size, by its own length. float32
partial outputs keep the result independent of the number of splits up to float32 rounding. With
packed queries b is 1 and s the query tokens of all requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import cuda.tile as ct
import torch
from torch import Tensor

from mla_var3.kernel.cutile.mla.latent_plan import LatentInputs, LatentPlan, LatentTiling
from mla_var3.kernel.cutile.mla.tile_ops import packed_queries, store_rows
from mla_var3.op.cost import Cost
from mla_var3.op.mla.attend import attend
from mla_var3.op.mla.cost import flash_mla_split_kv_stages
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.reference import latent_segment
from mla_var3.runtime.ct_kernel import CtKernel

ConstInt = ct.Constant[int]
ConstBool = ct.Constant[bool]


@dataclass
class SplitKVPartialTiling(LatentTiling):
    """Bm query rows (s*h of one request, packed) against Bn latent tokens of one split."""


@ct.kernel
def split_kv_partial(
    q_latent, q_rope, c_kv, k_rope, lengths, table, bounds, tree, o_partial, lse_partial,
    scale_log2e: float, s: int, splits: int, scales,
    PAGE: ConstInt, PACKED: ConstInt, TREE: ConstInt, WINDOW: ConstInt, CACHE: ConstInt,
    CAUSAL: ConstBool,
    H: ConstInt, BM: ConstInt, BN: ConstInt, KP: ConstInt, PARTS: ConstInt, P: ConstInt,
):  # fmt: skip
    # q_latent [b, s*h, K], q_rope [b, s*h, P]; packed: b = 1
    # o_partial [b, splits, s*h, K], lse_partial [b, splits, s*h]
    row_tile = ct.bid(0)
    split = ct.bid(1)
    request = ct.bid(2)
    if PACKED == 1:
        first, count = packed_queries(bounds, request, s, lse_partial.shape[2] // H)
        if row_tile * BM < count * H:
            begin, end = first * H, (first + count) * H
            store_rows(
                q_latent.slice(1, begin, end), q_rope.slice(1, begin, end), c_kv, k_rope,
                scales, lengths, table, tree, o_partial.slice(2, begin, end),
                lse_partial.slice(2, begin, end),
                (0, split, row_tile), 0, request, split, splits, count, scale_log2e,
                PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
            )  # fmt: skip
    else:
        store_rows(
            q_latent, q_rope, c_kv, k_rope, scales, lengths, table, tree, o_partial, lse_partial,
            (request, split, row_tile), request, request, split, splits, s, scale_log2e,
            PAGE, TREE, WINDOW, CACHE, CAUSAL, H, BM, BN, KP, PARTS, P,
        )  # fmt: skip


@dataclass
class CtSplitKVPartial(LatentPlan):
    """Plan of the partial-attention stage."""

    splits: int = field(default=1, metadata={"help": "splits of each request's tokens"})
    tiling: SplitKVPartialTiling = field(default_factory=SplitKVPartialTiling)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("splits", self.splits, minimum=1)

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """Output and LSE of each split: positions outside it count as unused."""
        q_latent, q_rope, c_kv, k_rope, lengths = self.reference_inputs(inputs)
        tile, oldest = self.tiling.Bn, torch.zeros_like(lengths)  # [b]
        if self.sliding_window:
            oldest = (lengths - self.s + 1 - self.sliding_window).clamp(min=0) // tile
        split_slots = -(-(-(-lengths // tile) - oldest) // self.splits) * tile
        start = (oldest * tile)[:, None]
        slots = torch.arange(self.t, device=c_kv.device)
        outs, lses = [], []
        for split in range(self.splits):
            begin = start + (split * split_slots)[:, None]
            end = begin + split_slots[:, None]
            inside = (slots >= begin) & (slots < end) & (slots < lengths[:, None])
            positions = torch.where(inside, slots, -1)
            [out], lse = attend(
                [latent_segment(q_latent, q_rope, c_kv, k_rope, positions)],
                lengths=lengths,
                **self.attend_options(compute_dtype, self.sliding_window),
            )
            outs.append(out)
            lses.append(lse)
        return torch.stack(outs, dim=1), torch.stack(lses, dim=1)

    def _autotune_configs(self) -> Sequence[SplitKVPartialTiling]:
        return SplitKVPartialTiling.candidates(self)

    def cost(self) -> Cost:
        seen = self.problem().within(self.sliding_window)
        return flash_mla_split_kv_stages(seen, self.splits, self.token_bytes)[0]

    def plan(self, *inputs: Tensor | None) -> CtKernel:
        operands = self.operands(LatentInputs.of(inputs))
        (lead, tokens), splits, h, k = operands.lead, self.splits, self.h, self.k
        sizes = lead, splits, tokens, h
        o_partial = operands.results(*sizes, k, dtype=torch.float32)
        lse_partial = operands.results(*sizes, dtype=torch.float32, empty=-math.inf)

        def grid_fn(tiling: SplitKVPartialTiling) -> tuple[int, int, int]:
            return (ct.cdiv(self.s * h, tiling.Bm), splits, self.b)

        def args_fn(tiling: SplitKVPartialTiling) -> tuple[object, ...]:
            rows = lead, splits, tokens * h
            given = (*operands.tensors, o_partial.view(*rows, k), lse_partial.view(rows))
            constants = (*operands.options, self.causal, h, *tiling.sides(k), self.p)
            return (*given, self.scale_log2e, self.s, splits, operands.scales, *constants)

        return self.kernel(split_kv_partial, grid_fn, args_fn, inputs, [o_partial, lse_partial])
