"""Measuring: check before timing, rotating order, rounds combined, failures as rows."""

from __future__ import annotations

from typing import Any

import pytest

from mla_var3.bench.contenders import (
    ABSORPTION,
    UP_PROJECTION,
    KernelContender,
    ProjectionContender,
    make_plan,
)
from mla_var3.bench.measure import combine, measure_case, rotated, with_projections
from mla_var3.bench.record import ABSENT, DECOMPRESSED, FAILED, LOST, MIX, OK, PROJECTION, BenchRow
from mla_var3.bench.suites import KernelChoice
from mla_var3.errors import InvalidArgumentError, MissingToolError
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.paths import find_kernel
from tests.unit.bench.bench_support import AROUND, PROBLEM, FakeContender, FakeTimer, row

SMALL = PROBLEM.__class__(b=2, s=3, t=70, h=8)


def measure(*contenders: Any, timer: FakeTimer | None = None, **options: Any) -> list[BenchRow]:
    options.setdefault("healthy", lambda: True)
    problem = options.pop("problem", PROBLEM)
    return measure_case(
        problem, contenders, timer or FakeTimer(), AROUND, release=lambda: None, **options
    )


def test_every_round_starts_elsewhere_and_each_place_differs() -> None:
    orders = [rotated("abcdef", i, 3) for i in range(3)]
    assert orders == [list("abcdef"), list("cdefab"), list("efabcd")]
    for name in "abcdef":
        assert len({order.index(name) for order in orders}) == 3
    assert rotated("ab", 3, 5) == ["b", "a"]
    assert rotated("", 1, 3) == []


def test_the_order_rotates_and_the_check_comes_once_before_the_first_timing() -> None:
    log: list[str] = []
    measure(*(FakeContender(name, log) for name in "abc"), rounds=3)
    assert log[:3] == ["build a", "check a", "run a"]
    assert [line[4:] for line in log if line.startswith("run")] == list("abcbcacab")
    assert sorted(line for line in log if line.startswith("check")) == [
        "check a",
        "check b",
        "check c",
    ]


def test_rounds_are_combined_into_median_and_widest_spread() -> None:
    timer = FakeTimer(100.0, 130.0, 110.0)
    (found,) = measure(FakeContender("a", []), timer=timer, rounds=3)
    assert found.time_us == 110.0
    assert found.spread_us == (131 - 99) / 2
    assert found.rounds_us == (100.0, 130.0, 110.0)
    assert (found.runs, found.timer) == (60, "cuda-graph")
    assert found.tflops == pytest.approx(2e9 / 110 / 1e6)


def test_a_warm_cache_in_any_round_is_said() -> None:
    cold = Timing(1, 1, 1, 1, 1, "cuda-graph", True)
    warm = Timing(2, 1, 3, 1, 1, "cuda-graph", False)
    assert combine([cold, warm]).cold_l2 is False
    assert combine([cold, cold]).cold_l2 is True


def test_a_failed_check_blocks_the_timing_and_nobody_else() -> None:
    log: list[str] = []
    wrong, right = FakeContender("wrong", log, error=0.5), FakeContender("right", log)
    rows = measure(wrong, right, rounds=2)
    assert "run wrong" not in log
    assert (rows[0].status, rows[0].time_us) == (FAILED, None)
    assert "relative error 0.5" in rows[0].reason
    assert rows[1].status == OK
    assert log.count("build wrong") == 1


def test_who_cannot_take_part_is_absent_and_who_breaks_has_failed() -> None:
    log: list[str] = []
    rows = measure(
        FakeContender("missing", log, broken=MissingToolError("lib: not found")),
        FakeContender("broken", log, broken=RuntimeError("CUDA out of memory\nlong story")),
        FakeContender("silent", log, broken=RuntimeError()),
    )
    assert [(r.status, r.reason) for r in rows] == [
        (ABSENT, "lib: not found"),
        (FAILED, "CUDA out of memory"),
        (FAILED, "RuntimeError"),
    ]
    assert rows[0].choices == {"n": 7}


def test_a_lost_device_fails_the_rest_with_the_culprit() -> None:
    log: list[str] = []
    rows = measure(
        FakeContender("good", log),
        FakeContender("killer", log, broken=RuntimeError("illegal address")),
        FakeContender("next", log),
        healthy=lambda: False,
    )
    assert [r.status for r in rows] == [LOST, FAILED, LOST]
    assert rows[1].reason == "illegal address"
    assert rows[2].reason == "the CUDA context was lost with killer"
    assert rows[2].asked == {"n": 7}
    assert "build next" not in log


def test_rows_carry_the_circumstances_and_the_versions_of_the_peer() -> None:
    (found,) = measure(FakeContender("peer", [], versions={"flashmla": "vllm 1"}))
    assert found.device == AROUND["device"]
    assert found.command == AROUND["command"]
    assert found.versions == {**AROUND["versions"], "flashmla": "vllm 1"}


def test_projections_are_added_by_path() -> None:
    rows = with_projections(
        [
            row("flash_mla"),
            row("mla_var6_plus", path=MIX),
            row("flash_attention", path=DECOMPRESSED),
            row(ABSORPTION, 10.0, source=PROJECTION, path=""),
            row(UP_PROJECTION, 20.0, source=PROJECTION, path=""),
        ]
    )
    assert [r.end_to_end_us for r in rows] == [1030.0, 1010.0, 1000.0, None, None]


def test_an_unknown_projection_leaves_no_end_to_end_time() -> None:
    rows = with_projections([row("flash_mla"), row(ABSORPTION, 10.0, source=PROJECTION, path="")])
    assert rows[0].end_to_end_us is None


def test_at_least_one_round() -> None:
    with pytest.raises(InvalidArgumentError, match="rounds"):
        measure(FakeContender("a", []), rounds=0)


def test_progress_counts_every_timing() -> None:
    seen: list[tuple[int, int]] = []
    measure(
        FakeContender("a", []),
        FakeContender("b", []),
        rounds=2,
        progress=lambda what, done, total, detail: seen.append((done, total)),
    )
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_our_kernels_and_projections_run_through_the_interpreter() -> None:
    contenders = [
        KernelContender(KernelChoice(find_kernel("flash_mla")), SMALL, "sm_90", "cpu"),
        KernelContender(
            KernelChoice(find_kernel("mla_var6_plus"), {"n": 40}), SMALL, "sm_90", "cpu"
        ),
        ProjectionContender(ABSORPTION, SMALL, "cpu"),
        ProjectionContender(UP_PROJECTION, SMALL, "cpu"),
    ]
    rows = measure(*contenders, rounds=1, problem=SMALL)
    assert [r.status for r in rows] == [OK] * 4, [r.reason for r in rows]
    assert [r.path for r in rows] == ["absorbed", "mix", "", ""]
    assert rows[1].choices == {"n": 40}
    assert rows[0].end_to_end_us == 300.0
    assert rows[1].end_to_end_us == 200.0
    assert all(r.error is not None and 0 < r.error < 0.01 for r in rows)


def test_a_plan_says_what_it_cannot_do() -> None:
    choice = KernelChoice(find_kernel("flash_mla"), {"n": 3})
    with pytest.raises(Exception, match="expected a plan that takes n=3"):
        make_plan(choice, SMALL, "sm_90")
    with pytest.raises(Exception, match="expected one of its targets .* got sm_80"):
        make_plan(KernelChoice(find_kernel("flash_mla")), SMALL, "sm_80")
    assert make_plan(KernelChoice(find_kernel("flash_mla")), SMALL, "sm_90").params()["t"] == 70
