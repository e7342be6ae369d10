"""flash_attention: attention over decompressed keys and values, scheduled by hand for Hopper.

Computes, for every request and head, o = softmax(q_nope k^T + q_rope k_rope^T) v. The rope part of
the keys is one array for all heads, so a token costs d+v elements per head and p once.

    q_nope [b, s, h, d]     q_rope [b, s, h, p]
    k [b, h, t, d]   v [b, h, t, v]   k_rope [b, t, p]
    lengths [b] int32       KV length per request, on the device
    -> o [b, s, h, v] in the input dtype, lse [b, s, h] float32 (natural logarithm)

(d, p, v) = (128, 64, 128), (192, 64, 256), (256, 0, 256), (64, 64, 128) or (64, 32, 64);
bfloat16 and float16; causal (bottom-right) or not; any b, s, t >= 1 and h; slots beyond a length
may hold NaN. Rows without a visible key give 0 and -inf. One compilation per dtype, pairing and
whether requests are split serves all shapes. Target: sm_90a.

The kernel is `decompressed/kernel.py` on all tokens of the cache: persistent CTAs, a producer warp
that loads KV blocks into a pipeline, two consumer warpgroups with 64 query rows each. Where there
are few work tiles the tokens are split, and the partials merged (`MergeSplits`).

Base version. Limits: fewer than 64 queries are padded to 64 rows (free while memory bound). At
v=256 the pipeline has one stage with two heads per CTA, two with one; neither was measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.kernel import HEADS, TILES
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    LONG_KV_BLOCK,
    DecompressedOperands,
    DecompressedShape,
    DecompressedTiling,
    decompressed_stage,
    may_be_long,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.hopper.widths import (
    HEAD_WIDTHS,
    HeadWidths,
    served_head_widths,
)
from mla_var3.op.mla.cost import flash_attention_cost
from mla_var3.op.mla.inputs import decompress_all
from mla_var3.op.mla.reference import reference_decompressed
from mla_var3.runtime.cute_kernel import CuteKernel

TUNED_SPLITS = (1, 2, 4, 8)
"""Splits that tuning tries beside the number that the shape suggests."""


@dataclass
class CuteFlashAttention(HopperPlan):
    """Plan of the base version of flash_attention in CuTe DSL."""

    v: int = field(default=0, metadata={"help": "value dimension; 0 for d"})
    tiling: DecompressedTiling = field(default_factory=DecompressedTiling)

    targets = ("sm_90",)
    needs_v = False
    needs_rope = False

    def __post_init__(self) -> None:
        super().__post_init__()
        widths = self.d, self.p, self.problem().v
        if HeadWidths(*widths) not in HEAD_WIDTHS:
            raise InvalidArgumentError("(d, p, v)", served_head_widths(), widths)

    @property
    def decompressed_shape(self) -> DecompressedShape:
        """How the work may be divided."""
        long_blocks = may_be_long(HeadWidths(self.d, self.p, self.problem().v))
        tokens = max(self.problem().kv_lengths)
        return DecompressedShape(self.b, self.s, self.h, tokens, long_blocks)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        raw = self.make_inputs(device)
        keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
        return raw.q_nope, raw.q_rope, keys, values, raw.k_rope, raw.lengths

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return reference_decompressed(*inputs, **self.attend_options(compute_dtype))

    def _autotune_configs(self) -> Sequence[DecompressedTiling]:
        shape = self.decompressed_shape
        paired = shape.pairing(DecompressedTiling())
        other = HEADS if paired == TILES else TILES
        blocks = (KV_BLOCK, LONG_KV_BLOCK) if shape.long_blocks and paired == TILES else ()
        splits = [n for n in TUNED_SPLITS if n <= shape.kv_blocks]
        return [
            DecompressedTiling(),
            *(DecompressedTiling(splits=n) for n in splits),
            DecompressedTiling(pairing=other),
            *(DecompressedTiling(kv_block=n) for n in blocks),
        ]

    def _algorithmic_flops_bytes(self, tiling: DecompressedTiling) -> tuple[float, float]:
        cost = flash_attention_cost(self.problem())
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> CuteKernel:
        shapes = {"q_nope": "bshd", "q_rope": "bshp", "k": "bhtd", "v": "bhtv", "k_rope": "btp"}
        self.check_inputs({**shapes, "lengths": "b"}, inputs)
        return decompressed_stage(
            self, self.tiling, DecompressedOperands(*inputs), self.decompressed_shape, self.t,
            self.sm_count, self._algorithmic_flops_bytes, self._autotune_configs(),
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(CuteFlashAttention().benchmark_kernel_argparse())
