"""The small kernels around attention over shared prefixes: layout, gathered queries, merge.

Each function launches its kernel on the current stream and returns what repeats the launch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES, PointerLaunch, sm_count_of
from mla_var3.kernel.cute_python.mla.latent.operands import token_stride
from mla_var3.kernel.cute_python.mla.prefix import layout as layouts
from mla_var3.kernel.cute_python.mla.prefix import rows as rowwise
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute_kernel import CuteProgram, program_for
from mla_var3.runtime.stage import Tiling

CTAS_PER_SM = 8
"""These kernels only move data: many CTAs keep the memory requests of an SM coming."""

scratch_size = layouts.scratch_size

_programs = CALL_STATE.table(64)


def lay_out(
    outputs: Mapping[str, Tensor | None],
    inputs: Mapping[str, Tensor | None],
    sizes: Mapping[str, int],
) -> PointerLaunch:
    """Resolve groups; see `layout.py` for names and shapes."""
    like = outputs["own_lengths"]
    assert like is not None
    rows = sizes["requests"] + (1 if outputs["places_1"] is None else 2) * sizes["chunks"]
    ctas = _ctas(like, -(-rows // layouts.COPY_WARPS))
    arguments = layouts.LayoutArguments(**inputs, **outputs, **sizes, copy_ctas=ctas)
    kernel_fn = layouts.LayOutPrefix.resolve_prefix
    return _launch(kernel_fn, layouts.LayOutPrefix(), arguments, like)


def gather(
    q_latent: Tensor,
    q_rope: Tensor,
    order: Tensor,
    bounds: Tensor,
    packed_latent: Tensor,
    packed_rope: Tensor,
) -> PointerLaunch:
    """Copy queries `[..., h, 512]` and `[..., h, 64]` into the order of the groups."""
    tokens, heads = packed_latent.shape[:2]
    arguments = rowwise.GatherArguments(
        q_latent, q_rope, order, bounds, packed_latent, packed_rope, tokens, heads,
        bounds.shape[0] - 1, token_stride(q_latent, heads), q_latent.stride(-2),
        token_stride(q_rope, heads), q_rope.stride(-2),
        _ctas(q_latent, -(-tokens * heads // rowwise.WARPS)),
    )  # fmt: skip
    host = rowwise.GatherQueries(ELEMENT_TYPES[q_latent.dtype])
    return _launch(rowwise.GatherQueries.gather_queries, host, arguments, q_latent)


def merge(o: Tensor, lse: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> PointerLaunch:
    """Merge one or two levels into contiguous `o [..., h, 512]` and `lse [..., h]`, in place.

    Args:
        parts: per level output, LSE and places; see `rows.py`.
    """
    rows = lse.numel()
    flat: list[Any] = [tensor for part in parts for tensor in part]
    flat += [None] * (6 - len(flat))
    sizes = rows, lse.shape[-1], _ctas(o, -(-rows // rowwise.WARPS))
    arguments = rowwise.MergeArguments._make([o, lse, *flat, *sizes])
    host = rowwise.MergePrefix(ELEMENT_TYPES[o.dtype])
    return _launch(rowwise.MergePrefix.merge_prefix, host, arguments, o)


def _ctas(like: Tensor, wanted: int) -> int:
    return max(1, min(sm_count_of(like.device.index) * CTAS_PER_SM, wanted))


def _launch(kernel_fn: Any, host: Any, arguments: Any, like: Tensor) -> PointerLaunch:
    present = tuple(argument is not None for argument in arguments)
    key = (kernel_fn, like.dtype, present, like.device.index)
    program: CuteProgram | None = _programs.get(key)
    if program is None:
        program = program_for(kernel_fn, host, arguments, Tiling(), like.device)
        _programs.keep(key, program)
    program(*arguments)
    return PointerLaunch(program.repeated(*arguments), type(arguments)._fields)
