"""The shipped parameters of the mix against the times that they were fitted to."""

import json
from pathlib import Path
from typing import Any

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.op.mla.cost import query_projection_cost
from mla_var3.op.mla.model.fit import MixRecord, fit
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import derived_parameters, mix_parameters
from mla_var3.op.mla.problem import MlaProblem

ROOT = Path(__file__).parents[4]
H200 = device_spec("H200")
SHIPPED = mix_parameters(H200)
SOURCE = "docs/results/2026-11-15-nvidia-h200-mix-rows.json"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / SOURCE).read_text(encoding="utf-8"))
    return content


def plain_rows(record: dict[str, Any]) -> list[MixRecord]:
    return [MixRecord(**row) for row in record["rows"] if row["form"] == "plain"]


@pytest.mark.slow
def test_the_shipped_parameters_are_the_fit_of_their_record(record):
    found = fit(plain_rows(record), derived_parameters(H200), SOURCE)
    for name, parameter in found.parameters.parameters.items():
        shipped = SHIPPED.parameters[name]
        # The model has kinks, so a search ends near the minimum: within a tenth of what the rows
        # leave uncertain.
        tolerance = 0.1 * (parameter.error or 0.01)
        assert shipped.value == pytest.approx(parameter.value, rel=tolerance), name
        assert (shipped.origin, shipped.source) == (parameter.origin, parameter.source)
    assert {"together", "starvation"} <= set(found.determined)
    assert found.rms < 0.055


@pytest.mark.parametrize("s", [16, 32, 43, 48, 64])
def test_what_the_model_chooses_was_measured_near_the_best(record, s):
    """From `q_nope` to `o`: projections that were not measured count as predicted."""
    problem = MlaProblem(b=32, s=s, t=4096, h=128)
    model = MixModel(SHIPPED)
    rates = SHIPPED.chip_tflops.value, SHIPPED.stream_gbps.value
    query_projection_us = query_projection_cost(problem).time_us(*rates)
    measured = {
        (row["n"], row["sms"]): row["with_combine_us"] + query_projection_us
        for row in record["with_combine"]
        if row["s"] == s
    }
    for row in plain_rows(record):
        if row.s == s and (row.n, row.sms) in ((0, 132), (4096, 0)):
            others_us = model.at(problem, row.n).others_us
            for upward in record["up_projection"]:
                if row.n == 0 and upward["s"] == s:
                    others_us = query_projection_us + upward["time_us"]
            measured[row.n, row.sms] = row.time_us + others_us
    chosen = model.at(problem, model.best_n(problem, multiple=128))
    nearest = min(
        measured,
        key=lambda pair: (
            ((pair[0] - chosen.n) / problem.t) ** 2
            + ((pair[1] - chosen.split) / SHIPPED.sm_count) ** 2
        ),
    )
    assert measured[nearest] <= 1.1 * min(measured.values())


@pytest.mark.parametrize("kernel", ["mla_var6_plus", "mla_var6_plus_v5"])
@pytest.mark.parametrize("n", [1024, 2048, 3072])
def test_plans_share_the_sms_as_the_estimate_assumes(kernel, n):
    """The effort of an 8-bit window counts in both."""
    pytest.importorskip("cutlass")
    from mla_var3.runtime.paths import find_kernel, plan_class

    plan_of = plan_class(find_kernel(kernel, language="cute-dsl"))
    plan = plan_of(b=32, s=64, t=4096, h=128, n=n).on_device(H200)
    assert plan.balanced_split().latent == plan.model.at(plan.problem(), n).split
