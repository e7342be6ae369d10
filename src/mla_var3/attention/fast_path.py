"""Repeated calls of one form: the short way to a launch.

The form of a call is everything that its checks and the choice of a kernel look at: shapes,
strides, dtypes and devices of the tensors, and the values of the other arguments. The first call of
a form goes the whole way. Where it ended in a kernel that took every tensor as it is, the launch is
kept by the form, and the next call of that form allocates its outputs, writes addresses and
launches. Whatever is not known goes the whole way again: another form, an address that is not
aligned, a capture of a CUDA graph, another current device.

Checks of values on the device (`debug`) and traced programs never come here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.absorbed import Launch
from mla_var3.attention.cache import LatentCache
from mla_var3.attention.task import AttentionTask
from mla_var3.attention.view import CacheView

FORMS_KEPT = 4096
"""Above this the forms are forgotten, all at once; a serving engine has a few per batch size."""

Key = tuple[Any, ...]
Result = tuple[torch.Tensor, torch.Tensor]
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides: `torch.empty_strided` has less to find out than `torch.empty`."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """A form of call in the latent space, with its launch.

    Attributes:
        launch: launches the kernel.
        outputs: shape and strides of the latent output.
        sums: shape and strides of the log-sum-exp.
        dtype, device: of the output.
        lengths: those of a pair of tensors, where every slot is used; None for other caches.
    """

    launch: Launch
    outputs: Layout
    sums: Layout
    dtype: torch.dtype
    device: torch.device
    lengths: torch.Tensor | None

    def attend(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        cache: Any,
        options: Mapping[str, Any],
    ) -> Result | None:
        """Output and log-sum-exp; None where this call has to go the whole way."""
        return self.attend_at(
            q_latent.data_ptr(),
            q_rope.data_ptr(),
            *_cache_addresses(cache, options, self.lengths),
            _address(options.get("cu_seqlens_q")),
            _address(options.get("tree_mask")),
            options.get("out"),
        )

    def attend_at(
        self,
        q_latent: int,
        q_rope: int,
        latent: int,
        rope: int,
        table: int,
        lengths: int,
        bounds: int,
        tree: int,
        out: torch.Tensor | None = None,
    ) -> Result | None:
        """The same by addresses."""
        launch = self.launch
        if not launch.ready():
            return None
        if out is None:
            out = torch.empty_strided(*self.outputs, dtype=self.dtype, device=self.device)
        lse = torch.empty_strided(*self.sums, dtype=torch.float32, device=self.device)
        done = launch(
            q_latent, q_rope, latent, rope, table, lengths, bounds, tree,
            out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return (out, lse) if done else None


@dataclass(frozen=True, slots=True)
class FullForm:
    """A form of call with the projections around the latent space.

    Attributes:
        latent: the part in the latent space.
        queries: shape and strides of `q_nope` by head, `[h, count, d]`.
        latents: those of latent queries and outputs by head.
        by_head: those of the output by head.
        outputs: those of the output.
    """

    latent: LatentForm
    queries: Layout
    latents: Layout
    by_head: Layout
    outputs: Layout

    def attend(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cache: Any,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        options: Mapping[str, Any],
    ) -> Result | None:
        """Output and log-sum-exp; None where this call has to go the whole way."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._attend(q_nope, q_rope, cache, w_uk, w_uv, options)
        return self._attend(q_nope, q_rope, cache, w_uk, w_uv, options)

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cache: Any,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        options: Mapping[str, Any],
    ) -> Result | None:
        form = self.latent
        launch, dtype, device = form.launch, form.dtype, form.device
        if not launch.ready():
            return None
        q_latent = torch.empty_strided(*self.latents, dtype=dtype, device=device)
        torch.bmm(q_nope.as_strided(*self.queries), w_uk, out=q_latent)
        o_latent = torch.empty_strided(*self.latents, dtype=dtype, device=device)
        lse = torch.empty_strided(*form.sums, dtype=torch.float32, device=device)
        done = launch(
            q_latent.data_ptr(),
            q_rope.data_ptr(),
            *_cache_addresses(cache, options, form.lengths),
            _address(options.get("cu_seqlens_q")),
            _address(options.get("tree_mask")),
            o_latent.data_ptr(),
            lse.data_ptr(),
        )
        if not done:
            return None
        out = options.get("out")
        if out is None:
            out = torch.empty_strided(*self.outputs, dtype=dtype, device=device)
        torch.bmm(o_latent, w_uv, out=out.as_strided(*self.by_head))
        return out, lse


_forms: dict[Key, Any] = {}


def call_form(*arguments: Any) -> Key | None:
    """The form of a call by its arguments, tensors and others; None for one that has no form."""
    form: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if argument is None:
            form.append(None)
        elif kind is torch.Tensor or kind is torch.nn.Parameter:
            form += (argument.shape, argument.stride(), argument.dtype, argument.device)
        elif isinstance(argument, torch.Tensor):
            return None  # a subclass may stand for something else than memory
        else:
            form += (kind, argument)  # equal numbers of different types are different
    return tuple(form)


def latent_key(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    cache: Any,
    d: int,
    kernel: str,
    options: Mapping[str, Any],
) -> Key | None:
    """The form of a call of `mla_latent_attention`; None for one that has no form."""
    parts = _cache_parts(cache)
    return call_form("latent", q_latent, q_rope, *parts[:4], d, kernel, *options, *options.values())


def full_key(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    cache: Any,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    kernel: str,
    options: Mapping[str, Any],
) -> Key | None:
    """The form of a call of `mla_attention`; None for one that has no form."""
    parts = _cache_parts(cache)
    return call_form(
        "full", q_nope, q_rope, w_uk, w_uv, kernel, *parts, *options, *options.values()
    )


def known_form(key: Key | None) -> Any:
    """What is kept for a form: a `LatentForm` or `FullForm` by the key's kind; None for nothing."""
    try:
        return None if key is None else _forms.get(key)
    except TypeError:  # a value without a hash, such as a list of lengths
        return None


def keep_form(
    key: Key | None,
    task: AttentionTask,
    launch: Launch | None,
    cache: Any,
    options: Mapping[str, Any],
) -> None:
    """Keep the launch of a call for the next ones of its form, where they can use it.

    Args:
        key: the form.
        task: the call, checked.
        launch: its launch; None when it has none.
        cache: the cache as the caller gave it.
        options: the optional arguments as the caller gave them.
    """
    if key is None or launch is None or not _as_given(task, options):
        return
    out = task.out
    if out is not None and not out.is_contiguous():
        return  # it is written through a copy
    made = _is_pair(cache) and options.get("lengths") is None
    form = _form_of(task, launch, task.cache.lengths if made else None)
    if form is not None:
        store_form(key, form)


def store_form(key: Key | None, form: Any) -> None:
    """Keep something for a form of call."""
    if key is None:
        return
    if len(_forms) >= FORMS_KEPT:
        _forms.clear()
    with suppress(TypeError):  # a value without a hash, such as a list of lengths
        _forms[key] = form


def forget_forms() -> None:
    """Forget all forms, for when other kernels may be chosen than before."""
    _forms.clear()


def _form_of(
    task: AttentionTask, launch: Launch, lengths: torch.Tensor | None
) -> LatentForm | FullForm | None:
    rows, d, h = tuple(task.q.shape[:-1]), task.q.shape[-1], task.h
    k, width = task.cache.latent.shape[-1], task.width
    latent = LatentForm(
        launch, _dense((*rows, k)), _dense(rows), task.q.dtype, task.q.device, lengths
    )
    if task.w_uk is None:
        return latent
    if not task.q.is_contiguous():
        return None
    count = math.prod(rows[:-1])
    queries, latents, by_head = (
        ((h, count, columns), (columns, h * columns, 1)) for columns in (d, k, width)
    )
    return FullForm(latent, queries, latents, by_head, _dense((*rows, width)))


def _dense(shape: tuple[int, ...]) -> Layout:
    """A contiguous layout."""
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return shape, tuple(strides)


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


def _is_pair(cache: Any) -> bool:
    return isinstance(cache, (tuple, list))


def _cache_parts(cache: Any) -> tuple[Any, ...]:
    """The tensors of a cache that a call may use, decompressed ones behind the other four."""
    if _is_pair(cache):
        return (*cache, "pair", None)
    view = cache.view() if isinstance(cache, LatentCache) else cache
    if not isinstance(view, CacheView):
        return (cache,)
    parts = view.latent, view.rope, view.lengths, view.block_table
    if view.k_new is None and view.k_prefix is None:
        return parts
    return *parts, view.k_new, view.v_new, view.window_start, view.k_prefix, view.v_prefix


def _cache_addresses(
    cache: Any, options: Mapping[str, Any], full_lengths: torch.Tensor | None
) -> tuple[int, int, int, int]:
    """Addresses of latent rows, rope rows, block table and lengths."""
    lengths = options.get("lengths")
    if _is_pair(cache):
        latent, rope = cache
        table, own = None, full_lengths
    else:
        view = cache.view() if isinstance(cache, LatentCache) else cache
        latent, rope, table, own = view.latent, view.rope, view.block_table, view.lengths
    if lengths is None:
        lengths = own
    return latent.data_ptr(), rope.data_ptr(), _address(table), _address(lengths)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
