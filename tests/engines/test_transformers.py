"""A tiny random DeepSeek-V3 of transformers, with its own attention and with ours."""

from __future__ import annotations

import copy

import pytest
import torch
from examples.capture_latents import MOST_QUERIES, capture
from transformers import AutoModelForCausalLM, DeepseekV3Config, StaticCache

from mla_var3.errors import UnsupportedError
from mla_var3.integrations.transformers import use
from mla_var3.report.accuracy import measure, read_latents
from tests.engines.tiny_deepseek import CONFIG

PROMPT = torch.randint(2, 1024, (2, 37), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    settings = {name: value for name, value in CONFIG.items() if name != "torch_dtype"}
    own = AutoModelForCausalLM.from_config(DeepseekV3Config(**settings, dtype="float32")).eval()
    return own, use(copy.deepcopy(own))


@torch.no_grad()
def test_logits_of_a_prompt(models) -> None:
    own, ours = models
    assert ours.config._attn_implementation == "hyper_mla"
    assert own.config._attn_implementation != "hyper_mla"  # the other instance is left alone
    torch.testing.assert_close(ours(PROMPT).logits, own(PROMPT).logits, atol=2e-4, rtol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens(models, cache) -> None:
    own, ours = models
    results = []
    for model in (own, ours):
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        if cache == "static":
            options["past_key_values"] = StaticCache(config=model.config, max_cache_len=64)
        results.append(model.generate(PROMPT, pad_token_id=0, **options))
    assert torch.equal(*results)


@torch.no_grad()
def test_padding_is_refused(models) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    with pytest.raises(UnsupportedError, match="batch prompts of one length"):
        models[1](PROMPT, attention_mask=mask)


@torch.no_grad()
def test_packed_sequences_are_refused(models) -> None:
    """Other attention functions get a mask for them, by the positions."""
    own, ours = models
    positions = torch.cat([torch.arange(20), torch.arange(17)])[None]
    options = {"position_ids": positions, "use_cache": False}
    packed, apart = own(PROMPT[:1], **options), own(PROMPT[:1, 20:], use_cache=False)
    torch.testing.assert_close(packed.logits[:, 20:], apart.logits, atol=2e-4, rtol=2e-3)
    with pytest.raises(UnsupportedError, match="^position_ids: expected"):
        ours(PROMPT[:1], **options)


def test_captured_latents_give_the_attention_of_the_layer(models, tmp_path) -> None:
    """What `examples/capture_latents.py` writes, against the layer's own attention weights."""
    own = models[0]
    found = capture(copy.deepcopy(own), PROMPT[:1], layer=1)
    k, p = CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]
    heads, t = CONFIG["num_attention_heads"], PROMPT.shape[1]
    queries = min(t, MOST_QUERIES // heads)
    assert found["latent"].shape == (t, k) and found["rope"].shape == (t, p)
    assert found["queries"].shape == (heads * queries, k + p)
    eager = copy.deepcopy(own)
    eager.set_attn_implementation("eager")
    weights = eager(PROMPT[:1], output_attentions=True).attentions[1][0]  # [h, s, t]
    last = found["queries"].view(heads, queries, -1)[:, -1]
    scores = last @ torch.cat([found["latent"], found["rope"]], dim=-1).mT
    torch.testing.assert_close(scores.softmax(-1), weights[:, -1], atol=1e-4, rtol=1e-3)
    torch.save(found, tmp_path / "latents.pt")
    latents = read_latents(tmp_path / "latents.pt")
    (row,) = measure(latents, (t,))
    assert 0 < row.errors["bfloat16"].output < row.errors["fp8_per_token"].output < 0.1


def test_a_model_without_mla_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="expand_kv"):
        use(torch.nn.Linear(2, 2))
