"""Runs side by side: what changed against a baseline, in figures, markdown, JSON and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.report.compare_runs import Figures, Run
from mla_var3.report.plots import bar_plot
from mla_var3.runtime.markdown import microseconds, number, quantity, table
from mla_var3.runtime.paths import split_full_name

TOTAL = "total"
PREDICTED_TIME = "kernel time, predicted (us)"
"""The kernel time of a run that was predicted by recorded rates."""


def differences(runs: Sequence[Run]) -> list[str]:
    """Why runs may not be compared: other problems or devices than the baseline's."""
    baseline, *others = runs
    found = []
    for run in others:
        parts = [
            f"{key} {baseline.problem[key]} against {run.problem[key]}"
            for key in baseline.problem
            if key in run.problem and _plain(baseline.problem[key]) != _plain(run.problem[key])
        ]
        if baseline.device != run.device:
            parts.append(f"device {baseline.device} against {run.device}")
        if parts:
            found.append(f"{baseline.label} and {run.label}: {', '.join(parts)}")
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader should know about runs that may be compared but were made differently."""
    found = []
    modes = {run.label: run.mode for run in runs}
    if len(set(modes.values())) > 1:
        each = ", ".join(f"{label}: {mode}" for label, mode in modes.items())
        found.append(f"the modes differ ({each}); they time different things")
    if len({run.clocks for run in runs if run.clocks is not None}) > 1:
        locked = ", ".join(run.label for run in runs if run.clocks)
        found.append(f"only {locked} ran with locked clocks")
    if len({split_full_name(run.kernel)[0] for run in runs}) > 1:
        found.append(
            "kernel times leave out projections, which designs need differently; hyper-mla "
            "predict shows call times"
        )
    missing = [run.label for run in runs if run.total.time_us is None]
    if missing and len(missing) < len(runs):
        found.append(f"no measured time in {', '.join(missing)}")
    elif missing:
        found.append("nothing was measured: times are predictions, or ideal at vendor peaks")
    return found


@dataclass(frozen=True)
class Row:
    """One metric of all runs.

    Attributes:
        where: stage name, or "total".
        metric: name with unit.
        values: one per run, None where it is missing.
        texts: the same for people.
    """

    where: str
    metric: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]

    def change(self, index: int) -> float | None:
        """Change of a run against the baseline, in percent."""
        before, after = self.values[0], self.values[index]
        return None if not before or after is None else 100 * (after - before) / before


_METRICS: tuple[tuple[str, Callable[[Figures], float | None], Callable[[float | None], str]], ...]
_METRICS = (
    ("time", lambda f: f.time_us, microseconds),
    ("ideal", lambda f: f.predicted_us, microseconds),
    ("TFLOP/s", lambda f: f.tflops, number),
    ("GB/s", lambda f: f.gbps, number),
    ("of roofline", lambda f: f.of_roofline, lambda value: quantity(value, "%")),
)


@dataclass
class Comparison:
    """Runs against the first of them.

    Attributes:
        runs: the baseline first; labels are unique.
        rows: total first, then stage by stage.
        forced: differences that somebody chose to ignore.
        remarks: what to know.
    """

    runs: list[Run]
    rows: list[Row]
    forced: list[str]
    remarks: list[str]

    def headers(self) -> tuple[str, ...]:
        """Column titles; two runs are previous and current."""
        if len(self.runs) == 2:
            before, after = (run.label for run in self.runs)
            return ("", "Metric", f"Previous: {before}", f"Current: {after}", "Change")
        titles = [f"{self.runs[0].label} (baseline)"]
        for run in self.runs[1:]:
            titles += [run.label, "Change"]
        return ("", "Metric", *titles)

    def cells(self) -> list[tuple[str, ...]]:
        """The rows of the table, for screens and for markdown."""
        rows = []
        last = ""
        for row in self.rows:
            cells = [row.texts[0]]
            for index in range(1, len(self.runs)):
                cells += [row.texts[index], change_text(row.metric, row.change(index))]
            rows.append((row.where if row.where != last else "", row.metric, *cells))
            last = row.where
        return rows


def change_text(metric: str, percent: float | None) -> str:
    """A change in percent; times also say which way it went."""
    if percent is None:
        return "-"
    text = f"{percent:+.1f} %"
    if "time" in metric and abs(percent) >= 0.05:
        text += " (faster)" if percent < 0 else " (slower)"
    return text


def compare(runs: Sequence[Run], *, force: bool = False) -> Comparison:
    """Compare runs with the first.

    Raises:
        InvalidArgumentError: fewer than two runs.
        UnsupportedError: they computed different things or ran on different devices; the message
            names what differs.
    """
    if len(runs) < 2:
        raise InvalidArgumentError("runs", "at least two to compare", len(runs))
    named = _unique_labels(runs)
    against = differences(named)
    if against and not force:
        raise UnsupportedError(
            f"compare: expected the same problem on the same device, got {'; '.join(against)}; "
            "--force compares them all the same"
        )
    rows = _rows(TOTAL, [run.total for run in named])
    for stage in dict.fromkeys(name for run in named for name in run.stages):
        if stage_is_total(named, stage):
            continue
        rows += _rows(stage, [run.stages.get(stage) for run in named])
    return Comparison(named, rows, against, remarks(named))


def stage_is_total(runs: Sequence[Run], stage: str) -> bool:
    """Whether a stage is the only one of every run that has it, so that the total says it all."""
    return all(len(run.stages) == 1 for run in runs if stage in run.stages)


def _rows(where: str, figures: Sequence[Figures | None]) -> list[Row]:
    rows = []
    for metric, read, show in _METRICS:
        values = tuple(None if f is None else read(f) for f in figures)
        if any(value is not None for value in values):
            rows.append(Row(where, metric, values, tuple(map(show, values))))
    extras = dict.fromkeys(key for f in figures if f is not None for key in f.extra)
    for key in extras:
        values = tuple(None if f is None else f.extra.get(key) for f in figures)
        # One run alone has nothing to be compared with.
        if sum(value is not None for value in values) > 1:
            rows.append(Row(where, key, values, tuple(map(number, values))))
    return rows


def _unique_labels(runs: Sequence[Run]) -> list[Run]:
    """Runs whose labels differ: equal ones get their mode, else their folder, else a number."""
    named = list(runs)
    for describe in (_with_mode, _with_folder, _with_number):
        labels = [run.label for run in named]
        candidates = [
            replace(run, label=describe(run, index)) if labels.count(run.label) > 1 else run
            for index, run in enumerate(named)
        ]
        if len({run.label for run in candidates}) > len(set(labels)):
            named = candidates
    return named


def _with_mode(run: Run, index: int) -> str:
    return f"{run.label} {run.mode}"


def _with_folder(run: Run, index: int) -> str:
    return f"{run.label} {run.folder.name}" if run.folder else run.label


def _with_number(run: Run, index: int) -> str:
    return f"{run.label} #{index + 1}"


def comparison_markdown(result: Comparison) -> str:
    """The comparison as markdown."""
    baseline = result.runs[0]
    problem = " ".join(f"{k}={v}" for k, v in baseline.problem.items() if v is not None)
    parts = [
        f"# {' against '.join(run.label for run in result.runs)}\n",
        "### Configuration\n",
        f"{problem} on {baseline.device or 'no device'}\n",
        table(
            ("Run", "Kernel", "Mode", "Device", "Choices", "Record"),
            [
                (
                    run.label,
                    run.kernel,
                    run.mode,
                    run.device,
                    " ".join(f"{k}={v}" for k, v in run.choices.items() if v is not None) or None,
                    None if run.folder is None else f"`{run.folder}`",
                )
                for run in result.runs
            ],
        ),
        f"### vs Baseline ({baseline.label})\n",
        table(result.headers(), result.cells()),
    ]
    notes = [f"- compared by force: {text}" for text in result.forced]
    notes += [f"- {text}" for text in result.remarks]
    return "\n".join(parts) + ("\n" + "\n".join(notes) + "\n" if notes else "")


def comparison_data(result: Comparison) -> dict[str, Any]:
    """The comparison, JSON-ready."""
    labels = [run.label for run in result.runs]
    return {
        "baseline": labels[0],
        "runs": [
            {
                "label": run.label,
                "kernel": run.kernel,
                "mode": run.mode,
                "device": run.device,
                "params": dict(run.params),
                "clocks_locked": run.clocks,
                "folder": None if run.folder is None else str(run.folder),
            }
            for run in result.runs
        ],
        "metrics": [
            {
                "stage": row.where,
                "metric": row.metric,
                "values": dict(zip(labels, row.values, strict=True)),
                "change_percent": {labels[i]: row.change(i) for i in range(1, len(labels))},
            }
            for row in result.rows
        ],
        "forced": result.forced,
        "remarks": result.remarks,
    }


def _has_model(result: Comparison) -> bool:
    return any(row.metric == PREDICTED_TIME for row in result.rows)


def comparison_plot(result: Comparison, path: Path) -> list[Path]:
    """Bars of the times, total and stage by stage; empty where no run has any."""
    measured = any(run.total.time_us is not None for run in result.runs)
    metric = "time" if measured else PREDICTED_TIME if _has_model(result) else "ideal"
    groups = {}
    for row in result.rows:
        if row.metric == metric:
            labels = [run.label for run in result.runs]
            pairs = zip(labels, row.values, strict=True)
            groups[row.where] = {label: value for label, value in pairs if value is not None}
    if not groups:
        return []
    kernels = ", ".join(dict.fromkeys(run.kernel for run in result.runs))
    return bar_plot(
        groups,
        path,
        title=f"{kernels} on {result.runs[0].device or 'no device'}",
        y_label=f"{metric}, µs",
    )
