"""A window in 8 bits: what the cache keeps, attention over it against float64, who reads it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.cache.copies import decompress_rows
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.ops import mla_attention_op
from mla_var3.attention.request.shape import CallShape
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.window.quantise import E4M3, QuantisedRows, dequantise, quantise

from .attention_support import (
    Model,
    filled_cache,
    make_model,
    normal,
    operator_operands,
    require_oracle,
    ring,
)

H, D, K, P, N = 2, 16, 32, 4, 64
BF16 = torch.bfloat16
SIZES: dict[str, Any] = {"b": 32, "s": 43, "t": 4096, "h": 128}
V5 = "mla_var6_plus_v5"
PAGED = pytest.mark.parametrize("page_size", [None, 64])


@pytest.fixture
def model(generator: torch.Generator) -> Model:
    return make_model(generator, H, D, K, BF16)


def eight_bit_cache(
    generator: torch.Generator, lengths: Sequence[int], model: Model, **options: Any
) -> tuple[LatentCache, list[torch.Tensor]]:
    settings = {"p": P, "t": 320, "window": N, "window_dtype": "fp8", "steps": 3, **options}
    return filled_cache(generator, lengths, model, dtype=BF16, **settings)


def same(found: QuantisedRows, wanted: QuantisedRows) -> bool:
    bits = (rows.values.view(torch.uint8) for rows in (found, wanted))
    return torch.equal(*bits) and torch.equal(found.scales, wanted.scales)


def queries(
    generator: torch.Generator, b: int, s: int, d: int = D, p: int = P
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(normal(generator, b, s, H, width, dtype=BF16) for width in (d, p))  # type: ignore[return-value]


def attend(
    cache: Any, q: tuple[torch.Tensor, torch.Tensor], model: Model, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = mla_var3.mla_attention(
        *q, cache, model.w_uk, model.w_uv, return_lse=True, **options
    )
    return output, lse


@PAGED
@pytest.mark.parametrize("value_dim", [D, 24])
def test_the_ring_after_every_change(page_size, value_dim, generator):
    """Bit by bit: what was given for the newest tokens of each request, rounded once."""
    b, t = 3, 320
    cache = LatentCache.allocate(
        b, t, k=K, p=P, page_size=page_size, window=N, window_dtype="fp8", heads=H, head_dim=D,
        value_dim=value_dim,
    )  # fmt: skip
    assert cache.window is not None and cache.window.k_new.dtype is E4M3
    tokens: list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in range(b)]
    oldest = [0] * b

    def append(counts: list[int]) -> None:
        m = max(counts)
        rows = normal(generator, b, m, K + P, dtype=BF16)
        keys = normal(generator, b, m, H, D, dtype=BF16)
        # Scales that differ from token to token.
        values = normal(generator, b, m, H, value_dim, dtype=BF16) * torch.logspace(
            -3, 3, m, dtype=BF16
        ).view(m, 1, 1)
        cache.append(rows[..., :K], rows[..., K:], counts, k_new=keys, v_new=values)
        for request, count in enumerate(counts):
            for i in range(count):
                at = keys[request, i], values[request, i], rows[request, i, K:]
                tokens[request].append(at)
            oldest[request] = max(oldest[request], len(tokens[request]) - N)

    def check() -> None:
        for request, own in enumerate(tokens):
            keys, values, positions = ring(cache.view(), request)
            assert positions == list(range(min(oldest[request], len(own)), len(own)))
            if not positions:
                continue
            held = own[positions[0] :]
            given = [torch.stack([token[i] for token in held], dim=-2) for i in range(3)]
            assert same(keys, quantise(given[0]))
            assert same(values, quantise(given[1], powers_of_two=True))
            assert cache.window is not None
            slots = [position % N for position in positions]
            assert torch.equal(cache.window.k_rope_new[request, slots], given[2])

    append([70, 5, 130])
    check()
    cache.truncate([3, 5, 90])
    for request, count in enumerate((3, 5, 90)):
        tokens[request] = tokens[request][: len(tokens[request]) - count]
        oldest[request] = min(oldest[request], len(tokens[request]))
    check()
    append([1, 17, 4])
    check()
    cache.evict([0])
    tokens[0], oldest[0] = [], 0
    cache.fork(2, into=[0])
    tokens[0], oldest[0] = list(tokens[2]), oldest[2]
    check()
    append([7, 60, 0])
    check()
    cache.check()


def test_a_rollback_is_filled_up_again(model, generator):
    cache, tokens = eight_bit_cache(generator, [150, 40], model)
    cache.truncate([50, 0])
    assert ring(cache.view(), 0)[2] == list(range(86, 100))
    cache.refill(model.w_uk, model.w_uv)
    assert cache.window is not None and not cache.window.scales.isnan()[:1].any()  # type: ignore[union-attr]
    keys, values, positions = ring(cache.view(), 0)
    assert positions == list(range(36, 100))
    rows = decompress_rows(tokens[0][positions, :K], model.w_uk, model.w_uv)
    for found, given in zip((keys, values), rows, strict=True):
        wanted = given.transpose(0, 1).double()
        error = (dequantise(found, torch.float64) - wanted).abs()
        assert bool((error <= 0.07 * wanted.abs() + 2e-3).all())


def test_zeros_and_infinities(model, generator):
    """A row of zeros is exact; a row with an infinity is NaN, and no other row with it."""
    cache, _ = eight_bit_cache(generator, [0], model)
    rows = normal(generator, 1, 3, K + P, dtype=BF16)
    keys, values = (normal(generator, 1, 3, H, D, dtype=BF16) for _ in range(2))
    keys[0, 0, 0], values[0, 1, 1] = 0.0, 0.0
    keys[0, 2, 0, 3] = torch.inf
    cache.append(rows[..., :K], rows[..., K:], k_new=keys, v_new=values)
    found_keys, found_values, _ = ring(cache.view(), 0)
    assert not dequantise(found_keys)[0, 0].any() and not dequantise(found_values)[1, 1].any()
    poisoned = dequantise(found_keys).isnan()
    assert bool(poisoned[0, 2].all()) and int(poisoned.sum()) == D
    assert not dequantise(found_values).isnan().any()


@PAGED
@pytest.mark.parametrize("causal", [True, False])
def test_torch_reads_the_ring(page_size, causal, model, generator):
    lengths = [200, 40, 64, 65, 131]
    cache, tokens = eight_bit_cache(generator, lengths, model, page_size=page_size)
    q = queries(generator, len(lengths), 3)
    found = attend(cache, q, model, causal=causal)
    require_oracle(*found, q, tokens, model, cache.view(), causal=causal)
    latent = attend((tokens[0][None, :, :K], tokens[0][None, :, K:]), (q[0][:1], q[1][:1]), model)
    assert not torch.equal(attend(cache, q, model)[0][:1], latent[0])


def test_torch_after_drops_and_beside_a_prefix(model, generator):
    cache, tokens = eight_bit_cache(generator, [200, 70, 130], model, prefix=64)
    for dropped in ([0, 3, 60], [30, 1, 2]):
        cache.truncate(dropped)
        tokens = [rows[: len(rows) - gone] for rows, gone in zip(tokens, dropped, strict=True)]
        q = queries(generator, 3, 2)
        require_oracle(*attend(cache, q, model), q, tokens, model, cache.view())


def test_both_in_8_bits(generator):
    """The window is rounded from the given rows, not from the rounded ones."""
    model = make_model(generator, H, D, 128, BF16)
    options = {"cache_dtype": "fp8_per_token", "page_size": 64, "p": 8}
    cache, tokens = eight_bit_cache(generator, [200], model, **options)
    keys, _, positions = ring(cache.view(), 0)
    given = decompress_rows(tokens[0][positions, :128], model.w_uk, model.w_uv)[0]
    error = dequantise(keys, torch.float64) - given.transpose(0, 1).double()
    assert float(error.norm() / given.double().norm()) < 0.035
    q = queries(generator, 1, 3, p=8)
    view = cache.view()
    stored = torch.cat(view.rows(torch.arange(200)[None], torch.float64), dim=-1)[0]
    stored[positions, 128:] = tokens[0][positions, 128:].double()
    require_oracle(*attend(cache, q, model), q, [stored], model, view)


def test_a_call_on_fewer_tokens_reads_no_window(model, generator):
    cache, tokens = eight_bit_cache(generator, [200], model)
    q = queries(generator, 1, 2)
    output, _ = attend(cache, q, model, lengths=[100])
    plain, _ = attend((tokens[0][None, :100, :K], tokens[0][None, :100, K:]), q, model)
    assert torch.equal(output, plain)


def test_inside_a_compiled_program(model, generator):
    cache, _ = eight_bit_cache(generator, [150, 40], model)
    q = queries(generator, 2, 3)

    def layer(q_nope: torch.Tensor) -> torch.Tensor:
        return mla_var3.mla_attention(q_nope, q[1], cache, model.w_uk, model.w_uv)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q[0]), layer(q[0]))
    operands = operator_operands(q, cache.view(), model)
    # Those of the schema compare arguments before and after, which torch cannot do in e4m3.
    torch.library.opcheck(mla_attention_op, operands, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_scales": None}, "cache.k_new: expected"),
        ({"window_scales": torch.ones(1, H, N)}, "cache.window_scales: expected"),
        ({"k_new": None}, "cache.k_new: expected one beside its other parts"),
        ({"v_new": torch.zeros(1, H, N, D, dtype=E4M3)}, "cache.v_new: expected"),
        (
            {"k_new": torch.zeros(1, H, 48, D, dtype=E4M3)},
            "cache.k_new: expected slots in multiples of 64, got 48",
        ),
    ],
)
def test_wrong_views_are_named(change, message, model, generator):
    cache, _ = eight_bit_cache(generator, [70], model)
    with pytest.raises(InvalidArgumentError, match=message):
        attend(replace(cache.view(), **change), queries(generator, 1, 1), model)


def refusals(**options: Any) -> dict[str, str | None]:
    listed = mla_var3.explain(**{**SIZES, **options}, device_name="NVIDIA H200").candidates
    return {f"{each.kernel}:{each.language}": each.refusal for each in listed}


def test_only_its_kernel_reads_a_window_in_8_bits():
    eight, sixteen = refusals(window=2048, window_dtype="fp8"), refusals(window=2048)
    assert eight[f"{V5}:cute-dsl"] is None
    assert sixteen[f"{V5}:cute-dsl"] == "a window in 16 bits; it reads one in 8 bits"
    for language in ("cute-dsl", "cutile-dsl"):
        reason = eight[f"mla_var6_plus:{language}"]
        assert reason == "a window in 8 bits; it reads one in 16 bits"
        assert sixteen[f"mla_var6_plus:{language}"] is None
    # Those that read no window serve the call from the latent rows.
    for name in ("flash_mla:cute-dsl", "flash_attention:cute-dsl", "flash_mla:cutile-dsl"):
        assert eight[name] is sixteen[name] is None
    assert "a cache without a window" in str(refusals()[f"{V5}:cute-dsl"])


def test_the_model_of_time_decides():
    def chosen(**options: Any) -> str:
        found = mla_var3.explain(
            **{**SIZES, "window_dtype": "fp8", **options}, device_name="NVIDIA H200"
        )
        assert "by recorded rates" in found.reason
        return found.kernel

    assert chosen(s=4, window=2048) == "flash_mla"  # few queries are cheap in latent form
    assert chosen(window=4096) == V5
    estimates = {
        each.kernel: each.estimate
        for each in mla_var3.explain(
            **SIZES, window=4096, window_dtype="fp8", device_name="NVIDIA H200"
        ).candidates
        if each.language == "cute-dsl"
    }
    assert "decompression" in estimates["flash_attention"].around  # type: ignore[union-attr]
    assert mla_var3.explain(**SIZES, window=4096, device_name="NVIDIA H200").kernel != V5
    with pytest.raises(InvalidArgumentError, match="window_dtype: expected none without a window"):
        CallShape(**SIZES, window_dtype="fp8")
    with pytest.raises(InvalidArgumentError, match="window_dtype: expected 'fp8' or None"):
        CallShape(**SIZES, window=64, window_dtype="bfloat16")


def test_a_call_says_what_it_has(model, generator):
    cache, _ = eight_bit_cache(generator, [70], model)
    q = queries(generator, 1, 1)
    found = mla_var3.explain(*q, cache, model.w_uk, model.w_uv)
    assert found.shape.window_dtype == "fp8" and found.kernel == "torch_tiled"
    with pytest.raises(UnsupportedError, match="a window in 8 bits; it reads one in 16 bits"):
        attend(cache, q, model, kernel="mla_var6_plus:cutile-dsl")
