"""The same random steps on several caches, compared bit by bit after each."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mla_var3.attention.cache.latent_cache import LatentCache

B, T, PAGE, PAGES = 5, 256, 64, 9
K, P = 256, 8
HEADS, WIDTH = 2, 4


def make_cache(dtype: Any = torch.bfloat16, **options: Any) -> LatentCache:
    """A cache with too few pages for all of its requests, every byte set."""
    if "window" in options or "prefix" in options:
        options = {"heads": HEADS, "head_dim": WIDTH, **options}
    if options.get("page_size"):
        options = {"num_pages": PAGES, **options}
    cache = LatentCache.allocate(B, T, k=K, p=P, dtype=dtype, **options)
    cache.buffer.view(torch.uint8).fill_(0x55)
    if cache.prefix is not None:
        device, length = cache.buffer.device, cache.prefix.length
        generator = torch.Generator().manual_seed(3)
        rows = torch.randn(length, K + P, generator=generator).bfloat16().to(device)
        cache.set_prefix(rows[:, :K], rows[:, K:], **weights(device))
    return cache


def weights(device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    w_uk = torch.randn(HEADS, WIDTH, K, generator=generator).bfloat16()
    w_uv = torch.randn(HEADS, K, WIDTH, generator=generator).bfloat16()
    return {"w_uk": w_uk.to(device), "w_uv": w_uv.to(device)}


def state(cache: LatentCache) -> dict[str, torch.Tensor]:
    """All that a cache holds."""
    found = {"lengths": cache.lengths, "refused": cache.refused, "buffer": cache.buffer}
    for name in ("block_table", "owners", "free", "free_count"):
        if cache.pages is not None:
            found[name] = getattr(cache.pages, name)
    for name in ("k_new", "v_new", "k_rope_new", "start"):
        if cache.window is not None:
            found[name] = getattr(cache.window, name)
    return found


def differing(one: LatentCache, other: LatentCache, share: float = 0.0) -> list[str]:
    """The parts of two caches that are not the same, bit by bit.

    Args:
        one: A cache.
        other: Another.
        share: The buffers are compared by their numbers, all NaN alike, of which this share may
            differ; 0 for bits.
    """
    found, others = [], state(other)
    for name, part in state(one).items():
        if name == "buffer" and share:
            same = all(
                wrong_numbers(*pair) <= share * pair[0].numel()
                for pair in zip(one.storage.parts(), other.storage.parts(), strict=True)
                if pair[0] is not None
            )
        else:
            same = torch.equal(part.view(torch.uint8), others[name].view(torch.uint8))
        if not same:
            found.append(name)
    return found


def wrong_numbers(one: torch.Tensor, other: torch.Tensor) -> int:
    one, other = one.float(), other.float()
    return int((~((one == other) | (one.isnan() & other.isnan()))).sum())


class Steps:
    """Random changes, the same for every cache.

    Attributes:
        seen: How often which kind of step happened, and tokens were "refused".
    """

    def __init__(
        self, caches: Sequence[LatentCache], seed: int, *, forks: bool, share: float = 0.0
    ) -> None:
        self.caches, self.seen, self._forks = caches, Counter[str](), forks
        self._share = share  # as in `differing`
        self._chance = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._device = caches[0].buffer.device

    def run(self, steps: int) -> None:
        """Take some steps; the caches are the same after each."""
        for step in range(steps):
            kinds: list[Callable[[], Callable[[LatentCache], Any]]] = [
                self.padded, self.padded, self.packed, self.packed, self.truncate, self.truncate,
                self.evict,
            ]  # fmt: skip
            if self._forks:
                kinds.append(self.fork)
            kind = self._chance.choice(kinds)
            self.take(kind(), f"step {step}, {kind.__name__}")
            self.seen[kind.__name__] += 1

    def take(self, change: Callable[[LatentCache], Any], name: str) -> None:
        """One change to every cache."""
        results = [change(cache) for cache in self.caches]
        for cache, result in zip(self.caches[1:], results[1:], strict=True):
            parts = differing(self.caches[0], cache, self._share)
            if result is not None and not torch.equal(result, results[0]):
                parts.append("taken")
            assert not parts, f"{name}: {parts}"

    def integers(self, values: list[int]) -> Any:
        """A tensor of either dtype."""
        dtype = self._chance.choice((torch.int32, torch.int64))
        return torch.tensor(values, dtype=dtype, device=self._device)

    def rows(self, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of many magnitudes, with zeros, NaN and infinities; columns of one tensor."""
        wide = torch.randn(*leading, K + P, generator=self._generator)
        wide *= 10.0 ** torch.randint(-38, 38, (*leading, 1), generator=self._generator)
        special = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 1e38])
        odd = torch.randint(0, 60, wide.shape, generator=self._generator)
        wide = torch.where(odd < len(special), special[odd.clamp(max=len(special) - 1)], wide)
        wide[torch.rand(leading, generator=self._generator) < 0.1] = 0.0
        rows = wide.to(torch.bfloat16).to(self._device)
        return rows[..., :K], rows[..., K:]

    def given(self) -> dict[str, torch.Tensor]:
        return weights(self._device) if self.caches[0].window is not None else {}

    def counted(self, taken: torch.Tensor, asked: list[int]) -> torch.Tensor:
        self.seen["refused"] += taken.tolist() != asked
        return taken

    def padded(self) -> Callable[[LatentCache], Any]:
        m = self._chance.choice((1, 3, 70))
        counts = [self._chance.choice((0, 1, m)) for _ in range(B)]
        how: Any = self._chance.choice((None, counts, self.integers(counts)))
        rows, options = self.rows(B, m), self.given()
        asked = [m] * B if how is None else counts
        return lambda cache: self.counted(cache.append(*rows, how, **options), asked)

    def packed(self) -> Callable[[LatentCache], Any]:
        counts = [self._chance.choice((0, 0, 1, 5, 64, 100)) for _ in range(B)]
        bounds = [sum(counts[:request]) for request in range(B + 1)]
        total = bounds[-1] + self._chance.choice((0, 3))
        if total == 0:
            return self.packed()
        cu_seqlens, options = self.integers(bounds), self.given()
        rows = self.rows(total)
        return lambda cache: self.counted(
            cache.append(*rows, cu_seqlens=cu_seqlens, **options), counts
        )

    def truncate(self) -> Callable[[LatentCache], Any]:
        counts = [self._chance.choice((0, 1, 5, 64, 90, 2**31 - 1)) for _ in range(B)]
        if self._chance.random() < 0.7:
            counts = [min(count, 5) for count in counts]
        given = self.integers(counts)
        return lambda cache: cache.truncate(given)

    def evict(self) -> Callable[[LatentCache], Any]:
        gone = self._chance.sample(range(B), self._chance.choice((0, 1, 1, 2, B)))
        mask = torch.tensor([request in gone for request in range(B)], device=self._device)
        how: Any = self._chance.choice((gone, mask))
        return lambda cache: cache.evict(how)

    def fork(self) -> Callable[[LatentCache], Any]:
        source, into = self._chance.randrange(B), self._chance.sample(range(B), 2)
        return lambda cache: cache.fork(source, into)
