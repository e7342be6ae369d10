"""A device to measure on: one profiling run at a time, and whether its clocks are locked.

The lock of a device is a file in the temporary folder that the kernel of the operating system locks
for us, so it is free again the moment its holder ends, in whichever way. What is written in the
file only tells others who holds it. Clocks are locked by our scripts, which leave a marker file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.paths import slug

log = logging.getLogger(__name__)

DEFAULT_WAIT_S = 600.0
_POLL_S = 0.2
_COMMAND_LENGTH = 160
STATE_VARIABLE = "HYPER_MLA_CLOCK_STATE"
LOCK_SCRIPT = "scripts/lock-gpu-clock.sh"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK_STEP_MHZ = 15
"""Clocks move in steps; a reading within one step of the locked clock agrees with it."""
_held: set[Path] = set()
"""Locks of this process: a mode may call another one."""


def current_device_name() -> str:
    """What names the current CUDA device for the lock: its UUID, or its index."""
    import torch

    index = torch.cuda.current_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return str(uuid) if uuid is not None else str(index)


def lock_path(device: str) -> Path:
    """The lock file of a device."""
    name = f"hyper-mla-device-{slug(device.removeprefix('GPU-'))}.lock"
    return Path(tempfile.gettempdir()) / name


@contextmanager
def device_lock(device: str, wait_seconds: float = DEFAULT_WAIT_S) -> Iterator[None]:
    """Hold a device, by UUID or index, for a profiling run; it may be taken again inside.

    Raises:
        UnsupportedError: another process still holds it after the wait, or the lock file cannot
            be opened.
    """
    path = lock_path(device)
    if path in _held:
        yield
        return
    descriptor = _open(path)
    try:
        _acquire(descriptor, path, device, wait_seconds)
        _held.add(path)
        try:
            holder = {
                "pid": os.getpid(),
                "command": shlex.join(sys.orig_argv),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            os.ftruncate(descriptor, 0)  # what a killed holder left
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            yield
        finally:
            _held.remove(path)
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)  # releases the lock; the file stays, or a waiter would lock a ghost


def _open(path: Path) -> int:
    mask = os.umask(0)  # others on the machine lock the same file, whoever made it
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        # Where fs.protected_regular is set, even root may not open another user's file in a sticky
        # folder with O_CREAT.
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        return os.open(path, flags | os.O_CREAT, 0o666)
    except OSError as error:
        raise UnsupportedError(
            f"device lock: expected to open {path} for writing, got: {error.strerror}"
        ) from error
    finally:
        os.umask(mask)


def _acquire(descriptor: int, path: Path, device: str, wait_seconds: float) -> None:
    end = time.monotonic() + wait_seconds
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            left = end - time.monotonic()
        if left <= 0:
            raise UnsupportedError(
                f"device {device}: expected to be the only profiling run, but {_holder(path)} "
                f"holds it and did not end within {wait_seconds:g} s; wait for it, or end it"
            )
        if not told:
            message = "device %s: waiting for up to %g s for %s"
            log.info(message, device, wait_seconds, _holder(path))
            told = True
        time.sleep(min(_POLL_S, left))


def _holder(path: Path) -> str:
    """Who holds the lock, as far as the file tells."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        command = textwrap.shorten(holder["command"], _COMMAND_LENGTH, placeholder=" ...")
        return f"process {holder['pid']} ({command}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


@dataclass(frozen=True)
class ClockState:
    """Whether our script locked the clocks of a GPU, and the lock still seems to hold.

    Without a lock the clocks are None; `problem` says why a marker was ignored.
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
    boot = _boot_id()
    if _full_uuid(uuid) != _full_uuid(gpu_uuid):
        problem = f"is about another card, {uuid}"
    elif boot and marker.get("boot_id") and marker["boot_id"] != boot:
        problem = "is from before the last restart, which reset the clocks"
    elif current_sm_mhz is not None and current_sm_mhz > sm_mhz + _CLOCK_STEP_MHZ:
        now = f"the card runs at {current_sm_mhz:.0f} MHz"
        problem = f"says {sm_mhz} MHz, but {now}: something else reset the clocks"
    else:
        return ClockState(True, sm_mhz, memory_mhz, since)
    return ClockState(False, problem=f"{path} {problem}")


def announce_clocks(environment: dict[str, Any]) -> ClockState:
    """The clock state of the GPU in a record of `mla_var3.runtime.environment`, also logged."""
    gpu = environment.get("gpu") or {}
    state = clock_state(gpu.get("uuid"), gpu.get("sm_clock_mhz"))
    log.info("GPU clocks: %s", state.describe())
    return state


def _full_uuid(uuid: str) -> str:
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def _boot_id() -> str:
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""
