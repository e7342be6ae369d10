"""NCU mode: the full Nsight Compute set per stage, its advice, and annotated sources."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from mla_var3.runtime.markdown import number, table, write_csv
from mla_var3.runtime.paths import write_atomic
from mla_var3.runtime.plan import KernelPlan
from mla_var3.runtime.profiling import NsightProfType, ProfileResult, common
from mla_var3.runtime.profiling.ncu import session as ncu_session
from mla_var3.runtime.profiling.ncu.reader import NOT_OURS, MetricValue, Rule, StageProfile, advice
from mla_var3.runtime.profiling.ncu.session import Session, make_result, profile
from mla_var3.runtime.profiling.ncu.source import (
    HOT_SHARE,
    KernelSource,
    annotate_source,
    package_path,
    shown_path,
    source_ptx,
    source_text,
)
from mla_var3.runtime.workflow import RunOptions

DEFAULT_RUNS = 1
_MODE = NsightProfType.NCU
_TOP_LINES = 8
_TOP_ADVICE = 8


@common.profiling_mode(_MODE, gpu=True)
def ncu_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and profile every stage with the full Nsight Compute set."""
    return write_ncu(profile(_MODE, plan, run, metrics=None, runs=DEFAULT_RUNS))


def write_ncu(session: Session) -> ProfileResult:
    """Write the artifacts of a session and return its result."""
    result = make_result(session)
    compact = []
    verbose = [
        common.header(f"{result.kernel}, ncu mode, all sections", result.record),
        "## How it was measured\n",
        ncu_session.method_table(session),
    ]
    for measured in session.profiles:
        source = KernelSource.of(measured.main)
        _write_kernel(session, measured, source)
        rules = measured.main.rules()
        compact += _compact_kernel(measured, rules, source)
        verbose += _verbose_kernel(measured, rules)
    common.write_artifacts(result, session.prepared, _report(session, result, compact))
    write_atomic(session.folder / "report-verbose.md", "\n".join(verbose))
    return result


def _write_kernel(session: Session, measured: StageProfile, source: KernelSource) -> None:
    """Write the files of one kernel."""
    folder, launch = session.folder / measured.name, measured.main
    details = [
        (section.name, label, name, value.value, value.unit)
        for section in launch.sections()
        for label, name, value in section.metrics
    ]
    columns = ("section", "label", "metric", "value", "unit")
    write_csv(folder / "ncu-details.csv", columns, details)
    write_csv(folder / "sass-metrics.csv", *source.sass_rows())
    ptx = source_ptx(session.report_path, launch, source.instructions)
    write_atomic(folder / "source.ptx", ptx)
    _write_sources(session.folder / "annotated-src" / measured.name, measured, source)


def _write_sources(folder: Path, measured: StageProfile, source: KernelSource) -> None:
    """Annotated copies of this package's sources; nobody else's are copied."""
    written: set[str] = set()
    for file, lines in source.files.items():
        own = package_path(file)
        found = source_text(measured.main, file) if own is not None else None
        if own is None or found is None:
            continue
        content, origin = found
        samples = sum(line.samples for line in lines.values())
        count = sum(line.instructions for line in lines.values())
        title = (
            f"{shown_path(file)} in {measured.name}, {origin}.",
            f"{samples / (source.samples or 1):.1%} of the kernel's {source.samples:.0f} warp "
            f"samples and {count} of its {len(source.instructions)} instructions are here.",
            f"[HOT]: at least {HOT_SHARE:.0%} of the samples. Inlined code counts where it is "
            "written;",
            "line numbers are those of the original.",
        )
        name = PurePosixPath(file).name
        if name in written:  # two modules of one name in different packages
            name = ".".join(own.parts)
        written.add(name)
        write_atomic(folder / name, annotate_source(content, lines, source.samples, title))


def _compact_kernel(measured: StageProfile, rules: list[Rule], source: KernelSource) -> list[str]:
    told = [(rule.title, rule.gain, rule.message) for rule in advice(rules)[:_TOP_ADVICE]]
    hot = [(f"`{shown_path(file)}:{at}`", said) for file, at, said in source.hottest(_TOP_LINES)]
    name = measured.name
    parts = [
        f"## {name}\n",
        "### What Nsight Compute recommends\n",
        table(("rule", "est. speedup", "what it says"), told)
        if told
        else "No recommendation with an estimated gain of 5% or more.\n",
        "### Hot lines\n",
        table(("line", "what was measured there"), hot)
        if hot
        else "The report has no samples with a source line.\n",
        f"Files: `{name}/ncu-details.csv`, `{name}/sass-metrics.csv`, `{name}/source.ptx`, "
        f"`annotated-src/{name}/`.\n",
    ]
    functions = {launch.function for launch in measured.launches}
    if len(functions) > 1:
        parts.append(
            f"The stage launches {len(functions)} GPU functions; details are those of the longest, "
            f"`{measured.main.function}`.\n"
        )
    return parts


def _report(session: Session, result: ProfileResult, kernels: list[str]) -> list[str]:
    return [
        common.header(f"{result.kernel}, ncu mode", result.record),
        ncu_session.contract(session),
        "## Key metrics\n",
        ncu_session.metrics_table(result),
        ncu_session.whole_note(session),
        *kernels,
        "Nsight Compute's advice is written for CUDA C++; not everything can be controlled from a "
        "tile language, and its estimates overlap. Left out: "
        + "; ".join(f"{name} ({why})" for name, why in NOT_OURS.items())
        + ". All of it is in `report-verbose.md`; `report.ncu-rep` opens in Nsight Compute.\n",
        *ncu_session.method_sections(session, result),
    ]


def _verbose_kernel(measured: StageProfile, rules: list[Rule]) -> list[str]:
    """Every section of the report with its rules, as Nsight Compute words them."""
    launch = measured.main
    parts = [f"## {measured.name}\n", f"GPU function `{launch.function}`.\n"]
    left = [rule for rule in rules if rule.message]
    for section in launch.sections():
        rows = [(label, _shown(v), v.unit, f"`{name}`") for label, name, v in section.metrics]
        parts += [f"### {section.name}\n", table(("metric", "value", "unit", "name"), rows)]
        parts += [_rule_text(rule) for rule in left if rule.section == section.identifier]
        left = [rule for rule in left if rule.section != section.identifier]
    if left:
        parts += ["### Other rules\n", *map(_rule_text, left)]
    return parts


def _shown(value: MetricValue) -> str | None:
    figure = value.number
    if figure is None:
        return None if value.value is None else str(value.value)
    return f"{figure:.0f}" if figure.is_integer() else number(figure, 5)


def _rule_text(rule: Rule) -> str:
    gain = f" (est. speedup {rule.gain})" if rule.gain else ""
    lines = [f"**{rule.title or rule.identifier}**{gain}: {rule.message}\n"]
    lines += [f"- `{name}` = {number(value, 4)}: {info}" for name, value, info in rule.metrics]
    if rule.metrics:
        lines.append("")
    for title, headers, rows in rule.tables:
        lines += [f"{title}\n", table(headers, rows)]
    return "\n".join(lines)
