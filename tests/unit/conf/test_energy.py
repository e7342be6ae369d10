"""Energy of work on a device: the figures fit the record, and decide for long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf import energy as module
from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.conf.energy import EnergyRates, energy_rates
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import derived_parameters, mix_parameters
from mla_var3.op.mla.model.window_plan import plan_window
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import window_form

ROOT = Path(__file__).resolve().parents[3]
H200 = "NVIDIA H200"


def model(form: str = "plain") -> MixModel:
    return MixModel(mix_parameters(device_spec(H200)), window_form(form))


def measured() -> list[dict[str, Any]]:
    rates = energy_rates(H200)
    assert rates is not None
    found: list[dict[str, Any]] = json.loads((ROOT / rates.source).read_text())["rows"]
    return found


def test_every_entry_names_a_known_device_and_an_existing_record() -> None:
    for device, rates in module._table().items():
        assert device in load_devices()
        assert (ROOT / rates.source).is_file()


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['kernel']}-{row['s']}")
def test_energy_and_time_for_long_are_as_measured(row: dict[str, Any]) -> None:
    problem = MlaProblem(**{name: row[name] for name in ("b", "s", "t", "h")})
    n = 0 if row["kernel"] == "flash_mla" else row["t"]
    expected = model(row["form"])
    joules = expected.joules(problem, n)
    # In 8 bits and beyond one tile of rows the queries are read again for every block.
    if (row["form"], row["s"]) != ("fp8", 128):
        assert joules == pytest.approx(row["joules"], rel=0.1)
    time_us = expected.lasting_us(problem, n) - expected.at(problem, n).others_us
    assert time_us == pytest.approx(row["us_for_a_second"], rel=0.1)


def test_a_mix_takes_an_energy_between_those_of_the_pure_paths() -> None:
    problem = MlaProblem(b=32, s=43, t=4096, h=128)
    none, some, everything = (model().joules(problem, n) for n in (0, 2048, 4096))
    assert none is not None and some is not None and everything is not None
    assert everything < some < none


def test_what_pays_in_a_short_run_only_is_not_chosen() -> None:
    problem = MlaProblem(b=32, s=43, t=4096, h=128)
    best = model().best_n(problem, multiple=128)
    assert 0 < best < problem.t
    assert model().worthwhile_n(problem, multiple=128) == problem.t
    # Few queries take less energy in latent form.
    assert model().worthwhile_n(MlaProblem(b=32, s=8, t=4096, h=128), multiple=128) == 0
    plan = plan_window(problem, model(), 20 << 30, multiple=128)
    assert (plan.chosen.n, plan.lasting.n) == (best, problem.t)
    assert plan.to_dict()["lasting"]["lasting_us"] < plan.to_dict()["chosen"]["lasting_us"]


def test_a_device_without_figures_has_no_limit() -> None:
    unknown = MixModel(derived_parameters(device_spec("NVIDIA H100 80GB HBM3")))
    problem = MlaProblem(b=32, s=43, t=4096, h=128)
    assert unknown.joules(problem, 100) is None
    assert unknown.lasting_us(problem, 100) == unknown.at(problem, 100).total_us


def test_nothing_is_free() -> None:
    values: dict[str, Any] = {
        "latent_joules_per_tflop": 1.0,
        "heads_joules_per_tflop": 1.0,
        "joules_per_gb": 0.0,
        "power_limit_w": 700.0,
        "source": "",
        "date": "",
    }
    with pytest.raises(InvalidArgumentError, match="joules_per_gb: expected a positive number"):
        EnergyRates(**values)
