"""The runtime on a GPU: streams, graphs, large tensors, tuning and event mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_var3.errors import InvalidArgumentError
from mla_var3.op.compare import compare
from mla_var3.op.mla.inputs import MlaInputs, make_inputs
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.reference import reference_decompressed, reference_from_latent
from mla_var3.runtime.check import check_stage, poison_outputs
from mla_var3.runtime.composite import ConcurrentKernels, KernelPipeline
from mla_var3.runtime.measure import time_gpu
from mla_var3.runtime.paths import find_kernel, plan_class
from mla_var3.runtime.profiling.event import event_profile_plan
from mla_var3.runtime.workflow import RunOptions, prepare

from .gpu_support import captured, outputs_of, require_equal

pytest.importorskip("cuda.tile")
pytestmark = pytest.mark.gpu

SMALL = {"b": 3, "s": 4, "t": 300, "h": 16, "lengths": (300, 0, 77), "seed": 0}
GIB = 1 << 30
Members = list[tuple[Any, tuple[Tensor, ...], Any]]
"""Plans, each with its inputs and its stage."""


def make(design: str, **fields: Any) -> Any:
    major, minor = torch.cuda.get_device_capability()
    plan = plan_class(find_kernel(design))(**{**SMALL, **fields})
    return plan.for_target(f"sm_{major}{minor}")


def planned(design: str, **fields: Any) -> tuple[Any, tuple[Tensor, ...], Any]:
    plan = make(design, **fields)
    inputs = plan.prepare_inputs("cuda")
    return plan, inputs, plan.plan(*inputs)


def refill(inputs: tuple[Tensor, ...], plan: Any, seed: int) -> None:
    """Other values in the same tensors."""
    for tensor, fresh in zip(inputs, plan.copy(seed=seed).prepare_inputs("cuda"), strict=True):
        tensor.copy_(fresh)


def two_kernels() -> tuple[Members, ConcurrentKernels]:
    members = [planned("flash_mla"), planned("flash_attention")]
    stages = [stage for _, _, stage in members]
    group = ConcurrentKernels(_name="both", concurrent_kernels=stages, stream_priorities=[-1, 0])
    return members, group


def test_concurrent_kernels_compute_what_sequential_ones_do() -> None:
    members, group = two_kernels()
    for _, _, stage in members:
        stage.launch()
    wanted = outputs_of(group)
    for _ in range(20):
        poison_outputs(group)
        group.launch()
        require_equal(outputs_of(group), wanted)
    assert len({stream.cuda_stream for stream in group._streams}) == 2
    for plan, inputs, stage in members:
        check_stage(plan, inputs, stage).require()


def test_the_group_waits_for_what_came_before_and_is_waited_for() -> None:
    """Inputs written just before and outputs read just after, on the current stream only."""
    members, group = two_kernels()
    group.launch()
    wanted = outputs_of(group)
    kept = [[tensor.clone() for tensor in inputs] for _, inputs, _ in members]
    for _ in range(20):
        for _, inputs, _ in members:
            for tensor in inputs[:-1]:
                tensor.zero_()
        torch.cuda._sleep(2_000_000)
        for (_, inputs, _), values in zip(members, kept, strict=True):
            for tensor, value in zip(inputs, values, strict=True):
                tensor.copy_(value)
        group.launch()
        copies = [output.clone() for output in group.output_tensors]
        poison_outputs(group)
        torch.cuda.synchronize()
        require_equal(copies, wanted)


def test_a_group_in_a_graph_follows_its_inputs() -> None:
    follows_its_inputs_in_a_graph(*two_kernels())


def follows_its_inputs_in_a_graph(members: Members, whole: Any) -> None:
    graph = captured(whole.launch)
    for seed in (1, 2):
        for plan, inputs, _ in members:
            refill(inputs, plan, seed)
        poison_outputs(whole)
        graph.replay()
        replayed = outputs_of(whole)
        whole.launch()
        require_equal(replayed, outputs_of(whole))
        for plan, inputs, stage in members:
            check_stage(plan, inputs, stage).require()


def test_a_group_within_a_pipeline_within_a_graph() -> None:
    """Nested: a group between stages, one of its members a pipeline."""
    _, _, before = planned("flash_attention")
    _, _, split = planned("flash_mla_split_kv", splits=3)
    plan, inputs, mix = planned("mla_var6_plus", n=100)
    group = ConcurrentKernels(_name="g", concurrent_kernels=[split, mix])
    stage = KernelPipeline(_name="p", stages=[before, group])
    stage.launch()
    wanted = outputs_of(group)
    graph = captured(stage.launch)
    poison_outputs(stage)
    graph.replay()
    require_equal(outputs_of(group), wanted)
    check_stage(plan, inputs, mix).require()


@pytest.mark.parametrize(
    ("design", "own"), [("mla_var6_plus", {"n": 100}), ("flash_mla_split_kv", {"splits": 4})]
)
def test_a_pipeline_in_a_graph(design: str, own: dict[str, int]) -> None:
    plan, inputs, stage = planned(design, **own)
    follows_its_inputs_in_a_graph([(plan, inputs, stage)], stage)


def test_launches_go_to_the_current_stream() -> None:
    _, _, stage = planned("flash_mla")
    stage.launch()
    wanted = outputs_of(stage)
    side = torch.cuda.Stream()
    poison_outputs(stage)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        stage.launch()
        copies = [output.clone() for output in stage.output_tensors]
    side.synchronize()
    require_equal(copies, wanted)


def test_the_last_request_of_a_cache_with_more_than_2_to_the_31_elements() -> None:
    """Offsets beyond 32 bits; only the last request is compared, so the reference stays small."""
    _, total = torch.cuda.mem_get_info()
    if total < 24 * GIB:
        pytest.skip(f"needs a GPU with 24 GiB of memory, this one has {total / GIB:.0f}")
    plan = make("flash_attention", b=33, s=1, t=4096, h=128, lengths=None)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=plan.torch_dtype, device="cuda")
        return values.normal_(generator=generator)

    keys, values = (normal(plan.b, plan.h, plan.t, plan.d) for _ in range(2))
    assert keys[-1].storage_offset() == 2**31
    queries = normal(plan.b, plan.s, plan.h, plan.d), normal(plan.b, plan.s, plan.h, plan.p)
    lengths = torch.full((plan.b,), plan.t, dtype=torch.int32, device="cuda")
    inputs = (*queries, keys, values, normal(plan.b, plan.t, plan.p), lengths)
    stage = plan.plan(*inputs)
    poison_outputs(stage)
    stage.launch()
    torch.cuda.synchronize()
    for request in (0, plan.b - 1):
        one = slice(request, request + 1)
        scale = plan.problem().softmax_scale
        exact, rounded = (
            reference_decompressed(
                *(tensor[one] for tensor in inputs),
                causal=True, scale=scale, compute_dtype=compute_dtype,
            )
            for compute_dtype in (torch.float32, plan.torch_dtype)
        )  # fmt: skip
        for output, wanted, baseline in zip(stage.output_tensors, exact, rounded, strict=True):
            allowed = 2 * compare(baseline, wanted).relative_frobenius + 1e-5
            assert compare(output[one], wanted).relative_frobenius <= allowed, request


@pytest.mark.parametrize("design", ["flash_attention", "flash_mla", "mla_var6_plus"])
def test_cpu_tensors_among_cuda_tensors_are_named(design: str) -> None:
    plan, inputs, _ = planned(design, **({"n": 50} if design == "mla_var6_plus" else {}))
    for index in range(1, len(inputs)):
        mixed = [tensor.cpu() if i == index else tensor for i, tensor in enumerate(inputs)]
        expected = r"^\w+: expected a tensor on cuda:0, got one on cpu$"
        with pytest.raises(InvalidArgumentError, match=expected):
            plan.plan(*mixed)


def test_tuning_writes_a_cache_that_the_next_run_uses() -> None:
    options = RunOptions(device="cuda", tune_max_iters=2, check=True)
    first = prepare(make("flash_attention"), options)
    assert first.check is not None
    assert first.check.passed
    [tuning] = first.tuning.values()
    assert not tuning.from_cache
    assert tuning.path.is_file()
    stored = json.loads(tuning.path.read_text())
    timed = [entry for entry in stored["results"] if entry["status"] == "ok"]
    assert 1 <= len(timed) <= 2
    assert all(entry["timing"]["median_us"] > 0 for entry in timed)
    written = tuning.path.stat().st_mtime_ns

    again = prepare(make("flash_attention"), options)
    [reused] = again.tuning.values()
    assert reused.from_cache
    assert reused.best == tuning.best
    assert tuning.path.stat().st_mtime_ns == written
    assert again.stage.tilings()["flash_attention"].to_dict() == tuning.best


def test_tuning_a_pipeline_leaves_it_correct() -> None:
    options = RunOptions(device="cuda", tune_max_iters=1, check=True)
    prepared = prepare(make("mla_var6_plus", n=100), options)
    assert set(prepared.tuning) == {"attention_block_specialized", "decompress_combine"}
    assert prepared.check is not None
    prepared.check.require()


def test_event_mode_writes_everything(tmp_path: Path) -> None:
    options = RunOptions(device="cuda", tune_max_iters=1, check=True)
    plan = make("mla_var6_plus", n=100)
    result = event_profile_plan(plan, tmp_path / "run", bench_runs=5, options=options)
    stages = ("attention_block_specialized", "decompress_combine")
    assert result.get_total_time_us() > 0
    assert tuple(stage.name for stage in result.stages) == stages
    assert result.record["above_roofline"] is False
    folder = tmp_path / "run"
    for name in ("report.md", "params.json"):
        assert (folder / name).stat().st_size > 0
    for stage in stages:
        assert json.loads((folder / "tiling" / f"{stage}.json").read_text())
        assert (folder / "tiling" / stage / "autotuning.json").is_file()
        assert list((folder / "compiled" / stage).glob("*.cubin"))
    record = json.loads((folder / "params.json").read_text())
    assert record["total"]["extra"]["timing"]["runs"] == 5
    assert record["device"]


@pytest.mark.parametrize("graph", [False, True])
def test_timing(graph: bool) -> None:
    source = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    timing = time_gpu(lambda: target.copy_(source), graph=graph, max_seconds=0.2)
    assert 0 < timing.min_us <= timing.p10_us <= timing.median_us <= timing.p90_us
    assert timing.runs >= 10
    assert bool((target == 1).all())


def test_the_reference_is_that_of_the_cpu_whatever_the_tf32_setting() -> None:
    problem = MlaProblem(b=3, s=4, t=70, h=16, lengths=(70, 0, 33))
    inputs = make_inputs(problem, "cpu", seed=9)
    on_gpu = MlaInputs(**{name: tensor.cuda() for name, tensor in vars(inputs).items()})
    expected = reference_from_latent(inputs, problem)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        found = reference_from_latent(on_gpu, problem)
    finally:
        matmul.fp32_precision = before
    for one, other in zip(found, expected, strict=True):
        assert compare(one.cpu(), other).relative_frobenius < 2e-6
