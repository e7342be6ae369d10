"""Measuring: check before timing, rotating order, rounds combined, failures as rows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.bench import contenders as bench_contenders
from mla_var3.bench import record
from mla_var3.bench.contenders import TuneBudget, call_contender, make_plan, tuning_note
from mla_var3.bench.measure import Timer, measure_case, rotated, summarise, with_projections
from mla_var3.bench.record import ABSENT, FAILED, LOST, OK, PROJECTION, BenchRow
from mla_var3.bench.suites import KernelChoice
from mla_var3.conf.devices import device_spec
from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.measure import Timing
from mla_var3.runtime.paths import find_kernel
from mla_var3.runtime.workflow import RunOptions
from tests.unit.bench.bench_support import AROUND, PROBLEM, FakeTimer, fake_contender, row

SMALL = PROBLEM.__class__(b=1, s=2, t=70, h=8)


def measure(*contenders: Any, timer: Timer | None = None, **options: Any) -> list[BenchRow]:
    options = {"healthy": lambda: True, "release": lambda: None, **options}
    problem = options.pop("problem", PROBLEM)
    return measure_case(problem, contenders, timer or FakeTimer(), AROUND, **options)


def test_the_order_rotates_and_the_check_comes_once_before_the_first_timing():
    orders = [rotated("abcdef", i, 3) for i in range(3)]
    assert orders == [list("abcdef"), list("cdefab"), list("efabcd")]
    assert rotated("ab", 3, 5) == ["b", "a"] and rotated("", 1, 3) == []
    log: list[str] = []
    seen: list[tuple[int, int]] = []
    progress = lambda what, done, total, detail: seen.append((done, total))  # noqa: E731
    measure(*(fake_contender(name, log) for name in "abc"), rounds=3, progress=progress)
    assert log[:3] == ["build a", "check a", "run a"]
    assert [line[4:] for line in log if line.startswith("run")] == list("abcbcacab")
    assert sorted(line[6:] for line in log if line.startswith("check")) == list("abc")
    assert seen == [(done, 9) for done in range(10)]


def test_rounds_are_combined_into_median_and_widest_spread():
    timer = FakeTimer(100.0, 130.0, 110.0)
    peer = fake_contender("a", [], versions={"flashmla": "vllm 1"})
    (found,) = measure(peer, timer=timer, rounds=3)
    assert (found.time_us, found.spread_us, found.runs) == (110.0, (131 - 99) / 2, 60)
    assert (found.rounds_us, found.timer) == ((100.0, 130.0, 110.0), "cuda-graph")
    assert found.tflops == pytest.approx(2e9 / 110 / 1e6)
    assert (found.device, found.command) == (AROUND["device"], AROUND["command"])
    assert found.versions == {**AROUND["versions"], "flashmla": "vllm 1"}
    cold, warm = (Timing(1, 1, 1, 1, 1, "cuda-graph", is_cold) for is_cold in (True, False))
    assert not summarise([cold, warm]).cold_l2 and summarise([cold, cold]).cold_l2


def test_who_cannot_take_part_is_absent_and_who_breaks_or_is_wrong_has_failed():
    log: list[str] = []
    rows = measure(
        fake_contender("missing", log, asked={"n": 7}, broken=MissingToolError("lib: not found")),
        fake_contender("broken", log, broken=RuntimeError("CUDA out of memory\nlong story")),
        fake_contender("silent", log, broken=RuntimeError()),
        fake_contender("leaving", log, broken=SystemExit(3)),
        fake_contender("wrong", log, error=0.5),
        fake_contender("right", log),
        rounds=2,
    )
    reasons = ("lib: not found", "CUDA out of memory", "RuntimeError", "called sys.exit: 3",
               "relative error 0.5", "")  # fmt: skip
    states = (ABSENT, *[FAILED] * 4, OK)
    assert [(r.status, r.reason) for r in rows] == list(zip(states, reasons, strict=True))
    assert rows[0].choices == rows[0].asked == {"n": 7} and rows[4].time_us is None
    assert "run wrong" not in log and log.count("build wrong") == 1


def test_a_process_that_ends_in_a_later_round_blames_the_one_that_ran():
    """The rows once named the last contender of the first round."""
    timings, saved = FakeTimer(), []

    def timer(run: Callable[[], None]) -> Timing:
        if timings.calls == 3:  # the second round starts with b
            raise KeyboardInterrupt
        return timings(run)

    with pytest.raises(KeyboardInterrupt):
        fakes = [fake_contender(name, []) for name in "abc"]
        measure(*fakes, timer=timer, rounds=3, checkpoint=saved.append)
    assert [(r.kernel, r.status) for r in saved[-1]] == [("a", LOST), ("b", FAILED), ("c", LOST)]


def test_projections_are_added_by_path():
    kernels = [row(path=path) for path in (record.LATENT, record.MIX, record.DECOMPRESSED)]
    times = zip(record.PROJECTIONS, (10.0, 20.0), strict=True)
    projections = [row(*each, source=PROJECTION, path="") for each in times]
    rows = with_projections([*kernels, *projections])
    assert [r.call_us for r in rows] == [1030.0, 1010.0, 1000.0, None, None]
    assert with_projections(rows[:1] + rows[3:4])[0].call_us is None  # one of them is unknown


def test_our_kernels_and_projections_run_through_the_interpreter():
    choices = [KernelChoice(find_kernel("flash_mla"))]
    choices.append(KernelChoice(find_kernel("mla_var6_plus"), {"n": 40}))
    contenders = [
        *(bench_contenders.kernel_contender(each, SMALL, "sm_90", "cpu") for each in choices),
        *(bench_contenders.projection_contender(name, SMALL, "cpu") for name in record.PROJECTIONS),
    ]
    rows = measure(*contenders, rounds=1, problem=SMALL)
    assert [r.status for r in rows] == [OK] * 4, [r.reason for r in rows]
    assert [r.path for r in rows] == ["latent", "mix", "", ""]
    assert rows[1].choices == {"n": 40}
    assert (rows[0].call_us, rows[1].call_us) == (300.0, 200.0)
    assert all(r.error is not None and 0 < r.error < 0.01 for r in rows)


def test_the_public_call_takes_part_with_its_choice_and_is_checked(monkeypatch):
    import mla_var3.attention.call as call

    (found,) = measure(call_contender(SMALL, "cpu"), rounds=1, problem=SMALL)
    assert (found.kernel, found.status, found.path) == ("mla_attention", OK, "call"), found.reason
    assert found.call_us == found.time_us == 100.0 and found.tflops
    assert found.note.startswith("torch_tiled (torch") and 0 < (found.error or 0) < 0.01
    right = call.mla_attention
    monkeypatch.setattr(call, "mla_attention", lambda *x, **o: right(*x, **o) * 1.1)
    (found,) = measure(call_contender(SMALL, "cpu"), rounds=1, problem=SMALL)
    assert found.status == FAILED
    assert "mla_attention (torch_tiled, torch): relative error 0.1" in found.reason


def test_a_plan_says_what_it_cannot_do(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (int(10e9), int(141e9)))
    spec = device_spec("H200")
    monkeypatch.setattr("mla_var3.runtime.workflow.current_device_spec", lambda: spec)
    small, large = (
        make_plan(KernelChoice(find_kernel(name)), PROBLEM, "sm_90")
        for name in ("flash_mla", "flash_attention")
    )
    bench_contenders.require_memory(small)
    with pytest.raises(UnsupportedError, match="GiB of free GPU memory, got 9.31 GiB"):
        bench_contenders.require_memory(large)
    for kernel, fields, target, message in (
        ("flash_mla", {"n": 3}, "sm_90", "expected a plan that takes n=3"),
        ("flash_attention", {}, "sm_80", "expected one of its targets .* got sm_80"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            make_plan(KernelChoice(find_kernel(kernel), fields), SMALL, target)


def test_kernels_share_the_seconds_of_tuning_and_what_was_tried_is_said(monkeypatch):
    """What one does not need is left to the others; later rounds search nothing."""
    clock = [0.0]
    monkeypatch.setattr("mla_var3.bench.contenders.time.monotonic", lambda: clock[0])
    budget, given = TuneBudget(3, 15.0), []
    for spent in (1.0, 7.0, 9.0, 4.0):
        options = RunOptions()
        with budget.spend(options):
            clock[0] += spent
        given.append(options.tune_seconds)
    assert given == [5.0, 7.0, 7.0, 0.0] and budget.seconds == 0.0
    options = RunOptions()
    with TuneBudget(3).spend(options):
        pass
    assert options.tune_seconds is None

    def stage(tried: int, candidates: int, **more: bool) -> Any:
        state = {"from_cache": False, "complete": True, **more}
        return SimpleNamespace(tried=tried, candidates=candidates, **state)

    assert tuning_note([]) == tuning_note([stage(0, 1)]) == ""
    assert tuning_note([stage(3, 4), stage(2, 2), stage(0, 1)]) == "tuned: 5 of 6 tilings timed"
    found = tuning_note([stage(1, 9, complete=False)])
    assert found == "tuned: 1 of 9 tilings timed; the time was up"
    assert tuning_note([stage(2, 2, from_cache=True)]).endswith("timed, found before")
