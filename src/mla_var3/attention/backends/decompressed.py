"""The CuTe DSL kernels that read decompressed tokens of a cache where they lie.

    flash_attention     a whole copy in the cache, or one made by the call
    mla_var6_plus       the ring of the newest tokens, the older ones latent
    mla_var6_plus_v6    the shared first tokens, the others latent

Dense and paged caches. A ring is read in the order of its slots. Tokens that it lacks after others
were dropped (positions before `window_start`) are attended in latent form with the older ones. All
queries have to see those: a request that lost so many tokens that its ring begins after the first
query gets NaN, until `refill` fills the ring up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from mla_var3.attention.backends.plan_stages import (
    Operands,
    Service,
    needs_q_nope,
    plan_of_operands,
    sizes_of,
)
from mla_var3.attention.backends.projections import project_heads
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.checks import kernel_ready
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.op.mla.inputs import decompress_all
from mla_var3.runtime.stage import Stage

_HOPPER = ("sm_90",)


def _run(form: Hashable, operands: Operands, build: Callable[[], Stage]) -> list[torch.Tensor]:
    from mla_var3.kernel.cute_python.mla.hopper.stage_call import run_stage

    return run_stage(form, operands, build)


def _paged_refusal(shape: CallShape) -> str | None:
    if shape.page_size is not None and shape.page_size % PAGE_STEP:
        return f"pages of {shape.page_size} tokens; it takes multiples of {PAGE_STEP}"
    return None


def _refusal(shape: CallShape) -> str | None:
    return needs_q_nope(shape) or _paged_refusal(shape)


def _ring_refusal(shape: CallShape) -> str | None:
    reasons = {
        "a cache without a ring of decompressed tokens (window)": not shape.window,
        f"a ring of {shape.window} slots; it takes multiples of {PAGE_STEP}": shape.window
        % PAGE_STEP,
        f"{shape.s} queries over a ring of {shape.window} slots, which has to hold them all": (
            shape.causal and shape.s > shape.window
        ),
        "a ring as long as the cache beside a shared prefix, which the ring does not hold": (
            shape.prefix and shape.window >= shape.t
        ),
    }
    found = _refusal(shape)
    return found or next((reason for reason, holds in reasons.items() if holds), None)


def _prefix_refusal(shape: CallShape) -> str | None:
    if not shape.prefix:
        return "a cache without a decompressed shared prefix"
    if shape.page_size is not None and shape.prefix % shape.page_size:
        return f"a prefix of {shape.prefix} tokens that ends inside of a page"
    return _refusal(shape)


def _latent_rows(
    cache: CacheView, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Latent rows, rope keys and block table of the slots from `first` to `last`."""
    table, page = cache.block_table, cache.page_size
    if table is None or page is None:
        return cache.latent[:, first:last], cache.rope[:, first:last], None
    table = table[:, first // page :]
    return cache.latent, cache.rope, table if table.stride(-1) == 1 else table.contiguous()


def _copy_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    cache, t = task.cache, plan.t
    copy = cache.full_copy()
    if copy is None:
        latent, rope = _all_rows(cache, t)
        keys, values = decompress_all(latent, task.w_uk, task.w_uv)
    else:
        keys, values = (part[:, :, :t] for part in copy)
        rope = (cache.rope if cache.block_table is None else cache.ring_rope())[:, :t]
    queries = kernel_ready(task.q), kernel_ready(task.q_rope)
    return *queries, keys, values, rope, kernel_ready(cache.lengths)


def _all_rows(cache: CacheView, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent rows and rope keys of the first t slots of every request, in order."""
    page = cache.page_size or 1
    latent, rope = cache.tile(0, -(-t // page) * page)
    return latent[:, :t], rope[:, :t]


def _ring_fields(shape: CallShape) -> dict[str, Any]:
    # A bound on the lengths does not make a ring shorter.
    return {**sizes_of(shape), "t": max(shape.t, shape.window), "n": shape.window}


def _ring_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    cache = task.cache
    assert task.w_uk is not None and task.w_uv is not None
    lengths, starts = kernel_ready(cache.lengths), kernel_ready(cache.ring_start())
    queries = kernel_ready(task.q), kernel_ready(task.q_rope)
    ring = cache.k_new, cache.v_new, cache.ring_rope(), lengths, starts
    older: Operands = (None,) * 5
    if plan.n < plan.t:
        # A call may look at fewer tokens than the cache has, and at none of the ring's.
        before = torch.minimum(starts, lengths)
        rows = _latent_rows(cache, 0, plan.t)
        older = project_heads(task.q, task.w_uk), *rows, before
    return *queries, *ring, kernel_ready(task.w_uv), *older


def _ring_stage(plan: Any, shape: CallShape, operands: Operands) -> Stage:
    from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
    from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens

    given: Any = operands  # which of them are there is the plan's to check
    q_nope, q_rope, k_new, v_new, rope_new, lengths, starts, w_uv, *older = given
    window = DecompressedOperands(q_nope, q_rope, k_new, v_new, rope_new, lengths, starts=starts)
    tokens = None
    if older[0] is not None:
        q_latent, latent, rope, table, before = older
        tokens = LatentTokens(q_latent, q_rope, latent, rope, before, table, seen_by_all=True)
    stage: Stage = plan.plan_parts(tokens, window, w_uv, shape.page_size or 0)
    return stage


def _prefix_fields(shape: CallShape) -> dict[str, Any]:
    return {**sizes_of(shape), "t": max(shape.t, shape.prefix), "prefix": shape.prefix}


def _prefix_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    cache = task.cache
    assert task.w_uk is not None and task.w_uv is not None
    lengths = kernel_ready(cache.lengths)
    queries = kernel_ready(task.q), kernel_ready(task.q_rope)
    prefix = cache.k_prefix, cache.v_prefix, cache.prefix_rope()
    own: Operands = (None,) * 5
    if plan.prefix < plan.t:
        own_lengths = (lengths - plan.prefix).clamp_(min=0)
        rows = _latent_rows(cache, plan.prefix, plan.t)
        own = project_heads(task.q, task.w_uk), *rows, own_lengths
    return *queries, *prefix, lengths, kernel_ready(task.w_uv), *own


def _prefix_stage(plan: Any, shape: CallShape, operands: Operands) -> Stage:
    from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
    from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens

    given: Any = operands
    q_nope, q_rope, k_prefix, v_prefix, rope_prefix, lengths, w_uv, *own = given
    shared = DecompressedOperands(
        q_nope, q_rope, k_prefix[None], v_prefix[None], rope_prefix[None], lengths
    )
    tokens = None
    if own[0] is not None:
        q_latent, latent, rope, table, own_lengths = own
        tokens = LatentTokens(q_latent, q_rope, latent, rope, own_lengths, table)
    stage: Stage = plan.plan_parts(tokens, shared, w_uv, shape.page_size or 0)
    return stage


def _service(operands: Any, refusal: Any, fields: Any, build: Any = plan_of_operands) -> Service:
    return Service(operands, refusal, fields, build, _run, runs_on_cpu=False, targets=_HOPPER)


CUTE_SERVICES: dict[str, Service] = {
    "flash_attention": _service(_copy_operands, needs_q_nope, sizes_of),
    "mla_var6_plus": _service(_ring_operands, _ring_refusal, _ring_fields, _ring_stage),
    "mla_var6_plus_v6": _service(_prefix_operands, _prefix_refusal, _prefix_fields, _prefix_stage),
}
"""By version: each reads other parts of a cache. The 8-bit version has no cache to read from."""
