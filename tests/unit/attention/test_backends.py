"""Backends: registered ones take over at once, and each is chosen only where it can run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from mla_var3.attention.backends import latent, registry
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.backends.plan_operands import CUTILE_SERVICES
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.call import mla_latent_attention
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.select.choice import choose
from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnknownNameError
from mla_var3.runtime.paths import KernelId


class Counted(TorchTiled):
    """The PyTorch path under another id."""

    kernel = "counted"

    def __init__(self) -> None:
        self.calls = 0

    def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return super().run(task)


@pytest.fixture
def attend(generator: torch.Generator) -> Iterator[Any]:
    """A call of the registered backend."""
    q, cache = torch.randn(1, 1, 2, 8, generator=generator), torch.randn(1, 4, 8)
    yield lambda: mla_latent_attention(q, q, (cache, cache), kernel="counted")
    registry.unregister("counted", "torch")


def test_a_registered_backend_replaces_the_one_before(attend):
    """Also for calls that were made before."""
    first, second = Counted(), Counted()
    registry.register(first)
    attend()
    registry.register(second)
    attend()
    assert (first.calls, second.calls) == (1, 1)
    registry.unregister("counted", "torch")
    with pytest.raises(UnknownNameError, match="counted"):
        attend()


SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"s": 1},
    "speculative": {"s": 16},
    "long": {"s": 128},
    "few heads": {"s": 1, "h": 16},
    "ragged": {"s": 4, "ragged": True},
    "tree": {"s": 8, "tree": True},
    "window": {"s": 8, "window": 1024},
    "prefix": {"s": 8, "prefix": 1024},
    "latent": {"s": 4, "latent_only": True},
}


@pytest.mark.parametrize("name", ["H200", "H20", "B200", "RTX 5090", "A100"])
def test_what_is_chosen_serves_the_device(name):
    """Devices with and without kernels, every dtype, kind of cache and shape."""
    spec = device_spec(name)
    foreign = {
        (known.kernel, known.language)
        for known in registry.backends()
        if known.targets is not None and not set(known.targets) & set(spec.targets)
    }
    for dtype, page, (label, sizes) in product(
        ("bfloat16", "float16", "float32"), (None, 16, 64), SHAPES.items()
    ):
        shape = CallShape(**{"b": 32, "t": 4096, "h": 128, **sizes}, dtype=dtype, page_size=page)
        explanation, backend = choose(shape, spec)
        assert (backend.kernel, backend.language) not in foreign, (label, dtype, page)
        refused = {(c.kernel, c.language) for c in explanation.candidates if c.refusal}
        assert foreign <= refused
        if dtype != "float32":
            portable = ("flash_mla", "flash_mla_split_kv") if page else tuple(CUTILE_SERVICES)
            assert spec.target == "sm_90" or backend.language == "cutile-dsl", (label, dtype, page)
            assert spec.target == "sm_90" or backend.kernel.startswith(portable)


def test_two_threads_find_a_kernel_with_its_projections(monkeypatch):
    """One that comes while the other looks for it has both functions or looks itself."""
    seen = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            seen.append((name, backend._attend_fn is None))
            return name

    backend = LatentBackend.of_package(KernelId("flash_mla", 0, "cute-dsl", "mla"))
    monkeypatch.setattr(latent, "import_kernel_module", lambda kernel: Module())
    assert backend._resolve() == "attend" and backend._whole == "whole"
    assert ("whole", True) in seen
