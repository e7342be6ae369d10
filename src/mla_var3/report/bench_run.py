"""A benchmark from its options to its files: measured on a GPU, predicted without one, or read.

Every run writes the record (JSON), the rows (CSV), the plots (PNG and SVG), a markdown page and
one self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mla_var3.conf.devices import DeviceSpec, device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.report.bench_analysis import row_speedups
from mla_var3.report.bench_measure import MAX_SECONDS, ROUNDS
from mla_var3.report.bench_page import html_page, markdown_page
from mla_var3.report.bench_plots import Plot, draw_plots
from mla_var3.report.bench_record import (
    FAILED,
    OURS,
    BenchRecord,
    BenchRow,
    circumstances,
    csv_text,
    load_record,
    merge_records,
    row_key,
    save_record,
)
from mla_var3.report.bench_regression import Regression, compare_records
from mla_var3.report.bench_suites import (
    COMMON,
    DESIGN,
    FIXED_SUITES,
    SUITES,
    SWEEP,
    WINDOW_S,
    Case,
    absorbed_cases,
    figures_cases,
    mla_kernels,
    select_backends,
    select_kernels,
    sweep_cases,
    window_cases,
)
from mla_var3.runtime import paths
from mla_var3.runtime.environment import environment
from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.measure import require_cuda
from mla_var3.runtime.workflow import (
    Progress,
    cuda_available,
    current_device_spec,
    no_progress,
    planning_device,
)

MEASURE, PREDICT, AUTO = "measure", "predict", "auto"
_ONE_VALUE = {"all": ("b", "s", "t", "h"), "var6_plus": ("b", "t", "h")}


@dataclass
class BenchOptions:
    """What to run.

    Attributes:
        suite: one of `mla_var3.report.bench_suites.SUITES`.
        sizes: b, s, t and h, each one or several values.
        dtype, causal: the rest of the problem.
        n_values: windows of the suite var6_plus.
        version: version of mla_var6_plus for that suite.
        kernels: "all", "latest", designs or full names.
        backends: languages and peers; all of them when empty.
        rounds: how often each contender is timed.
        max_seconds: time for one timing.
        tune: search tilings before timing.
        peer_libs: folder with the peers' operator libraries.
        mode: "measure", "predict", or "auto": measure where there is a GPU.
        predict_for: device of the table to predict for.
        records: records to read instead of running anything.
        against: earlier record to compare with.
        across_versions: compare also where compilers or peers have other versions.
        out_dir: folder of the report.
        progress: reporter for long work.
        on_rows: called with the rows of each finished shape.
    """

    suite: str = "figures"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: str = "bfloat16"
    causal: bool = True
    n_values: tuple[int, ...] | None = None
    version: str | None = None
    kernels: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    rounds: int = ROUNDS
    max_seconds: float = MAX_SECONDS
    tune: bool = False
    peer_libs: Path | None = None
    mode: str = AUTO
    predict_for: str | None = None
    records: tuple[Path, ...] = ()
    against: Path | None = None
    across_versions: bool = False
    out_dir: Path | None = None
    progress: Progress = no_progress
    on_rows: Callable[[Sequence[BenchRow]], None] = lambda rows: None

    def __post_init__(self) -> None:
        if self.suite not in SUITES:
            raise UnknownNameError("suite", self.suite, SUITES)
        if self.rounds < 1:
            raise InvalidArgumentError("rounds", "a number of at least 1", self.rounds)
        if not self.max_seconds > 0:
            raise InvalidArgumentError("max_seconds", "a positive number", self.max_seconds)
        if self.suite in FIXED_SUITES:
            given = [*self.sizes, *(["causal"] if not self.causal else [])]
            given += ["dtype"] if self.dtype != COMMON.dtype else []
            given += ["kernels"] if self.kernels else []
            if given:
                raise InvalidArgumentError(
                    given[0],
                    f"none: the suite {self.suite} has fixed shapes (use all or sweep)",
                    "one",
                )
        for name, values in self.sizes.items():
            if not values or (name in _ONE_VALUE.get(self.suite, ()) and len(values) > 1):
                count = "one value" if name in _ONE_VALUE.get(self.suite, ()) else "some values"
                raise InvalidArgumentError(name, f"{count} for the suite {self.suite}", values)
        for name, value in (("n", self.n_values), ("version", self.version)):
            if value is not None and self.suite != "var6_plus":
                raise InvalidArgumentError(name, "none: only the suite var6_plus has it", value)


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
        """Our rows that broke or are wrong."""
        return [r for r in self.record.rows if r.source == OURS and r.status == FAILED]


def run_bench(options: BenchOptions) -> BenchResult:
    """Run, predict or read, and write the report.

    Raises:
        UnsupportedError: `mode` is "measure" and there is no GPU.
    """
    # Read first: a file that cannot be used should not cost a measurement.
    earlier = load_record(options.against) if options.against else None
    name = "records" if options.records else options.suite
    folder = options.out_dir or paths.output_root() / "bench" / name / paths.timestamp()
    missing: dict[str, str] = {}
    if options.records:
        record = merge_records(load_record(path) for path in options.records)
    else:
        cases, missing = build_cases(options)
        record = BenchRecord(options.suite, environment(), absent=dict(missing))
        save = folder / f"{name}.json"
        if _measures(options):
            _measure(record, cases, options, save)
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
    base = _base(options)
    if options.suite == "var6_plus":
        return _window_cases(base, options, languages, kernels, peers)
    default = ("all",) if options.suite == "all" else ("latest",)
    chosen = select_kernels(options.kernels or default, kernels) if kernels else []
    sizes = {**(SWEEP if options.suite == "sweep" else {}), **options.sizes}
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
    wanted = f"v{(options.version or '0').removeprefix('v')}"
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
    cases = window_cases(base, s_values, options.n_values, versions, kernels, peers)
    # Another language may simply not have the version, unless it was asked for by name.
    return cases, reasons if options.backends else {}


def _measures(options: BenchOptions) -> bool:
    if options.mode == PREDICT or options.predict_for:
        return False
    if options.mode == MEASURE:
        require_cuda("bench")
    return options.mode == MEASURE or cuda_available()


def _measure(record: BenchRecord, cases: Sequence[Case], options: BenchOptions, save: Path) -> None:
    from mla_var3.report.bench_contenders import contenders
    from mla_var3.report.bench_measure import gpu_timer, measure_case, warm_up
    from mla_var3.report.bench_peer_libraries import PeerLibraries
    from mla_var3.report.bench_peers import peer_kernel

    spec = current_device_spec()
    wanted = {peer_kernel(name).library for case in cases for name in case.peers}
    libraries = PeerLibraries(options.peer_libs, wanted) if wanted else None
    record.settings = {
        "rounds": options.rounds,
        "seconds per timing": options.max_seconds,
        "tilings": "tuned" if options.tune else "default",
    }
    around = circumstances(record.environment, spec.name)
    timer = gpu_timer(options.max_seconds)
    warm_up()
    by_case = [
        contenders(case, libraries, spec.target, tune=options.tune, progress=options.progress)
        for case in cases
    ]
    total, before = sum(map(len, by_case)) * options.rounds, 0
    for case, entrants in zip(cases, by_case, strict=True):
        progress = _part_of(options.progress, before, total)
        rows = measure_case(
            case.problem, entrants, timer, around, rounds=options.rounds, progress=progress
        )
        before += len(entrants) * options.rounds
        entrants.clear()  # the peers of a case share its float32 references, which are large
        record.rows += unique_rows(rows)
        options.on_rows(rows)
        save_record(record, save)  # an interrupted run keeps the shapes that are done


def _predict(record: BenchRecord, cases: Sequence[Case], options: BenchOptions) -> None:
    from mla_var3.report.bench_predict import NOTE, predict_case

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


def unique_rows(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows without repetitions: the model may choose an n that was asked for as well."""
    return list({row_key(row): row for row in rows}.values())


def _part_of(progress: Progress, before: int, total: int) -> Progress:
    def report(what: str, done: int, _: int, detail: str) -> None:
        progress("bench", before + done, total, detail)

    return report


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
    folder.mkdir(parents=True, exist_ok=True)
    save_record(record, files["json"])
    write_atomic(files["csv"], csv_text(record, row_speedups(record.rows)))
    plots = draw_plots(record, folder)
    write_atomic(files["markdown"], markdown_page(record, plots, regression))
    write_atomic(files["html"], html_page(record, plots, regression))
    if regression is not None:
        files["regression"] = folder / "regression.json"
        write_json(files["regression"], regression.to_dict())
    return BenchResult(folder, record, plots, files, regression, missing)
