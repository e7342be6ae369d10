"""Calls over shared prefixes are replayed, with the device code of the small kernels on the CPU."""

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_var3
from mla_var3.attention.backends.latent import LatentBackend
from mla_var3.attention.prefix import attend, layout
from mla_var3.attention.prefix.attend import PrefixBackend
from mla_var3.attention.prefix.groups import PrefixGroups
from mla_var3.attention.prefix.layout import prefix_layout
from mla_var3.kernel.cute_python.mla.hopper.constants import FP8_FORMATS
from mla_var3.op.mla.cache_formats import PER_TENSOR, cache_format, quantise
from tests.kernel.prefix_on_cpu import CpuKernels
from tests.unit.attention.attention_support import (
    filled_cache,
    make_model,
    normal,
    random_parents,
    registered,
    require_oracle,
)
from tests.unit.attention.replay.replay_support import RepeatableKernel

from .prefix_support import Batch, make_batch

H, D, K, P = 2, 128, 512, 64
KERNEL = "repeatable_prefix"
DTYPE = torch.bfloat16
A, B, C = (0, 128), (1, 192), (2, 64)
PREFIXES = {1: [[A], [], [B], [A], [A], [B]], 2: [[A, B], [], [A, C], [A, B], [A, B], [A, C]]}
LENGTHS = {1: [300, 150, 210, 128, 250, 193], 2: [400, 90, 200, 330, 321, 260]}
GROUPS = {
    1: ([[0, -1, 1, 0, 0, 1]], [[128, 192, 0]]),
    2: ([[0, -1, 0, 0, 0, 0], [0, -1, 1, 0, 0, 1]], [[128, 0], [192, 64]]),
}
"""By levels; requests in two groups and in none, one too short for its prefix."""


@pytest.fixture
def latent() -> RepeatableKernel:
    return RepeatableKernel()


@pytest.fixture
def kernels(latent: RepeatableKernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuKernels]:
    made = CpuKernels()
    for module in (attend, layout):
        monkeypatch.setattr(module, "prefix_kernels", lambda device: made)
    inner = LatentBackend(
        "repeatable", "torch", latent, runs_on_cpu=True, cache_formats=FP8_FORMATS
    )
    with registered(PrefixBackend(inner)):
        yield made


def groups_of(levels: int, ordered: bool = False) -> PrefixGroups:
    of, lengths = (torch.tensor(values, dtype=torch.int32) for values in GROUPS[levels])
    if ordered:
        of = torch.where(of < 0, 9, of).sort(dim=1).values
    return PrefixGroups(of, lengths, ordered=ordered)


def batch_of(
    generator: torch.Generator, levels: int, paged: bool, ordered: bool = False, p: int = P
) -> Batch:
    lengths, prefixes = LENGTHS[levels], PREFIXES[levels]
    if ordered:
        of = groups_of(levels).prefix_of[-1]
        order = sorted(range(len(lengths)), key=lambda r: (of[r] < 0, int(of[r])))
        lengths, prefixes = ([values[r] for r in order] for values in (lengths, prefixes))
    return make_batch(generator, lengths, prefixes, paged=paged, k=K, p=p, dtype=DTYPE, t=448)


def queries(
    generator: torch.Generator, *leading: int, width: int = K, p: int = P
) -> list[torch.Tensor]:
    return [normal(generator, *leading, H, w, dtype=DTYPE) for w in (width, p)]


def attend_right(batch: Batch, q: Any, prefix: Any, **options: Any) -> Any:
    """The output of a latent call that is compared with the oracle."""
    masks = {name: options.pop(name) for name in ("counts", "trees") if name in options}
    found = mla_var3.mla_latent_attention(*q, batch.cache, prefix=prefix, kernel=KERNEL, **options)
    batch.require(*q, *found, **masks)
    return found[0]


@pytest.mark.parametrize("laid_out", [False, True], ids=["groups", "layout"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "dense"])
def test_latent_calls(paged, levels, ordered, laid_out, latent, kernels, generator):
    for turn in range(3):
        batch = batch_of(generator, levels, paged, ordered)
        q, groups = queries(generator, 6, 2), groups_of(levels, ordered)
        prefix = prefix_layout(groups, q[0], batch.cache) if laid_out else groups
        options = {"out": torch.full_like(q[0], torch.nan)} if laid_out else {}
        output = attend_right(batch, q, prefix, **options)
        assert not options or output is options["out"]
        # One pass over own tokens, and one per level.
        assert (latent.calls, latent.repeats) == (1 + levels, turn * (1 + levels))
    gathered = [] if ordered else ["gather"] * levels
    assert [name for name in kernels.calls if name != "lay_out"] == [*gathered, "merge"]
    assert kernels.calls.count("lay_out") == (3 if laid_out else 1)


@pytest.mark.parametrize("options", ["tree", "packed"])
def test_trees_and_packed_queries(options, latent, kernels, generator):
    counts = [2, 0, 1, 3, 4, 1]
    for turn in range(2):
        batch, groups = batch_of(generator, 1, True), groups_of(1)
        if options == "tree":
            mask = mla_var3.attention.tree_ancestors(random_parents(generator, 6, 4))
            attend_right(batch, queries(generator, 6, 4), groups, tree_mask=mask, trees=mask)
        else:
            bounds = torch.tensor([0, *counts]).cumsum(0).int()
            q = queries(generator, sum(counts) + 2)  # two rows of no request
            attend_right(batch, q, groups, cu_seqlens_q=bounds, max_q=4, counts=counts)
        assert (latent.calls, latent.repeats) == (2, 2 * turn)


@pytest.mark.parametrize("kept", [True, False], ids=["kept workspace", "allocated"])
def test_whole_calls(kept, latent, kernels, generator, monkeypatch):
    if not kept:
        monkeypatch.setattr("mla_var3.attention.replay.replay.LARGEST_BYTES", 0)
    model = make_model(generator, H, D, K, DTYPE)
    for turn in range(3):
        batch, groups = batch_of(generator, 2, True), groups_of(2)
        q = queries(generator, 6, 2, width=D)
        found = mla_var3.mla_attention(
            *q, batch.cache, model.w_uk, model.w_uv, prefix=groups, kernel=KERNEL, return_lse=True
        )
        require_oracle(*found, q, batch.tokens, model)
        assert (latent.calls, latent.repeats) == (3, 3 * turn)


def test_the_prefix_of_a_cache(latent, kernels, generator):
    """Its groups are those of the call shape, which the launch keeps."""
    model = make_model(generator, H, D, K, DTYPE)
    for turn in range(2):
        cache, tokens = filled_cache(
            generator, [200, 130, 128], model, p=P, t=256, dtype=DTYPE, page_size=64, prefix=128
        )
        q = queries(generator, 3, 2, width=D)
        found = mla_var3.mla_attention(
            *q, cache, model.w_uk, model.w_uv, kernel=KERNEL, return_lse=True
        )
        require_oracle(*found, q, tokens, model)
        assert (latent.calls, latent.repeats) == (2, 2 * turn)


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_caches_in_8_bits(name, latent, kernels, generator):
    """Every pass reads the scales of its own call."""
    for turn in range(2):
        batch, q = batch_of(generator, 1, True), queries(generator, 6, 1)
        scale = torch.full((1,), 0.01 * (turn + 1)) if name == PER_TENSOR.name else None
        rows = (part.nan_to_num() for part in (batch.cache.latent, batch.cache.rope))
        parts = quantise(*rows, cache_format(name), scale)
        view = dataclasses.replace(batch.cache, **vars(parts))
        found = mla_var3.mla_latent_attention(*q, view, prefix=groups_of(1), kernel=KERNEL)
        wanted = mla_var3.mla_latent_attention(*q, view, kernel="torch_tiled")
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        assert (latent.calls, latent.repeats) == (2, 2 * turn)


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
def test_queries_without_rope(ordered, latent, kernels, generator):
    """The kernel that gathers queries copies rope keys, so torch does it."""
    for _ in range(2):
        batch, q = batch_of(generator, 1, True, ordered, p=0), queries(generator, 6, 2, p=0)
        attend_right(batch, q, groups_of(1, ordered))
    assert "gather" not in kernels.calls and latent.repeats == (2 if ordered else 0)


def test_an_unaligned_output_is_written_through_a_copy(kernels, latent, generator):
    for turn in range(2):
        batch, q = batch_of(generator, 1, True), queries(generator, 6, 1)
        out = torch.full((q[0].numel() + 1,), torch.nan, dtype=DTYPE)[1:].view_as(q[0])
        assert attend_right(batch, q, groups_of(1), out=out) is out
        assert (latent.calls, latent.repeats) == (2 * (turn + 1), 0)


def test_other_groups_of_the_same_shape_are_used(kernels, latent, generator):
    """The replay reads the groups of its own call."""
    for turn in range(2):
        batch, groups = batch_of(generator, 1, True), groups_of(1)
        if turn:
            groups.prefix_of[0, 4] = -1  # one request less shares its prefix
        attend_right(batch, queries(generator, 6, 1), groups)
    assert (latent.calls, latent.repeats) == (2, 2)


def test_numbers_of_another_type_are_laid_out_by_torch(kernels, latent, generator):
    """The kernels read int32; a call with other integers is right, and not replayed."""
    for _ in range(2):
        batch, groups = batch_of(generator, 1, True), groups_of(1)
        groups = PrefixGroups(groups.prefix_of.long(), groups.prefix_length)
        attend_right(batch, queries(generator, 6, 1), groups)
    assert "lay_out" not in kernels.calls and (latent.calls, latent.repeats) == (4, 0)


@pytest.mark.parametrize("ordered", [False, True], ids=["any order", "ordered"])
def test_short_passes_share_the_sms(ordered, latent, kernels, monkeypatch, generator):
    """The pass over prefixes first, that over own tokens beside it, each with its SMs."""
    monkeypatch.setattr(PrefixBackend, "_overlaps", lambda self, task: True)
    for turn in range(2):
        batch = batch_of(generator, 1, True, ordered)
        q = queries(generator, 6, 2)
        groups = dataclasses.replace(groups_of(1, ordered), tokens=96, own=64)
        attend_right(batch, q, groups)
        assert (latent.calls, latent.repeats) == (2, 2 * turn)
    first, second = latent.options
    assert (first.overlap, second.overlap) == ("first", "second")
    assert first.causal is False and second.causal is True
    assert first.sms + second.sms == 132 and min(first.sms, second.sms) > 0


def test_a_pass_that_copies_is_not_overlapped(latent, kernels, monkeypatch, generator):
    """What it copied is free again on the host while it still runs."""
    monkeypatch.setattr(PrefixBackend, "_overlaps", lambda self, task: True)
    monkeypatch.setattr(RepeatableKernel, "__call__", without_launch)
    batch, q = batch_of(generator, 1, True), queries(generator, 6, 2)
    groups = dataclasses.replace(groups_of(1), tokens=96, own=64)
    attend_right(batch, q, groups)
    assert [(one.overlap, one.sms > 0) for one in latent.options] == [("first", True), ("", False)]


def without_launch(self: RepeatableKernel, operands: Any, options: Any) -> None:
    RepeatableKernel.compute(operands, options)
    self.options.append(options)


@pytest.mark.parametrize(
    ("b", "s", "h", "tokens", "own", "wanted"),
    [
        (16, 1, 12, 63_872, 4_128, 96),  # an agent on 8 cards: 3 tiles of all, one of each request
        (16, 1, 16, 2_048, 2_048, 26),
        (64, 4, 128, 4_096, 512, 0),  # long
        (4, 1, 8, 65_536, 64, 0),  # too few SMs for own tokens
        (16, 1, 12, None, 4_128, 0),
        (16, 1, 12, 63_872, None, 0),
    ],
)
def test_the_share_of_the_sms(b, s, h, tokens, own, wanted):
    """By the KV blocks and query tiles of either pass, where the groups say both numbers."""
    of, lengths = torch.zeros((1, b), dtype=torch.int32), torch.tensor([[tokens or 64]])
    groups = PrefixGroups(of, lengths, ordered=True, tokens=tokens, own=own)
    empty = torch.empty(0, dtype=torch.int32)
    part = layout.PrefixPart(empty, None, empty, empty, empty, most=b * s)
    laid_out = layout.PrefixLayout(groups, (part,), empty, empty, 64, b * s, True)
    task = SimpleNamespace(q=torch.empty(b, s, h, 0), cache=SimpleNamespace(requests=b))
    assert attend.shared_sms(task, laid_out, 132) == wanted
    two = dataclasses.replace(laid_out, parts=(part, part))
    assert attend.shared_sms(task, two, 132) == 0
