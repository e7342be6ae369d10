"""What a record says: the fastest, speed-ups, crossings, windows, doubts; and the plots of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.bench.analysis import (
    END_TO_END,
    KERNEL_ONLY,
    doubts,
    find_crossings,
    row_speedups,
    shape_groups,
    speedup_grid,
    times_over_n,
    times_over_s,
)
from mla_var3.bench.plots import Plot, draw_plots, series_colour
from mla_var3.bench.record import (
    DECOMPRESSED,
    FAILED,
    MIX,
    PREDICTED,
    PROJECTION,
    BenchRow,
    load_record,
)
from tests.unit.bench.bench_support import peer, record, row

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def sweep_rows() -> list[BenchRow]:
    """Absorbed doubles with s, decompressed stays; the lines meet at s = 32."""
    rows = []
    for t in (1024, 4096):
        for s in (8, 16, 64, 128):
            share = t / 4096
            rows += [
                row("flash_mla", 60.0 * s * share, s=s, t=t, projections_us=0.0),
                row(
                    "flash_attention",
                    1920.0 * share,
                    s=s,
                    t=t,
                    path=DECOMPRESSED,
                    projections_us=0.0,
                ),
                peer("FlashMLA", 72.0 * s * share, s=s, t=t, projections_us=0.0),
            ]
    return rows


def test_the_basis_is_end_to_end_only_where_all_have_it() -> None:
    (group,) = shape_groups([row(), peer()])
    assert group.basis == END_TO_END
    (group,) = shape_groups([row(), peer(projections_us=None)])
    assert group.basis == KERNEL_ONLY


def test_projections_and_failures_do_not_compete() -> None:
    rows = [
        row(time_us=1000.0),
        row("query absorption", 10.0, source=PROJECTION, projections_us=None),
        row("mla_var6_plus", None, status=FAILED),
        peer(time_us=900.0),
    ]
    (group,) = shape_groups(rows)
    assert group.best_ours is rows[0]
    assert group.best_rival is rows[3]
    assert row_speedups(rows) == {0: pytest.approx(940 / 1040), 3: 1.0}


def test_a_prediction_is_compared_with_the_pure_paths() -> None:
    rows = [
        row("flash_mla_v2", 800.0, kind=PREDICTED),
        row("flash_attention", 900.0, kind=PREDICTED),
        row("mla_var6_plus", 400.0, kind=PREDICTED, projections_us=20.0),
    ]
    (group,) = shape_groups(rows)
    assert group.best_rival is rows[0]
    assert group.best_ours is rows[2]
    assert group.speedup(rows[2]) == pytest.approx(840 / 420)


def test_crossings_lie_where_the_lines_meet() -> None:
    data = times_over_s(sweep_rows())
    assert data is not None
    assert data.title == "b=32 t=4096 h=128"
    assert list(data.series) == ["flash_mla", "flash_attention", "FlashMLA"]
    (crossing,) = data.crossings
    assert (crossing.before, crossing.after) == ("flash_mla", "flash_attention")
    assert crossing.s == pytest.approx(32.0)


def test_a_tie_is_no_crossing() -> None:
    lines = {
        "a": [(1, 10.0), (2, 20.0), (4, 40.0), (8, 80.0)],
        "b": [(1, 12.0), (2, 20.0), (4, 40.0), (8, 40.0)],
    }
    (only,) = find_crossings(dict(reversed(lines.items())))
    assert (only.before, only.after) == ("a", "b")
    assert 4 <= only.s < 8


def test_a_crossing_without_both_lines_is_put_in_the_middle() -> None:
    (crossing,) = find_crossings({"a": [(4, 1.0)], "b": [(16, 1.0)]})
    assert crossing.s == pytest.approx(8.0)
    assert find_crossings({"a": [(4, 1.0), (16, 2.0)]}) == []


def test_one_length_is_no_sweep() -> None:
    assert times_over_s([row(), peer()]) is None


def test_windows_are_grouped_by_kernel_and_length() -> None:
    rows = [
        row("mla_var6_plus", 100.0 + n, s=s, path=MIX, choices={"n": n})
        for s in (16, 32)
        for n in (2048, 0)
    ]
    data = times_over_n([*rows, row("mla_var6_plus", 5.0, s=64, choices={"n": 0})])
    assert data is not None
    assert data.series == {
        "mla_var6_plus, s=16": [(0, 100.0), (2048, 2148.0)],
        "mla_var6_plus, s=32": [(0, 100.0), (2048, 2148.0)],
    }
    assert times_over_n([row()]) is None


def test_the_grid_holds_the_best_of_ours_over_the_best_peer() -> None:
    grid = speedup_grid(sweep_rows())
    assert grid is not None
    assert len(grid.cells) == 8
    assert grid.cells[8, 1024] == pytest.approx(72 / 60)
    assert grid.cells[128, 4096] == pytest.approx(72 * 128 / 1920)
    assert speedup_grid([row()]) is None


def test_the_cells_of_a_grid_are_all_of_one_kind() -> None:
    both = [row(s=1, time_us=100.0), peer(s=1, time_us=150.0)]  # 140 against 190 end to end
    alone = [row(s=2, time_us=100.0, projections_us=None), peer(s=2, time_us=120.0)]
    grid = speedup_grid([*both, *alone])
    assert grid is not None
    assert grid.basis == KERNEL_ONLY
    assert grid.cells == pytest.approx({(1, 4096): 1.5, (2, 4096): 1.2})
    grid = speedup_grid(both)
    assert grid is not None
    assert grid.basis == END_TO_END
    assert grid.cells == pytest.approx({(1, 4096): 190 / 140})


def test_too_good_to_be_true_is_said() -> None:
    # 3e8 bytes at the vendor's 4800 GB/s take 62 us.
    impossible = row("flash_mla", 50.0, flops=1e9)
    found = doubts([impossible, peer(time_us=45.0, flops=1e6, bytes=1e6)])
    assert len(found) == 1
    assert "below the 62.5 µs" in found[0]
    (large,) = doubts([row(time_us=1000.0), peer(time_us=1200.0)])
    assert "1.19x as fast as the best peer" in large
    assert doubts([row(time_us=1000.0), peer(time_us=1050.0)]) == []
    assert doubts([replace(impossible, kind=PREDICTED)]) == []


# --- plots ----------------------------------------------------------------------------------------


def svg(plot: Plot) -> str:
    png, vector = plot.files
    assert png.read_bytes().startswith(b"\x89PNG")
    assert png.stat().st_size > 5000
    return vector.read_text()


def drawn(folder: Path, *rows: BenchRow) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw_plots(record(*rows), folder)}


def test_time_against_s_shows_kernels_and_crossings(tmp_path: Path) -> None:
    text = svg(drawn(tmp_path, *sweep_rows())["time_s"])
    for shown in (
        *("query tokens per request, s", "time end to end, µs", "b=32 t=4096 h=128 on NVIDIA H200"),
        *("flash_mla", "flash_attention", "FlashMLA", "s ≈ 32"),
    ):
        assert shown in text
    assert "predicted" not in text


def test_the_roofline_has_roofs_and_points(tmp_path: Path) -> None:
    text = svg(drawn(tmp_path, *sweep_rows())["roofline"])
    for shown in ("FLOP per byte", "TFLOP/s", "measured rates", "vendor peak", "FlashMLA"):
        assert shown in text


def test_time_against_n_has_one_line_per_length(tmp_path: Path) -> None:
    rows = [
        row("mla_var6_plus_v3", 500.0 + n, s=s, path=MIX, choices={"n": n})
        for s in (16, 32)
        for n in (0, 1024)
    ]
    text = svg(drawn(tmp_path, *rows)["time_n"])
    for shown in (
        *("decompressed tokens per request, n", "time, µs", "b=32 t=4096 h=128"),
        *("mla_var6_plus_v3, s=16", "mla_var6_plus_v3, s=32"),
    ):
        assert shown in text


def test_the_heat_map_has_s_and_t(tmp_path: Path) -> None:
    text = svg(drawn(tmp_path, *sweep_rows())["speedup"])
    for shown in (
        *("KV tokens per request, t", "query tokens per request, s", "Speed-up over the best peer"),
        *("1024", "4096", "128", "1.20"),
    ):
        assert shown in text


def test_the_bars_name_every_kernel(tmp_path: Path) -> None:
    text = svg(drawn(tmp_path, row(choices={"n": 5}), peer())["kernels"])
    for shown in ("flash_mla n=5", "FlashMLA", "time end to end, µs (ours in blue)"):
        assert shown in text


def test_among_equals_the_bars_show_the_common_shape(tmp_path: Path) -> None:
    rows = [row(s=s, t=t) for s, t in ((1, 1024), (16, 4096), (32, 4096))]
    text = svg(drawn(tmp_path, *rows)["kernels"])
    assert "b=32 s=16 t=4096 h=128" in text


def test_predictions_are_marked_on_every_plot(tmp_path: Path) -> None:
    rows = [replace(r, kind=PREDICTED) for r in sweep_rows() if r.kernel != "FlashMLA"]
    rows += [
        row("mla_var6_plus", 100.0 * s + n, s=s, path=MIX, choices={"n": n}, kind=PREDICTED)
        for s in (8, 16)
        for n in (0, 64)
    ]
    plots = drawn(tmp_path, *rows)
    assert not [plot.missing for plot in plots.values() if plot.missing]
    for plot in plots.values():
        assert "predicted" in svg(plot), plot.name
    assert "better pure path" in svg(plots["speedup"])


def test_a_plot_that_cannot_be_drawn_says_why(tmp_path: Path) -> None:
    plots = drawn(tmp_path)
    assert all(plot.missing and not plot.files for plot in plots.values())
    unknown = drawn(tmp_path, row(device="NVIDIA Nothing"))
    assert unknown["roofline"].missing == "NVIDIA Nothing is not in the device table"
    assert unknown["kernels"].files


def test_the_published_record_can_be_drawn(tmp_path: Path) -> None:
    found = load_record(RESULTS / "2026-11-15-nvidia-h200.json")
    plots = {plot.name: plot for plot in draw_plots(found, tmp_path)}
    assert [name for name, plot in plots.items() if plot.missing] == []
    assert "kernel only" in svg(plots["time_s"])


def test_no_two_lines_of_a_plot_have_one_colour() -> None:
    names = ["flash_mla", "flash_attention", "FlashMLA", "FlashInfer", "flash_mla_v2", "x", "y"]
    assert len({series_colour(name, names) for name in names}) == len(names)
