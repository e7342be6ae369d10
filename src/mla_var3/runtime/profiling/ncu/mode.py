"""NCU mode: the full Nsight Compute set per stage, its advice, and annotated sources."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mla_var3.runtime.files import write_atomic
from mla_var3.runtime.markdown import number, table
from mla_var3.runtime.profiling import NsightProfType, ProfileResult
from mla_var3.runtime.profiling.common import (
    header,
    profiling_mode,
    tiling_table,
    write_artifacts,
)
from mla_var3.runtime.profiling.figures import check_markdown
from mla_var3.runtime.profiling.ncu.metrics import MetricValue
from mla_var3.runtime.profiling.ncu.reader import NOT_OURS, Rule, StageProfile, advice
from mla_var3.runtime.profiling.ncu.session import Session, make_result, profile
from mla_var3.runtime.profiling.ncu.source import (
    HOT_SHARE,
    Instruction,
    LineProfile,
    annotate_source,
    describe_line,
    instructions_of,
    line_profiles,
    markers_of,
    package_path,
    sass_rows,
    shown_path,
    source_ptx,
    source_text,
)
from mla_var3.runtime.profiling.ncu.text import (
    contract,
    method_table,
    metrics_table,
    timer_table,
    whole_note,
    write_csv,
)
from mla_var3.runtime.workflow import RunOptions

if TYPE_CHECKING:
    from mla_var3.runtime.plan import KernelPlan

DEFAULT_RUNS = 1
_MODE = NsightProfType.NCU
_TOP_LINES = 8
_TOP_ADVICE = 8


@profiling_mode(_MODE, gpu=True)
def ncu_profile_plan(plan: KernelPlan, run: RunOptions) -> ProfileResult:
    """Tune, check when asked, and profile every stage with the full Nsight Compute set."""
    return write_ncu(profile(_MODE, plan, run, metrics=None, runs=DEFAULT_RUNS))


def write_ncu(session: Session) -> ProfileResult:
    """Write the artifacts of a session and return its result."""
    result, folder = make_result(session), session.folder
    write_artifacts(folder, result.record, session.prepared)
    compact, verbose = [], []
    for measured in session.profiles:
        rules = measured.main.rules()
        lines = _write_kernel(session, measured)
        compact.append(_compact_kernel(measured, rules, lines))
        verbose.append(_verbose_kernel(measured, rules))
    write_atomic(folder / "report.md", _report(session, result, compact))
    write_atomic(folder / "report-verbose.md", _verbose_report(session, result, verbose))
    return result


def _write_kernel(
    session: Session, measured: StageProfile
) -> list[tuple[str, int, LineProfile, float]]:
    """Write the files of one kernel; returns its lines (file, number, profile, all samples)."""
    folder, launch = session.folder / measured.name, measured.main
    write_csv(
        folder / "ncu-details.csv",
        ("section", "label", "metric", "value", "unit"),
        [
            (section.name, label, name, value.value, value.unit)
            for section in launch.sections()
            for label, name, value in section.metrics
        ],
    )
    instructions = instructions_of(launch)
    write_csv(folder / "sass-metrics.csv", *sass_rows(instructions))
    write_atomic(folder / "source.ptx", source_ptx(session.report_path, launch, instructions))
    total = sum(item.values.get("samples", 0.0) for item in instructions)
    files = line_profiles(instructions, markers_of(launch))
    _write_sources(
        session.folder / "annotated-src" / measured.name, measured, files, total, instructions
    )
    found = [
        (file, number, line, total)
        for file, lines in files.items()
        for number, line in lines.items()
        if file
    ]
    return sorted(found, key=lambda entry: -entry[2].samples)


def _write_sources(
    folder: Path,
    measured: StageProfile,
    files: dict[str, dict[int, LineProfile]],
    total: float,
    instructions: list[Instruction],
) -> None:
    """Annotated copies of this package's sources; nobody else's are copied."""
    written: set[str] = set()
    for file, lines in files.items():
        own = package_path(file)
        source = source_text(measured.main, file) if own is not None else None
        if own is None or source is None:
            continue
        text, origin = source
        share = sum(line.samples for line in lines.values()) / total if total else 0.0
        count = sum(line.instructions for line in lines.values())
        title = (
            f"{shown_path(file)} in {measured.name}, {origin}.",
            f"{share:.1%} of the kernel's {total:.0f} warp samples and {count} of its "
            f"{len(instructions)} instructions are here.",
            f"[HOT]: at least {HOT_SHARE:.0%} of the samples. Inlined code counts where it is "
            "written;",
            "line numbers are those of the original.",
        )
        name = PurePosixPath(file).name
        if name in written:  # two modules of one name in different packages
            name = ".".join(own.parts)
        written.add(name)
        write_atomic(folder / name, annotate_source(text, lines, total, title))


def _scope(rule: Rule) -> str | None:
    if rule.speedup_pct is None:
        return None
    return f"{rule.speedup_pct:.0f}% {'of the kernel' if rule.is_global else 'of one unit'}"


def _compact_kernel(
    measured: StageProfile,
    rules: list[Rule],
    lines: list[tuple[str, int, LineProfile, float]],
) -> str:
    told = advice(rules)[:_TOP_ADVICE]
    hot = [entry for entry in lines[:_TOP_LINES] if entry[2].samples]
    parts = [f"## {measured.name}\n", "### What Nsight Compute recommends\n"]
    if told:
        parts.append(
            table(
                ("rule", "est. speedup", "what it says"),
                [(rule.title, _scope(rule), rule.message) for rule in told],
            )
        )
    else:
        parts.append("No recommendation with an estimated gain of 5% or more.\n")
    parts.append("### Hot lines\n")
    if hot:
        parts.append(
            table(
                ("line", "what was measured there"),
                [
                    (f"`{shown_path(file)}:{at}`", describe_line(line, total))
                    for file, at, line, total in hot
                ],
            )
        )
    else:
        parts.append("The report has no samples with a source line.\n")
    parts.append(
        f"Files: `{measured.name}/ncu-details.csv`, `{measured.name}/sass-metrics.csv`, "
        f"`{measured.name}/source.ptx`, `annotated-src/{measured.name}/`.\n"
    )
    functions = {launch.function for launch in measured.launches}
    if len(functions) > 1:
        parts.append(
            f"The stage launches {len(functions)} GPU functions; details are those of the longest, "
            f"`{measured.main.function}`.\n"
        )
    return "\n".join(parts)


def _report(session: Session, result: ProfileResult, kernels: list[str]) -> str:
    parts = [
        header(f"{result.kernel}, ncu mode", result.record),
        contract(session),
        "## Key metrics\n",
        metrics_table(result),
        whole_note(session),
        *kernels,
        "Nsight Compute's advice is written for CUDA C++; not everything can be controlled from a "
        "tile language, and its estimates overlap. Left out: "
        + "; ".join(f"{name} ({why})" for name, why in NOT_OURS.items())
        + ". All of it is in `report-verbose.md`; `report.ncu-rep` opens in Nsight Compute.\n",
        "## Duration and event time\n",
        timer_table(result),
        "## How it was measured\n",
        method_table(session),
        "## Tiling\n",
        tiling_table(session.prepared.stage),
    ]
    if result.check is not None:
        parts += ["## Check\n", check_markdown(result.check)]
    return "\n".join(part for part in parts if part)


def _verbose_report(session: Session, result: ProfileResult, kernels: list[str]) -> str:
    parts = [
        header(f"{result.kernel}, ncu mode, all sections", result.record),
        "## How it was measured\n",
        method_table(session),
        *kernels,
    ]
    return "\n".join(parts)


def _verbose_kernel(measured: StageProfile, rules: list[Rule]) -> str:
    launch = measured.main
    parts = [f"## {measured.name}\n", f"GPU function `{launch.function}`.\n"]
    left = list(rules)
    for section in launch.sections():
        parts.append(f"### {section.name}\n")
        parts.append(
            table(
                ("metric", "value", "unit", "name"),
                [(label, _shown(v), v.unit, f"`{name}`") for label, name, v in section.metrics],
            )
        )
        parts += [_rule_text(rule) for rule in left if rule.section == section.identifier]
        left = [rule for rule in left if rule.section != section.identifier]
    if any(rule.message for rule in left):
        parts.append("### Other rules\n")
        parts += [_rule_text(rule) for rule in left]
    return "\n".join(part for part in parts if part)


def _shown(value: MetricValue) -> str | None:
    figure = value.number
    if figure is None:
        return None if value.value is None else str(value.value)
    return f"{figure:.0f}" if figure.is_integer() else number(figure, 5)


def _rule_text(rule: Rule) -> str:
    if not rule.message:
        return ""
    gain = f" (est. speedup {_scope(rule)})" if rule.speedup_pct is not None else ""
    lines = [f"**{rule.title or rule.identifier}**{gain}: {rule.message}\n"]
    for name, value, info in rule.metrics:
        lines.append(f"- `{name}` = {number(value, 4)}: {info}")
    if rule.metrics:
        lines.append("")
    for title, headers, rows in rule.tables:
        lines += [f"{title}\n", table(headers, rows)]
    return "\n".join(lines)
