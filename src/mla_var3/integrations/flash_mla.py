"""The interface of FlashMLA's dense decoding, served by this package.

An engine that imports `flash_mla` imports this module instead. What is served: a paged bfloat16 or
float16 cache whose rows hold the latent part and the rope part side by side (576 wide, of which 512
are values), pages of 64 tokens or a multiple, causal or not, any number of heads. Sparse attention
and the fp8 cache are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mla_var3.attention.backends import AUTO
from mla_var3.attention.call import HEAD_WIDTH, may_repeat, mla_latent_attention
from mla_var3.attention.checks import INDEX_DTYPES, require_int, require_tensor
from mla_var3.attention.fast_path import (
    LatentForm,
    Result,
    call_form,
    known_form,
    latent_key,
    store_form,
)
from mla_var3.attention.sizes import PAGE_STEP
from mla_var3.attention.view import paged_view
from mla_var3.errors import InvalidArgumentError, UnsupportedError

_DTYPES = (torch.bfloat16, torch.float16)
_INFINITY, _NAN = float("inf"), float("nan")


@dataclass
class FlashMLASchedMeta:
    """What calls that share a schedule have in common; the first call fills it in.

    The kernels here schedule themselves, so all that is kept is the form of the calls, to refuse
    one that differs as FlashMLA does.

    Attributes:
        config: the form of the calls; None before the first.
    """

    config: dict[str, object] | None = None

    def require(self, config: dict[str, object]) -> None:
        """Keep the form of the first call, and require it of the later ones."""
        if self.config is None:
            self.config = config
        for name, value in config.items():
            if self.config[name] != value:
                raise InvalidArgumentError(
                    f"tile_scheduler_metadata ({name})",
                    f"{self.config[name]}, as in the first call with it",
                    value,
                )


@dataclass(frozen=True, slots=True)
class PagedForm:
    """A form of call with one KV head, see `attention/fast_path`.

    Attributes:
        latent: the call that it becomes.
        config: what metadata keeps of it.
        rope_at: bytes from a row's start to its rope part, in queries and pages.
    """

    latent: LatentForm
    config: dict[str, object]
    rope_at: int

    def serves(self, metadata: object) -> bool:
        """Whether metadata is for calls of this form; what is still empty becomes so."""
        if type(metadata) is not FlashMLASchedMeta:
            return False
        if metadata.config is None:
            metadata.config = self.config
        return metadata.config is self.config or metadata.config == self.config

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> Result | None:
        """Output and log-sum-exp; None where this call has to go the whole way."""
        queries, pages, rope_at = q.data_ptr(), k_cache.data_ptr(), self.rope_at
        result = self.latent.attend_at(
            queries, queries + rope_at, pages, pages + rope_at,
            table.data_ptr(), lengths.data_ptr(), 0, 0,
        )  # fmt: skip
        return None if result is None else (result[0], _by_head(result[1]))


def get_mla_metadata(*arguments: object, **options: object) -> tuple[FlashMLASchedMeta, None]:
    """The metadata that `flash_mla_with_kvcache` takes.

    Args:
        arguments: accepted and not used, as in FlashMLA; older callers pass lengths and heads.
        options: likewise.

    Returns:
        Empty metadata, and None in the place of the number of splits.
    """
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens over a paged latent cache.

    Args:
        q: absorbed queries with their rope part, `[b, s, h, k+p]`.
        k_cache: `[num_pages, page, h_k, k+p]`; `h_k` divides `h`, head i reads the rows of
            `i // (h / h_k)`.
        block_table: int32 `[b, max_pages]`; entries beyond a request's tokens may be anything.
        cache_seqlens: int32 `[b]`, tokens of each request, the queries being the newest.
        head_dim_v: k, the first columns of a row, which are the values.
        tile_scheduler_metadata: from `get_mla_metadata`.
        num_splits: None.
        softmax_scale: factor on the logits; `(k + p) ** -0.5` by default.
        causal: whether a query sees no position after its own.
        is_fp8_kvcache: only False is served.
        indices: sparse attention is not served; None.
        attn_sink: belongs to sparse attention; None.
        extra_k_cache: likewise.
        extra_indices_in_kvcache: likewise.
        topk_length: likewise.
        extra_topk_length: likewise.

    Returns:
        The output `[b, s, h, k]` and the natural log-sum-exp `[b, h, s]`, float32. A query that
        sees no token has zeros and, as in FlashMLA, a log-sum-exp of +inf.
    """
    key = None
    if may_repeat():
        key = call_form(
            "flash_mla", q, k_cache, block_table, cache_seqlens, head_dim_v, num_splits,
            softmax_scale, causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache,
            extra_indices_in_kvcache, topk_length, extra_topk_length,
        )  # fmt: skip
        form = known_form(key)
        if form is not None and form.serves(tile_scheduler_metadata):
            result: Result | None = form.attend(q, k_cache, block_table, cache_seqlens)
            if result is not None:
                return result
    sparse = {
        "indices": indices,
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in sparse.items():
        if value is not None:
            raise UnsupportedError(f"{name}: expected None (dense attention), got sparse attention")
    if is_fp8_kvcache:
        raise UnsupportedError("is_fp8_kvcache: expected False (a 16-bit cache), got True")
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise InvalidArgumentError(
            "tile_scheduler_metadata",
            "the first value of get_mla_metadata",
            type(tile_scheduler_metadata).__name__,
        )
    if num_splits is not None:
        raise InvalidArgumentError("num_splits", "None", type(num_splits).__name__)
    labels = [("b", None), ("s", None), ("h", None), ("k+p", None)]
    require_tensor("q", q, labels, _DTYPES, None)
    b, _, h, width = q.shape
    require_int("head_dim_v", head_dim_v, minimum=1, maximum=width - 1, maximum_name="k+p-1")
    device = q.device
    pages = [("num_pages", None), ("page", None), ("h_k", None), ("k+p", width)]
    require_tensor("k_cache", k_cache, pages, [q.dtype], device)
    require_tensor(
        "block_table", block_table, [("b", b), ("max_pages", None)], INDEX_DTYPES, device
    )
    require_tensor("cache_seqlens", cache_seqlens, [("b", b)], INDEX_DTYPES, device)
    assert block_table is not None and cache_seqlens is not None
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if page_size % PAGE_STEP:
        raise InvalidArgumentError("k_cache", f"pages of a multiple of {PAGE_STEP}", page_size)
    if kv_heads == 0 or h % kv_heads:
        raise InvalidArgumentError("k_cache", f"h_k that divides h={h}", kv_heads)
    config: dict[str, object] = {
        "b": b,
        "s": q.shape[1],
        "h": h,
        "page": page_size,
        "h_k": kv_heads,
        "causal": causal,
    }
    tile_scheduler_metadata.require(config)
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    group = h // kv_heads
    outputs, lses = [], []
    for head in range(kv_heads):
        rows = q[:, :, head * group : (head + 1) * group]
        operands = (
            rows[..., :head_dim_v],
            rows[..., head_dim_v:],
            paged_view(k_cache[:, :, head], block_table, cache_seqlens, k=head_dim_v),
        )
        options: dict[str, Any] = {"causal": causal, "scale": scale}
        output, lse = mla_latent_attention(*operands, **options)
        outputs.append(output)
        lses.append(lse)
    if kv_heads > 1:
        return torch.cat(outputs, dim=2), _by_head(torch.cat(lses, dim=2))
    if block_table.dtype is cache_seqlens.dtype is torch.int32:
        latent = known_form(latent_key(*operands, HEAD_WIDTH, AUTO, options))
        if latent is not None:
            store_form(key, PagedForm(latent, config, head_dim_v * q.element_size()))
    return outputs[0], _by_head(lses[0])


def _by_head(lse: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp `[b, s, h]` as FlashMLA gives it: `[b, h, s]`, +inf instead of -inf.

    In place, and turned as a view, which is what FlashMLA returns too.
    """
    return lse.nan_to_num_(_NAN, _INFINITY, _INFINITY).mT
