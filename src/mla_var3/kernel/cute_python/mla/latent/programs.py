"""Which latent kernel serves a call, and the constants that its program is compiled for."""

from typing import Any, NamedTuple

from mla_var3.kernel.cute_python.mla.hopper.constants import ROWS
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90, FlashMLATiling, default_few
from mla_var3.kernel.cute_python.mla.latent.operands import (
    LatentOperands,
    LatentOptions,
    head_box,
    may_cluster,
)
from mla_var3.kernel.cute_python.mla.latent_fp8.kernel import LatentFp8Sm90, columns_for


class LatentProgram(NamedTuple):
    """A latent kernel with its constants.

    Attributes:
        constants: what `host` is constructed with, beside an element type.
    """

    kernel_fn: Any
    host: Any
    tiling: FlashMLATiling
    constants: dict[str, Any]


def latent_program(operands: LatentOperands, options: LatentOptions) -> LatentProgram:
    """The kernel of a call: that for 8-bit caches where the cache has scales."""
    rows, scales = options.max_q * operands.lse.shape[-1], operands.scales
    constants: dict[str, Any] = {"empty_positive": options.empty_positive}
    if scales is not None:
        ragged = operands.cu_seqlens_q is not None
        columns = ROWS if options.batch_invariant else columns_for(rows, ragged)
        constants |= {"columns": columns, "per_token": scales.numel() > 1}
        tiling = FlashMLATiling(few=columns % ROWS)
        return LatentProgram(LatentFp8Sm90.latent_fp8, LatentFp8Sm90, tiling, constants)
    few = 0 if options.batch_invariant else default_few(rows)
    constants |= {"few": few, "head_box": head_box(operands), "widths": operands.widths}
    constants |= {"overlap": options.overlap} if options.overlap else {}
    constants |= {} if may_cluster(options) else {"clusters": False}
    return LatentProgram(FlashMLASm90.flash_mla, FlashMLASm90, FlashMLATiling(few=few), constants)
