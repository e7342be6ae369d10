"""What limits a kernel, by fixed rules on measured figures, and what to try about it.

The figures are those of `ncu.reader.FIGURES`, by key. Two utilisations decide the class: tensor
cores and DRAM. The other rules find issues that explain a class or cost time of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from mla_var3.runtime.markdown import byte_count

TENSOR_HIGH_PCT = 60.0
DRAM_HIGH_PCT = 70.0
WAVES_LOW = 1.0

STALL_MEANING = {
    "long_scoreboard": "waiting for data from global or local memory",
    "short_scoreboard": "waiting for shared memory or a special function",
    "barrier": "waiting at a CTA barrier",
    "gmma": "waiting for the tensor core",
    "wait": "fixed latency between dependent instructions",
    "mio_throttle": "shared-memory and special-function queue full",
    "math_pipe_throttle": "arithmetic pipe busy",
    "lg_throttle": "too many global and local accesses in flight",
    "no_instruction": "instruction cache miss",
    "branch_resolving": "waiting for a branch target",
    "warpgroup_arrive": "waiting for the warpgroup before a matrix product",
    "no_instructions": "instruction cache miss",
    "drain": "waiting for stores to leave before the exit",
    "imc_miss": "constant cache miss",
    "dispatch_stall": "dispatcher held back",
    "not_selected": "ready, but another warp was issued",
    "selected": "issuing",
}
"""Stall reason -> what the warps wait for; annotation mode collects the first ten."""


class Bound(Enum):
    """Class of a bottleneck: its name in reports, and what to look at."""

    MEMORY = ("Memory-bound", "data reuse, TMA hints, head grouping")
    COMPUTE = ("Compute-bound", "kernel efficiency, tile sizes")
    LATENCY = ("Latency-bound", "occupancy, less spilling, more CTAs")
    UNKNOWN = ("unknown", "collect tensor core and DRAM utilisation first")

    def __init__(self, label: str, focus: str) -> None:
        self.label, self.focus = label, focus


class Issue(NamedTuple):
    """One figure outside its healthy range."""

    key: str
    name: str
    trigger: str
    healthy: str
    hint: str


class Opportunity(NamedTuple):
    """Something to try, with what it could save at most."""

    name: str
    stage: str
    gain_pct: float
    trigger: str


@dataclass
class StageMeasurement:
    """What was measured of a stage, and what the rules say about it."""

    name: str
    figures: Mapping[str, float]
    roofline_us: float | None = None
    algorithm_bytes: float | None = None
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_us(self) -> float:
        return self.figures["time_us"]

    @property
    def bound(self) -> Bound:
        """The class by the utilisation of tensor cores and DRAM.

        With both high, the one further above its threshold decides.
        """
        tensor, dram = self.figures.get("tensor_pct"), self.figures.get("dram_pct")
        if tensor is None or dram is None:
            return Bound.UNKNOWN
        over = {Bound.COMPUTE: tensor / TENSOR_HIGH_PCT, Bound.MEMORY: dram / DRAM_HIGH_PCT}
        highest = max(over, key=over.__getitem__)
        return highest if over[highest] > 1 else Bound.LATENCY

    @property
    def issues(self) -> tuple[Issue, ...]:
        """Every figure outside its healthy range, the costliest kind first."""
        return tuple(
            Issue(key, name, trigger, healthy, hint)
            for key, (name, healthy, hint, judge) in _RULES.items()
            if key in self.figures and (trigger := judge(self.figures[key]))
        )

    @property
    def key_issue(self) -> str:
        return f"{self.issues[0].name} ({self.issues[0].trigger})" if self.issues else "none"

    def main_stall(self) -> tuple[str, float] | None:
        """The most frequent reason to wait, and its share of all waiting."""
        stalls = {k: v for k, v in self.stalls.items() if k not in ("selected", "not_selected")}
        if not stalls:
            return None
        reason = max(stalls, key=lambda name: stalls[name])
        return reason, stalls[reason] / sum(stalls.values())


_RULES: dict[str, tuple[str, str, str, Callable[[float], str | None]]] = {
    "local_bytes": (
        *("register overflow", "0 B", "smaller tiles, fewer accumulators"),
        lambda v: f"local spilling={byte_count(v)}" if v else None,
    ),
    "waves_per_sm": (
        *("underfilled GPU", "> 1.0", "more CTAs, fewer resources per CTA"),
        lambda v: f"waves/SM={v:.2f}" if v <= WAVES_LOW else None,
    ),
    "occupancy_pct": (
        *("register or shared memory pressure", "> 25%", "smaller tiles, occupancy hint"),
        lambda v: f"occupancy={v:.1f}%" if v <= 25 else None,
    ),
    "l2_hit_pct": (
        *("locality issue", ">= 80%", "swizzled schedule, larger tiles, data layout"),
        lambda v: f"L2 hit rate={v:.1f}%" if v < 80 else None,
    ),
}
"""Figure -> issue, healthy range, hint, and the trigger of an unhealthy value."""


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
    figures, bound = stage.figures, stage.bound
    tensor, dram_pct = figures.get("tensor_pct", 0.0), figures.get("dram_pct", 0.0)
    limits = {Bound.COMPUTE: tensor, Bound.MEMORY: dram_pct}
    share = 1 - limits.get(bound, max(tensor, dram_pct)) / 100
    if stage.roofline_us:
        share = min(share, 1 - stage.roofline_us / stage.time_us)
    found = []
    if bound is Bound.COMPUTE:
        found.append(("keep the tensor cores fed (tile sizes)", share, f"TC util={tensor:.1f}%"))
    elif bound is Bound.MEMORY:
        found.append(("stream closer to peak bandwidth (TMA)", share, f"DRAM={dram_pct:.1f}%"))
    elif bound is Bound.LATENCY and (stall := stage.main_stall()):
        what = f"hide latency: warps are {STALL_MEANING.get(stall[0], stall[0])}"
        found.append((what, share, f"stall {stall[0]}={stall[1]:.0%}"))
    elif bound is Bound.LATENCY:
        occupancy = figures.get("occupancy_pct", math.nan)
        what = "hide latency (occupancy, more CTAs)"
        found.append((what, share, f"occupancy={occupancy:.1f}%"))
    dram, needed = figures.get("dram_bytes"), stage.algorithm_bytes
    if dram and needed and dram > needed:
        saved = (1 - needed / dram) * dram_pct / 100
        trigger = f"DRAM traffic={dram / needed:.2f}x of what the algorithm needs"
        found.append(("better locality (schedule, swizzle, larger tiles)", saved, trigger))
    spilled = figures.get("local_bytes", 0.0)
    if spilled:
        saved = min(1.0, spilled / max(figures.get("l2_bytes", 0.0), spilled))
        found.append(("remove register spilling", saved, f"local spilling={byte_count(spilled)}"))
    waves = figures.get("waves_per_sm")
    if waves:
        # The last wave is as long as a full one, however few CTAs it has.
        saved = 1 - waves / math.ceil(waves)
        what = "more CTAs" if waves <= WAVES_LOW else "balance the last wave (CTAs, tile size)"
        found.append((what, saved, f"waves/SM={waves:.2f}"))
    return found


def root_cause(stage: StageMeasurement) -> str:
    """Two sentences about the stage that takes most of the time."""
    figures, bound = stage.figures, stage.bound
    if bound is Bound.UNKNOWN:
        return "The profiler reported no tensor core or DRAM utilisation."
    first = (
        f"{stage.name} keeps the tensor cores busy {figures['tensor_pct']:.0f} % and DRAM "
        f"{figures['dram_pct']:.0f} % of the time"
    )
    stall = stage.main_stall()
    if bound is Bound.LATENCY and stall:
        first += f", so its warps mostly wait ({stall[0]}: {STALL_MEANING.get(stall[0], stall[0])})"
    issues = "; ".join(f"{issue.name}, {issue.trigger}" for issue in stage.issues)
    return f"{first}. Outside the healthy range: {issues}." if issues else f"{first}."
