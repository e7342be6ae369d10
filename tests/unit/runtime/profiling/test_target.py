"""The program that runs under the profiler: spec, ranges, tilings."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import UnsupportedError
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.plan import KernelPlan, Target
from mla_var3.runtime.profiling import target
from mla_var3.runtime.profiling.target import TargetSpec, launch_ranges
from mla_var3.runtime.stage import Stage
from tests.unit.runtime.runtime_support import fake_kernel


def make_plan(design: str = "mla_var6_plus", **fields: Any) -> KernelPlan:
    sizes = {"b": 2, "s": 4, "t": 256, **fields}
    plan: KernelPlan = plan_class(find_kernel(design))(**sizes)
    return plan.resolve(800.0, 4000.0).for_target("sm_90")


def meta_stage(plan: KernelPlan) -> Stage:
    return plan.plan(*plan.prepare_inputs("meta"))


@pytest.mark.parametrize(
    "design", ["flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus"]
)
def test_a_plan_survives_the_way_through_the_file(design, tmp_path):
    plan = make_plan(design, lengths=(256, 100))
    stage = meta_stage(plan)
    TargetSpec.of(plan, stage, runs=3).write(tmp_path / "spec.json")
    spec = TargetSpec.read(tmp_path / "spec.json")
    again = spec.build_plan()
    assert again == plan
    assert again.target.code == "sm_90"
    assert spec.build_stage(again, "meta").tilings() == stage.tilings()
    assert spec.runs == 3


def test_the_profiled_plan_is_made_for_the_same_device(tmp_path):
    """Splits and shares of SMs follow the device, not its compile target alone."""
    made = plan_class(find_kernel("flash_mla_split_kv"))(b=2, s=1, t=4096, h=128)
    plan = made.resolved(Target.of(device_spec("NVIDIA A100-SXM4-80GB")))
    TargetSpec.of(plan, meta_stage(plan), runs=1).write(tmp_path / "spec.json")
    spec = TargetSpec.read(tmp_path / "spec.json")
    again = spec.build_plan()
    assert again.target == plan.target
    shapes = [
        [[tuple(tensor.shape) for tensor in kernel.output_tensors] for kernel in stage.kernels()]
        for stage in (meta_stage(plan), spec.build_stage(again, "meta"))
    ]
    assert shapes[0] == shapes[1]


def test_tuned_tilings_are_used_not_those_of_the_plan(tmp_path):
    plan = make_plan("flash_mla")
    stage = meta_stage(plan)
    (kernel,) = stage.kernels()
    kernel.tiling = type(kernel.tiling)(**{**kernel.tiling.to_dict(), "Bn": 32})
    spec = TargetSpec.of(plan, stage, runs=1)
    rebuilt = spec.build_stage(spec.build_plan(), "meta")
    assert next(rebuilt.kernels()).tiling.Bn == 32
    assert spec.build_plan() == plan


def test_a_plan_of_a_script_cannot_be_profiled(monkeypatch):
    plan = make_plan()
    stage = meta_stage(plan)
    monkeypatch.setattr(type(plan), "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    with pytest.raises(UnsupportedError, match="expected a plan class in a module"):
        TargetSpec.of(plan, stage, runs=1)
    spec = SimpleNamespace(name="mla_var3.kernel.there")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    assert TargetSpec.of(plan, stage, runs=1).module == "mla_var3.kernel.there"


def test_each_kernel_is_launched_alone_inside_its_range():
    """Under names that are unique and safe for the filter of ranges."""
    events: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        events.append(f"push {name}")
        yield
        events.append("pop")

    group = ConcurrentKernels("pair", [fake_kernel("a", events), fake_kernel("a", events)])
    pipeline = KernelPipeline("pipe", [group, fake_kernel("b", events)])
    launch_ranges(pipeline, mark, lambda kernel: events.append(f"wait {kernel}"))
    assert events == [
        *("push hyper_mla.a", "a", "pop", "wait a", "push hyper_mla.a.2", "a", "pop", "wait a"),
        *("push hyper_mla.b", "b", "pop", "wait b"),
    ]
    assert not set(" ".join(events)) & set("/@[],")


def test_a_timeline_is_of_whole_runs(monkeypatch, tmp_path):
    recorded: list[Any] = []
    monkeypatch.setattr(target, "_prepared_stage", lambda spec: "stage")
    monkeypatch.setattr(target, "record_runs", lambda *given: recorded.append(given[::2]))
    plan = make_plan()
    spec = replace(TargetSpec.of(plan, meta_stage(plan), runs=4), timeline=True)
    spec.write(tmp_path / "spec.json")
    assert target.main([str(tmp_path / "spec.json")]) == 0
    assert recorded == [("stage", 4)]


@pytest.mark.parametrize("under_ncu", [False, True])
def test_nsight_python_gets_the_stages_only_under_the_profiler(monkeypatch, tmp_path, under_ncu):
    calls: list[Any] = []

    def kernel(**options: Any) -> Any:
        def decorate(function: Any) -> Any:
            calls.append((options, function.__name__))
            return function

        return decorate

    fake = SimpleNamespace(analyze=SimpleNamespace(kernel=kernel), annotate="annotate")
    monkeypatch.setitem(sys.modules, "nsight", fake)
    monkeypatch.setattr(target, "_prepared_stage", lambda spec: "stage")
    monkeypatch.setattr(target, "launch_ranges", lambda *given: calls.append(given[:2]))
    monkeypatch.delenv("NSPY_NCU_PROFILE", raising=False)
    if under_ncu:
        monkeypatch.setenv("NSPY_NCU_PROFILE", "signature")
    plan = make_plan()
    spec = TargetSpec.of(plan, meta_stage(plan), runs=2)
    spec.nsight = {"metrics": ["m"], "clock_control": "none", "output_prefix": "x/nsight-"}
    spec.write(tmp_path / "spec.json")
    assert json.loads((tmp_path / "spec.json").read_text())["nsight"]["metrics"] == ["m"]
    assert target.main([str(tmp_path / "spec.json")]) == 0
    options, name = calls[0]
    assert options["runs"] == 2
    assert options["metrics"] == ["m"]
    assert options["combine_kernel_metrics"](1, 2) == 3  # a stage may launch several kernels
    # nsight-python builds the report's name from the function's.
    assert f"-{name}-" in target.NSIGHT_REPORT
    assert calls[1:] == ([("stage", "annotate")] if under_ncu else [])


def test_a_profiler_that_is_cut_off_leaves_no_program_behind(tmp_path):
    """It starts the profiled program itself, which would stay on the GPU."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 300 & echo $! > {pid}; wait"]
    with pytest.raises(subprocess.TimeoutExpired):
        target.run_profiler(command, dict(os.environ), 1.0)
    started = int(pid.read_text())
    for _ in range(100):
        status = Path(f"/proc/{started}/stat")
        # A process that was killed may stay a zombie until it is reaped.
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {started} is still there")


def test_what_profiler_and_program_print_is_kept():
    done = target.run_profiler(["sh", "-c", "echo one; echo two >&2; exit 3"], dict(os.environ), 60)
    assert (done.returncode, done.stdout.split()) == (3, ["one", "two"])
