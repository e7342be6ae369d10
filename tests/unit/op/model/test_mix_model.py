"""The model of the mix on shared SMs: its parts by hand, its choices against brute force."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.cost import NOTHING
from mla_var3.op.mla.cost import (
    attention_block_specialized_cost,
    decompressed_bytes,
    flash_attention_cost,
    flash_mla_cost,
    output_up_projection_cost,
    query_projection_cost,
)
from mla_var3.op.mla.model import parameters as parameters_module
from mla_var3.op.mla.model.mix import MixModel, MixWork, mix_work, part_times_us
from mla_var3.op.mla.model.parameters import (
    Parameter,
    derived_parameters,
    mix_parameters,
    read_parameters,
)
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import FP8, PLAIN

H200 = derived_parameters(device_spec("H200"))
# Round numbers of no device: 10 SMs, of which a few draw most of the bandwidth.
TOY = replace(
    H200.with_values(
        {
            "latent_tflops_per_sm": 2.0,
            "heads_tflops_per_sm": 1.0,
            "chip_tflops": 18.0,
            "stream_gbps_per_sm": 40.0,
            "stream_gbps": 200.0,
            "stream_sharpness": 3.0,
            "together": 0.8,
            "starvation": 0.5,
            "launch_us": 5.0,
        }
    ),
    sm_count=10,
)
PROBLEM = MlaProblem(b=4, s=16, t=512, h=8, d=32, p=16, k=128)
RAGGED = replace(PROBLEM, lengths=(512, 0, 100, 300))


@pytest.mark.parametrize("name", load_devices())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_a_fit_the_device_table_gives_everything(name, dtype):
    spec = device_spec(name)
    found = derived_parameters(spec, dtype)
    assert found.chip_tflops.value == spec.burst_tflops(dtype)
    assert found.stream_gbps.value == spec.burst_gbps
    whole = found.latent_tflops_per_sm.value * spec.sm_count
    assert whole == pytest.approx(found.chip_tflops.value)
    assert not found.fitted
    for parameter in found.parameters.values():
        assert parameter.source and parameter.error is None
    measured = "burst_dram_bw_GBps" in spec
    assert found.stream_gbps.origin == ("measured" if measured else "vendor")
    for guess in ("stream_gbps_per_sm", "stream_sharpness", "together", "starvation", "launch_us"):
        assert found.parameters[guess].origin == "assumed"


def test_bandwidth_is_proportional_first_and_level_last():
    curve = [TOY.bandwidth_gbps(sms) for sms in range(200)]
    assert curve[0] == 0.0
    assert curve[1] == pytest.approx(40.0, rel=0.01)
    assert curve[199] == pytest.approx(200.0, rel=0.001) and curve[199] <= 200.0
    steps = [after - before for before, after in itertools.pairwise(curve)]
    assert all(step >= 0 for step in steps)
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(steps))
    # Where both limits are equal the sharpness alone says how much is lost.
    assert TOY.bandwidth_gbps(5) == pytest.approx(200.0 * 2 ** (-1 / 3))


@pytest.mark.parametrize(
    ("name", "value"),
    [("chip_tflops", 0.0), ("stream_gbps", -1.0), ("launch_us", -1.0),
     ("chip_tflops", math.nan), ("together", -0.1), ("starvation", 1.01)],
)  # fmt: skip
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected"):
        TOY.with_values({name: value})
    with pytest.raises(InvalidArgumentError, match=f"^{name}: expected a Parameter, got 5.0"):
        replace(TOY, **{name: 5.0})  # type: ignore[arg-type]


def test_fits_survive_a_file_and_are_used_for_their_own_device_only(tmp_path, monkeypatch):
    path = tmp_path / "rates.json"
    fitted = replace(H200, launch_us=Parameter(4.0, "fitted", "a test", 0.1))
    path.write_text(json.dumps([H200.to_dict() | {"dtype": "float16"}, fitted.to_dict()]))
    assert read_parameters(path)[1] == fitted and fitted.fitted
    spec, other = device_spec("H200"), device_spec("B200")
    assert mix_parameters(spec, "bfloat16", path) == fitted
    with pytest.raises(InvalidArgumentError, match="expected parameters of NVIDIA B200"):
        mix_parameters(other, "bfloat16", path)
    # As the file that ships.
    monkeypatch.setattr(parameters_module, "shipped_path", lambda: path)
    path.write_text(json.dumps([fitted.to_dict()]))
    assert mix_parameters(spec) == fitted
    assert mix_parameters(spec, "float16") == derived_parameters(spec, "float16")
    assert mix_parameters(other) == derived_parameters(other)


LAUNCH = H200.to_dict()["launch_us"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected parameters in JSON"),
        ({}, "expected a list of parameters, got dict"),
        ([1], "entry: expected an object"),
        ([{"device": "x"}], "entry: expected chip_tflops"),
        *(
            ([H200.to_dict() | {name: value}], message)
            for name, value, message in (
                ("launch_us", 3, "launch_us: expected value, unit, origin"),
                ("sm_count", 0, "sm_count: expected"),
                ("dtype", "float32", "dtype: expected bfloat16 or float16"),
                ("launch_us", LAUNCH | {"unit": "ms"}, "unit: expected 'µs', got 'ms'"),
                ("launch_us", LAUNCH | {"origin": "guessed"}, "origin: expected vendor"),
                ("launch_us", LAUNCH | {"value": "3"}, "launch_us: expected zero or a positive"),
            )
        ),
    ],
)
def test_bad_files_are_refused(content, message, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidArgumentError) as caught:
        read_parameters(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("problem", [PROBLEM, RAGGED])
@pytest.mark.parametrize("form", [PLAIN, FP8])
@pytest.mark.parametrize("n", [1, 64, 300, 511])
def test_the_work_adds_up_to_that_of_the_cost_model(problem, form, n):
    work = mix_work(problem, n, form)
    whole = attention_block_specialized_cost(problem, n, form)
    # Both kinds of work read the rope part of the queries.
    rope = problem.b * problem.s * problem.h * problem.p * 2
    assert work.latent.flops + work.heads.flops == whole.flops
    # Time counts the operations on the window by the effort that they take.
    assert work.flops == work.latent.flops + form.effort * work.heads.flops
    assert work.latent.bytes + work.heads.bytes == whole.bytes + rope


@pytest.mark.parametrize("problem", [PROBLEM, RAGGED, MlaProblem(b=32, s=64, t=4096, h=128)])
def test_the_ends_are_the_pure_paths_and_cost_what_the_roofline_says(problem):
    latent, heads = flash_mla_cost(problem), flash_attention_cost(problem)
    projections = query_projection_cost(problem), output_up_projection_cost(problem)
    assert mix_work(problem, 0) == MixWork(latent, NOTHING, projections)
    assert mix_work(problem, problem.t) == MixWork(NOTHING, heads, ())
    model, rates = MixModel(H200), (H200.chip_tflops.value, H200.stream_gbps.value)
    for n, costs in ((0, (latent, *projections)), (problem.t, (heads,))):
        expected = sum(cost.time_us(*rates) for cost in costs)
        assert model.at(problem, n).total_us == pytest.approx(expected)
        assert model.best_split(problem, n) == (0 if n else 132)


def test_times_by_hand():
    n, split = 256, 4
    work = mix_work(PROBLEM, n)
    latent, heads, chip, memory, together = part_times_us(TOY, work, split)
    four, six, ten = (TOY.bandwidth_gbps(sms) for sms in (4, 6, 10))
    alone = max(work.latent.flops / (4 * 2.0 * 1e6), work.latent.bytes / (four * 1e3))
    # While six of ten SMs stream, 0.6 ** 2 of the rate is gone; afterwards it is whole again.
    done_beside_the_stream = (1 - 0.6**2) * heads
    assert alone > done_beside_the_stream
    assert latent == pytest.approx(heads + alone - done_beside_the_stream)
    assert heads == max(work.heads.flops / (6 * 1.0 * 1e6), work.heads.bytes / (six * 1e3))
    assert chip == (work.latent.flops + work.heads.flops) / 18e6
    assert memory == (work.latent.bytes + work.heads.bytes) / 200e3
    latent_on_all = max(work.latent.flops / 20e6, work.latent.bytes / (ten * 1e3))
    heads_on_all = max(work.heads.flops / 10e6, work.heads.bytes / (ten * 1e3))
    assert together == pytest.approx(0.8 * (latent_on_all + heads_on_all))
    found = MixModel(TOY).time_us(PROBLEM, n, split)
    assert found.attention_us == max(latent, heads, chip, memory, together) + 5.0
    others = [cost.time_us(18.0, 200.0) + 5.0 for cost in work.others]
    assert found.total_us == pytest.approx(found.attention_us + sum(others))
    waits = {"latent": latent, "heads": heads, "chip": chip, "memory": memory, "together": together}
    assert waits[found.bound] == max(waits.values())


def test_work_without_an_sm_never_ends():
    model = MixModel(TOY)
    assert math.isinf(model.time_us(PROBLEM, 0, 0).total_us)
    assert math.isinf(model.time_us(PROBLEM, 256, 10).total_us)
    assert math.isfinite(model.time_us(PROBLEM, 512, 0).total_us)


@pytest.mark.parametrize(
    ("bound", "slow"),
    [
        ("latent", {"latent_tflops_per_sm": 1e-3}),
        ("heads", {"heads_tflops_per_sm": 1e-3}),
        ("chip", {"chip_tflops": 1e-3}),
        ("memory", {"stream_gbps": 1e-3}),
        ("together", {"together": 1e3}),
    ],
)
def test_each_limit_can_be_the_one_that_binds(bound, slow):
    fast = dict.fromkeys(
        ("latent_tflops_per_sm", "heads_tflops_per_sm", "chip_tflops", "stream_gbps"), 1e6
    )
    # One SM draws more than the memory gives: each kind alone then gets everything, both do not.
    corner = {"stream_gbps_per_sm": 1e9, "stream_sharpness": math.inf}
    model = MixModel(TOY.with_values(fast | corner | slow))
    assert model.time_us(PROBLEM, 256, 5).bound == bound


rates = st.fixed_dictionaries(
    {
        "latent_tflops_per_sm": st.floats(0.2, 20),
        "heads_tflops_per_sm": st.floats(0.2, 20),
        "chip_tflops": st.floats(2, 300),
        "stream_gbps_per_sm": st.floats(5, 100),
        "stream_gbps": st.floats(20, 800),
        "stream_sharpness": st.sampled_from([1.0, 2.5, 8.0, math.inf]),
        "together": st.sampled_from([0.0, 0.6, 0.9, 1.1]),
        "starvation": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        "launch_us": st.floats(0, 10),
    }
).map(lambda values: replace(H200.with_values(values), sm_count=12))
problems = st.sampled_from([PROBLEM, RAGGED, replace(PROBLEM, s=1), replace(RAGGED, s=64, h=2)])


@settings(max_examples=60, deadline=None)
@given(rates, problems, st.integers(1, 511), st.sampled_from([PLAIN, FP8]))
def test_the_split_is_the_best_of_all(parameters, problem, n, form):
    model = MixModel(parameters, form)
    found = model.time_us(problem, n, model.best_split(problem, n)).total_us
    every = [model.time_us(problem, n, g).total_us for g in range(parameters.sm_count + 1)]
    assert found == pytest.approx(min(every), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(rates, problems, st.sampled_from([PLAIN, FP8]), st.none() | st.integers(0, 600_000))
def test_the_window_is_the_best_of_all_that_fit(parameters, problem, form, budget):
    model = MixModel(parameters, form)
    n = model.best_n(problem, budget, multiple=16)
    assert budget is None or decompressed_bytes(problem, n, form) <= budget
    longest = max(problem.kv_lengths)
    fitting = [
        size
        for size in {*range(0, longest, 16), longest}
        if budget is None or decompressed_bytes(problem, size, form) <= budget
    ]
    assert n in fitting
    best = min(model.at(problem, size).total_us for size in fitting)
    assert model.at(problem, n).total_us == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("s", [4, 32, 64, 200])
def test_a_fine_search_comes_within_the_steps_of_whole_sms(s):
    problem = MlaProblem(b=8, s=s, t=3000, h=64)
    rounded = H200.with_values({"stream_sharpness": 3.0})
    model = MixModel(rounded)
    found = model.at(problem, model.best_n(problem)).total_us
    best = min(model.at(problem, n).total_us for n in range(0, 3001, 7))
    assert found <= best * 1.005


def test_bad_choices_are_refused():
    model = MixModel(H200)
    for message, call in {
        "split: expected an integer from 0 to sm_count": lambda: model.time_us(PROBLEM, 0, 133),
        "n: expected an integer from 0 to t=512": lambda: model.at(PROBLEM, 513),
        "problem.dtype: expected bf": lambda: model.best_n(replace(PROBLEM, dtype="float16")),
        "max_bytes: expected": lambda: model.best_n(PROBLEM, -1),
        "multiple: expected": lambda: model.best_n(PROBLEM, multiple=0),
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            call()
