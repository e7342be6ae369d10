"""The vLLM backend holds no cache that vLLM has given up; on stand-ins for vLLM's modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

NAME = "mla_var3.integrations.vllm.backend"


class Base:
    """Whatever vLLM offers as a base class or a value."""

    def __class_getitem__(cls, item: Any) -> type[Base]:
        return cls

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.dcp_world_size, self.reorder_batch_threshold = 1, 1


class StandIn(ModuleType):
    """A module that has every name."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "max_decode_query_len":
            raise AttributeError(name)
        if name == "init_logger":
            return lambda logger: SimpleNamespace(info=lambda *arguments: None)
        if name in ("AttentionCGSupport", "AttentionType", "QueryLenSupport", "envs"):
            return SimpleNamespace(DECODER="decoder", UNIFORM_BATCH=1, VARLEN=1)
        return type(name, (Base,), {})


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = (
        "vllm", "vllm.config", "vllm.logger", "vllm.v1", "vllm.v1.attention",
        "vllm.v1.attention.backend", "vllm.model_executor", "vllm.model_executor.layers",
        "vllm.model_executor.layers.attention",
        "vllm.model_executor.layers.attention.mla_attention",
    )  # fmt: skip
    for name in names:
        monkeypatch.setitem(sys.modules, name, StandIn(name))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def test_a_new_builder_lets_the_layers_forget_their_caches(backend):
    """vLLM profiles graphs with a small cache first, and counts on its memory afterwards."""
    impl, others = object.__new__(backend.HyperMLAImpl), SimpleNamespace(_cache="theirs")
    impl.kv_lora_rank, impl._cache, impl._pages = 512, None, None
    cache = torch.zeros((2, 64, 576), dtype=torch.bfloat16)
    assert impl._pages_of(cache, None).latent.shape == (2, 64, 512)
    assert impl._cache is cache
    layers = {"ours": SimpleNamespace(impl=impl), "theirs": SimpleNamespace(impl=others)}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(), speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(get_num_attention_heads=lambda parallel: 16),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )  # fmt: skip
    names = ["ours", "theirs", "unknown"]
    backend.HyperMLAMetadataBuilder(None, names, config, torch.device("cpu"))
    assert impl._cache is None and impl._pages is None and others._cache == "theirs"
