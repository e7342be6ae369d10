"""The CuTe DSL kernels on decompressed tokens as backends: what they get, refuse, and are worth.

Their stages are built on CPU tensors and computed by the kernels' contracts in float64, so that
everything but the machine code is that of a call on a GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import mla_var3
from mla_var3.attention.backends import plan_operands
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.request.validate import Options, full_task
from mla_var3.errors import UnsupportedError
from mla_var3.kernel.cute_python.mla.hopper.widths import HEAD_WIDTHS

from .attention_support import Model, filled_cache, make_model, normal, require_oracle
from .emulated_stages import attend, backend, emulate, stage_of

H200 = "NVIDIA H200"
H, D, P, K = 2, 128, 64, 512
SIZES: dict[str, Any] = {"b": 32, "s": 43, "t": 4096, "h": 128}
LANGUAGE = "cute-dsl"
RINGS = {None: "mla_var6_plus", "fp8": "mla_var6_plus_v5"}
"""The kernel that reads a ring, by `window_dtype`."""
WINDOW_DTYPE = pytest.mark.parametrize("window_dtype", RINGS)


@pytest.fixture
def model(generator: torch.Generator) -> Model:
    return make_model(generator, H, D, K, torch.bfloat16)


def task_on(
    cache: Any, model: Model, generator: torch.Generator, s: int = 3, **options: Any
) -> AttentionTask:
    b = (cache.view() if isinstance(cache, LatentCache) else cache).requests
    q_nope, q_rope = (normal(generator, b, s, H, w, dtype=torch.bfloat16) for w in (D, P))
    return full_task(q_nope, q_rope, cache, model.w_uk, model.w_uv, Options(**options))


def require_right(
    result: tuple[torch.Tensor, torch.Tensor],
    task: AttentionTask,
    tokens: list[torch.Tensor],
    model: Model,
) -> None:
    q, options = (task.q, task.q_rope), {"causal": task.causal, "scale": task.scale}
    require_oracle(*result, q, tokens, model, task.cache, **options)


def cache_and_tokens(
    generator: torch.Generator, lengths: list[int], model: Model, **options: Any
) -> tuple[LatentCache, list[torch.Tensor]]:
    return filled_cache(
        generator, lengths, model, p=P, dtype=torch.bfloat16, **{"t": 256, "steps": 3, **options}
    )


def append(
    cache: LatentCache, tokens: list[torch.Tensor], m: int, model: Model, generator: torch.Generator
) -> list[torch.Tensor]:
    """The tokens after m more of each request."""
    new = normal(generator, len(tokens), m, K + P, dtype=torch.bfloat16)
    cache.append(new[..., :K], new[..., K:], w_uk=model.w_uk, w_uv=model.w_uv)
    return [torch.cat([old, more]) for old, more in zip(tokens, new, strict=True)]


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "window_dtype"), [(64, None), (128, None), (64, "fp8")])
def test_the_mix_reads_a_ring_as_it_lies(page_size, causal, window, window_dtype, model, generator):
    lengths = [200, 40, 0, window, window + 1]
    options = {"page_size": page_size, "window": window, "window_dtype": window_dtype}
    cache, tokens = cache_and_tokens(generator, lengths, model, **options)
    task = task_on(cache, model, generator, causal=causal, scale=0.05)
    require_right(attend(RINGS[window_dtype], task), task, tokens, model)
    # The kernel's operands are the memory of the ring.
    stage, ring = stage_of(RINGS[window_dtype], task), cache.window
    kernel = next(kernel for kernel in stage.kernels() if kernel.name == "decompressed_attention")
    pointers = [tensor.data_ptr() for tensor in kernel.input_tensors]
    for part in (ring.k_new, ring.v_new, ring.scales, ring.k_rope_new, ring.start):  # type: ignore[union-attr]
        assert part is None or part.data_ptr() in pointers


@pytest.mark.parametrize("widths", HEAD_WIDTHS, ids=str)
def test_flash_attention_at_the_widths_of_published_models(widths, generator):
    def random(*shape: int) -> torch.Tensor:
        return normal(generator, *shape, dtype=torch.bfloat16)

    d, p, v = widths.d, widths.p, widths.v
    model = Model(random(H, d, K) * 0.05, random(H, K, v) * 0.05)
    rows, lengths = random(2, 70, K + p), (70, 33)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = torch.nan
    task = full_task(
        random(2, 3, H, d), random(2, 3, H, p), (rows[..., :K], rows[..., K:]), model.w_uk,
        model.w_uv, Options(lengths=lengths),
    )  # fmt: skip
    stage = stage_of("flash_attention", task)
    [kernel] = stage.kernels()
    assert kernel.host_fn(kernel.tiling).widths == widths
    emulate(stage)
    tokens = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    require_right(tuple(stage.output_tensors), task, tokens, model)


@WINDOW_DTYPE
@pytest.mark.parametrize("page_size", [None, 64])
def test_wrapping_and_dropping(page_size, window_dtype, model, generator):
    """The ring turns, loses tokens and is shorter for a while; the older half takes those over."""
    options = {"page_size": page_size, "window": 64, "window_dtype": window_dtype}
    cache, tokens = cache_and_tokens(generator, [150, 30], model, **options)
    for dropped in ([0, 0], [7, 2], [30, 0], [1, 12]):
        cache.truncate(dropped)
        tokens = [rows[: len(rows) - gone] for rows, gone in zip(tokens, dropped, strict=True)]
        tokens = append(cache, tokens, 9, model, generator)
        task = task_on(cache, model, generator, s=9)
        require_right(attend(RINGS[window_dtype], task), task, tokens, model)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize(
    ("dropped", "window_dtype"), [(62, None), (63, None), (64, None), (100, None), (63, "fp8")]
)
def test_a_ring_that_lacks_tokens_of_the_queries_is_completed(
    page_size, dropped, window_dtype, model, generator
):
    """The latent kernel shows its tokens to every query, so the ring has to hold the newest."""
    options = {"page_size": page_size, "window": 64, "window_dtype": window_dtype}
    cache, tokens = cache_and_tokens(generator, [200, 40], model, **options)
    assert cache.view().ring_whole
    cache.truncate([dropped, 0])
    assert not cache.view().ring_whole
    kept = [tokens[0][: 200 - dropped], tokens[1]]
    for causal in (False, True):
        task = task_on(cache, model, generator, causal=causal)
        require_right(attend(RINGS[window_dtype], task), task, kept, model)
    assert cache.window is not None and cache.window.start[0] <= 200 - dropped - 2


def test_a_captured_call_completes_a_whole_ring_too(model, generator, monkeypatch):
    """Its graph may be replayed after tokens were dropped."""
    completed: list[int] = []
    monkeypatch.setattr(plan_operands, "fill_ring", lambda *given: completed.append(given[-1]))
    cache, _ = cache_and_tokens(generator, [200, 40], model, window=64)
    task = task_on(cache, model, generator)
    for is_captured in (False, True):
        monkeypatch.setattr(plan_operands, "capturing", lambda tensor, now=is_captured: now)
        attend("mla_var6_plus", task)
    assert completed == [2]


@pytest.mark.parametrize("lengths", [[200, 70, 68], [66, 64, 200]])
def test_a_ring_beside_a_shared_prefix(lengths, model, generator):
    """Also of queries that reach into the prefix."""
    cache, tokens = cache_and_tokens(generator, lengths, model, window=64, prefix=64)
    for kernel, s in (("mla_var6_plus", 3), ("mla_var6_plus", 9), ("mla_var6_plus_v6", 3)):
        task = task_on(cache, model, generator, s=s)
        require_right(attend(kernel, task), task, tokens, model)


def test_a_call_on_fewer_tokens_than_the_cache_has(model, generator):
    cache, tokens = cache_and_tokens(generator, [200, 40], model, window=64)
    shorter = [tokens[0][:100], tokens[1][:33]]
    task = task_on(cache, model, generator, lengths=[100, 33])
    require_right(attend("flash_attention", task), task, shorter, model)
    # The ring holds the newest of 200 tokens, so it has nothing of a call on 100.
    assert "a cache without a window" in str(backend("mla_var6_plus").unsupported(task.shape()))
    whole, tokens = cache_and_tokens(generator, [200, 40], model, window=256)
    task = task_on(whole, model, generator, lengths=[100, 33])
    assert whole.view().at_lengths(task.cache.lengths).full_copy() is not None
    shorter = [tokens[0][:100], tokens[1][:33]]
    require_right(attend("flash_attention", task), task, shorter, model)


@WINDOW_DTYPE
@pytest.mark.parametrize("window", [128, 256])
def test_all_tokens_within_the_ring(window, window_dtype, model, generator):
    """By a bound on the lengths, or in a ring as long as the cache."""
    kernel, options = RINGS[window_dtype], {"max_kv": 100} if window < 256 else {}
    cache, tokens = cache_and_tokens(
        generator, [90, 40], model, window=window, window_dtype=window_dtype
    )
    task = task_on(cache, model, generator, **options)
    stage = stage_of(kernel, task)
    assert [kernel.name for kernel in stage.kernels()] == ["decompressed_attention"]
    assert (cache.view().full_copy() is None) is (window < 256 or window_dtype == "fp8")
    require_right(attend(kernel, task), task, tokens, model)
    kept = tokens
    append(cache, tokens, 100, model, generator)
    cache.truncate([100, 100])  # the ring has lost its first tokens, and no latent kernel runs
    task = task_on(cache, model, generator, **options)
    require_right(attend(kernel, task), task, kept, model)


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("window", [0, 64, 256])
def test_a_whole_copy_or_one_made_by_the_call(page_size, window, model, generator, monkeypatch):
    cache, tokens = cache_and_tokens(
        generator, [209, 40, 0], model, page_size=page_size, window=window
    )
    cache.truncate([9, 0, 0])  # a ring with a slot for every token lacks none after that
    tokens[0] = tokens[0][:200]
    for options in ({}, {"max_kv": 201}):
        task = task_on(cache, model, generator, **options)
        stage = stage_of("flash_attention", task)
        (kernel,) = stage.kernels()
        copied = cache.window is None or kernel.input_tensors[2].data_ptr() not in (
            cache.window.k_new.data_ptr(),
        )
        assert copied is (window < 256)
        require_right(attend("flash_attention", task), task, tokens, model)
    with monkeypatch.context() as patch:  # operators of a traced program get tensors alone
        patch.setattr("torch.compiler.is_compiling", lambda: True)
        assert (replace(cache.view()).full_copy() is None) is (window < 256)


def test_a_whole_ring_has_nothing_of_a_prefix(model, generator):
    cache, tokens = cache_and_tokens(generator, [200, 70], model, window=256, prefix=64)
    task = task_on(cache, model, generator)
    assert cache.view().full_copy() is None
    require_right(attend("flash_attention", task), task, tokens, model)
    refusal = backend("mla_var6_plus").unsupported(task.shape())
    assert refusal is not None and "beside a shared prefix" in refusal


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_the_shared_prefix_is_read_once(page_size, causal, model, generator):
    cache, tokens = cache_and_tokens(
        generator, [200, 70, 128], model, page_size=page_size, prefix=128 if page_size else 100
    )
    tokens = [torch.cat([rows, tokens[0][len(rows) : cache.prefix.length]]) for rows in tokens]  # type: ignore[union-attr]
    task = task_on(cache, model, generator, causal=causal)
    require_right(attend("mla_var6_plus_v6", task), task, tokens, model)


def test_views_without_rope_keys_of_their_own(model, generator):
    """As other owners of caches, and traced programs, pass them."""
    cache, tokens = cache_and_tokens(
        generator, [200, 128], model, page_size=64, window=64, prefix=64
    )
    bare = replace(cache.view(), k_rope_new=None, k_rope_prefix=None)
    for kernel in ("mla_var6_plus", "mla_var6_plus_v6"):
        task = task_on(bare, model, generator)
        require_right(attend(kernel, task), task, tokens, model)
    full = replace(bare, window_start=None, k_prefix=None, v_prefix=None)
    task = task_on(full, model, generator)
    require_right(attend("mla_var6_plus", task), task, tokens, model)


@pytest.mark.parametrize(
    ("kernel", "options", "refusal"),
    [
        ("mla_var6_plus", {}, "a cache without a window"),
        ("mla_var6_plus", {"window": 100}, "a window of 100 slots; it takes multiples of 64"),
        ("mla_var6_plus", {"window": 64, "s": 65}, "65 queries over a window of 64 slots"),
        ("mla_var6_plus", {"window": 64, "page_size": 80}, "pages of 80 tokens"),
        ("mla_var6_plus", {"window": 64, "k": 256}, "these sizes: k: expected 512"),
        ("mla_var6_plus_v6", {}, "a cache without a decompressed shared prefix"),
        ("mla_var6_plus_v6", {"prefix": 96, "page_size": 64}, "ends inside of a page"),
        ("flash_attention", {"d": 64}, "these sizes: (d, p, v): expected (128, 64, 128)"),
        *(
            ("mla_var6_plus_v5", {"window": 64, **options}, refusal)
            for options, refusal in (
                ({"s": 65}, "65 queries over a window of 64 slots"),
                ({"d": 64}, "these sizes: d: expected 128"),
                ({"k": 256}, "these sizes: k: expected 512"),
                ({"v": 64}, "values of width v=64 beside d=128"),
                ({"page_size": 80}, "pages of 80 tokens"),
                ({"window": 4096, "prefix": 64}, "beside a shared prefix"),
                ({"cache_dtype": "fp8_per_token"}, "an 8-bit cache (fp8_per_token)"),
            )
        ),
        *(
            (kernel, {"window": 64, "prefix": 64, **options}, refusal)
            for kernel in ("flash_attention", *(f"mla_var6_plus{v}" for v in ("", "_v5", "_v6")))
            for options, refusal in (
                ({"ragged": True}, "different numbers of queries per request"),
                ({"tree": True}, "a tree of tokens"),
                ({"sliding_window": 512}, "a sliding window"),
                ({"partial": True}, "a cache that holds a part"),
                ({"dtype": "float32"}, "float32"),
                ({"aligned": False}, "16-byte aligned"),
                ({"latent_only": True}, "queries in the latent space"),
            )
        ),
    ],
    ids=str,
)
def test_refusals(kernel, options, refusal):
    window_dtype = "fp8" if kernel == "mla_var6_plus_v5" else None
    shape = CallShape(**{**SIZES, "window_dtype": window_dtype, **options})
    assert refusal in str(backend(kernel).unsupported(shape))


def test_on_other_gpus_and_on_the_cpu(model, generator):
    listed = mla_var3.explain(**SIZES, window=2048, device_name="NVIDIA B200").candidates
    refusals = {c.kernel: c.refusal for c in listed if c.language == LANGUAGE}
    for kernel in ("flash_attention", "mla_var6_plus"):
        assert "it is written for sm_90" in str(refusals[kernel])
    cache, _ = cache_and_tokens(generator, [70], model, window=64)
    q_nope, q_rope = (normal(generator, 1, 1, H, w, dtype=torch.bfloat16) for w in (D, P))
    with pytest.raises(UnsupportedError, match="it needs a GPU"):
        mla_var3.mla_attention(
            q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel=f"mla_var6_plus:{LANGUAGE}"
        )


def chosen(**options: Any) -> tuple[str, str]:
    found = mla_var3.explain(**{**SIZES, **options}, device_name=H200)
    return found.kernel, found.language


def test_what_the_cache_holds_decides():
    assert chosen() == ("flash_mla", LANGUAGE)
    assert chosen(window=4096) in (("flash_attention", LANGUAGE), ("mla_var6_plus", LANGUAGE))
    # At the power limit a mix gains less over the latent kernel than its time is uncertain.
    assert chosen(window=2304) == ("flash_mla", LANGUAGE)
    assert chosen(b=64, s=4, t=4608, prefix=4096) == ("mla_var6_plus_v6", LANGUAGE)
    # Few queries are cheap in latent form, whatever else there is.
    assert chosen(s=8, window=2304) == ("flash_mla", LANGUAGE)
