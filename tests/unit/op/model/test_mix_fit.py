"""Fitting the model of the mix: known rates come back from synthetic rows, the rest stays."""

import math
import random
import sys

import pytest

from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, MissingToolError, UnknownNameError
from mla_var3.op.mla.model.fit import LEAST_RECORDS, MixRecord, fit
from mla_var3.op.mla.model.mix import MixModel
from mla_var3.op.mla.model.parameters import MixParameters, derived_parameters
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.op.mla.window.formats import window_form

START = derived_parameters(device_spec("H200"))
SMS = START.sm_count
# Made up, and far from the start on purpose.
TRUTH = {
    "latent_tflops_per_sm": 4.0,
    "heads_tflops_per_sm": 3.0,
    "chip_tflops": 480.0,
    "stream_gbps_per_sm": 50.0,
    "stream_gbps": 3900.0,
    "stream_sharpness": 2.5,
    "launch_us": 6.0,
}
ARRANGEMENTS = (
    (0, SMS), (0, 66), (0, 33), (1, 0), (1, 44), (1, 88), (1, 110),
    (0.5, 66), (0.5, 40), (0.5, 100), (0.25, 90), (0.75, 30),
)  # fmt: skip
"""Shares of the tokens that are decompressed, and SMs of the latent part."""


def rows(
    truth: MixParameters, noise: float = 0.0, arrangements=ARRANGEMENTS, form: str = "plain"
) -> list[MixRecord]:
    """Rows as the model of `truth` gives them, with noise on every time."""
    chance = random.Random(7)
    model = MixModel(truth, window_form(form))
    found = []
    for b, t in ((32, 4096), (1, 128)):
        for s in (1, 16, 64, 512):
            for share, sms in arrangements:
                n = int(share * t)
                problem = MlaProblem(b=b, s=s, t=t, h=128)
                time_us = model.time_us(problem, n, sms).attention_us
                time_us *= math.exp(chance.gauss(0.0, noise))
                found.append(MixRecord(b, s, t, 128, n, sms, time_us, form=form))
    return found


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-3), (0.03, 0.15)])
def test_the_rates_come_back(noise, tolerance):
    found = fit(rows(START.with_values(TRUTH), noise), START, "synthetic rows")
    assert set(found.determined) == set(TRUTH)
    for name, value in TRUTH.items():
        parameter = found.parameters.parameters[name]
        # The exponent of the bend is the least certain of them.
        allowed = tolerance * (4 if name == "stream_sharpness" else 1)
        assert parameter.value == pytest.approx(value, rel=allowed), name
        assert parameter.origin == "fitted" and "synthetic rows" in parameter.source
        assert parameter.error is not None and parameter.error < 0.25
    assert found.rms == pytest.approx(noise, abs=0.2 * noise + 1e-5)


def test_what_both_kinds_share_comes_back():
    shared = {"together": 0.95, "starvation": 0.4}
    truth = START.with_values(TRUTH | shared | {"chip_tflops": 5000.0})
    found = fit(rows(truth, 0.01), START, "synthetic rows")
    assert set(shared) <= set(found.determined)
    for name, value in shared.items():
        assert found.parameters.parameters[name].value == pytest.approx(value, rel=0.05), name
    assert found.rms == pytest.approx(0.01, abs=0.003)


def test_an_8_bit_window_is_fitted_with_its_own_bytes_and_no_limit_that_no_row_meets():
    truth = START.with_values(TRUTH | {"chip_tflops": 5000.0})
    mixed = rows(truth, 0.01) + rows(truth, 0.01, form="fp8")
    found = fit(mixed, START, "synthetic rows")
    for name in ("stream_gbps", "stream_gbps_per_sm", "latent_tflops_per_sm"):
        assert found.parameters.parameters[name].value == pytest.approx(TRUTH[name], rel=0.03)
    assert "chip_tflops" not in found.determined
    assert found.parameters.chip_tflops == START.chip_tflops


def test_rows_of_one_kind_determine_that_kind_only():
    only_latent = rows(START.with_values(TRUTH), 0.005, arrangements=((0, 66), (0, 33)))
    busy = [row for row in only_latent if row.s >= 32 and row.b == 32]
    found = fit(busy, START, "synthetic rows")
    assert found.determined == ("latent_tflops_per_sm",)
    assert found.parameters.latent_tflops_per_sm.value == pytest.approx(4.0, rel=0.02)
    for name in set(TRUTH) - {"latent_tflops_per_sm"}:
        assert found.parameters.parameters[name] == START.parameters[name]


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingToolError, match=r"fitting needs scipy.*hyper-mla\[fit\]"):
        fit(rows(START.with_values(TRUTH)), START, "x")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"time_us": 0.0}, "time_us: expected a positive number"),
        ({"sms": 133}, r"records\[3\].sms: expected an integer from 0"),
        ({"sms": 0}, r"records\[3\].sms: expected SMs for both"),
        ({"dtype": "float16"}, r"records\[3\].dtype: expected bfloat16"),
        ({"form": "int4"}, "unknown window form"),
        (None, f"records: expected at least {LEAST_RECORDS}"),
    ],
)
def test_bad_records_are_refused(row, message):
    good = {"b": 1, "s": 1, "t": 64, "h": 8, "n": 0, "sms": 9, "time_us": 3.0}
    records = [good] * 2 if row is None else [good] * 3 + [good | row]
    with pytest.raises((InvalidArgumentError, UnknownNameError), match=message):
        fit(records, START, "x")
