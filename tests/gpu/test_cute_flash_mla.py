"""flash_mla in CuTe DSL on a Hopper GPU: shapes, pages, CTA groups, graphs, streams, packing.

Programs are compiled once per dtype and kind of cache and serve all shapes, so most of the time
goes to the reference. Caches hold NaN in every slot without a token and in pages of nobody.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

import cutlass
from cutlass import Int32, cute

from mla_var3.kernel.cute_python.mla.flash_mla.flash_mla.flash_mla import (
    CuteFlashMLA,
    FlashMLATiling,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import DEFAULT_SM_COUNT, KV_BLOCK
from mla_var3.kernel.cute_python.mla.latent.groups import (
    GroupShape,
    balanced_items,
    in_halves,
    partial_count,
    range_begins,
)
from mla_var3.kernel.cute_python.mla.latent.merge import merge_rows
from mla_var3.kernel.cute_python.mla.latent.operands import LATENT_FIELDS
from mla_var3.kernel.cute_python.mla.latent.ranges import (
    ITEM_COST,
    Batch,
    PackedQueries,
    takes_turns,
    work_range,
)
from mla_var3.kernel.paging import dense_inputs
from mla_var3.op.mla.attend import KvSegment, attend
from mla_var3.runtime.check import check_stage, poison_outputs
from mla_var3.runtime.cute_kernel import CuteKernel, program_for
from mla_var3.runtime.workflow import current_device_spec

from ..kernel.test_cute_schedule import trimmed
from .gpu_support import (
    RELATIVE,
    captured,
    outputs_of,
    relaunched,
    require_close,
    require_equal,
)

pytestmark = pytest.mark.usefixtures("hopper")

DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """One problem with the pattern of its lengths, and how the blocks work together."""

    b: int
    s: int
    t: int
    h: int
    pattern: str = "mixed"
    causal: bool = True
    dtype: str = "bfloat16"
    page: int = 0
    group_ctas: int = 0
    sms: int = 0

    @property
    def lengths(self) -> tuple[int, ...] | None:
        t, s = self.t, self.s
        patterns = {
            "mixed": (t, 0, 1, min(s, t), t // 2 + 1),
            "edges": (t // KV_BLOCK * KV_BLOCK, t - 1, min(t, 64), min(t, 65), min(t, 128), t),
            "ragged": tuple((i * 7919 + 13) % (t + 1) for i in range(self.b)),
        }
        if self.pattern == "equal":
            return None
        return tuple(itertools.islice(itertools.cycle(patterns[self.pattern]), self.b))

    def plan(self) -> CuteFlashMLA:
        names = ("b", "s", "t", "h", "lengths", "causal", "dtype", "page")
        return CuteFlashMLA(seed=0, **{name: getattr(self, name) for name in names})

    def shape(self, plan: CuteFlashMLA) -> GroupShape:
        """The CTA groups that the case asks for."""
        return plan.groups(
            FlashMLATiling(group_ctas=self.group_ctas, sms=min(self.sms, plan.sm_count))
        )


SIZES = [
    (1, 1, 1, 8), (1, 1, 1, 128), (1, 1, 2, 24), (1, 1, 63, 16), (1, 1, 64, 32), (1, 1, 65, 64),
    (1, 1, 127, 128), (1, 1, 128, 8), (1, 1, 129, 128), (1, 1, 4097, 128), (1, 1, 20000, 128),
    (1, 1, 20000, 8), (1, 2, 20000, 64), (1, 3, 777, 24), (1, 16, 8191, 128), (1, 33, 500, 32),
    (1, 64, 64, 128), (1, 128, 130, 16), (1, 200, 200, 128), (1, 200, 20000, 16), (1, 199, 1, 24),
    (2, 1, 300, 64), (2, 2, 700, 64), (2, 5, 1, 8), (2, 7, 12345, 24), (2, 64, 3000, 128),
    (2, 200, 101, 32), (3, 1, 15000, 128), (3, 4, 1000, 16), (3, 100, 1009, 8), (4, 1, 64, 128),
    (4, 2, 20000, 128), (4, 17, 2049, 64), (5, 1, 333, 128), (5, 3, 5000, 24), (5, 16, 4096, 128),
    (5, 129, 1009, 16), (6, 8, 640, 32), (7, 1, 10007, 128), (7, 11, 509, 64), (8, 1, 4096, 16),
    (8, 4, 6000, 128), (8, 200, 600, 128), (9, 2, 130, 8), (10, 6, 4801, 32), (13, 1, 777, 128),
    (16, 1, 8192, 128), (16, 2, 1, 128), (16, 16, 4096, 128), (17, 3, 259, 24), (24, 1, 3000, 64),
    (31, 1, 100, 8), (32, 2, 4096, 128), (33, 4, 700, 16), (48, 1, 2000, 128), (64, 1, 1000, 32),
    (64, 2, 1024, 128), (66, 1, 4096, 128), (100, 3, 65, 64), (127, 1, 500, 24),
    (128, 1, 2048, 128), (128, 4, 300, 128), (128, 1, 1, 8), (128, 2, 63, 16),
]  # fmt: skip


def size_cases() -> list[Case]:
    """Lengths, mask, dtype and cache change at different paces, so that they meet in many ways."""
    patterns = itertools.cycle(("mixed", "equal", "ragged", "edges"))
    masks = itertools.cycle((True, False, True))
    dtypes = itertools.cycle(("bfloat16", "bfloat16", "float16", "bfloat16", "float16"))
    pages = itertools.cycle((0, 64, 0, 128, 0, 192, 0))
    kinds = zip(patterns, masks, dtypes, pages, strict=False)
    return [Case(*sizes, *kind) for sizes, kind in zip(SIZES, kinds, strict=False)]


def group_cases() -> list[Case]:
    """16 query tiles per request; lengths that are cut, and equal ones that are not."""
    whole = [
        Case(4, 8, 1500, 128, "equal", group_ctas=g, sms=m) for g, m in ((16, 64), (4, 16), (1, 1))
    ]
    chosen = [(1, 0), (2, 0), (3, 0), (5, 0), (7, 0), (8, 0), (15, 0), (16, 0)]
    limited = [(0, 1), (0, 2), (0, 7), (0, 33), (0, 66), (0, 131), (1, 50), (4, 63), (16, 16)]
    cut = [
        Case(3, 8, 1500, 128, "mixed", page=page, group_ctas=group_ctas, sms=sms)
        for (group_ctas, sms), page in zip(chosen + limited, itertools.cycle((0, 64)), strict=False)
    ]
    return whole + cut


HALVES = [
    Case(66, 1, 900, 16, "equal"), Case(64, 4, 700, 16, "ragged", page=64),
    Case(64, 3, 1100, 16, "edges", causal=False, dtype="float16"),
    Case(33, 1, 1000, 128, "edges", page=64), Case(32, 1, 4097, 128, "equal", page=128),
    Case(16, 2, 2000, 128, "equal"), Case(60, 1, 700, 24, "ragged", dtype="float16", page=192),
    Case(64, 2, 600, 32, "mixed"), Case(8, 8, 256, 8, "equal"),
    Case(50, 64, 500, 1, "ragged", causal=False),
]  # fmt: skip
"""Shapes whose items two CTA groups share, see `cluster.py`."""
BALANCED = [
    Case(128, 1, 1100, 128, "ragged", page=64), Case(100, 4, 700, 32, "edges"),
    Case(90, 3, 500, 64, "ragged", causal=False, dtype="float16"),
    Case(128, 2, 900, 8, "ragged", page=64, sms=50), Case(64, 16, 900, 24, "ragged", page=128),
    Case(100, 4, 700, 128, "ragged", group_ctas=2),
]  # fmt: skip
"""Shapes whose items are taken whole, in the order of their lengths, see `balance.py`."""
FILLED = [
    Case(20, 4, 4000, 128, "ragged", group_ctas=2), Case(100, 2, 2000, 128, "equal", group_ctas=2),
    Case(45, 3, 2000, 64, "equal", page=64, group_ctas=1),
    Case(9, 4, 2000, 128, "ragged", causal=False, dtype="float16", group_ctas=2, sms=50),
    Case(20, 3, 4000, 64, "ragged", page=128, group_ctas=1, sms=50),
]  # fmt: skip
"""Shapes whose groups take whole items and parts of those that are left."""
CASES = size_cases() + group_cases() + HALVES + BALANCED + FILLED


def planned(case: Case) -> tuple[CuteFlashMLA, tuple[Tensor, ...], Any]:
    plan = case.plan().for_target("sm_90").on_device(current_device_spec())
    inputs = plan.prepare_inputs(DEVICE)
    stage = plan.plan(*inputs)
    if case.group_ctas or case.sms:
        choose_groups(stage, case.shape(plan))
    return plan, inputs, stage


def named_arguments(args: Sequence[Any]) -> dict[str, Any]:
    """Arguments by name, without the stream."""
    return dict(zip(LATENT_FIELDS, args, strict=True))


def choose_groups(stage: Any, shape: GroupShape) -> None:
    """Launch with these CTA groups.

    By arguments: a tiling of its own would be compiled anew, although only numbers differ.
    """
    (kernel,) = stage.kernels()
    original = kernel.args_fn

    chosen = dataclasses.asdict(shape)

    def args_fn(tiling: Any) -> tuple[Any, ...]:
        return tuple({**named_arguments(original(tiling)), **chosen}.values())

    kernel.args_fn = args_fn


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shape(case: Case) -> None:
    """Twice on poisoned outputs: what is left in the buffers of the first run must not matter."""
    plan, inputs, stage = planned(case)
    check_stage(plan, inputs, stage).require()
    first = outputs_of(stage)
    require_close(first, plan.reference_fn(*inputs), RELATIVE[plan.dtype])
    require_equal(relaunched(stage), first)


def test_the_cases_are_many_and_varied() -> None:
    """Needs no GPU."""
    assert len(set(CASES)) == len(CASES) >= 80
    assert len({(case.dtype, case.causal, bool(case.page)) for case in CASES}) == 8
    assert len({(case.pattern, case.causal) for case in CASES}) == 8
    assert {0, 1} <= {length for case in CASES for length in case.lengths or ()}
    plans = [(case, case.plan()) for case in CASES]
    counts = [partial_count(plan.problem().kv_lengths, case.shape(plan)) for case, plan in plans]
    assert sum(count > 0 for count in counts) >= 20
    assert sum(count == 0 for count in counts) >= 20
    for case in HALVES + BALANCED + FILLED:
        plan = case.plan()
        lengths, shape = plan.problem().kv_lengths, case.shape(plan)
        assert in_halves(lengths, shape) if case in HALVES else balanced_items(lengths, shape), case
        assert (partial_count(lengths, shape) > 0) == (case in FILLED), case


def test_every_case_can_be_planned() -> None:
    """Needs no GPU: the plan takes the inputs, and the CTA groups asked for fit its buffers."""
    for case in CASES:
        plan = case.plan()
        stage = plan.plan(*plan.prepare_inputs("meta"))
        shape = case.shape(plan)
        choose_groups(stage, shape)
        (attention,) = stage.kernels()
        named = named_arguments(attention.args_fn(attention.tiling))  # type: ignore[attr-defined]
        assert (named["group_ctas"], named["group_count"]) == (shape.group_ctas, shape.group_count)
        assert case.group_ctas in (0, shape.group_ctas)
        assert shape.ctas <= (case.sms or plan.sm_count)
        assert named["merges"].shape[0] >= merge_rows(shape.ctas)


# --- the schedule on the device -------------------------------------------------------------------


class RangeProbe:
    """Writes what `work_range` finds, one warp per part.

    With `packed`, requests have as many query tiles as `begins` says, of 64 heads.
    """

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed

    @cute.jit
    def __call__(self, lengths: cute.Pointer, begins: cute.Pointer, ranges: cute.Pointer, *others):
        *sizes, stream = others
        requests, _, _, group_count, *_ = sizes
        self.range_probe(
            cute.make_tensor(lengths, cute.make_layout(requests)),
            cute.make_tensor(begins, cute.make_layout(requests + 1)),
            cute.make_tensor(ranges, cute.make_layout((group_count, 5), stride=(5, 1))),
            *sizes,
        ).launch(grid=(group_count, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def range_probe(
        self,
        lengths: cute.Tensor,
        begins: cute.Tensor,
        ranges: cute.Tensor,
        requests: Int32,
        visits: Int32,
        newest: Int32,
        group_count: Int32,
        tiles: Int32,
        total: Int32,
    ):
        group, _, _ = cute.arch.block_idx()
        packed = PackedQueries(begins, tiles, total, 64, 4 * 64) if self.packed else None
        batch = Batch(lengths, requests, visits, newest, 1 << 30, None, packed)
        found = work_range(batch, 0, Int32(1), group, group_count)
        numbers = (found.begin, found.begin_block, found.end, found.end_block, found.step)
        if cute.arch.lane_idx() == 0:
            for i in cutlass.range_constexpr(len(numbers)):
                ranges[group, i] = numbers[i]


def schedules() -> list[tuple[list[int], int, int, int]]:
    """(lengths, visits, newest, CTA groups), from one request to the largest batches in use."""
    draw = random.Random(0)
    found = [
        ([0], 1, 0, 132),
        ([1], 1, 0, 132),
        ([64 * 100], 1, 0, 132),
        ([4096] * 64, 2, 0, 128),
        ([4096] * 64, 2, 0, 127),
        ([4096] * 16, 1, 0, 128),  # equal items with eight groups each
        ([4097, 4100, 4160] * 4, 2, 0, 120),
        ([1_000_000] * 1000, 100, 0, 131),
        ([draw.randrange(1_000_001) for _ in range(1000)], 100, 0, 132),
        ([draw.randrange(5000) for _ in range(5000)], 1, 0, 66),
    ]
    for _ in range(40):
        count = draw.choice((1, 2, 31, 32, 33, 64, 100, 257))
        most = draw.choice((1, 64, 700, 20_000))
        lengths = [draw.choice((0, draw.randrange(most + 1))) for _ in range(count)]
        newest = draw.choice((0, 0, 1, 100))
        found.append((lengths, draw.choice((1, 1, 2, 5)), newest, draw.choice((1, 7, 66, 132))))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_device_finds_the_ranges_of_the_host(packed: bool) -> None:
    draw = random.Random(1)
    for lengths, visits, newest, groups in schedules():
        tiles = 4 * visits
        counts = [draw.randrange(tiles + 1) if packed else tiles for _ in lengths]
        begins = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(DEVICE)
        ranges = torch.full((groups, 5), -7, dtype=torch.int32, device=DEVICE)
        device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        args = (
            device_lengths, begins, ranges, len(lengths), visits, newest, groups, tiles, sum(counts)
        )  # fmt: skip
        probe = RangeProbe(packed)
        program_for(RangeProbe.range_probe, probe, args, FlashMLATiling(), ranges.device)(*args)
        old = [max(length - newest, 0) for length in lengths]
        shape, items = GroupShape(1, visits, groups), len(lengths) * visits
        found = [-(-count // 4) for count in counts]  # visits of four tiles
        wanted = [
            [*begin, *end, 1] for begin, end in itertools.pairwise(range_begins(old, shape, found))
        ]
        blocks = [-(-length // KV_BLOCK) for length in old]
        total = sum((b + ITEM_COST) * n for b, n in zip(blocks, found, strict=True))
        longest = max((b for b, n in zip(blocks, found, strict=True) if n), default=0)
        if takes_turns(longest, items, groups, total):
            wanted = [[group, 0, items, 0, groups] for group in range(groups)]
        for ranges_of in (got := ranges.tolist(), wanted):
            for one in ranges_of:
                one[2:4] = trimmed((one[2], one[3]), found, visits)
        assert got == wanted, (len(lengths), visits, newest, groups)


# --- values ---------------------------------------------------------------------------------------

CUT = Case(3, 4, 2100, 64)
"""Split on any device with a few SMs."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("factor", [100.0, -100.0])
def test_huge_scores(dtype: str, factor: float) -> None:
    """Hundreds of powers of two apart: a row is nearly one token, and nothing overflows."""
    plan, inputs, stage = planned(dataclasses.replace(CUT, dtype=dtype))
    for queries in inputs[:2]:
        queries.mul_(factor)
    got = relaunched(stage)
    wanted = plan.reference_fn(*inputs, compute_dtype=torch.float64)
    assert float(wanted[1][wanted[1].isfinite()].abs().max()) > 100.0
    require_close(got, wanted, RELATIVE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [128.0, -128.0])
def test_scores_that_are_all_far_from_zero(shift: float) -> None:
    plan, inputs, stage = planned(CUT)
    q_latent, _, c_kv, *_ = inputs
    q_latent[..., 0] = shift
    c_kv[..., 0] = torch.where(c_kv[..., 0].isnan(), c_kv[..., 0], 16.0)
    got = relaunched(stage)
    wanted = plan.reference_fn(*inputs, compute_dtype=torch.float64)
    finite = wanted[1][wanted[1].isfinite()]
    assert bool((finite.sign() == math.copysign(1.0, shift)).all())
    require_close(got, wanted, RELATIVE[plan.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CUT, HALVES[1], HALVES[3]], ids=str)
@pytest.mark.parametrize("size", [1.0e-20, 1.0, 1.0e30])
def test_columns_of_any_size_are_exact(case: Case, size: float) -> None:
    """CTAs exchange rows in 16 bits: columns far below the largest keep all bits of the result."""
    plan, inputs, stage = planned(case)
    q_latent, _, c_kv, *_ = inputs
    q_latent.zero_()  # the rope part alone decides the scores
    spread = torch.arange(c_kv.shape[-1], device=DEVICE) % 25
    c_kv.mul_(size * torch.exp2(-spread.double()).to(c_kv.dtype))
    poison_outputs(stage)
    stage.launch()
    wanted = plan.reference_fn(*inputs, compute_dtype=torch.float64)[0]
    difference = outputs_of(stage)[0].double() - wanted
    for n in (0, 12, 24):
        error, scale = ((part[..., spread == n] / size).norm() for part in (difference, wanted))
        assert float(error / scale) < RELATIVE[plan.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 64])
def test_repeated_runs_are_identical(page: int) -> None:
    _, _, stage = planned(dataclasses.replace(CUT, page=page))
    stage.launch()
    wanted = outputs_of(stage)
    for _ in range(20):
        require_equal(relaunched(stage), wanted)


@pytest.mark.gpu
def test_another_tiling_on_the_same_stage() -> None:
    plan, inputs, stage = planned(Case(3, 8, 1500, 128))
    (attention,) = stage.kernels()
    for group_ctas, sms in ((0, 0), (1, 0), (16, 0), (2, 40), (0, 0)):
        attention.tiling = FlashMLATiling(group_ctas=group_ctas, sms=sms)
        check_stage(plan, inputs, stage).require()


@pytest.mark.gpu
def test_a_cache_in_one_tensor_and_queries_side_by_side() -> None:
    """Views with other strides than their width, as engines hand them over."""
    plan, inputs, _ = planned(CUT)
    q_latent, q_rope, c_kv, k_rope, lengths = inputs
    queries = torch.cat([q_latent, q_rope], dim=-1)
    cache = torch.cat([c_kv, k_rope], dim=-1)
    cache = torch.cat([cache, torch.full_like(cache[:, :5], torch.nan)], dim=1)
    k, t = plan.k, plan.t
    views = (
        queries[..., :k], queries[..., k:], cache[:, :t, :k], cache[:, :t, k:], lengths
    )  # fmt: skip
    assert views[2].stride(0) != c_kv.stride(0)
    check_stage(plan, views, plan.plan(*views)).require()


# --- graphs and streams ---------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_a_graph_is_replayed_with_other_lengths(page: int, causal: bool) -> None:
    """Lengths and cache are rewritten in place; each replay divides the work anew."""
    case = Case(5, 3, 3000, 64, "equal", causal=causal, page=page)
    plan, inputs, stage = planned(case)
    graph = captured(stage.launch)
    t = case.t
    for lengths in (
        (t, t, t, t, t), (0, 0, 0, 0, t), (1, 0, 2, 64, 65), (0, 0, 0, 0, 0),
        (t, 1, t // 2, 129, 0), (64, 64, 64, 64, 64), (t, t - 1, t - 2, t - 3, t - 4),
    ):  # fmt: skip
        fresh = plan.copy(lengths=lengths).prepare_inputs(DEVICE)
        for tensor, values in zip(inputs, fresh, strict=True):
            tensor.copy_(values)
        poison_outputs(stage)
        graph.replay()
        replayed = outputs_of(stage)
        require_close(replayed, plan.reference_fn(*inputs), RELATIVE[plan.dtype])
        require_equal(relaunched(stage), replayed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (Case(100, 1, 4096, 128, "equal", page=64), 3),
        (Case(100, 2, 4096, 128, "equal", page=64, group_ctas=2), 2),
    ],
    ids=str,
)
def test_a_graph_is_replayed_with_other_ways_to_take_items(case, kinds) -> None:
    """Balanced, split and in turns, or balanced with some of them split."""
    plan, inputs, stage = planned(case)
    graph = captured(stage.launch)
    seen = set()
    for most, spread in ((1000, 500), (4000, 100), (1000, 1), (600, 600), (4096, 4000)):
        lengths = tuple(most - i * 7919 % spread for i in range(case.b))
        shape = case.shape(plan)
        seen.add((balanced_items(lengths, shape) is None, partial_count(lengths, shape) > 0))
        fresh = plan.copy(lengths=lengths).prepare_inputs(DEVICE)
        for tensor, values in zip(inputs, fresh, strict=True):
            tensor.copy_(values)
        poison_outputs(stage)
        graph.replay()
        require_close(outputs_of(stage), plan.reference_fn(*inputs), RELATIVE[plan.dtype])
    assert len(seen) == kinds or plan.sm_count != DEFAULT_SM_COUNT


@pytest.mark.gpu
@pytest.mark.parametrize("sms", [0, 60])
def test_two_streams_at_once(sms: int) -> None:
    """Each plan has its own buffers, so neither sees the partials of the other."""
    made = [
        planned(dataclasses.replace(CUT, sms=sms)),
        planned(Case(4, 2, 1900, 128, "ragged", causal=False, page=64, sms=sms)),
    ]
    wanted = []
    for plan, inputs, stage in made:
        check_stage(plan, inputs, stage).require()
        wanted.append(outputs_of(stage))
    streams = [torch.cuda.Stream() for _ in made]
    for _ in range(5):
        for _, _, stage in made:
            poison_outputs(stage)
        torch.cuda.synchronize()
        for _ in range(4):
            for stream, (_, _, stage) in zip(streams, made, strict=True):
                with torch.cuda.stream(stream):
                    stage.launch()
        for exact, (_, _, stage) in zip(wanted, made, strict=True):
            require_equal(outputs_of(stage), exact)


# --- packed queries and the newest tokens ---------------------------------------------------------


def launch_with(kernel: CuteKernel, **changes: Any) -> None:
    """Launch the program of a stage, with some arguments other than the plan gives."""
    assert kernel.host_fn is not None and kernel.args_fn is not None
    named = named_arguments(kernel.args_fn(kernel.tiling))
    assert set(changes) <= set(named)
    values = tuple({**named, **changes}.values())
    made = kernel.host_fn(kernel.tiling)
    program_for(kernel.kernel_fn, made, values, kernel.tiling, torch.device(DEVICE))(*values)


def run_packed(
    stage: Any, queries: tuple[Tensor, Tensor], begins: Tensor | None, newest: int
) -> tuple[Tensor, Tensor]:
    """Output [queries, h, k] and log-sum-exp [queries, h]."""
    q_latent, q_rope = queries
    out = torch.full_like(q_latent, torch.nan)
    lse = torch.full(q_latent.shape[:2], torch.nan, device=q_latent.device)
    rows = {"o_latent": out, "lse": lse, "total_rows": lse.numel()}
    (attention,) = stage.kernels()
    packed: dict[str, Any] = {}
    if begins is not None:
        packed = {"cu_seqlens_q": begins, "queries": int(begins.diff().max())}
    launch_with(
        attention, **rows, **packed,
        q_latent=q_latent, q_rope=q_rope, newest=newest,
        q_latent_stride=q_latent.stride(1), q_rope_stride=q_rope.stride(1),
    )  # fmt: skip
    torch.cuda.synchronize()
    return out, lse


def packed_reference(
    plan: CuteFlashMLA,
    dense: tuple[Tensor, ...],
    queries: tuple[Tensor, Tensor],
    counts: Sequence[int],
    newest: int,
) -> tuple[Tensor, Tensor]:
    """Request by request, since each has its own number of queries; the newest tokens left out."""
    _, _, c_kv, k_rope, lengths = dense
    outs, lses = [], []
    first = 0
    for request, count in enumerate(counts):
        mine = torch.cat([part[first : first + count] for part in queries], dim=-1)
        first += count
        if not count:
            continue
        length = int(lengths[request])
        positions = torch.arange(plan.t, device=c_kv.device)
        positions = torch.where(positions < length - newest, positions, -1)
        keys = torch.cat([c_kv[request], k_rope[request]], dim=-1)
        segment = KvSegment(
            mine[None], keys[None, None], c_kv[None, None, request], positions[None]
        )
        (out,), lse = attend(
            [segment], lengths=[length], causal=plan.causal, scale=plan.problem().softmax_scale
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses)


def random_queries(total: int, plan: CuteFlashMLA) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    made = [
        torch.empty((total, plan.h, width), dtype=plan.torch_dtype, device=DEVICE)
        for width in (plan.k, plan.p)
    ]
    q_latent, q_rope = (values.normal_(generator=generator) for values in made)
    return q_latent, q_rope


PACKED = [
    ((3, 1, 2, 7, 4), (500, 77, 1, 900, 1200)),
    ((1, 0, 40, 2, 0, 1, 9), (1200, 800, 1199, 0, 3, 64, 65)),
    ((0, 0, 5), (10, 20, 1000)),
    ((33,), (1111,)),
    ((1,) * 40, tuple((i * 37) % 1201 for i in range(40))),
    ((2, 200, 1), (1200, 150, 640)),
    (tuple(i % 4 for i in range(64)), tuple(800 + (i * 37) % 401 for i in range(64))),  # in halves
    (tuple(i % 9 for i in range(200)), tuple(500 + (i * 37) % 701 for i in range(200))),  # balanced
]


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "lengths"), PACKED, ids=[str(len(c)) for c, _ in PACKED])
@pytest.mark.parametrize(
    ("h", "causal", "newest"), [(16, True, 0), (128, True, 0), (64, False, 0), (24, True, 70)]
)
def test_packed_queries_of_different_counts(
    counts: tuple[int, ...], lengths: tuple[int, ...], h: int, causal: bool, newest: int
) -> None:
    case = Case(len(counts), max(counts), 1200, h, causal=causal, page=64)
    plan = dataclasses.replace(case.plan(), lengths=lengths).on_device(current_device_spec())
    inputs = plan.prepare_inputs(DEVICE)
    stage = plan.plan(*inputs)
    poison_outputs(stage)
    queries = random_queries(sum(counts), plan)
    begins = list(itertools.accumulate(counts, initial=0))
    got = run_packed(stage, queries, torch.tensor(begins, dtype=torch.int32, device=DEVICE), newest)
    wanted = packed_reference(plan, dense_inputs(inputs, plan.t), queries, counts, newest)
    require_close(got, wanted, RELATIVE[plan.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("newest", [1, 63, 64, 100, 1000, 5000])
@pytest.mark.parametrize("causal", [True, False])
def test_the_newest_tokens_are_left_out(newest: int, causal: bool) -> None:
    case = dataclasses.replace(CUT, b=6, causal=causal)
    plan, inputs, stage = planned(case)
    poison_outputs(stage)
    q_latent, q_rope = (part.flatten(0, 1) for part in inputs[:2])
    got = run_packed(stage, (q_latent, q_rope), None, newest)
    counts = [plan.s] * plan.b
    wanted = packed_reference(plan, inputs, (q_latent, q_rope), counts, newest)
    require_close(got, wanted, RELATIVE[plan.dtype])
