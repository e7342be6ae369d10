"""Plots are written, of a sensible size, and say what they show."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mla_var3.bench.plots import COLOURS
from mla_var3.conf.devices import device_spec, load_devices
from mla_var3.op.mla.model.times import IDEAL
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.plots import (
    bar_plot,
    crossover_plot,
    dense_s_values,
    dense_sweeps,
    line_plot,
    speedup_series,
)
from mla_var3.report.sweep import DeviceSweep, crossover_text, sweep

PROBLEM = MlaProblem(b=32, s=1, t=4096, h=128)


@pytest.fixture(scope="module")
def entries() -> dict[str, DeviceSweep]:
    """A coarse sweep of every device."""
    return {name: sweep(PROBLEM, spec, (1, 16, 256)) for name, spec in load_devices().items()}


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.parametrize("count", [1, 5])
def test_crossover_plot(count: int, tmp_path: Path, entries: dict[str, DeviceSweep]) -> None:
    shown = sorted(entries.values(), key=lambda entry: not entry.fitted)[:count]
    png, svg = crossover_plot(shown, tmp_path / "sub" / "crossover", "heading of it")
    assert (png.name, svg.name) == ("crossover.png", "crossover.svg")
    width, height = png_size(png)
    assert 800 < width < 3000 and 500 < height < 3000
    text, last = svg.read_text(), shown[0].crossovers[-1]
    for words in ("heading of it", "H200", "query tokens", "time, µs", "flash_mla",
                  f"s = {last.s_from}", "steady call time by recorded rates"):  # fmt: skip
        assert words in text, words
    again = crossover_plot(shown, tmp_path / "again", "heading of it")[1]
    assert again.read_bytes() == svg.read_bytes()
    assert len(list(svg.parent.iterdir())) == 2


def test_line_and_bar_plots(tmp_path: Path) -> None:
    points = {"a": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]}
    labels = {"title": "a title", "y_label": "time, µs"}
    lines = line_plot(points, tmp_path / "lines", x_label="s", log_x=True, **labels)
    groups = {"s=1": {"a": 1.0, "b": 2.0}, "s=2": {"a": 3.0}}
    bars = bar_plot(groups, tmp_path / "bars", **labels)
    for png, svg in (lines, bars):
        assert min(png_size(png)) > 400 and "a title" in svg.read_text()


def test_sweeps_carry_their_rates_and_rank_only_what_was_timed(
    entries: dict[str, DeviceSweep],
) -> None:
    for name, entry in entries.items():
        spec, data = device_spec(name), entry.to_dict()
        rates = tuple(value.value for _, value in entry.rates.values())
        assert rates == spec.burst_rates("bfloat16")
        assert data["rates"]["memory"]["measured"] == ("burst_dram_bw_GBps" in spec)
        assert data["rates"]["compute"]["source"]
        assert set(entry.predictions) == set(COLOURS)
        assert data["predicted"]["mla_var6_plus"][1]["s"] == 16
        if entry.fitted:
            assert data["crossovers"][-1]["s_to"] == 256
            assert "flash_attention for s >= " in crossover_text(entry)
        else:
            assert (data["heading"], entry.fastest(0), data["crossovers"]) == (IDEAL, None, [])
            assert crossover_text(entry) == f"not ranked ({IDEAL})"


def test_what_the_plots_of_the_main_job_show(entries: dict[str, DeviceSweep]) -> None:
    assert dense_s_values(8, 2) == [1, 2, 3, 4, 6, 8]
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} <= set(dense_s_values())
    entry = entries["NVIDIA H200"]
    (dense,) = dense_sweeps([entry])
    assert dense.s_values == tuple(dense_s_values()) and dense.crossovers == entry.crossovers
    ((device, points),) = speedup_series([entry]).items()
    assert f"NVIDIA {device}" == entry.device
    assert 0.9 < dict(points)[16.0] <= 1.0  # on an H200 the mix is never ahead
