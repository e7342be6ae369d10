"""Calls on caches with decompressed tokens on a Hopper GPU: the kernels of CuTe DSL that read them.

Caches hold NaN wherever no token lies, in the latent buffer, the ring and its rope keys. Results
are compared with the attention in float32 over the latent tokens, which knows nothing of copies; a
ring in 8 bits with the attention in float32 over its rounded tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import mla_var3
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.view import CacheView
from mla_var3.errors import UnsupportedError

from ..unit.attention.attention_support import (
    Model,
    assert_close,
    make_model,
    normal,
    poison_window,
)
from .gpu_support import replayed_steps

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

D, P, K = 128, 64, 512
RING, COPY, PREFIX = (
    f"{kernel}:cute-dsl" for kernel in ("mla_var6_plus", "flash_attention", "mla_var6_plus_v6")
)
RINGS = {None: RING, "fp8": "mla_var6_plus_v5:cute-dsl"}
"""The kernel that reads a ring, by `window_dtype`."""
WINDOW_DTYPE = pytest.mark.parametrize("window_dtype", RINGS, ids=lambda name: name or "16 bits")
FP8_TOLERANCE = 0.05
"""With a ring in 8 bits the kernel rounds queries and probabilities to e4m3 as well."""


def model_of(generator: torch.Generator, h: int, dtype: torch.dtype = torch.bfloat16) -> Model:
    made = make_model(generator, h, D, K, dtype)
    return Model(made.w_uk.cuda(), made.w_uv.cuda())


def random_rows(generator: torch.Generator, model: Model, *shape: int) -> torch.Tensor:
    return normal(generator, *shape, dtype=model.w_uk.dtype).cuda()


def make_cache(
    generator: torch.Generator,
    model: Model,
    lengths: list[int],
    t: int = 512,
    steps: int = 3,
    **options: Any,
) -> LatentCache:
    """A cache with NaN in unused slots, filled in a few appends, so that a ring has turned."""
    cache = LatentCache.allocate(
        len(lengths), t, dtype=model.w_uk.dtype, device="cuda", heads=model.w_uk.shape[0], **options
    )
    cache.buffer.fill_(torch.nan)
    if cache.window is not None:
        poison_window(cache.window)
    prefix = options.get("prefix", 0)
    if prefix:
        shared = random_rows(generator, model, prefix, K + P)
        cache.set_prefix(shared[:, :K], shared[:, K:], model.w_uk, model.w_uv)
    for step in range(steps, 0, -1):
        held = cache.lengths.tolist()
        counts = [max(0, end - at) // step for end, at in zip(lengths, held, strict=True)]
        if max(counts):
            append(cache, generator, model, max(counts), counts)
    wanted = [max(length, prefix) for length in lengths]
    assert cache.lengths.tolist() == wanted
    return cache


def append(
    cache: LatentCache,
    generator: torch.Generator,
    model: Model,
    m: int,
    counts: list[int] | None = None,
) -> None:
    rows = random_rows(generator, model, cache.lengths.shape[0], m, K + P)
    weights = {} if cache.window is None else {"w_uk": model.w_uk, "w_uv": model.w_uv}
    cache.append(rows[..., :K], rows[..., K:], counts, **weights)


def queries_of(
    generator: torch.Generator, model: Model, b: int, s: int
) -> tuple[torch.Tensor, torch.Tensor]:
    h = model.w_uk.shape[0]
    return tuple(random_rows(generator, model, b, s, h, w) for w in (D, P))  # type: ignore[return-value]


def reference(
    q: tuple[torch.Tensor, torch.Tensor], cache: LatentCache, model: Model, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32 over the latent tokens, in order, and over a ring in 8 bits."""
    view = cache.view()
    positions = torch.arange(view.capacity, device="cuda").expand(view.requests, -1)
    latent, rope = (rows.float() for rows in view.rows(positions))
    plain = CacheView(latent, rope, view.lengths)
    if view.window_scales is not None and view.k_rope_new is not None:
        plain = replace(
            plain, k_new=view.k_new, v_new=view.v_new, window_start=view.window_start,
            k_rope_new=view.k_rope_new.float(), window_scales=view.window_scales,
        )  # fmt: skip
    output, lse = mla_var3.mla_attention(
        q[0].float(), q[1].float(), plain, model.w_uk.float(), model.w_uv.float(),
        kernel="torch_tiled", return_lse=True, **options,
    )  # fmt: skip
    return output, lse


def require_right(
    kernel: str,
    q: tuple[torch.Tensor, torch.Tensor],
    cache: LatentCache,
    model: Model,
    **options: Any,
) -> None:
    output, lse = mla_var3.mla_attention(
        *q, cache, model.w_uk, model.w_uv, kernel=kernel, return_lse=True, **options
    )
    require_close(cache, (output, lse), reference(q, cache, model, **options))


def require_close(
    cache: LatentCache,
    found: tuple[torch.Tensor, torch.Tensor],
    wanted: tuple[torch.Tensor, torch.Tensor],
) -> None:
    tolerance = None if cache.view().window_scales is None else FP8_TOLERANCE
    for request in range(found[0].shape[0]):
        output, lse, expected, expected_lse = (x[request].cpu() for x in (*found, *wanted))
        assert_close(output, expected, lse, expected_lse, tolerance)


@WINDOW_DTYPE
@pytest.mark.parametrize(("causal", "page_size"), [(True, None), (True, 64), (False, 64)])
@pytest.mark.parametrize(
    ("s", "h", "window"),
    [(1, 16, 64), (5, 3, 128), (16, 16, 192), (40, 4, 64), (64, 8, 64), (100, 4, 128)],
)
def test_a_ring(s, h, window, causal, page_size, window_dtype, generator):
    """Shorter than the ring, as long, longer, turned by an odd number of slots, and empty."""
    model = model_of(generator, h)
    lengths = [500, s, max(window, s), window + s + 7, 2 * window + s, 0]
    cache = make_cache(
        generator, model, lengths, window=window, page_size=page_size, window_dtype=window_dtype
    )
    q = queries_of(generator, model, len(lengths), s)
    require_right(RINGS[window_dtype], q, cache, model, causal=causal)


@WINDOW_DTYPE
def test_a_ring_in_float16_with_another_scale(window_dtype, generator):
    model, kernel = model_of(generator, 16, torch.float16), RINGS[window_dtype]
    options = {"window": 128, "window_dtype": window_dtype}
    cache = make_cache(generator, model, [500, 40, 130], **options)
    require_right(kernel, queries_of(generator, model, 3, 4), cache, model, scale=0.05)


@WINDOW_DTYPE
@pytest.mark.parametrize("length", [2000, 900, 1024, 1031])
def test_a_ring_that_is_split(length, window_dtype, generator):
    """One request of few heads: the window is split over the SMs and merged."""
    model, options = model_of(generator, 4), {"window": 1024, "window_dtype": window_dtype}
    cache = make_cache(generator, model, [length], t=2304, **options)
    require_right(RINGS[window_dtype], queries_of(generator, model, 1, 4), cache, model)


@WINDOW_DTYPE
@pytest.mark.parametrize("s", [43, 70])
def test_a_ring_of_many_requests(s, window_dtype, generator):
    model, lengths = model_of(generator, 128), [1500 - 97 * i for i in range(12)]
    options = {"window": 512, "page_size": 64, "window_dtype": window_dtype}
    cache = make_cache(generator, model, lengths, t=1536, **options)
    require_right(RINGS[window_dtype], queries_of(generator, model, 12, s), cache, model)


@WINDOW_DTYPE
@pytest.mark.parametrize(("page_size", "s"), [(None, 5), (64, 5), (64, 50)])
def test_wrapping_and_dropping(page_size, s, window_dtype, generator):
    """The ring turns and loses tokens, which the older half then attends to."""
    model, kernel = model_of(generator, 16), RINGS[window_dtype]
    options = {"window": 128, "page_size": page_size, "window_dtype": window_dtype}
    cache = make_cache(generator, model, [300, 60, 129], t=1024, **options)
    for dropped in ([0, 0, 0], [1, 4, 2], [60, 0, 5], [0, 30, 100], [3, 3, 3]):
        cache.truncate(dropped)
        require_right(kernel, queries_of(generator, model, 3, 1), cache, model)  # it lacks tokens
        append(cache, generator, model, s)
        require_right(kernel, queries_of(generator, model, 3, s), cache, model)
    cache.evict([1])
    append(cache, generator, model, s)
    require_right(kernel, queries_of(generator, model, 3, s), cache, model)


@WINDOW_DTYPE
@pytest.mark.parametrize("s", [4, 60])
@pytest.mark.parametrize(("t", "window", "h"), [(512, 128, 16), (2304, 1024, 2)])
def test_a_ring_that_lacks_tokens_of_the_queries_is_completed(
    t, window, h, s, window_dtype, generator
):
    """The latent kernel shows its tokens to every query, so the ring has to hold the newest."""
    model = model_of(generator, h)
    options, kernel = {"window": window, "window_dtype": window_dtype}, RINGS[window_dtype]
    cache = make_cache(generator, model, [2 * window + 9, 70], t=t, **options)
    q = queries_of(generator, model, 2, s)
    cache.truncate([window - 1, 0])
    require_right(kernel, q, cache, model, causal=False)
    require_right(kernel, q, cache, model)


def test_fewer_tokens_than_the_cache_has(generator):
    model = model_of(generator, 16)
    cache = make_cache(generator, model, [500, 100], window=128)
    lengths = torch.tensor([480, 33], dtype=torch.int32, device="cuda")
    q = queries_of(generator, model, 2, 3)
    require_right(COPY, q, cache, model, lengths=lengths)
    with pytest.raises(UnsupportedError, match="a cache without a window"):
        mla_var3.mla_attention(*q, cache, model.w_uk, model.w_uv, kernel=RING, lengths=lengths)
    require_right(RING, queries_of(generator, model, 2, 3), cache, model, max_kv=501)


@WINDOW_DTYPE
def test_all_tokens_within_the_ring(window_dtype, generator):
    """A bound on the lengths that the ring holds: nothing is attended in latent form."""
    model, kernel = model_of(generator, 16), RINGS[window_dtype]
    options = {"window": 128, "window_dtype": window_dtype}
    cache = make_cache(generator, model, [100, 64, 3], **options)
    q = queries_of(generator, model, 3, 3)
    require_right(kernel, q, cache, model, max_kv=128)
    append(cache, generator, model, 120)
    cache.truncate([120, 120, 120])
    require_right(kernel, q, cache, model, max_kv=128)


@pytest.mark.parametrize("s", [5, 40, 60])
def test_a_first_block_that_no_query_sees(s, generator):
    """With few rows in 8 bits a row's maximum starts in the first block: here with dropped tokens.

    All scores are far below zero, where a maximum that started at zero would round them away.
    """
    model = model_of(generator, 16)
    cache = make_cache(generator, model, [320], window=256, window_dtype="fp8")
    cache.truncate([64])
    window = cache.window
    assert window is not None and window.start.tolist() == [64]
    q_nope, q_rope = queries_of(generator, model, 1, s)
    cache.k_rope[..., 0] = window.k_rope_new[..., 0] = 4.0
    q_rope[..., 0] = -200.0
    require_right(RINGS["fp8"], (q_nope, q_rope), cache, model)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("window", [0, 128, 512])
@pytest.mark.parametrize(("s", "h"), [(1, 16), (7, 3), (130, 4)])
def test_a_whole_copy_or_one_made_by_the_call(s, h, window, page_size, generator):
    model = model_of(generator, h)
    cache = make_cache(generator, model, [500, 131, 0], window=window, page_size=page_size)
    for options in ({}, {"max_kv": 501}, {"causal": False}):
        require_right(COPY, queries_of(generator, model, 3, s), cache, model, **options)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("s", "h", "b"), [(1, 16, 3), (4, 8, 20), (70, 2, 3)])
def test_a_shared_prefix(s, h, b, causal, page_size, generator):
    model = model_of(generator, h)
    lengths = [192 + (0, s, 250, 3)[i % 4] for i in range(b)]
    prefix = 192 if page_size else 170
    cache = make_cache(generator, model, lengths, prefix=prefix, page_size=page_size)
    q = queries_of(generator, model, b, s)
    require_right(PREFIX, q, cache, model, causal=causal)


@pytest.mark.parametrize("page_size", [None, 64])
def test_a_prefix_and_a_ring(page_size, generator):
    """The ring holds nothing of the prefix; either copy serves the call."""
    model, s = model_of(generator, 16), 4
    cache = make_cache(
        generator, model, [400, 128 + s, 140], window=128, prefix=128, page_size=page_size
    )
    for kernel in (RING, PREFIX, COPY):
        require_right(kernel, queries_of(generator, model, 3, s), cache, model)
    append(cache, generator, model, s)
    for kernel in (RING, PREFIX):
        require_right(kernel, queries_of(generator, model, 3, s), cache, model)


def test_auto_takes_them_where_they_pay(generator):
    """The choice by sizes is tested elsewhere; here its result runs."""
    model = model_of(generator, 128)
    for options, s, wanted in (
        ({"window": 512}, 64, "flash_attention"),
        ({"window": 384}, 64, "flash_mla"),  # beside one that would have to be mixed
        ({"window": 512, "window_dtype": "fp8"}, 64, "mla_var6_plus_v5"),
        ({"prefix": 448}, 32, "mla_var6_plus_v6"),
    ):
        cache = make_cache(generator, model, [500] * 16, **options)
        q = queries_of(generator, model, 16, s)
        choice = mla_var3.explain(*q, cache, model.w_uk, model.w_uv)
        if choice.device == "NVIDIA H200":  # where their rates are known
            assert choice.kernel == wanted and choice.language == "cute-dsl", str(choice)
        require_right("auto", q, cache, model)


def test_into_a_given_tensor_and_on_another_stream(generator):
    model = model_of(generator, 16)
    cache = make_cache(generator, model, [500, 70], window=128)
    q = queries_of(generator, model, 2, 3)
    wanted = mla_var3.mla_attention(*q, cache, model.w_uk, model.w_uv, kernel=RING)
    out = torch.full_like(wanted, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            mla_var3.mla_attention(*q, cache, model.w_uk, model.w_uv, kernel=RING, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (RING, {"window": 64}),
        (COPY, {"window": 512}),
        (PREFIX, {"prefix": 64}),
        (RING, {"window": 64, "prefix": 64}),
        (RINGS["fp8"], {"window": 64, "window_dtype": "fp8"}),
    ],
    ids=str,
)
def test_a_captured_step(kernel, options, page_size, generator):
    """Drop, append and attend in one graph; replayed while lengths and ring move on."""
    b, s, h = 2, 3, 16
    model = model_of(generator, h)
    cache = make_cache(generator, model, [0, 0], page_size=page_size, **options)
    latent, rope = (torch.zeros(b, s, w, dtype=torch.bfloat16, device="cuda") for w in (K, P))
    q_nope, q_rope = (torch.zeros(b, s, h, w, dtype=torch.bfloat16, device="cuda") for w in (D, P))
    rejected = torch.zeros(b, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q_nope)
    lse = torch.empty(b, s, h, device="cuda")
    weights = {"w_uk": model.w_uk, "w_uv": model.w_uv} if "window" in options else {}

    def step() -> None:
        cache.truncate(rejected)
        cache.append(latent, rope, **weights)
        result = mla_var3.mla_attention(
            q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel=kernel, out=out, return_lse=True,
        )  # fmt: skip
        lse.copy_(result[1])

    inputs = (latent, rope, q_nope, q_rope)
    for turn in replayed_steps(step, cache, inputs, rejected, generator, 60):
        if turn % 6 == 5:
            require_close(cache, (out, lse), reference((q_nope, q_rope), cache, model))
    cache.check()
