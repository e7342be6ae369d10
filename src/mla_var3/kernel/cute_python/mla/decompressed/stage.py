"""The decompressed kernel as a stage of a plan, and on one request after another.

A plan fixes its tensors. `attend_request` takes tensors that change: programs are looked up by what
they were compiled for, and arguments are written for every launch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.fp8_few import columns_for
from mla_var3.kernel.cute_python.mla.decompressed.kernel import (
    HEADS,
    TILES,
    DecompressedArguments,
    DecompressedSm90,
)
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import choose_splits
from mla_var3.kernel.cute_python.mla.hopper.constants import CONSUMER_WARPGROUPS, KV_BLOCK, ROWS
from mla_var3.kernel.cute_python.mla.hopper.plan import HopperPlan
from mla_var3.kernel.cute_python.mla.hopper.widths import HeadWidths
from mla_var3.kernel.cute_python.mla.latent.call import (
    ELEMENT_TYPES,
    call_program,
    sm_count_of,
)
from mla_var3.runtime.cute_kernel import CuteKernel, Int64Arg
from mla_var3.runtime.plan import Constraints, Tiling
from mla_var3.runtime.tensors import require_view

MERGE_CTAS_PER_SM = 4
"""The merge only moves data: several CTAs of 8 warps on an SM keep its memory requests coming.
Other numbers were not measured."""
LONG_KV_BLOCK = 128
"""Tokens of a KV block where a work tile has many: fewer and larger products take less energy, and
a score fewer instructions. A work tile begins later, because its queries go to shared memory."""
LONG_TOKENS = 8192
"""Tokens of a work tile from which long KV blocks pay, where it has all query rows of a head and
memory has its share in the time. On an H200 they take 11 to 14 % less time at 32768 tokens, 5 to
7 % less in bursts at 8192, 2 % more at 4096, 7 % more at 1024; over a prefix of 26472 tokens with
two work tiles per head 7 to 14 % more (docs/results/2026-11-16-nvidia-h200-models.md)."""


@dataclass(frozen=True)
class DecompressedShape:
    """What decides how the work is divided.

    Attributes:
        requests: requests with keys of their own; 1 for a shared prefix.
        rows: query rows of a head that meet the same keys.
        tokens: decompressed tokens of the longest request.
        long_blocks: whether KV blocks may have 128 tokens, see `may_be_long`.
    """

    requests: int
    rows: int
    heads: int
    tokens: int
    long_blocks: bool = False

    @property
    def kv_blocks(self) -> int:
        """KV blocks of the longest request."""
        return max(1, -(-self.tokens // KV_BLOCK))

    def pairing(self, tiling: "DecompressedTiling") -> str:
        """What the two warpgroups of a CTA share: with one query tile only the request."""
        return tiling.pairing or (HEADS if self.rows <= ROWS else TILES)

    def request_tiles(self, pairing: str) -> int:
        """Work tiles of a request without splits."""
        row_tiles = -(-self.rows // ROWS)
        if pairing == TILES:
            return self.heads * -(-row_tiles // CONSUMER_WARPGROUPS)
        return -(-self.heads // CONSUMER_WARPGROUPS) * row_tiles

    def kv_block(self, tiling: "DecompressedTiling", sms: int) -> int:
        """Tokens of a KV block on a number of SMs."""
        one_tile = self.pairing(tiling) == TILES and self.rows <= CONSUMER_WARPGROUPS * ROWS
        pays = one_tile and self.tokens // self.splits(tiling, sms) >= LONG_TOKENS
        return tiling.kv_block or (LONG_KV_BLOCK if self.long_blocks and pays else KV_BLOCK)

    def splits(self, tiling: "DecompressedTiling", sms: int) -> int:
        """Splits of every request on a number of SMs."""
        tiles = self.request_tiles(self.pairing(tiling))
        return tiling.splits or choose_splits(self.requests, tiles, self.kv_blocks, sms)

    def ctas(self, tiling: "DecompressedTiling", sms: int) -> int:
        """Persistent CTAs: one on each SM, as far as there are work tiles."""
        tiles = self.request_tiles(self.pairing(tiling))
        return min(sms, self.requests * tiles * self.splits(tiling, sms))


@dataclass
class DecompressedTiling(Tiling):
    """How the work of the decompressed kernel is divided; its tiles are fixed by what fits an SM.

    Attributes:
        sms: SMs to use; 0 takes the share that the plan gives it.
        splits: splits of every request, merged afterwards; 0 lets the shape decide.
        pairing: what the two warpgroups of a CTA have in common, "heads" for two heads of a query
            tile, "tiles" for two query tiles of a head; empty lets the rows decide.
        kv_block: tokens of a KV block, 64, or 128 where `may_be_long`; 0 lets the shape decide.
    """

    sms: int = 0
    splits: int = 0
    pairing: str = ""
    kv_block: int = 0

    def validate(self, pd: Any) -> Constraints:
        shape: DecompressedShape = pd.decompressed_shape
        paired = shape.pairing(self)
        return Constraints(
            (
                0 <= self.sms <= pd.sm_count,
                f"sms: expected 0 to {pd.sm_count} (SMs of the device), got {self.sms}",
            ),
            (
                0 <= self.splits <= shape.kv_blocks,
                f"splits: expected 0 to {shape.kv_blocks} (blocks of {KV_BLOCK} tokens), "
                f"got {self.splits}",
            ),
            (
                self.pairing in ("", HEADS, TILES),
                f"pairing: expected {HEADS}, {TILES} or nothing, got {self.pairing!r}",
            ),
            (
                self.kv_block in (0, KV_BLOCK)
                or (self.kv_block == LONG_KV_BLOCK and shape.long_blocks and paired == TILES),
                f"kv_block: expected 0, {KV_BLOCK}, or {LONG_KV_BLOCK} for two query tiles of "
                f"(128, 64, 128) wide heads in 16 bits and in order, got {self.kv_block}",
            ),
        )


def may_be_long(widths: HeadWidths) -> bool:
    """Whether there are KV blocks of 128 tokens: in 16 bits and in order, for these widths.

    Other widths were not measured, and v=256 leaves no registers for their scores.
    """
    return widths == HeadWidths()


class DecompressedOperands(NamedTuple):
    """The tensors that the kernel reads.

    Attributes:
        q_nope, q_rope: [b, s, h, d] and [b, s, h, p], contiguous; p may be 0.
        keys: [b, h, slots, d]; 1 instead of b for a shared prefix.
        values: the same, v wide.
        k_rope: [b, slots, p].
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


def _arguments(
    operands: DecompressedOperands,
    o: Tensor,
    lse: Tensor,
    shape: DecompressedShape,
    tiling: DecompressedTiling,
    sms: int,
    strides: Sequence[Sequence[int]],
    requests: int,
    **numbers: Any,
) -> DecompressedArguments:
    """The arguments of a launch.

    Args:
        o: output, contiguous like the queries.
        strides: of keys, values and rope keys, from a token to a head to a request.
        numbers: the other sizes, by name.
    """
    splits, rope = shape.splits(tiling, sms), operands.k_rope.shape[-1] > 0
    o_partial = lse_partial = None
    if splits > 1:
        o_partial = o.new_empty((splits, *o.shape), dtype=torch.float32)
        lse_partial = lse.new_empty((splits, *lse.shape))
    absent = {} if rope else {"q_rope": None, "k_rope": None}
    keys, values, k_rope = strides
    return DecompressedArguments(
        **{**operands._asdict(), **absent},
        o=o,
        lse=lse,
        o_partial=o_partial,
        lse_partial=lse_partial,
        requests=requests,
        queries=o.shape[-3],
        heads=o.shape[-2],
        key_token=keys[0],
        key_head=Int64Arg(keys[1]),
        key_request=Int64Arg(keys[2]),
        value_row=values[0],
        value_head=Int64Arg(values[1]),
        value_request=Int64Arg(values[2]),
        rope_token=k_rope[0] if rope else 0,
        rope_request=Int64Arg(k_rope[1] if rope else 0),
        splits=splits,
        ctas=shape.ctas(tiling, sms),
        merge_ctas=min(sms * MERGE_CTAS_PER_SM, lse.numel()),
        **numbers,
    )


def attend_request(
    q_nope: Tensor,
    q_rope: Tensor,
    keys: Tensor,
    values: Tensor,
    k_rope: Tensor,
    length: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> None:
    """Attention of one request over its decompressed tokens.

    Args:
        q_nope: `[s, h, d]`, contiguous.
        q_rope: `[s, h, p]`, contiguous.
        keys: `[t, h, d]`, a view with any strides of whole 16 bytes, 1 in the last dimension.
        values: `[t, h, v]`, likewise.
        k_rope: `[t, p]`, likewise.
        length: int32 `[1]` on the device, t.
        o: `[s, h, v]`, contiguous; written.
        lse: float32 `[s, h]`, contiguous; written, natural logarithm.
        causal: Whether the last query is at the last token, and none sees a later one.
        scale: Factor on the scores.
    """
    (s, h, d), t, tiling = q_nope.shape, keys.shape[0], DecompressedTiling()
    sms = sm_count_of(q_nope.device.index)
    widths = HeadWidths(d, k_rope.shape[-1], values.shape[-1])
    shape = DecompressedShape(1, s, h, t, may_be_long(widths))
    first, second, third = keys.stride(), values.stride(), k_rope.stride(0)
    arguments = _arguments(
        DecompressedOperands(q_nope, q_rope, keys, values, k_rope, length), o, lse, shape, tiling,
        sms, ((*first[:2], t * first[0]), (*second[:2], t * second[0]), (third, t * third)), 1,
        slots=t, kept=t, causal=int(causal), scale_log2e=scale * math.log2(math.e),
    )  # fmt: skip
    program = call_program(
        DecompressedSm90.decompressed_attention, DecompressedSm90, tiling, arguments, q_nope,
        pairing=shape.pairing(tiling), partials=arguments.splits > 1, widths=widths,
        kv_block=shape.kv_block(tiling, sms),
    )  # fmt: skip
    program(*arguments)


def decompressed_stage(
    plan: HopperPlan,
    tiling: DecompressedTiling,
    operands: DecompressedOperands,
    shape: DecompressedShape,
    kept: int,
    share: int,
    cost_fn: Callable[[Any], tuple[float, float]],
    configs: Sequence[DecompressedTiling],
    shared: bool = False,
    alone: bool = False,
) -> CuteKernel:
    """The stage that attends over the decompressed tokens; its outputs are o and lse.

    Args:
        plan: the plan that it belongs to, whose `decompressed_shape` is `shape`.
        kept: tokens of a request that are decompressed, or those of the prefix.
        share: SMs that it gets when the tiling names none.
        shared: whether the tokens are a prefix of all requests.
        alone: whether no other kernel attends to the tokens before a ring.
    """
    q_nope, keys, values, k_rope = operands.q_nope, operands.keys, operands.values, operands.k_rope
    b, s, h, d = q_nope.shape
    p, fp8, ring = k_rope.shape[-1], operands.scales is not None, operands.starts is not None
    widths = HeadWidths(d, p, d if fp8 else values.shape[-1])
    rows = b * s * h
    read = operands._replace(
        q_nope=require_view("q_nope", q_nope, rows * d),
        q_rope=require_view("q_rope", operands.q_rope, rows * p) if p else operands.q_rope,
    )
    o = q_nope.new_empty((b, s, h, widths.v))
    lse = q_nope.new_empty((b, s, h), dtype=torch.float32)
    columns = columns_for(shape.rows) if fp8 else 0
    if ring and (kept % KV_BLOCK or kept != keys.shape[2]):
        raise InvalidArgumentError(
            "window",
            f"a multiple of {KV_BLOCK} for a ring, as many as it has slots",
            f"{kept} with {keys.shape[2]} slots",
        )
    if ring and shared:
        raise InvalidArgumentError("starts", "none for a shared prefix, which is no ring", "a ring")

    def host_fn(tiling: DecompressedTiling) -> DecompressedSm90:
        sms = tiling.sms or share
        return DecompressedSm90(
            ELEMENT_TYPES[plan.torch_dtype], shape.pairing(tiling), fp8, columns, shared,
            shape.splits(tiling, sms) > 1, ring, ring and alone, widths,
            shape.kv_block(tiling, sms),
        )  # fmt: skip

    def args_fn(tiling: DecompressedTiling) -> DecompressedArguments:
        strides = [[each.stride(2), each.stride(1), each.stride(0)] for each in (keys, values)]
        return _arguments(
            read, o, lse, shape, tiling, tiling.sms or share,
            (*strides, [k_rope.stride(1), k_rope.stride(0)]), b, slots=keys.shape[2], kept=kept,
            causal=int(plan.causal), scale_log2e=plan.scale_log2e,
        )  # fmt: skip

    return CuteKernel(
        kernel_fn=DecompressedSm90.decompressed_attention,
        host_fn=host_fn,
        args_fn=args_fn,
        requires_arch="sm_90a",
        tiling=tiling,
        plan=plan,
        input_tensors=[tensor for tensor in operands if tensor is not None],
        output_tensors=[o, lse],
        algorithmic_flops_bytes_fn=cost_fn,
        autotune_configs=configs,
    )
