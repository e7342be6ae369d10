"""The decompressed kernel as a stage of a plan: its tiling, what it launches, its arguments.

`window_rows.py` has the kernel. When a window is cut into parts, the merge of `window_merge.py`
follows in the same program, so that the stage writes the final rows whatever its tiling.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import const_expr
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import columns_for
from mla_var3.kernel.cute_python.mla.decompressed.jobs import BLOCK, GROUPS, window_parts
from mla_var3.kernel.cute_python.mla.decompressed.kernel import WindowSm90
from mla_var3.kernel.cute_python.mla.decompressed.merge import WindowMerge
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.latent.schedule import ROWS
from mla_var3.runtime.cute_kernel import CuteKernel, Int64Arg
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import require_view

HEADS, TILES = "heads", "tiles"
FORMS = ("", HEADS, TILES)
ARGUMENTS = tuple(inspect.signature(WindowSm90.__call__).parameters)[1:-1]
"""Arguments of the kernel's host code, without the stream."""
OUT, LSE, PARTS = (ARGUMENTS.index(name) for name in ("o", "lse", "parts"))
"""Where the merge finds its operands among them."""
MERGE_BLOCKS_PER_SM = 4
"""The merge only moves data: several blocks of 8 warps on an SM keep its memory requests coming."""


@dataclass(frozen=True)
class WindowShape:
    """What decides how the work is cut.

    Attributes:
        requests: windows with keys of their own; 1 when the window is shared.
        rows: query rows of a head that meet the same keys.
        heads: query heads.
        tokens: tokens of the longest window.
    """

    requests: int
    rows: int
    heads: int
    tokens: int

    @property
    def kv_blocks(self) -> int:
        """Blocks of tokens of the longest window."""
        return max(1, -(-self.tokens // BLOCK))

    def form(self, tiling: "WindowTiling") -> str:
        """What the two warpgroups of a block share: with one tile of rows only the request."""
        return tiling.form or (HEADS if self.rows <= ROWS else TILES)

    def units(self, form: str) -> int:
        """Jobs of a window without cuts."""
        row_tiles = -(-self.rows // ROWS)
        if form == TILES:
            return self.heads * -(-row_tiles // GROUPS)
        return -(-self.heads // GROUPS) * row_tiles

    def parts(self, tiling: "WindowTiling", sms: int) -> int:
        """Parts of every window on a number of SMs."""
        units = self.units(self.form(tiling))
        return tiling.parts or window_parts(self.requests, units, self.kv_blocks, sms)

    def blocks(self, tiling: "WindowTiling", sms: int) -> int:
        """Persistent blocks: one on each SM, as far as there are jobs."""
        jobs = self.requests * self.units(self.form(tiling)) * self.parts(tiling, sms)
        return min(sms, jobs)


@dataclass
class WindowTiling(Tiling):
    """How the decompressed kernel is spread; its tiles are fixed by what fits an SM.

    Attributes:
        sms: SMs to use; 0 takes the share that the plan gives it.
        parts: parts of every window, which are merged afterwards; 0 lets the shape decide.
        form: what the two halves of a block have in common, "heads" for two heads of a tile of
            rows, "tiles" for two tiles of a head; empty lets the rows decide.
    """

    sms: int = 0
    parts: int = 0
    form: str = ""

    def validate(self, pd: Any) -> Constraints:
        shape: WindowShape = pd.window_shape
        return Constraints(
            (
                0 <= self.sms <= pd.sm_count,
                f"sms: expected 0 to {pd.sm_count} (SMs of the device), got {self.sms}",
            ),
            (
                0 <= self.parts <= shape.kv_blocks,
                f"parts: expected 0 to {shape.kv_blocks} (blocks of {BLOCK} tokens), "
                f"got {self.parts}",
            ),
            (
                self.form in FORMS,
                f"form: expected {HEADS}, {TILES} or nothing, got {self.form!r}",
            ),
        )


@dataclass(frozen=True)
class WindowOperands:
    """The tensors that the kernel reads.

    Attributes:
        q_nope, q_rope: [b, s, h, 128] and [b, s, h, 64], contiguous.
        keys: [windows, h, slots, 128].
        values: the same.
        k_rope: [windows, slots, 64].
        lengths: [b] int32.
        scales: of keys and values in 8 bits, all three as `pack_window` lays them out; None for
            16 bits.
        starts: [b] int32, the oldest position of a window that is a ring; None where slots are in
            order.
    """

    q_nope: Tensor
    q_rope: Tensor
    keys: Tensor
    values: Tensor
    k_rope: Tensor
    lengths: Tensor
    scales: Tensor | None = None
    starts: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All of them that are there."""
        found = [self.q_nope, self.q_rope, self.keys, self.values, self.k_rope, self.lengths]
        return [*found, *(extra for extra in (self.scales, self.starts) if extra is not None)]


class WindowProgram:
    """Host code that launches the decompressed kernel and, if windows are cut, their merge."""

    def __init__(self, kernel: WindowSm90):
        self.kernel = kernel

    @cute.jit
    def __call__(self, *arguments):
        """The arguments of the kernel; o, lse, rows and blocks of the merge; the stream."""
        *attention, o, lse, rows, merge_blocks, stream = arguments
        self.kernel(*attention, stream)
        if const_expr(self.kernel.wide):
            WindowMerge(self.kernel.dtype)(
                attention[OUT], attention[LSE], o, lse, rows, attention[PARTS], merge_blocks, stream
            )


def window_stage(
    plan: HopperPlan,
    tiling: WindowTiling,
    dtype: type,
    operands: WindowOperands,
    shape: WindowShape,
    window: int,
    share: int,
    cost_fn: Callable[[Any], tuple[float, float]],
    configs: Sequence[WindowTiling],
    shared: bool = False,
    alone: bool = False,
) -> CuteKernel:
    """The stage that attends over the decompressed tokens; its outputs are o and lse.

    Args:
        plan: the plan that it belongs to, whose `window_shape` is `shape`.
        tiling: its tiling.
        dtype: element type of queries and output, as the language names it.
        operands: what it reads.
        shape: how the work may be cut.
        window: newest tokens that are decompressed, or those of the prefix.
        share: SMs that it gets when the tiling names none.
        cost_fn: its FLOPs and bytes.
        configs: candidate tilings.
        shared: whether the window is a prefix of all requests.
        alone: whether nobody attends to the tokens before a window that is a ring.
    """
    q_nope, keys, values, k_rope = operands.q_nope, operands.keys, operands.values, operands.k_rope
    b, s, h, d = q_nope.shape
    rows = b * s * h
    queries = (
        require_view("q_nope", q_nope, rows * d),
        require_view("q_rope", operands.q_rope, rows * operands.q_rope.shape[-1]),
    )
    o = q_nope.new_empty((b, s, h, d))
    lse = q_nope.new_empty((b, s, h), dtype=torch.float32)
    fp8, ring = operands.scales is not None, operands.starts is not None
    columns = columns_for(shape.rows) if fp8 else 0
    if ring and (window % BLOCK or window != keys.shape[2]):
        raise InvalidArgumentError(
            "window",
            f"a multiple of {BLOCK} for a ring, as many as it has slots",
            f"{window} with {keys.shape[2]} slots",
        )
    if ring and (shared or fp8):
        raise InvalidArgumentError(
            "starts", "none for a shared window or one in 8 bits, which are no rings", "a ring"
        )

    def cut(tiling: WindowTiling) -> int:
        return shape.parts(tiling, tiling.sms or share)

    def host_fn(tiling: WindowTiling) -> WindowProgram:
        form, wide = shape.form(tiling), cut(tiling) > 1
        kernel = WindowSm90(dtype, form, fp8, columns, shared, wide, ring, ring and alone)
        return WindowProgram(kernel)

    def args_fn(tiling: WindowTiling) -> tuple[object, ...]:
        sms, parts = tiling.sms or share, cut(tiling)
        written: tuple[Tensor, Tensor] = (o, lse)
        merged: tuple[Tensor | None, Tensor | None] = (None, None)
        if parts > 1:
            written = (
                o.new_empty((parts, *o.shape), dtype=torch.float32),
                lse.new_empty((parts, *lse.shape)),
            )
            merged = (o, lse)
        return (
            *queries, keys, values, k_rope, operands.scales, operands.lengths,
            operands.starts, *written, plan.scale_log2e, b, s, h, keys.shape[2],
            keys.stride(2), Int64Arg(keys.stride(1)), Int64Arg(keys.stride(0)),
            values.stride(2), Int64Arg(values.stride(1)), Int64Arg(values.stride(0)),
            k_rope.stride(1), Int64Arg(k_rope.stride(0)),
            window, int(plan.causal), parts, shape.blocks(tiling, sms),
            *merged, rows, min(sms * MERGE_BLOCKS_PER_SM, rows),
        )  # fmt: skip

    return CuteKernel(
        kernel_fn=WindowSm90.window_attention,
        host_fn=host_fn,
        args_fn=args_fn,
        requires_arch="sm_90a",
        tiling=tiling,
        plan=plan,
        input_tensors=operands.tensors,
        output_tensors=[o, lse],
        algorithmic_flops_bytes_fn=cost_fn,
        autotune_configs=configs,
    )
