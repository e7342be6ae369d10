"""Wrong values for the public names beyond the operands of a call, which test_validation has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import CacheView, CallShape, paged_view, tree_ancestors
from mla_var3.errors import HyperMlaError

B, T, H, D, P, K = 2, 8, 2, 6, 4, 8
WINDOW = {"k_new": torch.ones(B, H, 3, D), "v_new": torch.ones(B, H, 3, D)}
NO_TEXT = (None, 3, [], torch.ones(1))


def operands() -> dict[str, torch.Tensor]:
    return {
        "q_nope": torch.ones(B, 1, H, D),
        "q_rope": torch.ones(B, 1, H, P),
        "w_uk": torch.ones(H, D, K),
        "w_uv": torch.ones(H, K, D),
    }


def view(**parts: Any) -> CacheView:
    lengths = torch.full((B,), T, dtype=torch.int32)
    return CacheView(torch.ones(B, T, K), torch.ones(B, T, P), lengths, **parts)


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(HyperMlaError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("kernel", NO_TEXT)
def test_a_kernel_is_named_by_text(kernel):
    message = "kernel: expected the name of a kernel or 'auto', got "
    refused(message, lambda: mla_var3.mla_attention(**operands(), cache=view(), kernel=kernel))
    refused(message, lambda: mla_var3.explain(b=1, s=1, t=8, h=1, kernel=kernel))


@pytest.mark.parametrize("flag", ["causal", "ragged", "tree", "partial", "latent_only", "aligned"])
def test_flags_are_true_or_false(flag):
    wrong: dict[str, Any] = {flag: [1]}
    refused(f"{flag}: expected True or False, got [1]", lambda: CallShape(1, 1, 8, 1, **wrong))


@pytest.mark.parametrize("scale", ["x", float("nan"), float("inf"), 0.0, -1.0, 1e300])
def test_a_scale_is_positive_and_finite(scale):
    message = "scale: expected a positive finite number or None, got"
    refused(message, lambda: CallShape(1, 1, 8, 1, scale=scale))


@pytest.mark.parametrize("wrong", NO_TEXT[1:])
def test_a_cache_format_is_named_by_text(wrong):
    message = "unknown cache format "
    refused(message, lambda: mla_var3.explain(b=1, s=1, t=8, h=1, cache_dtype=wrong))
    pages, zeros = torch.zeros(1, 64, 576, dtype=torch.uint8), torch.zeros(1, 1).int()
    refused(message, lambda: paged_view(pages, zeros, zeros[0], format=wrong))


@pytest.mark.parametrize("size", ["b", "s", "t", "h", "d", "p", "k", "page_size"])
def test_sizes_have_an_end(size):
    sizes: dict[str, Any] = {"b": 1, "s": 1, "t": 8, "h": 1, size: 2**40}
    refused(f"{size}: expected an integer from {int(size != 'p')} to ", lambda: CallShape(**sizes))


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("pages", None, "pages: expected a tensor [num_pages, page, k+p], got NoneType"),
        ("pages", torch.ones(3, 64, 12, dtype=torch.int32), "pages: expected dtype torch.bfloat16"),
        ("lengths", [1, 2], "lengths: expected a tensor [b], got list"),
        ("lengths", torch.ones(2, 2), "lengths: expected [b], got [2, 2]"),
        ("block_table", torch.zeros(3, 1, dtype=torch.int32), "block_table: expected [b=2, max"),
        ("k", 13, "k: expected an integer from 1 to k+p=12, got 13"),
        ("k", 0, "k: expected an integer from 1 to k+p=12, got 0"),
    ],
)
def test_a_view_of_pages(argument, value, message):
    given = {
        "pages": torch.ones(3, 64, 12),
        "block_table": torch.zeros(2, 1, dtype=torch.int32),
        "lengths": torch.ones(2, dtype=torch.int32),
        "k": 8,
        argument: value,
    }
    refused(message, lambda: paged_view(**given))


def test_indices_of_pages_do_not_wrap_around():
    """2**32 + 1 would become a valid page or length."""
    wild = 2**32 + 1
    view = paged_view(torch.ones(3, 64, 12), torch.tensor([[wild]]), torch.tensor([-wild]), k=8)
    assert view.block_table is not None
    assert view.block_table.tolist() == [[2**31 - 1]] and view.lengths.tolist() == [-(2**31)]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0, 1], "parents: expected a tensor [..., s], got list"),
        (torch.tensor(1), "parents: expected a tensor [..., s], got []"),
        (torch.ones(3), "parents: expected dtype torch.int32 or torch.int64, got torch.float32"),
    ],
)
def test_parents_are_a_tensor_of_indices(parents, message):
    refused(message, lambda: tree_ancestors(parents))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"k_new": torch.ones(3)}, "cache.k_new: expected [b=2, h=2, n, d=6], got [3]"),
        ({"k_new": torch.ones(B, H, 3, D)}, "cache.v_new: expected a tensor [b=2, h=2, n=3, v=6]"),
        (
            {**WINDOW, "v_new": torch.ones(B, H, 3, D + 1)},
            "cache.v_new: expected [b=2, h=2, n=3, v=6], got [2, 2, 3, 7]",
        ),
        ({"v_new": torch.ones(B, H, 3, D)}, "cache.k_new: expected one beside its other"),
        (
            {"window_start": torch.zeros(B).int()},
            "cache.k_new: expected one beside its other parts",
        ),
        (
            {"k_prefix": torch.ones(H, 3, D), "v_prefix": torch.ones(H, 2, D)},
            "cache.v_prefix: expected [h=2, m=3, v=6], got [2, 2, 6]",
        ),
        (
            {**WINDOW, "window_start": torch.zeros(B)},
            "cache.window_start: expected dtype torch.int32",
        ),
    ],
)
def test_decompressed_parts_are_whole(parts, message):
    refused(message, lambda: mla_var3.mla_attention(**operands(), cache=view(**parts)))
