"""The kernels that HyperMLA is measured against, where they are installed.

FlashMLA and FlashAttention-3 come as torch operator libraries inside the vLLM package
(`_flashmla_C`, `_vllm_fa3_C`); a folder that holds just these two files will do. PyTorch's own
scaled dot-product attention is always there. Each peer gets the same tensors as our kernels, laid
out as it wants them, and is checked against the same float32 reference before it is timed.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mla_var3.op.mla.problem import MlaProblem

PAGE = 64
LIBRARIES = {
    "flashmla": ("_flashmla_C", "_flashmla_C.abi3.so"),
    "fa3": ("_vllm_fa3_C", "vllm_flash_attn/_vllm_fa3_C.abi3.so"),
}
FA3_FIXED = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "is_rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
    "attention_chunk": 0,
}


@dataclass(frozen=True)
class Peer:
    """One way of a peer to compute the problem: `run` returns o with the shape of the reference."""

    name: str
    run: Callable[[], Tensor]


class PeerLibraries:
    """The operator libraries that could be loaded, and why the others could not."""

    def __init__(self, folder: Path | None) -> None:
        self.absent: dict[str, str] = {}
        # The libraries leave the driver's symbols to whoever loaded it.
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        for name, (namespace, file) in LIBRARIES.items():
            path = self._find(folder, file)
            if path is None:
                self.absent[name] = f"{Path(file).name} not found (install vllm, or --peer_libs)"
                continue
            try:
                torch.ops.load_library(str(path))
                getattr(torch.ops, namespace)
            except (OSError, RuntimeError) as error:
                self.absent[name] = str(error).splitlines()[0]

    @staticmethod
    def _find(folder: Path | None, file: str) -> Path | None:
        if folder is not None:
            return next(iter(sorted(folder.rglob(Path(file).name))), None)
        spec = importlib.util.find_spec("vllm")
        root = Path(spec.origin).parent if spec is not None and spec.origin else None
        return root / file if root is not None and (root / file).is_file() else None

    def has(self, name: str) -> bool:
        """Whether a library is there."""
        return name not in self.absent


def _call_by_name(operator: Any, **given: Any) -> Any:
    """Call a torch operator by argument names; what is not given is None or its fixed value."""
    names = [argument.name for argument in operator._schema.arguments]
    return operator(*[given.get(name, FA3_FIXED.get(name)) for name in names])


def _fa3(**given: Any) -> Tensor:
    out: Tensor = _call_by_name(torch.ops._vllm_fa3_C.fwd.default, **given)[0]
    return out


def absorbed_peers(
    libraries: PeerLibraries, problem: MlaProblem, inputs: tuple[Tensor, ...]
) -> list[Peer]:
    """Peers on the latent cache, for the inputs of flash_mla (all lengths equal t)."""
    q_latent, q_rope, c_kv, k_rope, lengths = inputs
    b, s, t, h, k = problem.b, problem.s, problem.t, problem.h, problem.k
    width, pages = k + problem.p, -(-t // PAGE)
    q = torch.cat([q_latent, q_rope], dim=-1)
    cache = c_kv.new_zeros((b, pages * PAGE, width))
    cache[:, :t] = torch.cat([c_kv, k_rope], dim=-1)
    peers = []
    if libraries.has("flashmla"):
        paged = cache.view(b * pages, PAGE, 1, width)
        table = torch.arange(b * pages, dtype=torch.int32, device=c_kv.device).view(b, pages)
        operator = torch.ops._flashmla_C.dense_decode_fwd.default
        extra = [None] * (len(operator._schema.arguments) - 9)

        def flashmla(plan: tuple[Any, Any]) -> Any:
            scale = problem.softmax_scale
            return operator(q, paged, k, lengths, table, scale, problem.causal, *plan, *extra)

        first = flashmla((None, None))
        plan = (first[2], first[3])
        peers.append(Peer("FlashMLA", lambda: flashmla(plan)[0]))
    if libraries.has("fa3"):
        flat = q.view(b * s, h, width)
        starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=q.device)
        view = cache.view(b, pages * PAGE, 1, width)[:, :t]

        def fa3_qv() -> Tensor:
            out = _fa3(
                q=flat[..., k:], q_v=flat[..., :k], k=view[..., k:], v=view[..., :k],
                softmax_scale=problem.softmax_scale, is_causal=problem.causal, num_splits=0,
                cu_seqlens_q=starts, seqused_k=lengths, max_seqlen_q=s, max_seqlen_k=t,
            )  # fmt: skip
            return out.view(b, s, h, k)

        peers.append(Peer("FlashAttention-3 qv", fa3_qv))
    return peers


def decompressed_peers(
    libraries: PeerLibraries, problem: MlaProblem, inputs: tuple[Tensor, ...], sdpa: bool = True
) -> list[Peer]:
    """Peers on cached keys and values, for the inputs of flash_attention (all lengths equal t)."""
    q_nope, q_rope, keys, values, k_rope, _ = inputs
    b, s, t, h, d = problem.b, problem.s, problem.t, problem.h, problem.d
    width, device = d + problem.p, q_nope.device
    q = torch.cat([q_nope, q_rope], dim=-1)  # [b, s, h, width]
    peers = []
    if libraries.has("fa3"):
        k = keys.new_empty((b, t, h, width))
        k[..., :d] = keys.transpose(1, 2)
        k[..., d:] = k_rope[:, :, None, :]
        v = values.transpose(1, 2).contiguous()
        q_starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=device)
        k_starts = torch.arange(0, (b + 1) * t, t, dtype=torch.int32, device=device)

        def fa3(splits: int) -> Tensor:
            out = _fa3(
                q=q.view(b * s, h, width), k=k.view(b * t, h, width), v=v.view(b * t, h, d),
                softmax_scale=problem.softmax_scale, is_causal=problem.causal, num_splits=splits,
                cu_seqlens_q=q_starts, cu_seqlens_k=k_starts, max_seqlen_q=s, max_seqlen_k=t,
            )  # fmt: skip
            return out.view(b, s, h, d)

        peers.append(Peer("FlashAttention-3", lambda: fa3(0)))
        peers.append(Peer("FlashAttention-3, one split", lambda: fa3(1)))
    if sdpa:
        rope = k_rope[:, None].expand(-1, h, -1, -1)
        k_sdpa = torch.cat([keys, rope], dim=-1)
        q_sdpa = q.transpose(1, 2)
        mask = None
        if problem.causal and s > 1:
            position = torch.arange(t, device=device)[None, :]
            limit = (t - s + torch.arange(s, device=device))[:, None]
            mask = torch.zeros((s, t), dtype=q.dtype, device=device)
            mask.masked_fill_(position > limit, float("-inf"))

        def torch_sdpa() -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = scaled_dot_product_attention(
                    q_sdpa, k_sdpa, values, attn_mask=mask, scale=problem.softmax_scale
                )
            return out.transpose(1, 2)

        peers.append(Peer("torch SDPA (cuDNN)", torch_sdpa))
    return peers
