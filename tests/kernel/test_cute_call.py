"""The absorbed CuTe kernel on changing tensors: what it gives the programs, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.kernel.cute_python.mla import latent_call
from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla import flash_mla
from mla_var3.kernel.cute_python.mla.schedule import gang_shape

SMS = 132


class Note:
    """Stands for a compiled program; keeps what it is called with."""

    def __init__(self, log: list[tuple[str, tuple[Any, ...]]], name: str) -> None:
        self.log, self.name = log, name

    def __call__(self, *args: Any) -> None:
        self.log.append((self.name, args))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """What the two programs were launched with, without a GPU."""
    log: list[tuple[str, tuple[Any, ...]]] = []

    def program_for(kernel_fn: Any, host: Any, args: Any, tiling: Any, device: Any) -> Note:
        return Note(log, kernel_fn.__name__)

    monkeypatch.setattr(latent_call, "program_for", program_for)
    monkeypatch.setattr(latent_call, "require_arch", lambda *args: None)
    monkeypatch.setattr(latent_call, "sm_count_of", lambda index: SMS)
    monkeypatch.setattr(latent_call, "workspace", lambda device, slots: ("o", "lse", "merges"))
    monkeypatch.setattr(latent_call, "_programs", {})
    yield log


def absorbed(b: int, s: int, h: int, **changes: Any) -> dict[str, Any]:
    """Arguments of `absorbed` on meta tensors."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    arguments = {
        "q_latent": empty(b, s, h, 512),
        "q_rope": empty(b, s, h, 64),
        "latent": empty(b, 256, 512),
        "rope": empty(b, 256, 64),
        "block_table": None,
        "lengths": empty(b, dtype=torch.int32),
        "query_begins": None,
        "tree": None,
        "max_queries": s,
        "causal": True,
        "scale": 0.1,
        "out": empty(b, s, h, 512),
        "lse": empty(b, s, h, dtype=torch.float32),
    }
    return {**arguments, **changes}


def test_both_kernels_get_the_same_gangs(calls: list[tuple[str, tuple[Any, ...]]]) -> None:
    flash_mla.absorbed(**absorbed(3, 2, 64))
    assert [name for name, _ in calls] == ["flash_mla", "merge_partials"]
    shape = gang_shape(2, 3, SMS)
    attention, merge = (args for _, args in calls)
    assert attention[-3:] == (shape.gang, shape.groups, shape.parts)
    assert merge[-3:-1] == (shape.gang, shape.parts)


def test_a_batch_without_queries_launches_nothing(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    flash_mla.absorbed(**absorbed(0, 2, 64))
    assert calls == []


def test_a_tree_is_given_as_bytes_with_its_strides(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    tree = torch.empty((4, 4), dtype=torch.bool, device="meta").expand(2, 4, 4)
    flash_mla.absorbed(**absorbed(2, 4, 16, tree=tree))
    given = [arg for arg in calls[0][1] if isinstance(arg, torch.Tensor)]
    assert any(arg.dtype is torch.uint8 and arg.shape == (2, 4, 4) for arg in given)
    assert calls[0][1][-7:-5] == (0, 4)


def test_one_program_serves_all_shapes_and_another_each_form(
    calls: list[tuple[str, tuple[Any, ...]]],
) -> None:
    for b, s, h in ((1, 1, 128), (7, 3, 64), (2, 9, 24)):
        flash_mla.absorbed(**absorbed(b, s, h))
    assert len(latent_call._programs) == 1
    flash_mla.absorbed(**absorbed(2, 1, 16))  # few rows
    table = torch.empty((2, 4), dtype=torch.int32, device="meta")
    flash_mla.absorbed(**absorbed(2, 4, 16, block_table=table))
    assert len(latent_call._programs) == 3


def test_what_it_does_not_serve_is_said() -> None:
    from mla_var3.attention.shape import CallShape

    assert flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8)) is None
    assert "k=256" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, k=256)))
    assert "pages of 16" in str(flash_mla.unsupported(CallShape(b=1, s=1, t=64, h=8, page_size=16)))
