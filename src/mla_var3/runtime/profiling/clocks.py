"""Whether the GPU's clocks are locked by our scripts, as far as their marker file tells."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

STATE_VARIABLE = "HYPER_MLA_CLOCK_STATE"
LOCK_SCRIPT = "scripts/lock-gpu-clock.sh"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_STEP_MHZ = 15
"""Clocks move in steps; a reading within one step of the locked clock agrees with it."""


@dataclass(frozen=True)
class ClockState:
    """What is known about a GPU's clocks.

    Attributes:
        locked: whether our script locked them and the lock still seems to hold.
        sm_mhz, memory_mhz: the locked clocks; None when not locked.
        since: when they were locked, ISO 8601.
        problem: why a marker was ignored; None when none was.
    """

    locked: bool
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    since: str | None = None
    problem: str | None = None

    def describe(self) -> str:
        if self.locked:
            return (
                f"clocks locked by {LOCK_SCRIPT} at {self.sm_mhz} MHz (SM) and {self.memory_mhz} "
                f"MHz (memory) since {self.since}"
            )
        doubt = f" ({self.problem})" if self.problem else ""
        return f"clocks not locked{doubt}; {LOCK_SCRIPT} locks them"


def marker_file(gpu_uuid: str) -> Path:
    """The file that the scripts leave while clocks are locked."""
    override = os.environ.get(STATE_VARIABLE)
    if override:
        return Path(override)
    # The scripts run under sudo, which has its own TMPDIR: the folder is fixed on both sides.
    return Path("/tmp") / f"hyper-mla-clocks-{_full_uuid(gpu_uuid)}.json"


def clock_state(gpu_uuid: str | None, current_sm_mhz: float | None = None) -> ClockState:
    """The clock state of a GPU."""
    if gpu_uuid is None:
        return ClockState(False)
    path = marker_file(gpu_uuid)
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        sm_mhz, memory_mhz = int(marker["sm_mhz"]), int(marker["memory_mhz"])
        uuid, since = str(marker["uuid"]), str(marker["date"])
    except FileNotFoundError:
        return ClockState(False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ClockState(False, problem=f"{path} is not a clock marker: {error!r}")
    problem = None
    boot = _boot_id()
    if _full_uuid(uuid) != _full_uuid(gpu_uuid):
        problem = f"{path} is about another card, {uuid}"
    elif boot and marker.get("boot_id") and marker["boot_id"] != boot:
        problem = f"{path} is from before the last restart, which reset the clocks"
    elif current_sm_mhz is not None and current_sm_mhz > sm_mhz + _CLOCK_STEP_MHZ:
        problem = (
            f"{path} says {sm_mhz} MHz, but the card runs at {current_sm_mhz:.0f} MHz: something "
            "else reset the clocks"
        )
    if problem:
        return ClockState(False, problem=problem)
    return ClockState(True, sm_mhz, memory_mhz, since)


def announce_clocks(environment: dict[str, Any]) -> ClockState:
    """The clock state of the GPU in a record of `mla_var3.runtime.environment`, also logged."""
    gpu = environment.get("gpu") or {}
    state = clock_state(gpu.get("uuid"), gpu.get("sm_clock_mhz"))
    log.info("GPU clocks: %s", state.describe())
    return state


def _full_uuid(uuid: str) -> str:
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None
