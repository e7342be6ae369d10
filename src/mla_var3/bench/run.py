"""A benchmark from its options to its files: measured on a GPU, predicted without one, or read.

Every run writes the record (JSON), the rows (CSV), the plots (PNG and SVG), a markdown page and one
self-contained HTML page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mla_var3.bench import record as records
from mla_var3.bench import suites
from mla_var3.bench.analysis import row_speedups
from mla_var3.bench.contribute import FILE_NAME, contribution
from mla_var3.bench.measure import QUICK_ROUNDS, QUICK_SECONDS
from mla_var3.bench.page import html_page, markdown_page
from mla_var3.bench.plots import Plot, draw_plots
from mla_var3.bench.predict import NOTE, predict_case
from mla_var3.bench.record import BenchRecord, load_record, save_record
from mla_var3.bench.regression import Regression, compare_records
from mla_var3.bench.session import SessionOptions, measure, unique_rows
from mla_var3.bench.suites import Case
from mla_var3.conf.devices import device_spec
from mla_var3.errors import InvalidArgumentError, UnknownNameError, UnsupportedError
from mla_var3.op.mla.problem import MlaProblem
from mla_var3.runtime import paths
from mla_var3.runtime.environment import environment
from mla_var3.runtime.markdown import write_json
from mla_var3.runtime.paths import make_folder, output_folder, write_atomic
from mla_var3.runtime.workflow import cuda_available, planning_device

MEASURE, PREDICT, AUTO = "measure", "predict", "auto"
_ONE_VALUE = {"all": ("b", "s", "t", "h"), "var6_plus": ("b", "t", "h")}
_ONLY_IN = {"n": ("var6_plus",), "version": ("var6_plus",), "kernels": ("all", "sweep")}
"""Option -> the suites that have it."""
_OPTION_NAMES = {"n_values": "n", "predict_for": "for_device"}
"""Field -> option of the command line, where the names differ."""
_OF_REPORTS = ("records", "against", "across_versions", "out_dir", "contribute", "progress")
"""Fields that matter to a report from records; the others say what to run, and how."""
_OF_TIMING = ("rounds", "max_seconds", "patience", "tune", "tune_seconds", "peer_libs")
"""Fields that matter to measurements only."""


@dataclass
class BenchOptions(SessionOptions):
    """What to run, and how; the help of `hyper-mla bench` says what each option means.

    Attributes:
        sizes: b, s, t and h, each one or several values.
        widths: d, p, k and v of a model; empty for the usual ones.
        n_values: windows of the suite var6_plus.
        mode: "measure", "predict", or "auto": measure where there is a GPU.
        predict_for: device of the table to predict for.
        records: records to read instead of running anything.
    """

    suite: str = "figures"
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "bfloat16"
    causal: bool = True
    cache_dtype: tuple[str, ...] = ()
    n_values: tuple[int, ...] | None = None
    version: str | None = None
    kernels: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    shapes: tuple[int, ...] = ()
    quick: bool = False
    mode: str = AUTO
    predict_for: str | None = None
    records: tuple[Path, ...] = ()
    against: Path | None = None
    across_versions: bool = False
    out_dir: Path | None = None
    contribute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite not in suites.SUITES:
            raise UnknownNameError("suite", self.suite, suites.SUITES)
        if self.mode not in (AUTO, MEASURE, PREDICT):
            raise InvalidArgumentError("mode", "auto, measure or predict", self.mode)
        if self.mode == MEASURE and (self.records or self.predict_for):
            other = "--records" if self.records else "--for_device"
            raise InvalidArgumentError("mode", f"auto with {other}", self.mode)
        if self.predict_for is not None:
            device_spec(self.predict_for)  # an unknown name is an error at once
        if self.resume and (self.records or self.predict_for or self.mode == PREDICT):
            other = "records" if self.records else "predictions"
            raise InvalidArgumentError("resume", f"none with {other}", self.resume)
        self._refuse_ignored()
        asked: dict[str, object] = {"model": self.widths, **self.sizes, "kernels": self.kernels}
        asked |= {"causal": not self.causal, "dtype": self.dtype != suites.COMMON.dtype}
        if self.suite in suites.FIXED_SUITES and any(asked.values()):
            name = next(name for name, given in asked.items() if given)
            expected = f"none: the suite {self.suite} has fixed shapes (use all or sweep)"
            raise InvalidArgumentError(name, expected, "one")
        formats = suites.EIGHT_BIT_CACHES["cutile-dsl"]
        for name in set(self.cache_dtype) - set(formats):
            raise InvalidArgumentError("cache_dtype", " or ".join(formats), name)
        for name, values in self.sizes.items():
            single = name in _ONE_VALUE.get(self.suite, ())
            if not values or (single and len(values) > 1):
                expected = f"{'one value' if single else 'some values'} for the suite {self.suite}"
                raise InvalidArgumentError(name, expected, values)
        if self.n_values == ():
            raise InvalidArgumentError("n", "some windows", self.n_values)
        chosen = {"n": self.n_values, "version": self.version, "kernels": self.kernels or None}
        for name, value in chosen.items():
            if value is not None and self.suite not in _ONLY_IN[name]:
                expected = f"none: only the suite {' or '.join(_ONLY_IN[name])} has it"
                raise InvalidArgumentError(name, expected, value)

    def _refuse_ignored(self) -> None:
        """Refuse what would have no effect beside --records, for predictions or by itself."""
        predicts = bool(self.predict_for) or self.mode == PREDICT
        other = "--for_device" if self.predict_for else f"--mode={PREDICT}"
        other = "--records" if self.records else other
        for name, value in self._given().items():
            if self.records or (predicts and name in _OF_TIMING):
                raise InvalidArgumentError(name, f"none with {other}", value)
        if self.across_versions and self.against is None:
            raise InvalidArgumentError("across_versions", "--against beside it", "none")

    def _given(self) -> dict[str, object]:
        """The options of a run that differ from their defaults, by their names; sizes one by one.

        What `quick` sets by itself is not among them.
        """
        given: dict[str, object] = {"model": self.widths} if self.widths else {}
        given |= self.sizes
        implied = {"rounds": QUICK_ROUNDS, "max_seconds": QUICK_SECONDS} if self.quick else {}
        for part in fields(self):
            name, value = part.name, getattr(self, part.name)
            ignored = name in _OF_REPORTS or name.startswith("on_") or part.default is MISSING
            if not ignored and value not in (part.default, implied.get(name)):
                given[_OPTION_NAMES.get(name, name)] = value
        return given

    @property
    def measures(self) -> bool:
        """Whether this run measures here."""
        if self.records or self.mode == PREDICT or self.predict_for:
            return False
        available = cuda_available()
        if self.mode == MEASURE and not available:
            raise UnsupportedError(
                "bench: expected a usable CUDA GPU for --mode=measure, got none "
                "(torch.cuda.is_available() is false); --mode=predict needs none"
            )
        return available


@dataclass
class BenchResult:
    """What came out: files by kind, and what was asked for and does not exist, with the reason."""

    folder: Path
    record: BenchRecord
    plots: list[Plot]
    files: dict[str, Path]
    regression: Regression | None
    missing: dict[str, str]


def run_bench(options: BenchOptions) -> BenchResult:
    """Measure, predict or read, and write the report."""
    # Everything that can be refused is refused before anything is measured.
    earlier = load_record(options.against) if options.against else None
    if options.resume and not options.measures:
        raise InvalidArgumentError("resume", "a GPU to continue on", "none")
    if options.contribute and not options.records and not options.measures:
        raise InvalidArgumentError("contribute", "a GPU to measure on, or --records", "neither")
    name = "records" if options.records else options.suite
    folder = options.out_dir or (options.resume.parent if options.resume else None)
    folder = folder or paths.output_root() / "bench" / name / paths.timestamp()
    missing: dict[str, str] = {}
    if options.records:
        record = records.merge_records(load_record(path) for path in options.records)
    else:
        cases, missing = build_cases(options)
        cases = chosen_shapes(cases, options.shapes)
        measures = options.measures
        with output_folder(folder):
            record = BenchRecord(options.suite, environment(), absent=dict(missing))
            if measures:
                record.settings = {"grid": "quick"} if options.quick else {}
                measure(record, cases, options, folder / f"{name}.json")
            else:
                _predict(record, cases, options)
    regression = None
    if earlier is not None:
        regression = compare_records(record, earlier, across_versions=options.across_versions)
    result = _write(record, folder, name, regression, missing)
    if options.contribute:
        result.files["to send"] = folder / FILE_NAME
        save_record(contribution(record), folder / FILE_NAME)
    return result


def chosen_shapes(cases: list[Case], numbers: Sequence[int]) -> list[Case]:
    """The cases of these shapes, counted from 1 in the order of the suite; all for none."""
    problems = list(dict.fromkeys(case.problem for case in cases))
    for number in numbers:
        if not 1 <= number <= len(problems):
            expected = f"numbers from 1 to {len(problems)}, shapes of the suite"
            raise InvalidArgumentError("shapes", expected, number)
    wanted = {problems[number - 1] for number in numbers}
    return [case for case in cases if case.problem in wanted] if numbers else cases


def build_cases(options: BenchOptions) -> tuple[list[Case], dict[str, str]]:
    """The cases of a suite, and what was asked for but does not exist."""
    languages, known = suites.select_backends(options.backends)
    peers = tuple(name for name in known if name not in suites.EIGHT_BIT_PEERS)
    cases, missing = _16_bit_cases(options, languages, peers)
    return suites.with_8_bit_caches(cases, options.cache_dtype, languages, known), missing


def _16_bit_cases(
    options: BenchOptions, languages: Sequence[str], peers: Sequence[str]
) -> tuple[list[Case], dict[str, str]]:
    kernels = [kernel for kernel in suites.mla_kernels() if kernel.language in languages]
    if options.suite == "models":
        s_values = suites.QUICK_MODEL_S if options.quick else suites.MODEL_S
        return suites.model_cases(kernels, peers, s_values), {}
    fixed = {
        "figures": suites.figures_cases,
        "latent": suites.latent_cases,
        "mix": suites.mix_cases,
        "prefix": suites.prefix_cases,
    }
    if options.suite in fixed:
        return fixed[options.suite](kernels, peers), {}
    first: dict[str, Any] = {name: values[0] for name, values in options.sizes.items()}
    first |= options.widths
    base = replace(suites.COMMON, dtype=options.dtype, causal=options.causal, **first)
    if options.suite == "engine":
        grid = suites.QUICK_ENGINE if options.quick else suites.ENGINE
        return suites.engine_cases(base, {**grid, **options.sizes}, kernels, peers), {}
    if options.suite == "var6_plus":
        return _window_cases(base, options, languages, kernels, peers)
    default = ("all",) if options.suite == "all" else ("latest",)
    chosen = suites.select_kernels(options.kernels or default, kernels) if kernels else []
    grid = suites.QUICK_SWEEP if options.quick else suites.SWEEP
    sizes = {**(grid if options.suite == "sweep" else {}), **options.sizes}
    return suites.sweep_cases(base, sizes, chosen, peers), {}


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
        there = {
            k.version: k for k in kernels if (k.design, k.language) == (suites.DESIGN, language)
        }
        if wanted in there:
            versions.append(there[wanted])
        else:
            known = f"there are {', '.join(there)}" if there else "there is no version at all"
            reasons[f"{suites.DESIGN} {wanted} ({language})"] = f"does not exist; {known}"
    if not versions:
        return [], reasons
    s_values = options.sizes.get("s", suites.WINDOW_S)
    steps = suites.QUICK_WINDOW_STEPS if options.quick else suites.WINDOW_STEPS
    cases = suites.window_cases(base, s_values, options.n_values, versions, kernels, peers, steps)
    # A language without the version is missing only if it was asked for by name.
    return cases, reasons if options.backends else {}


def _predict(record: BenchRecord, cases: Sequence[Case], options: BenchOptions) -> None:
    spec = device_spec(options.predict_for) if options.predict_for else planning_device()
    record.notes = [NOTE]
    record.settings = {"predicted for": spec.name}
    around = records.circumstances(record.environment, spec.name)
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
    suffixes = {"json": "json", "csv": "csv", "markdown": "md", "html": "html"}
    files = {kind: folder / f"{name}.{suffix}" for kind, suffix in suffixes.items()}
    make_folder(folder)
    save_record(record, files["json"])
    write_atomic(files["csv"], records.csv_text(record, row_speedups(record.rows)))
    plots = draw_plots(record, folder)
    write_atomic(files["markdown"], markdown_page(record, plots, regression))
    write_atomic(files["html"], html_page(record, plots, regression))
    if regression is not None:
        files["regression"] = folder / "regression.json"
        write_json(files["regression"], regression.to_dict())
    return BenchResult(folder, record, plots, files, regression, missing)
