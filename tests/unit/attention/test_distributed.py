"""Heads and KV tokens shared over processes, against one process."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import mla_var3
from mla_var3.attention.distributed import (
    KvShare,
    gather_heads,
    head_range,
    kv_parallel_attention,
    merge_over_ranks,
)
from mla_var3.attention.merge import merge_partials
from mla_var3.errors import InvalidArgumentError

B, S, H, D, P, K, T = 3, 4, 5, 6, 4, 8, 50


def problem() -> dict[str, torch.Tensor]:
    """The same on every rank. Requests end in different stretches, one has no token."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "q_nope": (B, S, H, D), "q_rope": (B, S, H, P), "c_kv": (B, T, K), "k_rope": (B, T, P),
        "w_uk": (H, D, K), "w_uv": (H, K, D),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**tensors, "lengths": torch.tensor([50, 27, 0], dtype=torch.int32)}


def on_one_process(**options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = problem()
    return mla_var3.mla_attention(
        x["q_nope"], x["q_rope"], (x["c_kv"], x["k_rope"]), x["w_uk"], x["w_uv"],
        lengths=x["lengths"], return_lse=True, **options,
    )  # fmt: skip


def shared_heads(rank: int, world: int) -> None:
    x, heads = problem(), head_range(H, rank, world)
    own = mla_var3.mla_attention(
        x["q_nope"][:, :, heads], x["q_rope"][:, :, heads], (x["c_kv"], x["k_rope"]),
        x["w_uk"][heads], x["w_uv"][heads], lengths=x["lengths"],
    )  # fmt: skip
    torch.testing.assert_close(gather_heads(own, H), on_one_process()[0])
    with pytest.raises(InvalidArgumentError, match=f"heads of rank {rank}, d"):
        gather_heads(own[..., :-1, :], H)


def shared_tokens(rank: int, world: int) -> None:
    x, share = problem(), KvShare.of(T)
    assert share == KvShare(rank, world, -(-T // world))
    stretch = slice(share.start, share.start + share.size)
    # Beyond its tokens a rank's stretch holds nothing that counts.
    c_kv, k_rope = (torch.full((B, share.size, w), torch.nan) for w in (K, P))
    for mine, whole in ((c_kv, x["c_kv"]), (k_rope, x["k_rope"])):
        part = whole[:, stretch]
        mine[:, : part.shape[1]] = part
    attend = partial(
        kv_parallel_attention, x["q_nope"], x["q_rope"], (c_kv, k_rope), x["w_uk"], x["w_uv"],
        total_lengths=x["lengths"], share=share,
    )  # fmt: skip
    tree = torch.tensor([-1, 0, 0, 1])
    for options in ({}, {"causal": False}, {"tree_mask": tree}, {"sliding_window": 5}):
        output, lse = attend(return_lse=True, **options)
        expected, expected_lse = on_one_process(**options)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(lse, expected_lse)
    for name, value in {"lengths": x["lengths"], "out": x["q_nope"], "shards": 2}.items():
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected none where ranks"):
            attend(**{name: value})
    with pytest.raises(InvalidArgumentError, match="share: expected one of 4 ranks, .* got one of"):
        attend(share=KvShare(0, 2, share.size))


def in_a_subgroup(rank: int, world: int) -> None:
    """Two groups of two, each merging its own halves, whose layouts differ."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = groups[rank // 2], rank % 2
    generator = torch.Generator().manual_seed(rank // 2)
    parts = [
        (torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator))
        for _ in range(2)
    ]
    o, lse = parts[place]
    merged = merge_over_ranks(o.T.contiguous().T if place else o, lse, group=group)
    for got, expected in zip(merged, merge_partials(parts), strict=True):
        torch.testing.assert_close(got, expected)


WORLD = 4
CASES: list[Callable[[int, int], None]] = [shared_heads, shared_tokens, in_a_subgroup]


def rank_main(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    try:
        for case in CASES:
            case(rank, world)
            Path(folder, f"{case.__name__}-{rank}").touch()
    finally:
        dist.destroy_process_group()


def test_over_processes(tmp_path, package_environment):
    """In an interpreter of its own: the ranks are forked, and this one has threads already."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=package_environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    passed = {path.name for path in tmp_path.iterdir()} - {"store"}
    assert passed == {f"{case.__name__}-{rank}" for case in CASES for rank in range(WORLD)}


def test_head_ranges_cover_the_heads():
    for h, world in ((128, 8), (7, 3), (3, 3)):
        ranges = [head_range(h, rank, world) for rank in range(world)]
        assert [x for part in ranges for x in range(h)[part]] == list(range(h))
        sizes = [part.stop - part.start for part in ranges]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: head_range(4, 0, 5), "world: expected an integer from 1 to h=4, got 5"),
        (lambda: head_range(4, 2, 2), "rank: expected an integer from 0 to world-1=1, got 2"),
        (lambda: KvShare(0, 2, 0), "size: expected a positive integer, got 0"),
        (lambda: KvShare(2, 2, 8), "rank: expected an integer from 0 to world-1=1, got 2"),
    ],
)
def test_wrong_shares(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message):
        wrong()


def test_merge_of_parts_without_keys():
    nothing = torch.zeros(2, 3), torch.full((2,), -torch.inf)
    some = torch.ones(2, 3), torch.tensor([0.5, -torch.inf])
    output, lse = merge_partials([nothing, some, nothing])
    assert torch.equal(output, torch.tensor([[1.0] * 3, [0.0] * 3]))
    assert torch.equal(lse, torch.tensor([0.5, -torch.inf]))


def test_parts_in_16_bits_are_merged_in_32():
    parts = [(torch.full((2, 3), x).bfloat16(), torch.zeros(2)) for x in (1.0, 1.0078125)]
    torch.testing.assert_close(merge_partials(parts)[0], torch.full((2, 3), 1.00390625))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "partials: expected one or more outputs with their LSE, got none"),
        ([((2, 3), (3,))], r"outputs \[2, 3\] and LSEs \[2\], .*, got \[2, 3\] and \[3\]"),
        ([((2, 3), (2,)), ((1, 3), (1,))], r"got \[1, 3\] and \[1\]"),
    ],
)
def test_parts_that_do_not_fit_are_not_merged(shapes, message):
    partials = [(torch.zeros(output), torch.zeros(lse)) for output, lse in shapes]
    with pytest.raises(InvalidArgumentError, match=message):
        merge_partials(partials)


if __name__ == "__main__":
    mp.start_processes(rank_main, (WORLD, sys.argv[1]), nprocs=WORLD, start_method="fork")
