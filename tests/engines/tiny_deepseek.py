"""A two-layer DeepSeek-V3 with random weights: one dense layer, one MoE layer, one MTP layer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 1024,
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 1, "n_routed_experts": 4, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "hidden_act": "silu", "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 1, "bos_token_id": 0,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def draw_weights(loader, model, model_config) -> None:
    """Stands in for vLLM's dummy weights, which lie within 0.001 and are alike in all layers.

    The same in every process. Attention matters, and the head leans to a fixed successor of each
    token, which the MTP layer sees through the embedding too: drafts are often right.
    """
    import torch

    def draw(name: str, p: torch.Tensor) -> torch.Tensor:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
        generator = torch.Generator(device=p.device).manual_seed(seed)
        return torch.randn(p.shape, generator=generator, device=p.device)

    layers = model_config.hf_text_config.num_hidden_layers
    gains = {"q_b_proj": 2.5, "o_proj": 2 / layers**0.5, "down_proj": 1 / layers**0.5}
    for name, p in model.named_parameters():
        if not p.is_floating_point():
            continue
        short, hidden = name.rsplit(".", 1)[0].split(".")[-1], p.shape[-1]
        if p.dim() == 1:
            value = torch.full_like(p, 1.0 if "norm" in name else 0.0)
        elif short == "embed_tokens":
            value = draw("embed", p)
        elif short in ("lm_head", "head"):
            order = torch.randperm(p.shape[0], generator=torch.Generator().manual_seed(7))
            leaning = draw("embed", p)[order.to(p.device)] * 12 / hidden
            value = leaning + draw("head", p) * 1.5 / hidden**0.5
        elif short == "eh_proj":
            rows = p.shape[0]
            value = draw(name, p) * 0.2 / rows**0.5
            value[:, :rows] += torch.eye(rows, device=p.device)
        else:
            value = draw(name, p) * gains.get(short, 1.0) / hidden**0.5
        p.data.copy_(value)
