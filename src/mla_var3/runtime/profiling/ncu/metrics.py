"""Nsight Compute metrics that the reports use: their names, meaning and units.

Every name here was read from an H200 recording of Nsight Compute 2025.3. A figure has a short key
by which the reports, the CSV files and the bottleneck rules know it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SECTOR_BYTES = 32

_SCALES = {
    "us": {
        **dict.fromkeys(("ns", "nsecond"), 1e-3),
        **dict.fromkeys(("us", "usecond"), 1.0),
        **dict.fromkeys(("ms", "msecond"), 1e3),
        **dict.fromkeys(("s", "second"), 1e6),
    },
    "MHz": {"hz": 1e-6, "Hz": 1e-6, "cycle/second": 1e-6, "cycle/s": 1e-6},
}
"""Unit of a figure -> unit in the report -> factor."""


@dataclass(frozen=True)
class MetricValue:
    """One value as the profiler reports it."""

    value: float | int | str | None
    unit: str

    @property
    def number(self) -> float | None:
        """The value as a finite number, None for texts and what was not collected."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            return None
        return float(self.value) if math.isfinite(self.value) else None


@dataclass(frozen=True)
class Figure:
    """One figure of a kernel.

    Attributes:
        key: short name, a CSV column and a key of `StageFigures.extra`.
        metric: Nsight Compute's name.
        label: heading in reports.
        unit: unit of the figure.
        additive: whether kernels of one stage add up; otherwise they are averaged by time.
        scale: factor on top of the unit's.
    """

    key: str
    metric: str
    label: str
    unit: str
    additive: bool = False
    scale: float = 1.0

    def convert(self, value: MetricValue) -> float | None:
        """The value in the figure's unit."""
        number = value.number
        if number is None:
            return None
        return number * self.scale * _SCALES.get(self.unit, {}).get(value.unit, 1.0)


_ELAPSED = "avg.pct_of_peak_sustained_elapsed"
_ACTIVE = "avg.pct_of_peak_sustained_active"

FIGURES: tuple[Figure, ...] = (
    Figure("time_us", "gpu__time_duration.sum", "duration", "us", additive=True),
    Figure(
        "tensor_pct",
        f"sm__pipe_tensor_cycles_active.{_ELAPSED}",
        "tensor core utilisation",
        "%",
    ),
    Figure("dram_pct", f"gpu__dram_throughput.{_ELAPSED}", "DRAM throughput", "%"),
    Figure("dram_read_bytes", "dram__bytes_read.sum", "DRAM read", "B", additive=True),
    Figure("dram_write_bytes", "dram__bytes_write.sum", "DRAM written", "B", additive=True),
    Figure("l2_pct", f"lts__throughput.{_ELAPSED}", "L2 throughput", "%"),
    Figure("l2_hit_pct", "lts__t_sector_hit_rate.pct", "L2 hit rate", "%"),
    Figure(
        "l2_bytes",
        "lts__t_sectors.sum",
        "L2 traffic",
        "B",
        additive=True,
        scale=SECTOR_BYTES,
    ),
    Figure("l1_hit_pct", "l1tex__t_sector_hit_rate.pct", "L1 hit rate", "%"),
    Figure("sm_pct", f"sm__throughput.{_ELAPSED}", "SM throughput", "%"),
    Figure("memory_pct", f"gpu__compute_memory_throughput.{_ELAPSED}", "memory throughput", "%"),
    Figure("issue_pct", f"smsp__issue_active.{_ACTIVE}", "issue slots busy", "%"),
    Figure("occupancy_pct", f"sm__warps_active.{_ACTIVE}", "achieved occupancy", "%"),
    Figure(
        "occupancy_limit_pct",
        "sm__maximum_warps_per_active_cycle_pct",
        "theoretical occupancy",
        "%",
    ),
    Figure("registers", "launch__registers_per_thread", "registers per thread", "register"),
    Figure(
        "shared_static_bytes",
        "launch__shared_mem_per_block_static",
        "static shared memory per block",
        "B",
    ),
    Figure(
        "shared_dynamic_bytes",
        "launch__shared_mem_per_block_dynamic",
        "dynamic shared memory per block",
        "B",
    ),
    Figure(
        "local_load_bytes",
        "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
        "local memory read",
        "B",
        additive=True,
        scale=SECTOR_BYTES,
    ),
    Figure(
        "local_store_bytes",
        "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
        "local memory written",
        "B",
        additive=True,
        scale=SECTOR_BYTES,
    ),
    Figure("waves_per_sm", "launch__waves_per_multiprocessor", "waves per SM", "wave"),
    Figure("grid", "launch__grid_size", "blocks", "block", additive=True),
    Figure("threads", "launch__block_size", "threads per block", "thread"),
    Figure("sm_clock_mhz", "gpc__cycles_elapsed.avg.per_second", "SM clock", "MHz"),
    Figure("dram_clock_mhz", "dram__cycles_elapsed.avg.per_second", "DRAM clock", "MHz"),
)
"""The hand-picked figures of annotation mode."""

STALL_REASONS = (
    *("long_scoreboard", "short_scoreboard", "barrier", "gmma", "wait", "mio_throttle"),
    *("math_pipe_throttle", "lg_throttle", "no_instruction", "branch_resolving"),
)
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"

STALL_MEANING = {
    "long_scoreboard": "waiting for data from global or local memory",
    "short_scoreboard": "waiting for shared memory or a special function",
    "barrier": "waiting at a block barrier",
    "gmma": "waiting for the tensor core",
    "warpgroup_arrive": "waiting for the warp group before a matrix product",
    "wait": "fixed latency between dependent instructions",
    "mio_throttle": "shared-memory and special-function queue full",
    "math_pipe_throttle": "arithmetic pipe busy",
    "lg_throttle": "too many global and local accesses in flight",
    "no_instruction": "instruction cache miss",
    "no_instructions": "instruction cache miss",
    "branch_resolving": "waiting for a branch target",
    "drain": "waiting for stores to leave before the exit",
    "imc_miss": "constant cache miss",
    "dispatch_stall": "dispatcher held back",
    "not_selected": "ready, but another warp was issued",
    "selected": "issuing",
}
"""Stall reason -> what the warps wait for."""


def annotation_metrics() -> list[str]:
    """The metric names that annotation mode collects."""
    stalls = [_STALL.format(reason) for reason in STALL_REASONS]
    return [*(figure.metric for figure in FIGURES), *stalls]


def figures_of(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """The figures of one launch; what was not collected is left out."""
    found: dict[str, float] = {}
    for figure in FIGURES:
        if figure.metric in metrics:
            value = figure.convert(metrics[figure.metric])
            if value is not None:
                found[figure.key] = value
    return with_derived(found)


def with_derived(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures and the sums that follow from them."""
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


def stall_cycles(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """Cycles per issued instruction that warps spend in each stall reason, largest first."""
    prefix, suffix = _STALL.split("{}")
    found = {
        name[len(prefix) : -len(suffix)]: value.number
        for name, value in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix) and value.number
    }
    stalls = {k: v for k, v in found.items() if v is not None and k not in ("selected",)}
    return dict(sorted(stalls.items(), key=lambda item: -item[1]))
