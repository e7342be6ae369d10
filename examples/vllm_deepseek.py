"""DeepSeek-V3 or another MLA model in vLLM, with HyperMLA's attention.

    python examples/vllm_deepseek.py MODEL [--drafts=3] [--tp=8]
    python examples/vllm_deepseek.py --dummy

`--dummy` makes a small model with random weights, to see that the engine starts and the backend is
used. Needs a Hopper GPU and `pip install "hyper-mla[vllm]"`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

DUMMY = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 4096,
    "hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 1, "n_routed_experts": 8, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 4, "moe_layer_freq": 1000, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 1,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPTS = ["Latent attention keeps", "Speculative decoding is"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder or name of a model")
    parser.add_argument("--dummy", action="store_true", help="random weights, no model needed")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the MTP layer drafts")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    given = parser.parse_args()
    if (given.model is None) != given.dummy:
        parser.error("give a model or --dummy")

    try:
        from vllm import LLM, SamplingParams
    except ModuleNotFoundError as error:
        raise SystemExit(f'{error}; pip install "hyper-mla[vllm]"') from None

    from mla_var3.integrations.vllm import flag

    options = {"attention_backend": flag(), "tensor_parallel_size": given.tp}
    if given.drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": given.drafts}
    prompts, model, new_tokens = PROMPTS, given.model, 128
    if given.dummy:
        model = tempfile.mkdtemp()
        (Path(model) / "config.json").write_text(json.dumps(DUMMY))
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        prompts = [{"prompt_token_ids": list(range(2, 2 + 100 * n))} for n in (1, 7)]
    llm = LLM(model, **options)
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=not given.dummy)
    started = time.perf_counter()
    outputs = [done.outputs[0] for done in llm.generate(prompts, sampling)]
    seconds = time.perf_counter() - started
    for output in outputs:
        print(output.text if not given.dummy else list(output.token_ids[:16]))
    tokens = sum(len(output.token_ids) for output in outputs)
    print(f"{tokens} tokens in {seconds:.2f} s with {flag()}")


if __name__ == "__main__":
    main()
