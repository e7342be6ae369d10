"""Whole calls: the projections and the latent attention in one launch of the host.

    q_latent = q_nope w_uk     [m, h, d] x [h, d, k]          `projections/queries.py`
    o_latent = attention       over the latent cache          `latent/` or `latent_fp8/kernel.py`
    o = o_latent w_uv          [m, h, k] x [h, k, v]          `projections/outputs.py`

One compiled host function launches all three, which costs the host little more than the launches.

Order on the device. The queries' projection is launched normally: it starts when all earlier work
on the stream has ended. The other two use programmatic dependent launch. CTAs of the attention may
start while the queries' projection ends, and wait on the device for its end before they read
queries; the 8-bit kernel loads its first KV blocks meanwhile. CTAs of the outputs' projection may
start while the attention ends, load their weights, and wait for the end of the attention before
they read its output or write their own. So when the last kernel writes, the other two have ended.
The first kernel of the next call starts when this last one has ended: no call writes into a
workspace that the call before still reads.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from torch import Tensor

from mla_var3.conf.kernel_rates import OWN_PROJECTION_QUERIES, PROJECTED_D, PROJECTED_V
from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, LATENT
from mla_var3.kernel.cute_python.mla.latent import call
from mla_var3.kernel.cute_python.mla.latent.operands import (
    WHOLE_FIELDS,
    LatentOperands,
    LatentOptions,
    LatentSizes,
    Partials,
    ProjectionOperands,
    ProjectionSizes,
    groups_of,
)
from mla_var3.kernel.cute_python.mla.latent.programs import latent_program
from mla_var3.kernel.cute_python.mla.projections import queries
from mla_var3.kernel.cute_python.mla.projections.outputs import (
    DecompressCombineSm90,
    column_choices,
    columns_for,
    default_head_ctas,
)
from mla_var3.runtime.tensors import ALIGNMENT_BYTES


class WholeCall:
    """Host code that launches the attention between its projections."""

    def __init__(self, element, attention, k=LATENT, d=HEAD, v=HEAD, **constants):
        self.element = element
        self.attention = attention
        self.constants = constants
        self.k = k
        self.d = d
        self.v = v

    @cute.jit
    def __call__(self, *arguments):
        """The arguments of `WHOLE_FIELDS` and the stream."""
        projections, sizes, rest = groups_of(arguments, ProjectionOperands, ProjectionSizes)
        operands, _, latent_sizes, (stream,) = groups_of(
            rest, LatentOperands, Partials, LatentSizes
        )
        tokens, heads = sizes.tokens, latent_sizes.heads
        queries.ProjectQueriesSm90(self.element, self.k, self.d)(
            projections.q_nope, projections.w_uk, operands.q_latent, tokens, heads,
            sizes.query_ctas, stream,
        )  # fmt: skip
        self.attention(self.element, early=True, **self.constants)(*rest)
        columns = sizes.output_columns
        outputs = (
            operands.o_latent, projections.w_uv, None, None, None, projections.out, None, tokens,
            heads, sizes.output_head_ctas, stream,
        )  # fmt: skip
        choices = column_choices(self.v)
        # All of them in one program: a CUDA graph can be captured for any number of queries once
        # another number has been called.
        for choice in cutlass.range_constexpr(len(choices)):
            if columns == choices[choice]:
                DecompressCombineSm90(
                    self.element, early=True, columns=choices[choice], k=self.k, v=self.v
                )(*outputs)


def whole_arguments(
    projections: ProjectionOperands, latent: tuple[Any, ...], sm_count: int
) -> tuple[Any, ...]:
    """The arguments of `WholeCall`, in the order of `WHOLE_FIELDS`."""
    heads, d, k = projections.w_uk.shape
    tokens = projections.q_nope.numel() // (heads * d)
    sizes = ProjectionSizes(
        tokens=tokens,
        query_ctas=queries.cta_count(tokens, heads, sm_count, k, d),
        output_head_ctas=default_head_ctas(tokens, heads, sm_count),
        output_columns=columns_for(tokens, heads, sm_count, projections.w_uv.shape[2]),
    )
    return (*projections, *sizes, *latent)


def serves(projections: ProjectionOperands) -> bool:
    """Whether these projections run in the launch of the attention; otherwise torch does them."""
    w_uk, w_uv, q_nope, _ = projections
    heads, d, k = w_uk.shape
    served = d in PROJECTED_D and w_uv.shape[2] in PROJECTED_V and k % queries.TILE_COLUMNS == 0
    most = OWN_PROJECTION_QUERIES * heads * d
    if not served or not 0 < q_nope.numel() <= most or q_nope.dtype not in call.ELEMENT_TYPES:
        return False
    return all(_is_aligned(tensor) for tensor in projections)


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0


def attend(
    projections: ProjectionOperands, operands: LatentOperands, options: LatentOptions
) -> call.LatentLaunch | None:
    """Attention with its projections; safe in a CUDA graph.

    `operands.q_latent` and `operands.o_latent` are workspace here.

    Returns:
        The same launch for other tensors; None where a tensor was copied first.
    """
    latent, sm_count, copied = call.call_arguments(operands, options)
    arguments = whole_arguments(projections, latent, sm_count)
    q_nope = projections.q_nope
    kernel_fn, host, tiling, constants = latent_program(operands, options)
    program = call.call_program(
        kernel_fn, WholeCall, tiling, arguments, q_nope, attention=host,
        k=operands.latent.shape[-1], d=q_nope.shape[-1], v=projections.out.shape[-1], **constants,
    )  # fmt: skip
    program(*arguments)
    if copied:
        return None
    workspace = {
        name: getattr(operands, name).numel() * q_nope.element_size()
        for name in ("q_latent", "o_latent")
    }
    return call.LatentLaunch(
        program.repeated(*arguments), q_nope.device, sm_count, WHOLE_FIELDS, workspace
    )
