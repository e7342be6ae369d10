"""What limits a kernel, by fixed rules on measured figures, and what to try about it.

The figures are those of `ncu_metrics`, by key. Two utilisations decide the class: tensor cores and
DRAM. The other rules point at issues that explain a class or cost time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mla_var3.runtime.markdown import byte_count
from mla_var3.runtime.profiling.ncu.metrics import STALL_MEANING

TENSOR_HIGH_PCT = 60.0
DRAM_HIGH_PCT = 70.0
OCCUPANCY_LOW_PCT = 25.0
L2_HIT_LOW_PCT = 80.0
WAVES_LOW = 1.0


class Bound(Enum):
    """Class of a bottleneck, as the reports print it."""

    MEMORY = "Memory"
    COMPUTE = "Compute"
    LATENCY = "Latency"
    UNKNOWN = "Unknown"

    @property
    def label(self) -> str:
        """For example "Memory-bound"."""
        return "unknown" if self is Bound.UNKNOWN else f"{self.value}-bound"

    @property
    def focus(self) -> str:
        """Where to look."""
        return _FOCUS[self]


_FOCUS = {
    Bound.MEMORY: "data reuse, TMA hints, head grouping",
    Bound.COMPUTE: "kernel efficiency, tile sizes",
    Bound.LATENCY: "occupancy, less spilling, more blocks",
    Bound.UNKNOWN: "collect tensor core and DRAM utilisation first",
}


@dataclass(frozen=True)
class Issue:
    """One figure outside its healthy range.

    Attributes:
        key: figure.
        name: what it means.
        trigger: the figure with its value, as `metric=value`.
        healthy: the healthy range.
        hint: what to try.
    """

    key: str
    name: str
    trigger: str
    healthy: str
    hint: str


@dataclass(frozen=True)
class Opportunity:
    """Something to try, with what it could save at most.

    Attributes:
        name: what to do.
        stage: where.
        gain_pct: upper bound of the time saved, in percent of the whole run.
        trigger: the figure that suggests it, as `metric=value`.
    """

    name: str
    stage: str
    gain_pct: float
    trigger: str


@dataclass(frozen=True)
class StageDiagnosis:
    """Class and issues of one stage."""

    stage: str
    bound: Bound
    issues: tuple[Issue, ...]

    @property
    def key_issue(self) -> str:
        """The issue to name first."""
        return f"{self.issues[0].name} ({self.issues[0].trigger})" if self.issues else "none"


@dataclass(frozen=True)
class StageMeasurement:
    """What the rules know of a stage.

    Attributes:
        name: stage name.
        figures: measured figures by key.
        roofline_us: predicted time; None if unknown.
        algorithm_bytes: bytes that the algorithm needs to move.
        stalls: stall cycles per issued instruction, by reason.
    """

    name: str
    figures: Mapping[str, float]
    roofline_us: float | None = None
    algorithm_bytes: float | None = None
    stalls: Mapping[str, float] | None = None

    @property
    def time_us(self) -> float:
        """Measured duration."""
        return self.figures["time_us"]


def classify(figures: Mapping[str, float]) -> Bound:
    """The class by the utilisation of tensor cores and DRAM.

    A kernel with both high is of the class of the one that is further above its threshold.
    """
    tensor, dram = figures.get("tensor_pct"), figures.get("dram_pct")
    if tensor is None or dram is None:
        return Bound.UNKNOWN
    tensor_high, dram_high = tensor > TENSOR_HIGH_PCT, dram > DRAM_HIGH_PCT
    if tensor_high and dram_high:
        return Bound.COMPUTE if tensor / TENSOR_HIGH_PCT >= dram / DRAM_HIGH_PCT else Bound.MEMORY
    if tensor_high:
        return Bound.COMPUTE
    return Bound.MEMORY if dram_high else Bound.LATENCY


def find_issues(figures: Mapping[str, float]) -> tuple[Issue, ...]:
    """Every figure outside its healthy range, the costliest kind first."""
    found = []
    spilled = figures.get("local_bytes", 0.0)
    if spilled > 0:
        found.append(
            Issue(
                "local_bytes",
                "register overflow",
                f"local spilling={byte_count(spilled)}",
                "0 B",
                "smaller tiles, fewer accumulators",
            )
        )
    rules = (
        ("waves_per_sm", WAVES_LOW, True, "underfilled GPU", "waves/SM={:.2f}", "> 1.0",
         "more blocks, fewer resources per block"),
        ("occupancy_pct", OCCUPANCY_LOW_PCT, True, "register or shared memory pressure",
         "occupancy={:.1f}%", "> 25%", "smaller tiles, occupancy hint"),
        ("l2_hit_pct", L2_HIT_LOW_PCT, False, "locality issue", "L2 hit rate={:.1f}%", "> 80%",
         "swizzled schedule, larger tiles, data layout"),
    )  # fmt: skip
    for key, limit, at_limit, name, trigger, healthy, hint in rules:
        value = figures.get(key)
        if value is not None and (value < limit or (at_limit and value == limit)):
            found.append(Issue(key, name, trigger.format(value), healthy, hint))
    return tuple(found)


def diagnose(stage: StageMeasurement) -> StageDiagnosis:
    """Class and issues of a stage."""
    return StageDiagnosis(stage.name, classify(stage.figures), find_issues(stage.figures))


def find_opportunities(stages: Sequence[StageMeasurement], limit: int = 3) -> list[Opportunity]:
    """What to try first, by the largest possible gain.

    Gains are upper bounds from the figures of one stage, weighted with its share of the time; they
    overlap and must not be added.
    """
    total = sum(stage.time_us for stage in stages)
    found = [
        Opportunity(name, stage.name, 100 * share * stage.time_us / total, trigger)
        for stage in stages
        for name, share, trigger in _gains(stage)
        if share > 0.01
    ]
    return sorted(found, key=lambda o: -o.gain_pct)[:limit]


def _gains(stage: StageMeasurement) -> list[tuple[str, float, str]]:
    """(what to do, share of the stage's time that it could save at most, trigger)."""
    figures, bound = stage.figures, classify(stage.figures)
    found = []
    headroom = 1 - stage.roofline_us / stage.time_us if stage.roofline_us else None
    if bound is Bound.COMPUTE:
        value = figures["tensor_pct"]
        share = _least(headroom, 1 - value / 100)
        found.append(("keep the tensor cores fed (tile sizes)", share, f"TC util={value:.1f}%"))
    elif bound is Bound.MEMORY:
        value = figures["dram_pct"]
        share = _least(headroom, 1 - value / 100)
        found.append(("stream closer to peak bandwidth (TMA)", share, f"DRAM={value:.1f}%"))
    elif bound is Bound.LATENCY:
        busiest = max(figures["tensor_pct"], figures["dram_pct"])
        share = _least(headroom, 1 - busiest / 100)
        found.append((*_latency_advice(stage, share),))
    found += _traffic_gains(stage)
    waves = figures.get("waves_per_sm")
    if waves:
        # The last wave is as long as a full one, however few blocks it has.
        share = 1 - waves / math.ceil(waves)
        what = "more blocks" if waves <= WAVES_LOW else "balance the last wave (blocks, tile size)"
        found.append((what, share, f"waves/SM={waves:.2f}"))
    return found


def _latency_advice(stage: StageMeasurement, share: float) -> tuple[str, float, str]:
    stalls = {
        k: v for k, v in (stage.stalls or {}).items() if k not in ("selected", "not_selected")
    }
    if not stalls:
        occupancy = stage.figures.get("occupancy_pct", math.nan)
        return "hide latency (occupancy, more blocks)", share, f"occupancy={occupancy:.1f}%"
    reason = max(stalls, key=lambda name: stalls[name])
    part = stalls[reason] / sum(stalls.values())
    meaning = STALL_MEANING.get(reason, reason)
    return f"hide latency: warps are {meaning}", share, f"stall {reason}={part:.0%}"


def _traffic_gains(stage: StageMeasurement) -> list[tuple[str, float, str]]:
    figures = stage.figures
    found = []
    dram, needed = figures.get("dram_bytes"), stage.algorithm_bytes
    if dram and needed and dram > needed and "dram_pct" in figures:
        share = (1 - needed / dram) * figures["dram_pct"] / 100
        trigger = f"DRAM traffic={dram / needed:.2f}x of what the algorithm needs"
        found.append(("better locality (schedule, swizzle, larger tiles)", share, trigger))
    spilled, l2 = figures.get("local_bytes", 0.0), figures.get("l2_bytes", 0.0)
    if spilled:
        share = min(1.0, spilled / max(l2, spilled))
        found.append(("remove register spilling", share, f"local spilling={byte_count(spilled)}"))
    return found


def _least(first: float | None, second: float) -> float:
    return max(0.0, second if first is None else min(first, second))


def root_cause(stage: StageMeasurement) -> str:
    """Two sentences about the stage that takes most of the time."""
    figures, diagnosis = stage.figures, diagnose(stage)
    if diagnosis.bound is Bound.UNKNOWN:
        return "The profiler reported no tensor core or DRAM utilisation."
    first = (
        f"{stage.name} keeps the tensor cores busy {figures['tensor_pct']:.0f} % and DRAM "
        f"{figures['dram_pct']:.0f} % of the time"
    )
    stalls = {
        k: v for k, v in (stage.stalls or {}).items() if k not in ("selected", "not_selected")
    }
    if diagnosis.bound is Bound.LATENCY and stalls:
        reason = max(stalls, key=lambda name: stalls[name])
        first += f", so its warps mostly wait ({reason}: {STALL_MEANING.get(reason, reason)})"
    issues = "; ".join(f"{issue.name}, {issue.trigger}" for issue in diagnosis.issues)
    return f"{first}. {f'Outside the healthy range: {issues}.' if issues else ''}".strip()
