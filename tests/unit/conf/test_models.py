"""The table of models, and configs of others."""

import json

import pytest

import mla_var3
from mla_var3.conf.models import Widths, models, read_config
from mla_var3.errors import InvalidArgumentError, UnknownNameError

DEEPSEEK = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_attention_heads": 128,
}  # fmt: skip
OPENPANGU = {
    "attention_kv_lora_dim": 512, "attention_qk_dim": 128, "attention_qk_rope_dim": 64,
    "attention_v_dim": 128, "num_attention_heads": 128,
}  # fmt: skip
MINICPM3 = {
    "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None,
    "hidden_size": 2560, "num_attention_heads": 40,
}  # fmt: skip


def test_a_model_by_name_alias_and_case():
    kimi = mla_var3.model("kimi-k2")
    assert kimi.widths == Widths(k=512, d=128, p=64, v=128)
    assert kimi.heads_per_rank(8) == 8
    assert kimi.sizes(2) == {"h": 32, "k": 512, "d": 128, "p": 64, "v": 128}
    assert mla_var3.model("Kimi-K2.5") is kimi
    assert mla_var3.model("deepseek-r1") is mla_var3.model("deepseek-v3")
    with pytest.raises(UnknownNameError, match=r"did you mean 'kimi-k2'.*minicpm3"):
        mla_var3.model("kimi-k22")

    for tp, expected in ((8, "a divisor of the 20 heads of glm-4.7-flash"), (0, "a positive")):
        with pytest.raises(InvalidArgumentError, match=f"tp: expected {expected}.*, got {tp}"):
            mla_var3.model("glm-4.7-flash").heads_per_rank(tp)


def test_names_are_unique_and_sources_are_repositories():
    names = [name for entry in models().values() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    assert all(entry.source.count("/") == 1 for entry in models().values())


def test_configs(tmp_path):
    path = tmp_path / "config.json"
    for config, *expected in (
        (DEEPSEEK, (512, 128, 64, 128), 128),
        ({"text_config": {**DEEPSEEK, "num_attention_heads": 96}}, (512, 128, 64, 128), 96),
        (OPENPANGU, (512, 128, 64, 128), 128),
        (MINICPM3, (256, 64, 32, 64), 40),
        ({**DEEPSEEK, "qk_rope_head_dim": 0}, (512, 128, 0, 128), 128),
    ):
        path.write_text(json.dumps(config))
        found = read_config(path)
        assert [found.widths, found.heads] == expected


def test_a_config_that_is_not_that_of_an_mla_model(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(InvalidArgumentError, match=f"^{path}: expected a readable config.json"):
        read_config(path)
    for text, message in (
        ("{", "expected a readable config.json, got Expecting"),
        ("[]", "expected a JSON object, got list"),
        ('{"num_attention_heads": 32}', "kv_lora_rank: expected an integer, .* got nothing"),
        *((json.dumps({**DEEPSEEK, key: value}), f"{key}: expected an integer >= .*, got ")
          for key in DEEPSEEK for value in ("x", [64], 64.5, -1, True)),
        (json.dumps({**DEEPSEEK, "num_attention_heads": 0}), "num_attention_heads: .*, got 0"),
        (json.dumps({**DEEPSEEK, "v_head_dim": None}), "v_head_dim: .* got nothing"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(InvalidArgumentError, match=f"^{path}: .*{message}"):
            read_config(path)
