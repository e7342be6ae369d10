"""Forms of calls and what is kept for them.

The form of a call is everything that its checks and the choice of a kernel look at: its plain
values, and the types, shapes, strides, dtypes and devices of its tensors. A call is taken apart
into `values`, a tuple that can be hashed and says which tensors there are, and `tensors`. What is
kept is found in two steps: for its values the few forms used last, by a check that compares all
tensors at once; else among all forms, by a key.
"""

from __future__ import annotations

from typing import Any

import torch

from mla_var3.runtime.torch_fast import LayoutCheck, layout_check

FORMS_KEPT = 4096
"""Above this the forms are forgotten, all at once; a serving engine has a few per batch size."""
RECENT = 8
"""Forms of the same values that are found by their check."""

Values = tuple[Any, ...]
Tensors = tuple[Any, ...]
Call = tuple[Values, Tensors]
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""

_forms: dict[Values, tuple[LayoutCheck | None, Any]] = {}
_recent: dict[Values, tuple[tuple[LayoutCheck, Any], ...]] = {}


def find_form(call: Call | None) -> Any:
    """What is kept for the form of a call; None for nothing."""
    if call is None:
        return None
    values, tensors = call
    try:
        recent = _recent[values]
    except KeyError:
        return _find_by_key(values, tensors)
    except TypeError:  # a value without a hash, such as a list of lengths
        return None
    check, form = recent[0]
    if check(*tensors):
        return form
    for check, form in recent[1:]:
        if check(*tensors):
            _use(values, check, form)
            return form
    return _find_by_key(values, tensors)


def store_form(call: Call | None, form: Any) -> None:
    """Keep something for the form of a call."""
    key = None if call is None else _key(*call)
    if call is None or key is None:
        return
    try:
        known = key in _forms
    except TypeError:  # a value without a hash
        return
    if not known and len(_forms) >= FORMS_KEPT:
        forget_forms()
    _keep(key, call, form)


def forget_forms() -> None:
    """Forget all forms, for when other kernels may be chosen than before."""
    _forms.clear()
    _recent.clear()


def _find_by_key(values: Values, tensors: Tensors) -> Any:
    key = _key(values, tensors)
    found = None if key is None else _forms.get(key)
    if key is None or found is None:
        return None
    check, form = found
    if check is not None and check(*tensors):
        _use(values, check, form)
    else:  # made under another state of torch
        _keep(key, (values, tensors), form)
    return form


def _keep(key: Values, call: Call, form: Any) -> None:
    values, tensors = call
    check = layout_check(tensors)
    _forms[key] = check, form
    if check is not None:
        _use(values, check, form)


def _use(values: Values, check: LayoutCheck, form: Any) -> None:
    """Put a form before the others of its values."""
    others = (known for known in _recent.get(values, ()) if known[1] is not form)
    _recent[values] = ((check, form), *others)[:RECENT]


def _key(values: Values, tensors: Tensors) -> Values | None:
    """The form of a call as one tuple; None for one that has no form."""
    key = list(values)
    for tensor in tensors:
        # A subclass may stand for something else than memory.
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return None
        key += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    return tuple(key)
