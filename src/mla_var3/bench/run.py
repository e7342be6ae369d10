"""A benchmark from its options to its files: measured on a GPU, predicted without one, or read.

Every run writes the record (JSON), the rows (CSV), the plots (PNG and SVG), a markdown page and
one self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mla_var3.bench.analysis import row_speedups
from mla_var3.bench.options import MEASURE, PREDICT, BenchOptions
from mla_var3.bench.page import html_page, markdown_page
from mla_var3.bench.plots import Plot, draw_plots
from mla_var3.bench.record import (
    FAILED,
    LOST,
    OURS,
    BenchRecord,
    BenchRow,
    circumstances,
    csv_text,
    load_record,
    merge_records,
    save_record,
)
from mla_var3.bench.regression import Regression, compare_records
from mla_var3.bench.session import measure, unique_rows
from mla_var3.bench.suites import (
    COMMON,
    DESIGN,
    QUICK_SWEEP,
    QUICK_WINDOW_STEPS,
    SWEEP,
    WINDOW_S,
    WINDOW_STEPS,
    Case,
    absorbed_cases,
    figures_cases,
    mix_cases,
    mla_kernels,
    select_backends,
    select_kernels,
    sweep_cases,
    window_cases,
)
from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime import paths
from mla_var3.runtime.environment import environment
from mla_var3.runtime.files import make_folder, write_atomic
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.measure import require_cuda
from mla_var3.runtime.workflow import cuda_available, planning_device


@dataclass
class BenchResult:
    """What came out.

    Attributes:
        folder: where the files lie.
        record: the rows.
        plots: the plots, drawn or not.
        files: by kind: json, csv, markdown, html.
        regression: the comparison with an earlier record.
        missing: what was asked for by name and does not exist -> reason.
    """

    folder: Path
    record: BenchRecord
    plots: list[Plot]
    files: dict[str, Path]
    regression: Regression | None
    missing: dict[str, str]

    @property
    def failed(self) -> list[BenchRow]:
        """Our rows that broke, are wrong, or never had their turn."""
        bad = (FAILED, LOST)
        return [row for row in self.record.rows if row.source == OURS and row.status in bad]


def run_bench(options: BenchOptions) -> BenchResult:
    """Run, predict or read, and write the report.

    Raises:
        UnsupportedError: `mode` is "measure" and there is no GPU.
    """
    # Read first: a file that cannot be used should not cost a measurement.
    earlier = load_record(options.against) if options.against else None
    if options.resume and not _measures(options):
        raise InvalidArgumentError("resume", "a GPU to go on with", "none")
    name = "records" if options.records else options.suite
    folder = options.out_dir or (options.resume.parent if options.resume else None)
    folder = folder or paths.output_root() / "bench" / name / paths.timestamp()
    missing: dict[str, str] = {}
    if options.records:
        record = merge_records(load_record(path) for path in options.records)
    else:
        cases, missing = build_cases(options)
        make_folder(folder)  # now, for the same reason
        record = BenchRecord(options.suite, environment(), absent=dict(missing))
        save = folder / f"{name}.json"
        if _measures(options):
            measure(record, cases, options, save)
        else:
            _predict(record, cases, options)
    regression = None
    if earlier is not None:
        regression = compare_records(record, earlier, across_versions=options.across_versions)
    return _write(record, folder, name, regression, missing)


def build_cases(options: BenchOptions) -> tuple[list[Case], dict[str, str]]:
    """The cases of a suite, and what was asked for but does not exist.

    Raises:
        UnknownNameError: a kernel or backend that does not exist.
    """
    languages, peers = select_backends(options.backends)
    kernels = [kernel for kernel in mla_kernels() if kernel.language in languages]
    if options.suite == "figures":
        return figures_cases(kernels, peers), {}
    if options.suite == "absorbed":
        return absorbed_cases(kernels, peers), {}
    if options.suite == "mix":
        return mix_cases(kernels, peers), {}
    base = _base(options)
    if options.suite == "var6_plus":
        return _window_cases(base, options, languages, kernels, peers)
    default = ("all",) if options.suite == "all" else ("latest",)
    chosen = select_kernels(options.kernels or default, kernels) if kernels else []
    grid = QUICK_SWEEP if options.quick else SWEEP
    sizes = {**(grid if options.suite == "sweep" else {}), **options.sizes}
    return sweep_cases(base, sizes, chosen, peers), {}


def _base(options: BenchOptions) -> MlaProblem:
    first: dict[str, Any] = {name: values[0] for name, values in options.sizes.items()}
    return replace(COMMON, dtype=options.dtype, causal=options.causal, **first)


def _window_cases(
    base: MlaProblem,
    options: BenchOptions,
    languages: Sequence[str],
    kernels: Sequence[paths.KernelId],
    peers: Sequence[str],
) -> tuple[list[Case], dict[str, str]]:
    wanted = f"v{'0' if options.version is None else options.version.removeprefix('v')}"
    versions, reasons = [], {}
    for language in languages:
        there = {k.version: k for k in kernels if (k.design, k.language) == (DESIGN, language)}
        if wanted in there:
            versions.append(there[wanted])
        else:
            known = f"there are {', '.join(there)}" if there else "there is no version at all"
            reasons[f"{DESIGN} {wanted} ({language})"] = f"does not exist; {known}"
    if not versions:
        return [], reasons
    s_values = options.sizes.get("s", WINDOW_S)
    steps = QUICK_WINDOW_STEPS if options.quick else WINDOW_STEPS
    cases = window_cases(base, s_values, options.n_values, versions, kernels, peers, steps)
    # Another language may simply not have the version, unless it was asked for by name.
    return cases, reasons if options.backends else {}


def _measures(options: BenchOptions) -> bool:
    if options.mode == PREDICT or options.predict_for:
        return False
    if options.mode == MEASURE:
        require_cuda("bench --mode=measure", "--mode=predict needs none")
    return options.mode == MEASURE or cuda_available()


def _predict(record: BenchRecord, cases: Sequence[Case], options: BenchOptions) -> None:
    from mla_var3.bench.predict import NOTE, predict_case

    spec: DeviceSpec = (
        device_spec(options.predict_for) if options.predict_for else planning_device()
    )
    record.notes = [NOTE]
    record.settings = {"predicted for": spec.name}
    around = circumstances(record.environment, spec.name)
    for done, case in enumerate(cases):
        options.progress("predictions", done, len(cases), "")
        rows = unique_rows(predict_case(case, spec, around))
        record.rows += rows
        options.on_rows(rows)
    options.progress("predictions", len(cases), len(cases), "")


def _write(
    record: BenchRecord,
    folder: Path,
    name: str,
    regression: Regression | None,
    missing: dict[str, str],
) -> BenchResult:
    files = {
        "json": folder / f"{name}.json",
        "csv": folder / f"{name}.csv",
        "markdown": folder / f"{name}.md",
        "html": folder / f"{name}.html",
    }
    make_folder(folder)
    save_record(record, files["json"])
    write_atomic(files["csv"], csv_text(record, row_speedups(record.rows)))
    plots = draw_plots(record, folder)
    write_atomic(files["markdown"], markdown_page(record, plots, regression))
    write_atomic(files["html"], html_page(record, plots, regression))
    if regression is not None:
        files["regression"] = folder / "regression.json"
        write_json(files["regression"], regression.to_dict())
    return BenchResult(folder, record, plots, files, regression, missing)
