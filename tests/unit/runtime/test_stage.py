"""Stages, pipelines and concurrent groups, nested in any way."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.cost import Cost
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.stage import (
    Constraints,
    Stage,
    constraint_failures,
    require_valid,
    tiling_from_dict,
)
from tests.unit.runtime.runtime_support import FakeTiling, fake_kernel


@pytest.mark.parametrize(("device", "noted"), [("cpu", "k"), ("cuda", "k on cuda")])
def test_a_launch_goes_where_the_tensors_are(device, noted):
    kernel = fake_kernel("k")
    kernel.output_tensors = [SimpleNamespace(device=SimpleNamespace(type=device))]
    kernel.launch()
    assert kernel.log == [noted]


def test_a_plan_without_tensors_does_not_launch():
    kernel = fake_kernel("empty", device="meta")
    with pytest.raises(UnsupportedError, match=r"^empty: planned without tensors \(device 'meta'"):
        kernel.launch()
    assert kernel.log == []


def pipeline(name: str, *stages: Stage, **more: Any) -> KernelPipeline:
    return KernelPipeline(_name=name, stages=list(stages), **more)


def group(name: str, *stages: Stage, **more: Any) -> ConcurrentKernels:
    return ConcurrentKernels(_name=name, concurrent_kernels=list(stages), **more)


def test_any_nesting_launches_in_order():
    log: list[str] = []
    a, b, c, d, e, f = (fake_kernel(name, log) for name in "abcdef")
    inside = group("g", pipeline("p", b, group("gg", c, d)), e)
    stage = pipeline("outer", a, inside, pipeline("q", f), fake_kernel("a", log))
    stage.launch()
    assert log == ["a", "b", "c", "d", "e", "f", "a"]
    assert [kernel.name for kernel in stage.kernels()] == log
    assert stage.cost() == Cost(7e6, 7e3)
    assert list(stage.tilings()) == ["a", "b", "c", "d", "e", "f", "a.2"]


def test_a_failing_stage_stops_the_pipeline():
    log: list[str] = []
    with pytest.raises(InvalidArgumentError):
        pipeline("p", *(fake_kernel(n, log, rows=r) for n, r in (("a", 1), ("b", 0)))).launch()
    assert log == ["a"]


def test_outputs():
    """A pipeline gives what its last stage gives, a group what all members give; or as told."""
    a, b, c = (fake_kernel(name) for name in "abc")
    together = group("g", b, c)
    outputs = [*b.output_tensors, *c.output_tensors]
    assert all(x is y for x, y in zip(together.output_tensors, outputs, strict=True))
    assert pipeline("p", a, together).output_tensors == together.output_tensors
    assert pipeline("p", together, a).output_tensors == a.output_tensors
    chosen = [a.output_tensors[0]]
    assert group("g", b, c, output_tensors=chosen).output_tensors is chosen
    assert pipeline("p", a, b, output_tensors=chosen).output_tensors is chosen


def test_a_group_overlaps():
    """A compute-bound and a memory-bound member hide each other; two of a kind add up."""
    compute, memory = fake_kernel("c", flops=6e6, nbytes=1e3), fake_kernel("m", flops=1, nbytes=4e3)
    assert group("g", compute, memory).predict_us(1.0, 1.0) == pytest.approx(6.000001)
    assert group("g", compute, compute).predict_us(1.0, 1.0) == pytest.approx(12.0)
    assert group("g", compute, memory).predict_us(6.0, 1.0) == pytest.approx(5.0)


def test_a_group_is_not_faster_than_a_member_that_is_a_pipeline():
    """Stages in order do not overlap each other, even where the total work would allow it."""
    compute, memory = fake_kernel("c", flops=6e6, nbytes=0), fake_kernel("m", flops=0, nbytes=5e3)
    tiny = fake_kernel("t", flops=1e3, nbytes=1)
    assert group("g", pipeline("p", compute, memory), tiny).predict_us(1.0, 1.0) == 11.0


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (False, "g: validate_joint_tiling_fn rejects the tilings"),
        (Constraints((False, "too much shared memory"), (False, "too slow")), "too much shared"),
    ],
    ids=["bool", "constraints"],
)
def test_a_joint_tiling_that_does_not_fit_launches_nothing(outcome, message):
    log: list[str] = []
    stage = group("g", fake_kernel("a", log), validate_joint_tiling_fn=lambda tilings: outcome)
    with pytest.raises(InvalidArgumentError, match="^tiling: expected a joint tiling that fits"):
        stage.launch()
    assert log == []
    assert message in "; ".join(stage.joint_failures())


class PretendedCuda:
    """Streams and events that only note what they are asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams, self.events = itertools.count(), itertools.count()
        self.current: Any = self.make_stream()
        self.current.name = "current"

    def make_stream(self, priority: int = 0) -> Any:
        stream = SimpleNamespace(name=f"s{next(self.streams)}", priority=priority)
        stream.wait_event = lambda event: self.log.append(f"{stream.name} waits {event.name}")
        return stream

    def make_event(self) -> Any:
        event = SimpleNamespace(name=f"e{next(self.events)}")
        event.record = lambda stream: self.log.append(f"{event.name} on {stream.name}")
        return event

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    pretended = PretendedCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: pretended.current)
    monkeypatch.setattr(torch.cuda, "Stream", pretended.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", pretended.make_event)
    monkeypatch.setattr(torch.cuda, "stream", pretended.on)
    return pretended


def on_cuda(name: str, cuda: PretendedCuda) -> Any:
    kernel = fake_kernel(name)
    kernel.output_tensors = [SimpleNamespace(device=SimpleNamespace(type="cuda"))]
    kernel._launch_cuda = lambda: cuda.log.append(f"{name} on {cuda.current.name}")
    return kernel


def test_members_fork_from_and_join_the_current_stream(cuda):
    """All wait for what came before, the current stream waits for all of them."""
    members = group("g", on_cuda("a", cuda), on_cuda("b", cuda), stream_priorities=[-1, 0])
    stage = pipeline("p", on_cuda("before", cuda), members, on_cuda("after", cuda))
    stage.launch()
    assert cuda.log == [
        "before on current",
        "e0 on current",
        *("s1 waits e0", "a on s1", "e1 on s1", "current waits e1"),
        *("s2 waits e0", "b on s2", "e2 on s2", "current waits e2"),
        "after on current",
    ]
    stage.launch()
    assert next(cuda.streams) == 1 + 2, "streams are made once"
    assert [stream.priority for stream in members._streams] == [-1, 0]


def test_a_group_in_a_group_forks_from_its_own_stream(cuda):
    inner = group("inner", on_cuda("a", cuda), on_cuda("b", cuda))
    group("outer", inner, on_cuda("c", cuda)).launch()
    assert "e1 on s1" in cuda.log  # the inner fork, on the outer member's stream
    assert {"s3 waits e1", "a on s3", "s4 waits e1", "b on s4", "c on s2"} <= set(cuda.log)
    assert "current waits e4" in cuda.log


def test_an_illegal_tiling_is_named_with_every_reason():
    with pytest.raises(InvalidArgumentError) as caught:
        require_valid(FakeTiling(rows=-1, occupancy=2), SimpleNamespace(limit=-2))
    assert str(caught.value) == (
        "tiling: expected a legal tiling, got rows=-1 occupancy=2: "
        "rows: expected a positive number, got -1; rows: expected at most -2, got -1"
    )


def test_a_plain_false_becomes_a_message():
    tiling = FakeTiling(rows=3)
    tiling.validate = lambda plan: plan == "legal"
    assert constraint_failures(tiling, None) == ("FakeTiling.validate rejects rows=3",)
    assert constraint_failures(tiling, "legal") == ()


@pytest.mark.parametrize("change", [{}, {"rows": 1, "speed": 9}], ids=["missing", "unknown"])
def test_other_fields_are_refused(change):
    values = {"columns": 1, "num_ctas": 1, "occupancy": 1, **change}
    wanted = re.escape("tiling: expected the fields ['columns', 'num_ctas', 'occupancy', 'rows']")
    with pytest.raises(InvalidArgumentError, match=f"^{wanted}, got "):
        tiling_from_dict(FakeTiling, values)
