"""Timing: the arithmetic and the order of device calls, with a clock that needs no GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.errors import DeviceTimeoutError, InvalidArgumentError, UnsupportedError
from mla_var3.runtime import measure
from mla_var3.runtime.measure import Timing, time_gpu, wait_for_device


class FakeClock:
    """Gives run i the time `times[i]`, and notes every call."""

    def __init__(self, times: Callable[[int], float] = lambda i: 100.0 + i) -> None:
        self.times = times
        self.calls: list[str] = []
        self.flushed = 0
        self.ended: set[Any] = set()

    def capture(self, fn: Callable[[], None], warmup: int, what: str) -> Callable[[], None]:
        self.calls.append("capture")
        fn()
        return lambda: self.calls.append("replay")

    def enqueue(self, fn: Callable[[], None], cold_l2: bool) -> Any:
        self.flushed += cold_l2
        fn()
        self.calls.append("enqueue")
        return self.calls.count("enqueue") - 1

    def wait(self, handle: Any, what: str) -> None:
        self.ended.add(handle)

    def elapsed_us(self, handle: Any) -> float:
        assert handle in self.ended, "an event was read before its run had ended"
        return self.times(handle)


def test_warmup_runs_are_not_counted():
    clock = FakeClock(lambda i: 1e6 if i < 2 else 10.0)
    launches: list[None] = []
    timing = time_gpu(lambda: launches.append(None), runs=5, warmup=2, clock=clock)
    assert timing == Timing(10.0, 10.0, 10.0, 10.0, 5, "cuda-event", True)
    assert len(launches) == 7


@pytest.mark.parametrize("cold", [True, False])
def test_the_cache_is_flushed_before_each_run_on_request(cold):
    clock = FakeClock()
    timing = time_gpu(lambda: None, runs=4, warmup=1, cold_l2=cold, clock=clock)
    assert clock.flushed == (5 if cold else 0)
    assert timing.cold_l2 is cold


def test_a_graph_is_captured_once_and_replayed():
    clock = FakeClock()
    launches: list[None] = []
    timing = time_gpu(lambda: launches.append(None), runs=4, warmup=1, graph=True, clock=clock)
    assert (timing.timer, len(launches)) == ("cuda-graph", 1)
    assert (clock.calls.count("capture"), clock.calls.count("replay")) == (1, 5)


@pytest.mark.parametrize(("seconds_per_run", "expected"), [(1e-6, 200), (0.04, 50), (10.0, 10)])
def test_number_of_runs_follows_the_budget(seconds_per_run, expected, monkeypatch):
    now = 0.0
    clock = FakeClock()

    def work() -> None:
        nonlocal now
        now += seconds_per_run

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    assert time_gpu(work, max_seconds=2.0, clock=clock).runs == pytest.approx(expected, abs=1)


def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="time_gpu: expected a usable CUDA GPU, got none"):
        time_gpu(lambda: None)


def fake_event(over: bool = False, broken: bool = False) -> Any:
    """An event that is over or never is, or whose device is broken."""

    def query() -> bool:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return over

    return SimpleNamespace(record=lambda: None, query=query)


def test_a_kernel_that_hangs_is_named(monkeypatch):
    with pytest.raises(DeviceTimeoutError, match=r"^flash_mla: expected to end .* within 0.01 s"):
        wait_for_device("flash_mla", 0.01, fake_event())
    monkeypatch.setenv("HYPER_MLA_TIMEOUT_S", "0.02")
    with pytest.raises(DeviceTimeoutError, match=r"within 0.02 s.*HYPER_MLA_TIMEOUT_S sets"):
        wait_for_device("flash_mla", event=fake_event())


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_a_bad_limit_is_refused(value, monkeypatch):
    monkeypatch.setenv("HYPER_MLA_TIMEOUT_S", value)
    with pytest.raises(InvalidArgumentError, match="HYPER_MLA_TIMEOUT_S: expected a positive"):
        wait_for_device("flash_mla", event=fake_event(True))


@pytest.mark.parametrize(
    ("event", "healthy"),
    [(fake_event(True), True), (fake_event(broken=True), False), (fake_event(), False)],
    ids=["healthy", "broken", "hung"],
)
def test_a_lost_gpu_is_noticed(event, healthy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(measure, "_HEALTH_TIMEOUT_S", 0.01)
    assert measure.cuda_is_healthy() is healthy
