"""Reads `.ncu-rep` files: the launches in our ranges with their metrics, sections and rules."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.measure import percentile
from mla_var3.runtime.profiling.ncu.driver import NcuTool, load_ncu_report
from mla_var3.runtime.profiling.ncu.metrics import (
    FIGURES,
    MetricValue,
    figures_of,
    stall_cycles,
    with_derived,
)
from mla_var3.runtime.profiling.target import RANGE_PREFIX

_MARKUP = re.compile(r"@(?:section|source|url|metric)[^@]*?:([^@:]*?)(?::https?://[^@]*)?@")
_OPTIMIZATION = 2
_GLOBAL_SPEEDUP = 2

NOT_OURS = {
    "MemoryL2Compression": "needs memory allocated as compressible, which is not the kernel's",
    "SOLFPRoofline": "counts float32 and float64 arithmetic, not the tensor cores",
}
"""Rules whose advice a kernel of this package cannot follow -> why."""


@dataclass(frozen=True)
class Rule:
    """One outcome of Nsight Compute's own rules.

    Attributes:
        identifier: name of the rule.
        section: identifier of its section.
        title, message: what it says, without markup.
        is_advice: whether it proposes an optimisation.
        speedup_pct: estimated gain; None without an estimate.
        is_global: whether the estimate is about the kernel's time, not about one unit.
        metrics: the metrics that it looked at, with what it says about them.
        tables: its tables, as (title, headers, rows).
    """

    identifier: str
    section: str
    title: str
    message: str
    is_advice: bool
    speedup_pct: float | None = None
    is_global: bool = False
    metrics: tuple[tuple[str, float | None, str], ...] = ()
    tables: tuple[tuple[str, tuple[str, ...], tuple[tuple[Any, ...], ...]], ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of the report with its metrics as (label, name, value)."""

    identifier: str
    name: str
    order: int
    metrics: tuple[tuple[str, str, MetricValue], ...]


@dataclass
class Launch:
    """One profiled kernel launch.

    Attributes:
        range_name: the NVTX range it ran in, without the prefix.
        function: name of the GPU function.
        metrics: every metric by name.
        action: the object of `ncu_report`, for source-level metrics; it keeps the report open.
    """

    range_name: str
    function: str
    metrics: dict[str, MetricValue]
    action: Any = field(repr=False, default=None)
    report: Any = field(repr=False, default=None)

    def rules(self) -> list[Rule]:
        """What Nsight Compute's rules say, in its order."""
        return [_rule(entry) for entry in self.action.rule_results_as_dicts()]

    def sections(self) -> list[Section]:
        """The sections that have metrics, in the order of the tool."""
        found = []
        for section in self.action.sections():
            metrics = [*section.header_metrics(), *section.body_metrics()]
            rows = {
                m.name(): (_label(m), m.name(), _value(m))
                for m in metrics
                if not m.name().startswith("breakdown:")  # lists of names, for the tool's charts
            }
            if rows:
                found.append(
                    Section(
                        section.identifier(), section.name(), section.order(), tuple(rows.values())
                    )
                )
        return sorted(found, key=lambda section: section.order)


@dataclass
class StageProfile:
    """What was measured of one stage, over all runs.

    Attributes:
        name: stage name.
        launches: the launches, run by run.
        runs: how often the stage ran.
        figures: medians over the runs, by key of `ncu_metrics.FIGURES`.
        spread_us: half the distance between the 10th and the 90th percentile of the duration.
        stalls: stall cycles per issued instruction of the longest launch.
    """

    name: str
    launches: list[Launch]
    runs: int
    figures: dict[str, float]
    spread_us: float | None
    stalls: dict[str, float]

    @property
    def main(self) -> Launch:
        """The longest launch of the stage, the one whose details are worth reading."""
        return max(self.launches, key=lambda launch: figures_of(launch.metrics).get("time_us", 0.0))


def read_launches(path: Path, tool: NcuTool | None = None) -> list[Launch]:
    """The launches of a report that ran in one of our ranges.

    Raises:
        MissingToolError: `ncu_report` is missing.
        UnsupportedError: it cannot read this file.
    """
    module = load_ncu_report(tool)
    try:
        report = module.load_report(str(path))
    except Exception as error:  # the reader raises different types from release to release
        raise UnsupportedError(
            f"{path}: expected a report that ncu_report can read, got {error}; "
            'a newer reader may help: pip install "hyper-mla[profiling]"'
        ) from error
    if not report.num_ranges():  # also what some releases make of a file that is no report
        raise UnsupportedError(f"{path}: expected a report with profiled kernels, got none")
    found = []
    for action in _actions(report):
        name = _range_name(action)
        if name is not None:
            metrics = {n: _value(action.metric_by_name(n)) for n in action.metric_names()}
            found.append(Launch(name, action.name(), metrics, action, report))
    return found


def _actions(report: Any) -> Iterator[Any]:
    for index in range(report.num_ranges()):
        part = report.range_by_idx(index)
        for number in range(part.num_actions()):
            yield part.action_by_idx(number)


def _range_name(action: Any) -> str | None:
    state = action.nvtx_state()
    if state is None:
        return None
    for domain in state.domains():
        for name in state.domain_by_id(domain).push_pop_ranges():
            if name.startswith(RANGE_PREFIX):
                return str(name).removeprefix(RANGE_PREFIX)
    return None


def _value(metric: Any) -> MetricValue:
    value = metric.value() if metric is not None and metric.has_value() else None
    return MetricValue(value, "" if metric is None else (metric.unit() or ""))


def _label(metric: Any) -> str:
    # Releases before 2026 have no labels.
    label = metric.label() if hasattr(metric, "label") else ""
    return str(label or metric.name())


def plain_text(text: str) -> str:
    """A rule's message without its links."""
    return " ".join(_MARKUP.sub(lambda match: match[1].strip(), text).split())


def _rule(entry: Mapping[str, Any]) -> Rule:
    message = entry.get("rule_message") or {}
    speedup = entry.get("speedup_estimation") or {}
    tables = []
    for table in entry.get("result_tables") or ():
        columns = [[plain_text(v) if isinstance(v, str) else v for v in c] for c in table["data"]]
        rows = tuple(zip(*columns, strict=True))
        tables.append((plain_text(table.get("title", "")), tuple(table["headers"]), rows))
    return Rule(
        identifier=entry["rule_identifier"],
        section=entry["section_identifier"],
        title=plain_text(message.get("title") or entry.get("name") or ""),
        message=plain_text(message.get("message") or ""),
        is_advice=int(message.get("type", 0)) == _OPTIMIZATION,
        speedup_pct=speedup.get("speedup"),
        is_global=int(speedup.get("type", 0)) == _GLOBAL_SPEEDUP,
        metrics=tuple(
            (m["name"], m.get("value"), plain_text(m.get("info") or ""))
            for m in entry.get("focus_metrics") or ()
        ),
        tables=tuple(tables),
    )


def advice(rules: Sequence[Rule], at_least_pct: float = 5.0) -> list[Rule]:
    """The recommendations worth reading: ours to follow, with a gain, the largest first."""
    seen: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        worth = rule.is_advice and rule.message and rule.identifier not in NOT_OURS
        if worth and (rule.speedup_pct is None or rule.speedup_pct >= at_least_pct):
            # The imbalance of SMs, their partitions and their L1 caches is one and the same.
            title = "" if rule.identifier == "WorkloadImbalance" else rule.title
            seen.setdefault((rule.identifier, title), rule)
    return sorted(seen.values(), key=lambda r: (not r.is_global, -(r.speedup_pct or 0.0)))


def stage_profiles(
    launches: Sequence[Launch], names: Sequence[str], runs: int
) -> list[StageProfile]:
    """Group launches by stage and sum up the runs.

    Args:
        launches: all launches of a report.
        names: range names of the stages in launch order, without the prefix.
        runs: how often each stage was launched.

    Raises:
        UnsupportedError: a stage is missing or its launches are no multiple of the runs.
    """
    found = []
    for name in names:
        own = [launch for launch in launches if launch.range_name == name]
        if not own or len(own) % runs:
            raise UnsupportedError(
                f"{name}: expected a multiple of {runs} profiled launches (one per run), "
                f"got {len(own)}"
            )
        size = len(own) // runs
        samples = [combine(own[i * size : (i + 1) * size]) for i in range(runs)]
        keys = [key for key in samples[0] if all(key in sample for sample in samples)]
        figures = {key: statistics.median(sample[key] for sample in samples) for key in keys}
        times = [sample["time_us"] for sample in samples if "time_us" in sample]
        if not times:
            raise UnsupportedError(f"{name}: expected a duration in the report, got none")
        spread = (percentile(times, 90) - percentile(times, 10)) / 2 if len(times) > 1 else None
        profile = StageProfile(name, own, runs, figures, spread, {})
        profile.stalls = stall_cycles(profile.main.metrics)
        found.append(profile)
    return found


def combine(launches: Sequence[Launch]) -> dict[str, float]:
    """The figures of the launches of one run of a stage: sums, or averages by time."""
    return combine_figures([figures_of(launch.metrics) for launch in launches])


def combine_figures(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of several kernels together: sums, or averages by time."""
    if len(parts) == 1:
        return dict(parts[0])
    total: dict[str, float] = {}
    for figure in FIGURES:
        if not all(figure.key in part for part in parts):
            continue
        if figure.additive:
            total[figure.key] = sum(part[figure.key] for part in parts)
        else:
            weight = sum(part["time_us"] for part in parts)
            weighted = sum(part[figure.key] * part["time_us"] for part in parts)
            total[figure.key] = weighted / weight
    return with_derived(total)
