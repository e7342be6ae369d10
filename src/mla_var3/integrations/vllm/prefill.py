"""The decompressed kernel as an MLA prefill backend of vLLM.

vLLM decompresses keys and values and hands them over packed, with the rope part of the keys behind
each head's. It has its own prefill backend; this one is used only where the configuration names it:
`--attention-config '{"mla_prefill_backend": "CUSTOM"}'`, or `HYPER_MLA` where vLLM takes new names.
The kernel is launched once per request. Offsets that vLLM has on the device only are read
once per step, which waits for the GPU. On the CPU the attention is PyTorch's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_var3.integrations.vllm import HOPPER, NAME, NO_CUTE, other_gpu
from mla_var3.kernel.cute_python.mla.hopper.widths import (
    HEAD_WIDTHS,
    HeadWidths,
    served_head_widths,
)
from mla_var3.op.mla.reference import reference_decompressed


class HyperMLAPrefillBackend(MLAPrefillBackend):
    """Prefill of the new tokens of a batch, and of the chunks of their context."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and bool(device_capability.major == HOPPER)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        return _widths(mla_dimensions) in HEAD_WIDTHS

    @classmethod
    def is_available(cls) -> bool:
        return find_spec("cutlass") is not None

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        reasons: list[str] = super().validate_configuration(device_capability, selector_config)
        reasons += other_gpu(device_capability)
        if not cls.is_available():
            reasons.append(NO_CUTE)
        if not cls.supports_mla_dimensions(selector_config.mla_dimensions):
            reasons.append(f"{NAME} serves heads of (d, p, v) = {served_head_widths()}")
        return reasons

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        super().prepare_metadata(prefill_metadata)
        # With the tensors, so that no other takes their address within the step.
        self._offsets: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}
        counts = getattr(prefill_metadata, "query_lens_cpu", None)
        if counts is not None:
            starts = prefill_metadata.query_start_loc
            offsets = [0, *counts.cumsum(0).tolist()]
            if len(offsets) == starts.numel():
                self._offsets[starts.data_ptr(), starts.numel()] = starts, offsets

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if output_scale is not None:
            raise NotImplementedError(f"{NAME} does not write outputs in 8 bits")
        starts = self._prefill_metadata.query_start_loc
        output, lse = self._attend(q, k, v, starts, starts, causal=True)
        if out is not None:
            output = out.copy_(output)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Any = None,
        chunk_idx: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over a part of the context, which older vLLM numbers and newer describes."""
        assert out is None, "supports_out() is not claimed"
        if chunk is None:
            metadata = self._prefill_metadata
            starts, context = metadata.query_start_loc, metadata.chunked_context
            return self._attend(q, k, v, starts, context.cu_seq_lens[chunk_idx], causal=False)
        return self._attend(q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, causal=False)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention of packed requests: the output `[tokens, h, v]` and the LSE `[h, tokens]`."""
        d = self.qk_nope_head_dim
        q_nope, q_rope = q[..., :d].contiguous(), q[..., d:].contiguous()
        keys, k_rope = k[..., :d], k[:, 0, d:]
        output = q.new_empty((*q.shape[:2], v.shape[-1]))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        # The lengths of all requests, so that a launch only needs a view of its own.
        lengths = (k_starts[1:] - k_starts[:-1]).to(torch.int32)
        attend = _attend_on_gpu if q.is_cuda else _attend_on_cpu
        bounds = zip(self._on_host(q_starts), self._on_host(k_starts), strict=True)
        first, first_key = next(bounds)
        for request, (last, last_key) in enumerate(bounds):
            queries, tokens = slice(first, last), slice(first_key, last_key)
            first, first_key = last, last_key
            if queries.start == queries.stop:
                continue
            if tokens.start == tokens.stop:
                output[queries].zero_()
                lse[queries].fill_(-torch.inf)
                continue
            attend(
                q_nope[queries], q_rope[queries], keys[tokens], v[tokens], k_rope[tokens],
                lengths[request : request + 1], output[queries], lse[queries],
                causal=causal, scale=self.scale,
            )  # fmt: skip
        return output, lse.transpose(0, 1).contiguous()

    def _on_host(self, offsets: Tensor) -> list[int]:
        """Offsets on the host, read once per step and not in every layer."""
        key = offsets.data_ptr(), offsets.numel()
        found = self._offsets.get(key)
        if found is None:
            found = self._offsets[key] = offsets, offsets.tolist()
        return found[1]


def _attend_on_gpu(*operands: Tensor, causal: bool, scale: float) -> None:
    from mla_var3.kernel.cute_python.mla.decompressed.stage import attend_request

    attend_request(*operands, causal=causal, scale=scale)


def _attend_on_cpu(*operands: Tensor, causal: bool, scale: float) -> None:
    q_nope, q_rope, keys, values, k_rope, length, output, lse = operands
    keys, values = (rows.transpose(0, 1)[None] for rows in (keys, values))
    request = q_nope[None], q_rope[None], keys, values, k_rope[None], length
    o, o_lse = reference_decompressed(*request, causal=causal, scale=scale)
    output.copy_(o[0])
    lse.copy_(o_lse[0])


def _widths(dimensions: Any) -> HeadWidths:
    return HeadWidths(
        dimensions.qk_nope_head_dim, dimensions.qk_rope_head_dim, dimensions.v_head_dim
    )
