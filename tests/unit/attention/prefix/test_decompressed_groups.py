"""Several groups with decompressed prefixes in one batch, on the CPU with PyTorch as the kernel."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention import decompress_prefixes
from mla_var3.attention.backends.torch_tiled import TorchTiled
from mla_var3.attention.prefix.decompressed import GroupedPrefixBackend
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.request.shape import CallShape
from mla_var3.attention.request.task import AttentionTask
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.model.prefix_plan import plan_prefix
from mla_var3.op.mla.prefix.problem import SharedPrefixProblem
from mla_var3.op.mla.problem import MlaProblem
from tests.unit.attention.attention_support import (
    Model,
    make_model,
    normal,
    registered,
    require_oracle,
)

from .prefix_support import Batch, make_batch

H, D, K, P = 2, 6, 8, 4
KERNEL = "torch_tiled_groups"
A, B, C = (0, 128), (1, 192), (2, 64)
LENGTHS = [300, 150, 250, 210, 193, 90, 70]
PREFIXES: list[list[tuple[int, int]]] = [[A], [A], [A], [B], [B], [], [C]]
GROUPS = PrefixGroups(torch.tensor([[0, 0, 0, 1, 1, -1, 2]]), torch.tensor([[150, 192, 64]]))
"""Two groups, one of them with tokens beyond its last page; no group, and one of one request."""


class Watched(TorchTiled):
    """Notes which requests come with which decompressed prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def run(self, task: AttentionTask) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append((task.cache.requests, task.cache.prefix))
        return super().run(task)


@pytest.fixture
def inner() -> Iterator[Watched]:
    made = Watched()
    with registered(GroupedPrefixBackend(made, made)):
        yield made


def call(
    batch: Batch, generator: torch.Generator, prefixes: Any, model: Model, **options: Any
) -> None:
    q = [normal(generator, len(LENGTHS), 2, H, w, dtype=torch.float32) for w in (D, P)]
    output, lse = mla_var3.mla_attention(
        *q, batch.cache, model.w_uk, model.w_uv, prefix=prefixes, return_lse=True, **options
    )
    require_oracle(output, lse, q, batch.tokens, model)


def test_a_cache_with_a_window_in_8_bits(inner):
    """The calls of the groups read no window, of whatever form."""
    sizes: dict[str, Any] = {"b": 7, "s": 2, "t": 320, "h": H, "window": 64, "prefix_copies": 192}
    for window_dtype in (None, "fp8"):
        shape = CallShape(**sizes, window_dtype=window_dtype)
        assert GroupedPrefixBackend(inner, inner).unsupported(shape) is None


@pytest.mark.parametrize("paged", [True, False])
def test_each_group_is_a_call_of_its_own(paged, inner, generator):
    model = make_model(generator, H, D, K)
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=paged)
    prefixes = decompress_prefixes(GROUPS, batch.cache, model.w_uk, model.w_uv)
    assert [(copy.first, copy.last, copy.tokens) for copy in prefixes.copies] == [
        (0, 3, 128), (3, 5, 192),
    ]  # fmt: skip
    assert prefixes.copy_bytes == 4 * (128 + 192) * (H * 2 * D + P)
    out = torch.full((len(LENGTHS), 2, H, D), torch.nan)
    call(batch, generator, prefixes, model, kernel=KERNEL, out=out)
    assert inner.seen == [(3, 128), (2, 192), (2, 0)] and not out.isnan().any()
    call(batch, generator, replace(prefixes, copies=prefixes.copies[1:]), model, kernel=KERNEL)
    assert inner.seen[3:] == [(3, 0), (2, 192), (2, 0)]


def test_a_prefix_that_is_all_of_its_requests(inner, generator):
    model = make_model(generator, H, D, K)
    batch = make_batch(generator, [128, 128], [[A], [A]], paged=True)
    groups, weights = PrefixGroups(torch.zeros(1, 2).int(), torch.tensor([[128]])), vars(model)
    prefixes = decompress_prefixes(groups, batch.cache, **weights)
    q = [normal(generator, 2, 2, H, w, dtype=torch.float32) for w in (D, P)]
    found = mla_var3.mla_attention(
        *q, batch.cache, **weights, prefix=prefixes, kernel=KERNEL, return_lse=True
    )
    require_oracle(*found, q, batch.tokens, model)
    assert inner.seen == [(2, 128)]


def test_the_copies_are_what_is_read(inner, generator):
    model = make_model(generator, H, D, K)
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    prefixes = decompress_prefixes(GROUPS, batch.cache, model.w_uk, model.w_uv)
    prefixes.copies[1].values.fill_(torch.nan)
    q = [normal(generator, len(LENGTHS), 1, H, w, dtype=torch.float32) for w in (D, P)]
    weights = model.w_uk, model.w_uv
    found = mla_var3.mla_attention(*q, batch.cache, *weights, prefix=prefixes, kernel=KERNEL)
    assert found.isnan().flatten(1).any(1).tolist() == [False] * 3 + [True] * 2 + [False] * 2


def test_other_kernels_use_the_groups_or_ignore_them(generator):
    model = make_model(generator, H, D, K)
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    prefixes = decompress_prefixes(GROUPS, batch.cache, model.w_uk, model.w_uv)
    call(batch, generator, prefixes, model)


def test_what_cannot_be_decompressed(generator):
    model = make_model(generator, H, D, K)
    batch = make_batch(generator, LENGTHS, PREFIXES, paged=True)
    weights = model.w_uk, model.w_uv
    apart = PrefixGroups(torch.tensor([[0, 1, 0, 1, 1, -1, 2]]), GROUPS.prefix_length)
    with pytest.raises(InvalidArgumentError, match="prefix_of: expected neighbours in group 0"):
        decompress_prefixes(apart, batch.cache, *weights)
    two = PrefixGroups(GROUPS.prefix_of.repeat(2, 1), GROUPS.prefix_length.repeat(2, 1))
    with pytest.raises(InvalidArgumentError, match="groups: expected one level of prefixes"):
        decompress_prefixes(two, batch.cache, *weights)
    others = PrefixGroups(torch.tensor([[0, 0, 0, 1, 1, 1, 2]]), GROUPS.prefix_length)
    message = r"prefix_of\[0, 5\]: expected a group that shares 192 tokens, .* got 1"
    with pytest.raises(InvalidArgumentError, match=message):
        decompress_prefixes(others, batch.cache, *weights)
    longer = PrefixGroups(GROUPS.prefix_of, GROUPS.prefix_length + 640)
    assert decompress_prefixes(longer, batch.cache, *weights).copies == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": None}, "groups: expected PrefixGroups, got NoneType"),
        ({"cache": (1, 2)}, "cache: expected a LatentCache or a CacheView, got tuple"),
        ({"w_uk": torch.zeros(H, D, K + 1)}, r"w_uk: expected \[h, d, k=8\], got \[2, 6, 9\]"),
        ({"w_uv": torch.zeros(H + 1, K, D)}, r"w_uv: expected \[h=2, k=8, v\], got"),
        ({"w_uv": torch.zeros(H, K, D).half()}, "w_uv: expected dtype torch.float32"),
        ({"w_uk": None}, r"w_uk: expected a tensor \[h, d, k=8\], got NoneType"),
    ],
)
def test_wrong_weights_groups_and_caches(changes, message, generator):
    batch, model = make_batch(generator, LENGTHS, PREFIXES, paged=True), make_model(generator)
    given = {"groups": GROUPS, "cache": batch.cache, "w_uk": model.w_uk, "w_uv": model.w_uv}
    with pytest.raises(InvalidArgumentError, match=message):
        decompress_prefixes(**given | changes)


def test_copies_of_other_heads_are_refused(generator):
    """A kernel would read behind their end."""
    batch, model = make_batch(generator, LENGTHS, PREFIXES, paged=True), make_model(generator)
    for weights, message in (
        ({"h": H - 1}, r"prefix.copies\[0\].keys: expected \[h=2, tokens=128, d=6\], got \[1, "),
        ({"d": D - 2}, r"prefix.copies\[0\].keys: .* got \[2, 128, 4\]"),
    ):
        other = make_model(generator, k=K, **weights)
        copies = decompress_prefixes(GROUPS, batch.cache, other.w_uk, other.w_uv)
        with pytest.raises(InvalidArgumentError, match=message):
            call(batch, generator, copies, model)


def test_the_way_of_large_groups_is_decompressed():
    """On an H200, 128 heads: at 256 query tokens per group, not at 32."""

    def chosen(groups: int, members: int, s: int) -> tuple[str, int]:
        problem = MlaProblem(b=groups * members, s=s, t=8448, h=128)
        shared = SharedPrefixProblem(problem, 8192, groups)
        plan = plan_prefix(shared, device_spec("NVIDIA H200"), 2**40)
        return plan.chosen.name, plan.ways[-1].copy_bytes

    token_bytes = (128 * 256 + 64) * 2
    assert chosen(4, 128, 2) == ("decompressed", 4 * 8192 * token_bytes)
    assert chosen(8, 8, 4)[0] == "latent"
