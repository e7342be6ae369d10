"""What the plots of the main job show: predictions turned into panels and series."""

from __future__ import annotations

from collections.abc import Iterable

from mla_var3.report.plots import Panel, Region
from mla_var3.report.sweep import S_VALUES, DeviceSweep

PURE_PATHS = ("flash_mla", "flash_attention")


def dense_s_values(last: int = S_VALUES[-1], per_octave: int = 8) -> list[int]:
    """Query lengths close enough for smooth curves, the powers of two among them."""
    values, i = set(), 0
    while (s := round(2 ** (i / per_octave))) <= last:
        values.add(s)
        i += 1
    return sorted(values)


def crossover_panels(sweeps: Iterable[DeviceSweep]) -> list[Panel]:
    """One panel per device."""
    return [
        Panel(
            title=entry.device.removeprefix("NVIDIA "),
            subtitle=entry.heading,
            x=entry.s_values,
            curves={
                kernel: [prediction.advised_us for prediction in predictions]
                for kernel, predictions in entry.predictions.items()
            },
            regions=[Region(c.kernel, c.s_from, c.s_to) for c in entry.crossovers],
        )
        for entry in sweeps
    ]


def speedup_series(
    sweeps: Iterable[DeviceSweep], kernel: str = "mla_var6_plus"
) -> dict[str, list[tuple[float, float]]]:
    """How much faster than the better of the two pure paths a kernel is predicted, per device."""
    series = {}
    for entry in sweeps:
        points = []
        for i, s in enumerate(entry.s_values):
            pure = min(entry.predictions[path][i].advised_us for path in PURE_PATHS)
            points.append((float(s), pure / entry.predictions[kernel][i].advised_us))
        series[entry.device.removeprefix("NVIDIA ")] = points
    return series


def dense_sweeps(sweeps: Iterable[DeviceSweep]) -> list[DeviceSweep]:
    """The same predictions at enough points for smooth curves."""
    return [entry.resampled(dense_s_values(entry.s_values[-1])) for entry in sweeps]
