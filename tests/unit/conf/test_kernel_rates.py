"""The recorded rates of kernels: they fit the records that they name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mla_var3.conf import kernel_rates as module
from mla_var3.conf.devices import load_devices
from mla_var3.conf.kernel_rates import KernelRates, kernel_rates
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.cost import flash_attention_cost, flash_mla_cost
from mla_var3.op.mla.problem import MlaProblem

ROOT = Path(__file__).resolve().parents[3]
ABSORBED = "docs/results/2026-11-15-nvidia-h200-absorbed.json"
DECOMPRESSED = "docs/results/2026-11-15-nvidia-h200-suite-mix.json"
SM_COUNT = 132


def test_every_entry_names_a_known_device_and_an_existing_record() -> None:
    devices = set(load_devices())
    for device, kernels in module._table().items():
        assert device in devices
        for rates in kernels.values():
            assert (ROOT / rates.source).is_file()


def test_the_absorbed_kernel_is_estimated_as_it_was_measured() -> None:
    """Compute bound and memory bound rows within a tenth; short launches within a quarter."""
    rates = kernel_rates("NVIDIA H200", "flash_mla", "cute-dsl")
    assert rates is not None and rates.cut_us is not None
    rows = json.loads((ROOT / ABSORBED).read_text())["rows"]
    ours = [row for row in rows if row.get("kernel") == "flash_mla"]
    assert len(ours) >= 10
    names = MlaProblem.__dataclass_fields__
    for row in ours:
        problem = MlaProblem(**{k: v for k, v in row["problem"].items() if k in names})
        measured = row.get("median_us") or row["time_us"]
        turns = problem.b * -(-problem.s * problem.h // 64) / SM_COUNT
        even = flash_mla_cost(problem).time_us(rates.tflops, rates.gbps) + turns * rates.tile_us
        whole = even * math.ceil(turns) / turns
        expected = rates.fixed_us + min(whole, even + rates.cut_us)
        bound = 0.25 if measured < 100 else 0.12
        assert expected == pytest.approx(measured, rel=bound), row["problem"]


def test_decompressed_attention_is_estimated_as_it_was_measured() -> None:
    """From few queries, where memory decides, to 128, where products do."""
    rates = kernel_rates("NVIDIA H200", "flash_attention", "cute-dsl")
    assert rates is not None and rates.cut_us == 0
    ours = [
        row
        for row in json.loads((ROOT / DECOMPRESSED).read_text())["rows"]
        if (row["kernel"], row.get("language")) == ("flash_attention", "cute-dsl")
    ]
    assert {row["problem"]["s"] for row in ours} >= {8, 128}
    names = MlaProblem.__dataclass_fields__
    for row in ours:
        problem = MlaProblem(**{k: v for k, v in row["problem"].items() if k in names})
        expected = flash_attention_cost(problem).time_us(rates.tflops, rates.gbps) + rates.fixed_us
        assert expected == pytest.approx(row["time_us"], rel=0.05), row["problem"]


def test_what_was_not_recorded_has_no_rates() -> None:
    assert kernel_rates("NVIDIA H200", "flash_mla", "no-dsl") is None
    assert kernel_rates("NVIDIA B200", "flash_mla", "cute-dsl") is None


@pytest.mark.parametrize("name", ["tflops", "gbps", "fixed_us", "tile_us", "cut_us"])
def test_rates_below_nothing_are_refused(name: str) -> None:
    values = {"tflops": 1.0, "gbps": 1.0, "fixed_us": 0.0, "tile_us": 0.0, "cut_us": 0.0}
    with pytest.raises(InvalidArgumentError, match=name):
        KernelRates(**values | {name: -1.0}, source="", date="")
