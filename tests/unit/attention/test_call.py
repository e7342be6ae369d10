"""`mla_attention` against a float64 oracle, with its options crossed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mla_var3
from mla_var3.attention.cache.copies import decompress_rows
from mla_var3.attention.cache.view import paged_view
from mla_var3.attention.merge import merge_partials
from mla_var3.attention.request.masks import tree_ancestors
from tests.fuzz import cases

from .attention_support import (
    Model,
    ancestors_by_walking,
    assert_close,
    filled_cache,
    make_model,
    normal,
    oracle,
    require_oracle,
)

mla_attention = mla_var3.mla_attention
P = 4


def require_right(
    generator: torch.Generator,
    model: Model,
    cache: Any,
    tokens: Any,
    widths: tuple[int, int] = (6, P),
    **options: Any,
) -> None:
    """A call with two queries per request, against the oracle."""
    h, dtype = model.sizes[0], model.w_uk.dtype
    q = [normal(generator, 2, 2, h, width, dtype=dtype) for width in widths]
    found = mla_attention(*q, cache, model.w_uk, model.w_uv, return_lse=True, **options)
    require_oracle(*found, q, tokens, model)


def test_options_crossed():
    """Random caches, sizes, masks, query packing and strides, each against float64."""
    # With AMX oneDNN adds 0 * NaN of the neighbouring number where widths are odd.
    with torch.backends.mkldnn.flags(enabled=False):
        for number in range(100):
            case = cases.draw(f"3/{number}", "cpu", [])
            assert cases.run(case, "cpu") == ("ok", ""), case


def test_the_output_alone_and_into_a_given_tensor(generator):
    model = make_model(generator)
    cache, _ = filled_cache(generator, [9, 4], model)
    q_nope, q_rope = (normal(generator, 2, 3, 2, w, dtype=torch.float32) for w in (6, P))
    alone = mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv)
    out = torch.full((2, 3, 2, 6), torch.nan)
    same = mla_attention(q_nope, q_rope, cache, model.w_uk, model.w_uv, out=out)
    assert same is out
    assert torch.equal(out, alone)
    bounds = torch.tensor([0, 3, 6], dtype=torch.int32)
    packed = {"cu_seqlens_q": bounds}
    for options in ({}, {"batch_invariant": True}, packed, {**packed, "batch_invariant": True}):
        apart = torch.full((2, 4, 2, 6), torch.nan)  # with rows between those of the output
        out, queries = apart[:, :3], (q_nope, q_rope)
        if "cu_seqlens_q" in options:
            out, queries = apart.view(8, 2, 6)[:6], (q_nope.flatten(0, 1), q_rope.flatten(0, 1))
        found = mla_attention(*queries, cache, model.w_uk, model.w_uv, out=out, **options)
        assert found is out and int(apart.isnan().all(-1).sum()) == 4
        torch.testing.assert_close(out.reshape(alone.shape), alone)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}, {"causal": False}])
def test_caches_that_hold_every_third_token_merge_to_the_whole(options, generator):
    model, lengths = make_model(generator), [20, 4]
    q = [normal(generator, 2, 3, 2, w, dtype=torch.float32) for w in (6, P)]
    tokens = normal(generator, 2, 20, 8 + P, dtype=torch.float32)
    tokens[1, 4:] = torch.nan
    if "sliding_window" in options:
        tokens[0, :13] = torch.nan  # the first of three queries sees 13 to 17
    partials = [
        mla_attention(
            *q, tokens[:, shard::3].split([8, P], -1), model.w_uk, model.w_uv, return_lse=True,
            lengths=[len(range(shard, length, 3)) for length in lengths],
            total_lengths=lengths, shards=3, shard=shard, **options,
        )
        for shard in range(3)
    ]  # fmt: skip
    held = [rows[:length] for rows, length in zip(tokens, lengths, strict=True)]
    require_oracle(*merge_partials(partials), q, held, model, **options)


def test_a_foreign_paged_cache(generator):
    """Pages in any order, wild entries beyond the tokens, int64 lengths."""
    model = make_model(generator)
    pages = normal(generator, 6, 64, 8 + P, dtype=torch.float32)
    table = torch.tensor([[4, 1, 2147480000], [3, -7, 999]], dtype=torch.int32)
    lengths = torch.tensor([100, 64])
    view = paged_view(pages, table, lengths, k=8)
    tokens = pages[[4, 1]].flatten(0, 1)[:100], pages[3]
    require_right(generator, model, view, tokens, max_kv=128)


def test_a_foreign_prefix_that_ends_inside_of_a_page(generator, monkeypatch):
    """In tiles of one page and in a single one."""
    model = make_model(generator)
    pages = normal(generator, 4, 64, 8 + P, dtype=torch.float32)
    table = torch.tensor([[0, 1, 2], [0, 1, 3]], dtype=torch.int32)
    prefix = pages[:2].flatten(0, 1)[:100]
    keys, values = decompress_rows(prefix[:, :8], model.w_uk, model.w_uv)
    view = replace(
        paged_view(pages, table, torch.tensor([190, 110]), k=8),
        k_prefix=keys.transpose(0, 1), v_prefix=values.transpose(0, 1),
        k_rope_prefix=prefix[:, 8:],
    )  # fmt: skip
    tokens = [pages[own.long()].flatten(0, 1) for own in table]
    tokens = [rows[:length] for rows, length in zip(tokens, (190, 110), strict=True)]
    for most in (2048, 64):
        monkeypatch.setattr("mla_var3.attention.backends.torch_tiled._TILE_MOST", most)
        require_right(generator, model, view, tokens, kernel="torch_tiled")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_scores_do_not_overflow(dtype, generator):
    """Logits far beyond the range of float16, in both signs."""
    model = make_model(generator, d=16, k=16, dtype=dtype)
    cache, tokens = filled_cache(generator, [40], model, dtype=dtype, window=7)
    for rows in tokens:
        rows.mul_(100)
    cache.buffer.mul_(100)
    assert cache.window is not None
    cache.window.k_new.mul_(100)
    cache.window.v_new.mul_(100)
    q_nope, q_rope = (normal(generator, 1, 2, 2, w, dtype=dtype) * 200 for w in (16, P))
    output, lse = mla_attention(
        q_nope, q_rope, cache, model.w_uk, model.w_uv, scale=4.0, return_lse=True
    )
    expected, expected_lse = oracle(
        q_nope[0], q_rope[0], tokens[0][:, :16], tokens[0][:, 16:], model, scale=4.0
    )
    assert float(expected_lse.abs().max()) > 65504
    assert output.isfinite().all() and lse.isfinite().all()
    assert_close(output[0].float().to(dtype), expected, lse[0], expected_lse)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.randoms())
@example(list(range(17)), None)  # a chain
@settings(max_examples=40, deadline=None)
def test_tree_ancestors_by_walking(draws, _):
    parents = [draw % (token + 1) - 1 for token, draw in enumerate(draws)]
    assert torch.equal(tree_ancestors(torch.tensor(parents)), ancestors_by_walking(parents))


def test_a_later_parent_on_the_device_counts_as_the_context(monkeypatch):
    """Where the host does not read, a wrong parent hides tokens, and nothing is out of bounds."""
    monkeypatch.setattr("mla_var3.attention.request.masks.readable", lambda tensor: False)
    assert torch.equal(tree_ancestors(torch.tensor([1, 5, 0])), ancestors_by_walking([-1, -1, 0]))


def on_the_interpreter(generator: torch.Generator, lengths: list[int], **options: Any) -> Any:
    """Weights, cache and tokens in widths that the kernels take."""
    model = make_model(generator, h=2, d=16, k=128, dtype=torch.bfloat16)
    options = {"p": 16, "t": 70, "dtype": torch.bfloat16, **options}
    return model, *filled_cache(generator, lengths, model, **options)


@pytest.mark.parametrize(
    "kernel", ["flash_mla", "flash_mla_split_kv", "flash_attention", "mla_var6_plus"]
)
@pytest.mark.parametrize("window", [0, 16, 70])
def test_the_kernels_on_the_interpreter(kernel, window, generator):
    """Each named kernel is what runs, and gives what the oracle says."""
    model, cache, tokens = on_the_interpreter(generator, [70, 21], window=window)
    # One element into their storage: kernels get copies at aligned addresses.
    q_nope, q_rope = (
        normal(generator, 2 * 3 * 2 * 16 + 1, dtype=torch.bfloat16)[1:].view(2, 3, 2, 16)
        for _ in range(2)
    )
    explanation = mla_var3.explain(q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel=kernel)
    assert explanation.kernel == kernel.partition(":")[0]
    assert explanation.path == "interpreter"
    output, lse = mla_attention(
        q_nope, q_rope, cache, model.w_uk, model.w_uv, kernel=kernel, return_lse=True
    )
    require_oracle(output, lse, (q_nope, q_rope), tokens, model)


def test_a_foreign_window_without_its_start_is_full(generator):
    model, cache, tokens = on_the_interpreter(generator, [60, 11], window=16)
    view = replace(cache.view(), window_start=None)
    require_right(generator, model, view, tokens, (16, 16), kernel="mla_var6_plus")


@pytest.mark.parametrize("kernel", ["torch_tiled", "flash_attention", "mla_var6_plus"])
def test_a_foreign_ring_as_long_as_the_cache_may_lack_tokens(kernel, generator):
    model, cache, tokens = on_the_interpreter(generator, [60, 21], window=70)
    view = replace(cache.view(), window_start=torch.tensor([40, 5], dtype=torch.int32))
    assert view.k_new is not None and view.v_new is not None
    for request, start in enumerate((40, 5)):
        view.k_new[request, :, :start] = view.v_new[request, :, :start] = 9.0
    given = {"widths": (16, 16), "kernel": kernel}
    # A call that looks at fewer tokens completes the ring for itself only.
    shorter = tokens[0][:20], tokens[1][:4]
    require_right(generator, model, view, shorter, lengths=[20, 4], **given)
    require_right(generator, model, view, tokens, **given)


@pytest.mark.parametrize("held", [False, True], ids=["the cache", "a view from before"])
def test_a_short_window_is_completed_for_the_mixed_kernel(held, generator):
    """After dropped tokens the call decompresses what the window lacks, until `refill` does."""
    model, cache, tokens = on_the_interpreter(generator, [60, 21], window=16)
    given = cache.view() if held else cache
    kept, options = (tokens[0][:57], tokens[1]), {"kernel": "mla_var6_plus"}
    cache.truncate([3, 0])
    require_right(generator, model, given, kept, (16, 16), **options)
    cache.refill(model.w_uk, model.w_uv, 3)
    require_right(generator, model, given, kept, (16, 16), **options)
