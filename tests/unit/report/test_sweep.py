"""Sweeps rank what was timed; plots are of a sensible size and say what they show."""

from matplotlib.image import imread

from mla_var3.bench.plots import COLOURS, bar_plot, line_plot
from mla_var3.conf.devices import load_devices
from mla_var3.op.mla.model.times import IDEAL
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.sweep import sweep


def test_line_and_bar_plots(tmp_path):
    points = {"a": [(1, 1.0), (2, 3.0)], "b": [(1, 2.0)]}
    labels = {"title": "a title", "y_label": "time, µs"}
    lines = line_plot(points, tmp_path / "lines", x_label="s", log=True, **labels)
    groups = {"s=1": {"a": 1.0, "b": 2.0}, "s=2": {"a": 3.0}}
    bars = bar_plot(groups, tmp_path / "bars", **labels)
    for png, svg in (lines, bars):
        assert min(imread(png).shape[:2]) > 400 and "a title" in svg.read_text()


def test_a_sweep_ranks_only_what_was_timed():
    for name, spec in load_devices().items():
        entry = sweep(MlaProblem(b=32, s=1, t=4096, h=128), spec, (1, 256))
        data = entry.to_dict()
        assert set(entry.predictions) == set(COLOURS)
        assert data["predicted"]["mla_var6_plus"][1]["s"] == 256
        fastest = ("flash_mla", "flash_attention") if entry.fitted else (None, None)
        assert (entry.fastest(0), entry.fastest(1)) == fastest, name
        assert entry.fitted or data["heading"] == IDEAL
