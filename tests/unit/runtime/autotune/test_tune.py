"""The tuning search on stages, a clock and a compiler that need no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.errors import MissingToolError, UnsupportedError
from mla_var3.runtime.autotune import tune as tune_module
from mla_var3.runtime.autotune.tune import Instruments, StageTuning, autotune, refine_plan
from mla_var3.runtime.autotune.units import units_of
from mla_var3.runtime.compile import CompileReport
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.measure import Timing, summarise
from mla_var3.runtime.paths import cache_root
from mla_var3.runtime.stage import Constraints, KernelStage, Stage, Tiling
from mla_var3.runtime.workflow import RunOptions
from tests.unit.runtime import runtime_support
from tests.unit.runtime.runtime_support import DoublingPlan


@dataclass
class FakeTiling(Tiling):
    rows: int = 64
    shape: tuple[int, ...] = (1, 2)

    def validate(self, pd: Any) -> Constraints:
        return Constraints((self.rows <= pd.limit, f"rows={self.rows} is above {pd.limit}"))


@dataclass
class FakeKernel(runtime_support.FakeKernel):
    world: World = field(kw_only=True)

    def _launch_cpu(self) -> None:
        self.world.launched.append((self.name, self.tiling.rows))

    def source_files(self) -> list[Path]:
        return [self.world.source]


@dataclass
class FakePlan(DoublingPlan):
    neighbours: tuple[int, ...] = ()
    build: Any = None

    def params(self) -> dict[str, Any]:
        return {"b": self.b, "limit": self.limit}

    def prepare_inputs(self, device: Any) -> tuple[torch.Tensor, ...]:
        return ()

    def plan(self, *inputs: torch.Tensor) -> Any:
        return self.build(self)

    def refinements(self) -> list[FakePlan]:
        return [self.copy(b=b) for b in self.neighbours]


@dataclass
class World:
    """A pretended GPU: what was launched, what things take, what goes wrong."""

    source: Path
    plan: FakePlan = field(default_factory=lambda: FakePlan(b=2))
    launched: list[tuple[str, int]] = field(default_factory=list)
    compiled: list[tuple[str, int]] = field(default_factory=list)
    timed: list[tuple[int, ...]] = field(default_factory=list)
    time_us: Callable[..., float] = lambda *rows: float(sum(rows))
    errors: dict[int, Exception] = field(default_factory=dict)
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    interrupt_after: int | None = None
    healthy: bool = True

    def time(self, launch: Callable[[], None]) -> Timing:
        if self.interrupt_after is not None and len(self.timed) >= self.interrupt_after:
            raise KeyboardInterrupt
        before = len(self.launched)
        launch()
        rows = tuple(rows for _, rows in self.launched[before:])
        self.timed.append(rows)
        if error := self.errors.get(rows[0]):
            self.healthy = "illegal memory access" not in str(error)
            raise error
        return summarise([self.time_us(*rows)], timer="cuda-event", cold_l2=True)

    def compile(self, kernel: KernelStage, target: str, tiling: Any) -> CompileReport:
        self.compiled.append((kernel.name, tiling.rows))
        figures = {"stack_bytes": 0, "shared_bytes": 1000, "instructions": {"HGMMA": 4}}
        figures.update(self.reports.get(tiling.rows, {}))
        return CompileReport(kernel.name, target, tiling.to_dict(), **figures)

    @property
    def instruments(self) -> Instruments:
        return Instruments(self.time, self.compile, lambda: self.healthy)

    def kernel(self, rows: list[int], name: str = "attend", owner: Any = None) -> FakeKernel:
        """A kernel with the first value as its active tiling and the others as candidates."""
        return FakeKernel(
            kernel_fn=name,
            tiling=FakeTiling(rows[0]),
            plan=owner or self.plan,
            input_tensors=[],
            output_tensors=[torch.empty(1)],
            algorithmic_flops_bytes_fn=lambda tiling: (1.0, 1.0),
            autotune_configs=[FakeTiling(value) for value in rows[1:]],
            world=self,
        )

    def tune(self, stage: Stage, **options: Any) -> dict[str, StageTuning]:
        run = RunOptions(**options)
        return autotune(stage, self.plan, SPEC, run, instruments=self.instruments)

    def refine(self, plan: FakePlan, **options: Any) -> FakePlan:
        return refine_plan(plan, SPEC, RunOptions(**options), instruments=self.instruments)


SPEC: Any = SimpleNamespace(
    name="NVIDIA Fake", compute_capability=(9, 0), target="sm_90",
    shared_memory_per_block_bytes=2000,
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    path = tmp_path / "kernel_source.py"
    path.write_text("original")
    return World(path)


def statuses(tuning: StageTuning) -> dict[int, str]:
    return {entry["config"]["rows"]: entry["status"] for entry in tuning.results}


def reason(tuning: StageTuning, rows: int) -> str:
    (entry,) = [entry for entry in tuning.results if entry["config"].get("rows") == rows]
    return entry["reason"] or ""


def test_the_fastest_is_set_and_everything_is_recorded(world):
    stage = world.kernel([64, 128, 32])
    outcome = world.tune(stage)
    tuning = outcome["attend"]
    assert stage.tiling == FakeTiling(32)
    assert (tuning.best, tuning.best_us) == ({"rows": 32, "shape": [1, 2]}, 32.0)
    assert statuses(tuning) == {64: "ok", 128: "ok", 32: "ok"}
    assert (tuning.complete, tuning.from_cache) == (True, False)
    stored = json.loads(tuning.path.read_text())
    assert (stored["best"], stored["complete"]) == (tuning.best, True)
    assert stored["environment"]["versions"]["python"]
    assert [e["timing"]["median_us"] for e in stored["results"]] == [64.0, 128.0, 32.0]
    assert stored["results"][0]["compile"]["instructions"] == {"HGMMA": 4}
    assert tuning.path.parent.name == world.plan.name
    assert "kernel-autotune/nvidia-fake/cutile-dsl" in tuning.path.as_posix()


def test_candidates_are_rejected_without_the_gpu(world):
    world.reports = {
        1: {"error": "no such tile"},
        2: {"stack_bytes": 80, "instructions": {"HGMMA": 4, "STL": 9}},
        3: {"instructions": {"HMMA": 4}},
        4: {"shared_bytes": 2001},
    }
    tuning = world.tune(world.kernel([64, 1, 2, 3, 4, 2000]))["attend"]
    assert world.timed == [(64,)]
    assert statuses(tuning) == {64: "ok", **dict.fromkeys((1, 2, 3, 4, 2000), "rejected")}
    assert reason(tuning, 1) == "does not compile: no such tile"
    assert reason(tuning, 2) == "spills (80 B of stack, 9 STL, 0 LDL)"
    assert reason(tuning, 3) == "misses the tensor-core path (HMMA, not HGMMA)"
    assert reason(tuning, 4) == "needs 2001 B of shared memory per CTA, NVIDIA Fake has 2000"
    assert reason(tuning, 2000) == "rows=2000 is above 1000"
    assert ("attend", 2000) not in world.compiled
    compiled = {e["config"]["rows"]: e["compile"] for e in tuning.results}
    assert compiled[2000] is None
    assert compiled[2] is not None and compiled[2]["stack_bytes"] == 80


def test_a_candidate_that_fails_on_the_gpu_is_a_result(world):
    world.errors[64] = RuntimeError("CUDA error:\n  too many resources requested")
    stage = world.kernel([64, 128])
    tuning = world.tune(stage)["attend"]
    assert statuses(tuning) == {64: "failed", 128: "ok"}
    assert reason(tuning, 64) == "RuntimeError: CUDA error: too many resources requested"
    assert stage.tiling.rows == 128 and tuning.complete


def test_no_usable_candidate_leaves_the_tiling_alone(world, caplog):
    world.reports = {rows: {"error": "no"} for rows in (64, 128)}
    stage = world.kernel([64, 128])
    tuning = world.tune(stage)["attend"]
    assert (tuning.best, tuning.best_us, stage.tiling.rows) == (None, None, 64)
    assert "no candidate could be timed" in caplog.text


def test_when_all_spill_the_fewest_stack_bytes_are_timed(world):
    stacks = {64: 800, 128: 16, 256: 16, 32: 24}
    world.reports = {rows: {"stack_bytes": stack} for rows, stack in stacks.items()}
    world.reports[8] = {"error": "no"}
    world.time_us = lambda rows: 1000.0 - rows
    stage = world.kernel([64, 128, 256, 32, 8])
    tuning = world.tune(stage)["attend"]
    assert world.timed == [(128,), (256,)]
    assert stage.tiling.rows == 256
    assert [rows for rows, status in statuses(tuning).items() if status == "ok"] == [128, 256]
    assert re.search(r"kept although it spills \(16 B.*fewest stack bytes", reason(tuning, 128))
    assert tuning.complete
    again = world.tune(world.kernel([64, 128, 256, 32, 8]))["attend"]
    assert again.from_cache and len(world.timed) == 2 and len(world.compiled) == 5


def test_without_the_disassemblers_candidates_are_timed_unfiltered_and_it_says_so(world, caplog):
    def missing(kernel: Any, target: str, tiling: Any) -> CompileReport:
        raise MissingToolError("cuobjdump: got none")

    world.compile = missing
    tuning = world.tune(world.kernel([64, 32]))["attend"]
    assert tuning.best_us == 32.0
    assert reason(tuning, 32) == "not filtered by compiling: cuobjdump: got none"
    assert caplog.text.count("candidates are not filtered by compiling") == 1


def test_one_candidate_needs_no_gpu_but_is_recorded(world):
    tuning = world.tune(world.kernel([64]))["attend"]
    assert (world.timed, world.compiled) == ([], [])
    assert (tuning.best, tuning.best_us) == ({"rows": 64, "shape": [1, 2]}, None)
    assert (tuning.complete, tuning.from_cache) == (True, False)
    assert reason(tuning, 64) == "the only candidate, not timed"
    assert tuning.path.exists()
    assert world.tune(world.kernel([64]))["attend"].from_cache
    assert world.tune(world.kernel([64, 32]))["attend"].best_us == 32.0, "now there is a choice"
    assert world.timed == [(64,), (32,)]


def test_tune_max_iters_bounds_the_timed_candidates(world):
    world.reports = {128: {"stack_bytes": 8}}
    rows = [64, 128, 32, 16, 8]
    tuning = world.tune(world.kernel(rows), tune_max_iters=2)["attend"]
    assert world.timed == [(64,), (32,)]
    assert (tuning.complete, tuning.best_us) == (False, 32.0)
    assert ("attend", 16) not in world.compiled, "what is not timed is not compiled either"
    again = world.tune(world.kernel(rows), tune_max_iters=2)["attend"]
    assert again.from_cache and len(world.timed) == 2
    more = world.tune(world.kernel(rows), tune_max_iters=3)["attend"]
    assert world.timed[2:] == [(16,)] and not more.from_cache
    everything = world.tune(world.kernel(rows))["attend"]
    assert world.timed[3:] == [(8,)]
    assert everything.complete and everything.best_us == 8.0


def test_tune_seconds_ends_the_search_after_one_candidate_at_least(world):
    rows = [64, 32, 16, 8]
    tuning = world.tune(world.kernel(rows), tune_seconds=0.0)["attend"]
    assert world.timed == [(64,)] and not tuning.complete
    assert (tuning.tried, tuning.candidates) == (1, 4)
    world.tune(world.kernel(rows), tune_seconds=0.0)
    assert world.timed == [(64,)], "nothing is timed where the history has something"
    assert world.tune(world.kernel(rows), tune_seconds=60.0)["attend"].complete
    assert world.timed == [(64,), (32,), (16,), (8,)]


@pytest.mark.parametrize("limit", [{"tune_max_iters": 1}, {"tune_seconds": 0.0}])
def test_a_tiling_that_an_earlier_run_was_given_does_not_use_up_a_limit(world, limit):
    world.tune(world.kernel([512, 64, 32]), **limit)
    stage = world.kernel([64, 32])
    tuning = world.tune(stage, **limit)["attend"]
    assert world.timed == [(512,), (64,)]
    assert (tuning.best_us, stage.tiling) == (64.0, FakeTiling(64))


def test_where_all_spill_the_time_of_a_tiling_given_earlier_is_not_enough(world):
    world.reports = {64: {"stack_bytes": 8}, 32: {"stack_bytes": 16}}
    world.tune(world.kernel([512, 64, 32]))
    stage = world.kernel([32, 64])
    assert world.tune(stage)["attend"].best_us == 64.0
    assert stage.tiling == FakeTiling(64)


def test_an_interrupted_search_resumes_where_it_stopped(world):
    world.interrupt_after = 2
    world.reports = {128: {"stack_bytes": 8}}
    rows = [64, 128, 32, 16, 8]
    stage = world.kernel(rows)
    with pytest.raises(KeyboardInterrupt) as caught:
        world.tune(stage)
    assert "the next run resumes there" in caught.value.__notes__[0]
    assert stage.tiling.rows == 64, "the tiling is as it was"
    (path,) = _cache_files(world.plan)
    stored = json.loads(path.read_text())
    assert (stored["complete"], stored["best_us"], len(stored["results"])) == (False, 32.0, 3)

    world.interrupt_after = None
    world.compiled.clear()
    tuning = world.tune(world.kernel(rows))["attend"]
    assert world.timed == [(64,), (32,), (16,), (8,)], "nothing is timed twice"
    assert {rows for _, rows in world.compiled} <= {16, 8}, "nothing is compiled twice"
    assert (tuning.complete, tuning.from_cache, tuning.best_us) == (True, False, 8.0)


def test_retune_starts_anew_and_keeps_the_old_until_there_is_something_new(world):
    first = world.tune(world.kernel([64, 32]))["attend"]
    old = first.path.read_bytes()
    world.interrupt_after = len(world.timed)
    with pytest.raises(KeyboardInterrupt):
        world.tune(world.kernel([64, 32]), retune=True)
    assert first.path.read_bytes() == old

    world.interrupt_after = None
    world.time_us = lambda rows: 1000.0 / rows
    stage = world.kernel([64, 32])
    again = world.tune(stage, retune=True)["attend"]
    assert len(world.timed) == 4
    assert (again.from_cache, again.best_us, stage.tiling.rows) == (False, 1000 / 64, 64)
    assert json.loads(first.path.read_text())["best_us"] == 1000 / 64


def test_a_history_made_for_something_else_is_never_used(world, caplog):
    path = world.tune(world.kernel([64, 32]))["attend"].path
    stored = json.loads(path.read_text())
    stored["key"]["toolkit"]["cuda-tile"] = "0.0.1"
    path.write_text(json.dumps(stored))
    tuning = world.tune(world.kernel([64, 32]))["attend"]
    assert not tuning.from_cache and len(world.timed) == 4
    assert "was made for something else" in caplog.text
    assert json.loads(path.read_text())["key"] == tuning.key


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((r".{200}\Z", ""), (r".*", ""), (r".*", "[]"), ('"complete": true', '"complete": "yes"')),
        *(('"status": "ok"', '"status": "fine"'), ('"config"', '"konfig"')),
        (r'"median_us": 64\.0', '"median_us": -1.0'),
        (r'"median_us": 64\.0', '"median_us": "fast"'),
        (r'"median_us": 64\.0', '"median": 64.0'),
        (r'"timing": \{.*?\}', '"timing": [64.0]'),
    ],
)
def test_a_damaged_history_is_not_used(old, new, world, caplog):
    path = world.tune(world.kernel([64, 32]))["attend"].path
    damaged = re.sub(old, new, path.read_text(), count=1, flags=re.DOTALL)
    assert damaged != path.read_text()
    path.write_text(damaged)
    tuning = world.tune(world.kernel([64, 32]))["attend"]
    assert not tuning.from_cache and tuning.complete
    assert "is damaged" in caplog.text
    assert json.loads(path.read_text())["complete"] is True


def test_a_stored_config_that_the_tiling_does_not_take_is_not_applied(world):
    path = world.tune(world.kernel([64, 32]))["attend"].path
    stored = json.loads(path.read_text())
    alien = {**stored["results"][0], "config": {"lanes": 3}}
    alien["timing"] = {**alien["timing"], "median_us": 0.5}
    too_large = {**alien, "config": {"rows": 4096, "shape": [1, 2]}}
    stored["results"] += [alien, too_large]
    path.write_text(json.dumps(stored))
    stage = world.kernel([64, 32])
    assert world.tune(stage)["attend"].best == {"rows": 32, "shape": [1, 2]}
    assert stage.tiling == FakeTiling(32)


def test_a_lost_gpu_stops_the_search_and_the_next_one_leaves_the_culprit_out(world):
    world.errors[32] = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(UnsupportedError, match="cannot be used any more .* illegal memory access"):
        world.tune(world.kernel([64, 32, 16]))
    assert len(world.timed) == 2, "nothing else was tried on a broken GPU"
    world.healthy = True
    tuning = world.tune(world.kernel([64, 32, 16]))["attend"]
    assert world.timed == [(64,), (32,), (16,)]
    assert statuses(tuning) == {64: "ok", 32: "failed", 16: "ok"}


def test_each_stage_of_a_pipeline_is_tuned_alone_with_its_inputs_filled(world):
    first, second = world.kernel([64, 32], "first"), world.kernel([128, 16], "second")
    outcome = world.tune(KernelPipeline("both", [first, second]))
    assert list(outcome) == ["first", "second"]
    assert (first.tiling.rows, second.tiling.rows) == (32, 16)
    assert world.launched == [
        *[("first", 64), ("first", 32)],
        *[("first", 32), ("second", 128), ("second", 16)],
    ]


def group(validate: Any, *members: Stage, name: str = "group") -> ConcurrentKernels:
    return ConcurrentKernels(name, list(members), validate_joint_tiling_fn=validate)


def test_a_group_is_tuned_together(world):
    world.time_us = lambda x, y: abs(x + y - 72) + 1.0
    x, y = world.kernel([64, 32], "x"), world.kernel([16, 8], "y")
    stage = group(None, x, y)
    tuning = world.tune(stage)["group"]
    assert world.timed == [(64, 16), (64, 8), (32, 16), (32, 8)]
    assert (x.tiling.rows, y.tiling.rows) == (64, 8)
    shape = {"shape": [1, 2]}
    assert tuning.best == {"x": {"rows": 64, **shape}, "y": {"rows": 8, **shape}}
    compiled = tuning.results[0]["compile"]
    assert compiled is not None and set(compiled) == {"x", "y"}
    assert len(world.compiled) == 4, "each kernel and tiling is compiled once"
    again_x, again_y = world.kernel([64, 32], "x"), world.kernel([16, 8], "y")
    again = world.tune(group(None, again_x, again_y))["group"]
    assert again.from_cache
    assert (again_x.tiling, again_y.tiling) == (FakeTiling(64), FakeTiling(8)), "tuples as well"


def test_joint_constraints_and_member_rejections(world):
    def fits(tilings: list[FakeTiling]) -> Constraints:
        total = sum(tiling.rows for tiling in tilings)
        return Constraints((total <= 80, f"{total} rows do not fit together"))

    world.reports = {8: {"stack_bytes": 4}}
    x, y = world.kernel([64, 32, 2000], "x"), world.kernel([16, 24, 8], "y")
    tuning = world.tune(group(fits, x, y))["group"]
    assert world.timed == [(64, 16), (32, 16), (32, 24)]
    reasons = {
        tuple(part["rows"] for part in entry["config"].values()): entry["reason"]
        for entry in tuning.results
        if entry["status"] == "rejected"
    }
    spills = "spills (4 B of stack, 0 STL, 0 LDL)"
    assert reasons == {
        **{(64, 24): "88 rows do not fit together", (64, 8): spills, (32, 8): spills},
        **{(2000, rows): "rows=2000 is above 1000" for rows in (16, 24, 8)},
    }
    assert tuning.complete and (x.tiling.rows, y.tiling.rows) == (32, 16)


def test_a_group_resumes(world):
    world.reports = {8: {"stack_bytes": 4}}

    def make() -> Stage:
        return group(None, world.kernel([64, 32], "x"), world.kernel([16, 8, 24], "y"))

    world.interrupt_after = 2
    with pytest.raises(KeyboardInterrupt):
        world.tune(make())
    world.interrupt_after = None
    tuning = world.tune(make())["group"]
    assert sorted(world.timed) == [(32, 16), (32, 24), (64, 16), (64, 24)]
    repeated = [part for part in set(world.compiled) if world.compiled.count(part) > 1]
    assert repeated == [("y", 24)], "only what was under way is compiled again"
    assert tuning.complete


def test_nesting(world):
    """pipeline(first, group(a, pipeline(b, c), group(d, e)), last)."""
    d, last = world.kernel([3, 4], "d"), world.kernel([5], "e")
    inner = group(lambda tilings: tilings[0].rows != 3, d, last, name="in")
    outer = group(
        lambda tilings: len(tilings) == 5,
        world.kernel([1, 2], "a"),
        KernelPipeline("bc", [world.kernel([7], "b"), world.kernel([9, 8], "c")]),
        inner,
        name="out",
    )
    stage = KernelPipeline(
        "all", [world.kernel([11, 10], "first"), outer, world.kernel([6], "last")]
    )
    (_, unit, _) = units_of(stage)
    assert [(g.name, s) for g, s in unit.groups] == [("out", slice(0, 5)), ("in", slice(3, 5))]

    outcome = world.tune(stage)
    assert list(outcome) == ["first", "out", "last"]
    assert {k.name: k.tiling.rows for k in stage.kernels()} == {
        **{"first": 10, "a": 1, "b": 7, "c": 8, "d": 4, "e": 5, "last": 6}
    }
    assert all(len(rows) == 5 and rows[3] == 4 for rows in world.timed if len(rows) > 1)


@pytest.fixture
def refinable(world: World) -> FakePlan:
    # The time is the tiling's rows: the plan decides the candidates.
    plan = FakePlan(b=5, neighbours=(3, 4))
    plan.build = lambda own: world.kernel([own.b * 100, own.b * 10], owner=own)
    return plan


def test_the_fastest_neighbour_is_returned(world, refinable):
    assert world.refine(refinable, autotune=False).b == 3
    assert world.timed == [(500,), (300,), (400,)]
    assert world.refine(refinable, autotune=False).b == 3
    assert len(world.timed) == 3, "the second call used the history"
    (path,) = [path for path in _cache_files(refinable) if ".refine-" in path.name]
    results = {e["config"]["b"]: e["reason"] for e in json.loads(path.read_text())["results"]}
    assert results == {b: f"with attend rows={b}00 shape=(1, 2)" for b in (5, 3, 4)}


def test_untuned_tilings_are_part_of_what_a_refinement_holds_for(world):
    def refine(rows: int) -> int:
        plan = FakePlan(b=5, neighbours=(3,))
        plan.build = lambda own: world.kernel([rows + own.b], owner=own)
        return world.refine(plan, autotune=False).b

    assert refine(100) == 3
    world.time_us = lambda rows: 1000.0 - rows
    assert refine(200) == 5
    assert world.timed == [(105,), (103,), (205,), (203,)]


def test_the_plans_of_a_refinement_share_the_seconds(world, refinable, monkeypatch):
    given: list[float] = []

    def noted(stage: Any, plan: Any, spec: Any, options: RunOptions, **rest: Any) -> None:
        given.append(options.tune_seconds or 0.0)

    monkeypatch.setattr(tune_module, "autotune", noted)
    world.refine(refinable, tune_seconds=30.0)
    assert given == pytest.approx([10.0, 15.0, 30.0], abs=1.0)


def test_a_plan_that_does_not_fit_is_a_failed_result(world, refinable):
    world.errors[300] = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")
    assert world.refine(refinable, autotune=False).b == 4
    stored = [json.loads(p.read_text()) for p in _cache_files(refinable)]
    (failed,) = [e for s in stored for e in s["results"] if e["status"] == "failed"]
    assert failed["config"]["b"] == 3
    assert failed["reason"].startswith("OutOfMemoryError: CUDA out of memory")


def test_a_gpu_lost_while_tuning_a_neighbour_does_not_condemn_the_neighbour(world, refinable):
    world.errors[300] = RuntimeError("illegal memory access")
    with pytest.raises(UnsupportedError, match="attend: the GPU cannot be used"):
        world.refine(refinable)
    world.healthy = True
    assert world.refine(refinable).b == 3, "with the tiling that works"


def _cache_files(plan: FakePlan) -> list[Path]:
    return sorted(cache_root().rglob(f"{plan.name}/*.json"))
