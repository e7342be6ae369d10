"""The products of whole calls, each launched alone as the joint launch has it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mla_var3.kernel.cute_python.mla.latent.call import ELEMENT_TYPES, sm_count_of
from mla_var3.kernel.cute_python.mla.projections.outputs import (
    DecompressCombineSm90,
    columns_for,
    default_head_ctas,
)
from mla_var3.kernel.cute_python.mla.projections.queries import ProjectQueriesSm90, cta_count
from mla_var3.runtime.cute_kernel import program_for


def query_product(
    q_nope: torch.Tensor, w_uk: torch.Tensor, q_latent: torch.Tensor
) -> Callable[[], None]:
    """Launches `q_latent[m, h, 512] = q_nope[m, h, 128] w_uk[h, 128, 512]`."""
    (m, h, _), device = q_nope.shape, q_nope.device
    arguments = (q_nope, w_uk, q_latent, m, h, cta_count(m, h, sm_count_of(device.index)))
    host = ProjectQueriesSm90(ELEMENT_TYPES[q_nope.dtype])
    program = program_for(ProjectQueriesSm90.project_queries, host, arguments, None, device)
    return program.bind(*arguments)


def output_product(
    o_latent: torch.Tensor, w_uv: torch.Tensor, out: torch.Tensor, early: bool = True
) -> Callable[[], None]:
    """Launches `out[m, h, 128] = o_latent[m, h, 512] w_uv[h, 512, 128]`."""
    (m, h, _), device = o_latent.shape, o_latent.device
    sm_count = sm_count_of(device.index)
    splits, columns = default_head_ctas(m, h, sm_count), columns_for(m, h, sm_count)
    arguments = (o_latent, w_uv, None, None, None, out, None, m, h, splits)
    host = DecompressCombineSm90(ELEMENT_TYPES[o_latent.dtype], early, columns)
    kernel_fn = DecompressCombineSm90.decompress_combine
    return program_for(kernel_fn, host, arguments, None, device).bind(*arguments)
