"""Paged latent caches for plans: the same tokens as in a dense cache, scattered over pages.

A page holds latent and rope columns side by side, as serving engines store them; the kernel gets
two strided views.
"""

import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.mla_plan import MlaPlan
from mla_var3.op.mla.inputs import random_numbers
from mla_var3.runtime.tensors import check_tensor

SPARE_PAGES = 3
"""Pages of no request, filled with NaN: a read out of bounds becomes visible."""


def paged_inputs(inputs: tuple[Tensor, ...], page: int, seed: int | None) -> tuple[Tensor, ...]:
    """Inputs of a dense cache with the cache scattered over pages, repeatably with a seed.

    Returns:
        q_latent, q_rope, pages of the latent [pages, page, k], of the rope [pages, page, p],
        lengths, block table [b, pages of a request] int32.
    """
    q_latent, q_rope, c_kv, k_rope, lengths = inputs
    b, t, k = c_kv.shape
    each = -(-t // page)
    count = b * each + SPARE_PAGES
    pool = c_kv.new_full((count, page, k + k_rope.shape[-1]), float("nan"))
    if c_kv.is_meta:
        table = lengths.new_empty((b, each))
    else:
        order = torch.randperm(count, generator=random_numbers(seed))[: b * each].to(c_kv.device)
        padded = pool.new_full((b, each * page, pool.shape[-1]), float("nan"))
        padded[:, :t, :k] = c_kv
        padded[:, :t, k:] = k_rope
        pool[order] = padded.view(b * each, page, -1)
        table = order.to(torch.int32).view(b, each)
    return q_latent, q_rope, pool[..., :k], pool[..., k:], lengths, table


def dense_inputs(inputs: tuple[Tensor, ...], t: int) -> tuple[Tensor, ...]:
    """The inputs of a dense cache again, for the reference."""
    q_latent, q_rope, latent, rope, lengths, table = inputs

    def gather(pages: Tensor) -> Tensor:
        return pages[table.long()].flatten(1, 2)[:, :t]

    return q_latent, q_rope, gather(latent), gather(rope), lengths


def check_paged(plan: MlaPlan, page: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Check the inputs of a paged kernel; returns the queries as rows."""
    q_latent, q_rope, latent, rope, lengths, table = inputs
    shapes = {"q_latent": "bshk", "q_rope": "bshp", "lengths": "b"}
    plan.check_inputs(shapes, (q_latent, q_rope, lengths))
    check_pages(plan, page, latent, rope, table, q_latent.device)
    return plan.query_rows(q_latent, q_rope)


def check_pages(
    plan: MlaPlan,
    page: int,
    latent: Tensor,
    rope: Tensor,
    table: Tensor | None,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
) -> None:
    """Check a pool of pages, [pages, page, k] and [pages, page, p], and its block table.

    The table is [b, pages of a request] int32; `dtypes` are those of latent and rope, None for the
    plan's, and the device is that of the queries.
    """
    dtype, rope_dtype = dtypes or (plan.torch_dtype, plan.torch_dtype)
    pages = [("pages", latent.shape[0]), ("page", page)]
    check_tensor("latent", latent, [*pages, ("k", plan.k)], dtype, device)
    check_tensor("rope", rope, [*pages, ("p", plan.p)], rope_dtype, device)
    shape = None if table is None else table.shape
    if shape is None or len(shape) != 2 or shape[0] != plan.b or shape[1] * page < plan.t:
        needed = -(-plan.t // page)
        got = "none" if shape is None else list(shape)
        raise InvalidArgumentError("table", f"[b={plan.b}, at least {needed} pages]", got)
    assert table is not None
    if table.dtype != torch.int32 or table.stride(1) != 1:
        raise InvalidArgumentError(
            "table", "int32 with stride 1 in a row", f"{table.dtype} with strides {table.stride()}"
        )
    if table.device != latent.device:
        raise InvalidArgumentError("table", f"a tensor on {device}", f"one on {table.device}")
