"""Planning the decompressed window within a budget."""

from dataclasses import replace

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cost import decompressed_bytes
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import derived_parameters, mix_parameters
from mla_var3.op.mla.model.window_plan import parse_bytes, plan_curve, plan_window
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import FP8

GIB = 2**30
MODEL = MixModel(derived_parameters(device_spec("H200")))
PROBLEM = MlaProblem(b=32, s=32, t=4096, h=128)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("123456", 123456), ("4GiB", 4 * GIB), ("4 gib", 4 * GIB), (" 1.5GiB ", 3 * GIB // 2),
        ("0.5kB", 500), (".5KiB", 512), ("2MB", 2_000_000), ("7MiB", 7 * 2**20), ("1TiB", 2**40),
        ("3 B", 3), ("9007199254740993", 9007199254740993),  # more than a float holds exactly
    ],
)  # fmt: skip
def test_amounts(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "4 parsecs", "1.2.3", "nan", "inf"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="^budget: expected a number of bytes"):
        parse_bytes(text)


def test_the_window_fits_and_no_better_one_does():
    budget = 2 * GIB
    plan = plan_window(PROBLEM, MODEL, budget, multiple=128)
    assert plan.chosen.window_bytes == decompressed_bytes(PROBLEM, plan.chosen.n) <= budget
    assert plan.chosen.n % 128 == 0
    fitting = [point for point in plan.curve if point.window_bytes <= budget]
    assert plan.chosen.advised_us == min(point.advised_us for point in fitting)
    assert plan.unlimited.advised_us == min(point.advised_us for point in plan.curve)
    assert plan.unlimited.n > plan.chosen.n  # the budget is what limits it here


@pytest.mark.parametrize("s", [8, 16, 32, 43, 64, 128])
@pytest.mark.parametrize("budget", [2, 4, 9])
def test_advice_follows_the_steady_time(s, budget):
    """On an H200 a mix is advised only where the whole cache does not fit, and gains 8 %."""
    model = MixModel(mix_parameters(device_spec("H200")))
    plan = plan_window(replace(PROBLEM, s=s), model, budget * GIB, multiple=128)
    fitting = [point for point in plan.curve if point.window_bytes <= budget * GIB]
    least = min(point.advised_us for point in fitting)
    assert plan.fitted and plan.chosen.advised_us <= 1.08 * least
    assert plan.chosen.estimate.steady_call_us == plan.chosen.advised_us
    if budget == 9 or s <= 32:
        assert plan.chosen.n == (4096 if s >= 43 else 0)
    if plan.chosen.estimate.mixes:
        assert plan.chosen.advised_us < 0.92 * plan.curve[0].advised_us


def test_layers_share_the_budget_and_an_8_bit_window_holds_more():
    one = plan_window(PROBLEM, MODEL, 2 * GIB, multiple=128)
    many = plan_window(PROBLEM, MODEL, 61 * 2 * GIB, layers=61, multiple=128)
    assert many.chosen == one.chosen
    assert many.layer_budget_bytes == one.budget_bytes
    assert many.to_dict()["chosen_bytes_all_layers"] == 61 * one.chosen.window_bytes
    small = plan_window(PROBLEM, replace(MODEL, form=FP8), 2 * GIB, multiple=128)
    assert small.chosen.n > one.chosen.n
    assert small.chosen.advised_us < one.chosen.advised_us
    # The curve runs from nothing to everything.
    sizes = [point.n for point in one.curve]
    assert sizes[0] == 0 and sizes[-1] == 4096 and sizes == sorted(set(sizes))
    assert {one.chosen.n, one.unlimited.n} <= set(sizes)
    long = plan_curve(replace(PROBLEM, t=1_000_000), MODEL, 128)
    assert len(long) < 100 and long[-1].n == 1_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget_bytes": 0}, "budget: expected a positive integer"),
        ({"budget_bytes": 4}, "budget: expected at least .* 128 tokens of each of 32 requests"),
        ({"layers": 1000}, "in 1000 layers .* got 1073741824 bytes"),
        ({"layers": 0}, "layers: expected a positive integer, got 0"),
        ({"multiple": 0}, "multiple: expected a positive integer"),
    ],
)
def test_nonsense_is_refused_by_name(change, message):
    arguments = {"budget_bytes": GIB, "multiple": 128, **change}
    with pytest.raises(InvalidArgumentError, match=message):
        plan_window(PROBLEM, MODEL, **arguments)
