"""Repeated calls of one form: the short way gives the same, and lets nothing bad pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_var3.attention import fast_path
from mla_var3.attention.cache import LatentCache
from mla_var3.attention.call import _backend, mla_attention, mla_latent_attention
from mla_var3.attention.view import CacheView
from mla_var3.errors import InvalidArgumentError

from .attention_support import filled_cache, make_model, normal
from .repeat_support import KERNEL, RepeatableKernel, repeatable_kernel

B, S, H, D, P, K, T = 3, 4, 2, 16, 8, 32, 130
DTYPE = torch.float16
MODEL = make_model(torch.Generator().manual_seed(5), H, D, K, DTYPE)


@pytest.fixture
def kernel() -> Iterator[RepeatableKernel]:
    _backend.cache_clear()
    with repeatable_kernel() as made:
        yield made
    _backend.cache_clear()


Make = Callable[[torch.Generator], tuple[Any, dict[str, Any]]]


def pair(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return tuple(normal(generator, B, T, w, dtype=DTYPE) for w in (K, P)), {}


def pair_with_lengths(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return pair(generator)[0], {"lengths": torch.tensor([130, 5, 70], dtype=torch.int32)}


def cache_of(generator: torch.Generator, **options: Any) -> LatentCache:
    return filled_cache(generator, [100, 31, 9], MODEL, p=P, t=T, dtype=DTYPE, **options)[0]


def dense(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator), {}


def paged(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator, page_size=64), {"scale": 0.3}


def with_window(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    return cache_of(generator, window=16).view(), {"causal": False}


def tree(generator: torch.Generator) -> tuple[Any, dict[str, Any]]:
    mask = torch.rand(B, S, S, generator=generator) < 0.5
    return cache_of(generator).view(), {"tree_mask": mask | torch.eye(S, dtype=torch.bool)}


MAKES = [pair, pair_with_lengths, dense, paged, with_window, tree]


def queries(generator: torch.Generator, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = ((B, S, H, width), (B, S, H, P))
    first, second = (normal(generator, *shape, dtype=DTYPE) for shape in shapes)
    return first, second


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("make", MAKES)
def test_the_latent_call(make: Make, kernel: RepeatableKernel, generator: torch.Generator) -> None:
    for turn in range(3):
        cache, options = make(generator)
        q = queries(generator, K)
        found = mla_latent_attention(*q, cache, kernel=KERNEL, **options)
        assert (kernel.calls, kernel.repeats) == (1, turn)
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled", **options))


@pytest.mark.parametrize("give_out", [False, True])
@pytest.mark.parametrize("make", MAKES)
def test_the_whole_call(
    make: Make, give_out: bool, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    for turn in range(3):
        cache, options = make(generator)
        q = queries(generator, D)
        operands = (*q, cache, MODEL.w_uk, MODEL.w_uv)
        wanted = mla_attention(*operands, kernel="torch_tiled", return_lse=True, **options)
        if give_out:
            options["out"] = torch.full((B, S, H, D), torch.nan, dtype=DTYPE)
        found = mla_attention(*operands, kernel=KERNEL, return_lse=True, **options)
        assert (kernel.calls, kernel.repeats) == (1, turn)
        assert not give_out or found[0] is options["out"]
        same(found, wanted)


def test_packed_queries(kernel: RepeatableKernel, generator: torch.Generator) -> None:
    cache = cache_of(generator)
    for turn, bounds in enumerate(([0, 1, 4, 6], [0, 0, 3, 6])):
        q = [normal(generator, 6, H, w, dtype=DTYPE) for w in (K, P)]
        options = {"cu_seqlens_q": torch.tensor(bounds, dtype=torch.int32), "max_q": 3}
        found = mla_latent_attention(*q, cache, kernel=KERNEL, **options)
        assert kernel.repeats == turn
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled", **options))


def test_weights_that_learn_give_no_gradients(
    kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    weights = [torch.nn.Parameter(weight) for weight in (MODEL.w_uk, MODEL.w_uv)]
    cache = cache_of(generator)
    for _ in range(2):
        output = mla_attention(*queries(generator, D), cache, *weights, kernel=KERNEL)
        assert isinstance(output, torch.Tensor) and not output.requires_grad
    assert kernel.repeats == 1


def test_queries_that_are_columns_of_one_tensor_are_not_copied(
    kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    cache = cache_of(generator)
    for turn in range(2):
        both = normal(generator, B, S, H, K + P, dtype=DTYPE)
        q = both[..., :K], both[..., K:]
        found = mla_latent_attention(*q, cache, kernel=KERNEL)
        assert kernel.repeats == turn
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled"))


# --- what never goes the short way ----------------------------------------------------------------


def uneven_queries(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return (q[0].transpose(1, 2).contiguous().transpose(1, 2), q[1]), {}


def list_of_lengths(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return q, {"lengths": [100, 31, 9]}


def long_lengths(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return q, {"lengths": torch.tensor([100, 31, 9])}


def strided_lengths(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return q, {"lengths": torch.tensor([[100, 1], [31, 2], [9, 3]], dtype=torch.int32)[:, 0]}


def parents(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return q, {"tree_mask": torch.tensor([-1, 0, 0, 1])}


def strided_out(q: tuple[torch.Tensor, ...]) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    return q, {"out": torch.empty(B, S, K, H, dtype=DTYPE).transpose(2, 3)}


@pytest.mark.parametrize(
    "change",
    [uneven_queries, list_of_lengths, long_lengths, strided_lengths, parents, strided_out],
)
def test_what_is_copied_goes_the_whole_way(
    change: Any, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    cache = cache_of(generator)
    for _ in range(2):
        q, options = change(queries(generator, K))
        found = mla_latent_attention(*q, cache, kernel=KERNEL, **options)
        options.pop("out", None)
        same(found, mla_latent_attention(*q, cache, kernel="torch_tiled", **options))
    assert (kernel.calls, kernel.repeats) == (2, 0)


def test_a_launch_that_is_not_ready(kernel: RepeatableKernel, generator: torch.Generator) -> None:
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    kernel.ready = False
    found = mla_latent_attention(*q, cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 0)
    same(found, mla_latent_attention(*q, cache, kernel="torch_tiled"))


def test_an_address_that_is_not_aligned(
    kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    shifted = torch.empty(q[0].numel() + 1, dtype=DTYPE)[1:].view(q[0].shape).copy_(q[0])
    found = mla_latent_attention(shifted, q[1], cache, kernel=KERNEL)
    assert (kernel.calls, kernel.repeats) == (2, 0)
    same(found, mla_latent_attention(*q, cache, kernel="torch_tiled"))


def test_the_checks_of_values(
    kernel: RepeatableKernel, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    lengths = torch.tensor([T + 1, 1, 1], dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]"):
        mla_latent_attention(*q, cache, kernel=KERNEL, lengths=lengths)
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]"):
        mla_latent_attention(*q, replace(cache.view(), lengths=lengths), kernel=KERNEL)
    assert kernel.repeats == 0


BAD: list[Any] = [
    ("causal", lambda q, view: ((*q, view), {"causal": 1})),
    ("causal", lambda q, view: ((*q, view), {"causal": None})),
    ("d", lambda q, view: ((*q, view), {"d": 128.0})),
    ("scale", lambda q, view: ((*q, view), {"scale": True})),
    ("max_kv", lambda q, view: ((*q, view), {"max_kv": True})),
    ("q_rope", lambda q, view: ((q[0], q[1].float(), view), {})),
    ("q_rope", lambda q, view: ((q[0], q[1][:, :, :1], view), {})),
    ("q_rope", lambda q, view: ((q[0], q[1].to("meta"), view), {})),
    ("cache.lengths", lambda q, view: ((*q, replace(view, lengths=view.lengths.long())), {})),
    ("cache.lengths", lambda q, view: ((*q, replace(view, lengths=view.lengths[:2])), {})),
    ("cache.c_kv", lambda q, view: ((*q, replace(view, latent=view.latent.float())), {})),
    ("cache.block_table", lambda q, view: ((*q, replace(view, block_table=view.lengths)), {})),
    ("out", lambda q, view: ((*q, view), {"out": torch.empty(B, S, H, K + 1, dtype=DTYPE)})),
    ("cache", lambda q, view: ((*q, (1, 2, 3)), {})),
]


@pytest.mark.parametrize(("name", "change"), BAD)
def test_a_bad_call_beside_a_known_form(
    name: str, change: Any, kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    view = cache_of(generator, page_size=64).view()
    q = queries(generator, K)
    known: list[dict[str, Any]] = [{}, {"causal": True}, {"scale": 1}, {"max_kv": 1}, {"d": 128}]
    for options in known:
        mla_latent_attention(*q, view, kernel=KERNEL, **options)
    before = kernel.repeats
    operands, options = change(q, view)
    with pytest.raises(InvalidArgumentError) as raised:
        mla_latent_attention(*operands, kernel=KERNEL, **options)
    assert str(raised.value).startswith(name)
    assert kernel.repeats == before


# --- what is kept ---------------------------------------------------------------------------------


def test_forms_are_forgotten_with_their_backend(
    kernel: RepeatableKernel, generator: torch.Generator
) -> None:
    cache, q = cache_of(generator), queries(generator, K)
    mla_latent_attention(*q, cache, kernel=KERNEL)
    assert fast_path._forms
    with repeatable_kernel() as other:
        _backend.cache_clear()
        assert not fast_path._forms
        mla_latent_attention(*q, cache, kernel=KERNEL)
        assert other.calls == 1
    assert not fast_path._forms


def test_no_more_forms_than_allowed(
    kernel: RepeatableKernel, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_path, "FORMS_KEPT", 2)
    cache, q = cache_of(generator), queries(generator, K)
    for s in (1, 2, 3, 4):
        part = tuple(rows[:, :s].contiguous() for rows in q)
        mla_latent_attention(*part, cache, kernel=KERNEL)
        assert len(fast_path._forms) <= 2


def test_subclasses_of_tensors_have_no_form(generator: torch.Generator) -> None:
    class Odd(torch.Tensor):
        """Stands for tensors that are not plain memory."""

    q = queries(generator, K)
    view: CacheView = cache_of(generator).view()
    odd = q[0].as_subclass(Odd)  # type: ignore[no-untyped-call]
    assert fast_path.latent_key(*q, view, 128, KERNEL, {}) is not None
    assert fast_path.latent_key(odd, q[1], view, 128, KERNEL, {}) is None
    assert fast_path.latent_key(*q, view, 128, KERNEL, {"lengths": odd}) is None
