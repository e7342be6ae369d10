"""Plans: parameters, copies for targets, planning without tensors, prediction."""

import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.op.cost import Cost
from mla_var3.op.mla import cost
from mla_var3.runtime.paths import find_kernel, plan_class
from tests.unit.runtime.runtime_support import DoublingPlan, FakeTiling

pytest.importorskip("cuda.tile")

DESIGNS = ("flash_attention", "flash_mla", "flash_mla_split_kv", "mla_var6_plus")
H200 = (790.0, 4300.0)


def make(design: str, **fields: Any) -> Any:
    sizes = {"b": 4, "s": 2, "t": 256, "h": 16}
    return plan_class(find_kernel(design))(**{**sizes, **fields})


def test_a_default_tiling_becomes_that_of_the_target_unless_it_is_pinned():
    tilings = {"sm_120": FakeTiling(rows=16), "sm_90": FakeTiling(), "sm_77": FakeTiling()}
    for target, tiling in tilings.items():
        assert DoublingPlan().for_target(target).tiling == tiling
    pinned = DoublingPlan().pin("tiling")
    assert pinned.for_target("sm_120").tiling == FakeTiling()
    assert pinned.copy(b=2).for_target("sm_120").tiling == FakeTiling()


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("design", DESIGNS)
def test_every_kernel_of_a_design_gets_a_tiling_that_fits(design, target):
    """What for_target chooses is legal there, and the stages know the target too."""
    for s in (2, 100):
        plan = make(design, s=s, **({"n": 128} if design == "mla_var6_plus" else {}))
        chosen = plan.for_target(target)
        for kernel in chosen.plan(*chosen.prepare_inputs("meta")).kernels():
            assert kernel.plan.target.code == target
            assert kernel.tiling.validate(kernel.plan)


def test_model_driven_fields_are_resolved_and_pinned_ones_kept():
    free = make("mla_var6_plus", b=32, s=32, t=4096, h=128)
    resolved = free.resolve(*H200)
    assert free.n is None
    assert 0 < resolved.n < 4096 and resolved.n % 128 == 0
    assert free.copy(n=7).resolve(*H200).n == 7


def test_the_split_count_follows_the_device():
    free = make("flash_mla_split_kv", b=1, s=1, t=32768, h=16)
    by_sms = sorted(load_devices().values(), key=lambda spec: spec.sm_count)
    counts = [free.on_device(spec).splits for spec in by_sms]
    assert free.splits is None and min(counts) >= 1
    assert counts[-1] >= counts[0]
    assert free.copy(splits=3).on_device(device_spec("NVIDIA H200")).splits == 3


@pytest.mark.parametrize("design", DESIGNS)
def test_a_small_copy_for_the_cpu(design):
    fields = {"n": 100} if design == "mla_var6_plus" else {}
    big = make(design, b=64, s=16, t=8192, h=128, causal=False, dtype="float16", **fields)
    small = big.cpu_check_plan()
    assert (small.b, small.s, small.t, small.h) == (2, 5, 150, 24)
    assert (small.dtype, small.causal) == ("float16", False)
    tiny = make(design, b=1, s=1, t=1, h=8, **({"n": 1} if fields else {}))
    assert tiny.cpu_check_plan().t == 1


def test_neighbours_of_the_window():
    plan = make("mla_var6_plus", t=4096, n=1024)
    windows = [other.n for other in plan.refinements()]
    assert windows == sorted(set(windows))
    assert (windows[0], windows[-1]) == (0, 4096) and 1024 not in windows
    assert make("flash_mla").refinements() == []


def tensors_of(stage: Any) -> list[torch.Tensor]:
    return [
        tensor
        for kernel in stage.kernels()
        for tensor in (
            *kernel.input_tensors,
            *kernel.output_tensors,
            *(a for a in kernel.args_fn(kernel.tiling) if isinstance(a, torch.Tensor)),
        )
    ]


@pytest.mark.parametrize("design", DESIGNS)
def test_an_empty_plan_allocates_nothing(design):
    """A batch whose tensors would take terabytes: every tensor is a shape only."""
    plan = make(design, b=1024, s=64, t=65536, h=128)
    make(design, b=1).plan_empty(*H200)  # what torch imports on first use is not ours
    tracemalloc.start()
    stage = plan.plan_empty(*H200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensors = tensors_of(stage)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert sum(tensor.nbytes for tensor in tensors) > 1 << 36
    assert peak < 8 << 20
    assert stage.device_type == "meta"


@pytest.mark.parametrize("design", DESIGNS)
def test_an_empty_plan_has_the_shapes_of_a_real_one(design):
    plan = make(design, t=16, lengths=(16, 0, 1, 7)).resolve(*H200)
    real = plan.plan(*plan.prepare_inputs("cpu"))
    empty = plan.plan_empty(*H200)
    assert [kernel.name for kernel in real.kernels()] == [kernel.name for kernel in empty.kernels()]
    for have, want in zip(tensors_of(empty), tensors_of(real), strict=True):
        assert (have.shape, have.dtype, have.stride()) == (want.shape, want.dtype, want.stride())


def costs(plan: Any) -> list[Cost]:
    """The cost model's own word on the stages of a plan."""
    problem = plan.problem()
    if plan.name == "flash_mla_split_kv":
        return list(cost.flash_mla_split_kv_stages(problem, plan.splits))
    if plan.name == "mla_var6_plus":
        first = cost.attention_block_specialized_cost(problem, plan.n)
        return [first, cost.decompress_combine_cost(problem)]
    return [getattr(cost, f"{plan.name}_cost")(problem)]


@pytest.mark.parametrize("lengths", [None, (256, 0, 1, 77)], ids=["full", "mixed"])
@pytest.mark.parametrize("design", DESIGNS)
def test_prediction_is_the_cost_model(design, lengths):
    plan = make(design, lengths=lengths).resolve(*H200)
    stage = plan.plan_empty(*H200)
    expected = costs(plan)
    assert [kernel.cost() for kernel in stage.kernels()] == expected
    assert stage.cost() == sum(expected[1:], start=expected[0])
    assert stage.predict_us(*H200) == pytest.approx(sum(c.time_us(*H200) for c in expected))
    flops, nbytes = plan._algorithmic_flops_bytes(plan.tiling)
    assert (flops, nbytes) == pytest.approx((stage.cost().flops, stage.cost().bytes))


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (4096, 75), (8192, 150), (None, 75)])
def test_a_small_copy_keeps_the_share_of_the_window(n, expected):
    """Also where the pinned window is larger than the small problem."""
    assert make("mla_var6_plus", t=8192, n=n).cpu_check_plan().n == expected


def test_a_plan_of_a_script_is_named_after_it(monkeypatch):
    plan_type = type("Own", (DoublingPlan,), {"__module__": "__main__"})
    program = SimpleNamespace(__file__="somewhere/own_kernel.py", __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert plan_type().name == "own_kernel"
    program.__spec__ = SimpleNamespace(name="tools.other_kernel")  # python -m tools.other_kernel
    assert plan_type().name == "other_kernel"
