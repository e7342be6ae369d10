"""Whole calls of the attention: the products around it and the kernel in one launch of the host.

    q_latent = q_nope w_uk     [m, h, 128] x [h, 128, 512]    `project_queries.py`
    o_latent = attention       over the latent cache          `absorbed_attention.py`
    o = o_latent w_uv          [m, h, 512] x [h, 512, 128]    `decompress_combine.py`

One compiled host function launches all of it, which costs the host little more than its launches.

What runs before what. The queries' product is launched in the plain way: it begins when everything
before it on the stream has ended. The other two are launched early. Blocks of the attention may
start while the queries' product ends, and wait on the device for its end before they read queries.
Blocks of the last product may start while the attention ends, bring their weights, and wait for the
end of the attention before they read its output or write their own. Each waits for the one before
it, so that where the last one writes, all have ended. The next call's first product begins when
this last one has ended: no call writes into memory between the steps, or into the room for pieces,
that the call before still reads.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

from mla_var3.conf.kernel_rates import OWN_PRODUCT_QUERIES
from mla_var3.kernel.cute_python.mla.hopper.constants import HEAD, LATENT
from mla_var3.kernel.cute_python.mla.latent.call import (
    ELEMENT_TYPES,
    AbsorbedLaunch,
    call_arguments,
    call_program,
)
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90, FlashMLATiling, default_few
from mla_var3.kernel.cute_python.mla.projections.outputs import (
    COLUMNS,
    DecompressCombineSm90,
    columns_for,
    default_head_ctas,
)
from mla_var3.kernel.cute_python.mla.projections.queries import ProjectQueriesSm90, cta_count
from mla_var3.runtime.tensors import ALIGNMENT_BYTES

READ, WRITTEN = slice(1, 8), 8
"""Among the arguments of the attention: what it reads beside its queries, and its output, which the
log-sum-exp follows."""
NUMBERS = 5
"""Numbers of the products, at the end."""


class WholeCall:
    """Host code that launches the queries' product, the attention and the output's product."""

    def __init__(self, element, few, empty_positive=False):
        self.element = element
        self.few = few
        self.empty_positive = empty_positive

    @cute.jit
    def __call__(self, *arguments):
        """The arguments of `whole_arguments` and the stream."""
        *given, stream = arguments
        w_uk, w_uv, q_nope, *rest = given[:-NUMBERS]
        queries, heads, blocks, splits, columns = given[-NUMBERS:]
        read = len(range(*READ.indices(len(rest))))
        out, lse, q_latent, o_latent = rest[read : read + 4]
        ProjectQueriesSm90(self.element)(q_nope, w_uk, q_latent, queries, heads, blocks, stream)
        attention = FlashMLASm90(
            self.element, self.few, empty_positive=self.empty_positive, early=True
        )
        attention(q_latent, *rest[:read], o_latent, lse, *rest[read + 4 :], stream)
        outputs = (o_latent, w_uv, None, None, None, out, None, queries, heads, splits, stream)
        # All widths in one program: a CUDA graph can be captured for any number of queries once
        # another number has been called.
        for width in cutlass.range_constexpr(len(COLUMNS)):
            if columns == COLUMNS[width]:
                DecompressCombineSm90(self.element, early=True, columns=COLUMNS[width])(*outputs)


class WholeLaunch(AbsorbedLaunch):
    """Repeats a whole call on other tensors of the same shapes, strides and dtypes.

    Its addresses are those of w_uk, w_uv, q_nope, q_rope, latent, rope, block_table, lengths,
    query_begins, tree, out, lse, q_latent and o_latent; any number for absent ones.
    """

    between = 2


def whole_arguments(
    attention: tuple[Any, ...],
    q_nope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    out: Tensor,
    sm_count: int,
) -> tuple[Any, ...]:
    """The arguments of `WholeCall`, in order: first the tensors that every call brings.

    Args:
        attention: those of the attention, see `attention_arguments`.
        q_nope: queries, `[..., h, 128]`, contiguous.
        w_uk, w_uv: weights, contiguous.
        out: `[..., h, 128]`, contiguous.
        sm_count: SMs of the device.
    """
    o_latent, lse, *room_and_numbers = attention[WRITTEN:]
    heads = q_nope.shape[-2]
    queries = q_nope.numel() // (heads * HEAD)
    return (
        w_uk, w_uv, q_nope, *attention[READ], out, lse, attention[0], o_latent, *room_and_numbers,
        queries, heads, cta_count(queries, heads, sm_count),
        default_head_ctas(queries, heads, sm_count), columns_for(queries, heads, sm_count),
    )  # fmt: skip


def serves(q_nope: Tensor, w_uk: Tensor, w_uv: Tensor, out: Tensor | None) -> bool:
    """Whether the products of a call are launched here.

    Args:
        q_nope: queries, `[..., h, d]`.
        w_uk, w_uv: `[h, d, k]` and `[h, k, d]`.
        out: where the output goes; None for a new tensor.
    """
    heads = q_nope.shape[-2]
    shapes = tuple(w_uk.shape) == (heads, HEAD, LATENT) and tuple(w_uv.shape) == (
        heads, LATENT, HEAD
    )  # fmt: skip
    most = OWN_PRODUCT_QUERIES * heads * HEAD
    if not shapes or not 0 < q_nope.numel() <= most or q_nope.dtype not in ELEMENT_TYPES:
        return False
    given = (q_nope, w_uk, w_uv) if out is None else (q_nope, w_uk, w_uv, out)
    return all(
        tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT_BYTES == 0 for tensor in given
    )


def whole(
    q_nope: Tensor,
    q_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    latent: Tensor,
    rope: Tensor,
    block_table: Tensor | None,
    lengths: Tensor,
    query_begins: Tensor | None,
    tree: Tensor | None,
    max_queries: int,
    causal: bool,
    scale: float,
    out: Tensor | None = None,
    empty_positive: bool = False,
) -> tuple[Tensor, Tensor, WholeLaunch | None] | None:
    """Attention with the products around it, on tensors that change; safe in a CUDA graph.

    Args:
        q_nope: queries without rope, [b, s, h, 128], or [queries, h, 128] with `query_begins`.
        q_rope: their rope part, rows at equal distances.
        w_uk, w_uv: [h, 128, 512] and [h, 512, 128].
        latent, rope, block_table, lengths, query_begins, tree, max_queries, causal, scale: as for
            the attention alone, see `call_arguments`.
        out: where the output goes, like q_nope; None for a new tensor.
        empty_positive: see `final_lse`.

    Returns:
        Output, log-sum-exp and the same launch for other tensors, which is None where a tensor was
        copied first; None for a call whose products are not launched here, see `serves`.
    """
    if not serves(q_nope, w_uk, w_uv, out):
        return None
    result = torch.empty_like(q_nope) if out is None else out
    lse = q_nope.new_empty(q_nope.shape[:-1], dtype=torch.float32)
    q_latent, o_latent = (q_nope.new_empty((*q_nope.shape[:-1], LATENT)) for _ in range(2))
    attention, sm_count, copied = call_arguments(
        q_latent, q_rope, latent, rope, block_table, lengths, query_begins, tree, max_queries,
        causal, scale, o_latent, lse,
    )  # fmt: skip
    arguments = whole_arguments(attention, q_nope, w_uk, w_uv, result, sm_count)
    tiling = FlashMLATiling(few=default_few(max_queries * q_nope.shape[-2]))
    program = call_program(
        FlashMLASm90.flash_mla, WholeCall, tiling, empty_positive, arguments, q_nope
    )
    program(*arguments)
    if copied:
        return result, lse, None
    return result, lse, WholeLaunch(program.repeated(*arguments), q_nope.device, sm_count)
