"""HyperMLA as an MLA attention backend of vLLM.

vLLM computes the projections around the attention and the prefill of long prompts; this backend
computes decode, speculative verification and short extensions on the latent cache, with a ragged
number of query tokens per request. The cache is in 16 bits, or in e4m3 with vLLM's scale per layer
(`--kv-cache-dtype fp8`); queries stay in 16 bits. Interfaces differ between vLLM versions; this
module looks at what is there, never at a version number.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention import backend as attention_interface
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf

import mla_var3
from mla_var3.integrations import paged
from mla_var3.integrations.vllm import HOPPER, NAME, NO_CUTE, other_gpu
from mla_var3.op.mla.cache_formats import PER_TENSOR
from mla_var3.op.mla.window.quantise import E4M3

# vLLM shows the loggers below its own name only.
log = init_logger("vllm.plugins.hyper_mla")

FP8_CACHES = ("fp8", "fp8_e4m3")
"""vLLM's names of a cache in e4m3 with one scale."""
FP8_WIDTH = paged.LATENT_WIDTH + paged.ROPE_WIDTH
"""Columns of the rows of such a cache that the kernel serves."""
_UNSUPPORTED_DRAFTS = "dflash", "dspark"
"""Speculation methods whose drafts attend without a causal mask."""


class HyperMLABackend(MLACommonBackend):
    """What the backend supports, as vLLM asks for it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_CACHES]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(paged.PAGE_SIZE)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(paged.ROW_WIDTHS)

    @staticmethod
    def get_builder_cls() -> type[HyperMLAMetadataBuilder]:
        return HyperMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[HyperMLAImpl]:
        return HyperMLAImpl

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major == HOPPER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Adaptive verification needs the bound on query lengths that newer vLLM passes."""
        return hasattr(attention_interface, "max_decode_query_len")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No request is split in that mode, so its result does not depend on the batch."""
        return True

    @classmethod
    def validate_configuration(cls, *arguments: Any, **options: Any) -> list[str]:
        """The reasons against this configuration: vLLM's, then ours with the remedy."""
        reasons: list[str] = super().validate_configuration(*arguments, **options)
        return reasons + refusals(**options) if reasons else reasons

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any
    ) -> str | None:
        if find_spec("cutlass") is None:
            return NO_CUTE
        if not fits_rows(kv_cache_dtype, head_size):
            return (
                f"{NAME} serves an fp8 cache with rows of {FP8_WIDTH} columns, this model has "
                f"{head_size}: --kv-cache-dtype auto"
            )
        if kv_cache_dtype in ("float16", "bfloat16") and f"torch.{kv_cache_dtype}" != str(dtype):
            return f"{NAME} needs a cache of the model's dtype: --kv-cache-dtype auto"
        return None


def fits_rows(kv_cache_dtype: str | None, head_size: int) -> bool:
    """Whether the kernel reads rows of so many columns in a cache of this dtype."""
    return kv_cache_dtype not in FP8_CACHES or head_size == FP8_WIDTH


def refusals(
    *,
    device_capability: Any = None,
    kv_cache_dtype: str | None = None,
    use_mla: bool = True,
    use_sparse: bool = False,
    use_non_causal: bool = False,
    head_size: int = 0,
    block_size: int | None = None,
    **_: Any,
) -> list[str]:
    """Why this backend does not serve a configuration, and what to change."""
    reasons = other_gpu(device_capability)
    if not HyperMLABackend.supports_kv_cache_dtype(kv_cache_dtype):
        reasons.append(f"{NAME} does not read {kv_cache_dtype}: --kv-cache-dtype auto, or fp8")
    if not use_mla or use_non_causal:
        reasons.append(
            f"{NAME} serves causal MLA; a draft model with other attention needs a backend of its "
            'own: "attention_backend" in --speculative-config'
        )
    elif use_sparse:
        reasons.append(f"{NAME} serves dense MLA; this model's attention is sparse")
    elif head_size and head_size not in paged.ROW_WIDTHS:
        served = ", ".join(map(str, paged.ROW_WIDTHS))
        reasons.append(f"{NAME} serves cache rows of {served} columns, this model has {head_size}")
    if block_size is not None and block_size % paged.PAGE_SIZE:
        reasons.append(
            f"{NAME} needs --block-size {paged.PAGE_SIZE} or a multiple, got {block_size}"
        )
    return reasons


@dataclass
class HyperMLADecodeMetadata(MLACommonDecodeMetadata):
    """The decode part of a batch, on the device.

    Attributes:
        query_start_loc: int32 `[b+1]`, first query token of each request.
        max_query_len: upper bound on the query tokens of a request.
        step: the forward pass, whose layers share a schedule.
    """

    query_start_loc: Tensor
    max_query_len: int
    step: paged.Step | None


@dataclass
class HyperMLAMetadata(MLACommonMetadata[HyperMLADecodeMetadata]):
    """vLLM's metadata of a batch with the decode part above."""

    def __post_init__(self) -> None:
        """Not the base class's check: it refuses rows that vLLM's own backends do not serve."""


class HyperMLAMetadataBuilder(MLACommonMetadataBuilder[HyperMLAMetadata]):
    """Builds the metadata, and decides which batches are decode and which fit CUDA graphs."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        heads = query_heads(vllm_config, layer_names)
        on_gpu = torch.device(device).type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else ""
        # The base class raises it to 1 + draft tokens where it is lower.
        eight_bits = kv_cache_spec.dtype.itemsize == 1  # of these layers, which may differ
        self.reorder_batch_threshold = paged.latent_crossover(
            heads, name, PER_TENSOR.name if eight_bits else None
        )
        interleaved = interleaves_tokens(vllm_config.parallel_config)
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, HyperMLAMetadata,
            **accepted(MLACommonMetadataBuilder.__init__, supports_dcp_with_varlen=interleaved),
        )  # fmt: skip
        self._decode_queries = decode_queries(vllm_config)
        # A schedule that one layer alone reads costs more than it saves.
        self._step = paged.Step(device) if len(layer_names) > 1 else None
        forget_caches(vllm_config, layer_names)
        # The decode metadata are views of the runner's persistent tensors. Under DCP the local
        # lengths are not, so a captured draft step would read stale ones.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        if on_gpu:
            k, p = paged.ROW_WIDTHS[kv_cache_spec.head_size]
            # Under DCP each rank attends with the gathered heads.
            paged.warm_up(
                heads * self.dcp_world_size, self.reorder_batch_threshold, device=device,
                dtype=vllm_config.model_config.dtype, k=k, p=p,
                cache_dtype=E4M3 if eight_bits else None,
                page_size=kv_cache_spec.block_size,
                shards=self.dcp_world_size if interleaved else 1,
                batch_invariant=batch_invariant(), step=self._step is not None,
            )  # fmt: skip
        _log_start(heads, self.reorder_batch_threshold, name or "cpu")

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Full CUDA graphs replay ragged verify batches: the kernel schedules on the device."""
        return decode_queries(vllm_config)

    def update_draft_decode_metadata(self, metadata: HyperMLAMetadata) -> None:
        """Nothing to do: the metadata refer to the runner's own tensors."""

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int | None = None,
        dcp_tot_seq_lens_device: Tensor | None = None,
    ) -> HyperMLADecodeMetadata:
        most = int((query_start_loc_cpu[1:] - query_start_loc_cpu[:-1]).max())
        if max_query_len is not None:
            # Adaptive verification moves drafts between requests on the device, and a graph is
            # captured with fewer tokens than it will replay. The bound given here may be that of
            # a prefill in the same batch, which would make the kernel plan for too many rows.
            most = max(most, min(max_query_len, self._decode_queries))
        return HyperMLADecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max(most, 1),
            step=None if self._step is None else self._step.next(),
        )


class HyperMLAImpl(MLACommonImpl[HyperMLAMetadata]):
    """The attention of one layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        """Refuse what the kernel does not compute, and select this backend for the drafts too."""
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        extras = {
            "ALiBi": alibi_slopes,
            "a sliding window": sliding_window,
            "a soft cap on logits": logits_soft_cap,
        }
        for what, value in extras.items():
            if value:
                raise NotImplementedError(f"{NAME} does not serve {what}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{NAME} serves decoder attention, not {attn_type}")
        self.supports_quant_query_input = False  # the kernel rounds queries itself, row by row
        config = get_current_vllm_config()
        self._batch_invariant = batch_invariant()
        self._sharded = interleaves_tokens(config.parallel_config)
        # A cache and its views. vLLM empties this name wherever it gives up a layer's cache.
        self._k_scale_cache: tuple[Tensor, paged.Pages] | None = None
        share_with_draft(config)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: HyperMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        decode = attn_metadata.decode
        assert decode is not None
        if not isinstance(q, tuple):
            q = q[..., : self.kv_lora_rank], q[..., self.kv_lora_rank :]
        pages = self._pages_of(kv_c_and_k_pe_cache, layer)
        shards = {}
        if self.dcp_world_size > 1 and self._sharded:
            shards = {
                "total_lengths": decode.dcp_tot_seq_lens,
                "shards": self.dcp_world_size,
                "shard": self.dcp_rank,
            }
        return paged.paged_attention(
            q[0], q[1], pages, decode.block_table, decode.seq_lens, scale=self.scale,
            max_q=decode.max_query_len, query_start_loc=decode.query_start_loc,
            return_lse=self.need_to_return_lse_for_decode, batch_invariant=self._batch_invariant,
            step=decode.step, **shards,
        )  # fmt: skip

    def _pages_of(self, cache: Tensor, layer: Any) -> paged.Pages:
        """The views of the layer's cache. vLLM makes a new view of an 8-bit cache in every call."""
        known = self._k_scale_cache
        if known is None or (known[0] is not cache and paged.moved(known[0], cache)):
            eight_bits = cache.dtype.itemsize == 1
            scale = layer._k_scale.reshape(1) if eight_bits else None
            known = cache, paged.Pages.of(cache, self.kv_lora_rank, scale)
            self._k_scale_cache = known
        return known[1]


def query_heads(vllm_config: Any, layer_names: list[str]) -> int:
    """Query heads of these layers on this GPU; a draft may have others than its target."""
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    heads = getattr(layers.get(layer_names[0]), "num_heads", None)
    return heads or int(
        vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    )


def forget_caches(vllm_config: Any, layer_names: list[str]) -> None:
    """Let our layers forget their views of a cache, before vLLM allocates another.

    It profiles CUDA graphs with a small cache first, and counts on its memory afterwards.
    """
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    for name in layer_names:
        impl = getattr(layers.get(name), "impl", None)
        if isinstance(impl, HyperMLAImpl):
            impl._k_scale_cache = None


def accepted(function: Any, **options: Any) -> dict[str, Any]:
    """The options that a function of this vLLM has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def interleaves_tokens(parallel: Any) -> bool:
    """Whether decode context parallelism puts token i on rank i % ranks.

    With longer runs per rank the kernel cannot mask several queries of a request; vLLM then
    decodes one token at a time.
    """
    return getattr(parallel, "cp_kv_cache_interleave_size", 1) == 1


def batch_invariant() -> bool:
    """Whether vLLM was asked for results that do not depend on the batch."""
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))


def decode_queries(vllm_config: Any) -> int:
    """The most query tokens of a decoding request: 1, or those of a verification."""
    if hasattr(attention_interface, "max_decode_query_len"):
        return int(attention_interface.max_decode_query_len(vllm_config))
    speculative = vllm_config.speculative_config
    return 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)


def share_with_draft(vllm_config: Any) -> None:
    """Select the target's backend for MTP and EAGLE draft layers.

    vLLM selects a backend for the draft on its own unless `speculative_config` names one. The
    draft model is built after the target's layers, so naming it here is in time.
    """
    speculative = vllm_config.speculative_config
    chosen = vllm_config.attention_config.backend
    if speculative is None or chosen is None or chosen.get_path().split(".")[0] != "mla_var3":
        return
    draft = getattr(speculative, "draft_model_config", None)
    cache_dtype = (
        getattr(speculative, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype
    )
    if (
        speculative.attention_backend is not None
        or draft is None
        or getattr(speculative, "method", None) in _UNSUPPORTED_DRAFTS
        or not draft.use_mla
        or draft.get_head_size() not in paged.ROW_WIDTHS
        or not HyperMLABackend.supports_kv_cache_dtype(cache_dtype)
        or not fits_rows(cache_dtype, draft.get_head_size())
    ):
        return
    speculative.attention_backend = chosen
    log.info("%s also serves the draft layers (speculative_config.attention_backend)", NAME)


@lru_cache(maxsize=8)
def _log_start(heads: int, threshold: int, device: str) -> None:
    log.info(
        "hyper-mla %s: kernel %s on %s, %d heads, latent up to %d query tokens per request, where "
        "the cost model sees decompressed prefill ahead",
        mla_var3.__version__,
        paged.SERVING_KERNEL if device != "cpu" else "torch_tiled",
        device,
        heads,
        threshold,
    )
