"""Reads `.ncu-rep` files: the profiled launches with their figures, sections and rules.

A figure is a metric under a short key, by which reports, CSV files and bottleneck rules refer to
it. The metric names were read from an H200 recording of Nsight Compute 2025.3.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.measure import spread
from mla_var3.runtime.profiling.bottleneck import STALL_MEANING, StageMeasurement
from mla_var3.runtime.profiling.ncu.driver import load_ncu_report
from mla_var3.runtime.profiling.target import RANGE_PREFIX

_MARKUP = re.compile(r"@(?:section|source|url|metric)[^@]*?:([^@:]*?)(?::https?://[^@]*)?@")
_OPTIMIZATION = 2
_GLOBAL_SPEEDUP = 2
_SECTOR_BYTES = 32
_LEAST_GAIN_PCT = 5.0
"""Advice with a smaller gain is not worth reading."""
_TIMES = {"n": 1e-3, "u": 1.0, "m": 1e3, "": 1e6}
_SCALES = {
    "us": {f"{p}{unit}": scale for p, scale in _TIMES.items() for unit in ("s", "second")},
    "MHz": dict.fromkeys(("hz", "Hz", "cycle/second", "cycle/s"), 1e-6),
}
"""Unit of a figure -> unit in the report -> factor."""


class MetricValue(NamedTuple):
    """One value as the profiler reports it."""

    value: float | int | str | None
    unit: str

    @property
    def number(self) -> float | None:
        """The value as a finite number; None for texts and what was not collected."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            return None
        return float(self.value) if math.isfinite(self.value) else None


@dataclass(frozen=True)
class Figure:
    """One figure of a kernel.

    Attributes:
        key: short name, a CSV column and a key of `StageFigures.extra`.
        metric: Nsight Compute's name; empty for a figure derived from others.
        label: heading in reports; empty for a figure that only the CSV files have.
        additive: whether kernels of one stage add up; otherwise they are averaged by time.
        per_kernel: whether it means nothing for several kernels together.
        scale: factor on top of the unit's.
    """

    key: str
    metric: str
    label: str
    unit: str
    additive: bool = False
    per_kernel: bool = False
    scale: float = 1.0

    def convert(self, value: MetricValue) -> float | None:
        """The value in the figure's unit; None where there is none, or its unit is unknown."""
        factor = _SCALES.get(self.unit, {value.unit: 1.0}).get(value.unit)
        if value.number is None or factor is None:
            return None
        return value.number * self.scale * factor


_PEAK = "avg.pct_of_peak_sustained_elapsed"
_ACTIVE = "avg.pct_of_peak_sustained_active"
_SHARED = "launch__shared_mem_per_block"
_LOCAL = "l1tex__t_sectors_pipe_lsu_mem_local_op"
_OCCUPANCY_LIMIT = "sm__maximum_warps_per_active_cycle_pct"
_PER_CTA = "shared memory per CTA"
_SECTORS: dict[str, Any] = {"additive": True, "scale": _SECTOR_BYTES}
_SUM: dict[str, Any] = {"additive": True}
_ONE: dict[str, Any] = {"per_kernel": True}

FIGURES: tuple[Figure, ...] = (
    Figure("time_us", "gpu__time_duration.sum", "", "us", **_SUM),
    Figure("tensor_pct", f"sm__pipe_tensor_cycles_active.{_PEAK}", "tensor core utilisation", "%"),
    Figure("dram_pct", f"gpu__dram_throughput.{_PEAK}", "DRAM throughput", "%"),
    Figure("dram_gbps", "", "DRAM throughput", "GB/s"),
    Figure("dram_read_bytes", "dram__bytes_read.sum", "DRAM read", "B", **_SUM),
    Figure("dram_write_bytes", "dram__bytes_write.sum", "DRAM written", "B", **_SUM),
    Figure("dram_bytes", "", "", "B"),
    Figure("l2_pct", f"lts__throughput.{_PEAK}", "L2 throughput", "%"),
    Figure("l2_hit_pct", "lts__t_sector_hit_rate.pct", "L2 hit rate", "%"),
    Figure("l2_bytes", "lts__t_sectors.sum", "", "B", **_SECTORS),
    Figure("l1_hit_pct", "l1tex__t_sector_hit_rate.pct", "L1 hit rate", "%"),
    Figure("sm_pct", f"sm__throughput.{_PEAK}", "SM throughput", "%"),
    Figure("memory_pct", f"gpu__compute_memory_throughput.{_PEAK}", "", "%"),
    Figure("issue_pct", f"smsp__issue_active.{_ACTIVE}", "issue slots busy", "%"),
    Figure("occupancy_pct", f"sm__warps_active.{_ACTIVE}", "achieved occupancy", "%"),
    Figure("occupancy_limit_pct", _OCCUPANCY_LIMIT, "theoretical occupancy", "%", **_ONE),
    Figure("registers", "launch__registers_per_thread", "registers per thread", "register", **_ONE),
    Figure("shared_static_bytes", f"{_SHARED}_static", f"static {_PER_CTA}", "B", **_ONE),
    Figure("shared_dynamic_bytes", f"{_SHARED}_dynamic", f"dynamic {_PER_CTA}", "B", **_ONE),
    Figure("shared_bytes", "", "", "B"),
    Figure("local_load_bytes", f"{_LOCAL}_ld.sum", "", "B", **_SECTORS),
    Figure("local_store_bytes", f"{_LOCAL}_st.sum", "", "B", **_SECTORS),
    Figure("local_bytes", "", "local spilling", "B"),
    Figure("waves_per_sm", "launch__waves_per_multiprocessor", "waves per SM", "wave", **_ONE),
    Figure("grid", "launch__grid_size", "CTAs", "CTA", additive=True, per_kernel=True),
    Figure("threads", "launch__block_size", "threads per CTA", "thread", **_ONE),
    Figure("sm_clock_mhz", "gpc__cycles_elapsed.avg.per_second", "SM clock while profiled", "MHz"),
    Figure("dram_clock_mhz", "dram__cycles_elapsed.avg.per_second", "", "MHz"),
)
"""The hand-picked figures of annotation mode, in the order of its table."""

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

NOT_OURS = {
    "MemoryL2Compression": "needs memory allocated as compressible, which is not the kernel's",
    "SOLFPRoofline": "counts float32 and float64 arithmetic, not the tensor cores",
}
"""Rules whose advice a kernel of this package cannot follow -> why."""


def annotation_metrics() -> list[str]:
    """The metric names that annotation mode collects."""
    stalls = [_STALL.format(reason) for reason in list(STALL_MEANING)[:10]]
    return [*(figure.metric for figure in FIGURES if figure.metric), *stalls]


def figures_of(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """The figures of one launch; what was not collected is left out."""
    found = {f.key: f.convert(metrics[f.metric]) for f in FIGURES if f.metric in metrics}
    return with_derived({key: value for key, value in found.items() if value is not None})


def with_derived(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures and those derived from them."""
    found = dict(figures)
    for total, parts in (
        ("dram_bytes", ("dram_read_bytes", "dram_write_bytes")),
        ("shared_bytes", ("shared_static_bytes", "shared_dynamic_bytes")),
        ("local_bytes", ("local_load_bytes", "local_store_bytes")),
    ):
        if all(part in found for part in parts):
            found[total] = sum(found[part] for part in parts)
    if found.get("time_us") and "dram_bytes" in found:
        found["dram_gbps"] = found["dram_bytes"] / found["time_us"] / 1e3
    return found


def combine_figures(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Figures of several kernels together: sums, or averages by time."""
    if len(parts) == 1:
        return dict(parts[0])
    total: dict[str, float] = {}
    for figure in FIGURES:
        if not figure.metric or not all(figure.key in part for part in parts):
            continue
        values = [part[figure.key] for part in parts]
        weights = None if figure.additive else [part["time_us"] for part in parts]
        total[figure.key] = sum(values) if weights is None else statistics.fmean(values, weights)
    return with_derived(total)


def stall_cycles(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """Cycles per issued instruction that warps spend in each stall reason, largest first."""
    prefix, suffix = _STALL.split("{}")
    found = {
        name[len(prefix) : -len(suffix)]: value.number
        for name, value in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix)
    }
    stalls = {reason: cycles for reason, cycles in found.items() if cycles and reason != "selected"}
    return dict(sorted(stalls.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Rule:
    """One result of Nsight Compute's own rules, its texts without markup.

    The estimated gain is None without an estimate; `is_global` says that it is about the kernel's
    time, not about one unit. `metrics` are those that it looked at, with its comments; `tables` are
    (title, headers, rows).
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

    @property
    def gain(self) -> str | None:
        if self.speedup_pct is None:
            return None
        return f"{self.speedup_pct:.0f}% {'of the kernel' if self.is_global else 'of one unit'}"


class Section(NamedTuple):
    """A section of the report with its metrics as (label, name, value)."""

    identifier: str
    name: str
    metrics: tuple[tuple[str, str, MetricValue], ...]


@dataclass
class Launch:
    """One profiled kernel launch, in an NVTX range whose name comes without the prefix.

    `action` is the object of `ncu_report` for source-level metrics, of a report that the reference
    keeps open.
    """

    range_name: str
    function: str
    metrics: dict[str, MetricValue]
    action: Any = field(repr=False, default=None)
    report: Any = field(repr=False, default=None)

    def rules(self) -> list[Rule]:
        return [_rule(entry) for entry in self.action.rule_results_as_dicts()]

    def sections(self) -> list[Section]:
        """The sections that have metrics, in the tool's order."""
        found = []
        for section in sorted(self.action.sections(), key=lambda section: section.order()):
            rows = {
                m.name(): (str(m.label() or m.name()), m.name(), _value(m))
                for m in (*section.header_metrics(), *section.body_metrics())
                if not m.name().startswith("breakdown:")  # lists of names, for the tool's charts
            }
            if rows:
                found.append(Section(section.identifier(), section.name(), tuple(rows.values())))
        return found


@dataclass
class StageProfile(StageMeasurement):
    """What was measured of one stage: all launches, run by run, and medians over the runs.

    The spread is half the distance between the 10th and the 90th percentile of the duration.
    """

    launches: list[Launch] = field(kw_only=True)
    runs: int = field(kw_only=True)
    spread_us: float | None = field(kw_only=True)

    def __post_init__(self) -> None:
        self.stalls = stall_cycles(self.main.metrics)

    @property
    def main(self) -> Launch:
        """The longest launch of the stage, whose details are worth reading."""
        return max(self.launches, key=lambda launch: figures_of(launch.metrics).get("time_us", 0.0))


def read_launches(path: Path) -> list[Launch]:
    """The launches of a report that ran in one of our ranges."""
    module = load_ncu_report()
    try:
        report = module.load_report(str(path))
    except Exception as error:  # the reader raises different types from release to release
        raise UnsupportedError(
            f"{path}: expected a report that ncu_report can read, got {error}; "
            'a newer reader may help: pip install "hyper-mla[profiling]"'
        ) from error
    if not report.num_ranges():  # also what some releases return for a file that is no report
        raise UnsupportedError(f"{path}: expected a report with profiled kernels, got none")
    found = []
    for part in map(report.range_by_idx, range(report.num_ranges())):
        for action in map(part.action_by_idx, range(part.num_actions())):
            if name := _range_name(action):
                metrics = {n: _value(action.metric_by_name(n)) for n in action.metric_names()}
                found.append(Launch(name, action.name(), metrics, action, report))
    return found


def _range_name(action: Any) -> str | None:
    state = action.nvtx_state()
    for domain in state.domains() if state is not None else ():
        for name in state.domain_by_id(domain).push_pop_ranges():
            if name.startswith(RANGE_PREFIX):
                return str(name).removeprefix(RANGE_PREFIX)
    return None


def _value(metric: Any) -> MetricValue:
    value = metric.value() if metric is not None and metric.has_value() else None
    return MetricValue(value, "" if metric is None else (metric.unit() or ""))


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


def advice(rules: Sequence[Rule]) -> list[Rule]:
    """The recommendations worth reading: that apply here, with a gain, the largest first."""
    seen: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        applies = rule.is_advice and rule.message and rule.identifier not in NOT_OURS
        if applies and (rule.speedup_pct is None or rule.speedup_pct >= _LEAST_GAIN_PCT):
            # The imbalance of SMs, their partitions and their L1 caches is one and the same.
            title = "" if rule.identifier == "WorkloadImbalance" else rule.title
            seen.setdefault((rule.identifier, title), rule)
    return sorted(seen.values(), key=lambda r: (not r.is_global, -(r.speedup_pct or 0.0)))


def stage_profiles(
    launches: Sequence[Launch], names: Sequence[str], runs: int
) -> list[StageProfile]:
    """Group launches by stage and take medians over the runs."""
    found = []
    for name in names:
        own = [launch for launch in launches if launch.range_name == name]
        if not own or len(own) % runs:
            raise UnsupportedError(
                f"{name}: expected a multiple of {runs} profiled launches (one per run), "
                f"got {len(own)}"
            )
        size = len(own) // runs
        parts = [figures_of(launch.metrics) for launch in own]
        samples = [combine_figures(parts[i : i + size]) for i in range(0, len(own), size)]
        keys = [key for key in samples[0] if all(key in sample for sample in samples)]
        figures = {key: statistics.median(sample[key] for sample in samples) for key in keys}
        if "time_us" not in figures:
            raise UnsupportedError(f"{name}: expected a duration in the report, got none")
        times = [sample["time_us"] for sample in samples]
        scatter = spread(times) if len(times) > 1 else None
        found.append(StageProfile(name, figures, launches=own, runs=runs, spread_us=scatter))
    return found
