"""The names that the package offers, and what using them leaves behind."""

import torch

import mla_var3
from mla_var3 import attention

from .attention_support import filled_cache, make_model, normal


def test_names_are_offered_and_listed():
    for name in ("LatentCache", "explain", "mla_attention", "mla_latent_attention"):
        assert getattr(mla_var3, name) is getattr(attention, name)
        assert name in dir(mla_var3)
    for name in attention.__all__:
        assert getattr(attention, name) is not None
        assert name in dir(attention)


def test_parameters_leave_no_gradients_behind(generator):
    model = make_model(generator)
    cache, _ = filled_cache(generator, [9, 4], model, window=3)
    for weight in (model.w_uk, model.w_uv):
        weight.requires_grad_()
    rows = normal(generator, 2, 1, 12, dtype=torch.float32).requires_grad_()
    cache.append(rows[..., :8], rows[..., 8:], w_uk=model.w_uk, w_uv=model.w_uv)
    cache.truncate([1, 0], w_uk=model.w_uk, w_uv=model.w_uv)
    assert not cache.buffer.requires_grad
    assert cache.window is not None and not cache.window.k_new.requires_grad
    q_nope, q_rope = (normal(generator, 2, 1, 2, w, dtype=torch.float32) for w in (6, 4))
    output = mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv)
    assert not output.requires_grad
