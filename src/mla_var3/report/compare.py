"""Runs side by side: what changed against a baseline, in figures, markdown, JSON and a plot.

A run is read from the record of a profile, or made from a profile's result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_var3.bench.plots import bar_plot
from mla_var3.conf import read_json
from mla_var3.errors import InvalidArgumentError, UnsupportedError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime.markdown import microseconds, number, quantity, table, write_json
from mla_var3.runtime.paths import make_folder, split_full_name, write_atomic
from mla_var3.runtime.profiling import ProfileResult, StageFigures

TOTAL = "total"
RECORD = "params.json"
PREDICTED_TIME = "kernel time, predicted (us)"
"""The kernel time of a run that was predicted by recorded rates."""
PROBLEM_KEYS = (*MlaProblem.__dataclass_fields__, "sliding_window")
"""The fields of a plan that define the problem; the others say how it is solved."""


@dataclass(frozen=True)
class Run:
    """One side of a comparison, with the stages in launch order.

    The device is None for a prediction of no device; `clocks` says whether they were locked, None
    where the record does not say.
    """

    label: str
    kernel: str
    language: str
    mode: str
    device: str | None
    params: Mapping[str, Any]
    total: StageFigures
    stages: Mapping[str, StageFigures]
    clocks: bool | None = None
    folder: Path | None = None

    @property
    def problem(self) -> dict[str, Any]:
        """The fields that define the problem."""
        found = {key: self.params[key] for key in PROBLEM_KEYS if key in self.params}
        # A kernel without the option reads all tokens, as one does with 0.
        return {**found, "sliding_window": self.params.get("sliding_window") or None}

    @property
    def choices(self) -> dict[str, Any]:
        """The other fields, such as n or splits."""
        skipped = (*PROBLEM_KEYS, "seed")
        return {key: value for key, value in self.params.items() if key not in skipped}


def load_run(path: Path) -> Run:
    """Read a profile output folder, or its record itself."""
    file = path / RECORD if path.is_dir() else path
    if not file.is_file():
        below = sorted(path.rglob(RECORD)) if path.is_dir() else []
        hint = f"; there are {len(below)} below it, the last is {below[-1].parent}" if below else ""
        expected = f"a profile output folder with {RECORD}"
        raise InvalidArgumentError(str(path), expected, f"none{hint}")
    record = read_json(file, "the record of a profile")
    try:
        return run_of_record(record, file.parent)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(str(file), "the record of a profile", repr(error)) from error


def run_of_record(record: Mapping[str, Any], folder: Path | None = None) -> Run:
    """A run from its record; figures that the mode did not measure are None."""
    device = record.get("device") or record.get("planned_for")
    total = _figures(record.get("total") or {})
    predictions = record.get("predicted_us") or {}
    if total.predicted_us is None and device in predictions:
        total.predicted_us = float(predictions[device])
    clocks = record.get("clocks")
    return Run(
        label=str(record["kernel"]),
        kernel=str(record["kernel"]),
        language=str(record.get("language", "")),
        mode=str(record["prof_type"]),
        device=device,
        params=dict(record["params"]),
        total=total,
        stages={str(s["name"]): _figures(s) for s in record.get("stages") or []},
        clocks=bool(clocks.get("locked")) if isinstance(clocks, Mapping) else None,
        folder=folder,
    )


def run_of_result(result: ProfileResult) -> Run:
    """A run from the result of a profile."""
    stages = {"total": vars(result.total), "stages": [vars(stage) for stage in result.stages]}
    return run_of_record({**result.record, **stages}, result.out_dir)


def _figures(data: Mapping[str, Any]) -> StageFigures:
    """The figures of a record's stage, extras reduced to the plain numbers among them."""
    extra = data.get("extra") or {}
    time_us, flops, moved, predicted_us = (
        _number(data.get(name)) for name in ("time_us", "flops", "bytes", "predicted_us")
    )
    numbers = {k: x for k, value in extra.items() if (x := _number(value)) is not None}
    name = str(data.get("name", TOTAL))
    return StageFigures(name, time_us, None, flops or 0.0, moved or 0.0, predicted_us, numbers)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def differences(runs: Sequence[Run]) -> list[str]:
    """Why runs may not be compared: another problem or device than the baseline's."""
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
    """What a reader must know about runs that may be compared but were made differently."""
    found = []
    modes = {run.label: run.mode for run in runs}
    if not set(modes.values()) <= {"static", "predicted"} and len(set(modes.values())) > 1:
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
    """One metric of a stage, or of the total: a value per run, and the same for people."""

    where: str
    metric: str
    values: tuple[float | None, ...]
    texts: tuple[str, ...]

    def change(self, index: int) -> float | None:
        """Change of a run from the baseline, in percent."""
        before, after = self.values[0], self.values[index]
        return None if not before or after is None else 100 * (after - before) / before


_Read = Callable[[StageFigures], float | None]
_METRICS: tuple[tuple[str, _Read, Callable[[float | None], str]], ...] = (
    ("time", lambda f: f.time_us, microseconds),
    ("ideal", lambda f: f.predicted_us, microseconds),
    ("TFLOP/s", lambda f: f.tflops, number),
    ("GB/s", lambda f: f.gbps, number),
    ("of roofline", lambda f: f.of_roofline_pct, lambda value: quantity(value, "%")),
)


@dataclass
class Comparison:
    """Runs against the first of them, with unique labels; rows of the total, then of each stage.

    `forced` are differences that the user chose to ignore.
    """

    runs: list[Run]
    rows: list[Row]
    forced: list[str]
    remarks: list[str]

    def notes(self) -> list[str]:
        """What was ignored by force, and what else a reader must know."""
        return [*(f"compared by force: {text}" for text in self.forced), *self.remarks]

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
    """Compare runs with the first; UnsupportedError names what differs where they may not be."""
    named = _unique_labels(runs)
    against = differences(named)
    if against and not force:
        raise UnsupportedError(
            f"compare: expected the same problem on the same device, got {'; '.join(against)}; "
            "--force compares them anyway"
        )
    rows = _rows(TOTAL, [run.total for run in named])
    for stage in dict.fromkeys(name for run in named for name in run.stages):
        # The only stage of every run that has it repeats the total.
        if any(len(run.stages) > 1 for run in named if stage in run.stages):
            rows += _rows(stage, [run.stages.get(stage) for run in named])
    return Comparison(named, rows, against, remarks(named))


def _rows(where: str, figures: Sequence[StageFigures | None]) -> list[Row]:
    rows = []
    for metric, read, show in _METRICS:
        values = tuple(None if f is None else read(f) for f in figures)
        if any(value is not None for value in values):
            rows.append(Row(where, metric, values, tuple(map(show, values))))
    extras = dict.fromkeys(key for f in figures if f is not None for key in f.extra)
    for key in extras:
        values = tuple(None if f is None else f.extra.get(key) for f in figures)
        if sum(value is not None for value in values) > 1:
            rows.append(Row(where, key, values, tuple(map(number, values))))
    return rows


def _unique_labels(runs: Sequence[Run]) -> list[Run]:
    """Runs with unique labels: equal ones get language, mode or number, the first that helps."""
    labels = [run.label for run in runs]
    numbers = [f"#{i + 1}" for i in range(len(runs))]
    for words in ([run.language for run in runs], [run.mode for run in runs], numbers):
        longer = [
            f"{label} {word}" if labels.count(label) > 1 else label
            for label, word in zip(labels, words, strict=True)
        ]
        labels = longer if len(set(longer)) > len(set(labels)) else labels
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def comparison_markdown(result: Comparison) -> str:
    """The comparison as markdown."""
    baseline = result.runs[0]
    problem = " ".join(f"{k}={v}" for k, v in baseline.problem.items() if v is not None)
    rows = []
    for run in result.runs:
        choices = " ".join(f"{k}={v}" for k, v in run.choices.items() if v is not None) or None
        folder = None if run.folder is None else f"`{run.folder}`"
        rows.append((run.label, run.kernel, run.mode, run.device, choices, folder))
    parts = [
        f"# {' against '.join(run.label for run in result.runs)}\n",
        f"### Configuration\n\n{problem} on {baseline.device or 'no device'}\n",
        table(("Run", "Kernel", "Mode", "Device", "Choices", "Record"), rows),
        f"### vs Baseline ({baseline.label})\n",
        table(result.headers(), result.cells()),
    ]
    parts += ["".join(f"- {text}\n" for text in result.notes())] if result.notes() else []
    return "\n".join(parts)


def comparison_data(result: Comparison) -> dict[str, Any]:
    """The comparison, JSON-ready."""
    labels = [run.label for run in result.runs]
    runs, metrics = [], []
    for run in result.runs:
        same = {name: getattr(run, name) for name in ("label", "kernel", "mode", "device")}
        folder = None if run.folder is None else str(run.folder)
        more = {"params": dict(run.params), "clocks_locked": run.clocks, "folder": folder}
        runs.append({**same, **more})
    for row in result.rows:
        values = dict(zip(labels, row.values, strict=True))
        changes = {label: row.change(index) for index, label in enumerate(labels) if index}
        what = {"stage": row.where, "metric": row.metric}
        metrics.append({**what, "values": values, "change_percent": changes})
    found = {"baseline": labels[0], "runs": runs, "metrics": metrics}
    return {**found, "forced": result.forced, "remarks": result.remarks}


def comparison_plot(result: Comparison, path: Path) -> list[Path]:
    """Bars of the times, total and stage by stage; empty where no run has any."""
    metrics = {row.metric for row in result.rows}
    metric = next((m for m in ("time", PREDICTED_TIME, "ideal") if m in metrics), None)
    labels = [run.label for run in result.runs]
    groups = {
        row.where: {k: v for k, v in zip(labels, row.values, strict=True) if v is not None}
        for row in result.rows
        if row.metric == metric
    }
    if not groups:
        return []
    kernels = ", ".join(dict.fromkeys(run.kernel for run in result.runs))
    title = f"{kernels} on {result.runs[0].device or 'no device'}"
    return bar_plot(groups, path, title=title, y_label=f"{metric}, µs")


def write_comparison(result: Comparison, folder: Path, json_file: Path | None = None) -> Path:
    """Write page, figures and plot into a folder, the figures into a further file too."""
    make_folder(folder)
    text = comparison_markdown(result)
    if comparison_plot(result, folder / "compare"):
        text += "\n![times side by side](compare.png)\n"
    write_atomic(folder / "compare.md", text)
    for file in filter(None, (folder / "compare.json", json_file)):
        write_json(file, comparison_data(result))
    return folder / "compare.md"
