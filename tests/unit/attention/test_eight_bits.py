"""Caches in 8 bits: what they hold, and attention over them against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import (
    CacheView,
    LatentCache,
    PrefixGroups,
    decompress_prefixes,
    explain,
    paged_view,
)
from mla_var3.attention.backends import torch_tiled
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.attention.select.choice import Explanation
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.op.mla.cache_formats import FORMATS, cache_format, dequantise, quantise
from mla_var3.op.mla.model.times import BORROWED, IDEAL

from .attention_support import (
    Model,
    assert_close,
    filled_cache,
    make_model,
    normal,
    oracle,
    registered,
)

H, D, K, P = 2, 6, 256, 8
FORMAT = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture
def model(generator: torch.Generator) -> Model:
    return make_model(generator, H, D, K, torch.bfloat16)


def rounded(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Tokens `[m, k+p]` as a cache of the format gives them back."""
    form = cache_format(name)
    return torch.cat(dequantise(quantise(rows[:, :K], rows[:, K:], form), torch.float64), dim=-1)


def contents(cache: LatentCache) -> list[torch.Tensor]:
    """The tokens that the cache holds, dequantised in float64."""
    view = cache.view()
    positions = torch.arange(view.capacity).expand(view.requests, -1)
    rows = torch.cat(view.rows(positions, torch.float64), dim=-1)
    return [row[:length] for row, length in zip(rows, view.lengths.tolist(), strict=True)]


def cache_of(
    generator: torch.Generator, lengths: list[int], model: Model, name: str, **options: Any
) -> tuple[LatentCache, list[torch.Tensor]]:
    options = {"p": P, "dtype": torch.bfloat16, "cache_dtype": name, **options}
    return filled_cache(generator, lengths, model, **options)


def queries(generator: torch.Generator, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(normal(generator, *rows, H, width, dtype=torch.bfloat16) for width in (D, P))  # type: ignore[return-value]


@FORMAT
@pytest.mark.parametrize(
    ("page_size", "window", "prefix"), [(None, 0, 0), (64, 0, 0), (None, 16, 20), (64, 16, 64)]
)
def test_attention_over_the_rounded_tokens(name, page_size, window, prefix, model, generator):
    """Decompressed tokens are not rounded to 8 bits."""
    lengths = [90, prefix + 2, 129]
    options = {"page_size": page_size, "window": window, "prefix": prefix}
    cache, tokens = cache_of(generator, lengths, model, name, **options)
    q_nope, q_rope = queries(generator, 3, 2)
    operands = (q_nope, q_rope, cache, model.w_uk, model.w_uv)
    output, lse = mla_var3.mla_attention(*operands, return_lse=True)
    for request, rows in enumerate(tokens):
        first = max(prefix, lengths[request] - window)
        held = torch.cat(
            [rows[:prefix].double(), rounded(rows[prefix:first], name), rows[first:].double()]
        )
        expected = oracle(q_nope[request], q_rope[request], held[:, :K], held[:, K:], model)
        assert_close(output[request], expected[0], lse[request], expected[1])
    alone = mla_var3.mla_attention(*operands, return_lse=True, batch_invariant=True)
    torch.testing.assert_close(alone, (output, lse), rtol=1e-2, atol=1e-2)
    found = explain(*operands)
    assert found.kernel == "torch_tiled" and found.shape.cache_dtype == name


@FORMAT
def test_copies_without_rope_keys_of_their_own(name, model, generator):
    """Rope keys are then dequantised to the dtype of the queries, as the other tiles are."""
    cache, _ = cache_of(generator, [90, 66], model, name, window=16, prefix=20)
    copies = ("k_new", "v_new", "k_prefix", "v_prefix")
    half = {part: getattr(cache.view(), part).half() for part in copies}
    view = replace(cache.view(), **half, k_rope_new=None, k_rope_prefix=None)
    q = [each.half() for each in queries(generator, 2, 3)]
    weights = model.w_uk.half(), model.w_uv.half()
    output, lse = mla_var3.mla_attention(*q, view, *weights, return_lse=True)
    for tiles in (torch_tiled._ring_tiles, torch_tiled._prefix_tiles):
        assert {keys.dtype for keys, _, _ in tiles(view, torch.float16)} == {torch.float16}
    wanted = mla_var3.mla_attention(*q, view.without_copies(), *weights, return_lse=True)
    torch.testing.assert_close((output, lse), wanted, rtol=5e-2, atol=5e-2)


@FORMAT
def test_refill_reads_the_rounded_tokens(name, model, generator):
    cache, _ = cache_of(generator, [40], model, name, window=16)
    cache.truncate([10], w_uk=model.w_uk, w_uv=model.w_uv)
    assert cache.window is not None and cache.window.start.tolist() == [14]
    latent, rope = (rows[0, 20] for rows in cache.view().rows(torch.arange(30)[None]))
    slot = 20 % 16
    keys = (latent.float() @ model.w_uk.float().mT).to(torch.bfloat16)
    torch.testing.assert_close(cache.window.k_new[0, :, slot], keys, atol=0.02, rtol=0.02)
    assert torch.equal(cache.window.k_rope_new[0, slot], rope)


def test_never_the_whole_pool_is_dequantised(model, generator, monkeypatch):
    cache, _ = cache_of(generator, [500], model, "fp8_per_token", page_size=64, t=512)
    seen = []

    def counted(parts: Any, dtype: torch.dtype) -> Any:
        seen.append(parts.latent.shape[1])
        return dequantise(parts, dtype)

    monkeypatch.setattr("mla_var3.attention.cache.view.dequantise", counted)
    monkeypatch.setattr(torch_tiled, "_TILE_MOST", 128)
    mla_var3.mla_attention(*queries(generator, 1, 2), cache, model.w_uk, model.w_uv)
    assert seen == [128] * 4


def refusals(found: Explanation) -> dict[str, str | None]:
    return {f"{each.kernel}:{each.language}": each.refusal for each in found.candidates}


def test_the_latent_kernel_of_each_format():
    """CuTe DSL reads two formats on Hopper, cuTile all three on every card."""
    sizes = {"b": 32, "s": 16, "t": 4096, "h": 128}
    for name in FORMATS:
        found = explain(**sizes, cache_dtype=name, device_name="H200")
        served = name in FP8_FORMATS
        assert found.kernel == "flash_mla"
        assert found.language == ("cute-dsl" if served else "cutile-dsl")
        assert (refusals(found)["flash_mla:cute-dsl"] is None) is served
        others = [
            refusal for kernel, refusal in refusals(found).items()
            if not kernel.startswith(("torch_tiled", "flash_mla"))
        ]  # fmt: skip
        assert others and all(f"an 8-bit cache ({name})" in (each or "") for each in others)
        for device in ("B200", "RTX 5090", "A100 SXM 80GB", "RTX 4090"):
            found = explain(**sizes, cache_dtype=name, device_name=device)
            assert (found.kernel, found.language) == ("flash_mla", "cutile-dsl")
    refused = refusals(explain(**sizes, cache_dtype="fp8_ds_mla"))["flash_mla:cute-dsl"]
    assert refused == ("an 8-bit cache (fp8_ds_mla); it reads 16-bit ones, fp8_per_token, fp8")
    for other in ({"page_size": 16}, {"k": 256}, {"device_name": "B200"}):
        found = explain(**sizes | other, cache_dtype="fp8")
        assert found.language == "cutile-dsl" and refusals(found)["flash_mla:cute-dsl"]
    found = explain(**sizes, k=256, cache_dtype="fp8_ds_mla")
    assert found.kernel == "torch_tiled"
    refused = refusals(found)["flash_mla:cutile-dsl"]
    assert refused is not None and "rows of a multiple of 16 bytes (fp8_ds_mla)" in refused


def test_cutile_is_estimated_by_its_rates_on_a_16_bit_cache():
    """Products in 16 bits: fewer bytes, the same operations; marked as an estimate."""
    sizes = {"b": 4, "s": 1, "t": 65536, "h": 16, "latent_only": True}
    for device, basis in (("H200", BORROWED), ("B200", IDEAL)):
        times = {}
        for name in (None, "fp8_ds_mla"):
            found = explain(**sizes, cache_dtype=name, device_name=device)
            [times[name]] = [
                each.estimate for each in found.candidates
                if (each.kernel, each.language) == ("flash_mla_split_kv", "cutile-dsl")
            ]  # fmt: skip
        assert times["fp8_ds_mla"].basis == basis and not times["fp8_ds_mla"].fitted
        assert times["fp8_ds_mla"].cost.flops == times[None].cost.flops
        assert times["fp8_ds_mla"].cost.bytes < 0.62 * times[None].cost.bytes
        # By its rates products of whole tiles take longer than memory, whatever the bytes.
        least = 1.0 if basis == BORROWED else 0.99
        assert times["fp8_ds_mla"].kernel_us <= least * times[None].kernel_us
    found = explain(**sizes, cache_dtype="fp8_ds_mla", device_name="H200")
    assert "not timed on an 8-bit cache; estimate, rates of a 16-bit cache" in found.reason


def test_each_format_has_an_estimate_of_its_own():
    sizes = {"b": 32, "s": 16, "t": 4096, "h": 128, "latent_only": True, "device_name": "H200"}
    times = {}
    for name in (None, *FP8_FORMATS):
        first = explain(**sizes, cache_dtype=name).candidates[0]
        assert first.estimate is not None and first.fitted
        times[name] = first.estimate
    assert times["fp8"].kernel_us < times["fp8_per_token"].kernel_us < times[None].kernel_us
    assert times["fp8"].cost.bytes < times["fp8_per_token"].cost.bytes < times[None].cost.bytes
    steady = [times[name].steady_kernel_us for name in ("fp8", "fp8_per_token", None)]
    assert None not in steady and steady == sorted(steady)
    ideal = [
        explain(**sizes | {"device_name": "H100 SXM"}, cache_dtype=name).candidates[0].predicted_us
        for name in (None, "fp8")
    ]
    assert ideal[1] == pytest.approx(ideal[0] / 2)  # type: ignore[operator]


@FORMAT
@pytest.mark.parametrize("page_size", [None, 64])
def test_a_shared_prefix(name, page_size, model, generator):
    """Its passes carry the scales; dense requests with scales per token cannot be read as pages."""
    options = {"t": 192, "page_size": page_size, "prefix": 64}
    cache, _ = cache_of(generator, [130, 70, 64], model, name, **options)
    q = queries(generator, 3, 2)
    operands = (*q, cache, model.w_uk, model.w_uv)
    with registered(PrefixBackend(torch_tiled.TorchTiled())) as backend:
        if page_size is None and name == "fp8_per_token":
            with pytest.raises(UnsupportedError, match="share no first tokens"):
                mla_var3.mla_attention(*operands, kernel=backend.kernel)
            return
        found = mla_var3.mla_attention(*operands, kernel=backend.kernel, return_lse=True)
    view = replace(cache.view(), k_prefix=None, v_prefix=None, k_rope_prefix=None)
    wanted = mla_var3.mla_attention(
        *q, view, model.w_uk, model.w_uv, kernel="torch_tiled", return_lse=True
    )
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@FORMAT
def test_decompressed_prefixes_have_the_dtype_of_the_weights(name, model, generator):
    cache, _ = cache_of(generator, [70, 64], model, name, t=128, page_size=64)
    cache.fork(0, into=[1])
    groups = PrefixGroups(torch.zeros(1, 2).int(), torch.tensor([[64]]))
    [copy] = decompress_prefixes(groups, cache, model.w_uk, model.w_uv).copies
    latent, rope = contents(cache)[0][:64].split([K, P], -1)
    keys = torch.einsum("mk,hdk->hmd", latent, model.w_uk.double())
    values = torch.einsum("mk,hkd->hmd", latent, model.w_uv.double())
    for part, wanted in ((copy.keys, keys), (copy.values, values), (copy.rope, rope)):
        assert part.dtype is torch.bfloat16
        torch.testing.assert_close(part.double(), wanted, rtol=2e-2, atol=2e-2)


def test_scales_that_the_copy_engine_cannot_read(generator):
    pages = torch.zeros((2, 64, 644), dtype=torch.uint8)
    table, lengths = torch.zeros((1, 2), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    view = paged_view(pages, table, lengths, format="fp8_per_token")
    q, q_rope = (torch.zeros((1, 1, 2, width), dtype=torch.bfloat16) for width in (512, 64))
    assert view.scales is not None
    odd = torch.zeros((2, 64, 2), dtype=torch.float32)[..., :1]
    for scales, aligned in ((view.scales, True), (odd, False)):
        found = explain(q, q_rope, replace(view, scales=scales), kernel="torch_tiled")
        assert found.shape.aligned is aligned


@pytest.mark.parametrize(
    ("dtype", "page_size", "backend"),
    [
        (torch.bfloat16, None, "eager"),
        ("fp8_per_token", 64, "aot_eager"),
        ("fp8_ds_mla", None, "aot_eager"),
    ],
)
def test_compiled_append_and_attention(dtype, page_size, backend, model, generator):
    cache = LatentCache.allocate(2, 64, k=K, p=P, dtype=dtype, page_size=page_size)
    rows = normal(generator, 2, 3, K + P, dtype=torch.bfloat16)
    q_nope, q_rope = queries(generator, 2, 3)

    def step(rows: torch.Tensor, q_nope: torch.Tensor) -> torch.Tensor:
        cache.append(rows[..., :K], rows[..., K:])
        return mla_var3.mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv)  # type: ignore[return-value]

    expected = step(rows, q_nope)
    cache.truncate([3, 3])
    cache.buffer.zero_()
    torch.compiler.reset()  # the same function was compiled for other caches
    found = torch.compile(step, backend=backend, fullgraph=True)(rows, q_nope)
    torch.testing.assert_close(found, expected)


def test_wrong_views(generator):
    pool = torch.zeros(2, 64, 660, dtype=torch.uint8)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.tensor([3])
    with pytest.raises(UnknownNameError, match="cache format 'fp4'"):
        paged_view(pool, table, lengths, format="fp4")
    with pytest.raises(InvalidArgumentError, match="scale: expected none without a format"):
        paged_view(pool.float(), table, lengths, scale=torch.ones(1))
    with pytest.raises(InvalidArgumentError, match=r"pages: expected dtype torch.uint8"):
        paged_view(pool.float(), table, lengths, format="fp8")
    view = paged_view(pool[..., :576], table, lengths, format="fp8")
    q_latent, q_rope = (normal(generator, 1, 1, 1, w, dtype=torch.bfloat16) for w in (512, 64))
    bad = CacheView(view.latent, view.rope, view.lengths, table, scales=torch.ones(2, 64, 3))
    with pytest.raises(InvalidArgumentError, match="cache.k_rope: expected dtype torch.bfloat16"):
        mla_var3.mla_latent_attention(q_latent, q_rope, bad)
    bad = CacheView(
        view.latent, view.rope.to(torch.bfloat16), view.lengths, table, scales=torch.ones(2, 64, 3)
    )
    with pytest.raises(InvalidArgumentError, match="cache.scales: expected"):
        mla_var3.mla_latent_attention(q_latent, q_rope, bad)
    plain = CacheView(view.latent, view.rope, view.lengths, table)
    with pytest.raises(InvalidArgumentError, match="cache.c_kv: expected dtype torch.bfloat16"):
        mla_var3.mla_latent_attention(q_latent, q_rope, plain)
