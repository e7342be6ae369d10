"""Call keys, and the replays that are kept by them.

A call key is everything that the checks and the choice of a kernel look at: the plain values of a
call, and the types, shapes, strides, dtypes and devices of its tensors. A call is taken apart into
`values`, a hashable tuple that also says which tensors there are, and `tensors`. A replay is found
in two steps: by its values and a check that compares all tensors at once, for the few replays used
last; otherwise by one key over everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.cute.torch_fast import LayoutCheck, layout_check

REPLAYS_KEPT = 4096
"""The oldest replay goes when there are more; an engine has a few per batch size."""
RECENT = 8
"""Replays of the same values that are found by their check."""

Values = tuple[Any, ...]
Tensors = tuple[Any, ...]
CallKey = tuple[Values, Tensors]
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


@dataclass(frozen=True, eq=False)
class CallKind:
    """A kind of call; compared by identity.

    Attributes:
        names: of the tensors that such a call always brings, in the order of its key. They are
            the names of the kernels' operands (`latent/operands.py`).
    """

    names: tuple[str, ...]


_LATENT, _WHOLE = ("q_latent", "q_rope"), ("w_uk", "w_uv", "q_nope", "q_rope")
_PAIR, _DENSE = ("latent", "rope"), ("latent", "rope", "lengths")
_PAGED = ("latent", "rope", "block_table", "lengths")
LATENT_PAIR, WHOLE_PAIR = CallKind(_LATENT + _PAIR), CallKind(_WHOLE + _PAIR)
LATENT_DENSE, WHOLE_DENSE = CallKind(_LATENT + _DENSE), CallKind(_WHOLE + _DENSE)
LATENT_PAGED, WHOLE_PAGED = CallKind(_LATENT + _PAGED), CallKind(_WHOLE + _PAGED)
_FURTHER = tuple(part.name for part in fields(CacheView) if part.name not in _PAGED)
"""What a view may hold beside the latent rows: decompressed tokens, scales."""


def latent_key(
    q_latent: Tensor, q_rope: Tensor, cache: Any, d: int, kernel: str, options: Mapping[str, Any]
) -> CallKey | None:
    """The key of a call of `mla_latent_attention`; None for one that cannot be replayed."""
    view = cache if type(cache) is CacheView else _view_of(cache)
    key: CallKey | None
    if view is None:
        key = _pair_key(cache, (LATENT_PAIR, d.__class__, d, kernel), (q_latent, q_rope))
    elif view.block_table is None:
        key = (
            (LATENT_DENSE, d.__class__, d, kernel),
            (q_latent, q_rope, view.latent, view.rope, view.lengths),
        )
    else:
        key = (
            (LATENT_PAGED, d.__class__, d, kernel),
            (q_latent, q_rope, view.latent, view.rope, view.block_table, view.lengths),
        )
    if key is not None and view is not None and view.scales is not None:
        key = (*key[0], "scales"), (*key[1], view.scales)
    return _with_options(key, options, getattr(view, "lengths", None)) if options else key


def whole_key(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Any,
    w_uk: Tensor,
    w_uv: Tensor,
    kernel: str,
    options: Mapping[str, Any],
) -> CallKey | None:
    """The key of a call of `mla_attention`; None for one that cannot be replayed."""
    view = cache if type(cache) is CacheView else _view_of(cache)
    key: CallKey | None
    if view is None:
        key = _pair_key(cache, (WHOLE_PAIR, kernel), (w_uk, w_uv, q_nope, q_rope))
    elif view.block_table is None:
        key = (
            (WHOLE_DENSE, kernel),
            (w_uk, w_uv, q_nope, q_rope, view.latent, view.rope, view.lengths),
        )
    else:
        key = (
            (WHOLE_PAGED, kernel),
            (w_uk, w_uv, q_nope, q_rope, view.latent, view.rope, view.block_table, view.lengths),
        )
    if key is not None and view is not None and _holds_more(view):
        present = _further_parts(view)
        key = (*key[0], *present), (*key[1], *present.values())
    return _with_options(key, options, getattr(view, "lengths", None)) if options else key


def tensor_names(key: CallKey, cache: Any, options: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of a key, in its order."""
    kind: CallKind = key[0][0]
    view = cache if type(cache) is CacheView else _view_of(cache)
    names = list(kind.names)
    if view is not None and "w_uk" in kind.names and _holds_more(view):
        names += _further_parts(view)
    elif view is not None and view.scales is not None:
        names.append("scales")
    lengths = getattr(view, "lengths", None)
    for name, value in options.items():
        if name == "prefix":
            names += value.tensors
        elif isinstance(value, Tensor) and value is not lengths:
            names.append(name)
    return names


def _view_of(cache: Any) -> CacheView | None:
    """The view of a cache; None for what has none."""
    return cache.kept_view if isinstance(cache, LatentCache) else None


def _pair_key(cache: Any, values: Values, queries: Tensors) -> CallKey | None:
    """The key of a call on a pair of tensors; None for what is no pair."""
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        return None
    return values, (*queries, *cache)


def _with_options(
    key: CallKey | None, options: Mapping[str, Any], lengths: Tensor | None
) -> CallKey | None:
    """A key with the options: their names, the types and values of plain ones, the tensors.

    Lengths that are those of the cache are not added again: no check accepts a tensor twice.
    """
    if key is None:
        return None
    values, tensors = key
    for name, value in options.items():
        if name == "prefix":
            values, tensors = (*values, name, *value.key), (*tensors, *value.tensors.values())
        elif isinstance(value, Tensor):
            if value is lengths:
                values = (*values, name, "of the cache")
            else:
                values, tensors = (*values, name), (*tensors, value)
        else:  # equal numbers of different types are different
            values = (*values, name, value.__class__, value)
    return values, tensors


def _holds_more(view: CacheView) -> bool:
    """Whether a view has any of `_FURTHER`: one alone is refused. By name, for speed."""
    return (
        view.k_new is not None or view.v_new is not None or view.window_start is not None
        or view.k_prefix is not None or view.v_prefix is not None
        or view.k_rope_new is not None or view.k_rope_prefix is not None
        or view.scales is not None or view.window_scales is not None
    )  # fmt: skip


def _further_parts(view: CacheView) -> dict[str, Tensor]:
    parts = {name: getattr(view, name) for name in _FURTHER}
    return {name: part for name, part in parts.items() if part is not None}


# Values by key: the values of the call, its check and its replay.
_replays = CALL_STATE.table(REPLAYS_KEPT)
_recent: dict[Values, tuple[tuple[LayoutCheck, Any], ...]] = {}
CALL_STATE.on_clear(_recent.clear)


def find_replay(key: CallKey | None) -> Any:
    """The replay of a call; None when there is none."""
    if key is None:
        return None
    values, tensors = key
    try:
        recent = _recent[values]
    except KeyError:
        return _find_by_key(values, tensors)
    except TypeError:  # a value without a hash, such as a list of lengths
        return None
    check, replay = recent[0]
    if check(*tensors):
        return replay
    for check, replay in recent[1:]:
        if check(*tensors):
            _use(values, check, replay)
            return replay
    return _find_by_key(values, tensors)


def store_replay(key: CallKey | None, replay: Any) -> None:
    """Keep a replay for the calls of a key; the oldest goes where there are too many."""
    full = None if key is None else _full_key(*key)
    if key is None or full is None:
        return
    try:
        hash(full)
    except TypeError:  # a value without a hash
        return
    _keep(full, key, replay)


def _find_by_key(values: Values, tensors: Tensors) -> Any:
    full = _full_key(values, tensors)
    found = None if full is None else _replays.get(full)
    if full is None or found is None:
        return None
    _, check, replay = found
    if check is not None and check(*tensors):
        _use(values, check, replay)
    else:  # made under another state of torch
        _keep(full, (values, tensors), replay)
    return replay


def _keep(full: Values, key: CallKey, replay: Any) -> None:
    values, tensors = key
    check = layout_check(tensors)
    for old_values, _, gone in _replays.keep(full, (values, check, replay)):
        left = tuple(known for known in _recent.get(old_values, ()) if known[1] is not gone)
        if left:
            _recent[old_values] = left
        else:
            _recent.pop(old_values, None)
    if check is not None:
        _use(values, check, replay)


def _use(values: Values, check: LayoutCheck, replay: Any) -> None:
    """Put a replay before the others of its values."""
    others = (known for known in _recent.get(values, ()) if known[1] is not replay)
    _recent[values] = ((check, replay), *others)[:RECENT]


def _full_key(values: Values, tensors: Tensors) -> Values | None:
    """The key as one tuple; None when a tensor is more than memory."""
    key = list(values)
    for tensor in tensors:
        # A subclass may stand for something else than memory.
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return None
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(key)
