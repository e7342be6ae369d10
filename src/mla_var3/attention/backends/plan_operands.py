"""What plans read of a call: their operands, and which calls they serve.

A kernel of the package that is driven by a plan serves calls through a `Service`. cuTile plans are
built in every call. The latent ones take dense and paged caches in 16 and 8 bits, packed queries
and trees; the others dense 16-bit caches and the same number of queries for all requests. Plans of
CuTe DSL read decompressed tokens where the cache keeps them, dense or paged, and are built once per
call key:

    flash_attention     a full copy in the cache, or one made by the call
    mla_var6_plus       the window of the newest tokens, the older ones latent
    mla_var6_plus_v5    the same with a window in 8 bits
    mla_var6_plus_v6    the shared prefix, the others latent

The window is a ring that is read in the order of its slots. Tokens that it lacks after a rollback
(positions before `window_start`) are attended in latent form with the older ones. All queries have
to see those, so a call decompresses the missing tokens that only some queries see.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_var3.attention.backends.latent import project_heads
from mla_var3.attention.cache.copies import fill_ring
from mla_var3.attention.cache.index import capturing
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.request.checks import kernel_ready
from mla_var3.attention.request.shape import CallShape, refusal_of
from mla_var3.attention.request.task import AttentionTask
from mla_var3.op.mla.cache_formats import FORMATS
from mla_var3.op.mla.inputs import MlaInputs, decompress_all, decompress_newest, project_queries
from mla_var3.op.mla.window.formats import FP8
from mla_var3.runtime.stage import Stage

Operands = tuple[Tensor | None, ...]
SMALL_PAGE_STEP = 16
"""Pages that cuTile's latent kernels take are multiples of this (`latent_plan.PAGE_STEP`)."""
SIZES = ("b", "s", "t", "h", "d", "p", "k", "causal")
"""Fields that every plan has and a call decides."""


def plan_of_operands(plan: Any, shape: CallShape, operands: Operands) -> Stage:
    """The stage of a plan that takes its operands one by one."""
    stage: Stage = plan.plan(*operands)
    return stage


@dataclass(frozen=True)
class Service:
    """How a plan serves calls.

    Attributes:
        operands: the tensors that the stage of a call reads, from its task, shape and plan.
        refusal: why calls of a shape cannot be served, beside what no plan serves; None if they
            can.
        fields: fields of the plan that a shape decides beside dtype and scale.
        build: makes the stage of a plan on the operands of a call.
        latent: whether the output is latent.
        runs_on_cpu: whether it takes CPU tensors, as cuTile does; other plans are built once.
        any_queries: whether it takes packed queries, trees and sliding windows.
        cache_formats: 8-bit formats of the cache that it reads.
        any_v: whether values may be wider or narrower than d.
        window_dtype: form of the window that it reads, as in `CallShape`.
        reads_window: whether it reads the window at all, if there is one.
    """

    operands: Callable[[AttentionTask, CallShape, Any], Operands]
    refusal: Callable[[CallShape], str | None]
    fields: Callable[[CallShape], dict[str, Any]]
    build: Callable[[Any, CallShape, Operands], Stage] = plan_of_operands
    latent: bool = False
    runs_on_cpu: bool = True
    any_queries: bool = False
    any_v: bool = False
    window_dtype: str | None = None
    reads_window: bool = False
    cache_formats: tuple[str, ...] = ()

    def refused(self, shape: CallShape) -> str | None:
        """Why calls of a shape cannot be served: by the form of their window, or otherwise."""
        if self.reads_window and shape.window and shape.window_dtype != self.window_dtype:
            kinds = {None: "16 bits", FP8.name: "8 bits"}
            held, read = kinds[shape.window_dtype], kinds[self.window_dtype]
            return f"a window in {held}; it reads one in {read}"
        return self.refusal(shape)

    def run(self, key: Hashable, operands: Operands, build: Callable[[], Stage]) -> list[Tensor]:
        """Launch the stage of a key, built now or for earlier operands; returns its outputs."""
        if self.runs_on_cpu:
            stage = build()
            stage.launch()
            return stage.output_tensors
        from mla_var3.kernel.cute_python.mla.hopper.stage_call import run_stage

        return run_stage(key, operands, build)


def sizes_of(shape: CallShape, **more: Any) -> dict[str, Any]:
    """The sizes of a shape as fields of a plan, and more fields."""
    return {name: getattr(shape, name) for name in SIZES} | more


def needs_q_nope(shape: CallShape) -> str | None:
    """Why kernels that read decompressed tokens refuse a call; None if they do not."""
    return "queries in the latent space: it needs q_nope" if shape.latent_only else None


# --- cuTile ---------------------------------------------------------------------------------------


def _page_refusal(shape: CallShape, step: int) -> str | None:
    if shape.page_size is not None and shape.page_size % step:
        return f"pages of {shape.page_size} tokens; it takes multiples of {step}"
    return None


def _dense_decompressed(shape: CallShape) -> str | None:
    return needs_q_nope(shape) or ("a paged cache" if shape.page_size is not None else None)


def _latent_fields(shape: CallShape) -> dict[str, Any]:
    page, window = shape.page_size or 0, shape.sliding_window or 0
    return sizes_of(shape, page=page, sliding_window=window, cache_dtype=shape.cache_dtype)


def _latent_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    q_latent = task.q if task.w_uk is None else project_heads(task.q, task.w_uk)
    latent, rope, table = _latent_rows(task.cache, 0, shape.t)
    masks = (None if x is None else kernel_ready(x) for x in (task.cu_seqlens_q, task.tree))
    rows = kernel_ready(q_latent), kernel_ready(task.q_rope), latent, rope
    scales = _cache_scales(task.cache, shape.t)
    return *rows, kernel_ready(task.cache.lengths), table, *masks, scales


def _cache_scales(cache: CacheView, t: int) -> Tensor | None:
    if cache.scales is None:
        return None
    if cache.scales.dim() == 1:
        return kernel_ready(cache.scales)
    return cache.scales if cache.block_table is not None else cache.scales[:, :t]


def _mixed_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    c_kv, k_rope = task.cache.latent[:, : shape.t], task.cache.rope[:, : shape.t]
    q_nope, q_rope = kernel_ready(task.q), kernel_ready(task.q_rope)
    raw = MlaInputs(q_nope, q_rope, c_kv, k_rope, task.w_uk, task.w_uv, task.cache.lengths)
    window = _straight_window(task, plan.n) if shape.window else decompress_newest(raw, plan.n)
    q_latent = project_queries(q_nope, task.w_uk)
    weights, lengths = kernel_ready(task.w_uv), kernel_ready(task.cache.lengths)
    return q_nope, q_latent, q_rope, c_kv, k_rope, *window, weights, lengths


def complete_window(task: AttentionTask, newest: int, most: int) -> None:
    """Decompress tokens that the window lacks after a rollback, in place.

    It has to hold the `newest` tokens of each request, of which at most `most` may be missing.
    """
    cache = task.cache
    # A CUDA graph may be replayed after tokens were dropped.
    if cache.ring_whole and not capturing(cache.lengths):
        return
    assert task.w_uk is not None and task.w_uv is not None
    fill_ring(cache, task.w_uk, task.w_uv, (cache.lengths.long() - newest).clamp(min=0), most)


def _straight_window(task: AttentionTask, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The window in the order that the kernel reads: slot j at position max(len - n, 0) + j.

    Slots beyond the length hold NaN, which no kernel reads.
    """
    cache = task.cache
    assert cache.k_new is not None and cache.v_new is not None
    complete_window(task, n, n)
    lengths = cache.lengths.long()[:, None]
    positions = (lengths - n).clamp(min=0) + torch.arange(n, device=lengths.device)  # [b, n]
    held = (positions >= cache.ring_start()[:, None]) & (positions < lengths)
    slots = (positions % cache.window)[:, None, :, None].expand(-1, task.h, -1, task.q.shape[-1])
    gone = ~held[:, None, :, None]
    nan = float("nan")
    k_new = cache.k_new.gather(2, slots).masked_fill_(gone, nan)
    v_new = cache.v_new.gather(2, slots).masked_fill_(gone, nan)
    _, rope = cache.rows(positions)
    return k_new, v_new, rope.masked_fill(~held[:, :, None], nan)


# --- CuTe DSL: decompressed tokens in place -------------------------------------------------------


def _refusal(shape: CallShape) -> str | None:
    return needs_q_nope(shape) or _page_refusal(shape, PAGE_STEP)


def _window_refusal(shape: CallShape) -> str | None:
    reasons = {
        "a cache without a window of decompressed tokens": not shape.window,
        f"a window of {shape.window} slots; it takes multiples of {PAGE_STEP}": (
            shape.window % PAGE_STEP
        ),
        f"{shape.s} queries over a window of {shape.window} slots, which has to hold them all": (
            shape.causal and shape.s > shape.window
        ),
        "a window as long as the cache beside a shared prefix, which it does not hold": (
            shape.prefix and shape.window >= shape.t
        ),
    }
    return _refusal(shape) or refusal_of(reasons)


def _prefix_refusal(shape: CallShape) -> str | None:
    if not shape.prefix:
        return "a cache without a decompressed shared prefix"
    if shape.page_size is not None and shape.prefix % shape.page_size:
        return f"a prefix of {shape.prefix} tokens that ends inside of a page"
    return _refusal(shape)


def _latent_rows(cache: CacheView, first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Latent rows, rope keys and block table of the slots from `first` to `last`."""
    table, page = cache.block_table, cache.page_size
    if table is None or page is None:
        return cache.latent[:, first:last], cache.rope[:, first:last], None
    table = table[:, first // page :]
    return cache.latent, cache.rope, table if table.stride(-1) == 1 else table.contiguous()


def _full_copy_operands(task: AttentionTask, shape: CallShape, plan: Any) -> Operands:
    assert task.w_uk is not None and task.w_uv is not None
    cache, t = task.cache, plan.t
    copy = cache.full_copy()
    if copy is None:
        page = cache.page_size or 1
        latent, rope = (rows[:, :t] for rows in cache.tile(0, -(-t // page) * page))
        keys, values = decompress_all(latent, task.w_uk, task.w_uv)
    else:
        keys, values = (part[:, :, :t] for part in copy)
        rope = (cache.rope if cache.block_table is None else cache.ring_rope())[:, :t]
    queries = kernel_ready(task.q), kernel_ready(task.q_rope)
    return *queries, keys, values, rope, kernel_ready(cache.lengths)


def _window_fields(shape: CallShape) -> dict[str, Any]:
    # A bound on the lengths does not make a window shorter.
    return sizes_of(shape, t=max(shape.t, shape.window), n=shape.window)


class MixOperands(NamedTuple):
    """What the plan of a mix reads: decompressed tokens, and the latent ones if there are any."""

    q_nope: Tensor
    q_rope: Tensor
    keys: Tensor | None
    values: Tensor | None
    rope: Tensor | None
    lengths: Tensor
    starts: Tensor | None
    w_uv: Tensor
    q_latent: Tensor | None = None
    latent: Tensor | None = None
    latent_rope: Tensor | None = None
    block_table: Tensor | None = None
    latent_lengths: Tensor | None = None
    scales: Tensor | None = None

    def stage(self, plan: Any, shape: CallShape, *, shared: bool) -> Stage:
        """The stage of a plan on these operands.

        The decompressed tokens are a shared prefix, or all queries see all latent tokens.
        """
        from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands
        from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens

        given: Any = self  # the plan checks that they are there
        keys, values, rope = given.keys, given.values, given.rope
        if shared:
            keys, values, rope = keys[None], values[None], rope[None]
        decompressed = DecompressedOperands(
            self.q_nope, self.q_rope, keys, values, rope, self.lengths, self.scales, self.starts
        )
        tokens = None
        if self.q_latent is not None:
            tokens = LatentTokens(
                self.q_latent, self.q_rope, given.latent, given.latent_rope, given.latent_lengths,
                self.block_table, seen_by_all=not shared,
            )  # fmt: skip
        stage: Stage = plan.plan_parts(tokens, decompressed, self.w_uv, shape.page_size or 0)
        return stage


def _window_operands(task: AttentionTask, shape: CallShape, plan: Any) -> MixOperands:
    cache = task.cache
    assert task.w_uv is not None
    if plan.n >= plan.t:  # no latent kernel: the window has to hold every token
        complete_window(task, plan.n, cache.window)
    elif task.causal:
        # The latent kernel shows its tokens to every query, so the window has to hold all that
        # only some queries see.
        complete_window(task, shape.s - 1, shape.s - 1)
    lengths, starts = kernel_ready(cache.lengths), kernel_ready(cache.ring_start())
    operands = MixOperands(
        kernel_ready(task.q), kernel_ready(task.q_rope), cache.k_new, cache.v_new,
        cache.ring_rope(), lengths, starts, kernel_ready(task.w_uv), scales=cache.window_scales,
    )  # fmt: skip
    if plan.n == plan.t:
        return operands
    # A call may look at fewer tokens than the cache has, and at none of the window's.
    return _with_latent(operands, task, 0, plan.t, torch.minimum(starts, lengths))


def _with_latent(
    operands: MixOperands, task: AttentionTask, first: int, last: int, lengths: Tensor
) -> MixOperands:
    """The operands with the latent tokens in the slots from `first` to `last`."""
    assert task.w_uk is not None
    latent, rope, table = _latent_rows(task.cache, first, last)
    q_latent = project_heads(task.q, task.w_uk)
    return operands._replace(
        q_latent=q_latent, latent=latent, latent_rope=rope, block_table=table,
        latent_lengths=lengths,
    )  # fmt: skip


def _prefix_operands(task: AttentionTask, shape: CallShape, plan: Any) -> MixOperands:
    cache = task.cache
    assert task.w_uv is not None
    lengths = kernel_ready(cache.lengths)
    operands = MixOperands(
        kernel_ready(task.q), kernel_ready(task.q_rope), cache.k_prefix, cache.v_prefix,
        cache.prefix_rope(), lengths, None, kernel_ready(task.w_uv),
    )  # fmt: skip
    if plan.prefix == plan.t:
        return operands
    own = (lengths - plan.prefix).clamp_(min=0)
    return _with_latent(operands, task, plan.prefix, plan.t, own)


def _mix_stage(plan: Any, shape: CallShape, operands: Operands, *, shared: bool) -> Stage:
    return MixOperands(*operands).stage(plan, shape, shared=shared)  # type: ignore[arg-type]


_LATENT = Service(
    _latent_operands, partial(_page_refusal, step=SMALL_PAGE_STEP), _latent_fields, latent=True,
    any_queries=True, cache_formats=tuple(FORMATS),
)  # fmt: skip

CUTILE_SERVICES: dict[str, Service] = {
    "flash_mla": _LATENT,
    "flash_mla_split_kv": _LATENT,
    "flash_attention": Service(_full_copy_operands, _dense_decompressed, sizes_of),
    "mla_var6_plus": Service(
        _mixed_operands,
        _dense_decompressed,
        lambda call: sizes_of(call, **({"n": min(call.window, call.t)} if call.window else {})),
        reads_window=True,
    ),
}
"""By design: all versions of a design take the same operands."""

_cute_service = partial(Service, runs_on_cpu=False)
_WINDOW = _window_operands, _window_refusal, _window_fields, partial(_mix_stage, shared=False)
CUTE_SERVICES: dict[str, Service] = {
    "flash_attention": _cute_service(
        _full_copy_operands, needs_q_nope, lambda call: sizes_of(call, v=call.v), any_v=True
    ),
    "mla_var6_plus": _cute_service(*_WINDOW, reads_window=True),
    "mla_var6_plus_v5": _cute_service(*_WINDOW, reads_window=True, window_dtype=FP8.name),
    "mla_var6_plus_v6": _cute_service(
        _prefix_operands,
        _prefix_refusal,
        lambda call: sizes_of(call, t=max(call.t, call.prefix), prefix=call.prefix),
        partial(_mix_stage, shared=True),
    ),
}
"""By version: each reads other parts of a cache."""
