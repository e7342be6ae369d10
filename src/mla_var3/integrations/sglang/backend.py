"""HyperMLA as an MLA attention backend of SGLang: decode, verification, extension.

All metadata are computed on the device into tensors that CUDA graphs can hold on to. Chains of
drafts are causal; trees (topk > 1) come as a mask over the draft tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

import mla_var3
from mla_var3.integrations import paged
from mla_var3.integrations.sglang import NAME, PREFILL
from mla_var3.op.mla.window.quantise import E4M3

try:
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode
except ImportError:  # SGLang 0.5.16
    VerifyMask = None

log = logging.getLogger(__name__)

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, E4M3)
"""Dtypes of the cache; one in e4m3 has a scale of 1, because SGLang's cache rounds what it gets
without dividing by the layer's `k_scale`."""


@dataclass(frozen=True)
class Metadata:
    """What the layers of one forward pass share.

    The block table is int32 `[b, max_pages]`; lengths are int32 `[b]`, with the new tokens. Each
    request has `max_q` query tokens, or with `query_start_loc`, int32 `[b+1]`, at most so many. A
    tree mask is bool `[b, max_q, max_q]`; chains have none.
    """

    block_table: Tensor
    lengths: Tensor
    max_q: int
    query_start_loc: Tensor | None = None
    tree_mask: Tensor | None = None


class HyperMLABackend(AttentionBackend):
    """Latent attention of one model runner."""

    # SGLang 0.5.16 sizes the mask of a verification by them.
    needs_cpu_seq_lens: bool = VerifyMask is None

    def __init__(self, runner: Any) -> None:
        super().__init__()
        config = runner.model_config
        if not runner.use_mla_backend:
            raise ValueError(f"{NAME} serves MLA models only")
        if runner.kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"{NAME} does not read {runner.kv_cache_dtype}: --kv-cache-dtype auto, or fp8_e4m3"
            )
        text = getattr(config, "hf_text_config", None)
        if getattr(text, "index_topk", None) is not None:
            raise ValueError(f"{NAME} serves dense attention, the model has sparse (index_topk)")
        settings = getattr(runner, "server_args", None)
        self._batch_invariant = bool(getattr(settings, "enable_deterministic_inference", False))
        self.page_size: int = runner.page_size
        self.k: int = config.kv_lora_rank
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.data_type = runner.kv_cache_dtype
        self.draft_tokens = draft_tokens(runner)
        self.device = torch.device(runner.device)
        # A verification may end behind the context: SGLang has slots for its tokens there.
        pages = -(-(config.context_len + self.draft_tokens) // self.page_size)
        # A view: the first token of each page of each request.
        self._first_tokens = runner.req_to_token_pool.req_to_token[:, :: self.page_size][:, :pages]
        # A draft has one layer, for which a schedule that layers share costs more than it saves.
        draft = getattr(runner, "is_draft_worker", False)
        self._step = None if draft else paged.Step(self.device)
        self._step_metadata: Metadata | None = None
        self._layers: dict[int, tuple[Tensor, paged.Pages]] = {}
        self._graph: Metadata | None = None
        self._verify_mask: Any = None
        self.forward_metadata: Metadata | None = None
        # SGLang scales the queries of Llama 4's kind only where it joins their parts.
        _register(apart=getattr(text, "llama_4_scaling", None) is None)
        if self.device.type == "cuda":
            self._prepare(runner)

    def _prepare(self, runner: Any) -> None:
        major, minor = torch.cuda.get_device_capability(self.device)
        if major != 9:
            raise ValueError(f"{NAME} runs on Hopper (sm_90), this GPU is sm_{major}{minor}")
        if self.page_size % paged.PAGE_SIZE:
            raise ValueError(
                f"{NAME} needs --page-size {paged.PAGE_SIZE} or a multiple, got {self.page_size}"
            )
        heads = runner.model_config.num_attention_heads // attention_ranks()
        for s, tree in {(1, False), (self.draft_tokens, False), (self.draft_tokens, True)}:
            if s:
                paged.warm_up(
                    heads, s, device=self.device, dtype=runner.dtype, k=self.k,
                    p=runner.model_config.qk_rope_head_dim,
                    cache_dtype=E4M3 if self.data_type is E4M3 else None,
                    page_size=self.page_size, packed=False, tree=tree,
                    batch_invariant=self._batch_invariant, step=self._step is not None,
                )  # fmt: skip
        _log_start(heads, torch.cuda.get_device_name(self.device), self.page_size)

    # Metadata, eager and for CUDA graphs

    def init_forward_metadata(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        lengths = forward_batch.seq_lens.to(torch.int32)
        most = forward_batch.seq_lens_cpu
        known = most is not None and most.numel() > 0  # an idle rank has no requests
        table = self._table(forward_batch, int(most.max()) if known else None)
        if mode.is_decode_or_idle():
            self.forward_metadata = Metadata(table, lengths, 1)
        elif mode.is_target_verify():
            tree = self._tree(forward_batch, lengths)
            total = lengths + self.draft_tokens
            self.forward_metadata = Metadata(table, total, self.draft_tokens, tree_mask=tree)
        elif mode.is_draft_extend_v2():
            # Every request has a window of draft tokens, whatever part of it is new.
            total = lengths - forward_batch.extend_seq_lens.to(torch.int32) + self.draft_tokens
            self.forward_metadata = Metadata(table, total, self.draft_tokens)
        else:
            counts = forward_batch.extend_seq_lens.to(torch.int32)
            starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            on_host = getattr(forward_batch, "extend_seq_lens_cpu", None)
            max_q = max(on_host) if on_host is not None else int(counts.max())
            self.forward_metadata = Metadata(table, lengths, int(max_q), starts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        s, pages, device = self.draft_tokens, self._first_tokens.shape[1], self.device
        self._graph = Metadata(
            torch.zeros((max_bs, pages), dtype=torch.int32, device=device),
            torch.ones(max_bs, dtype=torch.int32, device=device),
            s,
            tree_mask=torch.zeros((max_bs, s, s), dtype=torch.bool, device=device) if s else None,
        )
        self._verify_mask = _draft_only_mask(self._graph.tree_mask)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if self._graph is None:  # an eager pass
            self.init_forward_metadata(forward_batch)
            return
        mode, b = forward_batch.forward_mode, forward_batch.batch_size
        lengths = self._graph.lengths[:b]
        table = self._graph.block_table[:b]
        lengths.copy_(forward_batch.seq_lens[:b])
        torch.index_select(
            self._first_tokens, 0, forward_batch.req_pool_indices[:b].long(), out=table
        )
        table.floor_divide_(self.page_size)
        if mode.is_decode_or_idle():
            self.forward_metadata = Metadata(table, lengths, 1)
            return
        tree = None
        if mode.is_target_verify():
            found = self._tree(forward_batch, lengths, padded=True)
            if found is not None and self._graph.tree_mask is not None:
                tree = self._graph.tree_mask[:b]
                if tree.data_ptr() != found.data_ptr():
                    tree.copy_(found)
            lengths.add_(self.draft_tokens)
        # The lengths of a captured draft extension include its window already.
        self.forward_metadata = Metadata(table, lengths, self.draft_tokens, tree_mask=tree)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: a captured pass reads the tensors that are filled before each replay."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> Any:
        """The mask over draft tokens, which SGLang fills after drafting."""
        return self._verify_mask

    def get_verify_buffers_to_fill_after_draft(self) -> list[None]:
        """None: the mask is read from the batch before each replay."""
        return [None, None]

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Nothing depends on the buffers that are filled late."""

    def _table(self, forward_batch: Any, longest: int | None) -> Tensor:
        """Pages of each request, int32 `[b, pages]`; all of them where no length is known."""
        pages = self._first_tokens
        if longest is not None:
            pages = pages[:, : -(-(longest + self.draft_tokens) // self.page_size)]
        rows: Tensor = pages[forward_batch.req_pool_indices.long()]
        return (rows // self.page_size).to(torch.int32)

    def _tree(self, forward_batch: Any, context: Tensor, *, padded: bool = False) -> Tensor | None:
        """Which draft tokens each draft token sees, bool `[b, s, s]`; None for chains.

        `context` are the tokens of each request before its drafts, int32 `[b]`. In a padded batch
        some requests may have no part of the mask.
        """
        spec, s, b = forward_batch.spec_info, self.draft_tokens, context.shape[0]
        mask: Tensor | None = getattr(spec, "custom_mask", None)
        # Trees of n-grams have no fixed number of branches: -1, or none in older versions.
        branches = getattr(spec, "tree_topk", getattr(spec, "topk", -1))
        if mask is None or branches in (0, 1):
            return None
        own, entries = self._verify_mask, b * s * s
        # Of more requests than the buffer has, the mask over the drafts alone is another tensor.
        if own is not None and (
            mask.data_ptr() == own.buffer.data_ptr()
            or (branches > 1 and mask.numel() <= entries and not padded)
        ):
            mask = mask[:entries].view(torch.bool)
            if mask.numel() < entries:  # data parallelism pads batches with requests
                mask = torch.nn.functional.pad(mask, (0, entries - mask.numel()))
            return mask.view(b, s, s)
        # The full mask: for each request, s rows of context and drafts; its last s columns.
        width = (context + s).long()
        first = (width * s).cumsum(0) - width * s
        index = torch.arange(s, device=context.device)
        rows = first[:, None] + index * width[:, None]  # [b, s]
        columns = context.long()[:, None] + index  # [b, s]
        places = rows[:, :, None] + columns[:, None, :]
        return mask.bool()[places.clamp_(max=mask.numel() - 1)]

    # Attention

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Write the new tokens to the cache, then attend."""
        for name, value in others.items():
            if value is not None:
                raise ValueError(f"{NAME} does not compute {name}")
        if k is not None and save_kv_cache:
            self._write(layer, forward_batch, k, v, k_rope)
        heads, width = layer.tp_q_head_num, layer.head_dim
        if q_rope is None:
            q = q.view(-1, heads, width)
            q, q_rope = q[..., : self.k], q[..., self.k :]
        meta = self.forward_metadata
        assert meta is not None
        q = q.view(-1, heads, self.k)
        q_rope = q_rope.view(q.shape[0], heads, width - self.k)  # no rope: no -1 for the tokens
        output, _lse = paged.paged_attention(
            q, q_rope, self._pages(layer), meta.block_table, meta.lengths, scale=layer.scaling,
            max_q=meta.max_q, query_start_loc=meta.query_start_loc, tree_mask=meta.tree_mask,
            batch_invariant=self._batch_invariant, step=self._step_of(meta),
        )  # fmt: skip
        return output.reshape(-1, heads * layer.v_head_dim)

    forward_extend = forward_decode

    def _write(
        self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor | None, k_rope: Tensor | None
    ) -> None:
        location = forward_batch.out_cache_loc
        if hasattr(KVWriteLoc, "for_batch"):
            location = KVWriteLoc.for_batch(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)

    def _step_of(self, meta: Metadata) -> paged.Step | None:
        """The forward pass with this metadata, whose layers share a schedule."""
        if self._step is not None and self._step_metadata is not meta:
            self._step_metadata, self._step = meta, self._step.next()
        return self._step

    def _pages(self, layer: Any) -> paged.Pages:
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        known = self._layers.get(layer.layer_id)
        # SGLang makes a new view of an 8-bit cache in every call.
        if known is None or (known[0] is not rows and paged.moved(known[0], rows)):
            whole = rows.shape[0] // self.page_size * self.page_size
            cache = rows[:whole].view(-1, self.page_size, rows.shape[-1])
            known = self._layers[layer.layer_id] = rows, paged.Pages.of(cache, self.k)
        return known[1]


def draft_tokens(runner: Any) -> int:
    """Tokens of a verification; 0 without speculation."""
    try:
        from sglang.srt.runtime_context import get_spec
    except ImportError:  # SGLang before it had a context for settings
        return runner.server_args.speculative_num_draft_tokens or 0
    return get_spec().speculative_num_draft_tokens or 0


def attention_ranks() -> int:
    """GPUs that share the heads of a layer."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().attn_tp_size)
    except (ImportError, AttributeError):
        from sglang.srt.layers.dp_attention import get_attention_tp_size

        return int(get_attention_tp_size())


def _draft_only_mask(buffer: Tensor | None) -> Any:
    """SGLang's description of a mask over the draft tokens alone; None where it has none."""
    if VerifyMask is None or buffer is None:
        return None
    flat = buffer.view(-1)
    return VerifyMask(buffer=flat, mode=TreeMaskMode.QLEN_ONLY, max_bs=buffer.shape[0])


def _register(*, apart: bool) -> None:
    """Ask SGLang's DeepSeek layers for fa3's prefill, and for query parts apart or joined."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    registry = handlers.AttentionBackendRegistry
    registry.register(NAME, registry.get_handler(PREFILL))
    if apart and NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)


@lru_cache(maxsize=8)
def _log_start(heads: int, device: str, page_size: int) -> None:
    log.info(
        "hyper-mla %s: kernel %s on %s, %d heads, page size %d",
        mla_var3.__version__,
        paged.SERVING_KERNEL,
        device,
        heads,
        page_size,
    )
