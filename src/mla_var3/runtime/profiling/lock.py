"""One profiling run at a time per device.

The lock is a file in the temporary folder that the kernel of the operating system locks for us, so
it is free again the moment its holder ends, in whichever way. What is written in the file only
tells others who holds it.
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
from datetime import UTC, datetime
from pathlib import Path

from mla_var3.errors import UnsupportedError
from mla_var3.runtime.paths import slug

log = logging.getLogger(__name__)

DEFAULT_WAIT_S = 600.0
_POLL_S = 0.2
_COMMAND_LENGTH = 160
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
