"""flash_mla: latent (absorbed) attention over the latent cache, scheduled by hand for Hopper.

Computes, for every request, o = softmax(q_latent c_kv^T + q_rope k_rope^T) c_kv.

    q_latent [b, s, h, k]     latent queries          q_rope [b, s, h, p]
    c_kv     [b, t, k]        latent cache            k_rope [b, t, p]
             or [pages, page, k] and [pages, page, p] with a block table [b, pages of a request]
    lengths  [b] int32        KV length per request, on the device
    -> o_latent [b, s, h, k] in the input dtype, lse [b, s, h] float32 (natural logarithm)

(k, p) = (512, 64), (512, 0), (256, 64) or (256, 32); bfloat16 and float16; causal (bottom-right) or
not; any b, s, t >= 1 and h; page sizes that are multiples of 64; slots beyond a length may hold
NaN. Rows without a visible key give 0 and -inf. `attend` also takes packed queries of different
counts (`cu_seqlens_q`), trees of draft tokens and a sliding window; the device code can leave out
the `newest` tokens. One compilation per dtype, widths, cache layout, `few` and set of these options
serves all shapes. Target: sm_90a.

The kernel and how it works: `latent/kernel.py`, which the mix uses as well.

Base version. Limits: 25 to 63 rows are padded to 64 (fewer go to the N side, see `few_rows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK, LATENT, ROPE, ROWS
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.hopper.widths import (
    LATENT_WIDTHS,
    LatentWidths,
    served_widths,
)
from mla_var3.kernel.cute_python.mla.latent import whole_call
from mla_var3.kernel.cute_python.mla.latent.call import LatentLaunch, call_arguments, call_program
from mla_var3.kernel.cute_python.mla.latent.groups import GroupShape, group_shape
from mla_var3.kernel.cute_python.mla.latent.kernel import (
    FlashMLATiling,
    default_few,
    latent_stage,
)
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOperands, LatentOptions
from mla_var3.kernel.cute_python.mla.latent.programs import latent_program
from mla_var3.kernel.mla_plan import sliding_window_field
from mla_var3.kernel.paging import check_paged, dense_inputs, paged_inputs
from mla_var3.op.mla.cost import flash_mla_cost
from mla_var3.op.mla.problem import require_int
from mla_var3.runtime.composite import KernelPipeline
from mla_var3.runtime.plan import Tiling
from mla_var3.runtime.tensors import require_view


@dataclass
class CuteFlashMLA(HopperPlan):
    """Plan of the base version of flash_mla in CuTe DSL."""

    page: int = field(
        default=0,
        metadata={"help": "tokens of a cache page, a multiple of 64; 0 for a dense cache"},
    )
    sliding_window: int = sliding_window_field()
    tiling: FlashMLATiling = field(default_factory=FlashMLATiling)

    targets = ("sm_90",)
    needs_v = False
    needs_rope = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 0 or self.page % KV_BLOCK:
            raise InvalidArgumentError("page", f"a multiple of {KV_BLOCK}, or 0", self.page)
        require_int("sliding_window", self.sliding_window, minimum=0)
        if LatentWidths(self.k, self.p) not in LATENT_WIDTHS:
            raise InvalidArgumentError("(k, p)", served_widths(), (self.k, self.p))

    def groups(self, tiling: FlashMLATiling) -> GroupShape:
        """The CTA groups of a launch with this tiling."""
        return group_shape(self.row_tiles, self.b, tiling.sms or self.sm_count, tiling.group_ctas)

    def prepare_inputs(self, device: torch.device | str) -> tuple[Tensor, ...]:
        inputs = self.latent_inputs(device)
        return paged_inputs(inputs, self.page, self.seed) if self.page else inputs

    def reference_fn(
        self, *inputs: Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        dense = dense_inputs(inputs, self.t) if self.page else inputs
        return self.latent_reference(
            *dense, compute_dtype=compute_dtype, sliding_window=self.sliding_window
        )

    def _default_tiling(self, name: str) -> Tiling | None:
        return FlashMLATiling(few=default_few(self.s * self.h)) if name == "tiling" else None

    def _autotune_configs(self) -> Sequence[FlashMLATiling]:
        sizes = [0, *(size for size in (1, 2, 4, 8, 16, 32) if size < self.row_tiles)]
        configs = [FlashMLATiling(group_ctas=size) for size in sizes]
        rows = self.s * self.h
        if rows < ROWS - 7:
            configs.append(FlashMLATiling(few=-(-rows // 8) * 8))
        return configs

    def _algorithmic_flops_bytes(self, tiling: FlashMLATiling) -> tuple[float, float]:
        cost = flash_mla_cost(self.problem().within(self.sliding_window))
        return cost.flops, cost.bytes

    def plan(self, *inputs: Tensor) -> KernelPipeline:
        _, _, latent, rope, lengths, *rest = inputs
        rows = check_paged(self, self.page, inputs) if self.page else self.latent_rows(*inputs)
        # All rows lie at one distance from each other, across requests too.
        count = self.b * self.s * self.h
        operands = LatentOperands.allocate(
            (self.b, self.s, self.h),
            require_view("q_latent", rows[0], count, self.k),
            require_view("q_rope", rows[1], count, self.p) if self.p else None,
            latent,
            rope if self.p else None,
            lengths,
            rest[0] if rest else None,
        )
        seen = self.problem().within(self.sliding_window)
        attention = latent_stage(
            self, self.tiling, operands, self.groups, seen.kv_lengths,
            self._algorithmic_flops_bytes, self._autotune_configs(),
            sliding_window=self.sliding_window or None,
        )  # fmt: skip
        return KernelPipeline(_name=self.name, stages=[attention])


def unsupported(shape: Any) -> str | None:
    """Why the kernel cannot serve a call of this shape; None when it can."""
    if LatentWidths(shape.k, shape.p) not in LATENT_WIDTHS:
        return f"(k, p) = ({shape.k}, {shape.p}); it is made for {served_widths()}"
    if shape.cache_dtype is not None and (shape.k, shape.p) != (LATENT, ROPE):
        return f"(k, p) = ({shape.k}, {shape.p}) in 8 bits; it is made for ({LATENT}, {ROPE})"
    if shape.page_size is not None and shape.page_size % KV_BLOCK:
        return f"pages of {shape.page_size} tokens; it takes multiples of {KV_BLOCK}"
    return None


def attend(operands: LatentOperands, options: LatentOptions) -> LatentLaunch | None:
    """Attention on tensors that change from call to call; safe in a CUDA graph.

    Returns:
        The same launch for other tensors; None when there was nothing to launch, or when a tensor
        was copied first.
    """
    if operands.lse.numel() == 0:
        return None
    arguments, sm_count, copied = call_arguments(operands, options)
    kernel_fn, host, tiling, constants = latent_program(operands, options)
    program = call_program(kernel_fn, host, tiling, arguments, operands.o_latent, **constants)
    program(*arguments)
    if copied:
        return None
    return LatentLaunch(
        program.repeated(*arguments), operands.o_latent.device, sm_count, overlap=options.overlap
    )


whole = whole_call
"""The attention with its projections in one launch: `whole.serves` and `whole.attend`."""


if __name__ == "__main__":
    raise SystemExit(CuteFlashMLA().benchmark_kernel_argparse())
