"""Members of a concurrent group that ran one after another although they could overlap, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mla_var3.conf.devices import DeviceSpec
from mla_var3.runtime.profiling.timeline.analysis import (
    Analysis,
    GroupOverlap,
    Iteration,
    Piece,
    group_overlap,
)
from mla_var3.runtime.profiling.timeline.model import GpuActivity
from mla_var3.runtime.profiling.timeline.outline import Group

SERIAL_BELOW = 0.10
"""Two members count as serialised when they share less than this part of the shorter one."""
_MIN_MEMBER_NS = 2_000
"""A shorter member ends before another could start; its overlap says nothing."""
_LAUNCH_LATENCY_NS = 10_000
"""A kernel that begins this soon after its launch call returned did not wait for the GPU (2 to 4 us
are usual on an H200)."""
_MAX_BLOCKS_PER_SM = 32
_MAX_THREADS_PER_SM = 2048
_MAX_THREADS_SM_120 = 1536
_RESERVED_SHARED = 1024
"""Shared memory that the system keeps of every thread block, since compute capability 8.0."""


@dataclass(frozen=True)
class Serialisation:
    """Two members that did not overlap.

    Attributes:
        group: the concurrent group.
        first, second: the members, in the order in which they ran.
        runs: in how many runs they did not overlap.
        of: runs looked at.
        cause: short word: "stream", "host", "resources" or "unknown".
        reason: the same in a sentence with the figures of one run.
    """

    group: str
    first: str
    second: str
    runs: int
    of: int
    cause: str
    reason: str


def resident_blocks(activity: GpuActivity, spec: DeviceSpec) -> int | None:
    """How many thread blocks of a launch the whole device holds at once, by its resources.

    None where the recording or the device table lacks a figure that decides it.
    """
    threads = activity.threads
    if not threads:
        return None
    most_threads = _MAX_THREADS_SM_120 if spec.target.startswith("sm_12") else _MAX_THREADS_PER_SM
    limits = [_MAX_BLOCKS_PER_SM, most_threads // threads]
    if activity.shared_bytes and "shared_memory_per_sm_KiB" in spec.values:
        available = int(spec["shared_memory_per_sm_KiB"]) * 1024
        limits.append(available // (activity.shared_bytes + _RESERVED_SHARED))
    if activity.registers and "registers_per_sm" in spec.values:
        # Registers are given to warps in units of 256.
        per_warp = -(-activity.registers * 32 // 256) * 256
        warps = -(-threads // 32)
        limits.append(int(spec["registers_per_sm"]) // (per_warp * warps))
    return max(min(limits), 0) * int(spec["sm_count"])


def serialisations(
    analysis: Analysis, runs: list[Iteration], spec: DeviceSpec
) -> list[Serialisation]:
    """All pairs of members that failed to overlap in at least half of the runs."""
    found = []
    for group in analysis.shape.groups:
        overlaps = [group_overlap(run, group) for run in runs]
        for i in range(len(group.members)):
            for j in range(i + 1, len(group.members)):
                serial = [
                    run
                    for run, overlap in zip(runs, overlaps, strict=True)
                    if _is_serial(overlap, i, j)
                ]
                if serial and 2 * len(serial) >= len(runs):
                    found.append(_explain(group, i, j, serial, len(runs), spec))
    return found


def _is_serial(overlap: GroupOverlap, i: int, j: int) -> bool:
    shorter = min(overlap.member_ns[i], overlap.member_ns[j])
    return shorter >= _MIN_MEMBER_NS and overlap.pairs[i, j] < SERIAL_BELOW * shorter


def _explain(
    group: Group, i: int, j: int, serial: list[Iteration], of: int, spec: DeviceSpec
) -> Serialisation:
    reasons = [_reason(group, i, j, run, spec) for run in serial]
    (cause, first, second), _ = Counter(r[:3] for r in reasons).most_common(1)[0]
    sentence = next(r[3] for r in reasons if r[:3] == (cause, first, second))
    return Serialisation(group.name, first, second, len(serial), of, cause, sentence)


def _reason(
    group: Group, i: int, j: int, run: Iteration, spec: DeviceSpec
) -> tuple[str, str, str, str]:
    """Cause, earlier member, later member and a sentence, for one run."""
    pieces = {m: _pieces(run, group.members[m].leaves) for m in (i, j)}
    early, late = sorted((i, j), key=lambda m: min(p.activity.start for p in pieces[m]))
    first, second = group.members[early].name, group.members[late].name
    ends = max(pieces[early], key=lambda p: p.activity.end)
    starts = min(pieces[late], key=lambda p: p.activity.start)
    streams = {p.activity.stream for p in pieces[early]} & {p.activity.stream for p in pieces[late]}
    if streams:
        stream = ", ".join(map(str, sorted(streams)))
        text = f"both ran on stream {stream}, which executes in order"
        return "stream", first, second, text
    ended = ends.activity.end
    if starts.activity.start - starts.launch.end < _LAUNCH_LATENCY_NS:
        late_us = (starts.launch.start - pieces[early][0].launch.start) / 1e3
        lasted_us = (ended - pieces[early][0].activity.start) / 1e3
        text = (
            f"the host launched {second} {late_us:.1f} µs after {first}, which was over after "
            f"{lasted_us:.1f} µs: launch overhead, not the GPU, kept them apart; capture the group "
            "in a CUDA graph or give it more work"
        )
        return "host", first, second, text
    waited_us = (starts.activity.start - starts.launch.start) / 1e3
    resident = resident_blocks(ends.activity, spec)
    if resident is not None and ends.activity.blocks and ends.activity.blocks >= resident:
        shared = (ends.activity.shared_bytes or 0) / 1024
        text = (
            f"{second} was enqueued while {first} still ran and began {waited_us:.1f} µs after its "
            f"launch: the {ends.activity.blocks} thread blocks of {first} fill the device (it "
            f"holds {resident} at once: {ends.activity.threads} threads, "
            f"{ends.activity.registers} registers per thread and {shared:.0f} KiB shared memory "
            "each), so no block of the other finds room; use smaller tiles or fewer blocks"
        )
        return "resources", first, second, text
    text = (
        f"{second} was enqueued while {first} still ran and began {waited_us:.1f} µs after its "
        "launch, on another stream and with room on the device: an event or a default stream "
        "between them, or a busy hardware queue; the timeline does not show which"
    )
    return "unknown", first, second, text


def _pieces(run: Iteration, leaves: tuple[int, ...]) -> list[Piece]:
    return [piece for piece in run.pieces if piece.leaf in leaves]
