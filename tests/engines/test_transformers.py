"""A tiny random DeepSeek-V3 of transformers, with its own attention and with ours."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, StaticCache

from mla_var3.errors import UnsupportedError
from mla_var3.integrations.transformers import use
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


def test_a_model_without_mla_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="expand_kv"):
        use(torch.nn.Linear(2, 2))
