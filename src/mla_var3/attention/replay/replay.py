"""Repeated calls of one form: the short way to a launch.

The first call of a form (see `forms`) goes the whole way. Where it ended in a kernel that took
every tensor as it is, the launch is kept by the form, and the next call of that form allocates its
outputs, writes addresses and launches. Whatever is not known goes the whole way again: another
form, an address that is not aligned, a capture of a CUDA graph, another current device.

Checks of values on the device (`debug`) and traced programs never come here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from mla_var3.attention.backends.latent import Launch
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.replay.key import Call, Layout, Tensors, Values, store_form
from mla_var3.attention.replay.launch_form import LaunchForm
from mla_var3.attention.replay.pointers import address_reader
from mla_var3.attention.replay.scratch import add_sums, aligned, shared_memory
from mla_var3.attention.replay.whole_form import WholeForm
from mla_var3.attention.request.task import AttentionTask
from mla_var3.runtime.torch_fast import tensor_maker, view_as, without_gradients

_SUM_BYTES = torch.float32.itemsize
_BEFORE_ROPE = 3
"""Tensors of a whole call before `q_rope`, none of which the launch reads."""
_CACHE = ("latent", "rope", "lengths", "block_table")
_DECOMPRESSED = tuple(part.name for part in fields(CacheView) if part.name not in _CACHE)
"""What a view may hold beside the cache itself."""


@dataclass(frozen=True, slots=True)
class FullForm:
    """A form of call with the projections around the latent space, as products of torch.

    For calls whose products are no kernels of the launch itself (see `whole_form`).

    Attributes:
        latent: the part in the latent space, with the latent queries in the place of the weights
            and of `q_nope`.
        queries: shape and strides of `q_nope` by head, `[h, count, d]`.
        latents: those of latent queries and outputs by head.
        by_head: those of the output by head.
        outputs: those of the output.
    """

    latent: LaunchForm
    queries: Layout
    latents: Layout
    by_head: Layout
    outputs: Layout
    _own: threading.local = field(default_factory=threading.local, compare=False)

    def attend(
        self, tensors: Tensors, with_sums: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Output and, if asked for, log-sum-exp; None where this call has to go the whole way."""
        if torch.is_inference_mode_enabled():
            return self._attend(tensors, with_sums, True)
        with without_gradients():
            return self._attend(tensors, with_sums, False)

    def _attend(
        self, tensors: Tensors, with_sums: bool, inference: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        form = self.latent
        stream, empty, out_at = form.launch.stream(), form.empty, form.out_at
        if stream is None:
            return None
        try:
            between = self._own.between[stream, inference]
        except (AttributeError, KeyError):
            between = self._between(stream, inference)
        q_latent, o_latent, sums = between
        launch, stock, _, _ = form.prepared(stream, inference)
        w_uk, w_uv, q_nope = tensors[:_BEFORE_ROPE]
        torch.bmm(view_as(q_nope, *self.queries, 0), w_uk, out=q_latent)
        if with_sums:
            sums = stock.pop() if stock else add_sums(stock, form.sums, empty)
        read = (q_latent, *tensors[_BEFORE_ROPE:])
        if not launch(form.addresses(read, o_latent.data_ptr(), sums.data_ptr())):
            return None
        out = empty(*self.outputs, form.dtype) if out_at is None else tensors[out_at]
        torch.bmm(o_latent, w_uv, out=view_as(out, *self.by_head, 0))
        return out, sums if with_sums else None

    def _between(
        self, stream: int, inference: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latent queries, latent outputs by head, and log-sum-exp that no caller asked for.

        Kept where they are small, for each mode.
        """
        form, (shape, strides) = self.latent, self.latents
        count, sums = math.prod(shape), math.prod(form.sums[0])
        start = aligned(sums * _SUM_BYTES)  # behind the sums
        memory = shared_memory(form.device, 2 * count * form.dtype.itemsize + start)
        if memory is None:
            first, second = (form.empty(shape, strides, form.dtype) for _ in range(2))
            return first, second, form.empty(*form.sums, torch.float32)
        rows = memory[start:].view(form.dtype)[: 2 * count].view(2, count)
        first, second = (part.as_strided(shape, strides) for part in rows)
        found = first, second, memory[: sums * _SUM_BYTES].view(torch.float32)
        self._own.__dict__.setdefault("between", {})[stream, inference] = found
        return found


def latent_parts(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: Any,
    d: int,
    kernel: str,
    options: Mapping[str, Any],
) -> Call | None:
    """A call of `mla_latent_attention`, taken apart; None for one that has no form."""
    view = cache if type(cache) is CacheView else _view_of(cache)
    if view is None:
        call = _pair_call(cache, ("latent", d.__class__, d, kernel), (q_latent, q_rope))
    elif view.block_table is None:
        call = (
            ("latent", d.__class__, d, kernel),
            (q_latent, q_rope, view.latent, view.rope, view.lengths),
        )
    else:
        call = (
            ("latent", d.__class__, d, kernel, "paged"),
            (q_latent, q_rope, view.latent, view.rope, view.block_table, view.lengths),
        )
    return _with_options(call, options, getattr(view, "lengths", None)) if options else call


def full_parts(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: Any,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kernel: str,
    options: Mapping[str, Any],
) -> Call | None:
    """A call of `mla_attention`, taken apart; None for one that has no form."""
    view = cache if type(cache) is CacheView else _view_of(cache)
    call: Call | None
    if view is None:
        call = _pair_call(cache, ("full", kernel), (w_uk, w_uv, q_nope, q_rope))
    elif view.block_table is None:
        call = (
            ("full", kernel),
            (w_uk, w_uv, q_nope, q_rope, view.latent, view.rope, view.lengths),
        )
    else:
        call = (
            ("full", kernel, "paged"),
            (w_uk, w_uv, q_nope, q_rope, view.latent, view.rope, view.block_table, view.lengths),
        )
    if call is not None and view is not None and _is_decompressed(view):
        parts = {name: getattr(view, name) for name in _DECOMPRESSED}
        present = {name: part for name, part in parts.items() if part is not None}
        call = (*call[0], *present), (*call[1], *present.values())
    return _with_options(call, options, getattr(view, "lengths", None)) if options else call


def keep_form(
    call: Call | None,
    task: AttentionTask,
    launch: Launch | None,
    cache: Any,
    options: Mapping[str, Any],
) -> None:
    """Keep the launch of a call for the next ones of its form, where they can use it.

    Args:
        call: the call, taken apart.
        task: the call, checked.
        launch: its launch; None when it has none.
        cache: the cache as the caller gave it.
        options: the optional arguments as the caller gave them.
    """
    if call is None or launch is None or not _as_given(task, options):
        return
    out = task.out
    if out is not None and not out.is_contiguous():
        return  # it is written through a copy
    if task.w_uk is not None and not task.q.is_contiguous():
        return
    store_form(call, _form_of(task, launch, cache, options))


def _form_of(
    task: AttentionTask, launch: Launch, cache: Any, options: Mapping[str, Any]
) -> LaunchForm | FullForm:
    names = _tensor_names(task, cache, options)
    out_at = names.index("out") if "out" in names else None
    kept = task.cache.lengths if "lengths" not in names else None
    rows, d, h = tuple(task.q.shape[:-1]), task.q.shape[-1], task.h
    k, width, device = task.cache.latent.shape[-1], task.width, task.q.device
    common: dict[str, Any] = {
        "launch": launch,
        "sums": _dense(rows),
        "dtype": task.q.dtype,
        "device": device,
        "empty": tensor_maker(device),
        "out_at": out_at,
    }
    if launch.between:
        return WholeForm(
            addresses=address_reader(names, kept), outputs=_dense((*rows, width)),
            between=math.prod(rows) * k, **common,
        )  # fmt: skip
    # Of a whole call the latent queries come first, in the place of three tensors.
    own = names if task.w_uk is None else ["q", *names[_BEFORE_ROPE:]]
    latent = LaunchForm(addresses=address_reader(own, kept), outputs=_dense((*rows, k)), **common)
    if task.w_uk is None:
        return latent
    count = math.prod(rows[:-1])
    queries, latents, by_head = (
        ((h, count, columns), (columns, h * columns, 1)) for columns in (d, k, width)
    )
    outputs = _dense((*rows, width))
    return FullForm(latent, queries, latents, by_head, outputs)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Shape and strides of a tensor."""
    return tuple(tensor.shape), tensor.stride()


def _dense(shape: tuple[int, ...]) -> Layout:
    """A contiguous layout."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return shape, tuple(strides)


def _tensor_names(task: AttentionTask, cache: Any, options: Mapping[str, Any]) -> list[str]:
    """Names of a call's tensors, in the order in which it is taken apart."""
    names = ["q", "q_rope"] if task.w_uk is None else ["w_uk", "w_uv", "q", "q_rope"]
    names += ["latent", "rope"]
    lengths = None
    if not isinstance(cache, (tuple, list)):
        view = cache.view() if isinstance(cache, LatentCache) else cache
        lengths = view.lengths
        names += ["lengths"] if view.block_table is None else ["block_table", "lengths"]
        if task.w_uk is not None:
            names += [name for name in _DECOMPRESSED if getattr(view, name) is not None]
    return names + [
        name
        for name, value in options.items()
        if isinstance(value, torch.Tensor) and value is not lengths
    ]


def _view_of(cache: Any) -> CacheView | None:
    """The view of a cache; None for what has none."""
    return cache.kept_view if isinstance(cache, LatentCache) else None


def _pair_call(cache: Any, values: Values, queries: Tensors) -> Call | None:
    """A call on a pair of tensors; None for what is no pair."""
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        return None
    return (*values, "pair"), (*queries, *cache)


def _with_options(
    call: Call | None, options: Mapping[str, Any], lengths: torch.Tensor | None
) -> Call | None:
    """A call with its options: their names, the types and values of plain ones, the tensors.

    Lengths that are those of the cache do not count twice, which no check of tensors would pass.
    """
    if call is None:
        return None
    values, tensors = call
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            if value is lengths:
                values = (*values, name, "of the cache")
            else:
                values, tensors = (*values, name), (*tensors, value)
        else:  # equal numbers of different types are different
            values = (*values, name, value.__class__, value)
    return values, tensors


def _is_decompressed(view: CacheView) -> bool:
    return view.k_new is not None or view.k_prefix is not None


def _as_given(task: AttentionTask, options: Mapping[str, Any]) -> bool:
    """Whether the checks passed the caller's own tensors on, not something made of them."""
    pairs = (
        (options.get("lengths"), task.cache.lengths),
        (options.get("cu_seqlens_q"), task.cu_seqlens_q),
        (options.get("tree_mask"), task.tree),
    )
    return all(
        given is None or (isinstance(given, torch.Tensor) and given.data_ptr() == taken.data_ptr())
        for given, taken in pairs
        if taken is not None
    )
