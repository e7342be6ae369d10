"""The public names, and modes of torch around calls, which must not change their results."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3 import attention
from mla_var3.attention import LatentCache, PrefixGroups, find_shared_prefixes, mla_attention
from mla_var3.attention.prefix.decompressed import decompress_prefixes
from mla_var3.errors import InvalidArgumentError

from .attention_support import filled_cache, make_model, normal

P = 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 64])
def test_autocast_changes_no_precision(dtype, window):
    """It would compute products in bfloat16, and float16 on the CPU not at all."""
    wanted = results(dtype, window, nullcontext())
    found = results(dtype, window, torch.autocast("cpu", dtype=torch.bfloat16))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def results(
    dtype: torch.dtype, window: int, mode: AbstractContextManager[Any]
) -> list[torch.Tensor]:
    """Of a call in a mode, and what the cache holds after some changes in it."""
    generator = torch.Generator().manual_seed(3)
    model = make_model(generator, dtype=dtype)
    weights: dict[str, Any] = {"w_uk": model.w_uk, "w_uv": model.w_uv}
    h, d, k = model.sizes
    cache, _ = filled_cache(generator, [100, 9], model, dtype=dtype, window=window)
    rows = normal(generator, 2, 2, k + P, dtype=dtype)
    q = [normal(generator, 2, 3, h, width, dtype=dtype) for width in (d, P)]
    with mode:
        cache.truncate([3, 1], **weights)
        cache.fork(0, into=[1])
        cache.append(rows[..., :k], rows[..., k:], **weights)
        found = mla_attention(*q, cache, **weights, return_lse=True)
    rings = [] if cache.window is None else [cache.window.k_new, cache.window.v_new]
    return [*found, cache.buffer, *rings]


@pytest.mark.parametrize("window", [0, 64])
def test_a_cache_of_inference_mode_is_used_outside(window, generator):
    model = make_model(generator)
    weights: dict[str, Any] = {"w_uk": model.w_uk, "w_uv": model.w_uv}
    with torch.inference_mode():
        cache, _ = filled_cache(generator, [70, 9], model, page_size=64, window=window)
    more = normal(generator, 2, 2, model.sizes[2] + P, dtype=torch.float32)
    cache.append(more[..., :-P], more[..., -P:], **weights)
    cache.truncate([0, 1], **weights)
    cache.evict([0])
    assert cache.lengths.tolist() == [0, 10]
    first = cache.view().tile(0, 64)[0][1, 9]
    assert torch.equal(first, more[1, 0, :-P])


def test_decompressed_prefixes_keep_no_graph(generator):
    model = make_model(generator)
    cache, _ = filled_cache(generator, [100, 100], model, page_size=64)
    cache.fork(0, into=[1])
    groups = PrefixGroups(torch.tensor([[0, 0]]), torch.tensor([[64]]))
    w_uk, w_uv = (torch.nn.Parameter(weight) for weight in (model.w_uk, model.w_uv))
    (copy,) = decompress_prefixes(groups, cache, w_uk, w_uv).copies
    assert not copy.keys.requires_grad and not copy.values.requires_grad


def test_lists_stay_on_the_host_whatever_the_default_device(generator):
    """There they are checked, and a GPU by default would be waited for."""
    model = make_model(generator)
    h, d, k = model.sizes
    q = [normal(generator, 2, 1, h, width, dtype=torch.float32) for width in (d, P)]
    rows = [normal(generator, 2, 70, width, dtype=torch.float32) for width in (k, P)]
    with torch.device("meta"):
        cache = LatentCache.allocate(2, 128, k=k, p=P, dtype=torch.float32, page_size=64)
        cache.append(*rows, counts=[70, 5])
        cache.truncate([1, 0])
        cache.evict([1])
        cache.fork(0, into=[1])
        assert cache.lengths.tolist() == [69, 69]
        groups = find_shared_prefixes([[4, 9], [4, 1]], [100, 100])
        assert groups.prefix_of.tolist() == [[0, 0]] and groups.prefix_length.tolist() == [[64]]
        with pytest.raises(InvalidArgumentError, match=r"lengths\[1\]"):
            mla_attention(*q, cache, model.w_uk, model.w_uv, lengths=[5, 129])
        mla_attention(*q, cache, model.w_uk, model.w_uv, lengths=[5, 7])


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
