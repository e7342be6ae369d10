"""The four designs on a GPU: a grid of shapes, each checked on poisoned outputs.

A kernel is compiled anew for every head count, mask, dtype and (where it matters to the copy
engine) divisibility of a dimension by 16, at 2 to 5 seconds each. So shapes come in few groups that
share what is compiled in, and within a group t is mostly odd; the whole grid takes a few minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mla_var3.runtime.check import check_stage
from mla_var3.runtime.paths import find_kernel, plan_class
from tests.unit.op.op_support import visible

pytest.importorskip("cuda.tile")
pytestmark = pytest.mark.gpu

DESIGNS = (
    *("flash_attention", "flash_mla", "flash_mla_split_kv"),
    *("mla_var6_plus", "mla_var6_plus_v2", "mla_var6_plus_v3", "mla_var6_plus_v4"),
)
LSE_RELATIVE = 1e-5
"""The log-sum-exp is float32 throughout; the check's own bound is the 16-bit one."""


@dataclass(frozen=True)
class Group:
    """What is compiled in, and the (s, t, n) that share it."""

    h: int
    causal: bool
    dtype: str
    shapes: tuple[tuple[int, int, int], ...]


GROUPS = (
    Group(
        128, True, "bfloat16",
        ((1, 5000, 1666), (2, 1, 1), (3, 127, 126), (16, 4096, 1365), (64, 1021, 5),
         (200, 2003, 667)),
    ),
    Group(128, False, "bfloat16", ((4, 4999, 4998), (33, 257, 257))),
    Group(64, False, "bfloat16", ((11, 509, 169), (150, 149, 49))),
    Group(32, True, "float16", ((6, 4801, 1), (100, 101, 33))),
    Group(24, True, "float16", ((7, 997, 332), (1, 31, 10), (65, 67, 66))),
    Group(16, True, "bfloat16", ((1, 1, 0), (5, 64, 21), (129, 1009, 0))),
    Group(8, False, "float16", ((2, 2999, 999), (9, 3, 2))),
)  # fmt: skip


def mixed_lengths(s: int, t: int) -> tuple[int, ...]:
    """Full, empty, one token, as many as queries, a bit more than half."""
    return t, 0, 1, min(s, t), t // 2 + 1


@pytest.mark.parametrize(
    ("group", "s", "t", "n"),
    [
        pytest.param(group, *shape, id="-".join(map(str, (group.h, group.causal, *shape))))
        for group in GROUPS
        for shape in group.shapes
    ],
)
@pytest.mark.parametrize("design", DESIGNS)
def test_shape(design: str, group: Group, s: int, t: int, n: int) -> None:
    own: dict[str, int] = {}
    if design.startswith("mla_var6_plus"):
        own["n"] = n
    if design == "flash_mla_split_kv":
        own["splits"] = min(t, 3 + s % 5)
    require_right(design, s, t, h=group.h, causal=group.causal, dtype=group.dtype, **own)


@pytest.mark.parametrize("page", [16, 32, 64, 192])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("widths", [(512, 64), (512, 0), (256, 32)])
@pytest.mark.parametrize("design", ["flash_mla", "flash_mla_split_kv"])
def test_pages(design: str, widths: tuple[int, int], window: int, page: int) -> None:
    """Unused slots hold NaN; lengths end inside of a page, at its end, and in the first one."""
    k, p = widths
    own = {"splits": 3} if design == "flash_mla_split_kv" else {}
    require_right(design, 5, 389, h=16, page=page, sliding_window=window, k=k, p=p, **own)


def require_right(design: str, s: int, t: int, **fields: Any) -> None:
    """Check a kernel on requests of different lengths, one without a token."""
    lengths = mixed_lengths(s, t)
    plan = plan_class(find_kernel(design))(
        b=len(lengths), s=s, t=t, lengths=lengths, seed=0, **fields
    ).for_target("sm_{}{}".format(*torch.cuda.get_device_capability()))
    inputs = plan.prepare_inputs("cuda")
    stage = plan.plan(*inputs)
    assert stage.device_type == "cuda"
    result = check_stage(plan, inputs, stage)
    result.require()
    assert result.outputs[1].error.relative_frobenius <= LSE_RELATIVE
    require_empty_rows(plan, stage)


def require_empty_rows(plan: Any, stage: Any) -> None:
    """Rows that see no key are exactly 0 and -inf."""
    out, lse = stage.output_tensors
    b, s, problem = range(plan.b), range(plan.s), plan.problem()
    empty = torch.tensor([[visible(problem, i, j) == 0 for j in s] for i in b], device=out.device)
    assert empty[1].all()
    assert not out[empty].any()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()
