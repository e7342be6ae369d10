"""The CuTe DSL runtime on a GPU: launches, shapes, streams, graphs, overhead, the cache."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.runtime.check import check_stage, poison_outputs
from mla_var3.runtime.composite import ConcurrentKernels
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.workflow import RunOptions, prepare

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.runtime import cute_kernel
from mla_var3.runtime.cute import launch as cute_launch
from mla_var3.runtime.cute.arguments import Int64Arg
from mla_var3.runtime.cute_kernel import CuteKernel, program_for
from tests.programs import run_program
from tests.unit.runtime.cute.cute_support import (
    ScaleAdd,
    ScalePlan,
    ScaleTiling,
    note_compilations,
    scale_add,
)

from .gpu_support import captured

pytestmark = pytest.mark.gpu

OVERHEAD_US = 10.0
SLEEP_CYCLES = 20_000_000


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return note_compilations(monkeypatch)


def planned(**fields: Any) -> tuple[ScalePlan, tuple[torch.Tensor, ...], CuteKernel]:
    plan = ScalePlan(**fields)
    inputs = plan.prepare_inputs("cuda")
    return plan, inputs, plan.plan(*inputs)


def expected(plan: ScalePlan, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (wanted,) = plan.reference_fn(*inputs)
    return wanted.to(getattr(torch, plan.dtype))


def check(plan: ScalePlan, inputs: tuple[torch.Tensor, ...], stage: CuteKernel) -> None:
    torch.cuda.synchronize()
    torch.testing.assert_close(stage.output_tensors[0], expected(plan, inputs))


# --- launching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_launch_computes_what_the_reference_does(dtype: str, with_bias: bool) -> None:
    plan, inputs, stage = planned(dtype=dtype, with_bias=with_bias, n=1001)
    check_stage(plan, inputs, stage).require()


def test_a_second_shape_takes_the_same_program(compilations: list[str]) -> None:
    for n in (1, 127, 128, 129, 100_003):
        plan, inputs, stage = planned(n=n, factor=float(n % 7))
        poison_outputs(stage)
        stage.launch()
        check(plan, inputs, stage)
    assert len(cute_kernel._programs) == 1
    assert len(compilations) == 1


def test_stages_that_share_a_program_keep_their_arguments() -> None:
    made = [planned(n=n) for n in (100, 200, 300)]
    for _ in range(3):
        for _, _, stage in made:
            poison_outputs(stage)
        for _, _, stage in made:
            stage.launch()
        for plan, inputs, stage in made:
            check(plan, inputs, stage)


def test_another_tiling_is_prepared_anew() -> None:
    plan, inputs, stage = planned()
    for threads in (128, 32, 512, 128):
        stage.tiling = ScaleTiling(threads=threads)
        poison_outputs(stage)
        stage.launch()
        check(plan, inputs, stage)


def test_the_program_takes_other_tensors_every_call() -> None:
    _, inputs, stage = planned(with_bias=False)
    host, args = stage._host_and_args(stage.tiling)
    program = program_for(scale_add, host, args, stage.tiling, inputs[0].device)
    for n in (5, 500, 50):
        x = torch.randn(n, device="cuda").to(torch.bfloat16)
        y = torch.full_like(x, torch.nan)
        program(x, y, None, n, Int64Arg(1), 3.0)
        torch.testing.assert_close(y, (x.float() * 3.0).to(torch.bfloat16))
    with pytest.raises(InvalidArgumentError, match="argument 0: expected a tensor on cuda"):
        program(x.cpu(), y, None, 1, Int64Arg(1), 3.0)


def test_a_strided_input_through_an_int64() -> None:
    x = torch.randn(4000, device="cuda").to(torch.bfloat16)
    y = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
    tiling = ScaleTiling()
    args = (x, y, None, 1000, Int64Arg(4), 2.0)
    program_for(scale_add, ScaleAdd(128), args, tiling, x.device)(*args)
    torch.testing.assert_close(y, (x[::4].float() * 2.0).to(torch.bfloat16))


def test_a_kernel_for_another_architecture_is_refused_by_name() -> None:
    capability = torch.cuda.get_device_capability()
    other = "sm_100a" if capability == (9, 0) else "sm_90a"
    _, _, stage = planned(requires_arch=other)
    with pytest.raises(UnsupportedError, match=torch.cuda.get_device_name()):
        stage.launch()
    plan = ScalePlan(requires_arch=cute_launch.arch_of_device(torch.device("cuda", 0)))
    check_stage(plan, inputs := plan.prepare_inputs("cuda"), plan.plan(*inputs)).require()


def test_a_launch_that_cuda_refuses_is_an_error_by_name() -> None:
    _, _, stage = planned(n=0)  # an empty grid
    with pytest.raises(UnsupportedError, match="scale_add: .*cudaError"):
        stage.launch()


# --- streams and graphs ---------------------------------------------------------------------------


def test_the_current_stream_is_used() -> None:
    """On a side stream behind a long wait, the result must not be there yet; then it must."""
    plan, inputs, stage = planned()
    stage.launch()
    torch.cuda.synchronize()
    stage.output_tensors[0].fill_(7.0)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        stage.launch()
    early = stage.output_tensors[0].clone()
    torch.cuda.current_stream().synchronize()
    assert torch.all(early == 7.0)
    side.synchronize()
    check(plan, inputs, stage)
    stage.output_tensors[0].fill_(7.0)
    torch.cuda.synchronize()
    stage.launch()
    torch.cuda.current_stream().synchronize()
    check(plan, inputs, stage)


def test_a_graph_follows_its_inputs() -> None:
    plan, inputs, stage = planned()
    graph = captured(stage.launch)
    for value in (1.0, -3.0):
        inputs[0].fill_(value)
        poison_outputs(stage)
        graph.replay()
        check(plan, inputs, stage)


def test_a_graph_outlives_the_stage_and_its_tiling() -> None:
    plan, inputs, stage = planned()
    output = stage.output_tensors[0]
    graph = captured(stage.launch)
    del stage
    gc.collect()
    torch.cuda.empty_cache()
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output, expected(plan, inputs))


def test_a_first_launch_inside_a_capture_is_refused(compilations: list[str]) -> None:
    _, _, stage = planned()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(UnsupportedError, match="one launch before the capture"),
        torch.cuda.graph(graph),
    ):
        stage.launch()
    assert compilations == []
    torch.cuda.synchronize()
    stage.launch()


def test_concurrent_members_in_a_graph() -> None:
    made = [planned(n=n) for n in (1000, 3000)]
    group = ConcurrentKernels(_name="both", concurrent_kernels=[stage for _, _, stage in made])
    graph = captured(group.launch)
    poison_outputs(group)
    graph.replay()
    for plan, inputs, stage in made:
        check(plan, inputs, stage)


def test_the_timer_captures_it() -> None:
    _, _, stage = planned(n=1 << 20)
    assert time_gpu(stage.launch, runs=10, graph=True).median_us > 0


# --- host time ------------------------------------------------------------------------------------


def host_us(launch: Callable[[], None], calls: int = 200, rounds: int = 20) -> float:
    """Host time of one call, the fastest round: fewer calls than the launch queue holds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            launch()
        best = min(best, (time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return best


def test_a_prepared_launch_is_cheap_for_the_host() -> None:
    _, _, stage = planned()
    stage.launch()
    assert host_us(stage.launch) < OVERHEAD_US


def test_a_call_with_other_arguments_is_cheap_for_the_host() -> None:
    _, inputs, stage = planned()
    host, args = stage._host_and_args(stage.tiling)
    program = program_for(scale_add, host, args, stage.tiling, inputs[0].device)
    program(*args)
    assert host_us(lambda: program(*args)) < OVERHEAD_US


# --- tuning and the cache -------------------------------------------------------------------------


def test_tuning_chooses_and_keeps_the_failure() -> None:
    prepared = prepare(ScalePlan(n=1 << 20), RunOptions(device="cuda", check=True))
    assert prepared.check is not None and prepared.check.passed
    tuning = prepared.tuning["scale_add"]
    assert not prepared.stage.tilings()["scale_add"].unknown  # type: ignore[attr-defined]
    assert "undefined_name" in tuning.path.read_text()


RELOAD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from tests.unit.runtime.cute.cute_support import ScalePlan
from mla_var3.runtime import cute_kernel
made = []
original = cute_kernel._trace_and_compile
cute_kernel._trace_and_compile = lambda *a: made.append(1) or original(*a)
plan = ScalePlan()
inputs = plan.prepare_inputs("cuda")
stage = plan.plan(*inputs)
stage.launch()
torch.cuda.synchronize()
(wanted,) = plan.reference_fn(*inputs)
same = torch.allclose(stage.output_tensors[0].float(), wanted, rtol=1e-2, atol=1e-2)
print(json.dumps({"made": len(made), "same": same}))
"""


def test_a_new_process_loads_the_program_from_the_disk(
    repo_root: Path, package_environment: dict[str, str], tmp_path: Path
) -> None:
    environment = {
        **package_environment,
        # Packages may lie where only the path of this process says: it is passed on as it is.
        "PYTHONPATH": os.pathsep.join([package_environment["PYTHONPATH"], *filter(None, sys.path)]),
        "HYPER_MLA_CACHE_DIR": str(tmp_path / "shared"),
    }
    outcomes = []
    for _ in range(2):
        done = run_program([sys.executable, "-c", RELOAD, repo_root], env=environment)
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout.splitlines()[-1]))
    assert outcomes == [{"made": 1, "same": True}, {"made": 0, "same": True}]
