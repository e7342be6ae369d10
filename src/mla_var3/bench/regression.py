"""A record against an earlier one: better, same or worse, judged by the measured spread.

Rows are compared only if they are the same measurement: kernel, language, shape, choices, kind,
timer, device, and the versions that decide the machine code. Other rows are listed with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from mla_var3.bench.record import OK, OURS, PREDICTED, BenchRecord, BenchRow, row_key
from mla_var3.runtime.environment import toolkit_versions

BETTER, SAME, WORSE = "better", "same", "worse"

SPREADS = 2.0
"""The neutral zone is this many combined spreads wide on either side. A spread is half the distance
from the 10th to the 90th percentile, 1.28 standard deviations of normal noise."""
LEAST_SHARE = 0.01
"""The neutral zone is at least this share of the earlier time: clocks differ that much between
runs, even if the spread within a run is small."""
_NOT_THE_PEERS = ("hyper-mla", "python", "driver")


@dataclass(frozen=True)
class Verdict:
    """One row against its earlier measurement; `zone_us` is half the neutral zone."""

    row: BenchRow
    before: BenchRow
    zone_us: float
    verdict: str

    @property
    def change(self) -> float:
        """New over earlier time, minus one."""
        return _time(self.row) / _time(self.before) - 1

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {"before_us": self.before.time_us, "after_us": self.row.time_us}
        judged = {"neutral_zone_us": self.zone_us, "verdict": self.verdict}
        what = {"kernel": self.row.label, "shape": self.row.shape}
        return {**what, **times, "change": self.change, **judged}


@dataclass
class Regression:
    """The outcome of a comparison: rows that could be compared, and why others could not be.

    Remarks are differences that do not prevent a comparison.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    not_compared: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        """How many rows have a verdict."""
        return sum(each.verdict == verdict for each in self.verdicts)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing is worse."""
        return bool(self.verdicts) and not self.count(WORSE)

    @property
    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(v)} {v}" for v in (BETTER, SAME, WORSE))
        return f"{counts}, {len(self.not_compared)} not compared"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "passed": self.passed,
            "summary": self.summary,
            "verdicts": [each.to_dict() for each in self.verdicts],
            "not_compared": [{"row": row, "reason": why} for row, why in self.not_compared],
            "remarks": self.remarks,
        }


def judge(before: BenchRow, after: BenchRow) -> Verdict:
    """The verdict on two measurements of the same thing."""
    noise = math.hypot(before.spread_us or 0.0, after.spread_us or 0.0)
    zone = max(SPREADS * noise, LEAST_SHARE * _time(before))
    difference = _time(after) - _time(before)
    verdict = SAME if abs(difference) <= zone else BETTER if difference < 0 else WORSE
    return Verdict(after, before, zone, verdict)


def compare_records(
    after: BenchRecord, before: BenchRecord, *, across_versions: bool = False
) -> Regression:
    """Compare what can be compared; with `across_versions` also other compilers and peers."""
    result = Regression()
    earlier = {row_key(row): row for row in before.rows}
    # A record read from several files has rows of several devices.
    same_device = {(row_key(row), row.device): row for row in before.rows}
    kinds = {row_key(row)[1:]: row.kind for row in before.rows}
    seen = set()
    for row in after.rows:
        key = row_key(row)
        seen.add(key)
        name = f"{row.label}, {row.shape}"
        old = same_device.get((key, row.device)) or earlier.get(key)
        if old is None:
            kind = kinds.get(key[1:])
            why = "not" if kind is None else f"{row.kind} here, {kind}"
            result.not_compared.append((name, f"{why} in the earlier record"))
            continue
        reasons = _differences(old, row)
        versions = ", ".join(_version_differences(old, row))
        if versions and not across_versions:
            reasons.append(f"other versions: {versions} (--across_versions compares)")
        elif versions:
            result.remarks.append(f"{name}: compared across versions: {versions}")
        if reasons:
            result.not_compared.append((name, "; ".join(reasons)))
        else:
            result.verdicts.append(judge(old, row))
    for key, row in earlier.items():
        if key not in seen:
            result.not_compared.append((f"{row.label}, {row.shape}", "only in the earlier record"))
    drivers = {str(row.versions.get("driver") or "") for row in (*before.rows, *after.rows)}
    if len(known := sorted(drivers - {""})) > 1:
        result.remarks.append(f"drivers differ: {', '.join(known)}")
    result.remarks += _setting_differences(before, after)
    return result


def _setting_differences(before: BenchRecord, after: BenchRecord) -> list[str]:
    """Settings and clocks that differ between the runs; they may explain a verdict."""
    old, new = before.settings, after.settings
    differ = [name for name in old if name in new and old[name] != new[name]]
    found = [f"{name} differ: {old[name]} against {new[name]}" for name in differ]
    then, now = (
        (record.environment.get("gpu") or {}).get("clocks_limited_by_setting")
        for record in (before, after)
    )
    if None not in (then, now) and then != now:
        then, now = ("locked" if limit else "not locked" for limit in (then, now))
        found.append(f"clocks were {then} before and are {now} now")
    return found


def _differences(before: BenchRow, after: BenchRow) -> list[str]:
    reasons = []
    if before.device != after.device:
        reasons.append(f"device {before.device or 'unknown'} against {after.device or 'unknown'}")
    for row, when in ((before, "earlier"), (after, "new")):
        if row.status != OK or row.time_us is None:
            reasons.append(f"{row.status} in the {when} record: {row.reason}")
        elif row.spread_us is None and row.kind != PREDICTED:
            reasons.append(f"no spread in the {when} record")
    if before.timer != after.timer and not reasons:
        reasons.append(f"timer {before.timer} against {after.timer}")
    return reasons


def _version_differences(before: BenchRow, after: BenchRow) -> list[str]:
    """Versions that decide what ran: the compilers of our kernels, the library of a peer."""
    if after.kind == PREDICTED:
        return []
    if after.language:
        names = list(toolkit_versions(after.language))
    else:
        # A public call may choose a kernel of either language, or PyTorch.
        compilers = () if after.source == OURS else toolkit_versions()
        ignored = {*_NOT_THE_PEERS, *compilers}
        names = [name for name in {**before.versions, **after.versions} if name not in ignored]
    pairs = [(name, before.versions.get(name), after.versions.get(name)) for name in names]
    return [
        f"{name} {old or 'not recorded'} against {new or 'not recorded'}"
        for name, old, new in pairs
        if old != new
    ]


def _time(row: BenchRow) -> float:
    return math.nan if row.time_us is None else row.time_us
