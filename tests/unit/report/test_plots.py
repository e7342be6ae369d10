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
    Panel,
    Region,
    bar_plot,
    crossover_panels,
    crossover_plot,
    dense_s_values,
    dense_sweeps,
    line_plot,
    speedup_series,
)
from mla_var3.report.sweep import crossover_text, sweep

PROBLEM = MlaProblem(b=32, s=1, t=4096, h=128)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def panel(title: str = "a device") -> Panel:
    return Panel(
        title,
        "100 TFLOP/s",
        [1, 2, 4, 8],
        {"flash_mla": [1.0, 2.0, 4.0, 8.0], "flash_attention": [3.0, 3.0, 3.0, 3.1]},
        [Region("flash_mla", 1, 2), Region("flash_attention", 3, 8)],
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_crossover_plot(count: int, tmp_path: Path) -> None:
    panels = [panel(f"device {i}") for i in range(count)]
    written = crossover_plot(panels, tmp_path / "sub" / "crossover", "heading of it")
    assert [path.name for path in written] == ["crossover.png", "crossover.svg"]
    width, height = png_size(written[0])
    assert 800 < width < 3000 and 500 < height < 3000
    svg = written[1].read_text()
    for words in ("heading of it", "device 0", "query tokens", "time, µs", "s = 3", "flash_mla"):
        assert words in svg
    assert sorted(path.name for path in written[0].parent.iterdir()) == [
        "crossover.png",
        "crossover.svg",
    ]


def test_crossover_plot_needs_a_panel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        crossover_plot([], tmp_path / "x", "heading")


def test_line_and_bar_plots(tmp_path: Path) -> None:
    lines = line_plot(
        {"a": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]},
        tmp_path / "lines",
        title="lines",
        x_label="s",
        y_label="time, µs",
        log_x=True,
        log_y=True,
    )
    bars = bar_plot(
        {"s=1": {"a": 1.0, "b": 2.0}, "s=2": {"a": 3.0}},
        tmp_path / "bars",
        title="bars",
        y_label="time, µs",
        formats=("png",),
    )
    assert all(path.stat().st_size > 1000 for path in [*lines, *bars])
    assert min(png_size(bars[0])) > 400


def test_a_plot_made_twice_is_the_same(tmp_path: Path) -> None:
    first = crossover_plot([panel()], tmp_path / "one", "heading", formats=("svg",))
    second = crossover_plot([panel()], tmp_path / "two", "heading", formats=("svg",))
    assert first[0].read_bytes() == second[0].read_bytes()


def test_sweeps_carry_their_rates() -> None:
    for spec in load_devices().values():
        entry = sweep(PROBLEM, spec, (1, 16, 256))
        assert (entry.compute.value, entry.memory.value) == spec.burst_rates("bfloat16")
        assert entry.memory.measured == ("burst_dram_bw_GBps" in spec)
        assert ("burst" if entry.compute.measured else "vendor peak") in entry.compute.origin
        assert entry.compute.source in entry.compute.origin
        assert set(entry.predictions) == set(COLOURS)
        assert all(len(values) == 3 for values in entry.predictions.values())
        data = entry.to_dict()
        assert data["predicted"]["mla_var6_plus"][1]["s"] == 16
        if entry.fitted:
            assert data["crossovers"][-1]["s_to"] == 256
            assert "flash_attention for s >= " in crossover_text(entry)
        else:
            assert (data["heading"], entry.fastest(0), data["crossovers"]) == (IDEAL, None, [])
            assert crossover_text(entry) == f"not ranked ({IDEAL})"


def test_what_the_plots_of_the_main_job_show() -> None:
    assert dense_s_values(8, 2) == [1, 2, 3, 4, 6, 8]
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} <= set(dense_s_values())
    entry = sweep(PROBLEM, device_spec("H200"), (1, 16, 256))
    (dense,) = dense_sweeps([entry])
    assert dense.s_values == tuple(dense_s_values()) and dense.crossovers == entry.crossovers
    assert dense.at(16) == entry.at(16)
    (only,) = crossover_panels([entry])
    assert only.title in entry.device
    assert only.subtitle == entry.heading == "steady call time by recorded rates"
    assert only.regions[0].start == 1 and only.regions[-1].end == 256
    (ideal,) = crossover_panels([sweep(PROBLEM, load_devices()["NVIDIA B200"], (1, 16, 256))])
    assert ideal.regions == []  # vendor peaks rank nothing
    ((device, points),) = speedup_series([entry]).items()
    assert f"NVIDIA {device}" == entry.device
    assert 0.9 < dict(points)[16.0] <= 1.0  # on an H200 the mix is never ahead
