"""The vLLM backend's memory: no cache that vLLM has given up, programs for the caches it has.

On stand-ins for vLLM's modules.
"""

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


def settings(layers: dict[str, Any], cache_dtype: str = "auto") -> Any:
    """As much of vLLM's configuration as a builder reads; the target has 16 heads."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(), speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda parallel: 16, dtype=torch.bfloat16
        ),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )  # fmt: skip


def test_a_new_builder_lets_the_layers_forget_their_caches(backend):
    """vLLM profiles graphs with a small cache first, and counts on its memory afterwards."""
    impl, others = object.__new__(backend.HyperMLAImpl), SimpleNamespace(_k_scale_cache="theirs")
    impl.kv_lora_rank, impl._k_scale_cache = 512, None
    cache = torch.zeros((2, 64, 576), dtype=torch.bfloat16)
    assert impl._pages_of(cache, None).latent.shape == (2, 64, 512)
    assert impl._k_scale_cache[0] is cache
    layers = {"ours": SimpleNamespace(impl=impl), "theirs": SimpleNamespace(impl=others)}
    names = ["ours", "theirs", "unknown"]
    spec = SimpleNamespace(dtype=torch.bfloat16)
    backend.HyperMLAMetadataBuilder(spec, names, settings(layers), torch.device("cpu"))
    assert impl._k_scale_cache is None and others._k_scale_cache == "theirs"


@pytest.mark.parametrize(
    ("layer", "dtype", "cache_dtype", "heads", "eight_bits"),
    [
        ({}, torch.uint8, "fp8", 16, True),
        ({"num_heads": 16}, torch.bfloat16, "fp8", 16, False),  # skipped, or a draft's
        ({"num_heads": 64}, torch.uint8, "auto", 64, True),  # a draft of its own kind
    ],
)
def test_programs_are_those_of_the_layers(
    backend, monkeypatch, layer, dtype, cache_dtype, heads, eight_bits
):
    """Layers may be kept from the cache's format; a draft has its own, and its own heads."""
    compiled = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(backend.paged, "warm_up", lambda h, *_, **o: compiled.append((h, o)))
    monkeypatch.setattr(
        backend.paged, "latent_crossover", lambda h, *given: compiled.append((h, given)) or 2
    )
    monkeypatch.setattr(backend.paged, "Step", lambda device: "a step")
    spec = SimpleNamespace(head_size=576, block_size=64, dtype=dtype)
    config = settings({"layer": SimpleNamespace(**layer)}, cache_dtype)
    for alone in (True, False):
        compiled.clear()
        layers = ["layer"] if alone else ["layer", "another"]
        backend.HyperMLAMetadataBuilder(spec, layers, config, torch.device("cuda"))
        (asked, (_, crossover_format)), (made, options) = compiled
        assert options["step"] is not alone  # a schedule is for several layers
    assert asked == made == heads
    assert crossover_format == ("fp8" if eight_bits else None)
    assert options["cache_dtype"] == (torch.float8_e4m3fn if eight_bits else None)
