"""FlashMLA's function called again with other tensors of the same key."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.select import choice
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.integrations.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_var3.op.mla.cache_formats import cache_format
from mla_var3.op.mla.window.quantise import E4M3

from ..attention.attention_support import pool_in_8_bits
from ..attention.replay.replay_support import KERNEL, RepeatableKernel, repeatable_kernel

B, S, H, K, P, PAGE = 3, 2, 4, 64, 8, 64
DTYPE = torch.bfloat16


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[RepeatableKernel]:
    """Every call is served by a kernel that can be repeated."""
    with repeatable_kernel() as made:
        backend = LatentBackend(KERNEL, "torch", made, runs_on_cpu=True)
        monkeypatch.setattr(choice, "backend_for", lambda shape, kernel, device: backend)
        yield made


def arguments(generator: torch.Generator, lengths: list[int], **changes: Any) -> dict[str, Any]:
    shape = (B * 2, PAGE, 1, K + P)
    case = {
        "q": torch.randn(B, S, H, K + P, generator=generator).to(DTYPE),
        "k_cache": torch.randn(shape, generator=generator).to(DTYPE),
        "block_table": torch.randperm(B * 2, generator=generator).view(B, 2).to(torch.int32),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        "head_dim_v": K,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "causal": True,
    }
    return {**case, **changes}


def full_path(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result without a replay."""
    with monkeypatch.context() as patch:
        patch.setenv("HYPER_MLA_DEBUG", "1")
        return flash_mla_with_kvcache(**case)


def test_other_tensors_of_the_same_key(kernel, generator, monkeypatch):
    for turn, lengths in enumerate(([100, 0, 7], [2, 128, 64], [0, 0, 3])):
        case = arguments(generator, lengths)
        found = flash_mla_with_kvcache(**case)
        assert kernel.repeats == turn
        wanted = full_path(case, monkeypatch)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
        empty = [request for request, length in enumerate(lengths) if length == 0]
        assert (found[1][empty] == torch.inf).all() and (found[0][empty] == 0).all()
        assert not (found[1] == -torch.inf).any()


def fp8_arguments(
    generator: torch.Generator, lengths: list[int], name: str, **changes: Any
) -> dict[str, Any]:
    """The same on an fp8 cache; the bytes of its scales are those of numbers too."""
    rows = torch.randn(B * 2, PAGE, K + P, generator=generator)
    pool, _ = pool_in_8_bits(rows[..., :K], rows[..., K:], cache_format(name))
    return arguments(
        generator, lengths, k_cache=pool.view(E4M3).unsqueeze(2), is_fp8_kvcache=True, **changes
    )


@pytest.mark.parametrize(("name", "scale"), [("fp8", None), ("fp8", 0.5), ("fp8_per_token", None)])
def test_fp8_caches_of_the_same_key(name, scale, kernel, generator, monkeypatch):
    for turn, lengths in enumerate(([100, 0, 7], [2, 128, 64])):
        given = None if scale is None else torch.full((1,), scale * (turn + 1))
        case = fp8_arguments(generator, lengths, name, descale_k=given)
        found = flash_mla_with_kvcache(**case)
        assert kernel.repeats == turn
        for one, other in zip(found, full_path(case, monkeypatch), strict=True):
            assert torch.equal(one, other)
    case["q"] = case["q"].to(E4M3)  # converted before the kernel
    for _ in range(2):
        flash_mla_with_kvcache(**case)
    assert kernel.repeats == 1


def test_a_captured_call_is_not_kept(kernel, generator):
    """The scale that it made for the cache holds nothing before its graph has run."""
    kernel.stream = None
    flash_mla_with_kvcache(**fp8_arguments(generator, [100, 0, 7], "fp8"))
    kernel.stream = 0
    for turn in range(2):
        flash_mla_with_kvcache(**fp8_arguments(generator, [100, 0, 7], "fp8"))
        assert (kernel.calls, kernel.repeats) == (2, turn)


def test_metadata_is_for_one_key(kernel, generator):
    metadata = get_mla_metadata()[0]
    flash_mla_with_kvcache(**arguments(generator, [9, 9, 9]))
    flash_mla_with_kvcache(**arguments(generator, [9, 9, 9], causal=False))
    for _ in range(2):
        case = arguments(generator, [9, 9, 9], tile_scheduler_metadata=metadata)
        flash_mla_with_kvcache(**case)
    assert kernel.repeats == 2
    with pytest.raises(InvalidArgumentError, match=r"tile_scheduler_metadata \(causal\)"):
        flash_mla_with_kvcache(**{**case, "causal": False})
    with pytest.raises(InvalidArgumentError, match="tile_scheduler_metadata: expected the first"):
        flash_mla_with_kvcache(**{**case, "tile_scheduler_metadata": None})


def test_metadata_of_a_refused_call_is_empty(generator):
    metadata = get_mla_metadata()[0]
    case = arguments(generator, [9, 9, 9], tile_scheduler_metadata=metadata)
    with pytest.raises(InvalidArgumentError, match="scale"):
        flash_mla_with_kvcache(**{**case, "softmax_scale": torch.nan})
    flash_mla_with_kvcache(**{**case, "causal": False})
    with pytest.raises(InvalidArgumentError, match=r"tile_scheduler_metadata \(causal\)"):
        flash_mla_with_kvcache(**case)


def test_a_kept_call_holds_no_cache(kernel, generator):
    """Its scales may be in the rows, and then a pointer to them says where."""
    for name in ("fp8_per_token", "fp8"):
        case = fp8_arguments(generator, [100, 0, 7], name)
        held = weakref.ref(case["k_cache"].untyped_storage())
        flash_mla_with_kvcache(**case)
        del case
        gc.collect()
        freed = held() is None
        assert freed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_fp8_kvcache", True), ("indices", torch.zeros(B, S, 4, dtype=torch.int32)),
        ("num_splits", torch.zeros(1)), ("head_dim_v", float(K)),
        ("block_table", torch.zeros(2, 2, dtype=torch.int32)), ("cache_seqlens", torch.zeros(B)),
        ("softmax_scale", -1.0), ("causal", 1),
    ],
)  # fmt: skip
def test_a_bad_call_beside_a_known_key(name, value, kernel, generator):
    flash_mla_with_kvcache(**arguments(generator, [9, 9, 9]))
    changes = {name: value}
    named = {"is_fp8_kvcache": "k_cache", "softmax_scale": "scale"}.get(name, name)
    error = UnsupportedError if name == "indices" else InvalidArgumentError
    with pytest.raises(error, match=f"^{named}"):
        flash_mla_with_kvcache(**arguments(generator, [9, 9, 9], **changes))


def test_indices_of_64_bits_and_two_heads_go_the_full_path(kernel, generator):
    for _ in range(2):
        case = arguments(generator, [9, 9, 9])
        flash_mla_with_kvcache(**{**case, "cache_seqlens": case["cache_seqlens"].long()})
        pages = case["k_cache"].expand(-1, -1, 2, -1).contiguous()
        flash_mla_with_kvcache(
            **{**case, "k_cache": pages, "tile_scheduler_metadata": get_mla_metadata()[0]}
        )
    assert (kernel.calls, kernel.repeats) == (2 + 2 * 2, 0)
