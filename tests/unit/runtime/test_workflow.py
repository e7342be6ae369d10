"""Preparing a run: the device, the plan, the check."""

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.runtime import workflow
from mla_var3.runtime.autotune import tune as autotune_module
from mla_var3.runtime.workflow import (
    RunOptions,
    current_device_spec,
    device_kind,
    pick_device,
    planning_device,
    prepare,
)
from tests.unit.runtime.runtime_support import DoublingPlan, FakeTiling

H200 = device_spec("NVIDIA H200")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with a GPU by name, whose tensors lie in ordinary memory."""
    machine = SimpleNamespace(name="NVIDIA H200", free=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: machine.name)
    monkeypatch.setattr(workflow, "free_memory", lambda where: machine.free)
    inputs = DoublingPlan.prepare_inputs
    monkeypatch.setattr(DoublingPlan, "prepare_inputs", lambda plan, device: inputs(plan, "cpu"))
    return machine


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu():
    assert pick_device("auto") == "cpu"
    assert pick_device("cpu") == "cpu"
    message = "^device: expected a usable CUDA GPU for --device=cuda, got.*--device=cpu"
    with pytest.raises(UnsupportedError, match=message):
        pick_device("cuda")


def test_a_torch_device_is_its_kind_and_another_gpu_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kinds = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "cuda:1": "cuda"}
    assert {device: device_kind(device) for device in kinds} == kinds
    with pytest.raises(InvalidArgumentError, match=r"^device: expected the current device cuda:1"):
        device_kind("cuda:0")


def test_nothing_is_guessed_for_an_unknown_gpu(gpu, caplog):
    gpu.name = "NVIDIA H9000"
    with pytest.raises(UnknownNameError, match="H9000"):
        current_device_spec()
    with pytest.raises(UnknownNameError, match="H9000"):
        prepare(DoublingPlan(), RunOptions(device="cuda"))
    with caplog.at_level(logging.WARNING):
        assert planning_device() == H200
    assert "unknown GPU; model-driven choices assume an NVIDIA H200" in caplog.text


@pytest.mark.usefixtures("no_gpu")
def test_on_the_cpu():
    """Model-driven fields are resolved for the planning device; nothing is tuned or checked."""
    prepared = prepare(DoublingPlan(), RunOptions())
    assert prepared.plan.choice == round(H200.burst_tflops("bfloat16"))
    assert (prepared.device, prepared.tuning, prepared.check) == (None, {}, None)
    assert (prepared.stage.device_type, prepared.stage.log) == ("cpu", [])
    assert prepared.inputs[0].device.type == "cpu"
    with pytest.raises(UnsupportedError, match="expected a plan on a GPU, got the CPU"):
        prepared.require_device()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_the_check_runs_when_asked(error):
    prepared = prepare(DoublingPlan(error=error), RunOptions(check=True))
    assert prepared.check is not None and prepared.check.passed is (error == 0.0)
    assert prepared.stage.log == ["doubling"]


@pytest.mark.usefixtures("no_gpu")
def test_a_problem_beyond_the_memory_is_refused_before_anything_is_allocated(monkeypatch):
    allocated: list[str] = []
    inputs = DoublingPlan.prepare_inputs

    def noted(plan: DoublingPlan, device: Any) -> Any:
        allocated.append(str(device))
        return inputs(plan, device)

    monkeypatch.setattr(DoublingPlan, "prepare_inputs", noted)
    with pytest.raises(InvalidArgumentError) as caught:
        prepare(DoublingPlan(b=1 << 50), RunOptions(device="cpu", check=True))
    assert allocated == ["meta"]
    assert re.fullmatch(
        r"sizes: expected tensors that fit the .* of free main memory, got .* "
        rf"b={1 << 50} limit=1000 choice=790, which needs at least 4096 TiB",
        str(caught.value),
    )


def test_free_memory_is_the_least_of_machine_and_control_group(monkeypatch, tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:       99 kB\nMemAvailable:   10 kB\n")
    monkeypatch.setattr(workflow, "MEMORY_INFO", info)
    monkeypatch.setattr(workflow, "CONTROL_GROUP", tmp_path)
    assert workflow.free_memory("cpu") == 10240
    (tmp_path / "memory.current").write_text("1000\n")
    for most, expected in (("max", 10240), ("5000", 4000)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert workflow.free_memory("cpu") == expected
    # Files that were read count as used, and give way.
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 600\nactive_file 300\n")
    assert workflow.free_memory("cpu") == 4600
    monkeypatch.setattr(workflow, "MEMORY_INFO", tmp_path / "none")
    (tmp_path / "memory.max").write_text("max\n")
    assert workflow.free_memory("cpu") is None


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Notes the calls of the tuner instead of tuning."""
    calls: list[tuple[Any, ...]] = []

    def autotune(stage: Any, plan: Any, spec: Any, options: RunOptions) -> dict[str, str]:
        calls.append(("autotune", plan.b, spec.name, options.retune))
        stage.tiling = FakeTiling(rows=128)
        return {"doubling": "tuned"}

    def refine_plan(plan: Any, spec: Any, options: RunOptions) -> Any:
        calls.append(("refine", plan.b, spec.name, options.retune))
        return plan.copy(b=3)

    monkeypatch.setattr(autotune_module, "autotune", autotune)
    monkeypatch.setattr(autotune_module, "refine_plan", refine_plan)
    return calls


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_it_tunes_then_checks(tuning):
    prepared = prepare(DoublingPlan(), RunOptions(check=True))
    assert tuning == [("autotune", 8, "NVIDIA H200", False)]
    assert prepared.tuning == {"doubling": "tuned"}
    assert prepared.stage.tilings() == {"doubling": FakeTiling(rows=128)}
    assert (prepared.require_device(), prepared.plan.target.code) == (H200, "sm_90")
    assert prepared.check is not None and prepared.check.passed


@pytest.mark.usefixtures("gpu")
def test_refining_comes_first_and_retunes_once(tuning):
    prepared = prepare(DoublingPlan(), RunOptions(refine=True, retune=True))
    assert tuning == [("refine", 8, "NVIDIA H200", True), ("autotune", 3, "NVIDIA H200", False)]
    assert prepared.plan.b == 3


@pytest.mark.usefixtures("gpu", "tuning")
def test_refining_and_tuning_share_the_seconds(monkeypatch):
    now, given = [100.0], []

    def refine_plan(plan: Any, spec: Any, options: RunOptions) -> Any:
        now[0] += 12.0
        return plan

    def autotune(stage: Any, plan: Any, spec: Any, options: RunOptions) -> dict[str, str]:
        given.append(options.tune_seconds)
        return {}

    monkeypatch.setattr(workflow.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(autotune_module, "refine_plan", refine_plan)
    monkeypatch.setattr(autotune_module, "autotune", autotune)
    for seconds in (15.0, 10.0, None):
        prepare(DoublingPlan(), RunOptions(refine=True, tune_seconds=seconds))
    assert given == [3.0, 0.0, None]


def test_the_plan_is_made_for_the_target_of_the_gpu(gpu, tuning):
    gpu.name = "NVIDIA GeForce RTX 5090"
    prepared = prepare(DoublingPlan(), RunOptions(autotune=False))
    assert prepared.plan.target.code == "sm_120"
    assert prepared.stage.tilings() == {"doubling": FakeTiling(rows=16)}
    assert tuning == []
