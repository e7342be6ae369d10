"""FlashMLA's dense decoding interface on the kernels of this package.

An engine that imports `flash_mla` imports this module instead; `stand_in()` arranges that in the
process, and so does

    python -m mla_var3.integrations.flash_mla -m some_engine its arguments

It serves a paged bfloat16 or float16 cache whose rows hold the latent part and the rope part side
by side (576 wide, of which 512 are values), pages of 64 tokens or a multiple, causal or not, any
number of heads. Sparse attention is refused. Callers of the older interface, whose metadata are
tensors, are served too.

An fp8 cache is one of `op/mla/cache_formats.py`, recognised by the bytes of its rows: 576 with one
scale for the cache (`descale_k`), as vLLM's fork of FlashMLA takes it, 644 with one per token, or
656 as upstream lays out the cache of its sparse kernel. On Hopper the kernel for 8-bit caches reads
the first two; cuTile serves the others. That kernel takes queries in 16 bits and rounds each row
with a scale of its own, so e4m3 queries are first converted to bfloat16.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_var3.attention.backends.registry import AUTO
from mla_var3.attention.cache.sizes import PAGE_STEP
from mla_var3.attention.cache.view import CacheView, paged_view
from mla_var3.attention.call import HEAD_WIDTH, checks_values, execute, is_traced
from mla_var3.attention.replay.key import (
    CallKey,
    CallKind,
    Layout,
    Tensors,
    find_replay,
    store_replay,
)
from mla_var3.attention.replay.replay import PointerReader, Replay
from mla_var3.attention.request.checks import INDEX_DTYPES, require_tensor
from mla_var3.attention.request.validate import Options, latent_task
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.cache_formats import BYTE_DTYPES, FORMATS, CacheFormat
from mla_var3.op.mla.problem import require_int
from mla_var3.op.mla.window.quantise import E4M3
from mla_var3.runtime.cute.torch_fast import tensor_maker

OLDER_METADATA = 8
"""Columns of the metadata of the older interface."""
_DTYPES = (torch.bfloat16, torch.float16)
_KIND = CallKind(("q", "k_cache", "block_table", "cache_seqlens"))
_POINTERS = ("q_latent", "q_rope", "latent", "rope", "block_table", "lengths")
"""The kernel's operands that a replay has pointers for; rows hold latent and rope part."""
_FP8_POINTERS = (*_POINTERS, "scales")


@dataclass
class FlashMLASchedMeta:
    """What calls that share a schedule have in common; the first call fills it in.

    The kernels here schedule themselves, so only the sizes and options of the calls are kept, to
    refuse one that differs as FlashMLA does.
    """

    config: dict[str, object] | None = None

    def require(self, config: dict[str, object]) -> None:
        """Require the sizes of the first call, if there was one."""
        if self.config is None:
            return
        for name, value in config.items():
            if self.config[name] != value:
                expected = f"{self.config[name]}, as in the first call with it"
                raise InvalidArgumentError(f"tile_scheduler_metadata ({name})", expected, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedReplay(Replay):
    """A call with one KV head, whose LSE `[b, h, s]` is `[b, s, h]` in memory.

    `config` is what the metadata of such calls holds.
    """

    config: dict[str, object]

    def serves(self, metadata: object) -> bool:
        """Whether metadata is for these calls; empty metadata becomes so."""
        if type(metadata) is not FlashMLASchedMeta:
            return isinstance(metadata, Tensor)
        if metadata.config is not self.config:
            if metadata.config is not None and metadata.config != self.config:
                return False
            metadata.config = self.config  # the same object, which the next call sees at once
        return True


def _pointer_reader(rope_at: int) -> PointerReader:
    """What reads the pointers of `_POINTERS`; rope parts lie `rope_at` bytes behind row starts."""

    def read(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
        q, pages, block_table, lengths = tensors
        row, page = q.data_ptr(), pages.data_ptr()
        return (
            row, row + rope_at, page, page + rope_at, block_table.data_ptr(), lengths.data_ptr(),
            out, lse,
        )  # fmt: skip

    return read


def _fp8_pointer_reader(view: CacheView, q_rope_at: int, pages: Tensor) -> PointerReader:
    """What reads the pointers of `_FP8_POINTERS` from the tensors of a call on an fp8 cache.

    The scales are in the pages, or a fifth tensor, or those of the first call, with this view of
    these pages, where the cache has none. Nothing of the first call's cache is kept alive. The rope
    part of a query row is `q_rope_at` bytes behind its start.
    """
    assert view.scales is not None
    rope_at = view.rope.data_ptr() - pages.data_ptr()
    in_pages = view.scales.dim() > 1
    scales_at = view.scales.data_ptr() - pages.data_ptr() if in_pages else 0
    kept = None if in_pages else view.scales

    def read(tensors: Tensors, out: int, lse: int) -> tuple[int, ...]:
        q, pages, block_table, lengths, *scale = tensors
        row, page = q.data_ptr(), pages.data_ptr()
        scales = scale[0] if scale else kept
        return (
            row, row + q_rope_at, page, page + rope_at, block_table.data_ptr(), lengths.data_ptr(),
            page + scales_at if scales is None else scales.data_ptr(), out, lse,
        )  # fmt: skip

    return read


def get_mla_metadata(
    cache_seqlens: Tensor | None = None, *arguments: object, **options: object
) -> tuple[FlashMLASchedMeta, None] | tuple[Tensor, Tensor]:
    """The metadata that `flash_mla_with_kvcache` takes.

    Empty metadata, and None in the place of the number of splits. Callers of the older interface
    pass lengths, and numbers of heads, which are not used; they get two tensors, which they copy
    into buffers of their own and nothing reads.
    """
    if not isinstance(cache_seqlens, Tensor):
        return FlashMLASchedMeta(), None
    metadata = cache_seqlens.new_zeros((1, OLDER_METADATA), dtype=torch.int32)
    return metadata, cache_seqlens.new_zeros((cache_seqlens.shape[0] + 1,), dtype=torch.int32)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    enable_batch_invariant: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the newest tokens over a paged latent cache.

    Args:
        q: latent queries with their rope part, `[b, s, h, k+p]`; e4m3 beside an fp8 cache, too.
        k_cache: `[num_pages, page, h_k, k+p]`; `h_k` divides `h`, head i reads the rows of
            `i // (h / h_k)`. In fp8 `[num_pages, page, h_k, bytes]`.
        block_table: int32 `[b, max_pages]`; entries beyond a request's tokens may be anything.
        cache_seqlens: int32 `[b]`, tokens of each request, the queries being the newest.
        head_dim_v: k, the first columns of a row, which are the values.
        tile_scheduler_metadata: from `get_mla_metadata`.
        num_splits: the second value of `get_mla_metadata`.
        softmax_scale: factor on the logits; `(k + p) ** -0.5` by default.
        causal: whether a query sees no position after its own.
        is_fp8_kvcache: whether `k_cache` is in fp8: float8_e4m3fn, uint8 or int8.
        indices: sparse attention is not served; None.
        attn_sink: belongs to sparse attention; None.
        extra_k_cache: likewise.
        extra_indices_in_kvcache: likewise.
        topk_length: likewise.
        extra_topk_length: likewise.
        out: where the output goes, `[b, s, h, k]`; by default a new tensor. For `h_k` of 1.
        enable_batch_invariant: whether a request's result must not depend on the rest of the batch.
        descale_q: the scale of e4m3 queries, float32 of one element; None for 1. Such queries are
            converted to bfloat16 first.
        descale_k: the scale of an fp8 cache that holds none, likewise.

    Returns:
        The output `[b, s, h, k]`, bfloat16 for e4m3 queries, and the LSE (natural log) `[b, h, s]`,
        float32. A query that sees no token has zeros and, as in FlashMLA, an LSE of +inf.
    """
    key: CallKey | None = None
    # What is not served has no key; most calls give none of it.
    if (
        (num_splits is None or isinstance(tile_scheduler_metadata, Tensor))
        and descale_q is None
        and out is None
        and not enable_batch_invariant
        and indices is None
        and attn_sink is None
        and extra_k_cache is None
        and extra_indices_in_kvcache is None
        and topk_length is None
        and extra_topk_length is None
        and not (is_traced() or checks_values())
    ):
        tensors: Tensors = (q, k_cache, block_table, cache_seqlens)
        if descale_k is not None:
            tensors = (*tensors, descale_k)
        key = (
            (_KIND, head_dim_v.__class__, head_dim_v, softmax_scale.__class__,
             softmax_scale, causal.__class__, causal, is_fp8_kvcache, descale_k is None),
            tensors,
        )  # fmt: skip
        replay = find_replay(key)
        if replay is not None and replay.serves(tile_scheduler_metadata):
            repeated: tuple[Tensor, Tensor] | None = replay.attend(key[1])
            if repeated is not None:
                return repeated
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
    if isinstance(tile_scheduler_metadata, Tensor):
        tile_scheduler_metadata = FlashMLASchedMeta()  # schedules have no sizes to compare
    elif not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        got = type(tile_scheduler_metadata).__name__
        expected = "the first value of get_mla_metadata"
        raise InvalidArgumentError("tile_scheduler_metadata", expected, got)
    elif num_splits is not None:
        raise InvalidArgumentError("num_splits", "None", type(num_splits).__name__)
    labels = [("b", None), ("s", None), ("h", None), ("k+p", None)]
    require_tensor("q", q, labels, (*_DTYPES, E4M3) if is_fp8_kvcache else _DTYPES, None)
    b, _, h, width = q.shape
    require_int("head_dim_v", head_dim_v, minimum=1, maximum=width, maximum_name="k+p")
    device = q.device
    pages = [("num_pages", None), ("page", None), ("h_k", None)]
    fmt: CacheFormat | None = None
    if is_fp8_kvcache:
        require_tensor("k_cache", k_cache, [*pages, ("bytes", None)], BYTE_DTYPES, device)
        fmt = _format_of_rows(k_cache.shape[3], head_dim_v, width - head_dim_v)
        if q.dtype is E4M3:
            key = None  # its replay would have pointers to queries that are converted first
        q = _wide_queries(q, descale_q)
    else:
        require_tensor("k_cache", k_cache, [*pages, ("k+p", width)], [q.dtype], device)
        for name, given in (("descale_q", descale_q), ("descale_k", descale_k)):
            if given is not None:
                raise InvalidArgumentError(name, "None beside a 16-bit cache", "a scale")
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
    if out is not None and kv_heads > 1:
        raise InvalidArgumentError("out", f"None with h_k={kv_heads}", "a tensor")
    if fmt is not None and fmt.by_page and kv_heads > 1:
        raise InvalidArgumentError("k_cache", f"h_k of 1 ({fmt.name})", kv_heads)
    sizes = {"b": b, "s": q.shape[1], "h": h, "page": page_size, "h_k": kv_heads}
    flags = {"causal": causal, "enable_batch_invariant": enable_batch_invariant}
    config: dict[str, object] = {**sizes, **flags}
    tile_scheduler_metadata.require(config)
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    group = h // kv_heads
    options = Options(causal=causal, scale=scale, out=out, batch_invariant=enable_batch_invariant)
    outputs, lses = [], []
    launch = None
    for head in range(kv_heads):
        rows = q[:, :, head * group : (head + 1) * group]
        view = paged_view(
            k_cache[:, :, head], block_table, cache_seqlens, k=head_dim_v,
            format=None if fmt is None else fmt.name, scale=descale_k,
        )  # fmt: skip
        operands = rows[..., :head_dim_v], rows[..., head_dim_v:], view
        task = replace(latent_task(*operands, options, HEAD_WIDTH), empty_positive=True)
        output, lse, launch = execute(task, AUTO)
        outputs.append(output)
        lses.append(lse)
    tile_scheduler_metadata.config = config  # not that of a call that was refused
    if kv_heads > 1:
        return torch.cat(outputs, dim=2), torch.cat(lses, dim=2).mT
    result = outputs[0], lses[0].mT
    if launch is None or launch.stream() is None:  # captured: see `keep_replay`
        return result
    if block_table.dtype is cache_seqlens.dtype is torch.int32:
        at = head_dim_v * q.element_size()
        reader = _pointer_reader(at) if fmt is None else _fp8_pointer_reader(view, at, k_cache)
        replay = PagedReplay(
            launch=launch,
            names=_POINTERS if fmt is None else _FP8_POINTERS,
            outputs=("o_latent", "lse"),
            fixed={},
            pointers=reader,
            output=_layout_of(result[0]),
            lse=_layout_of(result[1]),
            dtype=q.dtype,
            device=device,
            empty=tensor_maker(device),
            config=config,
        )
        store_replay(key, replay)
    return result


def _format_of_rows(row_bytes: int, k: int, p: int) -> CacheFormat:
    known = {fmt.row_bytes(k, p): fmt for fmt in FORMATS.values()}
    if row_bytes not in known:
        sizes = ", ".join(f"{size} ({fmt.name})" for size, fmt in sorted(known.items()))
        raise InvalidArgumentError("k_cache", f"rows of {sizes} bytes", row_bytes)
    return known[row_bytes]


def _wide_queries(q: Tensor, scale: Tensor | None) -> Tensor:
    if q.dtype is not E4M3:
        if scale is not None:
            raise InvalidArgumentError("descale_q", f"None beside queries in {q.dtype}", "a scale")
        return q
    if scale is None:
        return q.to(torch.bfloat16)
    if not isinstance(scale, Tensor) or scale.numel() != 1:
        got = list(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidArgumentError("descale_q", "a tensor of one element", got)
    return (q.float() * scale.to(q.device, torch.float32).reshape(1)).to(torch.bfloat16)


def _layout_of(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride()


def stand_in() -> None:
    """Let `import flash_mla` find this module in this process, whether FlashMLA is there or not."""
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        sys.modules[name] = sys.modules[flash_mla_with_kvcache.__module__]


def main(arguments: Sequence[str]) -> None:
    """Run a script or, after `-m`, a module, with this module in FlashMLA's place."""
    if not arguments or arguments[0] in ("-h", "--help") or list(arguments) == ["-m"]:
        usage = "python -m mla_var3.integrations.flash_mla [-m module | script] ..."
        raise SystemExit(f"usage: {usage}")
    from mla_var3.integrations import flash_mla

    flash_mla.stand_in()  # of the imported module, not of this program
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
