"""Calls of the decompressed kernel on one request after another, with tensors that change.

A plan fixes its tensors and prepares its arguments. Here programs are looked up by what they were
compiled for, and arguments are written for every launch.
"""

import math

import torch
from torch import Tensor

from mla_var3.kernel.cute_python.mla.decompressed.kernel import (
    DecompressedArguments,
    DecompressedSm90,
)
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    MERGE_CTAS_PER_SM,
    DecompressedShape,
    DecompressedTiling,
    may_be_long,
)
from mla_var3.kernel.cute_python.mla.hopper.widths import HeadWidths
from mla_var3.kernel.cute_python.mla.latent.call import call_program, sm_count_of
from mla_var3.runtime.cute_kernel import Int64Arg


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
    (s, h, d), t, p, v = q_nope.shape, keys.shape[0], k_rope.shape[-1], values.shape[-1]
    device, tiling = q_nope.device, DecompressedTiling()
    sms, widths = sm_count_of(device.index), HeadWidths(d, p, v)
    shape = DecompressedShape(1, s, h, t, may_be_long(widths))
    splits = shape.splits(tiling, sms)
    o_partial, lse_partial = None, None
    if splits > 1:
        o_partial = o.new_empty((splits, s, h, v), dtype=torch.float32)
        lse_partial = lse.new_empty((splits, s, h))
    arguments = DecompressedArguments(
        q_nope=q_nope,
        q_rope=q_rope if p else None,
        keys=keys,
        values=values,
        k_rope=k_rope if p else None,
        scales=None,
        lengths=length,
        starts=None,
        o=o,
        lse=lse,
        o_partial=o_partial,
        lse_partial=lse_partial,
        scale_log2e=scale * math.log2(math.e),
        requests=1,
        queries=s,
        heads=h,
        slots=t,
        key_token=keys.stride(0),
        key_head=Int64Arg(keys.stride(1)),
        key_request=Int64Arg(t * keys.stride(0)),
        value_row=values.stride(0),
        value_head=Int64Arg(values.stride(1)),
        value_request=Int64Arg(t * values.stride(0)),
        rope_token=k_rope.stride(0) if p else 0,
        rope_request=Int64Arg(t * k_rope.stride(0) if p else 0),
        kept=t,
        causal=int(causal),
        splits=splits,
        ctas=shape.ctas(tiling, sms),
        merge_ctas=min(sms * MERGE_CTAS_PER_SM, s * h),
    )
    program = call_program(
        DecompressedSm90.decompressed_attention, DecompressedSm90, tiling, arguments, q_nope,
        pairing=shape.pairing(tiling), partials=splits > 1, widths=widths,
        kv_block=shape.kv_block(tiling, sms),
    )  # fmt: skip
    program(*arguments)
