"""Latents of one layer of a Hugging Face model, for `hyper-mla accuracy --latents`.

    python examples/capture_latents.py MODEL --layer=10 --text=book.txt --out=latents.pt
    python examples/capture_latents.py --dummy

The attention of the layer is observed through the attention interface of transformers, while the
model reads the text once. The file holds the latent rows and rope keys as a latent cache has them,
and latent queries of the newest tokens. `--dummy` makes a small model with random weights. Needs
`transformers`; runs on the CPU and on a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from mla_var3.integrations.transformers import NAME, attend, use

DUMMY = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
    "n_routed_experts": 4, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MOST_QUERIES = 256
"""Query rows that are kept: those of the newest tokens."""


@torch.no_grad()
def capture(model: Any, tokens: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """Read tokens `[1, t]` and return what the attention of a layer got.

    Returns:
        `latent [t, k]`, `rope [t, p]` and `queries [rows, k+p]`, the latent queries with the scale
        of the logits in them; float32, on the CPU.
    """
    from transformers import AttentionInterface

    found: dict[str, torch.Tensor] = {}

    def observe(module: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        if module.layer_idx == layer:
            h, width = query.shape[1], query.shape[-1]
            d, scale = width - key.shape[-1], options.get("scaling") or width**-0.5
            w_uk = module.kv_b_proj.weight.view(h, -1, value.shape[-1])[:, :d].float()
            newest = query[0, :, -max(1, MOST_QUERIES // h) :].float()  # [h, s, d+p]
            queries = torch.cat([newest[..., :d] @ w_uk, newest[..., d:]], dim=-1) * scale
            parts = {"latent": value[0, 0], "rope": key[0, 0], "queries": queries.flatten(0, 1)}
            found.update({name: part.float().cpu() for name, part in parts.items()})
        return attend(module, query, key, value, *rest, **options)

    use(model)
    AttentionInterface.register(NAME, observe)
    try:
        model(tokens)
    finally:
        AttentionInterface.register(NAME, attend)
    if not found:
        raise SystemExit(f"layer: expected one of the model's MLA layers, got {layer}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or name of a model")
    parser.add_argument("--dummy", action="store_true", help="random weights, no model needed")
    parser.add_argument("--layer", type=int, default=0, help="which layer (default: 0)")
    parser.add_argument("--text", type=Path, help="file to read; a model needs one")
    parser.add_argument("--tokens", type=int, default=4096, help="of it at most (default: 4096)")
    parser.add_argument("--out", type=Path, default=Path("latents.pt"), help="file to write")
    given = parser.parse_args()
    if given.dummy == (given.model is not None) or given.dummy == (given.text is not None):
        parser.error("give a model and --text, or --dummy")

    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config
    except ModuleNotFoundError as error:
        raise SystemExit(f'{error}; pip install "hyper-mla[transformers]"') from None

    torch.manual_seed(0)
    if given.dummy:
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**DUMMY)).eval()
        tokens = torch.randint(0, DUMMY["vocab_size"], (1, min(given.tokens, 256)))
    else:
        model = AutoModelForCausalLM.from_pretrained(
            given.model, dtype="auto", device_map="auto" if torch.cuda.is_available() else None
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        tokens = tokenizer(given.text.read_text(), return_tensors="pt").input_ids
        tokens = tokens[:, : given.tokens].to(model.device)
    found = capture(model, tokens, given.layer)
    torch.save(found, given.out)
    print({name: tuple(part.shape) for name, part in found.items()})
    print(f"written: {given.out}; next: hyper-mla accuracy --latents {given.out}")


if __name__ == "__main__":
    main()
