"""The peers' kernels on our inputs: each gets the same numbers, laid out as it wants them.

A peer reads either the latent cache (absorbed) or cached keys and values (decompressed; there all
requests have `t` tokens). A peer is checked against the float32 reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mla_var3.bench.peer_libraries import PeerLibraries, call_known, call_operator
from mla_var3.bench.record import ABSORBED, DECOMPRESSED
from mla_var3.errors import UnknownNameError
from mla_var3.op.cost import Cost
from mla_var3.op.mla.cost import flash_attention_cost, flash_mla_cost
from mla_var3.op.mla.inputs import MlaInputs, absorb_queries, decompress_all, make_inputs
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_absorbed, reference_decompressed

PAGE = 64
SEED = 1
FLASHINFER_WORKSPACE = 384 << 20
TRITON_SPLITS = 4
"""What vLLM uses for its Triton decode kernel."""
FA3_DEFAULTS = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "attention_chunk": 0,
}

Run = Callable[[], Tensor]


@dataclass(frozen=True)
class PeerInputs:
    """The numbers of one problem, from which every peer's layout is made."""

    problem: MlaProblem
    raw: MlaInputs

    @classmethod
    def make(cls, problem: MlaProblem, device: torch.device | str) -> PeerInputs:
        """The same numbers at every call."""
        return cls(problem, make_inputs(problem, device, seed=SEED))

    def latent_queries(self) -> Tensor:
        """[b, s, h, k + p]."""
        q_latent = absorb_queries(self.raw.q_nope, self.raw.w_uk)
        return torch.cat([q_latent, self.raw.q_rope], dim=-1)

    def latent_cache(self) -> Tensor:
        """[b, whole pages, k + p], zero in slots without a token: not every peer bears NaN."""
        b, t, _ = self.raw.c_kv.shape
        cache = self.raw.c_kv.new_zeros((b, -(-t // PAGE) * PAGE, self.problem.k + self.problem.p))
        cache[:, :t] = torch.cat([self.raw.c_kv, self.raw.k_rope], dim=-1)
        used = torch.arange(cache.shape[1], device=cache.device) < self.raw.lengths[:, None]
        return cache.masked_fill_(~used[:, :, None], 0.0)

    def page_table(self) -> Tensor:
        """[b, pages]: the pages of a request lie one after the other."""
        b, pages = self.problem.b, -(-self.problem.t // PAGE)
        return torch.arange(b * pages, dtype=torch.int32, device=self.raw.c_kv.device).view(b, -1)

    def starts(self, tokens: int) -> Tensor:
        """[b + 1]: where each request starts among rows of `tokens` per request."""
        steps = torch.arange(self.problem.b + 1, dtype=torch.int32, device=self.raw.c_kv.device)
        return steps * tokens


@dataclass(frozen=True)
class PeerKernel:
    """One way of a peer to compute the problem.

    Attributes:
        title: its name in tables.
        library: name in `PeerLibraries`.
        path: "absorbed" or "decompressed".
        build: makes the call that returns o.
    """

    title: str
    library: str
    path: str
    build: Callable[[PeerLibraries, PeerInputs], Run]

    def cost(self, problem: MlaProblem) -> Cost:
        """FLOPs and bytes of its path, the same count as for our kernels."""
        absorbed = self.path == ABSORBED
        return flash_mla_cost(problem) if absorbed else flash_attention_cost(problem)


def reference(path: str, inputs: PeerInputs) -> Tensor:
    """The float32 output of a path."""
    raw, problem = inputs.raw, inputs.problem
    settings: dict[str, Any] = {"causal": problem.causal, "scale": problem.softmax_scale}
    if path == ABSORBED:
        queries = absorb_queries(raw.q_nope, raw.w_uk)
        cache = (raw.c_kv, raw.k_rope, raw.lengths)
        return reference_absorbed(queries, raw.q_rope, *cache, **settings)[0]
    keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
    operands = (raw.q_nope, raw.q_rope, keys, values, raw.k_rope, raw.lengths)
    return reference_decompressed(*operands, **settings)[0]


def _flashmla(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, lengths, table = inputs.problem, inputs.raw.lengths, inputs.page_table()
    q, k, scale = inputs.latent_queries(), problem.k, problem.softmax_scale
    paged = inputs.latent_cache().view(-1, PAGE, 1, k + problem.p)
    if "flashmla" in libraries.operators:
        operator = libraries.operators["flashmla"].dense_decode_fwd.default
        extra = [None] * (len(operator._schema.arguments) - 9)

        def call(plan: tuple[Any, Any]) -> Any:
            return operator(q, paged, k, lengths, table, scale, problem.causal, *plan, *extra)

        first = call((None, None))  # also plans; the plan is reused as serving engines do
        plan = (first[2], first[3])
        return lambda: call(plan)[0]
    module = libraries.modules["flashmla"]
    metadata, splits = module.get_mla_metadata(lengths, problem.s * problem.h, 1)
    return lambda: module.flash_mla_with_kvcache(
        q, paged, table, lengths, k, metadata, splits, softmax_scale=scale, causal=problem.causal
    )[0]


def _fa3_qv(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, lengths = inputs.problem, inputs.raw.lengths
    b, s, t, h, k = problem.b, problem.s, problem.t, problem.h, problem.k
    q = inputs.latent_queries()
    cache = inputs.latent_cache()[:, :t, None]
    if "fa3" in libraries.operators:
        operator, flat = libraries.operators["fa3"].fwd.default, q.view(b * s, h, k + problem.p)
        starts = inputs.starts(s)

        def varlen() -> Tensor:
            out: Tensor = call_operator(
                operator, FA3_DEFAULTS,
                q=flat[..., k:], q_v=flat[..., :k], k=cache[..., k:], v=cache[..., :k],
                softmax_scale=problem.softmax_scale, is_causal=problem.causal, num_splits=0,
                cu_seqlens_q=starts, seqused_k=lengths, max_seqlen_q=s, max_seqlen_k=t,
            )[0]  # fmt: skip
            return out.view(b, s, h, k)

        return varlen
    return _fa3_package(
        libraries, inputs, q=q[..., k:], qv=q[..., :k], k_cache=cache[..., k:],
        v_cache=cache[..., :k], num_splits=0,
    )  # fmt: skip


def _fa3(splits: int) -> Callable[[PeerLibraries, PeerInputs], Run]:
    def build(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
        problem, raw = inputs.problem, inputs.raw
        b, s, t, h, d = problem.b, problem.s, problem.t, problem.h, problem.d
        width = d + problem.p
        q = torch.cat([raw.q_nope, raw.q_rope], dim=-1)
        keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
        k = keys.new_empty((b, t, h, width))
        k[..., :d] = keys.transpose(1, 2)
        k[..., d:] = raw.k_rope[:, :, None, :]
        v = values.transpose(1, 2).contiguous()
        if "fa3" in libraries.operators:
            operator = libraries.operators["fa3"].fwd.default
            q_starts, k_starts = inputs.starts(s), inputs.starts(t)

            def varlen() -> Tensor:
                out: Tensor = call_operator(
                    operator, FA3_DEFAULTS,
                    q=q.view(b * s, h, width), k=k.view(b * t, h, width), v=v.view(b * t, h, d),
                    softmax_scale=problem.softmax_scale, is_causal=problem.causal,
                    num_splits=splits, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts,
                    max_seqlen_q=s, max_seqlen_k=t,
                )[0]  # fmt: skip
                return out.view(b, s, h, d)

            return varlen
        return _fa3_package(libraries, inputs, q=q, k_cache=k, v_cache=v, num_splits=splits)

    return build


def _fa3_package(libraries: PeerLibraries, inputs: PeerInputs, **operands: Any) -> Run:
    problem = inputs.problem
    attend = libraries.modules["fa3"].flash_attn_with_kvcache

    def call() -> Tensor:
        out = attend(
            **operands, cache_seqlens=inputs.raw.lengths, softmax_scale=problem.softmax_scale,
            causal=problem.causal,
        )  # fmt: skip
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    return call


def _flashinfer(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, lengths, table = inputs.problem, inputs.raw.lengths, inputs.page_table()
    b, s, h, k, p = problem.b, problem.s, problem.h, problem.k, problem.p
    q = inputs.latent_queries().view(b * s, h, k + p)
    paged = inputs.latent_cache().view(-1, PAGE, k + p)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.int8, device=q.device)
    wrapper = libraries.modules["flashinfer"].BatchMLAPagedAttentionWrapper(workspace)
    wrapper.plan(
        inputs.starts(s), inputs.starts(table.shape[1]), table.flatten(), lengths, h, k, p, PAGE,
        problem.causal, problem.softmax_scale, q.dtype, paged.dtype,
    )  # fmt: skip
    out = q.new_empty((b * s, h, k))

    def call() -> Tensor:
        wrapper.run(q[..., :k], q[..., k:], paged[..., :k], paged[..., k:], out=out)
        return out.view(b, s, h, k)

    return call


def _triton(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    """The Triton kernel of vLLM knows one query per request, so every query is a request."""
    problem = inputs.problem
    b, s, h, k, p = problem.b, problem.s, problem.h, problem.k, problem.p
    attend = libraries.modules["triton"].decode_attention_fwd
    q = inputs.latent_queries().view(b * s, h, k + p)
    paged = inputs.latent_cache().view(-1, PAGE, 1, k + p)
    lengths = inputs.raw.lengths[:, None].expand(b, s)
    later = torch.arange(s - 1, -1, -1, dtype=torch.int32, device=q.device)
    visible = lengths - later if problem.causal else lengths
    out, lse = q.new_empty((b * s, h, k)), torch.empty((b * s, h), device=q.device)
    partials = torch.empty((b * s, h, TRITON_SPLITS, k + 1), device=q.device)
    operands = {
        "q": q, "k_buffer": paged, "v_buffer": paged[..., :k], "o": out, "lse": lse,
        "req_to_token": inputs.page_table().repeat_interleave(s, dim=0),
        "b_seq_len": visible.reshape(-1), "attn_logits": partials, "num_kv_splits": TRITON_SPLITS,
        "sm_scale": problem.softmax_scale, "page_size": PAGE, "is_mla": True,
    }  # fmt: skip

    def call() -> Tensor:
        call_known(attend, **operands)
        return out.view(b, s, h, k)

    return call


def _sdpa(libraries: PeerLibraries, inputs: PeerInputs) -> Run:
    problem, raw = inputs.problem, inputs.raw
    s, t = problem.s, problem.t
    keys, values = decompress_all(raw.c_kv, raw.w_uk, raw.w_uv)
    k = torch.cat([keys, raw.k_rope[:, None].expand(-1, problem.h, -1, -1)], dim=-1)
    q = torch.cat([raw.q_nope, raw.q_rope], dim=-1).transpose(1, 2)
    mask = None
    if problem.causal and s > 1:
        position = torch.arange(t, device=q.device)[None, :]
        limit = (t - s + torch.arange(s, device=q.device))[:, None]
        mask = torch.zeros((s, t), dtype=q.dtype, device=q.device)
        mask.masked_fill_(position > limit, float("-inf"))
    backend = SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, values, attn_mask=mask, scale=problem.softmax_scale
            )
        return out.transpose(1, 2)

    return call


KERNELS = {
    "flashmla": PeerKernel("FlashMLA", "flashmla", ABSORBED, _flashmla),
    "fa3_qv": PeerKernel("FlashAttention-3 qv", "fa3", ABSORBED, _fa3_qv),
    "flashinfer": PeerKernel("FlashInfer", "flashinfer", ABSORBED, _flashinfer),
    "triton": PeerKernel("Triton (vLLM decode)", "triton", ABSORBED, _triton),
    "fa3": PeerKernel("FlashAttention-3", "fa3", DECOMPRESSED, _fa3(0)),
    "fa3_one_split": PeerKernel("FlashAttention-3, one split", "fa3", DECOMPRESSED, _fa3(1)),
    "sdpa": PeerKernel("torch SDPA (cuDNN)", "torch", DECOMPRESSED, _sdpa),
}


def peer_kernel(name: str) -> PeerKernel:
    """A peer by its short name.

    Raises:
        UnknownNameError: there is no such peer.
    """
    if name not in KERNELS:
        raise UnknownNameError("peer", name, KERNELS)
    return KERNELS[name]
