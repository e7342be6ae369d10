"""Findings of a record: the fastest, speed-ups, crossings, windows, doubts; and the plots."""

from dataclasses import replace
from pathlib import Path

import pytest

from mla_var3.bench import analysis
from mla_var3.bench.analysis import doubts, shape_groups, speedup_grid, times_over_n, times_over_s
from mla_var3.bench.plots import Plot, draw_plots, series_colour
from mla_var3.bench.record import DECOMPRESSED, FAILED, MIX, PREDICTED, PROJECTION, BenchRow
from tests.unit.bench.bench_support import peer, record, row


def sweep_rows() -> list[BenchRow]:
    """Latent doubles with s, decompressed stays; the lines meet at s = 32."""
    rows = []
    for t in (1024, 4096):
        for s in (8, 16, 64, 128):
            share, case = t / 4096, {"s": s, "t": t, "projections_us": 0.0}
            rows += [
                row("flash_mla", 60.0 * s * share, **case),
                row("flash_attention", 1920.0 * share, path=DECOMPRESSED, **case),
                peer("FlashMLA", 72.0 * s * share, **case),
            ]
    return rows


def eight_bit(time_us: float, **changes: object) -> BenchRow:
    return row("mla_var6_plus_v2", time_us, language="cute-dsl", path=MIX, **changes)


def window_rows(least: float = 100.0, **changes: object) -> list[BenchRow]:
    return [
        row("mla_var6_plus_v3", least + n, s=s, path=MIX, choices={"n": n}, **changes)
        for s in (16, 32)
        for n in (2048, 0)
    ]


def test_projections_and_failures_do_not_compete():
    rows = [
        row(time_us=1000.0),
        row("query projection", 10.0, source=PROJECTION, projections_us=None),
        row("mla_var6_plus", None, status=FAILED),
        peer(time_us=900.0),
    ]
    (group,) = shape_groups(rows)
    assert (group.best_ours, group.best_rival) == (rows[0], rows[3])
    assert group.basis == analysis.CALL_TIME
    assert analysis.row_speedups(rows) == {0: pytest.approx(940 / 1040), 3: 1.0}
    (group,) = shape_groups([row(), peer(projections_us=None)])
    assert group.basis == analysis.KERNEL_TIME


def test_an_eight_bit_kernel_is_never_our_best():
    rows = [row(time_us=1000.0), eight_bit(500.0), peer(time_us=900.0)]
    (group,) = shape_groups(rows)
    assert (group.best_ours, group.best_eight_bit) == (rows[0], rows[1])
    grid = speedup_grid(rows)
    assert grid is not None and grid.cells == pytest.approx({(16, 4096): 940 / 1040})
    assert any(rows[1].label in text and "1.74x" in text for text in doubts(rows))
    lines = [eight_bit(10.0 * s, s=s) for s in (8, 16, 64, 128)]
    data = times_over_s([*sweep_rows(), *lines])
    assert data is not None and "mla_var6_plus_v2 (cute-dsl) 8-bit" in data.series
    assert [(c.before, c.after) for c in data.crossings] == [("flash_mla", "flash_attention")]


def test_8_bit_caches_meet_8_bit_peers():
    """Our 16-bit kernel is not compared with an 8-bit peer, our 8-bit one with all of them."""
    fp8 = {"cache_dtype": "fp8", "language": "cute-dsl"}
    rows = [row(time_us=1000.0), row("flash_mla", 450.0, **fp8), peer(time_us=900.0)]
    rows.append(peer("FlashMLA (vLLM)", 700.0, cache_dtype="fp8"))
    (group,) = shape_groups(rows)
    assert (group.best_ours, group.best_eight_bit) == (rows[0], rows[1])
    assert (group.rival_of(rows[0]), group.rival_of(rows[1])) == (rows[2], rows[3])
    assert group.speedup(rows[0]) == pytest.approx(940 / 1040)
    assert group.speedup(rows[1]) == pytest.approx(740 / 490)
    assert rows[1].series == "flash_mla (cute-dsl) fp8"
    predicted = [replace(each, kind=PREDICTED) for each in rows[:2]]
    (group,) = shape_groups(predicted)
    assert group.rivals == predicted[:1] and group.best_eight_bit is predicted[1]


def test_a_prediction_is_compared_with_the_pure_paths():
    pure = [row(name, 800.0, kind=PREDICTED) for name in ("flash_mla_v2", "flash_attention")]
    mix = row("mla_var6_plus", 400.0, kind=PREDICTED, projections_us=20.0)
    (group,) = shape_groups([*pure, mix])
    assert (group.best_rival, group.best_ours) == (pure[0], mix)
    assert group.speedup(mix) == pytest.approx(840 / 420)


def test_crossings_lie_where_the_lines_meet_and_windows_are_grouped():
    data = times_over_s(sweep_rows())
    assert data is not None and data.title == "b=32 t=4096 h=128"
    (crossing,) = data.crossings
    assert (crossing.before, crossing.after) == ("flash_mla", "flash_attention")
    assert crossing.s == pytest.approx(32.0)
    data = times_over_n([*window_rows(), row("mla_var6_plus", 5.0, s=64, choices={"n": 0})])
    points = [(0, 100.0), (2048, 2148.0)]
    assert data is not None
    assert data.series == {f"mla_var6_plus_v3, s={s}": points for s in (16, 32)}
    assert times_over_s([row(), peer()]) is times_over_n([row()]) is None


def test_only_lines_with_a_time_on_either_side_cross():
    for a, b, meet in (
        # A tie changes nothing; the lines part after s=4.
        ([(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)], [(1, 1.2), (2, 2.0), (4, 4.0), (8, 4.0)], 4),
        ([(1, 1.0), (2, 2.0)], [(4, 1.0), (8, 1.0)], None),  # one ends before the other starts
        ([(1, 1.0), (2, 2.0)], [(1, 3.0), (2, 3.0), (4, 3.0)], None),  # the faster one ends
        ([(1, 5.0), (2, 5.0), (4, 5.0)], [(2, 1.0), (4, 1.0)], None),  # a faster one starts
        ([(1, 1.0), (4, 4.0)], [(1, 2.0), (2, 2.0), (4, 2.0)], 2),  # a gap hides no crossing
        ([(1, 1.0), (4, 2.0)], [(1, 2.0), (2, 3.0), (4, 4.0)], None),
    ):  # fmt: skip
        found = analysis.find_crossings({"b": b, "a": a})
        assert [(c.before, c.after) for c in found] == ([] if meet is None else [("a", "b")])
        assert meet is None or found[0].s == pytest.approx(meet)


def test_the_grid_compares_all_cells_by_the_same_time():
    grid = speedup_grid(sweep_rows())
    assert grid is not None and len(grid.cells) == 8
    assert grid.cells[128, 4096] == pytest.approx(72 * 128 / 1920)
    assert speedup_grid([row()]) is None
    both = [row(s=1, time_us=100.0), peer(s=1, time_us=150.0)]  # call times 140 and 190
    alone = [row(s=2, time_us=100.0, projections_us=None), peer(s=2, time_us=120.0)]
    for rows, basis, cells in (
        (both, analysis.CALL_TIME, {(1, 4096): 190 / 140}),
        ([*both, *alone], analysis.KERNEL_TIME, {(1, 4096): 1.5, (2, 4096): 1.2}),
    ):
        grid = speedup_grid(rows)
        assert grid is not None and grid.basis == basis
        assert grid.cells == pytest.approx(cells)


def test_doubtful_rows_are_named():
    # 3e8 bytes at the vendor's 4800 GB/s take 62 us.
    impossible = row("flash_mla", 50.0, flops=1e9)
    (found,) = doubts([impossible, peer(time_us=45.0, flops=1e6, bytes=1e6)])
    assert "below the 62.5 µs" in found
    (large,) = doubts([row(time_us=1000.0), peer(time_us=1200.0)])
    assert "1.19x as fast as the best peer" in large
    assert doubts([row(time_us=1000.0), peer(time_us=1050.0)]) == []
    assert doubts([replace(impossible, kind=PREDICTED)]) == []
    # 1e12 FLOPs take 1011 us at the vendor's peak in 16 bits, half of that in 8.
    fast = eight_bit(600.0, flops=1e12, bytes=1e6)
    assert doubts([fast]) == []
    assert "below the 1010.7 µs" in doubts([replace(fast, language="cutile-dsl")])[0]
    assert "below the 505.4 µs" in doubts([replace(fast, time_us=500.0)])[0]


def svg(plot: Plot) -> str:
    png, vector = plot.files
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5000
    return vector.read_text()


def drawn(folder: Path, *rows: BenchRow) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw_plots(record(*rows), folder)}


WORDS = {
    "time_s": ("query tokens per request, s", "call time, µs", "on NVIDIA H200", "s ≈ 32"),
    "roofline": ("FLOP per byte", "TFLOP/s", "burst rates", "vendor peak", "FlashMLA"),
    "time_n": ("tokens per request, n", "kernel time, µs", "mla_var6_plus_v3, s=16"),
    "speedup": ("KV tokens per request, t", "Speed-up over the best peer", "1024", "1.20"),
    "kernels": ("b=32 s=16 t=4096 h=128", "mla_var6_plus_v2 (cute-dsl) 8-bit n=4096",
                "(ours in blue, 8-bit hatched)"),
}  # fmt: skip


def test_a_plot_says_what_it_shows(tmp_path):
    rows = [*sweep_rows(), *window_rows(9000.0), eight_bit(300.0, s=16, choices={"n": 4096})]
    plots = drawn(tmp_path, *rows)
    for name, words in WORDS.items():
        text = svg(plots[name])
        assert [word for word in words if word not in text] == [] and "predicted" not in text


def test_predictions_are_marked_on_every_plot(tmp_path):
    rows = [replace(r, kind=PREDICTED) for r in sweep_rows() if r.kernel != "FlashMLA"]
    rows += window_rows(kind=PREDICTED)
    found = drawn(tmp_path, *rows)
    assert not [plot.missing for plot in found.values() if plot.missing]
    for plot in found.values():
        assert "predicted" in svg(plot), plot.name
    assert "better pure path" in svg(found["speedup"])


def test_a_plot_that_cannot_be_drawn_says_why(tmp_path):
    assert all(plot.missing and not plot.files for plot in drawn(tmp_path).values())
    unknown = drawn(tmp_path, row(device="NVIDIA Nothing"))
    assert unknown["roofline"].missing == "NVIDIA Nothing is not in the device table"
    assert unknown["kernels"].files
    names = ["flash_mla", "flash_attention", "FlashMLA", "FlashInfer", "flash_mla_v2", "x", "y"]
    assert len({series_colour(name, names) for name in names}) == len(names)
