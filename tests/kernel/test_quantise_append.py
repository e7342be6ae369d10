"""quantise_append: the same bytes as the rounding in torch, in the interpreter."""

from typing import Any

import pytest
import torch

from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.attention.cache.storage import Storage
from mla_var3.errors import KernelCompileError
from mla_var3.kernel.cutile.mla import quantise_append as module
from mla_var3.kernel.cutile.mla.quantise_append import serves, write_tokens
from mla_var3.op.mla.cache_formats import FORMATS, PER_TENSOR, cache_format, quantise
from mla_var3.runtime import ct_kernel

K, P, PAGE = 512, 64, 64
INF, NAN = torch.inf, torch.nan
FORMAT = pytest.mark.parametrize("name", FORMATS)
TARGETS = ("sm_90", "sm_100", "sm_120")


def tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all magnitudes, with zeros, NaN and infinities in both parts."""
    sizes = torch.logspace(-38, 38, 12)[:, None]
    latent = (torch.randn(12, K, generator=generator) * sizes).bfloat16()
    rope = torch.randn(12, P, generator=generator).bfloat16()
    latent[0, 3], latent[1, 4], latent[3, 7] = NAN, INF, -INF
    rope[4, 1], rope[5, 1], rope[6, 9] = INF, NAN, -INF
    latent[2], latent[7], rope[7], rope[8], latent[11] = 0.0, 0.0, 0.0, 1e38, NAN
    return latent, rope


@FORMAT
def test_the_bytes_are_those_of_torch(name, generator):
    """Rows that are not valid leave the cache as it was, whatever their slot."""
    fmt = cache_format(name)
    scale = torch.tensor([0.7]) if fmt is PER_TENSOR else None
    latent, rope = tokens(generator)
    buffers = [torch.full((3, PAGE, fmt.row_bytes(K, P)), 0x55, dtype=torch.uint8) for _ in "ab"]
    found, wanted = (fmt.parts(buffer, K, P, scale) for buffer in buffers)
    slots = torch.randperm(3 * PAGE, generator=generator)[:12]
    valid = torch.ones(12, dtype=torch.bool)
    valid[[4, 10]] = False
    slots[[4, 10]] = torch.tensor([-9, 10**9])
    write_tokens(latent, rope, slots, valid, fmt, found)
    values = quantise(latent, rope, fmt, scale)
    places = slots[valid] // PAGE, slots[valid] % PAGE
    for part in ("latent", "rope") if scale is not None else ("latent", "rope", "scales"):
        bytes_of = getattr(values, part).view(torch.uint8)
        getattr(wanted, part).view(torch.uint8)[places] = bytes_of[valid]
    assert torch.equal(*buffers)
    assert (buffers[0] != 0x55).any()


@FORMAT
@pytest.mark.parametrize("page_size", [None, PAGE])
def test_a_cache_that_writes_by_the_kernel(name, page_size, generator, monkeypatch):
    """Appends, drops and evictions, with packed rows that are columns of one tensor."""
    rows = torch.randn(9, K + P, generator=generator).bfloat16()

    def filled(by_kernel: bool) -> LatentCache:
        cache = LatentCache.allocate(3, 128, dtype=name, page_size=page_size)
        cache.storage._has_kernel = by_kernel
        for bounds in ([0, 4, 4, 9], [0, 0, 7, 8]):
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
            cache.append(rows[:, :K], rows[:, K:], cu_seqlens=cu_seqlens)
            cache.truncate([1, 0, 2])
        cache.evict([1])
        cache.append(rows[:3, None, :K], rows[:3, None, K:], counts=[1, 1, 0])
        return cache

    monkeypatch.setattr("mla_var3.attention.cache.storage.quantise", None)
    found = filled(by_kernel=True)
    monkeypatch.undo()
    assert found.storage._launched
    wanted = filled(by_kernel=False)
    assert torch.equal(found.buffer, wanted.buffer) and torch.equal(found.lengths, wanted.lengths)


def test_where_torch_writes(generator, monkeypatch):
    """Widths that are no powers of two, and a GPU for which the kernel does not compile."""
    assert serves(512, 64) and not serves(512, 0) and not serves(96, 64)
    assert not LatentCache.allocate(1, 64, dtype="fp8").storage._has_kernel  # on the CPU

    def fails(*args: Any) -> None:
        raise KernelCompileError("quantise_append: no such target")

    monkeypatch.setattr(module, "launch_kernel", fails)
    cache = LatentCache.allocate(1, 64, dtype="fp8")
    storage: Storage = cache.storage
    storage._has_kernel = True
    rows = torch.randn(1, 2, K + P, generator=generator).bfloat16()
    cache.append(rows[..., :K], rows[..., K:])
    assert not storage._has_kernel and cache.c_kv.float().any()


@pytest.mark.slow
@FORMAT
def test_it_compiles(name, monkeypatch):
    """For every target that has float8, with pages of more bytes than 32 bits count."""
    fmt, launched = cache_format(name), []
    monkeypatch.setattr(module, "launch_kernel", lambda *launch: launched.append(launch))
    pool = torch.empty((1 << 18, PAGE, fmt.row_bytes(K, P)), dtype=torch.uint8, device="meta")
    rows = torch.empty((16, K + P), dtype=torch.bfloat16, device="meta")
    slots, valid = (
        torch.empty(16, dtype=kind, device="meta") for kind in (torch.int64, torch.bool)
    )
    write_tokens(rows[:, :K], rows[:, K:], slots, valid, fmt, fmt.parts(pool, K, P))
    kernel, _, args = launched[0]
    for target in TARGETS:
        signature = ct_kernel.signature_of(kernel, args)
        assert ct_kernel._export(kernel, signature, target, "cubin")
