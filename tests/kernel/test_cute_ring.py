"""The decompressed kernel on a ring: which slots its rows see, by the device code on plain numbers.

The functions of `window_jobs.py` are traced on a GPU; without their decorators they are Python, and
numbers go through them as through the kernel.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed import jobs as window_jobs
from mla_var3.kernel.cute_python.mla.decompressed.kernel import DecompressedSm90
from mla_var3.kernel.cute_python.mla.decompressed.scheduler import Job, Window
from mla_var3.kernel.cute_python.mla.decompressed.stage import (
    DecompressedOperands,
    DecompressedShape,
    DecompressedTiling,
)
from mla_var3.kernel.cute_python.mla.hopper.constants import KV_BLOCK
from mla_var3.kernel.cute_python.mla.latent.kernel import FlashMLASm90
from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens
from mla_var3.kernel.cute_python.mla.mla_var6_plus.mla_var6_plus.mla_var6_plus import (
    CuteMlaVar6Plus,
)

from .compile_once import Compiled, compile_once
from .test_cute_var6_plus import require_well_compiled

ROWS = 64
DEVICE_FUNCTIONS = ("job_at", "ring_state", "row_limit", "places_end", "place_of")


@pytest.fixture(autouse=True)
def plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DEVICE_FUNCTIONS:
        monkeypatch.setattr(window_jobs, name, inspect.unwrap(getattr(window_jobs, name)))
    monkeypatch.setattr(window_jobs, "Int32", int)


def window_of(
    lengths: list[int],
    starts: list[int] | None,
    n: int,
    queries: int,
    causal: bool,
    *,
    heads: int = 3,
    parts: int = 1,
    tiles: bool = False,
    alone: bool = False,
) -> Window:
    return Window(
        lengths, len(lengths), queries, heads, n, n, int(causal), parts, tiles, False, starts, alone
    )


def jobs_of(window: Window) -> Iterator[Job]:
    return (window_jobs.job_at(index, window) for index in range(window.jobs))


def seen_slots(job: Job, row: int, lowest: int, window: Window) -> set[int]:
    """Slots whose scores a row keeps, with the mask of a warp whose lowest limit is given."""
    limit = window_jobs.row_limit(job, row, window)
    kept = set()
    for block in range(job.first, job.last):
        token = block * KV_BLOCK
        masked = job.gone > 0 or window_jobs.places_end(token, job, window) > lowest
        for slot in range(token, token + KV_BLOCK):
            place = window_jobs.place_of(slot, job, window)
            if not masked or (job.gone <= place < limit):
                kept.add(slot)
    return kept


def wanted_slots(length: int, start: int, n: int, queries: int, row: int, causal: bool) -> set[int]:
    end = min(length, length - queries + row + 1) if causal else length
    return {x % n for x in range(min(start, length), end)}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_row_sees_the_positions_of_its_ring(data: st.DataObject) -> None:
    n = KV_BLOCK * data.draw(st.integers(1, 4))
    queries = data.draw(st.sampled_from([1, 2, 5, 63, 64, 65, 100]))
    causal, tiles = data.draw(st.booleans()), data.draw(st.booleans())
    length = data.draw(st.one_of(st.integers(0, 3 * n), st.sampled_from([n - 1, n, n + 1, 2 * n])))
    oldest = max(length - n, 0)
    start = data.draw(st.one_of(st.just(oldest), st.integers(oldest, length)))
    parts = data.draw(st.integers(1, 4))
    window = window_of([length], [start], n, queries, causal, parts=parts, tiles=tiles)
    missing = causal and start > max(length - queries + 1, 0)
    tile_rows = range(-(-queries // ROWS))
    found: dict[tuple[int, int], set[int]] = {}
    for job in jobs_of(window):
        assert job.broken is missing
        for tile in {job.tile, job.tile + 1} if tiles else {job.tile}:
            if tile not in tile_rows:
                continue
            rows = range(tile * ROWS, min(tile * ROWS + ROWS, queries))
            # A warp has 16 rows; those that are not there are as if they were.
            for warp in range(tile * ROWS, tile * ROWS + ROWS, 16):
                limits = [window_jobs.row_limit(job, row, window) for row in range(warp, warp + 16)]
                for row in set(rows) & set(range(warp, warp + 16)):
                    slots = seen_slots(job, row, min(limits), window)
                    before = found.setdefault((job.head, row), set())
                    assert not slots & before, "two parts see the same slot"
                    before |= slots
    heads = {head for head, _ in found}
    for head, row in itertools.product(heads, range(queries)):
        wanted = wanted_slots(length, start, n, queries, row, causal)
        assert found[head, row] == wanted, (head, row)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(0, 1000), st.integers(1, 5))
def test_slots_without_a_token_are_at_the_end_of_the_last_block(
    blocks: int, length: int, parts: int
) -> None:
    """Those may hold NaN: they are never kept, and the rows to clear begin behind the tokens."""
    n = blocks * KV_BLOCK
    window = window_of([length], [max(length - n, 0)], n, 1, True, parts=parts)
    for job in jobs_of(window):
        assert job.tokens == min(length, n)
        assert all(slot < job.tokens for slot in seen_slots(job, 0, -1, window))
        # Blocks before a job's last one are full.
        assert (job.last - 1) * KV_BLOCK <= job.tokens


def test_most_blocks_need_no_mask() -> None:
    """Only those that hold one of the newest tokens, two of them where these lie across a border.

    That is what makes a ring as fast as a window in order.
    """
    n, queries = 32 * KV_BLOCK, 16
    for length in (n, n + 7, 5 * n + 700):
        (job, *_) = jobs_of(window_of([length], [length - n], n, queries, True))
        window = window_of([length], [length - n], n, queries, True)
        lowest = window_jobs.row_limit(job, 0, window)
        masked = [
            block
            for block in range(job.first, job.last)
            if window_jobs.places_end(block * KV_BLOCK, job, window) > lowest
        ]
        newest = {(length - 1 - i) % n // KV_BLOCK for i in range(queries - 1)}
        assert set(masked) >= newest
        assert len(masked) <= 2


@pytest.mark.parametrize(
    ("length", "start", "queries", "causal", "alone", "missing"),
    [
        (300, 172, 4, True, False, False),
        (300, 171, 4, True, False, True),  # a token before the oldest place of the ring
        (300, 297, 4, True, False, False),
        (300, 298, 4, True, False, True),  # the first query must not see token 297
        (300, 300, 4, False, False, False),
        (300, 400, 4, False, False, False),  # a call that looks at fewer tokens than the cache has
        (2, 0, 4, True, False, False),
        (0, 0, 4, True, False, False),
        (100, 0, 4, True, True, False),
        (100, 1, 4, True, True, True),  # nobody else has token 0
    ],
)
def test_tokens_that_nobody_has_are_noticed(
    length: int, start: int, queries: int, causal: bool, alone: bool, missing: bool
) -> None:
    window = window_of([length], [start], 128, queries, causal, alone=alone)
    assert {job.broken for job in jobs_of(window)} == {missing}


def test_windows_in_order_know_nothing_of_rings() -> None:
    window = window_of([300, 20], None, 128, 4, True)
    assert not window.ring
    assert {(job.cut, job.gone, bool(job.broken)) for job in jobs_of(window)} == {(0, 0, False)}


def test_every_job_of_the_stage_is_one_of_the_kernel() -> None:
    for rows, heads, parts in itertools.product((1, 64, 65, 130), (1, 3, 16), (1, 3)):
        shape = DecompressedShape(5, rows, heads, 256)
        tiling = DecompressedTiling(parts=parts)
        tiles = shape.form(tiling) == "tiles"
        window: Any = window_of(
            [300] * 5, [44] * 5, 256, rows, True, heads=heads, parts=parts, tiles=tiles
        )
        assert shape.requests * shape.units(shape.form(tiling)) * parts == window.jobs


# --- what it compiles to --------------------------------------------------------------------------

RING_VARIANTS = {
    "heads": (2, 1),
    "tiles": (100, 1),
    "cut": (2, 2),
    "alone": (2, 1),
}
"""Queries, and parts of the window."""
COMPILE = """
import contextlib, json, sys
import torch
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedOperands, DecompressedTiling
from mla_var3.kernel.cute_python.mla.mix.plan import LatentTokens
from mla_var3.runtime import cute_kernel
from mla_var3.runtime.compile import compile_report
from mla_var3.runtime.paths import find_kernel, plan_class
cute_kernel.quiet_compiler = contextlib.nullcontext
reports = {}
for variant, (s, parts) in json.loads(sys.argv[1]).items():
    n, t = 128, 128 if variant == "alone" else 300
    plan = plan_class(find_kernel("mla_var6_plus", language="cute-dsl"))(b=2, s=s, t=t, h=64, n=n)
    inputs = plan.prepare_inputs("meta")
    q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, rope_new, w_uv, lengths = inputs
    latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, seen_by_all=True)
    ring = DecompressedOperands(q_nope, q_rope, k_new, v_new, rope_new, lengths, starts=lengths.clone())
    for kernel in plan.plan_parts(latent, ring, w_uv).kernels():
        if kernel.name == "window_attention":
            kernel.tiling = DecompressedTiling(parts=parts)
            print(f"== {variant} {kernel.name}", file=sys.stderr, flush=True)
            reports[f"{variant} {kernel.name}"] = compile_report(kernel, "sm_90").to_dict()
print(json.dumps(reports))
"""


@pytest.fixture(scope="session")
def compiled_rings(
    package_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Compiled:
    return compile_once("cute-ring", COMPILE, RING_VARIANTS, package_environment, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("variant", RING_VARIANTS)
def test_a_ring_costs_no_registers(compiled_rings: Compiled, variant: str) -> None:
    """No spills, and products that do not wait for each other, as in a window in order."""
    report = compiled_rings.reports[f"{variant} window_attention"]
    require_well_compiled(report, compiled_rings.remarks[f"{variant} window_attention"])
    assert set(report.mma) == {"HGMMA"}


# --- its stage ------------------------------------------------------------------------------------


def ring_plan(
    **fields: Any,
) -> tuple[CuteMlaVar6Plus, LatentTokens, DecompressedOperands, torch.Tensor]:
    plan = CuteMlaVar6Plus(**{"b": 2, "s": 2, "t": 300, "h": 4, "n": 128, **fields})
    inputs = plan.prepare_inputs("meta")
    q_nope, q_latent, q_rope, c_kv, k_rope, k_new, v_new, rope_new, w_uv, lengths = inputs
    latent = LatentTokens(q_latent, q_rope, c_kv, k_rope, lengths, seen_by_all=True)
    window = DecompressedOperands(
        q_nope, q_rope, k_new, v_new, rope_new, lengths, starts=lengths.clone()
    )
    return plan, latent, window, w_uv


def test_the_older_tokens_are_shown_to_every_query() -> None:
    plan, latent, window, w_uv = ring_plan()
    stage = plan.plan_parts(latent, window, w_uv)
    kernels: dict[str, Any] = {kernel.name: kernel for kernel in stage.kernels()}
    for name, host, causal in (
        ("flash_mla", FlashMLASm90, 0),
        ("window_attention", DecompressedSm90, 1),
    ):
        names = list(inspect.signature(host.__call__).parameters)[1:-1]
        kernel = kernels[name]
        named = dict(zip(names, kernel.args_fn(kernel.tiling), strict=False))
        assert named["causal"] == causal, name
    assert kernels["window_attention"].host_fn(DecompressedTiling()).kernel.ring


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 100}, "window: expected a multiple of 64 for a ring"),
        ({"n": 0}, None),
    ],
)
def test_rings_of_odd_sizes(fields: dict[str, Any], message: str | None) -> None:
    plan, latent, window, w_uv = ring_plan(**fields)
    if message is None:  # no window, no ring
        assert plan.plan_parts(latent, window, w_uv)
        return
    with pytest.raises(InvalidArgumentError, match=message):
        plan.plan_parts(latent, window, w_uv)


def test_wrong_parts_are_named() -> None:
    plan, latent, window, w_uv = ring_plan()
    with pytest.raises(InvalidArgumentError, match="starts: expected"):
        starts = torch.zeros(3, dtype=torch.int32, device="meta")
        plan.plan_parts(latent, replace(window, starts=starts), w_uv)
    with pytest.raises(InvalidArgumentError, match="starts: expected none for a shared window"):
        plan._mixed(latent, window, w_uv, shared=True)
    with pytest.raises(InvalidArgumentError, match="latent: expected the tokens beside 128 of 300"):
        plan.plan_parts(None, window, w_uv)
    with pytest.raises(InvalidArgumentError, match=r"table: expected \[b=2, at least 5 pages\]"):
        pages = replace(
            latent,
            latent=torch.zeros(9, 64, 512, dtype=torch.bfloat16, device="meta"),
            rope=torch.zeros(9, 64, 64, dtype=torch.bfloat16, device="meta"),
            table=torch.zeros(2, 4, dtype=torch.int32, device="meta"),
        )
        plan.plan_parts(pages, window, w_uv, 64)


def test_written_down_sms_are_those_that_were_worked_out() -> None:
    plan = CuteMlaVar6Plus(b=32, s=43, t=4096, h=128, n=2048).on_device(device_spec("NVIDIA H200"))
    settled = plan.settled()
    assert settled.split() == plan.split()
    assert settled.gangs(settled.tiling) == plan.gangs(plan.tiling)
    assert settled.tiling.sms and settled.window_tiling.sms
    for n in (0, 4096):
        alone = plan.copy(n=n)
        assert alone.settled() == alone
