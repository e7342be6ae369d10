"""Every wrong argument of the public names raises an error with what was expected and what came."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import CacheView, CallShape, LatentCache, paged_view, tree_ancestors
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.select.choice import run
from mla_var3.errors import HyperMlaError, InvalidArgumentError, UnknownNameError, UnsupportedError

B, S, H, D, P, K, T = 2, 3, 2, 6, 4, 8, 70

Arguments = dict[str, Any]


def arguments() -> Arguments:
    return {
        "q_nope": torch.randn(B, S, H, D),
        "q_rope": torch.randn(B, S, H, P),
        "cache": (torch.randn(B, T, K), torch.randn(B, T, P)),
        "w_uk": torch.randn(H, D, K),
        "w_uv": torch.randn(H, K, D),
    }


def changed(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda given: {**given, **changes}


def pair(t: int, k: int, rope_t: int, p: int) -> Callable[[Arguments], Arguments]:
    """A cache of two tensors, of these slots and widths."""
    return changed(cache=(torch.randn(B, t, k), torch.randn(B, rope_t, p)))


def allocated(b: int, **options: Any) -> Callable[[Arguments], Arguments]:
    return changed(cache=LatentCache.allocate(b, T, k=K, p=P, dtype=torch.float32, **options))


def view(**parts: Any) -> Callable[[Arguments], Arguments]:
    """A dense view with some decompressed parts."""
    lengths = torch.full((B,), T, dtype=torch.int32)
    return changed(cache=CacheView(torch.ones(B, T, K), torch.ones(B, T, P), lengths, **parts))


BOUNDS = torch.tensor([0, 3, 6], dtype=torch.int32)
WINDOW = {"k_new": torch.ones(B, H, 3, D), "v_new": torch.ones(B, H, 3, D)}
PACKED = {"q_nope": torch.randn(6, H, D), "q_rope": torch.randn(6, H, P), "cu_seqlens_q": BOUNDS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(q_nope=3), r"q_nope: expected a tensor \[b, s, h, d\], got int"),
        (changed(q_nope=torch.randn(B, S, H)), r"q_nope: expected \[b, s, h, d\], got \[2, 3, 2\]"),
        (changed(q_nope=torch.randn(B, 0, H, D)), "q_nope: expected s of at least 1"),
        (changed(q_nope=torch.randn(0, S, H, D)), "q_nope: expected b of at least 1"),
        (changed(q_nope=torch.randn(B, S, H, D).half()), "w_uk: expected dtype torch.float16"),
        (changed(q_rope=torch.randn(B, S, 1, P)), r"q_rope: expected \[b=2, s=3, h=2, p=4\], got"),
        (changed(q_rope=None), "q_rope: expected a tensor .* got NoneType"),
        (
            changed(q_rope=torch.empty(B, S, H, P, device="meta")),
            "q_rope: .* on cpu, got one on meta",
        ),
        (changed(w_uk=torch.randn(H, D + 1, K)), r"w_uk: expected \[h=2, d=6, k\], got \[2, 7"),
        (changed(w_uv=torch.randn(H, D, K)), r"w_uv: expected \[h=2, k=8, v\], got \[2, 6, 8\]"),
        (changed(w_uv=torch.randn(H, K, 0)), "w_uv: expected v of at least 1, got "),
        (changed(cache=5), "cache: expected a LatentCache, a CacheView or a pair .* got int"),
        (pair(T, 9, T, P), r"cache\[0\] \(c_kv\): expected \[b=2, t, k=8\], got \[2, 70, 9\]"),
        (pair(T, K, T - 1, P), r"cache\[1\] \(k_rope\): expected .* t=70, p=4\], got \[2, 69, 4\]"),
        (pair(0, K, 0, P), "cache: expected at least one slot per request, got none"),
        (pair(2, K, 2, P), r"s: expected at most the t=2 slots of a request \(causal\), got 3"),
        (allocated(3), r"cache.c_kv: expected \[b=2, t, k=8\], got \[3, 70, 8\]"),
        (
            allocated(B, window=4, heads=1, head_dim=D),
            r"cache.k_new: expected \[b=2, h=2, n, d=6\], got \[2, 1, 4, 6\]",
        ),
        (changed(lengths=[1]), r"lengths: expected \[b=2\], got \[1\]"),
        (changed(lengths="ab"), "lengths: expected integers, as a tensor or a sequence, got 'ab'"),
        (
            changed(lengths=torch.empty(B, dtype=torch.int32, device="meta")),
            "lengths: expected a tensor on cpu, got one on meta",
        ),
        (changed(lengths=torch.ones(B)), "lengths: expected dtype torch.int32 or torch.int64"),
        (changed(causal=1), "causal: expected True or False, got 1"),
        (changed(scale=0), "scale: expected a positive finite number or None, got 0"),
        (changed(out=torch.empty(B, S, H, K)), r"out: expected \[b=2, s=3, h=2, v=6\], got"),
        (
            changed(out=torch.empty(1, S, H, D).expand(B, S, H, D)),
            r"out: expected a place of its own for every value, got strides \(0, ",
        ),
        (changed(max_q=2), "max_q: expected s=3 without cu_seqlens_q, got 2"),
        (changed(max_kv=0), "max_kv: expected a positive integer, got 0"),
        (changed(cu_seqlens_q=BOUNDS), r"q_nope: expected \[total_q, h, d\], got \[2, 3, 2, 6\]"),
        (
            changed(**{**PACKED, "cu_seqlens_q": BOUNDS[:2]}),
            r"cu_seqlens_q: expected \[b\+1=3\], got \[2\]",
        ),
        (
            changed(tree_mask=torch.ones(S, S).bool(), causal=False),
            "tree_mask: expected none with causal=False, got a tree",
        ),
        (changed(tree_mask=[0]), "tree_mask: expected a tensor, got list"),
        (changed(tree_mask=torch.ones(4, 4).bool()), r"tree_mask: expected \[s=3, s=3\], got \[4"),
        (changed(tree_mask=torch.zeros(S)), "tree_mask: expected dtype torch.bool or"),
        (changed(tree_mask=torch.ones(S, S)), "tree_mask: expected dtype torch.bool or"),
        (
            changed(tree_mask=torch.ones(S, S).bool(), total_lengths=[9, 9], shards=2),
            "tree_mask: expected none with shards, got a tree",
        ),
        (changed(total_lengths=[1, 2, 3]), r"total_lengths: expected \[b=2\], got \[3\]"),
        (view(k_new=torch.ones(3)), r"cache.k_new: expected \[b=2, h=2, n, d=6\], got \[3\]"),
        (view(k_new=WINDOW["k_new"]), r"cache.v_new: .* a tensor \[b=2, h=2, n=3, v=6\]"),
        (
            view(**{**WINDOW, "v_new": torch.ones(B, H, 3, D + 1)}),
            r"cache.v_new: expected \[b=2, h=2, n=3, v=6\], got \[2, 2, 3, 7\]",
        ),
        (view(v_new=WINDOW["v_new"]), "cache.k_new: expected one beside its other parts"),
        (view(window_start=torch.zeros(B).int()), "cache.k_new: expected one beside its other"),
        (
            view(k_prefix=torch.ones(H, 3, D), v_prefix=torch.ones(H, 2, D)),
            r"cache.v_prefix: expected \[h=2, m=3, v=6\], got \[2, 2, 6\]",
        ),
        (view(**WINDOW, window_start=torch.zeros(B)), "cache.window_start: .* dtype torch.int32"),
    ],
)
def test_wrong_arguments(change, message):
    given = change(arguments())
    operands = [given.pop(name) for name in ("q_nope", "q_rope", "cache", "w_uk", "w_uv")]
    with pytest.raises(InvalidArgumentError, match=message):
        mla_var3.mla_attention(*operands, **given)
    with pytest.raises(InvalidArgumentError, match=message):
        mla_var3.explain(*operands, **given)


@pytest.mark.parametrize(
    ("kernel", "error", "message"),
    [
        ("flash_mle", UnknownNameError, "unknown kernel 'flash_mle'; did you mean 'flash_mla'"),
        ("flash_mla:c", UnknownNameError, "unknown kernel 'flash_mla:c'"),
        (
            "mla_var6_plus",
            UnsupportedError,
            r"got 'mla_var6_plus'; .*mla_var6_plus \(cutile-dsl\): it does not support float32",
        ),
    ],
)
def test_a_named_kernel_is_used_or_refused(kernel, error, message):
    with pytest.raises(error, match=message):
        mla_var3.mla_attention(**arguments(), kernel=kernel)


def test_unknown_options_are_named():
    given = arguments()
    with pytest.raises(UnknownNameError, match="unknown option 'casual'; did you mean 'causal'"):
        mla_var3.mla_latent_attention(
            torch.randn(B, S, H, K), given["q_rope"], given["cache"], casual=True
        )
    with pytest.raises(InvalidArgumentError, match="operands: expected 5 .* got 2"):
        mla_var3.explain(1, 2)
    with pytest.raises(InvalidArgumentError, match="d: expected a positive integer, got 0"):
        mla_var3.mla_latent_attention(torch.randn(B, S, H, K), given["q_rope"], given["cache"], d=0)


def paged_arguments(**changes: Any) -> Arguments:
    view = CacheView(
        latent=torch.randn(4, 64, K),
        rope=torch.randn(4, 64, P),
        lengths=torch.tensor([70, 0], dtype=torch.int32),
        block_table=torch.tensor([[3, 1], [-1, 9]], dtype=torch.int32),
    )
    return {**arguments(), "cache": replace(view, **changes)}


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


RING = {name: torch.zeros(B, H, 64, D) for name in WINDOW}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"lengths": int32(129, 0)}, {}, r"lengths\[0\]: expected .* from 0 to t=128, got 129"),
        ({"lengths": int32(5, -1)}, {}, r"lengths\[1\]: expected .* from 0 to t=128, got -1"),
        (
            {"latent": torch.randn(4, 64, K + 1)},
            {},
            r"cache.c_kv: expected .* k=8\], got \[4, 64, 9\]",
        ),
        (
            {**RING, "window_start": int32(5, 0)},
            {},
            r"window_start\[0\]: expected a position among the newest n=64 of 70, got 5",
        ),
        ({"lengths": int32(129, 0)}, {"max_kv": 1000}, r"lengths\[0\]: .* t=128, got 129"),
        ({}, {"max_kv": 64}, r"lengths\[0\]: expected a number from 0 to max_kv=64, got 70"),
        ({"block_table": int32([3, 4], [0, 0])}, {}, r"block_table\[0, 1\]: .* from 0 to 3, got 4"),
        (
            {"block_table": int32([-1, 0], [0, 0])},
            {},
            r"block_table\[0, 0\]: .* from 0 to 3, got -1",
        ),
        ({}, {**PACKED, "cu_seqlens_q": int32(0, 4, 3)}, "cu_seqlens_q: expected ascending bounds"),
        ({}, {**PACKED, "cu_seqlens_q": int32(0, 4, 7)}, "cu_seqlens_q: expected ascending bounds"),
        (
            {},
            {**PACKED, "cu_seqlens_q": torch.tensor([0, 4, 2**32 + 6])},
            "cu_seqlens_q: expected ascending bounds",
        ),
        ({}, {"total_lengths": [2**32, 5]}, r"total_lengths\[0\]: .* 2147483647, got 4294967296"),
        ({}, {**PACKED, "max_q": 2}, "max_q: expected at least 3, got 2"),
        ({}, {"lengths": [129, 1]}, r"lengths\[0\]: expected a number from 0 to t=128, got 129"),
        ({}, {"lengths": [-1, 5]}, r"lengths\[0\]: expected a number from 0 to t=128, got -1"),
        ({}, {"tree_mask": int32(1, -1, 0)}, r"tree_mask\[0\]: .* before token 0, got 1"),
        ({}, {"tree_mask": int32(*[[-1, 0, 7]] * B)}, r"tree_mask\[0, 2\]: expected .* got 7"),
    ],
)
def test_values_that_the_host_has_are_always_checked(changes, options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        mla_var3.mla_attention(**{**paged_arguments(**changes), **options})


def test_a_list_is_checked_for_tensors_without_values():
    """As for a GPU, whose memory the host does not read."""

    given = arguments()
    cache = tuple(part.to("meta") for part in given.pop("cache"))
    moved = {name: value.to("meta") for name, value in given.items()}
    with pytest.raises(InvalidArgumentError, match=r"lengths\[1\]: .* t=70, got 71"):
        mla_var3.mla_attention(**moved, cache=cache, lengths=[3, 71])


def test_debug_mode_wants_a_token_per_query(monkeypatch):
    given = paged_arguments(lengths=int32(2, 0))
    mla_var3.mla_attention(**given)  # the first query sees nothing, which is defined
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]: expected at least the s=3"):
        mla_var3.mla_attention(**given)


def test_debug_mode_checks_what_a_traced_program_brings(monkeypatch):
    """Its operator runs on operands whose values were not known when the program was made."""
    view = CacheView(torch.zeros(1, 4, K), torch.zeros(1, 4, P), int32(9))
    q, q_rope = torch.zeros(1, 1, H, K), torch.zeros(1, 1, H, P)
    task = AttentionTask(q, q_rope, view, None, None, causal=True, scale=1.0)
    run(task, "auto")
    monkeypatch.setenv("HYPER_MLA_DEBUG", "1")
    with pytest.raises(InvalidArgumentError, match=r"lengths\[0\]: expected .* to t=4, got 9"):
        run(task, "auto")


# --- beyond the operands of a call ----------------------------------------------------------------

NO_TEXT = (None, 3, [], torch.ones(1))


def refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(HyperMlaError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("kernel", NO_TEXT)
def test_a_kernel_is_named_by_text(kernel):
    message = "kernel: expected the name of a kernel or 'auto', got "
    refused(message, lambda: mla_var3.mla_attention(**arguments(), kernel=kernel))
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
    found = paged_view(torch.ones(3, 64, 12), torch.tensor([[wild]]), torch.tensor([-wild]), k=8)
    assert found.block_table is not None
    assert found.block_table.tolist() == [[2**31 - 1]] and found.lengths.tolist() == [-(2**31)]


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
