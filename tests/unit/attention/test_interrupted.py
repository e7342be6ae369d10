"""Changes of a cache that fail half-way, for want of memory: it stays as it was."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_var3.attention import mla_attention
from mla_var3.attention.cache import latent_cache
from mla_var3.attention.cache.latent_cache import LatentCache
from mla_var3.runtime import ct_kernel

from .attention_support import Model, filled_cache, make_model, normal, require_oracle
from .test_fork import owned_pages

LENGTHS = [100, 20, 70]
NEW = [30, 5, 1]
P, SMALL_BYTES = 4, 512


class OutOfMemory(TorchDispatchMode):
    """Has no memory for the n-th new tensor that is not small."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        found = func(*args, **kwargs)
        for each in tree_leaves(found):
            if not _is_tensor(each) or _memory(each) in given:
                continue
            if each.untyped_storage().nbytes() <= SMALL_BYTES:
                continue
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError(f"no memory for {func}")
        return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def require_contents(cache: LatentCache, tokens: list[torch.Tensor], model: Model) -> None:
    """Lengths, pages and what the attention sees."""
    assert cache.lengths.tolist() == [len(rows) for rows in tokens]
    if cache.pages is not None:
        owned_pages(cache)
    h, d, _ = model.sizes
    generator = torch.Generator().manual_seed(7)
    q = [normal(generator, len(tokens), 2, h, width, dtype=torch.float32) for width in (d, P)]
    output, lse = mla_attention(*q, cache, model.w_uk, model.w_uv, return_lse=True)
    require_oracle(output, lse, q, tokens, model)


@pytest.mark.parametrize(
    ("page_size", "window", "forks"),
    [(None, 64, False), (64, 0, True), (64, 64, True), (64, 192, False)],
)
def test_a_failed_append_takes_nothing(page_size, window, forks, generator):
    model = make_model(generator)
    k = model.sizes[2]
    filled, held = filled_cache(
        generator, LENGTHS, model, t=192, page_size=page_size, window=window, steps=1
    )
    if forks:
        filled.fork(0, into=[2])
        held[2] = held[0]
    rows = normal(generator, len(NEW), max(NEW), k + P, dtype=torch.float32)
    longer = [torch.cat([old, new[:n]]) for old, new, n in zip(held, rows, NEW, strict=True)]
    change = (rows[..., :k], rows[..., k:], torch.tensor(NEW), model)
    failures = 0
    for n in itertools.count(1):
        cache, memory = copy.deepcopy(filled), OutOfMemory(n)
        try:
            with memory:
                append(cache, *change)
        except torch.OutOfMemoryError:
            failures += 1
            require_contents(cache, held, model)
            append(cache, *change)
        require_contents(cache, longer, model)
        if memory.left > 0:
            break
    assert failures > 5


def test_an_append_interrupted_before_pages_are_copied_keeps_their_tokens(generator, monkeypatch):
    model = make_model(generator)
    cache, tokens = filled_cache(generator, LENGTHS, model, t=192, page_size=64)
    cache.fork(0, into=[2])
    tokens[2] = tokens[0]
    real, calls = cache.index._copy_pages, []

    def copy_pages(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(cache.index, "_copy_pages", copy_pages)
    with pytest.raises(KeyboardInterrupt):
        one_more(cache, tokens, model, generator)
    require_contents(cache, tokens, model)


def test_a_prefix_that_is_not_decompressed_changes_nothing(generator, monkeypatch):
    model = make_model(generator)
    h, d, k = model.sizes
    cache = LatentCache.allocate(
        2, 192, k=k, p=P, dtype=torch.float32, page_size=64, prefix=64, heads=h, head_dim=d
    )
    old, new = (normal(generator, 64, k + P, dtype=torch.float32) for _ in range(2))
    cache.set_prefix(old[:, :k], old[:, k:], model.w_uk, model.w_uv)

    def decompress(*rows: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the keys")

    monkeypatch.setattr(latent_cache, "decompress_rows", decompress)
    with pytest.raises(torch.OutOfMemoryError):
        cache.set_prefix(new[:, :k], new[:, k:], model.w_uk, model.w_uv)
    assert torch.equal(cache.buffer[0], old)


def append(
    cache: LatentCache,
    latent: torch.Tensor,
    rope: torch.Tensor,
    counts: torch.Tensor | None,
    model: Model,
) -> None:
    cache.append(latent, rope, counts, w_uk=model.w_uk, w_uv=model.w_uv)


def one_more(
    cache: LatentCache, tokens: list[torch.Tensor], model: Model, generator: torch.Generator
) -> list[torch.Tensor]:
    """The tokens after one more of each request."""
    k = model.sizes[2]
    rows = normal(generator, 3, 1, k + P, dtype=torch.float32)
    append(cache, rows[..., :k], rows[..., k:], None, model)
    return [torch.cat([old, new]) for old, new in zip(tokens, rows, strict=True)]


def test_a_failed_fork_leaves_empty_requests(generator, monkeypatch):
    model = make_model(generator)
    cache, tokens = filled_cache(generator, LENGTHS, model, t=192, page_size=64, window=64)

    def fork(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory for the ring")

    with monkeypatch.context() as patch:
        patch.setattr(cache.window, "fork", fork)
        with pytest.raises(torch.OutOfMemoryError):
            cache.fork(0, into=[2])
    tokens[2] = tokens[2][:0]
    require_contents(cache, tokens, model)
    require_contents(cache, one_more(cache, tokens, model, generator), model)


def test_without_a_disk_to_compile_on_torch_appends(generator, monkeypatch, caplog):
    """cuTile compiles in a folder for temporary files, which may be full, or gone after weeks."""

    def launch(*arguments: Any, **options: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/tmp/gone/append.bytecode")

    monkeypatch.setattr(ct_kernel.ct, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    on_gpu = ct_kernel._launch_on_gpu
    monkeypatch.setattr(
        ct_kernel, "launch_kernel", lambda made: on_gpu(made.kernel, made.grid, made.args)
    )
    model = make_model(generator)
    cache, tokens = filled_cache(generator, LENGTHS, model, t=192, page_size=64)
    cache.index.kernels.serve(float8=True, fp8=False)
    assert cache.index.kernels.pages
    require_contents(cache, one_more(cache, tokens, model, generator), model)
    assert "No such file or directory" in caplog.text
