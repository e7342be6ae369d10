"""Stages that are kept by key: later calls get the pointers that a stage of their own would."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass", reason="needs the cute extra: nvidia-cutlass-dsl")

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.kernel.cute_python.mla.decompressed.stage import DecompressedTiling
from mla_var3.kernel.cute_python.mla.hopper import stage_call
from mla_var3.runtime.call_state import CALL_STATE
from mla_var3.runtime.paths import find_kernel, plan_class

SIZES: dict[str, Any] = {"b": 2, "s": 3, "t": 300, "h": 1, "seed": 0}
PLANS = {
    "flash_attention": {},
    "mla_var6_plus": {"n": 100},
    "mla_var6_plus_v5": {"n": 100},
    "whole window": {"n": 300},
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for the GPU: the kernels that are loaded, and the pointers of each launch."""
    found = SimpleNamespace(loaded=[], addresses=[])

    def program_for(kernel_fn: Any, *others: Any) -> Any:
        def launch(*addresses: int) -> None:
            found.addresses.append((kernel_fn.__name__, addresses))

        found.loaded.append(kernel_fn.__name__)
        return SimpleNamespace(repeated=lambda *arguments: launch)

    monkeypatch.setattr(stage_call, "program_for", program_for)
    monkeypatch.setattr(stage_call, "require_arch", lambda *arguments: None)
    CALL_STATE.clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(stage_call, "_at_once", lambda steps, _: stage_call._in_order(steps))
    return found


def plan_of(name: str, **fields: Any) -> Any:
    kernel = "mla_var6_plus" if name == "whole window" else name
    made = plan_class(find_kernel(kernel, language="cute-dsl"))(
        **{**SIZES, **PLANS.get(name, {}), **fields}
    )
    return made.on_device(device_spec("NVIDIA H200"))


def pointers(stage: Any) -> list[tuple[str, tuple[int, ...]]]:
    """What a stage of its own would pass."""
    # Addresses are compared after all are made.
    alive = [(kernel.name, kernel.args_fn(kernel.tiling)) for kernel in stage.kernels()]
    return [
        (name, tuple(0 if x is None else x.data_ptr() for x in arguments if is_pointer(x)))
        for name, arguments in alive
    ]


def is_pointer(argument: Any) -> bool:
    return argument is None or isinstance(argument, Tensor)


def test_operands_that_were_the_same_memory_once(launches):
    """A stage built on one tensor in two places does not serve calls with two tensors."""
    plan = plan_of("flash_attention")
    q_nope, q_rope, keys, _, *others = plan.prepare_inputs("cpu")
    for values in (keys, keys.clone()):
        given = (q_nope, q_rope, keys, values, *others)
        launches.addresses.clear()
        stage_call.run_stage("key", given, lambda given=given: plan.plan(*given))
        passed = {address for _, each in launches.addresses for address in each}
        assert {keys.data_ptr(), values.data_ptr()} <= passed


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_kept_stage_passes_what_a_new_one_would(name, splits, launches):
    plan = plan_of(name)
    field = "tiling" if name == "flash_attention" else "decompressed_tiling"
    plan = plan.copy(**{field: DecompressedTiling(splits=splits)})
    first = plan.prepare_inputs("cpu")
    second = tuple(tensor.clone() for tensor in first)
    stage_call.run_stage("key", first, lambda: plan.plan(*first))
    launches.addresses.clear()

    def never() -> Any:
        raise AssertionError("built again")

    outputs = stage_call.run_stage("key", second, never)
    stage = plan.plan(*second)
    wanted = pointers(stage)
    assert [kernel for kernel, _ in launches.addresses] == [kernel for kernel, _ in wanted]
    operands = {tensor.data_ptr() for tensor in second if tensor.numel()}
    own: dict[int, int] = {}
    for (_, got), (_, fresh) in zip(launches.addresses, wanted, strict=True):
        assert len(got) == len(fresh)
        for address, expected in zip(got, fresh, strict=True):
            if expected in operands or expected == 0:
                assert address == expected
            else:  # memory of the call: the same one wherever the new stage has the same one
                assert own.setdefault(expected, address) == address
    assert len(set(own.values())) == len(own)
    for output, expected in zip(outputs, stage.output_tensors, strict=True):
        assert own[expected.data_ptr()] == output.data_ptr()
        assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


def test_programs_are_loaded_once_for_many_keys(launches):
    for b in (2, 3):
        plan = plan_of("mla_var6_plus", b=b).copy(decompressed_tiling=DecompressedTiling(splits=1))
        inputs = plan.prepare_inputs("cpu")
        stage_call.run_stage(b, inputs, functools.partial(plan.plan, *inputs))
    names = ["flash_mla", "decompressed_attention", "decompress_combine"]
    assert launches.loaded == names
    half = plan_of("mla_var6_plus", dtype="float16").copy(
        decompressed_tiling=DecompressedTiling(splits=1)
    )
    inputs = half.prepare_inputs("cpu")
    stage_call.run_stage("half", inputs, lambda: half.plan(*inputs))
    assert launches.loaded == names * 2


def test_other_strides_are_another_key(launches):
    plan = plan_of("flash_attention")
    inputs = list(plan.prepare_inputs("cpu"))
    built = 0

    def build() -> Any:
        nonlocal built
        built += 1
        return plan.plan(*inputs)

    for _ in range(2):
        stage_call.run_stage("key", inputs, build)
    keys = torch.zeros(2, 1, 310, 128, dtype=torch.bfloat16)
    inputs[2] = keys[:, :, :300]
    for _ in range(2):
        stage_call.run_stage("key", inputs, build)
    assert built == 2


def test_an_unaligned_pointer_is_refused_beside_a_known_key(launches):
    plan = plan_of("flash_attention")
    inputs = list(plan.prepare_inputs("cpu"))
    stage_call.run_stage("key", inputs, lambda: plan.plan(*inputs))
    odd = torch.zeros(inputs[0].numel() + 1, dtype=torch.bfloat16)[1:].view(inputs[0].shape)
    inputs[0] = odd
    with pytest.raises(InvalidArgumentError, match="q_nope: expected a pointer aligned"):
        stage_call.run_stage("key", inputs, lambda: plan.plan(*inputs))


def test_a_view_that_is_no_operand_is_refused(launches):
    """The plan of a prefix cuts its own tokens off: those have to be operands themselves."""
    plan = plan_of("mla_var6_plus_v6", prefix=128)
    inputs = plan.prepare_inputs("cpu")
    with pytest.raises(InvalidArgumentError, match="operands: expected every view"):
        stage_call.run_stage("key", inputs, lambda: plan.plan(*inputs))


def test_the_oldest_stage_is_evicted(launches, monkeypatch):
    monkeypatch.setattr(stage_call._kept, "maxsize", 3)
    plan = plan_of("flash_attention")
    inputs = plan.prepare_inputs("cpu")
    built: list[int] = []

    def run(key: int) -> None:
        def build() -> Any:
            built.append(key)
            return plan.plan(*inputs)

        stage_call.run_stage(key, inputs, build)
        assert len(stage_call._kept) <= 3

    for key in (0, 1, 2, 3, 1, 2, 3, 0, 2):
        run(key)
    assert built == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(("s", "t", "h"), [(300, 300, 2), (1, 900, 2), (600, 700, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_request_alone_is_launched_as_by_the_plan(monkeypatch, s, t, h, causal) -> None:
    """On keys and values with other strides: those inside of an engine's tensors."""
    from mla_var3.kernel.cute_python.mla.decompressed import stage as call
    from mla_var3.kernel.cute_python.mla.latent import call as programs

    launched: list[Any] = []

    def program_for(kernel_fn: Any, host: Any, args: Any, tiling: Any, device: Any) -> Any:
        return lambda *arguments: launched.append((host, type(args)(*arguments)))

    monkeypatch.setattr(programs, "program_for", program_for)
    monkeypatch.setattr(programs, "require_arch", lambda *arguments: None)
    monkeypatch.setattr(call, "sm_count_of", lambda index: 132)
    CALL_STATE.clear()
    plan = plan_of("flash_attention", b=1, s=s, t=t, h=h, causal=causal)
    scale = plan.problem().softmax_scale
    q_nope, q_rope, length, keys, values = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (
            ((s, h, 128), torch.bfloat16), ((s, h, 64), torch.bfloat16), ((1,), torch.int32),
            ((t, h, 192), torch.bfloat16), ((t, h, 256), torch.bfloat16),
        )
    )  # fmt: skip
    o, lse = torch.empty_like(q_nope), torch.empty((s, h), device="meta")
    call.attend_request(
        q_nope, q_rope, keys[..., :128], values[..., 128:], keys[:, 0, 128:], length, o, lse,
        causal=causal, scale=scale,
    )  # fmt: skip
    (stage,) = plan.plan(*plan.prepare_inputs("meta")).kernels()
    expected = stage.args_fn(stage.tiling)
    host, found = launched[0]
    assert vars(host) == vars(stage.host_fn(stage.tiling))
    strides = {
        "key_token": h * 192, "key_head": 192, "value_row": h * 256, "value_head": 256,
        "rope_token": h * 192,
    }  # fmt: skip
    for name, value in found._asdict().items():
        wanted = getattr(expected, name)
        if isinstance(value, Tensor):
            assert value.dtype == wanted.dtype, name
        elif name in strides:
            assert int(getattr(value, "value", value)) == strides[name]
        elif not name.endswith("_request"):  # one request has no stride
            assert value == pytest.approx(wanted), name
