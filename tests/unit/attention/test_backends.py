"""Backends: registered ones take over at once, and each is chosen only where it can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from mla_var3.attention.backends import latent, registry
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.backends.plan_operands import CUTILE_SERVICES
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.cache.view import CacheView
from mla_var3.attention.call import mla_latent_attention
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.attention.select import choice
from mla_var3.attention.select.choice import choose
from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnknownNameError
from mla_var3.kernel.cute_python.mla.latent.operands import LatentOptions
from mla_var3.runtime.paths import KernelId

from .attention_support import registered


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


def test_a_card_that_is_not_in_the_table_gets_the_torch_path(monkeypatch, caplog):
    """Unless the call names a kernel."""

    def unknown(device_type: str) -> None:
        raise UnknownNameError("device", "GTX 1", ())

    monkeypatch.setattr(choice, "spec_for", unknown)
    shape, device = CallShape(3, 1, 77, 5), torch.device("cuda")
    assert isinstance(choice.backend_for(shape, "auto", device), TorchTiled)
    assert "until then calls on this GPU use torch_tiled" in caplog.text
    with pytest.raises(UnknownNameError, match="unknown device 'GTX 1'"):
        choice.backend_for(shape, "flash_mla", device)


MILLION = 2**20
LARGE = {"b": 1, "s": 4, "t": 4096, "h": 128}


@pytest.mark.parametrize(
    ("name", "sizes", "refusal"),
    [
        ("flash_attention:cutile-dsl", {"t": 131072}, "2**31 numbers"),
        ("flash_attention:cutile-dsl", {"t": 131071}, "None"),
        ("flash_mla:cutile-dsl", {"s": 32768, "t": MILLION}, "2**31 numbers"),
        ("flash_mla:cutile-dsl", {"s": 32767, "t": MILLION}, "None"),
        ("flash_mla:cutile-dsl", {"b": 256, "s": 2048, "ragged": True}, "None"),
        ("flash_mla:cutile-dsl", {"ragged": True, "rows_in_32_bits": False}, "packed queries"),
        ("flash_mla:cutile-dsl", {"b": 70000, "h": 16}, "more than 65,535 requests"),
        ("mla_var6_plus:cutile-dsl", {"t": MILLION, "window": 2048}, "None"),
        ("flash_mla:cute-dsl", {"b": 2, "s": 40000, "t": 65536, "tree": True}, "2**31 entries"),
        ("flash_mla:cute-dsl", {"b": 70000, "s": 8, "tree": True}, "None"),
    ],
)
def test_sizes_beyond_32_bits_are_refused(name, sizes, refusal):
    kernel, language = name.split(":")
    [found] = [
        one for one in registry.backends() if (one.kernel, one.language) == (kernel, language)
    ]
    assert refusal in str(found.unsupported(CallShape(**{**LARGE, **sizes})))


@pytest.mark.parametrize("name", ["B200", "RTX 5090", "A100"])
def test_a_long_context_is_served_on_every_card(name):
    """Not by the kernel whose keys cuTile cannot address, which would be the quickest there."""
    for s in (4096, 32768):
        explanation, backend = choose(CallShape(b=1, s=s, t=131072, h=128), device_spec(name))
        assert backend.unsupported(explanation.shape) is None
        assert (backend.kernel, backend.language) != ("flash_attention", "cutile-dsl")


def test_loose_bounds_do_not_reach_the_kernel(generator):
    """It counts queries and positions with 32 bits."""
    noted: list[LatentOptions] = []

    def attend(operands: Any, options: LatentOptions) -> None:
        noted.append(options)
        assert operands.cu_seqlens_q.dtype is torch.int32

    backend = LatentBackend("noted", "torch", attend, runs_on_cpu=True, sliding_window=True)
    q, cache = torch.randn(3, 2, 8, generator=generator), torch.randn(2, 4, 8)
    q, cache = q.bfloat16(), cache.bfloat16()
    bounds = torch.tensor([0, 2, 3])
    with registered(backend):
        for max_q, window in ((2, 5), (100, 100), (2**31 - 1, 2**31 - 1), (None, None)):
            mla_latent_attention(
                q, q, (cache, cache), cu_seqlens_q=bounds, max_q=max_q, sliding_window=window,
                kernel="noted",
            )  # fmt: skip
    found = [(one.max_q, one.sliding_window) for one in noted]
    assert found == [(2, 5), (100, 100), (3, 2**30 - 1), (3, None)]


def test_rows_of_one_head_stay_where_they_are():
    """The stride of a dimension of size 1 may be anything; kernels step by it."""
    q = torch.arange(3 * 2 * 4 * 64.0).view(3, 2, 4, 64)[:, :, 1:2]
    taken = latent.boxed_rows(q)
    assert taken.data_ptr() == q.data_ptr() and torch.equal(taken, q)
    assert taken.stride() == (512, 256, 256, 1)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"sliding_window": 5}, "a sliding window"),
        ({"partial": True, "tree": True}, "a tree of tokens in a cache that holds a part"),
        ({"cache_dtype": "fp8"}, "an 8-bit cache (fp8); it reads 16-bit ones"),
        ({"partial": True, "ragged": True, "batch_invariant": True}, "None"),
    ],
)
def test_what_a_latent_kernel_may_refuse(options, refusal):
    kernel = LatentBackend("noted", "torch", lambda *_: None)
    assert refusal in str(kernel.unsupported(CallShape(**LARGE, **options)))


@pytest.mark.parametrize(("tokens", "fits"), [(32767, True), (32768, False)])
def test_packed_queries_are_counted_as_they_are(tokens, fits):
    """Not by the most of any request times the requests."""
    q = torch.empty(1, dtype=torch.bfloat16).expand(tokens, 128, 512)
    cache = torch.zeros(256, 64, 512, dtype=torch.bfloat16)
    bounds = torch.full((257,), tokens, dtype=torch.int32)
    bounds[0] = 0
    view = CacheView(cache, cache[..., :64], torch.full((256,), 64, dtype=torch.int32))
    task = AttentionTask(
        q=q, q_rope=q[..., :64], cache=view, w_uk=None, w_uv=None, causal=True, scale=1.0,
        cu_seqlens_q=bounds, max_q=tokens,
    )  # fmt: skip
    assert task.shape().rows_in_32_bits is fits
    assert replace(task, max_q=None).shape().s == 128  # the mean, rounded up
    weights = {"w_uk": torch.empty(128, 128, 512), "w_uv": torch.empty(128, 512, 128)}
    assert replace(task, q=q[..., :128], **weights).shape().rows_in_32_bits is fits
