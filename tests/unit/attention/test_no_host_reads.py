"""What a CUDA graph captures never asks the device: on tensors without values that would raise."""

from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.errors import InvalidArgumentError

from .attention_support import registered

B, S, H, D, P, K = 3, 4, 2, 8, 8, 16


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weights() -> dict[str, torch.Tensor]:
    return {"w_uk": empty(H, D, K), "w_uv": empty(H, K, D)}


def make_cache(**options: Any) -> LatentCache:
    return LatentCache.allocate(
        B, 200, k=K, p=P, device="meta", heads=H, head_dim=D, **{"window": 16, **options}
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 64},
        {"page_size": 64, "prefix": 64},
        {"dtype": "fp8"},
        {"dtype": "fp8_per_token", "page_size": 64, "prefix": 64},
        {"window": 128, "window_dtype": "fp8"},
    ],
)
def test_the_cache(options):
    cache, counts = make_cache(**options), empty(B, dtype=torch.int32)
    if "prefix" in options:
        cache.set_prefix(empty(64, K), empty(64, P), **weights())
    taken = cache.append(empty(B, 70, K), empty(B, 70, P), counts, **weights())
    assert taken.shape == (B,)
    bounds = empty(B + 1, dtype=torch.int32)
    cache.append(empty(9, K), empty(9, P), cu_seqlens=bounds, **weights())
    cache.fork(empty(1, dtype=torch.int32), empty(2, dtype=torch.int32))
    cache.append(empty(B, 70, K), empty(B, 70, P), counts, **weights())
    cache.truncate(counts, **weights(), most=3)
    cache.evict(empty(B, dtype=torch.bool))
    cache.evict(empty(2, dtype=torch.int64))
    with pytest.raises((RuntimeError, NotImplementedError)):
        cache.check()  # this one does ask


@pytest.mark.parametrize(
    "paged",
    [
        {},
        {"page_size": 64},
        {"page_size": 64, "dtype": "fp8_per_token"},
        {"window": 128, "window_dtype": "fp8"},
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"tree_mask": torch.empty(S, dtype=torch.int32, device="meta")},
        {"tree_mask": torch.empty(B, S, S, dtype=torch.bool, device="meta")},
        {"cu_seqlens_q": torch.empty(B + 1, dtype=torch.int32, device="meta"), "max_q": 5},
        {"total_lengths": torch.empty(B, dtype=torch.int32, device="meta"), "max_kv": 100},
    ],
)
def test_the_attention(paged, options):
    leading = (9,) if "cu_seqlens_q" in options else (B, S)
    output, lse = mla_var3.mla_attention(
        empty(*leading, H, D), empty(*leading, H, P), make_cache(**paged), **weights(),
        kernel="torch_tiled", return_lse=True, **options,
    )  # fmt: skip
    assert output.shape == (*leading, H, D) and lse.shape == (*leading, H)


@pytest.mark.parametrize("paged", [{}, {"page_size": 64}])
@pytest.mark.parametrize("packed", [True, False])
def test_shared_prefixes(paged, packed):
    cache = LatentCache.allocate(B, 256, k=K, p=P, device="meta", **paged)
    groups = mla_var3.PrefixGroups(empty(2, B, dtype=torch.int32), empty(2, 2, dtype=torch.int32))
    options: dict[str, Any] = {}
    if packed:
        options = {"cu_seqlens_q": empty(B + 1, dtype=torch.int32), "max_q": 5}
    leading = (9,) if packed else (B, S)
    with registered(PrefixBackend(TorchTiled())) as backend:
        output, lse = mla_var3.mla_latent_attention(
            empty(*leading, H, K), empty(*leading, H, P), cache, prefix=groups,
            kernel=backend.kernel, **options,
        )  # fmt: skip
    assert output.shape == (*leading, H, K) and lse.shape == (*leading, H)


def test_packed_queries_need_their_bound():
    bounds = empty(B + 1, dtype=torch.int32)
    with pytest.raises(InvalidArgumentError, match="max_q: expected the most queries of any"):
        mla_var3.mla_attention(
            empty(9, H, D), empty(9, H, P), make_cache(), **weights(), kernel="torch_tiled",
            cu_seqlens_q=bounds,
        )  # fmt: skip
